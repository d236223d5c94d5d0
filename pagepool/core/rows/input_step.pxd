# The rows of a step, as its inputs have them: named by a step in flight, or listed by the caller.
#
# Always, for each row of a checked `InputStep`: ``0 <= starts < stops``, and known tokens end at `known`, at most `stops`. Its
# tokens begin at `begins`, so ``begins[num_rows] == num_tokens``; rows with one token may come first.

from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint32_t

from pagepool.core.rows.settle cimport *


cdef struct Source:           # tables and tokens of rows
    const Batch *batch        # NULL: the tables belong to a manager's engine
    Table **tables            # [num_groups]
    Table **cross_tables      # [num_cross] pages of encoders' outputs
    const int32_t *encoder_lens  # [num_rows] tokens of these; NULL: there are none
    Py_ssize_t num_cross
    int32_t *page_sizes       # [num_groups]
    int32_t *capacities       # [num_groups] tokens of a ring; 0: no ring
    int32_t *strides          # [num_groups] slots of a page in the engine's arrays
    int32_t *shifts           # [num_groups] binary logarithm of a page size; -1: it is no power of two
    Py_ssize_t num_groups
    Py_ssize_t num_rows
    const int32_t *token_ids  # [num_rows, stride]; NULL: the engine has its own
    Py_ssize_t stride
    int32_t max_num_tokens    # most tokens of a row
    int32_t rank              # number of a context-parallel rank
    int32_t num_ranks         # ranks that share the tokens of a page

cdef struct Spans:            # tokens ``[start, stop)`` of each row
    int32_t *rows
    int32_t *starts
    int32_t *stops
    int32_t *known            # where the row's known tokens end, at most `stop`
    int32_t *drafts           # where its drafts begin: they are behind the known tokens and the token in flight, if any

cdef struct Listed:           # rows and their tokens, as the caller listed them
    const int32_t *rows
    const int32_t *starts
    const int32_t *stops
    Py_ssize_t num_rows
    int64_t call              # number of the call
    int64_t *seen             # [num_rows of the source] the last call that listed each row

cdef struct InputStep:        # a step's rows, in the order of its arrays
    Spans spans
    Py_ssize_t num_rows
    int64_t num_tokens
    int64_t num_keys          # sum of the stops
    Py_ssize_t num_single     # rows with one token
    int64_t num_unknown       # tokens that the rows do not know yet
    int32_t *order            # [num_rows] index of each row in the call
    int32_t *sources          # [num_rows] by index in the call: place among the sampled tokens of the step before, or -1
    int32_t *begins           # [num_rows + 1] where the tokens of each row begin
    const int32_t *drafts     # [num_rows, num_drafts] ids of unknown tokens, by index in the call; NULL: -1 each
    Py_ssize_t num_drafts
    Py_ssize_t num_padded_tokens
    Py_ssize_t num_padded_rows
    int64_t pad_slot
    int64_t pad_last

cdef enum FaultKind:
    FAULTLESS
    OUTSIDE_TABLE
    NOT_READY                 # not admitted, or pending
    REPEATED
    STALE                     # changed since the call whose result was given
    ROWS_ADDED_SINCE          # rows were added to the step after the call counted them
    WRONG_SPAN
    FEW_DRAFTS
    WITHOUT_SOURCE            # its first token is sampled by another step than the one filled before
    MANY_TOKENS
    WITHOUT_PAGE
    LONG_KEYS                 # more keys than int32 can count
    MANY_PAGES                # a list has room for fewer

cdef struct Fault:
    FaultKind kind
    Py_ssize_t at             # index of the row in the call
    int64_t row
    int64_t start
    int64_t stop
    Py_ssize_t group
    int64_t page_id


cdef inline uint32_t page_at(int32_t position, int32_t page_size, int32_t shift) noexcept nogil:
    """Return the place of the page of a position. A shift is several times faster than a division."""
    return <uint32_t>position >> shift if shift >= 0 else <uint32_t>position // <uint32_t>page_size


cdef inline void read_span(
    Spans *spans, Py_ssize_t i, int32_t row, int32_t start, int32_t stop, int32_t num_known
) noexcept nogil:
    spans.rows[i], spans.starts[i], spans.stops[i], spans.known[i] = row, start, stop, min(stop, num_known)
    spans.drafts[i] = spans.known[i]


