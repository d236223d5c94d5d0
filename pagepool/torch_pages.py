"""Host memory behind an engine's tensors of pages: the class `HostPages` of `pagepool.torch`.

The host pages of a cache group are rows of one array of bytes, laid out as those of `pagepool.host_pages`. A save gathers up
to 64 pages into a new tensor of bytes on the device, a row for each. They cross in one copy, and a thread copies them into the
rows of the host. A load takes the same way back: rows are copied into new memory, cross in one copy, and are scattered.

On CUDA the current stream gathers and scatters, and a stream for each direction copies to and from pinned memory. Events order
them: a copy to the host begins behind its gather, and a scatter behind the copy from the host. torch reuses memory, on the
device and pinned, only once the streams that were recorded for it have passed. On other devices each call ends with its work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from pagepool._core import copy_rows
from pagepool.arguments import require_int
from pagepool.errors import ArgumentError, ArgumentTypeError
from pagepool.host_rows import Rows, align, count_equal, show_page
from pagepool.page_copies import check_different
from pagepool.transfers import (
    MAX_PAGES_PER_CALL,
    Copies,
    Copy,
    GroupArguments,
    GroupTransfers,
    LoadsAndSaves,
    Transfers,
    divide,
    read_groups,
)

__all__ = ["HostPages"]

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""Types by bytes of an item, as which tensors are moved: devices have kernels for them, and they keep the bits of floats."""

Int32Array = npt.NDArray[np.int32]
Arrays = TypeVar("Arrays")


