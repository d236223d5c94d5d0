# Digests of 16 bytes, the keys of the index, and of 32 bytes, whose upper halves lie in an array of their own.

from pagepool.core.base.siphash cimport *

cdef struct WideDigest:       # 32 bytes, big-endian: first the upper half
    Digest key                # the lower half, and key of the index
    Digest upper              # 0 with SipHash


cdef inline WideDigest digest_at(const Digest *digests, const Digest *uppers, Py_ssize_t i) noexcept nogil:
    """Return a digest, with its upper half unless `uppers` is NULL."""
    return WideDigest(key=digests[i], upper=uppers[i] if uppers != NULL else Digest(lo=0, hi=0))


cdef inline void set_digest(Digest *digests, Digest *uppers, Py_ssize_t i, WideDigest digest) noexcept nogil:
    """Write what `digest_at` returns."""
    digests[i] = digest.key
    if uppers != NULL:
        uppers[i] = digest.upper
