"""One list of moves: copies, loads, saves, and writes of states, taken once a step."""

cimport cython

from pagepool.core.holding cimport RequestMaps, StateWrite

import numpy as np

from pagepool.errors import ArgumentTypeError


@cython.final
@cython.auto_pickle(False)
cdef class PageCopies:
    """Pages to copy, in order: page ``src[i]`` to page ``dst[i]``, in the arrays of cache group ``group[i]``.

    The three are read-only int32 arrays of one length, which ``len()`` returns. With several pools, ids are relative to the
    group's pool. Destinations are distinct.
    """

    def __init__(self):
        raise TypeError("a PageCopies is a part of what take_moves returns")

    def __len__(self):
        return len(self.src)

    def __repr__(self):
        return f"PageCopies(src={self.src.tolist()}, dst={self.dst.tolist()}, group={self.group.tolist()})"

    def __reduce__(self):
        raise ArgumentTypeError("page copies cannot be pickled")


@cython.final
@cython.auto_pickle(False)
cdef class StateWrites:
    """States that the next step writes: the state of row ``rows[i]`` after its first ``num_tokens[i]`` tokens, to page
    ``page_ids[i]`` in the arrays of cache group ``group[i]``. In writes of a batch, ``request_ids`` is None. In writes of a
    manager's requests, ``request_ids[i]`` names the request, and ``rows`` is None.

    The request ids are a tuple, the other fields read-only int32 arrays, all of one length, which ``len()`` returns.
    """

    def __init__(self):
        raise TypeError("a StateWrites is a part of what take_moves returns")

    def __len__(self):
        return len(self.num_tokens)

    def __repr__(self):
        holders = f"rows={self.rows.tolist()}" if self.request_ids is None else f"request_ids={self.request_ids!r}"
        return (
            f"StateWrites({holders}, num_tokens={self.num_tokens.tolist()}, page_ids={self.page_ids.tolist()}, "
            f"group={self.group.tolist()})"
        )

    def __reduce__(self):
        raise ArgumentTypeError("state writes cannot be pickled")


@cython.final
@cython.auto_pickle(False)
cdef class Moves:
    """Moves to make before the next step, and states that it writes. ``len()`` counts all moves.

    The device first reads all pages of ``saves``, which go from the device to the tier; then it writes all pages of ``loads``,
    which come from the tier; then it makes the ``copies`` within the device, reading all sources before it writes any
    destination, so one gather and one scatter suffice. These are `PageCopies`. The step itself makes the ``writes``, which are
    `StateWrites`. Answer ``number`` by `CacheManager.complete` or `fail` once the bytes of loads and saves have arrived; 0:
    there are no loads or saves, and nothing to answer.
    """

    def __init__(self):
        raise TypeError("a Moves is what take_moves returns")

    def __len__(self):
        return len(self.copies) + len(self.loads) + len(self.saves) + len(self.writes)

    def __repr__(self):
        parts = [f"number={self.number}"]
        parts += [f"{name}={getattr(self, name)!r}" for name in ("copies", "loads", "saves", "writes") if getattr(self, name)]
        return f"Moves({', '.join(parts)})"

    def __reduce__(self):
        raise ArgumentTypeError("moves cannot be pickled")


cdef PageCopies copies_of(object columns):
    """Return the copies in a read-only array of three rows."""
    cdef PageCopies copies = PageCopies.__new__(PageCopies)
    copies.src, copies.dst, copies.group = columns
    return copies


cdef StateWrites writes_of(object columns):
    """Return the writes in an array of four rows."""
    cdef StateWrites writes = StateWrites.__new__(StateWrites)
    columns.flags.writeable = False
    writes.rows, writes.num_tokens, writes.page_ids, writes.group = columns
    return writes


