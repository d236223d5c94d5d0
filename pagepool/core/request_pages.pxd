# What requests hold.

cimport cython
from libc.stdint cimport int32_t, int64_t

from pagepool.core.chain cimport HashChain
from pagepool.core.entering cimport Contents
from pagepool.core.holdings cimport Holding, Limits
from pagepool.core.ids cimport PageIds
from pagepool.core.records cimport Pool
from pagepool.core.rules cimport Group, Rules
from pagepool.core.siphash cimport Digest
from pagepool.core.store cimport PageStore


@cython.final
cdef class PageRules:
    cdef Rules rules


@cython.final
cdef class CacheGroups:
    cdef Group *groups
    cdef Py_ssize_t num


cdef enum Outcome:
    DONE
    SHORT                     # too few pages are free
    WRONG_HIT                 # a hit has another content, or cannot be held
    NOT_EMPTY                 # hits of a request that holds pages
    HELD_FREE                 # a page in the free queue was given a reference
    NO_MEMORY

cdef struct Demand:           # what is asked of a pool
    int64_t num_tokens        # that are to have slots
    Py_ssize_t num_reserved   # pages to leave free
    int32_t shard             # where new pages come from; -1: anywhere
    int32_t held_free         # a page in the way: free, and with references


@cython.final
cdef class RequestPages:
    cdef PageStore store
    cdef CacheGroups groups
    cdef Holding holding
    cdef Limits limits
    cdef int64_t num_cached_tokens
    cdef int64_t max_num_tokens

    cdef void plan(self) noexcept
    cdef Outcome take_locked(self, tuple hits, HashChain chain, tuple new, Demand *demand) noexcept
    cdef bint reserve(self, tuple hits, tuple new, int64_t num_tokens) noexcept
    cdef int refuse_hits(self, tuple hits, HashChain chain) except -1
    cdef int32_t find_shard(self) noexcept
    cdef bint make_room(self, const Holding *source) noexcept


cdef void lock_chain(HashChain chain) noexcept
cdef void unlock_chain(HashChain chain) noexcept
cdef void set_contents(Contents *contents, HashChain chain) noexcept
cdef tuple checked_hits(PageStore store, object hits, const Holding *holding)
cdef Py_ssize_t count_all_free_hits(
    const Pool *pool, const Holding *holding, tuple hits, HashChain chain, const Digest *digests, Py_ssize_t num_digests
) noexcept
cdef int64_t count_needed(const Holding *holding, tuple hits, int64_t num_tokens) noexcept
cdef int32_t count_hit_pages(const Group *group, PageIds hits) noexcept
cdef Py_ssize_t count_state_hits(const Holding *holding, tuple hits) noexcept
cdef Py_ssize_t count_adoptable(const Pool *pool, const Holding *holding, tuple hits) noexcept
cdef void attach_all(Pool *pool, const Holding *holding, tuple hits, bint adopts) noexcept
cdef void adopt_states(Pool *pool, const Holding *holding, tuple hits) noexcept
cdef void copy_states(Pool *pool, const Holding *holding, tuple hits) noexcept
