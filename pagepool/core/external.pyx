"""Tokens that come from elsewhere: those of running rows and of requests are committed, or fail."""

from libc.stdint cimport int32_t

from pagepool.core.arguments cimport size_of
from pagepool.core.batch cimport Batch, holding_of
from pagepool.core.chain cimport HashChain
from pagepool.core.copies cimport has_copies_due
from pagepool.core.holdings cimport Holding, forget_uncomputed
from pagepool.core.pending cimport commit_row, fail_row, put_back_behind, skip_unread
from pagepool.core.request_pages cimport RequestPages, lock_chain, unlock_chain
from pagepool.core.row_memory cimport RowMemory
from pagepool.core.rules cimport MAX_TOKENS
from pagepool.core.siphash cimport Digest

from pagepool.errors import ArgumentError, CopiesDueError


def end_external(RowMemory rows not None, row, num_tokens, bint is_failed) -> int:
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
