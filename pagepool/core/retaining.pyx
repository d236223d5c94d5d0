"""Cached pages retained with a priority, and protected: the part of the free queue that they are evicted from."""

cimport cython
from cpython.mem cimport PyMem_RawCalloc as calloc
from cpython.mem cimport PyMem_RawFree as free
from libc.math cimport ceil, isfinite
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint8_t

from pagepool.core.arguments cimport as_list, float_of, size_of
from pagepool.core.chain cimport HashChain
from pagepool.core.eviction cimport make_lru
from pagepool.core.ids cimport PageIds
from pagepool.core.levels cimport end_retention, remove_deadline, set_deadline, set_level
from pagepool.core.page_records cimport new_shard_links, use_shard_links
from pagepool.core.platform cimport monotonic_ns
from pagepool.core.queue cimport begin_level_parts
from pagepool.core.records cimport (
    NORMAL, NO_GROUP, NULL_PAGE, NUM_LEVEL_PARTS, PROTECTED, Deadlines, Links, Pool,
)
from pagepool.core.request_pages cimport CacheGroups
from pagepool.core.row_memory cimport RowMemory
from pagepool.core.spans cimport TokenSpan
from pagepool.core.store cimport PageStore

from pagepool.errors import ArgumentError, ArgumentTypeError, shown

cdef enum:
    MAX_PRIORITY = 2 * NORMAL

cdef double MAX_NS = 2.0 ** 61


cdef bint begin_levels(PageStore store) noexcept:
    """Divide the queue of a locked pool by levels, unless it is; False, and nothing changed, where memory is short."""
    cdef Pool *pool = &store.pool
    cdef Pool divided = pool[0]
    cdef Links *links = NULL
    cdef uint8_t *levels
    if pool.levels != NULL:
        return True
    divided.num_parts = max(1, pool.num_parts) + NUM_LEVEL_PARTS
    levels = <uint8_t *>calloc(pool.num_pages, 1)
    if pool.num_shards:
        links = new_shard_links(&divided, pool.num_shards)
    if levels == NULL or (links == NULL and pool.num_shards) or not (pool.num_parts or make_lru(pool)):
        free(levels)
        free(links)
        return False
    begin_level_parts(pool)
    pool.levels = levels
    if pool.num_shards:
        use_shard_links(pool, links, pool.num_shards)
    return True


cdef bint make_deadlines(Pool *pool) noexcept:
    """Make room for deadlines, unless there is; False where memory is short."""
    cdef Deadlines *deadlines = &pool.deadlines
    if deadlines.times == NULL:
        deadlines.times = <int64_t *>calloc(pool.num_pages, sizeof(int64_t) + 2 * sizeof(int32_t))
        deadlines.heap = <int32_t *>(deadlines.times + pool.num_pages)
        deadlines.places = deadlines.heap + pool.num_pages
    return deadlines.times != NULL


cdef bint retain_found(PageStore store, PageIds found, Retention retention) noexcept:
    """Retain cached pages of a locked pool, the last first: its time is up first, too. False, and nothing changed, where memory
    is short.
    """
    cdef Pool *pool = &store.pool
    cdef int64_t end
    cdef int32_t page_id
    cdef Py_ssize_t i
    if found.num == 0 or (pool.levels == NULL and retention.level == 0):
        return True
    if not begin_levels(store) or not (retention.duration == 0 or make_deadlines(pool)):
        return False
    end_retention(pool)
    end = monotonic_ns() + retention.duration
    for i in range(found.num):
        page_id = found.ids[found.num - 1 - i]
        set_level(pool, page_id, pool.levels[page_id] & PROTECTED | retention.level)
        if retention.duration and retention.level:
            set_deadline(&pool.deadlines, page_id, end + i)
        else:
            remove_deadline(&pool.deadlines, page_id)
    return True


cdef Py_ssize_t keep_cached(const Pool *pool, int32_t *ids, Py_ssize_t n, uint8_t *is_listed) noexcept nogil:
    """Keep those ids that are of cached pages, each once, and mark them. Returns how many."""
    cdef Py_ssize_t i, count = 0
    for i in range(n):
        if ids[i] != NULL_PAGE and pool.pages[ids[i]].group != NO_GROUP and not is_listed[ids[i]]:
            is_listed[ids[i]] = True
            ids[count] = ids[i]
            count += 1
    return count


cdef bint replace_protected(PageStore store, PageIds listed, uint8_t *is_listed) noexcept:
    """Protect the cached pages among those that are listed, and no others, the last first. The pool is locked. False, and
    nothing changed, where memory is short.
    """
    cdef Pool *pool = &store.pool
    cdef PageIds old = store.protected_ids
    cdef Py_ssize_t i
    cdef int32_t page_id
    listed.num = keep_cached(pool, listed.ids, listed.num, is_listed)
    if listed.num and not begin_levels(store):
        return False
    for i in range(old.num - 1 if old is not None else -1, -1, -1):
        page_id = old.ids[i]
        if not is_listed[page_id]:
            set_level(pool, page_id, pool.levels[page_id] & ~PROTECTED)
    for i in range(listed.num - 1, -1, -1):
        page_id = listed.ids[i]
        set_level(pool, page_id, pool.levels[page_id] | PROTECTED)
    store.protected_ids = listed
    return True


