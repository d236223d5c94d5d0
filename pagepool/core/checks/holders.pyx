"""Checks of requests and rows against reference counts and page tables."""

from libc.stdint cimport INT32_MAX, int32_t, int64_t
from libc.string cimport memcmp

from pagepool.core.base cimport SIPHASH, Digest, WideDigest, digest_at, hash_pages
from pagepool.core.holding cimport (
    CacheGroups, Group, Held, Holding, RequestPages, count_prompt_pages, find_needed, full_pages, is_state, pages_for,
)
from pagepool.core.pool cimport (
    FLAGS, MAX_BANKS, NO_GROUP, NULL_PAGE, LeasedPages, PageStore, Pool, Transfer, bank_of, count_by_bank, count_holders,
    id_in_bank, is_leased,
)
from pagepool.core.rows cimport (
    OTHER_PAGES, PENDING, RUNNING, Batch, ExtraKey, RowRecord, RowStore, RunningRows, StateWrite, WriteList, count_hashable,
    digests_of, end_of, find_extra_key, held_by, holding_of, launch_of, plan_next, shown_offset_of, tokens_of,
)
from pagepool.core.tables cimport Table, count_table_places, ids_at
from pagepool.core.values cimport as_list

import numpy as np

from pagepool.errors import ArgumentError, ArgumentTypeError, IntegrityError


def check_holders(PageStore store not None, requests, RunningRows rows=None, CacheGroups groups=None) -> None:
    """Raise IntegrityError unless each page has a reference for each lease, and for each place where `requests`, `RequestPages`
    of the store, or `rows` hold it, and rows and tables agree. With `rows` or `groups`, each cached page, in the tier too, must
    also be in the bank of its group. O(num_pages + pages held + table).
    """
    cdef list checked = requests_of(store, requests)
    cdef int32_t[::1] counts = np.zeros(store.pool.num_pages, dtype=np.int32)
    cdef int32_t[::1] tier_counts = np.zeros(1 if store.pool.tier == NULL else store.pool.tier.pool.num_pages, dtype=np.int32)
    cdef RowStore running
    cdef str flaw
    if rows is None:
        with store.own_lock()[0]:
            flaw = find_flaw(store, checked, None, groups, &counts[0], &tier_counts[0])
    else:
        running = rows.rows
        running.check_made()
        if running.store is not store:
            raise ArgumentError("rows: got those of another pool, allowed: those of this pool")
        running.acquire_locks()
        flaw = find_flaw(store, checked, running, running.groups, &counts[0], &tier_counts[0])
        running.release_locks()
    if flaw is not None:
        raise IntegrityError(flaw)


cdef list requests_of(PageStore store, object values):
    """Return `values` as a list of `RequestPages` of the store, or raise."""
    cdef list requests = list(as_list(values, "requests", False))
    for item in requests:
        if not isinstance(item, RequestPages):
            raise ArgumentTypeError(f"requests: got {type(item).__name__}, allowed: RequestPages")
        if (<RequestPages>item).store is not store:
            raise ArgumentError("requests: got one of another pool, allowed: those of this pool")
    return requests


# Flaws are returned as texts, or None. An exception made here, under the locks, could start a garbage collection that
# calls the core.

cdef str find_flaw(
    PageStore store, list requests, RowStore rows, CacheGroups groups, int32_t *counts, int32_t *tier_counts
):
    """Describe a flaw in the rows, if any, the requests or the tier. Shared pages of rows are found once all are counted."""
    cdef str flaw = None
    if rows is not None:
        flaw = find_flaw_in_rows(rows, counts)
    flaw = flaw or find_flaw_in_requests(store, counts, requests)
    if rows is not None:
        flaw = flaw or find_shared_open_page(rows, counts)
    if store.pool.num_banks > 1 and groups is not None:
        flaw = flaw or find_foreign_entry(store, groups, &store.pool, "")
    if store.pool.tier != NULL:
        flaw = flaw or find_flaw_in_tier(store, tier_counts)
        if store.pool.num_banks > 1 and groups is not None:
            flaw = flaw or find_foreign_entry(store, groups, store.pool.tier.pool, " of the host tier")
    return flaw


