"""Look-ups of prefixes. A group's page j is known by the digest of the last hash page in it: index (j + 1) * stride - 1.

A refused request needs at least as many free pages the next time, unless one of its hits got another holder or a further page
of it was cached. Hits evicted from the end on are followed; after other changes the prefix is looked up again.
"""

cimport cython
from libc.string cimport memcmp

from pagepool.core.arguments cimport as_long_long, group_of, require_instance, size_of
from pagepool.core.ids cimport as_page_ids
from pagepool.core.index cimport find, find_within, has_key, home_of
from pagepool.core.platform cimport fetch, go_on, let_others_run
from pagepool.core.queue cimport count_free, has_free_pages
from pagepool.core.records cimport NULL_PAGE, WATCHED, count_changes
from pagepool.core.rules cimport MAX_TOKENS
from pagepool.core.siphash cimport Digest

import numpy as np

from pagepool.errors import ArgumentTypeError

cdef enum:
    LOOK_AHEAD = 8            # hashes by which a look-up has memory fetched before it reads it


cdef struct Keys:             # what pages of one size are looked up by
    const Digest *digests     # of a request's hash pages
    Py_ssize_t stride         # digests of a page
    const int32_t *groups     # that must all hit
    Py_ssize_t num_groups
    Range ids                 # of pages that may hit
    bint reaches_tier         # whether those in the tier hit as well


cdef bint hits_all(Pool *pool, const Keys *keys, Py_ssize_t page) noexcept nogil:
    cdef Digest key = keys.digests[(page + 1) * keys.stride - 1]
    cdef Py_ssize_t g
    for g in range(keys.num_groups):
        if find_within(pool, key, keys.groups[g], keys.ids) == NULL_PAGE:
            if not keys.reaches_tier or find(pool.tier.pool, key, keys.groups[g]) == NULL_PAGE:
                return False
    return True


cdef void fetch_hit(Pool *pool, const Keys *keys, Py_ssize_t at, Py_ssize_t stop) noexcept nogil:
    """Have the memory fetched that look-ups soon after digest `at` will read: slots first, then the records that those name."""
    if at + 2 * LOOK_AHEAD < stop:
        fetch(home_of(pool, keys.digests[at + 2 * LOOK_AHEAD], keys.groups[0]))
        fetch(&pool.pages[home_of(pool, keys.digests[at + LOOK_AHEAD], keys.groups[0]).page_id])


cdef Py_ssize_t find_first_miss(Pool *pool, const Keys *keys, Py_ssize_t start, Py_ssize_t stop) noexcept nogil:
    """End of the pages from `start` on, at most up to `stop`, that hit in all groups."""
    cdef Py_ssize_t page = start
    while page < stop:
        fetch_hit(pool, keys, (page + 1) * keys.stride - 1, stop * keys.stride)
        if not hits_all(pool, keys, page):
            break
        page += 1
    return page


cdef Py_ssize_t find_run_end(Pool *pool, const Keys *keys, Py_ssize_t stop, Py_ssize_t need) noexcept nogil:
    """End of the last `need` consecutive pages before `stop` that hit in all groups; else of the leading ones that do."""
    cdef Py_ssize_t page, run = 0
    for page in range(stop - 1, -1, -1):
        if not hits_all(pool, keys, page):
            run = 0
            continue
        run += 1
        if run >= need:
            return page + run
    return run


@cython.final
@cython.auto_pickle(False)
cdef class FoundIds(PageIds):
    """Pages that a look-up found. Their content is known while no prefix entry is dropped."""

    cdef bint is_known(self, HashChain chain, const Group *group, const Pool *pool) noexcept:
        """Whether these are still the pages of a group with what the chain says. The pool is locked."""
        return (
            self.chain is chain
            and &self.store.pool == pool
            and self.stride == group.stride
            and self.group == group.id
            and self.num_dropped == pool.num_dropped
        )


