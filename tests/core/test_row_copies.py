"""Rows copied natively: the bytes of NumPy's copies, whatever the strides and threads, and errors before anything is copied."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from pagepool._core import copy_rows
from pagepool.errors import ArgumentError, ArgumentTypeError

MIB = 1 << 20


def draw(rng: np.random.Generator, num_rows: int, width: int) -> Any:
    return rng.integers(0, 256, (num_rows, width), dtype=np.uint8)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8, 1000])
@pytest.mark.parametrize(("num", "width"), [(0, 8), (5, 0), (1, 1), (7, 63), (64, 4096), (3, MIB), (9, 2 * MIB + 129)])
def test_the_copies_are_those_of_numpy(num: int, width: int, num_threads: int) -> None:
    rng = np.random.default_rng(width)
    source, target = draw(rng, 9, width), draw(rng, 10, width)
    src, dst = rng.integers(0, 9, num), rng.permutation(max(num, 10))[:num] % 10
    expected = target.copy()
    for one, other in zip(src, dst, strict=True):  # a row may be written twice
        expected[other] = source[one]
    copy_rows(source, src, target, dst.astype(np.int32), num_threads)
    assert target.tobytes() == expected.tobytes()


def test_rows_may_have_gaps_and_any_order() -> None:
    rng = np.random.default_rng(1)
    source, target = draw(rng, 6, 3 * MIB), np.zeros((6, 3, MIB), np.uint8)
    copy_rows(source[::-2, 5 : 5 + MIB], np.arange(3), target[:, 1], np.array([5, 0, 3]), 2)
    assert (target[[5, 0, 3], 1] == source[[5, 3, 1], 5 : 5 + MIB]).all()
    assert target.sum() == target[[5, 0, 3], 1].sum()


def test_rows_of_one_array() -> None:
    """A row may be copied onto itself."""
    rows = draw(np.random.default_rng(2), 4, MIB)
    expected = rows[[0, 0, 2, 2]]
    copy_rows(rows, np.array([0, 2, 0]), rows, np.array([1, 3, 0]), 4)
    assert (rows == expected).all()


def test_the_same_rows_by_many_threads() -> None:
    source = draw(np.random.default_rng(3), 8, MIB)
    targets = [np.zeros_like(source) for _ in range(4)]
    ids = np.arange(8)
    threads = [threading.Thread(target=copy_rows, args=(source, ids, target, ids, 2)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((target == source).all() for target in targets)


ROWS, IDS = np.zeros((4, 8), np.uint8), np.zeros(2, np.int32)
READ_ONLY = np.zeros((4, 8), np.uint8)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((ROWS, np.array([0, 4]), ROWS, IDS), ArgumentError, "source_ids: got 4, allowed: rows from 0 to 3"),
        ((ROWS, IDS, ROWS, np.array([-1, 0])), ArgumentError, "target_ids: got -1, allowed: rows from 0 to 3"),
        ((ROWS, IDS, ROWS, IDS[:1]), ArgumentError, "target: got 1 rows of 8 bytes, allowed: 2 of 8"),
        ((ROWS, IDS, ROWS[:, :7], IDS), ArgumentError, "target: got 2 rows of 7 bytes, allowed: 2 of 8"),
        ((ROWS, IDS, READ_ONLY, IDS), ArgumentError, "target: got a read-only array, allowed: one to write to"),
        ((ROWS[:, ::2], IDS, ROWS, IDS), ArgumentError, "source: got rows with gaps, allowed: contiguous rows"),
        ((ROWS.T, IDS, ROWS, IDS), ArgumentError, "source: got rows with gaps, allowed: contiguous rows"),
        ((ROWS, IDS, ROWS, IDS, 0), ArgumentError, "num_threads: got 0, allowed: 1 to .*"),
        (
            (ROWS.view(np.int8), IDS, ROWS, IDS),
            ArgumentTypeError,
            "source: got ndarray, allowed: an array of uint8 with 2 dimensions",
        ),
        ((ROWS, IDS, bytes(32), IDS), ArgumentTypeError, "target: got bytes, allowed: an array of uint8 with 2 dimensions"),
        (
            (ROWS, IDS.astype(float), ROWS, IDS),
            ArgumentTypeError,
            "source_ids: got an array of float64 with 1 dimensions, allowed: .*",
        ),
    ],
)
def test_errors(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}$"):
        copy_rows(*arguments)
    assert not ROWS.any()
