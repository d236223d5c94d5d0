"""Eviction policies by name. Without one the page that was released first is evicted first."""

from cpython.mem cimport PyMem_RawCalloc as calloc
from cpython.mem cimport PyMem_RawFree as free
from libc.stdint cimport UINT32_MAX, uint32_t

from pagepool.core cimport adaptive
from pagepool.core.adaptive cimport SAMPLE_INTERVAL
from pagepool.core.platform cimport CACHE_LINE
from pagepool.core.queue cimport link_mark
from pagepool.core.records cimport BLANK, NEW, NULL_PAGE, SET_SIZE, GhostEntry, Policy, Pool

from pagepool.errors import ArgumentError, ArgumentTypeError, shown

EVICTION_POLICIES = ("lru", "adaptive")

cdef enum:
    GHOST_SIZE = 6            # pools of evicted pages, of which the ghost has a sample; a smaller one forgets keys too early


cdef str checked_policy(object name):
    """The name of a policy as a str. ArgumentError for an unknown name, ArgumentTypeError for another type."""
    if not isinstance(name, str):
        raise ArgumentTypeError(f"eviction: got {type(name).__name__}, allowed: a string")
    policy = str.__str__(name)  # a subclass may equal anything
    if policy not in EVICTION_POLICIES:
        raise ArgumentError(f"eviction: got {shown(policy)}, allowed: {', '.join(map(repr, EVICTION_POLICIES))}")
    return policy


cdef int set_policy(Pool *pool, str name) except -1:
    """Give a pool without pages in its queue a policy that `checked_policy` returned; "lru" is none."""
    cdef Policy *policy
    if name == "lru":
        return 0
    pool.policy = policy = <Policy *>calloc(1, sizeof(adaptive.Adaptive))
    if policy != NULL:
        policy.marks = <uint32_t *>calloc(pool.num_pages, sizeof(uint32_t))
    if policy == NULL or policy.marks == NULL or not make_ghost(pool):
        raise MemoryError(f"the eviction policy of {pool.num_pages} pages")
    set_adaptive(<adaptive.Adaptive *>policy)
    adaptive.start_adaptive(<adaptive.Adaptive *>policy, pool.num_pages)
    policy.new_part = NEW
    pool.num_parts, pool.is_divided = adaptive.NUM_PARTS, True
    return 0


cdef bint make_ghost(Pool *pool) noexcept:
    """Make room for a sample of the pages that were evicted last; False where memory is short."""
    cdef double size_in_sets = <double>GHOST_SIZE * pool.num_pages / SAMPLE_INTERVAL / SET_SIZE
    cdef size_t num_sets = 1 + <size_t>min(<double>(UINT32_MAX - 1), size_in_sets)
    cdef void *memory = calloc(num_sets * SET_SIZE * sizeof(GhostEntry) + CACHE_LINE, 1)
    pool.policy.ghost.memory, pool.policy.ghost.num_sets = memory, <uint32_t>num_sets
    pool.policy.ghost.entries = <GhostEntry *>(<char *>memory + CACHE_LINE - <size_t>memory % CACHE_LINE)
    return memory != NULL


cdef bint make_blank_part(Pool *pool) noexcept:
    """Make all pages of a pool without a policy, whose records have room for a part, those of the blank one; False where memory
    is short.
    """
    cdef Policy *policy = <Policy *>calloc(1, sizeof(Policy))
    cdef uint32_t *marks = <uint32_t *>calloc(pool.num_pages, sizeof(uint32_t))
    if policy == NULL or marks == NULL:
        free(policy)
        free(marks)
        return False
    policy.marks, policy.new_part, policy.num_in_part[BLANK] = marks, BLANK, pool.num_free
    pool.policy, pool.num_parts, pool.is_divided = policy, 1, True
    link_mark(pool.pages, pool.num_pages, pool.pages[NULL_PAGE].next_free)
    return True


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
