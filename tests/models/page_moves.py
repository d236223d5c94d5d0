"""Copies and transfers of pages as `take_moves` returns them, made from pairs of pages."""

from __future__ import annotations

from itertools import count
from typing import Any, NamedTuple

import numpy as np

NUMBERS = count(1)


class Copies(NamedTuple):
    src: Any
    dst: Any
    group: Any


class Moves(NamedTuple):
    number: int
    saves: Any
    loads: Any


def make_copies(pairs: Any, groups: Any = None) -> Copies:
    """Return copies from a sequence of (source, destination)."""
    src, dst = np.array(pairs, dtype=np.int32).reshape(-1, 2).T.copy()
    return Copies(src, dst, np.zeros(len(src), dtype=np.int32) if groups is None else np.array(groups, dtype=np.int32))


def make_transfers(saves: Any = (), loads: Any = (), save_groups: Any = None, load_groups: Any = None) -> Moves:
    """Return saves and loads from sequences of (source, destination), under a new number."""
    return Moves(next(NUMBERS), make_copies(saves, save_groups), make_copies(loads, load_groups))
