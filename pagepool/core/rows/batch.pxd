# Rows of a running batch. The caller holds the locks of the batch, the store and the tables, and has checked the rows.
#
# A `Batch` keeps for each row its known tokens, a `RowRecord` with the counts that every step reads, a ring of launches, and a
# `Row` with everything else. A call that plans rows is a `Growth`. It first checks all rows, and lists those that need work
# besides counting as `DueRow`s; then it does this work, and advances the counts of the other rows.
#
# Always, for each row:
# - ``num_tokens <= max_num_tokens``; a pending row has ``num_computed + num_external < num_tokens``.
# - The first `num_hashed` digests match its tokens and extra keys; an admitted row has at most `count_hashable` of them.
# - `next_plan` is 0 in a free row and 1 in a pending one. While a running row has fewer planned positions than that, no page
#   is to be taken, cached or skipped, and the row is not full.
# - A free row has no token, no page, no context and no session.
# - `holding` points to the batch's groups, and the tables show its pages.
# A `Growth` has ``num_due <= num_rows``, ``num_new <= max_num_new`` and ``num_grown <= num_rows``. Between calls no page waits
# to be hashed.

from libc.stdint cimport INT32_MAX, INT64_MAX, int32_t, int64_t, uint32_t, uint8_t
from libc.string cimport memcmp, memcpy, memset

from pagepool.core.base cimport (
    GUARDS, SIPHASH, UNKNOWN, Digest, Hashing, exceptional, hash_pages, rare, reserve_items, signs_of,
)
from pagepool.core.holding cimport (
    NUM_WAITING, Checkpoint, Contents, Group, Held, Holding, Limits, PageToHash, Rules, Shortage, StateWrite, Waiting,
    WriteList, cache_full_pages, cache_waiting, cache_written, can_restart, count_new_in_banks, count_new_pages, cut_prompt,
    drop_behind, empty, exchange_writes, find_any_excess, find_final, find_lost_page, find_next_boundary, find_next_write,
    find_restart, first_to_skip, full_entries, full_pages, give_back_written, has_copies, has_moves_due, hash_waiting,
    is_recurrent, is_ring, is_state, keeps_checkpoints, last_hash, limits_of, remove_write, restart_from, ring_has, shortage_in,
    skip_pages, take_missing, write_checkpoint,
)
from pagepool.core.pool cimport (
    FLAGS, MAX_BANKS, NO_GROUP, NO_SESSION, NULL_PAGE, Lineage, Page, Pool, count_free_in, count_least_free, count_refusal,
    digest_of, find_held_free, is_journaled, now_of, queue_in, set_session, uncache, uncache_everywhere, uncache_in_tier,
)
from pagepool.core.rows.fills cimport *
from pagepool.core.rows.run cimport *
from pagepool.core.tables cimport Table, blank, clear_from, count_table_places, ids_at, write_ids


cdef struct ExtraKey:         # bytes hashed with a page's tokens
    const uint8_t *data
    Py_ssize_t size           # 0: none
    Py_ssize_t page           # OTHER_PAGES in a row's first key, for pages without their own; LAST_PAGE in the last

cdef enum:
    OTHER_PAGES = -1
    LAST_PAGE = 0x7fffffff

cdef struct DueRow:           # a row that needs work besides counting
    int32_t at                # its index in the call
    int32_t num_new_pages     # missing pages, at most INT32_MAX
    int32_t num_room          # positions that need slots, drafts included
    int32_t before            # position where its step begins

cdef struct LinesBefore:      # how far a due row is before its step
    int32_t num_run           # oldest launches that have run once the step is planned
    int32_t num_final         # final tokens
    int32_t num_sure          # final tokens that no step in flight writes: pages are skipped by this count