cdef inline bint read_launch(const Batch *batch, const Growth *growth, Py_ssize_t at, Spans *spans) noexcept nogil:
    """Read the positions that a row of a call writes; False if its launch is over, or is marked NOBODYS."""
    cdef int32_t row = growth.grown_rows[at]
    cdef Launch launch
    cdef Py_ssize_t i = find_launch(batch, row, growth.step)
    if i < 0:
        return False
    launch = launch_of(batch, row, i)
    assert launch.before <= end_of(batch, row, i) <= batch.max_num_tokens
    if launch.num_sampled == NOBODYS and batch.records[row].state != ENDED:
        return False
    read_span(spans, at, row, launch.before, end_of(batch, row, i), batch.records[row].num_tokens)
    spans.drafts[at] = spans.stops[at] - max(0, launch.num_sampled - 1)
    return True


cdef inline FaultKind find_empty_span(const Spans *spans, Py_ssize_t n, Py_ssize_t *at) noexcept nogil:
    """Find the first row without tokens."""
    cdef bint is_any_wrong = False
    cdef Py_ssize_t i
    for i in range(n):
        is_any_wrong |= spans.starts[i] >= spans.stops[i]
    for i in range(n if is_any_wrong else 0):
        if spans.starts[i] >= spans.stops[i]:
            at[0] = i
            return WRONG_SPAN
    return FAULTLESS


cdef inline FaultKind read_lists(const Source *source, const Listed *listed, Spans *spans, Py_ssize_t *at) noexcept nogil:
    cdef int64_t *seen = listed.seen
    cdef int32_t num_known
    cdef Py_ssize_t i
    for i in range(listed.num_rows):
        at[0] = i
        read_span(spans, i, listed.rows[i], listed.starts[i], listed.stops[i], listed.stops[i])
        if not 0 <= spans.rows[i] < source.num_rows:
            return OUTSIDE_TABLE
        if source.batch != NULL:
            if not 0 <= spans.rows[i] < source.batch.num_rows or source.batch.records[spans.rows[i]].state != RUNNING:
                return NOT_READY
            num_known = source.batch.records[spans.rows[i]].num_tokens
            spans.known[i] = spans.drafts[i] = min(spans.known[i], num_known)
        if seen[spans.rows[i]] == listed.call:
            return REPEATED
        seen[spans.rows[i]] = listed.call
        if not 0 <= spans.starts[i] < spans.stops[i] <= source.max_num_tokens:
            return WRONG_SPAN
    return FAULTLESS


cdef inline FaultKind count_tokens_of(InputStep *step, const Spans *spans, Py_ssize_t *at) noexcept nogil:
    """Count the tokens, the keys, and the rows with one token. A row may have at most `num_drafts` drafts, if ids are given."""
    cdef const int32_t *starts = spans.starts
    cdef const int32_t *stops = spans.stops
    cdef const int32_t *known = spans.known
    cdef const int32_t *drafts = spans.drafts
    cdef int64_t num_tokens = 0, num_keys = 0, num_unknown = 0
    cdef int32_t num_single = 0
    cdef Py_ssize_t i
    for i in range(step.num_rows):  # no early exit, so that it vectorises
        num_tokens += stops[i] - starts[i]
        num_keys += stops[i]
        num_single += stops[i] - starts[i] == 1
        num_unknown += min(stops[i] - starts[i], stops[i] - known[i])
    step.num_tokens, step.num_keys, step.num_single, step.num_unknown = num_tokens, num_keys, num_single, num_unknown
    assert step.num_rows <= num_tokens <= num_keys and num_single <= step.num_rows
    for i in range(step.num_rows if step.drafts != NULL else 0):
        if min(stops[i] - starts[i], stops[i] - drafts[i]) > step.num_drafts:
            at[0] = i
            return FEW_DRAFTS
    return MANY_TOKENS if num_tokens > step.num_padded_tokens else FAULTLESS


