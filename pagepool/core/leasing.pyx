"""Leases of pages that a transfer reads."""

cimport cython
from libc.stdint cimport int32_t

from pagepool.core.ids cimport PageIds, as_own_ids
from pagepool.core.pages cimport find_untouchable, share, touch_all
from pagepool.core.records cimport NO_GROUP, NULL_PAGE, Pool, is_free
from pagepool.core.store cimport PageStore

from pagepool.errors import ArgumentTypeError, PageIdError


cdef Py_ssize_t find_unleasable(Pool *pool, const int32_t *ids, Py_ssize_t n) noexcept nogil:
    """Index of the null page, of a free page without an entry, or with a reference, or of one that cannot have a further one;
    -1: there is none.
    """
    cdef Py_ssize_t i
    for i in range(n):
        if ids[i] == NULL_PAGE or is_free(pool, ids[i]) and (pool.pages[ids[i]].group == NO_GROUP or pool.pages[ids[i]].ref_cnt):
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
    cdef dict leases                # those that are held, as keys, the oldest first: nothing can be lost by an interrupt
    cdef readonly bint is_held

    def __cinit__(self, PageStore store not None, page_ids, dict leases not None):
        cdef Py_ssize_t bad
        cdef bint has_room
        self.store, self.leases = store, leases
        self.ids = store.checked(as_own_ids(page_ids, "page_ids"))
        leases[self] = None
        with store.lock:
            bad = find_unleasable(&store.pool, self.ids.ids, self.ids.num)
            has_room = store.make_leases()
            self.is_held = bad < 0 and has_room
            if self.is_held:
                self.take()
        if not self.is_held:
            del leases[self]
            self.refuse(bad)

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
        cdef Py_ssize_t i, bad = -1
        with self.store.lock:
            if self.is_held:
                bad = self.store.give_back_ids(self.ids.ids, self.ids.num, True)
            for i in range(self.ids.num if self.is_held and bad < 0 else 0):
                self.store.leases[self.ids.ids[i]] -= 1
            self.is_held = self.is_held and bad >= 0
        if bad >= 0:
            self.store.refuse_give_back(self.ids, bad)
        self.leases.pop(self, None)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.release()