class HostPages(Transfers):
    """Host memory for `num_pages` pages of an engine's tensors, as many as in the manager's `HostTier`; with several pools a
    number for each group, as many as the tier has behind the group's pool.

    >>> import torch
    >>> from pagepool import CacheGroupSpec, CacheManager, FullAttentionSpec, HostTier
    >>> from pagepool.torch import HostPages
    >>> groups = [CacheGroupSpec(FullAttentionSpec(2, 1, 8, "float32", use_mla=False))]
    >>> manager = CacheManager(4, groups, max_model_len=8, host_tier=HostTier(16))
    >>> arrays = {"keys": torch.zeros(4, 2), "values": torch.zeros(4, 2)}
    >>> host_pages = HostPages(arrays, 16)
    >>> arrays = host_pages.warmup(arrays)
    >>> arrays = host_pages.run(arrays, manager.take_moves())  # before each step, and before the copies
    >>> for finished in host_pages.poll():
    ...     failed = manager.fail(finished.number, saves=finished.failed_saves, loads=finished.failed_loads)

    `run` starts copies on the current stream and returns; `poll` reports finished ones, as `FinishedTransfers` of
    `pagepool.host_pages`. Tensors are updated in place. One thread at a time may call. While another thread captures a CUDA
    graph, no transfer may be under way: `wait` before.

    `rows` has an array of bytes ``[num_pages, bytes of a row]`` for each group, `layout` a text that describes these rows. The
    rows of jax arrays of the same shapes and dtypes have the same meaning, and the same text. ``rows[group][page_id]`` has the
    bytes of a host page from the time `poll` reports its save until the next save to it starts. `mark_saved` marks rows that
    others wrote while no transfer of their pages was under way. In a row the tensors of each dtype begin at a multiple of 64
    bytes.
    """

    def __init__(
        self,
        arrays: Any,
        num_pages: int | Sequence[int],
        *,
        groups: Sequence[int] | None = None,
        page_axis: int | Sequence[int] = 0,
        memory: Any = None,
        num_copy_threads: int = 2,
    ) -> None:
        """`arrays` are tensors on one device, in any lists, tuples and dicts; those of a dict are taken in the order of its
        keys. Their `page_axis` has a place for each page id of the pool. With `groups`, `arrays` is a list or tuple with the
        tensors of each of these groups; then `num_pages` and `page_axis` may be sequences too.

        The rows are in `memory`, a writable buffer; with `groups`, a list or tuple of a buffer for each group. By default they
        are in new memory, which `warmup` allocates, in huge pages where the system has them. Up to `num_copy_threads` threads
        copy rows: for loads the calling thread is one of them, for saves a thread of this object, which ends after its copies
        by `close`, with the object, or when the interpreter exits.

        Raise ArgumentTypeError for other types; ArgumentError for other values, tensors on several devices, tensors that are
        not strided or whose elements share memory, and too small buffers; OSError if there is not enough memory.
        """
        leaves = flatten(arrays)
        self._places = [*leaves]
        read = read_groups(arrays, num_pages, groups, page_axis, memory)
        num_threads = require_int("num_copy_threads", num_copy_threads, 1)
        grouped = divide([*leaves.values()], [len(flatten(each.arrays)) for each in read])
        self._link = make_link([*leaves.values()])
        made = [GroupPages(own, each, self._link, num_threads) for own, each in zip(grouped, read, strict=True)]
        super().__init__(num_pages, groups, made, grouped)

    _groups: Sequence[GroupPages]

    def run(self, arrays: Arrays, moves: LoadsAndSaves) -> Arrays:
        """Start loads and saves, and return `arrays`. All saves are read before any load is written.

        `moves` is the result of `take_moves`, or any object with its attributes. The tensors must have the places, shapes,
        strides, dtypes and device of the constructor's.

        On CUDA the current stream reads saved pages and writes loaded ones, behind the work launched there before and ahead of
        later work. It waits for loads to cross, not for saves. The device keeps a copy of the pages until the transfers are
        done. The call waits for nothing there; for loads it copies rows, with up to `num_copy_threads` threads. On the CPU it
        returns once all is done but the rows of saves. Up to 64 pages, or 16 MiB, cross in one piece, which costs the calling
        thread about 0.1 ms, and 10 us more for each tensor. A page that was never saved, or whose save failed, is not loaded;
        `poll` reports this, and errors of torch in a copy.

        Before anything is done, raise ArgumentTypeError for arguments of other types; PageIdError for pages beyond the tensors
        or the host, and for null pages; ArgumentError for a page written twice, a group without tensors, a number still in
        flight, unequal lengths, tensors unlike the first or without memory, and while the current stream captures a CUDA graph;
        IntegrityError in a forked process.
        """
        with torch.inference_mode():  # tensors made in this mode are only changed in it, and others may require gradients
            self._start(arrays, moves)
        return arrays

    def warmup(self, arrays: Arrays, max_num_pages: int = MAX_PAGES_PER_CALL) -> Arrays:
        """Let the device load its kernels, and allocate pinned memory, for transfers of up to `max_num_pages` pages each way.
        Return the arrays, unchanged. The system also allocates the rows, unless they are in the caller's memory or in use; each
        core takes some 45 ms for a GiB.

        The null pages are read, and written with what they had. Errors are those of `run`.
        """
        self._require_own_process()
        max_num_pages = require_int("max_num_pages", max_num_pages, 1)
        grouped = self._split(arrays)
        with torch.inference_mode():
            for group, leaves in zip(self._groups, grouped, strict=True):
                group.warmup(leaves, max_num_pages)
        return arrays

    def close(self) -> None:
        """Wait until all rows are written, and end the thread. Later saves fail; `poll` and `wait` still report. In a forked
        process do nothing.
        """
        if self._is_own_process:
            self._copier.shutdown()

    def _split(self, arrays: Any) -> list[list[Any]]:
        self._link.check()
        leaves = flatten(arrays)
        if [*leaves] != self._places:
            raise ArgumentError(
                f"arrays: got tensors at {list_places(leaves)}, allowed: as at first, {list_places(self._places)}"
            )
        check_different([*leaves.values()])
        return self._check_groups([*leaves.values()])


def flatten(tree: Any, place: str = "") -> dict[str, Any]:
    """Return the tensors in lists, tuples and dicts by their places, as jax orders them. None is no tensor.

    >>> flatten(({"values": 1, "keys": 2}, None, [3]))
    {"[0]['keys']": 2, "[0]['values']": 1, '[2][0]': 3}
    """
    if tree is None:
        return {}
    if isinstance(tree, dict):
        items = [(key, tree[key]) for key in sort_keys(tree)]
    elif isinstance(tree, list | tuple):
        items = [*enumerate(tree)]
    else:
        return {place: tree}
    return {within: leaf for key, value in items for within, leaf in flatten(value, f"{place}[{key!r}]").items()}


def sort_keys(tree: dict[Any, Any]) -> list[Any]:
    """Return the keys of a dict in order. Raise ArgumentTypeError if they have none."""
    try:
        return sorted(tree)
    except TypeError as error:
        raise ArgumentTypeError("arrays: got a dict whose keys have no order, allowed: keys that can be sorted") from error


def list_places(places: Sequence[str] | dict[str, Any]) -> str:
    """Return the text of the places of tensors, of a few if there are many.

    >>> list_places(["[0]", "[1]"]), list_places([""])
    ('[0], [1]', 'the top')
    """
    listed = [*places]
    return ", ".join([place or "the top" for place in listed[:8]] + ["..."] * (len(listed) > 8)) or "no place"


