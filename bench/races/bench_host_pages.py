"""Transfers between the arrays of an engine and host memory, beside a transfer for each page, and `jax.device_put` of the same
bytes in one array.

The first two also gather the pages of all layers before a save, and scatter them after a load. All are timed to completion, to
and from pinned memory of the device, and then in the calling thread alone, until it goes on. The remark tells how much later a
step ends that starts behind a save.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import pytest

from bench.races.host_rivals import Moving, MovingByPage, Putting, Transferring
from bench.races.race import HOST, WALL_TIME, Race, Work

PAGE_KIB = 256
NUM_TURNS = 10
ROUNDS_PER_TURN = 10
NUM_STEPS = 20
WAYS = pytest.mark.parametrize("way", ["save", "load"])
CALLING_TIME = pytest.mark.benchmark(timer=time.thread_time)

pytestmark = WALL_TIME


class Starting:
    """A contender that is timed until its calls return."""

    def __init__(self, moving: Moving) -> None:
        self.prepare, self.run, self._moving = moving.finish, moving.start, moving

    @property
    def page_ids(self) -> list[float]:
        return self._moving.page_ids


def make_contenders(num_pages: int, way: str, page_kib: int) -> dict[str, Moving]:
    return {
        "by page": MovingByPage(num_pages, way, page_kib),
        "device_put": Putting(num_pages, way, page_kib),
        "pagepool": Transferring(num_pages, way, page_kib),
    }


def make_work(name: str, num_pages: int, page_kib: int) -> Work:
    work, num_mib = f"{name} of {num_pages} pages of {page_kib} KiB", num_pages * page_kib / 1024
    return Work(work, "MiB", num_mib, NUM_TURNS, suite=HOST, rounds_per_turn=ROUNDS_PER_TURN)


@WAYS
@pytest.mark.parametrize("num_pages", [1, 8, 64])
def test_transfers(race: Race, num_pages: int, way: str) -> None:
    pytest.importorskip("jax")
    race(make_contenders(num_pages, way, PAGE_KIB), make_work(f"{way}s", num_pages, PAGE_KIB))


@CALLING_TIME
@WAYS
@pytest.mark.parametrize(("num_pages", "page_kib"), [(8, PAGE_KIB), (64, PAGE_KIB), (64, 64)])
def test_the_calling_thread(race: Race, num_pages: int, page_kib: int, way: str) -> None:
    pytest.importorskip("jax")
    contenders = {name: Starting(moving) for name, moving in make_contenders(num_pages, way, page_kib).items()}
    race(contenders, make_work(f"calling thread, {way}s", num_pages, page_kib))


def test_the_delay_of_a_step(remark: Callable[[str], None]) -> None:
    """A product of matrices stands for the step."""
    pytest.importorskip("jax")
    delays = {
        name: time_steps(kind(64, "save", PAGE_KIB)) for name, kind in (("ours", Transferring), ("by page", MovingByPage))
    }
    (alone, behind), (_, by_page) = delays["ours"], delays["by page"]
    remark(
        f"A step of {alone:.2f} ms that starts behind a save of 64 pages, 16 MiB, ends after {behind:.2f} ms, and after "
        f"{by_page:.2f} ms where each page is a transfer."
    )


def time_steps(moving: Moving) -> tuple[float, float]:
    """Return the milliseconds of a step alone and behind transfers: medians."""
    jax = moving.jax
    matrix = jax.numpy.ones((1024, 1024))
    step = jax.jit(lambda matrix, page: matrix @ matrix + page[0, 0])
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for i in range(2 * NUM_STEPS + 2):
        start = time.perf_counter()
        if i % 2:
            moving.start()
        step(matrix, moving.arrays[0][1]).block_until_ready()
        seconds[bool(i % 2)].append(time.perf_counter() - start)
        moving.finish()
    return median(seconds[False][1:]) * 1e3, median(seconds[True][1:]) * 1e3
