# Batches of events, applied to the index of a router.
#
# A batch is compared with the index, and its memory is reserved, before anything changes. Events that do not fit are left out.
# If the other events could give a worker more blocks than it may have, the net changes of the batch are computed and applied.
# Always:
#
# * Net changes have one `Change` for each block, group and medium in the batch, and a slot for each change.
# * A worker has at most `max_blocks` blocks after a batch.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memcmp, memset

from pagepool.core.router.left_out cimport *

cdef enum:
    MAX_BLOCKS = 1 << 30      # blocks of a group

cdef struct Change:           # net change of a block
    uint64_t block_hash
    int32_t group
    int32_t plane
    uint64_t num_before       # copies before the batch
    uint64_t num              # copies after the batch

cdef struct NetChanges:       # net changes of a batch; `items` NULL: not computed
    Change *items             # [num] in the order of the batch
    Py_ssize_t num
    uint32_t *slots           # [num_slots] index in `items` plus 1; 0: empty
    Py_ssize_t num_slots
    uint64_t multiplier


cdef inline int32_t _trust_of(const Event *event) noexcept nogil:
    """Return how far an event is trusted to describe its group. Events of caches besides the pool name no kind, or another
    medium. On the device, a block that no prompt fills has an event of its own, so several blocks have their group's size.
    """
    cdef bint is_of_pool = is_on_device(event)
    return 4 * event.has_kind + 2 * is_of_pool + (is_of_pool and event.num > 1)


cdef inline bint _fits_group(GroupSpec *known, const Event *event, bint has_others) noexcept nogil:
    """Whether the index has a place for a stored event in a group. Learn the spec of the group. `has_others`: whether
    other groups are known; only then are there blocks that prompts do not fill.
    """
    cdef int32_t size = event.spec.block_size, known_size = known.spec.block_size, trust = _trust_of(event)
    cdef bint has_kinds = event.has_kind and known.has_kind
    cdef bint has_same_kind = event.spec.is_state == known.spec.is_state and event.spec.window == known.spec.window
    cdef bint is_alike = not has_kinds or has_same_kind
    cdef bint has_parts = has_kinds and is_alike and event.spec.window == 0
    cdef bint is_larger = has_parts and size > known_size and known_size and size % known_size == 0
    cdef bint is_more_trusted = trust > known.trust and (trust - trust % 2 > known.trust or has_others or size < known_size)
    if known_size and is_alike and size == known_size:
        if event.has_kind and not known.has_kind:
            known.spec, known.has_kind = event.spec, True
        known.trust = max(known.trust, trust)
        return True
    if has_parts and size < known_size and known_size % size == 0 and (event.num == 1 or trust <= known.trust):
        known.has_tails = True
        return True
    if known_size and not is_more_trusted and not (is_larger and has_others and known.trust % 2 == 0):
        return False
    known.spec, known.has_kind, known.has_tails, known.trust = event.spec, event.has_kind, is_larger, trust
    return True


cdef inline bint _fits_model(
    const EventBatch *batch, const Event *event, int32_t page_size, int32_t max_groups, int32_t num_known
) noexcept nogil:
    """Whether a stored event agrees with the numbers known for all groups. `num_known` is the highest known group plus one."""
    cdef int32_t num_groups = batch.told.num_groups or event.told.num_groups
    cdef int32_t hit_tokens = batch.told.hit_tokens or event.told.hit_tokens
    if event.spec.block_size % page_size or hit_tokens % page_size:
        return False
    if event.told.num_groups and (event.told.num_groups != num_groups or num_groups < num_known):
        return False
    if event.told.hit_tokens and event.told.hit_tokens != hit_tokens:
        return False
    return event.group < (num_groups or MAX_EVENT_GROUPS) and max(num_groups, event.group + 1) <= max_groups


cdef inline void settle_groups(const BlockTable *table, EventBatch *batch, int32_t max_groups) noexcept nogil:
    """Compare the groups of a batch with each other and with the index, leave out contradicting events, and set the batch's
    specs. The spec of a group may change while no worker has blocks of the group.
    """
    cdef const Event *event
    cdef Py_ssize_t i
    cdef int32_t num_known = 0, num_specs = 0
    cdef bint is_new
    for i in range(table.num_spaces):
        if table.spaces[i].num_blocks:
            batch.specs[i], batch.told = table.spaces[i].known, table.told
            num_known, num_specs = <int32_t>i + 1, num_specs + 1
    for i in range(batch.num_events):
        event = &batch.events[i]
        if event.kind != STORED:
            continue
        if not _fits_model(batch, event, table.page_size, max_groups, num_known):
            leave_out(batch, i)
            continue
        is_new = batch.specs[event.group].spec.block_size == 0
        if not _fits_group(&batch.specs[event.group], event, num_specs > (not is_new)):
            leave_out(batch, i)
            continue
        num_known, num_specs = max(num_known, event.group + 1), num_specs + is_new
        batch.told = Told(
            num_groups=batch.told.num_groups or event.told.num_groups,
            hit_tokens=batch.told.hit_tokens or event.told.hit_tokens,
        )
    if batch.told.num_groups == 0 and num_known <= table.told.num_groups:
        batch.told = table.told


