"""Steps that fail, and with them all later ones: rows go back, and pages that were not filled lose their entries."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
from admissions import admission
from hybrids import CHUNK, FULL, WINDOW, batch_state, count_hits, keep_every
from hybrids import PROMPT as LONG_PROMPT
from hybrids import make_batch as make_rows
from hybrids import make_manager as make_hybrid
from refusing import refused

from pagepool import CacheGroupSpec, CacheManager, EngineRequest, MambaSpec, MultiGroupPageTable, RunningBatch
from pagepool.errors import ArgumentError, DoubleFreeError

STATE = keep_every(None)
AT_ENDS = MambaSpec(4, ((1, 1),), "float16", checkpoint_interval=8)
PROMPT = LONG_PROMPT[:20]  # five full pages

make_manager = partial(make_hybrid, default=(FULL,))


def make_batch(*specs: Any, caches: str = "scheduled", **options: Any) -> RunningBatch:
    return make_rows(make_manager(*specs, caches=caches), **options)


def make_written(**options: Any) -> RunningBatch:
    """Return a batch whose steps write checkpoints to pages of their own."""
    groups = [CacheGroupSpec(FULL), CacheGroupSpec(AT_ENDS, pool="states")]
    settings = {name: options.pop(name) for name in ("caches", "restores_states") if name in options}
    manager = CacheManager({"kv": 60, "states": 20}, groups, 64, **settings)
    return RunningBatch(manager, MultiGroupPageTable(4, 64, 64, [4, 4]), **options)


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


@pytest.mark.parametrize("specs", [(FULL,), (FULL, WINDOW), (CHUNK, FULL)])
def test_all_rows_of_a_step_go_back_and_are_planned_again(specs: tuple[Any, ...]) -> None:
    batch = make_batch(*specs, max_steps_ahead=1)
    first = admit(batch, 0, PROMPT[:7])
    batch.admit(1, LONG_PROMPT[20:40], max_num_new_tokens=6, step=first)
    before = [batch.get_page_ids(row) for row in range(4)]
    second, num_new = batch.new_step(), 10
    for _ in range(2):
        batch.plan([0, 1], [1, 8], [2, 0], step=second)
        if num_new == 10:
            batch.admit(3, LONG_PROMPT[40:50], step=second)
        assert fail(batch, second) == []
        assert [counts_of(batch, row) for row in (0, 1, 3)] == [(7, 7, 0), (20, 6, 0), (10, 0, 0)]
        assert [batch.get_page_ids(row) for row in range(4)] == before
        second, num_new = batch.new_step(), 0
    assert batch.settle(first, [50], [1, 0]).tolist() == [0, 1]
    assert counts_of(batch) == (8, 7, 0)
    third = batch.plan([3, 0, 1], [10, 1, 14])
    assert batch.settle(third, [51, 52, 53]).tolist() == [3, 0, 1]
    assert [counts_of(batch, row) for row in (0, 1, 3)] == [(9, 8, 0), (21, 20, 0), (11, 10, 0)]
    batch.check()


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


def test_rows_that_hit_such_a_page_go_back_to_it() -> None:
    batch = make_batch(FULL, max_steps_ahead=1)
    first = admit(batch, 0, PROMPT[:7])
    second = batch.plan([0])
    batch.settle(first, [50])
    third = batch.new_step()
    assert batch.admit(1, [*PROMPT[:7], 50, 1], step=third) == 8
    assert batch.admit(2, [*PROMPT[:4], 50, 1], step=third) == 4
    assert fail(batch, second) == []
    assert [counts_of(batch, row) for row in range(3)] == [(8, 4, 0), (9, 4, 0), (6, 4, 0)]  # row 1 held the page too
    assert batch.num_cached_tokens[:3].tolist() == [0, 4, 4]
    assert batch.get_page_ids(0) == batch.get_page_ids(1) == batch.get_page_ids(2)
    assert batch.probe(3, [*PROMPT[:7], 50, 1]) == 4
    again = batch.plan([0, 1, 2], [4, 5, 2])
    assert batch.settle(again, [60, 61, 62]).tolist() == [0, 1, 2]
    assert batch.probe(3, [*PROMPT[:7], 50, 1]) == 8
    batch.check()


def test_a_refused_call_leaves_the_step_to_fail() -> None:
    batch = make_batch()
    step = admit(batch, 0, PROMPT)
    batch.release([0])
    with refused(lambda: batch_state(batch), ArgumentError, "row 0"):
        batch.step([0], [1], step=step)
    assert fail(batch, step) == []
    assert batch.probe(0, PROMPT) == 0


@pytest.mark.parametrize("is_released", [False, True])
@pytest.mark.parametrize("caches", ["scheduled", "computed"])
@pytest.mark.parametrize("max_steps_ahead", [0, 1])
def test_no_checkpoint_that_others_wrote_is_dropped(max_steps_ahead: int, caches: str, is_released: bool) -> None:
    prompt = PROMPT[:8]
    batch = make_written(max_steps_ahead=max_steps_ahead, caches=caches)
    first = admit(batch, 2, [*prompt, 5, 5], resume_at=[8])
    assert batch.take_moves().writes.num_tokens.tolist() == [8]
    failed = admit(batch, 0, [*prompt, 5, 3, 3, 5], resume_at=[8])
    assert batch.num_cached_tokens[0] == 0  # the state has not run
    batch.take_moves()
    batch.settle(first, [7])
    batch.release([2])
    assert batch.probe(1, [*prompt, 9]) == 8
    num_cached = batch._manager.stats().pools["states"].num_cached_pages
    if is_released:
        batch.release([0])
    assert fail(batch, failed) == []
    assert batch.probe(1, [*prompt, 9]) == 8
    assert batch._manager.stats().pools["states"].num_cached_pages == num_cached == 1
    if not is_released:
        assert counts_of(batch) == (12, 0, 0)


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_checkpoint_that_was_not_written_is_dropped_and_rows_that_hit_it_go_back(is_copied: bool) -> None:
    """With steps ahead it hits once the next step is planned. A row whose copy is still due is released."""
    batch = make_written(max_steps_ahead=1)
    failed = admit(batch, 0, PROMPT[:10], resume_at=[8])
    batch.take_moves()
    later = batch.plan([0])
    batch.take_moves()
    hitting = admit(batch, 1, [*PROMPT[:8], 1, 2])
    assert batch.num_cached_tokens[1] == 8
    if is_copied:
        assert len(batch.take_moves().copies) == 1
    assert fail(batch, failed) == ([] if is_copied else [1])
    assert counts_of(batch) == (10, 0, 0)
    assert counts_of(batch, 1) == ((10, 0, 0) if is_copied else (0, 0, 0))
    assert batch.probe(2, [*PROMPT[:8], 1, 2]) == 0
    assert batch._manager.stats().pools["states"].num_cached_pages == 0
    for step in (later, hitting):
        assert batch.settle(step).tolist() == [-1]


# --- rows that cannot go back are released --------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [WINDOW, CHUNK])
def test_a_row_whose_window_moved_on_is_released(spec: Any) -> None:
    """It hit pages of the failed step, which it would compute again from their first token on."""
    batch = make_batch(FULL, spec)
    failed = admit(batch, 0, PROMPT[:17])
    batch.release([0])
    assert batch.admit(1, [*PROMPT[:16], *range(20)], max_num_new_tokens=6, step=batch.new_step()) == 16
    batch.plan([1], 10)
    batch.plan([1], 4)
    assert 0 in batch.get_page_ids(1)[1]
    assert fail(batch, failed) == [1]
    assert not batch.is_admitted.any()
    assert (batch.probe(0, PROMPT), batch._manager.stats().num_held_pages) == (0, 0)


def test_a_row_with_a_state_is_released_unless_it_goes_back_to_its_first_token() -> None:
    batch = make_batch(FULL, STATE, max_steps_ahead=1)
    first = admit(batch, 0, PROMPT[:8], max_num_new_tokens=4)
    batch.admit(2, LONG_PROMPT[30:38], step=first)
    second = batch.plan([0, 2], [4, 1])
    batch.admit(1, LONG_PROMPT[20:28], step=second)
    assert fail(batch, second) == [0, 2]
    assert counts_of(batch, 1) == (8, 0, 0)
    assert batch.settle(first, [1], [0, 1]).tolist() == [-1, -1]
    batch.check()


def test_a_row_with_copies_due_is_released() -> None:
    batch = make_batch(FULL)
    failed = admit(batch, 0, PROMPT[:10])
    batch.fork(0, [1])
    lost = fail(batch, failed)
    assert 1 in lost
    assert not batch.is_admitted[lost].any()
    batch.release([row for row in range(4) if batch.is_admitted[row]])
    batch.take_moves()
    assert (batch.probe(2, PROMPT), batch._manager.stats().num_held_pages) == (0, 0)


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
    assert batch.plan([0]).num_grown == 1
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
    batch.settle(batch.plan([0], num_computed_tokens - 17, 5))  # the drafts are rejected
    end = share(batch) if share else None
    before = batch_state(batch)
    for num_tokens in (num_computed_tokens + 2, num_computed_tokens):
        batch.append([0] * 3, [7, 8, 9])
        batch.trim([0], num_tokens)
        assert (batch.num_tokens[0], batch.num_computed_tokens[0]) == (num_tokens, num_computed_tokens)
        batch.trim([0], num_computed_tokens)
        assert batch_state(batch) == before
    batch.append([0], [5])
    assert batch.plan([0]).new_page_ids.tolist() == [], "the slots were there"
    batch.check()
    if end:
        end()
    batch.release([0])
    batch.check()
    assert batch._manager.stats().num_held_pages == 0


def test_a_cut_of_a_computed_token_leaves_the_open_page_to_others() -> None:
    """And gives back the pages behind, also those for drafts."""
    batch = make_batch(FULL)
    batch.admit(0, PROMPT[:17])
    batch.append([0], PROMPT[17:18])
    batch.settle(batch.plan([0], 1, 9))
    [pages] = batch.get_page_ids(0)
    lease = batch._manager.lease(pages[4:5])
    batch.trim([0], 17)
    assert (batch.get_page_ids(0), batch.num_tokens[0], batch.num_computed_tokens[0]) == ((pages[:4],), 17, 16)
    batch.check()
    lease.release()
    assert batch._manager.stats().num_held_pages == 4
