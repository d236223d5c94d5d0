"""Bugs that fuzzing found in the compiled core, each in its shortest form. Most of them crashed or hung."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pagepool import PagePool
from pagepool._core import (
    CacheGroups,
    GroupedRows,
    HashChain,
    PageIds,
    PageRules,
    PageStore,
    RequestHashes,
    RequestPages,
    RowRequest,
    RunningRows,
    TableRows,
    TokenSpan,
    check_holders,
    drop_dependents,
    find_prefix,
    keep_token_ids,
    load_prefix,
    pack_dirty_segments,
    rank_checkpoints,
)
from pagepool.errors import ArgumentError, ArgumentTypeError, PageIdError, PagePoolError

KEY = bytes(16)


class Index:
    """An int that acts when it is read."""

    def __init__(self, value: int, act: Callable[[], Any]) -> None:
        self.value, self.act = value, act

    def __index__(self) -> int:
        self.act()
        return self.value


class Varying:
    """An index that is the next of some ints at each read."""

    def __init__(self, *values: int) -> None:
        self.values = list(values)

    def __index__(self) -> int:
        return self.values.pop(0)


def make_batch(store: PageStore, *tables: TableRows, hash_page_size: int = 4, stride: int = 1) -> RunningRows:
    return RunningRows(store, tables, [(PageRules(4), 0, stride)] * len(tables), 32, hash_page_size, KEY, 0)


def admit(batch: RunningRows, row: int, token_ids: list[int], extra_keys: Any = ()) -> int | None:
    return RowRequest(batch, row, token_ids).admit(extra_keys)


# --- objects half made ------------------------------------------------------------------------------------------


def test_grouped_rows_keep_nothing_of_a_constructor_that_failed() -> None:
    rows = GroupedRows.__new__(GroupedRows)
    with pytest.raises(ArgumentError):
        rows.__init__([object()])  # type: ignore[misc, list-item]
    rows.clear_row(0)
    assert rows.page_tables == ()


def test_the_tables_of_grouped_rows_stay() -> None:
    rows = GroupedRows([TableRows(2, 2)])
    with pytest.raises(ArgumentError, match="second call of the constructor, allowed: one call"):
        rows.__init__([TableRows(9, 9)])  # type: ignore[misc]


BAD_BATCHES: list[Callable[[], Any]] = [
    lambda: make_batch(PageStore(8)),
    lambda: make_batch(PageStore(8), *[TableRows(2, 8)] * 2),
    lambda: make_batch(PageStore(8), TableRows.__new__(TableRows)),
    lambda: make_batch(PageStore(8), TableRows(2, 8), TableRows(3, 8)),
    lambda: make_batch(PageStore(8), TableRows(2, 8), stride=1000),  # hashes that do not make a page
    lambda: make_batch(PageStore(8, False), TableRows(2, 8)),  # hashes without an index
    lambda: RunningRows(PageStore(8), [TableRows(2, 8)], [(PageRules(4), 0, 1)], 32, 4, b"key", 0),
]


@pytest.mark.parametrize("make", BAD_BATCHES)
def test_a_batch_that_cannot_be(make: Callable[[], Any]) -> None:
    with pytest.raises(PagePoolError):
        make()


def test_a_batch_whose_constructor_failed_is_refused() -> None:
    batch = RunningRows.__new__(RunningRows)
    for call in (
        lambda: admit(batch, 0, [1]),
        lambda: batch.get_page_ids(0),
        lambda: batch.move_row(0, 1),
        lambda: check_holders(PageStore(8), [], batch),
    ):
        with pytest.raises(ArgumentError, match="constructor did not run"):
            call()
        with pytest.raises(PagePoolError):
            batch.__init__(PageStore(8), [TableRows(2, 8)], [(PageRules(4), 0, 9)], 32, 4, KEY, 0)  # type: ignore[misc]


def test_a_batch_that_is_made_while_its_constructor_runs() -> None:
    batch = RunningRows.__new__(RunningRows)
    arguments = (PageStore(8), [TableRows(2, 8)], [(PageRules(4), 0, 1)], 32, 4, KEY)
    with pytest.raises(ArgumentError, match="second call of the constructor, allowed: one call"):
        batch.__init__(*arguments, Index(0, lambda: batch.__init__(*arguments, 0)))  # type: ignore[misc]
    assert admit(batch, 0, [1]) == 0
    check_holders(arguments[0], [], batch)


def test_a_table_that_is_made_while_its_constructor_runs() -> None:
    table = TableRows.__new__(TableRows)
    with pytest.raises(ArgumentError, match="second call of the constructor, allowed: one call"):
        table.__init__(1, Index(1, lambda: table.__init__(100, 100)))  # type: ignore[misc, arg-type]
    assert table.page_table_cpu.shape == (table.max_num_reqs, table.max_num_pages_per_req) == (100, 100)


def test_a_table_whose_constructor_failed_is_refused() -> None:
    table = TableRows.__new__(TableRows)
    with pytest.raises(ArgumentError):
        table.__init__(2**20, 2**20)  # type: ignore[misc]
    for call in (
        table.copy_aligned,
        table.clear_rows,
        lambda: pack_dirty_segments((table,), 0, 1),
        lambda: GroupedRows([table]),
    ):
        with pytest.raises(ArgumentError):
            call()


def test_a_chain_that_keeps_no_tokens() -> None:
    """Missing memory must not be copied, not even zero bytes of it: UndefinedBehaviorSanitizer reports it."""
    chain = HashChain(4, KEY, True)
    chain.extend([], b"extra")
    assert len(chain) == 0


# --- arguments that change, or lie ------------------------------------------------------------------------------


def test_requests_that_grow_while_they_are_read() -> None:
    table = TableRows(4, 64)
    rows: list[int] = [0]
    requests: list[Any] = []

    def grow() -> None:
        rows.extend([1] * 100)
        requests.extend([[1]] * 100)

    requests.append([Index(1, grow)])
    table.append_rows_batch(requests, rows)
    assert table.num_pages_per_row.tolist() == [1, 0, 0, 0]


def test_extra_keys_that_are_more_than_they_say() -> None:
    class Short(list[Any]):
        def __len__(self) -> int:
            return 1

    batch = make_batch(PageStore(8), TableRows(2, 8))
    assert admit(batch, 0, [1] * 16, Short((page, b"key") for page in range(100))) == 0
    batch.release([0])


def test_page_ids_that_answer_otherwise_the_second_time() -> None:
    store = PageStore(8)
    keep_token_ids(store, 4)
    store.enter(1, 5, 0)
    page_hash = store.page_hash_of(Varying(1, 1 << 28))  # type: ignore[arg-type]
    assert page_hash is not None
    assert page_hash.page_hash.hash_value == 5
    assert [page and page.page_id for page in store.neighbours(Varying(2, 7))] == [1, 3]  # type: ignore[arg-type]


# --- numbers out of bounds --------------------------------------------------------------------------------------


class Liar(np.ndarray[Any, Any]):
    """An array that lies about its type."""

    dtype = property(lambda _: 3)


class Mute:
    """A value whose repr fails."""

    def __repr__(self) -> str:
        raise TypeError("no repr")


REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (
        lambda: RequestPages(PageStore(8), CacheGroups([(PageRules(4), 0, 1)]), 8).allocate(4, hits=(None,)),  # type: ignore[arg-type]
        ArgumentTypeError,
        "hits: got NoneType",
    ),
    (lambda: PageIds(np.ones(3).view(Liar)), ArgumentTypeError, "float64"),
    *((lambda page_id=page_id: PageStore(8).pages(PageIds([page_id])), PageIdError, "got") for page_id in (-1, 8, 2**31 - 1)),
    *((lambda bound=bound: PageStore(8).find(1, 0, bound), PagePoolError, "start: got") for bound in (2**31, "0", 0.5)),
    (lambda: PagePool(Mute(), enable_caching=False), ArgumentError, "got a Mute"),
    (lambda: setattr(PageStore(8), "names", None), AttributeError, "names"),
    (lambda: rank_checkpoints(PageStore(8), [0]), ArgumentError, "banks: got those of a store that has one"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_what_is_refused(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("key", [-1, 2**128, 1.5, "1", None, np.ones(2)], ids=repr)
def test_keys_that_are_none(key: Any) -> None:
    store = PageStore(8)
    for call in (lambda: store.find(key, 0), lambda: store.enter(1, key, 0), lambda: HashChain(4, KEY).append_key(key)):
        with pytest.raises(PagePoolError, match="key: got"):
            call()


def test_pages_with_more_tokens_than_are_kept() -> None:
    store = PageStore(8)
    keep_token_ids(store, 1)
    batch = make_batch(store, TableRows(2, 8))
    admit(batch, 0, [1] * 9)
    assert [page_hash and page_hash.page_hash.token_ids for page_hash in map(store.page_hash_of, (1, 2, 3))] == [(), (), None]


def test_hits_without_an_index() -> None:
    chain = HashChain(1, KEY)
    chain.extend([1, 2])
    (hits,), num_tokens = find_prefix(PageStore(8, False), CacheGroups([(PageRules(1), 0, 1)]), chain, 3)
    assert (hits.to_list(), num_tokens) == ([], 0)


# --- locks ------------------------------------------------------------------------------------------------------


WITH_FINALIZERS = """
import gc
from pagepool._core import CacheGroups, CachePage, HashChain, PageIds, PageStore, PageRules, RequestPages, RowRequest
from pagepool._core import RunningRows, TableRows, check_holders
from pagepool.page_pool.integrity import check_store

