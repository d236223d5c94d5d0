# Look-ups of a prompt: how much of it each worker has, by its hashes.
#
# A group has the workers of each page, or, where any number of leading pages is a hit, only how many leading pages each worker
# has. Leading pages are counted by words of bits, until no worker is left.

from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.string cimport memset

from pagepool.core.base.platform cimport rare, raw_calloc, raw_free
from pagepool.core.holding.rules cimport Rules, count_run_pages
from pagepool.core.router.block_table cimport BlockTable
from pagepool.core.router.event_batch cimport MAX_EVENT_GROUPS
from pagepool.core.router.space cimport WORD, Space, ctz, find_entry, is_free_entry

cdef struct SearchedGroup:    # of a look-up, which all of its workers share
    Rules rules
    bint is_state
    Py_ssize_t stride         # hashes of a page
    Py_ssize_t num_pages      # that hashes were given for
    int32_t *num_leading      # [workers] pages that a worker has from the first on; NULL with a window or a state
    uint64_t *bits            # [num_pages * words] workers that have a page; NULL without

cdef struct Search:
    const uint64_t *hashes
    Py_ssize_t num_hashes
    uint32_t planes           # a bit for each medium that counts


cdef inline uint32_t _find_workers(
    const Space *space, uint64_t block_hash, uint32_t guess, uint32_t planes, uint64_t *holders, int32_t num_planes,
    int32_t num_words,
) noexcept nogil:
    """Find the workers that have a block in one of the media, a bit for each. Returns its entry, which may be `guess`, or 0.
    The numbers are those of the table, and known to the compiler where there are few.
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
        guess = 0  # the links of a free entry looked like the hash


cdef inline void _set_counts(int32_t *counts, uint64_t workers, int32_t first, int32_t count) noexcept nogil:
    """Set the count of workers, a bit for each from `first` on."""
    while workers:
        counts[first + ctz(workers)] = count
        workers &= workers - 1


cdef inline void _count_leading_of(
    const Space *space, const Search *search, Py_ssize_t stride, int32_t *counts, uint64_t *words, int32_t num_planes,
    int32_t num_words,
) noexcept nogil:
    """`_count_leading` for numbers that the compiler may know."""
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
    """Count for each worker the pages that it has from the first one on. `words` are twice those of a page."""
    if table.num_planes == 1 and table.num_words == 1:
        _count_leading_of(space, search, stride, counts, words, 1, 1)
    else:
        _count_leading_of(space, search, stride, counts, words, table.num_planes, table.num_words)


cdef inline bint _search_pages(
    const BlockTable *table, const Space *space, const Search *search, SearchedGroup *group
) noexcept nogil:
    """List the workers that have each page; False where memory is short."""
    cdef Py_ssize_t page
    cdef uint32_t entry = 0
    group.bits = <uint64_t *>raw_calloc(max(<Py_ssize_t>1, group.num_pages * table.num_words), sizeof(uint64_t))
    if group.bits == NULL:
        return False
    for page in range(group.num_pages):
        entry = _find_workers(
            space, search.hashes[(page + 1) * group.stride - 1], entry + 1 if entry else 0, search.planes,
            group.bits + page * table.num_words, table.num_planes, table.num_words,
        )
    return True


cdef inline bint _has_page(const SearchedGroup *group, int32_t num_words, Py_ssize_t page, int32_t worker) noexcept nogil:
    return group.bits[page * num_words + worker // WORD] >> (worker % WORD) & 1


cdef inline Py_ssize_t _find_last_run(
    const SearchedGroup *group, int32_t num_words, int32_t worker, Py_ssize_t stop, Py_ssize_t need
) noexcept nogil:
    """The end of the last `need` consecutive pages before `stop` that a worker has; if there are none, of its leading pages."""
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
    """The hashes of the longest prefix, at most `num_hashes`, that a group can resume at."""
    cdef Py_ssize_t need, num_pages = num_hashes // group.stride
    if group.num_leading != NULL:
        return min(num_pages, <Py_ssize_t>group.num_leading[worker]) * group.stride
    need = 1 if group.is_state else count_run_pages(&group.rules, False)
    return _find_last_run(group, num_words, worker, num_pages, need) * group.stride


cdef inline Py_ssize_t _find_longest_prefix(
    const SearchedGroup *groups, Py_ssize_t num, int32_t num_words, int32_t worker, Py_ssize_t num_hashes, Py_ssize_t multiple
) noexcept nogil:
    """The hashes of the longest prefix that all groups can resume at: each shortens it in turn, until none does any more."""
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
    const BlockTable *table, const Space *space, const Search *search, Py_ssize_t page_size, uint64_t *words,
    SearchedGroup *group,
) noexcept nogil:
    """Look all pages of a group up; False where memory is short."""
    assert space.is_known and space.spec.block_size >= page_size and space.spec.block_size % page_size == 0
    group.stride = space.spec.block_size // page_size
    group.num_pages = search.num_hashes // group.stride
    group.is_state = space.spec.is_state
    group.rules.page_size, group.rules.window = space.spec.block_size, space.spec.window
    if not _is_leading(space):
        return _search_pages(table, space, search, group)
    group.num_leading = <int32_t *>raw_calloc(table.num_words * WORD, sizeof(int32_t))
    if group.num_leading != NULL:
        _count_leading(table, space, search, group.stride, group.num_leading, words)
    return group.num_leading != NULL


cdef inline Py_ssize_t _common_stride(const SearchedGroup *groups, Py_ssize_t num, Py_ssize_t highest) noexcept nogil:
    """The least number of hashes that is a multiple of the pages of all groups, or one above `highest`."""
    cdef Py_ssize_t g, rest, divisor, multiple = 1
    for g in range(num):
        divisor, rest = multiple, groups[g].stride
        while rest:
            divisor, rest = rest, divisor % rest
        multiple = min(multiple // divisor * groups[g].stride, highest + 1)
    return multiple


cdef inline bint search_prefix(
    const BlockTable *table, const Search *search, Py_ssize_t page_size, uint64_t *words, int32_t *counts
) noexcept nogil:
    """Find the hashes of the prefix that each worker has in all groups; False where memory is short."""
    cdef SearchedGroup[MAX_EVENT_GROUPS] groups
    cdef Py_ssize_t g, multiple, num = 0
    cdef int32_t worker
    cdef bint has_room = True
    cdef Py_ssize_t num_groups = table.num_groups if table.num_groups else table.num_spaces
    if num_groups == 1 and _is_leading(&table.spaces[0]) and table.spaces[0].spec.block_size == page_size:
        _count_leading(table, &table.spaces[0], search, 1, counts, words)
        return True
    for g in range(num_groups):
        if not table.spaces[g].is_known:  # what a worker has in it is unknown
            return True
    memset(&groups, 0, sizeof(groups))
    for g in range(num_groups):
        if has_room:
            has_room = _search_group(table, &table.spaces[g], search, page_size, words, &groups[num])
            num += 1
    multiple = _common_stride(groups, num, search.num_hashes)
    for worker in range(table.num_workers if has_room and num else 0):
        counts[worker] = <int32_t>_find_longest_prefix(groups, num, table.num_words, worker, search.num_hashes, multiple)
    for g in range(num):
        raw_free(groups[g].num_leading)
        raw_free(groups[g].bits)
    return has_room
