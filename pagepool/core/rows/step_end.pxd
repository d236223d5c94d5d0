# Steps end.

from pagepool.core.rows.forks cimport *
from pagepool.core.rows.refusals cimport *
from pagepool.core.rows.step_result cimport *
from pagepool.core.tier cimport FailedLoads


cdef object settle_step(RowStore rows, StepResult ended, PageIds tokens, object counts)
cdef object fail_step(RowStore rows, StepResult ended)
cdef tuple rewind_rows(RowStore rows, FailedLoads loads)
