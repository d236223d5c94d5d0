"""Host memory behind an engine's arrays of pages: `HostPages` makes the loads and saves of `take_moves`.

The host pages of a cache group are rows of one array of bytes. A save gathers up to 64 pages on the device into one array per
dtype, which the runtime copies to the host; a thread waits for it, and copies its pages into rows. A load copies rows into
staging memory, which crosses in one piece and is scattered on the device. A page not in its row yet is scattered from the array
that its save gathered, so no load waits for a save. No program computes in host memory: XLA on GPUs aborts the process on a
scatter into it (openxla/xla issues 34565 and 47362). With one CPU device nothing crosses: its programs read the rows in place.

jax may alias memory passed to it, and read it late. So nothing is written where a program may still read: the next load uses
other staging memory, and the thread waits for such programs before it writes rows. A failed copy spoils only its own pages. jax
is imported by the first `HostPages`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from pagepool._core import copy_rows
from pagepool.arguments import require_int
from pagepool.device import call_with_payload, get_shard_map, import_jax
from pagepool.errors import ArgumentError, ArgumentTypeError, shown
from pagepool.host_rows import Rows, Staging, alias_rows, align, as_bytes, describe_pages
from pagepool.page_copies import (
    Axes,
    cast_bits,
    check_arrays,
    check_different,
    find_crossing,
    get_page_axes,
    get_part_size,
    list_programs,
    pad,
    read_in_part,
    write_in_part,
)
from pagepool.transfers import (
    MAX_PAGES_PER_CALL,
    Copies,
    Copy,
    FinishedTransfers,
    GroupArguments,
    GroupTransfers,
    LoadsAndSaves,
    Transfers,
    divide,
    read_groups,
)

if TYPE_CHECKING:
    import jax

__all__ = ["FinishedTransfers", "HostPages"]

NOWHERE = np.iinfo(np.int32).max
"""A page outside every array: writes to it are dropped."""

MIN_OPERATIONS = 1024
"""Arithmetic operations in a load's program, enough to run it on another thread: on CPUs XLA runs a program of less than 1,000
in the calling thread if all inputs are ready. Moves of data do not count.
"""

MEMORY_KINDS = ("pinned_host", "unpinned_host")

Int32Array = npt.NDArray[np.int32]
Arrays = TypeVar("Arrays")


class HostPages(Transfers):
    """Host memory for `num_pages` pages of an engine's arrays, as many as in the manager's `HostTier`; with several pools a
    number for each group, as many as the tier has behind the group's pool.

    >>> import jax.numpy as jnp
    >>> from pagepool import CacheGroupSpec, CacheManager, FullAttentionSpec, HostTier
    >>> groups = [CacheGroupSpec(FullAttentionSpec(2, 1, 8, "float32", use_mla=False))]
    >>> manager = CacheManager(4, groups, max_model_len=8, host_tier=HostTier(16))
    >>> arrays = {"keys": jnp.zeros((4, 2)), "values": jnp.zeros((4, 2))}
    >>> host_pages = HostPages(arrays, 16)
    >>> arrays = host_pages.warmup(arrays)
    >>> arrays = host_pages.run(arrays, manager.take_moves())  # before each step, and before `copy_pages`
    >>> for finished in host_pages.poll():
    ...     failed = manager.fail(finished.number, saves=finished.failed_saves, loads=finished.failed_loads)

    `run` starts copies and returns; `poll` reports finished ones. Arrays keep their shardings. One thread at a time may call.

    `rows` has an array of bytes ``[num_pages, bytes of a row]`` for each group, `layout` a text that describes these rows: the
    texts of two processes are equal exactly if their rows have the same meaning. ``rows[group][page_id]`` has the bytes of a
    host page from the time `poll` reports its save until the next save to it starts. `mark_saved` marks rows that others wrote
    while no transfer of their pages was under way. A row has the parts of all devices in turn; in each part the arrays of each
    dtype begin at a multiple of 64 bytes.
    """

    def __init__(
        self,
        arrays: Any,
        num_pages: int | Sequence[int],
        *,
        groups: Sequence[int] | None = None,
        page_axis: int | Sequence[int] = 0,
        memory_kind: str | None = "pinned_host",
        memory: Any = None,
        num_copy_threads: int = 2,
    ) -> None:
        """`arrays` is any pytree of jax arrays, on one device or with a `NamedSharding`. Their `page_axis` has a place for each
        page id of the pool. With `groups`, `arrays` is a list or tuple with a pytree for each of these groups; then `num_pages`
        and `page_axis` may be sequences too. Pages cross to and from `memory_kind`, ``"pinned_host"`` or ``"unpinned_host"``,
        of the same devices. For None, or if the devices lack that kind, they cross to the first CPU device, and the attribute
        `memory_kind` is None. In two cases `run` may block until the device has computed a saved page: if the page crosses to
        the CPU device of another backend, and on a CPU with jax before 0.9.

        The rows are in `memory`, a writable buffer; with `groups`, a list or tuple of a buffer for each group. By default they
        are in new memory, which `warmup` allocates, in huge pages where the system has them. Saved pages are in other memory
        until their rows are written: on GPUs in pinned memory, limited by XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB. Devices that
        divide the page axis, or hold the same part of an array, each keep their own copy of a page.

        Up to `num_copy_threads` threads copy rows: for loads the calling thread is one of them, for saves a thread of this
        object, which ends after its copies by `close`, with the object, or when the interpreter exits. Loads to one CPU device
        copy no rows, unless the address of `memory` is no multiple of 64.

        Raise ArgumentTypeError for other types and shardings; ArgumentError for other values, arrays that span processes, and
        too small buffers; OSError if there is not enough memory.
        """
        leaves, self._tree = import_jax().tree_util.tree_flatten(arrays)
        read = read_groups(arrays, num_pages, groups, page_axis, memory)
        num_threads = require_int("num_copy_threads", num_copy_threads, 1)
        sizes = [len(import_jax().tree_util.tree_leaves(each.arrays)) for each in read]
        self.memory_kind = find_memory_kind(leaves, memory_kind)
        grouped = divide(leaves, sizes)
        made = [GroupPages(own, each, self.memory_kind, num_threads) for own, each in zip(grouped, read, strict=True)]
        super().__init__(num_pages, groups, made, grouped)

    _groups: Sequence[GroupPages]

    def run(self, arrays: Arrays, moves: LoadsAndSaves) -> Arrays:
        """Start loads and saves, and return the arrays for the next step. All saves are read before any load is written.

        `moves` is the result of `take_moves`, or any object with its attributes; without loads and saves `arrays` is returned.
        The arrays must have the pytree, shapes, dtypes and shardings of the constructor's. If something is loaded, the arrays
        are donated: they are updated in place, and the ones passed become invalid. The results are committed to their devices.

        The call does not wait for the device, which keeps a copy of the pages until the transfers are done. For loads the call
        copies rows, with up to `num_copy_threads` threads; one CPU device reads the rows in place instead, until `poll` reports
        the load. Saves cost the calling thread some us a page, loads the copies and less than that besides
        (docs/benchmarks.md). Up to 64 pages, or 16 MiB a device, cross in one piece, padded to a power of two. A page that was
        never saved, or whose save failed, is not loaded; `poll` reports this, and errors of jax in a copy. Only an error after
        arrays were donated is raised here; a device error in a load also spoils the arrays, as in any step. Devices
        communicate, by an all-reduce, only if they divide the page axis and a page is loaded into another part.

        Before anything is done, raise ArgumentTypeError for arguments of other types or dtypes; PageIdError for pages beyond
        the arrays or the host, and for null pages; ArgumentError for a page written twice, a group without arrays, a number
        still in flight, unequal lengths, and arrays that are deleted or unlike the first; IntegrityError in a forked process.
        """
        grouped = self._start(arrays, moves)
        return arrays if grouped is None else self._join(grouped)

    def warmup(self, arrays: Arrays, max_num_pages: int = MAX_PAGES_PER_CALL) -> Arrays:
        """Compile the programs for transfers of up to `max_num_pages` pages each way. Return the arrays, unchanged. The system
        also allocates the rows, unless they are in the caller's memory or in use; each core takes some 45 ms for a GiB.

        There are at most 7 programs each way for each dtype, and twice as many for loads to one CPU device, or if devices
        divide the page axis. The arrays are donated; errors are those of `run`.
        """
        self._require_own_process()
        max_num_pages = require_int("max_num_pages", max_num_pages, 1)
        grouped = self._split(arrays)
        for group, leaves in zip(self._groups, grouped, strict=True):
            group.warmup(leaves, max_num_pages)
        return self._join(grouped)  # type: ignore[no-any-return]

    def close(self) -> None:
        """Wait until no row is written or read any more, end the thread, and take the rows back from jax, so that `memory` can
        be closed once this object is gone. After a load jax's own threads may hold `memory` for some ms more: ``mmap.close``
        raises BufferError until they have released it and a garbage collection has run. Later saves fail; `poll` and `wait`
        still report. In a forked process do nothing.
        """
        if not self._is_own_process:
            return
        self._copier.shutdown()
        for group in self._groups:
            group.close()
        gc.collect(0)  # makes jax release NumPy's memory

    def _split(self, arrays: Any) -> list[list[Any]]:
        leaves, tree = import_jax().tree_util.tree_flatten(arrays)
        if tree != self._tree:
            raise ArgumentError(f"arrays: got the pytree {tree}, allowed: as at first, {self._tree}")
        check_different(leaves)
        return self._check_groups(leaves)

    def _join(self, grouped: Sequence[Sequence[Any]]) -> Any:
        return self._tree.unflatten([leaf for leaves in grouped for leaf in leaves])


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


class GroupPages(GroupTransfers):
    """The host pages of a cache group's arrays. `aliases` are the rows as jax arrays, one for each pack, if programs can read
    them; `readers` are the loads that read them.
    """

    def __init__(self, leaves: Sequence[Any], arguments: GroupArguments, memory_kind: str | None, num_threads: int) -> None:
        page_axis = arguments.page_axis
        num_pages = check_arrays(leaves, page_axis) if leaves or arguments.group is None else 0
        is_divided = any(get_part_size(leaf, page_axis) < leaf.shape[page_axis] for leaf in leaves)
        self.layout = [(leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves]
        self.packs = make_packs(leaves, page_axis, memory_kind)
        num_bytes = align(self.packs[-1].stop) if self.packs else 0
        row_shape = len(self.packs[0].list_devices()) if self.packs else 1, num_bytes
        super().__init__(arguments, num_pages, row_shape, num_threads, is_divided)
        self.staging = Staging(self.max_num_pages * prod(row_shape))
        self.aliases = alias_rows(self.rows, [pack.dtype for pack in self.packs], self.packs[0].device) if self.packs else []
        self.readers: list[Copy] = []

    def describe_arrays(self, leaves: Sequence[Any]) -> list[str]:
        """Return the text of each pack."""
        return [describe_pages([leaves[i] for i in pack.places], self.page_axis, pack.list_devices()) for pack in self.packs]

    def check(self, leaves: Sequence[Any]) -> None:
        """Check that the arrays are like the first ones, and can be donated."""
        if leaves:
            check_arrays(leaves, self.page_axis)
        for leaf, (shape, dtype, sharding) in zip(leaves, self.layout, strict=True):
            is_kept = leaf.sharding == sharding or leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
            if leaf.shape != shape or leaf.dtype != dtype or not is_kept:
                got = f"{leaf.dtype} {leaf.shape} {leaf.sharding}"
                raise ArgumentError(f"arrays: got {got}, allowed: as at first, {dtype} {shape} {sharding}")

    def start_save(self, leaves: Sequence[Any], src: Int32Array, dst: Int32Array) -> tuple[Any, Callable[[], None]]:
        """Return an array on the devices for each pack, and the function that writes the rows."""
        saved = [pack.save(leaves, src) for pack in self.packs]
        return [pages for pages, _ in saved], partial(self._write_rows, [array for _, array in saved], dst, self.readers)

    def _write_rows(self, arrays: Sequence[Any], dst: Int32Array, readers: Sequence[Copy]) -> None:
        """Wait until the pages have arrived in `arrays` on the host, and until no program in `readers` reads rows any more.
        Then copy the pages into rows.
        """
        for reader in readers:
            reader.wait()
        with import_jax().transfer_guard_device_to_host("allow"):
            for pack, pages in zip(self.packs, arrays, strict=True):
                pack.write_rows(pages, self.rows, dst, self.num_threads)

    def load_gathered(self, leaves: list[Any], pages: Any, pairs: Int32Array) -> Copies:
        """Scatter pages from the arrays of a save. A host page may be loaded into several device pages, one in each call."""
        copies: Copies = []
        left = np.arange(pairs.shape[1])
        while left.size:
            places, first = np.unique(self.places[pairs[0, left]], return_index=True)
            chosen = left[first]
            moves = np.full((2, pages[0].shape[1]), NOWHERE, dtype=np.int32)
            moves[:, places] = self.origins[pairs[0, chosen]], pairs[1, chosen]
            copies.append((chosen, self._load(leaves, partial(list, pages), moves)))
            left = np.delete(left, first)
        return copies

    def load_rows(self, leaves: list[Any], pairs: Int32Array) -> Copy:
        """Let programs read the rows in place if they can, or stage them."""
        can_read_rows = bool(self.aliases) and not any(alias.is_deleted() for alias in self.aliases)
        return self._load_in_place(leaves, pairs) if can_read_rows else self._load_staged(leaves, pairs)

    def _load_in_place(self, leaves: list[Any], pairs: Int32Array) -> Copy:
        copy = self._load(leaves, partial(list, self.aliases), pad(pairs, NOWHERE), True)
        self.readers = [*(reader for reader in self.readers if not reader.is_ready()), copy]  # new: saves keep the old list
        return copy

    def _load_staged(self, leaves: list[Any], pairs: Int32Array) -> Copy:
        memory = self.staging.take()
        stage = partial(self._stage, pairs[0], memory)
        copy = self._load(leaves, stage, pad(np.stack([self.origins[pairs[0]], pairs[1]]), NOWHERE))
        self.staging.keep(memory, copy)
        return copy

    def _stage(self, src: Int32Array, memory: Rows) -> list[Any]:
        return [pack.stage(self.rows, src, memory, self.num_threads) for pack in self.packs]

    def _load(
        self, leaves: list[Any], get_pages: Callable[[], Sequence[Any]], moves: Int32Array, are_in_rows: bool = False
    ) -> Copy:
        """Load pages from arrays, one for each pack. `moves` is as in `Pack.load`."""
        try:
            crosses = self.is_divided and find_crossing(leaves, moves, self.page_axis)
            arrays = zip(self.packs, get_pages(), strict=True)
            return Copy([pack.load(leaves, pages, moves, crosses, are_in_rows) for pack, pages in arrays])
        except Exception as error:
            if any(leaf.is_deleted() for leaf in leaves):
                raise
            return Copy(error=error)

    def close(self) -> None:
        """Wait until no program reads rows any more, and delete the jax arrays that alias them."""
        for reader in self.readers:
            reader.wait()
        for alias in self.aliases:
            alias.delete()
        self.aliases = []

    def warmup(self, leaves: list[Any], max_num_pages: int) -> None:
        """Run all programs for up to `max_num_pages` pages: they read null pages and drop their writes."""
        self.allocate_rows()
        programs = list_programs(leaves, self.page_axis, min(max_num_pages, self.max_num_pages))
        for i, pack in enumerate(self.packs):
            pack.commit(leaves)
            for num_pages, crosses in programs:
                nowhere = np.full((2, num_pages), NOWHERE, dtype=np.int32)
                pages, _ = pack.save(leaves, np.zeros(num_pages, np.int32))
                pack.load(leaves, pages, nowhere, crosses)
                if self.aliases:
                    pack.load(leaves, self.aliases[i], nowhere, crosses, True)


class Pack(NamedTuple):
    """Arrays of one dtype on the same mesh, or on one device. Their pages are moved in arrays ``[device, page, item]``, whose
    first axis is divided among the devices. In each device's part of a row, the pack has the bytes from `start` to `stop`.
    """

    places: tuple[int, ...]
    shardings: tuple[jax.sharding.Sharding, ...]
    page_axis: int
    device: jax.sharding.Sharding
    host: jax.sharding.Sharding
    dtype: npt.DTypeLike
    num_items: int
    start: int

    @property
    def stop(self) -> int:
        """End of the pack in each device's part of a row, in bytes."""
        return self.start + self.num_items * np.dtype(self.dtype).itemsize

    def list_devices(self) -> list[jax.Device]:
        """Return the devices in the order of their parts of a row."""
        mesh = getattr(self.device, "mesh", None)
        return list(self.device.device_set if mesh is None else mesh.devices.flat)

    def commit(self, leaves: list[Any]) -> None:
        """Commit arrays on one device to their device, as loads do: uncommitted arrays would need other programs."""
        if len(self.device.device_set) == 1:
            put(leaves, self.places, import_jax().device_put([leaves[place] for place in self.places], list(self.shardings)))

    def save(self, leaves: Sequence[Any], page_ids: Int32Array) -> tuple[Any, Any]:
        """Read pages, and start to copy them to the host. Return the array on the devices and the one on the host."""
        read = get_reader(self.shardings, self.page_axis)
        pages = call_with_payload(read, [leaves[place] for place in self.places], pad(page_ids, 0))
        return pages, import_jax().device_put(pages, self.host)

    def write_rows(self, arrived: Any, rows: Rows, dst: Int32Array, num_threads: int) -> None:
        """Wait for an array on the host, and copy its pages into rows."""
        arrived.block_until_ready()
        for shard in arrived.addressable_shards:
            first = shard.index[0].start or 0
            for i, pages in enumerate(np.asarray(shard.data)):
                copy_rows(as_bytes(pages), np.arange(len(dst)), self._columns(rows, first + i), dst, num_threads)

    def stage(self, rows: Rows, src: Int32Array, memory: Rows, num_threads: int) -> Any:
        """Copy rows into the pack's part of `memory`, and return that part as pages: for one device a NumPy array, which saves
        a call of jax. A mesh would need other programs for a NumPy array, and refuses it where jax has several processes.
        """
        shape = rows.shape[1], 1 << (len(src) - 1).bit_length()
        staged = memory[prod(shape) * self.start : prod(shape) * self.stop]
        for i, pages in enumerate(staged.reshape(*shape, self.stop - self.start)):
            copy_rows(self._columns(rows, i), src, pages, np.arange(len(src)), num_threads)
        pages = staged.view(self.dtype).reshape(*shape, self.num_items)
        return import_jax().device_put(pages, self.device) if hasattr(self.device, "mesh") else pages

    def load(self, leaves: list[Any], pages: Any, moves: Int32Array, crosses: bool, are_in_rows: bool = False) -> Any:
        """Write pages into the arrays; the results replace those in `leaves`. ``moves[0]`` has the device pages that were
        saved, or with `are_in_rows` rows of the array `pages`; ``moves[1]`` has the pages to write. Return the fence.
        """
        first_item = self.start // np.dtype(self.dtype).itemsize if are_in_rows else None
        write = get_writer(self.shardings, self.page_axis, crosses, first_item)
        written, fence = call_with_payload(write, [leaves[place] for place in self.places], pages, moves)
        put(leaves, self.places, written)
        return fence

    def _columns(self, rows: Rows, device: int) -> Rows:
        return rows[:, device, self.start : self.stop]


