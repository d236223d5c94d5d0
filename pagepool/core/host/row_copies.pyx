"""Copies between rows of host memory, by several threads."""

from libc.stdint cimport int32_t, uint8_t
from libc.string cimport memmove

from pagepool.core.base cimport CACHE_LINE, go_on, let_others_run, raw_calloc, raw_free
from pagepool.core.values cimport PageIds, as_own_ids, require_matrix, size_of

import numpy as np

from pagepool.errors import ArgumentError

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_t:
        pass
    int pthread_create(pthread_t *thread, const void *attributes, void *(*run)(void *) noexcept nogil, void *argument)
    int pthread_detach(pthread_t thread)

cdef extern from *:
    """
    #include <sched.h>
    /* Add to a number that threads share, and return the sum. */
    static inline Py_ssize_t pagepool_add(Py_ssize_t *number, Py_ssize_t more) {
        return __atomic_add_fetch(number, more, __ATOMIC_ACQ_REL);
    }
    """
    Py_ssize_t add "pagepool_add" (Py_ssize_t *number, Py_ssize_t more) noexcept nogil
    int sched_yield() noexcept nogil

cdef enum:
    MAX_THREADS = 64
    PIECES_OF_A_THREAD = 4
    BYTES_OF_A_THREAD = 1 << 20   # a thread starts in some 50 us, as long as copying a MiB takes
    BYTES_OF_A_PAGE = 1 << 6      # bytes a page in calls of `let_others_run`: the GIL is released from 64 KiB on


cdef struct Copying:          # rows, their bytes divided into pieces; each thread copies the next piece, until none is left
    const uint8_t *source
    uint8_t *target
    Py_ssize_t source_stride  # bytes from one row to the next
    Py_ssize_t target_stride
    const int32_t *source_ids
    const int32_t *target_ids
    Py_ssize_t num_rows
    Py_ssize_t width          # bytes of a row
    Py_ssize_t num_pieces
    Py_ssize_t num_begun      # pieces; exceeds `num_pieces` once all have begun
    Py_ssize_t num_copied     # pieces
    Py_ssize_t num_threads    # threads that may still read this; the last one frees it


cdef inline Py_ssize_t start_of(const Copying *copying, Py_ssize_t piece) noexcept nogil:
    """Return the offset of the first byte of a piece, counted over all rows."""
    cdef Py_ssize_t num_bytes = copying.num_rows * copying.width
    if piece == copying.num_pieces:
        return num_bytes
    return num_bytes // copying.num_pieces // CACHE_LINE * CACHE_LINE * piece


cdef void copy_piece(const Copying *copying, Py_ssize_t piece) noexcept nogil:
    """Copy a piece, which may begin and end inside rows. A row may be copied onto itself."""
    cdef Py_ssize_t start = start_of(copying, piece), left = start_of(copying, piece + 1) - start, size
    cdef Py_ssize_t i = start // copying.width, column = start % copying.width
    assert 0 <= piece < copying.num_pieces and left > 0
    while left > 0:
        size = min(copying.width - column, left)
        memmove(
            copying.target + copying.target_ids[i] * copying.target_stride + column,
            copying.source + copying.source_ids[i] * copying.source_stride + column,
            size,
        )
        i, column, left = i + 1, 0, left - size


cdef void copy_pieces(Copying *copying) noexcept nogil:
    """Copy pieces that no thread has begun. Once all have begun, do not touch the rows: `copy_rows` may have returned."""
    cdef Py_ssize_t piece = add(&copying.num_begun, 1) - 1
    while piece < copying.num_pieces:
        copy_piece(copying, piece)
        add(&copying.num_copied, 1)
        piece = add(&copying.num_begun, 1) - 1


cdef void leave(Copying *copying) noexcept nogil:
    if add(&copying.num_threads, -1) == 0:
        raw_free(copying)


cdef void *help_copying(void *argument) noexcept nogil:
    copy_pieces(<Copying *>argument)
    leave(<Copying *>argument)
    return NULL


cdef bint copy_by_threads(const Copying *rows, Py_ssize_t num_threads) noexcept nogil:
    """Copy by this thread and new ones, without waiting for those that start late; return False if memory is short."""
    cdef Copying *copying = <Copying *>raw_calloc(1, sizeof(Copying))
    cdef pthread_t thread
    assert num_threads > 0 and rows.num_pieces > 0
    if copying == NULL:
        return False
    copying[0] = rows[0]
    copying.num_threads = num_threads
    for _ in range(1, num_threads):
        if pthread_create(&thread, NULL, help_copying, copying) == 0:
            pthread_detach(thread)
        else:
            leave(copying)
    copy_pieces(copying)
    while add(&copying.num_copied, 0) < rows.num_pieces:
        sched_yield()
    leave(copying)
    return True


cdef PageIds rows_of(object row_ids, Py_ssize_t num_rows, str name):
    """Return checked ids that nobody can change while the GIL is released."""
    cdef PageIds ids = as_own_ids(row_ids, name)
    cdef Py_ssize_t i
    for i in range(ids.num):
        if not 0 <= ids.ids[i] < num_rows:
            raise ArgumentError(f"{name}: got {ids.ids[i]}, allowed: rows from 0 to {num_rows - 1}")
    return ids


cdef object require_rows(object rows, str name):
    """Return `rows`, which must be a matrix of bytes with contiguous rows."""
    rows = require_matrix(rows, np.uint8, name)
    if rows.shape[1] > 1 and rows.strides[1] != 1:
        raise ArgumentError(f"{name}: got rows with gaps, allowed: contiguous rows")
    return rows


def copy_rows(source, source_ids, target, target_ids, num_threads=1) -> None:
    """Copy row ``source_ids[i]`` of `source` to row ``target_ids[i]`` of `target`, for all `i`.

    Both are uint8 matrices with rows of one length. The bytes of a row are contiguous; there may be gaps between rows. They
    may share memory if no byte is both read and written, except by a copy of a row onto itself. The ids are arrays or lists of
    ints; a row of `target` that occurs twice gets bytes of either source. 64 KiB and more are copied without the GIL, by up to
    `num_threads` threads, including the caller's, and at most one for each MiB. The call returns when all is copied, without
    waiting for threads that start late.

    Before anything is copied, raise ArgumentTypeError for other types, and ArgumentError for ids outside the arrays, unequal
    lengths, a read-only target, and less than one thread.
    """
    cdef const uint8_t[:, :] sources = require_rows(source, "source")
    cdef PageIds rows_of_source = rows_of(source_ids, sources.shape[0], "source_ids"), rows_of_target
    cdef uint8_t[:, :] targets
    cdef Copying rows
    cdef Py_ssize_t num = size_of(num_threads, "num_threads", 1), width = sources.shape[1], num_bytes
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
    rows = Copying(
        source=&sources[0, 0], target=&targets[0, 0], source_stride=sources.strides[0], target_stride=targets.strides[0],
        source_ids=rows_of_source.ids, target_ids=rows_of_target.ids, num_rows=rows_of_source.num, width=width,
        num_pieces=1, num_begun=0, num_copied=0, num_threads=0,
    )
    thread = let_others_run(num_bytes // BYTES_OF_A_PAGE)
    num = 1 if thread == NULL else max(1, min(num, num_bytes // BYTES_OF_A_THREAD, MAX_THREADS))
    if num > 1:
        rows.num_pieces = num * PIECES_OF_A_THREAD
    if num == 1 or not copy_by_threads(&rows, num):
        copy_pieces(&rows)
    go_on(thread)
