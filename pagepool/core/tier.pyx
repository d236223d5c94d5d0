"""The tier behind a pool: host memory behind device memory."""

cimport cython
from cpython.mem cimport PyMem_RawCalloc as calloc
from cpython.mem cimport PyMem_RawFree as free
from cpython.ref cimport Py_INCREF, PyObject
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint8_t, uint32_t

from pagepool.core.arguments cimport size_of
from pagepool.core.records cimport Fill, Pool, Tier
from pagepool.core.store cimport PageStore
from pagepool.core.transfers cimport note_cached, save_evicted

from pagepool.errors import ArgumentError, ArgumentTypeError

cdef enum:
    MAX_USES = 255


cdef void note_eviction(Pool *pool, int32_t page_id) noexcept nogil:
    save_evicted(pool, page_id)


cdef void note_cached_page(Pool *pool, int32_t page_id) noexcept nogil:
    note_cached(pool, page_id)


@cython.final
@cython.auto_pickle(False)
cdef class PageTier:
    """`num_pages` pages, including a null page, behind those of `store`. `eviction` is the name of its policy.

    A page that is evicted from the store is saved, if it was used `min_uses` times, and if it `writes_through` as soon as it is
    computed and was used that often. O(num_pages of both) to make.
    """

    def __cinit__(self, PageStore store not None, num_pages, eviction="lru", bint writes_through=False, min_uses=1):
        cdef Tier *tier = &self.tier
        cdef Py_ssize_t n = store.pool.num_pages
        cdef bint has_all
        store.check_fixed()
        if not store.enable_caching:
            raise ArgumentError("host_tier: got one, allowed without prefix caching: None")
        self.num_device_pages = store.pool.num_pages
        self.pages = PageStore(num_pages, True, True, eviction)
        tier.min_uses = <uint8_t>size_of(min_uses, "min_uses", 1, MAX_USES)
        tier.oldest_load = INT64_MAX
        tier.note_eviction, tier.note_entry, tier.pool = note_eviction, note_cached_page, &self.pages.pool
        tier.loading = <int64_t *>calloc(n, sizeof(int64_t))
        tier.uses = <uint8_t *>calloc(n, 1) if tier.min_uses > 1 else NULL
        tier.fresh_numbers = <uint32_t *>calloc(n, sizeof(uint32_t)) if writes_through else NULL
        tier.fills = <Fill *>calloc(self.pages.pool.num_pages, sizeof(Fill))
        has_all = tier.loading != NULL and tier.fills != NULL and (tier.uses != NULL) == (tier.min_uses > 1)
        if not has_all or (tier.fresh_numbers != NULL) != writes_through:
            raise MemoryError("the tier of a pool")

    def __dealloc__(self):
        free(self.tier.items)
        free(self.tier.loading)
        free(self.tier.uses)
        free(self.tier.fresh_numbers)
        free(self.tier.fresh)
        free(self.tier.fills)

    def __reduce__(self):
        raise ArgumentTypeError("a tier cannot be pickled")

    def counters(self, PageStore store not None) -> tuple:
        """Free and cached pages, pages in flight, and pages saved, loaded, failed, evicted and refused since it was made."""
        cdef Tier tier
        cdef Pool pool
        if store.tier != <PyObject *>self:
            raise ArgumentError("store: got one with another tier")
        with store.lock:
            tier, pool = self.tier, self.pages.pool
        return (
            pool.num_free, pool.num_entries, tier.num, tier.num_saved, tier.num_loaded, tier.num_failed, pool.num_evicted,
            tier.num_refused,
        )


def add_tier(PageStore store not None, PageTier tier not None) -> None:
    """Put a new tier behind a store that has none, and for which it was made. It is the store's from now on."""
    cdef bint is_new
    store.check_fixed()
    if not store.enable_caching or tier.num_device_pages != store.pool.num_pages:
        raise ArgumentError("host_tier: got one for another pool")
    with store.lock:
        is_new = store.pool.tier == NULL and not tier.is_used
        if is_new:
            store.pool.tier = &tier.tier
            tier.is_used = True
            Py_INCREF(tier)
            store.tier = <PyObject *>tier
    if not is_new:
        raise ArgumentError("host_tier: got one for a pool that has one, or one that a pool has")
