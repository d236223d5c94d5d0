"""Admission to rows of a running batch: slots for drafts, and rows that were used before. A free row keeps its hashes: a wrong
one would hit too much, or too little.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
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

from pagepool import CacheGroupSpec, CacheManager, MambaSpec, MultiGroupPageTable, RunningBatch
from pagepool.errors import ArgumentError, ArgumentTypeError, StateAheadError

WRITTEN = MambaSpec(4, ((1, 1),), "float16", checkpoint_interval=8, checkpoints="ends")


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
    num_hits = batch.admit(0, PROMPT[:20], num_lookahead_tokens=num_ahead, **options)
    assert plain.admit(0, PROMPT[:20], **options) == num_hits
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
        assert batch.grow([0], 0, num_ahead).new_page_ids.size == 0
    batch.release([0])
    batch.check()


ADMISSIONS_AHEAD = [  # tokens hit, admitted, ahead, and the checkpoint that is passed
    (0, 7, 1, None),
    (0, 7, 2, 8),
    (0, 8, 0, None),
    (0, 8, 1, 8),
    (0, 9, 7, None),
    (0, 9, 8, 16),
    (8, 9, 7, None),
    (8, 9, 8, 16),
    (8, 15, 1, None),
    (8, 15, 64, 16),
    (8, 16, 1, 16),
]


@pytest.mark.parametrize(("num_hits", "num_admitted", "num_ahead", "passed"), ADMISSIONS_AHEAD)
@pytest.mark.parametrize("specs", [(FULL, STATE), (STATE,), (FULL, keep_every(4), STATE), (WINDOW, STATE, FULL)])
def test_drafts_at_admission_end_at_checkpoints(
    specs: Sequence[Any], num_hits: int, num_admitted: int, num_ahead: int, passed: int | None
) -> None:
    for restores_states in (False, True):
        batch = make_batch(make_manager(*specs), restores_states=restores_states)
        if num_hits:
            batch.admit(0, PROMPT[:8])
            batch.release([0])
        options = {"num_tokens": num_admitted, "num_lookahead_tokens": num_ahead}
        if passed is not None and not restores_states:
            message = f"^row 1: lookahead to token {min(MAX_MODEL_LEN, num_admitted + num_ahead)} passes .* after {passed}, "
            with refused(lambda: batch_state(batch), StateAheadError, message):  # noqa: B023
                batch.admit(1, PROMPT[:20], **options)
            options["num_lookahead_tokens"] = passed - num_admitted
        assert batch.admit(1, PROMPT[:20], **options) == num_hits
        take(batch)
        assert batch.num_computed_tokens[1] == num_admitted
        batch.release([1])
        batch.check()


def test_a_refused_request_is_refused_with_drafts_only_while_it_lacks_pages() -> None:
    batch = make_batch(make_manager(FULL, num_pages=9))
    batch.admit(0, PROMPT[20:32])
    for _ in range(2):
        assert batch.admit(1, PROMPT[:19], num_lookahead_tokens=2) is None
        assert batch.refusal is not None
        assert (batch.refusal.num_needed, batch.refusal.num_free) == (6, 5)
    assert batch.admit(1, PROMPT[:19], num_lookahead_tokens=1) == 0
    batch.release([1])
    assert batch.admit(1, PROMPT[:19], num_lookahead_tokens=13) is None
    batch.release([0])
    assert batch.admit(1, PROMPT[:19], num_lookahead_tokens=13) == 16


@pytest.mark.parametrize("restores_states", [False, True])
def test_a_refused_request_does_not_pass_a_checkpoint(restores_states: bool) -> None:
    batch = make_batch(make_manager(num_pages=9), restores_states=restores_states)
    batch.admit(0, PROMPT[20:40])
    tokens = PROMPT[:16]
    assert batch.admit(1, tokens) is None
    options = {"num_tokens": 9, "num_lookahead_tokens": 7}
    assert batch.admit(1, tokens, **options) is None
    options["num_tokens"] = 8
    if restores_states:
        assert batch.admit(1, tokens, **options) is None
    else:
        with refused(lambda: batch_state(batch), StateAheadError, "lookahead to token 15 passes the checkpoint after 8, "):
            batch.admit(1, tokens, **options)


@pytest.mark.parametrize("writes", ["ends", "anywhere"])
def test_drafts_of_a_step_planned_ahead_are_planned(writes: str) -> None:
    """The step computes them, so that states are written there, and no fork sees the state in flight."""
    tokens = PROMPT[:7]
    for num_ahead in (0, 1, 5, 40):
        batch = make_written_batch(max_steps_ahead=1, writes=writes)
        batch.admit(0, tokens, resume_at=[], num_lookahead_tokens=num_ahead)
        batch.take_writes()
        if num_ahead:
            with pytest.raises(StateAheadError, match=f"up to {min(64, 7 + num_ahead)}; "):
                batch.fork(0, [1])
        else:
            batch.fork(0, [1])
        batch.release([0])


def test_drafts_of_awaited_tokens_are_not_planned() -> None:
    batch = make_written_batch(max_steps_ahead=1)
    batch.admit(0, PROMPT[:20], num_external_tokens=19, num_lookahead_tokens=9)
    assert [len(ids) for ids in batch.get_page_ids(0)] == [7, 1]
    batch.take_writes()
    batch.commit_external(0, 19)
    batch.fork(0, [1])
    take(batch)
    batch.grow([0], 1, 3)
    with pytest.raises(StateAheadError):
        batch.fork(0, [2])


@pytest.mark.parametrize(("value", "error"), [(-1, ArgumentError), (2**70, ArgumentError), (1.0, ArgumentTypeError)])
def test_wrong_numbers_of_drafts(value: Any, error: type[Exception]) -> None:
    batch = make_batch(make_manager(FULL))
    with refused(lambda: batch_state(batch), error, "num_lookahead_tokens"):
        batch.admit(0, PROMPT[:8], num_lookahead_tokens=value)
    assert batch.admit(0, PROMPT[:8], num_lookahead_tokens=2**30) == 0
    assert len(batch.get_page_ids(0)[0]) == MAX_MODEL_LEN // 4
