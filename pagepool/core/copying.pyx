"""Copies of pages that are due before the next step, and forks of requests and rows, which need them."""

cimport cython
from cpython.mem cimport PyMem_RawMalloc as malloc
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy

from pagepool.core.arguments cimport size_of
from pagepool.core.batch cimport (
    Batch, ExtraKey, RowState, begin_admission, digests_of, holding_of, plan_next_event, set_context, show_row, start_call,
    tokens_of,
)
from pagepool.core.holdings cimport (
    FORKED, SHORT_OF_MEMORY, SHORT_OF_PAGES, UNSHAREABLE, ForkOutcome, Holding, awaits_copies, check_fork, count_open_pages,
    end_copies, fork_group, lacks_page,
)
from pagepool.core.ids cimport PageIds, as_own_ids
from pagepool.core.queue cimport count_free_in
from pagepool.core.records cimport Pool
from pagepool.core.request_pages cimport RequestPages
from pagepool.core.rules cimport Group, pages_for
from pagepool.core.running cimport RunningRows
from pagepool.core.siphash cimport Digest
from pagepool.core.store cimport PageStore

import numpy as np

from pagepool.errors import ArgumentError, ArgumentTypeError, CopiesDueError, OutOfPagesError, PageIdError, RowIndexError


@cython.final
@cython.auto_pickle(False)
cdef class PageCopies:
    """Pages to be copied before the next step: page ``src[i]`` to page ``dst[i]``, in the arrays of cache group ``group[i]``.

    The three are read-only int32 arrays of one length, which ``len()`` returns. All sources are read before any destination
    is written, and no destination stands there twice, so one gather and one scatter do it.
    """

    cdef readonly object src
    cdef readonly object dst
    cdef readonly object group

    def __init__(self):
        raise TypeError("a PageCopies is what take_copies returns")

    def __len__(self):
        return len(self.src)

    def __repr__(self):
        return f"PageCopies(src={self.src.tolist()}, dst={self.dst.tolist()}, group={self.group.tolist()})"

    def __reduce__(self):
        raise ArgumentTypeError("page copies cannot be pickled")


cdef PageCopies copies_of(object src, object dst, object group):
    cdef PageCopies copies = PageCopies.__new__(PageCopies)
    copies.src, copies.dst, copies.group = src, dst, group
    for array in (src, dst, group):
        array.flags.writeable = False
    return copies


cdef PageCopies NO_COPIES = copies_of(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.int32))


def take_copies(PageStore store not None) -> PageCopies:
    """Return the copies that are due; from now on the caller does them. O(copies); nothing is allocated without any."""
    cdef Pool *pool = &store.pool
    cdef int32_t[:, ::1] taken
    cdef Py_ssize_t i, num_due, num = -1
    with store.lock:
        num_due = pool.copies.num
    if num_due == 0:
        return NO_COPIES
    while num != num_due:  # arrays are made without the lock
        num = num_due
        columns = np.empty((3, num), np.int32)
        taken = columns
        with store.lock:
            num_due = pool.copies.num
            if num == num_due:
                for i in range(num):
                    taken[0, i] = pool.copies.items[i].src
                    taken[1, i] = pool.copies.items[i].dst
                    taken[2, i] = pool.copies.items[i].group
                end_copies(pool)
    return copies_of(columns[0], columns[1], columns[2])


cdef bint lacks_pages(const Holding *holding, int32_t num_computed) noexcept:
    """Whether pages were given back that tokens from `num_computed` on need: of a request that went back behind a window."""
    cdef const Group *group
    cdef Py_ssize_t g
    for g in range(holding.num_groups):
        group = &holding.groups[g]
        if lacks_page(group, &holding.held[g], num_computed, pages_for(&group.rules, num_computed)):
            return True
    return False


def fork_request(RequestPages held not None, RequestPages target not None, num_computed_tokens) -> bool:
    """Let `target`, which holds nothing, go on from the computed tokens of a request: full pages are shared, others copied,
    within the shard of the first page, if the pool is divided. False, and nothing changed, if too few pages are free.
    PageIdError for a page that cannot be shared. O(pages).
    """
    cdef int64_t num_computed = size_of(num_computed_tokens, "num_computed_tokens", 0, held.limits.num_room)
    cdef Pool *pool = &held.store.pool
    cdef ForkOutcome outcome = SHORT_OF_MEMORY
    cdef Py_ssize_t g
    cdef bint is_past_pages
    if target is held or target.store is not held.store or target.groups is not held.groups or len(target):
        raise ArgumentError("target: got one of another pool or other groups, or that holds pages")
    with held.store.lock:
        is_past_pages = lacks_pages(&held.holding, <int32_t>num_computed)
        if not is_past_pages and target.make_room(&held.holding):
            outcome = check_fork(pool, &held.holding, <int32_t>num_computed, 1, held.find_shard())
        for g in range(held.holding.num_groups if outcome == FORKED else 0):
            fork_group(pool, &held.holding, &target.holding, <int32_t>g, <int32_t>num_computed, held.find_shard())
        held.plan()
        target.plan()
    if is_past_pages:
        raise ArgumentError(
            f"num_computed_tokens: got {num_computed}, allowed: as many as the request had, since pages that further tokens "
            "attend to were given back behind a window"
        )
    if outcome == SHORT_OF_MEMORY:
        raise MemoryError("the page ids of a request")
    if outcome == UNSHAREABLE:
        raise PageIdError("a page of the request cannot have a further reference, or was given back, or a free page has one")
    return outcome == FORKED


