"""Host memory behind an engine's arrays of pages: `HostPages` makes the transfers listed by `take_transfers`.

Each saved page becomes one array per dtype, with the page of all layers, gathered on the device and copied out by the runtime.
No program computes in host memory: XLA on GPUs aborts the process on a scatter into it (openxla/xla issues 34565 and 47362),
and nothing is donated, so a failed copy spoils only its own page. A load depends on the arrays made by its save, so it never
reads a page too early. An array on the host is never written again; a later save of the page replaces it.

Programs move up to 16 pages each, in powers of two. jax is imported by the first `HostPages`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from pagepool.arguments import MAX_SIZE, require_int
from pagepool.device import call_with_payload, get_shard_map, import_jax
from pagepool.errors import ArgumentError, ArgumentTypeError, PageIdError, shown
from pagepool.page_copies import (
    Axes,
    check_arrays,
    check_different,
    check_moves,
    find_crossing,
    find_places,
    get_page_axes,
    list_programs,
    pad,
    read_fields,
    read_in_part,
    write_in_part,
)

if TYPE_CHECKING:
    import jax

__all__ = ["FinishedTransfers", "HostPages"]

MAX_PAGES_PER_CALL = 16
"""Largest number of pages of one call of a program."""

NOWHERE = np.iinfo(np.int32).max
"""A page outside every array: writes to it are dropped."""

MEMORY_KINDS = ("pinned_host", "unpinned_host")

Int32Array = npt.NDArray[np.int32]
Arrays = TypeVar("Arrays")


class Transfers(Protocol):
    """The attributes of `pagepool.Transfers` read by `HostPages.run`: its number, and int32 arrays of ids and groups."""

    @property
    def number(self) -> int: ...
    @property
    def save_src(self) -> Int32Array: ...
    @property
    def save_dst(self) -> Int32Array: ...
    @property
    def save_group(self) -> Int32Array: ...
    @property
    def load_src(self) -> Int32Array: ...
    @property
    def load_dst(self) -> Int32Array: ...
    @property
    def load_group(self) -> Int32Array: ...


class FinishedTransfers(NamedTuple):
    """Finished transfers, for `CacheManager.fail_transfers`: indices of failed saves and loads, and the first error."""

    number: int
    failed_saves: list[int]
    failed_loads: list[int]
    error: Exception | None


class HostPages:
    """Host memory for `num_pages` pages of an engine's arrays, the same number as in the manager's `HostTier`; with several
    pools a number for each group, that of its pool.

    >>> import jax.numpy as jnp
    >>> from pagepool import CacheGroupSpec, CacheManager, FullAttentionSpec, HostTier
    >>> groups = [CacheGroupSpec(FullAttentionSpec(2, 1, 8, "float32", use_mla=False))]
    >>> manager = CacheManager(4, groups, max_model_len=8, host_tier=HostTier(16))
    >>> arrays = {"keys": jnp.zeros((4, 2)), "values": jnp.zeros((4, 2))}
    >>> host_pages = HostPages(arrays, 16)
    >>> arrays = host_pages.warmup(arrays)
    >>> arrays = host_pages.run(arrays, manager.take_transfers())  # before each step, and before `copy_pages`
    >>> for finished in host_pages.poll():
    ...     failed = manager.fail_transfers(finished.number, saves=finished.failed_saves, loads=finished.failed_loads)

    `run` starts copies and returns; `poll` reports finished ones. Arrays keep their shardings. One thread at a time may use it.
    Each page costs the calling thread about 30 us each way, whatever its size, and about 100 us beside an H100.
    """

    def __init__(
        self,
        arrays: Any,
        num_pages: int | Sequence[int],
        *,
        groups: Sequence[int] | None = None,
        page_axis: int | Sequence[int] = 0,
        memory_kind: str | None = "pinned_host",
    ) -> None:
        """`arrays` is any pytree of jax arrays, on one device or with a `NamedSharding`. Their `page_axis` has a place for each
        page id of the pool. With `groups`, `arrays` is a list or tuple with a pytree for each of these groups; then `num_pages`
        and `page_axis` may be sequences too. Pages are kept in `memory_kind`, ``"pinned_host"`` or ``"unpinned_host"``, of the
        same devices. For None, or if the devices lack that kind, they are kept in arrays of the first CPU device, and the
        attribute `memory_kind` is None. In two cases `run` may block until the device has computed a saved page: if the page is
        copied to another backend's CPU device, and on a CPU with jax before 0.9.

        Host memory is allocated page by page. On GPUs XLA limits pinned memory: XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB. Devices that
        divide the page axis, or hold the same part of an array, each keep their own copy of a page.

        Raise ArgumentTypeError for other types and shardings; ArgumentError for other values, and arrays that span processes.
        """
        self.num_pages = num_pages
        jax = import_jax()
        leaves, self._tree = jax.tree_util.tree_flatten(arrays)
        if groups is not None and not isinstance(arrays, list | tuple):
            raise ArgumentTypeError(f"arrays: got {type(arrays).__name__}, allowed with groups: a list or tuple")
        trees = [arrays] if groups is None else arrays
        axes = page_axis if isinstance(page_axis, Sequence) else [page_axis] * len(trees)
        nums = num_pages if isinstance(num_pages, Sequence) else [num_pages] * len(trees)
        chosen = [None] if groups is None else [require_int("group", group, 0) for group in groups]
        if not len(trees) == len(axes) == len(chosen):
            got = f"{len(trees)} arrays, {len(chosen)} groups, {len(axes)} page axes"
            raise ArgumentError(f"groups: got {got}, allowed: as many of each")
        if len(nums) != len(trees):
            raise ArgumentError(f"num_pages: got {len(nums)} numbers, allowed for {len(trees)} groups: {len(trees)}")
        nums = [require_int("num_pages", num, 2, MAX_SIZE) for num in nums]
        sizes = [len(jax.tree_util.tree_leaves(tree)) for tree in trees]
        self._stops = np.cumsum(sizes).tolist()
        self.memory_kind = find_memory_kind(leaves, memory_kind)
        self._groups = [
            GroupPages(leaves[stop - size : stop], group, num, axis, self.memory_kind)
            for stop, size, group, num, axis in zip(self._stops, sizes, chosen, nums, axes, strict=True)
        ]
        self._pending: dict[int, tuple[list[PageCopy], list[PageCopy]]] = {}

    def run(self, arrays: Arrays, transfers: Transfers) -> Arrays:
        """Start transfers, and return the arrays for the next step. All saves are read before any load is written.

        `transfers` is the result of `take_transfers`, or any object with its attributes; if it is empty, `arrays` is returned.
        The arrays must have the pytree, shapes, dtypes and shardings given at first. If something is loaded, the arrays are
        donated: they are updated in place, and the ones passed become invalid. The results are committed to their devices.

        The call does not wait for the device, which keeps a copy of the pages until the transfers are done. A page that was
        never saved, or whose save failed, is not loaded; `poll` reports this, and errors of jax in a copy. Only an error after
        arrays were donated is raised here; a device error in a load also spoils the arrays, as in any step. Devices
        communicate, by an all-reduce, only if they divide the page axis and a page is loaded into another part.

        Before anything is done, raise ArgumentTypeError for arguments of other types or dtypes; PageIdError for pages beyond
        the arrays or the host, and for null pages; ArgumentError for a page written twice, a group without arrays, a number
        still in flight, unequal lengths, and arrays that are deleted or not as at first.
        """
        saves = read_fields(transfers, "transfers", ("save_src", "save_dst", "save_group"), "Transfers")
        loads = read_fields(transfers, "transfers", ("load_src", "load_dst", "load_group"), "Transfers")
        if saves.shape[1] + loads.shape[1] == 0:
            return arrays
        number = require_int("number", transfers.number, 1)
        if number in self._pending:
            raise ArgumentError(f"number: got {number}, allowed: one that is not in flight")
        grouped = self._split(arrays)
        save_places, load_places = self._check(saves, "save"), self._check(loads, "load")
        pending: tuple[list[Any], list[Any]] = [None] * saves.shape[1], [None] * loads.shape[1]
        for group, leaves, places in zip(self._groups, grouped, save_places, strict=True):
            put(pending[0], places, group.save(leaves, saves[:2, places]))
        for group, leaves, places in zip(self._groups, grouped, load_places, strict=True):
            put(pending[1], places, group.load(leaves, loads[:2, places]))
        self._pending[number] = pending
        return self._join(grouped)  # type: ignore[no-any-return]

    def poll(self) -> list[FinishedTransfers]:
        """Return finished transfers, each once, in the order of their start, without blocking. O(pages in flight)."""
        ready = [n for n, both in self._pending.items() if all(copy.is_ready() for copies in both for copy in copies)]
        return [self._finish(number) for number in ready]

    def wait(self) -> list[FinishedTransfers]:
        """Wait for all transfers, and return those not returned before."""
        return [self._finish(number) for number in list(self._pending)]

    def warmup(self, arrays: Arrays, max_num_pages: int = MAX_PAGES_PER_CALL) -> Arrays:
        """Compile the programs for transfers of up to `max_num_pages` pages each way. Return the arrays, unchanged.

        There are at most 5 programs each way for each dtype, and twice as many for loads if devices divide the page axis. The
        arrays are donated; errors are those of `run`.
        """
        max_num_pages = require_int("max_num_pages", max_num_pages, 1)
        grouped = self._split(arrays)
        for group, leaves in zip(self._groups, grouped, strict=True):
            group.warmup(leaves, min(max_num_pages, MAX_PAGES_PER_CALL))
        return self._join(grouped)  # type: ignore[no-any-return]

    def _split(self, arrays: Any) -> list[list[Any]]:
        """Return the checked arrays of each group."""
        leaves, tree = import_jax().tree_util.tree_flatten(arrays)
        if tree != self._tree:
            raise ArgumentError(f"arrays: got the pytree {tree}, allowed: as at first, {self._tree}")
        check_different(leaves)
        grouped = [leaves[start:stop] for start, stop in zip([0, *self._stops], self._stops, strict=False)]
        for group, own in zip(self._groups, grouped, strict=True):
            group.check(own)
        return grouped

    def _join(self, grouped: Sequence[Sequence[Any]]) -> Any:
        return self._tree.unflatten([leaf for leaves in grouped for leaf in leaves])

    def _check(self, moves: Int32Array, way: str) -> list[npt.NDArray[np.intp]]:
        """Check saves or loads. Return the indices of each group's transfers."""
        places = [find_places(moves[2], group.group) for group in self._groups]
        wrong = np.delete(moves[2], np.concatenate(places))
        if wrong.size:
            allowed = ", ".join(str(group.group) for group in self._groups)
            raise ArgumentError(f"transfers.{way}_group: got {wrong[0]}, allowed: {allowed}")
        for group, own in zip(self._groups, places, strict=True):
            sizes = group.num_pages, group.num_host_pages
            check_moves(f"transfers.{way}_", moves[:2, own], *(sizes if way == "save" else sizes[::-1]))
        return places

    def _finish(self, number: int) -> FinishedTransfers:
        saves, loads = [[copy.wait() for copy in copies] for copies in self._pending.pop(number)]
        failed_saves, failed_loads = ([i for i, error in enumerate(errors) if error] for errors in (saves, loads))
        error = next((error for error in (*saves, *loads) if error), None)
        return FinishedTransfers(number, failed_saves, failed_loads, error)


