# Holders go back: tokens were not computed after all, or are computed again, and written to pages that nobody else holds.

from libc.stdint cimport int32_t, int64_t

from pagepool.core.holding.caching cimport *
from pagepool.core.pool cimport find, uncache, uncache_everywhere, uncache_in_tier


cdef inline void _forget_page(Pool *pool, int32_t page_id, const Digest *digest, int32_t group) noexcept nogil:
    """Drop the entry of a page. The null page stands for a skipped page or a checkpoint: then all pages with the digest lose
    their entries, in the tier too.
    """
    if page_id == NULL_PAGE and digest != NULL:
        page_id = find(pool, digest[0], group)
        while page_id != NULL_PAGE:
            uncache(pool, page_id)
            page_id = find(pool, digest[0], group)
        uncache_in_tier(pool.tier, digest[0], group)
    elif pool.pages[page_id].group != NO_GROUP:
        uncache_everywhere(pool, page_id)


cdef inline int32_t count_once_cached(const Holding *holding, Py_ssize_t g) noexcept nogil:
    """Count the leading pages or checkpoints of a group that may have prefix entries, also those of tokens set back."""
    cdef const Group *group = &holding.groups[g]
    cdef const Held *held = &holding.held[g]
    if group.id == NO_GROUP:
        return 0
    if is_state(&group.rules):
        return held.num_written
    return max(held.num_cached, min(full_entries(&group.rules, holding.num_once_cached), held.num_pages))


cdef inline bint _is_checkpoint(const Holding *holding, int64_t num_tokens) noexcept nogil:
    """Whether the holder keeps its state after `num_tokens` tokens."""
    return writes_states(holding) and find_next_boundary(holding.boundaries, <int32_t>(num_tokens - 1)) == num_tokens


cdef inline void forget_uncomputed(
    Pool *pool, const Holding *holding, int32_t num_computed, const Contents *contents
) noexcept nogil:
    """Drop the entries of pages with tokens from `num_computed` on, except hits."""
    cdef const Group *group
    cdef const Held *held
    cdef Py_ssize_t g, i, end
    cdef int32_t page_id, stop
    for g in range(holding.num_groups if pool.slots != NULL else 0):
        group = &holding.groups[g]
        held = &holding.held[g]
        stop = count_once_cached(holding, g)
        for i in range(max(full_entries(&group.rules, num_computed), held.num_hits), stop):
            end = (i + 1) * group.stride
            if is_state(&group.rules) and not _is_checkpoint(holding, (i + 1) * group.rules.entry_size):
                continue
            assert end > 0 and (is_state(&group.rules) or i < held.num_pages)
            page_id = NULL_PAGE if is_state(&group.rules) else held.ids[i]
            _forget_page(pool, page_id, &contents.digests[end - 1] if end <= contents.num_digests else NULL, group.id)


cdef inline void recompute_from(const Group *group, Held *held, int32_t num_computed) noexcept nogil:
    """Let pages with tokens from `num_computed` on be cached and ranked again, if they have lost their entry."""
    cdef int32_t place = full_entries(&group.rules, num_computed)
    held.num_cached = min(held.num_cached, place)
    held.num_hits = min(held.num_hits, place)
    held.ranking.num_ranked = min(held.ranking.num_ranked, place)
    assert held.num_hits <= held.num_cached or is_state(&group.rules)  # a fork of a state counts all checkpoints as hits


cdef inline void give_back_from(
    Pool *pool, const Group *group, Held *held, int64_t place, int32_t num_computed
) noexcept nogil:
    """Give back the pages from a place on, the last first. Tokens from `num_computed` on are computed again."""
    assert place >= 0 and 0 <= held.num_skipped <= held.num_pages
    while held.num_pages > place:
        held.num_pages -= 1
        give_back(pool, held.ids[held.num_pages])
    if held.num_skipped > held.num_pages:
        held.num_skipped, held.next_needed = held.num_pages, 0
    assert held.num_pages == 0 or held.num_skipped == 0 or held.ids[held.num_skipped - 1] == NULL_PAGE or held.num_prompt
    recompute_from(group, held, num_computed)


