# Records of rows that run together. The caller holds the locks of the batch, the store and the tables, and checked the rows.

from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint32_t, uint8_t

from pagepool.core.copies cimport has_copies_due
from pagepool.core.entering cimport Contents, Waiting
from pagepool.core.holdings cimport Held, Holding, Limits, empty, limits_of
from pagepool.core.notes cimport is_journaled
from pagepool.core.platform cimport GUARDS, rare, raw_free
from pagepool.core.records cimport NO_GROUP, Pool
from pagepool.core.references cimport put_back_all
from pagepool.core.rows cimport Rows, clear_from, write_ids
from pagepool.core.rules cimport Group, is_state
from pagepool.core.siphash cimport Digest

cdef struct ExtraKey:         # what enters the hash of a page besides its tokens
    const uint8_t *data       # NULL ends a row's keys
    Py_ssize_t size
    Py_ssize_t page

cdef struct RowState:         # 32 bytes, two to a cache line
    int32_t num_tokens        # known ones
    int32_t num_computed      # tokens
    int32_t next_event        # computed tokens up to which only counting is due; 0: free, 1: pending, or copies may be due
    uint32_t stamp            # the call that last named the row
    int32_t num_hits          # tokens hit at admission
    int32_t num_hashed        # pages; in a free row those of its last tokens
    int32_t shard             # where pages come from; -1: anywhere
    uint8_t is_admitted
    uint8_t is_claimed        # admitted, or about to be

cdef struct DueRow:           # a row for which more than counting is due
    int32_t at                # in the call
    int32_t num_new_pages     # that it needs; INT32_MAX: that many or more

cdef struct SwappedGroup:     # what a row had in a group when its pages were saved in the tier
    int32_t *tier_ids         # of its pages, in token order; the null page where it had none
    int32_t num_pages
    int32_t num_skipped
    int32_t num_cached

cdef struct Swapped:          # a row whose pages are in the tier, each with a reference
    SwappedGroup *groups      # [num_groups], in the same memory
    int32_t num_computed      # tokens

cdef struct Batch:            # rows that run together; values by row are [num_rows]
    Pool *pool
    Group *groups
    Py_ssize_t num_groups
    Held *held                # [num_rows, num_groups] with their own page ids: the tables are the user's to write
    Rows **tables             # [num_groups]
    Py_ssize_t num_rows
    int32_t max_num_tokens    # of a row
    int32_t hash_page_size    # tokens; 0: no prefix caching
    Digest extra_key
    RowState *states
    uint32_t stamp            # this call
    int32_t *checked_rows     # the rows of this call
    Py_ssize_t num_ascending  # of them `copy_ascending` checked, unchanged since
    DueRow *due_rows          # of this call
    Waiting waiting
    int32_t *token_ids        # [num_rows, tokens_stride] known tokens
    Py_ssize_t tokens_stride
    Digest *digests           # [num_rows, digests_stride]
    Py_ssize_t digests_stride
    ExtraKey **extra_keys     # NULL for most
    int32_t *contexts         # 0 for most
    Swapped **swapped         # NULL for most
    bint skips_pages          # whether pages of any group fall out of a window
    bint has_state            # whether any group is a state
    bint keeps_states         # whether checkpoints of any are kept
    bint unifies_pages        # whether rows share pages that got the same tokens
    int64_t *admissions       # which admission, or change of places, a row had last
    int64_t num_admissions    # and changes of places, of all rows
    int32_t *num_external     # tokens that come from elsewhere, for which a row waits; 0: the row is not pending

cdef struct Amounts:          # a number for each row; stride 0: the same for all
    const int32_t *values
    Py_ssize_t stride

cdef struct Grown:            # the counts of a row after a call that grew it
    int32_t num_tokens
    int32_t num_computed

cdef struct Growth:           # one call that grows rows
    const int32_t *rows
    Py_ssize_t num_rows
    Amounts num_new_tokens
    Amounts num_ahead         # tokens that are to have room only
    const int32_t *token_ids  # one to append to each row first; NULL: none
    int32_t signs             # below 0 if one of these is
    Grown *grown              # [num_rows]
    int32_t *grown_rows       # [num_rows] a copy of `rows`, in the same memory
    int64_t num_admissions    # of the batch by then
    Py_ssize_t num_due        # rows
    Py_ssize_t max_num_new    # pages
    Py_ssize_t num_new
    int32_t *new_ids          # [max_num_new], as those that follow, in the same memory
    int32_t *new_rows
    int32_t *new_groups


