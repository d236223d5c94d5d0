"""Blocks for a request's next tokens, compiled: blocks behind windows go back, missing ones are taken, full ones are cached.

The functions replace methods of vLLM's `KVCacheManager`, with the same results. A step that needs no block costs a few look-ups
per group. They read and write vLLM's own dicts, so vLLM's other methods keep working. Three cases are left to vLLM's own
methods, which call the pool's compiled ones: a request's first call, with hits or external tokens; managers unknown to
`plan_of`; and groups of kinds other than full attention and windows.
"""

from cpython.dict cimport PyDict_GetItemWithError
from cpython.object cimport PyObject
from libc.stdint cimport int64_t

from pagepool.compat.vllm.blocks cimport Block, FreeQueue, as_block
from pagepool.compat.vllm.plan cimport EVERYTHING, GroupPlan, Plan, plan_of
from pagepool.compat.vllm.pool cimport Filled, cache_as_vllm, enter_blocks, give_blocks_back, take_blocks

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.kv_cache_interface import CrossAttentionSpec, EncoderOnlyAttentionSpec
from vllm.v1.request import Request, RequestStatus

cdef object vllm_allocate_slots = KVCacheManager.allocate_slots
cdef object vllm_cache_blocks = KVCacheManager.cache_blocks
cdef tuple UNCACHED = (CrossAttentionSpec, EncoderOnlyAttentionSpec)
cdef tuple WAITING = (RequestStatus.WAITING, RequestStatus.PREEMPTED)

cdef struct StepTokens:       # token counts of a request in a step
    int64_t num_before        # computed before the step
    int64_t num_computed      # num_before, limited to the longest sequence
    int64_t num_scheduled     # num_computed and the tokens of the step
    int64_t num_slots         # num_scheduled and drafted tokens

cdef struct Missing:          # blocks
    int64_t num_needed        # blocks that must be free, without blocks before a window
    int64_t num_taken


def allocate_slots(self, request, num_new_tokens, *args, **options):
    """Give a request blocks for its next tokens, and cache the blocks that these fill.

    Return vLLM's `KVCacheBlocks` with the new ones, or None if too few blocks are free. Arguments and options are those of
    vLLM's method. O(groups + blocks taken, given back and cached).
    """
    cdef Plan plan = None
    cdef StepTokens tokens
    cdef int64_t num_ahead = options["num_lookahead_tokens"] if "num_lookahead_tokens" in options else 0
    if not args and len(options) == ("num_lookahead_tokens" in options) and num_new_tokens >= 1:
        plan = plan_of(self)
    if plan is None or has_partial_hit(plan, request.request_id):
        return allocate_as_vllm(self, request, num_new_tokens, args, options)
    tokens.num_before = request.num_computed_tokens
    tokens.num_computed = min(tokens.num_before, plan.max_model_len)
    tokens.num_scheduled = tokens.num_computed + <int64_t>num_new_tokens
    tokens.num_slots = min(tokens.num_scheduled + num_ahead, plan.max_model_len)
    if plan.needs_processed:
        leave_windows(plan, request, max(0, tokens.num_computed - <int64_t>request.num_in_flight_tokens))
    if plan.queue.listens:
        return take_slots_in_turn(self, plan, request, &tokens)
    return take_slots(self, plan, request, &tokens)


cdef object allocate_as_vllm(object self, object request, object num_new_tokens, tuple args, dict options):
    """Allocate by vLLM's own method, which serves all new requests, and report new requests to the queue."""
    cdef FreeQueue queue
    managers = self.coordinator.single_type_managers
    is_new = not (managers and managers[0].req_to_blocks.get(request.request_id))
    found = self.block_pool.free_block_queue
    if not isinstance(found, FreeQueue):
        return vllm_allocate_slots(self, request, num_new_tokens, *args, **options)
    queue = <FreeQueue>found
    if is_new:
        queue.begin_turn(request)
    else:
        queue.go_on(request.request_id)
    try:
        blocks = vllm_allocate_slots(self, request, num_new_tokens, *args, **options)
    finally:
        queue.end_call()
    if is_new and blocks is not None:
        queue.note_request()
    return blocks


cdef object take_slots_in_turn(object self, Plan plan, object request, const StepTokens *tokens):
    """Call `take_slots` for a queue that listens."""
    plan.queue.go_on(request.request_id)
    try:
        return take_slots(self, plan, request, tokens)
    finally:
        plan.queue.end_call()


cdef bint has_partial_hit(Plan plan, object request_id) except -1:
    """Whether the request begins inside a shared block, which vLLM's own method copies."""
    cdef GroupPlan group
    for value in plan.groups:
        group = <GroupPlan>value
        if group.partial_hits and request_id in group.partial_hits:
            return True
    return False


