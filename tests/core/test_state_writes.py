"""States that a step writes to pages of their own: where, when they hit, and what an engine may do meanwhile."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import hybrids
import pytest
from admissions import admission
from hybrids import (
    FULL,
    NUM_ROWS,
    PAGE_SIZE,
    PROMPT,
    WINDOW,
    count_hits,
    like,
    make_manager,
    make_request,
    manager_state,
    plan,
    run,
)
from refusing import refused
from settings import scale

from pagepool import (
    CacheGroupSpec,
    CacheManager,
    EngineRequest,
    MambaSpec,
    MultiGroupPageTable,
    RequestTraits,
    RunningBatch,
    StateWrites,
)
from pagepool.errors import ArgumentError, MovesDueError

MAX_MODEL_LEN = 512
LONG = list(range(1000, 1000 + MAX_MODEL_LEN))
STATE = MambaSpec(PAGE_SIZE, ((1, 1),), "float16", checkpoint_interval=128)


def make_batch(*specs: MambaSpec, num_states: int = 12, **options: object) -> RunningBatch:
    """Return a batch of a manager with a pool of attention and one of states."""
    groups = [CacheGroupSpec(FULL), *(CacheGroupSpec(spec, pool="states") for spec in specs or (STATE,))]
    manager = CacheManager({"kv": 600, "states": num_states}, groups, MAX_MODEL_LEN)
    sizes = [PAGE_SIZE] * len(groups)
    return RunningBatch(manager, MultiGroupPageTable(NUM_ROWS, MAX_MODEL_LEN, MAX_MODEL_LEN, sizes), **options)


def places_of(writes: StateWrites) -> list[tuple[int, int]]:
    return list(zip(writes.rows.tolist(), writes.num_tokens.tolist(), strict=True))


def test_states_are_written_where_requests_resume() -> None:
    """At the last multiple of 64 that is 64 tokens before the prompt's end, and in the prompt at multiples of the interval."""
    batch = make_batch()
    assert batch.admit(0, LONG[:400]) == 0
    assert places_of(batch.take_moves().writes) == [(0, 128), (0, 256), (0, 320), (0, 384)]
    batch.step([0], [7])
    assert batch.admit(1, [*LONG[:300], *LONG[:100]]) == 256
    assert places_of(batch.take_moves().writes) == [(1, 320), (1, 384)]  # 400 - 64 is 336
    batch.check()


def test_a_row_whose_transfer_failed_writes_states_everywhere() -> None:
    """It computes all tokens itself."""
    batch = make_batch(num_states=40)
    batch.admit(0, LONG[:400], num_external_tokens=256)
    assert places_of(batch.take_moves().writes) == [(0, 256)]
    assert batch.fail_external(0, 200) == 0
    batch.plan([0], 400)
    assert places_of(batch.take_moves().writes) == [(0, 128), (0, 256), (0, 320), (0, 384)]
    batch.check()


def test_a_row_grows_once_its_writes_are_taken() -> None:
    batch = make_batch()
    batch.admit(0, LONG[:200])
    for call in (lambda: batch.step([0], [7]), lambda: batch.trim([0], 200), lambda: batch.fork(0, [1])):
        with pytest.raises(
            MovesDueError, match=r"row 0.*: got moves of its pages that are due, allowed: none; call take_moves"
        ):
            call()
    batch.move_row(0, 3)
    writes = batch.take_moves().writes
    assert repr(writes) == "StateWrites(rows=[3], num_tokens=[128], page_ids=[2], group=[1])"
    batch.step([3], [7])
    assert len(batch.take_moves().writes) == 0


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_failed_step_drops_the_writes_of_its_rows(is_taken: bool) -> None:
    """A row goes back to its first token, and behind that it is released, since its state may be lost."""
    batch = make_batch()
    step = batch.new_step()
    batch.admit(0, LONG[:300], max_num_new_tokens=200, step=step)
    for _ in range(2):
        if is_taken:
            assert places_of(batch.take_moves().writes) == [(0, 128), (0, 192)]
        assert batch.settle(step, failed=True).tolist() == []
        assert (batch.num_tokens[0], batch.num_computed_tokens[0]) == (300, 0)
        assert len(batch.take_moves().writes) == 0
        batch.check()
        step = batch.plan([0], 200)
    batch.take_moves()
    later = batch.plan([0], 100)
    if is_taken:
        assert places_of(batch.take_moves().writes) == [(0, 256)]
    assert batch.settle(later, failed=True).tolist() == [0]
    assert (len(batch.take_moves().writes), batch.is_admitted[0]) == (0, False)
    batch.check()


