"""Rows whose pages are transferred: swapped out and in, gone back where a load failed."""

from cpython.mem cimport PyMem_RawFree as free
from cpython.mem cimport PyMem_RawMalloc as malloc
from libc.stdint cimport int32_t, int64_t

from pagepool.core.arguments cimport require_instance
from pagepool.core.batch cimport (
    Batch, Swapped, SwappedGroup, begin_admission, can_go_back, digests_of, drop_swapped, end_row, go_back, held_by,
    holding_of, plan_next_event, show_row,
)
from pagepool.core.holdings cimport (
    Held, Holding, are_destinations, are_sources, count_places, empty, find_load_number, find_wrong, has_copies_due,
    list_last_first, record_loads, record_taken, waits_for_loads,
)
from pagepool.core.ids cimport PageIds
from pagepool.core.index cimport find, find_within
from pagepool.core.pages cimport share, take_from, touch_all
from pagepool.core.queue cimport find_held_free, has_free_pages, put_back_all
from pagepool.core.records cimport (
    FILLED, FILLING, FLAGS, NO_GROUP, NULL_PAGE, Page, Pool, Ranking, Tier, Transfer, digest_of, ids_in_shard,
)
from pagepool.core.rules cimport Group, is_state, pages_for
from pagepool.core.running cimport RunningRows
from pagepool.core.siphash cimport Digest
from pagepool.core.tier cimport FailedLoads
from pagepool.core.transfers cimport find_oldest_load, note_save, note_transfer, reserve_transfers

from pagepool.errors import ArgumentError, CopiesDueError, DoubleFreeError


def swap_out_row(RunningRows rows not None, row) -> bool:
    """Have the pages of a row saved in the tier, and give them back: see `RunningBatch.swap_out`."""
    cdef Py_ssize_t source = rows.checked_row(row)
    cdef Batch *batch = &rows.batch
    cdef Holding holding = holding_of(batch, source)
    cdef PageIds ids = PageIds.__new__(PageIds)
    cdef Swapped *swapped = NULL
    cdef Py_ssize_t bad = -1
    cdef bint is_running, is_due = False, is_saved = False, has_memory = True
    check_tier(rows)
    rows.enter_call()
    is_running = batch.states[source].is_admitted and batch.states[source].num_computed > 0 and not batch.num_external[source]
    if is_running:
        is_due = has_copies_due(batch.pool, &holding)
        has_memory = ids.try_reserve(count_places(&holding))
    if is_running and not is_due and has_memory and not waits_for_loads(batch.pool, &holding.held[0]):
        ids.num = list_last_first(&holding, ids.ids)
        swapped = new_swapped(batch, source)
        has_memory = swapped != NULL
        is_saved = has_memory and save_row(batch, source, swapped)
    if is_saved:
        bad = rows.store.give_back_ids(ids.ids, ids.num, False)
        batch.swapped[source] = swapped
        batch.pool.tier.num_swapped += 1
        if bad < 0:
            leave_row(batch, source)
        else:
            drop_swapped(batch, source)
    else:
        free(swapped)
    rows.let_go()
    if not is_running:
        refuse_row(rows, source)
    if is_due:
        raise CopiesDueError(
            f"row {source}: copies of its pages are due, or transfers: call take_copies and take_transfers, and do them, before"
        )
    if not has_memory:
        raise MemoryError(f"the pages of row {source}")
    if bad >= 0:
        raise DoubleFreeError(f"row {source}: page {ids.ids[bad]}, which it holds, was given back by somebody else")
    return is_saved


cdef int check_tier(RunningRows rows) except -1:
    if rows.store.pool.tier == NULL:
        raise ArgumentError("row: cannot be swapped without a host tier; allowed: a manager with host_tier")
    return 0


