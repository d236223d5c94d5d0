"""The states that a soak compares: cheap counts, and everything observable of the pools."""

from __future__ import annotations

from typing import Any

import numpy as np

import pagepool


class SoakError(AssertionError):
    """Engines differ, a wrong call was not refused, or something is left at the end."""


def require_equal(what: str, values: list[Any]) -> None:
    """Raise if the engines differ."""
    if any(value != values[0] for value in values[1:]):
        raise SoakError(f"{what}: " + " against ".join(f"{value!r:.500}" for value in values))


def pool_state(pool: pagepool.PagePool) -> tuple[Any, ...]:
    """Return the free order, the ref counts, the number of prefix entries and the counters."""
    counts = pool.ref_counts()
    counts[0] = 0  # the null page's count is not maintained
    return pool.free_page_ids_in_order().tobytes(), counts.tobytes(), len(pool.cached_page_hash_to_page), pool.stats


def require_same_pools(what: str, pools: list[pagepool.PagePool]) -> None:
    """Raise if pools differ in their snapshots, including prefix entries and their order among equals."""
    first, *others = map(sort_entries, pools)
    differences = {name for other in others for name in first if not np.array_equal(first[name], other[name])}
    if differences:
        raise SoakError(f"{what}: they differ in {', '.join(sorted(differences))}")


def sort_entries(pool: pagepool.PagePool) -> dict[str, Any]:
    """Return a pool's snapshot with the prefix entries by key, since their order in the index is different in each pool."""
    arrays = pool.snapshot()
    del arrays["checksum"]
    order = np.lexsort((*arrays["cached_keys"].T, arrays["cached_group_ids"]))
    cached = {name: array[order] for name, array in arrays.items() if name.startswith("cached") and array.size}
    return arrays | cached


def held_page_ids(pool: pagepool.PagePool) -> Any:
    """Return the ids of held pages, ``[held pages]``."""
    return np.flatnonzero(pool.ref_counts()[1:]).astype(np.int32) + 1


def list_references(pool: pagepool.PagePool) -> Any:
    """Return the ids of held pages, each repeated by its number of holders."""
    held = held_page_ids(pool)
    return np.repeat(held, pool.ref_counts()[held])
