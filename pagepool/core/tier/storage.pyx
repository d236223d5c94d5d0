"""Storage outside the process, behind the tier: pages of the tier are stored there, filled from there, and held for readers."""

cimport cython
from cpython.mem cimport PyMem_RawCalloc as calloc
from cpython.mem cimport PyMem_RawFree as free
from cpython.mem cimport PyMem_RawMalloc as malloc
from libc.stdint cimport INT32_MAX, INT64_MAX, int32_t, int64_t, uint8_t, uint64_t
from libc.string cimport memcmp, memmove

from pagepool.core.base cimport MAX_GROUP
from pagepool.core.holding cimport StoredKey, count_hit_places
from pagepool.core.tier.tier cimport *
from pagepool.core.values cimport as_page_ids, require_matrix

import numpy as np

from pagepool.errors import ArgumentError, ArgumentTypeError, not_made


cdef PageTier tier_of(PageStore store):
    if store.pool.tier == NULL:
        raise ArgumentError("store: got one without a host tier, allowed: one with a tier")
    return <PageTier><object>store.tier


cdef void queue_unstored(Pool *pool, int32_t page_id) noexcept nogil:
    """Queue a cached page of the tier for storage. If memory is short it is not stored."""
    cdef Tier *storage = pool.tier
    cdef const Page *page = &pool.pages[page_id]
    assert storage.pool == NULL and page.group != NO_GROUP and storage.num == storage.num_due
    if not reserve_transfers(storage, 1):
        storage.counters.num_refused_pages += 1
        return
    queue_transfer(storage, Transfer(
        key=digest_of(page), number=storage.arrivals[page_id], page_id=page_id, tier_id=NULL_PAGE, group=page.group & ~FLAGS,
        is_load=False, is_void=False,
    ))


cdef void store_evicted(Pool *pool, int32_t page_id) noexcept nogil:
    """Queue a page that the tier evicts, unless another page of the tier has its content."""
    assert pool.pages[page_id].group != NO_GROUP
    if not pool.pages[page_id].group & TWIN:
        queue_unstored(pool, page_id)


cdef void store_cached(Pool *pool, int32_t page_id, bint may_be_replaced) noexcept nogil:
    """Queue a page that reached the tier."""
    note_arrival(pool, page_id, may_be_replaced)
    queue_unstored(pool, page_id)


cdef void note_arrival(Pool *pool, int32_t page_id, bint may_be_replaced) noexcept nogil:
    """Note the step in which a page reached the tier."""
    assert not may_be_replaced  # the tier has no checkpoints of its own
    assert 0 < page_id < pool.num_pages and pool.tier.num_steps >= 0
    pool.tier.arrivals[page_id] = pool.tier.num_steps


cdef bint is_linked(const Tier *storage) noexcept nogil:
    """Whether storage is behind the tier, rather than nothing, or readers alone."""
    return storage.pool == NULL and storage.save_evicted == store_evicted


cdef void leave_unstored(Pool *pool, int32_t page_id) noexcept nogil:
    """Store nothing of a page that the tier evicts: no storage is linked."""
    assert pool.pages[page_id].group != NO_GROUP


cdef void follow_arrival(Pool *pool, int32_t page_id, bint may_be_replaced) noexcept nogil:
    """Note an arrival without storage. Notes of wrong contents are for storage alone, so they end here."""
    note_arrival(pool, page_id, may_be_replaced)
    pool.tier.num = pool.tier.num_due = 0


cdef void follow_arrivals(Pool *pool, Tier *storage) noexcept nogil:
    """Note arrivals in the tier's pool from now on without storing pages. The storage has its `arrivals`."""
    assert storage.arrivals != NULL
    storage.save_evicted, storage.record_cached = leave_unstored, follow_arrival
    storage.num = storage.num_due = 0
    pool.tier = storage


