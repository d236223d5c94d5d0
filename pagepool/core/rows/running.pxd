# Running rows, as Python has them.

cimport cython

from pagepool.core.holding cimport RefusedRequest, Tokens, count_room_tokens, count_slots, count_tokens
from pagepool.core.rows.refusals cimport *
from pagepool.core.rows.step_result cimport *


@cython.auto_pickle(False)
cdef class RunningRows:
    cdef RowStore rows
    cdef int64_t last_step          # last step with moves taken by this batch
    cdef readonly object stays
    cdef readonly object num_ahead_tokens
    cdef readonly object num_tokens
    cdef readonly object num_computed_tokens
    cdef readonly object num_cached_tokens
    cdef readonly object num_external_tokens
    cdef readonly object is_admitted

    cdef int exchange(self, object src, object tgt, bint is_move) except -1
    cdef int give_back(self, PageIds row_ids, object seconds) except -1
    cdef int fork_into(self, Py_ssize_t source, PageIds target_rows) except -1
