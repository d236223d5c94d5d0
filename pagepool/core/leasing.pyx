"""Leases of pages that a transfer reads."""

cimport cython
from libc.stdint cimport int32_t

from pagepool.core.ids cimport PageIds, as_own_ids
from pagepool.core.pages cimport find_untouchable, share, touch_all
from pagepool.core.records cimport NO_GROUP, NULL_PAGE, Page, Pool, is_free
from pagepool.core.store cimport PageStore

from pagepool.errors import ArgumentTypeError, PageIdError


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
