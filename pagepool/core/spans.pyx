"""Leases, and spans of tokens of a request or running row, of which cached pages are leased, or expected back."""

cimport cython
from libc.math cimport ceil, isfinite
from libc.stdint cimport INT64_MAX, int32_t, int64_t

from pagepool.core.arguments cimport float_of, size_of, term_of_seconds
from pagepool.core.batch cimport digests_of, held_by, holding_of
from pagepool.core.boundaries cimport NUM_BOUNDARIES, Boundaries
from pagepool.core.chain cimport HashChain
from pagepool.core.groups cimport CacheGroups
from pagepool.core.holdings cimport Held, Holding, keep_window
from pagepool.core.ids cimport PageIds, as_own_ids, new_ids
from pagepool.core.index cimport find, has_key
from pagepool.core.lookups cimport Query, count_junction_tokens, fetch_hits, find_longest, query_of
from pagepool.core.pages cimport begin_lease, end_lease, end_leases, find_untouchable, set_end, share, touch_all
from pagepool.core.queue cimport expect_page, now_of
from pagepool.core.records cimport NO_GROUP, NULL_PAGE, SECOND, LeasedSpan, Page, Pool, Range, is_free
from pagepool.core.request_pages cimport RequestPages
from pagepool.core.rules cimport MAX_TOKENS, Group, first_hit_page, has_window, is_state, last_hash
from pagepool.core.running cimport RunningRows
from pagepool.core.siphash cimport Digest
from pagepool.core.store cimport PageStore

from pagepool.errors import ArgumentError, ArgumentTypeError, LeaseBudgetError, PageIdError, shown


cdef double MAX_SECONDS = 2.0 ** 40


cdef int64_t duration_of(object seconds) except -1:
    """How long a lease lasts, in units of the clock."""
    cdef double value = float_of(seconds, "seconds")
    if not (isfinite(value) and value > 0):
        raise ArgumentError(f"seconds: got {shown(seconds)}, allowed: finite and above 0")
    return <int64_t>ceil(min(value, MAX_SECONDS) * SECOND)


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


@cython.final
@cython.auto_pickle(False)
cdef class Lease:
    """References to pages, which are not handed out until `release`, whoever frees them, or until the lease ends: see
    `CacheManager.lease`.

    ``with`` releases it at the end. ``page_ids`` are those of the call; ``len()`` counts them. `is_held` is False once it was
    released, or has ended.
    """

    cdef PageStore store
    cdef PageIds ids
    cdef LeasedSpan span

    def __cinit__(self):
        self.ids = PageIds.__new__(PageIds)

    def __init__(self):
        raise TypeError("a Lease is what CacheManager.lease returns")

    def __reduce__(self):
        raise ArgumentTypeError("a lease cannot be pickled")

    cdef bint hold(self, int64_t duration) noexcept:
        """Take the references, for a duration that counts against the budget, or 0: until `release`. False where memory is
        short. The pool is locked, and all pages can be held.
        """
        cdef Pool *pool = &self.store.pool
        cdef int32_t page_id
        cdef Py_ssize_t i
        if not self.store.make_leases():
            return False
        pool.is_restored &= self.ids.num == 0
        for i in range(self.ids.num):
            page_id = self.ids.ids[i]
            if is_free(pool, page_id):
                touch_all(pool, &page_id, 1)
            else:
                share(pool, page_id)  # no policy is told: a lease does not use a page that is held
            pool.leases.counts[page_id] += 1
        begin_lease(pool, &self.span, self.ids.ids, self.ids.num, duration)
        return True

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

    @property
    def is_held(self) -> bool:
        cdef bint is_held
        if self.store is None:  # made by hand
            return False
        with self.store.lock:
            end_leases(&self.store.pool)
            is_held = self.span.is_held
        return is_held

    def __len__(self):
        return self.ids.num

    def __repr__(self):
        return f"Lease(page_ids={self.page_ids}, is_held={self.is_held})"

    def extend(self, seconds) -> None:
        """Let the lease end in so many seconds from now. ArgumentError if it has ended, or has no end, and unless they are
        finite and above 0.
        """
        cdef int64_t duration = duration_of(seconds)
        cdef bint has_end = False
        if self.is_held:
            with self.store.lock:
                has_end = self.span.end != 0
                if has_end:
                    set_end(&self.store.pool, &self.span, duration)
        if not has_end:
            raise ArgumentError("the lease has ended, or is one of page ids, which has no end")

    def release(self) -> None:
        """Give the references back, of the last page first; a second call does nothing. DoubleFreeError, and nothing changed,
        if somebody else gave one of them back. O(pages), and O(leases) for one with an end.
        """
        cdef Py_ssize_t bad = -1
        if self.store is None:
            return
        with self.store.lock:
            if self.span.is_held:  # no other thread was faster
                bad = end_lease(&self.store.pool, &self.span)
        if bad >= 0:
            self.store.refuse_give_back(self.ids, bad)
        self.store.leases.pop(self, None)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.release()


