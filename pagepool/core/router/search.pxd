# The search for a prompt: how much of it each worker has cached.
#
# In a group where any number of leading pages is a hit, the search counts the leading pages of each worker: it combines the
# words of bits page by page, until no worker is left. In other groups it keeps the workers of each page. Then it looks for the
# longest prefix at which all groups can resume. Always:
#
# * A group has either counts of leading pages or bits. Neither reaches past the hashes of the prompt.

from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.string cimport memset

from pagepool.core.holding cimport Rules, count_run_pages
from pagepool.core.router.block_table cimport *

cdef struct SearchedGroup:    # a cache group of a search
    Rules rules
    bint is_state
    Py_ssize_t stride         # hashes per page
    Py_ssize_t num_pages      # full pages of the prompt
    int32_t *num_leading      # [workers] leading pages of each worker; NULL with a window or a state
    uint64_t *bits            # [num_pages * words] workers of each page; NULL without a window or a state

cdef struct Search:
    const uint64_t *hashes
    Py_ssize_t num_hashes
    uint32_t planes           # a bit for each medium to search
    uint64_t *words           # [2 * num_words] bits of workers; the caller frees them, and `counts` behind them
    int32_t *counts           # [num_words * WORD] hashes of the prefix that each worker has


cdef inline uint32_t _find_workers(
    const Space *space, uint64_t block_hash, uint32_t guess, uint32_t planes, uint64_t *holders, int32_t num_planes,
    int32_t num_words,
) noexcept nogil:
    """Find the workers of a block, a bit for each, and return its entry; 0 if it has none. `guess` is tried first.

    `num_planes` and `num_words` are those of the table. As constants, they let the compiler unroll the loops.
    """
    cdef const uint64_t *bits
    cdef uint64_t any_held
    cdef int32_t plane, word
    cdef uint32_t entry
    while True:
        bits, any_held = space.entries + guess * <size_t>(1 + num_planes * num_words), 0
        entry = guess if guess and guess < space.num_entries and bits[0] == block_hash else 0
        if not entry:
            entry = find_entry(space, block_hash, 0)
            bits = space.entries + entry * <size_t>(1 + num_planes * num_words)
        assert entry == 0 or (entry < space.num_entries and bits[0] == block_hash)
        for word in range(num_words):
            holders[word] = 0
            for plane in range(num_planes if entry else 0):
                holders[word] |= bits[1 + plane * num_words + word] if planes >> plane & 1 else 0
            any_held |= holders[word]
        if not rare(not any_held and entry and entry == guess and is_free_entry(bits, 1 + num_planes * num_words)):
            return entry
        guess = 0  # the links in a free entry look like the hash: search again


cdef inline void _set_counts(int32_t *counts, uint64_t workers, int32_t first, int32_t count) noexcept nogil:
    """Set the count of some workers, given by bits from worker `first` on."""
    while workers:
        counts[first + ctz(workers)] = count
        workers &= workers - 1


cdef inline void _count_leading_of(
    const Space *space, const Search *search, Py_ssize_t stride, int32_t *counts, uint64_t *words, int32_t num_planes,
    int32_t num_words,
) noexcept nogil:
    """Count leading pages, as `_count_leading` does, for numbers that may be constants."""
    cdef uint64_t *holders = words
    cdef uint64_t *still = words + num_words
    cdef uint64_t left
    cdef Py_ssize_t page, num_pages = search.num_hashes // stride
    cdef int32_t word
    cdef uint32_t entry = 0
    memset(counts, 0, num_words * WORD * sizeof(int32_t))
    memset(holders, 0xff, num_words * sizeof(uint64_t))
    for page in range(num_pages):
        entry = _find_workers(
            space, search.hashes[(page + 1) * stride - 1], entry + 1 if entry else 0, search.planes, still,
            num_planes, num_words,
        )
        left = 0
        for word in range(num_words):
            still[word] &= holders[word]
            if still[word] != holders[word]:
                _set_counts(counts, holders[word] & ~still[word], word * WORD, <int32_t>page)
                holders[word] = still[word]
            left |= still[word]
        if left == 0:
            return
    for word in range(num_words):
        _set_counts(counts, holders[word], word * WORD, <int32_t>num_pages)


cdef inline void _count_leading(
    const BlockTable *table, const Space *space, const Search *search, Py_ssize_t stride, int32_t *counts, uint64_t *words
) noexcept nogil:
    """Count the leading pages of each worker. `words` has room for the bits of two pages."""
    if table.media.num == 1 and table.num_words == 1:
        _count_leading_of(space, search, stride, counts, words, 1, 1)
    else:
        _count_leading_of(space, search, stride, counts, words, table.media.num, table.num_words)


cdef inline bint _search_pages(
    const BlockTable *table, const Space *space, const Search *search, SearchedGroup *group
) noexcept nogil:
    """Find the workers of each page; return False if memory is short."""
    cdef Py_ssize_t page
    cdef uint32_t entry = 0
    group.bits = <uint64_t *>raw_calloc(max(<Py_ssize_t>1, group.num_pages * table.num_words), sizeof(uint64_t))
    if group.bits == NULL:
        return False
    for page in range(group.num_pages):
        entry = _find_workers(
            space, search.hashes[(page + 1) * group.stride - 1], entry + 1 if entry else 0, search.planes,
            group.bits + page * table.num_words, table.media.num, table.num_words,
        )
    return True