def make_packs(leaves: Sequence[Any], page_axis: int, memory_kind: str | None) -> list[Pack]:
    """Divide arrays by dtype and mesh. Pages arrive in memory of this kind, or for None on the first CPU device."""
    jax = import_jax()
    places: dict[tuple[Any, Any], list[int]] = {}
    for place, leaf in enumerate(leaves):
        places.setdefault((leaf.dtype, get_page_sharding(leaf.sharding)), []).append(place)
    packs: list[Pack] = []
    for (dtype, device), own in places.items():
        shardings = tuple([leaves[place].sharding for place in own])
        if memory_kind is None:
            host = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
        else:
            host = device.with_memory_kind(memory_kind)
        parts = [leaves[place].sharding.shard_shape(leaves[place].shape) for place in own]
        num_items = sum(prod(part[:page_axis] + part[page_axis + 1 :]) for part in parts)
        start = align(packs[-1].stop) if packs else 0
        packs.append(Pack(tuple(own), shardings, page_axis, device, host, dtype, num_items, start))
    return packs


def get_page_sharding(sharding: jax.sharding.Sharding) -> Any:
    """Return the sharding of arrays of moved pages: each device has its own parts, or dummy pages if it has none."""
    kinds = import_jax().sharding
    if not sharding.is_fully_addressable:
        raise ArgumentError("arrays: got an array that spans processes, allowed: arrays of this process")
    device: Any = next(iter(sharding.device_set))
    if sharding.memory_kind not in (None, default := device.default_memory().kind):
        raise ArgumentError(f"arrays: got one in {sharding.memory_kind}, allowed: the memory of the device, {default}")
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
    mapped = map_parts(read, shardings, is_writer=False)
    return jax.jit(mapped, out_shardings=get_page_sharding(shardings[0]))  # type: ignore[no-any-return]


