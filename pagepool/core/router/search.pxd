# The search for a prompt: how much of it each worker has cached.
#
# In a group where any number of leading pages is a hit, the search counts the leading pages of each worker: it combines the
# words of bits page by page, until no worker is left. In other groups it notes which workers have each page. Groups with equal
# specs are searched as one kind, since with eagle a kind drops one page. Then the search looks for the longest prefix at which
# all kinds can resume, in the order of `find_longest`. A group without a block so far is ignored; but if pagepool's events
# count it in their number of groups, nothing hits. Always:
#
# * A kind has either counts of leading hashes or bits. Neither reaches past the hashes of the prompt.

from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.string cimport memcmp, memset

from pagepool.core.holding cimport Rules, count_run_pages
from pagepool.core.router.block_table cimport *

cdef struct Kind:             # cache groups with equal specs
    Spec spec
    Rules rules
    Py_ssize_t stride         # hashes per page
    Py_ssize_t unit           # a hit ends at a multiple of this many hashes: `stride`, or 1 with `has_parts`
    Py_ssize_t num_pages      # full pages of the prompt
    int32_t *num_leading      # [workers] leading hashes of each worker; NULL with a window or a state
    uint64_t *bits            # [num_pages * words] workers of each page; NULL without a window or a state

cdef struct Search:
    const uint64_t *hashes
    Py_ssize_t num_hashes
    uint32_t planes           # a bit for each medium to search
    bint use_eagle            # the last page of a hit is dropped
    bint has_parts            # hits may end within pages
    uint64_t *words           # [2 * num_words] bits of workers; `counts` follows in this memory, which the caller frees
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
    const Space *space, const Search *search, Py_ssize_t stride, int32_t *counts, int32_t num_planes, int32_t num_words
) noexcept nogil:
    """Count leading pages, as `_count_leading` does; `num_planes` and `num_words` may be constants."""
    cdef uint64_t *holders = search.words
    cdef uint64_t *still = search.words + num_words
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
    const BlockTable *table, const Space *space, const Search *search, Py_ssize_t stride, int32_t *counts
) noexcept nogil:
    """Count the leading pages of each worker."""
    if table.media.num == 1 and table.num_words == 1:
        _count_leading_of(space, search, stride, counts, 1, 1)
    else:
        _count_leading_of(space, search, stride, counts, table.media.num, table.num_words)


cdef inline uint32_t _find_holders(
    const BlockTable *table, const Space *space, const Search *search, uint64_t block_hash, uint32_t guess
) noexcept nogil:
    """Write the workers of a block to the words of the search, and return its entry, as `_find_workers` does."""
    return _find_workers(space, block_hash, guess, search.planes, search.words, table.media.num, table.num_words)


cdef inline bint _is_leading(const Spec *spec) noexcept nogil:
    """Whether any number of leading pages is a hit."""
    return spec.window == 0 and not spec.is_state


cdef inline bint _has_parts(const BlockTable *table) noexcept nogil:
    """Whether hits may end within pages, as in vLLM: if states are kept there, and no window has pages of several hashes."""
    cdef const Space *space
    cdef bint has_parts = False
    for space in table.spaces[:table.num_spaces]:
        has_parts |= space.known.spec.is_state and space.known.has_tails
        if space.known.spec.window and space.known.spec.block_size > table.page_size:
            return False
    return has_parts


cdef inline void _count_parts(
    const BlockTable *table, const Space *space, const Search *search, const Kind *kind, int32_t *num_leading
) noexcept nogil:
    """Add to the leading pages of each worker the longest part of the next page that it has."""
    cdef Py_ssize_t i
    cdef int32_t word, worker
    cdef uint64_t workers
    for i in range(search.num_hashes):
        if (i + 1) % kind.stride == 0 or not _find_holders(table, space, search, search.hashes[i], 0):
            continue
        for word in range(table.num_words):
            workers = search.words[word]
            while workers:
                worker = word * WORD + ctz(workers)
                if num_leading[worker] // kind.stride == i // kind.stride:
                    num_leading[worker] = <int32_t>i + 1
                workers &= workers - 1