def fork_row(RunningRows rows not None, row, targets) -> None:
    """Let free rows go on from the computed tokens of an admitted row: see `RunningBatch.fork`."""
    cdef Py_ssize_t source = rows.checked_row(row)
    cdef PageIds target_rows = as_own_ids(targets, "targets")
    cdef list forgotten = [None] * (2 * target_rows.num)  # what goes with them may wait for a fork of the process
    cdef Batch *batch = &rows.batch
    cdef Holding holding = holding_of(batch, source)
    cdef Py_ssize_t num_right, i
    cdef bint is_ready
    cdef ForkOutcome outcome = SHORT_OF_MEMORY
    if target_rows.num == 0:
        raise ArgumentError("targets: got none, allowed: at least 1")
    rows.enter_call()
    is_ready = batch.states[source].is_admitted and not batch.num_external[source] and not awaits_copies(batch.pool, &holding)
    num_right = count_free_rows(batch, source, target_rows) if is_ready else 0
    if num_right == target_rows.num:
        outcome = check_fork(
            batch.pool, &holding, batch.states[source].num_computed, num_right, batch.states[source].shard
        )
    if outcome == FORKED and not copy_extra_keys(rows, source, target_rows, forgotten):
        outcome = SHORT_OF_MEMORY
    if outcome == FORKED:
        for i in range(num_right):
            fill_target(batch, source, target_rows.ids[i])
        begin_admission(batch, source)  # what it shares now cannot be taken back
        plan_next_event(batch, source)
    rows.let_go()
    if outcome != FORKED:
        refuse_fork(rows, source, target_rows, is_ready, num_right, outcome)


cdef Py_ssize_t count_free_rows(Batch *batch, Py_ssize_t source, PageIds targets) noexcept:
    """How many targets there are before the first that is not a free row, or stands there twice."""
    cdef Py_ssize_t i
    cdef RowState *state
    start_call(batch)
    for i in range(targets.num):
        if not 0 <= targets.ids[i] < batch.num_rows:
            return i
        state = &batch.states[targets.ids[i]]
        if state.is_claimed or state.stamp == batch.stamp:
            return i
        state.stamp = batch.stamp
    return targets.num


cdef bint copy_extra_keys(RunningRows rows, Py_ssize_t source, PageIds targets, list forgotten) noexcept:
    """Give free rows the extra keys of another, and what they had to `forgotten`. False where memory is short: those that have
    them by then have no digests.
    """
    cdef Batch *batch = &rows.batch
    cdef ExtraKey *keys = batch.extra_keys[source]
    cdef Py_ssize_t i, row, num_keys = 1
    while keys != NULL and keys[num_keys - 1].data != NULL:
        num_keys += 1
    for i in range(targets.num):
        row = targets.ids[i]
        forgotten[2 * i], forgotten[2 * i + 1] = rows.refusals[row], rows.extra_key_bytes[row]
        rows.refusals[row] = None
        rows.forget_extra_keys(row)
        if keys != NULL:
            batch.extra_keys[row] = <ExtraKey *>malloc(num_keys * sizeof(ExtraKey))
            if batch.extra_keys[row] == NULL:
                return False
            memcpy(batch.extra_keys[row], keys, num_keys * sizeof(ExtraKey))
            rows.extra_key_bytes[row] = rows.extra_key_bytes[source]
    return True


cdef void fill_target(Batch *batch, Py_ssize_t source, Py_ssize_t row) noexcept nogil:
    """Let a free row be what another is."""
    cdef RowState *state = &batch.states[row]
    cdef Holding forked = holding_of(batch, source), new = holding_of(batch, row)
    cdef Py_ssize_t g
    memcpy(tokens_of(batch, row), tokens_of(batch, source), batch.states[source].num_tokens * sizeof(int32_t))
    memcpy(digests_of(batch, row), digests_of(batch, source), batch.states[source].num_hashed * sizeof(Digest))
    state[0] = batch.states[source]
    state.stamp = batch.stamp
    set_context(batch, row, batch.contexts[source])
    begin_admission(batch, row)
    for g in range(batch.num_groups):
        fork_group(batch.pool, &forked, &new, <int32_t>g, state.num_computed, state.shard)
        show_row(batch, row, g)
    plan_next_event(batch, row)


cdef int refuse_fork(
    RunningRows rows, Py_ssize_t source, PageIds targets, bint is_ready, Py_ssize_t at, ForkOutcome outcome
) except -1:
    cdef Batch *batch = &rows.batch
    cdef Holding holding = holding_of(batch, source)
    if batch.num_external[source]:
        raise ArgumentError(f"row {source} waits for tokens from elsewhere: call commit_external or fail_external before")
    if not is_ready and batch.states[source].is_admitted:
        raise CopiesDueError(
            f"row {source}: copies to its pages are due, or transfers: call take_copies, and with a host tier take_transfers, "
            "and do them, before"
        )
    if not is_ready:
        raise ArgumentError(f"row {source} is not admitted")
    if at < targets.num:
        if not 0 <= targets.ids[at] < batch.num_rows:
            raise RowIndexError(f"targets: got {targets.ids[at]} (at {at}), allowed: 0 to {batch.num_rows - 1}")
        raise ArgumentError(f"targets: got {targets.ids[at]} (at {at}), allowed: free rows, each once")
    if outcome == SHORT_OF_PAGES:
        num_new = count_open_pages(&holding, batch.states[source].num_computed) * targets.num
        num_free = count_free_in(batch.pool, batch.states[source].shard)
        raise OutOfPagesError(f"row {source}: its forks need {num_new} pages, {num_free} are free")
    if outcome == UNSHAREABLE:
        raise PageIdError(
            f"row {source}: a page that it holds cannot have a further reference, or was given back, or a free page has one"
        )
    raise MemoryError(f"forks of row {source}")
