"""Values that Python takes for others: text for a flag, a set or bytes for a sequence, a bool for an int."""

import inspect
from collections.abc import Callable, Iterator
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from argument_cases import CASES, NAMED

import pagepool
import pagepool.events
import pagepool.replay
import pagepool.router
import pagepool.stores
from pagepool import (
    CacheGroupSpec,
    CacheManager,
    EngineRequest,
    FullAttentionSpec,
    HostTier,
    MultiGroupPageTable,
    PageTable,
    RunningBatch,
    StepInputs,
    WaitingQueue,
)
from pagepool._core import PageIds, require_token_ids
from pagepool.errors import ArgumentTypeError
from pagepool.stores import FileStore

SPEC = FullAttentionSpec(page_size=4, num_kv_heads=1, head_size=8, dtype="float16", use_mla=False)
NO_SEQUENCE: list[Any] = [
    *({1, 2}, frozenset([1, 2]), {1: 2}, MappingProxyType({1: 2}), b"ab", bytearray(b"ab"), memoryview(b"ab"), "12"),
    *({1: 2, 2: 1}.keys(), {1: 2, 2: 1}.values(), np.ma.array([1, 2], mask=[False, True])),
    *(np.ma.array([1, 2], dtype=np.int32, mask=True), np.array([1, None], dtype=object)),
    *([1, True], [1, np.True_], (1, False), [1, 1.0], [1, "2"], [1, None]),
    *(np.array([1.0, 2.0]), np.array([True, False]), np.array(["1", "2"]), np.array([[1, 2], [3, 4]]), np.array(1)),
]


def make_batch() -> RunningBatch:
    manager = CacheManager(16, [CacheGroupSpec(SPEC)], 32)
    return RunningBatch(manager, PageTable(2, 8, 32))


def admitted() -> RunningBatch:
    batch = make_batch()
    batch.admit(0, [1, 2, 3])
    batch.admit(1, [4, 5, 6])
    return batch


def with_tokens() -> RunningBatch:
    """Return a batch whose rows have a token to compute."""
    batch = admitted()
    batch.append([0, 1], [7, 8])
    return batch


TOKENS: dict[str, Callable[[Any], Any]] = {
    "EngineRequest": lambda tokens: EngineRequest("a", tokens),
    "append_output_token_ids": lambda tokens: EngineRequest("a", [1]).append_output_token_ids(tokens),
    "admit": lambda tokens: make_batch().admit(0, tokens),
    "probe": lambda tokens: make_batch().probe(0, tokens),
    "append": lambda tokens: admitted().append([0, 1], tokens),
    "step": lambda tokens: admitted().step([0, 1], tokens),
    "require_token_ids": lambda tokens: require_token_ids(tokens),
    "PageIds": lambda tokens: PageIds(tokens),
    "PrefixIndex": lambda tokens: pagepool.router.PrefixIndex(2).hash_tokens(tokens),
}
ROWS: dict[str, Callable[[Any], Any]] = {
    "step": lambda rows: admitted().step(rows, [7, 8]),
    "append": lambda rows: admitted().append(rows, [7, 8]),
    "plan": lambda rows: with_tokens().plan(rows),
    "trim": lambda rows: admitted().trim(rows, 2),
    "release": lambda rows: admitted().release(rows),
    "append_rows_batch": lambda rows: PageTable(4, 8, 32).append_rows_batch([[1], [2]], rows),
    "append_rows_batch of groups": lambda rows: MultiGroupPageTable(4, 32, 32, [4]).append_rows_batch([[[1]], [[2]]], rows),
    "page_sizes": lambda sizes: MultiGroupPageTable(4, 32, 32, sizes),
    "page_ids": lambda ids: PageTable(4, 8, 32).append_row(ids, 0),
}


def name_of_values(values: Any) -> str:
    """Return a text that is the same in each process."""
    return f"{type(values).__name__} {bytes(values) if isinstance(values, memoryview) else values!r}"


@pytest.mark.parametrize("values", NO_SEQUENCE, ids=name_of_values)
@pytest.mark.parametrize("call", [*TOKENS.values(), *ROWS.values()], ids=[*TOKENS, *ROWS])
def test_what_is_no_sequence_of_ints_is_refused(call: Callable[[Any], Any], values: Any) -> None:
    """The items of a set come in any order, those of bytes are no tokens, those of a mapping are its keys."""
    with pytest.raises(ArgumentTypeError, match=r"got .*allowed: "):
        call(values)


