# The pages that requests hold. A `Step` gives the next tokens of a request slots; its `Outcome` is DONE, or the reason for a
# refusal.
#
# Always: `limits`, `num_cached_tokens` and `num_idle` are those that `plan` computed at the last change of `holding`.

cimport cython
from libc.stdint cimport int32_t, int64_t

from pagepool.core.holding.groups cimport *
from pagepool.core.holding.writes cimport *
from pagepool.core.pool cimport PageStore
from pagepool.core.values cimport HashChain, PageIds


cdef enum Outcome:
    DONE
    TOO_FEW                   # too few pages are free
    TOO_LARGE                 # the pool or shard would be too small even if all its pages were free
    WRONG_HIT                 # a hit has another content by now, or cannot be held
    NOT_EMPTY                 # hits for a request that holds pages
    HELD_FREE                 # a caller gave a reference to a page in the free queue
    MOVES_DUE                # moves of pages of the request are due
    CACHED_OTHERWISE          # a page that was filled has an entry under another hash
    LOST_PAGE                 # another caller gave back a page that is to be skipped or kept
    NO_MEMORY

cdef struct Step:             # the next tokens of a request
    int64_t num_computed      # tokens computed before the step
    int64_t num_settled       # those of them whose pages windows may leave: without lookahead all
    int64_t num_to_cache      # leading tokens whose full pages are cached; 0: none
    int64_t num_final         # computed tokens whose keys are known: states written among them are cached
    int64_t write_from        # tokens that the step, or a transfer, does not compute: it writes no state among them
    int64_t write_to          # known tokens that the step computes, and those before
    bint caches_first         # these tokens are computed, so pages are cached before a window leaves them
    bint may_overwrite        # tokens may be written to pages that are cached for others
    int32_t context           # see `Origin`
    int32_t session           # session of a request without pages, see `PageSessions.hold`
    Demand demand
    bint stays_in_shard       # new pages come from the shard of the request's other pages, if these are in one shard
    bint may_be_too_large     # a request that can never fit is TOO_FEW, not TOO_LARGE
    int64_t num_changes       # `count_changes` at the refusal for want of pages
    int32_t wrong_page        # page for which the step was refused
    Py_ssize_t wrong_at       # place of that page in its group
    Py_ssize_t wrong_num      # pages of that group; for TOO_LARGE the pages needed
    int32_t wrong_shard       # shard that is too small; -1: the pool is


@cython.final
cdef class RequestPages:
    cdef Limits limits              # first with the next three: a call with nothing due reads little memory
    cdef readonly int64_t num_cached_tokens
    cdef int64_t num_idle           # tokens that have slots, up to the next checkpoint
    cdef int64_t num_looked_up      # tokens that had hashes and got slots at the admission; 0 once the request was set back
    cdef PageStore store
    cdef CacheGroups groups
    cdef Holding holding
    cdef int64_t max_num_tokens
    cdef Boundaries boundaries      # storage for `holding.boundaries`, unless that is NULL
    cdef WriteList writes           # states that its step writes
    cdef public str session_id      # name of its session, for events
    cdef readonly object owner      # the request of a manager that holds them

    cdef void fix_boundaries(self, int64_t num_tokens, int64_t junction, PageIds resume_at) noexcept
    cdef void plan(self) noexcept
    cdef bint is_idle(self, int64_t num_computed, int64_t num_tokens, int64_t num_slots) noexcept
    cdef int note_looked_up(self, int64_t num_tokens) except -1
    cdef bint has_states_due(self, int64_t num_computed) noexcept
    cdef bint has_writes_due(self) noexcept
    cdef Outcome allocate_checked(
        self, Step *step, tuple hits, HashChain chain, PageIds tokens, int32_t num_shards, tuple new
    ) except *
    cdef int refuse(self, Outcome outcome, const Step *step, tuple hits, HashChain chain) except -1


cdef int refuse_ahead(str name, int64_t num_slots, int64_t num_passed) except -1
cdef int refuse_due(PageStore store, str name) except -1
cdef int refuse_unshareable(str name) except -1
cdef int require_banks(PageStore store, CacheGroups groups) except -1
cdef Contents contents_of(HashChain chain, int32_t context, int32_t session) noexcept
cdef Hits *list_hits(tuple hits) noexcept
cdef bint copy_ids(const Holding *holding, tuple copies) noexcept
cdef bint list_last_first(
    const Pool *pool, const Holding *holding, int32_t num_computed, PageIds listed, bint are_worthless
) noexcept
cdef bint rate_and_list(
    Pool *pool, const Holding *holding, int32_t num_computed, PageIds listed, Py_ssize_t *num_staying
) noexcept
cdef void begin_boundaries(
    CacheGroups groups, Boundaries *boundaries, int64_t num_tokens, int64_t junction, int64_t external_end, PageIds resume_at
) noexcept
