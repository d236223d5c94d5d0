# Look-ups of prefixes, and refused requests. A `Query` asks for the longest prefix that hits in all groups. A `RefusedRequest`
# shows whether a request that lacked pages certainly lacks them again.

cimport cython
from libc.stdint cimport int32_t, int64_t

from pagepool.core.holding.demand cimport *
from pagepool.core.holding.groups cimport *
from pagepool.core.pool cimport Ranges

cdef struct StoredKey:        # a page in storage behind the tier
    Digest key
    Digest upper              # upper half of the digest, if it is known and has 32 bytes; else 0
    int32_t group

cdef struct Query:
    const Group *groups       # [num_groups] all of them must hit
    Py_ssize_t num_groups
    const Kinds *kinds        # kinds of the groups
    const Digest *digests     # [num_digests] of the hash pages that may hit
    Py_ssize_t num_digests
    Py_ssize_t hash_size      # tokens of a digest
    Ranges ids                # pages that may hit
    bint reaches_tier         # pages in the tier hit as well
    const StoredKey *stored   # [num_stored] in ascending order of `key.lo`: these hit as well
    Py_ssize_t num_stored
    Py_ssize_t num_known      # digests of the request: the last may be one that must not hit
    PrefixEnd end             # result of `find_end`
    Py_ssize_t num_full_hashes  # result of `find_longest`: hashes that hit in all groups of full attention; 0: no such group
    Py_ssize_t num_reachable  # result of `find_and_load`: hashes that would hit if enough pages were free for loads
    int32_t short_bank        # result of `find_and_load`: bank that has too few free pages for the loads, or NO_BANK

# A `Watch` has the reasons for a refusal, and the pool's counters at that time. Hits are `WATCHED` page by page if they are the
# leading pages of the only group, and the page behind them misses. These hits stay valid while no page loses the flag: to an
# eviction, to a hit, or to a held twin that look-ups prefer. If the last pages were evicted, the hits get shorter. Hits without
# the flag stay valid while no page is cached or uncached.
cdef struct Watch:
    int64_t num_changes       # entries and drops of the index
    int64_t num_reused
    int64_t num_unwatched
    Py_ssize_t num_held       # upper bound of the hits, null pages included, that take nothing from the free queue
    int64_t num_given_back    # `count_given_back` when the free hits were counted
    Py_ssize_t num_free_hits  # hits in the free queue; hits that were evicted since are subtracted
    Py_ssize_t stride         # digests per page; 0: the hits are not watched page by page, and the fields below mean nothing
    int32_t group
    int32_t page_size         # tokens
    Range ids                 # pages that may hit
    const Digest *digests     # keys of the look-up
    Py_ssize_t max_num_pages  # most pages that may hit
    Py_ssize_t num_pages      # pages that hit

cdef struct Tokens:           # token counts of a request for a row
    Py_ssize_t num_known
    Py_ssize_t num_prompt     # known tokens of the prompt, as reference windows see them
    Py_ssize_t num_wanted     # known tokens that should get room
    Py_ssize_t max_num_new    # most tokens behind the hits that get room
    Py_ssize_t num_external   # most tokens that come from elsewhere behind the hits; if any do, only these get room
    Py_ssize_t num_ahead      # lookahead tokens: they get slots behind all others, but no room
    bint reserves_prompt      # all known tokens get slots, also those without room


@cython.final
cdef class FoundPrefix:
    cdef readonly tuple hits
    cdef readonly int64_t num_queried_tokens
    cdef readonly int64_t num_hit_tokens
    cdef readonly bint is_short
    cdef public bint is_preempted
    cdef PrefixEnd end


