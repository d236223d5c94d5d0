# The index of a router: which workers have a block, by its hash.
#
# Each cache group has a `Space`. Its blocks are entries of ``1 + planes x words`` 64-bit words: the hash, and for each medium a
# bit for each worker. A table with linear probing finds the entry of a hash; it has an 8-byte slot for each, of which at most
# three quarters are taken, and deletion shifts entries back, as in `index.pxd`. Always:
#
# * An entry is free exactly when all of its bits are 0. Free entries are a ring through their first words, closed by entry 0,
#   which is never taken: those freed last are at its end.
# * A block that follows another one in a prompt takes the entry behind it if that is free. So a look-up, which knows what
#   follows what from its request, mostly finds the next block in the next entry, without a probe. This is a guess that the hash
#   confirms or refutes: answers do not depend on it.
# * A bit stands for one copy or more. The copies beyond the first, its duplicates, are rare: a table of their own has them.
#
# Changes reserve their memory first and cannot fail then.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from pagepool.core.base.memory cimport reserve_items, resize
from pagepool.core.base.platform cimport fetch, rare, raw_calloc, raw_free
from pagepool.core.router.event_batch cimport MAX_EVENT_GROUPS, Spec

cdef enum:
    MAX_MEDIA = 8
    MAX_MEDIUM_SIZE = 32      # bytes of a name
    WORD = 64                 # workers of a word
    FETCH_AHEAD = 8           # hashes by which a change has memory fetched before it reads it
    MIN_ROOM = 64             # entries, and slots of a table
    MIN_DUPLICATE_SLOTS = 256  # slots for duplicates that are kept
    BLOCKS_PER_DUPLICATE = 32  # of all groups, for which one more slot is kept
    MIN_GAINED = 64           # blocks that a worker is known to have got, at least
    ENTRIES_PER_GAINED = 2048  # of a space, for which one more is known

cdef struct FreeEntry:        # the first word of a free entry
    uint32_t prev
    uint32_t next

cdef struct BlockSlot:        # a slot of the table
    uint32_t tag              # upper half of a product of the hash; its share of 2**32 is the share of the table at its home
    uint32_t entry            # 0: empty

cdef struct Space:
    uint64_t *entries         # [num_entries * stride]
    BlockSlot *slots          # [num_slots]
    uint32_t num_entries      # entry 0 among them
    uint32_t num_slots
    uint32_t num_blocks
    Spec spec
    bint is_known             # whether `spec` was told

cdef struct Medium:
    char[MAX_MEDIUM_SIZE] name
    Py_ssize_t size

cdef struct GainedBlock:      # a block that a worker got
    uint32_t group
    uint32_t entry

cdef struct Duplicate:        # copies beyond the first of a block that a worker has
    uint64_t key              # of its entry, group, medium and worker; 0: empty
    uint64_t num

cdef struct Worker:
    int64_t num_bits
    int64_t num_duplicates    # bits with further copies
    bint is_lossy             # whether batches were lost, so that copies are not counted
    GainedBlock *gained       # [num_gained] all of its blocks, and some that it had, unless `is_incomplete`
    Py_ssize_t num_gained
    Py_ssize_t capacity
    bint is_incomplete        # whether it got more since it last had none

cdef struct BlockTable:
    Space[MAX_EVENT_GROUPS] spaces
    Py_ssize_t num_spaces     # behind the last that is known
    Medium[MAX_MEDIA] media
    int32_t num_planes
    int32_t num_words
    int32_t num_workers       # behind the last that told anything
    int32_t num_groups        # of the workers, as they say; 0: unknown
    Worker *workers           # [num_words * WORD]
    Duplicate *duplicates     # [num_duplicate_slots] with linear probing, at most three quarters taken
    Py_ssize_t num_duplicate_slots
    Py_ssize_t num_duplicates
    uint64_t multiplier


cdef inline Py_ssize_t stride_of(const BlockTable *table) noexcept nogil:
    return 1 + table.num_planes * table.num_words


cdef inline uint64_t *entry_at(const BlockTable *table, const Space *space, uint32_t entry) noexcept nogil:
    return space.entries + entry * <size_t>stride_of(table)


