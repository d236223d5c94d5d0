# The operating system and the compiler.

from libc.stdint cimport int32_t, int64_t, uint32_t

cdef extern from *:
    """
    #if defined(__linux__)
    #include <sys/mman.h>
    #endif
    /* Use small pages for sparsely touched memory: huge pages would make all of it resident. */
    static inline void pagepool_keep_sparse(char *memory, size_t size) {
    #if defined(MADV_NOHUGEPAGE)
        size_t start = ((size_t)memory + 4095) & ~(size_t)4095;
        if (size >= 2 << 20) madvise((void *)start, ((size_t)memory + size - start) & ~(size_t)4095, MADV_NOHUGEPAGE);
    #endif
    }
    """
    void keep_sparse "pagepool_keep_sparse" (char *memory, size_t size) noexcept nogil
    void fetch "__builtin_prefetch" (const void *address) noexcept nogil

cdef extern from *:
    """
    static inline void *pagepool_calloc(size_t num, size_t size) { return PyMem_RawCalloc(num, size); }
    static inline void *pagepool_realloc(void *memory, size_t size) { return PyMem_RawRealloc(memory, size); }
    static inline void pagepool_free(void *memory) { PyMem_RawFree(memory); }  /* `cython -a` marks PyMem_... as Python */
    """
    void *raw_calloc "pagepool_calloc" (size_t num, size_t size) noexcept nogil
    void *raw_realloc "pagepool_realloc" (void *memory, size_t size) noexcept nogil
    void raw_free "pagepool_free" (void *memory) noexcept nogil

cdef extern from *:
    """
    #include <time.h>
    static inline int64_t pagepool_monotonic_ns(void) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    }
    """
    int64_t monotonic_ns "pagepool_monotonic_ns" () noexcept nogil

cdef extern from *:
    """
    #if defined(CLOCK_MONOTONIC_COARSE)
    #define PAGEPOOL_COARSE_CLOCK CLOCK_MONOTONIC_COARSE  /* up to a few ms late, but read in a few ns */
    #else
    #define PAGEPOOL_COARSE_CLOCK CLOCK_MONOTONIC
    #endif
    static inline int64_t pagepool_coarse_time(int32_t units_a_second) {
        struct timespec now;
        clock_gettime(PAGEPOOL_COARSE_CLOCK, &now);
        return (int64_t)now.tv_sec * units_a_second + now.tv_nsec / (1000000000 / units_a_second);
    }
    static inline int32_t pagepool_highest_bit(uint32_t word) { return 31 - __builtin_clz(word); }  /* word != 0 */
    """
    int64_t coarse_time "pagepool_coarse_time" (int32_t units_a_second) noexcept nogil
    int32_t highest_bit "pagepool_highest_bit" (uint32_t word) noexcept nogil

cdef extern from *:
    """
    #define PAGEPOOL_RELEASE_GIL_AT 1024
    /* Release the GIL for work on many pages; only C may run until `go_on`. Builds that trace lines keep the GIL. */
    static inline void *pagepool_let_others_run(Py_ssize_t num_pages) {
    #if CYTHON_TRACE_NOGIL
        return NULL;
    #else
        return num_pages >= PAGEPOOL_RELEASE_GIL_AT ? (void *)PyEval_SaveThread() : NULL;
    #endif
    }
    static inline void pagepool_go_on(void *thread) {
        if (thread != NULL) PyEval_RestoreThread((PyThreadState *)thread);
    }
    """
    void *let_others_run "pagepool_let_others_run" (Py_ssize_t num_pages) noexcept
    void go_on "pagepool_go_on" (void *thread) noexcept

cdef extern from *:
    """
    /* 0 only in the build that `python -m bench.races.guards` compares with, to measure the guards of hot loops. */
    #ifndef PAGEPOOL_GUARDS
    #define PAGEPOOL_GUARDS 1
    #endif
    """
    bint GUARDS "PAGEPOOL_GUARDS"

cdef extern from *:
    """
    #ifdef Py_GIL_DISABLED
    #define PAGEPOOL_GIL_DISABLED 1
    #else
    #define PAGEPOOL_GIL_DISABLED 0
    #endif
    """
    bint GIL_DISABLED "PAGEPOOL_GIL_DISABLED"

cdef enum:
    CACHE_LINE = 64           # bytes


cdef extern from *:
    """
    /* A rare condition: the compiler moves the branch out of the hot cache lines. */
    #define pagepool_rare(condition) __builtin_expect(!!(condition), 0)
    /* A condition that few pools ever meet: the compiler does not inline the calls in the branch either. */
    #if defined(__GNUC__) && __GNUC__ >= 9
    #define pagepool_exceptional(condition) __builtin_expect_with_probability(!!(condition), 0, 0.999)
    #else
    #define pagepool_exceptional(condition) __builtin_expect(!!(condition), 0)
    #endif
    """
    bint rare "pagepool_rare" (bint condition) noexcept nogil
    bint exceptional "pagepool_exceptional" (bint condition) noexcept nogil
