"""Copies of pages due before the next step."""

cimport cython
from libc.stdint cimport int32_t

from pagepool.core.pool cimport PageStore, Pool, give_back, id_in_bank

import numpy as np

from pagepool.errors import ArgumentTypeError


@cython.final
@cython.auto_pickle(False)
cdef class PageCopies:
    """Pages to copy before the next step: page ``src[i]`` to page ``dst[i]``, in the arrays of cache group ``group[i]``.

    The three are read-only int32 arrays of one length, which ``len()`` returns. Read all sources before writing any
    destination; destinations are distinct, so one gather and one scatter suffice.
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


cdef void end_copies(Pool *pool) noexcept nogil:
    """Give back the sources of the taken copies, and empty the list."""
    cdef Py_ssize_t i
    for i in range(pool.copies.num):
        give_back(pool, pool.copies.items[i].src)
    pool.copies.num = 0


def take_copies(PageStore store not None) -> PageCopies:
    """Hand the due copies over to the caller, who does them. O(copies); nothing is allocated without any."""
    cdef Pool *pool = &store.pool
    cdef int32_t[:, ::1] taken
    cdef Py_ssize_t i, num_due, num = -1
    with store.own_lock()[0]:
        num_due = pool.copies.num
    if num_due == 0:
        return NO_COPIES
    while num != num_due:  # arrays are made without the lock
        num = num_due
        columns = np.empty((3, num), np.int32)
        taken = columns
        with store.own_lock()[0]:
            num_due = pool.copies.num
            if num == num_due:
                for i in range(num):
                    taken[0, i] = id_in_bank(pool, pool.copies.items[i].src)
                    taken[1, i] = id_in_bank(pool, pool.copies.items[i].dst)
                    taken[2, i] = pool.copies.items[i].group
                end_copies(pool)
                assert pool.copies.num == 0
    return copies_of(columns)
