"""Block hashes of vLLM's requests, with the bytes of its `sha256` and `sha256_cbor`. Importing this does not import vLLM."""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.object cimport PyObject
from libc.stdint cimport int32_t, uint8_t, uint32_t
from libc.string cimport memcpy

from pagepool.core.base cimport CBOR_ARRAY, CBOR_BYTES, CBOR_NULL, has_sha_instructions, sha256, write_head, write_int
from pagepool.core.values cimport size_of

from importlib import import_module

from pagepool.errors import ArgumentError, CompatError, shown

cdef extern from *:
    """
    /* Read a plain int of 32 bits; 0 for everything else. Runs no Python code. */
    static inline int pagepool_read_token(PyObject *item, int32_t *token) {
        int overflow = 0;
        long number;
        if (!PyLong_CheckExact(item)) return 0;
    #if PY_VERSION_HEX >= 0x030c0000
        if (PyUnstable_Long_IsCompact((PyLongObject *)item))
            number = (long)PyUnstable_Long_CompactValue((PyLongObject *)item);
        else
    #endif
        number = PyLong_AsLongAndOverflow(item, &overflow);
        *token = (int32_t)number;
        return !overflow && *token == number;
    }
    """
    bint read_token "pagepool_read_token" (PyObject *item, int32_t *token) noexcept nogil

cdef extern from "Python.h":
    PyObject **items_of "PySequence_Fast_ITEMS" (list items)

cdef enum:
    DIGEST_SIZE = 32          # bytes
    MAX_PARENT_SIZE = 255     # bytes: pickle and CBOR write the size of larger parents differently
    MAX_NUM_TOKENS = 13_000   # tokens of a block and its lookahead: below 64 KiB pickle writes a single frame
    TOKEN_SIZE = 5            # largest encoding of a token, in bytes
    ROOM = 300                # bytes for the rest of an encoded block, and for writes past its end

cdef enum:                    # opcodes of pickle, protocol 5
    PROTO = 0x80
    FRAME = 0x95
    SHORT_BINBYTES = 0x43
    MEMOIZE = 0x94
    MARK = 0x28
    BININT = 0x4a
    BININT1 = 0x4b
    BININT2 = 0x4d
    TUPLE = 0x74
    TUPLE1 = 0x85
    TUPLE3 = 0x87
    NONE = 0x4e
    STOP = 0x2e

cdef struct BlockToHash:
    const uint8_t *parent
    Py_ssize_t parent_size
    PyObject **tokens
    Py_ssize_t num_tokens
    Py_ssize_t num_ahead      # lookahead: tokens behind the block that its hash covers too


cdef bint HAS_SHA = has_sha_instructions()


cdef inline void store_little(uint8_t *out, uint32_t number) noexcept nogil:
    out[0] = <uint8_t>number
    out[1] = <uint8_t>(number >> 8)
    out[2] = <uint8_t>(number >> 16)
    out[3] = <uint8_t>(number >> 24)


cdef inline uint8_t *pickle_token(uint8_t *out, int32_t token) noexcept nogil:
    """Write an int without branches, and return its end. Four bytes of the value are written, some possibly past this end."""
    cdef bint is_two = <uint32_t>token > 0xff, is_four = <uint32_t>token > 0xffff
    out[0] = <uint8_t>(BININT1 + is_two * (BININT2 - BININT1) + is_four * (BININT - BININT2))
    store_little(out + 1, token)
    return out + 2 + is_two + 2 * is_four


cdef inline uint8_t *pickle_tuple(uint8_t *out, bint has_none, PyObject **tokens, Py_ssize_t num_tokens) noexcept nogil:
    """Pickle a tuple of tokens, with None before them if `has_none`, and return its end; NULL if a token is not a plain int of
    32 bits.
    """
    cdef Py_ssize_t i, size = has_none + num_tokens
    cdef int32_t token = 0
    out[0] = MARK
    out += size > 3
    out[0] = NONE
    out += has_none
    for i in range(num_tokens):
        if not read_token(tokens[i], &token):
            return NULL
        out = pickle_token(out, token)
    out[0] = TUPLE if size > 3 else <uint8_t>(TUPLE1 - 1 + size)
    out[1] = MEMOIZE
    return out + 2


