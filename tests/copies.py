"""Helpers of the tests of page copies: random arrays and copies, and the same copies in NumPy."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from devices import read

from pagepool.page_copies import get_program


class Copies(NamedTuple):
    src: Any
    dst: Any
    group: Any


def make_copies(pairs: Any, groups: Any = None) -> Copies:
    """Return copies from a sequence of (source, destination)."""
    src, dst = np.array(pairs, dtype=np.int32).reshape(-1, 2).T.copy()
    return Copies(src, dst, np.zeros(len(src), dtype=np.int32) if groups is None else np.array(groups, dtype=np.int32))


def draw_copies(rng: np.random.Generator, num_pages: int, num_copies: int) -> Copies:
    """Return copies of any pages, often also destinations or repeated, to different pages."""
    src = rng.integers(1, num_pages, num_copies)
    dst = 1 + rng.permutation(num_pages - 1)[:num_copies]
    return make_copies(np.stack([src, dst], axis=1), rng.integers(0, 3, num_copies))


def draw_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Any:
    """Return random numbers of any sign, among them minus zero."""
    numbers = rng.integers(-9, 9, shape) * np.where(rng.random(shape) < 0.5, 1.0, -1.0)
    return numbers.astype(dtype)


def copy_in_numpy(array: Any, copies: Copies, page_axis: int = 0) -> Any:
    copied = array.copy()
    np.moveaxis(copied, page_axis, 0)[copies.dst] = np.moveaxis(array, page_axis, 0)[copies.src]
    return copied


def assert_same(array: jax.Array, expected: Any) -> None:
    """The dtype, and the bits."""
    assert array.dtype == expected.dtype
    assert read(array).tobytes() == expected.tobytes()


def compile_program(leaves: list[jax.Array], page_axis: int = 0, crosses: bool = False) -> str:
    """Return the text of the compiled program for eight copies."""
    program: Any = get_program(tuple(leaf.sharding for leaf in leaves), page_axis, crosses)
    return str(program.lower(leaves, np.zeros((2, 8), dtype=np.int32)).compile().as_text())
