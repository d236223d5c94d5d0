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
    take,
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


def test_a_junction_is_a_boundary() -> None:
    """Two prompts that share 200 tokens: the second writes the state there, and the third hits it."""
    batch = make_batch()
    batch.admit(0, LONG[:120])
    assert places_of(batch.take_moves().writes) == []
    batch.step([0], [7])
    assert batch.admit(1, [*LONG[:110], *LONG[200:210]]) == 0
    assert places_of(batch.take_moves().writes) == [(1, 64)]
    batch.step([1], [7])
    assert batch.admit(2, [*LONG[:110], *LONG[300:320]]) == 64


def test_named_places_and_the_end_of_external_tokens_are_boundaries() -> None:
    batch = make_batch()
    batch.admit(0, LONG[:100], traits=RequestTraits(resume_at=[70, 200]))
    assert places_of(batch.take_moves().writes) == [(0, 64)]
    batch.append([0] * 100, LONG[100:200])
    batch.plan([0], 100)
    assert places_of(batch.take_moves().writes) == [(0, 192)]
    assert batch.admit(1, LONG[300:500], num_external_tokens=128) == 0
    assert places_of(batch.take_moves().writes) == [(1, 128)]
    batch.commit_external(1, 128)
    batch.plan([1], 72)
    assert batch.admit(2, [*LONG[300:440], 1]) == 128
    batch.check()


@pytest.mark.parametrize("num_hits", [0, 64])
@pytest.mark.parametrize("num_external", [63, 64, 65, 127, 128, 129, 192, 199, 300])
def test_a_transfer_writes_the_state_at_its_end_alone(num_external: int, num_hits: int) -> None:
    """The connector has no other one, and a prompt that parts from it before does not hit."""
    batch = make_batch(num_states=40)
    if num_hits:
        batch.admit(0, LONG[:65], max_num_new_tokens=64, traits=RequestTraits(resume_at=[64]))
        batch.take_moves()
        batch.release([0])
    named = list(range(64, 257, 64))
    assert batch.admit(0, LONG[:400], num_external_tokens=num_external, traits=RequestTraits(resume_at=named)) == num_hits
    end = num_hits + num_external
    expected = [(0, end)] if end % 64 == 0 else []
    assert places_of(batch.take_moves().writes) == expected
    batch.commit_external(0, num_external)
    batch.plan([0], 400 - end)
    behind = [place for place in (*named, 320, 384) if place > end]
    assert places_of(batch.take_moves().writes) == [(0, place) for place in behind]
    batch.release([0])
    for num_shared in range(1, 400, 21):
        places = [num_hits, *(place for _, place in expected), *behind]
        assert batch.probe(1, [*LONG[:num_shared], 1]) == max([0, *(place for place in places if place <= num_shared)])
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


def test_a_checkpoint_hits_once_a_later_step_of_its_row_is_planned() -> None:
    """Before that, a copy of the hit could run before the step that writes it. Of two rows that compute the same tokens the
    first one's checkpoint stays, and the other's page is free again.
    """
    batch = make_batch()
    first, failed = batch.new_step(), batch.new_step()
    batch.admit(0, LONG[:200], step=first)
    assert batch.admit(1, LONG[:200], step=first) == 0
    assert places_of(batch.take_moves().writes) == [(0, 128), (1, 128), (1, 192)]  # the junction of the second row
    assert batch.admit(2, [*LONG[:190], 7], step=failed) == 0  # the step that writes has not run
    assert batch.settle(failed, failed=True).tolist() == []
    batch.release([2])
    batch.step([0, 1], [7, 7])
    assert batch.admit(2, LONG[:200]) == 192
    moves, pool = batch.take_moves(), batch._manager.pools["states"]
    assert (len(moves.copies), len(moves.writes)) == (1, 0)
    assert (pool.get_num_free_pages(), batch._manager.stats().pools["states"].num_cached_pages) == (11 - 3, 2)
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
def test_a_row_that_ends_before_its_step_ran_leaves_no_checkpoint(is_taken: bool) -> None:
    batch = make_batch()
    step = batch.new_step()
    batch.admit(0, LONG[:200], step=step)
    if is_taken:
        batch.take_moves()
    batch.release([0])
    batch.settle(step, failed=True)
    assert batch.admit(0, LONG[:200]) == 0
    batch.check()


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


def test_rows_never_wait_for_states() -> None:
    """With a state for each row and one more, checkpoints are left out while rows are free."""
    batch = make_batch(num_states=NUM_ROWS + 2)
    assert batch.admit(0, LONG[:300]) == 0
    assert places_of(batch.take_moves().writes) == [(0, 128)]  # of three boundaries
    for row in range(1, NUM_ROWS):
        assert batch.admit(row, LONG[row : row + 200]) == 0
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