def link_storage(PageStore store not None, bint writes_through=False) -> None:
    """Put storage behind the tier of a store. A page that the tier evicts is due there. If the storage `writes_through`, pages
    are also due as they reach the tier. ArgumentError if there is storage already. O(pages of the tier).
    """
    cdef PageTier tier = tier_of(store)
    cdef Tier *storage = &tier.storage
    cdef Pool *pool = &tier.pages.pool
    cdef int64_t *arrivals = <int64_t *>calloc(pool.num_pages, sizeof(int64_t))
    cdef bint is_new = False
    if arrivals == NULL:
        raise MemoryError("the storage behind a tier")
    with store.own_lock()[0]:
        is_new = not is_linked(storage)
        if is_new:
            arrivals, storage.arrivals = storage.arrivals, arrivals
            storage.num = storage.num_due = 0  # notes from before
            storage.num_clears = storage.num_steps = 0
            storage.save_evicted = store_evicted
            storage.record_cached = store_cached if writes_through else note_arrival
            pool.tier = storage
    free(arrivals)
    if not is_new:
        raise ArgumentError("host_tier: got one that has storage behind it, allowed: one without")


def unlink_storage(PageStore store not None) -> None:
    """Take the storage away; nothing is due there any more. O(1)."""
    cdef PageTier tier = tier_of(store)
    with store.own_lock()[0]:
        if tier.storage.arrivals != NULL:
            follow_arrivals(&tier.pages.pool, &tier.storage)


def take_unstored(PageStore store not None, num_steps=0) -> tuple:
    """Return the pages of the tier that are due for storage, in order: an array ``[n, 2]`` of their keys, lower half first,
    their groups, their ids in the tier, and the steps in which they are settled; then the number of the present step, and how
    often everything was dropped since the storage was linked. Contents stay until the transfers due before this call are
    made. Page 0 stands for a key whose content was found to be wrong.

    A step begins with each call of `take_moves`, except calls for forks and refused calls. A page is settled `num_steps` steps
    after it reached the tier: until then its own step may turn out to have failed. Unsettled pages that are still in the tier
    are not due yet. O(pages).
    """
    cdef PageTier tier = tier_of(store)
    cdef Tier *storage = &tier.storage
    cdef int64_t num_waiting = size_of(num_steps, "num_steps", 0, INT32_MAX), now = 0, num_clears = 0
    cdef uint64_t[:, ::1] key_view
    cdef int32_t[:, ::1] id_view
    cdef int64_t[::1] step_view
    cdef Transfer *item
    cdef Py_ssize_t i, num_kept, num_due = -1, num = storage.num
    while num_due < 0:  # arrays are made without the lock
        keys, ids, steps = np.empty((num, 2), np.uint64), np.empty((2, num), np.int32), np.empty(num, np.int64)
        key_view, id_view, step_view = keys, ids, steps
        with store.own_lock()[0]:
            now, num_clears = storage.num_steps, storage.num_clears
            if storage.num <= num:
                num_due = num_kept = 0
                for i in range(storage.num):
                    item = &storage.items[i]
                    if is_waiting(&tier.pages.pool, item, now - num_waiting):
                        storage.items[num_kept] = item[0]
                        num_kept += 1
                        continue
                    key_view[num_due, 0], key_view[num_due, 1] = item.key.lo, item.key.hi
                    id_view[0, num_due] = item.group
                    id_view[1, num_due] = 0 if item.is_void else id_in_bank(&tier.pages.pool, item.page_id)
                    step_view[num_due] = item.number + num_waiting
                    num_due += 1
                assert num_kept + num_due == storage.num
                storage.num = storage.num_due = num_kept
            num = storage.num
    return keys[:num_due], ids[0, :num_due], ids[1, :num_due], steps[:num_due], now, num_clears


cdef bint is_waiting(const Pool *pool, const Transfer *item, int64_t last_settled) noexcept nogil:
    """Whether a page is not settled yet, and still in the tier."""
    assert not item.is_load and (item.is_void or 0 < item.page_id < pool.num_pages)
    return not item.is_void and item.number > last_settled and has_key(&pool.pages[item.page_id], item.key, item.group)


