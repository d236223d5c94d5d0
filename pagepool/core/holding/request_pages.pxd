# What requests hold. A `Step` gives the next tokens of a request slots; its `Outcome` is DONE, or says why it was refused.
# Always: the `limits` and `num_cached_tokens` of a request are those of its `holding`.

cimport cython
from libc.stdint cimport int32_t, int64_t

from pagepool.core.holding.boundaries cimport Boundaries
from pagepool.core.holding.groups cimport CacheGroups
from pagepool.core.holding.holding cimport Contents, Demand, Hits, Holding, Limits
from pagepool.core.holding.rules cimport Group
from pagepool.core.pool.records cimport Pool
from pagepool.core.pool.store cimport PageStore
from pagepool.core.values.chain cimport HashChain
from pagepool.core.values.ids cimport PageIds


cdef enum Outcome:
    DONE
    TOO_FEW                   # pages are free
    TOO_LARGE                 # for the pool, or shard, even if all its pages were free
    WRONG_HIT                 # a hit has another content, or cannot be held
    NOT_EMPTY                 # hits of a request that holds pages
    HELD_FREE                 # a page in the free queue was given a reference
    COPIES_DUE                # copies or transfers of pages of the request are due
    ENTERED_OTHERWISE         # a page that got full has an entry under another hash
    LOST_PAGE                 # a page that is to be skipped or kept was given back by somebody else
    NO_MEMORY

cdef struct Step:             # the next tokens of a request
    int64_t num_computed      # tokens that are computed before it
    int64_t num_to_cache      # leading tokens whose full pages enter the prefix index; 0: none
    int32_t context           # see `Origin`
    int32_t session           # of a request without pages
    Demand demand
    bint stays_in_shard       # new pages come from the shard of the others, if these are in one
    bint may_be_too_large     # what can never fit is TOO_FEW as well
    int64_t num_changes       # of the index, until it was refused for want of pages
    int32_t wrong_page        # the page that an outcome is about
    Py_ssize_t wrong_at       # its place in its group
    Py_ssize_t wrong_num      # pages of that group; or what is too large
    int32_t wrong_shard       # for which it is too large; -1: for the pool


@cython.final
cdef class RequestPages:
    cdef Limits limits              # this and the next two first: a call with nothing due reads one cache line
    cdef readonly int64_t num_cached_tokens
    cdef int64_t num_idle           # tokens that have slots, up to the next checkpoint
    cdef PageStore store
    cdef CacheGroups groups
    cdef Holding holding
    cdef int64_t max_num_tokens
    cdef Boundaries boundaries      # of `holding`, unless that has none
    cdef public str session_id      # of `holding`, for events

    cdef void fix_boundaries(self, int64_t num_tokens, int64_t junction, PageIds resume_at) noexcept
    cdef void plan(self) noexcept
    cdef bint is_idle(self, int64_t num_computed, int64_t num_tokens, int64_t num_slots) noexcept
    cdef bint has_states_due(self, int64_t num_computed) noexcept
    cdef Outcome allocate_checked(
        self, Step *step, tuple hits, HashChain chain, PageIds tokens, int32_t num_shards, tuple new
    ) except *
    cdef int refuse(self, Outcome outcome, const Step *step, tuple hits, HashChain chain) except -1


cdef int refuse_ahead(str name, int64_t num_slots, int64_t num_passed) except -1
cdef Contents contents_of(HashChain chain, int32_t context, int32_t session) noexcept
cdef Hits *list_hits(tuple hits) noexcept
cdef bint copy_ids(const Holding *holding, tuple copies) noexcept
cdef bint list_last_first(
    const Pool *pool, const Holding *holding, int32_t num_computed, PageIds listed, bint are_worthless
) noexcept
cdef bint list_all(Pool *pool, const Holding *holding, int32_t num_computed, PageIds listed, Py_ssize_t *num_staying) noexcept
cdef void begin_boundaries(
    CacheGroups groups, Boundaries *boundaries, int64_t num_tokens, int64_t junction, PageIds resume_at
) noexcept
