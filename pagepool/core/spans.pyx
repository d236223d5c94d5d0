"""Leases, protection, and spans of tokens of a request or running row, in which cached pages are pinned and retained."""

cimport cython
from cpython.mem cimport PyMem_RawCalloc as calloc
from cpython.mem cimport PyMem_RawFree as free
from libc.math cimport ceil, isfinite
from libc.stdint cimport INT32_MAX, INT64_MAX, int32_t, int64_t, uint8_t

from pagepool.core.arguments cimport as_list, float_of, size_of
from pagepool.core.batch cimport digests_of, hash_row, held_by, holding_of
from pagepool.core.boundaries cimport NUM_BOUNDARIES, Boundaries
from pagepool.core.chain cimport HashChain
from pagepool.core.groups cimport CacheGroups
from pagepool.core.holdings cimport Held, Holding, keep_window
from pagepool.core.ids cimport PageIds, as_own_ids, new_ids
from pagepool.core.index cimport find, has_key
from pagepool.core.lookups cimport Query, count_junction_tokens, fetch_hits, find_longest, query_of
from pagepool.core.pages cimport find_untouchable, share, touch_all
from pagepool.core.platform cimport monotonic_ns
from pagepool.core.queue cimport (
    begin_blank_part, begin_level_parts, end_retention, find_pinned, remove_deadline, set_deadline, set_level, take_pin_back,
)
from pagepool.core.records cimport (
    NORMAL, NO_GROUP, NULL_PAGE, NUM_LEVEL_PARTS, PROTECTED, Deadlines, Links, Page, Pool, Range, is_free, is_pinned,
)
from pagepool.core.request_pages cimport RequestPages
from pagepool.core.rules cimport MAX_TOKENS, Group, first_hit_page, has_window, is_state, last_hash
from pagepool.core.running cimport RunningRows
from pagepool.core.siphash cimport Digest
from pagepool.core.store cimport PageStore, new_shard_links, use_shard_links

from pagepool.errors import ArgumentError, ArgumentTypeError, PageIdError, PinBudgetError, shown


cdef Py_ssize_t find_unholdable(Pool *pool, const int32_t *ids, Py_ssize_t n) noexcept nogil:
    """Return the index of the null page, of a free page without an entry or with a reference, or of a page that cannot have a
    further one; -1: there is none.
    """
    cdef const Page *page
    cdef Py_ssize_t i
    for i in range(n):
        page = &pool.pages[ids[i]]
        if ids[i] == NULL_PAGE or is_free(pool, ids[i]) and (page.group == NO_GROUP or page.ref_cnt):
            return i
    return find_untouchable(pool, ids, n, n)


cdef enum PinOutcome:
    PINNED
    OVER_BUDGET
    UNPINNABLE                # a page cannot have a further reference, or pin
    SHORT_OF_MEMORY


cdef PinOutcome pin_found(
    PageStore store, PageIds found, PageIds fresh, Py_ssize_t max_num_pinned, int32_t *unpinnable
) noexcept:
    """Pin all pages that were found, or none; `fresh` lists those without pins. The pool is locked."""
    cdef Pool *pool = &store.pool
    cdef PinOutcome outcome = PINNED
    cdef Py_ssize_t i, bad, num_done = 0
    if found.num == 0:
        return PINNED
    if not store.make_pins() or not fresh.try_reserve(found.num):
        return SHORT_OF_MEMORY
    while num_done < found.num and pool.pins[found.ids[num_done]] < INT32_MAX:
        if pool.pins[found.ids[num_done]] == 0:
            fresh.put(&found.ids[num_done], 1)
        pool.pins[found.ids[num_done]] += 1
        num_done += 1
    bad = find_unholdable(pool, fresh.ids, fresh.num)
    if num_done < found.num:
        unpinnable[0] = found.ids[num_done]
    elif bad >= 0:
        unpinnable[0] = fresh.ids[bad]
    if num_done == found.num and fresh.num and pool.num_pinned + fresh.num > max_num_pinned:
        outcome = OVER_BUDGET
    elif unpinnable[0] != NULL_PAGE:
        outcome = UNPINNABLE
    else:
        touch_all(pool, fresh.ids, fresh.num)
        pool.num_pinned += <int32_t>fresh.num
    for i in range(num_done if outcome != PINNED else 0):
        pool.pins[found.ids[i]] -= 1
    return outcome


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
        cdef Py_ssize_t i, bad = -1
        if not self.is_held:
            return
        with self.store.lock:
            if self.is_held:  # no other thread was faster
                bad = self.store.give_back_ids(self.ids.ids, self.ids.num, True)
                self.is_held = bad >= 0
                for i in range(self.ids.num if bad < 0 else 0):
                    self.store.leases[self.ids.ids[i]] -= 1
        if bad >= 0:
            self.store.refuse_give_back(self.ids, bad)
        self.leases.pop(self, None)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.release()


