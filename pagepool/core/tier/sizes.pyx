"""The sizes of pools: shrunk, with what they cached saved in the tier, and grown again."""

from libc.stdint cimport int32_t

from pagepool.core.base cimport NEVER, go_on, let_others_run
from pagepool.core.pool cimport (
    LEFT, MAX_BANKS, NO_GROUP, SAVED, Bank, class_of, count_held, count_pages_in, end_leases, end_of_queue, find_held_free,
    is_free, is_page, page_behind, put_away, queue_of_bank, restore, retire, term_of,
)
from pagepool.core.tier.tier cimport *
from pagepool.core.values cimport as_list

from pagepool.errors import ArgumentError


cdef bint is_to_be_saved(const Pool *pool, int32_t page_id, bint are_final) noexcept nogil:
    """Whether a page that is about to be evicted is saved, unless the tier has its content: its content is final, no page that
    is found before it has the content, and the page is expected back. The tier may have evicted it since it was saved.
    """
    cdef const Page *page = &pool.pages[page_id]
    cdef int32_t group = page.group & ~FLAGS
    if page.group == NO_GROUP or (page.ref_cnt > 1 and not are_final) or term_of(&pool.expected, page_id) == NEVER:
        return False
    if page.group & TWIN and find(pool, digest_of(page), group) != page_id:
        return False
    if pool.num_banks > 1 and class_of(pool, page_id) == LEFT:
        return False
    if pool.tier.fresh_numbers != NULL and pool.tier.fresh_numbers[page_id] == SAVED:
        return find(pool.tier.pool, digest_of(page), group) != NULL_PAGE
    return True


cdef int32_t find_saved(const Pool *pool, int32_t page_id) noexcept nogil:
    """Return the page of the tier with the content of a cached page, or NULL_PAGE."""
    cdef const Page *page = &pool.pages[page_id]
    return find(pool.tier.pool, digest_of(page), page.group & ~FLAGS)


cdef void save_last(Pool *pool, int32_t queue, const int32_t *ids, Py_ssize_t n, bint are_final) noexcept nogil:
    """Save the last ones of pages of a bank, as many as the tier can have: first the last one, so that the tier evicts it last.
    Pages that it has already stay for as long.
    """
    cdef Py_ssize_t i, first = n
    cdef int32_t num_left = count_free_in(pool.tier.pool, queue)
    while first and num_left:
        first -= 1
        num_left -= is_to_be_saved(pool, ids[first], are_final)
    for i in range(first):
        if is_to_be_saved(pool, ids[i], are_final) and find_saved(pool, ids[i]) == NULL_PAGE:
            pool.tier.counters.num_refused_pages += 1
    for i in range(first, n):
        if is_to_be_saved(pool, ids[i], are_final) and find_saved(pool, ids[i]) != NULL_PAGE:
            keep_longer(pool.tier, find_saved(pool, ids[i]))
    for i in range(n - 1, first - 1, -1):
        if is_to_be_saved(pool, ids[i], are_final) and find_saved(pool, ids[i]) == NULL_PAGE:
            save_page(pool, ids[i], digest_of(&pool.pages[ids[i]]), pool.pages[ids[i]].group & ~FLAGS)


cdef Py_ssize_t list_leaving(const Pool *pool, int32_t bank, int32_t *ids) noexcept nogil:
    """List the retired pages of a bank that were not put away: free ones in the order of the queue, then held ones."""
    cdef const Bank *pages = &pool.banks[bank]
    cdef int32_t first = pages.stop - pages.num_retired, queue = queue_of_bank(bank)
    cdef int32_t page_id = page_behind(pool, end_of_queue(pool, queue), queue)
    cdef Py_ssize_t num = 0
    while is_page(pool, page_id):
        if page_id >= first:
            ids[num] = page_id
            num += 1
        page_id = page_behind(pool, page_id, queue)
    for page_id in range(first, pages.stop):
        if not is_free(pool, page_id) and (pool.pages[page_id].ref_cnt or pool.pages[page_id].group != NO_GROUP):
            ids[num] = page_id
            num += 1
    return num


cdef int32_t resize_bank(Pool *pool, int32_t bank, int32_t num_retired, int32_t *ids, bint are_final) noexcept nogil:
    """Let a bank have `num_retired` retired pages. Return how many of them others hold. `ids` has room for that many."""
    cdef int32_t num_held = 0
    cdef Py_ssize_t i, num
    pool.num_reused += pool.banks[bank].num_retired != num_retired  # refused requests are judged anew
    restore(pool, bank, num_retired)
    retire(pool, bank, num_retired)
    num = list_leaving(pool, bank, ids)
    if pool.tier != NULL:
        save_last(pool, queue_of_bank(bank), ids, num, are_final)
    for i in range(num):
        num_held += not put_away(pool, ids[i])
    return num_held


def resize_banks(PageStore store not None, sizes, bint are_final=False, bint only_unheld=False) -> int:
    """Let the banks of a store have other sizes, null pages included: from 1 to those at construction. Return how many pages at
    or above them are held; with `only_unheld`, how many are held in all, and then nothing changes if there are any.

    Free pages above are evicted, after saves in the tier. Held ones lose their entries, after saves if entries `are_final`:
    made once their pages are computed. Call again until none are held. ArgumentError for a store divided into shards.
    O(num_pages).
    """
    cdef Pool *pool = &store.pool
    cdef int32_t[MAX_BANKS] nums_retired
    cdef int32_t num_held = 0, num_left = 0, num_all = 0, num_shards, bad, bank
    cdef list checked = as_list(sizes, "sizes")
    cdef PageIds ids = PageIds.__new__(PageIds)
    cdef void *thread
    cdef int64_t most
    if len(checked) != pool.num_banks:
        raise ArgumentError(f"sizes: got {len(checked)}, allowed: {pool.num_banks}")
    for bank in range(pool.num_banks):
        most = 1 + count_pages_in(pool, queue_of_bank(bank))
        nums_retired[bank] = <int32_t>(most - size_of(checked[bank], "num_pages", 1, most))
        num_all += nums_retired[bank]
    ids.reserve(num_all)
    with store.own_lock()[0]:
        end_leases(pool)
        num_shards, bad = pool.num_shards, find_held_free(pool, pool.num_pages)
        if num_shards <= 1 and bad == NULL_PAGE:
            num_held = count_held(pool) if only_unheld else 0
            thread = let_others_run(pool.num_pages)
            for bank in range(0 if num_held else pool.num_banks):
                num_left += resize_bank(pool, bank, nums_retired[bank], ids.ids, are_final)
            go_on(thread)
    if num_shards > 1:
        raise ArgumentError(f"num_pages: got sizes for a pool in {num_shards} shards, allowed: one that is not divided")
    store.check_untaken(bad)
    return num_held if only_unheld else num_left
