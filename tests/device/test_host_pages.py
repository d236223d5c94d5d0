"""Host pages on one device: values, order, donation, asynchrony, failures, errors. What they share is in `test_page_copies`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from devices import after_slow_work  # noqa: E402
from moved_pages import Moves, TransferredPages, draw_array, make_copies, make_transfers  # noqa: E402

from pagepool.errors import ArgumentError, ArgumentTypeError, PageIdError  # noqa: E402
from pagepool.host_pages import FinishedTransfers, HostPages, Pack, get_writer  # noqa: E402

NUM_PAGES = 24
DTYPES = ["float32", "bfloat16", "float16", "float8_e4m3fn", "int8", "int32", "bool", "complex64"]
WIDE = ["float64", "int64", "complex128"]
KINDS = ["pinned_host", "unpinned_host", None]
NUMS_OF_TURNS = (1, 4, 16, 64)
"""Amounts of slow work, larger ones for a machine on which the calling thread had to wait."""
on_new_jax = pytest.mark.skipif(
    jax.__version_info__ < (0, 9), reason="CPUs have no pinned memory, and copies wait for their arrays"
)


def done(transfers: Moves) -> FinishedTransfers:
    return FinishedTransfers(transfers.number, [], [], None)


# Values.


@pytest.mark.usefixtures("word")
@pytest.mark.parametrize(
    ("page_axis", "memory_kind", "dtypes"),
    [
        *((axis, kind, DTYPES[axis::3]) for axis, kind in enumerate(KINDS)),
        *(pytest.param(axis, kind, DTYPES, marks=pytest.mark.slow) for axis in range(3) for kind in KINDS),
    ],
)
def test_transfers_are_those_of_numpy(page_axis: int, memory_kind: str | None, dtypes: list[str]) -> None:
    rng = np.random.default_rng(page_axis)
    shape = [2, 3, 5]
    shape[page_axis] = NUM_PAGES
    hosts = [draw_array(rng, tuple(shape), dtype) for dtype in [*dtypes, *(WIDE if jax.config.jax_enable_x64 else [])]]
    for is_aligned in (True, False):
        pages = TransferredPages(hosts, page_axis=page_axis, memory_kind=memory_kind, is_aligned=is_aligned)
        for _ in range(10):
            pages.move(rng, 4)
            pages.check()


@pytest.mark.usefixtures("word")
def test_pytrees_of_several_dtypes() -> None:
    arrays = {"keys": jnp.arange(8).reshape(4, 2), "none": None, "scales": [jnp.arange(4.0), jnp.arange(8.0).reshape(4, 2)]}
    structure = jax.tree_util.tree_structure(arrays)
    host_pages = HostPages(arrays, 4)
    arrays = host_pages.run(arrays, make_transfers([(1, 3)], [(3, 2)]))
    assert jax.tree_util.tree_structure(arrays) == structure
    keys, first, second = jax.tree_util.tree_leaves(arrays)
    assert keys.tolist() == [[0, 1], [2, 3], [2, 3], [6, 7]]
    assert first.tolist() == [0, 1, 1, 3]
    assert second.tolist() == [[0, 1], [2, 3], [2, 3], [6, 7]]


class Cache(NamedTuple):
    keys: Any
    states: Any


@pytest.mark.usefixtures("word")
def test_groups_have_their_own_arrays() -> None:
    """The same page of the host may hold a page of each; places count over all groups."""
    cache = Cache([jnp.arange(5).reshape(1, 5)], {"state": jnp.arange(5) * 10})
    host_pages = HostPages(cache, 4, groups=[0, 3], page_axis=[1, 0])
    cache = host_pages.run(cache, make_transfers([(1, 2), (4, 2), (3, 1)], save_groups=[3, 0, 3]))
    transfers = make_transfers(loads=[(2, 1), (2, 2), (3, 3), (1, 4)], load_groups=[0, 3, 0, 3])
    cache = host_pages.run(cache, transfers)
    assert cache.keys[0].tolist() == [[0, 4, 2, 3, 4]]
    assert cache.states["state"].tolist() == [0, 10, 10, 30, 30]
    assert [finished.failed_loads for finished in host_pages.wait()] == [[], [2]]


def test_pools_have_arrays_of_their_own_lengths() -> None:
    cache = Cache([jnp.arange(5)], [jnp.arange(3) * 10])
    host_pages = HostPages(cache, (7, 4), groups=[0, 1])
    cache = host_pages.run(cache, make_transfers([(4, 6), (2, 3)], save_groups=[0, 1]))
    cache = host_pages.run(cache, make_transfers(loads=[(6, 1), (3, 1)], load_groups=[0, 1]))
    assert (cache.keys[0].tolist(), cache.states[0].tolist()) == ([0, 4, 2, 3, 4], [0, 20, 20])
    assert host_pages.num_pages == (7, 4)
    for moves, groups, field, allowed in (
        ([(3, 3)], [1], r"saves\.src", 2),
        ([(2, 4)], [1], r"saves\.dst", 3),
        ([(2, 7)], [0], r"saves\.dst", 6),
    ):
        with pytest.raises(PageIdError, match=rf"^moves\.{field}: got page \d, allowed: 1 to {allowed}$"):
            host_pages.run(cache, make_transfers(moves, save_groups=groups))


def test_groups_without_arrays() -> None:
    cache = Cache([jnp.arange(5)], [])
    host_pages = HostPages(cache, 4, groups=[0, 1], page_axis=(0, 0))
    cache = host_pages.run(host_pages.warmup(cache, 1), make_transfers([(1, 2)], [(2, 4)]))
    assert cache.keys[0].tolist() == [0, 1, 2, 3, 1]
    assert cache.states == []


def test_nothing_to_transfer_gives_the_same_arrays() -> None:
    arrays = {"keys": jnp.arange(4)}
    host_pages = HostPages(arrays, 4)
    assert host_pages.run(arrays, make_transfers()._replace(number=0)) is arrays
    assert host_pages.poll() == []


# Order, donation, and host arrays.


def test_saves_leave_the_arrays_and_loads_update_them_in_place() -> None:
    arrays = [jnp.zeros((64, 8)), jnp.ones((64, 8))]
    host_pages = HostPages(arrays, 64)
    arrays = host_pages.warmup(arrays, 4)
    pointers = [array.unsafe_buffer_pointer() for array in arrays]
    saved = host_pages.run(arrays, make_transfers([(1, 2), (5, 6)]))
    assert all(one is other for one, other in zip(saved, arrays, strict=True))
    loaded = host_pages.run(arrays, make_transfers([], [(2, 3)]))
    assert all(array.is_deleted() for array in arrays)
    assert [array.unsafe_buffer_pointer() for array in loaded] == pointers


@on_new_jax
@pytest.mark.parametrize("memory_kind", KINDS)
def test_calls_return_before_the_device_has_computed(memory_kind: str | None) -> None:
    """Loads read what pending saves will have written. Overwriting the transfers changes nothing."""
    array = jnp.arange(64)
    host_pages = HostPages(array, 64, memory_kind=memory_kind)
    array = host_pages.warmup(array, 2)
    for num_turns in NUMS_OF_TURNS:
        both, loads = make_transfers([(5, 1), (6, 2)], []), make_transfers([(7, 3)], [(1, 10), (2, 11)])
        array = after_slow_work(jax.block_until_ready(array), num_turns)
        for transfers in (both, loads):
            array = host_pages.run(array, transfers)
            for ids in (*transfers.saves, *transfers.loads):
                ids[:] = 1
        finished, is_ready = host_pages.poll(), array.is_ready()
        assert [*finished, *host_pages.wait()] == [done(both), done(loads)]
        assert array[jnp.array([10, 11])].tolist() == [5, 6]
        assert host_pages.poll() == []
        if not (finished or is_ready):
            return
    pytest.fail("the calls waited for the device")


@pytest.mark.usefixtures("word")
@pytest.mark.parametrize("num_pages", [1, 64])
def test_programs_of_loads_are_too_long_for_the_calling_thread(num_pages: int) -> None:
    """XLA counts their operations on the CPU."""
    array = jnp.zeros((NUM_PAGES, 2), jnp.float32)
    (pack,) = HostPages(array, NUM_PAGES)._groups[0].packs
    moves = np.zeros((2, num_pages), np.int32)
    for shape, first_item in (((1, num_pages, 2), None), ((NUM_PAGES, 16), 0)):
        program = get_writer(pack.shardings, 0, False, first_item).lower([array], np.zeros(shape, np.float32), moves)
        costs = program.compile().cost_analysis()
        assert (costs[0] if isinstance(costs, list) else costs)["flops"] >= 1000


@on_new_jax
def test_poll_returns_what_is_done() -> None:
    array = jnp.arange(8)
    host_pages = HostPages(array, 8)
    for num_turns in NUMS_OF_TURNS:
        first, second = make_transfers([(1, 1)]), make_transfers([(2, 2)])
        host_pages.run(array, first)
        host_pages._copier.submit(int).result()  # which comes after the save
        host_pages.run(after_slow_work(array, num_turns), second)
        finished = host_pages.poll()
        is_early = finished == [done(first)]
        end = time.monotonic() + 60
        while len(finished) < 2 and time.monotonic() < end:
            finished += host_pages.poll()
        assert finished == [done(first), done(second)]
        if is_early:
            return
    pytest.fail("nothing was done before the device had computed all")


# Memory kinds.


@on_new_jax
def test_arrays_in_memory_of_the_host_are_refused() -> None:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    with pytest.raises(ArgumentError, match=r"^arrays: got one in pinned_host, allowed: the memory of the device, \w+$"):
        HostPages(jax.device_put(jnp.arange(8), sharding), 8)


@on_new_jax
@pytest.mark.parametrize("memory_kind", ["pinned_host", "unpinned_host"])
def test_pages_cross_to_the_memory_that_was_asked_for(memory_kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, save = [], Pack.save
    monkeypatch.setattr(Pack, "save", lambda *args: saved.append(save(*args)) or saved[-1])
    host_pages = HostPages(array := jnp.arange(8), 8, memory_kind=memory_kind)
    host_pages.run(array, make_transfers([(1, 2)]))
    assert host_pages.memory_kind == memory_kind
    assert [on_host.sharding.memory_kind for _, on_host in saved] == [memory_kind]


def test_devices_without_the_memory_use_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, kind: str) -> None:
        raise ValueError(f"Could not find memory addressable by device cpu: {kind}")

    monkeypatch.setattr(jax.sharding.SingleDeviceSharding, "with_memory_kind", refuse)
    array = jnp.arange(8)
    host_pages = HostPages(array, 8)
    assert host_pages.memory_kind is None
    array = host_pages.run(array, make_transfers([(3, 1)], [(1, 6)]))
    assert array.tolist() == [0, 1, 2, 3, 4, 5, 3, 7]


# Failures.


def test_pages_that_were_never_saved_are_not_loaded() -> None:
    array = jnp.arange(5)
    host_pages = HostPages(array, 5)
    array = host_pages.run(array, transfers := make_transfers([(1, 1)], [(2, 2), (1, 3), (4, 4)]))
    ((number, failed_saves, failed_loads, error),) = host_pages.poll() or host_pages.wait()
    assert (number, failed_saves, failed_loads) == (transfers.number, [], [0, 2])
    assert isinstance(error, PageIdError)
    assert str(error) == "page 2 of the host: got one that was not saved, allowed: pages that were saved"
    assert array.tolist() == [0, 1, 2, 1, 4]


class Failing:
    """Calls of a method of `Pack`, some of which raise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.call, self.fails = getattr(Pack, name), False
        monkeypatch.setattr(Pack, name, lambda *args: self.run(*args))

    def run(self, *args: Any) -> Any:
        if self.fails:
            raise MemoryError("no memory")
        return self.call(*args)