@lru_cache(maxsize=64)
def get_writer(shardings: Shardings, page_axis: int, crosses: bool, first_item: int | None = None) -> Callable[..., Any]:
    """Return the program that writes pages into a pack's arrays. `crosses`: some page goes to another device's part.
    `first_item`: where the pack begins in a row, if the pages are in rows of one device.
    """
    jax = import_jax()
    axes = [get_page_axes(sharding, page_axis) for sharding in shardings]
    write = partial(write_pages, page_axis=page_axis, axes=axes, crosses=crosses, first_item=first_item)
    mapped = map_parts(write, shardings, is_writer=True)
    own, pages = list(shardings), get_page_sharding(shardings[0])
    shardings_of = {"in_shardings": (own, pages, None), "out_shardings": (own, pages)}  # pages may come from NumPy
    return jax.jit(mapped, donate_argnums=0, **shardings_of)  # type: ignore[no-any-return]


def map_parts(function: Callable[..., Any], shardings: Shardings, is_writer: bool) -> Callable[..., Any]:
    """Let a function run on each device's parts. A reader takes arrays and page ids, a writer arrays, pages and page ids."""
    jax = import_jax()
    first: Any = shardings[0]
    if not isinstance(first, jax.sharding.NamedSharding):
        return function
    arrays = [getattr(sharding, "spec", None) for sharding in shardings]
    pages, ids = get_page_sharding(first).spec, jax.sharding.PartitionSpec()
    in_specs, out_specs = ((arrays, pages, ids), (arrays, pages)) if is_writer else ((arrays, ids), pages)
    shard_map = get_shard_map(is_checked=False)  # jax cannot know that a page's copies on several devices are equal
    return shard_map(function, mesh=first.mesh, in_specs=in_specs, out_specs=out_specs)  # type: ignore[no-any-return]


