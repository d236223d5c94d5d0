"""Checks of a policy, and pools loaded from a snapshot."""

from libc.stdint cimport INT32_MAX, INT64_MAX, int32_t, int64_t
from libc.string cimport memcpy

from pagepool.core.base cimport MAX_GROUP
from pagepool.core.pool.layouts cimport *
from pagepool.core.pool.pool cimport *
from pagepool.core.values cimport as_list, as_own_ids, as_page_ids, require_matrix, size_of

import numpy as np

from pagepool.core.pool.store import COUNTERS
from pagepool.errors import ArgumentTypeError, SnapshotError

cdef enum:
    NUM_BANK_COUNTERS = 5

cdef int64_t MAX_POLICY_COUNT = INT64_MAX // 8  # so that sums of counts are counts too


def follow(prev_ids, next_ids, first_ids) -> tuple:
    """List the ids of rings, each from its first on. Return them and True, or False at the first link that does not lead back,
    with the ids before it.
    """
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
    """Describe the first fault in the marks, ghost and counts of the eviction policy of a pool, or of the tier behind it; None
    if there is none. O(num_pages).
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
    """Find the first page whose mark of the blank part has a stamp, or -1."""
    cdef Py_ssize_t i
    for i in range(pool.policy.num_pages):
        if pool.policy.marks[i] & PART == BLANK and pool.policy.marks[i] != BLANK:
            return i
    return -1


cdef Py_ssize_t find_wrong_set(const Pool *pool) noexcept nogil:
    """Find the first set of the ghost with an entry that belongs to another set, has no part, or is there twice. -1: none."""
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


def load_store(kind, pools, ref_counts, free_page_ids, cached, policy, totals) -> PageStore:
    """Make a store from the arrays of a snapshot. `kind` is whether prefixes are cached, and the eviction policy; `pools` has
    names, numbers of pages and counters, by bank; `cached` has the ids, group ids, keys, upper halves of digests or none, and
    token ids of cached pages, and whether they stay behind windows; `policy` has marks, ghosts, counts and learned values,
    empty without a policy; `totals` has the counters and the number of shards. SnapshotError if they contradict one another.
    O(num_pages).
    """
    cdef PageIds counts = as_own_ids(ref_counts, "ref_counts")
    enable_caching, eviction = kind
    cached_page_ids, cached_group_ids, cached_keys, cached_uppers, cached_token_ids, cached_kept = cached
    counters, num_shards = totals
    cdef PageStore store = make_store_of_pools(counts.num, enable_caching, eviction, pools)
    tokens = require_matrix(cached_token_ids, np.int32, "cached_token_ids")
    keys = np.ascontiguousarray(require_matrix(cached_keys, np.uint64, "cached_keys"))
    uppers = np.ascontiguousarray(require_matrix(cached_uppers, np.uint64, "cached_uppers"))
    cdef Py_ssize_t width = tokens.shape[1]
    if width:
        store.keep_token_ids(size_of(width - 1, "page_size", 1))
    if len(uppers):
        store.keep_whole_digests()
    load_entries(
        &store.pool,
        as_own_ids(cached_page_ids, "cached_page_ids"),
        as_own_ids(cached_group_ids, "cached_group_ids"),
        as_own_ids(keys.view(np.int32).reshape(-1), "cached_keys"),
        as_own_ids(uppers.view(np.int32).reshape(-1), "cached_uppers"),
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


cdef PageStore make_store_of_pools(Py_ssize_t num_pages, object enable_caching, object eviction, object pools):
    """Make the store of a snapshot with `num_pages` pages, the null page included, in all of these pools."""
    cdef PageStore store
    cdef list sizes
    cdef Py_ssize_t i
    names, nums_pages, pool_counters = pools
    sizes = [size_of(size, "pool_sizes", 1) for size in as_list(nums_pages, "pool_sizes")]
    counted = np.ascontiguousarray(require_matrix(pool_counters, np.int64, "pool_counters"))
    if not sizes or sum(sizes) - len(sizes) + 1 != num_pages or counted.shape != (len(sizes), NUM_BANK_COUNTERS):
        got = f"{sizes}, {len(counted)} rows of counters and {num_pages} ref counts"
        raise SnapshotError(f"pool_sizes: got {got}, allowed: the same pools and pages")
    store = PageStore(
        sizes[0], enable_caching, eviction=eviction, further_banks=[size - 1 for size in sizes[1:]], bank_names=names,
    )
    for i in range(len(sizes)):
        allocated, evicted, lost, refusals, passed = [
            size_of(count, "pool_counters", 0, INT64_MAX) for count in counted[i].tolist()
        ]
        store.pool.banks[i].num_allocated_pages, store.pool.banks[i].num_evicted_pages = allocated, evicted
        store.pool.banks[i].num_lost_hit_tokens, store.pool.banks[i].num_refusals = lost, refusals
        store.pool.banks[i].num_passed_checkpoints = passed
    return store


cdef int load_queue(Pool *pool, PageIds ref_counts, PageIds free_ids) except -1:
    """Set the ref counts, and the order of the free queue."""
    cdef Py_ssize_t i
    cdef int32_t page_id, count
    cdef bint is_queued
    assert pool.num_free == 0
    for i in range(free_ids.num):
        require_once(pool, "free_page_ids", free_ids, i, False)
        if is_served(pool, free_ids.ids[i]):
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
    assert pool.num_free == free_ids.num
    return 0


cdef list load_policy(Pool *pool, object arrays):
    """Set the marks, ghosts, counts and learned values of a policy whose queue is empty. Without a policy the arrays must be
    empty. Return the saved numbers of free pages in the parts, which are reset to 0.
    """
    cdef Items items
    cdef Item *target
    cdef Py_ssize_t i
    cdef bytes source
    assert pool.num_free == 0
    list_items(pool, &items)
    for name, array in zip((b"marks", b"ghosts", b"policy_counts", b"learned"), arrays, strict=True):
        source = bytes_of(array)
        target = find_item(&items, name)
        if len(source) != target.size:
            raise SnapshotError(f"the eviction policy: got {len(source)} bytes, allowed: {target.size}")
        if target.size:
            memcpy(target.start, <const char *>source, target.size)
    i = find_wrong_mark(pool) if pool.policy != NULL else -1
    if i >= 0:
        raise SnapshotError(describe_mark(pool, i))
    parts = list_parts(pool)
    for i in range(len(parts)):
        pool.policy.num_in_part[i] = 0
    return parts


cdef list list_parts(const Pool *pool):
    """List the numbers of free pages in the parts of a policy; none without one."""
    cdef Py_ssize_t i
    return [pool.policy.num_in_part[i] for i in range(NUM_PARTS if pool.policy != NULL else 0)]


cdef bytes bytes_of(object array):
    """Copy the memory of an array. ArgumentTypeError for anything else, and for arrays of objects."""
    if isinstance(array, np.ndarray) and type(array) is not np.ndarray:
        array = np.asarray(array)
    if not isinstance(array, np.ndarray) or array.dtype.hasobject:
        raise ArgumentTypeError(f"the eviction policy: got {type(array).__name__}, allowed: an array without objects")
    return array.tobytes()


cdef int require_once(Pool *pool, str name, PageIds ids, Py_ssize_t i, bint is_entry) except -1:
    """Raise SnapshotError for an id outside the pool, or a page that is in the index, or the free queue, already."""
    cdef int32_t page_id = ids.ids[i]
    if 0 < page_id < pool.num_pages and not (pool.pages[page_id].group != NO_GROUP if is_entry else is_free(pool, page_id)):
        return 0
    raise SnapshotError(f"{name}: got {page_id} (at {i}), allowed: 1 to {pool.num_pages - 1}, each once")


cdef int load_entries(
    Pool *pool, PageIds ids, PageIds groups, PageIds keys, PageIds uppers, PageIds tokens, PageIds kept
) except -1:
    """Cache pages in order, in a pool without cached pages."""
    cdef Py_ssize_t i, width = pool.tokens_width
    cdef Entry entry
    cdef int32_t group, num_tokens
    assert pool.num_entries == 0
    if not (groups.num == kept.num == ids.num and keys.num == 4 * ids.num and tokens.num == ids.num * width):
        nums = f"{ids.num} ids, {groups.num} groups, {keys.num // 4} keys, {kept.num} flags"
        raise SnapshotError(f"cached pages: got {nums}, allowed: as many")
    if uppers.num not in (0, keys.num):
        raise SnapshotError(f"cached_uppers: got {uppers.num // 4}, allowed: none, or {ids.num}")
    if ids.num and pool.slots == NULL:
        raise SnapshotError(f"cached_page_ids: got {ids.num}, allowed without prefix caching: none")
    for i in range(ids.num):
        group, num_tokens = groups.ids[i], tokens.ids[i * width] if width else 0
        require_once(pool, "cached_page_ids", ids, i, True)
        if not 0 <= group <= MAX_GROUP:
            raise SnapshotError(f"cached_group_ids: got {group} (at {i}), allowed: 0 to {MAX_GROUP}")
        if num_tokens and not 0 < num_tokens < width:
            raise SnapshotError(f"cached_token_ids: page {ids.ids[i]} has {num_tokens}, allowed: 0 to {width - 1}")
        entry = bare_entry(<const Digest *>(keys.ids + 4 * i), group)
        entry.upper = <const Digest *>(uppers.ids + 4 * i) if uppers.num else NULL
        entry.token_ids, entry.num_tokens = tokens.ids + i * width + 1, num_tokens
        cache(pool, ids.ids[i], &entry, NULL, NULL, 0)
        if kept.ids[i]:
            pool.pages[ids.ids[i]].group |= KEPT
    assert pool.num_entries == ids.num and pool.num_keys <= pool.num_entries
    return 0


def give_back_restored(PageStore store not None) -> int | None:
    """Give back all references of a loaded store, in the order of page ids, and return the number of pages. Return None, with
    nothing changed, if the store was not loaded or references were taken since. O(num_pages).
    """
    cdef Pool *pool = &store.pool
    cdef int32_t page_id, num_given = 0
    cdef bint is_restored
    with store.lock:
        is_restored = pool.is_restored
        for page_id in range(1, pool.num_pages if is_restored else 1):
            if pool.pages[page_id].ref_cnt > 0:
                pool.pages[page_id].ref_cnt = 1
                give_back(pool, page_id)
                num_given += 1
    return num_given if is_restored else None
