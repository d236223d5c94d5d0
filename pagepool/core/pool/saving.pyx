"""A pool copied, to be checked or saved, and loaded."""

from libc.stdint cimport INT32_MAX, INT64_MAX, int32_t, int64_t, uint32_t, uint8_t
from libc.string cimport memcpy

from pagepool.core.base.limits cimport MAX_GROUP
from pagepool.core.base.siphash cimport Digest
from pagepool.core.pool.index cimport enter, keep_tokens
from pagepool.core.pool.policy cimport (
    BLANK, NUM_PARTS, NUM_POLICY_COUNTS, PART, SET_SIZE, Ghost, GhostEntry, Learned, Policy, is_right, set_of,
)
from pagepool.core.pool.queue cimport now_of, pull, push, push_marked, put_back
from pagepool.core.pool.records cimport (
    KEPT, NO_GROUP, NULL_PAGE, Context, Links, Note, Page, Pool, Removal, Session, Slot, count_plain_parts, count_queue_links,
    count_remembered, is_free, num_slots_of,
)
from pagepool.core.pool.store cimport PageStore
from pagepool.core.values.arguments cimport as_list, require_matrix, size_of
from pagepool.core.values.ids cimport PageIds, as_own_ids, as_page_ids

import numpy as np

from pagepool.core.pool.store import COUNTERS
from pagepool.errors import ArgumentError, ArgumentTypeError, SnapshotError

LINKS, KEY = [("prev", "i4"), ("next", "i4")], [("low", "u8"), ("high", "u8")]
DTYPES = {                        # in the order of `list_arrays`; notes have the key of the parent
    "pages": np.dtype([*KEY, ("ref_cnt", "i4"), *LINKS, ("group", "i4")]),
    "slots": np.dtype([("tag", "u4"), ("page_id", "i4")]), "twins": np.dtype(LINKS), "shard_links": np.dtype(LINKS),
    "notes": np.dtype([*KEY, ("place", "i4"), ("context", "i4"), *LINKS]),
    "removed": np.dtype([*KEY, ("group", "i4"), ("", "i4")]),
    "contexts": np.dtype([("num_users", "i4"), ("num_holders", "i4")]), "page_tokens": np.dtype("i4"),
    "marks": np.dtype("u4"), "ghosts": np.dtype([("tag", "u4"), ("mark", "u4")]),
    "policy_counts": np.dtype("i8"), "learned": np.dtype("u1"),
    "terms": np.dtype("u1"), "stamps": np.dtype("u4"), "owners": np.dtype("i4"), "owner_links": np.dtype(LINKS),
    "sessions": np.dtype(
        [(name, "i4") for name in ("first", "num_pages", "num_closed", "num_holders", "main")] + [("tenant", "u1"), ("", "V3")]
    ),
    "tenants": np.dtype("u1"),
}
cdef enum:
    NUM_ARRAYS = 18
    FIRST_OF_POLICY = 8       # of its four arrays

cdef struct Array:
    void *start
    Py_ssize_t size           # bytes

cdef Policy NO_POLICY         # of zeros
cdef int64_t MAX_POLICY_COUNT = INT64_MAX // 8  # so that sums of counts are counts too


