"""Policies by name. A policy is a header with the functions of `Policy`; this module knows all of them."""

from cpython.mem cimport PyMem_RawCalloc as calloc
from cpython.mem cimport PyMem_RawFree as free
from libc.stdint cimport UINT32_MAX, int32_t, int64_t, uint32_t

from pagepool.core cimport adaptive, arc, lru
from pagepool.core.arguments cimport float_of
from pagepool.core.platform cimport CACHE_LINE
from pagepool.core.queue cimport link_mark
from pagepool.core.records cimport BLANK, NEW, NULL_PAGE, SET_SIZE, GhostEntry, Policy, Pool

from pagepool.errors import ArgumentError, ArgumentTypeError, shown

EVICTION_POLICIES = ("lru", "arc", "adaptive")

cdef int MAX_GHOST_SIZE = 64  # pools
cdef double ADAPTIVE_GHOST_SIZE = 6  # pools; a smaller one forgets keys before they return


cdef tuple checked_policy(object name, object ghost_size):
    """The name of a policy and a ghost size, in pools, as a str and a float or None. ArgumentError for an unknown name, and for
    a ghost size unless it is ARC's; ArgumentTypeError for other types.
    """
    if not isinstance(name, str):
        raise ArgumentTypeError(f"eviction: got {type(name).__name__}, allowed: a string")
    policy = str.__str__(name)  # a subclass may equal anything
    size = None if ghost_size is None else float_of(ghost_size, "ghost_size")
    if policy not in EVICTION_POLICIES:
        raise ArgumentError(f"eviction: got {shown(policy)}, allowed: {', '.join(map(repr, EVICTION_POLICIES))}")
    if size is not None and not (policy == "arc" and 0 < size <= MAX_GHOST_SIZE):
        raise ArgumentError(
            f"ghost_size: got {shown(ghost_size)} for {policy!r}, allowed: above 0 to {MAX_GHOST_SIZE} for 'arc', else None"
        )
    return policy, size


cdef int set_policy(Pool *pool, object name, object ghost_size) except -1:
    """Give a pool without pages in its queue a policy that `checked_policy` returned; "lru" is none. Without a ghost size ARC
    has a ghost of one pool, as in its paper.
    """
    cdef double num_pools = 1 if ghost_size is None else ghost_size
    cdef int64_t num_ghosts = <int64_t>(num_pools * pool.num_pages) + 1
    if name == "arc":
        begin_policy(pool, sizeof(arc.Arc) + arc.count_log_bytes(num_ghosts), arc.NUM_PARTS, arc.SPARE_ROOM * num_pools, 1)
        arc.start_arc(<arc.Arc *>pool.policy, num_ghosts)
        set_arc(<arc.Arc *>pool.policy)
    elif name == "adaptive":
        begin_policy(pool, sizeof(adaptive.Adaptive), adaptive.NUM_PARTS, ADAPTIVE_GHOST_SIZE, adaptive.SAMPLE_WEIGHT)
        set_adaptive(<adaptive.Adaptive *>pool.policy)
        adaptive.start_adaptive(<adaptive.Adaptive *>pool.policy, pool.num_pages)
    return 0


cdef int begin_policy(Pool *pool, size_t size, int32_t num_parts, double ghost_size, uint32_t sample_interval) except -1:
    """Allocate `size` bytes for a policy, marks, and a ghost for one page in `sample_interval` of `ghost_size` pools."""
    cdef Policy *policy = <Policy *>calloc(1, size)
    cdef double size_in_sets = min(<double>(UINT32_MAX - 1), ghost_size * pool.num_pages / sample_interval / SET_SIZE)
    cdef size_t num_sets = 1 + <size_t>size_in_sets
    pool.policy = policy
    if policy != NULL:
        policy.marks = <uint32_t *>calloc(pool.num_pages, sizeof(uint32_t))
        policy.ghost.memory = calloc(num_sets * SET_SIZE * sizeof(GhostEntry) + CACHE_LINE, 1)
    if policy == NULL or policy.marks == NULL or policy.ghost.memory == NULL:
        raise MemoryError(f"the eviction policy of {pool.num_pages} pages")
    policy.ghost.num_sets, policy.ghost.sample_mask = <uint32_t>num_sets, sample_interval - 1
    policy.ghost.entries = <GhostEntry *>(
        <char *>policy.ghost.memory + CACHE_LINE - <size_t>policy.ghost.memory % CACHE_LINE
    )
    policy.new_part = NEW
    pool.num_parts, pool.is_divided = num_parts, True
    return 0


cdef bint make_lru(Pool *pool) noexcept:
    """Give a pool without a policy, whose records have room for a part, that of `lru.pxd`; False where memory is short."""
    cdef Policy *policy = <Policy *>calloc(1, sizeof(Policy))
    cdef uint32_t *marks = <uint32_t *>calloc(pool.num_pages, sizeof(uint32_t))
    if policy == NULL or marks == NULL:
        free(policy)
        free(marks)
        return False
    policy.marks, policy.new_part, policy.num_in_part[BLANK] = marks, BLANK, pool.num_free
    policy.note_release, policy.note_queued, policy.note_hit = lru.note_release, lru.note_queued, lru.note_hit
    policy.note_miss, policy.pick = lru.note_miss, lru.pick
    policy.note_eviction = policy.note_drop = lru.note_page
    policy.is_right = lru.is_right
    pool.policy, pool.num_parts, pool.is_divided = policy, lru.NUM_PARTS, True
    link_mark(pool.pages, pool.num_pages, pool.pages[NULL_PAGE].next_free)
    return True


cdef void set_arc(arc.Arc *state) noexcept:
    cdef Policy *policy = &state.base
    policy.learned, policy.num_learned_bytes = &state.learned, sizeof(arc.Learned) + arc.count_log_bytes(state.max_num_ghosts)
    policy.note_release, policy.note_queued, policy.note_hit = arc.note_release, arc.note_queued, arc.note_hit
    policy.note_miss, policy.pick = arc.note_miss, arc.pick
    policy.note_eviction, policy.note_drop, policy.is_right = arc.note_eviction, arc.note_drop, arc.is_right


cdef void set_adaptive(adaptive.Adaptive *state) noexcept:
    cdef Policy *policy = &state.base
    policy.learned, policy.num_learned_bytes = &state.learned, sizeof(adaptive.Learned)
    policy.note_release, policy.note_queued, policy.note_hit = adaptive.note_release, adaptive.note_queued, adaptive.note_hit
    policy.note_miss, policy.pick = adaptive.note_miss, adaptive.pick
    policy.note_eviction, policy.note_drop, policy.is_right = adaptive.note_eviction, adaptive.note_drop, adaptive.is_right


cdef void free_policy(Pool *pool) noexcept:
    if pool.policy != NULL:
        free(pool.policy.marks)
        free(pool.policy.ghost.memory)
        free(pool.policy)
