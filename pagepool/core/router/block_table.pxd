# The index of a router: which workers have a block, by its hash.
#
# Each cache group has a `Space`. Its entries have a bit for each medium and worker. Changes reserve their memory first and
# cannot fail later. Always:
#
# * A bit stands for one copy or more. `duplicates` counts the copies beyond the first.
# * `num_bits` of a worker is the number of its bits, and `num_duplicates` the number of bits with duplicates.
# * `gained` lists all blocks of a worker, and some that it had before, unless `is_incomplete`.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

from pagepool.core.router.duplicates cimport *
from pagepool.core.router.space cimport *

cdef enum:
    MAX_MEDIA = 8
    MAX_MEDIUM_SIZE = 32      # bytes of a name
    FETCH_AHEAD = 8           # hashes between a prefetch and its use
    BLOCKS_PER_DUPLICATE = 32  # blocks per spare slot for duplicates
    MIN_GAINED = 64           # least capacity of a list of gained blocks
    ENTRIES_PER_GAINED = 2048  # entries of a space per gained block listed beyond `MIN_GAINED`

cdef struct Medium:
    char[MAX_MEDIUM_SIZE] name
    Py_ssize_t size

cdef struct Media:
    Medium[MAX_MEDIA] items
    int32_t num

cdef struct GainedBlock:      # current or earlier block of a worker
    uint32_t group
    uint32_t entry

cdef struct Worker:
    DuplicateTable *left_out  # numbers of copies of blocks left out, by `_left_out_key`; NULL: none
    int64_t num_skipped       # events left out, wholly or in part
    int64_t num_bits
    int64_t num_duplicates    # bits with duplicates
    bint is_lossy             # batches were lost, so duplicates are not counted
    bint is_incomplete        # `gained` lacks blocks: there were too many, or memory was short
    GainedBlock *gained       # [num_gained] blocks gained since the worker last had none
    Py_ssize_t num_gained
    Py_ssize_t capacity       # blocks for which `gained` has room

cdef struct BlockTable:
    Space[MAX_EVENT_GROUPS] spaces
    Py_ssize_t num_spaces     # number of the last known group, plus 1
    Media media
    int32_t num_words         # words of bits for all workers, in one medium
    int32_t num_workers       # highest number of a worker with a batch, plus 1
    Told told                 # numbers in pagepool's events that concern all groups
    int32_t page_size         # tokens per hash of a prompt
    Worker *workers           # [num_words * WORD]
    DuplicateTable duplicates
    uint64_t multiplier


cdef inline uint64_t *_bits_at(
    const BlockTable *table, const Space *space, uint32_t entry, int32_t plane, int32_t worker
) noexcept nogil:
    """Return the word with the bit of a worker."""
    return entry_at(space, entry) + 1 + plane * table.num_words + worker // WORD


