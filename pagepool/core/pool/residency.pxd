# Residency: how long sampled pages stay in the pool. The caller holds the store's lock.
#
# Always: a stay does not start after its last use, and neither is later than now.

from libc.stdint cimport int32_t, int64_t

from pagepool.core.base cimport monotonic_ns
from pagepool.core.pool.records cimport *


cdef inline Stay *_stay_of(Pool *pool, int32_t page_id) noexcept nogil:
    """Return the times of a sampled page."""
    return &pool.residency.stays[page_id >> pool.residency.shift]


cdef inline void _count_time(Histogram *histogram, int64_t duration) noexcept nogil:
    cdef int64_t milliseconds = duration // 1_000_000
    cdef Py_ssize_t bucket = 0
    assert duration >= 0
    while milliseconds >> bucket and bucket < NUM_BUCKETS - 1:
        bucket += 1
    histogram.counts[bucket] += 1
    histogram.sum += duration


cdef inline void begin_stay(Pool *pool, int32_t page_id) noexcept nogil:
    """Record that a sampled page without an entry is handed out."""
    cdef int64_t now = monotonic_ns()
    assert not page_id & pool.sample_mask
    _stay_of(pool, page_id)[0] = Stay(start=now, last_use=now)


cdef inline void renew_stay(Pool *pool, int32_t page_id) noexcept nogil:
    """Record that a sampled page is evicted and handed out."""
    cdef Stay *stay = _stay_of(pool, page_id)
    cdef int64_t now = monotonic_ns()
    assert not page_id & pool.sample_mask and stay.start <= stay.last_use <= now
    _count_time(&pool.residency.lifetimes, now - stay.start)
    _count_time(&pool.residency.idle_times, now - stay.last_use)
    stay[0] = Stay(start=now, last_use=now)


cdef inline void record_use(Pool *pool, int32_t page_id) noexcept nogil:
    """Record a hit on a sampled page."""
    cdef Stay *stay = _stay_of(pool, page_id)
    cdef int64_t now = monotonic_ns()
    assert not page_id & pool.sample_mask and stay.start <= stay.last_use <= now
    _count_time(&pool.residency.reuse_gaps, now - stay.last_use)
    stay.last_use = now
