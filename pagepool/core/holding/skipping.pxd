# Pages that no further token attends to are skipped: they are given back, and the null page takes their place. If windows stay
# cached at boundaries, a holder delays this for pages with which another request could resume if this one ended now. A skipped
# page with which a request can resume at a boundary is flagged `KEPT`. Any other skipped page is worthless, and discarded
# unless it has other holders; each holder decides again when it skips the page.

from libc.stdint cimport int32_t, int64_t, uint32_t

from pagepool.core.holding.moves cimport *
from pagepool.core.pool cimport (
    BLANK, KEPT, KNOWN_SHARE, NULL_PAGE, PART, count_free_in, count_release, find_unheld, is_free, is_kept, pass_part, skip,
)


cdef inline int32_t _find_skip_stop(const Group *group, const Held *held, int32_t num_computed) noexcept nogil:
    """Return the place behind the pages that are not needed after `num_computed` computed tokens. Chunks keep the last cached
    page. Full pages that could not be cached while hits were loaded, or are of an answer, count as cached, or they would be
    held forever.
    """
    cdef int32_t num_cached = held.num_cached
    if rare(group.rules.answer_window):
        return min(first_answer_page(&group.rules, held, num_computed), held.num_pages)
    if num_cached and (held.load_number or is_past_prompt(&group.rules, held)):
        num_cached = max(num_cached, full_pages(&group.rules, num_computed))
    return min(first_held_page(group, num_computed, num_cached), held.num_pages)


cdef inline int32_t find_lost_page(const Pool *pool, const Holding *holding, int32_t num_computed) noexcept nogil:
    """Return a page due to be skipped that another caller gave back; NULL_PAGE: there is none."""
    cdef const Held *held
    cdef Py_ssize_t g, stop, bad
    for g in range(holding.num_groups):
        held = &holding.held[g]
        stop = _find_skip_stop(&holding.groups[g], held, num_computed)
        bad = find_unheld(pool, held.ids, first_to_skip(&holding.groups[g].rules, held), stop)
        if bad >= 0:
            return held.ids[bad]
    return NULL_PAGE


cdef inline int32_t draw_references(Pool *pool, const Holding *holding, int32_t change) noexcept nogil:
    """Add `change`, -1 or 1, to the reference count of each held page. Return a page with too few references; NULL_PAGE: there
    is none.
    """
    cdef const Held *held
    cdef Py_ssize_t g, i
    cdef int32_t bad = NULL_PAGE
    for g in range(holding.num_groups):
        held = &holding.held[g]
        for i in range(held.num_pages):
            pool.pages[held.ids[i]].ref_cnt += change
            if held.ids[i] != NULL_PAGE and (pool.pages[held.ids[i]].ref_cnt < 0 or is_free(pool, held.ids[i])):
                bad = held.ids[i]
    return bad


cdef inline int32_t find_overdrawn(Pool *pool, const Holding *holding) noexcept nogil:
    """Return a page with fewer references than places in the holding; NULL_PAGE: there is none."""
    cdef int32_t bad = draw_references(pool, holding, -1)
    draw_references(pool, holding, 1)
    return bad


cdef inline bint lacks_page(const Group *group, const Held *held, int32_t num_computed, int64_t num_pages) noexcept nogil:
    """Whether a page before place `num_pages` was given back, though tokens from `num_computed` on attend to it or are written
    to it.
    """
    cdef int32_t first = first_useful_page(&group.rules, num_computed, 0)
    if rare(group.rules.answer_window):
        first = first_answer_page(&group.rules, held, num_computed)
    return first < min(num_pages, <int64_t>held.num_pages) and held.ids[first] == NULL_PAGE


cdef inline void keep_page(Pool *pool, int32_t page_id) noexcept nogil:
    """Let a page stay cached when it leaves a window. No effect on a page without an entry."""
    if pool.pages[page_id].group != NO_GROUP:
        pool.pages[page_id].group |= KEPT


cdef inline Py_ssize_t _find_longest_group(const Holding *holding) noexcept nogil:
    """Return the group that shows best how long a request is: one of full attention, if there is any."""
    cdef Py_ssize_t g, longest = 0
    for g in range(holding.num_groups):
        if hits_leading_pages(&holding.groups[g]) or is_state(&holding.groups[longest].rules):
            longest = g
    return longest


