# SHA-256: NIST, FIPS 180-4, "Secure Hash Standard", 2015. It uses the SHA instructions of x86 and ARMv8 where the
# processor has them.

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

cdef extern from *:
    """
    /* FIPS 180-4, 4.2.2 */
    static const uint32_t pagepool_sha256_constants[64] = {
        0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
        0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
        0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
        0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
        0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
        0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
        0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
        0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
    };
    #if (defined(__x86_64__) || defined(__i386__)) && (defined(__GNUC__) || defined(__clang__))
    #include <cpuid.h>
    #include <immintrin.h>
    /* Whether the processor has the instructions in `pagepool_sha256_compress`: CPUID, leaves 1 and 7. */
    static inline int pagepool_has_sha_instructions(void) {
        unsigned int a, b, c, d;
        if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_SSSE3) || !(c & bit_SSE4_1)) return 0;
        return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & (1u << 29)) != 0;
    }
    /* The instructions hold the eight words as (a, b, e, f) and (c, d, g, h), the first of each in the highest lane. One
       instruction does two rounds. The message schedule is four vectors of four words, each renewed every sixteen rounds. */
    __attribute__((target("sha,sse4.1,ssse3")))
    static inline void pagepool_sha256_compress(uint32_t *state, const uint8_t *data, Py_ssize_t num_blocks) {
        const __m128i big_endian = _mm_set_epi8(12, 13, 14, 15, 8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3);
        const __m128i *constants = (const __m128i *)pagepool_sha256_constants;
        __m128i abcd = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)state), 0xb1);
        __m128i efgh = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(state + 4)), 0x1b);
        __m128i abef = _mm_alignr_epi8(abcd, efgh, 8), cdgh = _mm_blend_epi16(efgh, abcd, 0xf0);
        __m128i words[4], sum;
        for (; num_blocks > 0; num_blocks--, data += 64) {
            const __m128i abef_before = abef, cdgh_before = cdgh;
            for (int i = 0; i < 4; i++)
                words[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)data + i), big_endian);
            for (int quarter = 0; quarter < 4; quarter++) {
                for (int i = 0; i < 4; i++) {
                    sum = _mm_add_epi32(words[i], _mm_loadu_si128(constants + 4 * quarter + i));
                    cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
                    abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0e));
                }
                if (quarter == 3) break;
                for (int i = 0; i < 4; i++) {
                    sum = _mm_alignr_epi8(words[(i + 3) & 3], words[(i + 2) & 3], 4);
                    sum = _mm_add_epi32(sum, _mm_sha256msg1_epu32(words[i], words[(i + 1) & 3]));
                    words[i] = _mm_sha256msg2_epu32(sum, words[(i + 3) & 3]);
                }
            }
            abef = _mm_add_epi32(abef, abef_before);
            cdgh = _mm_add_epi32(cdgh, cdgh_before);
        }
        abcd = _mm_shuffle_epi32(abef, 0x1b);
        efgh = _mm_shuffle_epi32(cdgh, 0xb1);
        _mm_storeu_si128((__m128i *)state, _mm_blend_epi16(abcd, efgh, 0xf0));
        _mm_storeu_si128((__m128i *)(state + 4), _mm_alignr_epi8(efgh, abcd, 8));
    }
    #elif defined(__aarch64__) && (defined(__ARM_FEATURE_SHA2) || (defined(__GNUC__) && !defined(__clang__)))
    #include <arm_neon.h>
    #if defined(__linux__) && !defined(__ARM_FEATURE_SHA2)
    #include <sys/auxv.h>
    static inline int pagepool_has_sha_instructions(void) { return (getauxval(AT_HWCAP) & (1 << 6)) != 0; }  /* HWCAP_SHA2 */
    #elif defined(__ARM_FEATURE_SHA2)
    static inline int pagepool_has_sha_instructions(void) { return 1; }  /* as on every ARM processor that runs macOS */
    #else
    static inline int pagepool_has_sha_instructions(void) { return 0; }
    #endif
    /* The instructions hold the eight words as (a, b, c, d) and (e, f, g, h). A pair of them does four rounds. */
    #if !defined(__clang__)
    __attribute__((target("+crypto")))
    #endif
    static inline void pagepool_sha256_compress(uint32_t *state, const uint8_t *data, Py_ssize_t num_blocks) {
        uint32x4_t abcd = vld1q_u32(state), efgh = vld1q_u32(state + 4), words[4], sum, before;
        for (; num_blocks > 0; num_blocks--, data += 64) {
            const uint32x4_t abcd_before = abcd, efgh_before = efgh;
            for (int i = 0; i < 4; i++)
                words[i] = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(data + 16 * i)));
            for (int quarter = 0; quarter < 4; quarter++) {
                for (int i = 0; i < 4; i++) {
                    sum = vaddq_u32(words[i], vld1q_u32(pagepool_sha256_constants + 16 * quarter + 4 * i));
                    before = abcd;
                    abcd = vsha256hq_u32(abcd, efgh, sum);
                    efgh = vsha256h2q_u32(efgh, before, sum);
                }
                if (quarter == 3) break;
                for (int i = 0; i < 4; i++) {
                    sum = vsha256su0q_u32(words[i], words[(i + 1) & 3]);
                    words[i] = vsha256su1q_u32(sum, words[(i + 2) & 3], words[(i + 3) & 3]);
                }
            }
            abcd = vaddq_u32(abcd, abcd_before);
            efgh = vaddq_u32(efgh, efgh_before);
        }
        vst1q_u32(state, abcd);
        vst1q_u32(state + 4, efgh);
    }
    #else
    static inline int pagepool_has_sha_instructions(void) { return 0; }
    static inline void pagepool_sha256_compress(uint32_t *state, const uint8_t *data, Py_ssize_t num_blocks) {
        (void)state; (void)data; (void)num_blocks;
    }
    #endif
    """
    const uint32_t *_CONSTANTS "pagepool_sha256_constants"
    bint has_sha_instructions "pagepool_has_sha_instructions" () noexcept nogil
    void compress_fast "pagepool_sha256_compress" (uint32_t *state, const uint8_t *data, Py_ssize_t num_blocks) noexcept nogil


