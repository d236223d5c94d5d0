# Page records with their lock, and views of pages.

cimport cython
from libc.stdint cimport int32_t, int64_t

from pagepool.core.base cimport MAX_GROUP, WideDigest, go_on, let_others_run, process_number, require_process
from pagepool.core.pool.banks cimport *
from pagepool.core.values cimport PageIds, as_list, float_of, group_of, int_of_wide, size_of


cdef object short_of_pages(Py_ssize_t num, Py_ssize_t num_free, str where=*)
cdef object hashed_page(str page)
cdef object overdrawn_page(str page)
cdef object checked_page_hash(object page_hash)


cdef class CachePage


@cython.auto_pickle(False)
cdef class PageRecords:
    cdef Pool pool
    cdef dict views                     # page id -> CachePage, made on demand
    cdef cython.pymutex lock
    cdef int process                    # number of the process that made the store

    @cython.final
    cdef inline int require_own(self) except -1:
        """Raise IntegrityError in a process other than the pool's."""
        return require_process(self.process, "PagePool")

    @cython.final
    cdef inline cython.pymutex *own_lock(self) except NULL:
        """Return the lock. IntegrityError in a process other than the pool's."""
        require_process(self.process, "PagePool")
        return &self.lock

    cdef int32_t read(self, const int32_t *value) except? -1
    cdef Page record(self, int32_t page_id) except *
    cdef int32_t checked_id(self, object page_id) except -1
    cdef PageIds checked(self, object page_ids)
    cdef int32_t checked_bank(self, object bank) except -1
    cdef int check_range(self, int32_t page_id) except -1
    cdef CachePage view(self, int32_t page_id)


cdef class LoosePages(PageRecords):
    cdef Py_ssize_t capacity            # allocated records

    cdef int32_t add_page(self, int32_t ref_cnt) except -1


@cython.final
cdef class CachePage:
    cdef PageRecords store
    cdef int32_t index                  # index of the record in the store
    cdef bint is_made_null              # a null page without a pool
    cdef object own_hash                # PageHashWithGroupId of a page without a pool, or None
    cdef readonly object page_id        # index in a pool; any int without a pool

    cdef bint is_loose(self)
    cdef tuple fields(self)
