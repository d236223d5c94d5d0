"""Drafts and checkpoints: a step writes states after known tokens, and none among drafts. `test_contents.py` has what steps
read.
"""

from __future__ import annotations

from typing import Any

import pytest
from hybrids import FULL, STATE, WINDOW, make_manager, manager_state, run
from refusing import refused

from pagepool import EngineRequest
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


# --- requests --------------------------------------------------------------------------------------------------------


def test_a_request_gets_new_tokens_by_each_call() -> None:
    manager, request = make_manager(FULL, WINDOW), EngineRequest("a", TOKENS[:21])
    manager.allocate_slots(request, 21)
    held = manager.get_page_ids("a")
    with refused(lambda: manager_state(manager), ArgumentError, "num_new_tokens: got 0, allowed: at least 1"):
        manager.allocate_slots(request, 0, num_lookahead_tokens=1)
    assert manager.allocate_slots(request, 21, num_lookahead_tokens=4) is not None  # a further call for the same step
    assert [ids[:6] for ids in manager.get_page_ids("a")] == list(held)
