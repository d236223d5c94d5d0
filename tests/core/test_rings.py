"""Rings: raw keys of the last tokens of a row, which are never cached and cost no hit."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hybrids import batch_state
from refusing import refused

from pagepool import (
    CacheGroupSpec,
    CacheManager,
    EngineRequest,
    FullAttentionSpec,
    HostTier,
    MultiGroupPageTable,
    RingSpec,
    RunningBatch,
    StepInputs,
)
from pagepool.errors import ArgumentError, ArgumentTypeError

MAX_LEN = 256
PROMPT = list(range(200))
FULL = CacheGroupSpec(FullAttentionSpec(16, 1, 8, "float32", use_mla=False))


def ring(capacity: int = 16, period: int = 4, **changes: Any) -> RingSpec:
    return RingSpec(**{"page_size": capacity, "period": period, "shape": (8,), "dtype": "float32", **changes})


def make_batch(spec: RingSpec | None = None, pools: int = 2, num_rows: int = 4, **options: Any) -> RunningBatch:
    spec = spec or ring()
    sizes = {"kv": 60, "rings": 1 + num_rows} if pools == 2 else 60
    manager = CacheManager(sizes, [FULL, CacheGroupSpec(spec, pool="rings" if pools == 2 else "kv")], MAX_LEN)
    table = MultiGroupPageTable(num_rows, MAX_LEN, MAX_LEN, page_sizes=[16, spec.page_size])
    return RunningBatch(manager, table, **options)


# --- the spec -----------------------------------------------------------------------------------------------------


def test_sizes_of_a_ring() -> None:
    spec = ring(16, 4, shape=(2, 3), dtype="bfloat16")
    assert spec.page_size_bytes == spec.max_memory_usage_bytes() == 16 * 6 * 2
    assert spec == ring(16, 4, shape=[2, 3], dtype="bfloat16")
    assert len({ring(16, 4).type_id, ring(12, 4).type_id, ring(16, 8).type_id}) == 3


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"period": 0}, ArgumentError, "period: got 0, allowed: 1 to 16"),
        ({"period": 17}, ArgumentError, "period: got 17, allowed: 1 to 16"),
        ({"period": 4.0}, ArgumentTypeError, "period: got 4.0"),
        ({"shape": ()}, ArgumentError, "shape: got no dimension"),
        ({"shape": (0,)}, ArgumentError, "shape: a dimension"),
        ({"shape": 8}, ArgumentTypeError, "shape: got int"),
        ({"capacity": 0}, ArgumentError, "page_size: got 0"),
    ],
)
def test_wrong_rings(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ring(**changes)


def test_rings_that_hits_would_need() -> None:
    with pytest.raises(ArgumentError, match="period: got 3, allowed with enable_caching: a divisor of 16, at whose multiples"):
        CacheManager(60, [FULL, CacheGroupSpec(ring(16, 3))], MAX_LEN)
    CacheManager(60, [FULL, CacheGroupSpec(ring(16, 3))], MAX_LEN, enable_caching=False)
    with pytest.raises(ArgumentError, match="got only rings, allowed with enable_caching: another group beside them"):
        CacheManager(60, [CacheGroupSpec(ring())], MAX_LEN)


# --- hits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pools", [1, 2])
def test_a_ring_costs_no_hit(pools: int) -> None:
    batch = make_batch(pools=pools)
    assert batch.admit(0, PROMPT) == 0
    assert [batch.admit(row, PROMPT) for row in (1, 2)] == [192, 192]
    rings = [batch.get_page_ids(row)[1] for row in range(3)]
    assert [len(ids) for ids in rings] == [1, 1, 1]
    assert len({ids[0] for ids in rings}) == 3  # each has its own, and no copy is due
    assert len(batch.take_moves()) == 0
    batch.release([0, 1, 2])
    assert batch.admit(3, PROMPT[:190]) == 176
    batch.check()


@pytest.mark.parametrize("pools", [1, 2])
def test_a_request_of_the_manager_hits_beside_a_ring(pools: int) -> None:
    sizes: Any = {"kv": 60, "rings": 5} if pools == 2 else 60
    manager = CacheManager(sizes, [FULL, CacheGroupSpec(ring(), pool="rings" if pools == 2 else "kv")], MAX_LEN)
    for number, most in enumerate((0, 192, 192)):
        request = EngineRequest(f"r{number}", PROMPT)
        pages, num_hits = manager.get_computed_pages(request)
        assert num_hits == most
        assert manager.allocate_slots(request, 200 - num_hits, num_hits, pages) is not None
        manager.check()


def test_admissions_wait_for_a_ring_alone_if_rings_are_short() -> None:
    manager = CacheManager({"kv": 60, "rings": 3}, [FULL, CacheGroupSpec(ring(), pool="rings")], MAX_LEN)
    requests = [EngineRequest(str(number), PROMPT[:20]) for number in range(3)]
    assert [manager.allocate_slots(request, 20) is not None for request in requests] == [True, True, False]
    manager.check()
    with pytest.raises(ArgumentError, match=r"num_pages\['rings'\]: got 3, allowed for 4 rows: at least 5"):
        RunningBatch(manager, MultiGroupPageTable(4, MAX_LEN, MAX_LEN, page_sizes=[16, 16]))


@pytest.mark.parametrize("policy", ["write_back", "write_through"])
def test_rings_are_not_saved(policy: str) -> None:
    """A request whose hit is loaded begins with a blank ring, as any other."""
    tier = HostTier({"kv": 100, "rings": 10}, policy=policy)
    groups = [FULL, CacheGroupSpec(ring(), pool="rings")]
    manager = CacheManager({"kv": 20, "rings": 5}, groups, MAX_LEN, host_tier=tier)
    batch = RunningBatch(manager, MultiGroupPageTable(4, MAX_LEN, MAX_LEN, page_sizes=[16, 16]))
    moved: list[int] = []
    for prompt in (PROMPT, list(range(1000, 1200)), PROMPT):
        num_hits = batch.admit(0, prompt)
        for _ in range(3):
            moves = batch.take_moves()
            moved += [*moves.saves.group.tolist(), *moves.loads.group.tolist()]
            assert len(moves.copies) == 0
            if moves.number:
                manager.complete(moves.number)
        batch.release([0])
    assert num_hits == 192
    assert set(moved) == {0}
    assert manager.stats().host_pools["rings"].num_cached_pages == 0
    batch.check()


# --- going back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_steps_ahead", "most"), [(0, 12), (1, 5), (2, 3), (7, 0)])
def test_drafts_that_a_ring_takes_back(num_steps_ahead: int, most: int) -> None:
    batch = make_batch(pools=1, max_steps_ahead=num_steps_ahead)
    batch.admit(0, PROMPT[:20])
    batch.append([0], [1])
    assert batch.max_num_drafts == most
    with refused(partial(batch_state, batch), ArgumentError, f"num_drafts: got {most + 1}, .*: up to {most}$"):
        batch.plan([0], num_drafts=most + 1)
    with refused(partial(batch_state, batch), ArgumentError, f"num_drafts: got {most + 1}, .*: up to {most}$"):
        batch.admit(1, PROMPT, num_drafts=most + 1)
    step = batch.plan([0], num_drafts=most)
    assert step.num_grown == 1
    batch.settle(step, [7], 1)  # all drafts are rejected
    batch.check()


def test_cuts_go_back_to_what_the_ring_has() -> None:
    batch = make_batch(pools=1)  # a ring of 16 tokens, blank at multiples of 4
    batch.admit(0, PROMPT)
    for num_tokens in (183, 90, 1):
        with refused(partial(batch_state, batch), ArgumentError, f"got {num_tokens} .*whose ring has lost the tokens before"):
            batch.trim([0], num_tokens)
    batch.trim([0], 187)  # the ring has 184 to 199
    with refused(partial(batch_state, batch), ArgumentError, "whose ring has lost"):
        batch.trim([0], 183)  # 180 was overwritten by 196, though the row has 187 tokens now
    batch.trim([0], 185)
    batch.trim([0], 60)  # a multiple of the period
    batch.trim([0], 0)
    batch.check()


def test_rejected_drafts_have_overwritten_what_came_before() -> None:
    batch = make_batch(pools=1)
    batch.admit(0, PROMPT[:100])
    batch.append([0], [1])
    batch.settle(batch.plan([0], num_drafts=12), [7], 1)  # 101 to 112 were written, and rejected
    batch.fork(0, [1])
    batch.take_moves()
    for row, num_tokens in ((0, 91), (0, 98), (1, 98)):  # 112 is where 96 was
        with refused(partial(batch_state, batch), ArgumentError, "whose ring has lost"):
            batch.trim([row], num_tokens)
    batch.trim([0, 1], 101)
    batch.check()


def test_a_second_cut_goes_back_to_what_the_ring_still_has() -> None:
    batch = make_batch(pools=1)
    batch.admit(0, PROMPT)
    for num_tokens in (199, 195, 190, 186):
        batch.trim([0], num_tokens)  # the ring has 184 to 199
    batch.append([0], [1])
    batch.plan([0])
    batch.trim([0], 185)
    batch.check()


def test_a_failed_step_goes_back_within_the_ring() -> None:
    batch = make_batch()
    first = batch.new_step()
    batch.admit(0, PROMPT[:50], step=first)
    batch.admit(1, PROMPT[:50], step=first)
    batch.settle(first)
    batch.append([0] * 9 + [1] * 30, list(range(300, 339)))
    step = batch.plan([0, 1], [9, 30])
    assert batch.settle(step, failed=True).tolist() == [1]  # 48 and 49 were overwritten by 64 and 65
    assert batch.num_computed_tokens[0] == 50
    assert batch.plan([0], 9).num_grown == 1
    batch.check()


def test_a_fork_copies_the_ring() -> None:
    batch = make_batch(pools=1)
    batch.admit(0, PROMPT[:50])
    batch.fork(0, [1])
    copies = batch.take_moves().copies
    pages = [batch.get_page_ids(row)[1][0] for row in (0, 1)]
    assert (1, *pages) in zip(copies.group.tolist(), copies.src.tolist(), copies.dst.tolist(), strict=True)
    with refused(partial(batch_state, batch), ArgumentError, "whose ring has lost"):
        batch.trim([1], 30)
    batch.check()


def test_tokens_from_elsewhere_that_fail_leave_no_ring() -> None:
    batch = make_batch()
    assert batch.admit(0, PROMPT, num_external_tokens=80) == 0
    assert batch.fail_external(0, 64) == 0
    batch.check()


# --- inputs -------------------------------------------------------------------------------------------------------


def test_inputs_have_the_page_of_a_ring() -> None:
    batch = make_batch()
    inputs = StepInputs(batch, num_tokens=256, num_reqs=4, fields=("slots", "state_pages"))
    step = batch.new_step()
    batch.admit(0, PROMPT, step=step)
    batch.admit(1, PROMPT, step=step)
    batch.inputs(step, out=inputs)
    assert inputs.state_pages[0] is None
    assert inputs.state_pages[1][:2].tolist() == [batch.get_page_ids(row)[1][0] for row in (0, 1)]
    batch.check()


def test_slots_of_a_ring() -> None:
    """Position p is at p % capacity; tokens that a later one of the step overwrites have the slot of padding."""
    batch = make_batch(ring(16, 4))
    inputs = StepInputs(batch, num_tokens=64, num_reqs=4, fields=["slots", "state_pages", "positions"], pad_slot=-5)
    batch.admit(0, PROMPT[:40])
    batch.admit(1, PROMPT[:3])
    batch.inputs(rows=[1, 0], starts=[0, 0], stops=[3, 40], out=inputs)
    pages = inputs.state_pages[1].tolist()
    assert pages[:2] == [batch.get_page_ids(1)[1][0], batch.get_page_ids(0)[1][0]]
    expected = [*(16 * pages[0] + position for position in range(3)), *[-5] * 24]
    expected += [16 * pages[1] + position % 16 for position in range(24, 40)]
    assert inputs.slots[1].tolist() == [*expected, *[-5] * 21]
    batch.inputs(batch.step([0, 1], [7, 8]), out=inputs, num_tokens=2)
    assert inputs.slots[1][:2].tolist() == [16 * pages[1] + 40 % 16, 16 * pages[0] + 3]
