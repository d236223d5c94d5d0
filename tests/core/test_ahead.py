"""Drafts and checkpoints: a step writes states after known tokens, and none among drafts. `test_contents.py` has what steps
read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hybrids import FULL, STATE, WINDOW, count_hits, keep_every, make_batch, make_manager, manager_state, run, start
from refusing import refused

from pagepool import CacheManager, EngineRequest, RequestTraits, RunningBatch
from pagepool.errors import ArgumentError

TOKENS = list(range(100, 164))
# --- boundaries that drafts pass -------------------------------------------------------------------------------------


AHEAD = [  # tokens admitted, appended, new, and ahead
    (7, 1, 1, 0),
    (7, 1, 1, 1),
    (7, 2, 2, 8),
    (8, 1, 1, 7),
    (8, 1, 1, 8),
    (9, 7, 7, 0),
    (9, 7, 7, 1),
    (9, 8, 7, 2),
    (9, 8, 8, 64),
]


def find_passed(num_admitted: int, num_new: int) -> set[int]:
    """Return the boundaries among the tokens that a step computes, without drafts."""
    return {end for end in (8, 16) if num_admitted < end <= num_admitted + num_new}


@pytest.mark.parametrize(("num_admitted", "num_appended", "num_new", "num_ahead"), AHEAD)
@pytest.mark.parametrize("specs", [(FULL, STATE), (STATE,), (FULL, keep_every(4), STATE), (WINDOW, STATE, FULL)])
def test_a_row_writes_no_state_among_drafts(
    specs: tuple[Any, ...], num_admitted: int, num_appended: int, num_new: int, num_ahead: int
) -> None:
    batch = make_batch(make_manager(*specs))
    batch.admit(0, [1, 2, 3])
    batch.admit(1, TOKENS[:num_admitted], traits=RequestTraits(resume_at=(8, 16)))
    batch.take_moves()
    batch.append([1] * num_appended + [0], TOKENS[num_admitted:][: num_appended + 1])
    assert batch.plan([0, 1], [1, num_new], [0, num_ahead]).num_grown == 2
    assert {*batch.take_moves().writes.num_tokens.tolist()} == find_passed(num_admitted, num_new)
    batch.check()


@pytest.mark.parametrize(("num_admitted", "num_appended", "num_new", "num_ahead"), AHEAD)
@pytest.mark.parametrize("specs", [(FULL, STATE), (STATE,)])
@pytest.mark.parametrize("are_drafts_new", [False, True])
def test_a_request_writes_no_state_among_drafts(
    specs: tuple[Any, ...], are_drafts_new: bool, num_admitted: int, num_appended: int, num_new: int, num_ahead: int
) -> None:
    """Tokens that the request does not know are drafts, too, whatever the argument that has them."""
    if are_drafts_new and num_new < num_appended:
        return
    manager = make_manager(*specs)
    request = EngineRequest("a", TOKENS[:num_admitted], resume_at=(8, 16))
    assert run(manager, request, num_admitted) is not None
    request.append_output_token_ids(TOKENS[num_admitted:][:num_appended])
    num_drafts = min(num_ahead, 64 - num_admitted - num_new) if are_drafts_new else 0
    assert manager.allocate_slots(request, num_new + num_drafts, num_lookahead_tokens=num_ahead - num_drafts) is not None
    assert {*manager.take_moves().writes.num_tokens.tolist()} == find_passed(num_admitted, num_new)
    manager.check()


@pytest.mark.parametrize(("num_known", "num_hits", "places"), [(15, 8, []), (17, 8, [16]), (17, 0, [16])])
def test_lookahead_at_admission_writes_no_state(num_known: int, num_hits: int, places: list[int]) -> None:
    manager = make_manager()
    manager.free(start(manager, "first", TOKENS[:9]))
    request = EngineRequest("a", TOKENS[:num_known])
    hits = manager.get_computed_pages(request) if num_hits else (None, 0)
    assert hits[1] == num_hits
    assert manager.allocate_slots(request, num_known - num_hits, num_hits, hits[0], 1000) is not None
    assert manager.take_moves().writes.num_tokens.tolist() == places


def test_a_request_that_was_set_back_writes_no_state_that_is_cached() -> None:
    manager = make_manager(FULL, STATE)
    request = EngineRequest("a", TOKENS[:30])
    for num_tokens in (8, 8, 4):
        assert run(manager, request, num_tokens) is not None
    request.num_computed_tokens = 5  # the engine has restored the state of 5 tokens
    assert manager.allocate_slots(request, 25, num_lookahead_tokens=4) is not None
    assert manager.take_moves().writes.num_tokens.tolist() == [24]


def test_a_request_that_counts_tokens_of_steps_in_flight_may_go_on() -> None:
    """Its steps compute a token that it does not know, so they write no state after it."""
    manager, request = make_manager(), EngineRequest("a", TOKENS[:7], resume_at=[16])
    manager.allocate_slots(request, 7)
    for num_computed in range(7, 24):
        request.num_computed_tokens = num_computed
        assert manager.allocate_slots(request, 1) is not None
        assert len(manager.take_moves()) == 0
        request.append_output_token_ids(TOKENS[num_computed])
    manager.free(request)
    assert count_hits(manager, TOKENS) == 0


@pytest.mark.parametrize("specs", [(FULL,), (FULL, WINDOW), (FULL, keep_every(None))])
@pytest.mark.parametrize("enable_caching", [True, False])
def test_models_without_checkpoints_may_look_ahead_anywhere(specs: tuple[Any, ...], enable_caching: bool) -> None:
    look_ahead_anywhere(lambda: make_manager(*specs, enable_caching=enable_caching))


def test_without_caching_no_state_is_kept() -> None:
    look_ahead_anywhere(lambda: make_manager(FULL, STATE, enable_caching=False))


def look_ahead_anywhere(make: Callable[[], CacheManager]) -> None:
    batch, manager = make_batch(make()), make()
    batch.admit(0, TOKENS[:7])
    batch.append([0], [TOKENS[7]])
    assert batch.plan([0], 1, 30).num_grown == 1
    request = EngineRequest("a", TOKENS[:7])
    assert manager.allocate_slots(request, 7, num_lookahead_tokens=30) is not None


def ways_behind(batch: RunningBatch) -> dict[str, Callable[[], Any]]:
    return {
        "cut": lambda: batch.trim([0], 7),
        "moved": lambda: (batch.move_row(0, 2), batch.move_row(2, 0)),
        "forked": lambda: (batch.fork(0, [1]), batch.take_moves().copies, batch.release([0]), batch.move_row(1, 0)),
    }


@pytest.mark.parametrize("way", ways_behind(make_batch(make_manager())))
def test_no_way_leads_behind_a_boundary(way: str) -> None:
    """Where rows were cut, moved or forked, the state at the next boundary is written as before, with drafts behind it."""
    batch = make_batch(make_manager())
    batch.admit(0, TOKENS[:7], traits=RequestTraits(resume_at=[8]))
    ways_behind(batch)[way]()
    batch.append([0], [TOKENS[7]])
    batch.plan([0], 1, 1)
    assert batch.take_moves().writes.num_tokens.tolist() == [8]
    batch.release([0])
    assert batch.admit(3, [*TOKENS[:8], 1]) == 8


# --- requests --------------------------------------------------------------------------------------------------------


def test_a_request_gets_new_tokens_by_each_call() -> None:
    manager, request = make_manager(FULL, WINDOW), EngineRequest("a", TOKENS[:21])
    manager.allocate_slots(request, 21)
    held = manager.get_page_ids("a")
    with refused(lambda: manager_state(manager), ArgumentError, "num_new_tokens: got 0, allowed: at least 1"):
        manager.allocate_slots(request, 0, num_lookahead_tokens=1)
    assert manager.allocate_slots(request, 21, num_lookahead_tokens=4) is not None  # a further call for the same step
    assert [ids[:6] for ids in manager.get_page_ids("a")] == list(held)
