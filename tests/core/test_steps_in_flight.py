"""Steps in flight: planned ahead and settled, with exact numbers; and calls that are refused and change nothing.

`test_runs.py` and `test_differential.py` compare random work with models, and `test_contents.py` reads what was computed.
`test_failed_runs.py` has steps that fail.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import numpy as np
from admissions import admission
from hybrids import FULL, MAX_MODEL_LEN, NUM_ROWS, PAGE_SIZE, PROMPT, batch_state, make_manager
from refusing import refused

from pagepool import (
    CacheGroupSpec,
    CacheManager,
    HostTier,
    MambaSpec,
    MultiGroupPageTable,
    RequestTraits,
    RunningBatch,
    StepInputs,
)
from pagepool.errors import (
    ArgumentError,
    RequestTooLargeError,
)

KEPT = MambaSpec(PAGE_SIZE, ((1, 1),), "float16", checkpoint_interval=16)


def make_batch(*specs: Any, num_pages: int = 60, tier: int = 0, caches: Any = "scheduled", **options: Any) -> RunningBatch:
    """Return a batch that plans a step ahead."""
    settings: dict[str, Any] = {"host_tier": HostTier(tier) if tier else None, "caches": caches}
    manager = make_manager(*specs, default=(FULL,), num_pages=num_pages, **settings)
    sizes = [PAGE_SIZE] * len(manager.kv_cache_groups)
    tables = MultiGroupPageTable(NUM_ROWS, MAX_MODEL_LEN, MAX_MODEL_LEN, sizes)
    return RunningBatch(manager, tables, **{"max_steps_ahead": 1} | options)


def counts_of(batch: RunningBatch, row: int = 0) -> tuple[int, int, int]:
    """Return a row's known and counted tokens, and the positions ahead."""
    return int(batch.num_tokens[row]), int(batch.num_computed_tokens[row]), int(batch.num_ahead_tokens[row])


def flight_state(batch: RunningBatch) -> tuple[Any, ...]:
    return batch_state(batch), batch.num_ahead_tokens.tolist(), batch.stays.tolist()


def start(batch: RunningBatch, num_tokens: int = 6, row: int = 0, **options: Any) -> Any:
    """Admit a prompt in a step of its own, and return the step."""
    step = batch.new_step()
    assert batch.admit(row, PROMPT[:num_tokens], step=step, **admission(**options)) is not None
    return step


# --- numbers -----------------------------------------------------------------------------------------------------------


def test_steps_go_around_the_ring() -> None:
    """The ring of a row's launches has place for as many as may be in flight."""
    for max_steps_ahead in (1, 2, 3, 7):
        batch = make_batch(max_steps_ahead=max_steps_ahead)
        steps = [start(batch), *(batch.plan([0]) for _ in range(max_steps_ahead))]
        for token in range(30):
            assert counts_of(batch) == (6 + token, 6 + token, max_steps_ahead)
            message = f"allowed: 1 to {max_steps_ahead}, which is max_steps_ahead"
            with refused(lambda: flight_state(batch), ArgumentError, message):  # noqa: B023
                batch.plan([0])
            assert batch.settle(steps.pop(0), [token]).tolist() == [0]
            steps.append(batch.plan([0]))
        batch.check()


# --- tokens that the host tells ----------------------------------------------------------------------------------------------


def test_step_settles_the_last_step_and_plans_the_next() -> None:
    """Also where steps may be planned ahead: then the row has one step in flight."""
    for max_steps_ahead in (0, 1, 2):
        batch = make_batch(max_steps_ahead=max_steps_ahead)
        first = start(batch, num_drafts=2)
        assert counts_of(batch) == (6, 6, 2)
        second = batch.step([0], [50])  # both drafts are rejected
        assert counts_of(batch) == (7, 7, 0)
        assert batch.settle(first, [51]).tolist() == [-1]  # its token is known
        third = batch.step([0], [52])
        assert counts_of(batch) == (8, 8, 0)
        assert batch.admit(1, [*PROMPT[:6], 50, 52, 1]) == 8
        assert batch.settle(second).tolist() == [-1]
        assert batch.settle(third, [53]).tolist() == [0]
        with refused(lambda: flight_state(batch), ArgumentError, "got a token behind 1 known ones that are not computed"):  # noqa: B023
            batch.step([0], [54])
        batch.plan([0])
        batch.step([0], [54])
        assert counts_of(batch) == (10, 10, 0)
        batch.check()