cdef inline uint32_t _rotr(uint32_t x, int bits) noexcept nogil:
    """Return `x` rotated right: ROTR of FIPS 180-4."""
    return (x >> bits) | (x << (32 - bits))


cdef inline uint32_t _load_word(const uint8_t *data) noexcept nogil:
    return <uint32_t>data[0] << 24 | <uint32_t>data[1] << 16 | <uint32_t>data[2] << 8 | data[3]


cdef inline void store_word(uint8_t *out, uint32_t word) noexcept nogil:
    out[0] = <uint8_t>(word >> 24)
    out[1] = <uint8_t>(word >> 16)
    out[2] = <uint8_t>(word >> 8)
    out[3] = <uint8_t>word


cdef inline void _extend(uint32_t *words) noexcept nogil:
    """Write `words[16]`, the next word of the message schedule, from the 16 words before it."""
    cdef uint32_t early = words[1], late = words[14]
    words[16] = words[0] + words[9]
    words[16] += _rotr(early, 7) ^ _rotr(early, 18) ^ early >> 3
    words[16] += _rotr(late, 17) ^ _rotr(late, 19) ^ late >> 10


cdef inline void _do_rounds(uint32_t *state, uint32_t *words) noexcept nogil:
    """Compress a block: FIPS 180-4, 6.2.2. The schedule is computed along the way, since GCC would vectorise a separate
    loop badly.
    """
    cdef uint32_t a = state[0], b = state[1], c = state[2], d = state[3]
    cdef uint32_t e = state[4], f = state[5], g = state[6], h = state[7]
    cdef uint32_t first, second
    cdef int i
    for i in range(64):
        first = h + words[i] + _CONSTANTS[i] + (g ^ (e & (f ^ g))) + (_rotr(e, 6) ^ _rotr(e, 11) ^ _rotr(e, 25))
        second = (_rotr(a, 2) ^ _rotr(a, 13) ^ _rotr(a, 22)) + ((a & b) | (c & (a | b)))
        h, g, f, e, d, c, b, a = g, f, e, d + first, c, b, a, first + second
        if i < 48:
            _extend(words + i)
    state[0] += a
    state[1] += b
    state[2] += c
    state[3] += d
    state[4] += e
    state[5] += f
    state[6] += g
    state[7] += h