cdef str find_flaw_in_requests(PageStore store, int32_t *counts, list requests):
    """Count the pages of requests, the sources of due copies and the pages of unfinished loads; each count needs a reference.
    Describe a page that has fewer references, besides those of leases, or a flaw in requests or leases.
    """
    cdef RequestPages request
    cdef Py_ssize_t g, i
    cdef int32_t page_id
    cdef str flaw
    for request in requests:
        for g in range(request.holding.num_groups):
            flaw = find_flaw_in_held(&store.pool, &request.holding, g, INT32_MAX, counts)
            if flaw is not None:
                return f"a request, group {g}: {flaw}"
        for i in range(request.writes.num):
            page_id = request.writes.items[i].page_id
            counts[page_id] += 1
            if counts[page_id] > 1 or store.pool.pages[page_id].group != NO_GROUP:
                return f"{store.shown_page(page_id)}, to which a request writes a state, has another holder or a prefix entry"
    add_transferred(&store.pool, counts, 1)
    flaw = find_flaw_in_leases(store)
    if flaw is not None:
        return flaw
    for i in range(1, store.pool.num_pages):
        if counts[i] > count_holders(&store.pool, i):
            leases = " and is leased" if is_leased(&store.pool, i) else ""
            ref_cnt = store.pool.pages[i].ref_cnt
            return f"{store.shown_page(<int32_t>i)} stands in {counts[i]} rows and requests{leases}, its ref count is {ref_cnt}"
    return None


cdef str find_flaw_in_leases(PageStore store):
    """Describe a bank whose count of pages in leases with an end is wrong, or a page of such a lease that counts no lease."""
    cdef int64_t[MAX_BANKS] found
    cdef const Pool *pool = &store.pool
    cdef const LeasedPages *lease = pool.leases.first
    cdef int32_t bank
    cdef Py_ssize_t i
    for bank in range(MAX_BANKS):
        found[bank] = 0
    while lease != NULL:
        count_by_bank(pool, lease.ids, lease.num, 1, &found[0])
        for i in range(lease.num):
            if not is_leased(pool, lease.ids[i]):
                return f"{store.shown_page(lease.ids[i])} is in a lease, and counts none"
        lease = lease.next
    for bank in range(MAX_BANKS):
        if found[bank] != pool.leases.num_pages_in[bank]:
            return f"leases have {found[bank]} pages of pool {bank}, the pool counts {pool.leases.num_pages_in[bank]}"
    return None


cdef void add_transferred(const Pool *pool, int32_t *counts, int32_t amount) noexcept:
    """Add `amount` to the counts of pages to which copies and loads have references."""
    cdef Py_ssize_t i
    for i in range(pool.copies.num):
        counts[pool.copies.items[i].src] += amount
    for i in range(pool.tier.num if pool.tier != NULL else 0):
        if pool.tier.items[i].is_load:
            counts[pool.tier.items[i].page_id] += amount


cdef str find_flaw_in_tier(PageStore store, int32_t *counts):
    """Describe a page of the tier that stands in more transfers than it has references, or in a transfer with a page of
    another bank. `counts` has a 0 for each page of the tier.
    """
    cdef Pool *pool = store.pool.tier.pool
    cdef const Transfer *transfer
    cdef Py_ssize_t i
    for i in range(store.pool.tier.num):
        transfer = &store.pool.tier.items[i]
        counts[transfer.tier_id] += 1
        if transfer.page_id != NULL_PAGE and bank_of(pool, transfer.tier_id) != bank_of(&store.pool, transfer.page_id):
            return f"{shown_tier_page(store, transfer.tier_id)} is in a transfer with {store.shown_page(transfer.page_id)}"
    for i in range(1, pool.num_pages):
        if counts[i] > pool.pages[i].ref_cnt:
            return f"{shown_tier_page(store, i)} stands in {counts[i]} transfers, its ref count is {pool.pages[i].ref_cnt}"
    return None


cdef str shown_tier_page(PageStore store, Py_ssize_t page_id):
    """Name a page of the tier behind a store."""
    cdef Pool *pool = store.pool.tier.pool
    where = f", pool {store.bank_names[bank_of(pool, page_id)]!r}" if pool.num_banks > 1 else ""
    return f"page {id_in_bank(pool, page_id)} of the host tier{where}"


