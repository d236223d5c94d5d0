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
# * A bit stands for one copy or more. The copies beyond the first, which are rare, are counted in a table of their own.
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
    MIN_COPIES = 256          # places of the table of copies that are kept
    BLOCKS_OF_A_COPY = 32     # of all groups, for which one more is kept
    MIN_MARKS = 64            # blocks that a worker is known to have got, at least
    ENTRIES_OF_A_MARK = 2048  # of a space, for which one more is known

cdef struct Link:             # the first word of a free entry
    uint32_t prev
    uint32_t next

cdef struct Place:            # a slot of the table
    uint32_t tag              # upper half of a product of the hash; its share of 2**32 is the share of the table at its home
    uint32_t entry            # 0: empty

cdef struct Space:
    uint64_t *entries         # [num_entries * stride]
    Place *places             # [num_places]
    uint32_t num_entries      # entry 0 among them
    uint32_t num_places
    uint32_t num_blocks
    Spec spec
    bint is_known             # whether `spec` was told

cdef struct Medium:
    char[MAX_MEDIUM_SIZE] name
    Py_ssize_t size

cdef struct Mark:             # a block that a worker got
    uint32_t group
    uint32_t entry

cdef struct Copies:           # copies beyond the first of a block that a worker has
    uint64_t key              # of its entry, group, medium and worker; 0: empty
    uint64_t num

cdef struct Holding:          # of a worker
    int64_t num_bits
    int64_t num_copied        # bits with further copies
    bint is_lossy             # whether batches were lost, so that copies are not counted
    Mark *marks               # [num_marks] all of its blocks, and some that it had, unless `is_over`
    Py_ssize_t num_marks
    Py_ssize_t capacity
    bint is_over              # whether it got more since it last had none

cdef struct Table:
    Space[MAX_EVENT_GROUPS] spaces
    Py_ssize_t num_spaces     # behind the last that is known
    Medium[MAX_MEDIA] media
    int32_t num_planes
    int32_t num_words
    int32_t num_workers       # behind the last that told anything
    int32_t num_groups        # of the workers, as they say; 0: unknown
    Holding *held             # [num_words * WORD] of each worker
    Copies *copies            # [num_copy_places] with linear probing, at most three quarters taken
    Py_ssize_t num_copy_places
    Py_ssize_t num_copied
    uint64_t multiplier


cdef inline Py_ssize_t stride_of(const Table *table) noexcept nogil:
    return 1 + table.num_planes * table.num_words


cdef inline uint64_t *entry_at(const Table *table, const Space *space, uint32_t entry) noexcept nogil:
    return space.entries + entry * <size_t>stride_of(table)


cdef inline Link *link_at(const Table *table, const Space *space, uint32_t entry) noexcept nogil:
    return <Link *>entry_at(table, space, entry)


cdef inline bint is_free(const uint64_t *entry, Py_ssize_t stride) noexcept nogil:
    cdef uint64_t bits = 0
    cdef Py_ssize_t i
    for i in range(1, stride):
        bits |= entry[i]
    return bits == 0


cdef inline uint32_t _tag_of(const Table *table, uint64_t block_hash) noexcept nogil:
    return <uint32_t>((block_hash * table.multiplier) >> 32)


cdef inline uint32_t _home_at(const Space *space, uint32_t tag) noexcept nogil:
    return <uint32_t>((<uint64_t>tag * space.num_places) >> 32)


cdef inline uint32_t _place_behind(const Space *space, uint32_t place) noexcept nogil:
    place += 1
    return 0 if place == space.num_places else place


cdef inline uint32_t _place_of(const Table *table, const Space *space, uint64_t block_hash, uint32_t tag) noexcept nogil:
    """The place of a block, or the empty one that ends the search. The table has places."""
    cdef uint32_t place = _home_at(space, tag)
    while space.places[place].entry:
        if space.places[place].tag == tag and entry_at(table, space, space.places[place].entry)[0] == block_hash:
            break
        place = _place_behind(space, place)
    return place


