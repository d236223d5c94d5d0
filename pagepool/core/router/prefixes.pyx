"""The index of a router: which workers have which prefixes cached."""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

from pagepool.core.base.limits cimport MAX_TOKENS
from pagepool.core.base.locks cimport INDEX_LOCK, LockNode, delist_lock, enlist_lock
from pagepool.core.base.platform cimport go_on, let_others_run, rare, raw_calloc, raw_free
from pagepool.core.holding.rules cimport Rules, count_run_pages
from pagepool.core.router.event_batch cimport (
    MAX_EVENT_GROUPS, NO_MEMORY, STORED, Event, EventBatch, Reader, Spec, Text, free_batch, read_batch, read_seconds,
)
from pagepool.core.values.arguments cimport array_of, as_list, index_of, size_of
from pagepool.core.values.chain cimport HashChain

import os

import numpy as np

from pagepool.errors import ArgumentError, ArgumentTypeError, EventBatchError, IntegrityError, shown

cdef enum:
    NUM_LOCKS = 8             # readers that look up side by side
    MAX_WORKERS = 1 << 16
    MAX_BLOCKS = 1 << 30      # of a group
    BYTES_OF_A_PAGE = 64      # of a payload, as many as take the time of a page
    HASHES_OF_A_PAGE = 2      # looked up for 64 workers: two threads gain from 2,048 hashes on

cdef extern from *:
    """
    static int pagepool_num_readers;
    /* The lock of a thread, the same at each call. */
    static inline int pagepool_lock_of_thread(int num_locks) {
        static __thread int number;
        if (!number) number = __atomic_add_fetch(&pagepool_num_readers, 1, __ATOMIC_RELAXED);
        return (unsigned)number % (unsigned)num_locks;
    }
    """
    int lock_of_thread "pagepool_lock_of_thread" (int num_locks) noexcept
    int ctz "__builtin_ctzll" (uint64_t word) noexcept nogil


@cython.final
cdef class ReaderLock:
    """One of several locks of an index: a reader takes one, a writer takes all in their order."""

    cdef cython.pymutex lock
    cdef LockNode lock_node

    def __cinit__(self):
        enlist_lock(&self.lock_node, &self.lock, INDEX_LOCK)

    def __dealloc__(self):
        delist_lock(&self.lock_node)


cdef struct SearchedGroup:    # of a look-up, which all of its workers share
    Rules rules
    bint is_state
    Py_ssize_t stride         # hashes of a page
    Py_ssize_t num_pages      # that hashes were given for
    int32_t *num_leading      # [workers] pages that a worker has from the first on; NULL with a window or a state
    uint64_t *bits            # [num_pages * words] workers that have a page; NULL without


cdef struct Search:
    const uint64_t *hashes
    Py_ssize_t num_hashes
    uint32_t planes           # a bit for each medium that counts


cdef inline uint32_t find_workers(
    const BlockTable *table, const Space *space, uint64_t block_hash, uint32_t guess, uint32_t planes, uint64_t *holders,
    int32_t num_planes, int32_t num_words,
) noexcept nogil:
    """Find the workers that have a block in one of the media, a bit for each. Returns its entry, which may be `guess`, or 0.
    The numbers are those of the table, and known to the compiler where there are few.
    """
    cdef const uint64_t *bits = space.entries + guess * <size_t>(1 + num_planes * num_words)
    cdef uint64_t any_held = 0
    cdef int32_t plane, word
    cdef uint32_t entry = guess if guess and guess < space.num_entries and bits[0] == block_hash else 0
    if not entry:
        entry = find_entry(table, space, block_hash, 0)
        bits = space.entries + entry * <size_t>(1 + num_planes * num_words)
    for word in range(num_words):
        holders[word] = 0
        for plane in range(num_planes if entry else 0):
            holders[word] |= bits[1 + plane * num_words + word] if planes >> plane & 1 else 0
        any_held |= holders[word]
    if rare(not any_held and entry and entry == guess and is_free_entry(bits, 1 + num_planes * num_words)):
        # the links of a free entry look like the hash
        return find_workers_again(table, space, block_hash, planes, holders)
    return entry


cdef uint32_t find_workers_again(
    const BlockTable *table, const Space *space, uint64_t block_hash, uint32_t planes, uint64_t *holders
) noexcept nogil:
    return find_workers(table, space, block_hash, 0, planes, holders, table.num_planes, table.num_words)


cdef inline void set_counts(int32_t *counts, uint64_t workers, int32_t first, int32_t count) noexcept nogil:
    """Set the count of workers, a bit for each from `first` on."""
    while workers:
        counts[first + ctz(workers)] = count
        workers &= workers - 1