cdef str find_foreign_entry(PageStore store, CacheGroups groups, Pool *pool, str where):
    """Describe a cached page of `pool`, the store's or the tier's, that is outside the bank of its group."""
    cdef int32_t page_id, group, bank
    for page_id in range(1, pool.num_pages):
        group, bank = pool.pages[page_id].group, bank_of(pool, page_id)
        if group == NO_GROUP or (group & ~FLAGS) >= groups.num:
            continue
        if groups.groups[group & ~FLAGS].bank != bank:
            return (
                f"page {id_in_bank(pool, page_id)}{where}, pool {store.bank_names[bank]!r}, is cached for "
                f"group {group & ~FLAGS}, "
                f"allowed: pages of the pool {store.bank_names[groups.groups[group & ~FLAGS].bank]!r}"
            )
    return None


cdef str find_flaw_in_held(Pool *pool, const Holding *holding, Py_ssize_t g, Py_ssize_t capacity, int32_t *counts):
    """Count a holder's pages of a group, and describe a flaw: wrong counts, an id outside the bank, a null page behind another
    page, a page with an entry or another holder to which a state is written, or a boundary's page that counts as worthless.
    """
    cdef Group *group = <Group *>&holding.groups[g]  # not const: const fields would be formatted as Python ints
    cdef Held *held = &holding.held[g]
    cdef int32_t i, first = pool.banks[group.bank].start, last = pool.banks[group.bank].stop - 1
    cdef int32_t num_prompt = count_prompt_pages(&group.rules, held)
    cdef int32_t num_entries = held.num_pages if not is_state(&group.rules) else INT32_MAX
    if not 0 <= held.num_skipped <= held.num_pages <= capacity or not 0 <= held.num_cached <= num_entries:
        return f"{held.num_pages} pages, {held.num_skipped} skipped, {held.num_cached} cached"
    for i in range(held.num_pages):
        if held.ids[i] != NULL_PAGE and not first <= held.ids[i] <= last:
            return f"page {held.ids[i]} (at {i}), allowed: {'0 to' if first == 1 else f'0, or {first} to'} {last}"
        if held.ids[i] == NULL_PAGE and i and held.ids[i - 1] != NULL_PAGE and i != num_prompt:
            return f"the null page stands behind page {held.ids[i - 1]} (at {i})"
        if num_prompt <= i < held.num_skipped and held.ids[i] != NULL_PAGE:
            return f"page {held.ids[i]} (at {i}), {held.num_skipped} are skipped"
        counts[held.ids[i]] += 1
        if is_state(&group.rules) and (counts[held.ids[i]] > 1 or pool.pages[held.ids[i]].group != NO_GROUP):
            return f"page {held.ids[i]}, to which a state is written, has another holder or a prefix entry"
    i = held.next_needed
    if holding.boundaries != NULL and find_needed(holding.boundaries, group, held.num_skipped).start < i:
        return f"a request that resumes needs a page before place {i}, allowed: none behind the {held.num_skipped} skipped ones"
    return None


cdef str find_flaw_in_rows(RowStore rows, int32_t *counts):
    cdef Holding *holding
    cdef Py_ssize_t row, g
    cdef str flaw
    for row in range(rows.batch.num_rows):
        flaw = find_flaw_in_counts(rows, row)
        if flaw is not None:
            return flaw
        holding = holding_of(&rows.batch, row)
        for g in range(rows.batch.num_groups):
            flaw = find_flaw_in_held(&rows.store.pool, holding, g, count_table_places(rows.batch.tables[g]), counts)
            if flaw is None:
                flaw = find_flaw_in_table(rows, row, g)
            if flaw is not None:
                return f"row {row}, group {g}: {flaw}"
    return find_flaw_in_writes(rows, counts)


