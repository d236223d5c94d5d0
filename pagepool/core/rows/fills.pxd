# The rows of the inputs that were filled last. A row may begin with a token that the step before samples, whose id only the
# device knows. So the field `sources` needs the rows of that step, in the order of its inputs, and a number for each token that
# it samples, whichever inputs of the batch were filled for it.
#
# The number is that of the step or, if steps are not planned ahead, the token's position: so a step of a row is not mistaken
# for an earlier one. Filling a step again, in any inputs, replaces its fill. A failed step has no fill.
#
# Always: ``0 <= last < capacity``, and a fill has at most as many rows as the batch.

from libc.stdint cimport int64_t


cdef enum:
    NAMED_ROWS = 0            # in place of a step: the caller named the rows
    TAKEN_BACK = -1

cdef struct FilledRow:        # a row of a step
    int64_t stay
    int64_t sampled           # `number_sampled` of the token that the step samples; 0: none

cdef struct Fill:             # the rows of a step, in the order of its inputs
    int64_t step              # number of the step; NAMED_ROWS or TAKEN_BACK
    int64_t num_cuts          # `num_cuts` of the batch when the step was filled
    Py_ssize_t num_rows
    FilledRow *rows           # [num_rows], and room for all rows of the batch

cdef struct Fills:            # the last fills, in a ring
    Fill *items               # [capacity]; NULL: no inputs of the batch have sources
    Py_ssize_t capacity
    Py_ssize_t last           # index of the newest


cdef inline Fill *find_fill_before(const Fills *fills, int64_t step) noexcept nogil:
    """Return the newest fill of another step than `step`, which may be filled again; NULL: there is none."""
    cdef Fill *fill
    cdef Py_ssize_t i
    for i in range(fills.capacity):
        fill = &fills.items[fills.last - i if fills.last >= i else fills.last - i + fills.capacity]
        if fill.step != TAKEN_BACK and (fill.step != step or step == NAMED_ROWS):
            return fill
    return NULL


cdef inline Fill *begin_fill(Fills *fills, int64_t step) noexcept nogil:
    """Return the place behind the fill of the step before, as the fill of `step`; the caller sets its rows."""
    cdef Fill *before = find_fill_before(fills, step)
    fills.last = before - fills.items + 1 if before != NULL else 0
    if fills.last == fills.capacity:
        fills.last = 0
    fills.items[fills.last].step = step
    return &fills.items[fills.last]


cdef inline void take_back_fills(Fills *fills, int64_t step) noexcept nogil:
    """Forget the fills of a failed step and of all later steps."""
    cdef Py_ssize_t i
    for i in range(fills.capacity):
        if fills.items[i].step >= step:
            fills.items[i].step = TAKEN_BACK


cdef inline Py_ssize_t place_in(const Fill *fill, Py_ssize_t i, int64_t stay, int64_t number) noexcept nogil:
    """Return the place of the row with a stay, probably `i`, in a fill whose step samples the row's token `number`; -1 if the
    step does not.
    """
    cdef Py_ssize_t place = 0
    if i < fill.num_rows and fill.rows[i].stay == stay:
        place = i
    while place < fill.num_rows and fill.rows[place].stay != stay:
        place += 1
    return place if place < fill.num_rows and fill.rows[place].sampled == number else -1