@pytest.mark.parametrize("way", ["failed transfer", "trim"])
def test_a_row_that_starts_over_has_a_state_left(way: str) -> None:
    batch = make_batch(num_states=NUM_ROWS + 2)
    for row in range(NUM_ROWS - 1):
        if way == "trim":
            batch.admit(row, LONG[:10])
            batch.take_moves()
            batch.trim([row], 0)
            batch.append([row] * 9, LONG[:9])
        else:
            batch.admit(row, LONG[:9], num_external_tokens=8)
            batch.take_moves()
            assert batch.fail_external(row, 3) == 0
        assert batch.get_page_ids(row) == ([], [])
    batch.admit(NUM_ROWS - 1, LONG[100:500])
    assert len(batch.take_moves().writes) == 1  # of five boundaries
    result = batch.plan(list(range(NUM_ROWS - 1)), 9)
    assert (result.num_grown, result.refusal) == (NUM_ROWS - 1, None)
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


@pytest.mark.parametrize("way", ["its next step", "its end"])
def test_a_checkpoint_of_a_request_hits_after_its_step(way: str) -> None:
    manager, request = make_manager(), make_request("a", 20)
    plan(manager, request, 20)
    writes = manager.take_moves().writes
    assert count_hits(manager) == 0
    if way == "its end":
        manager.free(request)
    else:
        request.append_output_token_ids([7])
        assert run(manager, request, 1) is not None
    assert count_hits(manager) == 16
    assert plan(manager, make_request("b", 30), 4) is not None
    [working] = manager.get_page_ids("b")[1]
    assert take(manager) == [(writes.page_ids[1], working, 1)]
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


@pytest.mark.parametrize(("is_taken", "is_counted"), [(False, False), (False, True), (True, False)])
def test_a_request_whose_step_did_not_run_leaves_no_checkpoint(is_taken: bool, is_counted: bool) -> None:
    manager, request = make_manager(), make_request("a", 20)
    plan(manager, request, 20)
    if is_taken:
        assert len(manager.take_moves().writes) == 2
    request.num_computed_tokens = 20 * is_counted
    manager.free(request)
    assert (count_hits(manager), len(manager.take_moves().writes)) == (0, 0)
    assert manager.page_pool.get_num_free_pages() == 39
    manager.check()


@pytest.mark.parametrize("num_computed", [0, 8, 12, 16, 20])
@pytest.mark.parametrize("has_next_step", [False, True])
def test_a_request_that_is_freed_after_a_failed_step_leaves_the_checkpoints_before(
    num_computed: int, has_next_step: bool
) -> None:
    """Also if a step was planned behind the one that failed."""
    manager, request = make_manager(), make_request("a", 24)
    run(manager, request, 20)
    if has_next_step:
        run(manager, request, 3)
        assert count_hits(manager) == 16
    manager.free(request, num_computed_tokens=num_computed)
    assert count_hits(manager) == num_computed // 8 * 8
    manager.check()


def test_a_request_that_was_set_back_writes_its_states_again() -> None:
    manager, request = make_manager(), make_request("a", 20)
    run(manager, request, 20)
    request.num_computed_tokens = 4  # the engine has restored the state of 4 tokens
    assert manager.allocate_slots(request, 16) is not None
    assert named_places(manager.take_moves().writes) == [("a", 8), ("a", 16)]
    assert manager.page_pool.get_num_free_pages() == 39 - 5 - 1 - 2
    request.num_computed_tokens = 20
    manager.free(request)
    assert count_hits(manager) == 16
    manager.check()


def test_a_fork_of_a_request_writes_states_of_its_own() -> None:
    """It has the boundaries of the other one. What both compute stays once."""
    manager, request = make_manager(), make_request("a", 20)
    run(manager, request, 12)
    forked = like(request, "b")
    assert manager.fork(request, forked) is not None
    assert len(manager.take_moves().copies) == 1
    assert count_hits(manager) == 0
    for each in (request, forked):
        assert plan(manager, each, 8) is not None
    assert count_hits(manager) == 8
    assert named_places(manager.take_moves().writes) == [("a", 16), ("b", 16)]
    for each in (request, forked):
        each.append_output_token_ids([7])
        assert run(manager, each, 1) is not None
    assert count_hits(manager) == 16
    assert sum(key.group_id == 1 for key in manager.page_pool.cached_page_hash_to_page) == 2
    manager.check()


def test_a_delayed_call_leaves_its_checkpoints_to_cache_pages() -> None:
    manager, request = make_manager(), make_request("a", 20)
    assert plan(manager, request, 20, delay_cache_pages=True) is not None
    assert named_places(manager.take_moves().writes) == [("a", 8), ("a", 16)]
    assert count_hits(manager) == 0
    manager.cache_pages(request, 20)
    assert count_hits(manager) == 16
    manager.free(request)
    assert count_hits(manager) == 16
    manager.check()


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
