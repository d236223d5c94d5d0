"""Digests of pages."""

from libc.stdint cimport uint64_t

from pagepool.core.base.cbor cimport *
from pagepool.core.base.sha256 cimport *


cdef inline void _store_digest(uint8_t *out, WideDigest digest) noexcept nogil:
    cdef uint64_t[4] words = [digest.upper.hi, digest.upper.lo, digest.key.hi, digest.key.lo]
    cdef int i
    for i in range(4):
        store_word(out + 8 * i, <uint32_t>(words[i] >> 32))
        store_word(out + 8 * i + 4, <uint32_t>words[i])


cdef inline WideDigest _digest_in(const uint32_t *state) noexcept nogil:
    return WideDigest(
        key=Digest(lo=<uint64_t>state[6] << 32 | state[7], hi=<uint64_t>state[4] << 32 | state[5]),
        upper=Digest(lo=<uint64_t>state[2] << 32 | state[3], hi=<uint64_t>state[0] << 32 | state[1]),
    )


cdef inline void _add_tokens(Sha256 *sha, const int32_t *tokens, Py_ssize_t n) noexcept nogil:
    """Add tokens in CBOR."""
    cdef uint8_t *room
    cdef Py_ssize_t i
    for i in range(n):
        room = sha_room(sha)
        sha.num_waiting += write_int(room, tokens[i]) - room


cdef inline WideDigest hash_wide(
    const Hashing *hashing, WideDigest parent, const int32_t *tokens, Py_ssize_t n, const uint8_t *extra, Py_ssize_t size
) noexcept nogil:
    """Hash a page of `n` tokens and its lookahead by SHA-256, with `size` bytes of extra keys."""
    cdef Sha256 sha
    cdef uint8_t *room
    cdef bint is_cbor = hashing.kind == SHA256_CBOR
    assert hashing.kind != SIPHASH and n > 0 and size >= 0
    sha_start(&sha, hashing.is_fast)
    room = sha.waiting
    if is_cbor:
        room = write_head(write_head(room, CBOR_ARRAY, 3), CBOR_BYTES, 32)
    _store_digest(room, parent)
    room += 32
    if is_cbor:
        room = write_head(room, CBOR_ARRAY, <uint32_t>n)
    sha.num_waiting = room - sha.waiting
    if is_cbor:
        _add_tokens(&sha, tokens, n)
        room = sha_room(&sha)
        if hashing.hash_lookahead:
            room = write_head(room, CBOR_ARRAY, 1 + <uint32_t>hashing.hash_lookahead)
        if size == 0:
            room[0] = CBOR_NULL
            room += 1
        sha.num_waiting = room - sha.waiting
        sha_add(&sha, extra, size)
        _add_tokens(&sha, tokens + n, hashing.hash_lookahead)
    else:
        sha_add(&sha, <const uint8_t *>tokens, (n + hashing.hash_lookahead) * sizeof(int32_t))
        sha_add(&sha, extra, size)
    sha_finish(&sha)
    return _digest_in(sha.state)


cdef void hash_pages(
    const Hashing *hashing, const int32_t *tokens, Py_ssize_t n, Digest *digests, Digest *uppers, Py_ssize_t start,
    Py_ssize_t stop, const uint8_t *extra, Py_ssize_t size,
) noexcept nogil:
    """Hash pages ``[start, stop)`` of a request, each with the digest of the page before. `tokens` begin at page 0, have `n`
    for each page, and end with the lookahead of the last one. Page `start` has `size` bytes of extra keys.
    """
    cdef WideDigest parent = digest_at(digests, uppers, start - 1) if start else hashing.root
    cdef Digest secret = hashing.key
    cdef Py_ssize_t num_bytes = (n + hashing.hash_lookahead) * sizeof(int32_t)
    cdef Py_ssize_t i
    assert 0 <= start <= stop and n > 0 and (uppers != NULL) == (hashing.kind != SIPHASH)
    if hashing.kind != SIPHASH:
        for i in range(start, stop):
            parent = hash_wide(hashing, parent, tokens + i * n, n, extra, size if i == start else 0)
            set_digest(digests, uppers, i, parent)
        return
    if size:
        parent.key = hash_after(hashing.extra_key, parent.key, extra, size)
    for i in range(start, stop):
        parent.key = hash_after(secret, parent.key, <const uint8_t *>(tokens + i * n), num_bytes)
        digests[i] = parent.key