cdef inline void count_leading_of(
    const BlockTable *table, const Space *space, const Search *search, Py_ssize_t stride, int32_t *counts, uint64_t *words,
    int32_t num_planes, int32_t num_words,
) noexcept nogil:
    """`count_leading` for numbers that the compiler may know."""
    cdef uint64_t *holders = words
    cdef uint64_t *still = words + num_words
    cdef uint64_t left
    cdef Py_ssize_t page, num_pages = search.num_hashes // stride
    cdef int32_t word
    cdef uint32_t entry = 0
    memset(counts, 0, num_words * WORD * sizeof(int32_t))
    memset(holders, 0xff, num_words * sizeof(uint64_t))
    for page in range(num_pages):
        entry = find_workers(
            table, space, search.hashes[(page + 1) * stride - 1], entry + 1 if entry else 0, search.planes, still,
            num_planes, num_words,
        )
        left = 0
        for word in range(num_words):
            still[word] &= holders[word]
            if still[word] != holders[word]:
                set_counts(counts, holders[word] & ~still[word], word * WORD, <int32_t>page)
                holders[word] = still[word]
            left |= still[word]
        if left == 0:
            return
    for word in range(num_words):
        set_counts(counts, holders[word], word * WORD, <int32_t>num_pages)


cdef void count_leading(
    const BlockTable *table, const Space *space, const Search *search, Py_ssize_t stride, int32_t *counts, uint64_t *words
) noexcept nogil:
    """Count for each worker the pages that it has from the first one on. `words` are twice those of a page."""
    if table.num_planes == 1 and table.num_words == 1:
        count_leading_of(table, space, search, stride, counts, words, 1, 1)
    else:
        count_leading_of(table, space, search, stride, counts, words, table.num_planes, table.num_words)


cdef bint search_pages(const BlockTable *table, const Space *space, const Search *search, SearchedGroup *group) noexcept nogil:
    """List the workers that have each page; False where memory is short."""
    cdef Py_ssize_t page
    cdef uint32_t entry = 0
    group.bits = <uint64_t *>raw_calloc(max(<Py_ssize_t>1, group.num_pages * table.num_words), sizeof(uint64_t))
    if group.bits == NULL:
        return False
    for page in range(group.num_pages):
        entry = find_workers(
            table, space, search.hashes[(page + 1) * group.stride - 1], entry + 1 if entry else 0, search.planes,
            group.bits + page * table.num_words, table.num_planes, table.num_words,
        )
    return True