cdef Moves moves_of(int64_t number, object columns, Py_ssize_t num_saves, Py_ssize_t num_loads, StateWrites writes):
    """Return the moves in an array of three rows: saves, loads, then copies."""
    cdef Moves moves = Moves.__new__(Moves)
    cdef Py_ssize_t num = num_saves + num_loads
    columns.flags.writeable = False
    assert num_saves >= 0 and num_loads >= 0 and num <= columns.shape[1]
    moves.number, moves.writes = number if num else 0, writes
    moves.saves = copies_of(columns[:, :num_saves]) if num_saves else NO_COPIES
    moves.loads = copies_of(columns[:, num_saves:num]) if num_loads else NO_COPIES
    moves.copies = copies_of(columns[:, num:]) if num < columns.shape[1] else NO_COPIES
    return moves


cdef object NO_COLUMNS = np.zeros((3, 0), np.int32)
NO_COLUMNS.flags.writeable = False
cdef PageCopies NO_COPIES = copies_of(NO_COLUMNS)
cdef StateWrites NO_WRITES = writes_of(np.zeros((4, 0), np.int32))
cdef Moves NO_MOVES = moves_of(0, NO_COLUMNS, 0, 0, NO_WRITES)


cdef Py_ssize_t count_due(const Pool *pool) noexcept nogil:
    """Count the copies, loads and saves that are due."""
    return pool.copies.num + (pool.tier.num_due if pool.tier != NULL else 0)


def take_moves(PageStore store not None, RequestMaps maps=None) -> Moves:
    """Return the due copies, loads and saves, which the caller makes, and the states that steps of a manager's requests write.
    O(moves); allocates nothing if none are due.
    """
    cdef StateWrites writes = NO_WRITES
    if maps is not None and maps.writing:
        writes = take_request_writes(store, maps)
    return take_with(store, writes, &store.last_step)


cdef StateWrites take_request_writes(PageStore store, RequestMaps maps):
    """Take the list of states that planned steps of requests write. O(writes)."""
    cdef int32_t[:, ::1] taken
    cdef RequestPages held
    cdef StateWrites writes
    cdef const StateWrite *write
    cdef list request_ids = []
    cdef Py_ssize_t i, at = 0
    with maps.lock:
        for held in maps.writing:
            request_ids += [held.owner.request_id] * (held.writes.num - held.writes.num_taken)
        columns = np.empty((4, len(request_ids)), np.int32)
        taken = columns
        with store.own_lock()[0]:
            for held in maps.writing:
                for i in range(held.writes.num_taken, held.writes.num):
                    write = &held.writes.items[i]
                    taken[1, at], taken[2, at] = write.num_tokens, id_in_bank(&store.pool, write.page_id)
                    taken[3, at] = write.group
                    at += 1
                held.writes.num_taken = held.writes.num
            assert at == len(request_ids)
        maps.writing = []
    writes = writes_of(columns)
    writes.rows, writes.request_ids = None, tuple(request_ids)
    return writes


cdef Moves take_with(PageStore store, StateWrites writes, int64_t *last_step):
    """Take the moves of a pool, together with `writes`. `last_step` is the last step for which the caller took moves."""
    cdef Pool *pool = &store.pool
    cdef int32_t[:, ::1] taken
    cdef Py_ssize_t num_due, num_saves = 0, num_loads = 0, num = -1
    cdef int64_t number = 0
    with store.own_lock()[0]:
        if pool.tier != NULL:
            begin_step(pool, last_step)
        pool.copies.is_between = False
        num_due = count_due(pool)
    if num_due == 0:
        return NO_MOVES if len(writes) == 0 else moves_of(0, NO_COLUMNS, 0, 0, writes)
    while num != num_due:  # arrays are made without the lock
        num = num_due
        columns = np.empty((3, num), np.int32)
        taken = columns
        with store.own_lock()[0]:
            num_due = count_due(pool)
            if num == num_due and num:
                num_saves, number = count_due_saves(pool.tier), pool.list_number
                num_loads = num - num_saves - pool.copies.num
                copy_transfers(pool, &taken[0, 0], num, num_saves)
                copy_copies(pool, &taken[0, 0] + num_saves + num_loads, num)  # there may be none
                assert pool.copies.num == 0 and (pool.tier == NULL or pool.tier.num_due == 0)
                pool.list_number += 1
    return moves_of(number, columns, num_saves, num_loads, writes)