cdef inline bint _search_leading(const BlockTable *table, const Space *space, const Search *search, Kind *kind) noexcept nogil:
    """Count the leading hashes of each worker, at most those in other groups of the kind; return False if memory is short."""
    cdef int32_t *num_leading = <int32_t *>raw_calloc(table.num_words * WORD, sizeof(int32_t))
    cdef int32_t worker
    if num_leading == NULL:
        return False
    _count_leading(table, space, search, kind.stride, num_leading)
    for worker in range(table.num_workers):
        num_leading[worker] *= <int32_t>kind.stride
    if search.has_parts and space.known.has_tails:
        _count_parts(table, space, search, kind, num_leading)
    for worker in range(table.num_workers if kind.num_leading != NULL else 0):
        num_leading[worker] = min(num_leading[worker], kind.num_leading[worker])
    raw_free(kind.num_leading)
    kind.num_leading = num_leading
    return True


cdef inline bint _search_pages(const BlockTable *table, const Space *space, const Search *search, Kind *kind) noexcept nogil:
    """Find the workers that have each page, in this group and in those of the kind before it; False if memory is short."""
    cdef Py_ssize_t page
    cdef int32_t word
    cdef uint32_t entry = 0
    cdef bint is_first = kind.bits == NULL
    assert kind.stride > 0 and kind.num_pages * kind.stride <= search.num_hashes
    if is_first:
        kind.bits = <uint64_t *>raw_calloc(max(<Py_ssize_t>1, kind.num_pages * table.num_words), sizeof(uint64_t))
    if kind.bits == NULL:
        return False
    for page in range(kind.num_pages):
        entry = _find_holders(
            table, space, search, search.hashes[(page + 1) * kind.stride - 1], entry + 1 if entry else 0
        )
        for word in range(table.num_words):
            kind.bits[page * table.num_words + word] = (
                search.words[word] if is_first else kind.bits[page * table.num_words + word] & search.words[word]
            )
    return True