cdef str find_flaw_in_writes(RowStore rows, int32_t *counts):
    """Count the pages to which states are written, and describe a write by a free row, at a token count where no checkpoint can
    be, or to a page with another holder or an entry.
    """
    cdef WriteList *writes = &rows.batch.writes
    cdef StateWrite *write
    cdef int32_t size
    cdef Py_ssize_t i, num_writes = 0
    for i in range(rows.batch.num_rows):
        num_writes += rows.batch.rows[i].num_writes
    if num_writes != writes.num:
        return f"rows have {num_writes} writes of states, {writes.num} are listed"
    if not 0 <= writes.num_taken <= writes.num <= writes.capacity:
        return f"{writes.num} writes of states, {writes.num_taken} of them taken"
    for i in range(writes.num):
        write = &writes.items[i]
        size = rows.batch.groups[write.group].rules.entry_size
        counts[write.page_id] += 1
        if not rows.batch.records[write.row].is_admitted or write.num_tokens <= 0 or write.num_tokens % size:
            return f"row {write.row} writes a state of {write.num_tokens} tokens, allowed: multiples of {size}, if admitted"
        if counts[write.page_id] > 1 or rows.store.pool.pages[write.page_id].group != NO_GROUP:
            return f"{rows.store.shown_page(write.page_id)}, to which a state is written, has another holder or a prefix entry"
    return None


cdef str find_shared_open_page(RowStore rows, int32_t *counts):
    """Describe a page that a row writes to, though it has another holder. Cached pages are not written to. `counts` includes
    copies and loads, which are subtracted first.
    """
    cdef Held *held
    cdef Py_ssize_t row, g, i
    cdef int32_t start
    cdef bint is_kept
    add_transferred(&rows.store.pool, counts, -1)
    for row in range(rows.batch.num_rows):
        for g in range(rows.batch.num_groups):
            held, start = held_by(&rows.batch, row, g), rows.batch.records[row].num_computed
            for i in range(full_pages(&rows.batch.groups[g].rules, start), held.num_pages):
                is_kept = held.ids[i] == NULL_PAGE or rows.store.pool.pages[held.ids[i]].group != NO_GROUP
                if counts[held.ids[i]] > 1 and not is_kept:
                    return f"row {row}, group {g}: page {held.ids[i]} (at {i}), to which it writes, has another holder"
    return None


cdef str find_flaw_in_counts(RowStore rows, Py_ssize_t row):
    cdef Batch *batch = &rows.batch
    cdef RowRecord *record = &batch.records[row]
    cdef int32_t planned, event = record.next_plan, final = record.next_settle
    cdef str flaw
    if not 0 <= record.num_computed <= record.num_tokens <= batch.max_num_tokens:
        return (
            f"row {row} has {record.num_tokens} tokens, {record.num_computed} of them computed, "
            f"allowed: at most {batch.max_num_tokens}"
        )
    if not 0 <= batch.rows[row].num_external <= max(0, record.num_tokens - record.num_computed - 1):
        return f"row {row} waits for {batch.rows[row].num_external} of {record.num_tokens - record.num_computed} tokens"
    if batch.rows[row].num_external and event != 1:
        return f"row {row} waits for tokens, and its next event is at {event}, allowed: 1"
    flaw = find_flaw_in_run(batch, row)
    if flaw is not None:
        return flaw
    if record.is_admitted and batch.hash_page_size and not has_right_digests(rows, row):
        return f"row {row}: {batch.rows[row].num_hashed} pages are hashed, not as those of its {record.num_tokens} tokens"
    if record.is_admitted:
        plan_next(batch, row)
    planned, record.next_plan, record.next_settle = record.next_plan, event, final
    if not record.is_admitted <= event <= planned:  # it is early after tokens are cut, or a row gets no room
        return f"row {row}: the next event is at {event} tokens, allowed: {int(record.is_admitted)} to {planned}"
    return None


