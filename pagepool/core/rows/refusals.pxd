# Errors for rows of a batch.

from libc.stdint cimport int32_t, int64_t

from pagepool.core.holding cimport ForkOutcome
from pagepool.core.rows.release cimport *
from pagepool.core.rows.step_result cimport *


cdef int check_lengths(PageIds tokens, PageIds rows) except -1
cdef int check_drafts(const Batch *batch, int32_t num_drafts) except -1
cdef int refuse_row_length(const Batch *batch, Py_ssize_t row, int64_t num_tokens) except -1
cdef object not_admitted(str name)
cdef int refuse_unready(
    PageStore store, const Batch *batch, Py_ssize_t row, bint is_due, bint may_wait=*, Py_ssize_t at=*
) except -1
cdef int refuse_ahead_of(const Batch *batch, Py_ssize_t row) except -1
cdef int refuse_growth(PageStore store, const Batch *batch, const Growth *growth, Py_ssize_t at, bint is_due) except -1
cdef int refuse_settlement(const Batch *batch, const Settlement *settlement, SettleFault fault, Py_ssize_t at) except -1
cdef int refuse_append(PageStore store, const Batch *batch, PageIds rows, Py_ssize_t at) except -1
cdef int refuse_trim(
    PageStore store, const Batch *batch, PageIds rows, Py_ssize_t at, int32_t num_tokens, bint is_due
) except -1
cdef int refuse_release(PageStore store, const Batch *batch, PageIds rows, const Release *release) except -1
cdef int refuse_fork(
    PageStore store, const Batch *batch, Py_ssize_t source, PageIds targets, Py_ssize_t at, ForkOutcome outcome
) except -1
cdef int refuse_end(
    PageStore store, const Batch *batch, Py_ssize_t row, int32_t num_tokens, int32_t num_external, bint is_due
) except -1
