"""Pools by kind of layer: their names and sizes, the groups that take pages from each, and what several do not support."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pagepool._core import PageIds, PageStore, drop_dependents
from pagepool.arguments import require_int, require_name
from pagepool.errors import ArgumentError, shown
from pagepool.group_rules import FULL, kind_of
from pagepool.group_rules import STATES as STATE_KINDS
from pagepool.page_pool import PagePool
from pagepool.page_pool.pool import EvictionPolicy, require_eviction, require_pool
from pagepool.specs import CacheGroupSpec

MAX_POOLS = 4
MIN_PAGES = 2  # the null page and one more
MAX_PAGES = 1 << 30


class PoolSizes(NamedTuple):
    """The pools of a manager in the core's order, each with its number of pages, and the number of each group's pool."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    pool_of_group: list[int]

    def list_pools_of_states(self, groups: Sequence[CacheGroupSpec]) -> list[int]:
        """Return the numbers of the pools that only have states; none if no pool has attention."""
        pairs = list(zip(self.pool_of_group, groups, strict=True))
        others = {number for number, group in pairs if kind_of(group.kv_cache_spec) != "Mamba"}
        of_attention = {number for number, group in pairs if not _has_state(group)}
        return [number for number in range(len(self.names)) if number not in others] if of_attention else []


def read_sizes(
    num_pages: int | Mapping[str, int], groups: Sequence[CacheGroupSpec], page_pool: PagePool | None = None
) -> PoolSizes:
    """Return the pools that `num_pages` names. Raise ArgumentError unless groups and sizes name the same pools; an int is the
    size of one pool for all groups.

    Pools with a group of attention come first. Otherwise the order is that of `page_pool`, or of `num_pages` without it.
    """
    names = [require_name("pool", getattr(group, "pool", "kv")) or "kv" for group in groups]
    if not isinstance(num_pages, Mapping):
        if len(set(names)) > 1:
            allowed = f"a size for each pool, such as {dict.fromkeys(names, 1024)}"
            raise ArgumentError(f"num_pages: got {shown(num_pages)}, allowed for groups of several pools: {allowed}")
        if names and isinstance(num_pages, int | np.integer) and num_pages == 1:
            raise ArgumentError("num_pages: got 1, which is the null page, allowed with groups: at least 2")
        return PoolSizes((names[0] if names else "kv",), (num_pages,), [0] * len(names))
    if set(num_pages) != set(names):
        raise ArgumentError(
            f"num_pages: got pools {sorted(num_pages, key=str)}, allowed: those of the groups, {sorted(set(names))}"
        )
    if len(num_pages) > MAX_POOLS:
        raise ArgumentError(f"num_pages: got {len(num_pages)} pools, allowed: {MAX_POOLS}")
    of_attention = {name for name, group in zip(names, groups, strict=True) if not _has_state(group)}
    order = [*page_pool.list_sizes(), *num_pages] if isinstance(page_pool, PagePool) else [*num_pages]
    ordered = sorted(num_pages, key=lambda name: (name not in of_attention, order.index(name)))
    sizes = tuple(require_int(f"num_pages[{name!r}]", num_pages[name], MIN_PAGES, MAX_PAGES) for name in ordered)
    return PoolSizes(tuple(ordered), sizes, [ordered.index(name) for name in names])


def read_new_sizes(num_pages: int | Mapping[str, int], pools: Mapping[str, PagePool]) -> list[int]:
    """Return a new size for each pool, from 1 to its number of pages. Raise ArgumentError unless `num_pages` names the same
    pools; an int is the size of the only one.
    """
    if not isinstance(num_pages, Mapping):
        if len(pools) > 1:
            raise ArgumentError(f"num_pages: got {shown(num_pages)}, allowed with several pools: a size for each")
        return [require_int("num_pages", num_pages, 1, pool.num_pages) for pool in pools.values()]
    if set(num_pages) != set(pools):
        raise ArgumentError(f"num_pages: got pools {sorted(num_pages, key=str)}, allowed: {sorted(pools)}")
    return [require_int(f"num_pages[{name!r}]", num_pages[name], 1, pool.num_pages) for name, pool in pools.items()]


def list_unsaved(groups: Sequence[CacheGroupSpec]) -> set[str]:
    """Return the names of the pools whose groups are all rings, so that no tier saves their pages."""
    names = {getattr(group, "pool", "kv") for group in groups}
    saved = {getattr(group, "pool", "kv") for group in groups if kind_of(group.kv_cache_spec) != "Ring"}
    return names - saved