def test_a_state_whose_list_was_not_taken_never_hits() -> None:
    batch = make_batch()
    batch.admit(0, LONG[:200])
    batch.release([0])
    assert batch.admit(0, LONG[:200]) == 0
    batch.check()


def test_a_checkpoint_is_not_copied_at_the_cost_of_a_row_without_a_state() -> None:
    """The row that hits it goes on in its page, and nobody hits it again."""
    batch = make_batch(num_states=NUM_ROWS + 2)
    batch.admit(0, LONG[:129])
    assert places_of(batch.take_moves().writes) == [(0, 64)]
    batch.release([0])
    batch.admit(0, LONG[200:500])
    assert len(batch.take_moves().writes) == 1
    assert batch.admit(1, [*LONG[:64], 7]) == 64
    for row in range(2, NUM_ROWS):
        assert batch.admit(row, [row]) == 0
    assert len(batch.take_moves().copies) == 0
    batch.release([1])
    assert batch.admit(1, [*LONG[:64], 7]) == 0
    batch.check()


@pytest.mark.parametrize("num_groups", [1, 2])
def test_no_row_waits_for_a_state(num_groups: int) -> None:
    """Whatever was hit, failed, cut or released before, and whether copies were taken meanwhile."""
    counts: Counter[str] = Counter()
    for seed in range(scale(40)):
        rng = Random(seed)
        num_states = num_groups * (NUM_ROWS + 1) + 1 + rng.choice((0, 0, 1, 3))
        batch = make_batch(*[STATE] * num_groups, num_states=num_states)
        for _ in range(30):
            for row in [row for row in range(NUM_ROWS) if not batch.is_admitted[row] and rng.random() < 0.6]:
                known = [*LONG[: rng.choice((70, 140, 200, 330))], *(rng.randrange(9) for _ in range(rng.randrange(1, 70)))]
                options = {"max_num_new_tokens": rng.choice((64, 100)), "num_external_tokens": rng.choice((0, 0, 64, 150))}
                num_hits = batch.admit(row, known, **admission(**options))
                assert num_hits is not None, f"seed {seed}: {batch.refusal}"
                counts["hits"] += num_hits > 0
            moves = batch.take_moves()
            counts.update(copies=len(moves.copies), writes=len(moves.writes))
            batch.check()
            for row in [row for row in range(NUM_ROWS) if batch.is_admitted[row]]:
                num_external = int(batch.num_external_tokens[row])
                num_left = int(batch.num_tokens[row] - batch.num_computed_tokens[row])
                if num_external and rng.random() < 0.5:
                    batch.commit_external(row, num_external)
                elif num_external:
                    batch.fail_external(row, 0)
                    counts["failures"] += 1
                elif num_left and rng.random() < 0.8:
                    result = batch.plan([row], rng.randint(1, num_left))
                    assert result.refusal is None, f"seed {seed}: {result.refusal}"
                elif rng.random() < 0.3:
                    batch.trim([row], 0)
                    batch.append([row] * 70, LONG[:70])
                    counts["cuts"] += 1
                else:
                    batch.release([row])
    assert min(counts[name] for name in ("hits", "failures", "cuts", "writes", "copies")) > 0


def test_a_boundary_among_drafts_is_written_once_they_are_known() -> None:
    batch = make_batch()
    batch.admit(0, LONG[:120], traits=RequestTraits(resume_at=[128]))
    batch.append([0], [LONG[120]])
    batch.plan([0], 1, 10)
    assert places_of(batch.take_moves().writes) == []
    batch.append([0] * 9, LONG[121:130])
    batch.plan([0], 9)
    assert places_of(batch.take_moves().writes) == [(0, 128)]
    batch.release([0])
    assert batch.probe(0, LONG[:140]) == 128
    batch.check()


@pytest.mark.parametrize("num_drafts", [0, 1])
def test_a_step_ahead_writes_a_boundary(num_drafts: int) -> None:
    """After a token that is not known yet, and before its drafts."""
    batch = make_batch(max_steps_ahead=1)
    first = batch.new_step()
    batch.admit(0, LONG[:127], step=first, traits=RequestTraits(resume_at=[128]))
    batch.take_moves()
    second = batch.plan([0], 1, num_drafts)
    assert places_of(batch.take_moves().writes) == [(0, 128)]
    with pytest.raises(
        ArgumentError,
        match=f"up to {128 + num_drafts}, allowed: none behind its 127 known tokens",
    ):
        batch.fork(0, [1])
    batch.settle(first, [LONG[127]])
    batch.settle(second, LONG[128 : 129 + num_drafts], [1 + num_drafts])
    batch.plan([0])
    assert places_of(batch.take_moves().writes) == []
    assert batch.admit(1, LONG[:140]) == 128
    batch.check()


