"""The host side of page tables: rows against a NumPy model, errors that change nothing, slots. No test here needs jax."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import weakref
from typing import Any

import numpy as np
import pytest
from refusing import refused
from sources import run_python
from table_model import MAX_PAGE_ID, SHAPES, make_grouped_work, make_work, slots_in_numpy

import pagepool
from pagepool import MultiGroupPageTable, PageTable
from pagepool._core import GroupedRows, PageIds, pack_dirty_lines, pack_dirty_segments
from pagepool.compat.easydel import cdiv
from pagepool.errors import (
    ArgumentError,
    ArgumentTypeError,
    IntegrityError,
    PagePoolError,
    RowIndexError,
    RowOverflowError,
)

NUM_STEPS = 600


def make_table(num_rows: int = 4, num_columns: int = 8) -> PageTable:
    return PageTable(num_rows, num_columns, 64)


def state_of(tables: Any) -> list[Any]:
    """Return the state that a call may change."""
    return [
        (
            table.page_table_cpu.tolist(),
            table.num_pages_per_row.tolist(),
            table.cpu_version,
            table.count_dirty_segments(0, table.max_num_reqs),
        )
        for table in getattr(tables, "page_tables", (tables,))
    ]


# Checks.


DAMAGE = {
    "row 1 has 9 pages, reaches to 2 of 8 columns": lambda table: table.num_pages_per_row.__setitem__(1, 9),
    "row 1 has -1 pages, reaches to 2 of 8 columns": lambda table: table.num_pages_per_row.__setitem__(1, -1),
    "row 1: page -5 (at 1), allowed: at least 0": lambda table: table.page_table_cpu.__setitem__((1, 1), -5),
    "row 1: page 3 (at 7) behind the row's reach, 2; no mark_dirty?": lambda table: table.page_table_cpu.__setitem__((1, 7), 3),
}


@pytest.mark.parametrize("message", DAMAGE)
@pytest.mark.parametrize("grouped", [False, True])
def test_check_finds_what_was_written_into_a_table(grouped: bool, message: str) -> None:
    tables = MultiGroupPageTable(4, 128, 64, [64, 16]) if grouped else make_table()
    table = tables.page_tables[1] if isinstance(tables, MultiGroupPageTable) else tables
    table.append_row([6, 7], 1)
    tables.check()
    DAMAGE[message](table)
    with pytest.raises(IntegrityError) as caught:
        tables.check()
    assert str(caught.value) == message


# Rows against the model.


@pytest.mark.parametrize("sizes", [*SHAPES, [16], [16, 16], [16, 1, 7]], ids=str)
def test_rows_are_those_of_the_model(sizes: Any) -> None:
    """Of a table by its shape, or of groups by their page sizes."""
    work = make_work(sizes, seed=1) if isinstance(sizes, tuple) else make_grouped_work(6, 200, sizes, seed=2)
    for _ in range(NUM_STEPS):
        work.do()
        work.check()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dirty_segments_are_enough(shape: tuple[int, int], seed: int) -> None:
    """Segments written over the last known table, with commits of random rows in between, give the table."""
    work = make_work(shape, seed)
    (table, model), *_ = work.pairs
    for _ in range(200):
        for _ in range(work.rng.integers(0, 4)):
            work.do()
            if not model.table.any():  # clear() sets the device to zeros in another way
                model.on_device[:] = 0
                table.mark_dirty()
        num_rows = int(work.rng.integers(0, shape[0] + 1))
        apply(*pack_dirty_segments((table,), num_rows, int(work.rng.integers(1, 500))), model.on_device)
        if not table.count_dirty_segments(0, num_rows):
            np.testing.assert_array_equal(model.on_device[:num_rows], model.table[:num_rows])


@pytest.mark.parametrize("num_behind", [0, 1, 64])
@pytest.mark.parametrize("sizes", [[16], [16, 1, 7]], ids=str)
def test_dirty_lines_are_enough(sizes: list[int], num_behind: int) -> None:
    """Lines written one after another into one array of all groups, or of wider rows, give the tables."""
    work = make_grouped_work(6, 300, sizes, seed=num_behind)
    tables = [table for table, _ in work.pairs]
    widths = [table.max_num_pages_per_req + num_behind for table in tables]
    width = int(np.gcd.reduce([64, *widths]))
    firsts = np.cumsum([0, *(6 * columns // width for columns in widths)])
    lines = np.zeros((firsts[-1], width), dtype=np.int32)
    for _ in range(200):
        work.do()
        num_rows, room = int(work.rng.integers(0, 7)), int(work.rng.integers(64, 2000))
        numbers, values = np.full(room, -1), np.full((room, width), -1, dtype=np.int32)
        num = pack_dirty_lines(tuple(tables), num_rows, np.array([*zip(firsts, widths, strict=False)]), numbers, values)
        lines[numbers[:num]] = values[:num]
        assert (numbers[num:] == -1).all()
        for table, (_, model), first, columns in zip(tables, work.pairs, firsts, widths, strict=False):
            if not model.table.any():  # clear() empties the device in another way
                table.mark_dirty()
            elif not table.count_dirty_segments(0, num_rows):
                on_device = lines[first : first + 6 * columns // width].reshape(6, columns)[:num_rows]
                np.testing.assert_array_equal(on_device[:, : columns - num_behind], model.table[:num_rows])
                assert not on_device[:, columns - num_behind :].any()


LINE_ERRORS: dict[str, Any] = {
    "places, numbers: got 1 x 2 and 3, allowed: 1 x 2 and 4": lambda pack: pack(numbers=np.zeros(3, dtype=np.int64)),
    "places, numbers: got 2 x 2 and 4, allowed: 1 x 2 and 4": lambda pack: pack(places=np.zeros((2, 2), dtype=np.int64)),
    "lines: got a width of 3, allowed: a divisor of 64": lambda pack: pack(lines=np.zeros((4, 3), dtype=np.int32)),
    "places: got line 0 and 7 columns, allowed: lines up to 2305843009213693952, multiples of 8 from 8 columns on": (
        lambda pack: pack(places=np.array([[0, 7]]))
    ),
    "places: got line -1 and 8 columns, allowed: lines up to 2305843009213693952, multiples of 8 from 8 columns on": (
        lambda pack: pack(places=np.array([[-1, 8]]))
    ),
    "num_reqs: got 5, allowed: 0 to 4": lambda pack: pack(num_reqs=5),
    "tables: got int, allowed: TableRows": lambda pack: pack(tables=(3,)),
}


@pytest.mark.parametrize("message", LINE_ERRORS)
def test_lines_that_do_not_fit_are_refused(message: str) -> None:
    table = make_table()
    table.append_row([1], 2)

    def pack(**changed: Any) -> int:
        given: dict[str, Any] = {
            "tables": (table,),
            "num_reqs": 4,
            "places": np.array([[0, 8]]),
            "numbers": np.zeros(4, dtype=np.int64),
            "lines": np.zeros((4, 8), dtype=np.int32),
        }
        return pack_dirty_lines(*(given | changed).values())

    with refused(lambda: state_of(table), PagePoolError) as caught:
        LINE_ERRORS[message](pack)
    assert str(caught.value) == message
    assert pack() == 1


def test_the_first_rows_may_be_copied() -> None:
    table = make_table()
    for row in range(3):
        table.append_row([row + 1], row)
    assert table.copy_aligned(2)[:, 0].tolist() == [1, 2]
    assert table.copy_aligned(0).shape == (0, 8)
    assert table.count_dirty_segments(0, 4) == 1
    with refused(lambda: state_of(table), ArgumentError, "num_rows: got 5, allowed: 0 to 4"):
        table.copy_aligned(5)


def apply(segments: Any, starts: Any, on_device: Any) -> None:
    """Write a payload as the device does, and check its padding."""
    (rows, columns) = starts[0].T
    is_here = rows < on_device.shape[0]
    width = min(64, on_device.shape[1])
    assert segments.shape == (rows.size, width)
    assert np.unique(rows[~is_here]).size == np.count_nonzero(~is_here)
    for segment, row, column in zip(segments[is_here], rows[is_here], columns[is_here], strict=True):
        assert 0 <= column <= on_device.shape[1] - width
        on_device[row, column : column + width] = segment


def test_the_buffers_are_the_arrays_themselves() -> None:
    table = make_table()
    assert table.get_cpu_tensor() is table.page_table_cpu
    assert table.page_table_cpu.dtype == table.num_pages_per_row.dtype == np.int32
    assert table.page_table_cpu.ctypes.data % 64 == 0
    table.append_row([5, 6], 1)
    table.get_cpu_tensor()[1, 1] = 9
    table.move_row(1, 0)
    assert table.page_table_cpu[0].tolist() == [5, 9, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "page_ids",
    [
        [3, 4],
        (3, 4),
        range(3, 5),
        (i for i in (3, 4)),
        PageIds([3, 4]),
        *(np.array([3, 4], dtype=dtype) for dtype in ("int32", "int64", "uint8", "uint64", ">i4")),
        np.array([3, 0, 4, 0], dtype=np.int32)[::2],
        np.array([4, 3], dtype=np.int64)[::-1],
        np.frombuffer(np.array([3, 4], dtype=np.int32).tobytes(), dtype=np.int32),  # read-only
        [np.int32(3), np.int64(4)],
    ],
    ids=lambda value: f"{type(value).__name__}-{getattr(value, 'dtype', '')}",
)
def test_ids_come_in_many_forms(page_ids: Any) -> None:
    table = make_table()
    table.append_row(page_ids, np.int64(0))
    assert table.page_table_cpu[0, :3].tolist() == [3, 4, 0]


@pytest.mark.parametrize("page_ids", [[], np.empty(0, dtype=np.int32), ()], ids=type)
def test_no_ids_change_nothing(page_ids: Any) -> None:
    table, tables = filled_table(), filled_tables()
    before = state_of(table), state_of(tables)
    table.append_row(page_ids, 0)
    table.append_rows_batch([page_ids, page_ids], [1, 2])
    for rows in ([], [3, 99], np.array([1, 2])):  # as in an engine: no requests, no work
        table.append_rows_batch([], rows)
        tables.append_rows_batch([], rows)
    assert (state_of(table), state_of(tables)) == before


def test_versions_move_with_each_change() -> None:
    table = make_table()
    calls: list[tuple[Any, ...]] = [
        (table.append_row, [1], 0),
        (table.add_row, [2], 1),
        (table.append_rows_batch, [[1], [2]], [0, 1]),
        (table.move_row, 0, 2),
        (table.swap_row, 0, 1),
        (table.clear_row, 0),
        (table.mark_dirty, [3]),
        (table.mark_dirty,),
        (table.clear,),
    ]
    for call, *args in calls:
        version = table.cpu_version
        call(*args)
        assert table.cpu_version > version


def test_only_touched_windows_are_dirty() -> None:
    table = make_table(4, 640)
    table.append_row([1], 0)
    table.append_row([1] * 65, 1)
    assert table.count_dirty_segments(0, 4) == 3
    assert table.count_dirty_segments(0, 1) == 1
    pack_dirty_segments((table,), 4, 16)
    table.append_row([1] * 63, 0)
    table.append_row([1] * 64, 0)
    assert table.count_dirty_segments(0, 4) == 2
    pack_dirty_segments((table,), 4, 16)
    table.swap_row(0, 1)
    assert table.count_dirty_segments(0, 4) == 4
    table.mark_dirty([3])
    assert table.count_dirty_segments(3, 4) == 10


def test_a_row_may_come_twice_in_a_batch() -> None:
    tables = MultiGroupPageTable(4, 64, 64, [16, 32])
    tables.append_rows_batch([[[1], [2]], [[3, 4], []], [[5], [6]]], np.array([2, 2, 2]))
    assert tables[0].page_table_cpu[2].tolist() == [1, 3, 4, 5]
    assert tables[1].page_table_cpu[2].tolist() == [2, 6]
    with refused(lambda: state_of(tables), RowOverflowError, "row 1: got 1 pages behind 4 that it has, allowed: 4 in all"):
        tables.append_rows_batch([[[1, 2], []], [[3, 4], [7]], [[5], []]], [1, 1, 1])


def test_groups_are_tables_by_number() -> None:
    tables = MultiGroupPageTable(4, 100, 64, [16, 32])
    assert len(tables) == 2
    assert [table.page_table_cpu.shape for table in tables] == [(4, 7), (4, 4)]
    assert tables[-1] is tables.page_tables[1]
    with pytest.raises(IndexError):
        tables[2]


def test_the_names_that_engines_import_beside_the_tables() -> None:
    assert pagepool.PAGE_TABLE_PADDING_VAL == pagepool.page_table.PAGE_TABLE_PADDING_VAL == 0
    assert pagepool.SLOT_MAPPING_PADDING_VAL == pagepool.page_table.SLOT_MAPPING_PADDING_VAL == 0
    assert cdiv(a=7, b=3) == 3
    assert cdiv(6, 3) == 2


def test_no_groups_at_all() -> None:
    tables = MultiGroupPageTable(4, 64, 64, [])
    tables.append_rows_batch([[], []], [0, 1])
    tables.add_row([], 0)
    tables.clear_row(0)
    tables.move_row(0, 1)
    tables.swap_row(0, 1)
    tables.mark_dirty()
    tables.clear()
    tables.warmup()
    assert tables.commit(4) == ()


# Errors change nothing.


def filled_table() -> PageTable:
    table = make_table()
    table.append_row([1, 2, 3], 0)
    table.append_row([4], 1)
    pack_dirty_segments((table,), 1, 16)
    return table


def filled_tables() -> MultiGroupPageTable:
    tables = MultiGroupPageTable(4, 128, 64, [16, 16])
    tables.append_row([[1, 2, 3], [4]], 0)
    pack_dirty_segments(tables.page_tables, 1, 16)
    return tables


def refuse(tables: Any, error: type[Exception], call: str, *args: Any) -> None:
    """Assert that the call raises exactly this error, and changes nothing."""
    with refused(lambda: state_of(tables), PagePoolError) as raised:
        getattr(tables, call)(*args)
    assert raised.type is error


def test_an_id_whose_reading_fails_or_changes_the_table() -> None:
    table = make_table()

    class Sly:
        def __index__(self) -> int:
            table.append_row([1] * 7, 0)
            return 9

    class Failing:
        def __index__(self) -> int:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        table.append_row([1, Failing()], 0)
    assert not table.page_table_cpu.any()
    table.append_row([2, Sly()], 1)
    with pytest.raises(RowOverflowError):
        table.append_row([2, Sly()], 0)
    assert table.num_pages_per_row.tolist() == [7, 2, 0, 0]


@pytest.mark.parametrize("count", [-1, 9, 2**31 - 1, -(2**31)])
def test_overwritten_counts_do_not_lead_outside_the_table(count: int) -> None:
    table = filled_table()
    table.num_pages_per_row[0] = count
    refuse(table, IntegrityError, "append_row", [1], 0)
    refuse(table, IntegrityError, "append_rows_batch", [[1]], [0])
    refuse(table, IntegrityError, "move_row", 0, 1)
    table.swap_row(0, 1)
    refuse(table, IntegrityError, "append_row", [1], 1)
    table.clear_row(1)
    table.append_row([5], 1)
    assert table.page_table_cpu[1].tolist() == [5] + [0] * 7


def test_a_move_is_refused_in_all_groups() -> None:
    tables = filled_tables()
    tables[1].num_pages_per_row[0] = 99
    refuse(tables, IntegrityError, "move_row", 0, 1)


def test_tables_that_are_too_large_are_refused() -> None:
    with pytest.raises(ArgumentError, match="allowed: 1073741824 ids in all"):
        PageTable(2**20, 2**11, 64)


def test_tables_are_made_once_and_not_copied() -> None:
    table = filled_table()
    with pytest.raises(ArgumentError):
        table.__init__(3, 3, 3)  # type: ignore[misc]
    for tables in (table, filled_tables()):
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(tables)
        with pytest.raises(TypeError, match="cannot be pickled"):
            copy.deepcopy(tables)
    with pytest.raises(AttributeError):
        table.page_table_cpu = np.zeros(3)  # type: ignore[misc]
    assert table.page_table_cpu.shape == (4, 8)


def test_a_table_whose_init_never_ran_has_no_rows() -> None:
    table = PageTable.__new__(PageTable)
    with pytest.raises(RowIndexError):
        table.append_row([1], 0)
    assert table.count_dirty_segments(0, 0) == 0
    with pytest.raises(RowIndexError):
        table.slot_mapping([0], [0], 16)


def test_groups_of_unlike_tables_are_refused() -> None:
    table = make_table()
    for page_tables in ([table, make_table(5)], [table, table], [1]):
        with pytest.raises(ArgumentError):
            GroupedRows(page_tables)  # type: ignore[arg-type]


# Commits, as far as they need no jax.


@pytest.mark.parametrize(
    ("num_reqs", "error"),
    [(-1, ArgumentError), (5, ArgumentError), (10**30, ArgumentError), (1.0, ArgumentTypeError), (None, ArgumentTypeError)],
)
def test_bad_numbers_of_rows_are_refused(num_reqs: Any, error: type[Exception]) -> None:
    refuse(filled_table(), error, "commit", num_reqs)
    refuse(filled_tables(), error, "commit", num_reqs)


# Memory and threads.


def test_tables_leave_at_once() -> None:
    """Without the garbage collector: they are large, and engines switch it off."""
    gc.disable()
    try:
        table = make_table(64, 1024)
        tables = MultiGroupPageTable(4, 64, 64, [16, 32])
        references = [weakref.ref(table), weakref.ref(tables), weakref.ref(tables[0]), weakref.ref(table.page_table_cpu)]
        host = table.page_table_cpu
        del table, tables
        assert [reference() is None for reference in references] == [True, True, True, False]
        host[:] = 3
    finally:
        gc.enable()


def test_borrowed_arrays_are_given_back() -> None:
    table = make_table(4, 64)
    ids = np.arange(4, dtype=np.int32)
    count = sys.getrefcount(ids)
    for _ in range(10):
        table.append_row(ids, 0)
        table.append_rows_batch([ids, ids], [1, 2])
        with pytest.raises(RowIndexError):
            table.append_row(ids, 9)
        table.slot_mapping(ids, ids, 16)
    assert sys.getrefcount(ids) == count


def test_tables_and_their_copies_are_aligned() -> None:
    for shape in ((1, 1), (3, 7), (64, 257)):
        table = PageTable(*shape, 64)
        for zeros in (table.page_table_cpu, table.copy_aligned()):
            assert zeros.ctypes.data % 64 == 0
            assert zeros.shape == shape
            assert zeros.flags.c_contiguous
            assert not zeros.any()


# Slot mapping.


@pytest.mark.parametrize("page_size", [1, 7, 16, 64, 1000])
@pytest.mark.parametrize("shape", [(5, 7), (64, 257), (1, 1)], ids=str)
def test_slots_are_those_of_numpy(shape: tuple[int, int], page_size: int) -> None:
    rng = np.random.default_rng(page_size)
    table = PageTable(*shape, 64)
    table.page_table_cpu[:] = rng.integers(0, MAX_PAGE_ID // page_size, shape)
    rows = rng.integers(0, shape[0], 2000).astype(np.int32)
    positions = rng.integers(0, shape[1] * page_size, 2000).astype(np.int32)
    expected = slots_in_numpy(table.page_table_cpu, rows, positions, page_size)
    for slots in (
        table.slot_mapping(rows, positions, page_size),
        table.slot_mapping(rows.astype(np.int64), positions.tolist(), np.int64(page_size)),  # type: ignore[arg-type]
    ):
        assert slots.dtype == np.int32
        np.testing.assert_array_equal(slots, expected)
    assert table.slot_mapping([], [], page_size).shape == (0,)


def test_slots_at_the_edge_of_int32() -> None:
    table = make_table()
    table.append_row([MAX_PAGE_ID // 16], 0)
    assert table.slot_mapping([0], [15], 16).tolist() == [MAX_PAGE_ID]
    table.append_row([MAX_PAGE_ID // 16 + 1], 0)
    with pytest.raises(ArgumentError, match=r"row 0, position 16 \(at 1\)"):
        table.slot_mapping([0, 0], [15, 16], 16)


# No jax.

HOST_WORK = """
import sys
from table_model import make_grouped_work, make_work
works = make_work((4, 100), seed=1), make_grouped_work(4, 64, [16, 32], seed=1)
for work in works:
    for _ in range(200):
        work.do()
    work.check()