cdef StoredKey *read_keys(object keys, object group_ids, Py_ssize_t num_groups, Py_ssize_t *num) except? NULL:
    """Copy keys and their groups from arrays; the caller frees the memory."""
    cdef const uint64_t[:, :] key_view = require_matrix(keys, np.uint64, "keys")
    cdef PageIds group_view = as_page_ids(group_ids, "groups")
    cdef Py_ssize_t i
    cdef StoredKey *copied
    num[0] = key_view.shape[0]
    assert num[0] >= 0 and num_groups >= 0
    if key_view.shape[1] != 2 or num[0] != group_view.num:
        raise ArgumentError(f"keys: got shape {keys.shape} for {group_view.num} groups, allowed: [{group_view.num}, 2]")
    for i in range(num[0]):
        if not 0 <= group_view.ids[i] < num_groups:
            raise ArgumentError(f"groups: got {group_view.ids[i]} (at {i}), allowed: 0 to {num_groups - 1}")
    copied = <StoredKey *>malloc(max(1, num[0]) * sizeof(StoredKey))
    if copied == NULL:
        raise MemoryError("the keys of pages")
    for i in range(num[0]):
        copied[i] = StoredKey(
            key=Digest(lo=key_view[i, 0], hi=key_view[i, 1]), upper=Digest(lo=0, hi=0), group=group_view.ids[i],
        )
    return copied


# Fills: pages of the tier that get contents from storage. Their transfers have the negative of their list's number.

cdef int find_uppers(HashChain chain, StoredKey *keys, Py_ssize_t num) except -1:
    """Set the upper halves of the keys that a chain of SHA-256 has. O(keys + pages) for keys in the order of the chain."""
    cdef Py_ssize_t i, _, at = 0
    with chain.own_lock()[0]:
        for i in range(num if chain.uppers != NULL else 0):
            for _ in range(chain.num):
                at = 0 if at == chain.num else at
                if memcmp(&chain.digests[at], &keys[i].key, sizeof(Digest)) == 0:
                    keys[i].upper = chain.uppers[at]
                    break
                at += 1
    return 0


def begin_fills(PageStore store not None, banks, keys, group_ids, HashChain chain=None) -> tuple:
    """Take a free page of the tier for each key that neither pool nor tier has, while the bank of its group has free pages.
    Return the number of this list, or 0 if no page was taken, and the page for each key, 0 where none was taken. The pages are
    held until `end_fills`. Pages evicted for them are due for storage: copy these before anything is written. No page is taken
    if everything was dropped since the storage was linked. `banks` has the bank of each group. `chain` has the whole digests of
    the keys, for events; None: the keys are whole. O(keys + pages + transfers in flight).
    """
    cdef PageTier tier_pages = tier_of(store)
    cdef Tier *tier = &tier_pages.tier
    cdef Py_ssize_t i, num = 0, num_taken = 0
    cdef int64_t number = 0
    cdef bint has_room, is_right
    cdef PageIds bank_of = PageIds([store.checked_bank(bank) for bank in as_list(banks, "banks")])
    cdef StoredKey *wanted = read_keys(keys, group_ids, bank_of.num, &num)
    cdef int32_t[::1] taken
    try:
        if chain is not None:
            find_uppers(chain, wanted, num)
        page_ids = np.zeros(num, np.int32)
        taken = page_ids
        with store.own_lock()[0]:
            has_room = reserve_transfers(tier, num)
            number = tier.num_fills + 1
            is_right = tier_pages.storage.num_clears == 0 or not is_linked(&tier_pages.storage)
            for i in range(num if has_room and is_right else 0):
                taken[i] = id_in_bank(tier.pool, begin_fill(&store.pool, &wanted[i], bank_of.ids[wanted[i].group], number))
                num_taken += taken[i] != NULL_PAGE
            assert num_taken <= num and tier.num_fills >= 0
            tier.num_fills += num_taken > 0
    finally:
        free(wanted)
    if not has_room:
        raise MemoryError("pages filled from storage")
    return number if num_taken else 0, page_ids