cdef inline Py_ssize_t _count_unknown(
    const BlockTable *table, const EventBatch *batch, Py_ssize_t group, const NetChanges *net
) noexcept nogil:
    """Count the new blocks of a group: stored hashes that have no entry. Without net changes, repeated hashes count again."""
    cdef const Event *event
    cdef Py_ssize_t i, j, num = 0
    cdef uint32_t entry
    for i in range(net.num):
        if net.items[i].group == group and net.items[i].num:
            num += find_entry(&table.spaces[group], net.items[i].block_hash, 0) == 0
    if net.items != NULL:
        return num
    for i in range(batch.num_void, batch.num_events):
        event = &batch.events[i]
        if event.kind == STORED and event.group == group:
            entry = 0
            for j in range(event.first, event.first + event.num):
                entry = find_entry(&table.spaces[group], batch.hashes[j], entry + 1 if entry else 0)
                num += entry == 0
    return num


cdef inline void _settle_media(const BlockTable *table, EventBatch *batch, Media *media) noexcept nogil:
    """Find the media of the index and the batch, and the medium of each event. Leave out stored events whose medium is one too
    many, or has too long a name. Names are copied now, because another thread may change the payload later.
    """
    cdef Event *event
    cdef Py_ssize_t i
    media[0] = table.media
    for i in range(batch.num_void, batch.num_events):
        event = &batch.events[i]
        event.plane = find_medium(media, event.medium)
        if event.plane < media.num:
            continue
        if event.kind == STORED and not add_medium(media, event.medium):
            leave_out(batch, i)
        if event.kind != STORED:
            event.plane = -1