def copy_records(PageStore store not None, str names=None, bint of_tier=False) -> dict:
    """Copy the records of a pool, or of the tier behind it: its numbers, and the arrays with these `names`, divided by blanks
    (None: all), as in `Pool` and `Journal`. Other arrays are empty. O(num_pages).
    """
    cdef const Pool *source = pool_of(store, of_tier)
    cdef Py_ssize_t[NUM_ARRAYS + 1] stops
    cdef bint[NUM_ARRAYS] is_wanted
    cdef Py_ssize_t i, size = -1, num_bytes = 0
    cdef uint8_t[::1] memory
    cdef uint8_t *start
    cdef Pool pool
    for i, name in enumerate(DTYPES):
        is_wanted[i] = names is None or name in names.split()
    while size != num_bytes:  # at first, and when the pool grew
        size = num_bytes
        memory = array = np.empty(size + 1, np.uint8)
        start = &memory[0]
        with store.lock:
            pool = source[0]
            with nogil:
                num_bytes = copy_arrays(&pool, is_wanted, stops, start, size)
    return dict(
        {name: array[stops[i]:stops[i + 1]].view(DTYPES[name]) for i, name in enumerate(DTYPES)}, is_pool=store.is_pool,
        num_pages=pool.num_pages, num_free=pool.num_free, num_held_free=pool.num_held_free, num_shards=pool.num_shards,
        num_keys=pool.num_keys, num_entries=pool.num_entries, multiplier=pool.multiplier, home_shift=pool.home_shift,
        tokens_width=pool.tokens_width, num_parts=pool.num_parts, num_new=pool.journal.num_new,
        num_removed=pool.journal.num_removed, is_cleared=pool.journal.is_cleared, is_told=pool.journal.is_told,
        num_plain_parts=count_plain_parts(&pool), num_free_by_term=list(pool.expected.num_free),
        free_terms=pool.expected.free_terms, now=now_of(&pool),
        num_parts_each=pool.num_parts_each, num_charged=list(pool.tenants.num_charged),
        num_free_by_tenant=list(pool.tenants.num_free), num_live=pool.sessions.num_live, counters=pool.counters,
    )


cdef Pool *pool_of(PageStore store, bint of_tier) except NULL:
    if of_tier and store.pool.tier == NULL:
        raise ArgumentError("of_tier: got True, allowed for a pool without a host tier: False")
    return store.pool.tier.pool if of_tier else &store.pool


cdef Py_ssize_t count_shard_links(const Pool *pool) noexcept nogil:
    """Links for which the memory of `shard_links` has room."""
    cdef Py_ssize_t n = pool.num_shards, num_twins = 0 if pool.shard_twins == NULL else pool.num_pages
    return count_queue_links(pool, n) + n + count_remembered(pool, n) + 2 * num_twins


cdef void list_arrays(const Pool *pool, Array *arrays) noexcept nogil:
    """List the arrays of a pool in the order of `DTYPES`. Those that it does not have are empty."""
    cdef Py_ssize_t i, n = pool.num_pages
    cdef bint has_policy = pool.policy != NULL
    cdef const Policy *policy = pool.policy if has_policy else &NO_POLICY
    cdef const void **starts = [
        pool.pages, pool.slots, pool.twins, pool.shard_links,
        pool.journal.notes, pool.journal.removed, pool.journal.contexts, pool.page_tokens,
        policy.marks, policy.ghost.entries, &policy.num_in_part[0], &policy.learned,
        pool.expected.terms, pool.expected.stamps, pool.sessions.owners, pool.sessions.links, pool.sessions.items,
        pool.tenants.of_pages,
    ]
    cdef Py_ssize_t *sizes = [
        (n + pool.num_parts) * sizeof(Page), num_slots_of(pool) * sizeof(Slot), n * sizeof(Links),
        count_shard_links(pool) * sizeof(Links),
        n * sizeof(Note), n * sizeof(Removal), max(0, pool.journal.num_contexts) * sizeof(Context),
        n * pool.tokens_width * sizeof(int32_t),
        n * sizeof(uint32_t), <Py_ssize_t>policy.ghost.num_sets * SET_SIZE * sizeof(GhostEntry),
        (NUM_POLICY_COUNTS if has_policy else 0) * sizeof(int64_t), sizeof(Learned) if has_policy else 0,
        n * sizeof(uint8_t), n * sizeof(uint32_t), n * sizeof(int32_t), n * sizeof(Links), pool.sessions.num * sizeof(Session),
        n * sizeof(uint8_t),
    ]
    for i in range(NUM_ARRAYS):
        arrays[i] = Array(<void *>starts[i], sizes[i]) if starts[i] != NULL else Array(pool.pages, 0)  # memcpy takes no NULL


