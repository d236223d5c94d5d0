# Records of rows that run together. The caller holds the locks of the batch, the store and the tables, and checked the rows.

from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint32_t, uint8_t
from libc.string cimport memset

from pagepool.core.platform cimport GUARDS
from pagepool.core.records cimport NO_GROUP, Pool
from pagepool.core.rows cimport Rows, clear_from, mark, write_ids
from pagepool.core.rules cimport Rules, first_useful_page, next_skip, pages_for
from pagepool.core.siphash cimport Digest

cdef enum:
    NUM_ENTRIES = 16          # that wait for their slots of the index to come into the cache

cdef struct Held:             # what a running row has in one group; as HeldPages
    int32_t num_pages
    int32_t num_cached
    int32_t num_skipped

cdef struct Group:
    Rules rules
    int32_t id                # in the prefix index; NO_GROUP: its pages are never cached
    int32_t stride            # hashes of a page
    Held *held                # [num_rows]
    int32_t *page_ids         # [num_rows, ids_stride] what the rows hold; the table is the user's to write
    Py_ssize_t ids_stride
    Rows *rows                # the table
    Py_ssize_t num_columns    # of it

cdef struct ExtraKey:         # what enters the hash of a page besides its tokens
    const uint8_t *data       # NULL ends a row's keys
    Py_ssize_t size
    Py_ssize_t page

cdef struct RowState:         # 32 bytes, two to a cache line
    int32_t num_tokens        # known ones
    int32_t num_computed      # tokens
    int32_t next_event        # of fewer computed tokens to come nothing but counting is due; 0: a free row
    uint32_t stamp            # the call that last named the row
    int32_t num_hits          # tokens hit at admission
    int32_t num_hashed        # pages; in a free row those of its last tokens
    int32_t shard             # where pages come from; -1: anywhere
    uint8_t is_admitted
    uint8_t is_claimed        # admitted, or about to be

cdef struct Link:             # a page to hash
    Digest parent
    Digest *digest            # where the result goes
    const uint8_t *tokens

cdef struct Entry:            # a page to enter in the prefix index
    const Digest *key
    const int32_t *tokens
    int32_t num_tokens
    int32_t page_id
    int32_t group

cdef struct Provenance:       # what its origin will be, once the parent is hashed
    const Digest *parent      # NULL: it has none
    int32_t place
    int32_t context

cdef struct Batch:            # rows that run together; values by row are [num_rows]
    Pool *pool
    Group *groups
    Py_ssize_t num_groups
    Py_ssize_t num_rows
    int32_t max_num_tokens    # of a row
    int32_t hash_page_size    # tokens; 0: no prefix caching
    Digest key
    Digest extra_key
    RowState *states
    uint32_t stamp            # this call
    int32_t *checked_rows     # the rows of this call
    Py_ssize_t num_ascending  # of them `copy_ascending` checked, unchanged since
    int32_t *due_rows         # where in this call stand those for which more than counting is due
    Link links[NUM_ENTRIES]
    Py_ssize_t num_links      # that wait to be hashed
    Entry entries[NUM_ENTRIES]
    Provenance provenances[NUM_ENTRIES]  # of the same, where there is a journal
    Py_ssize_t num_entries    # that wait to be entered, once those are
    int32_t *token_ids        # [num_rows, tokens_stride] known tokens
    Py_ssize_t tokens_stride
    Digest *digests           # [num_rows, digests_stride]
    Py_ssize_t digests_stride
    ExtraKey **extra_keys     # NULL for most
    int32_t *contexts         # 0 for most
    bint skips_pages          # whether pages of any group fall out of a window
    bint has_state            # whether any group is a state
    int64_t *admissions       # which admission, or change of places, a row had last
    int64_t num_admissions    # and changes of places, of all rows

cdef struct Amounts:          # a number for each row; stride 0: the same for all
    const int32_t *values
    Py_ssize_t stride

cdef struct Grown:            # a row after a call that grew it
    int32_t row
    int32_t num_tokens
    int32_t num_computed

cdef struct Growth:           # one call that grows rows
    const int32_t *rows
    Py_ssize_t num_rows
    Amounts num_new_tokens
    Amounts num_ahead         # tokens that are to have room only
    const int32_t *token_ids  # one to append to each row first; NULL: none
    Grown *grown              # [num_rows]
    int64_t num_admissions    # of the batch by then
    Py_ssize_t num_due        # rows
    Py_ssize_t max_num_new    # pages
    Py_ssize_t num_new
    int32_t *new_ids          # [max_num_new], as those that follow, in the same memory
    int32_t *new_rows
    int32_t *new_groups


