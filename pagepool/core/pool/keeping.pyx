"""Data that a pool keeps besides its pages, once a caller asks for them: token ids, keys of evicted pages."""

from cpython.mem cimport PyMem_RawCalloc as calloc
from cpython.mem cimport PyMem_RawFree as free
from libc.string cimport memcpy

from pagepool.core.pool.arrays cimport *
from pagepool.core.pool.store cimport *


def keep_token_ids(PageStore store not None, width) -> None:
    """Keep up to `width` tokens of each page cached from now on, at 4 bytes a token. Tokens kept so far stay; a width that
    is not greater changes nothing.
    """
    cdef Py_ssize_t i, num_values = size_of(width, "page_size", 1) + 1
    cdef int32_t *page_tokens
    if num_values <= store.pool.tokens_width:
        return
    page_tokens = <int32_t *>calloc(num_values * store.pool.num_pages, sizeof(int32_t))
    if page_tokens == NULL:
        raise MemoryError(f"{width} token ids for each of {store.pool.num_pages} pages")
    with store.own_lock()[0]:
        for i in range(store.pool.num_pages if store.pool.tokens_width else 0):
            memcpy(
                page_tokens + i * num_values,
                store.pool.page_tokens + i * store.pool.tokens_width,
                store.pool.tokens_width * sizeof(int32_t),
            )
        free(store.pool.page_tokens)
        store.pool.page_tokens = page_tokens
        store.pool.tokens_width = num_values


def remember_evicted(PageStore store not None, bank) -> None:
    """Remember the keys of the pages last evicted from a bank, from now on: about twice as many as the bank has pages. With
    these keys look-ups count the hits that evictions lost. 16 bytes a page. O(pages of the bank), once.
    """
    cdef Bank *kept = &store.pool.banks[store.checked_bank(bank)]
    cdef Ghost ghost
    cdef bint has_room = kept.ghost.entries != NULL or make_ghost(&ghost, 2.0 * (kept.stop - kept.start))
    with store.own_lock()[0]:
        if has_room and kept.ghost.entries == NULL:
            kept.ghost = ghost
    if not has_room:
        raise MemoryError(f"the evicted keys of {kept.stop - kept.start} pages")


def search_all_lost(PageStore store not None) -> None:
    """Let each look-up search for checkpoints behind its hits, so that hits lost for want of pages are counted exactly."""
    with store.own_lock()[0]:
        store.pool.lost_interval = 1


def drop_dependents(PageStore store not None, group, state_groups) -> None:
    """Let the policy, when it evicts a page of `group`, with keys and values, uncache the free checkpoints with its key in
    `state_groups`. No effect without a policy, or with a tier.
    """
    cdef int32_t checked = group_of(group)
    cdef PageIds groups = PageIds([group_of(number) for number in as_list(state_groups, "state_groups")])
    cdef bint has_room
    with store.own_lock()[0]:
        has_room = resize(<void **>&store.pool.dependents.state_groups, max(1, groups.num) * sizeof(int32_t))
        if has_room:
            copy_bytes(store.pool.dependents.state_groups, groups.ids, groups.num * sizeof(int32_t))
            store.pool.dependents.group, store.pool.dependents.num = checked, <int32_t>groups.num
    if not has_room:
        raise MemoryError(f"{groups.num} groups")
