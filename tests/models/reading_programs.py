"""Program: commits, copies of pages and host pages with jax's compilation cache in a folder, compared with NumPy.

Prints how many programs were read from the cache. The arrays share memory with NumPy, which a program must not write.
"""

from __future__ import annotations

import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from devices import read, run_work
from table_model import make_grouped_work, make_work

from pagepool.host_pages import HostPages
from pagepool.page_copies import copy_pages

NUM_PAGES = 64
NUM_ROUNDS = 20
CACHE_HITS = "/jax/compilation_cache/cache_hits"
EMPTY = np.zeros(0, dtype=np.int32)


def share(values: Any) -> tuple[Any, Any]:
    """Return a jax array of these values, and its memory: an array that begins at a multiple of 64 bytes is not copied."""
    raw = np.zeros(values.nbytes + 64, dtype=np.uint8)
    start = -raw.ctypes.data % 64
    memory = raw[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    memory[:] = values
    return jax.device_put(memory, jax.devices()[0]), memory


def make_arrays(rng: np.random.Generator) -> tuple[list[Any], list[Any], list[Any]]:
    """Return two arrays of pages, what they hold, and the memory in which they begin."""
    models = [rng.integers(1, 1000, (NUM_PAGES, 48)).astype(dtype) for dtype in ("int32", "float32")]
    arrays, memories = zip(*map(share, models), strict=True)
    return [*arrays], models, [*memories]


def check(arrays: list[Any], models: list[Any]) -> None:
    junk = [np.full(model.shape, -7, dtype=model.dtype) for model in models for _ in range(3)]  # in memory that was freed
    del junk
    for array, model in zip(arrays, models, strict=True):
        np.testing.assert_array_equal(read(array), model)


def choose_pages(rng: np.random.Generator) -> Any:
    return rng.permutation(np.arange(1, NUM_PAGES, dtype=np.int32))[:8].reshape(2, 4)


def copy_at_random(rng: np.random.Generator) -> None:
    arrays, models, memories = make_arrays(rng)
    for keeps_memory in (True, False):
        src, dst = choose_pages(rng)
        first = [memory.copy() for memory in memories]
        arrays = copy_pages(arrays, SimpleNamespace(src=src, dst=dst, group=np.zeros_like(src)))
        for model in models:
            model[dst] = model[src]
        check(arrays, models)
        np.testing.assert_equal(memories, first)
        if keeps_memory:
            memories = []


def transfer_at_random(rng: np.random.Generator) -> None:
    """Save pages, and load them into others."""
    arrays, models, memories = make_arrays(rng)
    first = [memory.copy() for memory in memories]
    host_pages = HostPages(arrays, NUM_PAGES)
    src, dst = choose_pages(rng)
    none, saved, loaded = (
        SimpleNamespace(src=src, dst=dst, group=np.zeros_like(src)) for src, dst in ((EMPTY, EMPTY), (src, src), (src, dst))
    )
    for number, (saves, loads) in enumerate(((saved, none), (none, loaded)), start=1):
        arrays = host_pages.run(arrays, SimpleNamespace(saves=saves, loads=loads, number=number))
        assert [done.error for done in host_pages.wait()] == [None]
    for model in models:
        model[dst] = model[src]
    check(arrays, models)
    np.testing.assert_equal(memories, first)
    del memories, first
    check(arrays, models)


def main(folder: str) -> None:
    counts = Counter[str]()
    jax.monitoring.register_event_listener(lambda event, **_: counts.update([event]))
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    run_work(make_work((8, 100), seed=1), NUM_ROUNDS)
    run_work(make_grouped_work(6, 300, [16, 32], seed=2), NUM_ROUNDS)
    rng = np.random.default_rng(3)
    for _ in range(NUM_ROUNDS):
        copy_at_random(rng)
        transfer_at_random(rng)
    print(counts[CACHE_HITS])


if __name__ == "__main__":
    main(*sys.argv[1:])
