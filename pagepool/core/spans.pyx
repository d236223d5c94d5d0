"""Spans of tokens of a request or a running row. The cached pages in them are pinned, retained with a priority, and leased."""

cimport cython
from cpython.mem cimport PyMem_RawCalloc as calloc
from cpython.mem cimport PyMem_RawFree as free
from libc.math cimport ceil, isfinite
from libc.stdint cimport INT32_MAX, INT64_MAX, int32_t, int64_t, uint8_t

from pagepool.core.arguments cimport as_list, float_of, size_of
from pagepool.core.batch cimport digests_of, hash_row, holding_of
from pagepool.core.chain cimport HashChain
from pagepool.core.eviction cimport make_blank_part
from pagepool.core.groups cimport CacheGroups
from pagepool.core.holdings cimport Held, Holding
from pagepool.core.ids cimport PageIds, as_own_ids, new_ids
from pagepool.core.index cimport find, has_key
from pagepool.core.lookups cimport Query, fetch_hits, find_longest, query_of
from pagepool.core.pages cimport find_untouchable, share, touch_all
from pagepool.core.platform cimport monotonic_ns
from pagepool.core.queue cimport (
    begin_level_parts, end_retention, find_pinned, remove_deadline, set_deadline, set_level, take_pin_back,
)
from pagepool.core.records cimport (
    NORMAL, NO_GROUP, NULL_PAGE, NUM_LEVEL_PARTS, PROTECTED, Deadlines, Links, Page, Pool, Range, is_free, is_pinned,
)
from pagepool.core.request_pages cimport RequestPages
from pagepool.core.rules cimport MAX_TOKENS, Group, is_state
from pagepool.core.running cimport RunningRows
from pagepool.core.siphash cimport Digest
from pagepool.core.store cimport PageStore, new_shard_links, use_shard_links

from pagepool.errors import ArgumentError, ArgumentTypeError, PageIdError, PinBudgetError, shown