cdef inline FreeEntry *free_entry_at(const BlockTable *table, const Space *space, uint32_t entry) noexcept nogil:
    return <FreeEntry *>entry_at(table, space, entry)


cdef inline bint is_free_entry(const uint64_t *entry, Py_ssize_t stride) noexcept nogil:
    cdef uint64_t bits = 0
    cdef Py_ssize_t i
    for i in range(1, stride):
        bits |= entry[i]
    return bits == 0


cdef inline uint32_t _tag_of_hash(const BlockTable *table, uint64_t block_hash) noexcept nogil:
    return <uint32_t>((block_hash * table.multiplier) >> 32)


cdef inline uint32_t _home_of_tag(const Space *space, uint32_t tag) noexcept nogil:
    return <uint32_t>((<uint64_t>tag * space.num_slots) >> 32)


cdef inline uint32_t _slot_behind(const Space *space, uint32_t slot) noexcept nogil:
    slot += 1
    return 0 if slot == space.num_slots else slot


cdef inline uint32_t _find_slot(const BlockTable *table, const Space *space, uint64_t block_hash, uint32_t tag) noexcept nogil:
    """The slot of a block, or the empty one that ends the search. The table has slots."""
    cdef uint32_t slot = _home_of_tag(space, tag)
    while space.slots[slot].entry:
        if space.slots[slot].tag == tag and entry_at(table, space, space.slots[slot].entry)[0] == block_hash:
            break
        slot = _slot_behind(space, slot)
    return slot


cdef inline bint _holds_block(const BlockTable *table, const Space *space, uint32_t entry, uint64_t block_hash) noexcept nogil:
    """Whether an entry, or a number behind the last, is that of a block."""
    cdef const uint64_t *found = entry_at(table, space, entry)
    return entry < space.num_entries and found[0] == block_hash and not is_free_entry(found, stride_of(table))


cdef inline uint32_t find_entry(
    const BlockTable *table, const Space *space, uint64_t block_hash, uint32_t guess
) noexcept nogil:
    """The entry of a block, 0 if there is none. It may be `guess`."""
    if guess and _holds_block(table, space, guess, block_hash):
        return guess
    if space.num_blocks == 0:
        return 0
    return space.slots[_find_slot(table, space, block_hash, _tag_of_hash(table, block_hash))].entry


cdef inline void _append_free_entry(const BlockTable *table, Space *space, uint32_t entry) noexcept nogil:
    """Put a free entry at the end of the ring."""
    cdef FreeEntry *ring = free_entry_at(table, space, 0)
    free_entry_at(table, space, entry)[0] = FreeEntry(ring.prev, 0)
    free_entry_at(table, space, ring.prev).next = entry
    ring.prev = entry


cdef inline void _unlink_free_entry(const BlockTable *table, Space *space, uint32_t entry) noexcept nogil:
    cdef FreeEntry removed = free_entry_at(table, space, entry)[0]
    free_entry_at(table, space, removed.prev).next = removed.next
    free_entry_at(table, space, removed.next).prev = removed.prev


cdef inline uint32_t ensure_entry(const BlockTable *table, Space *space, uint64_t block_hash, uint32_t guess) noexcept nogil:
    """The entry of a block, a new one if it has none: `guess` if that is free. There is room, and the caller sets a bit."""
    cdef uint32_t tag, slot, entry
    if guess and _holds_block(table, space, guess, block_hash):
        return guess
    tag = _tag_of_hash(table, block_hash)
    slot = _find_slot(table, space, block_hash, tag)
    if space.slots[slot].entry:
        return space.slots[slot].entry
    entry = guess
    if not guess or guess >= space.num_entries or not is_free_entry(entry_at(table, space, guess), stride_of(table)):
        entry = free_entry_at(table, space, 0).next
    _unlink_free_entry(table, space, entry)
    entry_at(table, space, entry)[0] = block_hash
    space.slots[slot] = BlockSlot(tag, entry)
    space.num_blocks += 1
    return entry


