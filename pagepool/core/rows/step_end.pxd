# Steps end.

from pagepool.core.rows.forks cimport *
from pagepool.core.rows.refusals cimport *
from pagepool.core.rows.step_result cimport *


cdef object settle_step(RowStore rows, StepResult ended, PageIds tokens, object counts)
cdef object fail_step(RowStore rows, StepResult ended)