cdef inline Holding holding_of(const Batch *batch, Py_ssize_t row) noexcept nogil:
    return Holding(batch.groups, batch.held + row * batch.num_groups, batch.num_groups)


cdef inline Held *held_by(const Batch *batch, Py_ssize_t row, Py_ssize_t g) noexcept nogil:
    return &batch.held[row * batch.num_groups + g]


cdef inline int32_t *tokens_of(const Batch *batch, Py_ssize_t row) noexcept nogil:
    return batch.token_ids + row * batch.tokens_stride


cdef inline Digest *digests_of(const Batch *batch, Py_ssize_t row) noexcept nogil:
    return batch.digests + row * batch.digests_stride


cdef inline Contents contents_of(const Batch *batch, Py_ssize_t row, Py_ssize_t num_tokens) noexcept nogil:
    cdef int32_t context = batch.contexts[row] if is_journaled(batch.pool) else 0
    return Contents(digests_of(batch, row), tokens_of(batch, row), num_tokens, context)


cdef inline int64_t last_token_event(const Batch *batch, Py_ssize_t row) noexcept nogil:
    """How many tokens are computed when a row that computes each token as it comes to know it is as long as it can be."""
    return <int64_t>batch.states[row].num_computed + batch.max_num_tokens - batch.states[row].num_tokens


cdef inline int64_t next_comparison(const Holding *holding) noexcept nogil:
    """The least number of computed tokens at which a page is full that was not compared with equal ones."""
    cdef Py_ssize_t g
    cdef int64_t num_tokens = INT32_MAX
    for g in range(holding.num_groups):
        if holding.groups[g].id != NO_GROUP and not is_state(&holding.groups[g].rules):
            num_tokens = min(num_tokens, (holding.held[g].num_unique + <int64_t>1) * holding.groups[g].rules.page_size)
    return num_tokens


cdef inline void plan_next_event(Batch *batch, Py_ssize_t row) noexcept nogil:
    """Compute the token count at which a page is next to be taken, entered or skipped, or the row is too short. Rows skip by
    the tokens that they had before, one token later.
    """
    cdef Holding holding = holding_of(batch, row)
    cdef Limits limits = limits_of(&holding)
    cdef int64_t event = min(<int64_t>INT32_MAX, last_token_event(batch, row) + 1)
    event = min(event, limits.num_room + 1)
    event = min(event, limits.num_full)
    if limits.num_skip < event:
        event = limits.num_skip + 1
    if rare(batch.unifies_pages):
        event = min(event, next_comparison(&holding) + 1)
    if has_copies_due(batch.pool, &holding):
        event = 1
    batch.states[row].next_event = <int32_t>event


cdef inline int32_t amount(const Amounts *amounts, Py_ssize_t i) noexcept nogil:
    return amounts.values[i * amounts.stride]


cdef inline int32_t room_for(const Batch *batch, int32_t num_tokens, int32_t num_ahead) noexcept nogil:
    """Tokens that are to have a slot, drafts included."""
    return <int32_t>min(<int64_t>num_tokens + num_ahead, <int64_t>batch.max_num_tokens)


cdef inline bint is_row(const Batch *batch, int32_t row) noexcept nogil:
    """Whether a row is in the table and admitted."""
    return 0 <= row < batch.num_rows and batch.states[row].is_admitted


cdef inline bint claim_row(Batch *batch, int32_t row, Py_ssize_t i) noexcept nogil:
    """Whether a row `is_row` and here for the first time in this call. Copies it, as the one at `i`."""
    if GUARDS and (not is_row(batch, row) or batch.states[row].stamp == batch.stamp):
        return False
    batch.states[row].stamp = batch.stamp
    batch.checked_rows[i] = row
    return True


cdef inline void start_call(Batch *batch) noexcept nogil:
    """Forget which rows were seen in calls before."""
    cdef Py_ssize_t row
    batch.num_ascending = 0
    batch.stamp += 1
    if batch.stamp == 0:
        for row in range(batch.num_rows):
            batch.states[row].stamp = 0
        batch.stamp = 1


