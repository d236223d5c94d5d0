"""Copies of pages that are due before the next step."""

cimport cython
from libc.stdint cimport int32_t

from pagepool.core.holding.holding cimport end_copies
from pagepool.core.pool.records cimport Pool
from pagepool.core.pool.store cimport PageStore

import numpy as np

from pagepool.errors import ArgumentTypeError


@cython.final
@cython.auto_pickle(False)
cdef class PageCopies:
    """Pages to be copied before the next step: page ``src[i]`` to page ``dst[i]``, in the arrays of cache group ``group[i]``.

    The three are read-only int32 arrays of one length, which ``len()`` returns. All sources are read before any destination
    is written, and no destination stands there twice, so one gather and one scatter do it.
    """

    cdef readonly object src, dst, group

    def __init__(self):
        raise TypeError("a PageCopies is what take_copies returns")

    def __len__(self):
        return len(self.src)

    def __repr__(self):
        return f"PageCopies(src={self.src.tolist()}, dst={self.dst.tolist()}, group={self.group.tolist()})"

    def __reduce__(self):
        raise ArgumentTypeError("page copies cannot be pickled")


cdef PageCopies copies_of(object columns):
    cdef PageCopies copies = PageCopies.__new__(PageCopies)
    columns.flags.writeable = False
    copies.src, copies.dst, copies.group = columns
    return copies


cdef PageCopies NO_COPIES = copies_of(np.zeros((3, 0), np.int32))


def take_copies(PageStore store not None) -> PageCopies:
    """Return the copies that are due; from now on the caller does them. O(copies); nothing is allocated without any."""
    cdef Pool *pool = &store.pool
    cdef int32_t[:, ::1] taken
    cdef Py_ssize_t i, num_due, num = -1
    with store.lock:
        num_due = pool.copies.num
    if num_due == 0:
        return NO_COPIES
    while num != num_due:  # arrays are made without the lock
        num = num_due
        columns = np.empty((3, num), np.int32)
        taken = columns
        with store.lock:
            num_due = pool.copies.num
            if num == num_due:
                for i in range(num):
                    taken[0, i] = pool.copies.items[i].src
                    taken[1, i] = pool.copies.items[i].dst
                    taken[2, i] = pool.copies.items[i].group
                end_copies(pool)
    return copies_of(columns)
