"""Sinks: learned keys in front of every sequence, in pages that are set aside once."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from pagepool import (
    CacheGroupSpec,
    CacheManager,
    EngineRequest,
    FullAttentionSpec,
    MultiGroupPageTable,
    PagePool,
    PageTable,
    RunningBatch,
    SlidingWindowSpec,
    StepInputs,
)
from pagepool._core import TableRows
from pagepool.errors import ArgumentError, ArgumentTypeError, OutOfPagesError, PageIdError, PagePoolError, RequestTooLargeError

MAX_LEN = 64
WINDOW = CacheGroupSpec(SlidingWindowSpec(4, 1, 8, "float32", use_mla=False, sliding_window=9))


def full(num_sink_tokens: int = 8, pool: str = "kv") -> CacheGroupSpec:
    spec = FullAttentionSpec(4, 1, 8, "float32", use_mla=False, num_sink_tokens=num_sink_tokens)
    return CacheGroupSpec(spec, pool=pool)


def make_batch(manager: CacheManager, num_rows: int = 4) -> RunningBatch:
    sizes, sinks = [group.kv_cache_spec.page_size for group in manager.kv_cache_groups], manager.sink_page_ids
    return RunningBatch(manager, MultiGroupPageTable(num_rows, MAX_LEN, MAX_LEN, sizes, sink_page_ids=sinks))


def test_the_spec() -> None:
    spec = full(8).kv_cache_spec
    assert spec.type_id != full(0).kv_cache_spec.type_id
    with pytest.raises(ArgumentError, match="num_sink_tokens: got 6, allowed: a multiple of page_size, 4"):
        full(6)
    with pytest.raises(ArgumentError, match="num_sink_tokens: got -4"):
        full(-4)
    with pytest.raises(ArgumentError, match="in one group"):
        FullAttentionSpec.merge([spec, full(0).kv_cache_spec])


def test_sinks_are_the_first_pages_of_each_row() -> None:
    manager = CacheManager(20, [full()], MAX_LEN)
    assert manager.sink_page_ids == ((1, 2),)
    batch = make_batch(manager)
    [table] = batch.group_tables
    assert batch.admit(0, [1, 2, 3, 4, 5, 6]) == 0
    assert batch.admit(1, [1, 2, 3, 4, 5, 7]) == 4  # sinks are in no key
    assert table.page_table_cpu[:3, :5].tolist() == [[1, 2, 3, 4, 0], [1, 2, 3, 5, 0], [1, 2, 0, 0, 0]]
    assert table.num_pages_per_row.tolist() == [2, 2, 0, 0]
    assert batch.get_page_ids(0) == ([3, 4],)
    assert table.slot_mapping([0, 1], [5, 0], 4).tolist() == [17, 12]
    inputs = StepInputs(batch, num_tokens=8, num_reqs=4, fields=["slots", "page_ids"])
    batch.inputs(batch.step([1, 0], [7, 8]), out=inputs)
    assert inputs.slots[0][:2].tolist() == [5 * 4 + 2, 4 * 4 + 2]
    assert inputs.page_ids[0][:, :5].tolist() == [[1, 2, 3, 5, 0], [1, 2, 3, 4, 0], [0] * 5, [0] * 5]
    batch.release([0, 1])
    table.check()
    batch.check()
    assert manager.reset_prefix_cache()


def test_a_table_without_the_sinks_of_its_manager() -> None:
    manager = CacheManager(20, [full()], MAX_LEN)
    with pytest.raises(ArgumentError, match=r"sink_page_ids \(\) for group 0, allowed: the manager's, \(1, 2\)"):
        RunningBatch(manager, PageTable(4, 16, MAX_LEN))
    with pytest.raises(ArgumentError, match="sink_page_ids: got 2 groups, allowed: 1"):
        MultiGroupPageTable(4, MAX_LEN, MAX_LEN, [4], sink_page_ids=[[1], [2]])
    with pytest.raises(PageIdError, match="sink_page_ids: got -1"):
        PageTable(4, 16, MAX_LEN, sink_page_ids=[1, -1])
    with pytest.raises(ArgumentTypeError, match="sink_page_ids"):
        PageTable(4, 16, MAX_LEN, sink_page_ids="ab")  # type: ignore[arg-type]


def test_requests_cannot_have_the_pages_of_sinks() -> None:
    manager = CacheManager(18, [full()], MAX_LEN)
    with pytest.raises(RequestTooLargeError, match="needs 16 pages, the pool has 15"):
        manager.require_capacity(64)
    with pytest.raises(RequestTooLargeError, match="needs 16 pages at once, the pool has 15"):
        make_batch(manager).admit(0, [1] * 64)
    with pytest.raises(RequestTooLargeError):
        manager.allocate_slots(EngineRequest("r", [1] * 64), 64)
    manager.require_capacity(60)
    assert manager.stats().num_held_pages == 2
    with pytest.raises(OutOfPagesError):
        CacheManager(2, [full()], MAX_LEN)


def test_a_pool_with_sinks_is_not_divided() -> None:
    manager = CacheManager(20, [full()], MAX_LEN)
    with pytest.raises(
        ArgumentError, match="data_parallel_size: got 2, allowed with pages set aside, as for sinks, or out of use: 1"
    ):
        RunningBatch(manager, PageTable(4, 16, MAX_LEN, sink_page_ids=manager.sink_page_ids[0]), data_parallel_size=2)
    with pytest.raises(ArgumentError, match="data_parallel_size: got 2"):
        manager.get_computed_pages(EngineRequest("r", [1] * 9), dp_shard_hint=0, data_parallel_size=2)
    pool = PagePool(20, True)
    pool.get_new_pages(1, dp_shard_hint=0, data_parallel_size=2)
    with pytest.raises(ArgumentError, match="set_aside: got a pool of 2 shards"):
        CacheManager(20, [full()], MAX_LEN, page_pool=pool)


def test_pools_by_kind() -> None:
    manager = CacheManager({"kv": 20, "other": 20}, [full(8), full(4, "other")], MAX_LEN)
    assert manager.sink_page_ids == ((1, 2), (1,))
    batch = make_batch(manager)
    batch.admit(0, [1] * 9)
    assert [table.page_table_cpu[0, :6].tolist() for table in batch.group_tables] == [[1, 2, 3, 4, 5, 0], [1, 2, 3, 4, 0, 0]]
    batch.check()


@pytest.mark.parametrize("seed", range(6))
def test_all_else_is_as_without_sinks(seed: int) -> None:
    """A pool that is larger by the sinks hands out the same pages behind them, in all calls."""
    rng = Random(seed)
    num_pages, others = rng.choice((24, 60)), rng.choice(([], [WINDOW]))
    plain = make_batch(CacheManager(num_pages, [full(0), *others], MAX_LEN))
    sunk = make_batch(CacheManager(num_pages + 3, [full(12), *others], MAX_LEN))

    def call(name: str, *args: Any, **options: Any) -> Any:
        results = []
        for batch in (plain, sunk):
            try:
                results.append(getattr(batch, name)(*args, **options))
            except PagePoolError as error:
                results.append(type(error))
        if name in ("plan", "step"):
            results = [(result.num_grown, len(result)) if not isinstance(result, type) else result for result in results]
        assert name == "take_moves" or results[0] == results[1]
        return results[0]

    def table_of(batch: RunningBatch, group: int, num_sinks: int) -> list[list[int]]:
        columns = batch.group_tables[group].page_table_cpu[:, num_sinks if group == 0 else 0 :]
        return [[max(0, page - num_sinks) for page in row] for row in columns.tolist()]

    for _ in range(200):
        free = [row for row in range(4) if not plain.is_admitted[row]]
        running = [row for row in range(4) if row not in free]
        action = rng.random()
        if free and action < 0.4:
            call("admit", rng.choice(free), [rng.randrange(2) for _ in range(rng.randint(1, 40))])
        elif running and action < 0.7:
            call("step", running, [rng.randrange(2) for _ in running])
        elif running and free and action < 0.8:
            call("fork", rng.choice(running), [rng.choice(free)])
        elif running and action < 0.85:
            row = rng.choice(running)
            call("trim", [row], rng.randint(0, int(plain.num_tokens[row])))
        elif action < 0.9:
            call("swap_row", *rng.sample(range(4), 2))
        elif running:
            call("release", [rng.choice(running)])
        call("take_moves")
        for batch in (plain, sunk):
            batch.check()
        for group in range(1 + len(others)):
            assert table_of(plain, group, 0) == table_of(sunk, group, 3)


@pytest.mark.parametrize("sinks", [[3], [3, 3]])
def test_a_table_that_is_made_again_keeps_its_sinks(sinks: list[int]) -> None:
    table = TableRows(2, 8, [1, 2])
    with pytest.raises(PagePoolError):
        table.__init__(2, 8, sinks)  # type: ignore[misc]
    assert table.sink_page_ids == (1, 2)
    assert table.page_table_cpu[:, :2].tolist() == [[1, 2]] * 2