def test_tokens_of_rows_without_room_and_behind_them_are_taken_back() -> None:
    """Row 0 gets no page. Row 2, which needs none, stays in the step before."""
    batch = make_batch(num_pages=7, max_steps_ahead=0)
    for row, num_tokens in enumerate((7, 5, 5)):
        start(batch, num_tokens, row, look_up=False)
    first = batch.step([1, 0, 2], [50, 51, 52])
    assert batch.step([1, 0, 2], [53, 54, 55]).num_grown == 1
    assert [counts_of(batch, row) for row in range(3)] == [(8, 8, 0), (7, 7, 0), (6, 6, 0)]
    assert batch.settle(first).tolist() == [-1, 0, 2]
    batch.check()


def test_a_row_without_room_is_not_planned() -> None:
    batch = make_batch(num_pages=6)
    for row in range(2):
        start(batch, 8, row, look_up=False)
    assert batch.plan([0, 1]).num_grown == 1
    assert [counts_of(batch, row) for row in range(2)] == [(8, 8, 1), (8, 8, 0)]
    batch.release([0])
    assert batch.plan([1]).num_grown == 1
    batch.check()


def test_a_row_that_is_in_a_step_twice_gets_a_token_once() -> None:
    """A later step that was settled has ended the row's first part of the step, so the row could join it again."""
    batch = make_batch()
    batch.settle(start(batch), [50])
    early = batch.new_step()
    batch.plan([0], step=early)
    batch.settle(batch.step([0], [51]), [52])
    batch.plan([0], step=early)
    assert batch.settle(early, [53, 54]).tolist() == [0, -1]
    assert counts_of(batch) == (10, 9, 0)
    batch.check()


def test_a_step_has_the_rows_of_all_its_calls_in_order() -> None:
    batch = make_batch()
    first = batch.new_step()
    assert (first.rows.tolist(), len(first), first.num_grown, first.refusal) == ([], 0, 0, None)
    batch.admit(2, PROMPT[:9], max_num_new_tokens=4, step=first)
    batch.admit(0, PROMPT[20:25], step=first)
    assert first.rows.tolist() == [2, 0]
    second = batch.new_step()
    assert batch.plan([0], step=second) is second
    assert batch.plan([2], 5, step=second) is second
    assert (second.rows.tolist(), second.num_grown) == ([0, 2], 1)
    rows = second.rows
    rows[:] = 3
    assert second.rows.tolist() == [0, 2]
    assert batch.settle(first, [5], [0, 1]).tolist() == [2, 0]
    assert batch.settle(second, [6, 7], [1, 1]).tolist() == [0, 2]
    assert (counts_of(batch, 0), counts_of(batch, 2)) == ((7, 6, 0), (10, 9, 0))


def test_steps_without_rows_end() -> None:
    for max_steps_ahead in (0, 1):
        batch = make_batch(max_steps_ahead=max_steps_ahead)
        for arguments in ((), ([],), ([], []), (None, [])):
            empty = batch.new_step()
            batch.plan([], step=empty)
            for step in (empty, batch.step([], []), batch.new_step()):
                assert batch.settle(step, *arguments).tolist() == []
            for step in (batch.plan([]), batch.new_step()):
                assert batch.settle(step, failed=True).tolist() == []


def test_the_tokens_of_an_earlier_step_come_first() -> None:
    batch = make_batch()
    first = start(batch)
    second = batch.plan([0])
    with refused(lambda: flight_state(batch), ArgumentError, "row 0"):
        batch.settle(second, [8])
    batch.settle(first, [7])
    assert batch.settle(second, [8]).tolist() == [0]


def test_tokens_go_to_the_stay_of_a_step_wherever_its_row_is() -> None:
    batch = make_batch()
    first = start(batch)
    second = start(batch, row=1)
    batch.move_row(0, 2)
    batch.swap_row(1, 2)
    assert batch.settle(first, [7]).tolist() == [1]
    assert batch.settle(second, [8]).tolist() == [2]
    assert [counts_of(batch, row) for row in (1, 2)] == [(7, 6, 0)] * 2
    batch.check()


def test_computed_pages_stay_when_a_row_ends() -> None:
    batch = make_batch(caches="computed")
    first = start(batch, 12, max_num_new_tokens=8)
    second = batch.plan([0], 4)
    batch.settle(first)
    batch.release([0])
    assert batch.admit(0, PROMPT[:20]) == 8
    batch.settle(second)
    batch.check()


# --- stays ---------------------------------------------------------------------------------------------------------------


def test_stays_are_numbers_of_admissions() -> None:
    batch = make_batch()
    assert (batch.stays.dtype, batch.num_ahead_tokens.dtype) == (np.int64, np.int32)
    assert batch.stays.tolist() == [0] * NUM_ROWS
    batch.admit(0, PROMPT[:5])
    batch.admit(1, PROMPT[:5])
    first, second = batch.stays[:2].tolist()
    assert 0 < first != second > 0
    batch.move_row(0, 3)
    batch.swap_row(1, 3)
    assert batch.stays.tolist() == [0, first, 0, second]
    batch.fork(1, [0])
    assert batch.stays[0] not in (0, first, second)
    batch.release([1])
    assert batch.stays[1] == 0
    batch.admit(1, PROMPT[:5])
    assert batch.stays[1] not in (0, first, second, batch.stays[0])
    for array in (batch.stays, batch.num_ahead_tokens):
        assert not array.flags.writeable