cdef int refuse_row(RunningRows rows, Py_ssize_t row) except -1:
    if not rows.batch.states[row].is_admitted:
        raise ArgumentError(f"row {row} is not admitted")
    if rows.batch.num_external[row]:
        raise ArgumentError(f"row {row} waits for tokens from elsewhere: call commit_external or fail_external before")
    raise ArgumentError(f"row {row} holds no computed tokens: there is nothing to swap out")


cdef Swapped *new_swapped(const Batch *batch, Py_ssize_t row) noexcept:
    """Room for the pages of the computed tokens of a row; NULL where memory is short."""
    cdef int32_t num_pages, num_computed = batch.states[row].num_computed
    cdef const Held *held
    cdef Swapped *swapped
    cdef int32_t *ids
    cdef Holding holding = holding_of(batch, row)
    cdef Py_ssize_t g, size = sizeof(Swapped) + batch.num_groups * sizeof(SwappedGroup)
    swapped = <Swapped *>malloc(size + count_places(&holding) * sizeof(int32_t))
    if swapped == NULL:
        return NULL
    swapped.groups = <SwappedGroup *>(swapped + 1)
    swapped.num_computed = num_computed
    ids = <int32_t *>(swapped.groups + batch.num_groups)
    for g in range(batch.num_groups):
        held = &holding.held[g]
        num_pages = <int32_t>min(<int64_t>held.num_pages, pages_for(&batch.groups[g].rules, num_computed))
        swapped.groups[g] = SwappedGroup(ids, num_pages, held.num_skipped, held.num_cached)
        ids += num_pages
    return swapped


cdef bint save_row(Batch *batch, Py_ssize_t row, Swapped *swapped) noexcept:
    """Take a page of the tier for each of the row's: the one that has its content, or a free one, and note what is to be saved.
    False, and nothing changed, if too few are free.
    """
    cdef Tier *tier = batch.pool.tier
    cdef Py_ssize_t g, num_missing = 0
    for g in range(batch.num_groups):
        num_missing += hold_saved(batch.pool, held_by(batch, row, g), &swapped.groups[g])
    if tier.pool.num_free < num_missing or not reserve_transfers(tier, num_missing):
        for g in range(batch.num_groups):
            put_back_all(tier.pool, swapped.groups[g].tier_ids, swapped.groups[g].num_pages)
        return False
    for g in range(batch.num_groups):
        save_missing(batch.pool, held_by(batch, row, g), &swapped.groups[g], <int32_t>g)
    return True


cdef Py_ssize_t hold_saved(Pool *pool, const Held *held, SwappedGroup *group) noexcept:
    """Take a reference to the pages of the tier that have the content of a row's. Returns how many others there are."""
    cdef const Page *page
    cdef Py_ssize_t num_missing = 0
    cdef int32_t i
    for i in range(group.num_pages):
        group.tier_ids[i] = NULL_PAGE
        if held.ids[i] == NULL_PAGE:
            continue
        page = &pool.pages[held.ids[i]]
        if page.group != NO_GROUP:
            group.tier_ids[i] = find(pool.tier.pool, digest_of(page), page.group & ~FLAGS)
        num_missing += group.tier_ids[i] == NULL_PAGE
        touch_all(pool.tier.pool, &group.tier_ids[i], 1)
    return num_missing


cdef void save_missing(Pool *pool, const Held *held, SwappedGroup *group, int32_t g) noexcept:
    """Have the pages saved that the tier has not. The row has a reference to each, beside that of the transfer."""
    cdef const Page *page
    cdef Digest key
    cdef int32_t i
    for i in range(group.num_pages):
        if held.ids[i] == NULL_PAGE or group.tier_ids[i] != NULL_PAGE:
            continue
        page = &pool.pages[held.ids[i]]
        key = digest_of(page) if page.group != NO_GROUP else Digest(0, 0)
        group.tier_ids[i] = note_save(pool.tier, key, g, held.ids[i], page.group == NO_GROUP)
        share(pool.tier.pool, group.tier_ids[i])