cdef object take_slots(object self, Plan plan, object request, const StepTokens *tokens):
    """Take the missing blocks, or return None if too few are free."""
    cdef Missing missing = Missing(num_needed=0, num_taken=0)
    request_id = request.request_id
    for group in plan.groups:
        add_missing(plan, <GroupPlan>group, request, request_id, tokens, &missing)
    watermark = self.watermark_blocks
    if watermark and request.status in WAITING:
        missing.num_needed += <int64_t>watermark
    if missing.num_needed > plan.queue.num_free_blocks:
        return None
    new_blocks = None
    if missing.num_taken or plan.has_others:
        new_blocks = tuple([take_for_group(plan, <GroupPlan>group, request_id, tokens) for group in plan.groups])
    cache_full(plan, request, request_id, min(tokens.num_scheduled, num_tokens_of(request)))
    if new_blocks is not None:
        for blocks in new_blocks:
            if blocks:
                return KVCacheBlocks(new_blocks)
    return plan.nothing


cdef int64_t num_tokens_of(object request) except -1:
    """Count the request's known tokens."""
    return len(request._all_token_ids) if type(request) is Request else request.num_tokens


cdef inline int64_t num_held_by(object held, object request_id) except -1:
    cdef PyObject *blocks = PyDict_GetItemWithError(held, request_id)
    return 0 if blocks == NULL else len(<object>blocks)


cdef inline int64_t count_skipped(GroupPlan group, int64_t num_computed) noexcept:
    """Count the blocks before the window of the next token."""
    return max(0, num_computed - group.window) // group.block_size if group.window != EVERYTHING else 0


cdef int add_missing(
    Plan plan, GroupPlan group, object request, object request_id, const StepTokens *tokens, Missing *missing
) except -1:
    """Add the number of blocks that a group will take for the request."""
    cdef int64_t num_held, num_needed
    if not group.is_known:
        missing.num_needed += count_by_manager(plan, group, request, tokens)
        return 0
    num_held = num_held_by(group.held, request_id)
    num_needed = (tokens.num_slots + group.block_size - 1) // group.block_size
    missing.num_taken += max(0, num_needed - num_held)
    if group.window != EVERYTHING and PyDict_GetItemWithError(group.num_cached, request_id) == NULL:
        num_held = max(num_held, count_skipped(group, tokens.num_before))
    missing.num_needed += max(0, num_needed - num_held)
    return 0


cdef int64_t count_by_manager(Plan plan, GroupPlan group, object request, const StepTokens *tokens) except? -1:
    prefill_end = 0
    if plan.coordinator.retention_interval == 0:
        prefill_end = max(request.num_prompt_tokens, num_tokens_of(request) - 1)
    return group.manager.get_num_blocks_to_allocate(
        request.request_id, tokens.num_slots, (), tokens.num_before, tokens.num_before, tokens.num_scheduled,
        apply_admission_cap=False, prefill_end=prefill_end,
    )


cdef list take_for_group(Plan plan, GroupPlan group, object request_id, const StepTokens *tokens):
    """Take a request's missing blocks of a group, and return them."""
    cdef list blocks, new_blocks
    cdef int64_t num_missing
    if not group.is_known:
        return group.manager.allocate_new_blocks(request_id, tokens.num_slots, tokens.num_scheduled)
    blocks = group.held[request_id]  # vLLM's default dict
    num_missing = (tokens.num_slots + group.block_size - 1) // group.block_size - len(blocks)
    if num_missing <= 0:
        return []
    new_blocks = take_blocks(plan.pool, plan.queue, num_missing)
    blocks.extend(new_blocks)
    if group.is_recording:
        group.manager.new_block_ids.extend([(<Block>block).block_id for block in new_blocks])
    return new_blocks


cdef int leave_windows(Plan plan, object request, int64_t num_processed) except -1:
    """Give back the blocks outside the windows of all later tokens."""
    cdef GroupPlan group
    for value in plan.groups:
        group = <GroupPlan>value
        if not group.is_known:
            group.manager.remove_skipped_blocks(request.request_id, num_processed, request.num_prompt_tokens)
        elif count_skipped(group, num_processed):
            leave_window(plan, group, group.held[request.request_id], count_skipped(group, num_processed))
    return 0