cdef inline void end_row(Batch *batch, Py_ssize_t row, Py_ssize_t g) noexcept nogil:
    """Let the table's row end where the batch's does."""
    cdef Rows *rows = batch.tables[g]
    cdef int32_t num_pages = held_by(batch, row, g).num_pages
    rows.num_pages[row] = num_pages
    clear_from(rows, row, num_pages)
    rows.version += 1


cdef inline void show_row(Batch *batch, Py_ssize_t row, Py_ssize_t g) noexcept nogil:
    """Make the table's row what the batch holds."""
    write_ids(batch.tables[g], row, 0, held_by(batch, row, g).ids, held_by(batch, row, g).num_pages)
    end_row(batch, row, g)


cdef inline void drop_swapped(Batch *batch, Py_ssize_t row) noexcept nogil:
    """Let go of the pages that a row has in the tier: it is computed again, or ends."""
    cdef Swapped *swapped = batch.swapped[row]
    cdef Py_ssize_t g
    if swapped == NULL:
        return
    for g in range(batch.num_groups):
        put_back_all(batch.pool.tier.pool, swapped.groups[g].tier_ids, swapped.groups[g].num_pages)
    batch.pool.tier.num_swapped -= 1
    batch.swapped[row] = NULL
    raw_free(swapped)


# Rows become free, get a context, and change places.

cdef inline void empty_row(Batch *batch, Py_ssize_t row) noexcept nogil:
    """Make a row free. Its pages were given back, or moved."""
    cdef Holding holding = holding_of(batch, row)
    cdef Py_ssize_t g
    drop_swapped(batch, row)
    empty(&holding)
    for g in range(batch.num_groups):
        end_row(batch, row, g)
    batch.states[row] = RowState(0, 0, 0, 0, 0, batch.states[row].num_hashed, -1, 0, 0)
    batch.num_external[row] = 0


cdef inline void begin_admission(Batch *batch, Py_ssize_t row) noexcept nogil:
    """From here on the row is not the one that any call before has grown."""
    batch.num_admissions += 1
    batch.admissions[row] = batch.num_admissions


cdef inline void set_context(Batch *batch, Py_ssize_t row, int32_t context) noexcept nogil:
    """The context of a row's pages from now on. None, which is what there is without a journal, has no users."""
    if batch.contexts[row]:
        batch.pool.journal.contexts[batch.contexts[row]].num_users -= 1
    if context:
        batch.pool.journal.contexts[context].num_users += 1
    batch.contexts[row] = context


cdef inline void swap_values(int32_t *first, int32_t *second, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(n):
        first[i], second[i] = second[i], first[i]


cdef inline void exchange_rows(Batch *batch, Py_ssize_t first, Py_ssize_t second) noexcept nogil:
    """Exchange all that two rows have."""
    cdef Py_ssize_t g, n = max(batch.states[first].num_tokens, batch.states[second].num_tokens)
    batch.states[first].num_hashed *= batch.states[first].is_admitted  # a free row's last tokens stay behind
    batch.states[second].num_hashed *= batch.states[second].is_admitted
    swap_values(tokens_of(batch, first), tokens_of(batch, second), n)
    n = max(batch.states[first].num_hashed, batch.states[second].num_hashed)
    if n:
        swap_values(
            <int32_t *>digests_of(batch, first), <int32_t *>digests_of(batch, second), n * (sizeof(Digest) // sizeof(int32_t))
        )
    batch.states[first], batch.states[second] = batch.states[second], batch.states[first]
    swap_values(&batch.num_external[first], &batch.num_external[second], 1)
    begin_admission(batch, first)
    begin_admission(batch, second)
    batch.extra_keys[first], batch.extra_keys[second] = batch.extra_keys[second], batch.extra_keys[first]
    batch.contexts[first], batch.contexts[second] = batch.contexts[second], batch.contexts[first]
    batch.swapped[first], batch.swapped[second] = batch.swapped[second], batch.swapped[first]
    for g in range(batch.num_groups):
        held_by(batch, first, g)[0], held_by(batch, second, g)[0] = held_by(batch, second, g)[0], held_by(batch, first, g)[0]
        show_row(batch, first, g)
        show_row(batch, second, g)
