# The pages that requests hold.
#
# Always: `limits`, `num_cached_tokens` and `num_idle` have the values that `plan` computed at the last change of `holding`.

cimport cython
from libc.stdint cimport int32_t, int64_t

from pagepool.core.holding.listing cimport *
from pagepool.core.holding.lookups cimport *
from pagepool.core.holding.request_step cimport *


@cython.final
cdef class RequestPages:
    cdef Limits limits              # at the front with the next three fields: a call with nothing due reads little memory
    cdef readonly int64_t num_cached_tokens
    cdef int64_t num_idle           # tokens that have slots, and fewer than those of the next checkpoint
    cdef int64_t num_looked_up      # tokens that had hashes and got slots at the admission; 0 once the request was set back
    cdef PageStore store
    cdef CacheGroups groups
    cdef Holding holding
    cdef int64_t max_num_tokens
    cdef Boundaries boundaries      # storage for `holding.boundaries`, unless that is NULL
    cdef WriteList writes           # states that its step writes
    cdef public str session_id      # name of its session, for events
    cdef int64_t begun              # when it was made, on the clock of stamps
    cdef readonly object owner      # the manager's request that holds the pages

    cdef void fix_boundaries(self, int64_t num_tokens, const PrefixEnd *end, int64_t external_end, PageIds resume_at) noexcept
    cdef void plan(self) noexcept
    cdef bint is_idle(self, int64_t num_computed, int64_t num_tokens, int64_t num_slots) noexcept
    cdef int note_looked_up(self, int64_t num_tokens) except -1
    cdef bint has_writes_due(self) noexcept
    cdef void count_hashed(self, Step *step) noexcept
    cdef Outcome allocate_checked(self, Step *step, tuple hits, HashChain chain, PageIds tokens, tuple new) except *
    cdef int refuse(self, Outcome outcome, const Step *step, tuple hits, HashChain chain) except -1


cdef int refuse_due(PageStore store, str name) except -1
cdef int refuse_unshareable(str name) except -1
cdef int require_banks(PageStore store, CacheGroups groups) except -1
cdef Contents contents_of(HashChain chain, int32_t context, int32_t session) noexcept
