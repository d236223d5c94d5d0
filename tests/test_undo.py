"""Steps that were scheduled and did not run: their cached pages are forgotten, and rows go back.

Random work against the oracle undoes steps too: see `BatchWorkload.undo`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from batch_model import package_pool_state

from pagepool import (
    CacheGroupSpec,
    CacheManager,
    ChunkedLocalAttentionSpec,
    EngineRequest,
    FullAttentionSpec,
    MambaSpec,
    MultiGroupPageTable,
    PageTable,
    RunningBatch,
    SlidingWindowSpec,
)
from pagepool.errors import ArgumentError, ArgumentTypeError, DoubleFreeError

PAGE_SIZE = 4
FULL = FullAttentionSpec(PAGE_SIZE, 1, 8, "float16", False)
WINDOW = SlidingWindowSpec(PAGE_SIZE, 1, 8, "float16", False, 5)
CHUNK = ChunkedLocalAttentionSpec(PAGE_SIZE, 1, 8, "float16", False, 8)
STATE = MambaSpec(page_size=PAGE_SIZE, shapes=((1, 1),), dtype="float16")
PROMPT = list(range(10, 30))  # five full pages
NUM_ROWS = 3


def make_manager(*specs: Any, **options: Any) -> CacheManager:
    return CacheManager(40, [CacheGroupSpec(spec) for spec in specs or (FULL,)], 64, hash_seed="undo", **options)


def make_batch(*specs: Any, manager: CacheManager | None = None) -> RunningBatch:
    specs = specs or (FULL,)
    table = MultiGroupPageTable(NUM_ROWS, 64, 64, [spec.page_size for spec in specs])
    return RunningBatch(manager or make_manager(*specs), table)


def count_hits(side: Any, token_ids: list[int] = PROMPT) -> int:
    """Return the tokens that another request would hit."""
    manager = getattr(side, "_manager", side)
    return manager.probe(EngineRequest("other", [*token_ids, 1])).num_hit_tokens


def state_of(batch: RunningBatch) -> tuple[Any, ...]:
    """Return the observable state of rows and pool, except the order of the free queue and counters."""
    batch.check()
    pool = package_pool_state(batch._manager.page_pool, with_hashes=True)
    by_row = [values.tolist() for values in (batch.num_tokens, batch.num_computed_tokens, batch.num_cached_tokens)]
    page_ids = [batch.get_page_ids(row) for row in range(NUM_ROWS)]
    return by_row, page_ids, pool.ref_counts, sorted(pool.free_page_ids), pool.prefix_entries


def give_back(batch: RunningBatch, page_ids: Iterable[int]) -> None:
    """Free pages as another caller might by mistake."""
    pool = batch._manager.page_pool
    pool.free_pages([pool.pages[int(page_id)] for page_id in page_ids])


# --- undoing a batch's call -------------------------------------------------------------------------------------


@pytest.mark.parametrize("specs", [(FULL,), (WINDOW,), (CHUNK,), (FULL, WINDOW, CHUNK)])
def test_a_step(specs: tuple[Any, ...]) -> None:
    batch = make_batch(*specs)
    batch.admit(0, PROMPT[:7])
    batch.admit(1, PROMPT[:4])
    before = state_of(batch)
    result = batch.step([0, 1], PROMPT[7:9])
    assert state_of(batch) != before
    batch.undo(result)
    assert state_of(batch) == before
    assert batch.step([0, 1], PROMPT[7:9]).num_grown == 2


def test_events_tell_nothing_of_it() -> None:
    if importlib.util.find_spec("msgspec") is None:
        pytest.skip("events need msgspec")
    manager = make_manager()
    manager.enable_events()
    batch = make_batch(manager=manager)
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
    "taken back": lambda batch: batch.undo(batch.results[-1]),
}


class Batch(RunningBatch):
    """A batch that records its results."""

    results: list[Any]


@pytest.mark.parametrize("what", SINCE)
def test_a_row_that_changed_since_is_refused(what: str) -> None:
    manager = make_manager()
    batch = Batch(manager, PageTable(NUM_ROWS, 16, 64))
    batch.admit(0, PROMPT[:7])
    batch.admit(1, PROMPT[8:15])
    batch.results = [batch.step([1, 0], [8, 9])]
    SINCE[what](batch)
    before = state_of(batch)
    with pytest.raises(ArgumentError, match=r"the last call first|taken back already"):
        batch.undo(batch.results[0])
    assert state_of(batch) == before


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
    before = state_of(batch)
    with pytest.raises(ArgumentError, match="release it"):
        batch.undo(first)
    assert state_of(batch) == before
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
    before = state_of(batch)
    with pytest.raises(ArgumentError):
        batch.release([0, 1], num_computed_tokens=counts)
    with pytest.raises(ArgumentTypeError):
        batch.release([0, 1], num_computed_tokens="20")  # type: ignore[arg-type]
    assert state_of(batch) == before


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
    assert count_hits(manager) == 4


@pytest.mark.parametrize("enable_caching", [True, False])
def test_free_of_nothing(enable_caching: bool) -> None:
    manager, request = make_manager(enable_caching=enable_caching), EngineRequest("a", PROMPT)
    manager.free(request, num_computed_tokens=3)
    manager.allocate_slots(request, 20)
    with pytest.raises(ArgumentError):
        manager.free(request, num_computed_tokens=-1)
    with pytest.raises(ArgumentTypeError):
        manager.free(request, num_computed_tokens=1.5)  # type: ignore[arg-type]
    assert len(manager.get_page_ids("a")[0]) == 5
    manager.free(request, num_computed_tokens=99)
    assert manager.stats().num_held_pages == 0


# --- states -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("specs", [(STATE,), (FULL, STATE)])
def test_a_state_cannot_be_cut_back(specs: tuple[Any, ...]) -> None:
    """The state includes the tokens; it can only be recomputed from the first one on."""
    batch = make_batch(*specs)
    batch.admit(0, PROMPT)
    batch.append([0, 0], [1, 2])
    batch.trim([0], 21)  # tokens that it does not include
    before = state_of(batch)
    for num_tokens in (19, 8, 1):
        with pytest.raises(ArgumentError, match="a state that saw later tokens: 0, or from 20 on"):
            batch.trim([0], num_tokens)
    assert state_of(batch) == before
    batch.trim([0], 0)
    batch.append([0], [5])
    assert batch.grow([0]).num_grown == 1
    batch.check()
