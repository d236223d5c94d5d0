"""Rows end: their last pages and states are cached, their pages are given back, and they are emptied."""

from pagepool.core.holding cimport count_places, draw_references, drop_copies, list_last_first, note_run_end, rate_pages
from pagepool.core.values cimport ids_in


cdef Identity NOBODYS_ROW     # all zeros


cdef Py_ssize_t copy_rows_to_release(Batch *batch, PageIds released) noexcept:
    """Copy the rows, and return the number of rows before the first wrong one."""
    cdef Py_ssize_t i
    start_call(batch)
    for i in range(released.num):
        if not stamp_row(batch, released.ids[i], i):
            return i
    return released.num


cdef bint changes_last_pages(const Batch *batch) noexcept:
    """Whether pages are cached or rated as their rows end, before they are given back."""
    return batch.has_boundaries or batch.hashing.hash_lookahead > 0


cdef int32_t find_overdrawn_page(Batch *batch, Py_ssize_t n) noexcept:
    """Find a page that has fewer references than the copied rows would give back; NULL_PAGE if there is none."""
    cdef Holding *holding
    cdef Py_ssize_t i
    cdef int32_t found, bad = NULL_PAGE
    for i in range(n):
        holding = holding_of(batch, batch.checked_rows[i])
        found = draw_references(batch.pool, holding, -1)
        bad = found if found != NULL_PAGE else bad
    for i in range(n):
        holding = holding_of(batch, batch.checked_rows[i])
        draw_references(batch.pool, holding, 1)
    return bad


cdef bint reserve_rows(const Batch *batch, Py_ssize_t n, PageIds ids, PageIds page_terms) noexcept:
    """Reserve memory for the pages of the copied rows, and for their terms if any are given; False if memory is short."""
    cdef Holding *holding
    cdef Py_ssize_t i, num_places = 0
    for i in range(n):
        holding = holding_of(batch, batch.checked_rows[i])
        num_places += count_places(holding)
    return ids.try_reserve(num_places) and (page_terms is None or page_terms.try_reserve(num_places))


cdef bint order_pages(
    RowStore rows, Py_ssize_t n, PageIds ids, Py_ssize_t *num_staying, const Amounts *terms, PageIds page_terms
) noexcept:
    """Rate the pages of the copied rows and list them in the order of giving back, pages that stay cached first, with their
    terms. False if memory is short.
    """
    cdef Batch *batch = &rows.batch
    cdef Holding *holding
    cdef Py_ssize_t i
    cdef int are_worthless
    for i in range(n if batch.has_boundaries else 0):
        rate_pages(batch.pool, holding_of(batch, batch.checked_rows[i]), MAX_TOKENS)
    for are_worthless in range(2 if batch.has_boundaries else 1):
        for i in range(n):
            holding = holding_of(batch, batch.checked_rows[i])
            if not list_last_first(batch.pool, holding, MAX_TOKENS, ids, are_worthless):
                return False
            if page_terms is not None and not are_worthless:
                if not rows.store.pad_terms(page_terms, amount(terms, i), ids.num):
                    return False
        if not are_worthless:
            num_staying[0] = ids.num
    return True


cdef void cache_last_pages(Batch *batch, Py_ssize_t n) noexcept:
    """Cache the pages of the copied rows whose lookahead became known after they were filled."""
    cdef Py_ssize_t i
    for i in range(n if batch.hashing.hash_lookahead else 0):
        cache_row(batch, batch.checked_rows[i], count_final(batch, batch.checked_rows[i]))
    cache_waiting(&batch.waiting)


cdef void end_row(Batch *batch, Py_ssize_t row, int32_t term, bint has_failed) noexcept:
    """Free a row whose pages were given back. Cache its last states with a term, unless their step has failed."""
    cdef Holding *holding = holding_of(batch, row)
    assert batch.records[row].is_admitted and batch.stamps[row] == batch.stamp
    note_row_entries(batch, row)
    drop_copies(batch.pool, holding)
    if batch.writes_states:
        if not has_failed:
            note_run_end(batch.pool, holding)
            settle_writes(batch, row, count_final(batch, row), 0, term)
        drop_writes(batch, row, 0)
    assert batch.rows[row].num_writes == 0 and batch.rows[row].write_list == 0
    set_identity(batch, row, NOBODYS_ROW)
    empty_row(batch, row)


cdef Release release_rows(
    RowStore rows, PageIds released, PageIds row_terms, PageIds ids, PageIds page_terms, bint has_failed
) noexcept:
    """Give back the pages of rows and free the rows, or change nothing. List the pages in `ids`, and their terms, if any, in
    `page_terms`. If the steps of the rows have failed, nothing more is cached. The locks are held.
    """
    cdef Amounts terms = amounts_in(row_terms)
    cdef Py_ssize_t num_right, num_staying = 0, bad, i
    cdef int32_t overdrawn = NULL_PAGE
    num_right = copy_rows_to_release(&rows.batch, released)
    if num_right < released.num:
        return Release(outcome=WRONG_ROW, at=num_right, page_id=NULL_PAGE)
    if page_terms is not None or changes_last_pages(&rows.batch):
        overdrawn = find_overdrawn_page(&rows.batch, num_right)  # before pages are cached or rated, or the queue is divided
    if overdrawn != NULL_PAGE:
        return Release(outcome=OVERDRAWN, at=0, page_id=overdrawn)
    if not reserve_rows(&rows.batch, num_right, ids, page_terms) or (num_right and not rows.store.make_terms(row_terms)):
        return Release(outcome=SHORT_OF_ROOM, at=0, page_id=NULL_PAGE)
    if not has_failed:
        cache_last_pages(&rows.batch, num_right)
    if not order_pages(rows, num_right, ids, &num_staying, &terms, page_terms):
        return Release(outcome=SHORT_OF_ROOM, at=0, page_id=NULL_PAGE)
    bad = rows.store.give_back_row(ids, num_staying, ids_in(page_terms))
    if bad >= 0:
        return Release(outcome=OVERDRAWN, at=0, page_id=ids.ids[bad])
    for i in range(num_right):
        end_row(&rows.batch, rows.batch.checked_rows[i], amount(&terms, i), has_failed)
    return Release(outcome=RELEASED, at=0, page_id=NULL_PAGE)


cdef bint reserve_places(const Batch *batch, PageIds ids) noexcept:
    """Reserve memory for the pages of any one row; False if memory is short."""
    cdef Py_ssize_t row, num_places = 0
    for row in range(batch.num_rows):
        num_places = max(num_places, count_places(holding_of(batch, row)))
    return ids.try_reserve(num_places)


cdef Release release_lost(RowStore rows, PageIds one, int32_t row, PageIds ids) noexcept:
    """Release a row whose tokens were not computed. `one` has room for the row, and `ids` for its pages. The locks are held.
    """
    one.ids[0], ids.num = row, 0
    return release_rows(rows, one, NO_TERMS, ids, None, True)