cdef Py_ssize_t copy_arrays(
    const Pool *pool, const bint *is_wanted, Py_ssize_t *stops, uint8_t *out, Py_ssize_t size
) noexcept nogil:
    """Copy arrays, each from one of `stops` to the next, unless they have another size. Returns the size in bytes."""
    cdef Array[NUM_ARRAYS] arrays
    cdef Py_ssize_t i
    list_arrays(pool, arrays)
    stops[0] = 0
    for i in range(NUM_ARRAYS):
        stops[i + 1] = stops[i] + (arrays[i].size if is_wanted[i] else 0)
    for i in range(NUM_ARRAYS if stops[NUM_ARRAYS] == size else 0):
        memcpy(out + stops[i], arrays[i].start, stops[i + 1] - stops[i])
    return stops[NUM_ARRAYS]


def follow(prev_ids, next_ids, first_ids) -> tuple:
    """List the ids of rings, each from its first on. Return them and True, or those before a link that does not lead back."""
    cdef PageIds before = as_page_ids(prev_ids, "prev_ids"), behind = as_page_ids(next_ids, "next_ids")
    cdef PageIds firsts = as_page_ids(first_ids, "first_ids"), ids = PageIds.__new__(PageIds)
    cdef Py_ssize_t i, n = min(before.num, behind.num)
    cdef int32_t page_id, following
    ids.reserve(n)
    for i in range(firsts.num):
        page_id = firsts.ids[i]
        while ids.num < n and 0 <= page_id < n:
            ids.put(&page_id, 1)
            following = behind.ids[page_id]
            if not 0 <= following < n or before.ids[following] != page_id:
                return ids, False
            page_id = following
            if page_id == firsts.ids[i]:
                break
    return ids, True


def find_policy_fault(PageStore store not None, bint of_tier=False) -> str | None:
    """Return what is wrong with what the eviction policy of a pool, or of the tier behind it, keeps, apart from its queue, or
    None. O(num_pages).
    """
    cdef Pool *pool = pool_of(store, of_tier)
    cdef Py_ssize_t page_id = -1, ghost_set = -1, count = -1
    cdef bint has_right_counts = True
    with store.lock:
        if pool.policy != NULL:
            page_id, ghost_set, count = find_wrong_mark(pool), find_wrong_set(pool), find_wrong_count(pool.policy)
            has_right_counts = max(page_id, ghost_set, count) >= 0 or is_right(pool.policy)
    if page_id >= 0:
        return describe_mark(pool, page_id)
    if ghost_set >= 0:
        return f"set {ghost_set} of the ghost has tags of other sets, or of no part, or one twice"
    if count >= 0:
        return f"count {count} of the eviction policy is out of range, allowed: 0 to {MAX_POLICY_COUNT}"
    return None if has_right_counts else f"what the eviction policy {store.eviction!r} has counted cannot be"


cdef str describe_mark(const Pool *pool, Py_ssize_t page_id):
    return f"page {page_id} has the mark {pool.policy.marks[page_id]}, allowed for part {<int>BLANK}: {<int>BLANK}"


cdef Py_ssize_t find_wrong_mark(const Pool *pool) noexcept nogil:
    """The first page with a mark of the blank part with a stamp; or -1."""
    cdef Py_ssize_t i
    for i in range(pool.num_pages):
        if pool.policy.marks[i] & PART == BLANK and pool.policy.marks[i] != BLANK:
            return i
    return -1


cdef Py_ssize_t find_wrong_set(const Pool *pool) noexcept nogil:
    """The first set of the ghost with an entry that no look-up finds, or that has no part; or -1."""
    cdef const Ghost *ghost = &pool.policy.ghost
    cdef const GhostEntry *entry
    cdef Py_ssize_t i, j
    for i in range(<Py_ssize_t>ghost.num_sets * SET_SIZE):
        entry = &ghost.entries[i]
        if entry.tag and not (set_of(ghost, entry.tag) == &ghost.entries[i - i % SET_SIZE]
                              and entry.mark & PART != BLANK):
            return i // SET_SIZE
        for j in range(i - i % SET_SIZE, i if entry.tag else 0):
            if ghost.entries[j].tag == entry.tag:
                return i // SET_SIZE
    return -1


cdef Py_ssize_t find_wrong_count(const Policy *policy) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(NUM_POLICY_COUNTS):
        if not 0 <= (&policy.num_in_part[0])[i] <= MAX_POLICY_COUNT:
            return i
    return -1


