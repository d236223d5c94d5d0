"""Copies for requests: states that become checkpoints, and requests that go on twice."""

from libc.stdint cimport INT64_MAX, int32_t, int64_t

from pagepool.core.arguments cimport as_shard, size_of
from pagepool.core.chain cimport HashChain
from pagepool.core.checkpoints cimport Source, are_checkpoints_due, is_checkpoint_due, keep_state
from pagepool.core.copies cimport awaits_copies, has_copies_due, reserve_copies
from pagepool.core.entering cimport Contents
from pagepool.core.forks cimport FORKED, SHORT_OF_MEMORY, UNSHAREABLE, ForkOutcome, check_fork, fork_group
from pagepool.core.holdings cimport Holding, lacks_page
from pagepool.core.ids cimport PageIds
from pagepool.core.records cimport Pool
from pagepool.core.request_pages cimport RequestPages, lock_chain, set_contents, unlock_chain
from pagepool.core.rules cimport MAX_TOKENS, Group, full_entries, pages_for

from pagepool.errors import ArgumentError, CopiesDueError, PageIdError


def check_copies_taken(RequestPages held not None, bint may_be_read=False) -> None:
    """CopiesDueError if pages of a request are the destination of a copy that is due, or the source, unless they `may_be_read`.
    """
    cdef bint is_due
    with held.store.lock:
        is_due = awaits_copies(&held.store.pool, &held.holding)
        is_due = is_due or not may_be_read and has_copies_due(&held.store.pool, &held.holding)
    if is_due:
        raise CopiesDueError(
            "copies of pages of the request are due, or transfers: call take_copies, and with a host tier take_transfers, and "
            "do them, before"
        )


def are_states_due(RequestPages held not None, num_computed_tokens) -> bool:
    """Whether a state of a request has come to, or past, the next multiple of its interval. O(groups)."""
    cdef int64_t num_computed = size_of(num_computed_tokens, "num_computed_tokens", 0, INT64_MAX)
    cdef int32_t num = <int32_t>min(num_computed, <int64_t>MAX_TOKENS)
    cdef bint is_due
    with held.store.lock:
        is_due = are_checkpoints_due(&held.holding, num)
    return is_due


def keep_states(
    RequestPages held not None, HashChain chain not None, num_computed_tokens, context=0, tuple shard=None, num_reserved=0
) -> tuple:
    """Keep the states of a request after `num_computed_tokens` tokens as checkpoints, as far as pages are free beside
    `num_reserved`, and return the next working page of each group that has one. A `shard` is ``(shard, number of shards)``.
    O(groups).
    """
    cdef int64_t num_computed = size_of(num_computed_tokens, "num_computed_tokens", 0, MAX_TOKENS)
    hint, num_shards = shard or (None, 0)
    cdef int32_t divided = <int32_t>size_of(num_shards, "data_parallel_size", 0)
    cdef Source source = Source(as_shard(hint, divided), size_of(num_reserved, "num_reserved_pages"))
    cdef Contents contents = Contents(NULL, NULL, 0, held.store.checked_context(context))
    cdef tuple new = tuple([PageIds.__new__(PageIds) for _ in range(held.holding.num_groups)])
    for ids in new:
        (<PageIds>ids).reserve(1)
    lock_chain(chain)
    try:
        held.store.lock_divided(divided)
        set_contents(&contents, chain)
        if num_computed <= <int64_t>chain.num * chain.page_size and reserve_copies(&held.store.pool, len(new)):
            keep_all(held, &contents, <int32_t>num_computed, &source, new)
        pass_over(held, <int32_t>num_computed)
        held.store.lock.release()
    finally:
        unlock_chain(chain)
    return new


def pass_states(RequestPages held not None, num_computed_tokens) -> None:
    """Keep no states up to `num_computed_tokens` tokens: the working pages are about to be written. O(groups)."""
    cdef int64_t num_computed = size_of(num_computed_tokens, "num_computed_tokens", 0, INT64_MAX)
    cdef int32_t num = <int32_t>min(num_computed, <int64_t>MAX_TOKENS)
    with held.store.lock:
        pass_over(held, num)


cdef void keep_all(
    RequestPages held, const Contents *contents, int32_t num_computed, const Source *source, tuple new
) noexcept:
    cdef Holding *holding = &held.holding
    cdef Py_ssize_t g
    for g in range(holding.num_groups):
        if is_checkpoint_due(&holding.groups[g], &holding.held[g], num_computed):
            if keep_state(&held.store.pool, holding, <int32_t>g, contents, num_computed, source):
                (<PageIds>new[g]).put(holding.held[g].ids, 1)


cdef void pass_over(RequestPages held, int32_t num_computed) noexcept:
    """Look at no state up to there again: the steps that follow write the working pages."""
    cdef Holding *holding = &held.holding
    cdef Py_ssize_t g
    for g in range(holding.num_groups):
        if is_checkpoint_due(&holding.groups[g], &holding.held[g], num_computed):
            holding.held[g].num_cached = full_entries(&holding.groups[g].rules, num_computed)
    held.plan()


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