@cython.final
cdef class RefusedRequest:
    cdef readonly tuple hits
    cdef readonly Py_ssize_t num_tokens
    cdef readonly Py_ssize_t num_hit_tokens
    cdef Watch watch
    cdef int32_t shard              # the shard that gives pages; -1: any
    cdef Py_ssize_t num_loads       # hits to be loaded from the tier; in `hits` they are null pages
    cdef int64_t num_slots          # slots that a row's request asked for, at most the row's length
    cdef PageStore store            # None for a row, like the chain
    cdef HashChain chain
    cdef tuple options              # for rows only, as are the fields below; None: the request cannot be recognized
    cdef Py_ssize_t num_external    # see `Tokens`
    cdef object source              # the list or `PageIds` of its tokens, held so that no other object gets its address

    cdef void begin(self, Pool *pool, const Query *query, Py_ssize_t num_held, int64_t num_changes) noexcept
    cdef Py_ssize_t count_most_pages(self, Py_ssize_t num_digests) noexcept
    cdef bint begin_request(self, PageStore store, CacheGroups groups, HashChain chain, int64_t num_changes) except -1
    cdef bint finds_hits(self, Pool *pool) noexcept
    cdef bint is_short(self, Pool *pool, int64_t num_pages, Py_ssize_t num_reserved) noexcept
    cdef void count_free_hits(self, Pool *pool) noexcept
    cdef int64_t count_needed(self, Pool *pool, const Holding *holding, int64_t num_slots) noexcept
    cdef bint is_request_short(self, int64_t num_pages, Py_ssize_t num_reserved) noexcept
    cdef bint is_of(self, object token_ids, object options, const int32_t *tokens) except -1


@cython.final
cdef class RequestHashes:
    cdef readonly object request
    cdef readonly HashChain chain
    cdef readonly list page_hashes
    cdef public object extra_keys
    cdef public FoundPrefix query
    cdef public bint is_counted
    cdef public bint are_unsure
    cdef public RefusedRequest refusal


cdef PrefixEnd new_end() noexcept
cdef FoundPrefix prefix_of(tuple hits, int64_t num_queried_tokens, int64_t num_hit_tokens)
cdef Query query_of(
    CacheGroups groups, const Digest *digests, Py_ssize_t num_digests, Py_ssize_t hash_size, Py_ssize_t num_tokens, Ranges ids
) noexcept
cdef Py_ssize_t find_longest(Pool *pool, Query *query) noexcept
cdef Py_ssize_t find_first_miss(
    Pool *pool, const Query *query, const Group *kind, Py_ssize_t start, Py_ssize_t stop
) noexcept nogil
cdef bint hits_all(Pool *pool, const Query *query, const Group *kind, Py_ssize_t page) noexcept nogil
cdef void find_end(Pool *pool, Query *query, Py_ssize_t num_hashes) noexcept
cdef Py_ssize_t count_hit_places(const Group *group, Py_ssize_t num_hashes) noexcept nogil
cdef Py_ssize_t find_first_hit_page(const Query *query, const Group *group, Py_ssize_t num_hashes) noexcept nogil
cdef Py_ssize_t fetch_hits(Pool *pool, const Query *query, Py_ssize_t num_hashes, tuple hits) noexcept
cdef Ranges ranges_in(PageStore store, tuple ids) except *
cdef tuple checked_hits(PageStore store, object hits, const Holding *holding)
cdef Hits *list_hits(tuple hits) noexcept


cdef Tokens count_tokens(
    object num_tokens, object max_num_new_tokens, Py_ssize_t num_known, Py_ssize_t num_external, object num_lookahead_tokens,
    bint reserves_prompt,
) except *


cdef inline int32_t count_external_tokens(const Tokens *tokens, Py_ssize_t num_hits) noexcept:
    """Count the tokens that come from elsewhere behind `num_hits` hit tokens. One token is left to compute."""
    return <int32_t>min(tokens.num_external, tokens.num_known - 1 - num_hits)


cdef inline int32_t count_room_tokens(const Tokens *tokens, Py_ssize_t num_hits) noexcept:
    """Count the tokens of a row that get room, `num_hits` hit tokens included."""
    if count_external_tokens(tokens, num_hits):
        return <int32_t>num_hits + count_external_tokens(tokens, num_hits)
    return <int32_t>max(min(tokens.num_wanted, num_hits + tokens.max_num_new), num_hits)


cdef inline int32_t count_slots(const Tokens *tokens, int32_t num_room, int32_t most) noexcept:
    """Count the tokens of a row that get slots, if `num_room` of them get room, and a row has at most `most` tokens."""
    if tokens.reserves_prompt:
        num_room = <int32_t>tokens.num_known
    return <int32_t>min(num_room + tokens.num_ahead, <Py_ssize_t>most)
