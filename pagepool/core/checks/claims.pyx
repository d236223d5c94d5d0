"""The claims of all holders: their references to pages, listed and counted."""

cimport cython
from libc.stdint cimport int32_t, int64_t

from pagepool.core.holding cimport Holding, RequestPages
from pagepool.core.pool cimport (
    MAX_BANKS, NULL_PAGE, SECOND, Page, PageStore, Pool, bank_of, count_held, count_set_aside, end_leases, has_own_reference,
    now_of,
)
from pagepool.core.rows cimport Batch, Lease, RunningRows, StateWrite, holding_of, ids_by_pool
from pagepool.core.values cimport PageIds, as_list

import numpy as np

from pagepool.errors import ArgumentError, ArgumentTypeError


@cython.final
@cython.auto_pickle(False)
cdef class PageClaim:
    """The pages to which one `holder` has references: a `RequestPages`, a `Lease`, a `PageIds`, or the row `row` of a
    `RunningRows`. For other references `holder` is ``"copy"``, ``"load"``, or ``"caller"``, whose references nothing explains.

    ``num_references`` counts references: a holder may have several to a page.
    """

    cdef readonly object holder
    cdef readonly Py_ssize_t row
    cdef readonly int64_t num_references
    cdef PageStore store
    cdef PageIds ids                    # records, each once
    cdef int64_t begun                  # on the clock of stamps; 0: not known
    cdef int64_t end                    # of a lease; 0: it has none
    cdef int64_t now
    cdef int64_t[MAX_BANKS] num_pages_in
    cdef int64_t[MAX_BANKS] num_own_in
    cdef int64_t[MAX_BANKS] num_first_in

    def __init__(self):
        raise TypeError("a PageClaim is what list_claims returns")

    def __reduce__(self):
        raise ArgumentTypeError("a claim of pages cannot be pickled")

    @property
    def num_pages(self) -> dict:
        """Pages by pool."""
        return self.by_pool(self.num_pages_in)

    @property
    def num_own_pages(self) -> dict:
        """Pages by pool that nobody else holds."""
        return self.by_pool(self.num_own_in)

    @property
    def num_first_pages(self) -> dict:
        """Pages by pool that no claim before this one has: all claims together count each page once."""
        return self.by_pool(self.num_first_in)

    cdef dict by_pool(self, const int64_t *counts):
        return {} if self.store is None else {name: counts[bank] for bank, name in enumerate(self.store.bank_names)}

    @property
    def page_ids_by_pool(self) -> dict:
        """Page ids by pool, each once. O(pages)."""
        return ids_by_pool(self.store, self.ids)

    @property
    def seconds(self):
        """Seconds since the holder began; None if that is not known."""
        return max(<int64_t>0, self.now - self.begun) / <double>SECOND if self.begun else None

    @property
    def seconds_left(self):
        """Seconds until a lease ends; None for everything else, and for leases without an end."""
        return max(<int64_t>0, self.end - self.now) / <double>SECOND if self.end else None


def list_claims(PageStore store not None, holders) -> list:
    """Return a `PageClaim` for each of `holders` that has references to pages of the store, in their order, the rows of
    `RunningRows` one after another; then those of copies that are due, of loads, and of the caller. O(pages held + rows), and
    O(num_pages) if the caller holds pages.
    """
    cdef list claims = []
    for holder in as_list(holders, "holders", False):
        claims += claims_of(store, holder)
    claims += [new_claim(store, name, -1) for name in ("copy", "load", "caller")]
    cdef int32_t[:, ::1] counts = np.zeros((2, store.pool.num_pages), dtype=np.int32)
    cdef bint fits
    with store.own_lock()[0]:
        end_leases(&store.pool)
        fits = fill_claims(&store.pool, claims, &counts[0, 0], &counts[1, 0])
    if not fits:
        raise MemoryError("claims of pages")
    return [claim for claim in claims if (<PageClaim>claim).ids.num]


cdef PageClaim new_claim(PageStore store, object holder, Py_ssize_t row):
    cdef PageClaim claim = PageClaim.__new__(PageClaim)
    claim.store, claim.holder, claim.row, claim.ids = store, holder, row, PageIds.__new__(PageIds)
    return claim


cdef list claims_of(PageStore store, object holder):
    """Return the empty claims of a holder, one for each row of `RunningRows`. Raise for values that hold no pages of the store.
    """
    cdef PageStore own
    if isinstance(holder, RunningRows):
        (<RunningRows>holder).rows.check_made()
        own = (<RunningRows>holder).rows.store
    elif isinstance(holder, RequestPages):
        own = (<RequestPages>holder).store
    elif isinstance(holder, Lease):
        own = (<Lease>holder).store
    elif isinstance(holder, PageIds):
        own = store
        store.checked(holder)
    else:
        allowed = "RequestPages, Lease, PageIds and RunningRows"
        raise ArgumentTypeError(f"holders: got {type(holder).__name__}, allowed: {allowed}")
    if own is not store:
        raise ArgumentError("holders: got one of another pool, allowed: those of this pool")
    if isinstance(holder, RunningRows):
        return [new_claim(store, holder, row) for row in range((<RunningRows>holder).rows.batch.num_rows)]
    return [new_claim(store, holder, -1)]


# These functions run under the store's lock, and return False if memory is short.

cdef bint fill_claims(const Pool *pool, list claims, int32_t *explained, int32_t *mine) noexcept:
    """List and count the pages of all claims; the last three are of copies, loads and the caller. The arrays have a 0 for each
    page.
    """
    cdef Py_ssize_t i, num = len(claims) - 3
    for i in range(num):
        if not add_claimed(claims[i]):
            return False
    if not add_writes_of_rows(claims, num) or not add_transferred(pool, claims[num], claims[num + 1]):
        return False
    for i in range(num + 2):
        count_claim(pool, claims[i], explained, mine)
    return add_unexplained(pool, claims, explained)


