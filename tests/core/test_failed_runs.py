"""Steps that fail, and with them all later ones: rows go back, and pages that were not filled lose their entries."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
from admissions import admission
from cpu_time import median_seconds
from hybrids import FULL, batch_state, count_hits
from hybrids import PROMPT as LONG_PROMPT
from hybrids import make_batch as make_rows
from hybrids import make_manager as make_hybrid
from refusing import refused

from pagepool import EngineRequest, RunningBatch
from pagepool.errors import ArgumentError, DoubleFreeError

PROMPT = LONG_PROMPT[:20]  # five full pages

make_manager = partial(make_hybrid, default=(FULL,))


def make_batch(*specs: Any, caches: str = "scheduled", **options: Any) -> RunningBatch:
    return make_rows(make_manager(*specs, caches=caches), **options)


def admit(batch: RunningBatch, row: int, token_ids: list[int], **options: Any) -> Any:
    """Admit a request in a step of its own, and return the step."""
    step = batch.new_step()
    assert batch.admit(row, token_ids, step=step, **admission(**options)) is not None
    return step


def counts_of(batch: RunningBatch, row: int = 0) -> tuple[int, int, int]:
    """Return a row's known and counted tokens, and the positions ahead."""
    return int(batch.num_tokens[row]), int(batch.num_computed_tokens[row]), int(batch.num_ahead_tokens[row])


def fail(batch: RunningBatch, step: Any) -> list[int]:
    """Let a step fail, and return the rows that were released."""
    lost = batch.settle(step, failed=True)
    batch.check()
    assert step.is_settled
    return lost.tolist()


# --- rows that go back ----------------------------------------------------------------------------------------------


SINCE: dict[str, tuple[Callable[[RunningBatch], Any], dict[int, tuple[int, int]]]] = {
    "another step": (lambda batch: batch.step([0], [1]), {0: (9, 8), 1: (8, 7)}),  # which says that the step has run
    "another plan": (lambda batch: (batch.append([0], [1]), batch.plan([0])), {0: (9, 8), 1: (8, 7)}),
    "a token more": (lambda batch: batch.append([0], [1]), {0: (9, 7), 1: (8, 7)}),
    "cut": (lambda batch: batch.trim([0], 6), {0: (6, 6), 1: (8, 7)}),
    "cut and appended": (lambda batch: (batch.trim([0], 7), batch.append([0], [9])), {0: (8, 7), 1: (8, 7)}),
    "moved": (lambda batch: batch.move_row(0, 2), {1: (8, 7), 2: (8, 7)}),
    "moved and back": (lambda batch: (batch.move_row(0, 2), batch.move_row(2, 0)), {0: (8, 7), 1: (8, 7)}),
    "exchanged": (lambda batch: batch.swap_row(0, 3), {1: (8, 7), 3: (8, 7)}),
    "released": (lambda batch: batch.release([0]), {1: (8, 7)}),
    "another request": (lambda batch: (batch.release([0]), batch.admit(0, PROMPT[:8])), {0: (8, 4), 1: (8, 7)}),
}


@pytest.mark.parametrize("what", SINCE)
def test_a_row_that_changed_since(what: str) -> None:
    batch = make_batch(FULL)
    batch.settle(admit(batch, 0, PROMPT[:7]))
    batch.settle(admit(batch, 1, PROMPT[8:15]))
    step = batch.step([1, 0], [8, 9])
    change, counts = SINCE[what]
    change(batch)
    assert fail(batch, step) == []
    for row in range(4):
        assert (row in counts) == batch.is_admitted[row]
        assert counts_of(batch, row) == (*counts.get(row, (0, 0)), 0)
    num_hits = batch.probe(int((~batch.is_admitted).argmax()), [*PROMPT[:7], 9, 1])
    assert num_hits == (8 if what in ("another step", "another plan") else 4)


@pytest.mark.usefixtures("drafter")
def test_events_tell_nothing_of_it() -> None:
    pytest.importorskip("msgspec", reason="events are an extra")
    manager = make_manager()
    manager.enable_events()
    batch = make_rows(manager)
    batch.settle(admit(batch, 0, PROMPT[:7]))
    manager.take_events()
    batch.settle(batch.step([0], PROMPT[7:8]), failed=True)
    assert manager.take_events() == []


# --- pages that were not filled -------------------------------------------------------------------------------------


