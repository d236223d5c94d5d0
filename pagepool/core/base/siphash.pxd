# SipHash-2-4 with 128-bit output: Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012, and its reference code.

from libc.stdint cimport uint64_t, uint8_t
from libc.string cimport memcpy

cdef struct Digest:
    uint64_t lo
    uint64_t hi

cdef struct SipState:
    uint64_t v0
    uint64_t v1
    uint64_t v2
    uint64_t v3


cdef inline uint64_t _rotate(uint64_t x, int bits) noexcept nogil:
    return (x << bits) | (x >> (64 - bits))


cdef inline void _sip_round(SipState *s) noexcept nogil:
    s.v0 += s.v1
    s.v1 = _rotate(s.v1, 13) ^ s.v0
    s.v0 = _rotate(s.v0, 32)
    s.v2 += s.v3
    s.v3 = _rotate(s.v3, 16) ^ s.v2
    s.v0 += s.v3
    s.v3 = _rotate(s.v3, 21) ^ s.v0
    s.v2 += s.v1
    s.v1 = _rotate(s.v1, 17) ^ s.v2
    s.v2 = _rotate(s.v2, 32)


cdef inline void _sip_rounds(SipState *s, int n, int lanes) noexcept nogil:
    cdef int _
    for _ in range(n):
        _sip_round(&s[0])
        if lanes == 2:
            _sip_round(&s[1])


cdef inline void _sip_absorb(SipState *s, const uint64_t *words, int lanes) noexcept nogil:
    """Absorb a word of each message."""
    cdef int lane
    for lane in range(lanes):
        s[lane].v3 ^= words[lane]
    _sip_rounds(s, 2, lanes)
    for lane in range(lanes):
        s[lane].v0 ^= words[lane]


cdef inline void sip_start(SipState *s, Digest key, int lanes) noexcept nogil:
    cdef int lane
    for lane in range(lanes):
        s[lane].v0 = key.lo ^ <uint64_t>0x736f6d6570736575
        s[lane].v1 = key.hi ^ <uint64_t>0x646f72616e646f6d ^ 0xee
        s[lane].v2 = key.lo ^ <uint64_t>0x6c7967656e657261
        s[lane].v3 = key.hi ^ <uint64_t>0x7465646279746573


cdef inline void sip_finish(SipState *s, Digest *digests, int lanes) noexcept nogil:
    cdef int lane
    for lane in range(lanes):
        s[lane].v2 ^= 0xee
    _sip_rounds(s, 4, lanes)
    for lane in range(lanes):
        digests[lane].lo = s[lane].v0 ^ s[lane].v1 ^ s[lane].v2 ^ s[lane].v3
        s[lane].v1 ^= 0xdd
    _sip_rounds(s, 4, lanes)
    for lane in range(lanes):
        digests[lane].hi = s[lane].v0 ^ s[lane].v1 ^ s[lane].v2 ^ s[lane].v3


cdef inline void sip_bytes(SipState *s, const uint8_t **data, Py_ssize_t size, uint64_t num_before, int lanes) noexcept nogil:
    """Absorb the last `size` bytes of each message, little-endian, after `num_before` bytes, a multiple of 8."""
    cdef uint64_t[2] words
    cdef int lane
    cdef Py_ssize_t i
    assert num_before % 8 == 0 and size >= 0 and lanes in (1, 2)
    for i in range(size // 8):
        for lane in range(lanes):
            memcpy(&words[lane], data[lane] + 8 * i, 8)
        _sip_absorb(s, words, lanes)
    for lane in range(lanes):
        words[lane] = 0
        memcpy(&words[lane], data[lane] + size // 8 * 8, size % 8)
        words[lane] |= (num_before + size) << 56
    _sip_absorb(s, words, lanes)


cdef inline void _hash_lanes(
    Digest key, const Digest *parents, const uint8_t **data, Py_ssize_t size, Digest *digests, int lanes
) noexcept nogil:
    """Hash messages: the 16 bytes of a parent and `size` bytes of data each."""
    cdef SipState[2] s
    cdef uint64_t[2] words
    cdef int lane
    sip_start(s, key, lanes)
    for lane in range(lanes):
        words[lane] = parents[lane].lo
    _sip_absorb(s, words, lanes)
    for lane in range(lanes):
        words[lane] = parents[lane].hi
    _sip_absorb(s, words, lanes)
    sip_bytes(s, data, size, 16, lanes)
    sip_finish(s, digests, lanes)


cdef inline Digest hash_after(Digest key, Digest parent, const uint8_t *data, Py_ssize_t size) noexcept nogil:
    """Hash the parent's 16 bytes and `data`: one link of a chain."""
    cdef Digest digest
    _hash_lanes(key, &parent, &data, size, &digest, 1)
    return digest


cdef inline void hash_two_after(
    Digest key, const Digest *parents, const uint8_t **data, Py_ssize_t size, Digest *digests
) noexcept nogil:
    """Hash a link of each of two chains at once."""
    _hash_lanes(key, parents, data, size, digests, 2)
