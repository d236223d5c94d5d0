# Rows of a running batch. The caller holds the locks of the batch, the store and the tables, and has checked the rows.
#
# A `Batch` keeps for each row its known tokens, a `RowRecord` with the counts that every step reads, and a `Row` with
# everything else. A call that grows rows is a `Growth`. It first advances the counts of all rows, and lists those in need of
# more work as `DueRow`s; then it does this work, and reverts the rows without room. `Grown` keeps a row's counts after the
# call: `undo` takes the call back only while the row still has them.
#
# Always, for each row:
# - ``0 <= num_computed <= num_tokens <= max_num_tokens``; a pending row has ``num_computed + num_external < num_tokens``.
# - `num_hashed` digests are those of its tokens and extra keys: at most `count_hashable` of its tokens once admitted.
# - `next_event` is 0 in a free row and 1 in a pending one. In others no page is to be taken, cached or skipped, and the row is
#   not full, below `next_event` tokens.
# - An admitted row is claimed; another claimed row is being admitted by one call.
# - A free row has no token, no page, no context and no session.
# - `holding` leads to the batch's groups, and the tables show its pages.
# - ``admission <= num_admissions``, and ``stamp`` is not 0 within a call.
# A `Growth` has ``num_due <= num_rows``, ``num_new <= max_num_new`` and ``num_grown <= num_rows``. Between calls no page waits
# to be hashed.

from libc.stdint cimport INT32_MAX, INT64_MAX, int32_t, int64_t, uint32_t, uint8_t
from libc.string cimport memcmp, memcpy, memset

from pagepool.core.base cimport GUARDS, SIPHASH, UNKNOWN, Digest, Hashing, exceptional, hash_pages, rare, signs_of
from pagepool.core.holding cimport (
    NUM_WAITING, Contents, Group, Held, Holding, Limits, PageToHash, Shortage, Waiting, are_checkpoints_due,
    cache_full_pages, cache_page, cache_states, cache_waiting, can_restart, count_new_in_banks, count_new_pages, empty,
    find_any_excess, find_lost_page, find_next_checkpoint, find_own_checkpoint, find_passed_checkpoint, find_restart,
    forget_uncomputed, full_entries, full_pages, give_back_from, has_moves_due, has_full_page, hash_waiting, is_state,
    keep_state, keeps_checkpoints, lacks_page, last_hash, limits_of, queue_for, record_taken, restart_from, shortage_in,
    skip_pages, take_missing,
)
from pagepool.core.pool cimport (
    MAX_BANKS, NO_GROUP, NO_SESSION, NULL_PAGE, Pool, count_free_in, count_least_free, count_refusal, expect_page,
    find_held_free, find_unheld, find_within, give_back, has_free_pages, ids_in_queue, is_journaled, now_of, queue_in, take,
)
from pagepool.core.rows.fills cimport *
from pagepool.core.rows.flights cimport *
from pagepool.core.rows.writes cimport *
from pagepool.core.tables cimport Table, blank, clear_from, write_ids


cdef struct ExtraKey:         # bytes hashed with a page's tokens
    const uint8_t *data
    Py_ssize_t size           # 0: none
    Py_ssize_t page           # a row has those of all other pages first, with OTHER_PAGES, and LAST_PAGE ends its keys

cdef enum:
    OTHER_PAGES = -1
    LAST_PAGE = 0x7fffffff

cdef struct RowRecord:        # 32 bytes, two to a cache line
    int32_t num_tokens        # known tokens
    int32_t num_computed      # leading tokens that are computed
    int32_t next_event        # computed count at which the row has work; 0: free, 1: pending, or copies may be due
    uint32_t stamp            # number of the last call that named the row
    int32_t num_hits          # tokens hit at admission
    int32_t num_hashed        # pages with digests; a free row keeps those of its last tokens
    int32_t num_external      # tokens awaited from elsewhere; 0: the row is not pending
    uint8_t is_admitted
    uint8_t is_claimed        # admitted, or being admitted

cdef struct DueRow:           # a row that needs more than counting
    int32_t at                # its index in the call
    int32_t num_new_pages     # missing pages, at most INT32_MAX

cdef struct Row:              # two cache lines; growth reads the first
    Holding holding
    Digest *digests           # [num_hashed]
    ExtraKey *extra_keys      # in the order of pages; NULL: none
    int32_t context           # 0: none
    int32_t shard             # source of new pages; -1: any
    int64_t admission         # number of the last admission, fork or exchange
    int64_t write_list        # number of the last list with a write of its states; 0: none
    int64_t last_cut          # number of the last cut of its computed tokens
    int64_t step              # number of the last step to which calls added the row
    Digest *uppers            # [num_hashed] upper halves of the digests; NULL: they have 16 bytes
    int32_t num_writes        # writes of its states that are due or were taken
    int32_t[5] unused

cdef struct Batch:            # rows that run together
    Pool *pool
    Group *groups
    Py_ssize_t num_groups
    Table **tables            # [num_groups]
    Py_ssize_t num_rows
    int32_t max_num_tokens    # limit for each row
    int32_t hash_page_size    # tokens; 0: no prefix caching
    RowRecord *records        # [num_rows] counts that each step reads
    Row *rows                 # [num_rows]
    uint32_t stamp            # number of this call
    int32_t *checked_rows     # [num_rows] the rows of this call
    Py_ssize_t num_ascending  # leading checked rows that `_copy_ascending` found right, unchanged since
    DueRow *due_rows          # [num_rows] due rows of this call
    Waiting waiting
    int32_t *token_ids        # [num_rows, tokens_stride] known tokens
    Py_ssize_t tokens_stride
    bint has_boundaries       # whether pages of windows and chunks stay cached at boundaries only
    bint skips_pages          # whether any group has a window or chunks
    bint has_state            # whether any group is a state
    bint keeps_states         # whether working pages of any state become checkpoints
    bint writes_states        # whether steps write checkpoints to pages of their own
    bint writes_anywhere      # whether they can do so inside their tokens, not only at the end
    WriteList writes
    Fills fills
    Flight *flights           # [num_rows]
    int64_t *stays            # [num_rows] numbers of the requests' stays, which move with the rows; 0: free
    int64_t num_stays         # stays of all rows: each admission and fork begins one
    int64_t num_cuts          # cuts of computed tokens of all rows
    int64_t num_steps         # steps to which several calls added rows
    int32_t max_steps_ahead   # steps planned before the one that runs is known; if any, flights count them
    bint caches_computed      # whether pages are cached once the steps that computed them are resolved
    bint caches_late          # whether this is so, or keys have a lookahead
    bint keeps_flights        # whether this is so, or `max_steps_ahead` is not 0
    bint resolves             # whether a step was resolved, or planned ahead
    bint restores_states      # whether the engine restores states after drafts, so that lookahead may pass checkpoints
    int64_t num_admissions    # admissions, forks and exchanges of all rows
    int64_t num_calls         # calls that may have changed computed tokens or pages
    Py_ssize_t num_admitted   # admitted rows
    Hashing hashing

cdef struct Amounts:          # a number for each row
    const int32_t *values
    Py_ssize_t stride         # 0: one value serves all rows

cdef struct Grown:            # the counts of a row after a call that grew it
    int32_t num_tokens
    int32_t num_computed

cdef struct Growth:           # one call that grows rows
    const int32_t *rows
    Py_ssize_t num_rows
    Amounts num_new_tokens
    Amounts num_ahead         # lookahead tokens: they get room, and are not counted
    const int32_t *token_ids  # a token to append to each row first; NULL: none
    int32_t signs             # negative if one of these tokens is
    Grown *grown              # [num_rows]; unset for rows planned ahead
    int32_t *grown_rows       # [num_rows] a copy of `rows`, in the same memory
    Launch *launches          # [num_rows] in the same memory; NULL: without max_steps_ahead
    int32_t *ahead            # [num_rows] lookahead of due rows planned ahead, in the same memory; NULL: another call
    Amounts num_drafts        # drafts of such rows
    bint is_admission         # whether the call admitted its row
    Py_ssize_t num_grown      # leading rows that have their room
    int64_t num_admissions    # the batch's counts when the call ended
    int64_t num_stays
    int64_t num_cuts
    int64_t num_calls
    int64_t num_excess        # pages that a row would hold, where that is more than its bank or shard has; else 0
    int32_t short_queue       # queue of that bank or shard
    Shortage shortage         # why the first row that did not fit got no pages
    Py_ssize_t num_due        # due rows
    Py_ssize_t max_num_new    # upper bound on new pages
    Py_ssize_t num_new        # new pages
    int32_t *new_ids          # [max_num_new], with the next two in one allocation
    int32_t *new_rows
    int32_t *new_groups