cdef inline bint find_wrong_page(
    const Source *source, Py_ssize_t group, bint is_wide, const InputStep *step, const Spans *spans, Fault *fault
) noexcept nogil:
    """Whether a token lies in the null page, or in a page whose slots do not fit the group's array. If so, set the fault."""
    cdef const Table *table = source.tables[group]
    cdef const int32_t *ids
    cdef const int32_t *rows = spans.rows
    cdef const int32_t *starts = spans.starts
    cdef int32_t page_size = source.page_sizes[group], shift = source.shifts[group]
    cdef int32_t num_slots = source.strides[group]
    cdef int64_t last_id = INT32_MAX if is_wide else (INT32_MAX - num_slots + <int64_t>1) // num_slots
    cdef Py_ssize_t i, page, stop_page, n = step.num_rows
    cdef bint is_single = step.num_single == n, is_any_wrong = not is_single
    for i in range(n if is_single else 0):  # no early exit, so that it is fast
        page = page_at(starts[i], page_size, shift)
        is_any_wrong |= <uint32_t>ids_at(table, rows[i])[page] - <uint32_t>1 >= <uint32_t>last_id
    for i in range(n if is_any_wrong else 0):
        ids = ids_at(table, spans.rows[i])
        page = page_at(spans.starts[i], page_size, shift)
        stop_page = page + 1
        if spans.stops[i] - spans.starts[i] > 1:
            stop_page += page_at(spans.stops[i] - 1, page_size, shift) - page
        while page < stop_page:
            if not 0 < ids[page] <= last_id:
                fault.at, fault.page_id = i, ids[page]
                fault.start = max(<int64_t>spans.starts[i], page * <int64_t>page_size)
                return True
            page += 1
    return False


cdef inline void arrange(InputStep *step, const Spans *spans) noexcept nogil:
    """Copy the rows with one token first, and then the others."""
    cdef Py_ssize_t i, at, single = 0, other = step.num_single
    for i in range(step.num_rows):
        if spans.stops[i] - spans.starts[i] == 1:
            at, single = single, single + 1
        else:
            at, other = other, other + 1
        put_span(step, at, spans, i)
    assert single == step.num_single and other == step.num_rows


cdef inline void put_span(InputStep *step, Py_ssize_t at, const Spans *spans, Py_ssize_t i) noexcept nogil:
    """Let row `i` of the call be at index `at` of the arrays."""
    read_span(&step.spans, at, spans.rows[i], spans.starts[i], spans.stops[i], spans.known[i])
    step.spans.drafts[at] = spans.drafts[i]
    step.order[at] = <int32_t>i


cdef inline Py_ssize_t launch_from(const Batch *batch, int32_t row, int32_t start) noexcept nogil:
    """Return the index of the row's launch that writes position `start`; -1: none does."""
    cdef Py_ssize_t i
    for i in range(batch.records[row].num_launches - 1, -1, -1):
        if launch_of(batch, row, i).before <= start:
            return i if start < end_of(batch, row, i) else -1
    return -1


cdef inline int64_t number_sampled(const Batch *batch, int32_t row, int32_t start, int32_t stop) noexcept nogil:
    """Return a number for the token sampled behind tokens ``[start, stop)`` of a row; 0 if known tokens follow. It is that of
    the step in which the token is sampled or, if steps are not planned ahead, the token's position.
    """
    cdef int32_t num_tokens = batch.records[row].num_tokens
    cdef Py_ssize_t i
    if stop < num_tokens:
        return 0
    if batch.max_steps_ahead == 0:
        return num_tokens + <int64_t>(start >= num_tokens)
    i = launch_from(batch, row, start)
    return launch_of(batch, row, i).step if i >= 0 else 0


cdef inline int64_t number_of_source(const Batch *batch, int32_t row, int32_t start) noexcept nogil:
    """Return the `number_sampled` of the unknown token at position `start`; 0: no step in flight samples the token."""
    cdef Py_ssize_t i
    if batch.max_steps_ahead == 0:
        return start if start == batch.records[row].num_tokens else 0
    i = launch_from(batch, row, start)
    return launch_of(batch, row, i - 1).step if i > 0 and launch_of(batch, row, i - 1).num_sampled > 0 else 0


cdef inline void begin_rows(InputStep *step) noexcept nogil:
    cdef Spans spans = step.spans
    cdef int32_t *begins = step.begins
    cdef int32_t begin = 0
    cdef Py_ssize_t i
    begins[0] = 0
    for i in range(step.num_rows):
        begin += spans.stops[i] - spans.starts[i]
        begins[i + 1] = begin
    assert begins[step.num_rows] == step.num_tokens
