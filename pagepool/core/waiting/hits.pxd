# The hits of waiting requests, kept current. A `Waiter` hits leading pages of the first group of full attention: some in the
# pool, and some behind them with its tier. It awaits the keys at both ends, since the last page of a hit may lose its entry,
# and the page behind it may be cached. The caller holds the locks of the line and of the store.
#
# Always:
#
# * While none of its keys comes or goes, the first `num_pages` pages of a waiter hit in the pool, and the next one does not.
#   The same is true of `num_reachable` with the tier. Its hits may be fewer: windows and states may end them.
# * Without full attention a waiter awaits no key, and has the hits of its last look-up.

from libc.stdint cimport int32_t, int64_t
from libc.string cimport memset

from pagepool.core.base cimport raw_calloc, resize
from pagepool.core.holding cimport Group, Query, find_first_miss, hits_all, hits_leading_pages, last_hash
from pagepool.core.pool cimport (
    NO_KEY, NO_PLACE, NUM_KEYS_EACH, AwaitedKey, AwaitedKeys, Pool, await_key, forget_key,
)
from pagepool.core.waiting.order cimport *

cdef struct Waiter:
    Py_ssize_t num_pages      # pages of the first group that hit in the pool
    Py_ssize_t num_reachable  # and in the pool or its tier
    int64_t num_hits          # tokens that would hit
    int64_t num_loads         # those that only the tier has
    int64_t num_tokens
    int64_t num_prompt        # tokens of the prompt, as reference windows see them
    int32_t shard             # -1: the whole pool
    int32_t next_free         # next number that is free
    bint is_waiting


cdef inline int64_t work_of(const Waiter *waiter) noexcept nogil:
    """Return the work of a request with its hits of now."""
    return count_work(waiter.num_tokens, waiter.num_hits, waiter.num_loads)


cdef inline void _await_ends(
    AwaitedKeys *awaited, int32_t first, const Query *query, const Group *group, Py_ssize_t num_pages
) noexcept nogil:
    """Await the keys of the last page that hits and of the next one, in two places."""
    if num_pages:
        await_key(awaited, first, query.digests[last_hash(group, num_pages - 1)], group.id)
    else:
        forget_key(awaited, first)
    if (num_pages + 1) * group.stride <= query.num_digests:
        await_key(awaited, first + 1, query.digests[last_hash(group, num_pages)], group.id)
    else:
        forget_key(awaited, first + 1)


cdef inline void forget_keys(AwaitedKeys *awaited, int32_t waiter) noexcept nogil:
    """Await no key of a waiter any more."""
    cdef int32_t i
    for i in range(NUM_KEYS_EACH):
        forget_key(awaited, waiter * NUM_KEYS_EACH + i)


cdef inline Py_ssize_t _find_end(Pool *pool, const Query *query, const Group *group, Py_ssize_t page) noexcept nogil:
    """Return the number of leading pages that hit, searched from `page` on in both directions. O(pages between them)."""
    while page and not hits_all(pool, query, group, page - 1):
        page -= 1
    return find_first_miss(pool, query, group, page, query.num_digests // group.stride)


cdef inline bint follow(
    Pool *pool, Query *query, AwaitedKeys *awaited, int32_t number, Waiter *waiter
) noexcept nogil:
    """Search both ends of a waiter's leading pages again, and await the keys there. Return whether they moved. `query` is its
    look-up; without full attention nothing is searched.
    """
    cdef const Group *group
    cdef Py_ssize_t num_pages = waiter.num_pages, num_reachable = waiter.num_reachable
    if not query.kinds.num or not hits_leading_pages(query.kinds.items[0]) or pool.slots == NULL:
        return False
    group = query.kinds.items[0]
    query.reaches_tier = False
    waiter.num_pages = _find_end(pool, query, group, min(num_pages, query.num_digests // group.stride))
    waiter.num_reachable = waiter.num_pages
    _await_ends(awaited, number * NUM_KEYS_EACH, query, group, waiter.num_pages)
    if pool.tier != NULL:
        query.reaches_tier = True
        waiter.num_reachable = _find_end(pool, query, group, max(waiter.num_pages, num_reachable))
        _await_ends(awaited, number * NUM_KEYS_EACH + 2, query, group, waiter.num_reachable)
    assert waiter.num_pages <= waiter.num_reachable
    return waiter.num_pages != num_pages or waiter.num_reachable != num_reachable


cdef inline int64_t count_leading_tokens(const Query *query, Py_ssize_t num_pages) noexcept nogil:
    """Return the tokens of a hit of leading pages, as a look-up in full attention alone counts them."""
    cdef Py_ssize_t num_hashes = num_pages - (query.kinds.use_eagle and num_pages > 0)
    num_hashes *= query.kinds.items[0].stride
    return (num_hashes - num_hashes % max(1, query.kinds.num_hit_hashes)) * query.hash_size
