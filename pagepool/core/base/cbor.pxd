# Ints and item heads in CBOR: RFC 8949, section 3.

from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t

from pagepool.core.base.sha256 cimport *

cdef enum:
    CBOR_NEGATIVE = 1 << 5
    CBOR_BYTES = 2 << 5
    CBOR_ARRAY = 4 << 5
    CBOR_NULL = 0xf6


cdef inline uint8_t *write_head(uint8_t *out, uint8_t major, uint32_t number) noexcept nogil:
    """Write an item's head, a major type and a number, and return its end. It has no branches, so up to 4 bytes past the end
    may be written.
    """
    cdef bint is_one = number > 23, is_two = number > 0xff, is_four = number > 0xffff
    cdef int num_bytes = is_one + is_two + 2 * is_four
    out[0] = <uint8_t>(major | (min(number, 23) + is_one + is_two + is_four))
    store_word(out + 1, <uint32_t>(<uint64_t>number << (32 - 8 * num_bytes)))
    return out + 1 + num_bytes


cdef inline uint8_t *write_int(uint8_t *out, int32_t number) noexcept nogil:
    """Write an int, as `write_head` does."""
    return write_head(out, CBOR_NEGATIVE if number < 0 else 0, ~number if number < 0 else number)
