"""Transfers between a pool and its tier, taken and ended."""

cimport cython
from cpython.mem cimport PyMem_RawCalloc as calloc
from cpython.mem cimport PyMem_RawFree as free
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint8_t

from pagepool.core.arguments cimport as_list, size_of
from pagepool.core.holdings cimport find_wrong
from pagepool.core.ids cimport PageIds
from pagepool.core.records cimport Pool, Tier, Transfer
from pagepool.core.request_pages cimport RequestPages
from pagepool.core.store cimport PageStore
from pagepool.core.transfers cimport end_load, end_save, find_oldest_load, save_fresh

import numpy as np

from pagepool.errors import ArgumentError, ArgumentTypeError


@cython.final
@cython.auto_pickle(False)
cdef class Transfers:
    """Pages to be transferred before the next step, under a `number`; 0 for none.

    Pages ``save_src[i]`` of the device are saved in pages ``save_dst[i]`` of the tier, in the arrays of group
    ``save_group[i]``; pages ``load_src[i]`` of the tier are loaded into pages ``load_dst[i]`` of the device, ``load_group[i]``.
    They are read-only int32 arrays. All saves are read before any load is written; no destination stands there twice.
    ``len()`` counts both.
    """

    cdef readonly int64_t number
    cdef readonly object save_src, save_dst, save_group
    cdef readonly object load_src, load_dst, load_group

    def __init__(self):
        raise TypeError("a Transfers is what take_transfers returns")

    def __len__(self):
        return len(self.save_src) + len(self.load_src)

    def __repr__(self):
        names = ("save_src", "save_dst", "save_group", "load_src", "load_dst", "load_group")
        return f"Transfers(number={self.number}, {', '.join(f'{name}={getattr(self, name).tolist()}' for name in names)})"

    def __reduce__(self):
        raise ArgumentTypeError("transfers cannot be pickled")


cdef Transfers transfers_of(int64_t number, object columns, Py_ssize_t num_saves):
    cdef Transfers transfers = Transfers.__new__(Transfers)
    columns.flags.writeable = False
    transfers.number = number
    transfers.save_src, transfers.save_dst, transfers.save_group = columns[:, :num_saves]
    transfers.load_dst, transfers.load_src, transfers.load_group = columns[:, num_saves:]
    return transfers


cdef Transfers NO_TRANSFERS = transfers_of(0, np.zeros((3, 0), np.int32), 0)


def take_transfers(PageStore store not None) -> Transfers:
    """Return the transfers that are due; from now on the caller does them. O(transfers); nothing is allocated without any."""
    cdef Pool *pool = &store.pool
    cdef Tier *tier
    cdef int32_t[:, ::1] taken
    cdef Py_ssize_t num_due, num = -1, num_saves = 0
    cdef int64_t number = 0
    if store.pool.tier == NULL:
        return NO_TRANSFERS
    with store.lock:
        tier = pool.tier
        save_fresh(pool)
        num_due = tier.num_due
    if num_due == 0:
        return NO_TRANSFERS
    while num != num_due:  # arrays are made without the lock
        num = num_due
        columns = np.empty((3, num), np.int32)
        taken = columns
        with store.lock:
            num_due = tier.num_due
            if num == num_due and num:
                num_saves = take_due(tier, &taken[0, 0], num)
                number = tier.last_number
    return transfers_of(number, columns, num_saves) if num else NO_TRANSFERS


cdef Py_ssize_t take_due(Tier *tier, int32_t *taken, Py_ssize_t num) noexcept nogil:
    """Give the `num` due transfers a number, and copy their columns, saves first. Returns how many saves there are."""
    cdef Transfer *transfer
    cdef Py_ssize_t i, at, num_saves = 0, num_loads = 0
    tier.last_number += 1
    for i in range(tier.num - tier.num_due, tier.num):
        num_saves += not tier.items[i].is_load
    for i in range(tier.num - tier.num_due, tier.num):
        transfer = &tier.items[i]
        transfer.number = tier.last_number
        at = num_saves + num_loads if transfer.is_load else i - (tier.num - tier.num_due) - num_loads
        num_loads += transfer.is_load
        taken[at], taken[num + at], taken[2 * num + at] = transfer.page_id, transfer.tier_id, transfer.group
    tier.num_due = 0
    return num_saves


@cython.final
@cython.auto_pickle(False)
cdef class FailedLoads:
    """Pages of a pool that loads, taken under a `number`, have left with a wrong content. ``len()`` counts them."""

    def __cinit__(self):
        self.ids = PageIds.__new__(PageIds)

    def __init__(self):
        raise TypeError("a FailedLoads is what fail_transfers returns")

    def __dealloc__(self):
        free(self.is_wrong)

    def __len__(self):
        return self.ids.num

    def __repr__(self):
        return f"FailedLoads(number={self.number}, page_ids={self.page_ids})"

    def __reduce__(self):
        raise ArgumentTypeError("failed loads cannot be pickled")

    @property
    def page_ids(self) -> list:
        return self.ids.to_list()[::-1]


