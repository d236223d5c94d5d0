"""Counts of a pool, for statistics."""

from libc.stdint cimport int32_t, int64_t

from pagepool.core.pool.store cimport *

from pagepool.errors import ArgumentTypeError

cdef Counters NO_COUNTS       # all zeros
COUNTERS = tuple(<dict>NO_COUNTS)


cdef tuple histogram_of(const Histogram *histogram):
    cdef Py_ssize_t i
    return [histogram.counts[i] for i in range(NUM_BUCKETS)], histogram.sum


def list_residency(PageStore store not None) -> tuple:
    """Return three histograms of sampled pages: lifetimes, idle times before eviction, and gaps between uses. Each is a list of
    the counts of times below 1 ms, 2, 4, ..., 2**22 ms, and longer, with the sum of the times in ns. O(1).
    """
    cdef Residency copied
    if store.pool.residency == NULL:
        return ()
    with store.own_lock()[0]:
        copied = store.pool.residency[0]
    return histogram_of(&copied.lifetimes), histogram_of(&copied.idle_times), histogram_of(&copied.reuse_gaps)


def estimate_hits(PageStore store not None) -> tuple | None:
    """Return how many pages were hit since the store was made, and the adaptive policy's estimate for LRU; None for other
    policies.
    """
    cdef int64_t num_shared, num_free, num_lru
    if store.pool.policy == NULL:
        return None
    with store.own_lock()[0]:
        num_shared, num_free = store.pool.policy.num_shared_hits, store.pool.policy.num_free_hits
        num_lru = store.pool.policy.num_lru_hits
    return num_shared + num_free, num_shared + num_lru


def count_leased(PageStore store not None) -> list:
    """Count the pages of leases with an end, once for each lease, by bank."""
    cdef Leases leases
    cdef Py_ssize_t i
    with store.own_lock()[0]:
        leases = store.pool.leases
    return [leases.num_pages_in[i] for i in range(store.pool.num_banks)]


def count_usable(PageStore store not None, bank) -> int:
    """Count the pages in use of a bank that requests can have; if none is in use, the pages that they wait for."""
    cdef int32_t queue = queue_of_bank(store.checked_bank(bank)), count
    with store.own_lock()[0]:
        count = count_usable_in(&store.pool, queue)
    return count


def list_sizes(PageStore store not None) -> list:
    """Return the number of pages in use of each bank, with its null page."""
    cdef int64_t[MAX_BANKS] sizes
    cdef Py_ssize_t i
    with store.own_lock()[0]:
        for i in range(store.pool.num_banks):
            sizes[i] = 1 + count_pages_in(&store.pool, queue_of_bank(<int32_t>i)) - store.pool.banks[i].num_retired
    return [sizes[i] for i in range(store.pool.num_banks)]


def count_entries(PageStore store not None, bank) -> tuple:
    """Return the counts of a bank for `PoolStats`: cached pages, pages ever handed out, pages ever evicted, tokens of lost
    hits, refusals, and checkpoints that found no page.
    """
    cdef int32_t checked = store.checked_bank(bank)
    cdef Bank counted
    with store.own_lock()[0]:
        counted = counted_bank(&store.pool, checked)
    return (
        counted.num_entries, counted.num_allocated_pages, counted.num_evicted_pages, counted.num_lost_hit_tokens,
        counted.num_refusals, counted.num_passed_checkpoints,
    )


cdef class QueryCounter:
    """Counts of requests admitted after a look-up, of their tokens, and of hit tokens. The store counts the tokens too, unless
    the requests were preempted.
    """

    def __cinit__(self, PageStore store not None, bint is_preempted=False):
        self.store = store
        self.is_preempted = is_preempted

    def __reduce__(self):
        raise ArgumentTypeError("a query counter cannot be pickled")

    @property
    def counts(self) -> dict:
        """Return the `QueryCounts` by name."""
        cdef QueryCounts counts
        with self.store.own_lock()[0]:
            counts = self.counted
        return counts

    cdef void count_lost(self, const LostHits *lost) noexcept:
        cdef Bank *banks = self.store.pool.banks
        with self.store.lock:
            if not self.is_preempted:
                banks[0].num_lost_hit_tokens += lost.num_for_pages
                if lost.states_bank != NO_BANK:
                    banks[lost.states_bank].num_lost_hit_tokens += lost.num_for_states

    cdef int count(self, Py_ssize_t num_tokens, Py_ssize_t num_hit_tokens) except -1:
        assert 0 <= num_hit_tokens <= num_tokens
        with self.store.own_lock()[0]:
            self.counted.num_requests += 1
            self.counted.num_queried_tokens += num_tokens
            self.counted.num_hit_tokens += num_hit_tokens
            if not self.is_preempted:
                self.store.pool.counters.num_queried_tokens += num_tokens
                self.store.pool.counters.num_hit_tokens += num_hit_tokens
        return 0