cdef inline void give_back_behind(Pool *pool, const Holding *holding, int32_t num_tokens) noexcept nogil:
    """Give back the pages behind the pages of `num_tokens` tokens, group by group."""
    cdef Py_ssize_t g
    for g in range(holding.num_groups):
        give_back_from(
            pool, &holding.groups[g], &holding.held[g], pages_for(&holding.groups[g].rules, num_tokens), num_tokens
        )


cdef inline int32_t _count_kept(
    const Pool *pool, const Group *group, const Held *held, int32_t num_computed, int32_t num_tokens
) noexcept nogil:
    """Count the leading pages that a holder of `num_tokens` tokens can keep if it writes the tokens from `num_computed` on: the
    pages before the first one with other holders to which it would write.
    """
    cdef int32_t page, num_pages = <int32_t>pages_for(&group.rules, num_tokens)
    for page in range(full_pages(&group.rules, num_computed), min(num_pages, held.num_pages)):
        if pool.pages[held.ids[page]].ref_cnt > 1:
            return page
    return num_pages


cdef inline int32_t find_restart(const Pool *pool, const Holding *holding, int32_t most, int32_t changed) noexcept nogil:
    """Count the leading tokens, at most `most`, that can stay computed, if the holder writes to the slots from `changed` on. In
    each group these tokens end where a page starts, or within a page that nobody else holds. O(groups) for each time that a
    group shortens them.
    """
    cdef const Group *group
    cdef Py_ssize_t g
    cdef int32_t kept, before = -1, restart = most
    while before != restart:
        before = restart
        for g in range(holding.num_groups):
            group = &holding.groups[g]
            kept = _count_kept(pool, group, &holding.held[g], min(changed, restart), restart)
            if kept < pages_for(&group.rules, restart):
                restart = kept * group.rules.page_size
    assert 0 <= restart <= most
    return restart


cdef inline bint can_restart(const Pool *pool, const Holding *holding, int32_t restart, int32_t num_tokens) noexcept nogil:
    """Whether a holder of `num_tokens` tokens can compute the tokens from `restart` on. Pages that these tokens attend to or
    are written to must be there, and pages to be given back must be held.
    """
    cdef const Group *group
    cdef const Held *held
    cdef Py_ssize_t g
    for g in range(holding.num_groups):
        group, held = &holding.groups[g], &holding.held[g]
        if lacks_page(group, held, restart, pages_for(&group.rules, num_tokens)):
            return False
        if find_unheld(pool, held.ids, full_pages(&group.rules, restart), held.num_pages) >= 0:
            return False
    return True


cdef inline void restart_from(
    Pool *pool, const Holding *holding, int32_t restart, int32_t changed, int32_t num_tokens
) noexcept nogil:
    """Let a holder of `num_tokens` tokens compute the tokens from `restart` on again, after `can_restart`, and write to the
    slots from `changed` on. It gives back, the last first, the pages behind its tokens, and all pages from the first one with
    other holders to which it would write. Changed pages lose their entries if nobody else holds them.
    """
    cdef const Group *group
    cdef Held *held
    cdef Py_ssize_t g, j
    cdef int32_t keep, page_id
    for g in range(holding.num_groups):
        group, held = &holding.groups[g], &holding.held[g]
        assert changed >= 0 and restart >= 0 and num_tokens >= 0
        keep = _count_kept(pool, group, held, changed, num_tokens)
        for j in range(held.num_pages - 1, full_pages(&group.rules, changed) - 1, -1):
            page_id = held.ids[j]
            if page_id != NULL_PAGE and pool.pages[page_id].ref_cnt == 1 and pool.pages[page_id].group != NO_GROUP:
                uncache(pool, page_id)
        give_back_from(pool, group, held, keep, restart if is_state(&group.rules) else changed)
