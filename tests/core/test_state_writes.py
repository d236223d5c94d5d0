"""States that a step writes to pages of their own: where, when they hit, and what an engine may do meanwhile."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from admissions import admission
from hybrids import FULL, NUM_ROWS, PAGE_SIZE, WINDOW, make_manager
from settings import scale

from pagepool import (
    CacheGroupSpec,
    CacheManager,
    MambaSpec,
    MultiGroupPageTable,
    RequestTraits,
    RunningBatch,
    StateWrites,
)
from pagepool.errors import ArgumentError, MovesDueError, StateAheadError

MAX_MODEL_LEN = 512
LONG = list(range(1000, 1000 + MAX_MODEL_LEN))
STATE = MambaSpec(PAGE_SIZE, ((1, 1),), "float16", checkpoint_interval=128, checkpoints="ends")


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
    batch = make_batch(writes="anywhere")
    assert batch.admit(0, LONG[:400]) == 0
    assert places_of(batch.take_moves().writes) == [(0, 128), (0, 256), (0, 320), (0, 384)]
    batch.step([0], [7])
    assert batch.admit(1, [*LONG[:300], *LONG[:100]]) == 256
    assert places_of(batch.take_moves().writes) == [(1, 320), (1, 384)]  # 400 - 64 is 336
    batch.check()


def test_a_junction_is_a_boundary() -> None:
    """Two prompts that share 200 tokens: the second writes the state there, and the third hits it."""
    batch = make_batch(writes="anywhere")
    batch.admit(0, LONG[:120])
    assert places_of(batch.take_moves().writes) == []
    batch.step([0], [7])
    assert batch.admit(1, [*LONG[:110], *LONG[200:210]]) == 0
    assert places_of(batch.take_moves().writes) == [(1, 64)]
    batch.step([1], [7])
    assert batch.admit(2, [*LONG[:110], *LONG[300:320]]) == 64


def test_named_places_and_the_end_of_external_tokens_are_boundaries() -> None:
    batch = make_batch(writes="anywhere")
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


@pytest.mark.parametrize("writes", ["ends", "anywhere"])
@pytest.mark.parametrize("num_hits", [0, 64])
@pytest.mark.parametrize("num_external", [63, 64, 65, 127, 128, 129, 192, 199, 300])
def test_a_transfer_writes_the_state_at_its_end_alone(num_external: int, num_hits: int, writes: str) -> None:
    """The connector has no other one, and a prompt that parts from it before does not hit."""
    batch = make_batch(num_states=40, writes=writes)
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
    assert places_of(batch.take_moves().writes) == ([(0, place) for place in behind] if writes == "anywhere" else [])
    batch.release([0])
    for num_shared in range(1, 400, 21):
        places = [num_hits, *(place for _, place in expected), *(behind if writes == "anywhere" else [])]
        assert batch.probe(1, [*LONG[:num_shared], 1]) == max([0, *(place for place in places if place <= num_shared)])
    batch.check()


def test_a_row_whose_transfer_failed_writes_states_everywhere() -> None:
    """It computes all tokens itself."""
    batch = make_batch(num_states=40, writes="anywhere")
    batch.admit(0, LONG[:400], num_external_tokens=256)
    assert places_of(batch.take_moves().writes) == [(0, 256)]
    assert batch.fail_external(0, 200) == 0
    batch.plan([0], 400)
    assert places_of(batch.take_moves().writes) == [(0, 128), (0, 256), (0, 320), (0, 384)]
    batch.check()


def test_kernels_that_write_ends_only_cut_chunks_there() -> None:
    batch = make_batch()
    assert batch.admit(0, LONG[:300], max_num_new_tokens=200, traits=RequestTraits(ends_at_checkpoint=True)) == 0
    assert places_of(batch.take_moves().writes) == [(0, 192)]  # 300 - 64 is 236; 128 is passed over
    assert batch.find_next_checkpoint([0]).tolist() == [256]
    batch.plan([0], 100)
    assert places_of(batch.take_moves().writes) == []  # 256 is inside the step
    assert batch.find_next_checkpoint([0]).tolist() == [MAX_MODEL_LEN]
    assert batch.admit(1, LONG[:290]) == 192


def test_a_checkpoint_hits_once_a_later_step_of_its_row_is_planned() -> None:
    """Before that, a copy of the hit could run before the step that writes it. Of two rows that compute the same tokens the
    first one's checkpoint stays, and the other's page is free again.
    """
    batch = make_batch(writes="anywhere")
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
    batch = make_batch(writes="anywhere")
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
    batch = make_batch(writes="anywhere")
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
    batch = make_batch(writes="anywhere")
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
    batch = make_batch(writes="anywhere")
    batch.admit(0, LONG[:200])
    batch.release([0])
    assert batch.admit(0, LONG[:200]) == 0
    batch.check()


def test_rows_never_wait_for_states() -> None:
    """With a state for each row and one more, checkpoints are left out while rows are free."""
    batch = make_batch(num_states=NUM_ROWS + 2, writes="anywhere")
    assert batch.admit(0, LONG[:300]) == 0
    assert places_of(batch.take_moves().writes) == [(0, 128)]  # of three boundaries
    for row in range(1, NUM_ROWS):
        assert batch.admit(row, LONG[row : row + 200]) == 0
    batch.check()


def test_a_checkpoint_is_not_copied_at_the_cost_of_a_row_without_a_state() -> None:
    """The row that hits it goes on in its page, and nobody hits it again."""
    batch = make_batch(num_states=NUM_ROWS + 2, writes="anywhere")
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
    batch = make_batch(num_states=NUM_ROWS + 2, writes="anywhere")
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
        batch = make_batch(*[STATE] * num_groups, num_states=num_states, writes=rng.choice(("ends", "anywhere")))
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


def test_drafts_stop_at_a_boundary_and_steps_ahead_write_there() -> None:
    batch = make_batch(writes="anywhere")
    batch.admit(0, LONG[:200], num_tokens=120)
    with pytest.raises(StateAheadError, match="lookahead to token 130, which passes the checkpoint after 128"):
        batch.plan([0], 5, 5)
    ahead = make_batch(writes="anywhere", max_steps_ahead=1)
    first = ahead.new_step()
    ahead.admit(0, LONG[:127], step=first, traits=RequestTraits(resume_at=[128]))
    ahead.take_moves()
    with pytest.raises(StateAheadError, match="got 1 drafts, allowed for states that are kept: 0"):
        ahead.plan([0], 1, 1)
    second = ahead.plan([0])
    assert places_of(ahead.take_moves().writes) == [(0, 128)]  # of a token that is not known yet
    with pytest.raises(
        StateAheadError,
        match="up to 128, allowed: none behind its 127 known tokens",
    ):
        ahead.fork(0, [1])
    ahead.settle(first, [LONG[127]])
    ahead.plan([0])
    ahead.settle(second, [LONG[128]])
    assert ahead.admit(1, LONG[:140]) == 128
    ahead.check()


def test_refusals() -> None:
    multiples = MambaSpec(PAGE_SIZE, ((1, 1),), "float16", checkpoint_interval=8)
    with pytest.raises(ArgumentError, match="max_steps_ahead: got 1, allowed for states with checkpoints at multiples: 0"):
        make_batch(multiples, max_steps_ahead=1)
    with pytest.raises(ArgumentError, match="checkpoints: got ends for some states"):
        make_batch(multiples, STATE)
    with pytest.raises(ArgumentError, match="checkpoints: got 'odd', allowed: multiples or ends"):
        MambaSpec(PAGE_SIZE, ((1, 1),), "float16", checkpoints="odd")
    with pytest.raises(ArgumentError, match="writes: got 'odd', allowed: ends or anywhere"):
        make_batch(writes="odd")
    with pytest.raises(ArgumentError, match="windows: got all, allowed for states with checkpoints"):
        make_manager(FULL, WINDOW, STATE, windows="all")
    with pytest.raises(TypeError, match=r"a StateWrites is a part of what take_moves returns"):
        StateWrites()


def test_the_interval_follows_the_sizes_of_the_layers() -> None:
    """The least multiple of 2,048 tokens at which a state takes at most a third of the keys and values between two."""
    kv = CacheGroupSpec(FULL, [f"layer {i}" for i in range(16)])
    token_bytes = 16 * FULL.page_size_bytes // PAGE_SIZE
    state = MambaSpec(PAGE_SIZE, ((2349 * token_bytes // 48 // 2,),), "float16", checkpoints="ends")
    states = CacheGroupSpec(state, [f"state {i}" for i in range(48)], pool="states")
    manager = CacheManager({"kv": 100, "states": 12}, [kv, states], MAX_MODEL_LEN)
    assert manager.checkpoint_interval == 8192
