# Requests that wait to be admitted, by number. A `WaitingLine` keeps their order and their hits.
#
# Always: a `Waiter` that waits has one `Place` in the line, and is in `requests`; all others are in the list of free
# numbers, and await no key.

cimport cython
from libc.stdint cimport int32_t, int64_t

from pagepool.core.holding cimport CacheGroups
from pagepool.core.pool cimport PageStore
from pagepool.core.values cimport HashedTokens
from pagepool.core.waiting.hits cimport *


@cython.final
cdef class WaitingRequest(HashedTokens):
    cdef public object name
    cdef public object traits             # `RequestTraits`
    cdef public object keys               # `RequestExtraKeys`, or None
    cdef public Py_ssize_t num_prefetched  # pages loaded for it in advance
    cdef int32_t number                   # in its line, or -1
    cdef int64_t came_at                  # on the monotonic clock, in nanoseconds


@cython.final
cdef class WaitingLine:
    cdef PageStore store
    cdef CacheGroups groups
    cdef Line line
    cdef Waiter *waiters      # [capacity of `awaited`]
    cdef int32_t first_free   # number, or -1
    cdef AwaitedKeys *awaited  # in the pool's list, which frees it
    cdef list requests        # `WaitingRequest` by number, or None
    cdef int32_t num_shards   # 0: requests name no shard
    cdef bint awaits_equal    # whether a request waits while another one computes the same tokens
    cdef cython.pymutex lock
    cdef int process

    cdef int acquire(self) except -1
    cdef void release(self) noexcept
    cdef bint reserve(self) noexcept
    cdef Query look_up_of(self, int32_t number) noexcept
    cdef bint look_up(self, int32_t number) noexcept
    cdef void follow_moved(self) noexcept
    cdef int32_t number_of(self, WaitingRequest request) except -1
    cdef int end(self, int32_t number, Py_ssize_t at) except -1