cdef inline void _compress_portably(uint32_t *state, const uint8_t *data, Py_ssize_t num_blocks) noexcept nogil:
    cdef uint32_t[64] words
    cdef Py_ssize_t block
    cdef int i
    for block in range(num_blocks):
        for i in range(16):
            words[i] = _load_word(data + 64 * block + 4 * i)
        _do_rounds(state, words)


cdef inline void _compress(uint32_t *state, const uint8_t *data, Py_ssize_t num_blocks, bint is_fast) noexcept nogil:
    if is_fast:
        compress_fast(state, data, num_blocks)
    else:
        _compress_portably(state, data, num_blocks)


cdef enum:
    _ROOM = 256               # bytes, whole blocks

cdef struct Sha256:           # a message that is hashed part by part
    uint32_t[8] state
    Py_ssize_t size           # bytes in whole blocks that were compressed
    Py_ssize_t num_waiting    # bytes in `waiting`, not compressed yet
    bint is_fast              # use SHA instructions, which the processor must have
    uint8_t[_ROOM + 128] waiting  # the last bytes, and room for the padding


cdef inline void sha_start(Sha256 *sha, bint is_fast) noexcept nogil:
    cdef uint32_t[8] state = [
        0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19
    ]
    memcpy(sha.state, state, sizeof(state))
    sha.size, sha.num_waiting, sha.is_fast = 0, 0, is_fast


cdef inline uint8_t *sha_room(Sha256 *sha) noexcept nogil:
    """Return room for up to 64 bytes of the message. The caller adds the number of bytes written to `num_waiting`."""
    cdef Py_ssize_t num_bytes = sha.num_waiting // 64 * 64
    if sha.num_waiting >= _ROOM:
        _compress(sha.state, sha.waiting, num_bytes // 64, sha.is_fast)
        memcpy(sha.waiting, sha.waiting + num_bytes, sha.num_waiting - num_bytes)
        sha.size += num_bytes
        sha.num_waiting -= num_bytes
    return sha.waiting + sha.num_waiting


cdef inline void sha_add(Sha256 *sha, const uint8_t *data, Py_ssize_t size) noexcept nogil:
    cdef uint8_t *room
    cdef Py_ssize_t num
    assert size >= 0
    while size:
        room = sha_room(sha)
        num = min(size, _ROOM - sha.num_waiting)
        memcpy(room, data, num)
        sha.num_waiting += num
        data += num
        size -= num


cdef inline void sha_finish(Sha256 *sha) noexcept nogil:
    """Compress the rest. The digest is then the eight words of `state`."""
    cdef Py_ssize_t num_padded = (sha.num_waiting + 8) // 64 * 64 + 64
    cdef uint64_t num_bits = <uint64_t>(sha.size + sha.num_waiting) << 3
    assert 0 <= sha.num_waiting < _ROOM + 64
    memset(sha.waiting + sha.num_waiting, 0, num_padded - sha.num_waiting)
    sha.waiting[sha.num_waiting] = 0x80
    store_word(sha.waiting + num_padded - 8, <uint32_t>(num_bits >> 32))
    store_word(sha.waiting + num_padded - 4, <uint32_t>num_bits)
    _compress(sha.state, sha.waiting, num_padded // 64, sha.is_fast)


cdef inline void sha256(const uint8_t *data, Py_ssize_t size, uint8_t *digest, bint is_fast) noexcept nogil:
    """Write the 32 bytes of the digest. `is_fast` uses SHA instructions, which the processor must have."""
    cdef Sha256 sha
    cdef int i
    sha_start(&sha, is_fast)
    sha.size = size // 64 * 64
    _compress(sha.state, data, size // 64, is_fast)
    sha.num_waiting = size - sha.size
    memcpy(sha.waiting, data + sha.size, sha.num_waiting)
    sha_finish(&sha)
    for i in range(8):
        store_word(digest + 4 * i, sha.state[i])
