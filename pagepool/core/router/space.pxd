# The blocks of a cache group, by their hashes.
#
# A block has an entry of `stride` 64-bit words: its hash, and words of bits. A hash table with linear probing finds the entry.
# A block that follows another in a prompt takes the next entry if it is free. So a look-up mostly finds the next block in the
# next entry, without a probe. The hash in the entry confirms or refutes this guess, so answers do not depend on it. Always:
#
# * An entry is free exactly when all of its bits are 0. Free entries form a ring through their first words, closed by entry 0,
#   which is never taken. The entry freed last is at the end of the ring.
# * Every other entry has one slot of 8 bytes. At least a quarter of the slots is empty.
# * No slot from a block's home to the slot with the block is empty: deletion moves later blocks back.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memset

from pagepool.core.base cimport fetch, raw_calloc, resize
from pagepool.core.router.event_batch cimport *

cdef enum:
    WORD = 64                 # workers per word
    MIN_ROOM = 64             # entries and slots, at least

cdef extern from *:
    int ctz "__builtin_ctzll" (uint64_t word) noexcept nogil

cdef struct FreeEntry:        # the first word of a free entry
    uint32_t prev
    uint32_t next

cdef struct BlockSlot:        # a slot of the hash table
    uint32_t tag              # upper half of hash * multiplier; home slot = tag * num_slots / 2**32
    uint32_t entry            # 0: empty

cdef struct Space:
    uint64_t *entries         # [num_entries * stride]
    BlockSlot *slots          # [num_slots]
    uint32_t num_entries      # entry 0 included
    uint32_t num_slots
    uint32_t num_blocks
    GroupSpec known           # block_size 0: no event has stored a block
    int32_t stride            # words of an entry
    uint64_t multiplier       # odd, and secret: nobody can choose colliding hashes


cdef inline uint64_t *entry_at(const Space *space, uint32_t entry) noexcept nogil:
    return space.entries + entry * <size_t>space.stride


cdef inline FreeEntry *_free_entry_at(const Space *space, uint32_t entry) noexcept nogil:
    return <FreeEntry *>entry_at(space, entry)


cdef inline bint is_free_entry(const uint64_t *entry, int32_t stride) noexcept nogil:
    cdef int32_t i
    for i in range(1, stride):
        if entry[i]:
            return False
    return True


cdef inline uint32_t _tag_of_hash(const Space *space, uint64_t block_hash) noexcept nogil:
    return <uint32_t>((block_hash * space.multiplier) >> 32)


cdef inline uint32_t _home_of_tag(const Space *space, uint32_t tag) noexcept nogil:
    return <uint32_t>((<uint64_t>tag * space.num_slots) >> 32)


cdef inline uint32_t _slot_behind(const Space *space, uint32_t slot) noexcept nogil:
    slot += 1
    return 0 if slot == space.num_slots else slot


cdef inline uint32_t _find_slot(const Space *space, uint64_t block_hash, uint32_t tag) noexcept nogil:
    """Find the slot of a block, or the empty slot that ends the search. The space has slots."""
    cdef uint32_t slot = _home_of_tag(space, tag)
    assert space.num_blocks < space.num_slots
    while space.slots[slot].entry:
        if space.slots[slot].tag == tag and entry_at(space, space.slots[slot].entry)[0] == block_hash:
            break
        slot = _slot_behind(space, slot)
    return slot


cdef inline bint _holds_block(const Space *space, uint32_t entry, uint64_t block_hash) noexcept nogil:
    """Whether an entry belongs to a block. `entry` may be one past the last."""
    cdef const uint64_t *found = entry_at(space, entry)
    return entry < space.num_entries and found[0] == block_hash and not is_free_entry(found, space.stride)


cdef inline uint32_t find_entry(const Space *space, uint64_t block_hash, uint32_t guess) noexcept nogil:
    """Return the entry of a block; 0 if it has none. `guess` is tried first."""
    if guess and _holds_block(space, guess, block_hash):
        return guess
    if space.num_blocks == 0:
        return 0
    return space.slots[_find_slot(space, block_hash, _tag_of_hash(space, block_hash))].entry


cdef inline void _append_free_entry(Space *space, uint32_t entry) noexcept nogil:
    """Append a free entry to the ring."""
    cdef FreeEntry *ring = _free_entry_at(space, 0)
    assert 0 < entry < space.num_entries and is_free_entry(entry_at(space, entry), space.stride)
    _free_entry_at(space, entry)[0] = FreeEntry(prev=ring.prev, next=0)
    _free_entry_at(space, ring.prev).next = entry
    ring.prev = entry


cdef inline void _unlink_free_entry(Space *space, uint32_t entry) noexcept nogil:
    cdef FreeEntry removed = _free_entry_at(space, entry)[0]
    assert 0 < entry < space.num_entries and is_free_entry(entry_at(space, entry), space.stride)
    assert _free_entry_at(space, removed.prev).next == entry and _free_entry_at(space, removed.next).prev == entry
    _free_entry_at(space, removed.prev).next = removed.next
    _free_entry_at(space, removed.next).prev = removed.prev


