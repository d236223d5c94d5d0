"""Transfers between an engine's pages and rows of host memory: their checks, the thread that writes rows, and their ends.

`pagepool.host_pages` moves the bytes of jax arrays, and `pagepool.torch` those of tensors. Everything else is here: which
transfers belong to which group, which of them are in flight, and from where a page is loaded. A page is loaded from its row
once the row is written, and until then from the pages gathered by its save on the device. So no load waits for a save.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pagepool.arguments import MAX_SIZE, require_int
from pagepool.errors import ArgumentError, ArgumentTypeError, IntegrityError, PageIdError
from pagepool.host_rows import make_memory, place_rows, touch
from pagepool.page_copies import Columns, check_moves, find_places, read_copies

MAX_PAGES_PER_CALL, MAX_BYTES_PER_CALL = 64, 16 << 20
"""Most pages, and most bytes on each device, that one call of a program moves; a single page may have more bytes."""

Int32Array = npt.NDArray[np.int32]
Places = npt.NDArray[np.intp]


class LoadsAndSaves(Protocol):
    """The attributes of `pagepool.Moves` read by `HostPages.run`."""

    @property
    def number(self) -> int:
        """The number of these transfers; any int without loads and saves."""

    @property
    def loads(self) -> Columns:
        """Loads, from pages of the host to pages of the device."""

    @property
    def saves(self) -> Columns:
        """Saves, from pages of the device to pages of the host."""


class FinishedTransfers(NamedTuple):
    """The finished transfers of a number, for `CacheManager.fail`: indices of failed saves and loads, and the first error."""

    number: int
    failed_saves: list[int]
    failed_loads: list[int]
    error: Exception | None


class GroupArguments(NamedTuple):
    """The arguments of `HostPages` for one group."""

    arrays: Any
    group: int | None
    num_host_pages: int
    page_axis: int
    memory: Any


def read_groups(
    arrays: Any,
    num_pages: int | Sequence[int],
    groups: Sequence[int] | None,
    page_axis: int | Sequence[int],
    memory: Any,
) -> list[GroupArguments]:
    """Return the arguments of `HostPages` for each group. Raise ArgumentTypeError or ArgumentError if they do not match."""
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
    buffers = [memory] if groups is None else [None] * len(trees) if memory is None else memory
    if not isinstance(buffers, list | tuple) or len(buffers) != len(trees):
        raise ArgumentTypeError(f"memory: got {type(memory).__name__}, allowed: a buffer for each of {len(trees)} groups")
    return [GroupArguments(*each) for each in zip(trees, chosen, nums, axes, buffers, strict=True)]


def divide(items: list[Any], sizes: Sequence[int]) -> list[list[Any]]:
    """Divide a list into parts of these sizes.

    >>> divide([7, 8, 9], [2, 0, 1])
    [[7, 8], [], [9]]
    """
    stops = [*accumulate(sizes)]
    return [items[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]


class Copy:
    """A call of a program with its transfer, under way or ended, or the error that prevented it. `fences`, such as arrays of
    jax or `Written`, are ready when the transfer has ended. The engine's arrays do not show this: jax's next step donates them.
    """

    def __init__(self, fences: Sequence[Any] = (), error: Exception | None = None) -> None:
        """Without fences the copy has ended."""
        self.fences, self.error = fences, error

    def is_ready(self) -> bool:
        """Whether `wait` would return immediately."""
        return all(fence.is_ready() for fence in self.fences)

    def wait(self) -> Exception | None:
        """Wait for the end, and return its error."""
        try:
            for fence in self.fences:
                fence.block_until_ready()
        except Exception as error:
            self.error = error
        return self.error


class Saving:
    """The last save of some pages. `pages` has what the save gathered on the device, until the rows are written. Then the
    copying thread may set `error`, and sets `pages` to None last: a reader of None finds the page in its row, or the error.
    """

    __slots__ = ("error", "pages")

    def __init__(self, pages: Any = None, error: Exception | None = None) -> None:
        """Without pages the save has ended."""
        self.pages, self.error = pages, error

    def write(self, write_rows: Callable[[], None]) -> None:
        """Call `write_rows`, and keep its error."""
        try:
            write_rows()
        except Exception as error:
            self.error = error.with_traceback(None)  # frames of the traceback would keep the pages
        finally:
            self.pages = None


class Written(NamedTuple):
    """The end of a call of `Saving.write`, with the methods of jax arrays that `Copy` uses."""

    saving: Saving
    end: Future[None]

    def is_ready(self) -> bool:
        """Whether the call has ended."""
        return self.end.done()

    def block_until_ready(self) -> None:
        """Wait for the end of the call, and raise its error."""
        self.end.result()
        if self.saving.error:
            raise self.saving.error


WRITTEN = Saving()
"""The save of a page whose row others wrote."""

Copies = list[tuple[Places, Copy]]
"""Copies with the indices of their transfers."""


class GroupTransfers(ABC):
    """The rows of a cache group, uint8 ``[host page, device, byte]``, and their transfers; group None stands for all groups.
    For each host page `savings` has its last save or None, `places` its index in the pages of the save, and `origins` the
    device page that was saved. A subclass moves the bytes.
    """

    def __init__(
        self,
        arguments: GroupArguments,
        num_pages: int,
        row_shape: tuple[int, int],
        num_threads: int,
        is_divided: bool = False,
    ) -> None:
        """`num_pages` is the number of pages on the device, `row_shape` the devices and bytes of a row. With `is_divided` a row
        does not show which device's part is valid.
        """
        self.group, self.num_host_pages, self.num_pages = arguments.group, arguments.num_host_pages, num_pages
        self.page_axis, self.num_threads, self.is_divided = arguments.page_axis, num_threads, is_divided
        shape = self.num_host_pages, *row_shape
        self.is_own_memory = arguments.memory is None
        self.rows = place_rows(make_memory(prod(shape)) if self.is_own_memory else arguments.memory, shape)
        self.max_num_pages = min(MAX_PAGES_PER_CALL, 1 << max(MAX_BYTES_PER_CALL // max(shape[2], 1), 1).bit_length() - 1)
        self.savings: list[Saving | None] = [None] * self.num_host_pages
        self.places, self.origins = np.zeros((2, self.num_host_pages), np.int32)

    @abstractmethod
    def describe_arrays(self, leaves: Sequence[Any]) -> list[str]:
        """Return texts that describe the pages of the arrays, in the order of a row."""

    @abstractmethod
    def check(self, leaves: Sequence[Any]) -> None:
        """Check that the arrays are like the first ones, and can be used."""

    @abstractmethod
    def start_save(self, leaves: Sequence[Any], src: Int32Array, dst: Int32Array) -> tuple[Any, Callable[[], None]]:
        """Gather pages on the device. Return them, and a function that waits for their arrival on the host and writes rows."""

    @abstractmethod
    def load_gathered(self, leaves: list[Any], pages: Any, pairs: Int32Array) -> Copies:
        """Load pages that a save gathered on the device, which are in `pages` at `places`. The copies have indices in `pairs`.
        What a load replaces in `leaves` is the array for the next step.
        """

    @abstractmethod
    def load_rows(self, leaves: list[Any], pairs: Int32Array) -> Copy:
        """Load pages from rows that are written."""

    def describe(self, leaves: Sequence[Any]) -> str:
        """Return the text of `HostPages.layout` for this group: devices, bytes, and arrays in the order of a row."""
        name = "all groups" if self.group is None else f"group {self.group}"
        return ", ".join([f"{name}: {self.rows.shape[1]} x {self.rows.shape[2]} bytes", *self.describe_arrays(leaves)])

    def save(self, leaves: Sequence[Any], pairs: Int32Array, submit: Callable[..., Future[None]]) -> Copies:
        """Start saves, from device pages to host pages. `submit` calls a function in the copying thread."""
        copies: Copies = []
        for own in self._divide(np.arange(pairs.shape[1])):
            src, dst = pairs[:, own]
            try:
                pages, write_rows = self.start_save(leaves, src, dst)
                saving = Saving(pages)
                copy = Copy([Written(saving, submit(saving.write, write_rows))])
            except Exception as error:
                saving, copy = Saving(error=error), Copy(error=error)
            self.places[dst], self.origins[dst] = np.arange(len(dst)), src
            for page_id in dst.tolist():
                self.savings[page_id] = saving
            copies.append((own, copy))
        return copies

    def load(self, leaves: list[Any], pairs: Int32Array) -> Copies:
        """Start loads, from host pages to device pages."""
        copies: Copies = []
        in_rows: list[int] = []
        under_way: dict[Saving, tuple[Any, list[int]]] = {}
        for i, page_id in enumerate(pairs[0].tolist()):
            saving = self.savings[page_id]
            pages = saving.pages if saving else None  # read once: the copying thread may drop them
            if saving and pages is not None:
                under_way.setdefault(saving, (pages, []))[1].append(i)
            elif saving and saving.error is None:
                in_rows.append(i)
            else:
                error = PageIdError(f"page {page_id} of the host: got one that was not saved, allowed: pages that were saved")
                copies.append((np.array([i]), Copy(error=saving.error if saving else error)))
        for pages, indices in under_way.values():
            own = np.array(indices)
            copies.extend((own[chosen], copy) for chosen, copy in self.load_gathered(leaves, pages, pairs[:, own]))
        for chosen in self._divide(np.array(in_rows, dtype=np.intp)):
            copies.append((chosen, self.load_rows(leaves, pairs[:, chosen])))
        return copies

    def mark_saved(self, page_ids: Sequence[int]) -> None:
        """Let rows that others wrote be loaded. Raise PageIdError for pages beyond the host, and null pages."""
        ids = np.array([require_int("page_ids", page_id, -MAX_SIZE) for page_id in page_ids], dtype=np.int64)
        wrong = ids[(ids < 1) | (ids >= self.num_host_pages)]
        if wrong.size:
            raise PageIdError(f"page_ids: got page {wrong[0]}, allowed: 1 to {self.num_host_pages - 1}")
        for page_id in ids.tolist():
            self.savings[page_id] = WRITTEN

    def allocate_rows(self) -> None:
        """Let the system allocate the rows, unless they are in the caller's memory or in use."""
        if self.is_own_memory and not any(self.savings):
            touch(self.rows)

    def _divide(self, places: Places) -> Iterator[Places]:
        """Divide transfers into pieces, one for each call of a program."""
        for start in range(0, len(places), self.max_num_pages):
            yield places[start : start + self.max_num_pages]


