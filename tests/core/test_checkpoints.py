"""Checkpoints of states by hand: how they are adopted, and what is refused. `test_differential.py` has the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hybrids import (
    FULL,
    PROMPT,
    WINDOW,
    batch_state,
    fill,
    keep_every,
    like,
    make_batch,
    make_manager,
    make_request,
    manager_state,
    plan,
    run,
    take,
)
from refusing import refused

from pagepool import EngineRequest, PageHash, PageHashWithGroupId, RequestTraits
from pagepool.errors import ArgumentError, IntegrityError, MovesDueError

pytestmark = pytest.mark.usefixtures("drafter")

# --- how long intervals are -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("specs", "interval"),
    [
        ((FULL, keep_every(4)), 4),
        ((FULL, keep_every(12), keep_every(8)), 8),
        ((keep_every(7),), 7),
        ((FULL, WINDOW, keep_every(np.int64(8))), 8),
        ((FULL, keep_every(8), keep_every(None)), None),
        ((FULL, keep_every(None)), None),
    ],
)
def test_the_interval_is_the_least_of_all_groups(specs: tuple[Any, ...], interval: int | None) -> None:
    assert make_manager(*specs).checkpoint_interval == interval
    assert make_manager(*specs, enable_caching=False).checkpoint_interval is None


# --- adoption ---------------------------------------------------------------------------------------------------


@pytest.mark.parts_at_a_page
def test_a_row_adopts_in_a_full_shard() -> None:
    batch = make_batch(make_manager(num_pages=10), data_parallel_size=2)  # shards of 4 and 5 pages, null page aside
    batch.admit(0, PROMPT[:8], traits=RequestTraits(dp_shard=0))
    batch.take_moves()
    batch.release([0])
    assert batch.admit(1, PROMPT[:12], traits=RequestTraits(dp_shard=0)) == 8
    assert (batch.get_page_ids(1), take(batch)) == (([1, 2, 3], [4]), [])
    batch.check()


# --- beside checkpoints -----------------------------------------------------------------------------------------


def test_events_of_states() -> None:
    messages = pytest.importorskip("pagepool.events", reason="events are an extra: msgspec is not installed")
    manager = make_manager(num_pages=7)
    manager.enable_events()
    manager.free(fill(manager, 8))
    events: Any = manager.take_events()
    attention, state = events
    assert (state.kv_cache_spec_kind, state.group_idx) == ("mamba", 1)
    assert state.parent_block_hash == attention.block_hashes[0]
    assert list(state.block_hashes) == [attention.block_hashes[1]]
    assert (state.token_ids.tolist(), state.block_size) == (PROMPT[4:8], 4)
    stored: Any = manager.snapshot_events()
    assert [event.kv_cache_spec_kind for event in stored] == ["full_attention", "mamba"]
    run(manager, EngineRequest("other", [1] * 20), 20)
    events = manager.take_events()
    removed = [event for event in events if isinstance(event, messages.BlockRemoved)]
    assert {event.group_idx: list(event.block_hashes) for event in removed} == {
        0: attention.block_hashes.tolist()[::-1],
        1: list(state.block_hashes),
    }


# --- damage -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_id", [3, 12])
def test_check_names_a_state_in_the_index(page_id: int) -> None:
    manager = make_manager()
    batch = make_batch(manager)
    fill(manager, 16)
    batch.admit(0, [9, *PROMPT[:15]])
    assert (manager.get_page_ids("first")[1], batch.get_page_ids(0)[1]) == ([3], [12])
    manager.page_pool.pages[page_id].page_hash = PageHashWithGroupId(PageHash(5, ()), 1)
    side = batch if page_id == 12 else manager
    with pytest.raises(
        IntegrityError, match=f"page {page_id}, to which a state is written, has another holder or a prefix entry"
    ):
        side.check()


# --- misuse -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_new_computed_tokens", [0, 8, 15, 17])
def test_hits_cut_short(num_new_computed_tokens: int) -> None:
    manager = make_manager()
    fill(manager, 20)
    request = make_request("b")
    hits, num_hit_tokens = manager.get_computed_pages(request)
    assert num_hit_tokens == 16
    message = f"^request 'b': got {num_new_computed_tokens} computed tokens, and new_computed_pages of .16, 16. tokens"
    with refused(lambda: manager_state(manager), ArgumentError, message):
        manager.allocate_slots(request, 4, num_new_computed_tokens, hits)
    assert take(manager) == []


class Due:
    """Row 0 has written copies due, row 1 as a source, row 2 has none; requests "written" and "source" alike."""

    def __init__(self) -> None:
        self.manager = make_manager()
        self.batch = make_batch(self.manager)
        self.requests = {name: make_request(name, 22) for name in ("source", "written", "free")}
        run(self.manager, self.requests["source"], 8)
        self.manager.free(fill(self.manager, 8, request_id="cached"))
        self.batch.admit(1, [7] * 6)
        self.batch.admit(2, [6] * 6)
        self.result = self.batch.step([1], [7])
        self.batch.fork(1, [3])
        self.batch.admit(0, PROMPT[:10])
        plan(self.manager, self.requests["written"], 3)

    def state(self) -> Any:
        self.manager.check()
        return batch_state(self.batch), [request.num_computed_tokens for request in self.requests.values()]


WHILE_DUE: dict[str, Callable[[Due], Any]] = {
    "step of a destination": lambda due: due.batch.step([2, 0], [1, 1]),
    "step of a source": lambda due: due.batch.step([2, 1], [1, 1]),
    "trim of a destination": lambda due: due.batch.trim([2, 0], [6, 9]),
    "trim of a source": lambda due: due.batch.trim([1], 6),
    "trim to nothing": lambda due: due.batch.trim([0], 0),
    "fork of a destination": lambda due: due.batch.fork(0, [3]),
    "fork of a fork": lambda due: due.batch.fork(3, [3]),
    "allocate_slots": lambda due: due.manager.allocate_slots(due.requests["written"], 1),
    "allocate_slots after the step": lambda due: due.manager.allocate_slots(due.requests["written"], 9),
    "a request's fork": lambda due: due.manager.fork(due.requests["written"], like(due.requests["written"])),
}


@pytest.mark.parametrize("name", WHILE_DUE)
def test_while_copies_are_due(name: str) -> None:
    due = Due()
    with refused(
        due.state,
        MovesDueError,
        r"^(row [013].*|request): got moves of its pages that are due, allowed: none; .* before$",
    ) as caught:
        WHILE_DUE[name](due)
    assert isinstance(caught.value, RuntimeError)
    assert take(due.batch) != []
    due.batch.step([0, 1, 2, 3], [1] * 4)
