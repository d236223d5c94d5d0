"""The number of this process, which counts forks, and errors for objects that another process made."""

from pagepool.core.base.platform cimport *

from pagepool.errors import of_other_process

cdef extern from *:
    """
    #include <pthread.h>
    static int *pagepool_process_number;
    static void pagepool_count_fork(void) { ++*pagepool_process_number; }
    /* Count each fork in the child, before `fork` returns there. Return non-zero if memory is short. */
    static int pagepool_count_forks_in(int *number) {
        pagepool_process_number = number;
        return pthread_atfork(NULL, NULL, pagepool_count_fork);
    }
    """
    bint count_forks_in "pagepool_count_forks_in" (int *number)


cdef extern from *:
    """
    /* Before CPython 3.13 a Cython mutex is an allocated lock; NULL if the allocation failed. */
    #if PY_VERSION_HEX > 0x030d0000
    #define pagepool_has_lock(mutex) 1
    #else
    #define pagepool_has_lock(mutex) (*(void **)(mutex) != NULL)
    #endif
    """
    bint has_lock "pagepool_has_lock" (const void *mutex)


cdef int process_number = 0

if count_forks_in(&process_number):
    raise MemoryError("the number of forks")


cdef int require_allocated(const void *mutex) except -1:
    """Raise MemoryError if the lock of a new object was not allocated, since using it would crash."""
    if not has_lock(mutex):
        raise MemoryError("a lock")
    return 0


cdef int refuse_process(str name) except -1:
    raise of_other_process(name)
