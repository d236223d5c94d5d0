"""Numbers for each row of a call, read from arguments."""

from numbers import Real

import numpy as np

from pagepool.errors import ArgumentError

cdef object ndarray = np.ndarray
cdef PageIds ZERO = PageIds([0])
cdef PageIds ONE = PageIds([1])
cdef PageIds NO_TERMS = PageIds([UNKNOWN])


cdef PageIds as_amounts(object values, str name, Py_ssize_t num_rows):
    """Return a copy of `values`, a number for each row or one for all, so that they cannot change during the call."""
    cdef PageIds amounts
    if hasattr(values, "__index__") and not isinstance(values, ndarray):
        return PageIds([size_of(values, name, 0, MAX_TOKENS)])
    amounts = as_own_ids(values, name)
    if amounts.num != num_rows:
        raise ArgumentError(f"{name}: got {amounts.num}, allowed: one, or as many as rows, {num_rows}")
    return amounts


cdef PageIds as_counts(object counts, PageIds tokens, Py_ssize_t num_rows):
    """Return how many of the tokens each row gets."""
    cdef PageIds numbers
    cdef Amounts amounts
    cdef int64_t total = 0
    cdef Py_ssize_t i
    if counts is None:
        numbers, total = ONE if tokens.num else ZERO, num_rows if tokens.num else 0
    else:
        numbers = as_amounts(counts, "counts", num_rows)
    amounts = amounts_in(numbers)
    for i in range(num_rows if counts is not None else 0):
        if amount(&amounts, i) < 0:
            raise ArgumentError(f"counts: got {amount(&amounts, i)} (at {i}), allowed: at least 0")
        total += amount(&amounts, i)
    if total != tokens.num:
        raise ArgumentError(f"token_ids: got {tokens.num}, allowed: as many as rows need by `counts`, {total}")
    return numbers


cdef PageIds as_terms(object seconds, Py_ssize_t num_rows):
    """Return the terms of `seconds`: a number or None for each row, or one number for all."""
    cdef list each = [seconds] if isinstance(seconds, Real) else as_list(seconds, "seconds")
    if len(each) not in (num_rows, 1) or (len(each) != num_rows and each[0] is not seconds):
        raise ArgumentError(f"seconds: got {len(each)}, allowed: one, or as many as rows, {num_rows}")
    return PageIds([term_of_seconds(item) for item in each])
