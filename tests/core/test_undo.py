"""Steps that were scheduled and did not run: their cached pages are forgotten, and rows go back.

Random work against the oracle undoes steps too: see `BatchWorkload.undo`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
from hybrids import CHUNK, FULL, WINDOW, batch_state, count_hits, keep_every
from hybrids import PROMPT as LONG_PROMPT
from hybrids import make_batch as make_rows
from hybrids import make_manager as make_hybrid
from refusing import refused

from pagepool import EngineRequest, RunningBatch
from pagepool.errors import ArgumentError, DoubleFreeError

pytestmark = pytest.mark.usefixtures("drafter")

STATE = keep_every(None)
PROMPT = LONG_PROMPT[:20]  # five full pages


make_manager = partial(make_hybrid, default=(FULL,))


def make_batch(*specs: Any) -> RunningBatch:
    return make_rows(make_manager(*specs))


def give_back(batch: RunningBatch, page_ids: Iterable[int]) -> None:
    """Free pages as another caller might by mistake."""
    pool = batch._manager.page_pool
    pool.free_pages([pool.pages[int(page_id)] for page_id in page_ids])


# --- undoing a batch's call -------------------------------------------------------------------------------------


def test_events_tell_nothing_of_it() -> None:
    pytest.importorskip("msgspec", reason="events are an extra")
    manager = make_manager()
    manager.enable_events()
    batch = make_rows(manager)
    batch.admit(0, PROMPT[:7])
    manager.take_events()
    batch.undo(batch.step([0], PROMPT[7:8]))
    assert manager.take_events() == []


# --- calls that cannot be undone --------------------------------------------------------------------------------

SINCE: dict[str, Callable[[RunningBatch], Any]] = {
    "another step": lambda batch: batch.step([0], [1]),
    "another grow": lambda batch: (batch.append([0], [1]), batch.grow([0])),
    "a token more": lambda batch: batch.append([0], [1]),
    "cut": lambda batch: batch.trim([0], 6),
    "cut and appended": lambda batch: (batch.trim([0], 7), batch.append([0], [9])),
    "moved": lambda batch: batch.move_row(0, 2),
    "moved and back": lambda batch: (batch.move_row(0, 2), batch.move_row(2, 0)),
    "exchanged": lambda batch: batch.swap_row(0, 1),
    "released": lambda batch: batch.release([0]),
    "another request": lambda batch: (batch.release([0]), batch.admit(0, PROMPT[:8])),
}


@pytest.mark.parametrize("what", SINCE)
def test_a_row_that_changed_since_is_refused(what: str) -> None:
    batch = make_batch()
    batch.admit(0, PROMPT[:7])
    batch.admit(1, PROMPT[8:15])
    result = batch.step([1, 0], [8, 9])
    SINCE[what](batch)
    with refused(lambda: batch_state(batch), ArgumentError, r"the last call first"):
        batch.undo(result)


def test_results_of_others() -> None:
    batch, other = make_batch(), make_batch()
    for each in (batch, other):
        each.admit(0, PROMPT[:7])
    result = batch.step([0], [1])
    with pytest.raises(ArgumentError, match="another batch"):
        other.undo(result)
    for wrong in (None, 1, "result"):
        with pytest.raises(TypeError):
            batch.undo(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", [WINDOW, CHUNK])
def test_pages_that_left_the_window_are_not_to_be_had_again(spec: Any) -> None:
    """Two steps were in flight when the first failed. The row is released instead, and none of its pages stays cached."""
    batch = make_batch(spec)
    batch.admit(0, PROMPT, num_tokens=2, look_up=False)  # a chunk needs nothing of earlier ones, so it would hit
    first = batch.grow([0], 16)
    second = batch.grow([0], 1)
    assert 0 in batch.get_page_ids(0)[0]
    batch.undo(second)
    with refused(lambda: batch_state(batch), ArgumentError, "release it"):
        batch.undo(first)
    batch.release([0], num_computed_tokens=2)
    batch.check()
    assert batch._manager.stats().num_cached_pages == 0


def test_pages_that_somebody_gave_back() -> None:
    batch = make_batch()
    batch.admit(0, PROMPT[:4])
    result = batch.step([0], [1])
    give_back(batch, result.new_page_ids)
    with pytest.raises(ArgumentError, match="cannot go back"):
        batch.undo(result)


# --- releasing uncomputed rows ----------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [21, [20, 9], [20], [-1, 4], -1, 1 << 40])
def test_wrong_numbers_are_refused(counts: Any) -> None:
    batch = make_batch()
    batch.admit(0, PROMPT)
    batch.admit(1, PROMPT[:8])
    with refused(lambda: batch_state(batch), ArgumentError):
        batch.release([0, 1], num_computed_tokens=counts)


@pytest.mark.parts_at_a_page
def test_release_where_somebody_gave_a_page_back() -> None:
    """All or nothing: entries stay too."""
    batch = make_batch()
    batch.admit(0, PROMPT)
    give_back(batch, batch.get_page_ids(0)[0][:1])
    with pytest.raises(DoubleFreeError):
        batch.release([0], num_computed_tokens=0)
    assert batch._manager.stats().num_cached_pages == 5


# --- the manager ------------------------------------------------------------------------------------------------


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


# --- states -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("specs", [(STATE,), (FULL, STATE)])
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_state_cannot_be_cut_back(specs: tuple[Any, ...], is_shared: bool) -> None:
    """The state includes the tokens; it can only be recomputed from the first one on. That is not what a caller asks for who
    cuts later, even where others hold the pages, so that all tokens would be computed again.
    """
    batch = make_batch(*specs)
    batch.admit(0, PROMPT)
    batch.append([0, 0], [1, 2])
    batch.trim([0], 21)  # tokens that it does not include
    lease = batch._manager.lease(batch.get_page_ids(0)[0] if is_shared else [])
    for num_tokens in (19, 8, 4, 3, 1):
        message = f"num_tokens: got {num_tokens} .*allowed for row 0, which has a state that saw later tokens: 0, or from 20 on"
        with refused(lambda: batch_state(batch), ArgumentError, message):
            batch.trim([0], num_tokens)
    lease.release()
    batch.trim([0], 0)
    batch.append([0], [5])
    assert batch.grow([0]).num_grown == 1
    batch.check()


# --- tokens that are not computed -------------------------------------------------------------------------------


def lease_open_page(batch: RunningBatch) -> Callable[[], object]:
    return batch._manager.lease([pages[-1] for pages in batch.get_page_ids(0)]).release


def fork_and_keep_copies(batch: RunningBatch) -> Callable[[], object]:
    """Pages stay held by copies that were taken, and by a fork."""
    batch.fork(0, [1])
    batch.take_moves()
    return lambda: batch.release([1])


@pytest.mark.parametrize("specs", [(FULL,), (FULL, WINDOW), (FULL, STATE), (STATE,)], ids=["full", "window", "hybrid", "state"])
@pytest.mark.parametrize("share", [lease_open_page, fork_and_keep_copies, None])
@pytest.mark.parametrize("num_computed_tokens", [18, 20])
def test_drafts_that_are_not_computed_are_cut_without_a_page(
    specs: tuple[Any, ...], share: Callable[[RunningBatch], Callable[[], object]] | None, num_computed_tokens: int
) -> None:
    """Also where others hold the open page: its computed tokens stay. Slots for drafts stay too."""
    batch = make_batch(*specs)
    batch.admit(0, PROMPT[:17])
    batch.append([0] * (num_computed_tokens - 17), PROMPT[17:num_computed_tokens])
    batch.grow([0], num_computed_tokens - 17, 5)
    end = share(batch) if share else None
    before = batch_state(batch)
    for num_tokens in (num_computed_tokens + 2, num_computed_tokens):
        batch.append([0] * 3, [7, 8, 9])
        batch.trim([0], num_tokens)
        assert (batch.num_tokens[0], batch.num_computed_tokens[0]) == (num_tokens, num_computed_tokens)
        batch.trim([0], num_computed_tokens)
        assert batch_state(batch) == before
    batch.append([0], [5])
    assert batch.grow([0]).new_page_ids.tolist() == [], "the slots were there"
    batch.check()
    if end:
        end()
    batch.release([0])
    batch.check()
    assert batch._manager.stats().num_held_pages == 0


def test_a_cut_of_a_computed_token_leaves_the_open_page_to_others() -> None:
    """And gives back the pages behind, also those for drafts."""
    batch = make_batch(FULL)
    batch.admit(0, PROMPT[:18])
    batch.grow([0], 0, 10)
    [pages] = batch.get_page_ids(0)
    lease = batch._manager.lease(pages[4:5])
    batch.trim([0], 17)
    assert (batch.get_page_ids(0), batch.num_tokens[0], batch.num_computed_tokens[0]) == ((pages[:4],), 17, 16)
    batch.check()
    lease.release()
    assert batch._manager.stats().num_held_pages == 4
