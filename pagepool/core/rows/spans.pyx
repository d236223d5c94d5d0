"""Leases, and spans of tokens, whose cached pages can be leased or expected back."""

cimport cython
from libc.math cimport ceil, isfinite
from libc.stdint cimport INT64_MAX, int32_t, int64_t

from pagepool.core.holding cimport RequestPages, find_resumption, first_hit_page, hits_leading_pages, is_recurrent, is_ring
from pagepool.core.pool cimport (
    MAX_BANKS, NOBODY, SECOND, bank_of, begin_lease, count_leasable, end_lease, end_leases, expect_page, find, find_over_budget,
    find_untouchable, has_key, hit, id_in_bank, is_free, make_leases, now_of, set_end, share,
)
from pagepool.core.values cimport HashChain, float_of

from pagepool.errors import ArgumentError, ArgumentTypeError, LeaseBudgetError, PageIdError, shown


cdef double MAX_SECONDS = 2.0 ** 40


cdef int64_t duration_of(object seconds) except -1:
    """Return the duration of a lease in units of the clock."""
    cdef double value = float_of(seconds, "seconds")
    if not (isfinite(value) and value > 0):
        raise ArgumentError(f"seconds: got {shown(seconds)}, allowed: finite and above 0")
    return <int64_t>ceil(min(value, MAX_SECONDS) * SECOND)


cdef Py_ssize_t find_unholdable(Pool *pool, const int32_t *ids, Py_ssize_t n) noexcept nogil:
    """Find a page that cannot be leased: the null page, a free page without an entry or with a reference, or a page with the
    most references that it can have. Return its index, or -1.
    """
    cdef const Page *page
    cdef Py_ssize_t i
    for i in range(n):
        page = &pool.pages[ids[i]]
        if ids[i] == NULL_PAGE or is_free(pool, ids[i]) and (page.group == NO_GROUP or page.ref_cnt):
            return i
    return find_untouchable(pool, ids, n, n)


cdef dict ids_by_pool(PageStore store, PageIds ids):
    """Return the ids of pages by the name of their pool, as users see them; nothing without a store. O(pages)."""
    cdef dict page_ids = {} if store is None else {name: [] for name in store.bank_names}
    cdef Py_ssize_t i
    for i in range(ids.num if page_ids else 0):
        name = store.bank_names[bank_of(&store.pool, ids.ids[i])]
        page_ids[name].append(id_in_bank(&store.pool, ids.ids[i]))
    return page_ids


