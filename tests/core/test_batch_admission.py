"""Admission to rows of a running batch: slots for drafts, reserved prompts, and rows that were used before. A free row keeps
its hashes: a wrong one would hit too much, or too little.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
from admissions import admission
from hybrids import (
    CHUNK,
    FULL,
    MAX_MODEL_LEN,
    NUM_ROWS,
    PROMPT,
    STATE,
    WINDOW,
    batch_state,
    keep_every,
    make_batch,
    make_manager,
    take,
)
from refusing import refused
from settings import scale

from pagepool import (
    CacheGroupSpec,
    CacheManager,
    EngineRequest,
    HostTier,
    MambaSpec,
    MultiGroupPageTable,
    Refusal,
    RequestTraits,
    RunningBatch,
)
from pagepool.errors import (
    ArgumentError,
    ArgumentTypeError,
    RequestTooLargeError,
    RowIndexError,
)

WRITTEN = MambaSpec(4, ((1, 1),), "float16", checkpoint_interval=8)


def make_written_batch(**options: Any) -> RunningBatch:
    """Return a batch whose states a step writes to pages of their own."""
    groups = [CacheGroupSpec(FULL), CacheGroupSpec(WRITTEN, pool="states")]
    manager = CacheManager({"kv": 60, "states": 20}, groups, MAX_MODEL_LEN)
    return RunningBatch(manager, MultiGroupPageTable(NUM_ROWS, MAX_MODEL_LEN, MAX_MODEL_LEN, [4, 4]), **options)


@pytest.mark.parametrize("admitted", [[], [0], [1], [0, 1]])
def test_rows_that_changed_places(admitted: list[int]) -> None:
    batch = make_batch(make_manager(FULL))
    prompts = PROMPT[:22], PROMPT[30:44]
    for row in (0, 1):
        batch.admit(row, prompts[row])
    batch.release([row for row in (0, 1) if row not in admitted])
    batch.swap_row(0, 1)
    batch.release(np.flatnonzero(batch.is_admitted))
    for row in (0, 1):
        assert batch.admit(row, prompts[row]) == len(prompts[row]) - 2
        assert batch.admit(2, prompts[1 - row]) == len(prompts[1 - row]) - 2
        batch.release([row, 2])
    batch.check()


# --- slots for drafts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("specs", [(FULL,), (FULL, WINDOW), (CHUNK, FULL), (keep_every(None), FULL)])
@pytest.mark.parametrize("options", [{}, {"num_tokens": 9}, {"max_num_new_tokens": 6}, {"num_external_tokens": 7}])
@pytest.mark.parametrize("num_ahead", [1, 3, 8, 1000])
def test_drafts_get_slots_at_admission(specs: Sequence[Any], options: dict[str, int], num_ahead: int) -> None:
    batch, plain = (make_batch(make_manager(*specs)) for _ in range(2))
    for each in (batch, plain):
        each.admit(0, PROMPT[:8])
        each.release([0])
    num_hits = batch.admit(0, PROMPT[:20], num_drafts=num_ahead, **admission(**options))
    assert plain.admit(0, PROMPT[:20], **admission(**options)) == num_hits
    num_slots = int(batch.num_computed_tokens[0] + batch.num_external_tokens[0]) + num_ahead
    for ids, plain_ids, spec in zip(batch.get_page_ids(0), plain.get_page_ids(0), specs, strict=True):
        is_state = isinstance(spec, MambaSpec)
        assert len(ids) == (1 if is_state else -(-min(num_slots, MAX_MODEL_LEN) // 4))
        assert [page == 0 for page in ids[: len(plain_ids)]] == [page == 0 for page in plain_ids]
    assert batch.num_computed_tokens.tolist() == plain.num_computed_tokens.tolist()
    assert batch.num_tokens.tolist() == plain.num_tokens.tolist()
    if batch.num_external_tokens[0]:
        batch.commit_external(0, batch.num_external_tokens[0])
    if min(num_slots, MAX_MODEL_LEN) == num_slots:
        batch.append([0], [1])
        assert batch.plan([0], 1, num_ahead - 1).new_page_ids.size == 0
    batch.release([0])
    batch.check()


@pytest.mark.parametrize(("num_hits", "num_admitted"), [(0, 7), (0, 8), (0, 9), (0, 17), (8, 9), (8, 15), (8, 16)])
@pytest.mark.parametrize("num_ahead", [0, 1, 8, 64])
@pytest.mark.parametrize("specs", [(FULL, STATE), (STATE,), (FULL, keep_every(4), STATE), (WINDOW, STATE, FULL)])
def test_drafts_at_admission_write_no_states(specs: Sequence[Any], num_ahead: int, num_hits: int, num_admitted: int) -> None:
    batch = make_batch(make_manager(*specs))
    if num_hits:
        batch.admit(0, PROMPT[:8])
        batch.take_moves()
        batch.release([0])
    assert batch.admit(1, PROMPT[:20], num_tokens=num_admitted, num_drafts=num_ahead) == num_hits
    assert {*batch.take_moves().writes.num_tokens.tolist()} == {*range(num_hits + 8, num_admitted + 1, 8)}
    assert batch.num_computed_tokens[1] == num_admitted
    batch.release([1])
    batch.check()


def test_a_refused_request_is_refused_with_drafts_only_while_it_lacks_pages() -> None:
    batch = make_batch(make_manager(FULL, num_pages=9))
    batch.admit(0, PROMPT[20:32])
    for _ in range(2):
        assert batch.admit(1, PROMPT[:19], num_drafts=2) is None
        assert batch.refusal is not None
        assert (batch.refusal.num_needed, batch.refusal.num_free) == (6, 5)
    assert batch.admit(1, PROMPT[:19], num_drafts=1) == 0
    batch.release([1])
    assert batch.admit(1, PROMPT[:19], num_drafts=13) is None
    batch.release([0])
    assert batch.admit(1, PROMPT[:19], num_drafts=13) == 16


@pytest.mark.parametrize("num_ahead", [0, 1, 5, 40])
def test_drafts_of_a_step_planned_ahead_are_planned(num_ahead: int) -> None:
    """The step computes them, so no fork sees the state in flight."""
    batch = make_written_batch(max_steps_ahead=1)
    batch.admit(0, PROMPT[:7], num_drafts=num_ahead, traits=RequestTraits(resume_at=[8]))
    assert batch.num_ahead_tokens[0] == num_ahead
    assert len(batch.take_moves().writes) == 0
    if num_ahead:
        with pytest.raises(ArgumentError, match=rf"^row 0: .* up to {7 + num_ahead}, allowed: none behind its 7"):
            batch.fork(0, [1])
    else:
        batch.fork(0, [1])
    batch.release([0])


def test_drafts_of_awaited_tokens_are_not_planned() -> None:
    batch = make_written_batch(max_steps_ahead=1)
    batch.admit(0, PROMPT[:20], num_external_tokens=19)
    assert [len(ids) for ids in batch.get_page_ids(0)] == [5, 1]
    batch.take_moves()
    batch.commit_external(0, 19)
    batch.fork(0, [1])
    take(batch)
    assert batch.plan([0], 1, 3).num_grown == 1
    assert batch.num_ahead_tokens[0] == 3


# --- reserved prompts -------------------------------------------------------------------------------------------------

KINDS = [(FULL,), (FULL, WINDOW), (CHUNK, FULL), (keep_every(None), FULL), (FULL, STATE), (WINDOW, STATE, FULL, CHUNK)]


@pytest.mark.parametrize("specs", KINDS)
@pytest.mark.parametrize("num_ahead", [0, 3])
@pytest.mark.parametrize("num_hits", [0, 8])
def test_chunks_of_a_reserved_prompt_take_no_pages(specs: Sequence[Any], num_ahead: int, num_hits: int) -> None:
    """All pages of the prompt are held from its first chunk on, and the slots for drafts behind it. Windows give theirs back as
    they move on.
    """
    batch = make_batch(make_manager(*specs, num_pages=80))
    if num_hits:
        batch.admit(0, PROMPT[:num_hits])
        batch.take_moves()
        batch.release([0])
    has_state = any(isinstance(spec, MambaSpec) for spec in specs)
    num_hits = 0 if has_state and STATE not in specs else num_hits
    prompt = PROMPT[:43]
    assert batch.admit(1, prompt, max_num_new_tokens=6, num_drafts=num_ahead, reserve="prompt") == num_hits
    take(batch)
    num_pages = -(-(43 + num_ahead) // 4)
    assert [len(ids) for ids in batch.get_page_ids(1)] == [1 if isinstance(spec, MambaSpec) else num_pages for spec in specs]
    assert all(ids[-1] for ids in batch.get_page_ids(1))
    for table, ids in zip(batch._tables, batch.get_page_ids(1), strict=True):
        assert table.page_table_cpu[1, : len(ids)].tolist() == ids
        assert table.num_pages_per_row[1] == len(ids)
    assert int(batch.num_computed_tokens[1]) == num_hits + 6
    pool = batch._manager.page_pool
    taken, num_held = [], len([page for page in batch.get_page_ids(1)[-1] if page])
    while (num_left := 43 - int(batch.num_computed_tokens[1])) > 0:
        num_new = min(5, num_left)
        taken += pool.get_new_pages(pool.get_num_free_pages())
        result = batch.plan([1], num_new, num_ahead if num_new == num_left else 0)
        assert (result.num_grown, result.new_page_ids.size) == (1, 0)
        take(batch)
        batch.check()
    assert all(ids[-1] for ids in batch.get_page_ids(1))
    if specs[-1] is WINDOW:
        assert len([page for page in batch.get_page_ids(1)[-1] if page]) < num_held
    batch.release([1])
    pool.free_pages(taken)
    if not has_state:
        assert batch.admit(2, prompt) == 40
        batch.release([2])
    batch.check()


def test_a_reserved_prompt_is_refused_as_a_whole() -> None:
    batch = make_batch(make_manager(FULL, num_pages=13))
    batch.admit(0, PROMPT[:16])
    other, options = [9] * 36, {"num_tokens": 8, "reserve": "prompt"}
    for _ in range(2):
        before = batch_state(batch)
        assert batch.admit(1, other, **admission(**options)) is None
        assert batch_state(batch) == before
        assert batch.refusal == Refusal(9, 8, 0, 0, "kv", None, can_wait=True)
    assert batch.admit(1, other, num_tokens=8) == 0
    batch.release([1])
    assert batch.admit(1, other[:32], num_drafts=1, **admission(**options)) is None
    assert batch.admit(1, other[:32], **admission(**options)) == 8
    batch.release([0, 1])
    with refused(lambda: batch_state(batch), RequestTooLargeError, "row 1 needs 13 pages at once, the pool has 12"):
        batch.admit(1, [9] * 49, **admission(**options))
    assert batch.admit(1, [9] * 49, num_tokens=8) == 8


def test_a_window_counts_all_pages_of_a_reserved_prompt() -> None:
    """In chunks the row would hold the pages of its window and its chunk; `require_capacity` says so for one step."""
    manager = make_manager(WINDOW, num_pages=9)
    batch = make_batch(manager)
    manager.require_capacity(40, 4)
    with pytest.raises(RequestTooLargeError):
        manager.require_capacity(40, 40)
    with refused(lambda: batch_state(batch), RequestTooLargeError, "row 0 needs 10 pages at once, the pool has 8"):
        batch.admit(0, PROMPT[:40], num_tokens=4, reserve="prompt")
    manager.require_capacity(32, 32)
    assert batch.admit(0, PROMPT[:32], num_tokens=4, reserve="prompt") == 0
    assert batch.admit(1, [9] * 40, num_tokens=4) is None
    for num_skipped in range(7):
        assert batch.plan([0], 4).new_page_ids.size == 0
        assert batch.get_page_ids(0)[0].count(0) == num_skipped
    assert batch.admit(1, [9] * 40, num_tokens=4) == 0


def test_a_shard_reserves_a_prompt() -> None:
    manager = make_manager(FULL, num_pages=16)
    batch = make_batch(manager, data_parallel_size=2)
    assert batch.admit(0, PROMPT[:20], num_tokens=4, reserve="prompt", traits=RequestTraits(dp_shard=1)) == 0
    assert all(8 <= page < 16 for page in batch.get_page_ids(0)[0])
    assert batch.admit(1, [9] * 16, num_tokens=4, reserve="prompt", traits=RequestTraits(dp_shard=1)) is None
    assert batch.refusal is not None
    assert (batch.refusal.num_needed, batch.refusal.num_free, batch.refusal.shard) == (4, 3, 1)
    assert batch.admit(1, [9] * 12, traits=RequestTraits(dp_shard=1, look_up=False)) == 0
    assert batch.plan([0], 16).new_page_ids.size == 0
    with pytest.raises(RequestTooLargeError):
        batch.admit(2, [9] * 33, num_tokens=4, reserve="prompt", traits=RequestTraits(dp_shard=1))


def test_drafts_of_a_reserved_prompt_follow_its_last_chunk() -> None:
    batch = make_batch(make_manager(FULL, STATE))
    assert batch.admit(0, PROMPT[:22], num_tokens=6, num_drafts=3, reserve="prompt") == 0
    assert len(batch.get_page_ids(0)[0]) == 7
    assert batch.plan([0], 10).new_page_ids.size == 0
    assert batch.take_moves().writes.num_tokens.tolist() == [8, 16]
    assert batch.plan([0], 6, 3).new_page_ids.size == 0
    assert len(batch.take_moves().writes) == 0
    ahead = make_written_batch(max_steps_ahead=1)
    assert ahead.admit(0, PROMPT[:22], num_tokens=6, reserve="prompt") == 0
    ahead.fork(0, [1])  # no planned step computes drafts
    ahead.take_moves()
    assert ahead.plan([0], 16).new_page_ids.size == 0


def test_what_ends_a_reservation() -> None:
    """Forks have the pages of computed tokens. Neither tokens that failed to come nor failed steps leave pages behind. Moves
    leave the pages, and so do cuts of tokens that no step computes.
    """
    manager = make_manager(FULL, num_pages=40)
    batch = make_batch(manager)

    def lengths(*rows: int) -> list[int]:
        return [len(batch.get_page_ids(row)[0]) for row in rows]

    def admit(**options: Any) -> None:
        batch.admit(0, PROMPT[:30], reserve="prompt", **admission(look_up=False, **options))

    admit(num_tokens=9)
    batch.fork(0, [1, 2])
    take(batch)
    assert lengths(0, 1, 2) == [8, 3, 3]
    batch.release([1, 2])
    batch.move_row(0, 1)
    batch.trim([1], 20)
    assert lengths(1) == [8]
    assert batch.settle(batch.plan([1], 11), failed=True).tolist() == []
    assert lengths(1) == [3]
    batch.plan([1], 3)
    batch.trim([1], 10)
    assert lengths(1) == [3]
    batch.release([1])
    admit(num_tokens=9)
    batch.trim([0], 5)
    assert lengths(0) == [2]
    batch.release([0])
    for num_came in (13, 6):
        admit(num_external_tokens=13)
        assert (lengths(0), batch.num_external_tokens[0]) == ([8], 13)
        if num_came == 13:
            batch.commit_external(0, 13)
            assert batch.plan([0], 17).new_page_ids.size == 0
        else:
            batch.fail_external(0, num_came)
            assert lengths(0) == [2]
        batch.release([0])
    batch.check()


# --- what admission would hit -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("specs", [*KINDS, (STATE,), (WRITTEN, FULL)])
@pytest.mark.parametrize("options", [{}, {"cache_salt": "salt"}, {"lora_id": 3}])
def test_a_probe_tells_what_admission_hits(specs: Sequence[Any], options: dict[str, Any]) -> None:
    batch = make_batch(make_manager(*specs, num_pages=80))
    batch.admit(0, PROMPT[:16], **admission(**options))
    take(batch)
    batch.take_moves()
    batch.release([0])
    before = batch_state(batch)
    for prompt in (PROMPT[:30], PROMPT[:17], PROMPT[:16], PROMPT[:3], [*PROMPT[:8], 1, 2, 3], [9] * 20):
        num_hits = batch.probe(1, prompt, **admission(**options))
        assert batch.probe(2, np.array(prompt, np.int64), **admission(**options)) == num_hits
        assert batch_state(batch) == before
        step = batch.new_step()
        assert batch.admit(1, prompt, step=step, **admission(**options)) == num_hits
        if not batch.settle(step, failed=True).size:
            batch.release([1])
        before = batch_state(batch)
    assert batch.probe(1, PROMPT[:30], traits=RequestTraits(cache_salt="other")) == 0


def run_transfers(batch: RunningBatch) -> None:
    if number := batch.take_moves().number:
        batch._manager.complete(number)


def run_one_by_one(batch: RunningBatch, *prompts: list[int]) -> None:
    """Cache prompts one after another, which sends pages of the first ones to the tier."""
    for tokens in prompts:
        batch.admit(0, tokens)
        batch.release([0])
        run_transfers(batch)


def test_a_probe_reaches_the_tier() -> None:
    manager = make_manager(FULL, num_pages=9, host_tier=HostTier(num_pages=40))
    batch = make_batch(manager)
    run_one_by_one(batch, PROMPT[:32], [9] * 32)
    assert manager.probe(EngineRequest("probe", PROMPT[:33])).num_hit_tokens == 32
    before = batch_state(batch)
    assert batch.probe(1, PROMPT[:33]) == 32
    assert batch.probe(2, PROMPT[:30]) == 28
    assert batch_state(batch) == before
    batch.admit(0, [7] * 9)
    assert batch.probe(1, PROMPT[:30]) == 28  # once there is room
    assert batch.admit(1, PROMPT[:30]) is None
    batch.release([0])
    assert batch.admit(1, PROMPT[:30]) == 28


def test_a_probe_of_more_than_the_pool_can_load() -> None:
    manager = make_manager(FULL, num_pages=9, host_tier=HostTier(num_pages=40))
    batch = make_batch(manager)
    run_one_by_one(batch, PROMPT[:32], [9] * 32)
    small = make_batch(manager, data_parallel_size=3)
    assert [small.probe(0, PROMPT[:33], traits=RequestTraits(dp_shard=shard)) for shard in (None, 0, 1)] == [32, 0, 0]


def test_a_probe_looks_in_its_shard() -> None:
    batch = make_batch(make_manager(FULL, num_pages=16), data_parallel_size=2)
    batch.admit(0, PROMPT[:12], traits=RequestTraits(dp_shard=1))
    assert [batch.probe(1, PROMPT[:20], traits=RequestTraits(dp_shard=shard)) for shard in (None, 0, 1, 2, 3)] == [
        12,
        0,
        12,
        0,
        12,
    ]
    batch = make_batch(make_manager(FULL))
    with refused(lambda: batch_state(batch), ArgumentError, "dp_shard: got 0, allowed without data_parallel_size: None"):
        batch.probe(1, PROMPT[:20], traits=RequestTraits(dp_shard=0))


def test_a_probe_keeps_a_refusal_that_it_does_not_change() -> None:
    batch = make_batch(make_manager(FULL, num_pages=9))
    batch.admit(0, PROMPT[:20])
    tokens = [*PROMPT[:8], *[9] * 16]
    options = None, None, None, None, True, 0

    def is_kept() -> bool:
        return batch._is_refused_still(1, tokens, None, None, 0, options)

    for other, keeps in ((tokens, True), ([*tokens, 3, 4, 5, 6, 7], True), (tokens[:20], False), ([1, *tokens], False)):
        assert batch.admit(1, tokens) is None
        assert is_kept()
        assert batch.probe(1, other) == 8 * (other[0] != 1)
        assert is_kept() == keeps
        assert batch.admit(1, tokens) is None
        assert batch.refusal == Refusal(4, 3, 0, 8, "kv", None, can_wait=True)
    assert batch.probe(1, tokens, traits=RequestTraits(cache_salt="salt")) == 0
    assert not is_kept()
    batch.release([0])
    assert batch.admit(1, tokens) == 8


# --- what is short ----------------------------------------------------------------------------------------------------


def test_a_refusal_again_counts_hits_that_are_free_by_now() -> None:
    batch = make_batch(make_manager(FULL, num_pages=13))
    batch.admit(0, PROMPT[:8])
    batch.admit(2, [9] * 28)
    tokens = [*PROMPT[:8], *[7] * 8]
    assert batch.admit(1, tokens, num_drafts=16) is None
    assert batch.refusal == Refusal(6, 3, 0, 8, "kv", None, can_wait=True)
    batch.release([0])
    for _ in range(2):
        assert batch.admit(1, tokens, num_drafts=16) is None
        assert batch.refusal == Refusal(8, 5, 0, 8, "kv", None, can_wait=True)
    assert batch.admit(1, tokens) == 8
    assert batch.refusal is None


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize(
    ("specs", "num_needed"), [((FULL, STATE), 5), ((FULL, STATE, STATE), 6), ((WINDOW, STATE, FULL), 8), ((STATE,), 1)]
)
def test_checkpoints_that_are_adopted_need_no_page(specs: Sequence[Any], num_needed: int, is_new: bool) -> None:
    """So that the request is admitted once one page more is free, and not before."""
    batch = make_batch(make_manager(*specs, num_pages=30))
    batch.admit(0, PROMPT[:8])
    batch.take_moves()
    batch.release([0])
    pool, tokens = batch._manager.page_pool, PROMPT[:16]
    taken = pool.get_new_pages(pool.get_num_free_pages() - num_needed)
    for num_reserved in (1, 3, 1):
        assert batch.admit(1, list(tokens) if is_new else tokens, num_reserved_pages=num_reserved) is None
        assert batch.refusal == Refusal(num_needed, num_needed, num_reserved, 8, "kv", None, can_wait=True)
    assert batch.admit(1, tokens) == 8
    assert not batch.take_moves().copies.src.size
    batch.release([1])
    pool.free_pages(taken)


def test_reserved_pages_of_a_shard_are_those_of_the_pool() -> None:
    batch = make_batch(make_manager(FULL, num_pages=16), data_parallel_size=2)
    tokens = [9] * 12
    for _ in range(2):
        assert batch.admit(0, tokens, num_reserved_pages=13, traits=RequestTraits(dp_shard=1)) is None
        assert batch.refusal == Refusal(3, 15, 13, 0, "kv", None, can_wait=False)
    batch.admit(1, PROMPT[:24], traits=RequestTraits(dp_shard=1))
    for _ in range(2):
        assert batch.admit(0, tokens, num_reserved_pages=9, traits=RequestTraits(dp_shard=1)) is None
        assert batch.refusal == Refusal(3, 2, 0, 0, "kv", 1, can_wait=True)
    batch.release([1])
    assert batch.admit(0, tokens, num_reserved_pages=12, traits=RequestTraits(dp_shard=1)) == 0


def test_a_refusal_is_forgotten_after_an_error() -> None:
    batch = make_batch(make_manager(FULL, num_pages=9))
    batch.admit(0, [9] * 20)
    wrong: list[dict[str, Any]] = [
        {"traits": 3}, {"num_tokens": 0}, {"reserve": "all"}, {"num_external_tokens": -1}, {"dp_shard": 0},
        {"num_drafts": -1}, {"row": 0}, {"row": 9}, {"token_ids": []},
    ]  # fmt: skip
    for options in wrong:
        assert batch.admit(1, [7] * 20) is None
        assert batch.refusal == Refusal(5, 3, 0, 0, "kv", None, can_wait=True)
        with pytest.raises((ArgumentError, ArgumentTypeError, RowIndexError), match=next(iter(options))):
            batch.admit(**admission(**{"row": 1, "token_ids": [7] * 20} | options))
        assert batch.refusal is None


def test_loads_that_never_fit_beside_the_rest() -> None:
    """The prefix is in the tier; with the tokens behind it the request is larger than the pool, whatever runs."""
    manager = make_manager(FULL, num_pages=9, host_tier=HostTier(num_pages=40))
    batch = make_batch(manager)
    run_one_by_one(batch, PROMPT[:32], [9] * 32)
    batch.admit(0, [7] * 9)
    with refused(lambda: batch_state(batch), RequestTooLargeError, "row 1 needs 9 pages at once, the pool has 8"):
        batch.admit(1, PROMPT[:36])
    assert batch.refusal is None
    assert batch.admit(1, PROMPT[:32]) is None
    assert batch.refusal == Refusal(8, 5, 0, 28, "kv", None, can_wait=True)
    assert batch.admit(1, PROMPT[:40], num_tokens=8) is None  # 32 tokens would hit, and nothing else gets slots
    assert batch.refusal == Refusal(8, 5, 0, 32, "kv", None, can_wait=True)


def test_loads_are_tried_again_once_they_fit() -> None:
    """Hits that others hold need no page, so a refusal for loads does not count them."""
    manager = make_manager(FULL, num_pages=13, host_tier=HostTier(num_pages=40))
    batch = make_batch(manager)
    run_one_by_one(batch, PROMPT[:40], [9] * 48)
    batch.admit(0, PROMPT[:20])  # loads four pages, of which another row hits
    run_transfers(batch)
    batch.admit(2, [7] * 22, traits=RequestTraits(look_up=False))
    tokens = PROMPT[:36]
    for _ in range(2):
        assert batch.admit(1, tokens) is None
        assert batch.refusal == Refusal(5, 1, 0, 32, "kv", None, can_wait=True)
    batch.release([2])
    assert batch.admit(1, tokens) == 32


@pytest.mark.parametrize("specs", [(FULL,), (FULL, WINDOW), (FULL, STATE), (CHUNK, FULL, STATE)])
@pytest.mark.parametrize("has_tier", [False, True])
def test_a_refused_request_fits_once_that_many_pages_are_free(specs: Sequence[Any], has_tier: bool) -> None:
    """And not with one less. Other pages are held by hand, and given back one by one."""
    counts: Counter[str] = Counter()
    for seed in range(scale(60)):
        rng = Random(f"{seed} {len(specs)} {has_tier}")
        options = {"host_tier": HostTier(num_pages=200)} if has_tier else {}
        manager = make_manager(*specs, num_pages=rng.randint(40, 60), **options)
        batch = make_batch(manager)
        pool, held = manager.page_pool, []
        prompts = [[i] * 8 + rng.choices(range(50), k=40) for i in range(4)]
        for _ in range(60):
            run_transfers(batch)
            batch.take_moves()
            row = rng.randrange(NUM_ROWS)
            if batch.is_admitted[row]:
                batch.release([row])
                continue
            held += pool.get_new_pages(rng.randint(0, pool.get_num_free_pages()))
            tokens = rng.choice(prompts)[: rng.randint(1, 48)]
            options = {"num_drafts": rng.choice((0, 0, 5)), "num_reserved_pages": rng.choice((0, 0, 3))}
            options |= {"reserve": "prompt"} if rng.random() < 0.3 else {"max_num_new_tokens": rng.randint(1, 48)}
            if batch.admit(row, tokens, **admission(**options)) is None:
                refusal = batch.refusal
                num_missing = refusal.num_needed + refusal.num_reserved - refusal.num_free
                assert num_missing > 0, (seed, refusal)
                if num_missing <= len(held):
                    pool.free_pages([held.pop() for _ in range(num_missing - 1)])
                    assert batch.admit(row, tokens, **admission(**options)) is None, (seed, refusal)
                    pool.free_pages([held.pop()])
                    assert batch.admit(row, tokens, **admission(**options)) is not None, (seed, refusal, batch.refusal)
                    counts["fits"] += 1
                    counts["loads"] += batch.take_moves().loads.src.size > 0
            pool.free_pages([held.pop() for _ in range(rng.randint(0, len(held)))])
    assert counts["fits"] > 20
    assert bool(counts["loads"]) == has_tier