cdef void leave_row(Batch *batch, Py_ssize_t row) noexcept:
    """Let a row whose pages were given back have no computed token."""
    cdef Holding holding = holding_of(batch, row)
    cdef Py_ssize_t g
    empty(&holding)
    for g in range(batch.num_groups):
        end_row(batch, row, g)
    batch.states[row].num_computed = batch.states[row].num_hits = 0
    begin_admission(batch, row)
    plan_next_event(batch, row)


def swap_in_row(RunningRows rows not None, row) -> int | None:
    """Have the pages of a row that are in the tier loaded: see `RunningBatch.swap_in`."""
    cdef Py_ssize_t target = rows.checked_row(row)
    cdef Batch *batch = &rows.batch
    cdef int32_t held_free = NULL_PAGE
    cdef bint is_swapped, is_back = False
    cdef int32_t num_computed = 0
    cdef int fill = FILLED
    check_tier(rows)
    rows.enter_call()
    is_swapped = batch.swapped[target] != NULL
    if is_swapped:
        fill = find_worst_fill(batch, batch.swapped[target])
    if is_swapped and fill == FILLED:
        is_back = load_row(batch, target, &held_free)
        num_computed = batch.states[target].num_computed
    elif is_swapped and fill != FILLING:
        drop_swapped(batch, target)
    rows.let_go()
    if not is_swapped:
        raise ArgumentError(f"row {target} has no pages in the host tier")
    rows.store.check_untaken(held_free)
    return num_computed if is_back or fill != FILLED and fill != FILLING else None


cdef int find_worst_fill(const Batch *batch, const Swapped *swapped) noexcept:
    """FILLING if a page of the row is still being saved, else UNFILLED if saving one failed, else FILLED."""
    cdef const SwappedGroup *group
    cdef Py_ssize_t g, i
    cdef int fill, worst = FILLED
    for g in range(batch.num_groups):
        group = &swapped.groups[g]
        for i in range(group.num_pages):
            fill = batch.pool.tier.fills[group.tier_ids[i]]
            if fill == FILLING:
                return FILLING
            worst = max(worst, fill)
    return worst


cdef bint load_row(Batch *batch, Py_ssize_t row, int32_t *held_free) noexcept:
    """Give a row pages with the contents of those that it has in the tier: cached ones, or others that are loaded. False, and
    nothing changed, if too few are free.
    """
    cdef Swapped *swapped = batch.swapped[row]
    cdef Tier *tier = batch.pool.tier
    cdef Holding holding = holding_of(batch, row)
    cdef Py_ssize_t g, num_missing = 0
    cdef int64_t number = 0
    for g in range(batch.num_groups):
        num_missing += hold_cached(batch, row, <int32_t>g)
    held_free[0] = find_held_free(batch.pool, num_missing)
    if held_free[0] != NULL_PAGE or not has_free_pages(batch.pool, num_missing, 0, batch.states[row].shard) or not (
        reserve_transfers(tier, 2 * num_missing)  # as many pages may be evicted, and saved
    ):
        for g in range(batch.num_groups):
            put_back_all(batch.pool, holding.held[g].ids, swapped.groups[g].num_pages)
        return False
    for g in range(batch.num_groups):
        number = max(number, find_load_number(batch.pool, holding.held[g].ids, swapped.groups[g].num_pages))
        load_missing(batch, row, <int32_t>g)
        show_row(batch, row, g)
    record_loads(batch.pool, &holding, tier.last_number + 1 if num_missing else number)
    batch.states[row].num_computed = swapped.num_computed
    drop_swapped(batch, row)
    find_oldest_load(tier)
    begin_admission(batch, row)
    plan_next_event(batch, row)
    return True