cdef bint add_pages(PageClaim claim, const int32_t *ids, Py_ssize_t n) noexcept:
    """List pages, but no null page."""
    cdef PageIds listed = claim.ids
    cdef Py_ssize_t i, num = listed.num
    if not listed.try_reserve(n):
        return False
    for i in range(n):
        if ids[i] != NULL_PAGE:
            listed.ids[num] = ids[i]
            num += 1
    listed.num = num
    return True


cdef bint add_holding(PageClaim claim, const Holding *holding) noexcept:
    cdef Py_ssize_t g
    for g in range(holding.num_groups):
        if not add_pages(claim, holding.held[g].ids, holding.held[g].num_pages):
            return False
    return True


cdef bint add_claimed(PageClaim claim) noexcept:
    """List the references of a request, row, lease or list of ids, except for pages to which a row's states are written."""
    cdef Batch *batch
    cdef RequestPages request
    cdef Lease lease
    cdef PageIds listed
    cdef Py_ssize_t i
    claim.now = now_of(&claim.store.pool.expected)
    if claim.row >= 0:
        batch = &(<RunningRows>claim.holder).rows.batch
        claim.begun = batch.rows[claim.row].begun
        return add_holding(claim, holding_of(batch, claim.row))
    if isinstance(claim.holder, RequestPages):
        request = claim.holder
        claim.begun = request.begun
        for i in range(request.writes.num):
            if not add_pages(claim, &request.writes.items[i].page_id, 1):
                return False
        return add_holding(claim, &request.holding)
    listed = None
    if isinstance(claim.holder, Lease):
        lease = claim.holder
        claim.begun, claim.end = lease.span.begun, lease.span.end
        listed = lease.ids if lease.span.is_held else None
    else:
        listed = claim.holder
    return listed is None or add_pages(claim, listed.ids, listed.num)


cdef bint add_writes_of_rows(list claims, Py_ssize_t num_claims) noexcept:
    """List the pages to which states of rows are written. O(claims + writes)."""
    cdef PageClaim claim
    cdef const StateWrite *write
    cdef Batch *batch
    cdef Py_ssize_t first, i
    for first in range(num_claims):
        claim = claims[first]
        if claim.row != 0:
            continue
        batch = &(<RunningRows>claim.holder).rows.batch
        for i in range(batch.writes.num):
            write = &batch.writes.items[i]
            if not add_pages(claims[first + write.row], &write.page_id, 1):
                return False
    return True


cdef bint add_transferred(const Pool *pool, PageClaim copied, PageClaim loaded) noexcept:
    """List the sources of copies that are due, and the pages of unfinished loads."""
    cdef Py_ssize_t i
    for i in range(pool.copies.num):
        if not add_pages(copied, &pool.copies.items[i].src, 1):
            return False
    for i in range(pool.tier.num if pool.tier != NULL else 0):
        if pool.tier.items[i].is_load and not add_pages(loaded, &pool.tier.items[i].page_id, 1):
            return False
    return True


cdef void count_claim(const Pool *pool, PageClaim claim, int32_t *explained, int32_t *mine) noexcept:
    """Count the references and pages of a claim, and list each page once. `mine` has only zeros again afterwards."""
    cdef int32_t *ids = claim.ids.ids
    cdef int32_t page_id, bank
    cdef Py_ssize_t i, num = 0
    claim.num_references = claim.ids.num
    for i in range(claim.ids.num):
        explained[ids[i]] += 1
        mine[ids[i]] += 1
    for i in range(claim.ids.num):
        page_id = ids[i]
        if mine[page_id] == 0:
            continue
        bank = bank_of(pool, page_id)
        claim.num_pages_in[bank] += 1
        claim.num_own_in[bank] += mine[page_id] == pool.pages[page_id].ref_cnt - has_own_reference(pool, page_id)
        claim.num_first_in[bank] += mine[page_id] == explained[page_id]
        mine[page_id] = 0
        ids[num] = page_id
        num += 1
    claim.ids.num = num


cdef bint add_unexplained(const Pool *pool, list claims, int32_t *explained) noexcept:
    """List the pages with more references than the claims explain in the last claim, which is empty. O(pages of claims), and
    O(num_pages) if the others do not have all held pages.
    """
    cdef PageClaim claim
    cdef Py_ssize_t i, j, num = len(claims) - 1
    cdef int64_t num_missing = count_held(pool) + count_set_aside(pool) + pool.num_held_free
    for i in range(num):
        claim = claims[i]
        for j in range(MAX_BANKS):
            num_missing -= claim.num_first_in[j]
    if num_missing:
        for i in range(1, pool.num_pages):
            if not add_excess(pool, claims[num], <int32_t>i, explained):
                return False
        return True
    for i in range(num):
        claim = claims[i]
        for j in range(claim.ids.num):
            if not add_excess(pool, claims[num], claim.ids.ids[j], explained):
                return False
    return True


cdef bint add_excess(const Pool *pool, PageClaim rest, int32_t page_id, int32_t *explained) noexcept:
    """List a page that has unexplained references, and count these; afterwards they are explained."""
    cdef const Page *page = &pool.pages[page_id]
    cdef int32_t num = page.ref_cnt - has_own_reference(pool, page_id) - explained[page_id]
    if num <= 0:
        return True
    rest.num_references += num
    rest.num_pages_in[bank_of(pool, page_id)] += 1
    rest.num_own_in[bank_of(pool, page_id)] += explained[page_id] == 0
    rest.num_first_in[bank_of(pool, page_id)] += explained[page_id] == 0
    explained[page_id] += num
    return add_pages(rest, &page_id, 1)