def protect_pages(PageStore store not None, lists) -> int:
    """Protect the cached pages in lists of ids, as `PageIds`, in place of those that were protected before. Returns how many.
    The last page is evicted first. O(pages).
    """
    cdef PageIds listed = PageIds.__new__(PageIds), ids
    cdef uint8_t *is_listed
    cdef bint has_room = False
    for item in as_list(lists, "lists"):
        if not isinstance(item, PageIds):
            raise ArgumentTypeError(f"lists: got {type(item).__name__}, allowed: PageIds")
        ids = store.checked(item)
        listed.add(ids.ids, ids.num)
    with store.lock:
        is_listed = <uint8_t *>calloc(store.pool.num_pages, 1)
        if is_listed != NULL:
            has_room = replace_protected(store, listed, is_listed)
        free(is_listed)
    if not has_room:
        raise MemoryError(f"levels of {store.pool.num_pages} pages")
    return listed.num


@cython.final
@cython.auto_pickle(False)
cdef class Retention:
    """With which `priority` pages are retained, from 0 to 100, and for how many `seconds`; None: for good."""

    cdef uint8_t level                  # 0 for the normal priority
    cdef int64_t duration               # ns; 0: for good

    def __cinit__(self, priority, seconds=None):
        cdef Py_ssize_t checked
        cdef double value
        if isinstance(priority, bool):
            raise ArgumentTypeError("priority: got bool, allowed: an int from 0 to 100")
        checked = size_of(priority, "priority", 0, MAX_PRIORITY)
        self.level = <uint8_t>(checked + 1) if checked != NORMAL else 0
        if seconds is not None:
            value = float_of(seconds, "seconds")
            if not (isfinite(value) and value > 0):
                raise ArgumentError(f"seconds: got {shown(seconds)}, allowed: finite and above 0, or None")
            self.duration = <int64_t>ceil(min(value * 1e9, MAX_NS)) or 1

    def __reduce__(self):
        raise ArgumentTypeError("a retention cannot be pickled")


@cython.final
@cython.auto_pickle(False)
cdef class RetentionSpan(TokenSpan):
    """A span of tokens whose pages are retained."""

    def retain(
        self, CacheGroups groups not None, HashChain chain not None, ids, Retention retention not None, bint are_hits
    ) -> int | None:
        """Retain those of the pages `ids` of each group that are cached under the digests of the chain. Returns how many.

        For hits None, and nothing changes, if one of them is not cached as such any more. O(pages).
        """
        cdef PageIds found = PageIds.__new__(PageIds)
        cdef tuple checked = self.checked_pages(groups, chain, ids, found)
        cdef bint is_stale, has_room = True
        with chain.lock, self.store.lock:
            is_stale = self.list_pages(groups, chain, checked, found) and are_hits
            if not is_stale:
                has_room = retain_found(self.store, found, retention)
        self.check_room(has_room)
        return None if is_stale else found.num

    def retain_row(self, RowMemory rows not None, row, Retention retention not None) -> int:
        """Retain the cached pages of an admitted row. Returns how many. Errors as in `require_cached`. O(pages)."""
        cdef PageIds found = PageIds.__new__(PageIds)
        cdef Py_ssize_t num_tokens, checked = self.checked_row(rows, row)
        cdef bint is_admitted, has_room
        rows.enter_call()
        is_admitted, num_tokens = rows.batch.states[checked].is_admitted, rows.batch.states[checked].num_tokens
        has_room = self.list_row(rows, checked, found) and retain_found(self.store, found, retention)
        rows.let_go()
        self.check_admitted(checked, is_admitted)
        self.check_room(has_room)
        return self.require_cached(found.num, num_tokens)

    cdef int check_room(self, bint has_room) except -1:
        if not has_room:
            raise MemoryError(f"levels of {self.store.pool.num_pages} pages")
        return 0

    def require_cached(self, num_pages, num_tokens) -> int:
        """`num_pages`; ArgumentError if that is 0, unless none of `num_tokens` tokens lies in the span."""
        cdef Py_ssize_t count = size_of(num_pages, "num_pages")
        cdef int64_t stop = min(self.stop, <int64_t>size_of(num_tokens, "num_tokens", 0, INT64_MAX))
        if count == 0 and self.start < stop:
            raise ArgumentError(f"tokens {self.start} to {stop}: got no cached page, allowed: at least one")
        return count