@pytest.mark.parametrize("name", ["save", "load"])
def test_what_jax_raises_for_a_call_fails_its_pages(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was saved in the page before is gone too."""
    array = jnp.arange(6)
    host_pages, failing = HostPages(array, 6), Failing(monkeypatch, name)
    array = host_pages.run(array, make_transfers([(1, 1), (2, 2)]))
    host_pages.wait()
    failing.fails = True
    array = host_pages.run(array, make_transfers([(3, 1)], [(2, 4), (1, 5)]))
    failing.fails = False
    ((_, failed_saves, failed_loads, error),) = host_pages.wait()
    assert isinstance(error, MemoryError)
    if name == "save":
        assert (failed_saves, failed_loads, array.tolist()) == ([0], [1], [0, 1, 2, 3, 2, 5])
    else:
        assert (failed_saves, failed_loads, array.tolist()) == ([], [0, 1], [0, 1, 2, 3, 4, 5])
    array = host_pages.run(array, make_transfers([(3, 1)], [(2, 4), (1, 5)]))
    assert host_pages.wait()[0].error is None
    assert array.tolist() == [0, 1, 2, 3, 2, 3]


class Broken:
    """An array whose computation failed, as jax tells when it is waited for."""

    def is_ready(self) -> bool:
        return True

    def block_until_ready(self) -> None:
        raise RuntimeError("the device failed")


def test_an_error_on_the_way_to_the_host_fails_the_pages_that_crossed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    array = jnp.arange(6)
    host_pages = HostPages(array, 6)
    array = host_pages.run(array, make_transfers([(1, 1), (2, 2), (3, 3)]))
    assert host_pages.wait()[0].error is None
    save = Pack.save
    monkeypatch.setattr(Pack, "save", lambda *args: (save(*args)[0], Broken()))
    array = host_pages.run(array, transfers := make_transfers([(4, 2)]))
    assert [finished[:3] for finished in host_pages.wait()] == [(transfers.number, [0], [])]
    array = host_pages.run(array, make_transfers([], [(1, 4), (2, 5)]))
    ((_, _, failed_loads, error),) = host_pages.wait()
    assert (failed_loads, str(error)) == ([1], "the device failed")
    assert array.tolist() == [0, 1, 2, 3, 1, 5]


def test_an_error_of_a_load_is_found_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory that it read is not used again."""
    array = jnp.arange(6)
    host_pages, load = HostPages(array, 6, memory=np.zeros(7 * 64, np.uint8)[1:]), Pack.load
    array = host_pages.run(array, make_transfers([(1, 1)]))
    host_pages.wait()
    monkeypatch.setattr(Pack, "load", lambda *args: load(*args) and Broken())
    array = host_pages.run(array, transfers := make_transfers([], [(1, 4)]))
    assert [finished[:3] for finished in host_pages.wait()] == [(transfers.number, [], [0])]
    staging = host_pages._groups[0].staging
    ((used, _),) = staging._used
    assert not np.shares_memory(staging.take(), used)


def test_an_error_after_donation_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    array = jnp.arange(6)
    host_pages = HostPages(array, 6)
    array = host_pages.run(array, make_transfers([(1, 1)]))

    def lose(self: Any, leaves: Any, *_: Any) -> None:
        leaves[0].delete()
        raise RuntimeError("lost")

    monkeypatch.setattr(Pack, "load", lose)
    with pytest.raises(RuntimeError, match=r"^lost$"):
        host_pages.run(array, make_transfers([], [(1, 2)]))


# Errors: nothing is done.


@pytest.mark.parametrize(
    ("transfers", "error", "message"),
    [
        (make_transfers([(8, 1)]), PageIdError, r"moves\.saves\.src: got page 8, allowed: 1 to 7"),
        (make_transfers([(0, 1)]), PageIdError, r"moves\.saves\.src: got page 0, allowed: 1 to 7"),
        (make_transfers([(1, 10)]), PageIdError, r"moves\.saves\.dst: got page 10, allowed: 1 to 9"),
        (make_transfers([(1, 1), (2, 1)]), ArgumentError, r"moves\.saves\.dst: got page 1 twice, allowed: each page once"),
        (make_transfers([(1, 1)], [(10, 1)]), PageIdError, r"moves\.loads\.src: got page 10, allowed: 1 to 9"),
        (make_transfers([(1, 1)], [(1, 0)]), PageIdError, r"moves\.loads\.dst: got page 0, allowed: 1 to 7"),
        (make_transfers([], [(1, 8)]), PageIdError, r"moves\.loads\.dst: got page 8, allowed: 1 to 7"),
        (make_transfers([], [(1, 2), (2, 2)]), ArgumentError, r"moves\.loads\.dst: got page 2 twice, allowed: each page once"),
        (make_transfers([(1, 1)], save_groups=[2]), ArgumentError, r"moves\.saves\.group: got 2, allowed: 0, 1"),
        (make_transfers([(1, 1)])._replace(number=0), ArgumentError, "number: got 0, allowed: at least 1"),
        (make_transfers([(1, 1)])._replace(number=None), ArgumentTypeError, "number: got None, allowed: an int"),
        (make_transfers([(1, 1)])._replace(saves=make_copies([(1, 1)])._replace(dst=np.zeros(0, np.int32))), ArgumentError,
         r"moves\.saves: got 1 src, 0 dst, 1 group, allowed: arrays of equal length"),
        (make_transfers([(1, 1)])._replace(loads=make_copies([(1, 1)])._replace(dst=[])), ArgumentTypeError,
         r"moves\.loads\.dst: got list, allowed: an int32 array with one axis"),
        (None, ArgumentTypeError, "moves: got NoneType, allowed: Moves"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_transfers(transfers: Any, error: type[Exception], message: str) -> None:
    arrays = [jnp.arange(8), jnp.arange(8)]
    host_pages = HostPages(arrays, 10, groups=[0, 1])
    with pytest.raises(error, match=f"^{message}$"):
        host_pages.run(arrays, transfers)
    assert host_pages.wait() == []
    assert not any(array.is_deleted() for array in arrays)


def test_a_number_in_flight_is_not_taken_again() -> None:
    host_pages = HostPages(array := jnp.arange(8), 8)
    host_pages.run(array, transfers := make_transfers([(1, 1)]))
    with pytest.raises(ArgumentError, match=rf"^number: got {transfers.number}, allowed: one that is not in flight$"):
        host_pages.run(array, transfers)
    assert host_pages.wait() == [done(transfers)]


@pytest.mark.parametrize(
    "call", [HostPages.warmup, lambda host_pages, arrays: host_pages.run(arrays, make_transfers([(1, 1)]))]
)
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: [jnp.arange(8)], ArgumentError, "arrays: got the pytree .*, allowed: as at first, .*"),
        (lambda: [jnp.arange(8), np.arange(8)], ArgumentTypeError, "arrays: got ndarray, allowed: jax arrays, .*"),
        (lambda: [jnp.arange(8), jnp.arange(9)], ArgumentError, r"arrays: got int\d\d \(9,\) .*, allowed: as at first, .*"),
        (lambda: [jnp.arange(8), jnp.arange(8.0)], ArgumentError, r"arrays: got float\d\d \(8,\) .*, allowed: as at first, .*"),
    ],
)
def test_wrong_arrays(call: Callable[..., Any], make: Callable[[], Any], error: type[Exception], message: str) -> None:
    host_pages = HostPages([jnp.arange(8), jnp.arange(8)], 10)
    with pytest.raises(error, match=f"^{message}$"):
        call(host_pages, make())
    assert host_pages.wait() == []


@pytest.mark.parametrize(
    ("arrays", "options", "error", "message"),
    [
        (jnp.arange(8), {"num_pages": 1}, ArgumentError, r"num_pages: got 1, allowed: 2 to 2\*\*62"),
        (jnp.arange(8), {"memory_kind": "pined_host"}, ArgumentError,
         "memory_kind: got 'pined_host', allowed: pinned_host, unpinned_host, None"),
        ({"a": jnp.arange(8)}, {"groups": [0]}, ArgumentTypeError, "arrays: got dict, allowed with groups: a list or tuple"),
        ([jnp.arange(8)], {"groups": [-1]}, ArgumentError, "group: got -1, allowed: at least 0"),
        (jnp.arange(8), {"num_copy_threads": 0}, ArgumentError, "num_copy_threads: got 0, allowed: at least 1"),
        (jnp.arange(8), {"memory": 7}, ArgumentTypeError, "memory: got int, allowed: a contiguous buffer"),
        (jnp.arange(8), {"memory": bytes(640)}, ArgumentError,
         "memory: got 640 read-only bytes, allowed: at least 640 writable ones"),
        (jnp.arange(8), {"memory": bytearray(639)}, ArgumentError,
         "memory: got 639 writable bytes, allowed: at least 640 writable ones"),
        ([jnp.arange(8)], {"groups": [0], "memory": bytearray(640)}, ArgumentTypeError,
         "memory: got bytearray, allowed: a buffer for each of 1 groups"),
        ([jnp.arange(8)], {"groups": [0, 1]}, ArgumentError,
         "groups: got 1 arrays, 2 groups, 1 page axes, allowed: as many .*"),
        ([jnp.arange(8)], {"groups": [0], "num_pages": [4, 4]}, ArgumentError,
         "num_pages: got 2 numbers, allowed for 1 groups: 1"),
        ([jnp.arange(8)], {"groups": [0], "page_axis": [0, 0]}, ArgumentError,
         "groups: got 1 arrays, 1 groups, 2 page axes, allowed: as many .*"),
    ],
)  # fmt: skip
def test_wrong_host_pages(arrays: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}$"):
        HostPages(arrays, **{"num_pages": 10, **options})