@cython.final
@cython.auto_pickle(False)
cdef class PrefixQuery:
    """Looks up the digests of `chain` in the prefix index of `store`, among page ids from `start_id` up to `stop_id` (None: to
    the end of the pool), or, if it `reaches_tier`, in its tier.
    """

    def __cinit__(self, PageStore store not None, chain, start_id=0, stop_id=None, bint reaches_tier=False):
        self.store, self.chain = store, require_instance(chain, HashChain, "chain")
        self.reaches_tier = reaches_tier and store.pool.tier != NULL
        self.ids = store.range_of(start_id, stop_id)

    def __reduce__(self):
        raise ArgumentTypeError("a prefix query cannot be pickled")

    def find_leading_hits(self, PageIds groups not None, stride, start, stop) -> int:
        """Return the end of the pages from `start` on, at most up to `stop`, that hit in all `groups`, with `stride` hashes a
        page. O(pages x groups).
        """
        cdef Keys keys = Keys(
            NULL, size_of(stride, "stride", 1), groups.ids, groups.num, self.ids, self.reaches_tier
        )
        cdef Py_ssize_t last = size_of(stop, "stop"), first = size_of(start, "start")
        cdef void *thread
        with self.chain.lock, self.store.lock:
            keys.digests = self.chain.digests
            last = min(last, self.chain.num // keys.stride)
            if not self.store.enable_caching:
                last = first if groups.num else last
            elif groups.num:
                thread = let_others_run(last - first)
                last = find_first_miss(&self.store.pool, &keys, first, last)
                go_on(thread)
        return last

    def find_last_run(self, PageIds groups not None, stride, stop, need) -> int:
        """Return the end of the last `need` consecutive pages before `stop` that hit in all `groups`, or, without such a run,
        of the leading pages that do. O(pages x groups).
        """
        cdef Keys keys = Keys(
            NULL, size_of(stride, "stride", 1), groups.ids, groups.num, self.ids, self.reaches_tier
        )
        cdef Py_ssize_t last = size_of(stop, "stop"), run = size_of(need, "need", 1)
        if not self.store.enable_caching:
            return 0
        with self.chain.lock, self.store.lock:
            keys.digests = self.chain.digests
            last = find_run_end(&self.store.pool, &keys, min(last, self.chain.num // keys.stride), run)
        return last

    def get_hits(self, group, stride, start, stop) -> PageIds | None:
        """Return the pages of one group in ``[0, stop)``: null pages before `start`, then the pages cached first. None if one
        is not cached, because another thread dropped it since it was found. O(stop).
        """
        cdef Py_ssize_t i, num_hashes = size_of(stride, "stride", 1)
        cdef Py_ssize_t last = size_of(stop, "stop", 0, len(self.chain) // num_hashes)
        cdef Py_ssize_t first = size_of(start, "start", 0, last)
        cdef int32_t checked_group = group_of(group)
        cdef bint is_whole = True
        cdef FoundIds hits = FoundIds.__new__(FoundIds)
        hits.store, hits.chain, hits.stride, hits.group = self.store, self.chain, num_hashes, checked_group
        hits.reserve(last)
        with self.chain.lock, self.store.lock:
            last = min(last, self.chain.num // num_hashes)
            for i in range(last):
                hits.ids[i] = NULL_PAGE
            for i in range(first, last if self.store.enable_caching else first):
                hits.ids[i] = find_within(
                    &self.store.pool, self.chain.digests[(i + 1) * num_hashes - 1], checked_group, self.ids
                )
                is_whole = is_whole and hits.ids[i] != NULL_PAGE
            hits.num = last
            hits.num_dropped = self.store.pool.num_dropped
        return hits if is_whole else None


cdef enum:
    NUM_SAMPLED = 16          # tokens, and up to twice as many, by which a refused request is recognised

cdef object ndarray = np.ndarray


cdef bint is_hit(Pool *pool, const Prefix *prefix, const int32_t *ids, Py_ssize_t i) noexcept nogil:
    """Whether the page that was found for place `i` is cached under its digest."""
    return has_key(&pool.pages[ids[i]], prefix.digests[(i + 1) * prefix.stride - 1], prefix.group)


cdef bint ends_at(Pool *pool, const Prefix *prefix, Py_ssize_t num_pages) noexcept nogil:
    """Whether the page behind the first `num_pages` misses, or may not hit."""
    if num_pages >= prefix.max_num_pages:
        return True
    return find_within(pool, prefix.digests[(num_pages + 1) * prefix.stride - 1], prefix.group, prefix.ids) == NULL_PAGE


cdef class Refusal:
    """A refused request of `num_tokens` tokens. `hits`, the `PageIds` of each group, hold `num_hit_tokens` tokens; both shrink
    as the last hits are evicted. While the hits are watched, `is_short` knows that the refusal stands.
    """

    def __cinit__(self, tuple hits not None, num_tokens, num_hit_tokens):
        if not all([isinstance(ids, PageIds) for ids in hits]):
            raise ArgumentTypeError(f"hits: got {[type(ids).__name__ for ids in hits]}, allowed: PageIds")
        self.hits = hits
        self.num_tokens = size_of(num_tokens, "num_tokens", 0, MAX_TOKENS)
        self.num_hit_tokens = size_of(num_hit_tokens, "num_hit_tokens", 0, self.num_tokens)

    def __reduce__(self):
        raise ArgumentTypeError("a refusal cannot be pickled")

    def watch_hits(self, PageStore store not None, HashChain chain not None, stride, group) -> bool:
        """Watch the hits, the leading pages of the only group under `chain`. False, and nothing is watched, unless a look-up
        would find exactly them now. Once for each object. O(pages).
        """
        cdef Py_ssize_t num_hashes = size_of(stride, "stride", 1, MAX_TOKENS)
        cdef int32_t checked_group = group_of(group)
        cdef PageIds ids = store.checked(self.hits[0]) if len(self.hits) == 1 else None
        if ids is None or self.store is not None or not store.enable_caching:
            return False
        with chain.lock, store.lock:
            self.page_size = num_hashes * chain.page_size
            self.prefix = Prefix(chain.digests, num_hashes, 0, checked_group, Range(0, store.pool.num_pages))
            self.prefix.max_num_pages = min(max(0, self.num_tokens - 1) // self.page_size, chain.num // num_hashes)
            if self.has_cached_hits(store, ids):
                self.begin(&store.pool, ids.num - count_free(&store.pool, ids.ids, ids.num))
        if self.watch.is_leading:
            self.store, self.chain = store, chain
        return self.watch.is_leading

    cdef bint has_cached_hits(self, PageStore store, PageIds ids) noexcept:
        """Whether `ids` are as many pages as the hits have tokens for, and cached."""
        cdef Py_ssize_t i
        if ids.num > self.prefix.max_num_pages or ids.num * self.page_size != self.num_hit_tokens:
            return False
        for i in range(ids.num):
            if not is_hit(&store.pool, &self.prefix, ids.ids, i):
                return False
        return True

    cdef void begin(self, Pool *pool, Py_ssize_t num_held) noexcept:
        """Watch hits that are cached, `num_held` of them held: one by one, unless the page behind them hits too. The pool is
        locked.
        """
        cdef Py_ssize_t i, n = self.num_hit_tokens // self.page_size if self.prefix.stride else 0
        self.watch = Watch(count_changes(pool), pool.num_reused, pool.num_unwatched, n, num_held, False)
        self.watch.is_leading = self.prefix.stride and ends_at(pool, &self.prefix, n)
        for i in range(n if self.watch.is_leading else 0):
            pool.pages[self.first_ids()[i]].group |= WATCHED

    cdef const int32_t *first_ids(self) noexcept:
        return (<PageIds>self.hits[0]).ids if self.hits else NULL

    cdef bint finds_hits(self, Pool *pool) noexcept:
        """Whether a look-up would find the hits, less those evicted from the end on since, and at most `watch.num_held` of them
        held. O(pages evicted). The pool is locked.
        """
        cdef Watch *watch = &self.watch
        if watch.num_reused != pool.num_reused:
            return False
        if not watch.is_leading:
            return watch.num_changes == count_changes(pool)
        while watch.num_unwatched != pool.num_unwatched and watch.num_pages:
            if is_hit(pool, &self.prefix, self.first_ids(), watch.num_pages - 1):
                break
            watch.num_pages -= 1
            watch.num_unwatched += 1
        if watch.num_unwatched != pool.num_unwatched or not ends_at(pool, &self.prefix, watch.num_pages):
            return False
        self.num_hit_tokens = watch.num_pages * self.page_size
        return True

    cdef bint finds_watched_hits(self) noexcept:
        """The same for those of a chain. It and the pool are locked."""
        self.prefix.digests = self.chain.digests
        return self.chain.num // self.prefix.stride >= self.prefix.max_num_pages and self.finds_hits(&self.store.pool)

    def has_same_hits(self) -> bool:
        """Whether a look-up would find the watched hits; those evicted from the end on go out of them. O(pages evicted)."""
        cdef bint is_same
        cdef PageIds ids
        if self.store is None:
            return False
        with self.chain.lock, self.store.lock:
            is_same = self.finds_watched_hits()
        if is_same and self.watch.num_pages < len(self.hits[0]):
            ids = PageIds.__new__(PageIds)
            ids.add(self.first_ids(), self.watch.num_pages)
            self.hits = (ids,)
        return is_same

    def is_short(self, num_new_pages, num_reserved=0) -> bool:
        """Whether it is certain that too few pages are free for the watched hits and `num_new_pages` behind them. O(1)."""
        cdef Py_ssize_t num_pages, num_new = size_of(num_new_pages, "num_new_pages")
        cdef Py_ssize_t reserved = size_of(num_reserved, "num_reserved_pages")
        cdef bint is_short
        if self.store is None:
            return False
        with self.chain.lock, self.store.lock:
            num_pages = num_new + len(self.hits[0]) - self.watch.num_held
            is_short = self.finds_watched_hits() and self.watch.num_pages == len(self.hits[0])
            is_short = is_short and not has_free_pages(&self.store.pool, num_pages, reserved, -1)
        return is_short


@cython.final
@cython.auto_pickle(False)
cdef class RequestHashes:
    """The digests of a request's full pages, computed on demand.

    ``chain`` has the keys of the prefix index. ``page_hashes`` has the hashes that users see, where they differ from the keys.
    ``query`` is the look-up that counts once the request is admitted: its tokens, the tokens that hit, and whether the request
    returns after a preemption, which ``is_counted`` implies. ``refusal`` describes the last refusal. ``is_short``: too few
    pages were free to load what the host tier has.
    """

    def __cinit__(self, request, HashChain chain not None, extra_keys=None):
        self.request, self.chain, self.extra_keys, self.page_hashes = request, chain, extra_keys, []

    def __reduce__(self):
        raise ArgumentTypeError("RequestHashes references the secret key of the hashes and cannot be pickled or copied")


cdef Tokens count_tokens(
    object num_tokens, object max_num_new_tokens, Py_ssize_t num_known, Py_ssize_t interval, Py_ssize_t num_external
) except *:
    """The tokens of a request that knows `num_known`. None for the others: all, and no limit."""
    cdef Tokens tokens = Tokens(num_known, num_known, num_known, interval, num_external)
    if num_tokens is not None:
        tokens.num_wanted = tokens.max_num_new = size_of(num_tokens, "num_tokens", 1, num_known)
    if max_num_new_tokens is not None:
        tokens.max_num_new = size_of(max_num_new_tokens, "max_num_new_tokens", 1)
    return tokens


cdef bint are_same(tuple mine, tuple others) except -1:
    """Whether the items of two tuples are the same objects, or equal strings or ints."""
    cdef Py_ssize_t i
    if len(mine) != len(others):
        return False
    for i in range(len(mine)):
        if mine[i] is not others[i]:
            if type(mine[i]) is not type(others[i]) or type(mine[i]) not in (str, int) or mine[i] != others[i]:
                return False
    return True


cdef const void *place_of(object source) noexcept:
    """Where tokens are, in a list or in `PageIds`."""
    return <const void *>source if type(source) is list else (<PageIds>source).ids


cdef bint has_sample(object source, const int32_t *tokens, Py_ssize_t n) except -1:
    """Whether a list, or `PageIds`, has `n` items, and some of them are the tokens there."""
    cdef const int32_t *ids = NULL if type(source) is list else (<PageIds>source).ids
    cdef Py_ssize_t i = n - 1, step = max(1, n // NUM_SAMPLED)
    cdef int overflow  # -1 then, which no token is
    if step > 16:
        step |= 17  # samples a power of two apart would share a set of the cache
    if n != (len(<list>source) if type(source) is list else (<PageIds>source).num):
        return False
    while i >= 0:
        if ids != NULL:
            if ids[i] != tokens[i]:
                return False
        elif type((<list>source)[i]) is not int or as_long_long((<list>source)[i], &overflow) != tokens[i]:
            return False
        i -= step
    return True


@cython.final
cdef class RowRefusal(Refusal):
    """A refused request for a row, which keeps its tokens, and how to recognise it."""

    @cython.critical_section  # for `source`, which it replaces
    cdef bint is_of(self, object token_ids, object options, const int32_t *tokens) except -1:
        """Whether a request is this one, which has `tokens`: O(1) for the list or memory that they came in, else O(tokens)."""
        cdef object source = token_ids
        cdef PageIds ids
        if self.options is None or type(options) is not tuple or not are_same(options, self.options):
            return False
        if type(token_ids) is not list:
            if not isinstance(token_ids, (ndarray, tuple)):  # others may change as they are read
                return False
            source = as_page_ids(token_ids, "token_ids")
        if not has_sample(source, tokens, self.num_tokens):
            return False
        if place_of(source) != place_of(self.source):
            ids = as_page_ids(source, "token_ids")
            if ids.num != self.num_tokens or memcmp(ids.ids, tokens, ids.num * sizeof(int32_t)) != 0:
                return False
            self.source = source
        return True