cdef inline bint _has_page(const Kind *kind, int32_t num_words, Py_ssize_t page, int32_t worker) noexcept nogil:
    return kind.bits[page * num_words + worker // WORD] >> (worker % WORD) & 1


cdef inline Py_ssize_t _find_last_run(
    const Kind *kind, int32_t num_words, int32_t worker, Py_ssize_t stop, Py_ssize_t need
) noexcept nogil:
    """Return the end of a worker's last run of `need` pages before `stop`; without a run, the number of its leading pages."""
    cdef Py_ssize_t page, num = 0
    assert need > 0 and stop <= kind.num_pages
    for page in range(stop - 1, -1, -1):
        num = num + 1 if _has_page(kind, num_words, page, worker) else 0
        if num == need:
            return page + need
    return num


cdef inline Py_ssize_t _shorten_prefix(
    const Kind *kind, int32_t num_words, int32_t worker, Py_ssize_t num_hashes, bint use_eagle, bint is_recheck
) noexcept nogil:
    """Return the longest prefix at which a kind can resume, in hashes: at most `num_hashes`. See `shorten` for eagle."""
    cdef bint drops = use_eagle and not is_recheck
    cdef Py_ssize_t need, num = num_hashes // kind.unit
    if kind.num_leading != NULL:
        num = min(num, kind.num_leading[worker] // kind.unit)
        return (num - (drops and num > 0)) * kind.unit
    if kind.spec.is_state:
        return _find_last_run(kind, num_words, worker, num, 1) * kind.unit
    need = count_run_pages(&kind.rules, use_eagle) + drops
    if need == 0:
        return num_hashes
    num = _find_last_run(kind, num_words, worker, num, need)
    return (num - (drops and num > 0)) * kind.unit


cdef inline Py_ssize_t _find_longest_prefix(
    const Kind *kinds, Py_ssize_t num, int32_t num_words, int32_t worker, const Search *search, Py_ssize_t multiple
) noexcept nogil:
    """Find the longest prefix at which all kinds can resume, in hashes. Kinds shorten it in turn until none does: first the
    kinds with counts of leading hashes, then the others.
    """
    cdef Py_ssize_t i, num_hashes = search.num_hashes - search.num_hashes % multiple, previous = -1
    cdef bint is_leading, is_recheck = False
    while num_hashes != previous:
        previous = num_hashes
        for is_leading in (True, False):
            for i in range(num):
                if (kinds[i].num_leading != NULL) == is_leading:
                    num_hashes = _shorten_prefix(&kinds[i], num_words, worker, num_hashes, search.use_eagle, is_recheck)
                    num_hashes -= num_hashes % multiple
        is_recheck = True
    assert 0 <= num_hashes <= search.num_hashes
    return num_hashes


cdef inline Kind *_kind_of(
    const BlockTable *table, const Search *search, const Spec *spec, Kind *kinds, Py_ssize_t *num
) noexcept nogil:
    """Return the kind of a group. A new kind has no counts and no bits yet."""
    cdef Kind *kind = kinds
    while kind < kinds + num[0]:
        if memcmp(&kind.spec, spec, sizeof(Spec)) == 0:
            return kind
        kind += 1
    num[0] += 1
    memset(kind, 0, sizeof(Kind))
    kind.spec = spec[0]
    kind.rules.page_size, kind.rules.window = spec.block_size, spec.window
    kind.stride = spec.block_size // table.page_size
    if search.has_parts and spec.is_state:
        kind.stride = 1
    kind.unit = 1 if search.has_parts else kind.stride
    kind.num_pages = search.num_hashes // kind.stride
    return kind


cdef inline Py_ssize_t _hit_multiple(
    const BlockTable *table, const Search *search, const Kind *kinds, Py_ssize_t num
) noexcept nogil:
    """Return how many hashes divide the length of each hit; if more than the prompt has, any such number."""
    cdef Py_ssize_t i, rest, divisor, multiple = max(1, table.told.hit_tokens // table.page_size)
    for i in range(num):
        divisor, rest = multiple, kinds[i].unit
        while rest:
            divisor, rest = rest, divisor % rest
        multiple = min(multiple // divisor * kinds[i].unit, search.num_hashes + 1)
    return multiple


cdef inline bint _is_unknown(const BlockTable *table) noexcept nogil:
    """Whether pagepool's events count a group without a block so far. Then nothing hits."""
    cdef int32_t g
    for g in range(table.told.num_groups):
        if table.spaces[g].known.spec.block_size == 0:
            return True
    return False


cdef inline bint search_prefix(const BlockTable *table, Search *search) noexcept nogil:
    """Find the prefix that each worker has in all groups, in hashes; return False if memory is short."""
    cdef Kind[MAX_EVENT_GROUPS] kinds
    cdef const Spec *spec
    cdef Kind *kind
    cdef Py_ssize_t g, multiple, num = 0
    cdef int32_t worker
    cdef bint has_room = True
    cdef int32_t *counts
    search.words = <uint64_t *>raw_calloc(table.num_words, 2 * sizeof(uint64_t) + WORD * sizeof(int32_t))
    if search.words == NULL:
        return False
    counts = search.counts = <int32_t *>(search.words + 2 * table.num_words)
    if _is_unknown(table):
        return True
    spec = &table.spaces[0].known.spec
    if table.num_spaces == 1 and _is_leading(spec) and spec.block_size == table.page_size:
        _count_leading(table, &table.spaces[0], search, 1, counts)
        for worker in range(table.num_workers if search.use_eagle else 0):
            counts[worker] -= counts[worker] > 0
        return True
    search.has_parts = _has_parts(table)
    for g in range(table.num_spaces):
        spec = &table.spaces[g].known.spec
        if not has_room or spec.block_size == 0:
            continue
        kind = _kind_of(table, search, spec, kinds, &num)
        if _is_leading(spec):
            has_room = _search_leading(table, &table.spaces[g], search, kind)
        else:
            has_room = _search_pages(table, &table.spaces[g], search, kind)
    multiple = _hit_multiple(table, search, kinds, num)
    for worker in range(table.num_workers if has_room and num else 0):
        counts[worker] = <int32_t>_find_longest_prefix(kinds, num, table.num_words, worker, search, multiple)
    for g in range(num):
        raw_free(kinds[g].num_leading)
        raw_free(kinds[g].bits)
    return has_room