cdef int mark_failed(char *is_failed, Py_ssize_t num, list places, str name) except -1:
    """Mark the transfers that failed, which are given by their places."""
    for place in places:
        is_failed[size_of(place, name, 0, num - 1)] = True
    return 0


def end_transfers(PageStore store not None, number, failed_saves=(), failed_loads=()) -> FailedLoads:
    """End the transfers that were taken under a number. Those that failed are given by their places among the saves, or among
    the loads. O(transfers in flight, and num_pages).
    """
    cdef Pool *pool = &store.pool
    cdef Tier *tier = pool.tier
    cdef int64_t checked = size_of(number, "number", 1, INT64_MAX)
    cdef FailedLoads failed = FailedLoads.__new__(FailedLoads)
    cdef list wrong_saves = list(as_list(failed_saves, "saves")), wrong_loads = list(as_list(failed_loads, "loads"))
    cdef Py_ssize_t i, num_saves, num_loads
    cdef char *is_failed
    if store.pool.tier == NULL:
        raise ArgumentError(f"number: got {checked}, allowed without a host tier: none")
    with store.lock:
        num_saves, num_loads = count_in_flight(tier, checked, False), count_in_flight(tier, checked, True)
    failed.store, failed.number = store, checked
    failed.is_wrong = <uint8_t *>calloc(pool.num_pages if wrong_loads else 1, 1)
    failed.ids.reserve(num_loads)
    is_failed = <char *>calloc(num_saves + num_loads + 1, 1)
    if is_failed == NULL or failed.is_wrong == NULL:
        free(is_failed)
        raise MemoryError("transfers")
    try:
        mark_failed(is_failed, num_saves, wrong_saves, "saves")
        mark_failed(is_failed + num_saves, num_loads, wrong_loads, "loads")
        with store.lock:
            if num_saves + num_loads == count_in_flight(tier, checked, False) + count_in_flight(tier, checked, True):
                end_all(pool, checked, is_failed, num_saves, failed.ids)
                end_forked(pool, failed)
            else:
                num_saves = num_loads = 0
    finally:
        free(is_failed)
    if num_saves + num_loads == 0:
        raise ArgumentError(f"number: got {checked}, allowed: that of transfers in flight")
    for i in range(failed.ids.num):
        failed.is_wrong[failed.ids.ids[i]] = True
    return failed


def find_wrong_token(RequestPages held not None, FailedLoads failed not None) -> int | None:
    """Return the first token of a request in a page that failed to load; None if there is none. O(pages)."""
    cdef int32_t first = -1
    with held.store.lock:
        if failed.store is held.store and failed.ids.num:
            first = find_wrong(&held.holding, failed.is_wrong, failed.number)
    return first if first >= 0 else None


cdef void end_forked(Pool *pool, FailedLoads failed) noexcept:
    """End the loads of pages that were copied by forks meanwhile. If any load failed, the copies may be wrong."""
    cdef int64_t *loading = pool.tier.loading
    cdef int32_t page_id
    for page_id in range(1, pool.num_pages if failed.number <= pool.tier.last_forked else 1):
        if loading[page_id] == failed.number:
            loading[page_id] = 0
            if failed.ids.num:
                failed.is_wrong[page_id] = True


cdef Py_ssize_t count_in_flight(const Tier *tier, int64_t number, bint is_load) noexcept nogil:
    cdef Py_ssize_t i, count = 0
    for i in range(tier.num):
        count += tier.items[i].number == number and tier.items[i].is_load == is_load
    return count


cdef void end_all(Pool *pool, int64_t number, const char *is_failed, Py_ssize_t num_saves, PageIds lost) noexcept:
    """End the transfers of a list, of which those that failed are marked, saves first."""
    cdef Tier *tier = pool.tier
    cdef const Transfer *transfer
    cdef Py_ssize_t i, save = num_saves, load = count_in_flight(tier, number, True), num_kept = 0
    cdef bint is_done
    for i in range(tier.num - 1, -1, -1):  # so that the last page of a prefix is evicted first
        transfer = &tier.items[i]
        if transfer.number != number:
            continue
        load -= transfer.is_load
        save -= not transfer.is_load
        is_done = not is_failed[num_saves + load if transfer.is_load else save]
        tier.num_failed += not is_done
        if transfer.is_load:
            tier.num_loaded += is_done
            end_load(pool, transfer, is_done)
        else:
            tier.num_saved += is_done
            end_save(tier, transfer, is_done)
        if transfer.is_load and not is_done:
            lost.put(&transfer.page_id, 1)
    for i in range(tier.num):
        if tier.items[i].number != number:
            tier.items[num_kept] = tier.items[i]
            num_kept += 1
    tier.num = num_kept
    find_oldest_load(tier)
