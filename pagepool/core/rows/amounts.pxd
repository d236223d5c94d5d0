# Numbers for each row of a call, read from arguments.

from pagepool.core.base cimport MAX_TOKENS
from pagepool.core.rows.settle cimport *
from pagepool.core.values cimport PageIds, as_list, as_own_ids, as_page_ids, new_ids, refuse_negative, size_of, term_of_seconds


cdef PageIds ZERO
cdef PageIds ONE
cdef PageIds NO_TERMS

cdef PageIds as_amounts(object values, str name, Py_ssize_t num_rows)
cdef PageIds as_counts(object counts, PageIds tokens, Py_ssize_t num_rows)
cdef PageIds as_terms(object seconds, Py_ssize_t num_rows)


cdef inline Amounts amounts_in(PageIds amounts) noexcept:
    """Return a view of amounts. A single number serves all rows."""
    return Amounts(values=amounts.ids, stride=amounts.num > 1)
