# Pages of running rows are hashed.

from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.string cimport memcmp

from pagepool.core.batch cimport Batch, ExtraKey, contents_of, digests_of, held_by, tokens_of
from pagepool.core.entering cimport NUM_WAITING, Contents, PageToHash, enter_full_pages, has_full_page
from pagepool.core.holdings cimport Held
from pagepool.core.pages cimport signs_of
from pagepool.core.platform cimport rare
from pagepool.core.siphash cimport Digest, hash_after


cdef inline Digest hash_page_of(
    const Batch *batch, Py_ssize_t row, Py_ssize_t page, Digest parent, const ExtraKey **next_key
) noexcept nogil:
    """The digest of a row's page behind `parent`; `next_key` goes on to the first extra key that is not before the page."""
    cdef const ExtraKey *key = next_key[0]
    while key != NULL and key.data != NULL and key.page < page:
        key += 1
    next_key[0] = key
    if key != NULL and key.data != NULL and key.page == page:
        parent = hash_after(batch.extra_key, parent, key.data, key.size)
    return hash_after(
        batch.waiting.key,
        parent,
        <const uint8_t *>(tokens_of(batch, row) + page * batch.hash_page_size),
        batch.hash_page_size * sizeof(int32_t),
    )


cdef inline int32_t hash_row(Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Hash the pages that `num_tokens` tokens fill, as far as they are not yet. Returns a value below 0 if one of these tokens
    is: while a page is hashed its tokens are at hand.
    """
    cdef const int32_t *tokens = tokens_of(batch, row)
    cdef int32_t signs = 0
    cdef Digest *digests = digests_of(batch, row)
    cdef const ExtraKey *key = batch.extra_keys[row]
    cdef Py_ssize_t i = batch.states[row].num_hashed
    cdef Digest parent = digests[i - 1] if i else Digest(0, 0)
    while (i + 1) * batch.hash_page_size <= num_tokens:
        signs |= signs_of(tokens + i * batch.hash_page_size, batch.hash_page_size)
        parent = hash_page_of(batch, row, i, parent, &key)
        digests[i] = parent
        i += 1
    batch.states[row].num_hashed = <int32_t>i
    return signs


cdef inline Py_ssize_t count_hashed_before(
    const Batch *batch, Py_ssize_t row, const int32_t *token_ids, Py_ssize_t n
) noexcept nogil:
    """How many pages of `token_ids` a free row has hashed already, because its last request began with them."""
    cdef const int32_t *tokens = tokens_of(batch, row)
    cdef Py_ssize_t i, size = batch.hash_page_size
    cdef Py_ssize_t num_pages = min(<Py_ssize_t>batch.states[row].num_hashed, n // size)
    for i in range(num_pages):
        if memcmp(tokens + i * size, token_ids + i * size, size * sizeof(int32_t)) != 0:
            return i
    return num_pages


cdef inline void hash_later(Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """`hash_row`, but a single page, which is what decoding fills, waits for another row's: two are hashed at once."""
    cdef Py_ssize_t i = batch.states[row].num_hashed
    cdef Digest *digests = digests_of(batch, row)
    cdef PageToHash *page = &batch.waiting.to_hash[batch.waiting.num_to_hash]
    cdef bint is_alone = batch.extra_keys[row] != NULL or batch.waiting.num_to_hash == NUM_WAITING
    if rare(is_alone) or num_tokens // batch.hash_page_size != i + 1:
        hash_row(batch, row, num_tokens)
    else:
        page.parent = digests[i - 1] if i else Digest(0, 0)
        page.digest = &digests[i]
        page.tokens = <const uint8_t *>(tokens_of(batch, row) + i * batch.hash_page_size)
        batch.waiting.num_to_hash += 1
        batch.states[row].num_hashed += 1


cdef inline void enter_row(Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Hash the pages that `num_tokens` tokens fill, and have them entered."""
    cdef Contents contents
    cdef Held *held
    cdef Py_ssize_t g
    if not batch.hash_page_size:
        return
    if (batch.states[row].num_hashed + <int64_t>1) * batch.hash_page_size <= num_tokens:
        hash_later(batch, row, num_tokens)
    for g in range(batch.num_groups):
        held = held_by(batch, row, g)
        if has_full_page(&batch.groups[g], held, num_tokens):
            contents = contents_of(batch, row, num_tokens)
            enter_full_pages(&batch.waiting, &batch.groups[g], held, &contents, num_tokens)
