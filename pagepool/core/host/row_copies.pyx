"""Copies between rows of host memory, by several threads."""

from libc.stdint cimport int32_t, uint8_t
from libc.string cimport memmove

from pagepool.core.base cimport CACHE_LINE, go_on, let_others_run
from pagepool.core.values cimport PageIds, as_own_ids, require_matrix, size_of

import numpy as np

from pagepool.errors import ArgumentError

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_t:
        pass
    int pthread_create(pthread_t *thread, const void *attributes, void *(*run)(void *) noexcept nogil, void *argument)
    int pthread_join(pthread_t thread, void **result)

cdef enum:
    MAX_THREADS = 64
    BYTES_OF_A_THREAD = 1 << 20   # a thread takes some 50 us to start, a MiB as long to copy
    BYTES_OF_A_PAGE = 1 << 6      # of a page in `let_others_run`: the GIL is released for 64 KiB


cdef struct Part:             # columns of all rows, for one thread
    const uint8_t *source
    uint8_t *target
    Py_ssize_t source_stride  # bytes from one row to the next
    Py_ssize_t target_stride
    const int32_t *source_ids
    const int32_t *target_ids
    Py_ssize_t num_rows
    Py_ssize_t size           # bytes of each row


cdef void *copy_part(void *argument) noexcept nogil:
    """Copy the columns of a part. A row may be copied onto itself."""
    cdef const Part *part = <const Part *>argument
    cdef Py_ssize_t i
    for i in range(part.num_rows):
        memmove(
            part.target + part.target_ids[i] * part.target_stride,
            part.source + part.source_ids[i] * part.source_stride,
            part.size,
        )
    return NULL


cdef void copy_parts(Part whole, Py_ssize_t num_parts) noexcept nogil:
    """Divide the columns among threads, this one among them. A part whose thread cannot be started is copied here."""
    cdef Part[MAX_THREADS] parts
    cdef pthread_t[MAX_THREADS] threads
    cdef bint[MAX_THREADS] has_thread
    cdef Py_ssize_t i, start = 0, stop
    assert 0 < num_parts <= MAX_THREADS
    for i in range(num_parts):
        stop = whole.size if i == num_parts - 1 else whole.size * (i + 1) // num_parts // CACHE_LINE * CACHE_LINE
        parts[i] = whole
        parts[i].source += start
        parts[i].target += start
        parts[i].size = stop - start
        start = stop
    for i in range(num_parts):
        has_thread[i] = i > 0 and pthread_create(&threads[i], NULL, copy_part, &parts[i]) == 0
    for i in range(num_parts):
        if not has_thread[i]:
            copy_part(&parts[i])
    for i in range(num_parts):
        if has_thread[i]:
            pthread_join(threads[i], NULL)


cdef PageIds rows_of(object row_ids, Py_ssize_t num_rows, str name):
    """Return checked ids that nobody can change while the GIL is released."""
    cdef PageIds ids = as_own_ids(row_ids, name)
    cdef Py_ssize_t i
    for i in range(ids.num):
        if not 0 <= ids.ids[i] < num_rows:
            raise ArgumentError(f"{name}: got {ids.ids[i]}, allowed: rows from 0 to {num_rows - 1}")
    return ids


cdef object require_rows(object rows, str name):
    """Return a matrix of bytes whose rows are contiguous."""
    rows = require_matrix(rows, np.uint8, name)
    if rows.shape[1] > 1 and rows.strides[1] != 1:
        raise ArgumentError(f"{name}: got rows with gaps, allowed: contiguous rows")
    return rows


def copy_rows(source, source_ids, target, target_ids, num_threads=1) -> None:
    """Copy row ``source_ids[i]`` of `source` to row ``target_ids[i]`` of `target`, for all `i` in order.

    Both are uint8 arrays with two axes, of rows equally long, whose bytes are contiguous; there may be gaps between rows. They
    may share memory if no byte is both read and written, except by a copy of a row onto itself. The ids are arrays or lists of
    ints. 64 KiB and more are copied without the GIL, by up to `num_threads` threads, the caller's among them; each copies
    some columns of all rows, at least 1 MiB. All have ended when the call returns.

    Before anything is copied, raise ArgumentTypeError for other types, and ArgumentError for ids outside the arrays, unequal
    lengths, a read-only target, and less than one thread.
    """
    cdef const uint8_t[:, :] sources = require_rows(source, "source")
    cdef PageIds rows_of_source = rows_of(source_ids, sources.shape[0], "source_ids"), rows_of_target
    cdef uint8_t[:, :] targets
    cdef Part whole
    cdef Py_ssize_t num_parts = size_of(num_threads, "num_threads", 1), width = sources.shape[1], num_bytes
    cdef void *thread
    target = require_rows(target, "target")
    if not target.flags.writeable:
        raise ArgumentError("target: got a read-only array, allowed: one to write to")
    targets = target
    rows_of_target = rows_of(target_ids, targets.shape[0], "target_ids")
    if targets.shape[1] != width or rows_of_target.num != rows_of_source.num:
        got = f"{rows_of_target.num} rows of {targets.shape[1]} bytes"
        raise ArgumentError(f"target: got {got}, allowed: {rows_of_source.num} of {width}")
    num_bytes = rows_of_source.num * width
    if num_bytes == 0:
        return
    whole = Part(
        source=&sources[0, 0], target=&targets[0, 0], source_stride=sources.strides[0], target_stride=targets.strides[0],
        source_ids=rows_of_source.ids, target_ids=rows_of_target.ids, num_rows=rows_of_source.num, size=width,
    )
    thread = let_others_run(num_bytes // BYTES_OF_A_PAGE)
    if thread == NULL:  # few bytes, or a build that keeps the GIL
        num_parts = 1
    copy_parts(whole, max(1, min(num_parts, num_bytes // BYTES_OF_A_THREAD, width // CACHE_LINE, MAX_THREADS)))
    go_on(thread)