# --- what is refused -------------------------------------------------------------------------------------------------------


def test_a_row_that_no_pool_can_hold_is_too_large() -> None:
    batch = make_batch(num_pages=3)
    start(batch, 8)
    with refused(lambda: flight_state(batch), RequestTooLargeError):
        batch.plan([0])


def test_steps_ahead_write_no_state_among_drafts() -> None:
    groups = [CacheGroupSpec(FULL), CacheGroupSpec(KEPT, pool="states")]
    manager = CacheManager({"kv": 60, "states": 12}, groups, MAX_MODEL_LEN)
    tables = MultiGroupPageTable(NUM_ROWS, MAX_MODEL_LEN, MAX_MODEL_LEN, [PAGE_SIZE] * 2)
    batch = RunningBatch(manager, tables, max_steps_ahead=1)
    step = start(batch, 15, resume_at=[16])
    batch.admit(1, PROMPT[20:33], max_num_new_tokens=12, step=step, traits=RequestTraits(resume_at=[16]))
    assert len(batch.take_moves().writes) == 0
    batch.plan([0], 1, 1)
    assert batch.take_moves().writes.num_tokens.tolist() == [16]  # after the token in flight
    batch.plan([1], 1, 3, step=batch.new_step())
    batch.admit(2, PROMPT[40:55], num_drafts=3, step=batch.new_step())
    assert len(batch.take_moves().writes) == 0
    step = start(batch, 14, 3, num_drafts=1, resume_at=[16], look_up=False)
    batch.plan([3])  # the place of its token depends on the draft
    assert len(batch.take_moves().writes) == 0
    batch.settle(step, [7, 8], [2])
    batch.plan([3])
    assert len(batch.take_moves().writes) == 0
    batch.check()


def test_a_set_whose_step_is_in_flight_is_not_written_again() -> None:
    batch = make_batch()
    inputs = StepInputs(batch, num_tokens=16, num_reqs=4, fields=["token_ids", "sources"], depth=2)
    batch.settle(start(batch, row=3), [1])  # an engine that never settles steps keeps track itself
    first = start(batch)
    batch.inputs(first, out=inputs)
    second = batch.plan([0])
    batch.inputs(second, out=inputs)
    assert inputs.sources.tolist()[:1] == [0]
    batch.admit(1, PROMPT[20:25], step=(third := batch.new_step()))
    kept = inputs.token_ids.tolist()
    with refused(lambda: flight_state(batch), ArgumentError):
        batch.inputs(third, out=inputs)
    assert inputs.token_ids.tolist() == kept
    batch.settle(first, [1])
    batch.inputs(third, out=inputs)
    assert (inputs.token_ids[:5].tolist(), inputs.sources.tolist()[:1]) == (PROMPT[20:25], [-1])


class Filling:
    """A batch with inputs of several sizes, of which only some list sources."""

    def __init__(self, **options: Any) -> None:
        self.batch = make_batch(**{"max_steps_ahead": 2} | options)
        self.big, self.small = self.make_inputs(64), self.make_inputs(8, order="decodes")

    def make_inputs(self, num_tokens: int, fields: Sequence[str] = ("token_ids", "sources"), **options: Any) -> StepInputs:
        return StepInputs(self.batch, num_tokens=num_tokens, num_reqs=4, fields=fields, **{"depth": 4} | options)

    def start(self, *lengths: int) -> Any:
        step = self.batch.new_step()
        for row, length in enumerate(lengths):
            self.batch.admit(row, PROMPT[10 * row : 10 * row + length], step=step)
        return step

    def fill(self, out: StepInputs, step: Any = None, **rows: Any) -> list[int]:
        self.batch.inputs(step, out=out, **rows)
        return out.sources[: len(step or rows["rows"])].tolist()

    def refuses(self, out: StepInputs, step: Any) -> bool:
        with refused(lambda: flight_state(self.batch), ArgumentError, "got a first token that is sampled by another step"):
            self.batch.inputs(step, out=out)
        return True