def test_a_refused_call_leaves_the_step_to_fail() -> None:
    batch = make_batch()
    step = admit(batch, 0, PROMPT)
    batch.release([0])
    with refused(lambda: batch_state(batch), ArgumentError, "row 0"):
        batch.step([0], [1], step=step)
    assert fail(batch, step) == []
    assert batch.probe(0, PROMPT) == 0


# --- a page that somebody else gave back ----------------------------------------------------------------------------


def give_back(batch: RunningBatch, page_ids: Iterable[int]) -> None:
    """Free pages as another caller might by mistake."""
    pool = batch._manager.page_pool
    pool.free_pages([pool.pages[int(page_id)] for page_id in page_ids])


def test_pages_that_somebody_gave_back() -> None:
    batch = make_batch(FULL)
    batch.settle(admit(batch, 0, PROMPT[:4]))
    step = batch.step([0], [1])
    give_back(batch, step.new_page_ids)
    with pytest.raises(DoubleFreeError, match="page 2 of a row"):
        batch.settle(step, failed=True)
    assert batch.is_admitted[0]


# --- requests of the manager ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("drafter")
def test_free_after_the_hashes_went() -> None:
    manager, request = make_manager(), EngineRequest("a", PROMPT)
    manager.allocate_slots(request, 20)
    manager.free_page_hashes(request)
    manager.free(request, num_computed_tokens=4)
    assert count_hits(manager, PROMPT) == 4


@pytest.mark.parametrize("enable_caching", [True, False])
def test_free_of_nothing(enable_caching: bool) -> None:
    manager, request = make_manager(enable_caching=enable_caching), EngineRequest("a", PROMPT)
    manager.free(request, num_computed_tokens=3)
    manager.allocate_slots(request, 20)
    with pytest.raises(ArgumentError):
        manager.free(request, num_computed_tokens=-1)
    assert len(manager.get_page_ids("a")[0]) == 5
    manager.free(request, num_computed_tokens=99)
    assert manager.stats().num_held_pages == 0


# --- entries of rows that are gone ------------------------------------------------------------------------------------


@pytest.mark.parametrize("keeps_result", [False, True])
def test_a_later_step_fails_with_an_earlier_one_though_its_result_is_gone(keeps_result: bool) -> None:
    batch = make_batch(max_steps_ahead=1)
    first = admit(batch, 0, [1, 2, 3, 4, 5])
    results = [admit(batch, 1, PROMPT)]
    batch.release([1])
    results = results[:keeps_result]
    fail(batch, first)
    assert batch.probe(1, [*PROMPT, 7]) == 0


def test_no_rows_are_added_to_a_step_that_failed_with_an_earlier_one() -> None:
    """The row would be in the step twice, and get the tokens of both places."""
    batch = make_batch(max_steps_ahead=1)
    first = admit(batch, 0, PROMPT, num_tokens=4)
    later = batch.new_step()
    batch.plan([0], 4, step=later)
    assert fail(batch, first) == []
    assert counts_of(batch) == (20, 0, 0)
    state = partial(batch_state, batch)
    with refused(state, ArgumentError, "step: got one that failed with an earlier step, allowed: one that did not"):
        batch.plan([0], 4, step=later)
    with refused(state, ArgumentError, "step: got one that failed"):
        batch.admit(1, PROMPT, step=later)
    assert batch.plan([0], 4).num_grown == 1
    assert batch.settle(later, [], 0).tolist() == [-1]
    assert counts_of(batch) == (20, 4, 0)


def test_entries_of_steps_that_cannot_fail_any_more_are_forgotten() -> None:
    """Else each release of a row that has just filled a page would make later calls slower."""
    batch = make_batch()

    def run(number: int) -> None:
        batch.admit(0, [number % 60, number % 61, number % 59])
        batch.step([0], [5])  # its result is dropped, and fills the page
        batch.release([0])

    run(0)
    before = median_seconds(partial(run, 1), 201)
    for number in range(12_000):
        run(number)
    assert median_seconds(partial(run, 1), 201) < 2 * before


def test_a_result_that_is_kept_longer_than_others_forgets_all() -> None:
    """Steps end in any order: what none of them can take back stays cached."""
    batch = make_batch()
    kept = [admit(batch, 0, [*range(9)]), admit(batch, 1, PROMPT)]
    batch.release([0, 1])
    del kept[0]
    fail(batch, kept[0])
    assert batch.probe(1, [*range(9), 7]) == 8
    assert batch.probe(1, [*PROMPT, 7]) == 0
