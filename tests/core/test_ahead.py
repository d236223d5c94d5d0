"""Drafts and checkpoints: a step that computes drafts must not change a state that is kept. States that would be wrong are
refused, or restored. `test_contents.py` has what a step reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hybrids import FULL, STATE, WINDOW, batch_state, keep_every, make_batch, make_manager, manager_state
from refusing import refused

from pagepool import CacheManager, EngineRequest, RunningBatch
from pagepool.errors import ArgumentError, StateAheadError

TOKENS = list(range(100, 164))
# --- what is refused -----------------------------------------------------------------------------------------------


ROWS_AHEAD = [  # tokens admitted, appended, new, ahead, and the checkpoint that is passed
    (7, 1, 1, 0, None),
    (7, 1, 1, 1, 8),
    (7, 2, 2, 7, None),
    (7, 2, 2, 8, 16),
    (8, 1, 1, 0, None),
    (8, 1, 1, 7, None),  # the checkpoint is kept by this call
    (8, 1, 1, 8, 16),
    (9, 7, 7, 0, None),
    (9, 7, 7, 1, 16),
    (9, 8, 8, 7, None),
    (9, 8, 7, 2, 16),
]


@pytest.mark.parametrize(("num_admitted", "num_appended", "num_new", "num_ahead", "passed"), ROWS_AHEAD)
@pytest.mark.parametrize("specs", [(FULL, STATE), (STATE,), (FULL, keep_every(4), STATE), (WINDOW, STATE, FULL)])
def test_lookahead_of_rows_ends_at_checkpoints(
    specs: tuple[Any, ...], num_admitted: int, num_appended: int, num_new: int, num_ahead: int, passed: int | None
) -> None:
    for restores_states in (False, True):
        batch = make_batch(make_manager(*specs, restores_states=restores_states))
        batch.admit(0, [1, 2, 3])
        batch.admit(1, TOKENS[:num_admitted])
        batch.append([1] * num_appended + [0], TOKENS[num_admitted:][: num_appended + 1])
        if passed is None or restores_states:
            assert batch.plan([0, 1], [1, num_new], [0, num_ahead]).num_grown == 2
            continue
        message = f"^row 1: got lookahead to token {min(64, num_admitted + num_new + num_ahead)}, which passes .* {passed}, "
        with refused(lambda: batch_state(batch), StateAheadError, message):  # noqa: B023
            batch.plan([0, 1], [1, num_new], [0, num_ahead])
        assert batch.plan([0, 1], [1, num_new], [0, passed - num_admitted - num_new]).num_grown == 2


@pytest.mark.parametrize(("num_admitted", "num_appended", "num_new", "num_ahead", "passed"), ROWS_AHEAD)
@pytest.mark.parametrize("specs", [(FULL, STATE), (STATE,)])
@pytest.mark.parametrize("are_drafts_new", [False, True])
def test_lookahead_of_requests_ends_at_checkpoints(
    specs: tuple[Any, ...],
    are_drafts_new: bool,
    num_admitted: int,
    num_appended: int,
    num_new: int,
    num_ahead: int,
    passed: int | None,
) -> None:
    """Tokens that the request does not know are drafts, too, whatever the argument that has them."""
    if are_drafts_new and num_new < num_appended:
        return
    for restores_states in (False, True):
        manager = make_manager(*specs, restores_states=restores_states)
        request = EngineRequest("a", TOKENS[:num_admitted])
        manager.allocate_slots(request, num_admitted)
        request.num_computed_tokens = num_admitted
        request.append_output_token_ids(TOKENS[num_admitted:][:num_appended])
        num_drafts = min(num_ahead, 64 - num_admitted - num_new) if are_drafts_new else 0

        def grow(manager: CacheManager = manager, request: EngineRequest = request, num_drafts: int = num_drafts) -> Any:
            return manager.allocate_slots(request, num_new + num_drafts, num_lookahead_tokens=num_ahead - num_drafts)

        if passed is None or restores_states:
            assert grow() is not None
            continue
        message = f"^request 'a': got lookahead to token {num_admitted + num_new + num_ahead}, which passes .* {passed}, "
        with refused(lambda: manager_state(manager), StateAheadError, message):  # noqa: B023
            grow()
        assert manager.allocate_slots(request, num_new) is not None


def test_lookahead_at_admission_ends_at_checkpoints() -> None:
    manager = make_manager()
    first = EngineRequest("first", TOKENS[:17])
    assert manager.allocate_slots(first, 8) is not None
    first.num_computed_tokens = 8
    assert manager.allocate_slots(first, 9) is not None
    manager.take_moves()
    manager.free(first)
    request = EngineRequest("a", TOKENS[:15])
    for num_ahead in (9, 1000):
        with refused(lambda: manager_state(manager), StateAheadError, "passes the checkpoint after 8, "):
            manager.allocate_slots(request, 7, num_lookahead_tokens=num_ahead)
    hits, num_hit_tokens = manager.get_computed_pages(request)
    assert num_hit_tokens == 8
    with refused(
        lambda: manager_state(manager), StateAheadError, "lookahead to token 17, which passes the checkpoint after 16, "
    ):
        manager.allocate_slots(request, 7, 8, hits, 2)
    assert manager.allocate_slots(request, 7, 8, hits, 1) is not None  # behind the checkpoint that was hit


def test_tokens_from_elsewhere_count_for_lookahead() -> None:
    manager, request = make_manager(), EngineRequest("a", TOKENS[:20])
    options: dict[str, Any] = {"num_external_computed_tokens": 15, "delay_cache_pages": True}
    with refused(
        lambda: manager_state(manager), StateAheadError, "lookahead to token 17, which passes the checkpoint after 16, "
    ):
        manager.allocate_slots(request, 0, num_lookahead_tokens=2, **options)
    assert manager.allocate_slots(request, 0, num_lookahead_tokens=1, **options) is not None


def test_lookahead_after_a_set_back_ends_at_checkpoints_that_were_made_before() -> None:
    manager = make_manager(FULL, STATE)
    request = EngineRequest("a", TOKENS[:30])
    for num_tokens in (8, 8, 4):
        assert manager.allocate_slots(request, num_tokens) is not None
        manager.take_moves()
        request.num_computed_tokens += num_tokens
    request.num_computed_tokens = 5  # the engine has restored the state of 5 tokens
    with refused(lambda: manager_state(manager), StateAheadError, "after 8,"):
        manager.allocate_slots(request, 3, num_lookahead_tokens=4)
    assert manager.allocate_slots(request, 2, num_lookahead_tokens=1) is not None


def test_a_request_that_counts_tokens_of_steps_in_flight_may_go_on() -> None:
    """Its computed tokens include one that it does not know, so no checkpoint is made there."""
    manager, request = make_manager(), EngineRequest("a", TOKENS[:7])
    manager.allocate_slots(request, 7)
    for num_computed in range(7, 24):
        request.num_computed_tokens = num_computed
        assert manager.allocate_slots(request, 1) is not None
        manager.take_moves()
        request.append_output_token_ids(TOKENS[num_computed])
    manager.free(request)


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
def test_no_way_leads_behind_a_checkpoint(way: str) -> None:
    """Where rows were cut, moved or forked, the next checkpoint is guarded as before, and may be kept."""
    batch = make_batch(make_manager())
    batch.admit(0, TOKENS[:7])
    ways_behind(batch)[way]()
    batch.append([0], [TOKENS[7]])
    with refused(lambda: batch_state(batch), StateAheadError):
        batch.plan([0], 1, 1)
    batch.plan([0], 1)
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