@cython.final
@cython.auto_pickle(False)
cdef class Lease:
    """References to pages that keep them from being handed out, until `release` or the end of the lease: see
    `CacheManager.lease`.

    A ``with`` block releases the lease at its end. ``page_ids`` are the leased pages; ``len()`` counts them. With several
    pools an id counts within the pool of its group; ``page_ids_by_pool`` has the ids of each pool by its name. ``is_held``
    is False once the lease was released or has ended.
    """

    def __cinit__(self):
        self.ids = PageIds.__new__(PageIds)

    def __init__(self):
        raise TypeError("a Lease is what CacheManager.lease returns")

    def __reduce__(self):
        raise ArgumentTypeError("a lease cannot be pickled")

    cdef bint hold(self, int64_t duration) noexcept:
        """Take the references: for a `duration`, counted against the budget, or until `release` if it is 0. False if memory is
        short. The pool is locked, and all pages can be leased.
        """
        cdef Pool *pool = &self.store.pool
        cdef int32_t page_id
        cdef Py_ssize_t i
        if not make_leases(pool):
            return False
        assert not self.span.has_begun and not self.span.is_held
        for i in range(self.ids.num):
            page_id = self.ids.ids[i]
            if is_free(pool, page_id):
                hit(pool, &page_id, 1, NOBODY, ends_terms=False)
            else:
                share(pool, page_id)  # not a use: the policy does not learn from leases of held pages
            pool.leases.counts[page_id] += 1
        begin_lease(pool, &self.span, self.ids.ids, self.ids.num, duration)
        return True

    cdef int refuse_budget(self, int32_t bank, int64_t num_pages) except -1:
        """Raise the error for a bank if leases with an end would have `num_pages` of its pages."""
        cdef int64_t num_leased, most
        with self.store.own_lock()[0]:
            num_leased, most = self.store.pool.leases.num_pages_in[bank], count_leasable(&self.store.pool, bank)
        where = "" if self.store.pool.num_banks == 1 else f" of the pool {self.store.bank_names[bank]!r}"
        raise LeaseBudgetError(
            f"pages to lease{where}: got {num_pages - num_leased} more, {num_leased} are leased, allowed: {most} in all"
        )

    cdef int refuse_page(self, Py_ssize_t bad) except -1:
        """Raise the error for the page at an index; MemoryError for an index below 0."""
        cdef int32_t page_id
        if bad < 0:
            raise MemoryError(f"leases of {self.store.pool.num_pages} pages")
        page_id = self.ids.ids[bad]
        if page_id == NULL_PAGE:
            raise PageIdError(f"page_ids: got the null page (at {bad}), allowed: others")
        if not self.store.is_free(page_id):
            self.store.refuse_touch(page_id)
        self.store.check_untaken(page_id if self.store.record(page_id).ref_cnt else NULL_PAGE)
        shown_id = id_in_bank(&self.store.pool, page_id)
        raise PageIdError(f"page_ids: got {shown_id} (at {bad}), which is free and not cached, allowed: held or cached pages")

    @property
    def page_ids(self) -> list:
        return self.ids.to_list() if self.store is None else self.store.ids_in_banks(self.ids).to_list()

    @property
    def page_ids_by_pool(self) -> dict:
        return ids_by_pool(self.store, self.ids)

    @property
    def is_held(self) -> bool:
        cdef bint is_held
        if self.store is None:  # made by hand
            return False
        with self.store.own_lock()[0]:
            end_leases(&self.store.pool)
            is_held = self.span.is_held
        return is_held

    def __len__(self):
        return self.ids.num

    def __repr__(self):
        return f"Lease(page_ids={self.page_ids}, is_held={self.is_held})"

    def extend(self, seconds) -> None:
        """Let the lease end `seconds` from now. ArgumentError if it has ended or never ends, and unless `seconds` is finite and
        above 0.
        """
        cdef int64_t duration = duration_of(seconds)
        cdef bint has_end = False
        if self.is_held:
            with self.store.own_lock()[0]:
                has_end = self.span.end != 0
                if has_end:
                    set_end(&self.store.pool, &self.span, duration)
        if not has_end:
            raise ArgumentError("lease: got one that has ended, or was made without seconds, allowed: others")

    def release(self) -> None:
        """Give the references back, the last page's first; a second call does nothing. DoubleFreeError, and nothing changed, if
        somebody else gave one of them back. O(pages), and O(leases) for a lease with an end.
        """
        cdef Py_ssize_t bad = -1
        if self.store is None:
            return
        with self.store.own_lock()[0]:
            if self.span.is_held:  # else another thread has released it
                bad = end_lease(&self.store.pool, &self.span)
        if bad >= 0:
            self.store.refuse_give_back(self.ids, bad)
        self.store.leases.pop(self, None)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.release()


cdef Lease new_lease(PageStore store):
    """Make a lease without pages. It is listed before it holds any, so that no interrupt can lose it. Amortised O(1)."""
    cdef Lease lease = Lease.__new__(Lease)
    if 2 * store.read(&store.pool.leases.num_ended) > len(store.leases):
        list_leases(store)
    lease.store = store
    store.leases[lease] = None
    return lease


def list_leases(PageStore store not None) -> list:
    """Return the held leases of a pool, the oldest first, and forget those that have ended. O(leases)."""
    cdef Lease lease
    cdef list held = [], listed = list(store.leases)
    cdef LeasedPages span
    with store.own_lock()[0]:
        end_leases(&store.pool)
        store.pool.leases.num_ended = 0
    for lease in listed:
        with store.own_lock()[0]:
            span = lease.span
        if span.is_held:
            held.append(lease)
        elif span.has_begun:  # else another thread is about to hold pages with it
            store.leases.pop(lease, None)
    return held


def term_of(seconds) -> int:
    """Return the term of pages that are wanted in `seconds`: infinity means never, None gives 0."""
    return term_of_seconds(seconds)


def limit_leases(PageStore store not None, max_share) -> None:
    """Let leases with an end have at most a share of each bank's pages, and no more than before. O(1)."""
    cdef double checked = float_of(max_share, "max_share")
    if not 0 <= checked <= 1:
        raise ArgumentError(f"max_share: got {shown(max_share)}, allowed: 0 to 1")
    with store.own_lock()[0]:
        store.pool.leases.max_share = min(store.pool.leases.max_share, checked) if store.pool.leases.is_limited else checked
        store.pool.leases.is_limited = True


