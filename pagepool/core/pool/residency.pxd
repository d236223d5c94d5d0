# Residency: how long sampled pages stay in the pool.
#
# Always: a stay does not start after its last use, and neither is later than now.

from libc.stdint cimport int32_t, int64_t

from pagepool.core.base cimport monotonic_ns

cdef enum:
    NUM_BUCKETS = 24          # histogram buckets: below 1 ms, below 2, 4, ..., 2**22 ms, and longer

cdef struct Stay:             # times of a sampled page in nanoseconds of the residency clock
    int64_t start             # when it was handed out
    int64_t last_use          # when it was last handed out or hit

cdef struct Histogram:        # durations by bucket
    int64_t counts[NUM_BUCKETS]
    int64_t sum               # ns

cdef struct Residency:        # how long sampled pages stay
    Stay *stays               # [num_pages / interval + 1]
    int32_t shift             # every 2**shift-th page is sampled
    Histogram lifetimes       # time between handing a page out and evicting it
    Histogram idle_times      # time between its last use and its eviction
    Histogram reuse_gaps      # time between two uses


cdef inline Stay *_stay_of(const Residency *residency, int32_t page_id) noexcept nogil:
    """Return the times of a sampled page."""
    return &residency.stays[page_id >> residency.shift]


cdef inline void _count_time(Histogram *histogram, int64_t duration) noexcept nogil:
    cdef int64_t milliseconds = duration // 1_000_000
    cdef Py_ssize_t bucket = 0
    assert duration >= 0
    while milliseconds >> bucket and bucket < NUM_BUCKETS - 1:
        bucket += 1
    histogram.counts[bucket] += 1
    histogram.sum += duration


cdef inline void begin_stay(const Residency *residency, int32_t page_id) noexcept nogil:
    """Record that a sampled page without an entry is handed out."""
    cdef int64_t now = monotonic_ns()
    _stay_of(residency, page_id)[0] = Stay(start=now, last_use=now)


cdef inline void renew_stay(Residency *residency, int32_t page_id) noexcept nogil:
    """Record that a sampled page is evicted and handed out."""
    cdef Stay *stay = _stay_of(residency, page_id)
    cdef int64_t now = monotonic_ns()
    assert not page_id & ((1 << residency.shift) - 1) and stay.start <= stay.last_use <= now
    _count_time(&residency.lifetimes, now - stay.start)
    _count_time(&residency.idle_times, now - stay.last_use)
    stay[0] = Stay(start=now, last_use=now)


cdef inline void record_use(Residency *residency, int32_t page_id) noexcept nogil:
    """Record a hit on a sampled page."""
    cdef Stay *stay = _stay_of(residency, page_id)
    cdef int64_t now = monotonic_ns()
    assert not page_id & ((1 << residency.shift) - 1) and stay.start <= stay.last_use <= now
    _count_time(&residency.reuse_gaps, now - stay.last_use)
    stay.last_use = now
