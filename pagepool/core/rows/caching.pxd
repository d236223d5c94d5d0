# Rows are hashed, and their pages cached and skipped.

from pagepool.core.rows.batch cimport *


cdef inline const ExtraKey *find_extra_key(
    const Batch *batch, Py_ssize_t row, Py_ssize_t page, const ExtraKey **next_key
) noexcept nogil:
    """Return the extra keys of a page in a row that has any, and advance `next_key` to the first key at or behind it."""
    cdef const ExtraKey *key = next_key[0]
    while key.page < page:
        key += 1
    next_key[0] = key
    return key if key.page == page else batch.rows[row].extra_keys


cdef inline int32_t hash_row(Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Hash the row's full pages up to `num_tokens` tokens, whose lookahead is known. Return a negative value if one of the
    hashed tokens is negative: the check is cheap while the tokens are read.
    """
    cdef const int32_t *tokens = tokens_of(batch, row)
    cdef const ExtraKey *next_key = batch.rows[row].extra_keys
    cdef const ExtraKey *key
    cdef const uint8_t *extra = NULL
    cdef Py_ssize_t i, following, num_bytes = 0, size = batch.hash_page_size
    cdef Py_ssize_t start = batch.rows[row].num_hashed, stop = max(start, num_tokens // size)
    assert size > 0 and 0 <= num_tokens <= batch.max_num_tokens
    i = start
    while i < stop:
        following = stop
        if next_key != NULL:
            key = find_extra_key(batch, row, i, &next_key)
            extra, num_bytes, following = key.data, key.size, i + 1
        hash_pages(
            &batch.hashing, tokens, size, digests_of(batch, row), batch.rows[row].uppers, i, following, extra, num_bytes,
        )
        i = following
    batch.rows[row].num_hashed = <int32_t>stop
    return signs_of(tokens + start * size, (stop - start) * size)


cdef inline Py_ssize_t count_hashed_before(
    const Batch *batch, Py_ssize_t row, const int32_t *token_ids, Py_ssize_t n
) noexcept nogil:
    """Count the leading pages of `token_ids` that a free row has hashed for its last request."""
    cdef const int32_t *tokens = tokens_of(batch, row)
    cdef Py_ssize_t i, size = batch.hash_page_size
    cdef Py_ssize_t num_pages = min(batch.rows[row].num_hashed, count_hashable(batch, n))
    for i in range(num_pages):
        if memcmp(tokens + i * size, token_ids + i * size, (size + batch.hashing.hash_lookahead) * sizeof(int32_t)) != 0:
            return i
    return num_pages


cdef inline void _hash_later(Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Hash the row as `hash_row` does, but with SipHash let a single page wait for other rows' pages, to be hashed together."""
    cdef Py_ssize_t i = batch.rows[row].num_hashed
    cdef Digest *digests = digests_of(batch, row)
    cdef PageToHash *page
    cdef bint is_alone = batch.rows[row].extra_keys != NULL or batch.waiting.num_to_hash == NUM_WAITING
    assert 0 <= batch.waiting.num_to_hash <= NUM_WAITING
    if exceptional(batch.hashing.hash_lookahead and i and batch.waiting.num_to_hash):
        if batch.waiting.to_hash[batch.waiting.num_to_hash - 1].digest == &digests[i - 1]:  # a late page of the same row
            hash_waiting(&batch.waiting)
    if rare(is_alone or batch.hashing.kind != SIPHASH) or num_tokens >= (i + 2) * batch.hash_page_size:
        hash_row(batch, row, num_tokens)
    else:
        page = &batch.waiting.to_hash[batch.waiting.num_to_hash]
        page.parent = digests[i - 1] if i else Digest(lo=0, hi=0)
        page.digest = &digests[i]
        page.tokens = <const uint8_t *>(tokens_of(batch, row) + i * batch.hash_page_size)
        batch.waiting.num_to_hash += 1
        batch.rows[row].num_hashed += 1


cdef inline void cache_row(Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Hash and cache the pages that the first `num_tokens` tokens, with a known lookahead, fill. O(1) if no page is new."""
    cdef Contents contents
    cdef Py_ssize_t g
    assert batch.records[row].next_settle <= max(0, limits_of(holding_of(batch, row)).num_full)
    if num_tokens < batch.records[row].next_settle or not batch.hash_page_size:
        return
    if (batch.rows[row].num_hashed + <int64_t>1) * batch.hash_page_size <= num_tokens:
        _hash_later(batch, row, num_tokens)
    contents = contents_of_row(batch, row, num_tokens)
    for g in range(batch.num_groups):
        cache_full_pages(&batch.waiting, &batch.groups[g], held_by(batch, row, g), &contents, num_tokens)


cdef inline void skip_row(Batch *batch, Py_ssize_t row, int32_t num_computed) noexcept nogil:
    """Skip the pages that no token from `num_computed` on attends to, and blank them in the tables."""
    cdef Holding *holding = holding_of(batch, row)
    cdef Py_ssize_t g
    cdef int32_t start
    for g in range(batch.num_groups):
        start = first_to_skip(&batch.groups[g].rules, &holding.held[g])
        skip_pages(batch.pool, holding, g, num_computed)
        if holding.held[g].num_skipped > start:
            blank(batch.tables[g], row, start, holding.held[g].num_skipped)
