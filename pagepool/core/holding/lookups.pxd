# Look-ups of prefixes, and refused requests. A `Query` is a look-up of the longest prefix that hits in all groups. A `Refusal`
# says whether a request that was refused for want of pages certainly is refused again.

cimport cython
from libc.stdint cimport int32_t, int64_t

from pagepool.core.base.siphash cimport Digest
from pagepool.core.holding.groups cimport CacheGroups, Kinds
from pagepool.core.holding.rules cimport Group
from pagepool.core.pool.records cimport Pool, Range
from pagepool.core.pool.store cimport PageStore
from pagepool.core.values.chain cimport HashChain
from pagepool.core.values.ids cimport PageIds

cdef struct Query:            # a look-up of the longest prefix
    const Group *groups       # [num_groups] that must all hit
    Py_ssize_t num_groups
    const Kinds *kinds        # of these
    const Digest *digests     # of a request's hash pages
    Py_ssize_t num_digests    # that may hit
    Py_ssize_t hash_size      # tokens of a digest
    Range ids                 # of pages that may hit
    bint reaches_tier         # whether those in the tier hit as well
    Py_ssize_t num_full_hashes  # that hit in all groups of full attention; 0: there are none. `find_longest` counts them

# A `Watch` has what a refusal rests on, and the pool's counters at that time. Hits are `WATCHED`, page by page, if they are the
# leading pages of the only group, and the page behind them misses: such hits stay while none loses the flag, with its entry or
# because it is touched, except the last ones, whose eviction shortens them. Other hits stay while nothing enters or leaves the
# index.
cdef struct Watch:
    int64_t num_changes       # of the index: entries and drops
    int64_t num_reused
    int64_t num_unwatched
    Py_ssize_t num_held       # upper bound on the hits, null pages among them, that take nothing from the free queue
    Py_ssize_t stride         # digests of a page; 0: the hits are not watched one by one, and the rest has no meaning
    int32_t group
    int32_t page_size         # tokens
    Range ids                 # of pages that may hit
    const Digest *digests     # by which pages are looked up
    Py_ssize_t max_num_pages  # that may hit
    Py_ssize_t num_pages      # that hit

cdef struct Tokens:           # numbers of tokens of a request for a row
    Py_ssize_t num_known
    Py_ssize_t num_wanted     # that are to have room
    Py_ssize_t max_num_new    # of these behind the hits
    Py_ssize_t interval       # these end at a multiple of it, if there is one behind the hits; 0: anywhere
    Py_ssize_t num_external   # at most so many come from elsewhere behind the hits; if any do, they alone get room


@cython.final
cdef class Refusal:
    cdef readonly tuple hits
    cdef readonly Py_ssize_t num_tokens
    cdef readonly Py_ssize_t num_hit_tokens
    cdef Watch watch
    cdef int32_t shard              # where pages come from; -1: anywhere
    cdef int64_t num_room           # tokens that were to have room, which a row could have; for a row only
    cdef PageStore store            # this and the chain for a request only
    cdef HashChain chain
    cdef tuple options              # this and the rest for a row only. None: it is not recognised
    cdef Py_ssize_t interval        # see `Tokens`
    cdef Py_ssize_t num_external    # see `Tokens`
    cdef object source              # the list, or the `PageIds`, with its tokens: held, so that nothing else is in its place

    cdef void begin(
        self, Pool *pool, CacheGroups groups, const Digest *digests, Py_ssize_t num_digests, Range ids, Py_ssize_t num_held,
        int64_t num_changes,
    ) noexcept
    cdef bint begin_request(self, PageStore store, CacheGroups groups, HashChain chain, int64_t num_changes) except -1
    cdef bint finds_hits(self, Pool *pool) noexcept
    cdef bint is_short(self, Pool *pool, int64_t num_pages, Py_ssize_t num_reserved) noexcept
    cdef bint is_request_short(self, int64_t num_pages, Py_ssize_t num_reserved) noexcept
    cdef bint is_of(self, object token_ids, object options, const int32_t *tokens) except -1


@cython.final
cdef class RequestHashes:
    cdef readonly object request
    cdef readonly HashChain chain
    cdef readonly list page_hashes
    cdef public object extra_keys
    cdef public object query
    cdef public bint is_counted
    cdef public bint is_short
    cdef public bint are_unsure
    cdef public Refusal refusal


cdef Query query_of(
    CacheGroups groups, const Digest *digests, Py_ssize_t num_digests, Py_ssize_t hash_size, Py_ssize_t num_tokens, Range ids
) noexcept
cdef Py_ssize_t find_longest(Pool *pool, Query *query) noexcept
cdef Py_ssize_t count_junction_tokens(const Query *query, Py_ssize_t num_hashes) noexcept
cdef Py_ssize_t find_first_hit_page(const Query *query, const Group *group, Py_ssize_t num_hashes) noexcept nogil
cdef Py_ssize_t fetch_hits(Pool *pool, const Query *query, Py_ssize_t num_hashes, tuple hits) noexcept
cdef Range range_in(PageStore store, tuple ids) except *


cdef Tokens count_tokens(
    object num_tokens, object max_num_new_tokens, Py_ssize_t num_known, Py_ssize_t interval, Py_ssize_t num_external
) except *


cdef inline int32_t count_external_tokens(const Tokens *tokens, Py_ssize_t num_hits) noexcept:
    """Count the tokens from elsewhere behind `num_hits` hit ones. One token is left to compute."""
    return <int32_t>min(tokens.num_external, tokens.num_known - 1 - num_hits)


cdef inline int32_t count_room_tokens(const Tokens *tokens, Py_ssize_t num_hits) noexcept:
    """Count the tokens that get room, `num_hits` hit ones among them."""
    cdef Py_ssize_t num = max(min(tokens.num_wanted, num_hits + tokens.max_num_new), num_hits)
    if count_external_tokens(tokens, num_hits):
        return <int32_t>num_hits + count_external_tokens(tokens, num_hits)
    if tokens.interval and num - num % tokens.interval > num_hits:
        num -= num % tokens.interval
    return <int32_t>num
