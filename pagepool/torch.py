"""Page tables on a torch device, and host memory behind its pages. Needs the extra ``pagepool[torch]``.

The device's tables of all groups are one tensor of windows, int32 ``[num_windows + 1, 64]``, so a commit is one copy of the
changed windows and one `index_copy_`. The last window takes the padding of a payload. Each table is a view at a fixed address,
which CUDA graphs may read. docs/torch.md describes an engine's step.

>>> from pagepool.torch import PageTable
>>> table = PageTable(max_num_reqs=4, max_num_pages_per_req=8, device="cpu")
>>> table.append_row([5, 6], 1)
>>> table.commit(num_reqs=2)[:2, :3].tolist()
[[0, 0, 0], [5, 6, 0]]
>>> table.gather([1], num_reqs=2)[:, :3].tolist()
[[5, 6, 0], [0, 0, 0]]
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pagepool._core import pack_dirty_lines
from pagepool.arguments import as_list, require_int
from pagepool.errors import ArgumentError, ArgumentTypeError, IntegrityError, RowIndexError, shown
from pagepool.host_table import SEGMENT, HostTable, HostTables, count_values, get_max_num_segments, get_payload_sizes
from pagepool.process_forks import ProcessLock

try:
    import torch

    from pagepool.torch_pages import HostPages
except ImportError as error:
    raise ImportError("page tables and host pages on a torch device need torch: pip install 'pagepool[torch]'") from error

__all__ = ["HostPages", "MultiGroupPageTable", "PageTable"]

NUM_BUFFERS = 4
"""Pinned buffers: the number of commits in flight before the next one waits for the oldest."""


class PageTable(HostTable):
    """The page ids of each row, on the host and on a torch device: zeros after each row's last page.

    The host half is that of `pagepool.PageTable`: rows change by native calls, and `mark_dirty` follows a direct write to
    ``page_table_cpu``. The device's tensor stays the same from the constructor on. Copies and kernels go to the current stream.
    A step launched on that stream before a commit reads the table before it changes. On other streams let steps wait for
    `committed`, and commit once the steps there have read the table.
    """

    def __init__(
        self,
        max_num_reqs: int,
        max_num_pages_per_req: int,
        *,
        device: torch.device | str | None = None,
        tensor: torch.Tensor | None = None,
        sink_page_ids: Sequence[int] = (),
    ) -> None:
        """`device` None means torch's default device. `tensor` is the engine's own table, used instead of a new one: int32,
        contiguous, ``[max_num_reqs, columns]`` with columns for `max_num_pages_per_req` pages and the sinks at least; it is
        zeroed. Commits are fastest if the number of columns is a multiple of 64. Pages `sink_page_ids` stand in front of each
        row, as in `pagepool.PageTable`. Raise ArgumentError or ArgumentTypeError for another device or tensor.
        """
        super().__init__(max_num_reqs, max_num_pages_per_req, sink_page_ids)
        attach((self,), device, None if tensor is None else [tensor])

    _buffers: Buffers
    _place: Place

    @property
    def page_table(self) -> torch.Tensor:
        """The table on the device as of the last commit, int32 ``[max_num_reqs, columns]``: always the same tensor. Unless an
        engine gave it, its columns are rounded up to a multiple of 64; columns behind the host's are zeros.
        """
        return self._place.table

    @property
    def committed(self) -> torch.cuda.Event | None:
        """The CUDA event recorded after the last change of the table on the device; None on other devices."""
        return self._buffers.committed

    def commit(self, num_reqs: int) -> torch.Tensor:
        """Send the changes in the first `num_reqs` rows and return `page_table`. Later rows stay dirty.

        At most 1/16 of the table is sent as windows of 64 columns, more as whole rows. Commits from several threads are
        serialised. If one fails, all rows become dirty. Raise ArgumentError for a number of rows outside the table, and while
        the current stream captures a CUDA graph. O(rows + changes).
        """
        self._buffers.commit((self,), num_reqs)
        return self.page_table

    def gather(
        self,
        rows: Sequence[int] | npt.NDArray[Any] | torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        num_reqs: int | None = None,
    ) -> torch.Tensor:
        """Write `rows` of the device's table into the first rows of `out`, in this order, and the null page into further rows
        up to `num_reqs`. Return `out`.

        `out` is contiguous and int32, ``[at least num_reqs, columns]`` with at most the columns of `page_table`, such as the
        static table of a CUDA graph; by default a new tensor. `num_reqs` None means all rows of `out`, or without `out` as many
        as `rows`. Rows on the host are checked: RowIndexError outside the table. A tensor on the device, int32 or int64, is not
        read here. Raise ArgumentError if something does not fit. O(rows x columns of `out`), on the device.
        """
        return gather((self,), rows, None if out is None else [out], num_reqs)[0]

    def warmup(self) -> None:
        """Send payloads of all sizes that change nothing, so that the device's kernels are loaded."""
        self._buffers.warmup((self,))

    def clear(self) -> None:
        """Empty all rows, on the host and on the device."""
        self._buffers.clear(self)

    def check(self) -> None:
        """Check the host table, and compare the device's with it outside dirty windows.

        Raise IntegrityError naming the first wrong row. O(table), and a copy of the device's table, for which it waits.
        """
        super().check()
        on_device = self._buffers.read(self)
        unsent = self.find_unsent(on_device[:, : self.max_num_pages_per_req])
        behind = np.argwhere(on_device[:, self.max_num_pages_per_req :])
        if unsent is None and len(behind):
            unsent = behind[0][0], self.max_num_pages_per_req + behind[0][1]
        if unsent is not None:
            row, column = unsent
            raise IntegrityError(f"row {row}, column {column}: the device has another page in a clean window")