cdef struct Row:              # two cache lines; growth reads the first
    Holding holding
    Digest *digests           # [num_hashed]
    ExtraKey *extra_keys      # in the order of pages; NULL: none
    int32_t context           # 0: none
    int32_t shard             # source of new pages; -1: any
    int32_t num_hashed        # pages with digests; a free row keeps those of its last tokens
    int32_t num_writes        # writes of its states that are due or were taken
    int64_t write_list        # number of the last list with a write of its states; 0: none
    int64_t last_cut          # number of the last cut of its computed tokens
    Digest *uppers            # [num_hashed] upper halves of the digests; NULL: they have 16 bytes
    int32_t num_hits          # tokens hit at admission
    int32_t num_external      # tokens awaited from elsewhere; 0: the row is not pending
    int32_t num_ahead         # planned positions behind the known tokens
    int32_t ring_start        # rings have no token before this one
    int32_t ring_stop         # positions up to here may be written in rings, by drafts that were rejected or before a cut
    int32_t unused
    int64_t begun             # when its stay began, on the clock of stamps

cdef struct Identity:         # context and session of a row's request
    int32_t context           # journal context of its pages; 0: none
    int32_t session

cdef struct MadeEntry:        # the entry of a page given back while the step that fills it is in flight
    int64_t step
    Digest key
    int32_t page_id
    int32_t group             # id of the group

cdef struct OpenStep:         # a step that may fail, in a list of all
    int64_t step              # its number; 0: it is not open
    bint has_failed           # it failed with an earlier step
    OpenStep *prev
    OpenStep *next

cdef struct Batch:            # rows that run together
    Pool *pool
    Group *groups
    Py_ssize_t num_groups
    Table **tables            # [num_groups]
    Py_ssize_t num_rows
    int32_t max_num_tokens    # limit for each row
    int32_t num_local_shards  # shards whose pages count from 1 in the tables; 0: tables have the ids of the pool
    int32_t hash_page_size    # tokens; 0: no prefix caching
    RowRecord *records        # [num_rows] counts that each step reads
    Launch *launches          # [num_rows, ring_size]
    Py_ssize_t ring_size      # most launches of a row: `max_steps_ahead` and one
    Row *rows                 # [num_rows]
    uint32_t stamp            # number of this call; not 0
    uint32_t *stamps          # [num_rows] number of the last call that named each row
    int32_t *checked_rows     # [num_rows] the rows of this call
    Py_ssize_t num_ascending  # leading checked rows that `_copy_ascending` found right, unchanged since
    DueRow *due_rows          # [num_rows] due rows of this call
    Waiting waiting
    int32_t *token_ids        # [num_rows, tokens_stride] known tokens
    Py_ssize_t tokens_stride
    bint has_boundaries       # whether pages of windows and chunks stay cached at boundaries only
    bint skips_pages          # whether any group has a window or chunks
    bint has_state            # whether any group is a state
    int32_t max_num_drafts    # most draft tokens behind each row's known ones, so that rings can take them back
    bint writes_states        # whether steps write checkpoints to pages of their own
    bint caches_computed      # whether pages are cached once the steps that computed them are settled
    bint caches_late          # whether `caches_computed`, or keys have a lookahead
    bint has_final            # whether `caches_late`, or pages are skipped, or states written: plans first handle what is final
    bint settles              # whether a step was settled
    WriteList writes
    Fills fills
    MadeEntry *made           # [num_made], and room for `made_capacity`
    Py_ssize_t num_made
    Py_ssize_t made_capacity
    OpenStep *open_steps      # NULL: none
    int64_t *stays            # [num_rows] numbers of the requests' stays, which move with the rows; 0: free
    int64_t num_stays         # stays of all rows: each admission and fork begins one
    int64_t num_cuts          # cuts of computed tokens in all rows
    int64_t num_steps         # steps that have rows
    int32_t max_steps_ahead   # most steps planned behind a running one whose tokens are not known
    Py_ssize_t num_admitted   # admitted rows
    Hashing hashing

cdef struct Amounts:          # a number for each row
    const int32_t *values
    Py_ssize_t stride         # 0: one value serves all rows

cdef struct Planned:          # a row in a call of `plan`
    int32_t num_planned       # planned positions after the call
    int32_t num_sampled       # most tokens that the step samples; 0 inside a prompt