cdef inline void _assert_row(const Batch *batch, Py_ssize_t row) noexcept nogil:
    """Assert what holds of every row, for functions that return pointers, which cannot have asserts."""
    assert 0 <= row < batch.num_rows and batch.max_num_tokens <= batch.tokens_stride
    assert batch.rows[row].holding.groups == batch.groups and batch.rows[row].holding.num_groups == batch.num_groups


cdef inline Holding *holding_of(const Batch *batch, Py_ssize_t row) noexcept nogil:
    _assert_row(batch, row)
    return &batch.rows[row].holding


cdef inline Held *held_by(const Batch *batch, Py_ssize_t row, Py_ssize_t g) noexcept nogil:
    _assert_row(batch, row)
    return &batch.rows[row].holding.held[g]


cdef inline int32_t offset_of(const Batch *batch, Py_ssize_t g) noexcept nogil:
    """Return the difference between the records of a group's pages and their ids."""
    return batch.pool.banks[batch.groups[g].bank].start - 1


cdef inline int32_t *tokens_of(const Batch *batch, Py_ssize_t row) noexcept nogil:
    _assert_row(batch, row)
    return batch.token_ids + row * batch.tokens_stride


cdef inline Digest *digests_of(const Batch *batch, Py_ssize_t row) noexcept nogil:
    _assert_row(batch, row)
    return batch.rows[row].digests


cdef inline Contents _contents_of(const Batch *batch, Py_ssize_t row, Py_ssize_t num_tokens) noexcept nogil:
    cdef int32_t context = batch.rows[row].context if is_journaled(batch.pool) else 0
    return Contents(
        digests=digests_of(batch, row), uppers=batch.rows[row].uppers, num_digests=batch.records[row].num_hashed,
        token_ids=tokens_of(batch, row), num_token_ids=num_tokens + batch.hashing.num_lookahead,
        num_lookahead=batch.hashing.num_lookahead, context=context, session=batch.rows[row].holding.session,
    )


cdef inline int64_t last_token_event(const Batch *batch, Py_ssize_t row) noexcept nogil:
    """Return the computed count at which the row is full, if it computes each token that it gets."""
    return <int64_t>batch.records[row].num_computed + batch.max_num_tokens - batch.records[row].num_tokens


cdef inline bint has_writes_due(const Batch *batch, Py_ssize_t row) noexcept nogil:
    """Whether a write of the row's states was not taken."""
    return batch.writes_states and batch.rows[row].write_list == batch.writes.number


cdef inline bint has_row_due(const Batch *batch, Py_ssize_t row) noexcept nogil:
    """Whether moves of the row's pages are due."""
    return has_moves_due(batch.pool, holding_of(batch, row)) or has_writes_due(batch, row)


cdef inline int32_t count_planned(const Batch *batch, Py_ssize_t row) noexcept nogil:
    """Count the row's tokens that are computed once all planned steps have run."""
    return max(batch.flights[row].num_planned, batch.records[row].num_computed)


cdef inline int32_t count_keyed(const Batch *batch, int64_t num_tokens) noexcept nogil:
    """Count the leading tokens of `num_tokens` known ones whose lookahead is known."""
    return <int32_t>max(0, num_tokens - batch.hashing.num_lookahead)


cdef inline int32_t count_cacheable(const Batch *batch, Py_ssize_t row, int32_t num_computed) noexcept nogil:
    """Count the leading tokens of `num_computed` that are final: no lookahead or step in flight changes their pages."""
    if exceptional(batch.caches_late):
        if batch.hash_page_size:
            num_computed = min(num_computed, count_keyed(batch, batch.records[row].num_tokens))
        if batch.caches_computed:
            num_computed = min(num_computed, batch.flights[row].num_resolved)
    return num_computed


cdef inline int32_t count_hashable(const Batch *batch, int64_t num_tokens) noexcept nogil:
    """Count the pages of `num_tokens` known tokens whose lookahead is known."""
    return count_keyed(batch, num_tokens) // batch.hash_page_size


cdef inline void cut_hashes(Batch *batch, Py_ssize_t row) noexcept nogil:
    """Forget the digests of tokens that the row knows no more."""
    cdef RowRecord *record = &batch.records[row]
    if batch.hash_page_size:
        record.num_hashed = min(record.num_hashed, count_hashable(batch, record.num_tokens))


cdef inline int64_t _plan_flight(Batch *batch, Py_ssize_t row, int64_t event, int64_t num_full) noexcept nogil:
    """Note the counts at which the row has a page to cache, and at which it has other work. Return the next event."""
    if batch.writes_states:
        event = min(event, num_full)
    batch.flights[row].next_work = <int32_t>event
    batch.flights[row].next_full = <int32_t>min(num_full, <int64_t>INT32_MAX)
    return event if batch.caches_computed and not batch.hashing.num_lookahead else min(event, num_full)


cdef inline void plan_next_event(Batch *batch, Py_ssize_t row) noexcept nogil:
    """Compute the token count at which this row next needs work: a page to take, cache or skip, or the end of its room. Pages
    are skipped one token later, since they fall out of the window of the next token.
    """
    cdef Holding *holding = holding_of(batch, row)
    cdef Limits limits = limits_of(holding)
    cdef const RowRecord *record = &batch.records[row]
    assert record.is_claimed and 0 <= record.num_computed <= record.num_tokens <= batch.max_num_tokens
    assert record.num_hashed == 0 or record.num_hashed * <int64_t>batch.hash_page_size <= record.num_tokens
    cdef int64_t event = min(<int64_t>INT32_MAX, last_token_event(batch, row) + 1)
    event = min(event, limits.num_room + 1)
    if limits.num_skip < event:
        event = limits.num_skip + 1
    if has_row_due(batch, row) or rare(batch.writes_states and batch.rows[row].num_writes):
        event = 1
    if exceptional(batch.keeps_flights):
        event = _plan_flight(batch, row, event, limits.num_full)
    else:
        event = min(event, limits.num_full)
    batch.records[row].next_event = <int32_t>event


cdef inline int32_t amount(const Amounts *amounts, Py_ssize_t i) noexcept nogil:
    return amounts.values[i * amounts.stride]


cdef inline int32_t room_for(const Batch *batch, int32_t num_tokens, int32_t num_ahead) noexcept nogil:
    """Count the tokens that need slots, drafts included."""
    assert 0 <= num_tokens <= batch.max_num_tokens
    return <int32_t>min(<int64_t>num_tokens + num_ahead, <int64_t>batch.max_num_tokens)


cdef inline int32_t plan_for(const Batch *batch, int32_t num_tokens, int32_t num_computed, int32_t num_ahead) noexcept nogil:
    """Return the number of tokens up to which a step computes a row: lookahead is part of it behind all known tokens only."""
    return room_for(batch, num_computed, num_ahead) if num_computed == num_tokens else num_computed


cdef inline bint is_row(const Batch *batch, int32_t row) noexcept nogil:
    """Whether the number is in the table and its row is admitted."""
    return 0 <= row < batch.num_rows and batch.records[row].is_admitted


cdef inline bint stamp_row(Batch *batch, int32_t row, Py_ssize_t i) noexcept nogil:
    """Copy an admitted row of a call to index `i`; False if it is not admitted, or repeated."""
    if GUARDS and (not is_row(batch, row) or batch.records[row].stamp == batch.stamp):
        return False
    assert batch.stamp != 0 and batch.records[row].is_claimed and 0 <= i < batch.num_rows
    batch.records[row].stamp = batch.stamp
    batch.checked_rows[i] = row
    return True


cdef inline void start_call(Batch *batch) noexcept nogil:
    """Begin a call in which no row has been seen."""
    cdef Py_ssize_t row
    batch.num_ascending = 0
    batch.stamp += 1
    if batch.stamp == 0:
        for row in range(batch.num_rows):
            batch.records[row].stamp = 0
        batch.stamp = 1