def put(items: list[Any], places: Any, values: Sequence[Any]) -> None:
    """Set ``items[places[i]] = values[i]``."""
    for place, value in zip(places, values, strict=True):
        items[place] = value


def find_memory_kind(leaves: Sequence[Any], memory_kind: str | None) -> str | None:
    """Return the kind of memory, or None if the devices do not have it. Raise ArgumentError for other kinds."""
    if memory_kind is not None and memory_kind not in MEMORY_KINDS:
        raise ArgumentError(f"memory_kind: got {shown(memory_kind)}, allowed: {', '.join(MEMORY_KINDS)}, None")
    sharding = getattr(leaves[0], "sharding", None) if leaves else None
    try:
        return memory_kind if memory_kind and sharding and sharding.with_memory_kind(memory_kind) else None
    except ValueError:
        return None


class PageCopy:
    """A copy of a page, possibly under way: an array for each pack of its group, or the error that prevented it. `origin` is
    the device page it was read from.
    """

    def __init__(self, origin: int = 0, arrays: Sequence[Any] = (), error: Exception | None = None) -> None:
        self.origin, self.arrays, self.error = origin, arrays, error

    def is_ready(self) -> bool:
        """Whether `wait` would return immediately."""
        return all(array.is_ready() for array in self.arrays)

    def wait(self) -> Exception | None:
        """Wait for the copy, and return its error."""
        try:
            for array in self.arrays:
                array.block_until_ready()
        except Exception as error:
            self.arrays, self.error = (), error
        return self.error