@pytest.mark.parametrize("interval", [0, -1, "odd", 1.5])
def test_intervals_that_are_refused(interval: Any) -> None:
    with pytest.raises((ArgumentError, TypeError), match="checkpoint_interval"):
        MambaSpec(PAGE_SIZE, ((1, 1),), "float16", checkpoint_interval=interval)


def test_refusals() -> None:
    with pytest.raises(ArgumentError, match="windows: got all, allowed for states that are kept: ends"):
        make_manager(FULL, WINDOW, STATE, windows="all")
    with pytest.raises(TypeError, match=r"a StateWrites is a part of what take_moves returns"):
        StateWrites()


def test_the_interval_follows_the_sizes_of_the_layers() -> None:
    """The least multiple of 2,048 tokens at which a state takes at most a third of the keys and values between two."""
    kv = CacheGroupSpec(FULL, [f"layer {i}" for i in range(16)])
    token_bytes = 16 * FULL.page_size_bytes // PAGE_SIZE
    state = MambaSpec(PAGE_SIZE, ((2349 * token_bytes // 48 // 2,),), "float16", checkpoint_interval="auto")
    states = CacheGroupSpec(state, [f"state {i}" for i in range(48)], pool="states")
    manager = CacheManager({"kv": 100, "states": 12}, [kv, states], MAX_MODEL_LEN)
    assert manager.checkpoint_interval == 8192


# --- requests of a manager ----------------------------------------------------------------------------------------


def named_places(writes: StateWrites) -> list[tuple[str, int]]:
    assert writes.rows is None
    assert writes.request_ids is not None
    return list(zip(writes.request_ids, writes.num_tokens.tolist(), strict=True))


def test_writes_of_requests_are_named_by_their_ids() -> None:
    """A row's writes are in the list of its batch, and those of requests in that of the manager."""
    manager = make_manager()
    batch = hybrids.make_batch(manager)
    for request_id, num_tokens in (("a", 20), ("b", 9)):
        assert plan(manager, EngineRequest(request_id, [ord(request_id), *PROMPT][:num_tokens]), num_tokens) is not None
    batch.admit(0, PROMPT[:8])
    assert places_of(batch.take_moves().writes) == [(0, 8)]
    writes = manager.take_moves().writes
    assert named_places(writes) == [("a", 8), ("a", 16), ("b", 8)]
    assert writes.group.tolist() == [1, 1, 1]
    assert repr(writes).startswith("StateWrites(request_ids=('a', 'a', 'b'), num_tokens=[8, 16, 8], ")
    assert len({*writes.page_ids.tolist(), *manager.get_page_ids("a")[1], *manager.get_page_ids("b")[1]}) == 5
    assert len(manager.take_moves().writes) == 0
    manager.check()


def test_a_request_goes_on_once_its_writes_are_taken() -> None:
    manager, request = make_manager(), make_request("a", 20)
    plan(manager, request, 8)
    for call in (lambda: manager.allocate_slots(request, 12), lambda: manager.fork(request, like(request))):
        with refused(lambda: manager_state(manager), MovesDueError, "got moves of its pages that are due, allowed: none"):
            call()
    assert plan(manager, EngineRequest("b", [7] * 9), 9) is not None  # others do not wait
    assert named_places(manager.take_moves().writes) == [("a", 8), ("b", 8)]
    assert manager.allocate_slots(request, 12) is not None


def test_checkpoints_of_requests_are_left_out_of_a_full_pool() -> None:
    """They are counted, and the request goes on."""
    groups = [CacheGroupSpec(FULL), CacheGroupSpec(hybrids.STATE, pool="states")]
    manager, request = CacheManager({"kv": 40, "states": 3}, groups, 64), make_request("a", 28)
    run(manager, request, 8)
    assert manager.stats().pools["states"].num_passed_checkpoints == 0
    run(manager, request, 16)  # the first checkpoint is in the index by now, and evicted for the second
    assert manager.stats().pools["states"].num_passed_checkpoints == 1
    run(manager, request, 4)
    assert count_hits(manager) == 16
    manager.check()


def test_a_request_that_did_not_run_leaves_the_states_of_others() -> None:
    """It wrote none of these, so its entries are not among them."""
    manager = make_manager()
    first, second = make_request("first"), make_request("second")
    assert manager.allocate_slots(first, 40) is not None
    manager.take_moves()
    first.num_computed_tokens = 40
    manager.free(first)
    num_hits = count_hits(manager, PROMPT[:40])
    assert num_hits > 0
    assert manager.allocate_slots(second, 40) is not None
    manager.take_moves()
    manager.free(second, num_computed_tokens=0)
    assert count_hits(manager, PROMPT[:40]) == num_hits
    manager.check()