cdef Py_ssize_t pickle_block(uint8_t *out, const BlockToHash *block) noexcept nogil:
    """Pickle (parent, tokens, keys), protocol 5, and return its size; 0 if a token is not a plain int of 32 bits. The keys are
    None, or with lookahead (None, *tokens).
    """
    cdef uint8_t *first = out
    out[0], out[1], out[2] = PROTO, 5, FRAME
    out[11], out[12] = SHORT_BINBYTES, <uint8_t>block.parent_size
    memcpy(out + 13, block.parent, block.parent_size)
    out += 13 + block.parent_size
    out[0] = MEMOIZE
    out = pickle_tuple(out + 1, False, block.tokens, block.num_tokens)
    if out == NULL:
        return 0
    if block.num_ahead:
        out = pickle_tuple(out, True, block.tokens + block.num_tokens, block.num_ahead)
        if out == NULL:
            return 0
    else:
        out[0] = NONE
        out += 1
    out[0], out[1], out[2] = TUPLE3, MEMOIZE, STOP
    store_little(first + 3, <uint32_t>(out + 3 - first - 11))
    store_little(first + 7, 0)
    return out + 3 - first


cdef inline uint8_t *write_array(uint8_t *out, bint has_null, PyObject **tokens, Py_ssize_t num_tokens) noexcept nogil:
    """Write an array of tokens, with null before them if `has_null`, and return its end; NULL if a token is not a plain int of
    32 bits.
    """
    cdef Py_ssize_t i
    cdef int32_t token = 0
    out = write_head(out, CBOR_ARRAY, <uint32_t>(has_null + num_tokens))
    out[0] = CBOR_NULL
    out += has_null
    for i in range(num_tokens):
        if not read_token(tokens[i], &token):
            return NULL
        out = write_int(out, token)
    return out


cdef Py_ssize_t encode_cbor(uint8_t *out, const BlockToHash *block) noexcept nogil:
    """Write [parent, tokens, keys] in canonical CBOR and return its size; 0 if a token is not a plain int of 32 bits. The keys
    are null, or with lookahead [null, *tokens].
    """
    cdef uint8_t *first = out
    out = write_head(out, CBOR_ARRAY, 3)
    out = write_head(out, CBOR_BYTES, <uint32_t>block.parent_size)
    memcpy(out, block.parent, block.parent_size)
    out = write_array(out + block.parent_size, False, block.tokens, block.num_tokens)
    if out == NULL:
        return 0
    if block.num_ahead:
        out = write_array(out, True, block.tokens + block.num_tokens, block.num_ahead)
        return 0 if out == NULL else out - first
    out[0] = CBOR_NULL
    return out + 1 - first


cdef uint8_t *make_buffer(Py_ssize_t num_tokens) except NULL:
    """Allocate memory for an encoded block with this number of tokens, lookahead included; free it with `PyMem_Free`."""
    cdef uint8_t *buffer = <uint8_t *>PyMem_Malloc(ROOM + TOKEN_SIZE * num_tokens)
    if buffer == NULL:
        raise MemoryError(f"{ROOM + TOKEN_SIZE * num_tokens} bytes")
    return buffer


cdef bytes hash_encoded(uint8_t *buffer, BlockToHash *block, bint is_cbor):
    """Return a block's digest, or None if a token is no plain 32-bit int. Parent and number of tokens must be within bounds."""
    cdef Py_ssize_t size = encode_cbor(buffer, block) if is_cbor else pickle_block(buffer, block)
    cdef bytes digest
    assert 0 <= size <= ROOM + TOKEN_SIZE * (block.num_tokens + block.num_ahead) - 4
    if size == 0:
        return None
    digest = PyBytes_FromStringAndSize(NULL, DIGEST_SIZE)
    sha256(buffer, size, <uint8_t *>PyBytes_AS_STRING(digest), HAS_SHA)
    return digest


