# Rows end when they sample a stop token, or have as many tokens as they may have.
#
# A row that has ended takes no token behind its last one: the tokens that its later launches sample are nobody's. It can only
# be released, since these launches may have changed its states.

from pagepool.core.rows.plan cimport *


cdef enum End:
    GOES_ON
    STOPPED                   # its last token is a stop token
    AT_LIMIT                  # it has as many tokens as it may have

cdef struct Ends:             # which rows end; arrays by row have a line for each row of the batch
    const int32_t *stop_token_ids  # negative ids are no tokens
    Py_ssize_t num_stop_token_ids
    Py_ssize_t stride         # from the ids of a row to those of the next; 0: the ids are for all rows
    Amounts max_num_tokens


cdef inline bint _is_stop(const Ends *ends, Py_ssize_t row, int32_t token_id) noexcept nogil:
    cdef const int32_t *ids = ends.stop_token_ids + row * ends.stride
    cdef Py_ssize_t i
    for i in range(ends.num_stop_token_ids):
        if ids[i] == token_id:
            return True
    return False


cdef inline int32_t count_to_end(
    const Batch *batch, const Ends *ends, Py_ssize_t row, const int32_t *token_ids, int32_t num, uint8_t *end
) noexcept nogil:
    """Return how many of `num` new tokens a row takes until it ends, and store whether it does."""
    cdef int32_t num_tokens = batch.records[row].num_tokens
    cdef int32_t limit = min(amount(&ends.max_num_tokens, row), batch.max_num_tokens)
    cdef int32_t i
    end[0] = GOES_ON
    for i in range(num):
        if _is_stop(ends, row, token_ids[i]):
            end[0] = STOPPED
        elif num_tokens + i + 1 >= limit:
            end[0] = AT_LIMIT
        if end[0] != GOES_ON:
            return i + 1
    return num


cdef inline void stop_row(Batch *batch, Py_ssize_t row) noexcept nogil:
    """End a row: nobody has the tokens that its launches sample."""
    cdef Py_ssize_t i
    for i in range(batch.records[row].num_launches):
        launch_at(batch, row, i).num_sampled = NOBODYS
    count_run_tokens(batch, row)
    batch.records[row].state = ENDED
