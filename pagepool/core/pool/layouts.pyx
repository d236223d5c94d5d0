"""Arrays and numbers of a pool by name, with their types and addresses: for checks and tests."""

from libc.stdint cimport INT32_MAX, int32_t, uint8_t, uintptr_t
from libc.string cimport memcpy

from pagepool.core.base cimport MAX_LOOKAHEAD
from pagepool.core.pool.index cimport *
from pagepool.core.pool.queue cimport *

from types import SimpleNamespace

import numpy as np

from pagepool.errors import ArgumentError

CONSTANTS = SimpleNamespace(
    NOT_FREE=NOT_FREE, NO_GROUP=NO_GROUP, NOT_NEW=NOT_NEW, NOT_FIRST=NOT_FIRST, TWIN=TWIN, KEPT=KEPT, FLAGS=FLAGS,
    MAX_GROUP=MAX_GROUP, MAX_REF_CNT=INT32_MAX - 1, BLANK=BLANK, PART=PART, SET_SIZE=SET_SIZE, NEVER=NEVER, SECOND=SECOND,
    SHARED=SHARED, COMMON=COMMON, MAX_TENANTS=MAX_TENANTS, NO_TENANT=NO_TENANT, MAX_LOOKAHEAD=MAX_LOOKAHEAD,
)

cdef enum:                    # indices in `TYPES`
    UINT8
    INT32
    UINT32
    INT64
    UINT64
    PAGE
    SLOT
    LINKS
    NOTE
    REMOVAL
    CONTEXT
    GHOST_ENTRY
    LEARNED
    SESSION
    CHECKPOINT_NOTE
    CLASS_COUNTS
    ANSWERS
    NUM_TYPES

cdef Policy NO_POLICY         # all zeros
cdef Pool NO_POOL
cdef Checkpoints NO_CHECKPOINTS
cdef Items ALL_ITEMS
cdef void *STRUCT = &NO_POLICY  # any memory: only the types of structs there are read

cdef list TYPES = [
    *map(np.dtype, (np.uint8, np.int32, np.uint32, np.int64, np.uint64)),
    *[
        np.asarray(struct).dtype for struct in (
            <Page[:1]><Page *>STRUCT, <Slot[:1]><Slot *>STRUCT, <Links[:1]><Links *>STRUCT, <Note[:1]><Note *>STRUCT,
            <Removal[:1]><Removal *>STRUCT, <Context[:1]><Context *>STRUCT, <GhostEntry[:1]><GhostEntry *>STRUCT,
            <Learned[:1]><Learned *>STRUCT, <Session[:1]><Session *>STRUCT,
            <CheckpointNote[:1]><CheckpointNote *>STRUCT, <ClassCounts[:1]><ClassCounts *>STRUCT,
            <Answers[:1]><Answers *>STRUCT,
        )
    ],
]
cdef Py_ssize_t[NUM_TYPES] TYPE_SIZES = [each.itemsize for each in TYPES]


cdef Pool *pool_of(PageStore store, bint of_tier) except NULL:
    """Return the pool of a store, or the pool of the tier behind it."""
    if of_tier and store.pool.tier == NULL:
        raise ArgumentError("of_tier: got True, allowed for a pool without a host tier: False")
    return store.pool.tier.pool if of_tier else &store.pool


cdef void add_array(Items *items, const char *name, int32_t type, const void *start, Py_ssize_t n) noexcept nogil:
    cdef Item *item = &items.items[items.num]
    item.name, item.type, item.is_number = name, type, False
    item.start, item.size = <void *>start, n * TYPE_SIZES[type] if start != NULL else 0
    items.num += 1


cdef void add_number(Items *items, const char *name, int32_t type, const void *start) noexcept nogil:
    add_array(items, name, type, start, 1)
    items.items[items.num - 1].is_number = True


cdef void list_items(const Pool *pool, Items *items) noexcept nogil:
    """List the arrays and numbers of a pool. Arrays that it does not have are empty."""
    items.num = 0
    list_pages(pool, items)
    list_shards(pool, items)
    list_journal(pool, items)
    list_policy(pool.policy, items)
    list_owners(pool, items)
    list_lineage(pool, items)


