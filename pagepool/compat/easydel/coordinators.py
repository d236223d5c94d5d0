"""EasyDeL's managers by kind of attention and its coordinators, under the same names, over pagepool's look-up."""

from collections.abc import Sequence
from functools import cached_property
from inspect import signature
from typing import Any

from pagepool._core import HashChain, PageIds, find_prefix
from pagepool.arguments import require_flag
from pagepool.errors import ArgumentError
from pagepool.group_rules import kind_of, make_rules
from pagepool.page_pool import PagePool
from pagepool.page_pool.pool import choose_pool
from pagepool.specs import CacheGroupSpec


class SingleTypeCacheManager:
    """One cache group: its spec, its index and the pool. The coordinator sets ``num_hashes_per_page``."""

    def __init__(self, kv_cache_spec: Any, page_pool: PagePool, kv_cache_group_id: int) -> None:
        """Manage the group with index `kv_cache_group_id`, described by `kv_cache_spec`."""
        self.kv_cache_spec = kv_cache_spec
        self.page_pool = page_pool
        self.kv_cache_group_id = kv_cache_group_id
        self.page_size = kv_cache_spec.page_size
        self.num_hashes_per_page = 1


class FullAttentionManager(SingleTypeCacheManager):
    """Full attention: each token attends to all tokens before it."""


class SlidingWindowManager(SingleTypeCacheManager):
    """Sliding window: each token attends to the last tokens, including itself."""


class ChunkedLocalAttentionManager(SingleTypeCacheManager):
    """Chunked attention: each token attends to its chunk."""


class MambaManager(SingleTypeCacheManager):
    """Recurrent states: each request has one state of fixed size."""


MANAGERS = FullAttentionManager, SlidingWindowManager, ChunkedLocalAttentionManager, MambaManager


def get_manager_for_kv_cache_spec(kv_cache_spec: Any, **kwargs: Any) -> SingleTypeCacheManager:
    """Make the manager for the kind of attention of a spec. `kwargs` go to its constructor. Raise ArgumentError as `kind_of`
    does.
    """
    by_name = {cls.__name__: cls for cls in MANAGERS}
    return by_name[f"{kind_of(kv_cache_spec)}Manager"](kv_cache_spec, **kwargs)


class CacheCoordinator:
    """The groups of a model, and the pool of their pages."""

    def __init__(
        self,
        num_pages: int,
        kv_cache_groups: Sequence[CacheGroupSpec],
        max_model_len: int,
        use_eagle: bool,
        enable_caching: bool,
        page_pool: PagePool | None = None,
    ) -> None:
        """See `CacheManager`. Raise ArgumentError for a pool of another size or with another `enable_caching`."""
        self.kv_cache_groups = kv_cache_groups
        self.max_model_len = max_model_len
        self.use_eagle = require_flag("use_eagle", use_eagle)
        self.enable_caching = require_flag("enable_caching", enable_caching)
        self.page_pool = choose_pool(page_pool, num_pages, self.enable_caching)
        self.num_pages = self.page_pool.num_pages
        self._rules = make_rules(kv_cache_groups, self.use_eagle, self.enable_caching)


class HybridCacheCoordinator(CacheCoordinator):
    """Coordinator of any number of groups, whatever their kinds, page sizes and order."""

    @cached_property
    def single_type_managers(self) -> tuple[SingleTypeCacheManager, ...]:
        """The manager of each group, made on first access."""
        managers = []
        for i, group in enumerate(self.kv_cache_groups):
            manager = get_manager_for_kv_cache_spec(group.kv_cache_spec, page_pool=self.page_pool, kv_cache_group_id=i)
            manager.num_hashes_per_page = int(self._rules.configuration[f"kv_cache_groups[{i}].num_hashes_per_page"] or 1)
            managers.append(manager)
        return tuple(managers)

    def find_longest_cache_hit(self, chain: HashChain, max_cache_hit_length: int) -> tuple[tuple[PageIds, ...], int]:
        """Return the longest cached prefix of at most `max_cache_hit_length` tokens, and its length in tokens. The prefix is
        page ids for each group, with the null page outside the group's attention. Nothing is changed.
        """
        return find_prefix(self.page_pool.store, self._rules.groups, chain, max_cache_hit_length + 1)

    def count_cached_tokens(self, chain: HashChain, max_cache_hit_length: int) -> int:
        """Return the length of the longest prefix that is cached in the pool or its host tier, in tokens."""
        return find_prefix(self.page_pool.store, self._rules.groups, chain, max_cache_hit_length + 1, reaches_tier=True)[1]


class UnitaryCacheCoordinator(HybridCacheCoordinator):
    """Coordinator of one group; ArgumentError for another number of groups."""

    __signature__ = signature(CacheCoordinator)

    def __init__(self, num_pages: int, kv_cache_groups: Sequence[CacheGroupSpec], *args: Any, **kwargs: Any) -> None:
        """Make a coordinator: parameters as in `CacheCoordinator`."""
        if len(kv_cache_groups) != 1:
            raise ArgumentError(f"kv_cache_groups: got {len(kv_cache_groups)}, allowed: 1")
        super().__init__(num_pages, kv_cache_groups, *args, **kwargs)


class CacheCoordinatorNoPrefixCache(HybridCacheCoordinator):
    """Coordinator of any number of groups, or none, without prefix caching: nothing hits."""

    def __init__(
        self,
        num_pages: int,
        kv_cache_groups: Sequence[CacheGroupSpec],
        max_model_len: int,
        use_eagle: bool,
        page_pool: PagePool | None = None,
    ) -> None:
        """See `CacheCoordinator`."""
        super().__init__(num_pages, kv_cache_groups, max_model_len, use_eagle, False, page_pool)


def get_kv_cache_coordinator(
    num_pages: int,
    kv_cache_groups: Sequence[CacheGroupSpec],
    max_model_len: int,
    use_eagle: bool,
    enable_caching: bool,
    page_pool: PagePool | None = None,
) -> CacheCoordinator:
    """Make the coordinator for a number of groups, with or without prefix caching, on `page_pool` or a new pool."""
    if not require_flag("enable_caching", enable_caching):
        return CacheCoordinatorNoPrefixCache(num_pages, kv_cache_groups, max_model_len, use_eagle, page_pool)
    cls = UnitaryCacheCoordinator if len(kv_cache_groups) == 1 else HybridCacheCoordinator
    return cls(num_pages, kv_cache_groups, max_model_len, use_eagle, enable_caching, page_pool)
