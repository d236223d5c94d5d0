# Look-ups of prefixes, and refused requests.

cimport cython
from libc.stdint cimport int32_t, int64_t

from pagepool.core.chain cimport HashChain
from pagepool.core.groups cimport CacheGroups, Kinds
from pagepool.core.ids cimport PageIds
from pagepool.core.records cimport Pool, Range
from pagepool.core.rules cimport Group
from pagepool.core.siphash cimport Digest
from pagepool.core.store cimport PageStore

cdef struct Query:            # a look-up of the longest prefix
    const Kinds *kinds        # of groups that must all hit
    const Digest *digests     # of a request's hash pages
    Py_ssize_t num_digests    # that may hit
    Py_ssize_t hash_size      # tokens of a digest
    Range ids                 # of pages that may hit
    bint reaches_tier         # whether those in the tier hit as well

cdef struct Prefix:           # what the leading pages of a request are looked up by in one group
    const Digest *digests
    Py_ssize_t stride         # digests of a page
    Py_ssize_t max_num_pages  # that may hit
    int32_t group
    Range ids

cdef struct Watch:            # what a refusal rests on, with the pool's counters of then
    int64_t num_changes       # of the index: entries and drops
    int64_t num_reused
    int64_t num_unwatched
    Py_ssize_t num_pages      # leading ones that hit
    Py_ssize_t num_held       # hits that would take nothing from the free queue, null pages among them: at most
    bint is_leading           # the hits are the leading pages of the only group, WATCHED, and the next page misses

cdef struct Tokens:           # of a request for a row
    Py_ssize_t num_known
    Py_ssize_t num_wanted     # that are to have room
    Py_ssize_t max_num_new    # of them behind the hits
    Py_ssize_t interval       # at a multiple of which they end, if there is one behind the hits; 0: anywhere
    Py_ssize_t num_external   # that come from elsewhere behind the hits, at most; they get room instead, if there are any


cdef class Refusal:
    cdef readonly tuple hits
    cdef readonly Py_ssize_t num_tokens
    cdef readonly Py_ssize_t num_hit_tokens
    cdef PageStore store
    cdef HashChain chain            # None: the digests are elsewhere
    cdef Prefix prefix              # of the only group; without a stride the hits are not its leading pages, or there are more
    cdef Py_ssize_t page_size       # of it, in tokens
    cdef Watch watch

    cdef bint watch_hits(self, PageStore store, CacheGroups groups, HashChain chain) except -1
    cdef bint is_short(self, int64_t num_new_pages, Py_ssize_t num_reserved) noexcept
    cdef bint has_cached_hits(self, PageStore store, PageIds ids) noexcept
    cdef void begin(self, Pool *pool, Py_ssize_t num_held) noexcept
    cdef const int32_t *first_ids(self) noexcept
    cdef bint finds_hits(self, Pool *pool) noexcept
    cdef bint finds_watched_hits(self) noexcept


@cython.final
cdef class RequestHashes:
    cdef readonly object request
    cdef readonly HashChain chain
    cdef readonly list page_hashes
    cdef public object extra_keys
    cdef public object query
    cdef public bint is_counted
    cdef public bint is_short
    cdef public Refusal refusal


@cython.final
cdef class RowRefusal(Refusal):
    cdef int32_t shard              # where its pages come from; -1: anywhere
    cdef tuple options              # None: it is not recognised
    cdef Py_ssize_t interval        # see `Tokens`
    cdef Py_ssize_t num_external    # see `Tokens`
    cdef object source              # the list, or the `PageIds`, with its tokens: held, so that nothing else is in its place

    cdef bint is_of(self, object token_ids, object options, const int32_t *tokens) except -1


cdef Query query_of(
    CacheGroups groups, const Digest *digests, Py_ssize_t num_digests, Py_ssize_t hash_size, Py_ssize_t num_tokens, Range ids
) noexcept
cdef Py_ssize_t find_longest(Pool *pool, const Query *query) noexcept
cdef Py_ssize_t find_first_hit_page(const Query *query, const Group *group, Py_ssize_t num_hashes) noexcept nogil
cdef bint fetch_hits(Pool *pool, const Query *query, CacheGroups groups, Py_ssize_t num_hashes, tuple hits) noexcept
cdef Range range_in(PageStore store, tuple ids) except *


cdef Tokens count_tokens(
    object num_tokens, object max_num_new_tokens, Py_ssize_t num_known, Py_ssize_t interval, Py_ssize_t num_external
) except *


cdef inline int32_t count_external_tokens(const Tokens *tokens, Py_ssize_t num_hits) noexcept:
    """Tokens from elsewhere behind `num_hits` hit ones. One is left to compute."""
    return <int32_t>min(tokens.num_external, tokens.num_known - 1 - num_hits)


cdef inline int32_t count_room_tokens(const Tokens *tokens, Py_ssize_t num_hits) noexcept:
    """Tokens that get room behind `num_hits` hit ones, and these."""
    cdef Py_ssize_t num = max(min(tokens.num_wanted, num_hits + tokens.max_num_new), num_hits)
    if count_external_tokens(tokens, num_hits):
        return <int32_t>num_hits + count_external_tokens(tokens, num_hits)
    if tokens.interval and num - num % tokens.interval > num_hits:
        num -= num % tokens.interval
    return <int32_t>num