cdef str find_flaw_in_run(const Batch *batch, Py_ssize_t row):
    """Describe a wrong state of a row, wrong counts or wrong launches."""
    cdef const RowRecord *record = &batch.records[row]
    cdef Py_ssize_t i, n = record.num_launches
    cdef int32_t resolved = launch_of(batch, row, 0).before if n else record.num_planned
    if (batch.stays[row] > 0) != record.is_admitted or batch.stays[row] > batch.num_stays:
        return f"row {row}: stay {batch.stays[row]}, allowed: {f'1 to {batch.num_stays}' if record.is_admitted else 0}"
    if record.is_admitted != (record.state >= PENDING) or (record.state == PENDING) != (batch.rows[row].num_external > 0):
        return f"row {row}: state {record.state}, though it waits for {batch.rows[row].num_external} tokens"
    if n > batch.ring_size or (n and record.state < RUNNING):
        return f"row {row}: {n} launches, allowed: at most {batch.ring_size if record.state >= RUNNING else 0}"
    if batch.rows[row].num_ahead != max(0, record.num_planned - record.num_tokens):
        return f"row {row}: {batch.rows[row].num_ahead} of {record.num_planned} positions lie behind {record.num_tokens} tokens"
    if record.num_computed != min(record.num_tokens, record.num_planned) or record.num_planned > batch.max_num_tokens:
        return f"row {row}: {record.num_planned} positions are planned, {record.num_computed} of {record.num_tokens} tokens"
    if record.num_resolved != resolved:
        return f"row {row}: {record.num_resolved} positions are resolved, allowed: {resolved}"
    if record.told_step and (n != 1 or not record.num_resolved + 1 == record.num_tokens == record.num_planned):
        return f"row {row}: told, with {n} launches from {record.num_resolved}, {record.num_tokens} tokens"
    for i in range(n):
        if not 0 <= launch_of(batch, row, i).before <= end_of(batch, row, i):
            return f"row {row}: launch {i} writes from {launch_of(batch, row, i).before} to {end_of(batch, row, i)}"
        if i and launch_of(batch, row, i - 1).num_sampled > 0 and launch_of(batch, row, i).num_sampled <= 0:
            return f"row {row}: launch {i} samples nothing behind one that does"
    return None


cdef bint has_right_digests(RowStore rows, Py_ssize_t row) noexcept:
    """Whether the row's digests match its tokens and extra keys. O(tokens)."""
    cdef Batch *batch = &rows.batch
    cdef const ExtraKey *next_key = batch.rows[row].extra_keys
    cdef ExtraKey none = ExtraKey(data=NULL, size=0, page=OTHER_PAGES)
    cdef const ExtraKey *key = &none
    cdef WideDigest found, parent = batch.hashing.root
    cdef Digest[2] digests
    cdef Digest[2] uppers
    cdef bint is_wide = batch.hashing.kind != SIPHASH
    cdef int32_t i, num_hashed = batch.rows[row].num_hashed
    if not 0 <= num_hashed <= count_hashable(batch, batch.records[row].num_tokens):
        return False
    for i in range(num_hashed):
        if next_key != NULL:
            key = find_extra_key(batch, row, i, &next_key)
        digests[0], uppers[0] = parent.key, parent.upper
        hash_pages(
            &batch.hashing, tokens_of(batch, row) + (i - (i > 0)) * batch.hash_page_size, batch.hash_page_size,
            digests, uppers if is_wide else NULL, i > 0, 1 + (i > 0), key.data, key.size,
        )
        parent = digest_at(digests, uppers if is_wide else NULL, i > 0)
        found = digest_at(digests_of(batch, row), batch.rows[row].uppers, i)
        if memcmp(&parent, &found, sizeof(WideDigest)) != 0:
            return False
    return True


cdef str find_flaw_in_table(RowStore rows, Py_ssize_t row, Py_ssize_t g):
    """Describe a row with too few pages for its tokens, or with other pages than in the table."""
    cdef Held *held = held_by(&rows.batch, row, g)
    cdef Table *table = rows.batch.tables[g]
    cdef int32_t *ids = ids_at(table, row)
    cdef Py_ssize_t i
    cdef int32_t page_id, num_computed = rows.batch.records[row].num_computed + rows.batch.rows[row].num_external
    if not pages_for(&rows.batch.groups[g].rules, num_computed) <= held.num_pages:
        return f"{held.num_pages} pages for {num_computed} tokens"
    if table.num_pages[row] != held.num_pages:
        return f"{held.num_pages} pages, the table says {table.num_pages[row]}"
    for i in range(count_table_places(table)):
        page_id = max(0, held.ids[i] - shown_offset_of(&rows.batch, row, g)) if i < held.num_pages else 0
        if ids[i] != page_id:
            return f"page {page_id} (at {i}), the table says {ids[i]}"
    return None