cdef inline bint holds(const Table *table, const Space *space, uint32_t entry, uint64_t block_hash) noexcept nogil:
    """Whether an entry, or a number behind the last, is that of a block."""
    cdef const uint64_t *found = entry_at(table, space, entry)
    return entry < space.num_entries and found[0] == block_hash and not is_free(found, stride_of(table))


cdef inline uint32_t find_block(const Table *table, const Space *space, uint64_t block_hash, uint32_t guess) noexcept nogil:
    """The entry of a block, 0 if there is none. It may be `guess`."""
    if guess and holds(table, space, guess, block_hash):
        return guess
    if space.num_blocks == 0:
        return 0
    return space.places[_place_of(table, space, block_hash, _tag_of(table, block_hash))].entry


cdef inline void _link_last(const Table *table, Space *space, uint32_t entry) noexcept nogil:
    """Put a free entry at the end of the ring."""
    cdef Link *ring = link_at(table, space, 0)
    link_at(table, space, entry)[0] = Link(ring.prev, 0)
    link_at(table, space, ring.prev).next = entry
    ring.prev = entry


cdef inline void _take_free(const Table *table, Space *space, uint32_t entry) noexcept nogil:
    cdef Link link = link_at(table, space, entry)[0]
    link_at(table, space, link.prev).next = link.next
    link_at(table, space, link.next).prev = link.prev


cdef inline uint32_t put_block(const Table *table, Space *space, uint64_t block_hash, uint32_t guess) noexcept nogil:
    """The entry of a block, a new one if it has none: `guess` if that is free. There is room, and the caller sets a bit."""
    cdef uint32_t tag, place, entry
    if guess and holds(table, space, guess, block_hash):
        return guess
    tag = _tag_of(table, block_hash)
    place = _place_of(table, space, block_hash, tag)
    if space.places[place].entry:
        return space.places[place].entry
    entry = guess
    if not guess or guess >= space.num_entries or not is_free(entry_at(table, space, guess), stride_of(table)):
        entry = link_at(table, space, 0).next
    _take_free(table, space, entry)
    entry_at(table, space, entry)[0] = block_hash
    space.places[place] = Place(tag, entry)
    space.num_blocks += 1
    return entry


cdef inline void _empty_place(Space *space, uint32_t place) noexcept nogil:
    """Empty a place, and shift back those behind it whose search passes it."""
    cdef uint32_t home, other = place
    while True:
        other = _place_behind(space, other)
        if space.places[other].entry == 0:
            break
        home = _home_at(space, space.places[other].tag)
        if (home <= place or home > other) if place < other else (other < home <= place):
            space.places[place] = space.places[other]
            place = other
    space.places[place].entry = 0


cdef inline void _drop_block(const Table *table, Space *space, uint32_t entry) noexcept nogil:
    """Free an entry whose last bit is gone."""
    cdef uint64_t block_hash = entry_at(table, space, entry)[0]
    cdef uint32_t tag = _tag_of(table, block_hash)
    cdef uint32_t place = _home_at(space, tag)
    while space.places[place].entry != entry:
        place = _place_behind(space, place)
    _empty_place(space, place)
    _link_last(table, space, entry)
    space.num_blocks -= 1


cdef inline uint64_t *bits_at(
    const Table *table, const Space *space, uint32_t entry, int32_t plane, int32_t worker
) noexcept nogil:
    """The word with the bit of a worker."""
    return entry_at(table, space, entry) + 1 + plane * table.num_words + worker // WORD