cdef inline bint has_page(const SearchedGroup *group, int32_t num_words, Py_ssize_t page, int32_t worker) noexcept nogil:
    return group.bits[page * num_words + worker // WORD] >> (worker % WORD) & 1


cdef Py_ssize_t find_last_run(
    const SearchedGroup *group, int32_t num_words, int32_t worker, Py_ssize_t stop, Py_ssize_t need
) noexcept nogil:
    """The end of the last `need` consecutive pages before `stop` that a worker has; if there are none, of its leading pages."""
    cdef Py_ssize_t page, num = 0
    for page in range(stop - 1, -1, -1):
        num = num + 1 if has_page(group, num_words, page, worker) else 0
        if num == need:
            return page + need
    return num


cdef Py_ssize_t shorten_prefix(
    const SearchedGroup *group, int32_t num_words, int32_t worker, Py_ssize_t num_hashes
) noexcept nogil:
    """The hashes of the longest prefix, at most `num_hashes`, that a group can resume at."""
    cdef Py_ssize_t need, num_pages = num_hashes // group.stride
    if group.num_leading != NULL:
        return min(num_pages, <Py_ssize_t>group.num_leading[worker]) * group.stride
    need = 1 if group.is_state else count_run_pages(&group.rules, False)
    return find_last_run(group, num_words, worker, num_pages, need) * group.stride


cdef Py_ssize_t find_longest_prefix(
    const SearchedGroup *groups, Py_ssize_t num, int32_t num_words, int32_t worker, Py_ssize_t num_hashes, Py_ssize_t multiple
) noexcept nogil:
    """The hashes of the longest prefix that all groups can resume at: each shortens it in turn, until none does any more."""
    cdef Py_ssize_t g, previous = -1
    while num_hashes != previous:
        previous = num_hashes
        for g in range(num):
            num_hashes = shorten_prefix(&groups[g], num_words, worker, num_hashes)
            num_hashes -= num_hashes % multiple
    return num_hashes


cdef bint is_leading(const Space *space) noexcept nogil:
    """Whether any number of leading pages is a hit."""
    return space.spec.window == 0 and not space.spec.is_state


cdef bint search_group(
    const BlockTable *table, const Space *space, const Search *search, Py_ssize_t page_size, uint64_t *words,
    SearchedGroup *group,
) noexcept nogil:
    """Look all pages of a group up; False where memory is short."""
    group.stride = space.spec.block_size // page_size
    group.num_pages = search.num_hashes // group.stride
    group.is_state = space.spec.is_state
    group.rules.page_size, group.rules.window = space.spec.block_size, space.spec.window
    if not is_leading(space):
        return search_pages(table, space, search, group)
    group.num_leading = <int32_t *>raw_calloc(table.num_words * WORD, sizeof(int32_t))
    if group.num_leading != NULL:
        count_leading(table, space, search, group.stride, group.num_leading, words)
    return group.num_leading != NULL


cdef Py_ssize_t common_stride(const SearchedGroup *groups, Py_ssize_t num, Py_ssize_t highest) noexcept nogil:
    """The least number of hashes that is a multiple of the pages of all groups, or one above `highest`."""
    cdef Py_ssize_t g, rest, divisor, multiple = 1
    for g in range(num):
        divisor, rest = multiple, groups[g].stride
        while rest:
            divisor, rest = rest, divisor % rest
        multiple = min(multiple // divisor * groups[g].stride, highest + 1)
    return multiple


cdef bint search_prefix(
    const BlockTable *table, const Search *search, Py_ssize_t page_size, uint64_t *words, int32_t *counts
) noexcept nogil:
    """Find the hashes of the prefix that each worker has in all groups; False where memory is short."""
    cdef SearchedGroup[MAX_EVENT_GROUPS] groups
    cdef Py_ssize_t g, multiple, num = 0
    cdef int32_t worker
    cdef bint has_room = True
    cdef Py_ssize_t num_groups = table.num_groups if table.num_groups else table.num_spaces
    if num_groups == 1 and is_leading(&table.spaces[0]) and table.spaces[0].spec.block_size == page_size:
        count_leading(table, &table.spaces[0], search, 1, counts, words)
        return True
    for g in range(num_groups):
        if not table.spaces[g].is_known:  # what a worker has in it is unknown
            return True
    memset(&groups, 0, sizeof(groups))
    for g in range(num_groups):
        if has_room:
            has_room = search_group(table, &table.spaces[g], search, page_size, words, &groups[num])
            num += 1
    multiple = common_stride(groups, num, search.num_hashes)
    for worker in range(table.num_workers if has_room and num else 0):
        counts[worker] = <int32_t>find_longest_prefix(groups, num, table.num_words, worker, search.num_hashes, multiple)
    for g in range(num):
        raw_free(groups[g].num_leading)
        raw_free(groups[g].bits)
    return has_room


cdef inline int32_t find_medium(const Medium *media, int32_t num, Text name) noexcept nogil:
    """The place of a medium, `num` if it is new. None is the first one, the GPU."""
    cdef int32_t i
    if name.at == NULL:
        return 0
    for i in range(num):
        if media[i].size == name.size and memcmp(media[i].name, name.at, name.size) == 0:
            return i
    return num


cdef const char *settle_groups(
    const BlockTable *table, EventBatch *batch, Py_ssize_t page_size, int32_t num_groups
) noexcept nogil:
    """The reason why the groups of a batch contradict one another, those before or the index; NULL: they do not. `num_groups`
    was given, or is 0; the batch gets the number that holds behind it. Both may change while nobody has blocks.
    """
    cdef Spec[MAX_EVENT_GROUPS] specs
    cdef const Event *event
    cdef Py_ssize_t i
    cdef int32_t highest = -1
    memset(&specs, 0, sizeof(specs))
    batch.num_groups = num_groups
    for i in range(table.num_spaces):
        if table.spaces[i].num_blocks:
            specs[i] = table.spaces[i].spec
            batch.num_groups = table.num_groups
    for i in range(batch.num_events):
        event = &batch.events[i]
        if event.kind != STORED:
            continue
        if event.num_groups and batch.num_groups and event.num_groups != batch.num_groups:
            return "num_groups differs from that which the index has"
        batch.num_groups = max(batch.num_groups, event.num_groups)
        if batch.num_groups and event.group >= batch.num_groups:
            return "group_idx is not below num_groups"
        if event.spec.block_size % page_size:
            return "block_size is not a multiple of the page size of the index"
        if specs[event.group].block_size == 0:
            specs[event.group] = event.spec
        if memcmp(&specs[event.group], &event.spec, sizeof(Spec)):
            return "block_size, kind or window differ from those that the group has"
        highest = max(highest, event.group)
    if batch.num_groups == 0 and highest < table.num_groups:
        batch.num_groups = table.num_groups
    return NULL


cdef struct Change:           # what a batch does to a block
    uint64_t block_hash
    int32_t group
    int32_t plane
    uint64_t num_before       # copies that the worker has
    uint64_t num

cdef struct NetChanges:       # what a batch changes, or NULL: it was not worked out
    Change *items             # [num] in the order of the batch
    Py_ssize_t num
    uint32_t *slots           # [num_slots] one more than the place of a block in `items`; 0: empty
    Py_ssize_t num_slots
    uint64_t multiplier


cdef Py_ssize_t count_unknown(
    const BlockTable *table, const EventBatch *batch, Py_ssize_t group, const NetChanges *net
) noexcept nogil:
    """Count the stored hashes of a group that have no entry yet, repeated ones again unless net changes are known."""
    cdef const Event *event
    cdef Py_ssize_t i, j, num = 0
    cdef uint32_t entry
    for i in range(net.num):
        if net.items[i].group == group and net.items[i].num:
            num += find_entry(table, &table.spaces[group], net.items[i].block_hash, 0) == 0
    if net.items != NULL:
        return num
    for i in range(batch.num_void, batch.num_events):
        event = &batch.events[i]
        if event.kind == STORED and event.group == group:
            entry = 0
            for j in range(event.first, event.first + event.num):
                entry = find_entry(table, &table.spaces[group], batch.hashes[j], entry + 1 if entry else 0)
                num += entry == 0
    return num


cdef struct Media:
    Medium[MAX_MEDIA] items
    int32_t num


cdef bint settle_media(const BlockTable *table, EventBatch *batch, Media *media) noexcept nogil:
    """Find the media of events, which are those of the index and those that the batch adds; False if they are too many, or a
    name is too long. The payload is not read later, in case another thread changes it.
    """
    cdef Event *event
    cdef Py_ssize_t i
    memcpy(media.items, table.media, sizeof(table.media))
    media.num = table.num_planes
    for i in range(batch.num_void, batch.num_events):
        event = &batch.events[i]
        event.plane = find_medium(media.items, media.num, event.medium)
        if event.plane < media.num:
            continue
        if event.kind != STORED:
            event.plane = -1
            continue
        if media.num == MAX_MEDIA or event.medium.size > MAX_MEDIUM_SIZE:
            return False
        media.items[media.num].size = event.medium.size
        memcpy(media.items[media.num].name, event.medium.at, event.medium.size)
        media.num += 1
    return True


cdef const char *reserve_changes(
    BlockTable *table, const EventBatch *batch, const Media *media, int32_t worker, const NetChanges *net
) noexcept nogil:
    """Reserve the memory of a batch, or of its net changes; the reason why there is none, or NULL."""
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
            num_stored[g] = count_unknown(table, batch, g, net)
        if space.num_blocks + num_stored[g] > MAX_BLOCKS:
            return "more blocks than a group may have"
    if media.num > table.num_planes or num_words > table.num_words:
        if not reshape(table, media.num, num_words):
            return NO_MEMORY
        memcpy(table.media, media.items, sizeof(table.media))
    for g in range(MAX_EVENT_GROUPS):
        if num_stored[g] and not reserve_blocks(table, &table.spaces[g], num_stored[g]):
            return NO_MEMORY
    return NULL if reserve_duplicates(table, num_copies) else NO_MEMORY


cdef inline Py_ssize_t find_change(const NetChanges *net, const Event *event, uint64_t block_hash) noexcept nogil:
    """The slot of a block among the net changes, or the empty one that ends the search."""
    cdef uint64_t tag = (block_hash ^ <uint64_t>event.group << 8 ^ <uint64_t>event.plane) * net.multiplier >> 32
    cdef Py_ssize_t slot = <Py_ssize_t>(tag * <uint64_t>net.num_slots >> 32)
    cdef const Change *found
    while net.slots[slot]:
        found = &net.items[net.slots[slot] - 1]
        if found.block_hash == block_hash and found.group == event.group and found.plane == event.plane:
            break
        slot = 0 if slot + 1 == net.num_slots else slot + 1
    return slot


cdef uint64_t count_copies(const BlockTable *table, const Event *event, uint64_t block_hash, int32_t worker) noexcept nogil:
    """The copies of a block that a worker has."""
    cdef const Space *space = &table.spaces[event.group]
    cdef uint32_t entry
    if worker >= table.num_workers or event.plane >= table.num_planes:
        return 0
    entry = find_entry(table, space, block_hash, 0)
    if not entry or not has_bit(table, space, entry, event.plane, worker):
        return 0
    return 1 + count_duplicates(table, duplicate_key(table, space, entry, event.plane, worker), worker)


cdef bint compute_changes(const BlockTable *table, const EventBatch *batch, int32_t worker, NetChanges *net) noexcept nogil:
    """List the blocks that a batch changes, with the copies of each before and after; False where memory is short."""
    cdef bint is_lossy = worker < table.num_workers and table.workers[worker].is_lossy and not batch.is_cleared
    cdef const Event *event
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
        for j in range(event.first, event.first + event.num if event.plane >= 0 else event.first):
            slot = find_change(net, event, batch.hashes[j])
            if net.slots[slot] == 0:
                change = &net.items[net.num]
                change.block_hash, change.group, change.plane = batch.hashes[j], event.group, event.plane
                change.num = 0 if batch.is_cleared else count_copies(table, event, batch.hashes[j], worker)
                change.num_before = change.num
                net.num += 1
                net.slots[slot] = <uint32_t>net.num
            change = &net.items[net.slots[slot] - 1]
            if event.kind == STORED:
                change.num = 1 if is_lossy else change.num + 1
            else:
                change.num = 0 if is_lossy or change.num == 0 else change.num - 1
    return True


cdef int64_t count_gained(const NetChanges *net) noexcept nogil:
    """The blocks that a worker has more behind the changes."""
    cdef int64_t num = 0
    cdef Py_ssize_t i
    for i in range(net.num):
        num += (net.items[i].num > 0) - <int64_t>(net.items[i].num_before > 0)
    return num


cdef void apply_change(BlockTable *table, const Change *item, int32_t worker) noexcept nogil:
    """Apply the net change of a block that a worker has."""
    cdef Space *space = &table.spaces[item.group]
    cdef uint32_t entry = find_entry(table, space, item.block_hash, 0)
    if item.num:
        set_duplicates(table, duplicate_key(table, space, entry, item.plane, worker), worker, item.num - 1)
    else:
        clear_bit(table, space, entry, item.plane, worker)


cdef void apply_changes(BlockTable *table, const EventBatch *batch, int32_t worker, const NetChanges *net) noexcept nogil:
    """Apply a batch for which there is room, or its net changes alone."""
    cdef const Event *event
    cdef Space *space
    cdef Py_ssize_t i
    cdef uint32_t parent
    if batch.is_cleared:
        remove_worker_blocks(table, worker)
    table.num_groups = batch.num_groups
    for i in range(net.num):
        if net.items[i].num_before:
            apply_change(table, &net.items[i], worker)
    for i in range(batch.num_events):
        event = &batch.events[i]
        space = &table.spaces[event.group]
        if event.kind == STORED:
            space.spec, space.is_known = event.spec, True
            table.num_spaces = max(table.num_spaces, event.group + 1)
        if i < batch.num_void:
            continue
        if event.kind == STORED:
            parent = find_entry(table, space, event.parent, 0) if event.has_parent else 0
            if net.items == NULL:
                store_blocks(table, space, batch.hashes + event.first, event.num, parent, event.plane, worker)
            else:
                store_changes(table, space, batch, event, parent, worker, net)
        elif net.items == NULL and event.plane >= 0 and space.num_blocks:
            remove_blocks(table, space, batch.hashes + event.first, event.num, event.plane, worker)


cdef void store_changes(
    BlockTable *table, Space *space, const EventBatch *batch, const Event *event, uint32_t last, int32_t worker,
    const NetChanges *net,
) noexcept nogil:
    """Note the blocks of an event that a worker has behind the batch, and their copies."""
    cdef const Change *found
    cdef Py_ssize_t j
    for j in range(event.first, event.first + event.num):
        found = &net.items[net.slots[find_change(net, event, batch.hashes[j])] - 1]
        if found.num:
            last = ensure_entry(table, space, found.block_hash, last + 1 if last else 0)
            set_bit(table, space, last, event.plane, worker)
            set_duplicates(table, duplicate_key(table, space, last, event.plane, worker), worker, found.num - 1)
        else:
            last = 0


cdef const char *apply_events(BlockTable *table, EventBatch *batch, int32_t worker, int64_t max_blocks) noexcept nogil:
    """Apply a batch, if its groups agree with the index. Return NULL, or the reason why it is refused.

    Only a batch after which the worker may have too many blocks has its net changes worked out.
    """
    cdef const char *error = NULL
    cdef NetChanges net
    cdef Media media
    cdef int64_t num_held = table.workers[worker].num_bits if worker < table.num_workers and not batch.is_cleared else 0
    memset(&net, 0, sizeof(net))
    if not settle_media(table, batch, &media):
        return "too many media, or a long name of one"
    if num_held + batch.num_stored > max_blocks:
        if not compute_changes(table, batch, worker, &net):
            error = NO_MEMORY
        elif num_held + count_gained(&net) > max_blocks:
            error = "more blocks than a worker may have"
    if error == NULL:
        error = reserve_changes(table, batch, &media, worker, &net)
    if error == NULL:
        apply_changes(table, batch, worker, &net)
        table.num_workers = max(table.num_workers, worker + 1)
        trim_duplicates(table)
    raw_free(net.items)
    raw_free(net.slots)
    return error


cdef int view_payload(object payload, Py_buffer *view) except -1:
    try:
        PyObject_GetBuffer(payload, view, PyBUF_SIMPLE)
    except (TypeError, ValueError, BufferError):
        raise ArgumentTypeError(f"payload: got {type(payload).__name__}, allowed: bytes") from None
    return 0


def time_of_batch(payload) -> float:
    """Return the time of an encoded batch in seconds since 1970; 0 if it has none. O(1)."""
    cdef Py_buffer view
    cdef Reader reader
    view_payload(payload, &view)
    reader = Reader(<const uint8_t *>view.buf, <const uint8_t *>view.buf + view.len, NULL)
    seconds = read_seconds(&reader)
    PyBuffer_Release(&view)
    return seconds


cdef class PrefixTable:
    """Which workers have which prefixes cached: the compiled part of `pagepool.router.PrefixIndex`, which describes it."""

    cdef BlockTable table
    cdef readonly Py_ssize_t page_size
    cdef readonly Py_ssize_t max_worker_blocks
    cdef int32_t num_groups   # that was given; 0: none
    cdef tuple locks

    def __cinit__(self, page_size, *, max_worker_blocks=1 << 24, num_groups=None, **_):
        self.page_size = size_of(page_size, "page_size", 1, MAX_TOKENS)
        self.max_worker_blocks = size_of(max_worker_blocks, "max_worker_blocks", 1, MAX_BLOCKS)
        self.num_groups = 0 if num_groups is None else <int32_t>size_of(num_groups, "num_groups", 1, MAX_EVENT_GROUPS)
        self.table.num_groups = self.num_groups
        self.locks = tuple([ReaderLock() for _ in range(NUM_LOCKS)])
        self.table.multiplier = <uint64_t>int.from_bytes(os.urandom(8), "little") | 1
        self.table.num_planes, self.table.num_words = 1, 1
        memcpy(self.table.media[0].name, b"GPU", 3)
        self.table.media[0].size = 3
        self.table.workers = <Worker *>raw_calloc(WORD, sizeof(Worker))
        if self.table.workers == NULL:
            raise MemoryError("a prefix index")

    def __dealloc__(self):
        free_table(&self.table)

    def __reduce__(self):
        raise ArgumentTypeError("a prefix index cannot be pickled")

    cdef void begin_write(self) noexcept:
        cdef Py_ssize_t i
        for i in range(NUM_LOCKS):
            (<ReaderLock>self.locks[i]).lock.acquire()

    cdef void end_write(self) noexcept:
        cdef Py_ssize_t i
        for i in range(NUM_LOCKS - 1, -1, -1):
            (<ReaderLock>self.locks[i]).lock.release()

    def apply(self, worker, payload) -> bool:
        """Apply an encoded batch of events of a worker, an int from 0 on: bytes, or another buffer. Returns whether it is
        complete in itself, because it has `AllBlocksCleared`.

        EventBatchError if it is malformed, contradicts what is known of the groups, or exceeds a limit; nothing has changed
        then. O(bytes); what `AllBlocksCleared` costs is of the order of what was stored before it.
        """
        cdef int32_t number = <int32_t>size_of(worker, "worker", 0, MAX_WORKERS - 1)
        cdef Py_buffer view
        cdef EventBatch batch
        cdef Reader reader
        cdef const char *error
        cdef void *thread
        view_payload(payload, &view)
        reader = Reader(<const uint8_t *>view.buf, <const uint8_t *>view.buf + view.len, NULL)
        thread = let_others_run(view.len // BYTES_OF_A_PAGE)
        read_batch(&reader, &batch)
        go_on(thread)
        error = reader.error if reader.error != NULL else self.apply_batch(number, &batch)
        place = reader.at - <const uint8_t *>view.buf
        is_cleared = batch.is_cleared
        free_batch(&batch)
        PyBuffer_Release(&view)
        if error == NO_MEMORY:
            raise MemoryError("a batch of events")
        if error != NULL:
            raise EventBatchError(f"payload: byte {place}: {error.decode()}")
        return is_cleared

    cdef const char *apply_batch(self, int32_t worker, EventBatch *batch) noexcept:
        """Check a batch against the index, and apply it. Returns the reason if it cannot be, or NULL."""
        cdef const char *error
        cdef void *thread
        self.begin_write()
        error = settle_groups(&self.table, batch, self.page_size, self.num_groups)
        if error == NULL:
            thread = let_others_run(batch.num_hashes)
            error = apply_events(&self.table, batch, worker, self.max_worker_blocks)
            go_on(thread)
        self.end_write()
        return error

    def find(self, hashes, medium=None):
        """Return how many tokens of a prompt each worker has, int32 ``[workers]``.

        `hashes` are those of the pages of the prompt: a uint64 or int64 array ``[pages]``, a list of ints or bytes, of which
        the last 64 bits count, or a `HashChain`. A page counts if the worker has it in any medium, or in `medium` if given.
        O(pages x groups); with windows or states O(pages x groups x workers).
        """
        cdef Py_buffer view
        cdef Search search
        cdef uint64_t *words
        cdef int32_t *counts = NULL
        cdef int32_t worker, num_workers = 0
        cdef bint has_room
        cdef void *thread
        cdef cython.pymutex *lock = &(<ReaderLock>self.locks[lock_of_thread(NUM_LOCKS)]).lock
        text = None if medium is None else medium_of(medium)
        PyObject_GetBuffer(as_hashes(hashes), &view, PyBUF_SIMPLE)
        search.hashes = <const uint64_t *>view.buf
        search.num_hashes = min(view.len // <Py_ssize_t>sizeof(uint64_t), MAX_TOKENS // self.page_size)
        lock[0].acquire()
        search.planes = <uint32_t>-1 if text is None else self.plane_of(text)
        words = <uint64_t *>raw_calloc(self.table.num_words, 2 * sizeof(uint64_t) + WORD * sizeof(int32_t))
        has_room = words != NULL
        if has_room:
            counts = <int32_t *>(words + 2 * self.table.num_words)
            num_workers = self.table.num_workers
            thread = let_others_run(search.num_hashes * self.table.num_words // HASHES_OF_A_PAGE)
            has_room = search_prefix(&self.table, &search, self.page_size, words, counts)
            go_on(thread)
        lock[0].release()
        PyBuffer_Release(&view)
        for worker in range(num_workers):
            counts[worker] *= <int32_t>self.page_size
        try:
            if not has_room:
                raise MemoryError("a look-up of prefixes")
            return array_of(counts, num_workers)
        finally:
            raw_free(words)

    cdef uint32_t plane_of(self, bytes name) noexcept:
        """The bit of a medium, none if there is none."""
        return <uint32_t>1 << find_medium(self.table.media, self.table.num_planes, text_of(name))

    def note_loss(self, worker) -> None:
        """Note that batches of a worker were lost. Until it has cleared everything, or is removed, a block is gone with the
        first copy that it removes, because removals of others may be lost. O(1).
        """
        cdef int32_t number = <int32_t>size_of(worker, "worker", 0, MAX_WORKERS - 1)
        self.begin_write()
        if number < self.table.num_workers:
            self.table.workers[number].is_lossy = True
        self.end_write()

    def remove_worker(self, worker) -> None:
        """Forget what a worker has cached. O(blocks that it got since it last had none)."""
        cdef int32_t number = <int32_t>size_of(worker, "worker", 0, MAX_WORKERS - 1)
        self.begin_write()
        if number < self.table.num_workers:
            remove_worker_blocks(&self.table, number)
        self.end_write()

    def clear(self) -> None:
        """Forget all blocks and groups, and give their memory back. Workers keep their numbers."""
        cdef Space[MAX_EVENT_GROUPS] spaces
        cdef Space space
        cdef Duplicate *duplicates
        cdef int32_t worker
        self.begin_write()
        memcpy(&spaces, self.table.spaces, sizeof(spaces))
        memset(self.table.spaces, 0, sizeof(spaces))
        for worker in range(self.table.num_words * WORD):
            raw_free(self.table.workers[worker].gained)
        memset(self.table.workers, 0, self.table.num_words * WORD * sizeof(Worker))
        self.table.num_spaces, self.table.num_groups = 0, self.num_groups
        duplicates, self.table.duplicates = self.table.duplicates, NULL
        self.table.num_duplicates = self.table.num_duplicate_slots = 0
        self.end_write()
        raw_free(duplicates)
        for space in spaces[:MAX_EVENT_GROUPS]:
            raw_free(space.entries)
            raw_free(space.slots)

    def list_blocks(self, worker, medium="GPU", group=0):
        """Return the hashes of a worker's blocks in a medium and a cache group: uint64, in any order. O(blocks of all)."""
        cdef int32_t number = <int32_t>size_of(worker, "worker", 0, MAX_WORKERS - 1)
        cdef const Space *space = &self.table.spaces[size_of(group, "group", 0, MAX_EVENT_GROUPS - 1)]
        cdef bytes name = medium_of(medium)
        cdef uint64_t[::1] found
        cdef int32_t plane
        cdef Py_ssize_t num = 0, num_held = -1
        cdef uint32_t entry
        while num_held != num:  # the array is made without the locks
            num = num_held
            hashes = np.empty(max(num, <Py_ssize_t>0), np.uint64)
            found = hashes
            self.begin_write()
            num_held = self.table.workers[number].num_bits if number < self.table.num_workers else 0
            plane = find_medium(self.table.media, self.table.num_planes, text_of(name))
            if num_held == num:
                num = 0
                for entry in range(1, space.num_entries if num_held and plane < self.table.num_planes else 0):
                    if bits_at(&self.table, space, entry, plane, number)[0] >> (number % WORD) & 1:
                        found[num] = entry_at(&self.table, space, entry)[0]
                        num += 1
                num_held = num
            self.end_write()
        return hashes[:num]

    @property
    def num_workers(self) -> int:
        """One more than the highest number of a worker that told anything."""
        return self.table.num_workers

    @property
    def media(self) -> tuple:
        """The media that were told, ``"GPU"`` first."""
        cdef Media media
        cdef int32_t i
        self.begin_write()
        memcpy(media.items, self.table.media, sizeof(self.table.media))
        media.num = self.table.num_planes
        self.end_write()
        return tuple([media.items[i].name[:media.items[i].size].decode(errors="surrogateescape") for i in range(media.num)])

    def stats(self) -> dict:
        """Return ``blocks`` (entries of all groups), ``held`` (blocks of each worker, a list) and ``bytes`` of memory."""
        cdef Py_ssize_t i, num_bytes = sizeof(BlockTable), num_blocks = 0
        self.begin_write()
        for i in range(self.table.num_spaces):
            num_bytes += self.table.spaces[i].num_entries * stride_of(&self.table) * <Py_ssize_t>sizeof(uint64_t)
            num_bytes += self.table.spaces[i].num_slots * <Py_ssize_t>sizeof(BlockSlot)
            num_blocks += self.table.spaces[i].num_blocks
        for i in range(self.table.num_words * WORD):
            num_bytes += sizeof(Worker) + self.table.workers[i].capacity * <Py_ssize_t>sizeof(GainedBlock)
        num_bytes += self.table.num_duplicate_slots * <Py_ssize_t>sizeof(Duplicate)
        self.end_write()
        return {"blocks": num_blocks, "held": [self.num_held(i) for i in range(self.table.num_workers)], "bytes": num_bytes}

    cdef int64_t num_held(self, int32_t worker) noexcept:
        """The blocks of a worker that told anything."""
        cdef int64_t num
        self.begin_write()
        num = self.table.workers[worker].num_bits
        self.end_write()
        return num

    def check(self) -> None:
        """Check that the records agree. IntegrityError if they do not. O(blocks x workers)."""
        cdef const char *fault = NULL
        cdef Py_ssize_t g
        cdef int64_t *num_held
        self.begin_write()
        num_held = <int64_t *>raw_calloc(self.table.num_words * WORD, sizeof(int64_t))
        for g in range(MAX_EVENT_GROUPS if num_held != NULL else 0):
            if fault == NULL:
                fault = find_fault(&self.table, &self.table.spaces[g], num_held)
        for g in range(self.table.num_words * WORD if num_held != NULL else 0):
            if num_held[g] != self.table.workers[g].num_bits:
                fault = "the blocks of a worker are miscounted"
        if fault == NULL and num_held != NULL:
            fault = find_duplicate_fault(&self.table, num_held)
        self.end_write()
        raw_free(num_held)
        if fault != NULL:
            raise IntegrityError(f"prefix index: {fault.decode()}")


cdef const char *find_fault(const BlockTable *table, const Space *space, int64_t *num_held) noexcept:
    """What contradicts what in a group, or NULL. Adds the blocks of each worker."""
    cdef uint32_t entry, num = 0, num_linked = 0
    cdef Py_ssize_t i
    cdef uint64_t word
    for entry in range(1, space.num_entries):
        if is_free_entry(entry_at(table, space, entry), stride_of(table)):
            continue
        num += 1
        if find_entry(table, space, entry_at(table, space, entry)[0], 0) != entry:
            return "a block is not found"
        for i in range(table.num_planes * table.num_words):
            word = entry_at(table, space, entry)[1 + i]
            while word:
                num_held[i % table.num_words * WORD + ctz(word)] += 1
                word &= word - 1
    if num != space.num_blocks:
        return "blocks are miscounted"
    entry = free_entry_at(table, space, 0).next if space.num_entries else 0
    while entry and num_linked <= space.num_entries:
        if not is_free_entry(entry_at(table, space, entry), stride_of(table)):
            return "a block is linked as free"
        num_linked += 1
        entry = free_entry_at(table, space, entry).next
    if space.num_entries and num + num_linked + 1 != space.num_entries:
        return "free entries are miscounted"
    num = 0
    for i in range(space.num_slots):
        num += space.slots[i].entry != 0
    if num != space.num_blocks:
        return "places are miscounted"
    return NULL


cdef const char *find_duplicate_fault(const BlockTable *table, int64_t *num_duplicates) noexcept:
    """What contradicts what in the duplicates, or NULL. `num_duplicates` is for each worker."""
    cdef Duplicate duplicate
    cdef const Space *space
    cdef Py_ssize_t i, num = 0
    cdef uint32_t entry
    cdef int32_t plane, worker
    memset(num_duplicates, 0, table.num_words * WORD * sizeof(int64_t))
    for i in range(table.num_duplicate_slots):
        duplicate = table.duplicates[i]
        if duplicate.key == 0:
            continue
        space = &table.spaces[duplicate.key >> 24 & 63]
        entry, worker = <uint32_t>(duplicate.key >> 32), <int32_t>(duplicate.key & 65535)
        plane = <int32_t>(duplicate.key >> 16 & 255)
        num += 1
        num_duplicates[worker] += 1
        if duplicate.num == 0 or find_duplicate(table, duplicate.key) != i:
            return "copies of a block are not found"
        if entry >= space.num_entries or not has_bit(table, space, entry, plane, worker):
            return "a block that a worker has not has copies"
    if num != table.num_duplicates:
        return "copies are miscounted"
    for i in range(table.num_words * WORD):
        if num_duplicates[i] != table.workers[i].num_duplicates:
            return "the copies of a worker are miscounted"
    return NULL


cdef bytes medium_of(object medium):
    if not isinstance(medium, str):
        raise ArgumentTypeError(f"medium: got {type(medium).__name__}, allowed: a string or None")
    try:
        return str.encode(medium, errors="surrogateescape")
    except UnicodeEncodeError:
        raise ArgumentError(f"medium: got {shown(medium)}, allowed: text that UTF-8 can encode") from None


cdef Text text_of(bytes name) noexcept:
    return Text(<const uint8_t *><const char *>name, len(name))


cdef object UINT64 = np.dtype(np.uint64)
cdef object ndarray = np.ndarray


cdef object as_hashes(object hashes):
    """Hashes as a contiguous array of uint64."""
    if type(hashes) is ndarray and hashes.dtype is UINT64 and hashes.ndim == 1 and hashes.flags.c_contiguous:
        return hashes
    if isinstance(hashes, HashChain):
        return hashes_of_chain(hashes)
    if isinstance(hashes, ndarray):
        hashes = np.asarray(hashes)  # a subclass may lie about itself
        if hashes.ndim != 1 or hashes.dtype.kind not in "iu":
            raise ArgumentTypeError(
                f"hashes: got an array of {hashes.dtype} with {hashes.ndim} dimensions, allowed: one of ints with 1 dimension"
            )
        wide = np.int64 if hashes.dtype.kind == "i" else np.uint64
        return np.ascontiguousarray(hashes, wide).view(np.uint64)
    if isinstance(hashes, (str, bytes, bytearray, memoryview)):
        raise ArgumentTypeError(f"hashes: got {type(hashes).__name__}, allowed: an array, a list of ints or bytes, a HashChain")
    return np.array([as_hash(block_hash) for block_hash in as_list(hashes, "hashes")], np.uint64)


cdef object as_hash(object block_hash):
    """The last 64 bits of a hash."""
    if isinstance(block_hash, bytes):
        if len(block_hash) < 8:
            raise ArgumentError(f"hashes: got {shown(block_hash)}, allowed: bytes with at least 8")
        return int.from_bytes(block_hash[len(block_hash) - 8:], "big")
    return index_of(block_hash, "hashes") & 0xffffffffffffffff


cdef object hashes_of_chain(HashChain chain):
    """The lower halves of the digests of a chain."""
    cdef Py_ssize_t i, num
    cdef uint64_t[::1] copied
    with chain.lock:
        num = chain.num
    hashes = np.empty(num, np.uint64)
    copied = hashes
    with chain.lock:
        num = min(num, chain.num)
        for i in range(num):
            copied[i] = chain.digests[i].lo
    return hashes[:num]
