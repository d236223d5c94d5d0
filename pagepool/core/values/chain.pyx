"""Hash chains of requests."""

cimport cython
from cpython.mem cimport PyMem_RawFree as free
from libc.stdint cimport uint8_t
from libc.string cimport memset

from pagepool.core.base cimport (
    MAX_LOOKAHEAD, SHA256, SHA256_CBOR, SIPHASH, SipState, digest_at, go_on, has_sha_instructions, hash_pages,
    let_others_run, process_number, require_allocated, reserve_items, set_digest, sip_bytes, sip_finish, sip_start,
)
from pagepool.core.values.arguments cimport *

from pagepool.errors import ArgumentError, ArgumentTypeError, shown


def siphash128(bytes key not None, bytes data not None) -> bytes:
    """Return the 128-bit SipHash-2-4 of `data` under the 16-byte `key`: 16 bytes. O(len(data)).

    >>> siphash128(bytes(range(16)), b"").hex()
    'a3817f04ba25a8e66df67214c7550293'
    """
    cdef SipState s
    cdef Digest digest
    cdef const uint8_t *message = data
    sip_start(&s, digest_of_bytes(key), 1)
    sip_bytes(&s, &message, len(data), 0, 1)
    sip_finish(&s, &digest, 1)
    return (<char *>&digest)[:16]


cdef Hashing hashing_of(str algorithm, bytes key, object hash_lookahead) except *:
    """Return how an algorithm hashes. `key` is the secret key of SipHash, 16 bytes, or with SHA-256 the parent of first pages,
    32 bytes. A digest also covers `hash_lookahead` tokens behind its page. No tokens can imitate extra keys.
    """
    cdef Hashing hashing
    memset(&hashing, 0, sizeof(hashing))
    hashing.hash_lookahead = <int32_t>size_of(hash_lookahead, "hash_lookahead", 0, MAX_LOOKAHEAD)
    if algorithm == "siphash128":
        hashing.kind, hashing.key = SIPHASH, digest_of_bytes(key)
        hashing.extra_key = digest_of_bytes(siphash128(key, b"extra keys"))
    elif algorithm in ("sha256", "sha256_cbor"):
        hashing.kind = SHA256 if algorithm == "sha256" else SHA256_CBOR
        if len(key) != 32:
            raise ArgumentError(f"key: got {len(key)} bytes, allowed: 32")
        hashing.is_fast = has_sha_instructions()
        hashing.root = wide_of_int(int.from_bytes(key, "big"), True)
    else:
        raise ArgumentError(f"algorithm: got {shown(algorithm)}, allowed: 'siphash128', 'sha256' or 'sha256_cbor'")
    return hashing