def count_leasable_pages(PageStore store not None) -> int:
    """Count the pages that leases with an end may have, in all banks. O(banks)."""
    cdef int64_t count = 0
    cdef int32_t bank
    with store.own_lock()[0]:
        for bank in range(store.pool.num_banks):
            count += count_leasable(&store.pool, bank)
    return count


def lease_pages(PageStore store not None, page_ids, bank=0, seconds=None) -> Lease:
    """Lease held pages of a bank, or free cached ones, for some seconds or until the lease is released: see `PagePool.lease`.
    O(pages); the first call O(num_pages).
    """
    cdef PageIds ids = store.checked(store.records_in_bank(as_own_ids(page_ids, "page_ids"), bank))
    cdef int64_t duration = 0 if seconds is None else duration_of(seconds)
    cdef int64_t[MAX_BANKS] num_pages_in
    cdef Lease lease = new_lease(store)
    cdef bint is_held = False
    cdef int32_t over = -1
    cdef Py_ssize_t bad
    lease.ids = ids
    with store.own_lock()[0]:
        end_leases(&store.pool)
        bad = find_unholdable(&store.pool, ids.ids, ids.num)
        if bad < 0 and duration:
            over = find_over_budget(&store.pool, ids.ids, ids.num, &num_pages_in[0])
        is_held = bad < 0 and over < 0 and lease.hold(duration)
    if not is_held:
        store.leases.pop(lease)
        if over >= 0:
            lease.refuse_budget(over, num_pages_in[over])
        lease.refuse_page(bad)
    return lease


