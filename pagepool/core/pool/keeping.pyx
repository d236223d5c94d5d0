"""Data that a pool keeps besides its pages, once a caller asks for them: token ids, keys of evicted pages."""

from cpython.mem cimport PyMem_RawCalloc as calloc
from cpython.mem cimport PyMem_RawFree as free
from libc.stdint cimport int32_t, uint32_t
from libc.string cimport memcpy

from pagepool.core.pool.arrays cimport *
from pagepool.core.pool.store cimport *

from pagepool.errors import ArgumentError


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


def keep_whole_digests(PageStore store not None) -> None:
    """Keep, besides keys, the upper halves of the 32-byte digests of pages cached from now on. No effect if they are kept
    already.
    """
    cdef Digest *uppers = <Digest *>calloc(3 * <Py_ssize_t>store.pool.num_pages, sizeof(Digest))
    if uppers == NULL:
        raise MemoryError(f"digests of {store.pool.num_pages} pages")
    store.names.max_key = (1 << 256) - 1
    with store.own_lock()[0]:
        if store.pool.uppers == NULL:
            store.pool.uppers, uppers = uppers, NULL
    free(uppers)


def rank_checkpoints(PageStore store not None, banks) -> None:
    """Keep the lineage of pages, and let the checkpoints in `banks`, which have no other pages, be evicted by their classes,
    from now on. The keys of the pages last evicted from these banks are remembered, about twice as many as they have pages:
    with these keys look-ups count the hits that evictions lost. 4 bytes a page of the pool, 56 a page of the banks.
    ArgumentError in a store of one bank, which has keys and values too. O(num_pages), once.
    """
    cdef PageIds checked = PageIds([store.checked_bank(bank) for bank in as_list(banks, "banks")])
    cdef Pool *pool = &store.pool
    cdef bint has_room
    cdef Py_ssize_t i
    if checked.num and pool.num_banks == 1:
        raise ArgumentError("banks: got those of a store that has one, allowed: those without keys and values")
    with store.own_lock()[0]:
        if pool.children == NULL:
            pool.children = <uint32_t *>calloc(pool.num_pages, sizeof(uint32_t))
        has_room = pool.children != NULL
        for i in range(checked.num if has_room else 0):
            has_room = has_room and begin_checkpoints(pool, &pool.banks[checked.ids[i]])
    if not has_room:
        raise MemoryError(f"the checkpoints of {store.pool.num_pages} pages")


cdef bint begin_checkpoints(const Pool *pool, Bank *bank) noexcept:
    """Let a bank rank its checkpoints and remember evicted ones; False if memory is short."""
    cdef Checkpoints *checkpoints
    cdef int32_t page_id
    if bank.ghost.entries == NULL and not make_ghost(&bank.ghost, 2.0 * (bank.stop - bank.start)):
        return False
    if bank.checkpoints != NULL:
        return True
    checkpoints = <Checkpoints *>calloc(1, sizeof(Checkpoints))
    if checkpoints == NULL:
        return False
    checkpoints.start = bank.start
    checkpoints.notes = <CheckpointNote *>calloc(bank.stop - bank.start, sizeof(CheckpointNote))
    if checkpoints.notes == NULL:
        free(checkpoints)
        return False
    for page_id in range(bank.start, bank.stop):
        if pool.pages[page_id].group != NO_GROUP:
            begin_note(checkpoints, page_id, NULL)
    bank.checkpoints = checkpoints
    return True


def keep_departures(PageStore store not None, bint notes_leaving=False) -> None:
    """Remember which keys leave the prefix index, and the tier's, from now on: the last ones, about twice as many as pool and
    tier have pages. 16 bytes a page. With `notes_leaving` keys of pages that windows leave are among them. No effect if they
    are kept already. O(num_pages).
    """
    cdef bint has_room
    with store.own_lock()[0]:
        has_room = begin_departures(&store.pool)
        if has_room and store.pool.tier != NULL:
            has_room = begin_departures(store.pool.tier.pool)
        store.pool.notes_leaving |= notes_leaving
    if not has_room:
        raise MemoryError(f"the departures of {store.pool.num_pages} pages")


cdef bint begin_departures(Pool *pool) noexcept:
    """Let a pool remember the keys that leave its index; False if memory is short."""
    if pool.departed.entries == NULL and not make_ghost(&pool.departed, 2.0 * pool.num_pages):
        pool.departed.entries = NULL
        return False
    pool.hear_removal = hear_removal
    return True


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