class Finalizer:
    def __init__(self):
        self.cycle = self

    def __del__(self):
        store.take(0)
        chain.append_key(1)
        batch.step([], [])
        batch.plan([])

def refuse(call, *arguments):
    for threshold in range(1, 12):
        Finalizer()
        gc.set_threshold(threshold)
        try:
            call(*arguments)
        except Exception as error:
            continue
        finally:
            gc.set_threshold(0)
        raise AssertionError(call)

store, table = PageStore(8), TableRows(2, 8)
chain = HashChain(1, bytes(16))
chain.extend([1, 2])
batch = RunningRows(store, [table], [(PageRules(4), 0, 1)], 32, 4, bytes(16), 0)
RowRequest(batch, 0, [1, 2, 3, 4, 5]).admit()
table.clear_row(0)
page = store.page(1)
refuse(check_holders, store, [], batch)
refuse(store.take, 100)
refuse(store.pop, 100)
refuse(store.remove_page, page)
refuse(store.enter, 1, 7, 0)
refuse(store.enter_pages, PageIds([1]), chain, 0, 0)
refuse(store.give_back, [3])
refuse(store.append, [3])
store.set_ref_count(3, 1)
refuse(store.take, 2)
refuse(check_store, store)
store.set_ref_count(3, 0)
store.enter(5, 9, 0)
store.set_ref_count(5, 1)
refuse(check_store, store)
uneven = PageStore(9, enable_caching=True)
groups = CacheGroups([(PageRules(4), 0, 1)])
refuse(RequestPages(uneven, groups, 32).allocate, 4, 4, (), chain, 0, 0, 2)
uneven_rows = RunningRows(uneven, [TableRows(2, 8)], [(PageRules(4), 0, 1)], 32, 4, bytes(16), 2)
refuse(RowRequest(uneven_rows, 0, [1, 2, 3, 4, 5]).admit)
"""


def test_finalizers_that_run_while_an_error_is_made() -> None:
    """The collector may run when any error is made, and a finalizer may make the same call: no lock may be held then."""
    subprocess.run([sys.executable, "-c", WITH_FINALIZERS], check=True, timeout=60)


def test_no_checkpoints_depend_on_a_group() -> None:
    """An empty list of groups has no memory: UndefinedBehaviorSanitizer reported a copy of no bytes from it."""
    pool = PagePool(8, enable_caching=True)
    drop_dependents(pool.store, 0, [])
    pool.check()


def test_hashes_are_not_cut_before_the_first() -> None:
    chain = HashChain(1, bytes(16))
    hashes = RequestHashes(object(), chain)
    chain.extend([1, 2, 3])
    with pytest.raises(ArgumentError, match="num_pages: got -2"):
        hashes.cut(-2)
    hashes.cut(1)
    assert len(chain) == 1


@pytest.mark.parametrize(
    ("stop", "message"), [(None, "^start and stop: got 0 and the end"), (2**61, "the page at token 0 is not")]
)
def test_a_lease_of_more_tokens_than_are_hashed_ends_its_search_with_the_hashes(stop: int | None, message: str) -> None:
    store = PagePool(8, enable_caching=True).store
    span = TokenSpan(0, stop).of_request(store, CacheGroups([(PageRules(4), 0, 1)]), HashChain(4, KEY, 0), 2**62)
    with pytest.raises(ArgumentError, match=message):
        span.lease(1.0)


def test_a_request_with_pages_has_its_boundaries() -> None:
    store, groups = PageStore(8), CacheGroups([(PageRules(4), 0, 1)])
    request, chain = RequestPages(store, groups, 32), HashChain(4, KEY)
    found = load_prefix(store, groups, chain, 8)
    request.begin(8, found)
    assert request.allocate(8)
    with pytest.raises(ArgumentError, match="holds pages"):
        request.begin(8, found)
