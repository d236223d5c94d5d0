# Digests of pages, by three algorithms. Each covers the digest of the page before, the page's tokens, and its extra keys.
#
# SipHash-2-4-128 has a secret key and digests of 16 bytes, the keys of the index. SHA-256 has digests of 32 bytes, whose lower
# halves are these keys. Its message is the parent's digest, the tokens as little-endian int32, and the extra keys; in CBOR it
# is the array of these three, null for no extra keys, as in vLLM's `sha256_cbor`.

from libc.stdint cimport int32_t, uint8_t

from pagepool.core.base.siphash cimport *

cdef enum HashKind:
    SIPHASH
    SHA256
    SHA256_CBOR

cdef struct WideDigest:       # 32 bytes, big-endian: first the upper half
    Digest key                # the lower half, and key of the index
    Digest upper              # 0 with SipHash

cdef struct Hashing:
    HashKind kind
    bint is_fast              # whether the processor has instructions for SHA-256
    Digest key                # secret key of SipHash
    Digest extra_key          # its key for extra keys
    WideDigest root           # parent of first pages


cdef inline WideDigest digest_at(const Digest *digests, const Digest *uppers, Py_ssize_t i) noexcept nogil:
    """Return a digest, with its upper half unless `uppers` is NULL."""
    return WideDigest(key=digests[i], upper=uppers[i] if uppers != NULL else Digest(lo=0, hi=0))


cdef inline void set_digest(Digest *digests, Digest *uppers, Py_ssize_t i, WideDigest digest) noexcept nogil:
    """Write what `digest_at` returns."""
    digests[i] = digest.key
    if uppers != NULL:
        uppers[i] = digest.upper


# In a module of its own, since code of this size changes what compilers inline in the loops of rows.
cdef void hash_pages(
    const Hashing *hashing, const int32_t *tokens, Py_ssize_t n, Digest *digests, Digest *uppers, Py_ssize_t start,
    Py_ssize_t stop, const uint8_t *extra, Py_ssize_t size,
) noexcept nogil