cdef struct Growth:           # one call that plans rows
    const int32_t *rows
    Py_ssize_t num_rows
    Amounts num_tokens        # known tokens of each row that get slots
    Amounts num_drafts        # drafts behind them
    const int32_t *token_ids  # the token that each row's last step sampled, to append first; NULL: none
    Planned *planned          # [num_rows]; NULL with `token_ids`
    int32_t *grown_rows       # [num_rows] a copy of `rows`, in the allocation of `planned`
    Py_ssize_t num_grown      # leading rows that have their room
    int64_t step              # number of the step
    uint32_t told_before      # `told_step` that rows had if they got their token as they were checked; 0: none did
    Py_ssize_t num_checked    # leading rows that are checked
    int64_t num_stays         # `num_stays` of the batch when the call ended
    int64_t num_excess        # pages that a row too large for its bank or shard would hold; 0: no row is
    int32_t short_queue       # queue of that bank or shard
    Shortage shortage         # why the first row that did not fit got no pages
    Py_ssize_t num_due        # due rows
    Py_ssize_t max_num_new    # upper bound on new pages
    Py_ssize_t num_new        # new pages
    int32_t *new_ids          # [max_num_new], with the next two in one allocation
    int32_t *new_rows
    int32_t *new_groups


cdef inline void _assert_row(const Batch *batch, Py_ssize_t row) noexcept nogil:
    """Assert what holds for every row, in place of functions that return pointers: these cannot have asserts."""
    assert 0 <= row < batch.num_rows and batch.max_num_tokens <= batch.tokens_stride
    assert batch.rows[row].holding.groups == batch.groups and batch.rows[row].holding.num_groups == batch.num_groups


cdef inline Holding *holding_of(const Batch *batch, Py_ssize_t row) noexcept nogil:
    _assert_row(batch, row)
    return &batch.rows[row].holding


cdef inline Held *held_by(const Batch *batch, Py_ssize_t row, Py_ssize_t g) noexcept nogil:
    _assert_row(batch, row)
    return &batch.rows[row].holding.held[g]


cdef inline int32_t offset_of(const Batch *batch, Py_ssize_t g) noexcept nogil:
    """Return the number that turns the id of a group's page into the index of its record, by addition."""
    return batch.pool.banks[batch.groups[g].bank].start - 1