cdef inline uint32_t ensure_entry(Space *space, uint64_t block_hash, uint32_t guess) noexcept nogil:
    """Return the entry of a block. If it has none, it gets `guess` if that is free, else another; the caller sets a bit."""
    cdef uint32_t tag, slot, entry
    if guess and _holds_block(space, guess, block_hash):
        return guess
    tag = _tag_of_hash(space, block_hash)
    slot = _find_slot(space, block_hash, tag)
    if space.slots[slot].entry:
        return space.slots[slot].entry
    entry = guess
    if not guess or guess >= space.num_entries or not is_free_entry(entry_at(space, guess), space.stride):
        entry = _free_entry_at(space, 0).next
    _unlink_free_entry(space, entry)
    entry_at(space, entry)[0] = block_hash
    space.slots[slot] = BlockSlot(tag=tag, entry=entry)
    space.num_blocks += 1
    assert space.num_blocks < space.num_entries and space.num_blocks + space.num_blocks // 3 + 2 <= space.num_slots
    return entry


cdef inline void _vacate_slot(Space *space, uint32_t slot) noexcept nogil:
    """Empty a slot, and move back the later blocks whose search passes it."""
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


cdef inline void drop_entry(Space *space, uint32_t entry) noexcept nogil:
    """Release the slot and entry of a block whose bits are all 0."""
    cdef uint64_t block_hash = entry_at(space, entry)[0]
    cdef uint32_t tag = _tag_of_hash(space, block_hash)
    cdef uint32_t slot = _home_of_tag(space, tag)
    assert space.num_blocks > 0 and is_free_entry(entry_at(space, entry), space.stride)
    while space.slots[slot].entry != entry:
        assert space.slots[slot].entry
        slot = _slot_behind(space, slot)
    _vacate_slot(space, slot)
    _append_free_entry(space, entry)
    space.num_blocks -= 1


cdef inline void _put_slot(Space *space, BlockSlot taken) noexcept nogil:
    """Put a block that has no slot into the first empty one from its home on."""
    cdef uint32_t slot = _home_of_tag(space, taken.tag)
    assert 0 < taken.entry < space.num_entries
    while space.slots[slot].entry:
        slot = _slot_behind(space, slot)
    space.slots[slot] = taken


cdef inline bint _grow_slots(Space *space, uint64_t num_blocks) noexcept nogil:
    """Make room for slots; return False, with nothing changed, if memory is short. Homes are in the order of tags, so both
    tables are walked from end to end.
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


cdef inline bint _grow_entries(Space *space, uint64_t num_blocks) noexcept nogil:
    """Make room for entries; return False, with nothing changed, if memory is short."""
    cdef uint32_t entry, first = space.num_entries
    cdef uint64_t num = max(num_blocks + 1, space.num_entries + space.num_entries // 8, <uint64_t>MIN_ROOM)
    if num_blocks < space.num_entries:
        return True
    if not resize(<void **>&space.entries, num * space.stride * sizeof(uint64_t)):
        return False
    space.num_entries = <uint32_t>num
    memset(entry_at(space, first), 0, (num - first) * space.stride * sizeof(uint64_t))
    for entry in range(max(first, <uint32_t>1), space.num_entries):
        _append_free_entry(space, entry)
    return True


cdef inline bint reserve_blocks(Space *space, uint64_t num_more) noexcept nogil:
    """Make room for more blocks; return False if memory is short."""
    cdef uint64_t num = space.num_blocks + num_more
    return _grow_slots(space, num) and _grow_entries(space, num)


cdef inline const char *find_space_fault(const Space *space, int32_t num_words, int64_t *counts) noexcept nogil:
    """Return what is wrong in a space, or NULL. Add the blocks of each worker to `counts`."""
    cdef uint32_t entry, num = 0, num_linked = 0
    cdef Py_ssize_t i
    cdef uint64_t word
    for entry in range(1, space.num_entries):
        if is_free_entry(entry_at(space, entry), space.stride):
            continue
        num += 1
        if find_entry(space, entry_at(space, entry)[0], 0) != entry:
            return "a block is not found"
        for i in range(space.stride - 1):
            word = entry_at(space, entry)[1 + i]
            while word:
                counts[i % num_words * WORD + ctz(word)] += 1
                word &= word - 1
    if num != space.num_blocks:
        return "blocks are miscounted"
    entry = _free_entry_at(space, 0).next if space.num_entries else 0
    while entry and num_linked <= space.num_entries:
        if not is_free_entry(entry_at(space, entry), space.stride):
            return "a block is linked as free"
        num_linked += 1
        entry = _free_entry_at(space, entry).next
    if space.num_entries and num + num_linked + 1 != space.num_entries:
        return "free entries are miscounted"
    num = 0
    for i in range(space.num_slots):
        num += space.slots[i].entry != 0
    if num != space.num_blocks:
        return "slots are miscounted"
    return NULL


cdef inline void fetch_slot(const Space *space, uint64_t block_hash) noexcept nogil:
    """Prefetch the home slot of a block."""
    fetch(&space.slots[_home_of_tag(space, _tag_of_hash(space, block_hash))])


cdef inline void free_space(Space *space) noexcept nogil:
    raw_free(space.entries)
    raw_free(space.slots)
