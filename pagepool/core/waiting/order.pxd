# The order in which waiting requests are admitted. A `Line` has their places in the order of arrival. The highest class goes
# first: the requests of the highest priority, and those of lower ones that were promoted. Within the class the request with the
# least work goes next, if that is no more than each request before it still gives.
#
# Always:
#
# * `left` tokens is what later requests may still compute before a request: its bound, less the work charged to it so far.
# * `classes` has each priority of the places once, in descending order, and counts their places. Requests that were put back
#   are the first places, and belong to no class.

from libc.stdint cimport INT64_MAX, int32_t, int64_t
from libc.string cimport memmove

from pagepool.core.base cimport reserve_items

cdef enum:
    LOADED_TOKENS_PER_COMPUTED = 10  # work of loads from a tier
    NUM_PASSES = 3            # a request is passed over in the step in which another computes its tokens, and in two more

cdef struct Place:            # a waiting request
    int64_t work              # tokens to compute, or to load at a tenth
    int64_t left              # tokens by which it may still be overtaken
    int64_t came_at           # `num_computed` of the line when it came
    int64_t passes_until      # number of the first step in which it is not passed over
    int32_t priority
    int32_t waiter            # its number
    bint is_back              # it ran before, and was put back
    bint is_misfit            # it was refused in this round, and others are tried
    bint is_away              # it is not ready in this round, and others are tried, uncharged

cdef struct PriorityClass:
    int32_t priority
    int32_t num               # places

cdef struct Line:
    Place *places             # [num] in the order of arrival, and room for `capacity`
    Py_ssize_t num
    Py_ssize_t capacity
    PriorityClass *classes    # [num_classes], and room for `class_capacity`
    Py_ssize_t num_classes
    Py_ssize_t class_capacity
    bint is_by_work           # else requests of a class are admitted in the order of arrival
    int64_t max_overtaken     # tokens by which any request may be overtaken
    double max_stretch        # and this part of the work in front of it when it came
    int64_t promote_after     # computed tokens after which a request counts in the next class
    int64_t num_computed      # work of all admitted requests
    int64_t num_overtakes     # pairs of a request and an earlier one that waited on
    int64_t num_charged       # work charged to them
    int64_t num_admitted      # requests
    int64_t longest_wait      # of an admitted request, in nanoseconds


cdef inline int64_t count_work(int64_t num_tokens, int64_t num_hits, int64_t num_loads) noexcept nogil:
    """Return the work of a request whose first tokens hit, `num_loads` of them in a tier."""
    return num_tokens - num_hits + num_loads // LOADED_TOKENS_PER_COMPUTED


cdef inline int64_t _wait_for_class(const Line *line, int32_t priority) noexcept nogil:
    """Return the computed tokens after which a request of this priority counts in the highest class. O(classes)."""
    cdef Py_ssize_t i = 0
    while i < line.num_classes and line.classes[i].priority > priority:
        i += 1
    return i * line.promote_after if line.promote_after <= INT64_MAX // (i + 1) else INT64_MAX


cdef inline bint _is_in_class(const Line *line, const Place *place) noexcept nogil:
    """Whether a place counts in the highest class."""
    if line.num_classes == 1 or place.is_back:
        return True
    return line.num_computed - place.came_at >= _wait_for_class(line, place.priority)


cdef inline bint _may_go(const Line *line, const Place *place, int64_t step) noexcept nogil:
    """Whether a place is in the highest class, ready, and no other request computes the same tokens in this step."""
    return _is_in_class(line, place) and place.passes_until <= step and not place.is_away


cdef inline Py_ssize_t find_next(const Line *line, int64_t step) noexcept nogil:
    """Return the index of the place that is next in a step; -1: none is. O(waiting)."""
    cdef Py_ssize_t i, found = -1
    cdef int64_t room = INT64_MAX, least = INT64_MAX
    cdef const Place *place
    for i in range(line.num):
        place = &line.places[i]
        if place.work >= least and place.left >= room:
            continue
        if not _may_go(line, place, step):
            continue
        if place.work < least and place.work <= room and not place.is_misfit:
            found, least = i, place.work
            if not line.is_by_work or place.is_back:
                break
        if place.left < room:
            room = place.left
    return found


cdef inline void charge(Line *line, Py_ssize_t at, int64_t work, int64_t step) noexcept nogil:
    """Charge the work of an admitted request to those that it overtakes. O(waiting)."""
    cdef Py_ssize_t i
    cdef Place *place
    for i in range(at):
        place = &line.places[i]
        if _may_go(line, place, step):
            place.left -= work
            line.num_overtakes += 1
            line.num_charged += work
    line.num_computed += work


cdef inline void _count_in_class(Line *line, int32_t priority, int32_t change) noexcept nogil:
    """Count a place more or less of a priority, for which there is room in the list of classes."""
    cdef Py_ssize_t i = 0
    while i < line.num_classes and line.classes[i].priority > priority:
        i += 1
    if i == line.num_classes or line.classes[i].priority != priority:
        memmove(&line.classes[i + 1], &line.classes[i], (line.num_classes - i) * sizeof(PriorityClass))
        line.classes[i] = PriorityClass(priority=priority, num=0)
        line.num_classes += 1
    line.classes[i].num += change
    assert line.classes[i].num >= 0
    if line.classes[i].num == 0:
        line.num_classes -= 1
        memmove(&line.classes[i], &line.classes[i + 1], (line.num_classes - i) * sizeof(PriorityClass))


cdef inline bint reserve_place(Line *line) noexcept nogil:
    """Make room for a place more; False, with nothing changed, if memory is short."""
    if not reserve_items(<void **>&line.places, &line.capacity, line.num + 1, sizeof(Place)):
        return False
    return reserve_items(<void **>&line.classes, &line.class_capacity, line.num_classes + 1, sizeof(PriorityClass))


cdef inline void add_place(Line *line, int32_t waiter, int32_t priority, int64_t work, bint is_back) noexcept nogil:
    """Add a request at the end or, if it `is_back`, in front of all others. O(waiting)."""
    cdef Py_ssize_t i, at = 0 if is_back else line.num
    cdef int64_t ahead = work
    assert line.num < line.capacity and line.num_classes < line.class_capacity and work >= 0
    for i in range(line.num):
        if line.places[i].is_back or line.places[i].priority >= priority:
            ahead += line.places[i].work
    memmove(&line.places[at + 1], &line.places[at], (line.num - at) * sizeof(Place))
    line.places[at] = Place(
        work=work, left=line.max_overtaken + <int64_t>(line.max_stretch * <double>ahead), came_at=line.num_computed,
        passes_until=0, priority=priority, waiter=waiter, is_back=is_back, is_misfit=False, is_away=False,
    )
    line.num += 1
    if not is_back:
        _count_in_class(line, priority, 1)


cdef inline void remove_place(Line *line, Py_ssize_t at) noexcept nogil:
    """Remove a request. O(waiting)."""
    assert 0 <= at < line.num
    if not line.places[at].is_back:
        _count_in_class(line, line.places[at].priority, -1)
    line.num -= 1
    memmove(&line.places[at], &line.places[at + 1], (line.num - at) * sizeof(Place))


cdef inline Py_ssize_t find_place(const Line *line, int32_t waiter) noexcept nogil:
    """Return the index of a waiter's place. O(waiting)."""
    cdef Py_ssize_t i = 0
    while line.places[i].waiter != waiter:
        i += 1
        assert i < line.num
    return i
