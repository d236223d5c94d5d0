"""Pages that a request or row holds, listed."""


cdef bint copy_ids(const Holding *holding, tuple copies) noexcept:
    """Append the pages of each group to its `PageIds`; False if memory is short."""
    cdef Py_ssize_t g
    for g in range(holding.num_groups):
        if not (<PageIds>copies[g]).try_reserve(holding.held[g].num_pages):
            return False
        (<PageIds>copies[g]).put(holding.held[g].ids, holding.held[g].num_pages)
    return True


cdef bint list_last_first(
    const Pool *pool, const Holding *holding, int32_t num_computed, PageIds listed, bint are_worthless
) noexcept:
    """Append the pages of a request that lose their entries (`are_worthless`), or else the pages that stay cached, in the order
    of giving back: group by group, the last page first. Uncomputed pages count as staying: `forget_uncomputed` drops their
    entries later, in the tier too. False if memory is short.
    """
    cdef Py_ssize_t g, i, num = listed.num
    cdef int32_t page_id, stop
    cdef bint are_chosen
    if not listed.try_reserve(count_places(holding)):
        return False
    for g in range(holding.num_groups):
        are_chosen = holding.boundaries != NULL and has_window(&holding.groups[g].rules)
        if are_worthless and not are_chosen:
            continue
        stop = full_pages(&holding.groups[g].rules, num_computed)
        for i in range(holding.held[g].num_pages - 1, -1, -1):
            page_id = holding.held[g].ids[i]
            if not are_chosen or (page_id != NULL_PAGE and (i < stop and not is_kept(&pool.pages[page_id])) == are_worthless):
                listed.ids[num] = page_id
                num += 1
    assert listed.num <= num <= listed.capacity
    listed.num = num
    return True