cdef void list_lineage(const Pool *pool, Items *items) noexcept nogil:
    """List the words of how runs went on from pages, and the checkpoints of each bank."""
    add_array(items, b"children", UINT32, pool.children, pool.num_pages)
    list_checkpoints(&pool.banks[0], items, b"checkpoints_0", b"classes_0", b"answers_0")
    list_checkpoints(&pool.banks[1], items, b"checkpoints_1", b"classes_1", b"answers_1")
    list_checkpoints(&pool.banks[2], items, b"checkpoints_2", b"classes_2", b"answers_2")
    list_checkpoints(&pool.banks[3], items, b"checkpoints_3", b"classes_3", b"answers_3")


cdef void list_checkpoints(
    const Bank *bank, Items *items, const char *notes, const char *classes, const char *answers
) noexcept nogil:
    cdef const Checkpoints *checkpoints = bank.checkpoints if bank.checkpoints != NULL else &NO_CHECKPOINTS
    add_array(items, notes, CHECKPOINT_NOTE, checkpoints.notes, bank.stop - bank.start)
    add_array(items, classes, CLASS_COUNTS, &checkpoints.classes[0], NUM_CHECKPOINT_CLASSES)
    add_array(items, answers, ANSWERS, &checkpoints.answers, 1)


cdef void list_pages(const Pool *pool, Items *items) noexcept nogil:
    add_array(items, b"pages", PAGE, pool.pages, pool.num_pages + pool.num_banks * (1 + pool.num_parts) - 1)
    add_array(items, b"slots", SLOT, pool.slots, num_slots_of(pool))
    add_array(items, b"twins", LINKS, pool.twins, pool.num_pages)
    add_array(items, b"page_tokens", INT32, pool.page_tokens, pool.num_pages * pool.tokens_width)
    add_array(items, b"uppers", UINT64, pool.uppers, 2 * <Py_ssize_t>pool.num_pages)
    add_number(items, b"tokens_width", INT64, &pool.tokens_width)
    add_number(items, b"multiplier", UINT64, &pool.multiplier)
    add_number(items, b"home_shift", UINT32, &pool.home_shift)
    add_number(items, b"num_pages", INT32, &pool.num_pages)
    add_number(items, b"num_free", INT32, &pool.num_free)
    add_number(items, b"num_held_free", INT32, &pool.num_held_free)
    add_number(items, b"num_keys", INT32, &pool.num_keys)
    add_number(items, b"num_entries", INT32, &pool.num_entries)
    add_number(items, b"num_parts", INT32, &pool.num_parts)
    add_number(items, b"num_parts_each", INT32, &pool.num_parts_each)


cdef void list_shards(const Pool *pool, Items *items) noexcept nogil:
    add_number(items, b"num_shards", INT32, &pool.num_shards)
    add_array(items, b"shard_links", LINKS, pool.shard_links, count_queue_links(pool, pool.num_shards))
    add_array(items, b"shard_num_free", INT32, pool.shard_num_free, pool.num_banks * pool.num_shards)
    add_array(items, b"shard_twins", LINKS, pool.shard_twins, pool.num_pages)
    add_array(items, b"shard_firsts", LINKS, pool.shard_firsts, pool.num_pages if pool.shard_twins != NULL else 0)


cdef void list_journal(const Pool *pool, Items *items) noexcept nogil:
    add_array(items, b"notes", NOTE, pool.journal.notes, pool.num_pages)
    add_array(items, b"removed", REMOVAL, pool.journal.removed, pool.num_pages)
    add_array(items, b"contexts", CONTEXT, pool.journal.contexts, max(0, pool.journal.num_contexts))
    add_number(items, b"num_contexts", INT32, &pool.journal.num_contexts)
    add_number(items, b"num_new", INT32, &pool.journal.num_new)
    add_number(items, b"num_removed", INT32, &pool.journal.num_removed)
    add_number(items, b"is_cleared", UINT8, &pool.journal.is_cleared)
    add_number(items, b"is_told", UINT8, &pool.journal.is_told)


cdef void list_policy(const Policy *policy, Items *items) noexcept nogil:
    cdef bint has_policy = policy != NULL
    if not has_policy:
        policy = &NO_POLICY
    add_array(items, b"marks", UINT32, policy.marks, policy.num_pages)
    add_array(items, b"ghosts", GHOST_ENTRY, policy.ghost.entries, <Py_ssize_t>policy.ghost.num_sets * SET_SIZE)
    add_array(items, b"policy_counts", INT64, &policy.num_in_part[0], NUM_POLICY_COUNTS if has_policy else 0)
    add_array(items, b"learned", LEARNED, &policy.learned, has_policy)


