"""Pages that are copied on the device, or transferred to the host and back, at random too, beside the same moves in NumPy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from devices import read
from page_moves import Copies, Moves, make_copies, make_transfers

from pagepool.host_pages import HostPages
from pagepool.page_copies import copy_pages, get_program, warmup

NUM_HOST_PAGES = 100


def draw_copies(rng: np.random.Generator, num_pages: int, num_copies: int) -> Copies:
    """Return copies of any pages, often also destinations or repeated, to different pages."""
    src = rng.integers(1, num_pages, num_copies)
    dst = 1 + rng.permutation(num_pages - 1)[:num_copies]
    return make_copies(np.stack([src, dst], axis=1), rng.integers(0, 3, num_copies))


def draw_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Any:
    """Return random numbers of any sign, among them minus zero."""
    numbers = rng.integers(-9, 9, shape) * np.where(rng.random(shape) < 0.5, 1.0, -1.0)
    return numbers.astype(jnp.dtype(dtype))


def copy_in_numpy(array: Any, copies: Copies, page_axis: int = 0) -> Any:
    copied = array.copy()
    np.moveaxis(copied, page_axis, 0)[copies.dst] = np.moveaxis(array, page_axis, 0)[copies.src]
    return copied


def assert_same(array: jax.Array, expected: Any) -> None:
    """The dtype, and the bits."""
    assert array.dtype == expected.dtype
    found = read(array)
    np.testing.assert_array_equal(found, expected)
    assert found.tobytes() == expected.tobytes()


def compile_program(leaves: list[jax.Array], page_axis: int = 0, crosses: bool = False) -> str:
    """Return the text of the compiled program for eight copies."""
    program: Any = get_program(tuple(leaf.sharding for leaf in leaves), page_axis, crosses)
    return str(program.lower(leaves, np.zeros((2, 8), dtype=np.int32)).compile().as_text())


class CopiedPages:
    """Arrays whose pages are copied, and the same arrays in NumPy. `placement`: a device or a sharding for all, or one each."""

    def __init__(self, hosts: list[Any], placement: Any = None, page_axis: int = 0, **options: Any) -> None:
        self.hosts, self.page_axis = [host.copy() for host in hosts], page_axis
        self.num_pages = hosts[0].shape[page_axis]
        self.arrays: Any = jax.device_put([jnp.array(host) for host in hosts], placement)
        self.shardings = [array.sharding for array in self.arrays]
        self.prepare(**options)

    def prepare(self) -> None:
        """Make what the moves need beside the arrays."""

    def warmup(self, max_num: int) -> None:
        self.arrays = warmup(self.arrays, max_num, page_axis=self.page_axis)

    def move(self, rng: np.random.Generator, num: int) -> None:
        """Copy pages at random; with host pages, transfer up to so many each way."""
        self.copy(draw_copies(rng, self.num_pages, num))

    def copy(self, copies: Copies) -> None:
        self.arrays = copy_pages(self.arrays, copies, page_axis=self.page_axis)
        self.hosts = [copy_in_numpy(host, copies, self.page_axis) for host in self.hosts]

    def check(self) -> None:
        """The arrays are those of NumPy, and lie where they did."""
        jax.tree.map(assert_same, self.arrays, self.hosts)
        assert [array.sharding for array in self.arrays] == self.shardings


class TransferredPages(CopiedPages):
    """The same with pages that are saved in host memory, and loaded from there."""

    def prepare(
        self, num_host_pages: int = NUM_HOST_PAGES, memory_kind: str | None = "pinned_host", is_aligned: bool = True
    ) -> None:
        """Without `is_aligned` the rows are where jax copies memory instead of aliasing it."""
        self.num_host_pages = num_host_pages
        options: dict[str, Any] = {"page_axis": self.page_axis, "memory_kind": memory_kind}
        memory = None if is_aligned else np.zeros(1 << 20, np.uint8)[1:]
        self.host_pages = HostPages(self.arrays, num_host_pages, memory=memory, **options)
        self.saved: list[dict[int, Any]] = [{} for _ in self.hosts]

    def warmup(self, max_num: int) -> None:
        self.arrays = self.host_pages.warmup(self.arrays, max_num)

    def move(self, rng: np.random.Generator, num: int) -> Moves:
        """Save any pages, and load pages that are saved by now."""
        num_saves, num_loads = rng.integers(0, num + 1, 2)
        saves = [rng.integers(1, self.num_pages, num_saves), 1 + rng.permutation(self.num_host_pages - 1)[:num_saves]]
        known = sorted({*self.saved[0], *saves[1].tolist()})
        loads = rng.permutation(1 + rng.permutation(self.num_pages - 1)[: num_loads if known else 0])
        sources = rng.choice(known, len(loads)) if known else loads
        return self.transfer(make_transfers(np.stack(saves, axis=1), np.stack([sources, loads], axis=1)))

    def check(self) -> None:
        super().check()
        assert [finished for finished in self.host_pages.wait() if finished[1:] != ([], [], None)] == []

    def transfer(self, transfers: Moves) -> Moves:
        self.arrays = self.host_pages.run(self.arrays, transfers)
        for host, saved in zip(self.hosts, self.saved, strict=True):
            pages = np.moveaxis(host, self.page_axis, 0)
            for src, dst in zip(transfers.saves.src, transfers.saves.dst, strict=True):
                saved[int(dst)] = pages[src].copy()
            for src, dst in zip(transfers.loads.src, transfers.loads.dst, strict=True):
                pages[dst] = saved[int(src)]
        return transfers
