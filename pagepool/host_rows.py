"""Rows of host memory for pages, memory for jax, and the text that describes a row."""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from pagepool.device import import_jax
from pagepool.errors import ArgumentError, ArgumentTypeError
from pagepool.page_copies import find_bits

if TYPE_CHECKING:
    import jax

ALIGNMENT = 64
"""Alignment in bytes of each dtype in a row, and of memory for jax. On CPUs jax aliases aligned memory and copies any other."""

SMALL_PAGE, BYTES_TO_TOUCH = 4096, 64 << 20
"""Bytes of the system's smallest page, and of the piece of memory that a thread of `touch` touches at a time."""

MAX_STAGING = 4
"""Most pieces of memory that are kept for later loads."""

Rows = npt.NDArray[np.uint8]


def align(num_bytes: int) -> int:
    """Return the next multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def as_bytes(pages: npt.NDArray[Any]) -> Rows:
    """Return the same memory as bytes."""
    return np.ascontiguousarray(pages).view(np.uint8)


def make_memory(num_bytes: int) -> mmap.mmap:
    """Return new memory. The system allocates it at the first write, in huge pages if it can."""
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the kernel has no huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def place_rows(memory: Any, shape: tuple[int, ...]) -> Rows:
    """Return an array of bytes in a buffer."""
    try:
        view = memoryview(memory).cast("B")
    except TypeError:
        raise ArgumentTypeError(f"memory: got {type(memory).__name__}, allowed: a contiguous buffer") from None
    if view.readonly or len(view) < prod(shape):
        kind = "read-only" if view.readonly else "writable"
        raise ArgumentError(f"memory: got {len(view)} {kind} bytes, allowed: at least {prod(shape)} writable ones")
    return np.frombuffer(view, np.uint8, prod(shape)).reshape(shape)


def alias_rows(rows: Rows, dtypes: Sequence[npt.DTypeLike], sharding: Any) -> list[jax.Array]:
    """Return an array of jax for each dtype, ``[page, item]``, with the same memory as the rows of one CPU device. Return no
    arrays if jax would copy the rows: for other devices, and at addresses that are no multiple of `ALIGNMENT`. Floats appear as
    unsigned ints, since XLA may convert a whole array of floats of few bits.
    """
    jax = import_jax()
    if not isinstance(sharding, jax.sharding.SingleDeviceSharding) or rows.ctypes.data % ALIGNMENT:
        return []
    if next(iter(sharding.device_set)).platform != "cpu":
        return []
    arrays = []
    for dtype in dtypes:
        view = rows.reshape(len(rows), -1).view(find_bits(dtype))
        for part in (view[:1], view):  # jax copies some dtypes: try one row first
            with jax.transfer_guard_host_to_device("allow"):
                array = jax.device_put(part, sharding)
            if array.unsafe_buffer_pointer() != part.ctypes.data:
                return []
        arrays.append(array)
    return arrays


def touch(rows: Rows) -> None:
    """Let the system allocate memory, in parallel on all cores. The contents stay; nobody may write to them meanwhile."""
    parts = np.array_split(rows.reshape(-1)[::SMALL_PAGE], 1 + rows.nbytes // BYTES_TO_TOUCH)
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda part: np.bitwise_or(part, 0, out=part), parts))


class Use(Protocol):
    """A use of memory by jax that may still run."""

    def is_ready(self) -> bool:
        """Whether the use has ended."""

    def wait(self) -> Exception | None:
        """Wait for the end of the use, and return its error."""


class Staging:
    """Pieces of memory handed to jax, which may alias them and read them late. A piece is handed out again only after its use
    has ended; after an error it is left to jax. `num_bytes` is the size of a piece.
    """

    def __init__(self, num_bytes: int) -> None:
        """Allocate nothing yet."""
        self._num_bytes, self._used = num_bytes, deque[tuple[Rows, Use]]()

    def take(self) -> Rows:
        """Return memory that nobody else writes or reads, at a multiple of `ALIGNMENT`."""
        while self._used and self._used[0][1].is_ready():
            memory, use = self._used.popleft()
            if use.wait() is None:
                return memory
        memory = np.empty(self._num_bytes + ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % ALIGNMENT
        return memory[start : start + self._num_bytes]

    def keep(self, memory: Rows, use: Use) -> None:
        """Keep memory for another use after this one. Beyond `MAX_STAGING` pieces forget the oldest, which jax frees."""
        self._used.append((memory, use))
        if len(self._used) > MAX_STAGING:
            self._used.popleft()


def count_equal(texts: Sequence[str]) -> str:
    """Return texts with the number of equal neighbours.

    >>> count_equal(["int8[2]", "int8[2]", "int8[3]"])
    '2 x int8[2], 1 x int8[3]'
    """
    return ", ".join(f"{len(list(equal))} x {text}" for text, equal in groupby(texts))


def show_page(dtype: str, shape: Sequence[int]) -> str:
    """Return the text of an array's page in a layout, such as ``"bfloat16[4,2]"``."""
    return f"{dtype}[{','.join(map(str, shape))}]"


def describe_pages(leaves: Iterable[jax.Array], page_axis: int, devices: Sequence[jax.Device]) -> str:
    """Return dtype and shape of each array's page, counting equal ones, and each device's part if it is not the whole page."""
    return count_equal([describe_page(leaf, page_axis, devices) for leaf in leaves])


def describe_page(leaf: jax.Array, page_axis: int, devices: Sequence[jax.Device]) -> str:
    """Describe a page of one array."""
    indices = leaf.sharding.devices_indices_map(leaf.shape)
    parts = []
    for device in devices:
        part = [s.indices(size)[:2] for s, size in zip(indices[device], leaf.shape, strict=True)]
        first, last = part.pop(page_axis)
        pages = "" if last - first == leaf.shape[page_axis] else f" of pages {first}:{last}"
        parts.append(",".join(f"{start}:{stop}" for start, stop in part) + pages)
    page = leaf.shape[:page_axis] + leaf.shape[page_axis + 1 :]
    whole = ",".join(f"0:{size}" for size in page)
    return show_page(str(leaf.dtype), page) + (f"({' | '.join(parts)})" if {*parts} != {whole} else "")