@pytest.mark.parametrize(
    "form",
    [
        *(list, tuple, iter, np.array, lambda ids: (i for i in ids), lambda ids: [np.int64(i) for i in ids]),
        *(lambda ids: memoryview(np.array(ids)), lambda ids: memoryview(np.array(ids, dtype=np.int32)), np.ma.array),
    ],
)
def test_any_sequence_of_ints_is_taken(form: Callable[[list[int]], Any]) -> None:
    assert make_batch().admit(0, form([1, 2, 3])) == 0
    batch = admitted()
    assert batch.step(form([0, 1]), form([7, 8])).num_grown == 2
    assert EngineRequest("a", form([1, 2])).all_token_ids == [1, 2]


def test_what_has_no_order_may_be_a_set() -> None:
    table = PageTable(4, 8, 32)
    table.mark_dirty({1, 3})
    manager = CacheManager(16, [CacheGroupSpec(SPEC)], 32)
    assert manager.allocate_slots(EngineRequest("a", range(8)), 8).get_page_ids() == ([1, 2],)
    assert manager.page_pool.evict_pages({1, 2}) == 2


@pytest.mark.parametrize("fields", ["token_ids", {"token_ids"}, {"token_ids": 1}, b"token_ids"], ids=repr)
def test_fields_have_an_order(fields: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"^fields: got .*, allowed: a list of names$"):
        StepInputs(make_batch(), num_tokens=8, num_reqs=2, fields=fields)


def flags_of(module: Any) -> Iterator[tuple[str, str]]:
    """Yield the names of calls and their parameters that are flags."""
    for name in module.__all__:
        value = getattr(module, name)
        calls = {name: value} if callable(value) else {}
        if inspect.isclass(value) and issubclass(value, tuple | Exception):
            continue  # results, and errors
        if inspect.isclass(value):
            calls |= {f"{name}.{each}": getattr(value, each) for each in vars(value) if not each.startswith("_")}
        for each, call in calls.items():
            try:
                parameters = inspect.signature(call).parameters.values() if callable(call) else ()
            except ValueError:  # a class of the core
                continue
            for parameter in parameters:
                if parameter.annotation in (bool, "bool") or type(parameter.default) is bool:
                    yield each, parameter.name


MODULES = (pagepool, pagepool.events, pagepool.replay, pagepool.router, pagepool.stores)
TRIED = {"fsync", "writes_through", "is_idle", "skips_misfits"}  # below, since a call makes a folder, or needs a storage
RESULTS = {"is_enabled"}  # of a report, which nobody makes


def test_all_flags_are_tried() -> None:
    """A new flag needs a case of the kind `flag`, which tries values of all kinds."""
    found = {name: call for module in MODULES for call, name in flags_of(module)}
    tried = {NAMED[case] for case, (_, kinds) in CASES.items() if "flag" in kinds.split()} | TRIED
    assert {name: call for name, call in found.items() if name not in tried | RESULTS} == {}
    assert len(found) > 10


@pytest.mark.parametrize("value", ["no", "", 2, None, 0.0, [], b"1", np.array([True])], ids=repr)
def test_a_store_takes_no_other_flag(value: Any, tmp_path: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"^fsync: got .*, allowed: True or False$"):
        FileStore(tmp_path, "n", fsync=value)


@pytest.mark.parametrize("name", ["is_idle", "skips_misfits"])
@pytest.mark.parametrize("value", ["no", "", 2, None, 0.0, [], b"1", np.array([True])], ids=repr)
def test_a_waiting_queue_takes_no_other_flag(name: str, value: Any) -> None:
    queue = WaitingQueue(CacheManager(8, [CacheGroupSpec(SPEC)], 32))
    with pytest.raises(ArgumentTypeError, match=rf"^{name}: got .*, allowed: True or False$"):
        queue.admit_by(lambda request: 0, **{name: value})


@pytest.mark.parametrize("value", ["no", "", 2, None, 0.0, [], b"1", np.array([True])], ids=repr)
def test_a_manager_takes_no_other_flag_with_a_storage(value: Any) -> None:
    manager = CacheManager(8, [CacheGroupSpec(SPEC)], 32, host_tier=HostTier(8))
    storage = SimpleNamespace(poll=lambda: None, stats=lambda: None)
    with pytest.raises(ArgumentTypeError, match=r"^writes_through: got .*, allowed: True or False$"):
        manager.attach_storage(storage, writes_through=value)


@pytest.mark.parametrize("value", [True, np.True_, 1, np.int8(1)])
def test_flags_of_numpy(value: Any) -> None:
    assert FullAttentionSpec(4, 1, 8, "float16", value).use_mla is True
    assert CacheManager(8, [CacheGroupSpec(SPEC)], 32, enable_caching=value).enable_caching is True
