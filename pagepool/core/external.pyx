"""Tokens that come from elsewhere, in two phases: pages are taken for them, then they are counted as computed, or go back."""

from libc.stdint cimport int32_t, int64_t

from pagepool.core.arguments cimport size_of
from pagepool.core.batch cimport Batch, end_row, held_by, holding_of, plan_next_event
from pagepool.core.chain cimport HashChain
from pagepool.core.copies cimport has_copies_due
from pagepool.core.entering cimport enter_waiting
from pagepool.core.holdings cimport Held, Holding, forget_uncomputed, recompute_from, skip_to
from pagepool.core.records cimport Pool
from pagepool.core.references cimport put_back_held
from pagepool.core.request_pages cimport RequestPages, lock_chain, unlock_chain
from pagepool.core.row_hashes cimport enter_row
from pagepool.core.rows cimport blank
from pagepool.core.rules cimport MAX_TOKENS, first_useful_page, pages_for
from pagepool.core.running cimport RunningRows
from pagepool.core.siphash cimport Digest

from pagepool.errors import ArgumentError, CopiesDueError


cdef void skip_unread(Pool *pool, const Holding *holding, int32_t num_tokens) noexcept nogil:
    """Give back the pages that no token from `num_tokens` on attends to. They may not have been filled, so they get no prefix
    entry, and nothing goes back to them.
    """
    cdef Held *held
    cdef Py_ssize_t g
    cdef int32_t stop
    for g in range(holding.num_groups):
        held = &holding.held[g]
        stop = min(first_useful_page(&holding.groups[g].rules, num_tokens, 0), held.num_pages)
        skip_to(pool, &holding.groups[g], held, stop)
        held.num_cached = max(held.num_cached, stop)


cdef void put_back_behind(Pool *pool, const Holding *holding, int32_t num_tokens) noexcept nogil:
    """Give back the pages wholly behind `num_tokens` tokens, group by group, the last first."""
    cdef Held *held
    cdef Py_ssize_t g
    cdef int64_t num_kept
    for g in range(holding.num_groups):
        held = &holding.held[g]
        num_kept = pages_for(&holding.groups[g].rules, num_tokens)
        while held.num_pages > num_kept:
            held.num_pages -= 1
            put_back_held(pool, held.ids[held.num_pages])
        held.num_skipped = min(held.num_skipped, held.num_pages)
        recompute_from(&holding.groups[g], held, num_tokens)


cdef void commit_row(Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Count tokens that a pending row waited for as computed, and let it run."""
    cdef Holding holding = holding_of(batch, row)
    cdef Py_ssize_t g
    batch.states[row].num_computed += num_tokens
    batch.num_external[row] = 0
    skip_unread(batch.pool, &holding, batch.states[row].num_computed)
    for g in range(batch.num_groups):
        if held_by(batch, row, g).num_skipped:
            blank(batch.tables[g], row, 0, held_by(batch, row, g).num_skipped)
    enter_row(batch, row, batch.states[row].num_computed)
    enter_waiting(&batch.waiting)
    plan_next_event(batch, row)


cdef void fail_row(Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Do it with the first of the tokens, and give back the pages behind. A state is wrong then, so nothing stands with one."""
    cdef Holding holding = holding_of(batch, row)
    cdef Py_ssize_t g
    if batch.has_state:
        batch.states[row].num_computed = batch.states[row].num_hits = num_tokens = 0
    commit_row(batch, row, num_tokens)
    put_back_behind(batch.pool, &holding, batch.states[row].num_computed)
    for g in range(batch.num_groups):
        end_row(batch, row, g)
    plan_next_event(batch, row)


def end_external(RunningRows rows not None, row, num_tokens, bint is_failed) -> int:
    """Let a pending row run: see `RunningBatch.commit_external`, and if it `is_failed` `RunningBatch.fail_external`. Returns
    how many tokens of the row are computed.
    """
    cdef Batch *batch = &rows.batch
    cdef Py_ssize_t checked = rows.checked_row(row)
    cdef int32_t num = <int32_t>size_of(num_tokens, "num_valid_tokens" if is_failed else "num_tokens", 0, MAX_TOKENS)
    cdef Holding holding = holding_of(batch, checked)
    cdef int32_t num_external, num_computed
    cdef bint is_due, is_right
    rows.enter_call()
    num_external = batch.num_external[checked]
    is_due = num_external and has_copies_due(batch.pool, &holding)
    is_right = 0 < num_external and num <= num_external and not is_due
    is_right = is_right and (is_failed or num == num_external or not batch.has_state)
    if is_right and is_failed:
        fail_row(batch, checked, num)
    elif is_right:
        commit_row(batch, checked, num)
    num_computed = batch.states[checked].num_computed
    rows.let_go()
    if not is_right:
        refuse_end(checked, num, num_external, is_due)
    return num_computed


cdef int refuse_end(Py_ssize_t row, int32_t num_tokens, int32_t num_external, bint is_due) except -1:
    if num_external == 0:
        raise ArgumentError(f"row {row} waits for no tokens from elsewhere")
    if is_due:
        raise CopiesDueError(f"row {row}: copies or transfers of its pages are due: take them, and do them, before")
    if num_tokens > num_external:
        raise ArgumentError(f"row {row}: got {num_tokens} tokens, allowed: at most the {num_external} for which it waits")
    raise ArgumentError(
        f"row {row}: got {num_tokens} tokens, allowed with a state: all {num_external}; call fail_external for fewer"
    )


def skip_unread_pages(RequestPages held not None, num_tokens) -> None:
    """Give back the pages of a request that no token from `num_tokens` on attends to. O(pages given back)."""
    cdef int32_t num = <int32_t>size_of(num_tokens, "num_tokens", 0, held.limits.num_room)
    with held.store.lock:
        skip_unread(&held.store.pool, &held.holding, num)
        held.plan()


def give_back_behind(RequestPages held not None, num_tokens, HashChain chain=None) -> None:
    """Give back the pages of a request wholly behind `num_tokens` tokens, the last first. Those with later tokens lose the
    entries that they got under `chain`, except hits. O(pages given back).
    """
    cdef int32_t num = <int32_t>size_of(num_tokens, "num_tokens", 0, MAX_TOKENS)
    cdef const Digest *digests = NULL
    cdef Py_ssize_t num_digests = 0
    lock_chain(chain)
    held.store.lock.acquire()
    if chain is not None:
        digests, num_digests = chain.digests, chain.num
    forget_uncomputed(&held.store.pool, &held.holding, num, digests, num_digests)
    put_back_behind(&held.store.pool, &held.holding, num)
    held.plan()
    held.store.lock.release()
    unlock_chain(chain)