cdef Py_ssize_t count_due_saves(const Tier *tier) noexcept nogil:
    cdef Py_ssize_t i, num = 0
    for i in range(tier.num - tier.num_due if tier != NULL else 0, tier.num if tier != NULL else 0):
        num += not tier.items[i].is_load
    return num


cdef void copy_transfers(Pool *pool, int32_t *taken, Py_ssize_t stride, Py_ssize_t num_saves) noexcept nogil:
    """Write the columns of the due loads and saves to `taken`, saves first. From now on they are in flight."""
    cdef Tier *tier = pool.tier
    cdef Transfer *transfer
    cdef int32_t device_id, tier_id
    cdef Py_ssize_t i, at, save = 0, load = num_saves
    for i in range(tier.num - tier.num_due if tier != NULL else 0, tier.num if tier != NULL else 0):
        transfer = &tier.items[i]
        assert transfer.number == 0 and 0 < transfer.tier_id < tier.pool.num_pages
        transfer.number = pool.list_number
        at = load if transfer.is_load else save
        load += transfer.is_load
        save += not transfer.is_load
        device_id, tier_id = id_in_bank(pool, transfer.page_id), id_in_bank(tier.pool, transfer.tier_id)
        taken[at] = tier_id if transfer.is_load else device_id
        taken[stride + at] = device_id if transfer.is_load else tier_id
        taken[2 * stride + at] = transfer.group
    assert save == num_saves
    if tier != NULL:
        tier.num_due = 0


cdef void copy_copies(Pool *pool, int32_t *taken, Py_ssize_t stride) noexcept nogil:
    """Write the columns of the due copies to `taken`, give back their sources, and empty the list."""
    cdef Py_ssize_t i
    for i in range(pool.copies.num):
        taken[i] = id_in_bank(pool, pool.copies.items[i].src)
        taken[stride + i] = id_in_bank(pool, pool.copies.items[i].dst)
        assert pool.pages[pool.copies.items[i].src].ref_cnt > 0 and pool.copies.items[i].dst != NULL_PAGE
        taken[2 * stride + i] = pool.copies.items[i].group
        give_back(pool, pool.copies.items[i].src)
    pool.copies.num = 0


def list_in_flight(PageStore store not None) -> list:
    """Return the `Moves` with loads and saves in flight, in the order they were taken. O(loads and saves x lists)."""
    cdef const Tier *tier = store.pool.tier
    cdef const Transfer *transfer
    cdef int64_t[:, ::1] taken
    cdef int32_t device_id, tier_id
    cdef Py_ssize_t i, num_taken = 0, num = -1
    while num != num_taken and tier != NULL:  # arrays are made without the lock
        num = num_taken
        items = np.empty((5, num), np.int64)
        taken = items
        with store.own_lock()[0]:
            num_taken = tier.num - tier.num_due
            assert num_taken >= 0
            for i in range(num_taken if num == num_taken else 0):
                transfer = &tier.items[i]
                taken[0, i], taken[1, i], taken[4, i] = transfer.number, transfer.is_load, transfer.group
                device_id, tier_id = id_in_bank(&store.pool, transfer.page_id), id_in_bank(tier.pool, transfer.tier_id)
                taken[2, i] = tier_id if transfer.is_load else device_id
                taken[3, i] = device_id if transfer.is_load else tier_id
    lists = []
    for number in np.unique(items[0][items[0] > 0]).tolist() if tier != NULL else ():
        chosen = items[:, items[0] == number]
        columns = np.ascontiguousarray(chosen[2:, np.argsort(chosen[1], kind="stable")], np.int32)
        num_loads = int(chosen[1].sum())
        lists.append(moves_of(number, columns, columns.shape[1] - num_loads, num_loads, NO_WRITES))
    return lists