@cython.auto_pickle(False)
cdef class TokenSpan:
    """Pages of `store`: those of a request, or row, that lie wholly within its tokens ``[start, stop)``.

    A `stop` of None is the end of its tokens.
    """

    def __cinit__(self, PageStore store not None, start=0, stop=None):
        self.store = store
        self.start = size_of(start, "start", 0, INT64_MAX)
        self.stop = INT64_MAX if stop is None else size_of(stop, "stop", self.start, INT64_MAX)

    def __reduce__(self):
        raise ArgumentTypeError("a span of tokens cannot be pickled")

    cdef Range pages_of(self, const Group *group, Py_ssize_t num_pages, Py_ssize_t num_digests) noexcept:
        """The places of a group's pages: of `num_pages` those that have digests. Of a state those of its checkpoints."""
        cdef int64_t size = group.rules.entry_size
        cdef int64_t start = (min(self.start, <int64_t>MAX_TOKENS) + size - 1) // size
        cdef int64_t stop = min(min(self.stop, <int64_t>MAX_TOKENS) // size, num_digests // group.stride)
        if group.id == NO_GROUP:
            return Range(0, 0)
        return Range(<int32_t>start, <int32_t>(stop if is_state(&group.rules) else min(stop, num_pages)))

    cdef bint list_group(
        self, const Group *group, const int32_t *ids, Py_ssize_t n, const Digest *digests, Py_ssize_t num_digests, PageIds found
    ) noexcept:
        """List those of a group's `n` pages, or of a state's checkpoints, that are cached under their digests."""
        cdef Range places = self.pages_of(group, n, num_digests)
        cdef int32_t i, page_id
        cdef Digest key
        if not found.try_reserve(max(0, places.stop - places.start)):
            return False
        for i in range(places.start, places.stop):
            key = digests[(i + 1) * group.stride - 1]
            page_id = find(&self.store.pool, key, group.id) if is_state(&group.rules) else ids[i]
            if page_id != NULL_PAGE and has_key(&self.store.pool.pages[page_id], key, group.id):
                found.put(&page_id, 1)
        return True

    cdef bint list_holding(
        self, const Holding *holding, const Digest *digests, Py_ssize_t num_digests, PageIds found
    ) noexcept:
        """List the cached pages that a request or row holds. False where memory is short."""
        cdef const Held *held
        cdef Py_ssize_t g
        for g in range(holding.num_groups):
            held = &holding.held[g]
            if not self.list_group(&holding.groups[g], held.ids, held.num_pages, digests, num_digests, found):
                return False
        return True

    cdef bint list_request(
        self, CacheGroups groups, HashChain chain, RequestPages held, Py_ssize_t num_tokens, PageIds found, tuple hits
    ) noexcept:
        """List the cached pages that a request holds, or, if it is None, those that one of so many tokens would hit. False
        where memory is short. Chain and pool are locked.
        """
        cdef Pool *pool = &self.store.pool
        cdef Query query = query_of(groups, chain.digests, chain.num, chain.page_size, num_tokens, Range(0, pool.num_pages))
        cdef PageIds ids
        cdef Py_ssize_t g
        if held is not None:
            return self.list_holding(&held.holding, chain.digests, chain.num, found)
        if not fetch_hits(pool, &query, groups, find_longest(pool, &query), hits):
            return False
        for g in range(groups.num):
            ids = hits[g]
            if not self.list_group(&groups.groups[g], ids.ids, ids.num, chain.digests, chain.num, found):
                return False
        return True

    cdef bint list_row(self, RunningRows rows, Py_ssize_t row, PageIds found) noexcept:
        """List the cached pages of a row of a locked batch, none if it is not admitted. False where memory is short."""
        cdef Holding holding = holding_of(&rows.batch, row)
        if not rows.batch.states[row].is_admitted:
            return True
        return self.list_holding(&holding, digests_of(&rows.batch, row), rows.batch.states[row].num_hashed, found)

    cdef Py_ssize_t checked_row(self, RunningRows rows, object row) except -1:
        cdef Py_ssize_t checked = rows.checked_row(row)
        self.check_pool(rows.store)
        return checked

    cdef int check_pool(self, PageStore store) except -1:
        if store is not self.store:
            raise ArgumentError("rows or pages: got those of another pool")
        return 0

    cdef int check_admitted(self, Py_ssize_t row, bint is_admitted) except -1:
        if not is_admitted:
            raise ArgumentError(f"row {row} is not admitted")
        return 0


cdef enum PinOutcome:
    PINNED
    OVER_BUDGET
    UNPINNABLE                # a page cannot have a further reference, or pin
    SHORT_OF_MEMORY

cdef struct Verdict:           # on pages to pin
    PinOutcome outcome
    Py_ssize_t max_num_pinned  # pages of the pool
    Py_ssize_t num_pinned      # before
    int32_t bad                # a page that cannot be pinned


cdef int32_t find_unpinnable(Pool *pool, const int32_t *ids, Py_ssize_t n) noexcept nogil:
    """A page that cannot have a further reference, or that has some in the free queue; NULL_PAGE: there is none."""
    cdef Py_ssize_t i = find_untouchable(pool, ids, n, n)
    if i >= 0:
        return ids[i]
    for i in range(n if pool.num_held_free else 0):
        if is_free(pool, ids[i]) and pool.pages[ids[i]].ref_cnt:
            return ids[i]
    return NULL_PAGE


cdef Py_ssize_t unpin_group(Pool *pool, const Group *group, Range pages, const Digest *digests) noexcept nogil:
    """Take back a pin of each page that is pinned with the contents at these places, the last first. Returns of how many."""
    cdef Py_ssize_t n = 0
    cdef int32_t i, page_id
    for i in range(pages.stop - 1, pages.start - 1, -1):
        page_id = find_pinned(pool, find(pool, digests[(i + 1) * group.stride - 1], group.id))
        if page_id != NULL_PAGE:
            take_pin_back(pool, page_id)
            n += 1
    return n


cdef Py_ssize_t add_pins(int32_t *pins, PageIds found, PageIds fresh) noexcept:
    """Count a pin for each page that was found, and list those that had none. Returns before which page no more can be."""
    cdef Py_ssize_t i
    for i in range(found.num):
        if pins[found.ids[i]] == INT32_MAX:
            return i
        if pins[found.ids[i]] == 0:
            fresh.put(&found.ids[i], 1)
        pins[found.ids[i]] += 1
    return found.num


cdef void pin_found(PageStore store, PageIds found, PageIds fresh, Verdict *verdict) noexcept:
    """Pin all pages that were found, or none; `fresh` lists those without pins. The pool is locked."""
    cdef Pool *pool = &store.pool
    cdef Py_ssize_t i, num_done
    verdict.num_pinned = pool.num_pinned
    if found.num == 0:
        return
    if not store.make_pins() or not fresh.try_reserve(found.num):
        verdict.outcome = SHORT_OF_MEMORY
        return
    num_done = add_pins(pool.pins, found, fresh)
    if num_done < found.num:
        verdict.outcome, verdict.bad = UNPINNABLE, found.ids[num_done]
    elif fresh.num and pool.num_pinned + fresh.num > verdict.max_num_pinned:
        verdict.outcome = OVER_BUDGET
    else:
        verdict.bad = find_unpinnable(pool, fresh.ids, fresh.num)
        verdict.outcome = UNPINNABLE if verdict.bad != NULL_PAGE else PINNED
    if verdict.outcome == PINNED:
        touch_all(pool, fresh.ids, fresh.num)
        pool.num_pinned += <int32_t>fresh.num
    for i in range(num_done if verdict.outcome != PINNED else 0):
        pool.pins[found.ids[i]] -= 1


@cython.final
@cython.auto_pickle(False)
cdef class PinSpan(TokenSpan):
    """A span of tokens whose pages are pinned or unpinned."""

    def pin(
        self, CacheGroups groups not None, HashChain chain not None, RequestPages held, num_tokens, max_num_pinned
    ) -> int:
        """Pin the cached pages that a request of `num_tokens` tokens holds, or, if `held` is None, hits. Returns how many.

        PinBudgetError, and nothing changed, if more than `max_num_pinned` pages of the pool would be pinned. O(pages).
        """
        cdef Verdict verdict = Verdict(PINNED, size_of(max_num_pinned, "max_num_pinned"), 0, NULL_PAGE)
        cdef Py_ssize_t num = size_of(num_tokens, "num_tokens", 0, INT64_MAX)
        cdef PageIds found = PageIds.__new__(PageIds), fresh = PageIds.__new__(PageIds)
        cdef tuple hits = new_ids(groups.num)
        self.check_pool(self.store if held is None else held.store)
        with chain.lock, self.store.lock:
            if self.list_request(groups, chain, held, num, found, hits):
                pin_found(self.store, found, fresh, &verdict)
            else:
                verdict.outcome = SHORT_OF_MEMORY
        return self.finish(&verdict, found.num, fresh.num)

    def pin_row(self, RunningRows rows not None, row, max_num_pinned) -> int:
        """Pin the cached pages of an admitted row. Returns how many. Errors as in `pin`. O(pages)."""
        cdef Verdict verdict = Verdict(PINNED, size_of(max_num_pinned, "max_num_pinned"), 0, NULL_PAGE)
        cdef PageIds found = PageIds.__new__(PageIds), fresh = PageIds.__new__(PageIds)
        cdef Py_ssize_t checked = self.checked_row(rows, row)
        cdef bint is_admitted
        rows.enter_call()
        is_admitted = rows.batch.states[checked].is_admitted
        if self.list_row(rows, checked, found):
            pin_found(self.store, found, fresh, &verdict)
        else:
            verdict.outcome = SHORT_OF_MEMORY
        rows.let_go()
        self.check_admitted(checked, is_admitted)
        return self.finish(&verdict, found.num, fresh.num)

    cdef object finish(self, const Verdict *verdict, Py_ssize_t num_found, Py_ssize_t num_fresh):
        """Return how many pages were pinned, or raise why none was."""
        if verdict.outcome == OVER_BUDGET:
            raise PinBudgetError(
                f"pages to pin: got {num_fresh} more, {verdict.num_pinned} are pinned, allowed: {verdict.max_num_pinned} in all"
            )
        if verdict.outcome == SHORT_OF_MEMORY:
            raise MemoryError(f"pins of {self.store.pool.num_pages} pages")
        if verdict.outcome == UNPINNABLE:
            self.refuse_page(verdict.bad)
        return num_found

    cdef int refuse_page(self, int32_t page_id) except -1:
        if is_pinned(&self.store.pool, page_id):
            raise PageIdError(f"page {page_id} cannot be pinned: it has {INT32_MAX} pins, which is as many as there can be")
        if is_free(&self.store.pool, page_id):
            self.store.check_untaken(page_id)
        self.store.refuse_touch(page_id)
        return 0

    def unpin(self, CacheGroups groups not None, HashChain chain not None) -> int:
        """Take back a pin of each page that is pinned with a content of the chain: group by group, the last page first.
        Returns of how many pages. O(pages).
        """
        cdef const Group *group
        cdef Py_ssize_t g, n = 0
        with chain.lock, self.store.lock:
            for g in range(groups.num if self.store.pool.num_pinned else 0):
                group = &groups.groups[g]
                n += unpin_group(&self.store.pool, group, self.pages_of(group, MAX_TOKENS, chain.num), chain.digests)
        return n

    def unpin_row(self, RunningRows rows not None, row) -> int:
        """The same with the contents of an admitted row. O(pages), and tokens that are not hashed yet."""
        cdef const Group *group
        cdef Range pages
        cdef Py_ssize_t g, n = 0, checked = self.checked_row(rows, row)
        cdef bint is_admitted
        rows.enter_call()
        is_admitted = rows.batch.states[checked].is_admitted
        if is_admitted and rows.batch.hash_page_size:
            hash_row(&rows.batch, checked, rows.batch.states[checked].num_tokens)
        for g in range(rows.batch.num_groups if is_admitted and self.store.pool.num_pinned else 0):
            group = &rows.batch.groups[g]
            pages = self.pages_of(group, MAX_TOKENS, rows.batch.states[checked].num_hashed)
            n += unpin_group(&self.store.pool, group, pages, digests_of(&rows.batch, checked))
        rows.let_go()
        self.check_admitted(checked, is_admitted)
        return n


cdef Py_ssize_t find_unleasable(Pool *pool, const int32_t *ids, Py_ssize_t n) noexcept nogil:
    """Index of the null page, of a free page without an entry, or with a reference, or of one that cannot have a further one;
    -1: there is none.
    """
    cdef const Page *page
    cdef Py_ssize_t i
    for i in range(n):
        page = &pool.pages[ids[i]]
        if ids[i] == NULL_PAGE or is_free(pool, ids[i]) and (page.group == NO_GROUP or page.ref_cnt):
            return i
    return find_untouchable(pool, ids, n, n)


@cython.final
@cython.auto_pickle(False)
cdef class Lease:
    """References to pages, which are not handed out until `release`, whoever frees them: see `CacheManager.lease`.

    ``with`` releases it at the end. ``page_ids`` are those of the call; ``len()`` counts them. `is_held` is False once it was
    released.
    """

    cdef PageStore store
    cdef PageIds ids
    cdef dict leases                # those that are held, as keys, the oldest first
    cdef readonly bint is_held

    def __cinit__(self):
        self.ids = PageIds.__new__(PageIds)

    def __init__(self):
        raise TypeError("a Lease is what CacheManager.lease returns")

    def __reduce__(self):
        raise ArgumentTypeError("a lease cannot be pickled")

    cdef void take(self) noexcept:
        """Take a reference to each page. A page that is held is not used by that, so no policy is told."""
        cdef Pool *pool = &self.store.pool
        cdef Py_ssize_t i
        pool.is_restored &= self.ids.num == 0
        for i in range(self.ids.num):
            if is_free(pool, self.ids.ids[i]):
                touch_all(pool, &self.ids.ids[i], 1)
            else:
                share(pool, self.ids.ids[i])
            self.store.leases[self.ids.ids[i]] += 1

    cdef int refuse(self, Py_ssize_t bad) except -1:
        """Raise what is wrong with the page at an index, or that memory is short."""
        cdef int32_t page_id
        if bad < 0:
            raise MemoryError(f"leases of {self.store.pool.num_pages} pages")
        page_id = self.ids.ids[bad]
        if page_id == NULL_PAGE:
            raise PageIdError(f"page_ids: got the null page (at {bad}), allowed: others")
        if not self.store.is_free(page_id):
            self.store.refuse_touch(page_id)
        self.store.check_untaken(page_id if self.store.record(page_id).ref_cnt else NULL_PAGE)
        raise PageIdError(f"page_ids: got {page_id} (at {bad}), which is free and not cached, allowed: held or cached pages")

    @property
    def page_ids(self) -> list:
        return self.ids.to_list()

    def __len__(self):
        return self.ids.num

    def __repr__(self):
        return f"Lease(page_ids={self.page_ids}, is_held={self.is_held})"

    def release(self) -> None:
        """Give the references back, of the last page first; a second call does nothing. DoubleFreeError, and nothing changed,
        if somebody else gave one of them back. O(pages).
        """
        cdef Py_ssize_t bad
        if not self.is_held:
            return
        with self.store.lock:
            bad = self.give_back()
        if bad >= 0:
            self.store.refuse_give_back(self.ids, bad)
        self.leases.pop(self, None)

    cdef Py_ssize_t give_back(self) noexcept:
        """Give the references back, unless another thread has. Returns the index of a page that has none, or -1."""
        cdef Py_ssize_t i, bad = -1
        if self.is_held:
            bad = self.store.give_back_ids(self.ids.ids, self.ids.num, True)
        for i in range(self.ids.num if self.is_held and bad < 0 else 0):
            self.store.leases[self.ids.ids[i]] -= 1
        self.is_held = self.is_held and bad >= 0
        return bad

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.release()


def lease_pages(PageStore store not None, page_ids, dict leases not None) -> Lease:
    """Lease pages, which are held, or free and cached: see `CacheManager.lease`. The lease is in `leases` before it holds any,
    so that no interrupt can lose it. O(pages); the first call O(num_pages).
    """
    cdef Lease lease = Lease.__new__(Lease)
    cdef Py_ssize_t bad
    lease.ids = store.checked(as_own_ids(page_ids, "page_ids"))
    lease.store, lease.leases = store, leases
    leases[lease] = None
    with store.lock:
        bad = find_unleasable(&store.pool, lease.ids.ids, lease.ids.num)
        lease.is_held = bad < 0 and store.make_leases()
        if lease.is_held:
            lease.take()
    if not lease.is_held:
        del leases[lease]
        lease.refuse(bad)
    return lease


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
    if levels == NULL or (links == NULL and pool.num_shards) or not (pool.num_parts or make_blank_part(pool)):
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
        self, CacheGroups groups not None, HashChain chain not None, RequestPages held, num_tokens,
        Retention retention not None,
    ) -> int:
        """Retain the cached pages that a request of `num_tokens` tokens holds, or, if `held` is None, hits. Returns how many.
        ArgumentError if there is none, unless none of its tokens lies in the span. O(pages).
        """
        cdef Py_ssize_t num = size_of(num_tokens, "num_tokens", 0, INT64_MAX)
        cdef PageIds found = PageIds.__new__(PageIds)
        cdef tuple hits = new_ids(groups.num)
        cdef bint has_room
        self.check_pool(self.store if held is None else held.store)
        with chain.lock, self.store.lock:
            has_room = self.list_request(groups, chain, held, num, found, hits)
            has_room = has_room and retain_found(self.store, found, retention)
        self.check_room(has_room)
        return self.require_cached(found.num, num)

    def retain_row(self, RunningRows rows not None, row, Retention retention not None) -> int:
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

    cdef Py_ssize_t require_cached(self, Py_ssize_t num_pages, int64_t num_tokens) except -1:
        """`num_pages`; ArgumentError if that is 0, unless none of `num_tokens` tokens lies in the span."""
        cdef int64_t stop = min(self.stop, num_tokens)
        if num_pages == 0 and self.start < stop:
            raise ArgumentError(f"tokens {self.start} to {stop}: got no cached page, allowed: at least one")
        return num_pages