def set_sinks_aside(
    store: PageStore, groups: Sequence[CacheGroupSpec], pool_of_group: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """Set the pages of each group's sinks aside, and return their ids in their pools. Raise OutOfPagesError for too few."""
    sinks: list[tuple[int, ...]] = []
    for group, bank in zip(groups, pool_of_group, strict=False):
        num_tokens, page_size = getattr(group.kv_cache_spec, "num_sink_tokens", 0), group.kv_cache_spec.page_size
        ids = store.set_aside(num_tokens // page_size, bank) if num_tokens else PageIds()
        sinks.append(tuple(*store.lists_in_banks((ids,))))
    return tuple(sinks)


def read_host_sizes(num_pages: int | Mapping[str, int], names: Sequence[str], unsaved_pools: Collection[str] = ()) -> list[int]:
    """Return the pages of a host tier behind each of these pools. Raise ArgumentError unless `num_pages` names the same pools,
    perhaps without `unsaved_pools`; an int is the size behind the only pool that is saved.
    """
    saved = [name for name in names if name not in unsaved_pools]
    if not isinstance(num_pages, Mapping):
        if len(saved) > 1:
            allowed = f"a size for each, such as {dict.fromkeys(names, 1024)}"
            raise ArgumentError(f"host_tier: got {num_pages} pages, allowed with several pools: {allowed}")
        return [num_pages if name in saved or len(names) == 1 else MIN_PAGES for name in names]
    if not set(saved) <= set(num_pages) <= set(names):
        got = sorted(num_pages, key=str)
        raise ArgumentError(f"host_tier: got pools {got}, allowed: those of the groups, {sorted(names)}")
    return [num_pages.get(name, MIN_PAGES) for name in names]


def _has_state(group: CacheGroupSpec) -> bool:
    return kind_of(group.kv_cache_spec) in STATE_KINDS


def make_pools(
    sizes: PoolSizes, enable_caching: bool, page_pool: PagePool | None, eviction: EvictionPolicy | None
) -> dict[str, PagePool]:
    """Return several pools over one store, by name: the pools of the store of `page_pool`, or new ones. Raise ArgumentError if
    the existing pools differ in names, sizes, caching or policy.
    """
    if page_pool is not None:
        require_pool(page_pool)
        require_eviction(page_pool, eviction)
        found, allowed = page_pool.list_sizes(), dict(zip(sizes.names, sizes.sizes, strict=True))
        if [*found.items()] != [*allowed.items()] or page_pool.enable_caching != enable_caching:
            got = f"{found}, caching {page_pool.enable_caching}"
            raise ArgumentError(f"page_pool: got pools {got}, allowed: {allowed}, caching {enable_caching}")
        store, configuration = page_pool.store, page_pool.configuration
        return {name: PagePool.of_bank(store, bank, configuration) for bank, name in enumerate(sizes.names)}
    first, *further = sizes.sizes
    store = PageStore(
        first,
        enable_caching,
        eviction="lru" if eviction is None else eviction,
        further_banks=[size - 1 for size in further],
        bank_names=sizes.names,
    )
    return {name: PagePool.of_bank(store, bank) for bank, name in enumerate(sizes.names)}


def link_checkpoints(store: PageStore, groups: Sequence[CacheGroupSpec], pool_of_group: Sequence[int]) -> None:
    """Let checkpoints in later pools lose their entries when a policy evicts the page of full attention that ends with them."""
    pairs = list(zip(groups, pool_of_group, strict=True))
    full = [i for i, (group, pool) in enumerate(pairs) if pool == 0 and kind_of(group.kv_cache_spec) in FULL]
    states = [i for i, (group, pool) in enumerate(pairs) if pool > 0 and kind_of(group.kv_cache_spec) == "Mamba"]
    if full and states:
        drop_dependents(store, full[0], states)


def require_states(pools: Mapping[str, PagePool], groups: Sequence[CacheGroupSpec], num_rows: int) -> None:
    """Raise ArgumentError if a pool of states is too small for a batch of `num_rows` rows. It needs, for each of its groups, a
    page for each row and one for a checkpoint, and one null page. One pool for all groups may be of any size.
    """
    for name, pool in pools.items() if len(pools) > 1 else ():
        kinds = [kind_of(group.kv_cache_spec) for group in groups if getattr(group, "pool", "kv") == name]
        num_needed = num_rows * len(kinds) + kinds.count("Mamba") + 1
        if set(kinds) <= {*STATE_KINDS} and pool.num_pages < num_needed:
            raise ArgumentError(
                f"num_pages[{name!r}]: got {pool.num_pages}, allowed for {num_rows} rows: at least {num_needed}"
            )
