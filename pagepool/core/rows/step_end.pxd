# Steps end.

from pagepool.core.rows.forks cimport *
from pagepool.core.rows.refusals cimport *
from pagepool.core.rows.step_result cimport *
from pagepool.core.tier cimport FailedLoads


cdef object settle_step(
    RowStore rows, StepResult ended, PageIds tokens, object counts, object stop_token_ids, object max_num_tokens
)
cdef object fail_step(RowStore rows, StepResult ended)
cdef tuple rewind_rows(RowStore rows, FailedLoads loads)
cdef int32_t end_external(RowStore rows, object row, object num_tokens, str name, bint is_failed, bint is_last=*) except -1