cdef inline void _empty_slot(Space *space, uint32_t slot) noexcept nogil:
    """Empty a slot, and shift back those behind it whose search passes it."""
    cdef uint32_t home, other = slot
    while True:
        other = _slot_behind(space, other)
        if space.slots[other].entry == 0:
            break
        home = _home_of_tag(space, space.slots[other].tag)
        if (home <= slot or home > other) if slot < other else (other < home <= slot):
            space.slots[slot] = space.slots[other]
            slot = other
    space.slots[slot].entry = 0


cdef inline void _drop_entry(const BlockTable *table, Space *space, uint32_t entry) noexcept nogil:
    """Free an entry whose last bit is gone."""
    cdef uint64_t block_hash = entry_at(table, space, entry)[0]
    cdef uint32_t tag = _tag_of_hash(table, block_hash)
    cdef uint32_t slot = _home_of_tag(space, tag)
    while space.slots[slot].entry != entry:
        slot = _slot_behind(space, slot)
    _empty_slot(space, slot)
    _append_free_entry(table, space, entry)
    space.num_blocks -= 1


cdef inline uint64_t *bits_at(
    const BlockTable *table, const Space *space, uint32_t entry, int32_t plane, int32_t worker
) noexcept nogil:
    """The word with the bit of a worker."""
    return entry_at(table, space, entry) + 1 + plane * table.num_words + worker // WORD