class GroupPages:
    """The host pages of a cache group's arrays; group None stands for all groups."""

    def __init__(
        self, leaves: Sequence[Any], group: int | None, num_host_pages: int, page_axis: int, memory_kind: str | None
    ) -> None:
        self.group, self.page_axis, self.num_host_pages = group, page_axis, num_host_pages
        self.num_pages = check_arrays(leaves, page_axis) if leaves or group is None else 0
        self.layout = [(leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves]
        self.packs = make_packs(leaves, page_axis, memory_kind)
        self.pages: dict[int, PageCopy] = {}

    def check(self, leaves: Sequence[Any]) -> None:
        """Check that the arrays are as at first, and can be donated."""
        if leaves:
            check_arrays(leaves, self.page_axis)
        for leaf, (shape, dtype, sharding) in zip(leaves, self.layout, strict=True):
            is_kept = leaf.sharding == sharding or leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
            if leaf.shape != shape or leaf.dtype != dtype or not is_kept:
                got = f"{leaf.dtype} {leaf.shape} {leaf.sharding}"
                raise ArgumentError(f"arrays: got {got}, allowed: as at first, {dtype} {shape} {sharding}")

    def save(self, leaves: Sequence[Any], pairs: Int32Array) -> list[PageCopy]:
        """Start saves, from device pages to host pages."""
        copies: list[PageCopy] = []
        for src, dst in divide(pairs):
            for page_id in dst.tolist():
                self.pages.pop(page_id, None)  # free its memory before allocating more
            try:
                arrays = zip(*[pack.save(leaves, src) for pack in self.packs], strict=True)
                saved = [PageCopy(*copy) for copy in zip(src.tolist(), arrays, strict=True)]
            except Exception as error:
                saved = [PageCopy(error=error) for _ in src]
            self.pages.update(zip(dst.tolist(), saved, strict=True))
            copies += saved
        return copies

    def load(self, leaves: list[Any], pairs: Int32Array) -> list[PageCopy]:
        """Start loads, from host pages to device pages, and replace the arrays in `leaves`."""
        copies = [
            self.pages.get(page_id)
            or PageCopy(error=PageIdError(f"page {page_id} of the host: allowed: pages that were saved"))
            for page_id in pairs[0].tolist()
        ]
        places = np.array([place for place, copy in enumerate(copies) if copy.error is None], dtype=np.intp)
        for (dst,), (chosen,) in zip(divide(pairs[1:, places]), divide(places[None]), strict=True):
            put(copies, chosen, self._load([copies[place] for place in chosen], dst, leaves))
        return copies

    def _load(self, saved: Sequence[PageCopy], dst: Int32Array, leaves: list[Any]) -> list[PageCopy]:
        pairs = np.stack([np.array([copy.origin for copy in saved], dtype=np.int32), dst])
        loaded = []
        try:
            crosses = find_crossing(leaves, pairs, self.page_axis)
            for i, pack in enumerate(self.packs):
                loaded.append(pack.load(leaves, [copy.arrays[i] for copy in saved], pairs, crosses))
        except Exception as error:
            if any(leaf.is_deleted() for leaf in leaves):
                raise
            return [PageCopy(error=error) for _ in saved]
        return [PageCopy(arrays=arrays) for arrays in zip(*loaded, strict=True)]

    def warmup(self, leaves: list[Any], max_num_pages: int) -> None:
        """Run all programs for up to `max_num_pages` pages: they read null pages and drop their writes."""
        programs = list_programs(leaves, self.page_axis, max_num_pages)
        for pack in self.packs:
            pack.commit(leaves)
            for num_pages, crosses in programs:
                pairs = np.repeat(np.array([[0], [NOWHERE]], dtype=np.int32), num_pages, axis=1)
                pack.load(leaves, pack.save(leaves, pairs[0]), pairs, crosses)


def divide(values: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    """Divide the last axis into pieces, one for each call of a program."""
    for start in range(0, values.shape[-1], MAX_PAGES_PER_CALL):
        yield values[..., start : start + MAX_PAGES_PER_CALL]


class Pack(NamedTuple):
    """Arrays of one dtype on the same mesh, or on one device. A page of all of them is moved as one array with one axis,
    divided among the devices.
    """

    places: tuple[int, ...]
    shardings: tuple[jax.sharding.Sharding, ...]
    page_axis: int
    device: jax.sharding.Sharding
    host: jax.sharding.Sharding

    def commit(self, leaves: list[Any]) -> None:
        """Commit arrays on one device to it, as loads do, since uncommitted arrays would need other programs."""
        if len(self.device.device_set) == 1:
            put(leaves, self.places, import_jax().device_put([leaves[place] for place in self.places], list(self.shardings)))

    def save(self, leaves: Sequence[Any], page_ids: Int32Array) -> list[Any]:
        """Read pages, and start to copy them to the host."""
        read = get_reader(self.shardings, self.page_axis)
        pages = call_with_payload(read, [leaves[place] for place in self.places], pad(page_ids, 0))
        return import_jax().device_put(pages[: len(page_ids)], self.host)  # type: ignore[no-any-return]

    def load(self, leaves: list[Any], pages: Sequence[Any], pairs: Int32Array, crosses: bool) -> list[Any]:
        """Start to copy pages to the device and write them into the arrays; the results replace those in `leaves`. `pairs` are
        the pages they were saved from, and the pages to write.
        """
        loaded: list[Any] = import_jax().device_put(pages, self.device)
        write = get_writer(self.shardings, self.page_axis, crosses)
        payload = pad(pairs, NOWHERE)
        padded = loaded + loaded[:1] * (payload.shape[1] - len(loaded))
        written = call_with_payload(write, [leaves[place] for place in self.places], padded, payload)
        put(leaves, self.places, written)
        return loaded


def make_packs(leaves: Sequence[Any], page_axis: int, memory_kind: str | None) -> list[Pack]:
    """Divide arrays by dtype and mesh. Host pages are in memory of this kind, or for None on the first CPU device."""
    jax = import_jax()
    places: dict[tuple[Any, Any], list[int]] = {}
    for place, leaf in enumerate(leaves):
        places.setdefault((leaf.dtype, get_page_sharding(leaf.sharding)), []).append(place)
    packs = []
    for (_, device), own in places.items():
        shardings = tuple([leaves[place].sharding for place in own])
        if memory_kind is None:
            host = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
        else:
            host = device.with_memory_kind(memory_kind)
        packs.append(Pack(tuple(own), shardings, page_axis, device, host))
    return packs


def get_page_sharding(sharding: jax.sharding.Sharding) -> Any:
    """Return the sharding of a moved page of an array: each device has its own part, or a dummy page if it has none."""
    kinds = import_jax().sharding
    if not sharding.is_fully_addressable:
        raise ArgumentError("arrays: got an array that spans processes, allowed: arrays of this process")
    if isinstance(sharding, kinds.NamedSharding):
        return kinds.NamedSharding(sharding.mesh, kinds.PartitionSpec(sharding.mesh.axis_names))
    if len(sharding.device_set) > 1:
        raise ArgumentTypeError(f"arrays: got a {type(sharding).__name__}, allowed: NamedSharding, or one device")
    return kinds.SingleDeviceSharding(*sharding.device_set)


Shardings = tuple["jax.sharding.Sharding", ...]


@lru_cache(maxsize=64)
def get_reader(shardings: Shardings, page_axis: int) -> Callable[..., Any]:
    """Return the program that reads pages of a pack's arrays. jax compiles it once per number of pages."""
    jax = import_jax()
    read = partial(read_pages, page_axis=page_axis, axes=[get_page_axes(sharding, page_axis) for sharding in shardings])
    return jax.jit(map_parts(read, shardings, is_writer=False))  # type: ignore[no-any-return]


@lru_cache(maxsize=64)
def get_writer(shardings: Shardings, page_axis: int, crosses: bool) -> Callable[..., Any]:
    """Return the program that writes pages into a pack's arrays. `crosses`: some page goes to another device's part."""
    jax = import_jax()
    axes = [get_page_axes(sharding, page_axis) for sharding in shardings]
    write = partial(write_pages, page_axis=page_axis, axes=axes, crosses=crosses)
    mapped = map_parts(write, shardings, is_writer=True)
    return jax.jit(mapped, donate_argnums=0, out_shardings=list(shardings))  # type: ignore[no-any-return]


def map_parts(function: Callable[..., Any], shardings: Shardings, is_writer: bool) -> Callable[..., Any]:
    """Let a function run on each device's parts. A reader takes arrays and page ids, a writer pages in between."""
    jax = import_jax()
    first: Any = shardings[0]
    if not isinstance(first, jax.sharding.NamedSharding):
        return function
    arrays = [getattr(sharding, "spec", None) for sharding in shardings]
    pages, ids = get_page_sharding(first).spec, jax.sharding.PartitionSpec()
    in_specs, out_specs = ((arrays, pages, ids), arrays) if is_writer else ((arrays, ids), pages)
    shard_map = get_shard_map(is_checked=False)  # jax cannot know that a page's copies on several devices are equal
    return shard_map(function, mesh=first.mesh, in_specs=in_specs, out_specs=out_specs)  # type: ignore[no-any-return]


def read_pages(parts: Sequence[Any], page_ids: Any, page_axis: int, axes: Sequence[Axes]) -> list[Any]:
    """Return each page of all parts as one array (traced)."""
    jax = import_jax()
    pages = [read_in_part(part, page_ids, page_axis, own) for part, own in zip(parts, axes, strict=True)]
    flat = [jax.numpy.moveaxis(page, page_axis, 0).reshape(page_ids.shape[0], -1) for page in pages]
    return list(jax.numpy.concatenate(flat, axis=1))


def write_pages(
    parts: Sequence[Any], pages: Sequence[Any], pairs: Any, page_axis: int, axes: Sequence[Axes], crosses: bool
) -> list[Any]:
    """Write the pages returned by `read_pages` (traced)."""
    jnp = import_jax().numpy
    flat, start, written = jnp.stack(pages), 0, []
    for part, own in zip(parts, axes, strict=True):
        shape = (*part.shape[:page_axis], *part.shape[page_axis + 1 :])
        stop = start + prod(shape)
        page = jnp.moveaxis(flat[:, start:stop].reshape(len(pages), *shape), 0, page_axis)
        written.append(write_in_part(part, page, pairs, page_axis, own, crosses))
        start = stop
    return written