cdef inline void show_end(Batch *batch, Py_ssize_t row) noexcept nogil:
    """Cut the row in the tables to the pages that it holds."""
    cdef Table *table
    cdef Py_ssize_t g
    for g in range(batch.num_groups):
        table = batch.tables[g]
        assert 0 <= held_by(batch, row, g).num_skipped <= held_by(batch, row, g).num_pages <= table.num_columns
        table.num_pages[row] = held_by(batch, row, g).num_pages
        clear_from(table, row, table.num_pages[row])
        table.version += 1


cdef inline void show_row(Batch *batch, Py_ssize_t row) noexcept nogil:
    """Write the row's pages to the tables."""
    cdef Py_ssize_t g
    for g in range(batch.num_groups):
        write_ids(batch.tables[g], row, 0, held_by(batch, row, g).ids, held_by(batch, row, g).num_pages, offset_of(batch, g))
    show_end(batch, row)


# Rows are emptied, get a context, and are exchanged.

cdef inline void empty_row(Batch *batch, Py_ssize_t row) noexcept nogil:
    """Make a row free whose pages were given back."""
    cdef Holding *holding = holding_of(batch, row)
    assert batch.rows[row].context == 0 and holding.session == NO_SESSION
    empty(holding)
    show_end(batch, row)
    batch.num_admitted -= batch.records[row].is_admitted
    assert batch.num_admitted >= 0
    batch.records[row] = RowRecord(
        num_tokens=0, num_computed=0, next_event=0, stamp=0, num_hits=0, num_hashed=batch.records[row].num_hashed,
        num_external=0, is_admitted=0, is_claimed=0,
    )
    batch.rows[row].shard = -1
    batch.rows[row].write_list = batch.rows[row].step = 0
    end_stay(batch, row)


cdef inline void end_stay(Batch *batch, Py_ssize_t row) noexcept nogil:
    """Drop all that is known about the row's steps in flight, whose tokens belong to nobody now."""
    batch.stays[row] = 0
    batch.flights[row] = Flight(
        num_planned=0, num_ahead=0, num_launched=0, num_told=0, num_resolved=0, next_full=0, next_work=0, unused=0
    )


cdef inline void begin_stay(Batch *batch, Py_ssize_t row) noexcept nogil:
    """Number a stay whose computed tokens, if there are any, belong to no step in flight."""
    end_stay(batch, row)
    batch.num_stays += 1
    batch.stays[row] = batch.num_stays
    batch.flights[row].num_resolved = batch.records[row].num_computed


cdef inline void begin_admission(Batch *batch, Py_ssize_t row) noexcept nogil:
    """Number an admission, after which earlier calls cannot be taken back for the row."""
    assert batch.rows[row].admission <= batch.num_admissions
    batch.num_admissions += 1
    batch.rows[row].admission = batch.num_admissions


cdef inline void set_context(Batch *batch, Py_ssize_t row, int32_t context) noexcept nogil:
    """Give the row's next pages a context. Users of context 0, none, are not counted: a pool without a journal has no other."""
    if batch.rows[row].context:
        assert batch.pool.journal.contexts[batch.rows[row].context].num_users > 0
        batch.pool.journal.contexts[batch.rows[row].context].num_users -= 1
    if context:
        batch.pool.journal.contexts[context].num_users += 1
    batch.rows[row].context = context