class Transfers(ABC):
    """The transfers of all groups: the base of both classes `HostPages`, which document the attributes."""

    def __init__(
        self,
        num_pages: int | Sequence[int],
        groups: Sequence[int] | None,
        made: Sequence[GroupTransfers],
        grouped: Sequence[Sequence[Any]],
    ) -> None:
        """`num_pages` and `groups` are those of the caller. `made` are the groups, `grouped` the arrays of each."""
        self.num_pages, self.groups = num_pages, groups
        self._groups, self._sizes = made, [len(leaves) for leaves in grouped]
        self.rows = [group.rows.reshape(len(group.rows), -1) for group in made]
        self.layout = "; ".join([group.describe(leaves) for group, leaves in zip(made, grouped, strict=True)])
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="pagepool-host-pages")
        self._process = os.getpid()
        self._pending: dict[int, tuple[Copies, Copies]] = {}

    @abstractmethod
    def _split(self, arrays: Any) -> list[list[Any]]:
        """Return the arrays of each group, checked."""

    def poll(self) -> list[FinishedTransfers]:
        """Return finished transfers, each once, in the order of their start, without blocking. A save is finished when its
        row is written. O(programs in flight).
        """
        self._require_own_process()
        ready = [n for n, both in self._pending.items() if all(copy.is_ready() for copies in both for _, copy in copies)]
        return [self._finish(number) for number in ready]

    def wait(self) -> list[FinishedTransfers]:
        """Wait for all transfers, and return those not reported before."""
        self._require_own_process()
        return [self._finish(number) for number in list(self._pending)]

    def mark_saved(self, page_ids: Sequence[int], *, group: int | None = None) -> None:
        """Mark rows of a group as written by others: from now on they can be loaded like saved pages. O(pages).

        The rows must have the `layout`, and while they were written no transfer of these pages may have been under way. Raise
        PageIdError for pages beyond the host, and null pages; ArgumentError for another group, and for a group whose page axis
        is divided among devices: its rows do not show which device's part is valid.
        """
        self._require_own_process()
        found = [own for own in self._groups if own.group == group]
        if not found or found[0].is_divided:
            raise ArgumentError(f"group: got {group}, allowed: a group of this object, whose page axis is not divided")
        found[0].mark_saved(page_ids)

    def _start(self, arrays: Any, moves: LoadsAndSaves) -> list[list[Any]] | None:
        """Start loads and saves. Return the arrays of each group for the next step, or None if there is nothing to do."""
        self._require_own_process()
        if not hasattr(moves, "saves") or not hasattr(moves, "loads"):
            raise ArgumentTypeError(f"moves: got {type(moves).__name__}, allowed: Moves")
        saves, loads = read_copies(moves.saves, "moves.saves"), read_copies(moves.loads, "moves.loads")
        if saves.shape[1] + loads.shape[1] == 0:
            return None
        number = require_int("number", moves.number, 1)
        if number in self._pending:
            raise ArgumentError(f"number: got {number}, allowed: one that is not in flight")
        grouped = self._split(arrays)
        save_places, load_places = self._check(saves, "saves"), self._check(loads, "loads")
        pending: tuple[Copies, Copies] = [], []
        for group, leaves, places in zip(self._groups, grouped, save_places, strict=True):
            pending[0].extend((places[own], copy) for own, copy in group.save(leaves, saves[:2, places], self._copier.submit))
        for group, leaves, places in zip(self._groups, grouped, load_places, strict=True):
            pending[1].extend((places[own], copy) for own, copy in group.load(leaves, loads[:2, places]))
        self._pending[number] = pending
        return grouped

    @property
    def _is_own_process(self) -> bool:
        return os.getpid() == self._process

    def _require_own_process(self) -> None:
        if not self._is_own_process:
            raise IntegrityError("HostPages: got a call in a forked process, allowed: calls in the process that made it")

    def _check_groups(self, leaves: list[Any]) -> list[list[Any]]:
        """Divide arrays by group, and check them."""
        grouped = divide(leaves, self._sizes)
        for group, own in zip(self._groups, grouped, strict=True):
            group.check(own)
        return grouped

    def _check(self, columns: Int32Array, way: str) -> list[Places]:
        """Check saves or loads. Return the indices of each group's transfers."""
        if columns.shape[1] == 0:
            return [np.zeros(0, np.intp)] * len(self._groups)
        places = [find_places(columns[2], group.group) for group in self._groups]
        wrong = np.delete(columns[2], np.concatenate(places))
        if wrong.size:
            allowed = ", ".join(str(group.group) for group in self._groups)
            raise ArgumentError(f"moves.{way}.group: got {wrong[0]}, allowed: {allowed}")
        for group, own in zip(self._groups, places, strict=True):
            sizes = group.num_pages, group.num_host_pages
            check_moves(f"moves.{way}.", columns[:2, own], *(sizes if way == "saves" else sizes[::-1]))
        return places

    def _finish(self, number: int) -> FinishedTransfers:
        waited = [[(places, copy.wait()) for places, copy in copies] for copies in self._pending.pop(number)]
        failed_saves, failed_loads = (sorted(int(i) for places, error in ended if error for i in places) for ended in waited)
        error = next((error for ended in waited for _, error in ended if error), None)
        return FinishedTransfers(number, failed_saves, failed_loads, error)
