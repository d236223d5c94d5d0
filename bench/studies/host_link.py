"""The link between a device and host memory, and what `HostPages` gets of it: ``make bench-host``, some minutes on a GPU.

Prints tables: what jax does with memory of the host; transfers of 1, 8 and 64 pages each way with 1, 2 and 4 copy threads,
beside a transfer for each page and one of all bytes; the same in smaller pieces; a step behind transfers. Ends with the
figures to reach.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import jax
import numpy as np

from bench.races.bench_host_pages import time_steps
from bench.races.host_rivals import Moving, MovingByPage, Putting, Transferring
from bench.tables import as_table
from pagepool import host_pages
from pagepool._core import copy_rows

MIB = 1 << 20
SIZE = 16 * MIB
PAGES_KIB = (64, 256, 1024)
NUMS_OF_PAGES = (1, 8, 64)
NUMS_OF_THREADS = (1, 2, 4)
PAGES_PER_CALL = (8, 16, 32, 64)
NUM_ROUNDS = 30
SECONDS_PER_CASE = 2.0
TARGETS = ((64, 0.6), (8, 0.4))
"""Numbers of pages of 256 KiB, and the least ratio of the time of one `device_put` to ours."""
MAX_DELAY_MS = 1.5


def time_calls(start: Callable[[], Any], finish: Callable[[Any], Any] = jax.block_until_ready) -> tuple[float, float]:
    """Return the microseconds until a call returns and until it has ended: medians, without the first two."""
    calls, totals = [], []
    end = time.perf_counter() + SECONDS_PER_CASE
    while len(calls) < 5 or (len(calls) < NUM_ROUNDS and time.perf_counter() < end):
        begin = time.perf_counter()
        result = start()
        calls.append(time.perf_counter() - begin)
        finish(result)
        totals.append(time.perf_counter() - begin)
    return median(calls[2:]) * 1e6, median(totals[2:]) * 1e6


def describe_machine() -> str:
    device = jax.devices()[0]
    kinds = ", ".join(sorted(memory.kind for memory in device.addressable_memories()))
    return (
        f"jax {jax.__version__}, {jax.device_count()} x {device.device_kind} ({device.platform}), memory: {kinds}; "
        f"{os.cpu_count()} cores, CPython {platform.python_version()}, NumPy {np.__version__}"
    )


def make_array(sharding: Any) -> Any:
    return jax.block_until_ready(jax.device_put(np.ones((64, SIZE // 64), np.uint8), sharding))


def tabulate_memory(moving: Moving) -> str:
    """Return what jax does with memory of the host, for 16 MiB."""
    device, host = moving.device, moving.host
    on_device, pinned, plain = make_array(device), make_array(host), np.ones((64, SIZE // 64), np.uint8)
    view = np.asarray(pinned)
    pointers = pinned.unsafe_buffer_pointer(), jax.device_put(plain, host).unsafe_buffer_pointer()
    cases: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
        "device to pinned_host": (lambda: jax.device_put(on_device, host), jax.block_until_ready),
        "pinned_host to device": (lambda: jax.device_put(pinned, device), jax.block_until_ready),
        "NumPy, already touched, to device": (lambda: jax.device_put(plain, device), jax.block_until_ready),
        "NumPy, new and touched, to device": (lambda: jax.device_put(plain.copy(), device), jax.block_until_ready),
        "NumPy to pinned_host": (lambda: jax.device_put(plain, host), jax.block_until_ready),
        "NumPy to pinned_host to device": (lambda: jax.device_put(jax.device_put(plain, host), device), jax.block_until_ready),
        "device to NumPy": (lambda: np.asarray(jax.numpy.copy(on_device)), lambda _: None),
        "np.asarray of a new array in pinned_host": (
            lambda: np.asarray(jax.block_until_ready(jax.device_put(on_device, host))),
            lambda _: None,
        ),
    }
    lines = [[name, *(f"{us / (SIZE / MIB):,.1f} us" for us in time_calls(*case))] for name, case in cases.items()]
    ids, target = np.arange(64), np.zeros_like(plain)
    for num_threads in NUMS_OF_THREADS:
        took, _ = time_calls(partial(copy_rows, plain, ids, target, ids, num_threads), lambda _: None)
        took_pinned, _ = time_calls(partial(copy_rows, view, ids, target, ids, num_threads), lambda _: None)
        lines.append(
            [
                f"64 rows by {num_threads} threads: from NumPy, from pinned_host",
                *(f"{us / 16:,.1f} us" for us in (took, took_pinned)),
            ]
        )
    answers = [
        f"np.asarray of pinned_host is {'a view' if view.ctypes.data == pointers[0] else 'a COPY'}.",
        f"device_put of NumPy to pinned_host is {'an alias' if plain.ctypes.data == pointers[1] else 'a copy'}.",
        "NumPy to device is staged a second time where it takes longer than pinned_host to device.",
    ]
    return "\n".join([as_table(["16 MiB, per MiB", "until the call returns", "to completion"], lines), "", *answers])


def name_threads(num: int) -> str:
    return f"rows, {num} copy thread{'s' * (num > 1)}"


def make_contenders(num_pages: int, way: str, page_kib: int) -> dict[str, Callable[[], Moving]]:
    return {
        "by page": partial(MovingByPage, num_pages, way, page_kib),
        "device_put": partial(Putting, num_pages, way, page_kib),
        **{name_threads(num): partial(Transferring, num_pages, way, page_kib, num) for num in NUMS_OF_THREADS},
    }


def time_transfers(num_pages: int, way: str, page_kib: int) -> dict[str, tuple[float, float]]:
    """Return times of a call, and to completion, by contender. Only one exists at a time, since they need memory."""
    times = {}
    for name, make in make_contenders(num_pages, way, page_kib).items():
        moving = make()
        times[name] = time_calls(moving.start, lambda _, moving=moving: moving.finish())
    return times


def as_line(name: str, times: Mapping[str, tuple[float, float]], num_pages: int, page_kib: int) -> list[str]:
    mib = num_pages * page_kib / 1024
    one = times["device_put"][1]
    shown = [f"{call / num_pages:,.1f} / {total / mib:,.1f} ({one / total:.2f})" for call, total in times.values()]
    return [name, *shown]


def tabulate_pieces() -> str:
    """Return times of 64 pages that cross in pieces, whose copies by the host and the device may overlap."""
    lines = []
    for way in ("save", "load"):
        cells = []
        for num in PAGES_PER_CALL:
            with patch.object(host_pages, "MAX_PAGES_PER_CALL", num):
                moving = Transferring(64, way, 256)
            call, total = time_calls(moving.start, lambda _, moving=moving: moving.finish())
            cells.append(f"{call / 64:,.1f} / {total / SIZE * MIB:,.1f}")
        lines.append([f"{way}s of 64 pages of 256 KiB", *cells])
    return as_table(["in pieces of pages", *map(str, PAGES_PER_CALL)], lines)


def judge(times: Mapping[tuple[int, str, int], Mapping[str, tuple[float, float]]], delay_ms: float) -> list[str]:
    """Return whether the figures that should be reached are."""
    lines = []
    for num_pages, least in TARGETS:
        for way in ("save", "load"):
            case = times[num_pages, way, 256]
            ratio = case["device_put"][1] / case[name_threads(2)][1]
            lines.append(
                f"{way}s of {num_pages} pages of 256 KiB: {ratio:.2f} of one device_put; wanted {least}: {ratio >= least}"
            )
    lines.append(f"a step behind 64 saves: {delay_ms:.2f} ms later; wanted {MAX_DELAY_MS}: {delay_ms <= MAX_DELAY_MS}")
    return lines


def main() -> None:
    print(describe_machine(), "\n", flush=True)
    print(tabulate_memory(Moving(1, "save", 64)), "\n", flush=True)
    times = {}
    print("us a page in the calling thread / us a MiB to completion (ratio of one device_put to it)\n")
    names = list(make_contenders(1, "save", 64))
    print("\n".join(as_table(["transfers", *names], [[""]]).splitlines()[:2]))
    for page_kib in PAGES_KIB:
        for num_pages in NUMS_OF_PAGES:
            for way in ("save", "load"):
                case = times[num_pages, way, page_kib] = time_transfers(num_pages, way, page_kib)
                line = as_line(f"{way}s of {num_pages} pages of {page_kib} KiB", case, num_pages, page_kib)
                print(f"| {' | '.join(line)} |", flush=True)
    print("\n" + tabulate_pieces(), flush=True)
    lines, delay = [], 0.0
    for way in ("save", "load"):
        for name, make in make_contenders(64, way, 256).items():
            if name != "device_put":
                alone, behind = time_steps(make())
                lines.append([f"{way}s of 64 pages of 256 KiB, {name}", f"{alone:.2f} ms", f"{behind:.2f} ms"])
                delay = behind - alone if (way, name) == ("save", name_threads(2)) else delay
    print("\n" + as_table(["a step behind", "alone", "behind"], lines) + "\n")
    print("\n".join(judge(times, delay)))


if __name__ == "__main__":
    main()
