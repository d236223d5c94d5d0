# Digests of pages, by three algorithms. A digest covers the digest of the page before, the page's tokens and lookahead, and its
# extra keys. The lookahead is a fixed number of tokens behind each page, on which the keys of drafters depend.
#
# SipHash-2-4-128 has a secret key, and digests of 16 bytes: the keys of the index. SHA-256 has digests of 32 bytes, whose lower
# halves are these keys. Its message is the parent's digest, the tokens as little-endian int32, and the extra keys. In CBOR, as
# in vLLM's `sha256_cbor`, it is an array of these three, null for no extra keys; if there is a lookahead, the third item is an
# array of extra keys and lookahead. Elsewhere the lookahead follows the page's tokens; its size is part of the secret or root.

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
    Digest extra_key          # SipHash's key for extra keys
    WideDigest root           # parent of first pages


# This function is in a module, since in a header its size would change what compilers inline in the loops of rows.
cdef void hash_pages(
    const Hashing *hashing, const int32_t *tokens, Py_ssize_t n, Digest *digests, Digest *uppers, Py_ssize_t start,
    Py_ssize_t stop, const uint8_t *extra, Py_ssize_t size,
) noexcept nogil