def lease_pages(PageStore store not None, page_ids, dict leases not None) -> Lease:
    """Lease pages, which are held, or free and cached: see `CacheManager.lease`. The lease is in `leases` before it holds any,
    so that no interrupt can lose it. O(pages); the first call O(num_pages).
    """
    cdef Lease lease = Lease.__new__(Lease)
    cdef Pool *pool = &store.pool
    cdef Py_ssize_t i, bad
    cdef int32_t page_id
    lease.ids = store.checked(as_own_ids(page_ids, "page_ids"))
    lease.store, lease.leases = store, leases
    leases[lease] = None
    with store.lock:
        bad = find_unholdable(pool, lease.ids.ids, lease.ids.num)
        lease.is_held = bad < 0 and store.make_leases()
        pool.is_restored &= not lease.is_held or lease.ids.num == 0
        for i in range(lease.ids.num if lease.is_held else 0):
            page_id = lease.ids.ids[i]
            if is_free(pool, page_id):
                touch_all(pool, &page_id, 1)
            else:
                share(pool, page_id)  # no policy is told: a lease does not use a page that is held
            store.leases[page_id] += 1
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
    if levels == NULL or (links == NULL and pool.num_shards) or not (pool.num_parts or begin_blank_part(pool)):
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


cdef bint replace_protected(PageStore store, PageIds listed, uint8_t *is_listed) noexcept:
    """Protect the cached pages among those that are listed, and no others, the last first. The pool is locked. False, and
    nothing changed, where memory is short.
    """
    cdef Pool *pool = &store.pool
    cdef PageIds old = store.protected_ids
    cdef Py_ssize_t i, n = listed.num
    cdef int32_t page_id
    listed.num = 0
    for i in range(n):
        page_id = listed.ids[i]
        if page_id != NULL_PAGE and pool.pages[page_id].group != NO_GROUP and not is_listed[page_id]:
            is_listed[page_id] = True
            listed.put(&page_id, 1)
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
    """The `priority` with which pages are retained, from 0 to 100, for a number of `seconds`; None: for good."""

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
cdef class TokenSpan:
    """Tokens ``[start, stop)`` of a request or an admitted row, which `of_request` and `of_row` name; a `stop` of None is the
    end of its tokens. The cached pages that lie wholly within them are pinned, unpinned or retained. If pages of windows stay
    only at boundaries, a `stop` is one for what is pinned or retained: the window before it must not be gone.
    """

    cdef readonly int64_t start
    cdef readonly int64_t stop
    cdef PageStore store            # None: the span is of no request and no row yet
    cdef CacheGroups groups
    cdef int64_t num_tokens         # of a request; of a row while it is locked
    cdef HashChain chain            # of a request; None: it is of a row
    cdef RequestPages held          # None: the request holds no pages
    cdef RunningRows rows
    cdef Py_ssize_t row
    cdef const Digest *digests      # of the request or row, while it is locked, as are the next
    cdef int32_t end                # tokens behind which a request is to resume; 0: anywhere
    cdef bint is_short              # whether groups of full attention hit as far as the end, and all groups do not
    cdef bint is_gone               # whether a group lacks a page of the window before the end

    def __cinit__(self, start=0, stop=None):
        self.start = size_of(start, "start", 0, INT64_MAX)
        self.stop = INT64_MAX if stop is None else size_of(stop, "stop", self.start, INT64_MAX)

    def __reduce__(self):
        raise ArgumentTypeError("a span of tokens cannot be pickled")

    def of_request(
        self, PageStore store not None, CacheGroups groups not None, HashChain chain not None, num_tokens,
        RequestPages held=None,
    ) -> TokenSpan:
        """Return the same span of a request of `num_tokens` tokens, hashed by `chain`. Its pages are those in `held`, or, if it
        is None, those that the request would hit.
        """
        cdef TokenSpan span = TokenSpan.__new__(TokenSpan, self.start, self.stop)
        if held is not None and (held.store is not store or held.groups is not groups):
            raise ArgumentError("held: got pages of another pool or other groups")
        span.store, span.groups, span.chain, span.held = store, groups, chain, held
        span.num_tokens = size_of(num_tokens, "num_tokens", 0, INT64_MAX)
        return span

    def of_row(self, RunningRows rows not None, row) -> TokenSpan:
        """Return the same span of a row."""
        cdef TokenSpan span = TokenSpan.__new__(TokenSpan, self.start, self.stop)
        span.row = rows.checked_row(row)
        span.rows, span.store, span.groups = rows, rows.store, rows.groups
        return span

    cdef tuple lock(self):
        """Take the locks of the request or row, and return room for hits. ArgumentError for a row that is not admitted."""
        cdef tuple hits
        if self.store is None:
            raise ArgumentError("the span is of no request and no row: call of_request or of_row")
        hits = new_ids(self.groups.num)
        if self.chain is not None:
            self.chain.lock.acquire()
            self.store.lock.acquire()
            self.digests = self.chain.digests
            return hits
        self.rows.enter_call()
        if not self.rows.batch.records[self.row].is_admitted:
            self.rows.let_go()
            raise ArgumentError(f"row {self.row} is not admitted")
        self.num_tokens, self.digests = self.rows.batch.records[self.row].num_tokens, digests_of(&self.rows.batch, self.row)
        return hits

    cdef void unlock(self) noexcept:
        if self.chain is None:
            self.rows.let_go()
        else:
            self.store.lock.release()
            self.chain.lock.release()

    cdef Range places_in(self, const Group *group, Py_ssize_t num_pages) noexcept:
        """The places of those of a group's `num_pages` pages that have digests, or of a state's checkpoints."""
        cdef Py_ssize_t num_digests = self.rows.batch.records[self.row].num_hashed if self.chain is None else self.chain.num
        cdef int64_t size = group.rules.entry_size
        cdef int64_t start = (min(self.start, <int64_t>MAX_TOKENS) + size - 1) // size
        cdef int64_t stop = min(min(self.stop, <int64_t>MAX_TOKENS) // size, num_digests // group.stride)
        if group.id == NO_GROUP:
            return Range(0, 0)
        return Range(<int32_t>start, <int32_t>(stop if is_state(&group.rules) else min(stop, num_pages)))

    cdef int32_t find_end(self) noexcept:
        """Return the number of tokens at which a request is to resume behind the span; 0: anywhere."""
        cdef const Boundaries *rule = &self.groups.boundaries
        cdef int64_t end = min(self.stop, min(self.num_tokens, <int64_t>MAX_TOKENS))
        if not rule.multiple or self.stop == INT64_MAX:
            return 0
        return <int32_t>max(0, end - end % rule.multiple - rule.use_eagle * rule.multiple)  # eagle drops a page

    cdef bint list_group(self, const Group *group, const int32_t *ids, Py_ssize_t n, PageIds found) noexcept:
        """List those of a group's `n` pages, or of a state's checkpoints, that are cached under their digests. A page of the
        window before the end may have left a holder's window, and is another one with its content then.
        """
        cdef Range places = self.places_in(group, n)
        cdef int32_t i, page_id, start = MAX_TOKENS, stop = self.end // group.rules.page_size
        cdef bint is_sought
        cdef Digest key
        if not found.try_reserve(max(0, places.stop - places.start)):
            return False
        if has_window(&group.rules):
            start = first_hit_page(&group.rules, self.end, self.groups.boundaries.use_eagle)
        for i in range(places.start, places.stop):
            key = self.digests[last_hash(group, i)]
            is_sought = start <= i < stop and ids[i] == NULL_PAGE
            page_id = find(&self.store.pool, key, group.id) if is_state(&group.rules) or is_sought else ids[i]
            if page_id != NULL_PAGE and has_key(&self.store.pool.pages[page_id], key, group.id):
                found.put(&page_id, 1)
            elif is_sought:
                self.is_gone = True
        for i in range(max(start, max(places.start, <int32_t>n)), stop if self.is_short else 0):
            self.is_gone |= find(&self.store.pool, self.digests[last_hash(group, i)], group.id) == NULL_PAGE
        return True

    cdef void keep_end(self) noexcept:
        """Let what holds the pages keep the window before the end when that is left."""
        cdef Holding holding
        if self.chain is not None and self.held is None:
            return
        holding = self.held.holding if self.chain is not None else holding_of(&self.rows.batch, self.row)
        if holding.boundaries != NULL and self.end and holding.boundaries.num < NUM_BOUNDARIES - 1:
            keep_window(&holding, self.end)

    cdef int refuse_end(self) except -1:
        raise ArgumentError(
            f"stop: got {self.stop}, where the window of token {self.end} is no longer cached, allowed: where requests can "
            f"resume, as with resume_at=[{self.end}] at admission, or as long as the request or row has the window"
        )

    cdef bint list_cached(self, PageIds found, tuple hits) noexcept:
        """List the cached pages that the request or row holds, or those that it would hit. False where memory is short. The
        locks are held.
        """
        cdef Pool *pool = &self.store.pool
        cdef Group *groups = self.groups.groups
        cdef const Held *held = NULL
        cdef Query query
        cdef PageIds ids
        cdef Py_ssize_t g, num_hashes
        self.end, self.is_short, self.is_gone = self.find_end(), False, False
        if self.chain is None:
            held = held_by(&self.rows.batch, self.row, 0)
        elif self.held is not None:
            held = self.held.holding.held
        else:
            query = query_of(
                self.groups, self.digests, self.chain.num, self.chain.page_size, self.num_tokens,
                Range(0, pool.num_pages),
            )
            num_hashes = find_longest(pool, &query)
            self.is_short = num_hashes * query.hash_size < self.end <= count_junction_tokens(&query, num_hashes)
            if fetch_hits(pool, &query, num_hashes, hits) < 0:
                return False
        for g in range(self.groups.num):
            ids = hits[g]
            if not self.list_group(
                &groups[g], held[g].ids if held else ids.ids, held[g].num_pages if held else ids.num, found
            ):
                return False
        return True

    def pin(self, max_num_pinned) -> int:
        """Pin the cached pages. Returns how many. PinBudgetError, and nothing changed, if more than `max_num_pinned` pages of
        the pool would be pinned; ArgumentError if the window before the end is gone. O(pages).
        """
        cdef Py_ssize_t most = size_of(max_num_pinned, "max_num_pinned")
        cdef PageIds found = PageIds.__new__(PageIds), fresh = PageIds.__new__(PageIds)
        cdef PinOutcome outcome = SHORT_OF_MEMORY
        cdef int32_t num_pinned, unpinnable = NULL_PAGE
        cdef tuple hits = self.lock()
        cdef bint has_room = self.list_cached(found, hits)
        if has_room and not self.is_gone:
            outcome = pin_found(self.store, found, fresh, most, &unpinnable)
        if outcome == PINNED:
            self.keep_end()
        num_pinned = self.store.pool.num_pinned
        self.unlock()
        if has_room and self.is_gone:
            self.refuse_end()
        if outcome == OVER_BUDGET:
            raise PinBudgetError(f"pages to pin: got {fresh.num} more, {num_pinned} are pinned, allowed: {most} in all")
        if outcome == SHORT_OF_MEMORY:
            raise MemoryError(f"pins of {self.store.pool.num_pages} pages")
        if outcome == UNPINNABLE:
            self.refuse_page(unpinnable)
        return found.num

    cdef int refuse_page(self, int32_t page_id) except -1:
        if is_pinned(&self.store.pool, page_id):
            raise PageIdError(f"page {page_id} cannot be pinned: it has {INT32_MAX} pins, which is as many as there can be")
        if is_free(&self.store.pool, page_id):
            self.store.check_untaken(page_id)
        self.store.refuse_touch(page_id)
        return 0

    def unpin(self) -> int:
        """Take back a pin of each page that is pinned with a content of the tokens: group by group, the last page first.
        Returns of how many pages. O(pages), and for a row O(tokens that are not hashed yet).
        """
        cdef Pool *pool
        cdef const Group *group
        cdef Range places
        cdef Py_ssize_t g, n = 0
        cdef int32_t i, page_id
        self.lock()
        pool = &self.store.pool
        if self.chain is None and self.rows.batch.hash_page_size:
            hash_row(&self.rows.batch, self.row, <int32_t>self.num_tokens)
        for g in range(self.groups.num if pool.num_pinned else 0):
            group = &self.groups.groups[g]
            places = self.places_in(group, MAX_TOKENS)
            for i in range(places.stop - 1, places.start - 1, -1):
                page_id = find_pinned(pool, find(pool, self.digests[last_hash(group, i)], group.id))
                if page_id != NULL_PAGE:
                    take_pin_back(pool, page_id)
                    n += 1
        self.unlock()
        return n

    def retain(self, Retention retention not None) -> int:
        """Retain the cached pages. Returns how many. ArgumentError if there is none, unless no token lies in the span, and if
        the window before the end is gone. O(pages).
        """
        cdef PageIds found = PageIds.__new__(PageIds)
        cdef tuple hits = self.lock()
        cdef int64_t stop = min(self.stop, self.num_tokens)
        cdef bint has_room
        has_room = self.list_cached(found, hits) and (self.is_gone or retain_found(self.store, found, retention))
        if has_room and found.num and not self.is_gone:
            self.keep_end()
        self.unlock()
        if has_room and self.is_gone:
            self.refuse_end()
        if not has_room:
            raise MemoryError(f"levels of {self.store.pool.num_pages} pages")
        if found.num == 0 and self.start < stop:
            raise ArgumentError(f"tokens {self.start} to {stop}: got no cached page, allowed: at least one")
        return found.num
