"""A running batch under misuse and failures: the named error, an unchanged state, and a batch that still works.

Values of wrong types are in `argument_cases`.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from batch_model import package_pool_state
from hybrids import FULL, PAGE_SIZE, WINDOW
from hybrids import make_manager as make_hybrid
from refusing import refused

import pagepool
from pagepool import CacheManager, MultiGroupPageTable, PageTable, RequestTraits, RunningBatch, StepResult
from pagepool.errors import (
    ArgumentError,
    DoubleFreeError,
    IntegrityError,
    PageHashError,
    RowOverflowError,
)

MAX_MODEL_LEN = 32
make_manager = partial(make_hybrid, num_pages=24, max_model_len=MAX_MODEL_LEN)


class InUse:
    """Four rows: 0 has 10 tokens; 1 shares the first 8 of them and has the maximum length; 2 has computed 3 of 6; 3 is free."""

    def __init__(self, manager: CacheManager | None = None, num_columns: int = 8) -> None:
        self.manager = manager or make_manager(FULL)
        self.pool = self.manager.page_pool
        self.table = PageTable(4, num_columns, 64)
        self.batch = RunningBatch(self.manager, self.table)
        self.batch.admit(0, list(range(10)))
        self.batch.admit(1, [*range(8), *range(100, 124)])
        self.batch.admit(2, [7] * 6, num_tokens=3)

    def state(self) -> list[Any]:
        """Return the observable state that a call may change, without tokens: see `go_on`."""
        batch, table, pool = self.batch, self.table, self.pool
        return [
            *(values.tolist() for values in (batch.is_admitted, batch.num_tokens, batch.num_computed_tokens)),
            batch.num_cached_tokens.tolist(),
            [batch.get_page_ids(row) for row in range(4)],
            table.page_table_cpu.tolist(),
            table.num_pages_per_row.tolist(),
            table.cpu_version,
            [table.count_dirty_segments(row, row + 1) for row in range(4)],
            pool.ref_counts().tolist(),
            pool.free_page_ids_in_order().tolist(),
            {key: list(pages) for key, pages in pool.cached_page_hash_to_page.items()},
            pool.stats,
        ]

    def go_on(self) -> list[Any]:
        """Fill more pages, whose hashes depend on all tokens, start other rows, and end: equal states mean equal rows."""
        batch = self.batch
        rows = np.flatnonzero(batch.is_admitted)
        num_left = batch.num_tokens - batch.num_computed_tokens
        batch.plan(np.flatnonzero(num_left), num_left[num_left > 0])
        growing = rows[batch.num_tokens[rows] <= MAX_MODEL_LEN - 8]
        for token_id in range(8):
            batch.step(growing, [token_id] * growing.size)
        for row in np.flatnonzero(~batch.is_admitted):
            batch.admit(row, list(range(9)))
        states = [self.state()]
        batch.check()
        batch.release([3, 1, 0, 2])
        batch.check()
        return [*states, self.state()]


# --- rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ahead", [22, 2**30, 2**30 + 1, 2**31 - 11, 2**31 - 10, 2**31 - 1])
def test_drafts_end_with_the_row_however_many_they_are(num_ahead: int) -> None:
    in_use = InUse()
    in_use.batch.append([0], [1])
    assert in_use.batch.plan([0], 1, [num_ahead]).new_page_ids.size == 5
    assert len(in_use.batch.get_page_ids(0)[0]) == 8
    in_use.batch.check()


# --- admission ----------------------------------------------------------------------------------------------


def test_a_table_may_have_less_room_than_the_model() -> None:
    batch = RunningBatch(make_manager(FULL), PageTable(2, 2, 64))
    assert batch.max_num_tokens == 8
    with pytest.raises(RowOverflowError, match=r"row 1: got 9 tokens, allowed: 8.*table has room"):
        batch.admit(1, [1] * 9)
    assert batch.admit(1, [1] * 7, num_tokens=2) == 0
    assert batch.plan([1], 5, 100).new_page_ids.size == 1
    assert batch.step([1], [1]).num_grown == 1
    for call in (batch.step, batch.append):
        with pytest.raises(RowOverflowError, match=r"row 1: got 9 tokens, allowed: 8"):
            call([1], [1])
    batch.check()


def test_pages_are_hashed_natively_or_not_at_all() -> None:
    batch = RunningBatch(make_manager(FULL, hash_algo=hash, enable_caching=False), PageTable(4, 8, 64))
    assert batch.admit(0, [1] * 9) == 0
    batch.check()


# --- what is allowed ----------------------------------------------------------------------------------------


def read_only(values: list[int]) -> Any:
    array = np.array(values, dtype=np.int32)
    array.setflags(write=False)
    return array


FORMS: dict[str, Callable[[list[int]], Any]] = {
    "uint8": lambda values: np.array(values, dtype=np.uint8),
    "uint64": lambda values: np.array(values, dtype=np.uint64),
    "big-endian int64": lambda values: np.array(values, dtype=">i8"),
    "read-only": read_only,
    "every other": lambda values: np.repeat(np.array(values, dtype=np.int32), 2)[::2],
    "backwards": lambda values: np.array(values[::-1], dtype=np.int32)[::-1],
    "a column": lambda values: np.array([values, values], dtype=np.int32).T[:, 1],
    "unaligned": lambda values: np.frombuffer(b"." + np.array(values, dtype=np.int32).tobytes(), dtype=np.int32, offset=1),
    "tuple": tuple,
    "NumPy's ints": lambda values: [np.int16(value) for value in values],
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_form_of_the_numbers_does_not_matter(form: Callable[[list[int]], Any]) -> None:
    expected, in_use = InUse(), InUse()
    for batch, of in ((expected.batch, list), (in_use.batch, form)):
        batch.admit(3, of([5, 6, 7, 8, 9]))
        batch.append(of([0]), of([10]))
        batch.plan(of([2, 0]), of([3, 1]), of([1, 9]))
        batch.step(of([3, 0]), of([11, 12]))
        batch.append(of([0, 0, 2]), of([3, 4, 5]))
        batch.trim(of([3, 2]), of([3, 6]))
        batch.release(of([1]))
    assert in_use.state() == expected.state()
    in_use.batch.check()


# --- windows ------------------------------------------------------------------------------------------------


def test_a_cut_that_begins_again_before_the_window_is_refused() -> None:
    """The cut goes through a page of 8 that both rows hold, so all would be computed again, into pages that were freed."""
    manager, tables = make_manager(replace(FULL, page_size=8), WINDOW), MultiGroupPageTable(2, MAX_MODEL_LEN, 64, [8, 4])
    batch = RunningBatch(manager, tables)
    batch.admit(0, list(range(16)))
    assert batch.admit(1, list(range(9))) == 8
    batch.step([0], [16])
    assert batch.get_page_ids(0)[1][:3] == [0, 0, 0]
    with refused(lambda: package_pool_state(manager.page_pool, False), ArgumentError, r"num_tokens: got 6 .*window.*row 0"):
        batch.trim([0], 6)
    batch.check()


# --- other users of pages and tables --------------------------------------------------------------------------


def test_a_page_that_leaves_the_window_or_is_cut_is_not_given_back_twice() -> None:
    manager = make_manager(WINDOW)
    batch = RunningBatch(manager, PageTable(2, 8, 64))
    batch.admit(0, list(range(8)))
    batch.admit(1, list(range(100, 110)))
    [leaving, _], [*_, cut] = batch.get_page_ids(0)[0], batch.get_page_ids(1)[0]
    manager.page_pool.free_page_ids([leaving, cut])
    with refused(lambda: package_pool_state(manager.page_pool, False), DoubleFreeError, r"row 0.*given back by somebody else"):
        batch.step([0], [8])
    with refused(
        lambda: package_pool_state(manager.page_pool, False), ArgumentError, r"num_tokens: got 8 .* or by somebody.*row 1"
    ):
        batch.trim([1], 8)
    manager.page_pool.touch_page_ids([leaving, cut])
    batch.step([0], [8])
    batch.trim([1], 8)
    batch.check()


def spoil(table: PageTable, value: int) -> None:
    """Write garbage into the table and its counts, also beyond the rows' ends."""
    table.page_table_cpu[:] = value
    table.num_pages_per_row[:] = value