class Gathered(NamedTuple):
    """Pages on the device, uint8 ``[page, byte of a row]``, and the event behind the work that gathers them."""

    pages: torch.Tensor
    event: torch.cuda.Event | None


class Arrival(NamedTuple):
    """Work on a stream, with the methods of jax arrays that `Copy` uses. It has ended where it has no event."""

    event: torch.cuda.Event | None

    def is_ready(self) -> bool:
        """Whether the work has ended, or failed."""
        try:
            return self.event is None or self.event.query()
        except RuntimeError:  # `block_until_ready` raises it again
            return True

    def block_until_ready(self) -> None:
        """Wait for the work, and raise its error."""
        if self.event is not None:
            self.event.synchronize()


class Link:
    """The way between a device and the host. Each call ends with its work."""

    def __init__(self, device: torch.device) -> None:
        """Remember the device."""
        self.device = device

    def check(self) -> None:
        """Raise ArgumentError if nothing may be moved now."""

    def make_index(self, ids: npt.NDArray[Any]) -> torch.Tensor:
        """Return page ids on the device, int64."""
        return torch.from_numpy(ids.astype(np.int64)).to(self.device)

    def make_memory(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return bytes of the host that cross to the device and back."""
        return torch.empty(shape, dtype=torch.uint8, device="cpu")

    def record(self) -> torch.cuda.Event | None:
        """Return the event behind the work that was launched so far."""
        return None

    def send(self, gathered: Gathered) -> tuple[torch.Tensor, Arrival]:
        """Start to copy pages to the host. Return the memory there, and when they have arrived."""
        return gathered.pages.to("cpu"), Arrival(None)

    def bring(self, pages: torch.Tensor) -> Gathered:
        """Start to copy pages to the device."""
        return Gathered(pages.to(self.device), None)

    def join(self, gathered: Gathered) -> torch.Tensor:
        """Return pages that the work launched from now on may read."""
        return gathered.pages


class CudaLink(Link):
    """The same for CUDA, where calls start work on streams: one stream copies to the host, another from there."""

    def __init__(self, device: torch.device) -> None:
        """Make the streams."""
        super().__init__(device)
        self._to_host, self._from_host = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def check(self) -> None:
        """Refuse captures: a graph would repeat the transfers."""
        if torch.cuda.is_current_stream_capturing():
            raise ArgumentError("HostPages: got a stream that captures a graph, allowed: before or after the capture")

    def make_index(self, ids: npt.NDArray[Any]) -> torch.Tensor:
        """Copy from pinned memory, which the current stream does not wait for."""
        return torch.from_numpy(ids.astype(np.int64)).pin_memory().to(self.device, non_blocking=True)

    def make_memory(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return pinned memory. torch hands it out again once the copies that use it have ended."""
        return torch.empty(shape, dtype=torch.uint8, device="cpu", pin_memory=True)

    def record(self) -> torch.cuda.Event:
        """Record an event on the current stream. Threads that wait for it sleep."""
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def send(self, gathered: Gathered) -> tuple[torch.Tensor, Arrival]:
        """Copy behind the gather."""
        with torch.cuda.stream(self._to_host):
            sent = self.join(gathered)
            pages = self.make_memory(tuple(sent.shape))
            pages.copy_(sent, non_blocking=True)
            return pages, Arrival(self.record())

    def bring(self, pages: torch.Tensor) -> Gathered:
        """Copy while the current stream computes."""
        with torch.cuda.stream(self._from_host):
            return Gathered(pages.to(self.device, non_blocking=True), self.record())

    def join(self, gathered: Gathered) -> torch.Tensor:
        """Let the current stream wait for pages, and keep their memory until it has read them."""
        stream = torch.cuda.current_stream(self.device)
        if gathered.event is not None:
            stream.wait_event(gathered.event)
        gathered.pages.record_stream(stream)
        return gathered.pages


def make_link(leaves: Sequence[Any]) -> Link:
    """Return the link to the device of tensors. Raise ArgumentTypeError for others, ArgumentError for several devices."""
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            raise ArgumentTypeError(f"arrays: got {type(leaf).__name__}, allowed: torch tensors")
        if leaf.device != leaves[0].device:
            raise ArgumentError(f"arrays: got tensors on {leaves[0].device} and {leaf.device}, allowed: one device for all")
    device = leaves[0].device if leaves else torch.device("cpu")
    return CudaLink(device) if device.type == "cuda" else Link(device)


class GroupPages(GroupTransfers):
    """The host pages of a cache group's tensors. What a save gathers is one tensor of bytes, with a row for each page."""

    def __init__(self, leaves: Sequence[torch.Tensor], arguments: GroupArguments, link: Link, num_threads: int) -> None:
        """Divide a row among the tensors."""
        page_axis = arguments.page_axis
        num_pages = check_tensors(leaves, page_axis) if leaves or arguments.group is None else 0
        self.link, self.layout = link, [describe_tensor(leaf) for leaf in leaves]
        self.packs = make_packs(leaves, page_axis)
        num_bytes = align(self.packs[-1].stop) if self.packs else 0
        super().__init__(arguments, num_pages, (1, num_bytes), num_threads)

    def describe_arrays(self, leaves: Sequence[torch.Tensor]) -> list[str]:
        """Return the text of each pack, which is jax's."""
        return [count_equal([show_tensor(leaves[place], self.page_axis) for place in pack.places]) for pack in self.packs]

    def check(self, leaves: Sequence[torch.Tensor]) -> None:
        """Check that the tensors are like the first ones, and have memory."""
        for leaf, layout in zip(leaves, self.layout, strict=True):
            if not isinstance(leaf, torch.Tensor):
                raise ArgumentTypeError(f"arrays: got {type(leaf).__name__}, allowed: torch tensors")
            if describe_tensor(leaf) != layout:
                got, allowed = (" ".join(map(str, each)) for each in (describe_tensor(leaf), layout))
                raise ArgumentError(f"arrays: got {got}, allowed: as at first, {allowed}")
            if leaf.numel() and not leaf.untyped_storage().nbytes():
                raise ArgumentError(
                    f"arrays: got a tensor of shape {list(leaf.shape)} without memory, allowed: tensors with memory"
                )

    def start_save(
        self, leaves: Sequence[torch.Tensor], src: Int32Array, dst: Int32Array
    ) -> tuple[Gathered, Callable[[], None]]:
        """Gather pages, and start to send them."""
        gathered = self._gather(leaves, src)
        pages, arrival = self.link.send(gathered)
        return gathered, partial(self._write_rows, pages.numpy(), arrival, dst)

    def load_gathered(self, leaves: list[Any], pages: Gathered, pairs: Int32Array) -> Copies:
        """Scatter pages that a save gathered, all in one call."""

        def choose() -> torch.Tensor:
            return self.link.join(pages).index_select(0, self.link.make_index(self.places[pairs[0]]))

        return [(np.arange(pairs.shape[1]), self._load(leaves, choose, pairs[1]))]

    def load_rows(self, leaves: list[Any], pairs: Int32Array) -> Copy:
        """Copy rows into memory that crosses, and scatter them on the device."""

        def bring() -> torch.Tensor:
            pages = self.link.make_memory((pairs.shape[1], self.rows.shape[2]))
            copy_rows(self.rows[:, 0], pairs[0], pages.numpy(), np.arange(pairs.shape[1]), self.num_threads)
            return self.link.join(self.link.bring(pages))

        return self._load(leaves, bring, pairs[1])

    def warmup(self, leaves: list[Any], max_num_pages: int) -> None:
        """Move null pages to the host and back, in numbers up to `max_num_pages`."""
        self.allocate_rows()
        for exponent in range((min(max_num_pages, self.max_num_pages) - 1).bit_length() + 1):
            null_pages = np.zeros(1 << exponent, np.int32)
            gathered = self._gather(leaves, null_pages)
            pages, arrival = self.link.send(gathered)
            arrival.block_until_ready()
            self._scatter(leaves, self.link.join(self.link.bring(pages)), null_pages)

    def _load(self, leaves: Sequence[torch.Tensor], get_pages: Callable[[], torch.Tensor], dst: Int32Array) -> Copy:
        try:
            self._scatter(leaves, get_pages(), dst)
            return Copy([Arrival(self.link.record())])
        except Exception as error:
            return Copy(error=error)

    def _gather(self, leaves: Sequence[torch.Tensor], page_ids: Int32Array) -> Gathered:
        index = self.link.make_index(page_ids)
        rows = torch.empty((len(page_ids), self.rows.shape[2]), dtype=torch.uint8, device=self.link.device)
        for pack in self.packs:
            for pages, part in pack.pair(leaves, rows):
                torch.index_select(pages, 0, index, out=part)
        return Gathered(rows, self.link.record())

    def _scatter(self, leaves: Sequence[torch.Tensor], rows: torch.Tensor, page_ids: Int32Array) -> None:
        index = self.link.make_index(page_ids)
        for pack in self.packs:
            for pages, part in pack.pair(leaves, rows):
                pages.index_copy_(0, index, part)

    def _write_rows(self, pages: Rows, arrival: Arrival, dst: Int32Array) -> None:
        """Wait until pages have arrived on the host, and copy them into rows. What lies between packs is left as it is."""
        arrival.block_until_ready()
        for pack in self.packs:
            columns = slice(pack.start, pack.stop)
            copy_rows(pages[:, columns], np.arange(len(dst)), self.rows[:, 0, columns], dst, self.num_threads)


class Pack(NamedTuple):
    """The tensors of one dtype. In a row their pages are together, in the bytes from `start` to `stop`."""

    places: tuple[int, ...]
    page_axis: int
    num_items: tuple[int, ...]
    """Items in a page of each tensor."""
    num_item_bytes: int
    start: int

    @property
    def stop(self) -> int:
        """End of the pack in a row."""
        return self.start + sum(self.num_items) * self.num_item_bytes

    def pair(self, leaves: Sequence[torch.Tensor], rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each tensor, its page axis first, with its part of `rows`, which has the shape of as many pages."""
        bits = BITS[self.num_item_bytes]
        parts = rows[:, self.start : self.stop].view(bits).split(self.num_items, dim=1)
        for place, part in zip(self.places, parts, strict=True):
            pages = leaves[place].view(bits).movedim(self.page_axis, 0)
            yield pages, part.view(len(rows), *pages.shape[1:])


def make_packs(leaves: Sequence[torch.Tensor], page_axis: int) -> list[Pack]:
    """Divide tensors by dtype, in the order in which dtypes appear."""
    places: dict[torch.dtype, list[int]] = {}
    for place, leaf in enumerate(leaves):
        places.setdefault(leaf.dtype, []).append(place)
    packs: list[Pack] = []
    for dtype, own in places.items():
        num_items = tuple([prod(get_page_shape(leaves[place], page_axis)) for place in own])
        packs.append(Pack(tuple(own), page_axis, num_items, dtype.itemsize, align(packs[-1].stop) if packs else 0))
    return packs


def get_page_shape(leaf: torch.Tensor, page_axis: int) -> tuple[int, ...]:
    """Return the shape of a tensor's page."""
    shape = tuple(leaf.shape)
    return shape[:page_axis] + shape[page_axis + 1 :]


def show_tensor(leaf: torch.Tensor, page_axis: int) -> str:
    """Return the text of a tensor's page, with the name that NumPy or jax has for its dtype."""
    return show_page(str(leaf.dtype).removeprefix("torch."), get_page_shape(leaf, page_axis))


def describe_tensor(leaf: torch.Tensor) -> tuple[Any, ...]:
    """Return what later tensors share with the first."""
    return leaf.dtype, tuple(leaf.shape), leaf.stride(), leaf.device


def check_tensors(leaves: Sequence[torch.Tensor], page_axis: int) -> int:
    """Check that pages of the tensors can be moved. Return the number of pages present in all of them."""
    require_int("page_axis", page_axis, 0)
    for leaf in leaves:
        if leaf.layout != torch.strided or leaf.is_quantized or leaf.device.type == "meta":
            kind = "quantized" if leaf.is_quantized else leaf.layout if leaf.device.type != "meta" else "without memory"
            raise ArgumentError(f"arrays: got a tensor that is {kind}, allowed: strided tensors with memory")
        if leaf.is_conj() or leaf.is_neg():
            raise ArgumentError("arrays: got a conjugate or negative view, allowed: tensors with values of their own")
        if leaf.dim() <= page_axis:
            raise ArgumentError(f"arrays: got shape {list(leaf.shape)}, allowed: more axes than page_axis, {page_axis}")
        if any(stride == 0 and size > 1 for stride, size in zip(leaf.stride(), leaf.shape, strict=True)):
            raise ArgumentError(
                f"arrays: got an expanded tensor of shape {list(leaf.shape)}, allowed: elements of their own memory"
            )
    check_different(leaves)
    if not leaves:
        raise ArgumentError("arrays: got no tensor, allowed: at least one")
    return int(min([leaf.shape[page_axis] for leaf in leaves]))