cdef int leave_window(Plan plan, GroupPlan group, list blocks, int64_t num_skipped) except -1:
    """Give back those of the first `num_skipped` blocks still held, last one first; put the null block in their places."""
    cdef list freed = []
    cdef Py_ssize_t i = min(num_skipped, <int64_t>len(blocks)) - 1
    while i >= 0 and blocks[i] is not group.null_block:
        freed.append(blocks[i])
        blocks[i] = group.null_block
        i -= 1
    if freed:
        give_blocks_back(plan.pool, plan.queue, freed)
    return 0


def estimate_cached_tokens(self, request):
    """Return how many of a request's tokens are cached in all of its groups. O(blocks)."""
    cdef list counts = []
    groups = self.kv_cache_config.kv_cache_groups
    for group, blocks in zip(groups, self.get_blocks(request.request_id).blocks):
        if group.kv_cache_spec.prefix_cacheable and not isinstance(group.kv_cache_spec, UNCACHED):
            counts.append(count_hashed(blocks))
    return min(counts) if counts else 0


cdef int64_t count_hashed(object blocks) except -1:
    """Return the largest number of tokens that the hash of a block covers."""
    cdef int64_t most = 0
    for block in blocks:
        most = max(most, as_block(block).num_hash_tokens)
    return most


def cache_blocks(self, request, num_computed_tokens):
    """Cache the blocks that a request's first `num_computed_tokens` fill. O(groups + blocks cached)."""
    cdef Plan plan = plan_of(self)
    queue = self.block_pool.free_block_queue if plan is None else plan.queue
    if isinstance(queue, FreeQueue) and (<FreeQueue>queue).listens:
        (<FreeQueue>queue).go_on(request.request_id)
        try:
            cache_filled(self, plan, request, num_computed_tokens)
        finally:
            (<FreeQueue>queue).end_call()
    else:
        cache_filled(self, plan, request, num_computed_tokens)


cdef int cache_filled(object self, Plan plan, object request, object num_computed_tokens) except -1:
    if plan is None:
        vllm_cache_blocks(self, request, num_computed_tokens)
    elif self.enable_caching:
        cache_full(plan, request, request.request_id, num_computed_tokens)
    return 0


cdef int cache_full(Plan plan, object request, object request_id, int64_t num_tokens) except -1:
    """Cache full blocks, group by group. At the first group served by its own manager, vLLM's coordinator takes over."""
    cdef GroupPlan group
    cdef int64_t num_hashed = <int64_t>len(request.block_hashes) * plan.hash_block_size
    for value in plan.groups:
        group = <GroupPlan>value
        if group.is_caching and not cache_group(
            plan, group, request, request_id, num_hashed, count_cacheable(plan, group, num_tokens)
        ):
            plan.coordinator.cache_blocks(request, num_tokens)
            break
    return 0


cdef int64_t count_cacheable(Plan plan, GroupPlan group, int64_t num_tokens) noexcept:
    """Count the leading computed tokens that a later hit of a group may use."""
    cdef int64_t num_final = max(0, num_tokens - plan.num_lag)
    if not plan.is_hybrid:
        return num_final
    if group.is_eagle and align(plan, num_tokens) > 0:
        return min(num_final, align(plan, num_final) + group.block_size)
    return align(plan, num_tokens)


cdef inline int64_t align(Plan plan, int64_t num_tokens) noexcept:
    return num_tokens - num_tokens % plan.alignment if plan.alignment else num_tokens


cdef bint cache_group(
    Plan plan, GroupPlan group, object request, object request_id, int64_t num_hashed, int64_t num_tokens
) except -1:
    """Cache a group's full blocks. Return False, with nothing done, to leave it to the group's manager."""
    cdef Filled filled
    cdef int64_t num_cached = 0, num_full = min(num_tokens, num_hashed) // group.block_size
    cdef PyObject *found
    if not group.is_known:
        return False
    found = PyDict_GetItemWithError(group.num_cached, request_id)
    if found != NULL:
        num_cached = <object>found
    if num_cached < num_full:
        if group.is_masked:
            return False
        stride = group.block_size // plan.hash_block_size
        filled = Filled(start=num_cached, stop=num_full, block_size=group.block_size, stride=stride)
        enter_filled(plan, group, request, filled)
    if group.has_partial_tail:
        group.manager._cache_partial_tail_block(request, num_tokens)
    return True


cdef int enter_filled(Plan plan, GroupPlan group, object request, Filled filled) except -1:
    request_id, hashes = request.request_id, request.block_hashes
    blocks = group.held[request_id]
    if type(hashes) is not list or not enter_blocks(plan.pool, blocks, hashes, filled, None, group.suffix):
        options = {"kv_cache_group_id": group.manager.kv_cache_group_id}
        cache_as_vllm(plan.pool, request, blocks, filled, options)
    group.num_cached[request_id] = filled.stop
    return 0