def load_store(kind, ref_counts, free_page_ids, cached, policy, totals) -> PageStore:
    """Return the store of which a snapshot has these arrays. `kind` is whether prefixes are cached, and the eviction
    policy; `cached` are the arrays of cached pages: ids, group ids, keys, token ids, and whether they stay when they leave
    windows; `policy` those of the policy, empty without one: marks, ghosts, counts, and what it has learned;
    `totals` are the counters and the number of shards. SnapshotError if they contradict one another. O(num_pages).
    """
    cdef PageIds counts = as_own_ids(ref_counts, "ref_counts")
    enable_caching, eviction = kind
    cached_page_ids, cached_group_ids, cached_keys, cached_token_ids, cached_kept = cached
    counters, num_shards = totals
    cdef PageStore store = PageStore(counts.num, enable_caching, eviction=eviction)
    tokens = require_matrix(cached_token_ids, np.int32, "cached_token_ids")
    keys = np.ascontiguousarray(require_matrix(cached_keys, np.uint64, "cached_keys"))
    cdef Py_ssize_t width = tokens.shape[1]
    if width:
        store.keep_token_ids(size_of(width - 1, "page_size", 1))
    load_entries(
        &store.pool,
        as_own_ids(cached_page_ids, "cached_page_ids"),
        as_own_ids(cached_group_ids, "cached_group_ids"),
        as_own_ids(keys.view(np.int32).reshape(-1), "cached_keys"),
        as_own_ids(tokens.reshape(-1), "cached_token_ids"),
        as_own_ids(cached_kept, "cached_kept"),
    )
    for page_id in range(1, store.pool.num_pages):
        pull(&store.pool, page_id)
    saved_parts = load_policy(&store.pool, policy)
    load_queue(&store.pool, counts, as_own_ids(free_page_ids, "free_page_ids"))
    queued_parts = list_parts(&store.pool)
    if saved_parts != queued_parts:
        raise SnapshotError(f"policy_counts: got {saved_parts} free pages in the parts, allowed by the marks: {queued_parts}")
    if size_of(num_shards, "data_parallel_size"):
        store.set_shards(num_shards)
    saved = [size_of(count, "counters", 0, INT64_MAX) for count in as_list(counters, "counters")]
    if len(saved) != len(COUNTERS):
        raise SnapshotError(f"counters: got {len(saved)}, allowed: {len(COUNTERS)}")
    store.pool.counters = dict(zip(COUNTERS, saved, strict=True))
    store.pool.is_restored = 1
    fault = find_policy_fault(store)
    if fault is not None:
        raise SnapshotError(fault)
    return store


cdef int load_queue(Pool *pool, PageIds ref_counts, PageIds free_ids) except -1:
    """Give pages outside the queue these references, and the free queue this order."""
    cdef Py_ssize_t i
    cdef int32_t page_id, count
    cdef bint is_queued
    for i in range(free_ids.num):
        require_once(pool, "free_page_ids", free_ids, i, False)
        if pool.policy != NULL:
            push_marked(pool, free_ids.ids[i])
        else:
            push(pool, free_ids.ids[i])
    for page_id in range(pool.num_pages):
        count = pool.pages[page_id].ref_cnt = ref_counts.ids[page_id]
        is_queued = page_id != NULL_PAGE and is_free(pool, page_id)
        if count == INT32_MAX:
            raise SnapshotError(f"ref_counts: page {page_id} has {count} references, allowed: fewer than {INT32_MAX}")
        if count < 0 or (count == 0) != (is_queued or page_id == NULL_PAGE):
            where = "in the free queue" if is_queued else "not in the free queue"
            raise SnapshotError(f"ref_counts: page {page_id} has {count} references and is {where}")
    return 0


