# Rows that compute the same tokens share pages: one that fills a page as another has before takes the other's, and gives its
# own back. Only when the step that filled it is over, so that nothing is written to a shared page.

from libc.stdint cimport int32_t

from pagepool.core.batch cimport Batch, held_by
from pagepool.core.holdings cimport Held, find_load_number
from pagepool.core.index cimport drop, find_within
from pagepool.core.pages cimport touch_all
from pagepool.core.records cimport FLAGS, NO_GROUP, NULL_PAGE, Page, digest_of, ids_in_shard, is_pinned
from pagepool.core.references cimport put_back_held
from pagepool.core.rows cimport mark
from pagepool.core.rules cimport Group, full_pages, is_state


cdef inline int32_t find_first_twin(const Batch *batch, Py_ssize_t row, int32_t page_id) noexcept nogil:
    """The page cached first with the content of a page, among those that the row may hold; NULL_PAGE if it is not cached."""
    cdef const Page *page = &batch.pool.pages[page_id]
    if page_id == NULL_PAGE or page.group == NO_GROUP:
        return NULL_PAGE
    return find_within(batch.pool, digest_of(page), page.group & ~FLAGS, ids_in_shard(batch.pool, batch.states[row].shard))


cdef inline void unify_pages(Batch *batch, Py_ssize_t row, int32_t num_computed) noexcept nogil:
    """Let a row share the pages that its first `num_computed` tokens fill, as far as they were not compared before."""
    cdef const Group *group
    cdef Held *held
    cdef Py_ssize_t g
    cdef int32_t place, page_id, first
    for g in range(batch.num_groups):
        group, held = &batch.groups[g], held_by(batch, row, g)
        for place in range(held.num_unique, 0 if is_state(&group.rules) else full_pages(&group.rules, num_computed)):
            page_id = held.ids[place]
            first = find_first_twin(batch, row, page_id)
            if find_load_number(batch.pool, &first, 1):
                continue
            if first != NULL_PAGE and first != page_id and not is_pinned(batch.pool, page_id):
                touch_all(batch.pool, &first, 1)
                drop(batch.pool, page_id)  # which nobody would do if the step that filled it turned out not to have run
                put_back_held(batch.pool, page_id)
                held.ids[place] = first
                batch.tables[g].table[row * batch.tables[g].num_columns + place] = first
                mark(batch.tables[g], row, place, place + 1)
                batch.tables[g].version += 1
        if not is_state(&group.rules):
            held.num_unique = max(held.num_unique, full_pages(&group.rules, num_computed))
