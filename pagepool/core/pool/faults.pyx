"""Faults of the links between pages, and of an eviction policy."""

from libc.stdint cimport INT64_MAX, int32_t, int64_t

from pagepool.core.pool.layouts cimport *
from pagepool.core.pool.pool cimport *
from pagepool.core.values cimport as_page_ids

cdef int64_t MAX_POLICY_COUNT = INT64_MAX // 8  # so that sums of counts do not overflow


def follow(prev_ids, next_ids, first_ids) -> tuple:
    """List the ids of rings, each ring from its first id on. Return all ids and True or, if a link does not lead back, the ids
    up to the first such link and False.
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
    with store.own_lock()[0]:
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
    """Return the first page that is marked blank, but has a stamp; -1: none."""
    cdef Py_ssize_t i
    for i in range(pool.policy.num_pages):
        if pool.policy.marks[i] & PART == BLANK and pool.policy.marks[i] != BLANK:
            return i
    return -1


cdef Py_ssize_t find_wrong_set(const Pool *pool) noexcept nogil:
    """Return the first set of the ghost with an entry that belongs to another set, has no part, or is there twice; -1: none."""
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