class MultiGroupPageTable(HostTables):
    """Page tables with the same rows, one for each cache group, in one tensor. One copy and one kernel commit all.

    >>> from pagepool.torch import MultiGroupPageTable
    >>> tables = MultiGroupPageTable(4, max_model_len=64, page_sizes=[16, 32], device="cpu")
    >>> tables.append_row([[1, 2], [4]], 0)
    >>> [table[0, :3].tolist() for table in tables.commit(num_reqs=1)]
    [[1, 2, 0], [4, 0, 0]]
    """

    def __init__(
        self,
        max_num_reqs: int,
        max_model_len: int,
        page_sizes: Sequence[int],
        *,
        device: torch.device | str | None = None,
        tensors: Sequence[torch.Tensor] | None = None,
        sink_page_ids: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """`page_sizes` are in tokens, one for each group: group ``g`` has ``ceil(max_model_len / page_sizes[g])`` columns.
        `tensors` are the engine's own tables, one for each group, as in `PageTable`; each is committed by a kernel of its own.
        """
        super().__init__(max_model_len, page_sizes, partial(make_host_half, max_num_reqs), sink_page_ids)
        attach(self.page_tables, device, tensors)

    if TYPE_CHECKING:

        @property
        def page_tables(self) -> tuple[PageTable, ...]:
            """The table of each group."""

        def __getitem__(self, i: int, /) -> PageTable:
            """Return the table of a group."""

    @property
    def committed(self) -> torch.cuda.Event | None:
        """The CUDA event recorded after the last change of any group on the device; None on other devices."""
        return self.page_tables[0].committed if self.page_tables else None

    def commit(self, num_reqs: int) -> tuple[torch.Tensor, ...]:
        """Send the changes in the first `num_reqs` rows of all groups together, and return their tensors, always the same. See
        `PageTable.commit`.
        """
        for tables in list_parts(self.page_tables):
            tables[0]._buffers.commit(tables, num_reqs)
        return tuple([table.page_table for table in self.page_tables])

    def gather(
        self,
        rows: Sequence[int] | npt.NDArray[Any] | torch.Tensor,
        *,
        out: Sequence[torch.Tensor] | None = None,
        num_reqs: int | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Write `rows` of each group's table into its tensor of `out`. See `PageTable.gather`."""
        return gather(self.page_tables, rows, out, num_reqs) if self.page_tables else ()

    def warmup(self) -> None:
        """Send payloads of all sizes that change nothing. See `PageTable.warmup`."""
        for tables in list_parts(self.page_tables):
            tables[0]._buffers.warmup(tables)


class Place(NamedTuple):
    """Where the table of a group is on the device."""

    group: int
    table: torch.Tensor
    """int32 ``[max_num_reqs, columns]``"""
    lines: torch.Tensor
    """The tensor that contains the table, int32 ``[num_lines, width]``; the width divides 64 and the columns."""
    first: int
    """Number of the table's first line."""
    padding: int | None
    """Number of a line outside all tables; None if there is none."""


class Payload(NamedTuple):
    """Memory for lines and their numbers: on the host, and where the kernel reads them; both may be the same memory."""

    host: torch.Tensor
    device: torch.Tensor
    host_numbers: npt.NDArray[np.int64]
    host_lines: npt.NDArray[np.int32]
    numbers: torch.Tensor
    lines: torch.Tensor


class Buffer:
    """Memory for a payload of any size: pinned, with an event of its last use, if the device is CUDA."""

    def __init__(self, num_values: int, device_memory: torch.Tensor | None) -> None:
        """`device_memory` receives the copies; without it the kernel reads the host's memory."""
        self.event = torch.cuda.Event() if device_memory is not None and device_memory.is_cuda else None
        self._host = torch.zeros(num_values, dtype=torch.int32, device="cpu", pin_memory=self.event is not None)
        self._device = self._host if device_memory is None else device_memory
        self._payloads: dict[tuple[int, int], Payload] = {}

    def get_payload(self, num_lines: int, width: int) -> Payload:
        """Return the memory as a payload of this size."""
        payload = self._payloads.get((num_lines, width))
        if payload is None:
            host, device = (memory[: num_lines * (width + 2)] for memory in (self._host, self._device))
            numbers, lines = zip(*(split_payload(memory, num_lines, width) for memory in (host, device)), strict=True)
            payload = Payload(host, device, numbers[0].numpy(), lines[0].numpy(), numbers[1], lines[1])
            self._payloads[num_lines, width] = payload
        return payload


class Buffers:
    """The buffers of the tables on one device, and the order of the changes there."""

    lock = ProcessLock("PageTable")

    def __init__(self, tables: tuple[PageTable, ...]) -> None:
        """Make buffers for the largest payload of `tables`, whose places are known and are zeros."""
        device = tables[0].page_table.device
        widths = {table._place.lines.shape[1] for table in tables}
        num_segments = get_payload_sizes(count_values(tables))[-1]
        num_values = num_segments * max(SEGMENT // width * (width + 2) for width in widths)
        memory = None if device.type == "cpu" else torch.zeros(num_values, dtype=torch.int32, device=device)
        self.lock = threading.RLock()
        self._is_cuda = device.type == "cuda"
        self._device = device
        self._buffers = [Buffer(num_values, memory) for _ in range(NUM_BUFFERS if self._is_cuda else 1)]
        self._starts = np.array([(table._place.first, table.page_table.shape[1]) for table in tables])
        self._turn = 0
        self.committed: torch.cuda.Event | None = None
        self._finish(self._join())

    def commit(self, tables: tuple[PageTable, ...], num_reqs: int) -> None:
        """Send the changes of tables within one tensor."""
        with self.lock:
            num_dirty = sum([table.count_dirty_segments(0, num_reqs) for table in tables])
            if num_dirty:
                stream = self._begin("commit")
                try:
                    if num_dirty > get_max_num_segments(count_values(tables)):
                        for table in tables:
                            self._send_rows(table, num_reqs)
                    else:
                        sizes = get_payload_sizes(count_values(tables))
                        self._send_lines(tables, num_reqs, next(size for size in sizes if size >= num_dirty))
                    self._finish(stream)
                except BaseException:
                    for table in tables:
                        table.mark_dirty()
                    raise

    def warmup(self, tables: tuple[PageTable, ...]) -> None:
        """Send payloads without changes."""
        with self.lock:
            for size in get_payload_sizes(count_values(tables)):
                stream = self._begin("warmup")
                self._send_lines(tables, 0, size)
                self._finish(stream)

    def clear(self, table: PageTable) -> None:
        """Empty a table on host and device."""
        with self.lock:
            stream = self._begin("clear")
            try:
                table.clear_rows()
                table.page_table.zero_()
                self._finish(stream)
            except BaseException:
                table.mark_dirty()
                raise

    def read(self, table: PageTable) -> npt.NDArray[np.int32]:
        """Return a table of the device as of the last commit."""
        with self.lock:
            self._join()
            return np.array(table.page_table.cpu().numpy())

    def make_index(self, rows: Sequence[int] | npt.NDArray[Any] | torch.Tensor, num_rows: int) -> torch.Tensor:
        """Return checked rows on the device, and let the current stream wait for the last commit."""
        is_capturing = self._is_cuda and torch.cuda.is_current_stream_capturing()
        if not is_capturing:
            self._join()
        if isinstance(rows, torch.Tensor) and rows.device.type != "cpu":
            if rows.dtype not in (torch.int32, torch.int64) or rows.dim() != 1 or rows.device != self._device:
                got = f"{rows.dtype} {list(rows.shape)} on {rows.device}"
                raise ArgumentError(f"rows: got {got}, allowed: int32 or int64 with 1 dimension, on {self._device}")
            return rows
        if is_capturing:
            raise ArgumentError("rows: got rows of the host while a graph is captured, allowed: a tensor on the device")
        index = torch.from_numpy(as_rows(rows, num_rows))
        return index.pin_memory().to(self._device, non_blocking=True) if self._is_cuda else index.to(self._device)

    def _begin(self, call: str) -> torch.cuda.Stream | None:
        """Return the current stream, which now waits for the last change. Refuse captures: a graph would repeat one payload."""
        if self._is_cuda and torch.cuda.is_current_stream_capturing():
            raise ArgumentError(f"{call}: got a stream that captures a graph, allowed: before or after the capture")
        return self._join()

    def _join(self) -> torch.cuda.Stream | None:
        """Let the current stream wait for the last change, which may be on another one."""
        if not self._is_cuda:
            return None
        stream = torch.cuda.current_stream(self._device)
        if self.committed is not None:
            stream.wait_event(self.committed)
        return stream

    def _finish(self, stream: torch.cuda.Stream | None) -> None:
        """Record the end of a change, and go on to the next buffer."""
        if stream is not None:
            event = self._buffers[self._turn].event
            event.record(stream)  # type: ignore[union-attr]  # there is one for each buffer
            self.committed = event
            self._turn = (self._turn + 1) % NUM_BUFFERS

    def _send_lines(self, tables: tuple[PageTable, ...], num_reqs: int, num_segments: int) -> None:
        """Send up to this many dirty segments as one payload of this size."""
        place, buffer = tables[0]._place, self._buffers[self._turn]
        width, starts = place.lines.shape[1], self._starts[place.group : place.group + len(tables)]
        if buffer.event is not None:
            buffer.event.synchronize()  # the copy of its last use may still be reading
        payload = buffer.get_payload(num_segments * (SEGMENT // width), width)
        count = pack_dirty_lines(tables, num_reqs, starts, payload.host_numbers, payload.host_lines)
        numbers, lines = payload.numbers, payload.lines
        if place.padding is None:
            numbers, lines = numbers[:count], lines[:count]
        else:
            payload.host_numbers[count:] = place.padding
        if payload.device is not payload.host:
            payload.device.copy_(payload.host, non_blocking=self._is_cuda)
        place.lines.index_copy_(0, numbers, lines)

    def _send_rows(self, table: PageTable, num_reqs: int) -> None:
        """Send the first rows whole. The device may read the pinned copy late; torch keeps it until then."""
        rows = torch.from_numpy(table.copy_aligned(num_reqs))
        on_device = table.page_table[:num_reqs, : table.max_num_pages_per_req]
        on_device.copy_(rows.pin_memory() if self._is_cuda else rows, non_blocking=self._is_cuda)


def split_payload(memory: torch.Tensor, num_lines: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers of lines, int64, and the lines of a payload."""
    return memory[: 2 * num_lines].view(torch.int64), memory[2 * num_lines :].view(num_lines, width)


def make_host_half(num_rows: int, num_columns: int, sink_page_ids: Sequence[int]) -> PageTable:
    """Return a table that is not yet attached to a device."""
    table = PageTable.__new__(PageTable)
    HostTable.__init__(table, num_rows, num_columns, sink_page_ids)
    return table


def list_parts(tables: tuple[PageTable, ...]) -> tuple[tuple[PageTable, ...], ...]:
    """Return the tables that are committed together: all if they are in one tensor, otherwise one by one."""
    if not tables or tables[0]._place.padding is not None:
        return (tables,) if tables else ()
    return tuple([(table,) for table in tables])


def attach(tables: tuple[PageTable, ...], device: torch.device | str | None, tensors: Sequence[torch.Tensor] | None) -> None:
    """Give host tables their places on the device, in a new tensor or in those of an engine, and common buffers."""
    with torch.inference_mode(False):  # a tensor made in inference mode could only be changed there
        checked = as_device(device)
        places = make_places(tables, checked) if tensors is None else find_places(tables, checked, tensors)
        for table, place in zip(tables, places, strict=True):
            table._place = place
        if tables:
            buffers = Buffers(tables)
            for table in tables:
                table._buffers = buffers


def as_device(device: torch.device | str | None) -> torch.device | None:
    """Return a device, with its number, or None. Raise ArgumentError for one that torch does not know."""
    if device is None:
        return None
    try:
        return torch.empty(0, device=device).device
    except Exception as error:  # torch raises RuntimeError, AssertionError, NotImplementedError and others
        raise ArgumentError(f"device: got {shown(device)}, allowed: a device that torch can use, or None") from error


def make_places(tables: tuple[PageTable, ...], device: torch.device | None) -> list[Place]:
    """Return places in a new tensor of zeros."""
    num_rows = [table.max_num_reqs for table in tables]
    widths = [-(-table.max_num_pages_per_req // SEGMENT) for table in tables]
    firsts = np.cumsum([0, *(rows * width for rows, width in zip(num_rows, widths, strict=True))]).tolist()
    lines = torch.zeros((firsts[-1] + 1, SEGMENT), dtype=torch.int32, device=device)
    return [
        Place(group, lines[first : first + rows * width].view(rows, width * SEGMENT), lines, first, firsts[-1])
        for group, (first, rows, width) in enumerate(zip(firsts, num_rows, widths, strict=False))
    ]


def find_places(tables: tuple[PageTable, ...], device: torch.device | None, tensors: Sequence[torch.Tensor]) -> list[Place]:
    """Return the places of tables in tensors of the engine, which become zeros."""
    listed = as_list("tensors", tensors, "a list of tensors")
    if len(listed) != len(tables):
        raise ArgumentError(f"tensors: got {len(listed)}, allowed: one for each group, {len(tables)}")
    for table, tensor in zip(tables, listed, strict=True):
        device = require_table("tensors", tensor, device).device
        num_rows, num_columns = table.max_num_reqs, table.max_num_pages_per_req
        if tensor.shape[0] != num_rows or tensor.shape[1] < num_columns:
            allowed = f"{num_rows} rows and at least {num_columns} columns"
            raise ArgumentError(f"tensors: got {list(tensor.shape)}, allowed: {allowed}")
    if len({tensor.data_ptr() for tensor in listed}) < len(listed):
        raise ArgumentError("tensors: got one twice, allowed: each once")
    return [
        Place(group, tensor.zero_(), tensor.view(-1, gcd(SEGMENT, tensor.shape[1])), 0, None)
        for group, tensor in enumerate(listed)
    ]


def require_table(name: str, tensor: object, device: torch.device | None) -> torch.Tensor:
    """Return `tensor`. Raise ArgumentTypeError or ArgumentError unless it is a contiguous int32 matrix on the device."""
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentTypeError(f"{name}: got {type(tensor).__name__}, allowed: a torch.Tensor")
    if tensor.dtype != torch.int32 or tensor.dim() != 2 or not tensor.is_contiguous():
        got = f"{tensor.dtype} {list(tensor.shape)}{'' if tensor.is_contiguous() else ', not contiguous'}"
        raise ArgumentError(f"{name}: got {got}, allowed: contiguous torch.int32 with 2 dimensions")
    if device is not None and tensor.device != device:
        raise ArgumentError(f"{name}: got one on {tensor.device}, allowed: on {device}")
    return tensor


def as_rows(rows: Any, num_rows: int) -> npt.NDArray[np.int64]:
    """Return rows as an array. Raise ArgumentTypeError unless they are a list of ints, RowIndexError outside the table."""
    try:
        array = np.asarray(rows)
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(f"rows: got {type(rows).__name__}, allowed: a list of ints") from error
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ArgumentTypeError(f"rows: got {array.dtype} with {array.ndim} dimensions, allowed: ints with 1 dimension")
    outside = np.flatnonzero((array < 0) | (array >= num_rows))
    if outside.size:
        raise RowIndexError(f"row: got {array[outside[0]]} (at {outside[0]}), allowed: 0 to {num_rows - 1}")
    return array.astype(np.int64)


def gather(
    tables: tuple[PageTable, ...],
    rows: Sequence[int] | npt.NDArray[Any] | torch.Tensor,
    out: Sequence[torch.Tensor] | None,
    num_reqs: int | None,
) -> tuple[torch.Tensor, ...]:
    """Gather the same rows of all tables. Everything is checked first."""
    index = tables[0]._buffers.make_index(rows, tables[0].max_num_reqs)
    num = index.shape[0]
    checked = None if num_reqs is None else require_int("num_reqs", num_reqs, num)
    if out is None:
        shape = num if checked is None else checked
        made = [table.page_table.new_empty((shape, table.page_table.shape[1])) for table in tables]
    else:
        made = as_list("out", out, "a tensor for each group")
    if len(made) != len(tables):
        raise ArgumentError(f"out: got {len(made)}, allowed: one for each group, {len(tables)}")
    for table, tensor in zip(tables, made, strict=True):
        num_columns, least = table.page_table.shape[1], num if checked is None else checked
        if require_table("out", tensor, table.page_table.device).shape[0] < least or not 0 < tensor.shape[1] <= num_columns:
            allowed = f"at least {least} rows and 1 to {num_columns} columns"
            raise ArgumentError(f"out: got {list(tensor.shape)}, allowed: {allowed}")
    for table, tensor in zip(tables, made, strict=True):
        torch.index_select(table.page_table[:, : tensor.shape[1]], 0, index, out=tensor[:num])
        tensor[num : tensor.shape[0] if checked is None else checked].zero_()
    return tuple(made)