cdef int32_t begin_fill(Pool *pool, const StoredKey *wanted, int32_t bank, int64_t number) noexcept nogil:
    """Take a free page of the tier in a bank for a key, and put its transfer before those that are due. There must be room.
    Return the null page if no page is free, or pool or tier has the content.
    """
    cdef Tier *tier = pool.tier
    cdef int32_t tier_id = NULL_PAGE, queue = queue_in(tier.pool, bank, -1)
    cdef Transfer *at = &tier.items[tier.num - tier.num_due]
    assert 0 <= tier.num_due <= tier.num < tier.capacity and number > 0
    if find(pool, wanted.key, wanted.group) != NULL_PAGE or find(tier.pool, wanted.key, wanted.group) != NULL_PAGE:
        return NULL_PAGE
    if count_free_in(tier.pool, queue) == 0:
        return NULL_PAGE
    take(tier.pool, &tier_id, 1, queue, NO_SESSION)
    assert tier.pool.pages[tier_id].ref_cnt == 1 and tier.pool.pages[tier_id].group == NO_GROUP
    if rare(tier.pool.uppers != NULL):
        tier.pool.uppers[tier_id] = wanted.upper
    memmove(at + 1, at, tier.num_due * sizeof(Transfer))
    at[0] = Transfer(
        key=wanted.key, number=-number, page_id=NULL_PAGE, tier_id=tier_id, group=wanted.group, is_load=False, is_void=False,
    )
    tier.num += 1
    return tier_id


def end_fills(PageStore store not None, number, failed=()) -> None:
    """End a list of `begin_fills`: its pages can hit now, except those whose indices in the taken pages are in `failed`.
    ArgumentError for an unknown number or index. O(transfers in flight).
    """
    cdef PageTier tier_pages = tier_of(store)
    cdef Tier *tier = &tier_pages.tier
    cdef int64_t checked = size_of(number, "number", 1, INT64_MAX)
    cdef list wrong = list(as_list(failed, "failed", False))
    cdef Py_ssize_t i, at, num
    cdef bytearray is_failed
    cdef char *flags
    with store.own_lock()[0]:
        num = count_in_flight(tier, -checked, False)
    is_failed = bytearray(num)
    for index in wrong if num else ():
        is_failed[size_of(index, "failed", 0, num - 1)] = True
    flags = is_failed
    with store.own_lock()[0]:
        at = num = num if num == count_in_flight(tier, -checked, False) else 0
        for i in range(tier.num - 1 if num else -1, -1, -1):  # last page first, so that it is evicted first
            if tier.items[i].number == -checked:
                at -= 1
                end_save(&store.pool, &tier.items[i], not flags[at])
        assert at == 0
        forget_list(tier, -checked)
    if num == 0:
        raise ArgumentError(f"number: got {checked}, allowed: that of pages being filled")


