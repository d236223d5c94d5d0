# How long sampled pages stay, and how long they are idle.

from libc.stdint cimport int32_t, int64_t

from pagepool.core.platform cimport monotonic_ns
from pagepool.core.records cimport NO_GROUP, NUM_BUCKETS, Histogram, Pool, Stay


cdef inline Stay *stay_of(Pool *pool, int32_t page_id) noexcept nogil:
    """When a sampled page was handed out and last used."""
    return &pool.residency.stays[page_id >> pool.residency.shift]


cdef inline void count_time(Histogram *histogram, int64_t duration) noexcept nogil:
    cdef int64_t milliseconds = duration // 1_000_000
    cdef Py_ssize_t bucket = 0
    while milliseconds >> bucket and bucket < NUM_BUCKETS - 1:
        bucket += 1
    histogram.counts[bucket] += 1
    histogram.sum += duration


cdef inline void note_claim(Pool *pool, int32_t page_id) noexcept nogil:
    """Record that a sampled page is handed out, and evicted if it has an entry."""
    cdef Stay *stay = stay_of(pool, page_id)
    cdef int64_t now = monotonic_ns()
    if pool.pages[page_id].group != NO_GROUP:
        count_time(&pool.residency.lifetimes, now - stay.start)
        count_time(&pool.residency.idle_times, now - stay.last_use)
    stay[0] = Stay(now, now)


cdef inline void note_use(Pool *pool, int32_t page_id) noexcept nogil:
    """Record a hit on a sampled page."""
    cdef Stay *stay = stay_of(pool, page_id)
    cdef int64_t now = monotonic_ns()
    count_time(&pool.residency.reuse_gaps, now - stay.last_use)
    stay.last_use = now