cdef inline bint _is_ranked(const Pool *pool, const Group *group) noexcept nogil:
    """Whether a policy ranks the pages of a group: it serves the first bank alone."""
    return pool.policy != NULL and group.bank == 0


cdef inline uint32_t _find_known_part(const Pool *pool, const Holding *holding) noexcept nogil:
    """Return the policy's part for all pages of a request that continues an earlier one; BLANK: the request is new. The policy
    knew the keys of most of its pages, so the pages that the request computed are as likely to be used again, above all the
    windows at its end.
    """
    cdef const Held *held
    cdef int64_t num_known
    cdef Py_ssize_t g
    if pool.policy == NULL:
        return BLANK
    g = _find_longest_group(holding)
    held = &holding.held[g]
    num_known = held.ranking.num_ranked if _is_ranked(pool, &holding.groups[g]) else 0
    if num_known == 0 or 100 * num_known < KNOWN_SHARE * held.num_pages or is_state(&holding.groups[g].rules):
        return BLANK
    return pool.policy.marks[held.ids[num_known - 1]] & PART


cdef inline int32_t _keep_needed(
    Pool *pool, const Boundaries *boundaries, const Group *group, const Held *held, int32_t stop
) noexcept nogil:
    """Keep the pages before place `stop` that a boundary needs. Return a place before which no boundary needs another page."""
    cdef Range needed = find_needed(boundaries, group, held.num_skipped)
    cdef int32_t place
    while needed.start < stop:
        for place in range(needed.start, min(needed.stop, stop)):
            keep_page(pool, held.ids[place])
        if needed.stop >= stop:
            return stop
        needed = find_needed(boundaries, group, needed.stop)
    assert needed.start >= stop
    return needed.start


cdef inline void _skip_to(Pool *pool, const Holding *holding, Py_ssize_t g, int32_t stop) noexcept nogil:
    """Give back the pages of a group before place `stop`, the last first. A policy counts the release of all as one call."""
    cdef Held *held = &holding.held[g]
    cdef bint is_ranked = _is_ranked(pool, &holding.groups[g])
    cdef uint32_t part = BLANK
    cdef int32_t j, num_counted = 0
    assert 0 <= held.num_skipped < stop <= held.num_pages
    if holding.boundaries != NULL:
        part = _find_known_part(pool, holding)
        if stop > held.next_needed and has_window(&holding.groups[g].rules):
            held.next_needed = _keep_needed(pool, holding.boundaries, &holding.groups[g], held, stop)
    for j in range(stop - 1, first_to_skip(&holding.groups[g].rules, held) - 1, -1):
        if is_ranked and part != BLANK:
            pass_part(pool.policy, held.ids[j], part)
        num_counted += skip(
            pool, held.ids[j], stays=holding.boundaries == NULL or is_kept(&pool.pages[held.ids[j]]),
            may_hit=not is_ranked or holding.boundaries != NULL or is_needed_by_hits(&holding.groups[g].rules, j),
        )
        held.ids[j] = NULL_PAGE
    if num_counted:
        count_release(pool.policy, num_counted, count_free_in(pool, -1) - num_counted)
    held.num_skipped = stop


cdef inline void skip_pages(Pool *pool, const Holding *holding, Py_ssize_t g, int32_t num_computed) noexcept nogil:
    """Give back the pages of a group that are not needed after `num_computed` computed tokens. While hits are loaded, give back
    none: if a load fails, they are needed again.
    """
    cdef int32_t stop = _find_skip_stop(&holding.groups[g], &holding.held[g], num_computed)
    assert 0 <= stop <= holding.held[g].num_pages and num_computed >= 0
    if stop > holding.held[g].num_skipped and not waits_for_loads(pool, &holding.held[g]):
        _skip_to(pool, holding, g, stop)


cdef inline void skip_unread(Pool *pool, const Holding *holding, int32_t num_tokens) noexcept nogil:
    """Give back the pages that no token from `num_tokens` on attends to. They may not have been filled, so they get no prefix
    entry.
    """
    cdef Held *held
    cdef Py_ssize_t g
    cdef int32_t stop
    for g in range(holding.num_groups):
        held = &holding.held[g]
        stop = min(first_useful_page(&holding.groups[g].rules, num_tokens, 0), held.num_pages)
        if rare(holding.groups[g].rules.answer_window):
            stop = min(first_answer_page(&holding.groups[g].rules, held, num_tokens), held.num_pages)
        if stop > held.num_skipped:
            _skip_to(pool, holding, g, stop)
        if not holding.groups[g].rules.answer_window:
            held.num_cached = max(held.num_cached, stop)


