# Page tables: the host side of a table, `TableRows`, and its base `TableGroup`, one or several tables with the same rows.

cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport int32_t, uint8_t

from pagepool.core.base cimport require_process
from pagepool.core.tables.page_table cimport *
from pagepool.core.values cimport PageIds


cdef class TableGroup:
    cdef PyObject **tables          # TableRows of equal height; the class that sets them keeps them alive
    cdef PyObject **lock_order      # the tables in locking order
    cdef Py_ssize_t num_tables

    cdef Py_ssize_t checked_row(self, object row) except -1
    cdef int put_one(self, object page_ids, object row, bint replaces) except -1
    cdef int put_several(self, object page_ids_per_req, object req_indices, bint replaces) except -1


cdef class TableRows(TableGroup):
    cdef Table table
    cdef PyObject *itself
    cdef readonly object page_table_cpu         # these buffers are pinned by the memoryviews below
    cdef readonly object num_pages_per_row
    cdef readonly tuple sink_page_ids
    cdef int32_t[:, ::1] table_view
    cdef int32_t[::1] num_pages_view
    cdef int32_t[::1] extent_view
    cdef uint8_t[::1] flags_view
    cdef cython.pymutex lock
    cdef int process          # number of the process that made it

    @cython.final
    cdef inline int require_own(self) except -1:
        """Raise IntegrityError in a process that did not make the table."""
        return require_process(self.process, "PageTable")

    @cython.final
    cdef inline cython.pymutex *own_lock(self) except NULL:
        """Return the lock; raise IntegrityError in a process that did not make the table."""
        require_process(self.process, "PageTable")
        return &self.lock


cdef tuple in_lock_order(tuple tables)
cdef tuple checked_tables(object page_tables)
