"""Cached pages pinned and unpinned: those of a request, a running row or a look-up."""

cimport cython
from libc.stdint cimport INT32_MAX, int32_t

from pagepool.core.arguments cimport size_of
from pagepool.core.batch cimport digests_of
from pagepool.core.chain cimport HashChain
from pagepool.core.ids cimport PageIds
from pagepool.core.index cimport find
from pagepool.core.pages cimport find_untouchable, touch_all
from pagepool.core.records cimport NULL_PAGE, Pool, Range, is_free, is_pinned
from pagepool.core.references cimport find_pinned, take_pin_back
from pagepool.core.request_pages cimport CacheGroups
from pagepool.core.row_hashes cimport hash_row
from pagepool.core.row_memory cimport RowMemory
from pagepool.core.rules cimport MAX_TOKENS, Group
from pagepool.core.siphash cimport Digest
from pagepool.core.spans cimport TokenSpan
from pagepool.core.store cimport PageStore

from pagepool.errors import PageIdError, PinBudgetError

cdef enum PinOutcome:
    PINNED
    STALE                     # a hit is not cached any more
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

    def pin(self, CacheGroups groups not None, HashChain chain not None, ids, max_num_pinned, bint are_hits) -> int | None:
        """Pin those of the pages `ids` of each group that are cached under the digests of the chain. Returns how many.

        For hits None, and nothing is pinned, if one of them is not cached as such any more. PinBudgetError, and nothing
        changed, if more than `max_num_pinned` pages of the pool would be pinned. O(pages).
        """
        cdef Verdict verdict = Verdict(PINNED, size_of(max_num_pinned, "max_num_pinned"), 0, NULL_PAGE)
        cdef PageIds found = PageIds.__new__(PageIds), fresh = PageIds.__new__(PageIds)
        cdef tuple checked = self.checked_pages(groups, chain, ids, found)
        cdef Py_ssize_t num_missed
        with chain.lock, self.store.lock:
            num_missed = self.list_pages(groups, chain, checked, found)
            if are_hits and num_missed:
                verdict.outcome = STALE
            else:
                pin_found(self.store, found, fresh, &verdict)
        return None if verdict.outcome == STALE else self.finish(&verdict, found.num, fresh.num)

    def pin_row(self, RowMemory rows not None, row, max_num_pinned) -> int:
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

    def unpin_row(self, RowMemory rows not None, row) -> int:
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
