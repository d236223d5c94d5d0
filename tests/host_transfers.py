"""Helpers of the tests of host pages: transfers, random ones too, and the same transfers in NumPy."""

from __future__ import annotations

from itertools import count
from typing import Any, NamedTuple

import numpy as np

NUMBERS = count(1)


class Transfers(NamedTuple):
    number: int
    save_src: Any
    save_dst: Any
    save_group: Any
    load_src: Any
    load_dst: Any
    load_group: Any


def make_transfers(saves: Any = (), loads: Any = (), save_groups: Any = None, load_groups: Any = None) -> Transfers:
    """Return transfers from sequences of (source, destination), under a new number."""
    fields = []
    for pairs, groups in ((saves, save_groups), (loads, load_groups)):
        src, dst = np.array(pairs, dtype=np.int32).reshape(-1, 2).T.copy()
        fields += [src, dst, np.zeros(len(src), dtype=np.int32) if groups is None else np.array(groups, dtype=np.int32)]
    return Transfers(next(NUMBERS), *fields)


class HostModel:
    """Pages of the host in NumPy, for one array with its page axis, and transfers drawn for them."""

    def __init__(self, array: Any, num_pages: int, page_axis: int = 0) -> None:
        self.page_axis, self.num_pages = page_axis, num_pages
        self.device = np.moveaxis(array.copy(), page_axis, 0)
        self.pages: dict[int, Any] = {}

    @property
    def array(self) -> Any:
        return np.moveaxis(self.device, 0, self.page_axis)

    def draw(self, rng: np.random.Generator, max_num: int) -> Transfers:
        """Return saves of any pages, and loads of pages that are saved by now."""
        num_saves, num_loads = rng.integers(0, max_num + 1, 2)
        saves = [rng.integers(1, len(self.device), num_saves), 1 + rng.permutation(self.num_pages - 1)[:num_saves]]
        known = sorted({*self.pages, *saves[1].tolist()})
        loads = rng.permutation(1 + rng.permutation(len(self.device) - 1)[: num_loads if known else 0])
        sources = rng.choice(known, len(loads)) if known else loads
        return make_transfers(np.stack(saves, axis=1), np.stack([sources, loads], axis=1))

    def run(self, transfers: Transfers) -> None:
        for src, dst in zip(transfers.save_src, transfers.save_dst, strict=True):
            self.pages[int(dst)] = self.device[src].copy()
        for src, dst in zip(transfers.load_src, transfers.load_dst, strict=True):
            self.device[dst] = self.pages[int(src)]
