# Digests of pages, by three algorithms. Each covers the digest of the page before, the page's tokens, those of its lookahead,
# and its extra keys. The lookahead is a fixed number of tokens behind each page, on which the keys of drafters depend.
#
# SipHash-2-4-128 has a secret key and digests of 16 bytes, the keys of the index. SHA-256 has digests of 32 bytes, whose lower
# halves are these keys. Its message is the parent's digest, the tokens as little-endian int32, and the extra keys; in CBOR it
# is the array of these three, null for no extra keys, as in vLLM's `sha256_cbor`. There the tokens of the lookahead follow the
# extra keys, in an array with them. Elsewhere they follow the page's tokens, and their number is part of the secret or root.

from libc.stdint cimport int32_t, uint8_t

from pagepool.core.base.digests cimport *

cdef enum HashKind:
    SIPHASH
    SHA256
    SHA256_CBOR

cdef struct Hashing:
    HashKind kind
    bint is_fast              # whether the processor has instructions for SHA-256
    int32_t hash_lookahead    # tokens behind each page
    Digest key                # secret key of SipHash
    Digest extra_key          # its key for extra keys
    WideDigest root           # parent of first pages


# In a module of its own, since code of this size changes what compilers inline in the loops of rows.
cdef void hash_pages(
    const Hashing *hashing, const int32_t *tokens, Py_ssize_t n, Digest *digests, Digest *uppers, Py_ssize_t start,
    Py_ssize_t stop, const uint8_t *extra, Py_ssize_t size,
) noexcept nogil