cdef void list_owners(const Pool *pool, Items *items) noexcept nogil:
    add_array(items, b"terms", UINT8, pool.expected.terms, pool.num_pages)
    add_array(items, b"stamps", UINT32, pool.expected.stamps, pool.num_pages)
    add_array(items, b"num_free_by_term", INT32, &pool.expected.num_free[0], NEVER + 1)
    add_number(items, b"free_terms", UINT32, &pool.expected.free_terms)
    add_array(items, b"owners", INT32, pool.sessions.owners, pool.num_pages)
    add_array(items, b"owner_links", LINKS, pool.sessions.links, pool.num_pages)
    add_array(items, b"sessions", SESSION, pool.sessions.items, pool.sessions.num)
    add_number(items, b"num_live", INT32, &pool.sessions.num_live)
    add_array(items, b"tenants", UINT8, pool.tenants.of_pages, pool.num_pages)
    add_array(items, b"num_charged", INT32, &pool.tenants.num_charged[0][0], MAX_BANKS * MAX_TENANTS)
    add_array(items, b"num_free_by_tenant", INT32, &pool.tenants.num_free[0][0], MAX_BANKS * MAX_TENANTS)


list_items(&NO_POOL, &ALL_ITEMS)


cdef Py_ssize_t copy_items(Items *items, const bint *is_wanted, uint8_t *out, Py_ssize_t size) noexcept nogil:
    """Copy the wanted items one after another, if their total size is `size`. Return the total size in bytes."""
    cdef Py_ssize_t i, num_bytes = 0
    for i in range(items.num):
        if not is_wanted[i]:
            items.items[i].size = 0
        num_bytes += items.items[i].size
    for i in range(items.num if num_bytes == size else 0):
        if items.items[i].size:
            memcpy(out, items.items[i].start, items.items[i].size)
            out += items.items[i].size
    return num_bytes


def copy_records(PageStore store not None, str names=None, bint of_tier=False) -> dict:
    """Copy the records of a pool, or of the tier behind it, by name: all numbers, and the arrays named in `names`, separated
    by spaces (None: all). Other arrays are empty. O(num_pages).
    """
    cdef const Pool *source = pool_of(store, of_tier)
    cdef bint[MAX_ITEMS] is_wanted
    cdef Py_ssize_t i, start = 0, size = -1, num_bytes = 0
    cdef uint8_t[::1] memory
    cdef Items items
    cdef uint8_t *copy
    cdef Pool pool
    cdef dict copied = {}
    for i in range(ALL_ITEMS.num):
        is_wanted[i] = names is None or ALL_ITEMS.items[i].is_number or ALL_ITEMS.items[i].name.decode() in names.split()
    while size != num_bytes:  # at first, and when the pool grew
        size = num_bytes
        memory = array = np.empty(size + 1, np.uint8)
        copy = &memory[0]
        with store.own_lock()[0]:
            pool = source[0]
            with nogil:
                list_items(source, &items)
                num_bytes = copy_items(&items, is_wanted, copy, size)
    for i in range(items.num):
        values = array[start:start + items.items[i].size].view(TYPES[items.items[i].type])
        copied[items.items[i].name.decode()] = values[0].item() if items.items[i].is_number else values
        start += items.items[i].size
    banks = [
        (
            pool.banks[i].start, pool.banks[i].stop, pool.banks[i].num_free, pool.banks[i].num_entries,
            pool.banks[i].num_allocated_pages, pool.banks[i].num_evicted_pages, pool.banks[i].num_lost_hit_tokens,
            pool.banks[i].num_refusals, pool.banks[i].num_passed_checkpoints, pool.banks[i].num_retired,
        )
        for i in range(pool.num_banks)
    ]
    ends = [end_of_queue(&pool, queue_of_bank(<int32_t>i)) for i in range(pool.num_banks)]
    return dict(
        copied, banks=banks, ends=ends, num_plain_parts=count_plain_parts(&pool), now=now_of(&pool.expected),
        counters=pool.counters,
    )


def locate_records(PageStore store not None, bint of_tier=False) -> dict:
    """Return the address, shape and type of each array and number of a pool, or of the tier behind it, by name. An array moves
    when it grows.
    """
    cdef const Pool *pool = pool_of(store, of_tier)
    cdef Items items
    cdef Item item
    cdef dict located = {}
    with store.own_lock()[0]:
        list_items(pool, &items)
    for item in items.items[:items.num]:
        shape = () if item.is_number else (item.size // TYPE_SIZES[item.type],)
        located[item.name.decode()] = <uintptr_t>item.start, shape, TYPES[item.type]
    return located
