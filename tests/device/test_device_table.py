"""Commits: what reaches the device, what never does, and the number of compilations, on one device, on several, in two
processes.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from devices import (  # noqa: E402
    Program,
    after_slow_work,
    assert_separate,
    await_programs,
    commit_at_random,
    commit_in_all_ways,
    count_compilations,
    count_compilations_of_warmup,
    make_pending,
    read,
    run_work,
)
from ports import free_port  # noqa: E402
from settings import NUM_OPERATIONS  # noqa: E402
from table_model import SHAPES, commit_groups_alone, make_grouped_work, make_work, slots_in_numpy  # noqa: E402

import pagepool  # noqa: E402
from pagepool import MultiGroupPageTable, PageTable, device, page_table  # noqa: E402
from pagepool._core import pack_dirty_segments  # noqa: E402
from pagepool.errors import ArgumentError, ArgumentTypeError, IntegrityError  # noqa: E402

GROUPS = [[16], [16, 16], [16, 1, 7]]


# Random work.


@pytest.mark.usefixtures("word")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_commits_send_what_changed(shape: tuple[int, int]) -> None:
    """With donation in one word, and without it in the other; groups the other way round."""
    run_work(make_work(shape, seed=1, donate=not jax.config.jax_enable_x64), 100 * NUM_OPERATIONS // 200_000 + 20)


@pytest.mark.usefixtures("word")
@pytest.mark.parametrize("page_sizes", GROUPS, ids=str)
def test_commits_send_all_groups(page_sizes: list[int]) -> None:
    run_work(
        make_grouped_work(6, 300, page_sizes, seed=2, donate=jax.config.jax_enable_x64), 60 * NUM_OPERATIONS // 200_000 + 15
    )


def test_a_group_may_be_committed_alone() -> None:
    commit_groups_alone(make_grouped_work(6, 300, [16, 5], seed=3), commit_at_random)


@pytest.mark.parametrize("shape", [(8, 100), (300, 640)], ids=str)
def test_host_writes_never_reach_a_pending_commit(shape: tuple[int, int]) -> None:
    """The device array is still being computed when the host table, which jax could alias, is overwritten."""
    work = make_work(shape, seed=4)
    assert work.pairs[0][0].page_table_cpu.ctypes.data % 64 == 0
    run_work(work, 5, is_pending=True)
    run_work(make_grouped_work(6, 300, [16, 5], seed=4), 2, is_pending=True)


@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize("shape", [(256, 2048), pytest.param((1024, 8192), marks=pytest.mark.slow)], ids=str)
def test_host_writes_never_reach_a_large_commit(shape: tuple[int, int], is_full: bool) -> None:
    table = PageTable(*shape, 64)
    for value in range(1, 5):
        for row in range(0, shape[0], 1 if is_full else 64):
            table.append_row([value] * 64, row)
        num_segments = shape[0] if is_full else shape[0] // 64
        if is_full:
            table.mark_dirty()
        else:
            make_pending(table)
            assert table.count_dirty_segments(0, shape[0]) == num_segments
        before = table.page_table
        expected = table.page_table_cpu.copy()
        array = table.commit(shape[0])
        assert array is not before
        table.page_table_cpu[:] = -1
        np.testing.assert_array_equal(read(array), expected)
        table.page_table_cpu[:] = expected


def test_what_was_sent_is_never_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """jax may alias its input, so what is sent is new memory each time, and whole tables are aligned as jax prefers it."""
    payloads: list[Any] = []
    uploads: list[Any] = []

    def keep(*args: Any) -> Any:
        payload = pack_dirty_segments(*args)
        payloads.extend(payload)
        return payload

    upload = page_table.upload
    monkeypatch.setattr(page_table, "pack_dirty_segments", keep)
    monkeypatch.setattr(page_table, "upload", lambda array, sharding: uploads.append(array) or upload(array, sharding))
    table = PageTable(64, 640, 64)
    for row in range(4):
        table.append_row([1], row)
        table.commit(64)
    for _ in range(3):
        table.mark_dirty()
        table.commit(64)
    assert (len(payloads), len(uploads)) == (8, 1 + 3)
    assert all(array.ctypes.data % 64 == 0 for array in uploads[1:])  # the first one is zeros
    assert_separate([*payloads, *uploads, table.page_table_cpu])


# The choice between segments and full uploads.


@pytest.mark.usefixtures("word")
def test_windows_or_the_whole_table(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("scatter_payload", "upload"):
        function = getattr(page_table, name)
        monkeypatch.setattr(page_table, name, lambda *args, name=name, function=function: calls.append(name) or function(*args))
    table = PageTable(64, 640, 64)  # 640 segments in all, so 40 at most
    table.warmup()
    for num_rows, num_committed, expected in (
        (4, 64, ["scatter_payload"]),
        (5, 64, ["upload"]),
        (0, 64, []),
        (5, 4, ["scatter_payload"]),
        (64, 63, ["scatter_payload"] * 10),
        (0, 64, ["scatter_payload"]),
    ):
        table.mark_dirty(range(num_rows))
        calls.clear()
        table.commit(num_committed)
        assert calls == expected


@pytest.mark.parametrize("page_sizes", [None, [1, 16]])
def test_nothing_dirty_gives_the_same_arrays(page_sizes: list[int] | None) -> None:
    work = make_grouped_work(8, 100, page_sizes, seed=1) if page_sizes else make_work((8, 100), seed=1)
    first = work.commit(8)
    work.tables.append_row([[1], [2]] if page_sizes else [1], 5)
    assert all(same is array for same, array in zip(work.commit(5), first, strict=True))
    assert not any(same is array for same, array in zip(work.commit(6), first, strict=True))


# Donation.


def test_commits_replace_the_array_in_place() -> None:
    table = PageTable(64, 640, 64)
    table.warmup()  # the first array may be the uploaded NumPy array itself, which is copied once
    old = table.commit(64)
    pointer = old.unsafe_buffer_pointer()
    table.append_row([1], 0)
    new = table.commit(64)
    assert old.is_deleted()
    assert new.unsafe_buffer_pointer() == pointer
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(old)


def test_without_donation_old_arrays_stay() -> None:
    table = PageTable(64, 640, 64, donate=False)
    arrays = []
    for value in range(1, 5):
        table.append_row([value], value)
        arrays.append(table.commit(64))
    table.mark_dirty()
    arrays.append(table.commit(64))
    table.clear()
    assert [read(array).sum() for array in arrays] == [1, 3, 6, 10, 10]


@pytest.mark.parametrize("donate", [True, False])
def test_a_step_that_still_reads_the_table_is_safe(donate: bool) -> None:
    table = PageTable(64, 640, 64, donate=donate)
    table.warmup()
    after_slow_work(table.page_table).block_until_ready()
    for value in range(1, 7):
        expected = table.page_table_cpu.copy()
        step = after_slow_work(table.page_table)
        table.append_row([value] * 100, value)
        if value % 3 == 0:
            table.mark_dirty()  # a full upload
        array = table.commit(64)
        table.page_table_cpu[:, 600:] = 9
        np.testing.assert_array_equal(np.asarray(step), expected)
        table.page_table_cpu[:, 600:] = 0
        np.testing.assert_array_equal(read(array), table.page_table_cpu)


def test_a_view_that_is_alive_keeps_its_contents() -> None:
    """NumPy views of the device array prevent its donation: a copy is made instead."""
    table = PageTable(64, 640, 64)
    table.append_row([1], 0)
    view = np.asarray(table.commit(64))
    table.append_row([2], 0)
    array = table.commit(64)
    assert view[0, :2].tolist() == [1, 0]
    assert read(array)[0, :2].tolist() == [1, 2]


# Failures.


def interrupt(*_: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize("takes_the_arrays", [False, True])
def test_after_a_failure_all_is_sent_again(takes_the_arrays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    work = make_grouped_work(6, 300, [16, 5], seed=6)
    run_work(work, 5)

    def broken(arrays: Any, *_: Any) -> Any:
        for array in arrays if takes_the_arrays else ():
            array.delete()
        interrupt()

    work.both("append_row", [[], []], 0)
    work.both("add_row", [[1], [2]], 3)
    with monkeypatch.context() as patch:
        patch.setattr(page_table, "get_scatter", lambda *_: broken)
        with pytest.raises(KeyboardInterrupt):
            work.tables.commit(6)
    for table, model in work.pairs:
        assert table.count_dirty_segments(0, 6) == 6 * -(-model.table.shape[1] // 64)
        if takes_the_arrays:
            model.on_device[:] = 0  # lost; rows that are committed next are whole again
    commit_at_random(work)
    run_work(work, 10)


def test_after_a_failed_upload_all_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    table = PageTable(64, 640, 64)
    table.append_row([1], 0)
    array = table.commit(64)
    table.append_row([2], 0)
    table.mark_dirty()
    with monkeypatch.context() as patch:
        patch.setattr(page_table, "upload", interrupt)
        with pytest.raises(KeyboardInterrupt):
            table.commit(64)
    assert table.page_table is array
    assert read(table.commit(64)).sum() == 3


def test_after_a_failed_clear_all_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    table = PageTable(64, 640, 64)
    table.append_row([1], 0)
    table.commit(64)
    with monkeypatch.context() as patch:
        patch.setattr(PageTable, "clear_rows", interrupt)
        with pytest.raises(KeyboardInterrupt):
            table.clear()
    assert table.count_dirty_segments(0, 64) == 64 * 10
    assert read(table.commit(64)).sum() == 1
    table.clear()
    assert read(table.commit(64)).sum() == 0


def test_check_finds_what_the_device_does_not_have() -> None:
    table = PageTable(8, 100, 64)
    table.append_row([1, 2], 3)
    table.check()
    table.commit(8)
    table.append_row([4], 3)
    table.check()  # not yet sent
    table.commit(8)
    table.page_table_cpu[3, 1] = 9
    with pytest.raises(IntegrityError, match=r"^row 3, column 1: the device has another page in a clean segment$"):
        table.check()
    table.mark_dirty([3])
    table.check()
    table.commit(8)
    table.check()
    with pytest.raises(ArgumentError, match="device_table: got 8 x 99, allowed: 8 x 100"):
        table.find_unsent(np.zeros((8, 99), dtype=np.int32))


@pytest.mark.parametrize("is_new", [False, True])
def test_a_commit_in_a_traced_function_is_refused(is_new: bool) -> None:
    """What it would have sent is sent later."""
    table = PageTable(8, 64, 64)
    if not is_new:
        table.commit(8)
    table.append_row([5, 6], 1)
    with pytest.raises(
        ArgumentTypeError, match=r"^page table: got a call in a traced function, allowed: calls outside of jax\.jit"
    ):
        jax.jit(lambda other: table.commit(8) + other)(1)
    assert table.commit(8)[1, :2].tolist() == [5, 6]
    table.check()


def test_a_table_that_the_user_deleted_is_made_anew() -> None:
    table = PageTable(8, 100, 64)
    table.append_row([1], 0)
    table.commit(8).delete()
    table.append_row([2], 1)
    with pytest.raises(RuntimeError, match="deleted"):
        table.commit(8)
    assert read(table.commit(8)).sum() == 3


def test_tables_leave_at_once_with_their_arrays() -> None:
    gc.collect()
    gc.disable()
    try:
        table = PageTable(64, 640, 64)
        table.append_row([1], 0)
        array = weakref.ref(table.commit(64))
        before = len(jax.live_arrays())
        del table
        assert array() is None
        assert len(jax.live_arrays()) == before - 1
    finally:
        gc.enable()


def test_commits_leave_nothing_behind() -> None:
    table = PageTable(64, 640, 64)
    table.warmup()
    for i in range(3):
        table.append_row([1], i)
        table.commit(64)
    gc.collect()
    before = len(jax.live_arrays())
    for i in range(50):
        table.append_row([1], i)
        table.commit(64)
    assert len(jax.live_arrays()) == before


# Compilations.


@pytest.mark.parametrize(
    ("shape", "num_sizes"), [((256, 2048), 4), ((1024, 8192), 6), ((1, 1), 1), ((5, 7), 1), ((64, 1000), 2)], ids=str
)
def test_as_many_compilations_as_payload_sizes(shape: tuple[int, int], num_sizes: int) -> None:
    assert count_compilations_of_warmup(PageTable(*shape, 64)) == num_sizes


def test_warmup_changes_nothing() -> None:
    table = PageTable(8, 100, 64)
    table.append_row([1], 0)
    version = table.cpu_version
    table.warmup()
    assert (table.cpu_version, table.count_dirty_segments(0, 8), read(table.page_table).sum()) == (version, 1, 0)
    assert read(table.commit(8)).sum() == 1


@pytest.mark.usefixtures("word")
@pytest.mark.parametrize("donate", [True, False])
def test_no_compilation_after_warmup(donate: bool) -> None:
    """For any number of requests, amount of work, and way of sending."""
    shape = (64, 1000)
    table = PageTable(*shape, 64, donate=donate)
    table.warmup()
    with count_compilations() as compilations:
        for num_reqs in range(shape[0] + 1):
            for num_dirty in (1, 7, num_reqs):
                table.mark_dirty(range(min(num_dirty, num_reqs)))
                table.append_row([num_reqs], num_reqs % shape[0])
                table.commit(num_reqs).block_until_ready()
        table.clear()
        table.commit(64)
    assert not compilations


@pytest.mark.usefixtures("word")
def test_no_compilation_after_warmup_of_groups() -> None:
    tables = MultiGroupPageTable(16, 2000, 64, [16, 2])
    assert count_compilations_of_warmup(tables) == 2
    with count_compilations() as compilations:
        for num_reqs in range(17):
            tables.append_row([[1], [num_reqs]], num_reqs % 16)
            tables.commit(num_reqs)
            tables.mark_dirty()
            tables.commit(num_reqs)
    assert not compilations


def test_without_warmup_only_what_is_needed_is_compiled() -> None:
    table = PageTable(64, 1001, 64)
    jax.clear_caches()
    with count_compilations() as compilations:
        for num_reqs in range(1, 65):
            table.append_row([1], num_reqs - 1)
            table.commit(num_reqs)
    assert len(compilations) == 1


# Transfers.


@contextmanager
def guard_all_threads(level: str) -> Iterator[None]:
    jax.config.update("jax_transfer_guard", level)
    try:
        yield
    finally:
        jax.config.update("jax_transfer_guard", None)


@pytest.mark.parametrize("guard", [jax.transfer_guard, jax.transfer_guard_host_to_device, guard_all_threads])
def test_commits_pass_a_transfer_guard(guard: Any) -> None:
    with guard("disallow"):
        table = PageTable(64, 640, 64)
        table.warmup()
        commit_in_all_ways(table)
        with pytest.raises(Exception, match="isallowed"):
            jax.jit(lambda x: x + 1)(np.ones(3))


# Slots.


@pytest.mark.usefixtures("word")
@pytest.mark.parametrize("page_size", [1, 7, 16])
def test_device_slots_are_those_of_numpy(page_size: int) -> None:
    rng = np.random.default_rng(page_size)
    table = PageTable(64, 257, 64)
    for row in range(64):
        table.append_row(rng.integers(0, 1000, 257, dtype=np.int32), row)
    rows = rng.integers(0, 64, 500, dtype=np.int32)
    positions = rng.integers(0, 257 * page_size, 500, dtype=np.int32)
    trace = jax.jit(pagepool.device_slot_mapping, static_argnames="page_size")
    slots = trace(table.commit(64), rows, positions, page_size=page_size)
    assert slots.dtype == jnp.int32
    np.testing.assert_array_equal(slots, slots_in_numpy(table.page_table_cpu, rows, positions, page_size))
    np.testing.assert_array_equal(slots, table.slot_mapping(rows, positions, page_size))


# Many devices.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_devices", "is_wide"),
    [(4, False), pytest.param(4, True, marks=pytest.mark.slow), pytest.param(8, False, marks=pytest.mark.slow)],
)
def test_several_devices(num_devices: int, is_wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_ENABLE_X64", str(int(is_wide)))
    await_programs([Program("many_devices.py", num_devices=num_devices)], timeout=600)


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ < (0, 5), reason="collectives on CPU break in such old versions, with any program")
def test_two_processes() -> None:
    address = f"127.0.0.1:{free_port()}"
    programs = [Program("two_processes.py", address, str(i), num_devices=2) for i in range(2)]
    await_programs(programs, timeout=300)


def test_tables_that_span_processes_have_one_sharding() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("rows",))
    specs = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("rows")
    with pytest.raises(ArgumentError, match="sharding: got 2 for tables that span processes, allowed: one for all"):
        page_table.LocalScatter(tuple(jax.sharding.NamedSharding(mesh, spec) for spec in specs), ())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_shard_map_is_found_where_older_versions_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    older = pytest.importorskip("jax.experimental.shard_map")
    monkeypatch.delattr(jax, "shard_map", raising=False)
    assert device.get_shard_map() is older.shard_map
    assert device.get_shard_map(is_checked=False).func is older.shard_map


@pytest.mark.parametrize("shape", [(4, 5), (3, 100)], ids=str)
def test_sinks_reach_the_device(shape: tuple[int, int]) -> None:
    """With the first commit and after `clear`, in all rows that are committed."""
    num_rows, num_columns = shape
    table = PageTable(num_rows, num_columns, 64, sink_page_ids=[7, 8])
    table.add_row([3, 4], 1)
    for _ in range(2):
        assert read(table.commit(num_rows)).tolist() == table.page_table_cpu.tolist()
        assert table.page_table_cpu[:, :2].tolist() == [[7, 8]] * num_rows
        table.check()
        table.append_row([5], 1)
        assert read(table.commit(num_rows))[1, :5].tolist() == [7, 8, *table.page_table_cpu[1, 2:5].tolist()]
        table.clear()
        assert table.num_pages_per_row.tolist() == [0] * num_rows
