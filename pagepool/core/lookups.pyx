"""Look-ups of prefixes. A group's page j is known by the digest of the last hash page in it: index (j + 1) * stride - 1."""

cimport cython

from pagepool.core.arguments cimport group_of, size_of
from pagepool.core.index cimport find, find_within, home_of
from pagepool.core.platform cimport fetch, go_on, let_others_run
from pagepool.core.records cimport NULL_PAGE
from pagepool.core.siphash cimport Digest

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

    def __cinit__(self, PageStore store not None, HashChain chain not None, start_id=0, stop_id=None, bint reaches_tier=False):
        self.store, self.chain = store, chain
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