cdef inline void _record_gain(BlockTable *table, const Space *space, uint32_t entry, int32_t worker) noexcept nogil:
    """List a block that a worker gained."""
    cdef Worker *gainer = &table.workers[worker]
    assert 0 <= gainer.num_gained <= gainer.capacity
    if gainer.num_bits == 0:
        gainer.num_gained, gainer.is_incomplete = 0, False
    if gainer.is_incomplete:
        return
    if rare(gainer.num_gained >= MIN_GAINED + space.num_entries // ENTRIES_PER_GAINED):
        gainer.is_incomplete = True
    elif rare(not reserve_items(<void **>&gainer.gained, &gainer.capacity, gainer.num_gained + 1, sizeof(GainedBlock))):
        gainer.is_incomplete = True
    else:
        gainer.gained[gainer.num_gained] = GainedBlock(group=<uint32_t>(space - &table.spaces[0]), entry=entry)
        gainer.num_gained += 1


cdef inline uint64_t _duplicate_key(
    const BlockTable *table, const Space *space, uint32_t entry, int32_t plane, int32_t worker
) noexcept nogil:
    """Return the key of a block's duplicates."""
    assert entry and 0 <= plane < MAX_MEDIA and 0 <= worker <= 0xffff and 0 <= space - &table.spaces[0] < MAX_EVENT_GROUPS
    return <uint64_t>entry << 32 | <uint64_t>(space - &table.spaces[0]) << 24 | <uint64_t>plane << 16 | <uint64_t>worker


cdef inline void _set_duplicates(BlockTable *table, uint64_t key, int32_t worker, uint64_t num) noexcept nogil:
    """Set the number of duplicates of a block at a worker. There is room."""
    if num or table.workers[worker].num_duplicates:
        table.workers[worker].num_duplicates += put_duplicate(&table.duplicates, key, num)
    assert 0 <= table.workers[worker].num_duplicates <= table.workers[worker].num_bits
    assert table.workers[worker].num_duplicates <= table.duplicates.num


cdef inline uint64_t _count_duplicates(const BlockTable *table, uint64_t key, int32_t worker) noexcept nogil:
    """Count the duplicates of a block at a worker."""
    if table.workers[worker].num_duplicates == 0:
        return 0
    return table.duplicates.slots[find_duplicate(&table.duplicates, key)].num


cdef inline void _add_duplicate(
    BlockTable *table, const Space *space, uint32_t entry, int32_t plane, int32_t worker
) noexcept nogil:
    """Count one more copy of a block that a worker has."""
    cdef uint64_t key = _duplicate_key(table, space, entry, plane, worker)
    if not table.workers[worker].is_lossy:
        _set_duplicates(table, key, worker, _count_duplicates(table, key, worker) + 1)


cdef inline bint _remove_duplicate(
    BlockTable *table, const Space *space, uint32_t entry, int32_t plane, int32_t worker
) noexcept nogil:
    """Count one duplicate less; return False if there is none."""
    cdef uint64_t key = _duplicate_key(table, space, entry, plane, worker)
    cdef uint64_t num = 0 if table.workers[worker].is_lossy else _count_duplicates(table, key, worker)
    if num:
        _set_duplicates(table, key, worker, num - 1)
    return num > 0


cdef inline void _drop_duplicates(
    BlockTable *table, const Space *space, uint32_t entry, int32_t plane, int32_t worker
) noexcept nogil:
    """Forget the duplicates of a block."""
    _set_duplicates(table, _duplicate_key(table, space, entry, plane, worker), worker, 0)


cdef inline bint _set_bit(BlockTable *table, const Space *space, uint32_t entry, int32_t plane, int32_t worker) noexcept nogil:
    """Set the bit of a worker; return False if it was set already."""
    cdef uint64_t *bits = _bits_at(table, space, entry, plane, worker)
    cdef uint64_t bit = <uint64_t>1 << (worker % WORD)
    assert 0 < entry < space.num_entries and space.stride == 1 + table.media.num * table.num_words
    assert 0 <= plane < table.media.num and 0 <= worker < table.num_words * WORD
    if rare(bits[0] & bit):
        return False
    _record_gain(table, space, entry, worker)
    table.workers[worker].num_bits += 1
    bits[0] |= bit
    return True


cdef inline bint _has_bit(
    const BlockTable *table, const Space *space, uint32_t entry, int32_t plane, int32_t worker
) noexcept nogil:
    return _bits_at(table, space, entry, plane, worker)[0] >> (worker % WORD) & 1


cdef inline void _clear_bit(BlockTable *table, Space *space, uint32_t entry, int32_t plane, int32_t worker) noexcept nogil:
    """Clear the bit of a worker, forget its duplicates of the block, and free the entry if no bits are left."""
    cdef uint64_t *bits = _bits_at(table, space, entry, plane, worker)
    cdef uint64_t bit = <uint64_t>1 << (worker % WORD)
    assert 0 < entry < space.num_entries and space.stride == 1 + table.media.num * table.num_words
    assert 0 <= plane < table.media.num and 0 <= worker < table.num_words * WORD
    if bits[0] & bit:
        if rare(table.workers[worker].num_duplicates != 0):
            _drop_duplicates(table, space, entry, plane, worker)
        table.workers[worker].num_bits -= 1
        assert table.workers[worker].num_bits >= table.workers[worker].num_duplicates
        bits[0] &= ~bit
        if is_free_entry(entry_at(space, entry), space.stride):
            drop_entry(space, entry)


cdef inline uint64_t count_copies(
    const BlockTable *table, const Space *space, uint64_t block_hash, int32_t plane, int32_t worker
) noexcept nogil:
    """Count the copies of a block that a worker has."""
    cdef uint32_t entry
    if worker >= table.num_workers or plane >= table.media.num:
        return 0
    entry = find_entry(space, block_hash, 0)
    if not entry or not _has_bit(table, space, entry, plane, worker):
        return 0
    return 1 + _count_duplicates(table, _duplicate_key(table, space, entry, plane, worker), worker)


cdef inline uint32_t set_copies(
    BlockTable *table, Space *space, uint64_t block_hash, uint32_t guess, int32_t plane, int32_t worker, uint64_t num
) noexcept nogil:
    """Set the number of a worker's copies of a block; return the block's entry, or 0 without copies. There is room."""
    cdef uint32_t entry = ensure_entry(space, block_hash, guess) if num else find_entry(space, block_hash, 0)
    assert entry and (num or _has_bit(table, space, entry, plane, worker))
    if num == 0:
        _clear_bit(table, space, entry, plane, worker)
        return 0
    _set_bit(table, space, entry, plane, worker)
    _set_duplicates(table, _duplicate_key(table, space, entry, plane, worker), worker, num - 1)
    return entry


cdef inline void store_blocks(
    BlockTable *table, Space *space, const uint64_t *hashes, Py_ssize_t num, uint32_t last, int32_t plane, int32_t worker
) noexcept nogil:
    """Record consecutive blocks of a worker, or duplicates of them. `last` is the entry of the block before; 0: unknown."""
    cdef Py_ssize_t i
    for i in range(num):
        if i + FETCH_AHEAD < num:
            fetch_slot(space, hashes[i + FETCH_AHEAD])
        last = ensure_entry(space, hashes[i], last + 1 if last else 0)
        if rare(not _set_bit(table, space, last, plane, worker)):
            _add_duplicate(table, space, last, plane, worker)


cdef inline void remove_blocks(
    BlockTable *table, Space *space, const uint64_t *hashes, Py_ssize_t num, int32_t plane, int32_t worker
) noexcept nogil:
    """Remove one copy of each block from a worker. Prompts are mostly removed from their end: guess the entry before."""
    cdef Py_ssize_t i
    cdef uint32_t entry, last = 0
    for i in range(num):
        if i + FETCH_AHEAD < num:
            fetch_slot(space, hashes[i + FETCH_AHEAD])
        entry = find_entry(space, hashes[i], last - 1 if last else 0)
        if entry:
            if not rare(table.workers[worker].num_duplicates and _remove_duplicate(table, space, entry, plane, worker)):
                _clear_bit(table, space, entry, plane, worker)
            last = entry


cdef inline void _clear_bits(BlockTable *table, Space *space, uint32_t entry, int32_t worker) noexcept nogil:
    """Clear the bits of a worker in all media."""
    cdef int32_t plane
    for plane in range(table.media.num):
        _clear_bit(table, space, entry, plane, worker)


cdef inline void remove_worker_blocks(BlockTable *table, int32_t worker) noexcept nogil:
    """Remove all blocks of a worker. O(its blocks) if `gained` lists them all; otherwise O(blocks of all workers), at most a
    constant for each block that the worker gained since it last had none.
    """
    cdef Space *space
    cdef GainedBlock block
    cdef uint32_t entry
    table.workers[worker].is_lossy = False
    forget_left_out(&table.workers[worker])
    if table.workers[worker].num_bits == 0:
        return
    if not table.workers[worker].is_incomplete:
        for block in table.workers[worker].gained[:table.workers[worker].num_gained]:
            _clear_bits(table, &table.spaces[block.group], block.entry, worker)
        assert table.workers[worker].num_bits == table.workers[worker].num_duplicates == 0
        return
    for space in table.spaces[:table.num_spaces]:
        for entry in range(1, space.num_entries):
            if table.workers[worker].num_bits == 0:
                return
            _clear_bits(table, space, entry, worker)


cdef inline void free_left_out(DuplicateTable *left_out) noexcept nogil:
    if left_out != NULL:
        raw_free(left_out.slots)
    raw_free(left_out)


cdef inline void forget_left_out(Worker *worker) noexcept nogil:
    """Forget the blocks of a worker that were left out."""
    free_left_out(worker.left_out)
    worker.left_out = NULL


cdef inline void trim_table(BlockTable *table) noexcept nogil:
    """Free the memory that duplicates do not need."""
    cdef Py_ssize_t g, num_kept = 0
    for g in range(table.num_spaces):
        num_kept += table.spaces[g].num_blocks // BLOCKS_PER_DUPLICATE
    trim_duplicates(&table.duplicates, num_kept)


cdef inline void _set_strides(BlockTable *table) noexcept nogil:
    """Set the multiplier and stride of all spaces. An entry has its hash, and a word for each medium and 64 workers."""
    cdef Py_ssize_t g
    for g in range(MAX_EVENT_GROUPS):
        table.spaces[g].stride, table.spaces[g].multiplier = 1 + table.media.num * table.num_words, table.multiplier


cdef inline bint reshape(BlockTable *table, const Media *media, int32_t num_words) noexcept nogil:
    """Widen all entries for more media or workers; return False, with nothing changed, if memory is short. O(blocks)."""
    cdef BlockTable shaped = table[0]
    cdef Worker *workers = <Worker *>raw_calloc(num_words * WORD, sizeof(Worker))
    cdef bint has_room = workers != NULL
    cdef Py_ssize_t g
    assert table.media.num <= media.num <= MAX_MEDIA and table.num_words <= num_words
    shaped.media, shaped.num_words = media[0], num_words
    _set_strides(&shaped)
    for g in range(table.num_spaces):
        if table.spaces[g].num_entries:
            shaped.spaces[g].entries = <uint64_t *>raw_calloc(
                table.spaces[g].num_entries, shaped.spaces[g].stride * sizeof(uint64_t)
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
    """Copy the entries of a space into a space with wider entries."""
    cdef const uint64_t *entry
    cdef uint64_t *copied
    cdef uint32_t i
    cdef int32_t plane
    for i in range(space.num_entries):
        entry, copied = entry_at(space, i), entry_at(into, i)
        copied[0] = entry[0]
        for plane in range(table.media.num):
            memcpy(
                copied + 1 + plane * shaped.num_words,
                entry + 1 + plane * table.num_words,
                table.num_words * sizeof(uint64_t),
            )


cdef inline int32_t find_medium(const Media *media, Text name) noexcept nogil:
    """Return the number of a medium; `media.num` if it is new. None means the first one, the GPU."""
    cdef int32_t i
    if name.at == NULL:
        return 0
    for i in range(media.num):
        if media.items[i].size == name.size and memcmp(media.items[i].name, name.at, name.size) == 0:
            return i
    return media.num


cdef inline bint add_medium(Media *media, Text name) noexcept nogil:
    """Add a new medium; return False if there are too many, or its name is too long."""
    if media.num == MAX_MEDIA or name.size > MAX_MEDIUM_SIZE:
        return False
    media.items[media.num].size = name.size
    memcpy(media.items[media.num].name, name.at, name.size)
    media.num += 1
    return True


cdef inline bint start_table(BlockTable *table, int32_t page_size, uint64_t multiplier) noexcept nogil:
    """Initialize a zeroed table, with the GPU as its only medium; return False if memory is short."""
    assert multiplier & 1
    table.multiplier = table.duplicates.multiplier = multiplier
    table.page_size, table.media.num, table.num_words = page_size, 1, 1
    _set_strides(table)
    memcpy(table.media.items[0].name, b"GPU", 3)
    table.media.items[0].size = 3
    table.workers = <Worker *>raw_calloc(WORD, sizeof(Worker))
    return table.workers != NULL


cdef inline void take_blocks_out(BlockTable *table, BlockTable *taken) noexcept nogil:
    """Move all blocks and groups to `taken`, which the caller frees. Workers keep their numbers."""
    cdef int32_t worker
    cdef int64_t num_skipped
    taken[0] = table[0]
    taken.workers = NULL
    for worker in range(table.num_words * WORD):
        raw_free(table.workers[worker].gained)
        forget_left_out(&table.workers[worker])
        num_skipped = table.workers[worker].num_skipped
        memset(&table.workers[worker], 0, sizeof(Worker))
        table.workers[worker].num_skipped = num_skipped
    memset(table.spaces, 0, sizeof(table.spaces))
    _set_strides(table)
    table.num_spaces = 0
    table.duplicates.slots = NULL
    table.duplicates.num_slots = table.duplicates.num = 0


cdef inline void free_table(BlockTable *table) noexcept nogil:
    cdef Py_ssize_t g
    for g in range(MAX_EVENT_GROUPS):
        free_space(&table.spaces[g])
    for g in range(table.num_words * WORD if table.workers != NULL else 0):
        raw_free(table.workers[g].gained)
        forget_left_out(&table.workers[g])
    raw_free(table.workers)
    raw_free(table.duplicates.slots)


cdef inline Py_ssize_t copy_hashes(
    const BlockTable *table, Py_ssize_t group, int32_t plane, int32_t worker, uint64_t *hashes
) noexcept nogil:
    """Copy the hashes of a worker's blocks in a medium, and return their number. The table has the medium and the worker."""
    cdef const Space *space = &table.spaces[group]
    cdef Py_ssize_t num = 0
    cdef uint32_t entry
    for entry in range(1, space.num_entries):
        if _has_bit(table, space, entry, plane, worker):
            hashes[num] = entry_at(space, entry)[0]
            num += 1
    return num


cdef inline Py_ssize_t table_bytes(const BlockTable *table) noexcept nogil:
    """Return the bytes of memory of a table."""
    cdef Py_ssize_t i, num_bytes = sizeof(BlockTable)
    for i in range(table.num_spaces):
        num_bytes += table.spaces[i].num_entries * table.spaces[i].stride * <Py_ssize_t>sizeof(uint64_t)
        num_bytes += table.spaces[i].num_slots * <Py_ssize_t>sizeof(BlockSlot)
    for i in range(table.num_words * WORD):
        num_bytes += sizeof(Worker) + table.workers[i].capacity * <Py_ssize_t>sizeof(GainedBlock)
        if table.workers[i].left_out != NULL:
            num_bytes += sizeof(DuplicateTable) + table.workers[i].left_out.num_slots * <Py_ssize_t>sizeof(Duplicate)
    return num_bytes + table.duplicates.num_slots * <Py_ssize_t>sizeof(Duplicate)


cdef inline const char *_find_duplicate_fault(const BlockTable *table, int64_t *num_duplicates) noexcept nogil:
    """Return what is wrong in the duplicates, or NULL. `num_duplicates` has room for a number per worker."""
    cdef Duplicate duplicate
    cdef const Space *space
    cdef Py_ssize_t i, num = 0
    cdef uint32_t entry
    cdef int32_t plane, worker
    memset(num_duplicates, 0, table.num_words * WORD * sizeof(int64_t))
    for i in range(table.duplicates.num_slots):
        duplicate = table.duplicates.slots[i]
        if duplicate.key == 0:
            continue
        space = &table.spaces[duplicate.key >> 24 & 63]
        entry, worker = <uint32_t>(duplicate.key >> 32), <int32_t>(duplicate.key & 65535)
        plane = <int32_t>(duplicate.key >> 16 & 255)
        num += 1
        num_duplicates[worker] += 1
        if duplicate.num == 0 or find_duplicate(&table.duplicates, duplicate.key) != i:
            return "copies of a block are not found"
        if entry >= space.num_entries or not _has_bit(table, space, entry, plane, worker):
            return "a block that a worker has not has copies"
    if num != table.duplicates.num:
        return "copies are miscounted"
    for i in range(table.num_words * WORD):
        if num_duplicates[i] != table.workers[i].num_duplicates:
            return "the copies of a worker are miscounted"
    return NULL


cdef inline const char *find_fault(const BlockTable *table) noexcept nogil:
    """Return what is wrong in a table, or NULL."""
    cdef const char *fault = NULL
    cdef Py_ssize_t i
    cdef int64_t *counts = <int64_t *>raw_calloc(table.num_words * WORD, sizeof(int64_t))
    if counts == NULL:
        return NULL
    for i in range(MAX_EVENT_GROUPS):
        if fault == NULL:
            fault = find_space_fault(&table.spaces[i], table.num_words, counts)
    for i in range(table.num_words * WORD):
        if counts[i] != table.workers[i].num_bits:
            fault = "the blocks of a worker are miscounted"
    if fault == NULL:
        fault = _find_duplicate_fault(table, counts)
    raw_free(counts)
    return fault