cdef Lease new_lease(PageStore store):
    """A lease without pages, listed before it holds any, so that no interrupt can lose it. Amortised O(1)."""
    cdef Lease lease = Lease.__new__(Lease)
    if 2 * store.read(&store.pool.leases.num_ended) > len(store.leases):
        list_leases(store)
    lease.store = store
    store.leases[lease] = None
    return lease


def list_leases(PageStore store not None) -> list:
    """List the leases of a pool that are held, the oldest first, and forget those that have ended. O(leases)."""
    cdef Lease lease
    cdef list held = [], listed = list(store.leases)
    cdef LeasedSpan span
    with store.lock:
        end_leases(&store.pool)
        store.pool.leases.num_ended = 0
    for lease in listed:
        with store.lock:
            span = lease.span
        if span.is_held:
            held.append(lease)
        elif span.has_begun:  # other threads list leases before they hold pages
            store.leases.pop(lease, None)
    return held


def term_of(seconds) -> int:
    """The term of pages that are wanted in so many seconds, or never, if that is infinity; 0 for None."""
    return term_of_seconds(seconds)


def lease_pages(PageStore store not None, page_ids) -> Lease:
    """Lease pages, which are held, or free and cached: see `CacheManager.lease`. O(pages); the first call O(num_pages)."""
    cdef PageIds ids = store.checked(as_own_ids(page_ids, "page_ids"))
    cdef Lease lease = new_lease(store)
    cdef bint is_held
    cdef Py_ssize_t bad
    lease.ids = ids
    with store.lock:
        bad = find_unholdable(&store.pool, ids.ids, ids.num)
        is_held = bad < 0 and lease.hold(0)
    if not is_held:
        store.leases.pop(lease)
        lease.refuse(bad)
    return lease


@cython.final
@cython.auto_pickle(False)
cdef class TokenSpan:
    """Tokens ``[start, stop)`` of a request or an admitted row, which `of_request` and `of_row` name; a `stop` of None is the
    end of its tokens. The cached pages that lie wholly within them are leased, or expected back. If pages of windows stay only
    at boundaries, a `stop` is one for what is leased: the window before it must not be gone.
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

    cdef PageStore require_store(self):
        if self.store is None:
            raise ArgumentError("the span is of no request and no row: call of_request or of_row")
        return self.store

    cdef tuple lock(self):
        """Take the locks of the request or row, and return room for hits. ArgumentError for a row that is not admitted."""
        cdef tuple hits
        self.require_store()
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

    def expect(self, seconds) -> int:
        """Say in how many seconds the cached pages are expected back (None: nobody knows), the last page first. Returns how
        many pages. O(pages); the first call O(num_pages).
        """
        cdef int32_t term = term_of_seconds(seconds)
        cdef PageIds found = PageIds.__new__(PageIds), terms = PageIds([term])
        cdef tuple hits = self.lock()
        cdef bint has_room = self.list_cached(found, hits) and (found.num == 0 or self.store.make_terms(terms))
        cdef int64_t now
        cdef Py_ssize_t i
        now = now_of(&self.store.pool)
        for i in range(found.num if has_room else 0):
            expect_page(&self.store.pool, found.ids[found.num - 1 - i], term, now)
        self.unlock()
        if not has_room:
            raise MemoryError(f"expectations of {self.store.pool.num_pages} pages")
        return found.num

    def lease(self, max_num_leased, seconds) -> Lease:
        """Lease the cached pages for a number of seconds. LeaseBudgetError, and nothing changed, if leases with an end had more
        than `max_num_leased` pages in all; ArgumentError if the window before the end of the span is gone. O(pages).
        """
        cdef Py_ssize_t most = size_of(max_num_leased, "max_num_leased"), bad = -1
        cdef int64_t num_leased, duration = duration_of(seconds)
        cdef Lease lease = new_lease(self.require_store())
        cdef bint has_room, is_over = False, is_held = False
        cdef tuple hits
        try:
            hits = self.lock()
            end_leases(&self.store.pool)
            has_room = self.list_cached(lease.ids, hits)
            num_leased = self.store.pool.leases.num_pages
            is_over = num_leased + lease.ids.num > most
            if has_room and not is_over and not self.is_gone:
                bad = find_unholdable(&self.store.pool, lease.ids.ids, lease.ids.num)
                is_held = bad < 0 and lease.hold(duration)
            if is_held:
                self.keep_end()
            self.unlock()
        finally:
            if not is_held:
                self.store.leases.pop(lease)
        if has_room and self.is_gone:
            self.refuse_end()
        if is_over:
            raise LeaseBudgetError(f"pages to lease: got {lease.ids.num} more, {num_leased} are leased, allowed: {most} in all")
        if not is_held:
            lease.refuse(bad)
        return lease