cdef inline int32_t *ids_of(const Group *group, Py_ssize_t row) noexcept nogil:
    return group.page_ids + row * group.ids_stride


cdef inline int32_t *tokens_of(const Batch *batch, Py_ssize_t row) noexcept nogil:
    return batch.token_ids + row * batch.tokens_stride


cdef inline Digest *digests_of(const Batch *batch, Py_ssize_t row) noexcept nogil:
    return batch.digests + row * batch.digests_stride


cdef inline int32_t count_missing(const Group *group, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Pages that a row lacks in a group so that `num_tokens` tokens have a slot."""
    cdef int32_t num_pages = group.held[row].num_pages
    if num_tokens <= <int64_t>num_pages * group.rules.page_size:
        return 0
    return pages_for(&group.rules, num_tokens) - num_pages


cdef inline Py_ssize_t count_new_pages(const Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Pages that a row lacks in all groups."""
    cdef Py_ssize_t g, count = 0
    for g in range(batch.num_groups):
        count += count_missing(&batch.groups[g], row, num_tokens)
    return count


cdef inline void blank(Group *group, Py_ssize_t row, Py_ssize_t start, Py_ssize_t stop) noexcept nogil:
    """Put the null page into places of a row, here and in the table."""
    memset(ids_of(group, row) + start, 0, (stop - start) * sizeof(int32_t))
    memset(group.rows.table + row * group.num_columns + start, 0, (stop - start) * sizeof(int32_t))
    mark(group.rows, row, start, stop)
    group.rows.version += 1


cdef inline int32_t find_skip_stop(const Group *group, Py_ssize_t row, int32_t num_computed) noexcept nogil:
    """End of a row's pages that no token from `num_computed` on attends to."""
    return min(first_useful_page(&group.rules, num_computed, group.held[row].num_cached), group.held[row].num_pages)


cdef inline int64_t last_token_event(const Batch *batch, Py_ssize_t row) noexcept nogil:
    """How many tokens are computed when a row that computes each token as it comes to know it is as long as it can be."""
    return <int64_t>batch.states[row].num_computed + batch.max_num_tokens - batch.states[row].num_tokens


cdef inline void plan_next_event(Batch *batch, Py_ssize_t row) noexcept nogil:
    """Work out the least number of tokens to come for which something is due: a page to take, to enter, or, since rows skip by
    the tokens that they had before, to skip one token earlier; or a token for which the row is too short.
    """
    cdef Group *group
    cdef Held *held
    cdef Py_ssize_t g
    cdef int64_t event = min(<int64_t>INT32_MAX, last_token_event(batch, row) + 1)
    for g in range(batch.num_groups):
        group = &batch.groups[g]
        held = &group.held[row]
        event = min(event, <int64_t>held.num_pages * group.rules.page_size + 1)
        event = min(event, <int64_t>next_skip(&group.rules, held.num_skipped) + 1)
        if batch.hash_page_size and group.id != NO_GROUP:
            event = min(event, <int64_t>(held.num_cached + 1) * group.rules.page_size)
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


cdef inline uint32_t start_call(Batch *batch) noexcept nogil:
    """Forget which rows were seen; returns the stamp of those that will be."""
    cdef Py_ssize_t row
    batch.num_ascending = 0
    batch.stamp += 1
    if batch.stamp == 0:
        for row in range(batch.num_rows):
            batch.states[row].stamp = 0
        batch.stamp = 1
    return batch.stamp


cdef inline void end_row(Group *group, Py_ssize_t row) noexcept nogil:
    """Let the table's row end where the batch's does."""
    group.rows.num_pages[row] = group.held[row].num_pages
    clear_from(group.rows, row, group.held[row].num_pages)
    group.rows.version += 1


cdef inline void show_row(Group *group, Py_ssize_t row) noexcept nogil:
    """Make the table's row what the batch holds."""
    write_ids(group.rows, row, 0, ids_of(group, row), group.held[row].num_pages)
    end_row(group, row)


cdef inline bint hits_leading_pages(const Group *group) noexcept nogil:
    """Whether what hits in a group are leading pages, any number: that of full attention."""
    return group.id != NO_GROUP and not group.rules.window and not group.rules.chunk