table, tables = (work.tables for work in works)
table.add_row([1], 0)
assert table.slot_mapping([0], [7], 16).tolist() == [23]
"""
WITHOUT_JAX = """
for ask in (lambda: table.commit(4), lambda: tables.commit(4), lambda: table.page_table, table.get_device_tensor, table.warmup):
    try:
        ask()
    except ImportError as error:
        assert "pip install 'pagepool[jax]'" in str(error), error
    else:
        raise SystemExit("no error")
assert table.page_table_cpu[0, 0] == 1
assert table.count_dirty_segments(0, 4) > 0
"""


@pytest.mark.parametrize(
    "code",
    [
        f"{HOST_WORK}\nassert not {{'jax', 'jaxlib'}} & set(sys.modules), 'jax was imported'",
        f"import sys\nsys.modules['jax'] = None\n{HOST_WORK}{WITHOUT_JAX}",
    ],
    ids=["it is not imported", "it is missing"],
)
def test_the_host_side_needs_no_jax(code: str) -> None:
    """Without jax a device copy is refused, and the rest works."""
    process = run_python("-c", code)
    assert process.returncode == 0, process.stderr


def test_the_tables_of_torch_need_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import pagepool.torch"
    process = run_python("-c", code)
    assert process.stderr.endswith(
        "ImportError: page tables and host pages on a torch device need torch: pip install 'pagepool[torch]'\n"
    )