cdef inline int32_t shown_offset_of(const Batch *batch, Py_ssize_t row, Py_ssize_t g) noexcept nogil:
    """Return the number that turns an id in the row's table into the index of its record, by addition. With local ids the pages
    of each shard count from 1.
    """
    cdef int32_t offset = offset_of(batch, g), shard = batch.rows[row].shard
    if not batch.num_local_shards or shard <= 0:
        return offset
    return offset + shard * ((batch.pool.banks[batch.groups[g].bank].stop - offset) // batch.num_local_shards) - 1


cdef inline int32_t *tokens_of(const Batch *batch, Py_ssize_t row) noexcept nogil:
    _assert_row(batch, row)
    return batch.token_ids + row * batch.tokens_stride


cdef inline Digest *digests_of(const Batch *batch, Py_ssize_t row) noexcept nogil:
    _assert_row(batch, row)
    return batch.rows[row].digests


cdef inline Contents contents_of_row(const Batch *batch, Py_ssize_t row, Py_ssize_t num_tokens) noexcept nogil:
    cdef int32_t context = batch.rows[row].context if is_journaled(batch.pool) else 0
    return Contents(
        digests=digests_of(batch, row), uppers=batch.rows[row].uppers, num_digests=batch.rows[row].num_hashed,
        token_ids=tokens_of(batch, row), num_token_ids=num_tokens + batch.hashing.hash_lookahead,
        hash_lookahead=batch.hashing.hash_lookahead, context=context, session=batch.rows[row].holding.session,
    )


cdef inline Contents contents_for(
    const Batch *batch, Py_ssize_t row, Py_ssize_t num_token_ids, Identity identity
) noexcept nogil:
    """Return the contents of the pages that a request in a claimed row may load: the row's hashes and first tokens."""
    cdef Contents contents = contents_of_row(batch, row, 0)
    contents.num_token_ids, contents.context, contents.session = num_token_ids, identity.context, identity.session
    return contents


cdef inline bint has_writes_due(const Batch *batch, Py_ssize_t row) noexcept nogil:
    """Whether a write of the row's states is due."""
    return batch.writes_states and batch.rows[row].write_list == batch.writes.number


cdef inline bint has_row_due(const Batch *batch, Py_ssize_t row) noexcept nogil:
    """Whether moves of the row's pages are due."""
    return has_moves_due(batch.pool, holding_of(batch, row)) or has_writes_due(batch, row)


# Launches.

cdef inline void _assert_launch(const Batch *batch, Py_ssize_t row, Py_ssize_t i) noexcept nogil:
    assert 0 <= i < batch.ring_size and batch.records[row].first_launch < batch.ring_size


cdef inline Launch *_place_of_launch(const Batch *batch, Py_ssize_t row, Py_ssize_t i) noexcept nogil:
    """Return a pointer to the launch at index `i`, counted from the oldest."""
    cdef Py_ssize_t place = batch.records[row].first_launch + i
    _assert_launch(batch, row, i)
    if place >= batch.ring_size:
        place -= batch.ring_size
    return &batch.launches[row * batch.ring_size + place]


cdef inline Launch launch_of(const Batch *batch, Py_ssize_t row, Py_ssize_t i) noexcept nogil:
    """Return the launch at index `i`, counted from the oldest."""
    cdef const RowRecord *record = &batch.records[row]
    cdef uint32_t age = <uint32_t>batch.num_steps - record.told_step
    if record.told_step:
        return Launch(before=record.num_resolved, num_sampled=1, step=batch.num_steps - age)
    return _place_of_launch(batch, row, i)[0]


cdef inline void store_launch(Batch *batch, Py_ssize_t row) noexcept nogil:
    """Store the launch of a told row, before the row or its launch changes."""
    if batch.records[row].told_step:
        assert batch.ring_size == 1 and batch.records[row].first_launch == 0
        batch.launches[row] = launch_of(batch, row, 0)
        batch.records[row].told_step = 0


cdef inline Launch *launch_at(Batch *batch, Py_ssize_t row, Py_ssize_t i) noexcept nogil:
    """Return a pointer to the launch at index `i`, through which it may be changed."""
    store_launch(batch, row)
    return _place_of_launch(batch, row, i)


cdef inline Py_ssize_t find_launch(const Batch *batch, Py_ssize_t row, int64_t step) noexcept nogil:
    """Return the index of the row's launch in a step; -1: the row has none. O(launches)."""
    cdef Py_ssize_t i
    for i in range(batch.records[row].num_launches - 1, -1, -1):
        if launch_of(batch, row, i).step == step:
            return i
    return -1


cdef inline int32_t end_of(const Batch *batch, Py_ssize_t row, Py_ssize_t i) noexcept nogil:
    """Return the position behind those that the launch at index `i` writes."""
    return launch_of(batch, row, i + 1).before if i + 1 < batch.records[row].num_launches else batch.records[row].num_planned


cdef inline Py_ssize_t count_awaited(const Batch *batch, Py_ssize_t row) noexcept nogil:
    """Count the launches whose sampled tokens are awaited. They are the newest ones. O(launches)."""
    cdef Py_ssize_t i, num = batch.records[row].num_launches
    for i in range(num):
        if launch_of(batch, row, i).num_sampled > 0:
            return num - i
    return 0


cdef inline Py_ssize_t count_run(const Batch *batch, Py_ssize_t row) noexcept nogil:
    """Count the oldest launches that have run once a step is planned for the row: those that the full ring has to drop."""
    cdef Py_ssize_t excess = batch.records[row].num_launches - batch.ring_size + 1
    return max(excess, <Py_ssize_t>0)


cdef inline void end_launches(Batch *batch, Py_ssize_t row, Py_ssize_t n) noexcept nogil:
    """Forget the `n` oldest launches."""
    cdef RowRecord *record = &batch.records[row]
    cdef Py_ssize_t first = record.first_launch + n
    assert 0 <= n <= record.num_launches <= batch.ring_size
    store_launch(batch, row)
    record.first_launch = <uint8_t>(first if first < batch.ring_size else first - batch.ring_size)
    record.num_launches -= <uint8_t>n


cdef inline void add_launch(Batch *batch, Py_ssize_t row, Launch launch) noexcept nogil:
    """Append a launch to a ring that has room."""
    cdef RowRecord *record = &batch.records[row]
    assert record.num_launches < batch.ring_size and 0 <= launch.before <= record.num_planned
    assert record.num_launches == 0 or launch_of(batch, row, record.num_launches - 1).before <= launch.before
    launch_at(batch, row, record.num_launches)[0] = launch
    record.num_launches += 1


cdef inline void disown_launches(Batch *batch, Py_ssize_t row, int32_t most) noexcept nogil:
    """Let the launches sample nothing, and limit each `before` to `most`: the row's next tokens are not theirs."""
    cdef Launch *launch
    cdef Py_ssize_t i
    for i in range(batch.records[row].num_launches):
        launch = launch_at(batch, row, i)
        launch.before, launch.num_sampled = min(launch.before, most), NOBODYS


# Counts that are derived.

cdef inline void count_run_tokens(Batch *batch, Py_ssize_t row) noexcept nogil:
    """Derive the counts of a row from its known tokens, planned positions and launches."""
    cdef RowRecord *record = &batch.records[row]
    assert 0 <= record.num_tokens <= batch.max_num_tokens and 0 <= record.num_planned <= batch.max_num_tokens
    store_launch(batch, row)
    if record.state >= RUNNING:
        record.num_computed = min(record.num_tokens, record.num_planned)
    record.num_resolved = launch_of(batch, row, 0).before if record.num_launches else record.num_planned
    batch.rows[row].num_ahead = max(0, record.num_planned - record.num_tokens)
    assert 0 <= record.num_computed <= record.num_planned and record.num_resolved <= record.num_planned


cdef inline int32_t count_keyed(const Batch *batch, int64_t num_tokens) noexcept nogil:
    """Count those of the first `num_tokens` tokens, all known, whose lookahead is known too."""
    return <int32_t>max(0, num_tokens - batch.hashing.hash_lookahead)


cdef inline int32_t final_of(
    const Batch *batch, int32_t num_tokens, int32_t num_computed, int32_t num_resolved
) noexcept nogil:
    """Count the final tokens of a row with these counts: the leading ones whose pages can be cached."""
    if exceptional(batch.caches_late):
        if batch.hash_page_size:
            num_computed = min(num_computed, count_keyed(batch, num_tokens))
        if batch.caches_computed:
            num_computed = min(num_computed, num_resolved)
    return num_computed


cdef inline int32_t count_final(const Batch *batch, Py_ssize_t row) noexcept nogil:
    """Count the row's final tokens."""
    cdef const RowRecord *record = &batch.records[row]
    return final_of(batch, record.num_tokens, record.num_computed, record.num_resolved)


cdef inline bint is_keyed(const Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Whether the lookahead of the row's first `num_tokens` tokens is known."""
    return num_tokens <= count_keyed(batch, batch.records[row].num_tokens)


cdef inline int32_t count_hashable(const Batch *batch, int64_t num_tokens) noexcept nogil:
    """Count the full pages of `num_tokens` known tokens for which the lookahead is known too."""
    return count_keyed(batch, num_tokens) // batch.hash_page_size


cdef inline void cut_hashes(Batch *batch, Py_ssize_t row) noexcept nogil:
    """Forget the digests that cover cut tokens."""
    if batch.hash_page_size:
        batch.rows[row].num_hashed = min(batch.rows[row].num_hashed, count_hashable(batch, batch.records[row].num_tokens))


cdef inline int64_t _next_caching(const Batch *batch, int64_t num_full) noexcept nogil:
    """Return the planned count from which a plan caches the page that `num_full` tokens fill."""
    if batch.writes_states or not batch.max_steps_ahead:
        return num_full + (batch.caches_computed and not batch.writes_states)
    return INT64_MAX


cdef inline void plan_next(Batch *batch, Py_ssize_t row) noexcept nogil:
    """Compute the counts at which this row next needs work: a page to take, cache or skip, or the end of its room. Pages are
    skipped, and with ``caches="computed"`` cached, one token later, when the next step is planned.
    """
    cdef RowRecord *record = &batch.records[row]
    cdef Limits limits = limits_of(holding_of(batch, row))
    cdef int64_t event = min(min(limits.num_room, limits.num_skip), <int64_t>batch.max_num_tokens) + 1
    cdef int64_t num_full = min(limits.num_full, <int64_t>INT32_MAX)
    assert record.state != FREE and 0 <= record.num_computed <= record.num_tokens <= batch.max_num_tokens
    assert batch.rows[row].num_hashed * <int64_t>batch.hash_page_size <= record.num_tokens
    event = min(event, _next_caching(batch, num_full))
    record.next_settle = <int32_t>num_full
    if rare(batch.writes_states and batch.rows[row].num_writes):
        event, record.next_settle = 1, 0
    if has_row_due(batch, row):
        event = 1
    record.next_plan = <int32_t>event


cdef inline int32_t amount(const Amounts *amounts, Py_ssize_t i) noexcept nogil:
    return amounts.values[i * amounts.stride]


cdef inline int32_t room_for(const Batch *batch, int64_t num_planned, int32_t num_drafts) noexcept nogil:
    """Count the positions that need slots, drafts included."""
    assert 0 <= num_planned <= batch.max_num_tokens
    return <int32_t>min(num_planned + num_drafts, <int64_t>batch.max_num_tokens)


cdef inline bint is_row(const Batch *batch, int32_t row) noexcept nogil:
    """Whether the number is in the table and its row is admitted."""
    return 0 <= row < batch.num_rows and batch.records[row].is_admitted


cdef inline bint has_due(const Batch *batch, int32_t row) noexcept nogil:
    """Whether moves are due for a row at which a call stopped. The locks are held: another thread may take the moves."""
    return is_row(batch, row) and has_row_due(batch, row)


cdef inline bint stamp_row(Batch *batch, int32_t row, Py_ssize_t i) noexcept nogil:
    """Copy a row of a call to `checked_rows[i]`; False if it is not admitted, or repeated."""
    if GUARDS and (not is_row(batch, row) or batch.stamps[row] == batch.stamp):
        return False
    assert batch.stamp != 0 and batch.records[row].state != FREE and 0 <= i < batch.num_rows
    batch.stamps[row] = batch.stamp
    batch.checked_rows[i] = row
    return True


cdef inline void start_call(Batch *batch) noexcept nogil:
    """Begin a call: no row has its stamp yet."""
    batch.num_ascending = 0
    batch.stamp += 1
    if batch.stamp == 0:
        memset(batch.stamps, 0, batch.num_rows * sizeof(uint32_t))
        batch.stamp = 1


cdef inline void show_end(Batch *batch, Py_ssize_t row) noexcept nogil:
    """Cut the row in the tables to the pages that it holds."""
    cdef Table *table
    cdef Py_ssize_t g
    for g in range(batch.num_groups):
        table = batch.tables[g]
        assert 0 <= held_by(batch, row, g).num_skipped <= held_by(batch, row, g).num_pages <= count_table_places(table)
        table.num_pages[row] = held_by(batch, row, g).num_pages
        clear_from(table, row, table.num_pages[row])
        table.version += 1


cdef inline void show_row(Batch *batch, Py_ssize_t row) noexcept nogil:
    """Write the row's pages to the tables."""
    cdef Py_ssize_t g
    for g in range(batch.num_groups):
        write_ids(
            batch.tables[g], row, 0, held_by(batch, row, g).ids, held_by(batch, row, g).num_pages,
            shown_offset_of(batch, row, g),
        )
    show_end(batch, row)


# Rows are emptied, get a context, and are exchanged.

cdef inline void empty_row(Batch *batch, Py_ssize_t row) noexcept nogil:
    """Free a row whose pages were given back."""
    assert not has_identity(batch, row)
    empty(holding_of(batch, row))
    show_end(batch, row)
    batch.num_admitted -= batch.records[row].is_admitted
    assert batch.num_admitted >= 0
    memset(&batch.records[row], 0, sizeof(RowRecord))
    batch.rows[row].shard, batch.stays[row] = -1, 0
    batch.rows[row].ring_start = batch.rows[row].ring_stop = 0
    batch.rows[row].num_hits = batch.rows[row].num_external = batch.rows[row].num_ahead = 0


cdef inline void note_planned(Batch *batch, Py_ssize_t row) noexcept nogil:
    """Note the positions that a planned step of the row writes in its rings, drafts included."""
    if rare(batch.has_state):
        batch.rows[row].ring_stop = max(batch.rows[row].ring_stop, batch.records[row].num_planned)


cdef inline void set_state(Batch *batch, Py_ssize_t row, RunState state) noexcept nogil:
    """Set the state of a row."""
    cdef RowRecord *record = &batch.records[row]
    batch.num_admitted += (state >= PENDING) - record.is_admitted
    record.state, record.is_admitted = <uint8_t>state, state >= PENDING
    assert 0 <= batch.num_admitted <= batch.num_rows


cdef inline void begin_stay(Batch *batch, Py_ssize_t row) noexcept nogil:
    """Number a stay: the time of a request in the batch's rows."""
    batch.num_stays += 1
    batch.stays[row], batch.rows[row].begun = batch.num_stays, now_of(&batch.pool.expected)


cdef inline Identity identity_of(const Batch *batch, Py_ssize_t row) noexcept nogil:
    return Identity(context=batch.rows[row].context, session=batch.rows[row].holding.session)


cdef inline bint has_identity(const Batch *batch, Py_ssize_t row) noexcept nogil:
    return batch.rows[row].context != 0 or batch.rows[row].holding.session != NO_SESSION


cdef inline void set_identity(Batch *batch, Py_ssize_t row, Identity identity) noexcept nogil:
    """Set the context and session of the row's next pages; all zeros: none."""
    _set_context(batch, row, identity.context)
    set_session(&batch.pool.sessions, &batch.rows[row].holding.session, identity.session)


cdef inline void _set_context(Batch *batch, Py_ssize_t row, int32_t context) noexcept nogil:
    """Set the row's context and count its users. Context 0, none, is not counted: a pool without a journal has no other."""
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
    cdef Py_ssize_t i, n = max(batch.records[first].num_tokens, batch.records[second].num_tokens)
    cdef Launch *ring = batch.launches + first * batch.ring_size
    cdef Launch *other = batch.launches + second * batch.ring_size
    assert first != second and batch.records[first].state != CLAIMED and batch.records[second].state != CLAIMED
    batch.rows[first].num_hashed *= batch.records[first].is_admitted  # a free row's tokens are not exchanged
    batch.rows[second].num_hashed *= batch.records[second].is_admitted
    _swap_values(tokens_of(batch, first), tokens_of(batch, second), n)
    batch.records[first], batch.records[second] = batch.records[second], batch.records[first]
    batch.rows[first], batch.rows[second] = batch.rows[second], batch.rows[first]
    batch.stays[first], batch.stays[second] = batch.stays[second], batch.stays[first]
    for i in range(batch.ring_size):
        ring[i], other[i] = other[i], ring[i]
    exchange_writes(&batch.writes, first, second)
    show_row(batch, first)
    show_row(batch, second)
