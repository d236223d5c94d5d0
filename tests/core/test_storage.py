"""Storage behind the host tier, in the core: pages due there, pages filled from there, and what is refused."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from pagepool import CacheGroupSpec, CacheManager, EngineRequest, FullAttentionSpec, HostTier, PageHashing
from pagepool._core import begin_fills, end_fills, hold_stored, link_storage, list_absent, take_unstored, unlink_storage
from pagepool.errors import ArgumentError, ArgumentTypeError

PAGE_SIZE = 4
SPEC = FullAttentionSpec(PAGE_SIZE, num_kv_heads=1, head_size=8, dtype="float32", use_mla=False)
TOKENS = list(range(100, 117))


def make_manager(num_host_pages: int | None = 8, num_groups: int = 1) -> CacheManager:
    tier = None if num_host_pages is None else HostTier(num_host_pages)
    return CacheManager(6, [CacheGroupSpec(SPEC)] * num_groups, 64, host_tier=tier, hashing=PageHashing(hash_seed=1))


def save_all(manager: CacheManager, token_ids: list[int]) -> None:
    """Compute a request, and let all of its pages go to the tier."""
    request = EngineRequest("request", token_ids)
    assert manager.allocate_slots(request, len(token_ids)) is not None
    manager.free(request)
    pool = manager.page_pool
    pool.free_page_ids(pool.get_new_page_ids(pool.get_num_free_pages()))
    manager.complete(manager.take_moves().number)


def list_keys(manager: CacheManager, token_ids: list[int], *stored: Any) -> tuple[Any, Any, int, int]:
    request = EngineRequest("other", token_ids)
    chain = manager.registry.hash_apart(request, len(token_ids))
    return list_absent(manager._store, manager._rules.groups, chain, len(token_ids), *stored)


def fill(manager: CacheManager, token_ids: list[int], failed: Any = ()) -> list[int]:
    """Fill the pages of a request in the tier. Return them."""
    keys, groups, _, _ = list_keys(manager, token_ids)
    number, page_ids = begin_fills(manager._store, [0], keys, groups)
    manager.check()
    end_fills(manager._store, number, failed)
    manager.check()
    return page_ids.tolist()  # type: ignore[no-any-return]


def count_hits(manager: CacheManager, token_ids: list[int]) -> int:
    return manager.probe(EngineRequest("probe", token_ids)).num_hit_tokens


def test_pages_that_are_there_are_not_filled() -> None:
    manager = make_manager()
    request = EngineRequest("request", TOKENS)
    keys, groups, _, _ = list_keys(manager, TOKENS)
    fill(manager, TOKENS[:9])
    number, page_ids = begin_fills(manager._store, [0], keys, groups)
    assert page_ids.tolist() == [0, 0, 3, 4]
    end_fills(manager._store, number)
    assert begin_fills(manager._store, [0], keys, groups)[0] == 0
    assert manager.get_computed_pages(request)[1] == 16


def test_a_full_tier_is_filled_as_far_as_pages_are_free() -> None:
    manager = make_manager(num_host_pages=4)
    assert fill(manager, TOKENS) == [1, 2, 3, 0]
    assert count_hits(manager, TOKENS) == 12


def test_a_reset_voids_fills() -> None:
    manager = make_manager()
    link_storage(manager._store, True)
    keys, groups, _, _ = list_keys(manager, TOKENS)
    number, _ = begin_fills(manager._store, [0], keys, groups)
    assert manager.reset_prefix_cache()
    end_fills(manager._store, number)
    assert count_hits(manager, TOKENS) == 0
    assert take_unstored(manager._store)[5] == 1
    assert begin_fills(manager._store, [0], keys, groups)[0] == 0
    unlink_storage(manager._store)
    link_storage(manager._store)
    assert take_unstored(manager._store)[5] == 0


def test_pages_are_due_once_they_are_settled() -> None:
    """Two steps after they reached the tier, or when they are evicted from it, to be held back by the caller."""
    manager = make_manager()
    link_storage(manager._store, True)
    save_all(manager, TOKENS)
    for _ in range(2):
        assert len(take_unstored(manager._store, 2)[0]) == 0
        manager.take_moves()
    _, _, page_ids, steps, step, _ = take_unstored(manager._store, 2)
    assert sorted(page_ids.tolist()) == [1, 2, 3, 4]
    assert steps.tolist() == [step] * 4
    save_all(manager, list(range(200, 217)))
    _, _, page_ids, steps, step, _ = take_unstored(manager._store, 2)
    assert (page_ids.tolist(), steps.tolist()) == ([4], [step - 1])  # the first prompt's, evicted
    request = EngineRequest("third", list(range(300, 317)))
    assert manager.allocate_slots(request, 17) is not None
    manager.free(request)
    pool = manager.page_pool
    pool.free_page_ids(pool.get_new_page_ids(pool.get_num_free_pages()))
    keys, _, _, steps, step, _ = take_unstored(manager._store, 2)
    assert len({*map(tuple, keys[steps == step + 2].tolist())}) == 1  # one of the second prompt's, listed twice
    assert len(take_unstored(manager._store, 2)[0]) == 0


def test_a_reset_keeps_the_word_about_wrong_contents() -> None:
    manager = make_manager()
    link_storage(manager._store, True)
    save_all(manager, TOKENS)
    take_unstored(manager._store)
    pages, _ = manager.get_computed_pages(EngineRequest("request", TOKENS))
    manager.complete(manager.take_moves().number)
    manager.page_pool.evict_pages(pages.get_page_ids()[0][:1])
    assert manager.reset_prefix_cache()
    _, _, page_ids, _, _, num_clears = take_unstored(manager._store)
    assert (page_ids.tolist(), num_clears) == ([0], 1)


def test_a_failed_load_is_a_wrong_content() -> None:
    manager = make_manager()
    link_storage(manager._store, True)
    save_all(manager, TOKENS)
    take_unstored(manager._store)
    assert manager.get_computed_pages(EngineRequest("request", TOKENS))[1] == 16
    manager.fail(manager.take_moves().number, loads=[0, 2])
    assert take_unstored(manager._store)[2].tolist() == [0, 0]
    manager.check()


def test_only_the_pages_of_the_longest_hit_are_asked_for() -> None:
    manager = make_manager(num_host_pages=40)
    fill(manager, TOKENS[:5])
    keys, groups, num_now, num_then = list_keys(manager, TOKENS)
    assert (len(keys), num_now, num_then) == (3, 4, 4)
    order = np.argsort(keys[[0, 2], 0])
    needed = list_keys(manager, TOKENS, keys[[0, 2]][order], groups[[0, 2]][order])
    assert (needed[0].tolist(), needed[2], needed[3]) == ([keys[0].tolist()], 4, 8)
    needed = list_keys(manager, TOKENS, keys[2:], groups[2:])
    assert (len(needed[0]), needed[3]) == (0, 4)


def test_misuse() -> None:
    bare, manager = make_manager(None), make_manager()
    store = manager._store
    keys, numbers = np.zeros((1, 2), np.uint64), [0]
    for call in (link_storage, unlink_storage, take_unstored):
        with pytest.raises(ArgumentError, match=r"^store: got one without a host tier"):
            call(bare._store)
    link_storage(store)
    with pytest.raises(ArgumentError, match="has storage behind it"):
        link_storage(store)
    with pytest.raises(ArgumentError, match=r"^groups: got 1 \(at 0\), allowed: 0 to 0"):
        begin_fills(store, [0], keys, [1])
    with pytest.raises(ArgumentError, match=r"^keys: got shape \(1, 2\) for 2 groups"):
        begin_fills(store, [0], keys, [0, 0])
    with pytest.raises(ArgumentError, match=r"^keys: got shape"):
        begin_fills(store, [0], np.zeros((1, 3), np.uint64), numbers)
    with pytest.raises(ArgumentTypeError, match=r"^keys: got ndarray"):
        begin_fills(store, [0], keys.astype(np.int64), numbers)
    number, _ = begin_fills(store, [0], keys, numbers)
    with pytest.raises(ArgumentError, match="failed"):
        end_fills(store, number, [1])
    with pytest.raises(ArgumentError, match=r"^number: got 9, allowed: that of pages being filled"):
        end_fills(store, 9)
    with pytest.raises(ArgumentError, match="number"):
        manager.complete(-number)
    end_fills(store, number)
    with pytest.raises(ArgumentError, match=r"^number: got 1"):
        end_fills(store, number)


def test_events_of_filled_pages_have_whole_digests() -> None:
    pytest.importorskip("msgspec", reason="events are an extra")
    manager = CacheManager(6, [CacheGroupSpec(SPEC)], 64, host_tier=HostTier(8), hashing=PageHashing(hash_algo="sha256"))
    manager.enable_events(hashes_as_bytes=True)
    link_storage(manager._store)
    save_all(manager, list(range(200, 217)))  # whose digests the pages of the tier had before
    manager.take_events()
    chain = manager.registry.hash_apart(EngineRequest("other", TOKENS), len(TOKENS))
    groups = manager._rules.groups
    keys, group_ids, _, _ = list_absent(manager._store, groups, chain, len(TOKENS))
    number, _ = begin_fills(manager._store, [0], keys, group_ids, chain)
    end_fills(manager._store, number)
    told = [digest for event in manager.take_events() if hasattr(event, "token_ids") for digest in event.block_hashes]
    parent, expected = bytes(32), []
    for start in range(0, 16, PAGE_SIZE):
        parent = hashlib.sha256(parent + np.array(TOKENS[start : start + PAGE_SIZE], "<i4").tobytes()).digest()
        expected.append(parent)
    assert sorted(told) == sorted(expected)


# --- pages held for a reader --------------------------------------------------------------------------------------


def evict_all(manager: CacheManager) -> None:
    """Let other prompts take all free pages of the tier."""
    for i in range(3):
        save_all(manager, list(range(400 + 20 * i, 417 + 20 * i)))


def test_a_held_page_is_not_evicted() -> None:
    manager = make_manager(num_host_pages=6)
    keys, groups, _, _ = list_keys(manager, TOKENS)
    save_all(manager, TOKENS)
    hold = hold_stored(manager._store, keys[:2], groups[:2])
    held = hold.page_ids.tolist()
    assert all(held)
    evict_all(manager)
    assert hold_stored(manager._store, keys, groups).page_ids.tolist() == [*held, 0, 0]
    manager.check()
    assert hold.release().tolist() == [True, True]
    assert hold.release().tolist() == [False, False]


def test_released_pages_can_be_evicted_and_count_as_just_used() -> None:
    manager = make_manager(num_host_pages=8)
    keys, groups, _, _ = list_keys(manager, TOKENS)
    save_all(manager, TOKENS)
    save_all(manager, list(range(200, 209)))  # 6 pages
    assert hold_stored(manager._store, keys[3:], groups[3:]).release().tolist() == [True]
    save_all(manager, list(range(300, 317)))
    found = hold_stored(manager._store, keys, groups)
    assert [bool(each) for each in found.page_ids.tolist()] == [False, False, False, True]
    found.release()
    evict_all(manager)
    assert not hold_stored(manager._store, keys, groups).page_ids.any()


def test_only_settled_pages_are_held() -> None:
    """With storage or without it: the steps count from the arrival of a page."""
    for has_storage in (False, True):
        manager = make_manager()
        keys, groups, _, _ = list_keys(manager, TOKENS)
        if has_storage:
            link_storage(manager._store)
        assert hold_stored(manager._store, keys, groups, 2).page_ids.tolist() == [0] * 4
        save_all(manager, TOKENS)
        for _ in range(2):
            assert hold_stored(manager._store, keys, groups, 2).page_ids.tolist() == [0] * 4
            manager.take_moves()
        hold = hold_stored(manager._store, keys, groups, 2)
        assert all(hold.page_ids.tolist())
        assert hold.release().all()


def test_storage_comes_and_goes_while_arrivals_are_noted() -> None:
    manager = make_manager(num_host_pages=40)
    keys, groups, _, _ = list_keys(manager, TOKENS)
    assert not hold_stored(manager._store, keys, groups).release().any()
    save_all(manager, TOKENS)
    assert hold_stored(manager._store, keys, groups).release().all()
    for first in (500, 700):
        link_storage(manager._store, True)
        with pytest.raises(ArgumentError, match="host_tier"):
            link_storage(manager._store)
        assert len(take_unstored(manager._store)[0]) == 0
        assert hold_stored(manager._store, keys, groups).release().all()
        save_all(manager, list(range(first, first + 17)))
        unlink_storage(manager._store)
        save_all(manager, list(range(first + 100, first + 117)))
        assert len(take_unstored(manager._store)[0]) == 0
        assert hold_stored(manager._store, keys, groups).release().all()
    manager.check()


def test_pages_that_are_dropped_while_they_are_held_are_not_right() -> None:
    manager = make_manager()
    keys, groups, _, _ = list_keys(manager, TOKENS)
    save_all(manager, TOKENS)
    hold = hold_stored(manager._store, keys, groups)
    assert manager.reset_prefix_cache()
    assert not hold_stored(manager._store, keys, groups).page_ids.any()
    assert hold_stored(manager._store, keys[:0], groups[:0]).num_clears == hold.num_clears + 1
    assert not hold.release().any()
    manager.check()
    assert all(fill(manager, TOKENS))


def test_wrong_arguments_of_a_hold_are_refused() -> None:
    manager = make_manager()
    keys, groups, _, _ = list_keys(manager, TOKENS)
    for wrong, of_groups, error in (
        (keys[:, :1], groups, ArgumentError),
        (keys, groups[:2], ArgumentError),
        (keys, [-1] * 4, ArgumentError),
        (keys.astype(np.int64), groups, ArgumentTypeError),
        (None, groups, ArgumentTypeError),
    ):
        with pytest.raises(error):
            hold_stored(manager._store, wrong, of_groups)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="num_steps"):
        hold_stored(manager._store, keys, groups, -1)
    with pytest.raises(ArgumentError, match="without a host tier"):
        hold_stored(make_manager(None)._store, keys, groups)
