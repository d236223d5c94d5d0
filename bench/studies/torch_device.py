"""Times of what a torch engine sends to its device in a step: commits, the field `page_ids`, transfers, graphs with page lists.

``python -m bench.studies.torch_device`` measures on a GPU, or with ``--device cpu`` on the CPU, where copies stay in memory.
Times are medians of whole calls, from an idle device to an idle device.

- *tables*: `commit` and `gather` of a table of which one row in 16 gets a page in each step, beside one copy of the field
  `page_ids` of `StepInputs` from pinned memory, which has all pages of all rows. The last line says from which size on the
  table is faster.
- *transfers*: saves and loads by `HostPages`, beside one copy of as many bytes between pinned memory and the device.
- *graphs*: a kernel that reads page lists at fixed addresses, replayed after each fill of `StepInputs`, beside the same kernel
  without a graph. Its results are compared with NumPy's.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from pagepool import CacheGroupSpec, CacheManager, FullAttentionSpec, RunningBatch, StepInputs
from pagepool.torch import HostPages, MultiGroupPageTable

PAGE_SIZE, NUM_STEPS, PAGE_BYTES = 16, 40, 256 << 10
SIZES = [(rows, columns) for rows in (32, 256, 1024) for columns in (64, 256, 1024, 4096)]
NUM_PAGES_MOVED = [1, 16, 64, 256]


class Clock:
    """Measures calls on a device."""

    def __init__(self, device: str) -> None:
        self.wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None

    def measure(self, calls: dict[str, Callable[[], Any]], prepare: Callable[[], Any] = lambda: None) -> dict[str, float]:
        """Return the median microseconds of calls made by turns, each time after `prepare`."""
        times: dict[str, list[int]] = {name: [] for name in calls}
        for _ in range(NUM_STEPS):
            prepare()
            for name, call in calls.items():
                self.wait()
                start = perf_counter_ns()
                call()
                self.wait()
                times[name].append(perf_counter_ns() - start)
        return {name: float(np.median(values)) / 1000 for name, values in times.items()}


class Rows:
    """Rows that decode, each with a prompt that fills half of its columns, and the inputs of their steps in pinned memory."""

    def __init__(self, num_rows: int, num_columns: int, device: str, **fields: tuple[int, ...]) -> None:
        self.num_rows, self.length = num_rows, num_columns * PAGE_SIZE
        spec = FullAttentionSpec(PAGE_SIZE, 1, 8, "float32", use_mla=False)
        manager = CacheManager(num_rows * num_columns + 1, [CacheGroupSpec(spec)], self.length, enable_caching=False)
        self.tables = MultiGroupPageTable(num_rows, self.length, page_sizes=[PAGE_SIZE], device=device)
        self.tables.warmup()
        self.batch = RunningBatch(manager, self.tables)
        is_pinned = device == "cuda"
        self.pinned = {name: torch.zeros(shape, dtype=torch.int32, pin_memory=is_pinned) for name, shape in fields.items()}
        self.static = {name: torch.zeros_like(values, device=device) for name, values in self.pinned.items()}
        arrays = {name: (values.numpy()[None],) for name, values in self.pinned.items()}  # of one group, in one set
        options: dict[str, Any] = {"num_tokens": num_rows, "num_reqs": num_rows, "depth": 1}
        self.inputs = StepInputs(self.batch, fields=[*fields], arrays=arrays, **options)
        for row in range(num_rows):  # so that one row in 16 takes a page in each step
            self.batch.admit(row, [1] * (self.length // 2 - row % PAGE_SIZE))

    def step(self) -> None:
        """Plan a decode step, and fill its inputs."""
        step = self.batch.step(np.arange(self.num_rows), np.ones(self.num_rows, np.int32))
        self.batch.inputs(step, out=self.inputs)

    def send(self) -> None:
        """Copy the inputs to the device."""
        for name, values in self.pinned.items():
            self.static[name].copy_(values, non_blocking=True)


def measure_tables(device: str, sizes: list[tuple[int, int]]) -> Iterator[str]:
    """Yield a line for each size of a table."""
    clock, faster = Clock(device), []
    for num_rows, num_columns in sizes:
        rows = Rows(num_rows, num_columns, device, page_ids=(num_rows, num_columns))
        out = [torch.zeros(num_rows, num_columns, dtype=torch.int32, device=device)]
        order = np.arange(num_rows)
        rows.tables.commit(num_rows)

        def commit(rows: Rows = rows, out: list[torch.Tensor] = out, order: Any = order) -> None:
            rows.tables.commit(rows.num_rows)
            rows.tables.gather(order, out=out)

        times = clock.measure({"commit": commit, "field": rows.send}, rows.step)
        ratio = times["field"] / times["commit"]
        if ratio > 1:
            faster.append(num_rows * num_columns)
        text = f"commit and gather {times['commit']:9.1f} us, the field page_ids {times['field']:9.1f} us"
        yield f"{num_rows:5} rows x {num_columns:4} columns: {text} ({ratio:.2f}x)"
    yield f"the table is faster from {min(faster):,} page ids on" if faster else "the field is faster at all sizes"


def copies_of(num_pages: int) -> SimpleNamespace:
    """Return the saves or loads of the first pages, each to or from the row of its number."""
    ids = np.arange(1, num_pages + 1, dtype=np.int32)
    return SimpleNamespace(src=ids, dst=ids, group=np.zeros(num_pages, np.int32))


def measure_transfers(device: str, nums_pages: list[int]) -> Iterator[str]:
    """Yield a line for each number of pages."""
    clock, most = Clock(device), max(nums_pages)
    pages = torch.zeros(2 * most + 1, PAGE_BYTES // 4, dtype=torch.int32, device=device)
    pinned = torch.zeros(most, PAGE_BYTES // 4, dtype=torch.int32, pin_memory=device == "cuda")
    host = HostPages([pages], most + 1)
    host.warmup([pages])
    empty = copies_of(0)

    def move(saves: Any, loads: Any) -> None:
        host.run([pages], SimpleNamespace(number=1, saves=saves, loads=loads, copies=empty))
        host.wait()

    for num_pages in nums_pages:
        copies = copies_of(num_pages)
        calls: dict[str, Callable[[], Any]] = {
            "saves": partial(move, copies, empty),
            "loads": partial(move, empty, copies),
            "one copy": partial(pinned[:num_pages].copy_, pages[:num_pages], non_blocking=True),
        }
        times = clock.measure(calls)
        rates = ", ".join(f"{name} {num_pages * PAGE_BYTES / time / 1000:6.2f} GB/s" for name, time in times.items())
        yield f"{num_pages:4} pages of {PAGE_BYTES >> 10} KiB: {rates}"


def measure_graphs(device: str, num_rows: int, num_columns: int) -> Iterator[str]:
    """Yield a line for a kernel that reads page lists."""
    num_pages = num_rows * num_columns
    rows = Rows(num_rows, num_columns, device, page_starts=(num_rows + 1,), page_indices=(num_pages,))
    starts, indices = rows.static["page_starts"], rows.static["page_indices"]
    places, sums = torch.arange(num_pages, device=device), torch.zeros(num_rows, dtype=torch.int64, device=device)
    zeros = torch.zeros_like(indices)

    def compute() -> None:
        """Sum the page ids of each row."""
        owners = torch.searchsorted(starts[1:], places, right=True, out_int32=False).clamp(max=num_rows - 1)
        sums.zero_().index_add_(0, owners, torch.where(places < starts[-1], indices, zeros).long())

    calls: dict[str, Callable[[], Any]] = {"eager": compute}
    compute()
    if device == "cuda":
        with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
            compute()
        calls["graph"] = graph.replay
    names = ("page_starts", "page_indices")

    def prepare() -> None:
        rows.step()
        rows.send()

    def check() -> None:
        found = [rows.pinned[name].numpy() for name in names]
        expected = [int(ids.sum()) for ids in np.split(found[1][: found[0][-1]], found[0][1:-1])]
        if sums.tolist() != expected:
            raise AssertionError("the kernel read other lists than those of the step")

    times = Clock(device).measure(calls | {"check": check}, prepare)
    del times["check"]
    text = ", ".join(f"{name} {time:.1f} us" for name, time in times.items())
    yield f"lists of {num_rows} rows x {num_columns // 2} pages, {NUM_STEPS} steps: {text}; all as NumPy has them"


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--quick", action="store_true", help="one small size of each")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    sizes, nums_pages, lists = (SIZES[:1], [2], (8, 8)) if options.quick else (SIZES, NUM_PAGES_MOVED, (256, 512))
    for lines in (
        measure_tables(options.device, sizes),
        measure_transfers(options.device, nums_pages),
        measure_graphs(options.device, *lists),
    ):
        for line in lines:
            print(line, flush=True)


if __name__ == "__main__":
    main()