ON_SPOILED: dict[str, Callable[[RunningBatch], Any]] = {
    "step": lambda batch: [
        batch.plan([2], int(batch.num_tokens[2] - batch.num_computed_tokens[2])).new_page_ids.tolist(),
        *(batch.step([0, 2], [token_id] * 2).new_page_ids.tolist() for token_id in range(7)),
    ],
    "plan": lambda batch: (batch.append([0], [1]), batch.plan([2, 0], [3, 1], 30).new_page_ids.tolist()),
    "trim": lambda batch: batch.trim([0, 1, 2], [6, 0, 6]),
    "release": lambda batch: batch.release([2, 1]),
    "move": lambda batch: batch.move_row(1, 3),
    "swap": lambda batch: (batch.swap_row(0, 1), batch.swap_row(2, 3)),
    "admit": lambda batch: batch.admit(3, list(range(9))),
    "append": lambda batch: batch.append([0, 2], [1, 1]),
}


@pytest.mark.parametrize("value", [-7, 0, 10**9, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("name", ON_SPOILED)
def test_the_table_is_written_and_never_read(name: str, value: int) -> None:
    in_use, expected = InUse(), InUse()
    spoil(in_use.table, value)
    with pytest.raises(IntegrityError, match=r"row 0, group 0.*the table says"):
        in_use.batch.check()
    assert ON_SPOILED[name](in_use.batch) == ON_SPOILED[name](expected.batch)
    in_use.table.page_table_cpu[:] = expected.table.page_table_cpu
    in_use.table.num_pages_per_row[:] = expected.table.num_pages_per_row
    assert in_use.state() == expected.state()
    in_use.batch.check()
    assert in_use.go_on()[0][4:] == expected.go_on()[0][4:]


def test_check_names_a_place_of_the_table_that_was_overwritten() -> None:
    in_use = InUse()
    in_use.table.page_table_cpu[1, 7] = 20
    with pytest.raises(IntegrityError, match=r"row 1, group 0: page \d+ \(at 7\), the table says 20"):
        in_use.batch.check()
    in_use.table.page_table_cpu[1, 7] = in_use.batch.get_page_ids(1)[0][7]
    in_use.table.page_table_cpu[3, 0] = 5
    with pytest.raises(IntegrityError, match=r"row 3, group 0: page 0 \(at 0\), the table says 5"):
        in_use.batch.check()


# --- injected failures --------------------------------------------------------------------------------------


def test_a_row_that_is_being_admitted_is_taken() -> None:
    """Calls beside another thread that hashes a long prompt, without the GIL."""
    num_tokens = 1 << 22
    batch = RunningBatch(make_manager(FULL, num_pages=9, max_model_len=num_tokens), PageTable(4, num_tokens // PAGE_SIZE, 64))
    calls = [
        lambda: batch.admit(3, [1]),
        lambda: batch.move_row(3, 0),
        lambda: batch.swap_row(0, 3),
        lambda: batch.release([3]),
        lambda: batch.step([3], [1]),
    ]
    num_refused = 0
    for token in range(50):
        prompt = np.full(num_tokens, token, dtype=np.int32)
        thread = threading.Thread(target=lambda prompt=prompt: batch.admit(3, prompt, num_tokens=1))
        thread.start()
        time.sleep(0.001)
        for call in calls:
            with contextlib.suppress(ArgumentError):
                call()
                break
        else:
            num_refused += not batch.is_admitted[3]
        thread.join()
        if num_refused:
            break
        batch.release([3])
    assert num_refused
    assert batch.num_tokens.tolist() == [0, 0, 0, num_tokens]
    batch.check()


@pytest.mark.parametrize("take_away", ["decr_ref", "popleft"])
def test_a_hit_that_is_neither_held_nor_free_is_refused(take_away: str) -> None:
    manager = make_manager(FULL, num_pages=4)
    batch = RunningBatch(manager, PageTable(2, 8, 64))
    batch.admit(0, list(range(9)))
    if take_away == "decr_ref":
        manager.page_pool.pages[1].decr_ref()
    else:
        batch.release([0])
        manager.page_pool.free_page_queue.popleft_n(3)
    with refused(lambda: manager.page_pool.free_page_ids_in_order().tolist(), PageHashError, "cannot be held"):
        batch.admit(1, list(range(9)))
    assert not batch.is_admitted[1]


@pytest.mark.parametrize("offset", [0, 4, 8])
def test_no_features_are_no_features(offset: int) -> None:
    """None, an empty list, and features of no tokens, with a salt; the manager hashes alike."""
    manager = make_manager(FULL)
    batch = RunningBatch(manager, PageTable(5, 8, 64))
    nowhere = SimpleNamespace(mm_hash="cat", modality="image", placeholder_range=SimpleNamespace(offset=offset, length=0))
    request = pagepool.EngineRequest("same", list(range(10)), cache_salt="a", mm_features=[nowhere])
    hits = [
        batch.admit(row, list(range(10)), traits=RequestTraits(cache_salt="a", mm_features=none))
        for row, none in enumerate((None, [], [nowhere]))
    ]
    assert hits == [0, 8, 8]
    assert manager.get_computed_pages(request)[1] == 8


def test_a_batch_is_not_pickled_and_a_result_not_made() -> None:
    batch = InUse().batch
    with pytest.raises(TypeError, match="a running batch cannot be pickled"):
        pickle.dumps(batch)
    with pytest.raises(TypeError, match="a StepResult is what RunningBatch returns"):
        StepResult()
    assert repr(batch.plan([2], 3)) == f"StepResult(num_grown=1, new_page_ids={batch.get_page_ids(2)[0][1:]})"


def test_limits_of_the_core_are_not_limits_of_the_model() -> None:
    manager = make_manager(FULL, max_model_len=10**12)
    with pytest.raises(pagepool.errors.RequestTooLargeError):
        manager.require_capacity(10**11)
    assert RunningBatch(manager, PageTable(2, 8, 64)).max_num_tokens == 32


def test_rows_that_are_added_while_a_step_is_settled_are_refused() -> None:
    """Here by a count that runs Python code. The call has counted the rows before."""
    batch = RunningBatch(make_manager(FULL, num_pages=60), PageTable(40, 8, 64))
    step = batch.new_step()
    batch.admit(0, [1, 2, 3], step=step)

    class Adding:
        def __index__(self) -> int:
            for row in range(1, 40):
                batch.admit(row, [4, 5, row], step=step)
            return 1

    with pytest.raises(ArgumentError, match="got one to which rows are added meanwhile, allowed: the 1 rows of the call"):
        batch.settle(step, [9], [Adding()])  # type: ignore[list-item]
    assert batch.num_tokens.tolist() == [3] * 40
    assert batch.settle(step, range(40)).tolist() == [*range(40)]
    batch._manager.check()


def test_tokens_that_change_while_counts_are_read_are_checked_as_they_are_used() -> None:
    batch = InUse().batch
    step, tokens = batch.plan([2], 3), np.array([5], np.int32)

    class Spoiling:
        def __index__(self) -> int:
            tokens[0] = -5
            return 1

    with pytest.raises(ArgumentError, match="token_ids: got -5"):
        batch.settle(step, tokens, [Spoiling()])  # type: ignore[list-item]
    assert batch.settle(step, [5]).tolist() == [2]