cdef inline void _mark_block(Table *table, const Space *space, uint32_t entry, int32_t worker) noexcept nogil:
    """Note that a worker got a block."""
    cdef Holding *held = &table.held[worker]
    if held.num_bits == 0:
        held.num_marks, held.is_over = 0, False
    if held.is_over:
        return
    if rare(held.num_marks >= MIN_MARKS + space.num_entries // ENTRIES_OF_A_MARK):
        held.is_over = True
    elif rare(not reserve_items(<void **>&held.marks, &held.capacity, held.num_marks + 1, sizeof(Mark))):
        held.is_over = True
    else:
        held.marks[held.num_marks] = Mark(<uint32_t>(space - &table.spaces[0]), entry)
        held.num_marks += 1


cdef inline uint64_t key_of(
    const Table *table, const Space *space, uint32_t entry, int32_t plane, int32_t worker
) noexcept nogil:
    """The key of the copies of a block."""
    return <uint64_t>entry << 32 | <uint64_t>(space - &table.spaces[0]) << 24 | <uint64_t>plane << 16 | <uint64_t>worker


cdef inline Py_ssize_t _copies_home(const Table *table, uint64_t key) noexcept nogil:
    return <Py_ssize_t>(((key * table.multiplier) >> 32) * <uint64_t>table.num_copy_places >> 32)


cdef inline Py_ssize_t _copies_behind(const Table *table, Py_ssize_t place) noexcept nogil:
    return 0 if place + 1 == table.num_copy_places else place + 1


cdef inline Py_ssize_t find_copies(const Table *table, uint64_t key) noexcept nogil:
    """The place of a key among the copies, or the empty one that ends the search. There are places."""
    cdef Py_ssize_t place = _copies_home(table, key)
    while table.copies[place].key not in (0, key):
        place = _copies_behind(table, place)
    return place


cdef inline void set_copies(Table *table, uint64_t key, int32_t worker, uint64_t num) noexcept nogil:
    """Set how many copies beyond the first there are. There is room."""
    cdef Py_ssize_t home, other, place
    if num == 0 and table.held[worker].num_copied == 0:
        return
    place = find_copies(table, key)
    if num:
        table.held[worker].num_copied += table.copies[place].key == 0
        table.num_copied += table.copies[place].key == 0
        table.copies[place] = Copies(key, num)
        return
    if table.copies[place].key == 0:
        return
    table.held[worker].num_copied -= 1
    table.num_copied -= 1
    other = place
    while True:  # shift back those whose search passes the place
        other = _copies_behind(table, other)
        if table.copies[other].key == 0:
            break
        home = _copies_home(table, table.copies[other].key)
        if (home <= place or home > other) if place < other else (other < home <= place):
            table.copies[place] = table.copies[other]
            place = other
    table.copies[place] = Copies(0, 0)


cdef inline uint64_t count_further(const Table *table, uint64_t key, int32_t worker) noexcept nogil:
    """The copies beyond the first."""
    cdef Py_ssize_t place
    if table.held[worker].num_copied == 0:
        return 0
    place = find_copies(table, key)
    return table.copies[place].num if table.copies[place].key else 0


cdef inline bint _resize_copies(Table *table, Py_ssize_t num) noexcept nogil:
    """Give the table of copies another number of places, enough for all; False, and nothing changed, where memory is short."""
    cdef Copies *before = table.copies
    cdef Copies *places = <Copies *>raw_calloc(num, sizeof(Copies))
    cdef Copies taken
    cdef Py_ssize_t num_before = table.num_copy_places
    if places == NULL:
        return False
    table.copies, table.num_copy_places = places, num
    for taken in before[:num_before]:
        if taken.key:
            table.copies[find_copies(table, taken.key)] = taken
    raw_free(before)
    return True


cdef inline Py_ssize_t _places_for(Py_ssize_t num_copied) noexcept nogil:
    return max(num_copied + num_copied // 3 + 2, <Py_ssize_t>MIN_COPIES)


cdef inline bint reserve_copies(Table *table, Py_ssize_t num_more) noexcept nogil:
    """Make room for more copies; False where memory is short."""
    cdef Py_ssize_t num = _places_for(table.num_copied + num_more)
    return num <= table.num_copy_places or _resize_copies(table, max(num, 2 * _places_for(table.num_copied)))


cdef inline void trim_copies(Table *table) noexcept nogil:
    """Give back room for copies that did not come."""
    cdef Py_ssize_t g, num = 2 * _places_for(table.num_copied)
    for g in range(table.num_spaces):
        num += table.spaces[g].num_blocks // BLOCKS_OF_A_COPY
    if table.num_copy_places > 2 * num:
        _resize_copies(table, num)


cdef inline void _add_further(Table *table, const Space *space, uint32_t entry, int32_t plane, int32_t worker) noexcept nogil:
    """Note that a worker has a further copy of a block."""
    cdef uint64_t key = key_of(table, space, entry, plane, worker)
    if not table.held[worker].is_lossy:
        set_copies(table, key, worker, count_further(table, key, worker) + 1)


cdef inline bint _take_further(Table *table, const Space *space, uint32_t entry, int32_t plane, int32_t worker) noexcept nogil:
    """Note that a worker has a further copy of a block less; False if it has none."""
    cdef uint64_t key = key_of(table, space, entry, plane, worker)
    cdef uint64_t num = 0 if table.held[worker].is_lossy else count_further(table, key, worker)
    if num:
        set_copies(table, key, worker, num - 1)
    return num > 0


cdef inline void _drop_further(Table *table, const Space *space, uint32_t entry, int32_t plane, int32_t worker) noexcept nogil:
    """Forget the further copies of a block."""
    set_copies(table, key_of(table, space, entry, plane, worker), worker, 0)


cdef inline void set_bit(Table *table, const Space *space, uint32_t entry, int32_t plane, int32_t worker) noexcept nogil:
    cdef uint64_t *bits = bits_at(table, space, entry, plane, worker)
    cdef uint64_t bit = <uint64_t>1 << (worker % WORD)
    if bits[0] & bit == 0:
        _mark_block(table, space, entry, worker)
        table.held[worker].num_bits += 1
        bits[0] |= bit


cdef inline bint has_bit(const Table *table, const Space *space, uint32_t entry, int32_t plane, int32_t worker) noexcept nogil:
    return bits_at(table, space, entry, plane, worker)[0] >> (worker % WORD) & 1


cdef inline void clear_bit(Table *table, Space *space, uint32_t entry, int32_t plane, int32_t worker) noexcept nogil:
    """Clear the bit of a worker and forget its copies, and free an entry with no other."""
    cdef uint64_t *bits = bits_at(table, space, entry, plane, worker)
    cdef uint64_t bit = <uint64_t>1 << (worker % WORD)
    if bits[0] & bit:
        if rare(table.held[worker].num_copied != 0):
            _drop_further(table, space, entry, plane, worker)
        table.held[worker].num_bits -= 1
        bits[0] &= ~bit
        if is_free(entry_at(table, space, entry), stride_of(table)):
            _drop_block(table, space, entry)


cdef inline void store_blocks(
    Table *table, Space *space, const uint64_t *hashes, Py_ssize_t num, uint32_t last, int32_t plane, int32_t worker
) noexcept nogil:
    """Record blocks of a worker, or further copies of them, each behind the one before. `last` is the entry before the first;
    0: unknown.
    """
    cdef Py_ssize_t i
    for i in range(num):
        if i + FETCH_AHEAD < num:
            fetch(&space.places[_home_at(space, _tag_of(table, hashes[i + FETCH_AHEAD]))])
        last = put_block(table, space, hashes[i], last + 1 if last else 0)
        if rare(has_bit(table, space, last, plane, worker)):
            _add_further(table, space, last, plane, worker)
        else:
            set_bit(table, space, last, plane, worker)


cdef inline void remove_blocks(
    Table *table, Space *space, const uint64_t *hashes, Py_ssize_t num, int32_t plane, int32_t worker
) noexcept nogil:
    """Note that a worker has a copy of blocks less. The end of a prompt mostly goes before its beginning."""
    cdef Py_ssize_t i
    cdef uint32_t entry, last = 0
    for i in range(num):
        if i + FETCH_AHEAD < num:
            fetch(&space.places[_home_at(space, _tag_of(table, hashes[i + FETCH_AHEAD]))])
        entry = find_block(table, space, hashes[i], last - 1 if last else 0)
        if entry:
            if not rare(table.held[worker].num_copied and _take_further(table, space, entry, plane, worker)):
                clear_bit(table, space, entry, plane, worker)
            last = entry


cdef inline void _clear_bits(Table *table, Space *space, uint32_t entry, int32_t worker) noexcept nogil:
    """Clear the bits of a worker in all media."""
    cdef int32_t plane
    for plane in range(table.num_planes):
        clear_bit(table, space, entry, plane, worker)


cdef inline void remove_all(Table *table, int32_t worker) noexcept nogil:
    """Note that a worker has nothing. O(its blocks) while its marks list them all, then O(blocks of all workers), which is at
    most a constant for each block that it got since it last had none.
    """
    cdef Space *space
    cdef Mark mark
    cdef uint32_t entry
    table.held[worker].is_lossy = False
    if table.held[worker].num_bits == 0:
        return
    if not table.held[worker].is_over:
        for mark in table.held[worker].marks[:table.held[worker].num_marks]:
            _clear_bits(table, &table.spaces[mark.group], mark.entry, worker)
        return
    for space in table.spaces[:table.num_spaces]:
        for entry in range(1, space.num_entries):
            if table.held[worker].num_bits == 0:
                return
            _clear_bits(table, space, entry, worker)


cdef inline void _put_place(Space *space, Place taken) noexcept nogil:
    """Put a block that has no place into the table."""
    cdef uint32_t place = _home_at(space, taken.tag)
    while space.places[place].entry:
        place = _place_behind(space, place)
    space.places[place] = taken


cdef inline bint _grow_places(Space *space, uint64_t num_blocks) noexcept nogil:
    """Make room in the table of a space; False, and nothing changed, where memory is short. Homes are in the order of tags, so
    both tables are walked from end to end.
    """
    cdef uint64_t num = max(num_blocks + num_blocks // 3 + 2, space.num_places + space.num_places // 2, <uint64_t>MIN_ROOM)
    cdef Space grown = space[0]
    cdef Place taken
    if num_blocks + num_blocks // 3 + 2 <= space.num_places:
        return True
    grown.places = <Place *>raw_calloc(num, sizeof(Place))
    if grown.places == NULL:
        return False
    grown.num_places = <uint32_t>num
    for taken in space.places[:space.num_places]:
        if taken.entry:
            _put_place(&grown, taken)
    raw_free(space.places)
    space[0] = grown
    return True


cdef inline bint _grow_entries(Table *table, Space *space, uint64_t num_blocks) noexcept nogil:
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
        _link_last(table, space, entry)
    return True


cdef inline bint reserve_blocks(Table *table, Space *space, uint64_t num_more) noexcept nogil:
    """Make room for more blocks; False where memory is short."""
    cdef uint64_t num = space.num_blocks + num_more
    return _grow_places(space, num) and _grow_entries(table, space, num)


cdef inline bint reshape(Table *table, int32_t num_planes, int32_t num_words) noexcept nogil:
    """Give all entries more media or workers; False, and nothing changed, where memory is short. O(blocks)."""
    cdef Table shaped = table[0]
    cdef Holding *held = <Holding *>raw_calloc(num_words * WORD, sizeof(Holding))
    cdef bint has_room = held != NULL
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
        raw_free(held)
        return False
    memcpy(held, table.held, table.num_words * WORD * sizeof(Holding))
    raw_free(table.held)
    shaped.held = held
    table[0] = shaped
    return True


cdef inline void _copy_entries(const Table *table, const Space *space, const Table *shaped, const Space *into) noexcept nogil:
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


cdef inline void free_table(Table *table) noexcept nogil:
    cdef Py_ssize_t g
    for g in range(MAX_EVENT_GROUPS):
        raw_free(table.spaces[g].entries)
        raw_free(table.spaces[g].places)
    for g in range(table.num_words * WORD if table.held != NULL else 0):
        raw_free(table.held[g].marks)
    raw_free(table.held)
    raw_free(table.copies)