def list_absent(
    PageStore store not None, CacheGroups groups not None, HashChain chain not None, num_tokens, keys=None, group_ids=()
) -> tuple:
    """Return the pages that a request of `num_tokens` tokens needs, and neither pool nor tier has: an array ``[n, 2]`` of keys,
    lower half first, and their groups. With the `keys` of pages in storage, ascending by the lower half, return only the pages
    that the longest hit with them needs; its pages that only the tier has count as just used, to stay until these arrive. The
    third and fourth result are the tokens of the hit without and with these keys, one token being left to compute.
    O(pages x groups x log keys).
    """
    cdef Py_ssize_t num_stored = 0, num_listed = 0, num_now, num_then, size = chain.page_size
    cdef Py_ssize_t num = size_of(num_tokens, "num_tokens", 0, INT64_MAX)
    cdef bint is_all = keys is None
    cdef StoredKey *stored = NULL if is_all else read_keys(keys, group_ids, MAX_GROUP, &num_stored)
    cdef StoredKey *listed = NULL
    cdef Ranges everywhere = ranges_in(store, (0, None))
    cdef uint64_t[:, ::1] key_view
    cdef int32_t[::1] group_view
    cdef Py_ssize_t i
    cdef Query query
    try:
        tier_of(store)
        store.require_own()
        with chain.own_lock()[0], store.lock:
            query = query_of(groups, chain.digests, chain.num, size, num, everywhere)
            query.reaches_tier = True
            num_now = num_then = find_longest(&store.pool, &query)
            query.stored, query.num_stored = stored, num_stored
            if num_stored:
                num_then = find_longest(&store.pool, &query)
            listed = <StoredKey *>malloc(max(1, query.num_digests * groups.num) * sizeof(StoredKey))
            if listed != NULL and is_all:
                num_listed = copy_absent(&store.pool, &query, query.num_digests, True, listed)
            elif listed != NULL and num_then > num_now:
                num_listed = copy_absent(&store.pool, &query, num_then, False, listed)
                use_present(&store.pool, &query, num_then)
        if listed == NULL:
            raise MemoryError("the keys of pages")
        listed_keys, listed_groups = np.empty((num_listed, 2), np.uint64), np.empty(num_listed, np.int32)
        key_view, group_view = listed_keys, listed_groups
        for i in range(num_listed):
            key_view[i, 0], key_view[i, 1], group_view[i] = listed[i].key.lo, listed[i].key.hi, listed[i].group
    finally:
        free(stored)
        free(listed)
    return listed_keys, listed_groups, num_now * size, num_then * size


cdef Py_ssize_t copy_absent(
    Pool *pool, const Query *query, Py_ssize_t num_hashes, bint is_all, StoredKey *listed
) noexcept nogil:
    """Copy the keys of the pages of `num_hashes` hashes that neither pool nor tier has: all, or those that a hit needs. Return
    their number.
    """
    cdef const Group *group
    cdef Py_ssize_t g, page, num = 0
    cdef Digest key
    for g in range(query.num_groups if query.kinds.num_hit_hashes else 0):
        group = &query.groups[g]
        for page in range(0 if is_all else find_first_hit_page(query, group, num_hashes), count_hit_places(group, num_hashes)):
            key = query.digests[last_hash(group, page)]
            if find(pool, key, group.id) == NULL_PAGE and find(pool.tier.pool, key, group.id) == NULL_PAGE:
                listed[num] = StoredKey(key=key, upper=Digest(lo=0, hi=0), group=group.id)
                num += 1
    assert num <= query.num_digests * query.num_groups
    return num


cdef void use_present(Pool *pool, const Query *query, Py_ssize_t num_hashes) noexcept nogil:
    """Treat the pages of a hit that only the tier has as just used, the last page first."""
    cdef const Group *group
    cdef Py_ssize_t g, page
    cdef int32_t tier_id
    cdef Digest key
    for g in range(query.num_groups - 1, -1, -1):
        group = &query.groups[g]
        for page in range(count_hit_places(group, num_hashes) - 1, find_first_hit_page(query, group, num_hashes) - 1, -1):
            key = query.digests[last_hash(group, page)]
            tier_id = find(pool.tier.pool, key, group.id)
            assert tier_id == NULL_PAGE or tier_id < pool.tier.pool.num_pages
            if tier_id != NULL_PAGE and find(pool, key, group.id) == NULL_PAGE:
                keep_longer(pool.tier, tier_id)