cdef Py_ssize_t hold_cached(Batch *batch, Py_ssize_t row, int32_t g) noexcept:
    """Take a reference to the pages of the pool that are cached with the content of a row's. Returns how many others the row
    has in the tier.
    """
    cdef const Group *group = &batch.groups[g]
    cdef const SwappedGroup *saved = &batch.swapped[row].groups[g]
    cdef int32_t *ids = held_by(batch, row, g).ids
    cdef Py_ssize_t i, num_missing = 0
    for i in range(saved.num_pages):
        ids[i] = NULL_PAGE
        if saved.tier_ids[i] == NULL_PAGE:
            continue
        if i < saved.num_cached and not is_state(&group.rules) and group.id != NO_GROUP:
            ids[i] = find_within(
                batch.pool, digests_of(batch, row)[(i + 1) * group.stride - 1], group.id,
                ids_in_shard(batch.pool, batch.states[row].shard),
            )
        num_missing += ids[i] == NULL_PAGE
        touch_all(batch.pool, &ids[i], 1)
    return num_missing


cdef void load_missing(Batch *batch, Py_ssize_t row, int32_t g) noexcept:
    """Take the pages that are not cached, note their loads, and let the row hold all: from the first of these on they are
    entered again.
    """
    cdef Pool *pool = batch.pool
    cdef const SwappedGroup *saved = &batch.swapped[row].groups[g]
    cdef Held *held = held_by(batch, row, g)
    cdef const Page *page
    cdef Transfer load
    cdef int32_t i, tier_id, first = saved.num_cached
    for i in range(saved.num_pages):
        tier_id = saved.tier_ids[i]
        if tier_id == NULL_PAGE or held.ids[i] != NULL_PAGE:
            continue
        if not is_state(&batch.groups[g].rules):
            first = min(first, i)
        take_from(pool, &held.ids[i], 1, batch.states[row].shard)
        share(pool, held.ids[i])
        share(pool.tier.pool, tier_id)
        pool.tier.loading[held.ids[i]] = pool.tier.last_number + 1
        page = &pool.tier.pool.pages[tier_id]
        load = Transfer(digest_of(page), 0, held.ids[i], tier_id, g, True, page.group == NO_GROUP)
        note_transfer(pool.tier, &load)
    held.num_pages, held.num_skipped, held.num_cached = saved.num_pages, saved.num_skipped, first
    held.num_hits = held.num_unique = 0
    held.ranking = Ranking(first, 0)
    record_taken(pool, held)


cdef enum Outcome:
    UNTOUCHED
    REWOUND
    LOST


def rewind_rows(RunningRows rows not None, failed) -> tuple:
    """Let rows go back to tokens that were computed without failed loads: see `RunningBatch.rewind`."""
    cdef FailedLoads loads = require_instance(failed, FailedLoads, "failed")
    cdef Outcome *outcomes
    cdef Py_ssize_t row
    if loads.store is not rows.store:
        raise ArgumentError("failed: got loads of another pool")
    rows.check_made()
    outcomes = <Outcome *>malloc(rows.batch.num_rows * sizeof(Outcome))
    if outcomes == NULL:
        raise MemoryError("rows")
    try:
        rows.enter_call()
        for row in range(rows.batch.num_rows):
            outcomes[row] = rewind_row(&rows.batch, row, loads) if loads.ids.num else UNTOUCHED
        rows.let_go()
        rewound = [row for row in range(rows.batch.num_rows) if outcomes[row] == REWOUND]
        return rewound, [row for row in range(rows.batch.num_rows) if outcomes[row] == LOST]
    finally:
        free(outcomes)


cdef Outcome rewind_row(Batch *batch, Py_ssize_t row, FailedLoads failed) noexcept:
    cdef Holding holding = holding_of(batch, row)
    cdef int32_t num_tokens = batch.states[row].num_tokens
    cdef int32_t first = find_wrong(&holding, failed.is_wrong, failed.number) if batch.states[row].is_admitted else -1
    if first < 0:
        return UNTOUCHED
    if are_sources(batch.pool, &holding) or are_destinations(batch.pool, &holding):
        return LOST
    if not can_go_back(batch, row, num_tokens, first):
        return LOST
    go_back(batch, row, num_tokens, first)
    return REWOUND