@cython.final
cdef class HashChain:
    """The digests of a request's full pages, each made from the one before: SipHash-2-4-128 under a secret key, or SHA-256.

    `page_size` is in tokens. `algorithm` is ``"siphash128"``, with a `key` of 16 bytes, or ``"sha256"`` or ``"sha256_cbor"``,
    whose `key` of 32 bytes is the parent of first pages. A digest also covers the `hash_lookahead` tokens behind its page. With
    `keep_token_ids` the chain keeps the tokens, too. A digest takes 16 bytes, 32 with SHA-256.
    """

    def __cinit__(
        self, page_size, bytes key not None, bint keep_token_ids=False, str algorithm not None="siphash128", hash_lookahead=0
    ):
        self.process = process_number
        require_allocated(&self.lock)
        self.page_size = size_of(page_size, "page_size", 1)
        self.hashing = hashing_of(algorithm, key, hash_lookahead)
        self.token_ids = PageIds() if keep_token_ids else None

    def __dealloc__(self):
        if self.process == process_number:  # else a thread of the parent may have been changing it
            free(self.digests)
            free(self.uppers)

    def __reduce__(self):
        raise ArgumentTypeError("a HashChain holds a secret key and cannot be pickled")

    def __len__(self):
        """Return the number of hashed pages."""
        cdef Py_ssize_t num
        with self.own_lock()[0]:
            num = self.num
        return num

    def __getitem__(self, Py_ssize_t i) -> int:
        """Return the digest of page `i` as an int of 128 bits, or 256 with SHA-256."""
        cdef WideDigest digest
        cdef Py_ssize_t num
        with self.own_lock()[0]:
            num = self.num
            if 0 <= i < num:
                digest = digest_at(self.digests, self.uppers, i)
        if not 0 <= i < num:
            raise IndexError(f"page: got {i}, allowed: 0 to {num - 1}")
        return int_of_wide(digest)

    def extend(self, object tokens, bytes extra_keys=b"", Py_ssize_t start=-1) -> None:
        """Hash the next pages. `tokens`, a list or an int array, has the token ids of whole pages and of the last one's
        lookahead. The digest of the first of these pages also covers `extra_keys`, unless they are empty. ArgumentError unless
        that is page `start` of the chain; -1: any. O(tokens).
        """
        cdef PageIds ids = as_page_ids(tokens, "token ids")
        cdef Py_ssize_t num_pages = (ids.num - self.hashing.hash_lookahead) // self.page_size
        cdef bint has_room, is_next
        if ids.num and (num_pages <= 0 or ids.num != self.count_tokens(num_pages)):
            behind = f", and {self.hashing.hash_lookahead} behind" if self.hashing.hash_lookahead else ""
            raise ArgumentError(f"token ids: got {ids.num}, allowed: a multiple of the page size {self.page_size}{behind}")
        if ids.num == 0:
            return
        with self.own_lock()[0]:
            is_next = start == self.num or start == -1
            has_room = is_next and self.extend_locked(ids, extra_keys or b"")
        if not is_next:
            refuse_hashed()
        if not has_room:
            raise MemoryError(f"{num_pages} digests more")

    cdef PageIds read_next(self, list token_ids, Py_ssize_t num_pages):
        """Read the tokens that are missing for `num_pages` hashed pages; return None if the request has too few."""
        cdef PageIds ids = PageIds.__new__(PageIds)
        cdef Py_ssize_t start = self.num * self.page_size, stop = self.count_tokens(num_pages)
        ids.add_items(token_ids, start, stop, "token_ids")
        refuse_negative(ids.ids, ids.num, start)
        return ids if ids.num == stop - start else None

    cdef int cut(self, Py_ssize_t num_pages) except -1:
        """Forget the digests from page `num_pages` on."""
        assert num_pages >= 0
        with self.own_lock()[0]:
            self.num = min(self.num, num_pages)
            if self.token_ids is not None:
                self.token_ids.num = min(self.token_ids.num, self.count_tokens(self.num))
        return 0

    cdef Py_ssize_t count_tokens(self, Py_ssize_t num_pages) noexcept:
        """Return the number of tokens that the digests of the first `num_pages` pages cover."""
        return num_pages * self.page_size + self.hashing.hash_lookahead

    cdef void keep_tokens(self, PageIds tokens) noexcept:
        """Keep the tokens of the next pages, for which there is room, if all tokens before them are kept."""
        cdef Py_ssize_t start = self.num * self.page_size
        if self.token_ids is not None and self.token_ids.num >= start:
            self.token_ids.num = start
            self.token_ids.put(tokens.ids, tokens.num)

    cdef bint extend_locked(self, PageIds tokens, bytes extra_keys) noexcept:
        """Hash pages as `extend` does, with the lock held; return False, with nothing changed, if memory is short."""
        cdef Py_ssize_t num_pages = (tokens.num - self.hashing.hash_lookahead) // self.page_size
        cdef Py_ssize_t start = self.num
        cdef const int32_t *ids = tokens.ids - start * self.page_size
        cdef const uint8_t *extra = <const uint8_t *><const char *>extra_keys
        cdef Py_ssize_t size = len(extra_keys)
        cdef void *thread
        assert tokens.num == self.count_tokens(num_pages)
        if not reserve_digests(self, num_pages, tokens.num):
            return False
        self.keep_tokens(tokens)
        thread = let_others_run(num_pages)
        hash_pages(&self.hashing, ids, self.page_size, self.digests, self.uppers, start, start + num_pages, extra, size)
        go_on(thread)
        self.num += num_pages
        assert self.num <= self.capacity
        assert self.token_ids is None or self.token_ids.num <= self.count_tokens(self.num)
        return True

    def append_key(self, object key, tokens=()) -> None:
        """Append a page whose key was made elsewhere: 128 bits, or 256 with SHA-256. `tokens` are empty, or all tokens of the
        page and its lookahead; they are kept if the chain keeps tokens.
        """
        cdef WideDigest digest = wide_of_int(key, self.hashing.kind != SIPHASH)
        cdef PageIds copied = as_own_ids(tokens, "token ids")
        cdef bint has_room
        if copied.num not in (0, self.count_tokens(1)):
            raise ArgumentError(f"token ids: got {copied.num}, allowed: none, or a page of {self.count_tokens(1)}")
        with self.own_lock()[0]:
            has_room = reserve_digests(self, 1, copied.num)
            if has_room:
                if copied.num:
                    self.keep_tokens(copied)
                set_digest(self.digests, self.uppers, self.num, digest)
                self.num += 1
        if not has_room:
            raise MemoryError("a digest more")

    def page_token_ids(self, Py_ssize_t i) -> tuple:
        """Return the tokens of page `i`; an empty tuple if they are not kept."""
        cdef PageIds tokens = PageIds.__new__(PageIds)
        if self.token_ids is None:
            return ()
        tokens.reserve(self.page_size)
        with self.own_lock()[0]:
            if 0 <= i < min(self.num, self.token_ids.num // self.page_size):
                tokens.put(self.token_ids.ids + i * self.page_size, self.page_size)
        return tuple(tokens.to_list())


cdef int refuse_hashed() except -1:
    """Raise the error for tokens whose pages another call hashed while they were read."""
    raise ArgumentError(
        "token ids: got tokens of pages that another call hashed while they were read, allowed: tokens whose attributes and "
        "items leave the request alone"
    )


cdef bint reserve_digests(HashChain chain, Py_ssize_t num_pages, Py_ssize_t num_tokens) noexcept:
    """Make room for digests and tokens; return False if memory is short."""
    cdef Py_ssize_t num = chain.num + num_pages
    if not reserve_items(<void **>&chain.digests, &chain.capacity, num, sizeof(Digest)):
        return False
    if chain.hashing.kind != SIPHASH:
        if not reserve_items(<void **>&chain.uppers, &chain.upper_capacity, num, sizeof(Digest)):
            return False
    return chain.token_ids is None or chain.token_ids.try_reserve(num_tokens)