@cython.final
@cython.auto_pickle(False)
cdef class TierHold:
    """Pages of the tier that are held for a reader until `release`: see `hold_stored`. ``page_ids`` has the page of each key, 0
    if none is held. ``num_clears`` counts how often everything was dropped before.
    """

    cdef PageStore store
    cdef StoredKey *keys
    cdef int32_t *ids
    cdef Py_ssize_t num
    cdef readonly object page_ids
    cdef readonly int64_t num_clears

    def __init__(self):
        raise TypeError("a TierHold is what hold_stored returns")

    def __dealloc__(self):
        free(self.keys)
        free(self.ids)

    def __reduce__(self):
        raise ArgumentTypeError("held pages of a tier cannot be pickled")

    def release(self):
        """Give the pages back, the last one first. Return an array of bool: whether each was held up to now, and still has its
        key, so that what was read from its row is right. A second call returns only False. O(keys).
        """
        cdef Pool *pool
        cdef Py_ssize_t i
        cdef uint8_t[::1] right_view
        if self.store is None:
            raise not_made("TierHold")
        pool = &tier_of(self.store).pages.pool
        are_right = np.zeros(len(self.page_ids), np.uint8)
        right_view = are_right
        with self.store.own_lock()[0]:
            for i in range(self.num - 1, -1, -1):
                if self.ids[i] != NULL_PAGE:
                    assert pool.pages[self.ids[i]].ref_cnt > 0
                    right_view[i] = has_key(&pool.pages[self.ids[i]], self.keys[i].key, self.keys[i].group)
                    give_back(pool, self.ids[i])
            self.num = 0
        return are_right.view(np.bool_)


cdef int32_t hold_settled(Pool *pool, const StoredKey *wanted, int64_t last_settled) noexcept nogil:
    """Hold the page of a key that arrived in the tier's pool in a step up to `last_settled`. Return it, or the null page."""
    cdef int32_t tier_id = find(pool, wanted.key, wanted.group)
    assert pool.tier.arrivals != NULL and tier_id < pool.num_pages
    if tier_id == NULL_PAGE or pool.tier.arrivals[tier_id] > last_settled:
        return NULL_PAGE
    hit(pool, &tier_id, 1, NO_SESSION)
    return tier_id


def hold_stored(PageStore store not None, keys, group_ids, num_steps=0) -> TierHold:
    """Hold the pages of `keys` in the tier until `TierHold.release`: their rows keep these contents, even while pool and tier
    drop the keys. `keys` is an array ``[n, 2]``, lower half first, with a group for each. Pages that are not settled, as
    `take_unstored` says for `num_steps`, are not held. The others count as just used.

    Before the first call no arrivals are noted, so pages of that time are settled `num_steps` steps after it. Pages stay held
    until `release`. O(keys), and O(pages of the tier) for the first call.
    """
    cdef PageTier tier = tier_of(store)
    cdef int64_t num_waiting = size_of(num_steps, "num_steps", 0, INT32_MAX)
    cdef TierHold hold = TierHold.__new__(TierHold)
    cdef int64_t *arrivals = NULL
    cdef int32_t[::1] id_view
    cdef Py_ssize_t i, num = 0
    cdef bint must_follow = tier.pages.pool.tier == NULL
    hold.keys = read_keys(keys, group_ids, MAX_GROUP, &num)
    hold.ids = <int32_t *>calloc(max(1, num), sizeof(int32_t))
    hold.page_ids = np.zeros(num, np.int32)
    id_view = hold.page_ids
    if must_follow:
        arrivals = <int64_t *>calloc(tier.pages.pool.num_pages, sizeof(int64_t))
    if hold.ids == NULL or (must_follow and arrivals == NULL):
        free(arrivals)
        raise MemoryError("pages held for a reader")
    hold.store = store
    with store.own_lock()[0]:
        if tier.pages.pool.tier == NULL:
            assert must_follow
            arrivals, tier.storage.arrivals = tier.storage.arrivals, arrivals
            tier.storage.num_steps = 0
            follow_arrivals(&tier.pages.pool, &tier.storage)
        hold.num, hold.num_clears = num, tier.tier.num_clears
        for i in range(num):
            hold.ids[i] = hold_settled(&tier.pages.pool, &hold.keys[i], tier.storage.num_steps - num_waiting)
            id_view[i] = id_in_bank(&tier.pages.pool, hold.ids[i])
    free(arrivals)
    return hold