cdef inline bint _has_page(const SearchedGroup *group, int32_t num_words, Py_ssize_t page, int32_t worker) noexcept nogil:
    return group.bits[page * num_words + worker // WORD] >> (worker % WORD) & 1


cdef inline Py_ssize_t _find_last_run(
    const SearchedGroup *group, int32_t num_words, int32_t worker, Py_ssize_t stop, Py_ssize_t need
) noexcept nogil:
    """Return the end of a worker's last run of `need` pages before `stop`; without a run, the number of its leading pages."""
    cdef Py_ssize_t page, num = 0
    assert need > 0 and stop <= group.num_pages
    for page in range(stop - 1, -1, -1):
        num = num + 1 if _has_page(group, num_words, page, worker) else 0
        if num == need:
            return page + need
    return num


cdef inline Py_ssize_t _shorten_prefix(
    const SearchedGroup *group, int32_t num_words, int32_t worker, Py_ssize_t num_hashes
) noexcept nogil:
    """Return the longest prefix at which a group can resume, in hashes: at most `num_hashes`."""
    cdef Py_ssize_t need, num_pages = num_hashes // group.stride
    if group.num_leading != NULL:
        return min(num_pages, <Py_ssize_t>group.num_leading[worker]) * group.stride
    need = 1 if group.is_state else count_run_pages(&group.rules, False)
    return _find_last_run(group, num_words, worker, num_pages, need) * group.stride


cdef inline Py_ssize_t _find_longest_prefix(
    const SearchedGroup *groups, Py_ssize_t num, int32_t num_words, int32_t worker, Py_ssize_t num_hashes, Py_ssize_t multiple
) noexcept nogil:
    """Find the longest prefix at which all groups can resume, in hashes. The groups shorten it in turn until none does."""
    cdef Py_ssize_t g, previous = -1
    while num_hashes != previous:
        previous = num_hashes
        for g in range(num):
            num_hashes = _shorten_prefix(&groups[g], num_words, worker, num_hashes)
            num_hashes -= num_hashes % multiple
    assert 0 <= num_hashes <= previous
    return num_hashes


cdef inline bint _is_leading(const Space *space) noexcept nogil:
    """Whether any number of leading pages is a hit."""
    return space.spec.window == 0 and not space.spec.is_state


cdef inline bint _search_group(
    const BlockTable *table, const Space *space, const Search *search, Py_ssize_t page_size, SearchedGroup *group
) noexcept nogil:
    """Search all pages of a group; return False if memory is short."""
    assert space.is_known and space.spec.block_size >= page_size and space.spec.block_size % page_size == 0
    group.stride = space.spec.block_size // page_size
    group.num_pages = search.num_hashes // group.stride
    group.is_state = space.spec.is_state
    group.rules.page_size, group.rules.window = space.spec.block_size, space.spec.window
    if not _is_leading(space):
        return _search_pages(table, space, search, group)
    group.num_leading = <int32_t *>raw_calloc(table.num_words * WORD, sizeof(int32_t))
    if group.num_leading != NULL:
        _count_leading(table, space, search, group.stride, group.num_leading, search.words)
    return group.num_leading != NULL


cdef inline Py_ssize_t _common_stride(const SearchedGroup *groups, Py_ssize_t num, Py_ssize_t highest) noexcept nogil:
    """Return the least common multiple of the strides of all groups, or a number above `highest`."""
    cdef Py_ssize_t g, rest, divisor, multiple = 1
    for g in range(num):
        divisor, rest = multiple, groups[g].stride
        while rest:
            divisor, rest = rest, divisor % rest
        multiple = min(multiple // divisor * groups[g].stride, highest + 1)
    return multiple


cdef inline bint search_prefix(const BlockTable *table, Search *search, Py_ssize_t page_size) noexcept nogil:
    """Find the prefix that each worker has in all groups, in hashes; return False if memory is short."""
    cdef SearchedGroup[MAX_EVENT_GROUPS] groups
    cdef Py_ssize_t g, multiple, num = 0
    cdef int32_t worker
    cdef bint has_room = True
    cdef int32_t *counts
    cdef Py_ssize_t num_groups = table.num_groups if table.num_groups else table.num_spaces
    search.words = <uint64_t *>raw_calloc(table.num_words, 2 * sizeof(uint64_t) + WORD * sizeof(int32_t))
    if search.words == NULL:
        return False
    counts = search.counts = <int32_t *>(search.words + 2 * table.num_words)
    if num_groups == 1 and _is_leading(&table.spaces[0]) and table.spaces[0].spec.block_size == page_size:
        _count_leading(table, &table.spaces[0], search, 1, counts, search.words)
        return True
    for g in range(num_groups):
        if not table.spaces[g].is_known:  # nothing is known of this group
            return True
    memset(&groups, 0, sizeof(groups))
    for g in range(num_groups):
        if has_room:
            has_room = _search_group(table, &table.spaces[g], search, page_size, &groups[num])
            num += 1
    multiple = _common_stride(groups, num, search.num_hashes)
    for worker in range(table.num_workers if has_room and num else 0):
        counts[worker] = <int32_t>_find_longest_prefix(groups, num, table.num_words, worker, search.num_hashes, multiple)
    for g in range(num):
        raw_free(groups[g].num_leading)
        raw_free(groups[g].bits)
    return has_room