cdef inline void _swap_values(int32_t *first, int32_t *second, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(n):
        first[i], second[i] = second[i], first[i]


cdef inline void exchange_rows(Batch *batch, Py_ssize_t first, Py_ssize_t second) noexcept nogil:
    """Exchange two rows."""
    cdef Py_ssize_t n = max(batch.records[first].num_tokens, batch.records[second].num_tokens)
    assert first != second
    assert batch.records[first].is_admitted == batch.records[first].is_claimed
    assert batch.records[second].is_admitted == batch.records[second].is_claimed
    batch.records[first].num_hashed *= batch.records[first].is_admitted  # a free row's last tokens stay behind
    batch.records[second].num_hashed *= batch.records[second].is_admitted
    _swap_values(tokens_of(batch, first), tokens_of(batch, second), n)
    batch.records[first], batch.records[second] = batch.records[second], batch.records[first]
    batch.rows[first], batch.rows[second] = batch.rows[second], batch.rows[first]
    batch.flights[first], batch.flights[second] = batch.flights[second], batch.flights[first]
    batch.stays[first], batch.stays[second] = batch.stays[second], batch.stays[first]
    exchange_writes(&batch.writes, first, second)
    begin_admission(batch, first)
    begin_admission(batch, second)
    show_row(batch, first)
    show_row(batch, second)


# Rows are hashed, and their pages cached.

cdef inline const ExtraKey *find_extra_key(
    const Batch *batch, Py_ssize_t row, Py_ssize_t page, const ExtraKey **next_key
) noexcept nogil:
    """Return the extra keys of a page in a row that has any, and advance `next_key` to the first at or behind the page."""
    cdef const ExtraKey *key = next_key[0]
    while key.page < page:
        key += 1
    next_key[0] = key
    return key if key.page == page else batch.rows[row].extra_keys


cdef inline int32_t hash_row(Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Hash the row's full pages up to `num_tokens` tokens, whose lookahead is known. Return a negative value if one of the
    hashed tokens is negative: the check is cheap while the tokens are read.
    """
    cdef const int32_t *tokens = tokens_of(batch, row)
    cdef const ExtraKey *next_key = batch.rows[row].extra_keys
    cdef const ExtraKey *key
    cdef const uint8_t *extra = NULL
    cdef Py_ssize_t i, following, num_bytes = 0, size = batch.hash_page_size
    cdef Py_ssize_t start = batch.records[row].num_hashed, stop = max(start, num_tokens // size)
    assert size > 0 and 0 <= num_tokens <= batch.max_num_tokens
    i = start
    while i < stop:
        following = stop
        if next_key != NULL:
            key = find_extra_key(batch, row, i, &next_key)
            extra, num_bytes, following = key.data, key.size, i + 1
        hash_pages(
            &batch.hashing, tokens, size, digests_of(batch, row), batch.rows[row].uppers, i, following, extra, num_bytes,
        )
        i = following
    batch.records[row].num_hashed = <int32_t>stop
    return signs_of(tokens + start * size, (stop - start) * size)


cdef inline Py_ssize_t count_hashed_before(
    const Batch *batch, Py_ssize_t row, const int32_t *token_ids, Py_ssize_t n
) noexcept nogil:
    """Count the leading pages of `token_ids` that a free row has hashed for its last request."""
    cdef const int32_t *tokens = tokens_of(batch, row)
    cdef Py_ssize_t i, size = batch.hash_page_size
    cdef Py_ssize_t num_pages = min(batch.records[row].num_hashed, count_hashable(batch, n))
    for i in range(num_pages):
        if memcmp(tokens + i * size, token_ids + i * size, (size + batch.hashing.num_lookahead) * sizeof(int32_t)) != 0:
            return i
    return num_pages


cdef inline void _hash_later(Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Do what `hash_row` does, but with SipHash let a single page wait for one of another row: two are hashed at once."""
    cdef Py_ssize_t i = batch.records[row].num_hashed
    cdef Digest *digests = digests_of(batch, row)
    cdef PageToHash *page
    cdef bint is_alone = batch.rows[row].extra_keys != NULL or batch.waiting.num_to_hash == NUM_WAITING
    assert 0 <= batch.waiting.num_to_hash <= NUM_WAITING
    if exceptional(batch.hashing.num_lookahead and i and batch.waiting.num_to_hash):
        if batch.waiting.to_hash[batch.waiting.num_to_hash - 1].digest == &digests[i - 1]:  # a late page of the same row
            hash_waiting(&batch.waiting)
    if rare(is_alone or batch.hashing.kind != SIPHASH) or num_tokens // batch.hash_page_size != i + 1:
        hash_row(batch, row, num_tokens)
    else:
        page = &batch.waiting.to_hash[batch.waiting.num_to_hash]
        page.parent = digests[i - 1] if i else Digest(lo=0, hi=0)
        page.digest = &digests[i]
        page.tokens = <const uint8_t *>(tokens_of(batch, row) + i * batch.hash_page_size)
        batch.waiting.num_to_hash += 1
        batch.records[row].num_hashed += 1


cdef inline void cache_row(Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Hash the pages that `num_tokens` tokens fill, whose lookahead is known, and cache them."""
    cdef Contents contents
    cdef Held *held
    cdef Py_ssize_t g
    if not batch.hash_page_size:
        return
    if (batch.records[row].num_hashed + <int64_t>1) * batch.hash_page_size <= num_tokens:
        _hash_later(batch, row, num_tokens)
    for g in range(batch.num_groups):
        held = held_by(batch, row, g)
        if has_full_page(&batch.groups[g], held, num_tokens):
            contents = _contents_of(batch, row, num_tokens)
            cache_full_pages(&batch.waiting, &batch.groups[g], held, &contents, num_tokens)


# Rows grow: their pages are skipped, taken and cached, row by row up to the first row that does not fit.

cdef inline void _skip_row(Batch *batch, Py_ssize_t row, int32_t num_computed) noexcept nogil:
    """Skip the pages that no token from `num_computed` on attends to, and blank them in the tables."""
    cdef Holding *holding = holding_of(batch, row)
    cdef Py_ssize_t g
    cdef int32_t start
    assert num_computed <= batch.records[row].num_computed
    for g in range(batch.num_groups):
        start = holding.held[g].num_skipped
        skip_pages(batch.pool, holding, g, num_computed)
        if holding.held[g].num_skipped > start:
            blank(batch.tables[g], row, start, holding.held[g].num_skipped)


cdef inline Py_ssize_t _count_rows_without(const Batch *batch, Py_ssize_t g) noexcept nogil:
    """Count the rows that hold no page of a group: free rows, and admitted ones that start over. O(rows)."""
    cdef Py_ssize_t row, count = 0
    for row in range(batch.num_rows):
        count += batch.rows[row].holding.held[g].num_pages == 0
    return count


cdef inline void count_reserved_states(
    const Batch *batch, Py_ssize_t num_served, Py_ssize_t[MAX_BANKS] num_reserved_in
) noexcept nogil:
    """Count the pages of each bank to leave free: one for each group of states and row that has none, without `num_served` of
    these rows; 0 in the first bank. O(rows x groups).
    """
    cdef const Group *group
    cdef Py_ssize_t g
    memset(num_reserved_in, 0, MAX_BANKS * sizeof(Py_ssize_t))
    for g in range(batch.num_groups):
        group = &batch.groups[g]
        if group.bank and is_state(&group.rules):
            num_reserved_in[group.bank] += _count_rows_without(batch, g) - num_served


cdef inline void _keep_row_states(Batch *batch, Py_ssize_t row, int32_t num_computed) noexcept nogil:
    """Keep the states after `num_computed` tokens that are due as checkpoints, and write the new working pages to tables."""
    cdef Contents contents
    cdef Holding *holding = holding_of(batch, row)
    cdef Held *held
    cdef Py_ssize_t[MAX_BANKS] num_reserved_in
    cdef Py_ssize_t g
    cdef int32_t num_cacheable = count_cacheable(batch, row, num_computed)
    cdef bint may_cache = num_cacheable == num_computed
    assert batch.keeps_states and num_computed <= batch.records[row].num_computed
    hash_row(batch, row, num_cacheable)
    contents = _contents_of(batch, row, num_computed)
    count_reserved_states(batch, 0, num_reserved_in)
    for g in range(batch.num_groups):
        held = held_by(batch, row, g)
        if keep_state(
            batch.pool, holding, <int32_t>g, &contents if may_cache else NULL, num_computed, batch.rows[row].shard,
            num_reserved_in[batch.groups[g].bank],
        ):
            write_ids(batch.tables[g], row, 0, held.ids, 1, offset_of(batch, g))
            batch.tables[g].version += 1


cdef inline void keep_last_states(Batch *batch, Py_ssize_t row, int32_t term) noexcept nogil:
    """Cache the states that are due as checkpoints, after the row's pages were given back."""
    cdef int32_t num_computed = batch.records[row].num_computed
    cdef Contents contents
    cdef Holding *holding = holding_of(batch, row)
    hash_row(batch, row, num_computed)
    contents = _contents_of(batch, row, num_computed)
    cache_states(batch.pool, holding, &contents, num_computed, term)


cdef inline bint _has_checkpoint(Batch *batch, Py_ssize_t row, Py_ssize_t g, int32_t num_tokens) noexcept nogil:
    """Whether the state after the row's first tokens, which are known and hashed, is cached in the row's shard."""
    cdef const Group *group = &batch.groups[g]
    cdef Digest key = digests_of(batch, row)[last_hash(group, full_entries(&group.rules, num_tokens) - 1)]
    return find_within(
        batch.pool, key, group.id, ids_in_queue(batch.pool, queue_for(batch.pool, group, batch.rows[row].shard))
    ) != NULL_PAGE


cdef inline bint _has_pages_for_writes(Batch *batch, Py_ssize_t row) noexcept nogil:
    """Whether a page is free for each state of the row, beside those of rows without one, and there is memory for the writes.
    """
    cdef Py_ssize_t[MAX_BANKS] num_states_in
    cdef Py_ssize_t[MAX_BANKS] num_reserved_in
    cdef const Group *group
    cdef Py_ssize_t g
    cdef int32_t queue
    memset(num_states_in, 0, sizeof(num_states_in))
    for g in range(batch.num_groups):
        num_states_in[batch.groups[g].bank] += keeps_checkpoints(&batch.groups[g])
    count_reserved_states(batch, 0, num_reserved_in)
    for g in range(batch.num_groups):
        group = &batch.groups[g]
        queue = queue_for(batch.pool, group, batch.rows[row].shard)
        if keeps_checkpoints(group) and not has_free_pages(
            batch.pool, num_states_in[group.bank], num_reserved_in[group.bank], queue
        ):
            return False
    return find_held_free(batch.pool, batch.num_groups) == NULL_PAGE and reserve_writes(&batch.writes, batch.num_groups)


cdef inline void _note_writes(Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Take a page for each state after the row's first tokens that is not cached, and note its write. If too few pages are
    free, the checkpoint is left out.
    """
    cdef const Group *group
    cdef int32_t page_id
    cdef Py_ssize_t g
    cdef bint has_pages, is_known = num_tokens + batch.hashing.num_lookahead <= batch.records[row].num_tokens
    if is_known:
        hash_row(batch, row, num_tokens)
    has_pages = _has_pages_for_writes(batch, row)
    for g in range(batch.num_groups):
        group = &batch.groups[g]
        if not keeps_checkpoints(group) or (is_known and _has_checkpoint(batch, row, g, num_tokens)):
            continue
        if not has_pages:
            batch.pool.banks[group.bank].num_passed_checkpoints += 1
            continue
        take(batch.pool, &page_id, 1, queue_for(batch.pool, group, batch.rows[row].shard), batch.rows[row].holding.session)
        record_taken(batch.pool, held_by(batch, row, g))
        note_write(
            &batch.writes, StateWrite(row=<int32_t>row, group=<int32_t>g, page_id=page_id, num_tokens=num_tokens)
        )
        batch.rows[row].write_list = batch.writes.number
        batch.rows[row].num_writes += 1


cdef inline void write_states(Batch *batch, Py_ssize_t row, int32_t num_planned) noexcept nogil:
    """Note the writes of a step that computes the row's tokens up to `num_planned`, one for each boundary that it can write. A
    transfer of tokens brings no state but that at their end. O(boundaries x groups).
    """
    cdef Holding *holding = holding_of(batch, row)
    cdef Py_ssize_t g
    cdef int64_t num_tokens = -1
    for g in range(batch.num_groups):
        if not keeps_checkpoints(&batch.groups[g]):
            continue
        if num_tokens < 0:  # all states have the same checkpoints
            num_tokens = find_own_checkpoint(holding, g)
            while num_tokens <= num_planned:
                if num_tokens == num_planned or (batch.writes_anywhere and not batch.records[row].num_external):
                    _note_writes(batch, row, <int32_t>num_tokens)
                num_tokens = find_next_checkpoint(holding, &batch.groups[g], num_tokens)
        holding.held[g].num_cached = max(holding.held[g].num_cached, full_entries(&batch.groups[g].rules, num_planned))


cdef inline void _cache_written(Batch *batch, const StateWrite *write) noexcept nogil:
    """Cache the page of a write whose tokens are computed, unless an equal checkpoint is cached."""
    cdef const Group *group = &batch.groups[write.group]
    cdef Contents contents
    assert batch.pool.pages[write.page_id].group == NO_GROUP and batch.pool.pages[write.page_id].ref_cnt > 0
    hash_row(batch, write.row, write.num_tokens)
    if not _has_checkpoint(batch, write.row, write.group, write.num_tokens):
        contents = _contents_of(batch, write.row, write.num_tokens)
        cache_page(batch.pool, group, write.page_id, full_entries(&group.rules, write.num_tokens) - 1, &contents)


cdef inline void settle_writes(Batch *batch, Py_ssize_t row, int32_t term) noexcept nogil:
    """Cache the pages of a row's writes that were taken and whose tokens are computed, and give these pages back with a term.
    Called as a later step of the row is planned, and as it ends. O(writes).
    """
    cdef WriteList *writes = &batch.writes
    cdef StateWrite write
    cdef Py_ssize_t i = 0
    while i < writes.num_taken and batch.rows[row].num_writes:
        write = writes.items[i]
        if write.row != row or write.num_tokens > count_cacheable(batch, row, batch.records[row].num_computed):
            i += 1
            continue
        remove_write(writes, i)
        batch.rows[row].num_writes -= 1
        _cache_written(batch, &write)
        give_back(batch.pool, write.page_id)
        if term != UNKNOWN and batch.pool.pages[write.page_id].group != NO_GROUP:
            expect_page(batch.pool, write.page_id, term, now_of(batch.pool))


cdef inline void drop_writes(Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Drop the writes of a row's states behind its first `num_tokens` tokens. O(writes)."""
    cdef WriteList *writes = &batch.writes
    cdef Py_ssize_t i
    batch.rows[row].write_list = 0
    for i in range(writes.num - 1 if batch.rows[row].num_writes else -1, -1, -1):
        if writes.items[i].row != row:
            continue
        if writes.items[i].num_tokens > num_tokens:
            give_back(batch.pool, writes.items[i].page_id)
            remove_write(writes, i)
            batch.rows[row].num_writes -= 1
        elif i >= writes.num_taken:
            batch.rows[row].write_list = writes.number


cdef inline void end_writes(Batch *batch, Py_ssize_t row, int32_t term) noexcept nogil:
    """Cache the row's states that were written, with a term, and drop its other writes."""
    settle_writes(batch, row, term)
    drop_writes(batch, row, 0)


cdef inline void take_pages(Batch *batch, Py_ssize_t row, int32_t num_tokens, Growth *growth) noexcept nogil:
    """Take the row's missing pages, group by group, and write them to the tables. Enough pages are free."""
    cdef Held *held
    cdef Py_ssize_t g
    cdef int32_t j, n
    for g in range(batch.num_groups):
        held = held_by(batch, row, g)
        n = take_missing(batch.pool, &batch.groups[g], held, num_tokens, batch.rows[row].shard, batch.rows[row].holding.session)
        assert growth == NULL or growth.num_new + n <= growth.max_num_new
        if n:
            write_ids(batch.tables[g], row, held.num_pages - n, held.ids + held.num_pages - n, n, offset_of(batch, g))
            batch.tables[g].version += 1
        for j in range(held.num_pages - n, held.num_pages if growth != NULL else 0):
            growth.new_ids[growth.num_new] = held.ids[j] - offset_of(batch, g)
            growth.new_rows[growth.num_new] = <int32_t>row
            growth.new_groups[growth.num_new] = <int32_t>g
            growth.num_new += 1


cdef inline bint _has_pages_for(
    const Batch *batch, Py_ssize_t row, int64_t num_new, int64_t num_tokens, Shortage *shortage
) noexcept nogil:
    """Whether the pages that the row lacks for `num_tokens` tokens are free: `num_new` in all. Otherwise set the shortage."""
    cdef int32_t shard = batch.rows[row].shard
    cdef int32_t num_free = batch.pool.num_free if shard < 0 else batch.pool.shard_num_free[shard]
    if exceptional((batch.pool.num_banks > 1) | (num_new > num_free)):
        return _has_pages_in_banks(batch, row, num_new, num_tokens, shortage)
    return True


cdef inline bint _has_pages_in_banks(
    const Batch *batch, Py_ssize_t row, int64_t num_new, int64_t num_tokens, Shortage *shortage
) noexcept nogil:
    """Compare the pages that a row lacks with each bank, or with its shard, and set the shortage where they are too few."""
    cdef int64_t[MAX_BANKS] num_new_in
    cdef int32_t bank, queue
    if batch.pool.num_banks == 1:
        shortage[0] = shortage_in(batch.pool, num_new, 0, 0, batch.rows[row].shard)
        return False
    if num_new <= count_least_free(batch.pool):
        return True
    count_new_in_banks(holding_of(batch, row), num_tokens, num_new_in)
    for bank in range(batch.pool.num_banks):
        queue = queue_in(batch.pool, bank, batch.rows[row].shard)
        if num_new_in[bank] > count_free_in(batch.pool, queue):
            shortage[0] = shortage_in(batch.pool, num_new_in[bank], 0, 0, queue)
            return False
    return True


cdef inline int64_t _find_row_excess(
    const Batch *batch, Py_ssize_t row, int64_t num_tokens, int32_t num_computed, int32_t *queue
) noexcept nogil:
    """Return `find_any_excess` of the row with slots for `num_tokens` tokens, which had `num_computed` before the call."""
    cdef int64_t[MAX_BANKS] num_new_in
    queue[0] = batch.rows[row].shard
    count_new_in_banks(holding_of(batch, row), num_tokens, num_new_in)
    return find_any_excess(batch.pool, holding_of(batch, row), NULL, num_new_in, num_computed, queue)


cdef inline Py_ssize_t _find_too_large(Batch *batch, Growth *growth) noexcept nogil:
    """Return the index of the first row of a call that no bank or shard can ever hold, and set the excess; the number of rows
    if there is none. Counts are advanced.
    """
    cdef const DueRow *due
    cdef int32_t row, num_computed, num_room_tokens
    cdef Py_ssize_t k
    for k in range(growth.num_due):
        due = &batch.due_rows[k]
        row = batch.checked_rows[due.at]
        num_computed = batch.records[row].num_computed
        num_room_tokens = room_for(batch, num_computed, amount(&growth.num_ahead, due.at))
        if not _has_pages_for(batch, row, due.num_new_pages, num_room_tokens, &growth.shortage):
            num_computed -= amount(&growth.num_new_tokens, due.at)
            growth.num_excess = _find_row_excess(batch, row, num_room_tokens, num_computed, &growth.short_queue)
            if growth.num_excess:
                return due.at
    return growth.num_rows


cdef inline bint _grow_row(Batch *batch, Growth *growth, const DueRow *due) noexcept nogil:
    """Do the work of a due row whose counts are advanced; False, and no page taken, if too few are free."""
    cdef int32_t row = batch.checked_rows[due.at]
    cdef int32_t num_tokens = batch.records[row].num_computed
    cdef int32_t num_room_tokens, num_ahead, num_before = num_tokens - amount(&growth.num_new_tokens, due.at)
    # A further call for the same step comes before the step has run.
    cdef bint is_next_step = num_tokens > num_before or growth.ahead != NULL
    cdef Holding *holding = holding_of(batch, row)
    assert batch.records[row].is_admitted and not batch.records[row].num_external
    assert 0 <= num_before <= num_tokens <= batch.records[row].num_tokens
    if rare(batch.writes_states) and (is_next_step or batch.max_steps_ahead):
        settle_writes(batch, row, UNKNOWN)
    if is_next_step:
        if exceptional(batch.hashing.num_lookahead):
            cache_row(batch, row, count_cacheable(batch, row, num_before))
            if batch.skips_pages or batch.has_state:  # pages may leave the row, and states need digests
                cache_waiting(&batch.waiting)
        if rare(batch.skips_pages):
            _skip_row(batch, row, count_cacheable(batch, row, num_before))
    if due.num_new_pages:
        num_room_tokens = room_for(batch, num_tokens, amount(&growth.num_ahead, due.at))
        if not _has_pages_for(batch, row, due.num_new_pages, num_room_tokens, &growth.shortage):
            return False
        take_pages(batch, row, num_room_tokens, growth)
    if rare(batch.keeps_states) and is_next_step and are_checkpoints_due(holding, num_before):
        _keep_row_states(batch, row, num_before)
    if rare(batch.writes_states):
        num_ahead = 0
        if batch.max_steps_ahead and not batch.restores_states:
            num_ahead = amount(&growth.num_ahead, due.at)
        write_states(batch, row, plan_for(batch, batch.records[row].num_tokens, num_tokens, num_ahead))
    if not batch.caches_computed:
        cache_row(batch, row, count_cacheable(batch, row, num_tokens))
    plan_next_event(batch, row)
    return True


cdef inline int64_t find_passed_behind(
    const Batch *batch, Py_ssize_t row, int64_t num_kept, int32_t num_counted, int32_t num_slots
) noexcept nogil:
    """Return `find_passed_checkpoint` of a row; INT64_MAX if passing is allowed."""
    if batch.restores_states or batch.max_steps_ahead:
        return INT64_MAX
    return find_passed_checkpoint(holding_of(batch, row), num_kept, num_counted, num_slots)


cdef inline int64_t find_passed(const Batch *batch, int32_t row, int32_t num_new, int32_t num_room_tokens) noexcept nogil:
    """Return the token count of the checkpoint that lookahead would pass; INT64_MAX if there is none, or passing is allowed.
    The row's counts are not advanced yet.
    """
    cdef int32_t num_computed = batch.records[row].num_computed
    return find_passed_behind(batch, row, num_computed if num_new else -1, num_computed + num_new, num_room_tokens)


cdef inline bint note_due_row(Batch *batch, Growth *growth, Py_ssize_t i, int32_t num_room_tokens) noexcept nogil:
    """Add a row to the due rows, with the pages that it may need; False if the call is wrong for it."""
    cdef int32_t row = batch.checked_rows[i]
    cdef const RowRecord *record = &batch.records[row]
    cdef Holding *holding = holding_of(batch, row)
    cdef bint is_step = growth.token_ids != NULL
    if GUARDS and not (record.is_admitted and record.num_tokens + is_step <= batch.max_num_tokens):
        return False
    if GUARDS and is_step and record.num_computed < record.num_tokens:
        return False
    if rare(record.next_event == 1) and (batch.records[row].num_external or has_row_due(batch, row)):
        return False
    if GUARDS and rare(batch.skips_pages or (batch.keeps_states and are_checkpoints_due(holding, record.num_computed))):
        if find_lost_page(batch.pool, holding, record.num_computed) != NULL_PAGE:
            return False
    if GUARDS and rare(batch.keeps_states or batch.writes_states):
        if find_passed(batch, row, amount(&growth.num_new_tokens, i), num_room_tokens) < INT64_MAX:
            return False
    batch.due_rows[growth.num_due] = DueRow(
        at=<int32_t>i, num_new_pages=<int32_t>min(count_new_pages(holding, num_room_tokens), <int64_t>INT32_MAX)
    )
    assert growth.num_due < growth.num_rows and batch.due_rows[growth.num_due].num_new_pages >= 0
    growth.max_num_new += batch.due_rows[growth.num_due].num_new_pages
    growth.num_due += 1
    return True


cdef inline bint _copy_ascending(Batch *batch, const int32_t *rows, Py_ssize_t n) noexcept nogil:
    """Copy rows if they are in the table and ascend, as they usually do: then none of them repeats."""
    cdef const int32_t *copied = batch.checked_rows
    cdef int32_t signs = 0
    cdef Py_ssize_t i
    if n <= batch.num_ascending and memcmp(copied, rows, n * sizeof(int32_t)) == 0:  # the same rows as in the last step
        return True
    batch.num_ascending = 0
    if n > batch.num_rows:
        return False
    memcpy(batch.checked_rows, rows, n * sizeof(int32_t))
    for i in range(1, n if GUARDS else 1):  # no early exit, so that it vectorises
        signs |= copied[i] | <int32_t>(<uint32_t>copied[i] - <uint32_t>copied[i - 1] - 1)
    if GUARDS and (signs < 0 or copied[0] < 0 or copied[n - 1] >= batch.num_rows):
        return False
    batch.num_ascending = n
    return True


cdef inline Py_ssize_t copy_rows(Batch *batch, const int32_t *rows, Py_ssize_t n) noexcept nogil:
    """Copy rows, so that they cannot change during the call. Return the number of rows before the first that is outside the
    table, free, or repeated.
    """
    cdef Py_ssize_t i
    if _copy_ascending(batch, rows, n):
        return n
    start_call(batch)
    for i in range(n):
        if not stamp_row(batch, rows[i], i):
            return i
    return n


cdef inline void revert_counts(Batch *batch, const Growth *growth, Py_ssize_t start, Py_ssize_t stop) noexcept nogil:
    """Revert the counts that `_step_rows` or `_advance_rows` advanced for copied rows."""
    cdef Py_ssize_t i, row
    for i in range(start, stop):
        row = batch.checked_rows[i]
        batch.records[row].num_tokens -= growth.token_ids != NULL
        batch.records[row].num_computed -= amount(&growth.num_new_tokens, i)
        assert 0 <= batch.records[row].num_computed <= batch.records[row].num_tokens


# Counts are advanced while rows are checked. A free row is never plain: its `next_event` is 0.

cdef inline void _advance_by_token(RowRecord *record, Grown *grown) noexcept nogil:
    """Count one more token as known and computed, for a row whose known tokens are all computed."""
    assert record.num_tokens == record.num_computed
    grown[0] = Grown(num_tokens=record.num_tokens + 1, num_computed=record.num_computed + 1)
    record.num_tokens, record.num_computed = grown.num_tokens, grown.num_computed


cdef inline Py_ssize_t _step_plain_rows(Batch *batch, Growth *growth, Py_ssize_t start, Py_ssize_t n) noexcept nogil:
    """Append a token to each copied row from `start` on, and return the index of the first due row."""
    cdef const int32_t *rows = batch.checked_rows
    cdef const int32_t *new_ids = growth.token_ids
    cdef int32_t *token_ids = batch.token_ids
    cdef RowRecord *records = batch.records
    cdef RowRecord *record
    cdef Grown *grown = growth.grown
    cdef Py_ssize_t i = start, stride = batch.tokens_stride
    cdef int32_t signs = 0
    while i < n:
        record = &records[rows[i]]
        if record.num_computed + 1 >= record.next_event or record.num_computed != record.num_tokens:
            break
        assert record.is_admitted and not record.num_external and record.num_tokens < batch.max_num_tokens
        signs |= new_ids[i]
        token_ids[rows[i] * stride + record.num_computed] = new_ids[i]
        _advance_by_token(record, &grown[i])
        i += 1
    growth.signs |= signs
    return i


cdef inline Py_ssize_t _step_rows(Batch *batch, Growth *growth, Py_ssize_t n) noexcept nogil:
    """Append a token to each copied row, and return the number of rows before the first wrong one; 0, and nothing advanced, if
    a token is negative.
    """
    cdef RowRecord *record
    cdef Py_ssize_t i = _step_plain_rows(batch, growth, 0, n)
    while i < n:
        record = &batch.records[batch.checked_rows[i]]
        if not note_due_row(batch, growth, i, record.num_computed + 1):
            break
        growth.signs |= growth.token_ids[i]
        tokens_of(batch, batch.checked_rows[i])[record.num_tokens] = growth.token_ids[i]
        _advance_by_token(record, &growth.grown[i])
        i = _step_plain_rows(batch, growth, i + 1, n)
    if growth.signs < 0:
        revert_counts(batch, growth, 0, i)
        return 0
    return i


cdef inline Py_ssize_t _advance_rows(Batch *batch, Growth *growth, Py_ssize_t n) noexcept nogil:
    """Count known tokens of each row as computed, and return the number of rows before the first wrong one."""
    cdef RowRecord *record
    cdef int32_t num_new, num_ahead, num_computed, num_room_tokens
    cdef Py_ssize_t i
    for i in range(n):
        record = &batch.records[batch.checked_rows[i]]
        num_new, num_ahead = amount(&growth.num_new_tokens, i), amount(&growth.num_ahead, i)
        if num_new < 0 or num_ahead < 0 or num_new > record.num_tokens - record.num_computed:
            return i
        num_computed = record.num_computed + num_new
        num_room_tokens = room_for(batch, num_computed, num_ahead)
        if max(num_room_tokens, record.num_computed + 1) >= record.next_event:
            if not note_due_row(batch, growth, i, num_room_tokens):
                return i
        assert record.is_admitted and not record.num_external
        record.num_computed = num_computed
        growth.grown[i] = Grown(num_tokens=record.num_tokens, num_computed=num_computed)
    return n


cdef inline Py_ssize_t limit_to_pool(Batch *batch, Growth *growth, Py_ssize_t num_right) noexcept nogil:
    """Return the number of right rows before the first that no bank or shard can ever hold. Others are reverted."""
    if num_right == growth.num_rows and rare(growth.max_num_new > count_least_free(batch.pool)):
        num_right = _find_too_large(batch, growth)
        revert_counts(batch, growth, num_right, growth.num_rows)
    return num_right


cdef inline Py_ssize_t advance_counts(Batch *batch, Growth *growth) noexcept nogil:
    """Copy the rows of a call and advance their counts; return the number of rows before the first wrong one."""
    cdef Py_ssize_t n = copy_rows(batch, growth.rows, growth.num_rows)
    cdef Py_ssize_t num_right = _advance_rows(batch, growth, n) if growth.token_ids == NULL else _step_rows(batch, growth, n)
    return limit_to_pool(batch, growth, num_right)


cdef inline void grow_rows(Batch *batch, Growth *growth) noexcept nogil:
    """Do the work of the due rows, in order, up to the first row that does not fit. The rows from there on are reverted."""
    cdef Py_ssize_t k, num_grown = growth.num_rows
    assert 0 <= growth.num_due <= growth.num_rows <= batch.num_rows
    memcpy(growth.grown_rows, batch.checked_rows, growth.num_rows * sizeof(int32_t))
    for k in range(growth.num_due):
        if not _grow_row(batch, growth, &batch.due_rows[k]):
            num_grown = batch.due_rows[k].at
            count_refusal(batch.pool, growth.shortage.queue)
            break
    cache_waiting(&batch.waiting)
    assert batch.waiting.num_to_hash == 0 and num_grown <= growth.num_rows
    revert_counts(batch, growth, num_grown, growth.num_rows)
    if rare(num_grown < growth.num_rows):
        cut_hashes(batch, batch.checked_rows[num_grown])
    growth.num_grown = num_grown


cdef inline Py_ssize_t append_tokens(Batch *batch, const int32_t *rows, const int32_t *token_ids, Py_ssize_t n) noexcept nogil:
    """Append a token to each row, in order, or none if one does not fit; return the number of tokens that fit."""
    cdef Py_ssize_t i, num_done = 0
    cdef int32_t row
    while num_done < n:
        row = rows[num_done]
        if not is_row(batch, row) or batch.records[row].num_tokens >= batch.max_num_tokens:
            break
        tokens_of(batch, row)[batch.records[row].num_tokens] = token_ids[num_done]
        batch.records[row].num_tokens += 1
        batch.records[row].next_event = <int32_t>min(<int64_t>batch.records[row].next_event, last_token_event(batch, row) + 1)
        num_done += 1
        assert batch.records[row].num_tokens <= batch.max_num_tokens
    if num_done < n:
        for i in range(num_done):
            batch.records[rows[i]].num_tokens -= 1
    elif batch.max_steps_ahead:
        for i in range(n):
            tell_token(&batch.flights[rows[i]], batch.records[rows[i]].num_tokens)
    return num_done


# Rows get shorter: tokens are cut, or a call that grew rows is taken back. Where computed tokens are cut, the next tokens
# overwrite the page at the cut, so it must have no other holder. Pages of tokens that were never computed are uncached: they
# must not hit.

cdef inline bint has_state_behind(const Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Whether the row has a state that saw tokens from `num_tokens` on, or will. A restart from token 0 replaces the state."""
    return batch.has_state and 0 < num_tokens < min(batch.records[row].num_tokens, count_planned(batch, row))


cdef inline bint can_restart_row(const Batch *batch, Py_ssize_t row, int32_t num_tokens, int32_t num_computed) noexcept nogil:
    """Whether the row `can_restart` with `num_tokens` known tokens, at most `num_computed` of them computed."""
    cdef Holding *holding = holding_of(batch, row)
    cdef int32_t restart = find_restart(batch.pool, holding, min(batch.records[row].num_computed, num_computed))
    return not batch.records[row].num_external and can_restart(batch.pool, holding, restart, num_tokens)


cdef inline bint _can_trim(const Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Whether the row can be cut to some of its tokens. Its pages matter only where computed tokens are cut."""
    if batch.flights[row].num_ahead or has_state_behind(batch, row, num_tokens):
        return False
    if num_tokens >= batch.records[row].num_computed:
        return not batch.records[row].num_external
    return can_restart_row(batch, row, num_tokens, num_tokens)


cdef inline Py_ssize_t _copy_rows_to_trim(
    Batch *batch, const int32_t *rows, const Amounts *lengths, Py_ssize_t n
) noexcept nogil:
    """Copy rows, and return the number of rows before the first wrong one."""
    cdef Py_ssize_t i
    start_call(batch)
    for i in range(n):
        if not stamp_row(batch, rows[i], i):
            return i
        if has_row_due(batch, batch.checked_rows[i]):
            return i
        if not 0 <= amount(lengths, i) <= batch.records[batch.checked_rows[i]].num_tokens:
            return i
        if not _can_trim(batch, batch.checked_rows[i], amount(lengths, i)):
            return i
    return n


cdef inline void _cut_tokens(Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Cut tokens that are not computed."""
    assert batch.records[row].num_computed <= num_tokens <= batch.records[row].num_tokens
    batch.records[row].num_tokens = num_tokens
    count_ahead(&batch.flights[row], num_tokens)
    cut_hashes(batch, row)
    plan_next_event(batch, row)


cdef inline void restart_row(Batch *batch, Py_ssize_t row, int32_t num_tokens, int32_t num_computed) noexcept nogil:
    """Restart a row that `can_restart_row` with `num_tokens` known tokens, at most `num_computed` of them computed."""
    cdef Holding *holding = holding_of(batch, row)
    cdef int32_t restart = find_restart(batch.pool, holding, min(batch.records[row].num_computed, num_computed))
    assert 0 <= restart <= batch.records[row].num_computed and not batch.records[row].num_external
    restart_from(batch.pool, holding, restart, num_tokens)
    if batch.writes_states:
        drop_writes(batch, row, restart)
    batch.num_cuts += 1
    batch.rows[row].last_cut = batch.num_cuts
    batch.flights[row].num_planned, batch.flights[row].num_told = 0, batch.flights[row].num_launched
    batch.flights[row].num_resolved = min(batch.flights[row].num_resolved, restart)
    show_end(batch, row)
    batch.records[row].num_computed = restart
    batch.records[row].num_hits = min(batch.records[row].num_hits, restart)
    _cut_tokens(batch, row, num_tokens)


cdef inline void _trim_row(Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Cut a row that `_can_trim`."""
    if num_tokens < batch.records[row].num_computed:
        restart_row(batch, row, num_tokens, num_tokens)
    else:
        _cut_tokens(batch, row, num_tokens)


cdef inline Py_ssize_t trim_rows(
    Batch *batch, const int32_t *rows, const Amounts *lengths, Py_ssize_t n
) noexcept nogil:
    """Cut rows, or none if one is wrong; return the number of rows before the first wrong one."""
    cdef Py_ssize_t i, num_right = _copy_rows_to_trim(batch, rows, lengths, n)
    for i in range(n if num_right == n else 0):
        _trim_row(batch, batch.checked_rows[i], amount(lengths, i))
    return num_right


cdef inline void uncache_row(Batch *batch, Py_ssize_t row, int32_t num_computed) noexcept nogil:
    """Uncache the row's pages with tokens from `num_computed` on, if the row cached them."""
    cdef Contents contents = _contents_of(batch, row, batch.records[row].num_tokens)
    cdef Holding *holding = holding_of(batch, row)
    forget_uncomputed(batch.pool, holding, num_computed, &contents)


cdef inline bint is_last_step(const Batch *batch, const Growth *growth, Py_ssize_t i) noexcept nogil:
    """Whether the row stayed where it was, and no later call gave it slots, or cut its computed tokens."""
    cdef int32_t row = growth.grown_rows[i]
    cdef const RowRecord *record = &batch.records[row]
    if not record.is_admitted:
        return False
    if batch.rows[row].admission > growth.num_admissions or batch.rows[row].last_cut > growth.num_cuts:
        return False
    if growth.launches != NULL and growth.launches[i].ordinal:
        if batch.flights[row].num_launched != growth.launches[i].ordinal:
            return False
    return growth.ahead != NULL or record.num_computed == growth.grown[i].num_computed


cdef inline bint is_as_grown(const Batch *batch, const Growth *growth, Py_ssize_t i) noexcept nogil:
    """Whether the call was the row's last one, and the row has the tokens of `Grown`, if the call gave it one."""
    if not is_last_step(batch, growth, i):
        return False
    return growth.token_ids == NULL or batch.records[growth.grown_rows[i]].num_tokens == growth.grown[i].num_tokens


cdef inline int32_t planned_by(const Batch *batch, const Growth *growth, Py_ssize_t i) noexcept nogil:
    """Return the number of tokens up to which the call planned the row, if no step was resolved since."""
    cdef const Grown *grown = &growth.grown[i]
    if growth.ahead != NULL:
        return growth.launches[i].num_planned + 1 + growth.launches[i].num_drafts
    return plan_for(batch, grown.num_tokens, grown.num_computed, amount(&growth.num_ahead, i))


cdef inline int32_t planned_before(const Batch *batch, const Growth *growth, Py_ssize_t i) noexcept nogil:
    """Return the number of tokens up to which steps before the row's last one are planned. Drafts rejected since the call count
    no more.
    """
    cdef int32_t num_planned
    if growth.launches == NULL:
        return 0
    num_planned = growth.launches[i].num_planned
    if growth.ahead != NULL:
        num_planned += batch.flights[growth.grown_rows[i]].num_planned - planned_by(batch, growth, i)
    return num_planned


cdef inline int32_t computed_before(const Batch *batch, const Growth *growth, Py_ssize_t i) noexcept nogil:
    """Return the row's computed count as it would be without the call."""
    if growth.ahead != NULL:
        return min(batch.records[growth.grown_rows[i]].num_computed, planned_before(batch, growth, i))
    return growth.grown[i].num_computed - amount(&growth.num_new_tokens, i)


cdef inline Py_ssize_t _find_taken(const Growth *growth, Py_ssize_t stop, int32_t row, Py_ssize_t g) noexcept nogil:
    """Return the start of the row's new pages of a group, which end at `stop`."""
    assert 0 <= stop <= growth.num_new
    while stop and growth.new_rows[stop - 1] == row and growth.new_groups[stop - 1] == g:
        stop -= 1
    return stop


cdef inline bint _have_ids(const int32_t *pages, const int32_t *ids, Py_ssize_t n, int32_t offset) noexcept nogil:
    """Whether pages have these ids, which are less by the offset of their bank."""
    cdef Py_ssize_t i
    for i in range(n):
        if pages[i] != ids[i] + offset:
            return False
    return True


cdef inline bint _is_shared_from(const Pool *pool, const Held *held, int32_t start) noexcept nogil:
    """Whether a page from place `start` on has other holders."""
    cdef int32_t i
    for i in range(start, held.num_pages):
        if held.ids[i] != NULL_PAGE and pool.pages[held.ids[i]].ref_cnt > 1:
            return True
    return False


cdef inline bint _can_undo(const Batch *batch, const Growth *growth, Py_ssize_t i, Py_ssize_t *stop) noexcept nogil:
    """Whether the call can be taken back for a row: the row is as the call left it, its last pages are the new ones before
    `stop`, and it holds the pages that it needs again, alone where it writes. Moves `stop` to the row's first new page.
    """
    cdef const Held *held
    cdef Py_ssize_t g, start, num_new, num_kept
    cdef int32_t row = growth.grown_rows[i]
    cdef Holding *holding = holding_of(batch, row)
    if not is_as_grown(batch, growth, i) or has_moves_due(batch.pool, holding):
        return False
    for g in range(batch.num_groups - 1, -1, -1):
        held = held_by(batch, row, g)
        start = _find_taken(growth, stop[0], row, g)
        num_new = stop[0] - start
        num_kept = held.num_pages - num_new
        if num_kept < 0 or not _have_ids(held.ids + num_kept, growth.new_ids + start, num_new, offset_of(batch, g)):
            return False
        if lacks_page(&batch.groups[g], held, computed_before(batch, growth, i), num_kept):
            return False
        if find_unheld(batch.pool, held.ids, num_kept, held.num_pages) >= 0:
            return False
        if _is_shared_from(batch.pool, held, full_pages(&batch.groups[g].rules, computed_before(batch, growth, i))):
            return False
        stop[0] = start
    return True


cdef inline void _undo_writes(Batch *batch, Py_ssize_t row) noexcept nogil:
    """Drop the writes of steps that are not planned any more, and skip the boundaries of the steps still planned."""
    cdef Held *held
    cdef Py_ssize_t g
    cdef int32_t num_planned = batch.records[row].num_computed if batch.restores_states else count_planned(batch, row)
    drop_writes(batch, row, num_planned)
    for g in range(batch.num_groups):
        held = held_by(batch, row, g)
        if keeps_checkpoints(&batch.groups[g]):
            held.num_cached = full_entries(&batch.groups[g].rules, num_planned)


cdef inline void _undo_row(Batch *batch, const Growth *growth, Py_ssize_t i, Py_ssize_t *stop) noexcept nogil:
    """Take the call back for a row, after `_can_undo`."""
    cdef Held *held
    cdef Py_ssize_t g, start
    cdef int32_t row = growth.grown_rows[i]
    cdef int32_t num_computed = computed_before(batch, growth, i)
    cdef RowRecord *record = &batch.records[row]
    cdef Flight *flight = &batch.flights[row]
    cdef int32_t num_tokens = record.num_tokens - (growth.token_ids != NULL)
    cdef int64_t num_hit
    cdef int32_t num_kept, num_keyed = min(num_computed, count_keyed(batch, num_tokens))
    assert 0 <= num_computed <= record.num_computed
    uncache_row(batch, row, num_keyed)
    for g in range(batch.num_groups - 1, -1, -1):
        held = held_by(batch, row, g)
        start = _find_taken(growth, stop[0], row, g)
        assert 0 <= stop[0] - start <= held.num_pages
        num_kept = num_keyed
        if rare(num_keyed < num_computed):  # hits keep their entries
            num_hit = held.num_hits * <int64_t>batch.groups[g].rules.entry_size
            num_kept = max(num_keyed, <int32_t>min(num_hit, <int64_t>num_computed))
        give_back_from(batch.pool, &batch.groups[g], held, held.num_pages - (stop[0] - start), num_kept)
        stop[0] = start
    show_end(batch, row)
    record.num_computed = num_computed
    record.num_tokens = num_tokens
    if growth.launches != NULL:
        flight.num_planned = planned_before(batch, growth, i)
        flight.num_launched -= growth.launches[i].ordinal != 0
        if growth.token_ids != NULL:
            flight.num_told = growth.launches[i].num_told
        flight.num_told = min(flight.num_told, flight.num_launched)
        count_ahead(flight, record.num_tokens)
    flight.num_resolved = min(flight.num_resolved, num_computed)
    if batch.writes_states:
        _undo_writes(batch, row)
    cut_hashes(batch, row)
    plan_next_event(batch, row)


cdef inline Py_ssize_t count_kept(const Batch *batch, const Growth *growth) noexcept nogil:
    """Count the rows of a call up to the last that cannot go back; 0: all can."""
    cdef Py_ssize_t num_left = growth.num_grown, num_pages = growth.num_new
    if growth.is_admission:
        return num_left - is_last_step(batch, growth, 0)
    while num_left and _can_undo(batch, growth, num_left - 1, &num_pages):
        num_left -= 1
    return num_left


cdef inline void undo_rows(Batch *batch, const Growth *growth) noexcept nogil:
    """Take a call back whose rows can all go back."""
    cdef Py_ssize_t i, num_pages = growth.num_new
    for i in range(growth.num_grown - 1, -1, -1):
        _undo_row(batch, growth, i, &num_pages)