cdef inline int64_t _find_cached_end(const Holding *holding, int64_t num_computed) noexcept nogil:
    """Return the number of computed tokens whose full pages were cached in all groups."""
    cdef const Group *group
    cdef Py_ssize_t g
    cdef int64_t end, most = 0
    for g in range(holding.num_groups):
        group = &holding.groups[g]
        if not is_state(&group.rules):
            most = max(most, <int64_t>holding.held[g].num_cached * group.rules.page_size)
    num_computed = min(num_computed, most)
    for g in range(holding.num_groups):
        group = &holding.groups[g]
        end = <int64_t>holding.held[g].num_cached * group.rules.page_size
        if not is_state(&group.rules) and end + group.rules.page_size <= num_computed:
            num_computed = end
    return num_computed


cdef inline int32_t _find_last_resumption(const Holding *holding, int64_t num_computed) noexcept nogil:
    """Return where a request resumes that shares all cached tokens."""
    cdef const Boundaries *boundaries = holding.boundaries
    return find_resumption(boundaries, _find_cached_end(holding, num_computed) + boundaries.hash_lookahead)


cdef inline bint _is_end_worth(const Holding *holding, int32_t end) noexcept nogil:
    """Whether the windows before the computed end should stay cached. They must be whole, and one of these must hold: the end
    is in the prompt; the windows have no more pages behind the prompt than the answer has in the longest group; or they have no
    fewer pages than the prompt has in that group, as in a short chat.
    """
    cdef Boundaries *boundaries = holding.boundaries
    cdef const Group *group
    cdef const Group *longest = &holding.groups[_find_longest_group(holding)]
    cdef Py_ssize_t g
    cdef int32_t place, first, start, num_pages = 0, num_new_pages = 0
    cdef int32_t num_prompt = max(0, boundaries.num_prompt - boundaries.num_dropped)  # less dropped tokens, as `end` is
    for g in range(holding.num_groups):
        group = &holding.groups[g]
        if not has_window(&group.rules):
            continue
        first, start = first_hit_page(&group.rules, end, boundaries.use_eagle), full_pages(&group.rules, num_prompt)
        for place in range(first, full_pages(&group.rules, end)):
            if holding.held[g].ids[place] != NULL_PAGE:
                break
            if find_needed(boundaries, group, place).start > place:
                return False
        num_pages += full_pages(&group.rules, end) - first
        num_new_pages += max(0, full_pages(&group.rules, end) - max(first, start))
    if end < find_resumption(boundaries, boundaries.num_prompt):
        return True
    start = full_pages(&longest.rules, num_prompt)
    if start >= full_pages(&longest.rules, end):
        return False
    return num_new_pages <= full_pages(&longest.rules, end) - start or start <= num_pages


cdef inline void rate_pages(Pool *pool, const Holding *holding, int64_t num_computed) noexcept nogil:
    """Decide which pages stay cached, and in which part of the policy, before a holder of `num_computed` tokens ends."""
    cdef const Held *held
    cdef Py_ssize_t g
    cdef int32_t place
    cdef uint32_t part
    if holding.boundaries == NULL:
        return
    part = _find_known_part(pool, holding)
    for g in range(holding.num_groups if part != BLANK else 0):
        held = &holding.held[g]
        for place in range(held.num_pages if _is_ranked(pool, &holding.groups[g]) else 0):
            if held.ids[place] != NULL_PAGE:
                pass_part(pool.policy, held.ids[place], part)
    _keep_windows(pool, holding, num_computed)


cdef inline void _keep_windows(Pool *pool, const Holding *holding, int64_t num_computed) noexcept nogil:
    """Keep the pages of windows and chunks with which a request can resume at a boundary, or at the computed end."""
    cdef Boundaries boundaries = holding.boundaries[0]
    cdef Py_ssize_t g
    cdef int32_t end = _find_last_resumption(holding, num_computed)
    if not boundaries.writes_states and end > 0 and _is_end_worth(holding, end):
        add_boundary(&boundaries, end, 0)
    for g in range(holding.num_groups):
        if has_window(&holding.groups[g].rules):
            _keep_needed(pool, &boundaries, &holding.groups[g], &holding.held[g], holding.held[g].num_pages)
