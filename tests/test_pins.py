"""Pins of cached pages, by hand: their budget, what ends them, and what is refused. `test_differential.py` has the rest."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from batch_model import package_pool_state
from hybrids import FULL, THREE_PAGES, WINDOW, count_hits, make_batch, manager_state, start, unseal
from hybrids import make_manager as make_hybrid
from refusing import refused
from twin_engine import Request
from twins import pins_of

from pagepool import CacheManager, EngineRequest, MultiGroupPageTable, PagePool, RunningBatch
from pagepool._core import copy_records
from pagepool.errors import (
    ArgumentError,
    ArgumentTypeError,
    DoubleFreeError,
    IntegrityError,
    PageIdError,
    PinBudgetError,
    SnapshotError,
)
from pagepool.page_pool.snapshot import seal

# --- requests -------------------------------------------------------------------------------------------------

make_manager = partial(make_hybrid, FULL, num_pages=21)


def fill(manager: CacheManager) -> int:
    """Take and free all free pages, which evicts what is not held. Returns how many there were."""
    num_free = manager.page_pool.get_num_free_pages()
    manager.page_pool.free_page_ids(manager.page_pool.get_new_page_ids(num_free))
    return num_free


def test_pinned_pages_stay_when_all_others_are_evicted() -> None:
    manager = make_manager()
    request = start(manager, "a")
    assert manager.pin(request) == 3
    manager.free(request)
    stats = manager.stats()
    assert (stats.num_pinned_pages, stats.num_unpinned_pages, stats.num_free_pages, stats.num_held_pages) == (3, 17, 17, 3)
    assert fill(manager) == 17
    assert count_hits(manager, [*THREE_PAGES, 99]) == 12
    assert manager.unpin(EngineRequest("b", THREE_PAGES)) == 3
    assert manager.page_pool.free_page_ids_in_order()[-3:].tolist() == [3, 2, 1]
    assert fill(manager) == 20
    assert count_hits(manager, [*THREE_PAGES, 99]) == 0
    assert manager.stats().num_pinned_pages == 0


@pytest.mark.parametrize("span", [(-1,), (4, 3), (0, 1 << 70)], ids=str)
def test_spans_that_are_refused(span: Any) -> None:
    manager = make_manager()
    request = start(manager, "a")
    batch = make_batch(manager)
    batch.admit(0, [7] * 5)
    for call in (
        lambda: manager.pin(request, *span),
        lambda: manager.unpin(request, *span),
        lambda: batch.pin(0, *span),
        lambda: batch.unpin(0, *span),
    ):
        with refused(lambda: manager_state(manager), ArgumentError, r"start|stop"):
            call()


def test_a_request_whose_tokens_are_missing() -> None:
    manager = make_manager()
    request = start(manager, "a")
    short = SimpleNamespace(
        request_id="short", num_tokens=12, all_token_ids=THREE_PAGES[:5], num_computed_tokens=0, sampling_params=None, status=1
    )
    manager.pin(request)
    for call in (manager.pin, manager.unpin):
        with refused(lambda: manager_state(manager), ArgumentError, "all_token_ids ends at 5"):
            call(short)


# --- the budget -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "num_pages"), [(0, 0), (np.float32(0.5), 10), (0.29, 5), (1, 20)])
def test_the_budget(share: Any, num_pages: int) -> None:
    assert make_manager(max_pinned_share=share).stats().max_num_pinned_pages == num_pages


@pytest.mark.parametrize(
    ("share", "error"),
    [(-0.1, ArgumentError), (1.1, ArgumentError), (float("nan"), ArgumentError), (True, ArgumentTypeError)],
)
def test_shares_that_are_refused(share: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="max_pinned_share: got"):
        make_manager(max_pinned_share=share)


def test_beyond_the_budget_nothing_is_pinned() -> None:
    manager = make_manager(max_pinned_share=0.2)
    first, second = start(manager, "a"), start(manager, "b", [*THREE_PAGES[:4], *range(50, 58)])
    assert manager.pin(first) == 3
    message = "^pages to pin: got 2 more, 3 are pinned, allowed: 4 in all$"
    with refused(lambda: manager_state(manager), PinBudgetError, message) as caught:
        manager.pin(second)
    assert isinstance(caught.value, ValueError)
    assert manager.pin(second, stop=8) == 2
    assert pins_of(manager.page_pool) == {1: 2, 2: 1, 3: 1, 4: 1}
    assert manager.pin(first) == 3  # pages that are pinned cost nothing more
    assert manager.stats().num_pinned_pages == 4


def test_a_smaller_budget_of_another_manager_keeps_what_is_pinned() -> None:
    manager = make_manager()
    request = start(manager, "a")
    manager.pin(request)
    other = make_manager(page_pool=manager.page_pool, max_pinned_share=0.05)
    assert other.pin(EngineRequest("b", THREE_PAGES)) == 2
    with pytest.raises(PinBudgetError, match="got 1 more, 3 are pinned, allowed: 1"):
        other.pin(start(other, "c", [9] * 4))


# --- what is beside pins --------------------------------------------------------------------------------------


def test_a_hopeless_request_is_told_of_pins(caplog: pytest.LogCaptureFixture) -> None:
    manager = make_manager(max_pinned_share=0.5)
    pinned = start(manager, "pinned", list(range(40)))
    manager.pin(pinned)
    manager.free(pinned)
    large = EngineRequest("large", [99] * 44)
    manager.require_capacity(44)
    assert manager.allocate_slots(large, 44) is None
    assert "needs 11 pages at once, the pool has 20, and 10 are pinned for others" in caplog.text
    caplog.clear()
    own = EngineRequest("own", list(range(60)))
    hits, num_hit_tokens = manager.get_computed_pages(own)
    blocker = start(manager, "blocker", [98] * 28)
    assert manager.allocate_slots(own, 20, num_hit_tokens, hits) is None
    assert not caplog.text  # it fits beside its own pins, once the blocker ends
    manager.free(blocker)
    assert manager.allocate_slots(own, 20, num_hit_tokens, hits) is not None


# --- which pages ------------------------------------------------------------------------------------------------


def test_pins_and_protection_are_no_look_ups() -> None:
    manager = make_manager()
    request = start(manager, "a")
    manager.free(request)
    before = manager.stats().queries, dict(manager.req_to_page_hashes)
    other = EngineRequest("other", [*THREE_PAGES, 99])
    assert (manager.pin(other), manager.unpin(other), manager.protect([other])) == (3, 3, 3)
    assert (manager.stats().queries, dict(manager.req_to_page_hashes)) == before


def test_pages_of_images_without_features_are_unpinned_by_their_request() -> None:
    manager = make_manager()
    request, other = (Request(name, list(THREE_PAGES), has_vision=True) for name in "ab")
    manager.allocate_slots(request, 12)
    assert manager.pin(request) == 3
    manager.free(request)
    assert manager.unpin(other) == 0
    assert manager.unpin(request) == 3


def test_a_running_request_is_not_disturbed_by_one_with_its_id() -> None:
    manager = make_manager()
    request = start(manager, "a")
    hashes = manager.req_to_page_hashes["a"]
    assert manager.pin(EngineRequest("a", [*THREE_PAGES[:4], *range(40, 48)])) == 1  # of what the request of that id holds
    assert manager.unpin(EngineRequest("a", THREE_PAGES)) == 1
    assert manager.req_to_page_hashes["a"] == hashes
    request.append_output_token_ids([1, 2, 3, 4])
    assert manager.allocate_slots(request, 4) is not None
    manager.check()


# --- the end of a pin -------------------------------------------------------------------------------------------


def test_a_reset_needs_the_pins_back(caplog: pytest.LogCaptureFixture) -> None:
    manager = make_manager()
    request = start(manager, "a")
    manager.pin(request)
    manager.pin(request)
    manager.free(request)
    assert not manager.reset_prefix_cache()
    assert "3 pages are held, 3 of them by pins" in caplog.text
    assert manager.page_pool.unpin_all() == 3
    assert manager.page_pool.free_page_ids_in_order()[-3:].tolist() == [1, 2, 3]
    assert manager.page_pool.unpin_all() == 0
    assert manager.reset_prefix_cache()
    assert PagePool(4, enable_caching=False).unpin_all() == 0


def test_the_reference_of_a_pin_is_not_given_back_by_others() -> None:
    manager = make_manager()
    pool = manager.page_pool
    request = start(manager, "a")
    manager.pin(request)
    with pytest.raises(DoubleFreeError, match="page 2 "):
        pool.free_page_ids([1, 2, 2])
    manager.free(request)
    before = manager_state(manager)
    for call in (
        lambda: pool.free_page_ids([1]),
        lambda: pool.free_pages([pool.pages[3]]),
        pool.pages[2].decr_ref,
    ):
        with pytest.raises(DoubleFreeError):
            call()
    assert manager_state(manager) == before
    pool.touch_page_ids([1])
    pool.free_page_ids([1])
    assert manager_state(manager)[0] == before[0]._replace(stats=manager_state(manager)[0].stats)


def test_a_page_that_somebody_else_gave_back_is_noticed() -> None:
    manager = make_hybrid(WINDOW, num_pages=21)
    request = EngineRequest("a", list(range(20)))
    manager.allocate_slots(request, 16)
    manager.pin(request, 0, 4)
    manager.page_pool.free_page_ids([1])
    with pytest.raises(IntegrityError, match="page 1 stands in 1 rows and requests and is pinned, its ref count is 1"):
        manager.check()
    request.num_computed_tokens = 16
    with pytest.raises(DoubleFreeError, match="page 1 "):
        manager.allocate_slots(request, 4)
    with pytest.raises(DoubleFreeError, match="page 1 "):
        manager.free(request)
    manager.page_pool.touch_page_ids([1])
    manager.free(request)
    manager.check()


def test_a_page_that_cannot_be_held_is_not_pinned() -> None:
    manager = make_manager()
    pool = manager.page_pool
    request = start(manager, "a")
    pool.pages[2].ref_cnt = (1 << 31) - 2
    with refused(lambda: manager_state(manager), PageIdError, "page 2 cannot be touched"):
        manager.pin(request)
    pool.pages[2].ref_cnt = 1
    manager.free(request)
    pool.pages[2].ref_cnt = 1
    with pytest.raises(IntegrityError, match="page 2 is in the free queue with ref count 1, allowed: 0"):
        manager.pin(EngineRequest("b", [*THREE_PAGES, 99]))
    assert pins_of(pool) == {}
    pool.pages[2].ref_cnt = 0
    manager.check()


# --- rows ---------------------------------------------------------------------------------------------------


def test_a_cut_row_that_ends_early_forgets_what_it_did_not_compute_again() -> None:
    """The cut goes through a pinned page of 6, so tokens from 18 on, which fill pages of 4, are to be computed again."""
    manager = make_hybrid(FULL, replace(FULL, page_size=6), num_pages=64, max_pinned_share=1.0)
    batch = RunningBatch(manager, MultiGroupPageTable(2, 64, 64, [4, 6]))
    batch.admit(0, list(range(24)))
    batch.pin(0, 18)
    batch.trim([0], 22)
    assert batch.num_computed_tokens[0] == 18
    page_ids = batch.get_page_ids(0)[0]
    batch.release([0], 14)
    batch.check()
    assert [manager.page_pool.pages[page_id].page_hash is not None for page_id in page_ids] == [True] * 3 + [False] * 2


# --- saved and checked ------------------------------------------------------------------------------------------


def make_pinned() -> tuple[CacheManager, EngineRequest]:
    manager = make_manager()
    request = start(manager, "a", [*THREE_PAGES, 99])
    manager.pin(request)
    manager.pin(request, stop=4)
    return manager, request


def test_a_restored_pool_has_the_pins(tmp_path: Path) -> None:
    manager, request = make_pinned()
    np.savez(tmp_path / "pool.npz", **manager.page_pool.snapshot())
    with np.load(tmp_path / "pool.npz") as file:
        pool = PagePool.restore(file)
    assert package_pool_state(pool, True) == package_pool_state(manager.page_pool, True)
    assert pool.release_all_held() == 4
    assert pins_of(pool) == {1: 2, 2: 1, 3: 1}
    pool.check()
    restored = make_manager(page_pool=pool)
    assert restored.page_pool.get_num_free_pages() == 17
    assert (restored.unpin(request), restored.unpin(request)) == (3, 1)
    assert restored.reset_prefix_cache()


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ([1], r"cached_pins: got 1, allowed: 3, one for each cached page, or none"),
        ([0, 0, -1], "has -1 pins"),
        ([0, 0, 1], r"page \d has 1 pins and 0 references"),
    ],
)
def test_pins_that_contradict_are_refused(pins: list[int], message: str) -> None:
    manager, request = make_pinned()
    manager.page_pool.unpin_all()
    manager.free(request)
    arrays = unseal(manager.page_pool)
    arrays["cached_pins"] = np.array(pins, dtype=np.int32)
    with pytest.raises(SnapshotError, match=message):
        PagePool.restore(seal(arrays))


def test_there_cannot_be_more_pins_than_are_counted() -> None:
    manager, request = make_pinned()
    arrays = unseal(manager.page_pool)
    arrays["cached_pins"] = np.array([1, (1 << 31) - 1, 1], dtype=np.int32)
    pool = PagePool.restore(seal(arrays))
    restored = make_manager(page_pool=pool)
    page_id = arrays["cached_page_ids"][1]
    with refused(lambda: manager_state(restored), PageIdError, f"page {page_id} cannot be pinned: it has 2147483647 pins"):
        restored.pin(request)


def test_a_pool_without_pins_has_no_memory_for_them() -> None:
    manager = make_manager()
    start(manager, "a")
    assert len(copy_records(manager.page_pool.store, "pins")["pins"]) == 0
    assert len(manager.page_pool.snapshot()["cached_pins"]) == 0
