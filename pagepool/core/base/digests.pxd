# Digests: 16 bytes, which are keys of the index, or 32 bytes, whose upper halves are in a separate array.

from pagepool.core.base.siphash cimport *

cdef struct WideDigest:       # 32 bytes; written big-endian, so the upper half comes first
    Digest key                # the lower half, and key of the index
    Digest upper              # 0 with SipHash


cdef inline WideDigest digest_at(const Digest *digests, const Digest *uppers, Py_ssize_t i) noexcept nogil:
    """Return digest `i`. Its upper half is 0 if `uppers` is NULL."""
    return WideDigest(key=digests[i], upper=uppers[i] if uppers != NULL else Digest(lo=0, hi=0))


cdef inline void set_digest(Digest *digests, Digest *uppers, Py_ssize_t i, WideDigest digest) noexcept nogil:
    """Store digest `i`, and its upper half unless `uppers` is NULL."""
    digests[i] = digest.key
    if uppers != NULL:
        uppers[i] = digest.upper