def read_pages(parts: Sequence[Any], page_ids: Any, page_axis: int, axes: Sequence[Axes]) -> Any:
    """Return the pages of all parts as one array ``[1, page, item]`` (traced)."""
    jax = import_jax()
    pages = [read_in_part(part, page_ids, page_axis, own) for part, own in zip(parts, axes, strict=True)]
    flat = [jax.numpy.moveaxis(page, page_axis, 0).reshape(page_ids.shape[0], -1) for page in pages]
    return jax.numpy.concatenate(flat, axis=1)[None]


def write_pages(
    parts: Sequence[Any],
    pages: Any,
    moves: Any,
    page_axis: int,
    axes: Sequence[Axes],
    crosses: bool,
    first_item: int | None,
) -> tuple[list[Any], Any]:
    """Write the pages returned by `read_pages`, or pages in rows. Return the parts, and a number as the fence (traced)."""
    jnp = import_jax().numpy
    start, written = first_item or 0, []
    for part, own in zip(parts, axes, strict=True):
        shape = (*part.shape[:page_axis], *part.shape[page_axis + 1 :])
        stop = start + prod(shape)
        flat = pages[0, :, start:stop] if first_item is None else read_rows(pages, moves[0], start, stop, part.dtype)
        page = jnp.moveaxis(flat.reshape(moves.shape[1], *shape), 0, page_axis)
        written.append(write_in_part(part, page, moves, page_axis, own, crosses))
        start = stop
    return written, jnp.maximum(jnp.arange(MIN_OPERATIONS, dtype=moves.dtype), moves[0, 0]).max().reshape(1)


def read_rows(rows: Any, row_ids: Any, start: int, stop: int, dtype: Any) -> Any:
    """Return the items from `start` to `stop` of rows; ids beyond the last row read the last row (traced). Each row is sliced
    alone: XLA would copy a slice of all rows to read one.
    """
    jax = import_jax()
    first = np.int32(start)  # with jax_enable_x64 an int becomes int64, but both indices need one type
    items = jax.vmap(lambda row_id: jax.lax.dynamic_slice(rows, (row_id, first), (1, stop - start))[0])(row_ids)
    return cast_bits(items, dtype)
