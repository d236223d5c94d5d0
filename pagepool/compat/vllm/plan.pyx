"""The structure of a vLLM manager, read once: groups, sizes, windows. Requests' blocks stay in vLLM's own objects."""

cimport cython

from pagepool.compat.vllm.pool cimport queue_of, suffix_of

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import (
    HybridKVCacheCoordinator,
    KVCacheCoordinatorNoPrefixCache,
    UnitaryKVCacheCoordinator,
)
from vllm.v1.core.single_type_kv_cache_manager import CrossAttentionManager, FullAttentionManager, SlidingWindowManager

cdef tuple COORDINATORS = (HybridKVCacheCoordinator, KVCacheCoordinatorNoPrefixCache, UnitaryKVCacheCoordinator)


@cython.final
cdef class GroupPlan:
    """A cache group: its sizes, and its vLLM manager's dicts of requests' blocks."""

    def __cinit__(self, coordinator, manager):
        self.manager = manager
        self.held = manager.req_to_blocks
        self.num_cached = manager.num_cached_block
        self.partial_hits = manager._partial_hit_reqs
        self.suffix = suffix_of(manager.kv_cache_group_id)
        self.null_block = manager._null_block
        self.block_size = manager.block_size
        self.is_known = is_known(coordinator, manager)
        self.is_caching = manager.enable_caching
        self.is_recording = manager._record_new_block_ids
        self.is_eagle = manager.use_eagle
        self.window = EVERYTHING
        if type(manager) is SlidingWindowManager:
            self.window = manager.sliding_window - 1 + manager.extra_retained_tokens
            self.is_masked = is_masked(coordinator, manager)
        else:
            self.has_partial_tail = self.is_known and self.block_size != manager.block_pool.hash_block_size


@cython.final
cdef class Plan:
    """A manager's groups, and settings of its coordinator."""

    def __cinit__(self, manager):
        coordinator = manager.coordinator
        self.groups = [GroupPlan(coordinator, one) for one in coordinator.single_type_managers]
        self.pool = manager.block_pool
        self.queue = queue_of(self.pool)
        self.coordinator = coordinator
        self.nothing = manager.empty_kv_cache_blocks
        self.max_model_len = manager.max_model_len
        self.hash_block_size = self.pool.hash_block_size
        self.num_lag = coordinator.num_reprefillable_tokens
        if type(coordinator) is HybridKVCacheCoordinator and not coordinator.enable_partial_hash_hits:
            self.alignment = coordinator.scheduler_block_size
        self.is_hybrid = type(coordinator) is HybridKVCacheCoordinator
        self.has_others = not all([(<GroupPlan>group).is_known for group in self.groups])
        self.needs_processed = self.has_others or any([(<GroupPlan>group).window != EVERYTHING for group in self.groups])


cdef bint is_known(object coordinator, object manager):
    """Whether the compiled functions treat the blocks of a group as its vLLM manager would."""
    is_own = manager.block_pool is coordinator.block_pool and manager.kv_cache_spec.prefix_cacheable
    return is_own and type(manager) in (FullAttentionManager, SlidingWindowManager)


cdef bint is_masked(object coordinator, object manager):
    """Whether only some of a window's blocks are cached: those just before a possible end of a hit."""
    alignment = manager.cache_hit_alignment_tokens
    if alignment is None or alignment % manager.block_size:
        return False
    if coordinator.retention_interval is not None:
        return True
    window = manager.kv_cache_spec.sliding_window
    return manager._contiguous_blocks_for_hit(window, manager.block_size, manager.use_eagle) < alignment // manager.block_size


cdef Plan plan_of(object manager):
    """Return a manager's plan, made by the first call; None leaves the manager to vLLM's own methods."""
    try:
        return manager._pagepool_plan
    except AttributeError:
        manager._pagepool_plan = make_plan(manager)
    return manager._pagepool_plan


cdef Plan make_plan(object manager):
    coordinator = manager.coordinator
    pool = coordinator.block_pool
    if type(coordinator) not in COORDINATORS or type(pool) is not BlockPool or queue_of(pool) is None:
        return None
    if any([isinstance(one, CrossAttentionManager) for one in coordinator.single_type_managers]):
        return None
    return Plan(manager)