def test_sources_are_places_in_the_inputs_filled_last_of_any_size() -> None:
    it = Filling()
    first = it.start(3, 1, 2)
    assert it.fill(it.big, first) == [-1, -1, -1]
    second = it.batch.plan([2, 1, 0])
    assert it.fill(it.small, second) == [2, 1, 0]
    assert it.fill(it.small, second) == it.fill(it.big, second) == [2, 1, 0]  # again, in other inputs too
    third = it.batch.plan([0, 1, 2])
    assert it.fill(it.big, third) == [2, 1, 0]
    it.batch.settle(first, [1, 2, 3])
    it.batch.settle(third, failed=True)
    third = it.batch.plan([1, 2, 0])
    assert it.fill(it.small, third) == [1, 0, 2]
    it.batch.swap_row(0, 3)
    it.batch.settle(second, [4, 5, 6])
    assert it.fill(it.big, it.batch.plan([3, 1, 2])) == [2, 0, 1]


def test_sources_follow_the_order_of_the_inputs_filled_last() -> None:
    """The second row of the step comes first where decodes do."""
    for out, places in (("big", [0, 1]), ("small", [1, 0])):
        it = Filling()
        first = it.start(3, 1)
        it.fill(it.big, first)
        it.fill(getattr(it, out), first)
        assert it.fill(it.big, it.batch.plan([0, 1])) == places


def test_sources_are_in_the_order_of_their_rows() -> None:
    """The first row of the step is a chunk, and comes last where decodes come first."""
    it = Filling()
    first = it.batch.new_step()
    it.batch.admit(0, PROMPT[:9], max_num_new_tokens=4, step=first)
    it.batch.admit(1, PROMPT[10:12], step=first)
    it.fill(it.big, first)
    assert it.fill(it.make_inputs(64, order="decodes"), it.batch.plan([0, 1], [5, 1])) == [1, -1]


def test_a_step_whose_inputs_were_not_filled_samples_for_no_source() -> None:
    """The row was in the inputs filled last, but these are of an older step of it."""
    it = Filling()
    it.fill(it.big, it.start(3, 2))
    second = it.batch.plan([0])
    third = it.batch.plan([0])
    assert it.refuses(it.big, third)
    assert it.refuses(it.small, third)
    it.batch.settle(third, failed=True)
    assert it.fill(it.small, second) == [0]
    assert it.fill(it.big, it.batch.plan([0])) == [0]


def test_inputs_without_sources_and_inputs_that_are_gone_count_too() -> None:
    it = Filling()
    plain = it.make_inputs(64, ["token_ids"])
    it.batch.inputs(it.start(3, 1), out=it.big)
    second = it.batch.plan([1, 0])
    it.batch.inputs(second, out=plain)
    del plain
    third = it.batch.plan([0, 1])
    del it.big
    gc.collect()
    assert it.fill(it.small, third) == [1, 0]
    it = Filling()
    it.fill(it.big, it.start(3, 1))
    it.batch.inputs(it.batch.plan([1]), out=it.make_inputs(64, ["token_ids"]))
    assert it.refuses(it.small, it.batch.plan([0, 1]))


def test_sources_in_inputs_of_named_rows() -> None:
    it = Filling()
    it.start(3, 2)
    assert it.fill(it.small, rows=[1, 0], starts=[0, 0], stops=[2, 3]) == [-1, -1]
    it.batch.plan([0, 1])
    assert it.fill(it.big, rows=[0, 1], starts=[3, 2], stops=[4, 3]) == [1, 0]
    third = it.batch.plan([1])
    assert it.fill(it.small, third) == [1]
    with refused(lambda: flight_state(it.batch), ArgumentError, "got a first token that is sampled by another step"):
        it.fill(it.small, rows=[1], starts=[3], stops=[4])  # of several steps in flight the batch cannot know which one
    chunk = Filling()
    chunk.start(3)
    chunk.fill(chunk.big, rows=[0], starts=[0], stops=[2])  # which samples nothing
    assert chunk.refuses(chunk.small, chunk.batch.plan([0]))


def test_sources_without_steps_ahead_are_those_of_named_rows() -> None:
    it = Filling(max_steps_ahead=0)
    it.fill(it.big, it.start(3, 1))
    assert it.fill(it.small, rows=[1, 0], starts=[1, 3], stops=[2, 4]) == [1, 0]
    for tokens in ([7, 8], [9, 10]):  # the inputs of the second step are not filled
        it.batch.step([0, 1], tokens)
    with refused(lambda: flight_state(it.batch), ArgumentError, "got a first token that is sampled by another step"):
        it.fill(it.big, rows=[1], starts=[3], stops=[4])


def test_tokens_that_were_cut_are_no_sources() -> None:
    it = Filling(max_steps_ahead=0)
    it.fill(it.big, it.start(3))
    it.batch.trim([0], 2)
    it.batch.append([0], [9])
    it.batch.plan([0], 1)
    with refused(lambda: flight_state(it.batch), ArgumentError, "got a first token that is sampled by another step"):
        it.fill(it.big, rows=[0], starts=[3], stops=[4])