cdef list load_policy(Pool *pool, object arrays):
    """Give the policy of a pool with an empty queue these marks, ghosts and counts, and what it had learned. Without a policy
    the arrays must be empty. Returns the numbers of free pages in the parts, which are 0 now.
    """
    cdef Array[NUM_ARRAYS] targets
    cdef Py_ssize_t i
    cdef bytes source
    list_arrays(pool, targets)
    marks, ghosts, counts, learned = arrays
    for i, array in enumerate((marks, ghosts, counts, learned), FIRST_OF_POLICY):
        source = bytes_of(array)
        if len(source) != targets[i].size:
            raise SnapshotError(f"the eviction policy: got {len(source)} bytes, allowed: {targets[i].size}")
        memcpy(targets[i].start, <const char *>source, targets[i].size)
    i = find_wrong_mark(pool) if pool.policy != NULL else -1
    if i >= 0:
        raise SnapshotError(describe_mark(pool, i))
    parts = list_parts(pool)
    for i in range(len(parts)):
        pool.policy.num_in_part[i] = 0
    return parts


cdef list list_parts(const Pool *pool):
    """The numbers of free pages in the parts of a policy; none without one."""
    cdef Py_ssize_t i
    return [pool.policy.num_in_part[i] for i in range(NUM_PARTS if pool.policy != NULL else 0)]


cdef bytes bytes_of(object array):
    """A copy of the memory of an array. ArgumentTypeError unless it is one without objects."""
    if isinstance(array, np.ndarray) and type(array) is not np.ndarray:
        array = np.asarray(array)
    if not isinstance(array, np.ndarray) or array.dtype.hasobject:
        raise ArgumentTypeError(f"the eviction policy: got {type(array).__name__}, allowed: an array without objects")
    return array.tobytes()


cdef int require_once(Pool *pool, str name, PageIds ids, Py_ssize_t i, bint is_entry) except -1:
    """SnapshotError for an id outside the pool, or of a page that is in the index, or free queue, already."""
    cdef int32_t page_id = ids.ids[i]
    if 0 < page_id < pool.num_pages and not (pool.pages[page_id].group != NO_GROUP if is_entry else is_free(pool, page_id)):
        return 0
    raise SnapshotError(f"{name}: got {page_id} (at {i}), allowed: 1 to {pool.num_pages - 1}, each once")


cdef int load_entries(Pool *pool, PageIds ids, PageIds groups, PageIds keys, PageIds tokens, PageIds kept) except -1:
    """Enter pages of a pool without entries in the prefix index, in order."""
    cdef Py_ssize_t i, width = pool.tokens_width
    cdef int32_t group, num_tokens
    if not (groups.num == kept.num == ids.num and keys.num == 4 * ids.num and tokens.num == ids.num * width):
        nums = f"{ids.num} ids, {groups.num} groups, {keys.num // 4} keys, {kept.num} flags"
        raise SnapshotError(f"cached pages: got {nums}, allowed: as many")
    if ids.num and pool.slots == NULL:
        raise SnapshotError(f"cached_page_ids: got {ids.num}, allowed without prefix caching: none")
    for i in range(ids.num):
        group, num_tokens = groups.ids[i], tokens.ids[i * width] if width else 0
        require_once(pool, "cached_page_ids", ids, i, True)
        if not 0 <= group <= MAX_GROUP:
            raise SnapshotError(f"cached_group_ids: got {group} (at {i}), allowed: 0 to {MAX_GROUP}")
        if num_tokens and not 0 < num_tokens < width:
            raise SnapshotError(f"cached_token_ids: page {ids.ids[i]} has {num_tokens}, allowed: 0 to {width - 1}")
        enter(pool, ids.ids[i], (<Digest *>(keys.ids + 4 * i))[0], group)
        if kept.ids[i]:
            pool.pages[ids.ids[i]].group |= KEPT
        if width:
            keep_tokens(pool, ids.ids[i], tokens.ids + i * width + 1, num_tokens)
    return 0


def give_back_restored(PageStore store not None) -> int | None:
    """Give back all references of a loaded store, the pages in order of their ids. Returns the number of pages. Returns None,
    and changes nothing, if the store was not loaded, or a reference was taken since. O(num_pages).
    """
    cdef Pool *pool = &store.pool
    cdef int32_t page_id, num_given = 0
    cdef bint is_restored
    with store.lock:
        is_restored = pool.is_restored
        for page_id in range(1, pool.num_pages if is_restored else 1):
            if pool.pages[page_id].ref_cnt > 0:
                pool.pages[page_id].ref_cnt = 1
                put_back(pool, page_id)
                num_given += 1
    return num_given if is_restored else None
