# SipHash-2-4 with 128-bit output: Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012, and its reference code.
# Four messages are hashed side by side where the processor has AVX2, otherwise two.

from libc.stdint cimport uint64_t, uint8_t
from libc.string cimport memcpy

cdef extern from *:
    """
    #if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
    #include <immintrin.h>
    static inline int pagepool_has_avx2(void) {
        __builtin_cpu_init();
        return __builtin_cpu_supports("avx2") != 0;
    }
    #define PAGEPOOL_FOUR __attribute__((target("avx2"))) static inline
    #define PAGEPOOL_ROTATE(x, bits) _mm256_or_si256(_mm256_slli_epi64(x, bits), _mm256_srli_epi64(x, 64 - (bits)))
    #define PAGEPOOL_ADD(x, y) x = _mm256_add_epi64(x, y)
    #define PAGEPOOL_XOR(x, y) x = _mm256_xor_si256(x, y)
    PAGEPOOL_FOUR void pagepool_sip_rounds(__m256i *v, int n) {
        for (; n > 0; n--) {
            PAGEPOOL_ADD(v[0], v[1]); v[1] = PAGEPOOL_ROTATE(v[1], 13); PAGEPOOL_XOR(v[1], v[0]);
            PAGEPOOL_ADD(v[2], v[3]); v[3] = PAGEPOOL_ROTATE(v[3], 16); PAGEPOOL_XOR(v[3], v[2]);
            v[0] = _mm256_shuffle_epi32(v[0], 0xb1);  /* rotate by 32 bits */
            PAGEPOOL_ADD(v[0], v[3]); v[3] = PAGEPOOL_ROTATE(v[3], 21); PAGEPOOL_XOR(v[3], v[0]);
            PAGEPOOL_ADD(v[2], v[1]); v[1] = PAGEPOOL_ROTATE(v[1], 17); PAGEPOOL_XOR(v[1], v[2]);
            v[2] = _mm256_shuffle_epi32(v[2], 0xb1);
        }
    }
    PAGEPOOL_FOUR void pagepool_sip_absorb(__m256i *v, const uint64_t *words) {
        const __m256i four = _mm256_loadu_si256((const __m256i *)words);
        PAGEPOOL_XOR(v[3], four);
        pagepool_sip_rounds(v, 2);
        PAGEPOOL_XOR(v[0], four);
    }
    PAGEPOOL_FOUR void pagepool_sip_squeeze(const __m256i *v, uint64_t *words) {
        __m256i four = _mm256_xor_si256(v[0], v[1]);
        PAGEPOOL_XOR(four, v[2]);
        PAGEPOOL_XOR(four, v[3]);
        _mm256_storeu_si256((__m256i *)words, four);
    }
    /* Parents and digests are pairs of words, the lower one first. */
    PAGEPOOL_FOUR void pagepool_sip_four(
        const uint64_t *key, const uint64_t *parents, const uint8_t *const *data, Py_ssize_t size, uint64_t *digests
    ) {
        uint64_t words[4], upper[4];
        Py_ssize_t i, whole = size / 8 * 8;
        int lane;
        __m256i v[4];
        v[0] = _mm256_set1_epi64x((long long)(key[0] ^ 0x736f6d6570736575));
        v[1] = _mm256_set1_epi64x((long long)(key[1] ^ 0x646f72616e646f6d ^ 0xee));
        v[2] = _mm256_set1_epi64x((long long)(key[0] ^ 0x6c7967656e657261));
        v[3] = _mm256_set1_epi64x((long long)(key[1] ^ 0x7465646279746573));
        for (i = 0; i < 2; i++) {
            for (lane = 0; lane < 4; lane++) words[lane] = parents[2 * lane + i];
            pagepool_sip_absorb(v, words);
        }
        for (i = 0; i < whole; i += 8) {
            for (lane = 0; lane < 4; lane++) memcpy(&words[lane], data[lane] + i, 8);
            pagepool_sip_absorb(v, words);
        }
        for (lane = 0; lane < 4; lane++) {
            words[lane] = 0;
            memcpy(&words[lane], data[lane] + whole, size - whole);
            words[lane] |= ((uint64_t)size + 16) << 56;
        }
        pagepool_sip_absorb(v, words);
        PAGEPOOL_XOR(v[2], _mm256_set1_epi64x(0xee));
        pagepool_sip_rounds(v, 4);
        pagepool_sip_squeeze(v, words);
        PAGEPOOL_XOR(v[1], _mm256_set1_epi64x(0xdd));
        pagepool_sip_rounds(v, 4);
        pagepool_sip_squeeze(v, upper);
        for (lane = 0; lane < 4; lane++) {
            digests[2 * lane] = words[lane];
            digests[2 * lane + 1] = upper[lane];
        }
    }
    #else
    static inline int pagepool_has_avx2(void) { return 0; }
    static inline void pagepool_sip_four(
        const uint64_t *key, const uint64_t *parents, const uint8_t *const *data, Py_ssize_t size, uint64_t *digests
    ) {
        (void)key; (void)parents; (void)data; (void)size; (void)digests;
    }
    #endif
    """
    bint has_avx2 "pagepool_has_avx2" () noexcept nogil
    void _hash_four "pagepool_sip_four" (
        const uint64_t *key, const uint64_t *parents, const uint8_t **data, Py_ssize_t size, uint64_t *digests
    ) noexcept nogil

cdef enum:
    MAX_LANES = 4             # messages hashed side by side

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
    """Hash messages, each the 16 bytes of a parent and `size` bytes of data."""
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


cdef inline void hash_each_after(
    Digest key, const Digest *parents, const uint8_t **data, Py_ssize_t size, Digest *digests, int lanes
) noexcept nogil:
    """Hash the next links of several chains side by side: `MAX_LANES` chains with AVX2, otherwise two."""
    if lanes == MAX_LANES:
        _hash_four(<const uint64_t *>&key, <const uint64_t *>parents, data, size, <uint64_t *>digests)
    else:
        _hash_lanes(key, parents, data, size, digests, 2)
