"""Admission to rows of a running batch: slots for drafts, reserved prompts, and rows that were used before. A free row keeps
its hashes: a wrong one would hit too much, or too little.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

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
    make_batch,
    make_manager,
)
from refusing import refused
from settings import scale

from pagepool import (
    CacheGroupSpec,
    CacheManager,
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


# --- slots for drafts -------------------------------------------------------------------------------------------------


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


# --- reserved prompts -------------------------------------------------------------------------------------------------


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


# --- what admission would hit -----------------------------------------------------------------------------------------


def run_transfers(batch: RunningBatch) -> None:
    if number := batch.take_moves().number:
        batch._manager.complete(number)


def run_one_by_one(batch: RunningBatch, *prompts: list[int]) -> None:
    """Cache prompts one after another, which sends pages of the first ones to the tier."""
    for tokens in prompts:
        batch.admit(0, tokens)
        batch.release([0])
        run_transfers(batch)


def test_a_probe_keeps_a_refusal_that_it_does_not_change() -> None:
    batch = make_batch(make_manager(FULL, num_pages=9))
    batch.admit(0, PROMPT[:20])
    tokens = [*PROMPT[:8], *[9] * 16]
    options = None, None, None, None, True, 0, None, 0

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