@cython.final
cdef class RequestBlockHasher:
    """Hasher of a request's new full blocks, made by `get_request_block_hasher`.

    It hashes requests without multimodal features, adapter or embeddings whose tokens are plain ints of 32 bits, and leaves
    all others to vLLM's own hasher. A call without a full block only compares two lengths. A block with lookahead is
    hashed once the tokens behind it are there. Pickling stores vLLM's functions by reference.
    """

    cdef readonly Py_ssize_t hash_block_size
    cdef readonly object caching_hash_fn
    cdef readonly Py_ssize_t num_hash_lookahead_tokens
    cdef bint is_cbor
    cdef object utils         # a module of vLLM
    cdef object theirs        # vLLM's function that makes its own hasher
    cdef object own_hasher    # None until it is needed

    def __cinit__(self, Py_ssize_t hash_block_size, caching_hash_fn, Py_ssize_t num_hash_lookahead_tokens=0):
        if not is_supported(hash_block_size, caching_hash_fn, num_hash_lookahead_tokens):
            raise ArgumentError(
                f"caching_hash_fn: got {shown(caching_hash_fn)} for blocks of {hash_block_size} and a lookahead of "
                f"{num_hash_lookahead_tokens}, allowed: vLLM's sha256 and sha256_cbor for blocks of 1 to {MAX_NUM_TOKENS}, "
                f"lookahead included, if this vLLM has it"
            )
        self.hash_block_size, self.caching_hash_fn = hash_block_size, caching_hash_fn
        self.num_hash_lookahead_tokens = num_hash_lookahead_tokens
        self.is_cbor = caching_hash_fn is bound_sha256_cbor
        self.utils, self.theirs = bound_utils, bound_theirs

    def __reduce__(self):
        return RequestBlockHasher, (self.hash_block_size, self.caching_hash_fn, self.num_hash_lookahead_tokens)

    @cython.binding(False)
    def find_new_hashes(self, request):
        """Return the hashes of the full blocks with known lookahead that follow the blocks of ``request.block_hashes``."""
        cdef Py_ssize_t num_new
        tokens, hashes = getattr(request, "_all_token_ids", None), getattr(request, "block_hashes", None)
        if type(tokens) is list and type(hashes) is list:
            num_new = len(<list>tokens) - self.num_hash_lookahead_tokens - len(<list>hashes) * self.hash_block_size
            if num_new < self.hash_block_size:
                return []
            digests = self.hash_request(request, tokens, hashes)
            if digests is not None:
                return digests
        if self.own_hasher is None:
            self.own_hasher = make_own_hasher(
                self.theirs, self.hash_block_size, self.caching_hash_fn, self.num_hash_lookahead_tokens
            )
        return self.own_hasher(request)

    cdef list hash_request(self, object request, list tokens, list hashes):
        """Return the new hashes, or None to leave them to vLLM's hasher. Like vLLM, replace an empty or missing parent by
        NONE_HASH.
        """
        cdef Py_ssize_t num_hashes = len(hashes)
        cdef list digests = []
        parent = hashes[num_hashes - 1] if num_hashes else None
        if request.mm_features or request.lora_request or request.prompt_embeds is not None:
            return None
        if not num_hashes and request.cache_salt:
            parent = self.hash_salted(request, tokens)
            digests.append(parent)
        if not parent:
            parent = getattr(self.utils, "NONE_HASH", None)
        if type(parent) is not bytes or len(<bytes>parent) > MAX_PARENT_SIZE:
            return None
        return self.hash_tokens(digests, parent, tokens, (num_hashes + len(digests)) * self.hash_block_size)

    cdef object hash_salted(self, object request, list tokens):
        """Hash the first block, the only one with the salt, by vLLM's functions."""
        size, stop = self.hash_block_size, self.hash_block_size + self.num_hash_lookahead_tokens
        if stop > size:
            extra_keys, _ = self.utils.generate_lookahead_block_hash_extra_keys(request, 0, size, stop, 0)
            extra_keys = (extra_keys, *tokens[size:stop])
        else:
            extra_keys, _ = self.utils.generate_block_hash_extra_keys(request, 0, size, 0)
        return self.utils.hash_block_tokens(self.caching_hash_fn, None, tokens[:size], extra_keys)

    cdef list hash_tokens(self, list digests, bytes parent, list tokens, Py_ssize_t start):
        """Append the digests of the full blocks from token `start` on to `digests`; None if a token is no plain 32-bit int."""
        cdef Py_ssize_t num_tokens = self.hash_block_size + self.num_hash_lookahead_tokens
        cdef uint8_t *buffer = make_buffer(num_tokens)
        try:
            while start + num_tokens <= len(tokens):
                parent = self.hash_block(buffer, parent, tokens, start)
                if parent is None:
                    return None
                digests.append(parent)
                start += self.hash_block_size
        finally:
            PyMem_Free(buffer)
        return digests

    cdef bytes hash_block(self, uint8_t *buffer, bytes parent, list tokens, Py_ssize_t start):
        """Return the digest of a block; None if a token is no plain 32-bit int. The list must not change during the call."""
        cdef BlockToHash block
        with cython.critical_section(tokens):
            if start + self.hash_block_size + self.num_hash_lookahead_tokens > len(tokens):
                return None
            block.parent, block.parent_size = <const uint8_t *>PyBytes_AS_STRING(parent), len(parent)
            block.tokens, block.num_tokens = items_of(tokens) + start, self.hash_block_size
            block.num_ahead = self.num_hash_lookahead_tokens
            return hash_encoded(buffer, &block, self.is_cbor)


# vLLM's functions, set by `bind`.
cdef object bound_utils = None
cdef object bound_sha256 = None
cdef object bound_sha256_cbor = None
cdef object bound_theirs = None


def bind() -> None:
    """Keep vLLM's own functions, importing vLLM. Call this before ``get_request_block_hasher`` is replaced in vLLM.

    No effect if they are kept already. Raise CompatError if the function is replaced already.
    """
    global bound_utils, bound_sha256, bound_sha256_cbor, bound_theirs
    utils, hashing = import_module("vllm.v1.core.kv_cache_utils"), import_module("vllm.utils.hashing")
    if utils is bound_utils:
        return
    theirs = utils.get_request_block_hasher
    if theirs is get_request_block_hasher:
        raise CompatError(f"{utils.__name__}.get_request_block_hasher: got pagepool's function, allowed: vLLM's")
    bound_utils, bound_sha256, bound_sha256_cbor, bound_theirs = utils, hashing.sha256, hashing.sha256_cbor, theirs