cdef inline void _record_gain(BlockTable *table, const Space *space, uint32_t entry, int32_t worker) noexcept nogil:
    """Note that a worker got a block."""
    cdef Worker *gainer = &table.workers[worker]
    if gainer.num_bits == 0:
        gainer.num_gained, gainer.is_incomplete = 0, False
    if gainer.is_incomplete:
        return
    if rare(gainer.num_gained >= MIN_GAINED + space.num_entries // ENTRIES_PER_GAINED):
        gainer.is_incomplete = True
    elif rare(not reserve_items(<void **>&gainer.gained, &gainer.capacity, gainer.num_gained + 1, sizeof(GainedBlock))):
        gainer.is_incomplete = True
    else:
        gainer.gained[gainer.num_gained] = GainedBlock(<uint32_t>(space - &table.spaces[0]), entry)
        gainer.num_gained += 1


cdef inline uint64_t duplicate_key(
    const BlockTable *table, const Space *space, uint32_t entry, int32_t plane, int32_t worker
) noexcept nogil:
    """The key of the copies of a block."""
    return <uint64_t>entry << 32 | <uint64_t>(space - &table.spaces[0]) << 24 | <uint64_t>plane << 16 | <uint64_t>worker


cdef inline Py_ssize_t _home_of_key(const BlockTable *table, uint64_t key) noexcept nogil:
    return <Py_ssize_t>(((key * table.multiplier) >> 32) * <uint64_t>table.num_duplicate_slots >> 32)


cdef inline Py_ssize_t _duplicate_behind(const BlockTable *table, Py_ssize_t slot) noexcept nogil:
    return 0 if slot + 1 == table.num_duplicate_slots else slot + 1


cdef inline Py_ssize_t find_duplicate(const BlockTable *table, uint64_t key) noexcept nogil:
    """The slot of a key among the duplicates, or the empty one that ends the search. There are slots."""
    cdef Py_ssize_t slot = _home_of_key(table, key)
    while table.duplicates[slot].key not in (0, key):
        slot = _duplicate_behind(table, slot)
    return slot


cdef inline void set_duplicates(BlockTable *table, uint64_t key, int32_t worker, uint64_t num) noexcept nogil:
    """Set how many copies beyond the first there are. There is room."""
    cdef Py_ssize_t home, other, slot
    if num == 0 and table.workers[worker].num_duplicates == 0:
        return
    slot = find_duplicate(table, key)
    if num:
        table.workers[worker].num_duplicates += table.duplicates[slot].key == 0
        table.num_duplicates += table.duplicates[slot].key == 0
        table.duplicates[slot] = Duplicate(key, num)
        return
    if table.duplicates[slot].key == 0:
        return
    table.workers[worker].num_duplicates -= 1
    table.num_duplicates -= 1
    other = slot
    while True:  # shift back those whose search passes the slot
        other = _duplicate_behind(table, other)
        if table.duplicates[other].key == 0:
            break
        home = _home_of_key(table, table.duplicates[other].key)
        if (home <= slot or home > other) if slot < other else (other < home <= slot):
            table.duplicates[slot] = table.duplicates[other]
            slot = other
    table.duplicates[slot] = Duplicate(0, 0)


cdef inline uint64_t count_duplicates(const BlockTable *table, uint64_t key, int32_t worker) noexcept nogil:
    """The copies beyond the first."""
    cdef Py_ssize_t slot
    if table.workers[worker].num_duplicates == 0:
        return 0
    slot = find_duplicate(table, key)
    return table.duplicates[slot].num if table.duplicates[slot].key else 0


cdef inline bint _resize_duplicates(BlockTable *table, Py_ssize_t num) noexcept nogil:
    """Give the duplicates another number of slots, enough for all; False, and nothing changed, where memory is short."""
    cdef Duplicate *before = table.duplicates
    cdef Duplicate *slots = <Duplicate *>raw_calloc(num, sizeof(Duplicate))
    cdef Duplicate taken
    cdef Py_ssize_t num_before = table.num_duplicate_slots
    if slots == NULL:
        return False
    table.duplicates, table.num_duplicate_slots = slots, num
    for taken in before[:num_before]:
        if taken.key:
            table.duplicates[find_duplicate(table, taken.key)] = taken
    raw_free(before)
    return True


cdef inline Py_ssize_t _slots_for(Py_ssize_t num_duplicates) noexcept nogil:
    return max(num_duplicates + num_duplicates // 3 + 2, <Py_ssize_t>MIN_DUPLICATE_SLOTS)


cdef inline bint reserve_duplicates(BlockTable *table, Py_ssize_t num_more) noexcept nogil:
    """Make room for more copies; False where memory is short."""
    cdef Py_ssize_t num = _slots_for(table.num_duplicates + num_more)
    return num <= table.num_duplicate_slots or _resize_duplicates(table, max(num, 2 * _slots_for(table.num_duplicates)))


cdef inline void trim_duplicates(BlockTable *table) noexcept nogil:
    """Give back room for copies that did not come."""
    cdef Py_ssize_t g, num = 2 * _slots_for(table.num_duplicates)
    for g in range(table.num_spaces):
        num += table.spaces[g].num_blocks // BLOCKS_PER_DUPLICATE
    if table.num_duplicate_slots > 2 * num:
        _resize_duplicates(table, num)


cdef inline void _add_duplicate(
    BlockTable *table, const Space *space, uint32_t entry, int32_t plane, int32_t worker
) noexcept nogil:
    """Note that a worker has a further copy of a block."""
    cdef uint64_t key = duplicate_key(table, space, entry, plane, worker)
    if not table.workers[worker].is_lossy:
        set_duplicates(table, key, worker, count_duplicates(table, key, worker) + 1)


cdef inline bint _remove_duplicate(
    BlockTable *table, const Space *space, uint32_t entry, int32_t plane, int32_t worker
) noexcept nogil:
    """Note that a worker has a further copy of a block less; False if it has none."""
    cdef uint64_t key = duplicate_key(table, space, entry, plane, worker)
    cdef uint64_t num = 0 if table.workers[worker].is_lossy else count_duplicates(table, key, worker)
    if num:
        set_duplicates(table, key, worker, num - 1)
    return num > 0


cdef inline void _forget_duplicates(
    BlockTable *table, const Space *space, uint32_t entry, int32_t plane, int32_t worker
) noexcept nogil:
    """Forget the further copies of a block."""
    set_duplicates(table, duplicate_key(table, space, entry, plane, worker), worker, 0)


cdef inline void set_bit(BlockTable *table, const Space *space, uint32_t entry, int32_t plane, int32_t worker) noexcept nogil:
    cdef uint64_t *bits = bits_at(table, space, entry, plane, worker)
    cdef uint64_t bit = <uint64_t>1 << (worker % WORD)
    if bits[0] & bit == 0:
        _record_gain(table, space, entry, worker)
        table.workers[worker].num_bits += 1
        bits[0] |= bit


cdef inline bint has_bit(
    const BlockTable *table, const Space *space, uint32_t entry, int32_t plane, int32_t worker
) noexcept nogil:
    return bits_at(table, space, entry, plane, worker)[0] >> (worker % WORD) & 1


cdef inline void clear_bit(BlockTable *table, Space *space, uint32_t entry, int32_t plane, int32_t worker) noexcept nogil:
    """Clear the bit of a worker and forget its copies, and free an entry with no other."""
    cdef uint64_t *bits = bits_at(table, space, entry, plane, worker)
    cdef uint64_t bit = <uint64_t>1 << (worker % WORD)
    if bits[0] & bit:
        if rare(table.workers[worker].num_duplicates != 0):
            _forget_duplicates(table, space, entry, plane, worker)
        table.workers[worker].num_bits -= 1
        bits[0] &= ~bit
        if is_free_entry(entry_at(table, space, entry), stride_of(table)):
            _drop_entry(table, space, entry)


cdef inline void store_blocks(
    BlockTable *table, Space *space, const uint64_t *hashes, Py_ssize_t num, uint32_t last, int32_t plane, int32_t worker
) noexcept nogil:
    """Record blocks of a worker, or further copies of them, each behind the one before. `last` is the entry before the first;
    0: unknown.
    """
    cdef Py_ssize_t i
    for i in range(num):
        if i + FETCH_AHEAD < num:
            fetch(&space.slots[_home_of_tag(space, _tag_of_hash(table, hashes[i + FETCH_AHEAD]))])
        last = ensure_entry(table, space, hashes[i], last + 1 if last else 0)
        if rare(has_bit(table, space, last, plane, worker)):
            _add_duplicate(table, space, last, plane, worker)
        else:
            set_bit(table, space, last, plane, worker)


cdef inline void remove_blocks(
    BlockTable *table, Space *space, const uint64_t *hashes, Py_ssize_t num, int32_t plane, int32_t worker
) noexcept nogil:
    """Note that a worker has a copy of blocks less. The end of a prompt mostly goes before its beginning."""
    cdef Py_ssize_t i
    cdef uint32_t entry, last = 0
    for i in range(num):
        if i + FETCH_AHEAD < num:
            fetch(&space.slots[_home_of_tag(space, _tag_of_hash(table, hashes[i + FETCH_AHEAD]))])
        entry = find_entry(table, space, hashes[i], last - 1 if last else 0)
        if entry:
            if not rare(table.workers[worker].num_duplicates and _remove_duplicate(table, space, entry, plane, worker)):
                clear_bit(table, space, entry, plane, worker)
            last = entry


cdef inline void _clear_bits(BlockTable *table, Space *space, uint32_t entry, int32_t worker) noexcept nogil:
    """Clear the bits of a worker in all media."""
    cdef int32_t plane
    for plane in range(table.num_planes):
        clear_bit(table, space, entry, plane, worker)


cdef inline void remove_worker_blocks(BlockTable *table, int32_t worker) noexcept nogil:
    """Note that a worker has nothing. O(its blocks) while its marks list them all, then O(blocks of all workers), which is at
    most a constant for each block that it got since it last had none.
    """
    cdef Space *space
    cdef GainedBlock block
    cdef uint32_t entry
    table.workers[worker].is_lossy = False
    if table.workers[worker].num_bits == 0:
        return
    if not table.workers[worker].is_incomplete:
        for block in table.workers[worker].gained[:table.workers[worker].num_gained]:
            _clear_bits(table, &table.spaces[block.group], block.entry, worker)
        return
    for space in table.spaces[:table.num_spaces]:
        for entry in range(1, space.num_entries):
            if table.workers[worker].num_bits == 0:
                return
            _clear_bits(table, space, entry, worker)


cdef inline void _put_slot(Space *space, BlockSlot taken) noexcept nogil:
    """Put a block that has no slot into the table."""
    cdef uint32_t slot = _home_of_tag(space, taken.tag)
    while space.slots[slot].entry:
        slot = _slot_behind(space, slot)
    space.slots[slot] = taken


cdef inline bint _grow_slots(Space *space, uint64_t num_blocks) noexcept nogil:
    """Make room in the table of a space; False, and nothing changed, where memory is short. Homes are in the order of tags, so
    both tables are walked from end to end.
    """
    cdef uint64_t num = max(num_blocks + num_blocks // 3 + 2, space.num_slots + space.num_slots // 2, <uint64_t>MIN_ROOM)
    cdef Space grown = space[0]
    cdef BlockSlot taken
    if num_blocks + num_blocks // 3 + 2 <= space.num_slots:
        return True
    grown.slots = <BlockSlot *>raw_calloc(num, sizeof(BlockSlot))
    if grown.slots == NULL:
        return False
    grown.num_slots = <uint32_t>num
    for taken in space.slots[:space.num_slots]:
        if taken.entry:
            _put_slot(&grown, taken)
    raw_free(space.slots)
    space[0] = grown
    return True


cdef inline bint _grow_entries(BlockTable *table, Space *space, uint64_t num_blocks) noexcept nogil:
    """Make room for entries; False, and nothing changed, where memory is short."""
    cdef uint32_t entry, first = space.num_entries
    cdef uint64_t num = max(num_blocks + 1, space.num_entries + space.num_entries // 8, <uint64_t>MIN_ROOM)
    if num_blocks < space.num_entries:
        return True
    if not resize(<void **>&space.entries, num * stride_of(table) * sizeof(uint64_t)):
        return False
    space.num_entries = <uint32_t>num
    memset(entry_at(table, space, first), 0, (num - first) * stride_of(table) * sizeof(uint64_t))
    for entry in range(max(first, <uint32_t>1), space.num_entries):
        _append_free_entry(table, space, entry)
    return True


cdef inline bint reserve_blocks(BlockTable *table, Space *space, uint64_t num_more) noexcept nogil:
    """Make room for more blocks; False where memory is short."""
    cdef uint64_t num = space.num_blocks + num_more
    return _grow_slots(space, num) and _grow_entries(table, space, num)


cdef inline bint reshape(BlockTable *table, int32_t num_planes, int32_t num_words) noexcept nogil:
    """Give all entries more media or workers; False, and nothing changed, where memory is short. O(blocks)."""
    cdef BlockTable shaped = table[0]
    cdef Worker *workers = <Worker *>raw_calloc(num_words * WORD, sizeof(Worker))
    cdef bint has_room = workers != NULL
    cdef Py_ssize_t g
    shaped.num_planes, shaped.num_words = num_planes, num_words
    for g in range(table.num_spaces):
        if table.spaces[g].num_entries:
            shaped.spaces[g].entries = <uint64_t *>raw_calloc(
                table.spaces[g].num_entries, stride_of(&shaped) * sizeof(uint64_t)
            )
            has_room = has_room and shaped.spaces[g].entries != NULL
    for g in range(table.num_spaces):
        if has_room:
            _copy_entries(table, &table.spaces[g], &shaped, &shaped.spaces[g])
        raw_free(table.spaces[g].entries if has_room else shaped.spaces[g].entries)
    if not has_room:
        raw_free(workers)
        return False
    memcpy(workers, table.workers, table.num_words * WORD * sizeof(Worker))
    raw_free(table.workers)
    shaped.workers = workers
    table[0] = shaped
    return True


cdef inline void _copy_entries(
    const BlockTable *table, const Space *space, const BlockTable *shaped, const Space *into
) noexcept nogil:
    """Copy the entries of a space into larger ones."""
    cdef const uint64_t *entry
    cdef uint64_t *copied
    cdef uint32_t i
    cdef int32_t plane
    for i in range(space.num_entries):
        entry, copied = entry_at(table, space, i), entry_at(shaped, into, i)
        copied[0] = entry[0]
        for plane in range(table.num_planes):
            memcpy(
                copied + 1 + plane * shaped.num_words,
                entry + 1 + plane * table.num_words,
                table.num_words * sizeof(uint64_t),
            )


cdef inline void free_table(BlockTable *table) noexcept nogil:
    cdef Py_ssize_t g
    for g in range(MAX_EVENT_GROUPS):
        raw_free(table.spaces[g].entries)
        raw_free(table.spaces[g].slots)
    for g in range(table.num_words * WORD if table.workers != NULL else 0):
        raw_free(table.workers[g].gained)
    raw_free(table.workers)
    raw_free(table.duplicates)