cdef inline const char *_reserve_changes(
    BlockTable *table, const EventBatch *batch, const Media *media, int32_t worker, const NetChanges *net
) noexcept nogil:
    """Reserve the memory for a batch or its net changes; return the reason for a failure, or NULL."""
    cdef Py_ssize_t i, g, num_copies = 0
    cdef Py_ssize_t[MAX_EVENT_GROUPS] num_stored
    cdef int32_t num_words = max(table.num_words, worker // <int32_t>WORD + 1)
    cdef Space *space
    memset(&num_stored, 0, sizeof(num_stored))
    for i in range(net.num):
        num_stored[net.items[i].group] += net.items[i].num > 0
        num_copies += net.items[i].num > 1
    if net.items == NULL:
        num_copies = batch.num_stored
        for i in range(batch.num_void, batch.num_events):
            if batch.events[i].kind == STORED:
                num_stored[batch.events[i].group] += batch.events[i].num
    for g in range(MAX_EVENT_GROUPS):
        space = &table.spaces[g]
        if num_stored[g] and space.num_blocks + num_stored[g] >= space.num_entries:
            num_stored[g] = _count_unknown(table, batch, g, net)
        if space.num_blocks + num_stored[g] > MAX_BLOCKS:
            return "more blocks than a group may have"
    if media.num > table.media.num or num_words > table.num_words:
        if not reshape(table, media, num_words):
            return NO_MEMORY
    for g in range(MAX_EVENT_GROUPS):
        if num_stored[g] and not reserve_blocks(&table.spaces[g], num_stored[g]):
            return NO_MEMORY
    return NULL if reserve_duplicates(&table.duplicates, num_copies) else NO_MEMORY


cdef inline Py_ssize_t _find_change(const NetChanges *net, const Event *event, uint64_t block_hash) noexcept nogil:
    """Find the slot of a block in the net changes, or the empty slot that ends the search."""
    cdef uint64_t tag = (block_hash ^ <uint64_t>event.group << 8 ^ <uint64_t>event.plane) * net.multiplier >> 32
    cdef Py_ssize_t slot = <Py_ssize_t>(tag * <uint64_t>net.num_slots >> 32)
    cdef const Change *found
    assert net.items != NULL and net.num < net.num_slots
    while net.slots[slot]:
        found = &net.items[net.slots[slot] - 1]
        if found.block_hash == block_hash and found.group == event.group and found.plane == event.plane:
            break
        slot = 0 if slot + 1 == net.num_slots else slot + 1
    return slot


cdef inline bint _compute_changes(
    const BlockTable *table, const EventBatch *batch, int32_t worker, NetChanges *net
) noexcept nogil:
    """Compute the net changes of a batch; return False if memory is short."""
    cdef bint is_lossy = worker < table.num_workers and table.workers[worker].is_lossy and not batch.is_cleared
    cdef const Event *event
    cdef const Space *space
    cdef Change *change
    cdef Py_ssize_t i, j, slot
    net.num_slots = 2 * batch.num_hashes + 1
    net.multiplier = table.multiplier
    net.items = <Change *>raw_calloc(batch.num_hashes + 1, sizeof(Change))
    net.slots = <uint32_t *>raw_calloc(net.num_slots, sizeof(uint32_t))
    if net.items == NULL or net.slots == NULL:
        return False
    for i in range(batch.num_void, batch.num_events):
        event = &batch.events[i]
        if event.kind == LEFT_OUT:
            continue
        space = &table.spaces[event.group]
        for j in range(event.first, event.first + event.num if event.plane >= 0 else event.first):
            slot = _find_change(net, event, batch.hashes[j])
            if net.slots[slot] == 0:
                change = &net.items[net.num]
                change.block_hash, change.group, change.plane = batch.hashes[j], event.group, event.plane
                change.num = 0 if batch.is_cleared else count_copies(table, space, batch.hashes[j], event.plane, worker)
                change.num_before = change.num
                net.num += 1
                net.slots[slot] = <uint32_t>net.num
            change = &net.items[net.slots[slot] - 1]
            if event.kind == STORED:
                change.num = 1 if is_lossy else change.num + 1
            else:
                change.num = 0 if is_lossy or change.num == 0 else change.num - 1
    assert net.num <= batch.num_hashes
    return True


cdef inline int64_t _count_gained(const NetChanges *net) noexcept nogil:
    """Count the blocks that a worker gains by the changes; negative if it loses more."""
    cdef int64_t num = 0
    cdef Py_ssize_t i
    for i in range(net.num):
        num += (net.items[i].num > 0) - <int64_t>(net.items[i].num_before > 0)
    return num


cdef inline void _apply_changes(
    BlockTable *table, const EventBatch *batch, int32_t worker, const NetChanges *net
) noexcept nogil:
    """Apply a batch, or its net changes if they were computed. There is room."""
    cdef const Change *change
    cdef const Event *event
    cdef Space *space
    cdef Py_ssize_t i
    cdef uint32_t parent
    if batch.is_cleared:
        remove_worker_blocks(table, worker)
    table.told = batch.told
    for i in range(net.num):
        change = &net.items[i]
        if change.num_before:
            set_copies(table, &table.spaces[change.group], change.block_hash, 0, change.plane, worker, change.num)
    for i in range(batch.num_events):
        event = &batch.events[i]
        if event.kind == LEFT_OUT:
            continue
        space = &table.spaces[event.group]
        if event.kind == STORED:
            space.known = batch.specs[event.group]
            table.num_spaces = max(table.num_spaces, event.group + 1)
        if i < batch.num_void:
            continue
        if event.kind == STORED:
            parent = find_entry(space, event.parent, 0) if event.has_parent else 0
            if net.items == NULL:
                store_blocks(table, space, batch.hashes + event.first, event.num, parent, event.plane, worker)
            else:
                _store_changes(table, batch, event, parent, worker, net)
        elif net.items == NULL and event.plane >= 0 and space.num_blocks:
            remove_blocks(table, space, batch.hashes + event.first, event.num, event.plane, worker)


cdef inline void _store_changes(
    BlockTable *table, const EventBatch *batch, const Event *event, uint32_t last, int32_t worker, const NetChanges *net
) noexcept nogil:
    """Store the blocks of an event that the worker has after the batch, with their duplicates."""
    cdef Space *space = &table.spaces[event.group]
    cdef const Change *found
    cdef Py_ssize_t j
    for j in range(event.first, event.first + event.num):
        found = &net.items[net.slots[_find_change(net, event, batch.hashes[j])] - 1]
        if found.num:
            last = set_copies(table, space, found.block_hash, last + 1 if last else 0, event.plane, worker, found.num)
        else:
            last = 0


cdef inline const char *apply_events(BlockTable *table, EventBatch *batch, int32_t worker, int64_t max_blocks) noexcept nogil:
    """Apply a batch whose groups are settled; return NULL, or the reason for refusing it, with no block changed."""
    cdef const char *error = NULL
    cdef NetChanges net
    cdef Media media
    cdef DuplicateTable *left_out
    cdef int64_t num_held = table.workers[worker].num_bits if worker < table.num_workers and not batch.is_cleared else 0
    memset(&net, 0, sizeof(net))
    _settle_media(table, batch, &media)
    if not settle_left_out(table, batch, worker, &left_out):
        return NO_MEMORY
    if num_held + batch.num_stored > max_blocks:
        if not _compute_changes(table, batch, worker, &net):
            error = NO_MEMORY
        elif num_held + _count_gained(&net) > max_blocks:
            error = "more blocks than a worker may have"
    if error == NULL:
        error = _reserve_changes(table, batch, &media, worker, &net)
    if error == NULL:
        _apply_changes(table, batch, worker, &net)
        table.num_workers = max(table.num_workers, worker + 1)
        trim_table(table)
        forget_left_out(&table.workers[worker])
        table.workers[worker].left_out, left_out = left_out, NULL
        table.workers[worker].num_skipped += batch.num_skipped
    free_left_out(left_out)
    raw_free(net.items)
    raw_free(net.slots)
    return error