def get_request_block_hasher(hash_block_size, caching_hash_fn, num_hash_lookahead_tokens=0):
    """Return a function that hashes a request's new full blocks, as vLLM's function of this name does.

    For vLLM's `sha256` and `sha256_cbor` and up to 13,000 tokens per block, lookahead included, it is a method of
    `RequestBlockHasher`. It is vLLM's own hasher otherwise, also if a trial of `caching_hash_fn` gives other digests, or if
    this vLLM has no lookahead and one is given. Raise ArgumentError for a block size below 1, ArgumentTypeError for no int.
    """
    cdef Py_ssize_t block_size = size_of(hash_block_size, "hash_block_size", 1)
    if is_supported(block_size, caching_hash_fn, num_hash_lookahead_tokens):
        hasher = RequestBlockHasher(block_size, caching_hash_fn, num_hash_lookahead_tokens)
        return hasher.find_new_hashes  # faster to call than an object
    return make_own_hasher(bound_theirs, hash_block_size, caching_hash_fn, num_hash_lookahead_tokens)


cdef object make_own_hasher(object theirs, object hash_block_size, object caching_hash_fn, object num_ahead):
    """Make vLLM's own hasher. Before 0.33 vLLM has no lookahead."""
    return theirs(hash_block_size, caching_hash_fn, num_ahead) if num_ahead else theirs(hash_block_size, caching_hash_fn)


cdef bint is_supported(Py_ssize_t hash_block_size, object caching_hash_fn, object num_ahead) except -1:
    """Whether blocks are hashed here. This imports vLLM."""
    bind()
    if type(num_ahead) is not int or not 0 <= num_ahead < MAX_NUM_TOKENS:
        return False
    if not 1 <= hash_block_size <= MAX_NUM_TOKENS - num_ahead:
        return False
    if num_ahead and not hasattr(bound_utils, "generate_lookahead_block_hash_extra_keys"):
        return False
    if caching_hash_fn is bound_sha256 or caching_hash_fn is bound_sha256_cbor:
        return agrees(caching_hash_fn, caching_hash_fn is bound_sha256_cbor)
    return False


cdef bint agrees(object hash_function, bint is_cbor) except -1:
    """Whether a hash function gives our digests; another version of pickle or cbor2 may not."""
    parent = bytes(range(DIGEST_SIZE))
    for tokens in ([0, 23, 24, 255, 256, 65535, 65536, (1 << 31) - 1, -1, -25, -(1 << 31)], [7], [7, 8], [7, 8, 9]):
        for ahead in ([], [7], [256, -1], [8, 65536, 24]):
            extra_keys = (None, *ahead) if ahead else None
            if hash_function((parent, tuple(tokens), extra_keys)) != _hash_block(parent, tokens + ahead, is_cbor, len(ahead)):
                return False
    return True


def _hash_block(bytes parent not None, list tokens not None, bint is_cbor, Py_ssize_t num_ahead=0):
    """Return the digest of a block, or None if it is not encoded here. The last `num_ahead` tokens are its lookahead. For
    tests.
    """
    cdef Py_ssize_t num_tokens = len(tokens)
    cdef BlockToHash block = BlockToHash(
        parent=<const uint8_t *>PyBytes_AS_STRING(parent), parent_size=len(parent), tokens=items_of(tokens),
        num_tokens=num_tokens - num_ahead, num_ahead=num_ahead,
    )
    cdef uint8_t *buffer
    if len(parent) > MAX_PARENT_SIZE or num_tokens > MAX_NUM_TOKENS or not 0 <= num_ahead < num_tokens:
        return None
    buffer = make_buffer(num_tokens)
    try:
        return hash_encoded(buffer, &block, is_cbor)
    finally:
        PyMem_Free(buffer)


def _sha256(bytes data not None, bint with_instructions):
    """Return SHA-256 of bytes, with the processor's SHA instructions or without. Raise ArgumentError if it lacks them. For
    tests.
    """
    cdef bytes digest = PyBytes_FromStringAndSize(NULL, DIGEST_SIZE)
    if with_instructions and not HAS_SHA:
        raise ArgumentError("with_instructions: got True, allowed: False, since the processor has no SHA instructions")
    sha256(<const uint8_t *>PyBytes_AS_STRING(data), len(data), <uint8_t *>PyBytes_AS_STRING(digest), with_instructions)
    return digest