@cython.final
@cython.auto_pickle(False)
cdef class TokenSpan:
    """Tokens ``[start, stop)`` of a request or an admitted row, given by `of_request` or `of_row`; a `stop` of None is the end
    of its tokens. `lease` and `expect` apply to the cached pages that lie wholly within the span: the pages that the request or
    row holds, and others with the same content where it holds none.
    """

    cdef readonly int64_t start
    cdef readonly int64_t stop
    cdef PageStore store            # None: no request or row is given yet
    cdef CacheGroups groups
    cdef HashChain chain            # the request's; None: the span is of a row
    cdef RequestPages held          # the request's
    cdef RowStore rows
    cdef Py_ssize_t row
    cdef int64_t num_tokens         # of the request or row; set, with the next three, while locked
    cdef const Digest *digests
    cdef Py_ssize_t num_digests
    cdef const Held *own            # [groups] pages that the request or row holds; NULL: none

    def __cinit__(self, start=0, stop=None):
        self.start = size_of(start, "start", 0, INT64_MAX - 1)
        self.stop = INT64_MAX if stop is None else size_of(stop, "stop", self.start, INT64_MAX - 1)

    def __reduce__(self):
        raise ArgumentTypeError("a span of tokens cannot be pickled")

    cdef TokenSpan unbound(self):
        """Return a copy of the span without a request or row."""
        cdef TokenSpan span = TokenSpan.__new__(TokenSpan, self.start)
        span.stop = self.stop
        return span

    def of_request(
        self, PageStore store not None, CacheGroups groups not None, HashChain chain not None, num_tokens,
        RequestPages held=None,
    ) -> TokenSpan:
        """Return the span for a request of `num_tokens` tokens, hashed by `chain`, which holds the pages `held`, or none."""
        cdef TokenSpan span = self.unbound()
        if held is not None and (held.store is not store or held.groups is not groups):
            raise ArgumentError("held: got pages of another pool or other groups, allowed: those of this pool and these groups")
        span.store, span.groups, span.chain, span.held = store, groups, chain, held
        span.num_tokens = size_of(num_tokens, "num_tokens", 0, INT64_MAX)
        return span

    def of_row(self, RunningRows rows not None, row) -> TokenSpan:
        """Return the span for a row."""
        cdef TokenSpan span = self.unbound()
        span.row = rows.rows.checked_row(row)
        span.rows, span.store, span.groups = rows.rows, rows.rows.store, rows.rows.groups
        return span

    cdef PageStore require_store(self):
        if self.store is None:
            raise ArgumentError("span: got one of no request and no row, allowed: one that of_request or of_row returns")
        return self.store

    cdef int lock(self) except -1:
        """Take the locks of the request or row. ArgumentError for a row that is not admitted."""
        cdef const RowRecord *record
        self.require_store()
        if self.chain is not None:
            self.store.require_own()
            self.chain.own_lock()[0].acquire()
            self.store.lock.acquire()
            self.digests, self.num_digests = self.chain.digests, self.chain.num
            self.own = self.held.holding.held if self.held is not None else NULL
            if not self.store.enable_caching:  # the chain may have digests for another manager
                self.num_digests = 0
        else:
            self.rows.acquire_locks()
            record = &self.rows.batch.records[self.row]
            if not record.is_admitted:
                self.rows.release_locks()
                raise not_admitted(f"row {self.row}")
            if self.rows.batch.hash_page_size:
                hash_row(&self.rows.batch, self.row, count_keyed(&self.rows.batch, record.num_tokens))
            self.digests, self.num_digests = digests_of(&self.rows.batch, self.row), self.rows.batch.rows[self.row].num_hashed
            self.num_tokens, self.own = record.num_tokens, held_by(&self.rows.batch, self.row, 0)
        return 0

    cdef void unlock(self) noexcept:
        if self.chain is None:
            self.rows.release_locks()
        else:
            self.store.lock.release()
            self.chain.lock.release()

    cdef int32_t find_cached_page(self, Py_ssize_t g, int64_t place) noexcept:
        """Find the cached page with the tokens of a place, preferably the holder's own; NULL_PAGE if there is none."""
        cdef const Group *group = &self.groups.groups[g]
        cdef Digest key = self.digests[last_hash(group, place)]
        assert 0 <= place and (place + 1) * group.stride <= self.num_digests
        if self.own != NULL and place < self.own[g].num_pages:
            if has_key(&self.store.pool.pages[self.own[g].ids[place]], key, group.id):
                return self.own[g].ids[place]
        return find(&self.store.pool, key, group.id)

    cdef bint collect_cached(self, PageIds found) noexcept:
        """Add the cached pages of the span to `found`, group by group. False if memory is short. The locks are held."""
        cdef const Group *group
        cdef Py_ssize_t g
        cdef int64_t i, size, stop
        cdef int32_t page_id
        for g in range(self.groups.num):
            group = &self.groups.groups[g]
            size = group.rules.entry_size
            stop = min(self.stop // size, self.num_digests // group.stride) if group.id != NO_GROUP else 0
            for i in range(min(self.start // size + (self.start % size > 0), stop), stop):
                page_id = self.find_cached_page(g, i)
                if page_id != NULL_PAGE:
                    if not found.try_reserve(1):
                        return False
                    found.put(&page_id, 1)
        return True

    cdef int64_t find_lost_token(self) noexcept:
        """Return the first token of a page of full attention that is not cached; -1 if there is none. Without a `stop` the span
        ends, in each group, with the last cached page. The locks are held.
        """
        cdef const Group *group
        cdef Py_ssize_t g
        cdef int64_t i, size, start, stop, num_hashed, lost, first = INT64_MAX
        for g in range(self.groups.num):
            group, lost = &self.groups.groups[g], INT64_MAX
            size = group.rules.entry_size
            if not hits_leading_pages(group):
                continue
            start, stop = self.start // size + (self.start % size > 0), min(self.stop, self.num_tokens) // size
            num_hashed = max(start, min(stop, self.num_digests // max(1, group.stride)))
            for i in range(start, num_hashed):
                if self.find_cached_page(g, i) == NULL_PAGE:
                    lost = min(lost, i * size)
                elif lost < INT64_MAX and self.stop == INT64_MAX:
                    return lost
            if num_hashed < stop:
                lost = min(lost, num_hashed * size)
            if self.stop < INT64_MAX:
                first = min(first, lost)
        return first if first < INT64_MAX else -1

    cdef int64_t find_lost_end(self) noexcept:
        """Look up what requests that share the span need where they resume: pages of windows and chunks, and checkpoints. If
        one is not cached, return the least number of shared tokens that leads there; else 0. The locks are held.
        """
        cdef Boundaries rule = self.groups.boundaries
        cdef const Group *group
        cdef Py_ssize_t g
        cdef int64_t i, stop
        cdef int32_t end
        rule.multiple = rule.multiple or self.groups.kinds.num_hit_tokens
        if not rule.multiple or self.stop == INT64_MAX:
            return 0
        end = find_resumption(&rule, min(self.stop, self.num_tokens, <int64_t>MAX_TOKENS))
        for g in range(self.groups.num if end else 0):
            group = &self.groups.groups[g]
            if is_ring(&group.rules):
                continue
            stop = (end + <int64_t>group.num_read_behind) // group.rules.entry_size
            i = stop - 1 if is_state(&group.rules) else first_hit_page(&group.rules, end, self.groups.kinds.use_eagle)
            for i in range(i, 0 if hits_leading_pages(group) else stop):
                if (i + 1) * group.stride > self.num_digests or self.find_cached_page(g, i) == NULL_PAGE:
                    return end + <int64_t>rule.num_dropped
        return 0

    cdef bint has_state(self) noexcept:
        """Whether the model has states that are not written at boundaries. Their requests cannot choose where to resume."""
        cdef Py_ssize_t g
        for g in range(0 if self.groups.boundaries.writes_states else self.groups.num):
            if is_recurrent(&self.groups.groups[g].rules):
                return True
        return False

    def expect(self, seconds) -> int:
        """Set the time, `seconds` from now, at which the cached pages are expected back (None: unknown), the last page first.
        Return the number of pages. O(pages); the first call O(num_pages).
        """
        cdef int32_t term = term_of_seconds(seconds)
        self.require_store()
        cdef PageIds found = PageIds.__new__(PageIds), terms = PageIds([term])
        cdef bint has_room
        cdef int64_t now
        cdef Py_ssize_t i
        self.lock()
        has_room = self.collect_cached(found) and (found.num == 0 or self.store.make_terms(terms))
        now = now_of(&self.store.pool.expected)
        for i in range(found.num if has_room else 0):
            expect_page(&self.store.pool, found.ids[found.num - 1 - i], term, now)
        self.unlock()
        if not has_room:
            raise MemoryError(f"expectations of {self.store.pool.num_pages} pages")
        return found.num

    def lease(self, seconds) -> Lease:
        """Lease the cached pages for `seconds`. LeaseBudgetError, and nothing changed, if leases with an end would have more
        pages of a bank than `limit_leases` allows; ArgumentError if the span ends behind the known tokens or has no pages, or
        if one of its pages, or a page needed to resume at its end, is no longer cached. O(pages).
        """
        cdef PageStore store = self.require_store()
        cdef int64_t lost, lost_end, duration = duration_of(seconds)
        cdef int64_t[MAX_BANKS] num_pages_in
        cdef int32_t over = -1
        cdef Py_ssize_t bad = -1
        cdef Lease lease
        cdef bint is_inside, is_listed, is_held = False
        cdef int64_t num_tokens
        lease = new_lease(store)
        try:
            self.lock()
            end_leases(&store.pool)
            num_tokens = self.num_tokens
            is_inside = self.stop == INT64_MAX or self.stop <= num_tokens
            lost, lost_end = self.find_lost_token(), self.find_lost_end()
            is_listed = is_inside and lost < 0 and lost_end == 0 and self.collect_cached(lease.ids)
            if is_listed:
                over = find_over_budget(&store.pool, lease.ids.ids, lease.ids.num, &num_pages_in[0])
            if is_listed and over < 0 and lease.ids.num:
                bad = find_unholdable(&store.pool, lease.ids.ids, lease.ids.num)
                is_held = bad < 0 and lease.hold(duration)
            self.unlock()
        finally:
            if not is_held:
                self.store.leases.pop(lease)
        if self.start > num_tokens:
            raise ArgumentError(f"start: got {self.start}, allowed: 0 to {num_tokens}, the known tokens")
        if not is_inside:
            raise ArgumentError(f"stop: got {self.stop}, allowed: {self.start} to {num_tokens}, the known tokens")
        if lost >= 0 or lost_end:
            self.refuse_lost(lost, lost_end)
        if is_listed and lease.ids.num == 0:
            raise ArgumentError(
                f"start and stop: got {self.start} and {'the end' if self.stop == INT64_MAX else self.stop}, where no page is "
                "cached, allowed: tokens with at least one full page"
            )
        if over >= 0:
            lease.refuse_budget(over, num_pages_in[over])
        if not is_held:
            lease.refuse_page(bad)
        return lease

    cdef int refuse_lost(self, int64_t lost, int64_t lost_end) except -1:
        """Raise the error for an uncached page, which begins with token `lost`, or is needed to resume at `lost_end`."""
        if lost >= 0 and self.stop == INT64_MAX:
            raise ArgumentError(f"stop: got the end, where the page at token {lost} is gone, allowed: at most {lost}")
        if lost >= 0:
            raise ArgumentError(f"stop: got {self.stop}, where the page at token {lost} is not cached, allowed: at most {lost}")
        advice = "" if self.has_state() else f", as with resume_at=[{lost_end}] at admission"
        raise ArgumentError(
            f"stop: got {self.stop}, where pages that requests need to resume are gone, allowed: where all are cached{advice}"
        )
