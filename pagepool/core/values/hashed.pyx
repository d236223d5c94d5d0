"""Tokens with the digests of their pages."""

cimport cython
from libc.string cimport memcmp

from pagepool.core.base cimport MAX_TOKENS
from pagepool.core.values.arguments cimport *
from pagepool.core.values.chain cimport *

from pagepool.errors import ArgumentError, ArgumentTypeError


cdef list checked_extra_keys(object extra_keys):
    """Return checked ``(page, bytes)`` pairs. The page None, which stands for all others, is the last."""
    cdef bytes data
    cdef list checked = []
    for page, data in as_list(extra_keys, "extra_keys"):
        if data is None:
            raise ArgumentTypeError("extra_keys: got None, allowed: bytes")
        if checked and checked[len(checked) - 1][0] is None:
            raise ArgumentError("extra_keys: got keys behind those of all other pages, allowed: none")
        checked.append((None if page is None else size_of(page, "page", 0, MAX_TOKENS), data))
    return checked


@cython.auto_pickle(False)
cdef class HashedTokens:
    """A copy of token ids, with the digests of their full pages, for a request that `RunningBatch.admit` gets later.

    `extra_keys` are those of a `RowRequest`, and the arguments in between those of a `HashChain`; a `page_size` of 0 makes no
    digests. ArgumentError for no tokens, and for negative ones. O(tokens).
    """

    def __cinit__(
        self, token_ids, page_size, bytes key not None=b"", extra_keys=(), bint keep_token_ids=False,
        str algorithm not None="siphash128", hash_lookahead=0,
    ):
        self.token_ids = PageIds(as_page_ids(token_ids, "token_ids"))
        if self.token_ids.num == 0:
            raise ArgumentError("token_ids: got none, allowed: at least 1")
        refuse_negative(self.token_ids.ids, self.token_ids.num, 0)
        self.extra_keys = checked_extra_keys(extra_keys)
        if size_of(page_size, "page_size"):
            self.chain = HashChain(page_size, key, keep_token_ids, algorithm, hash_lookahead)
            self.hash_pages()

    @property
    def hits_fewer(self) -> bool:
        """Whether the request was not admitted because hits that its queue expected are gone."""
        return self.falls_short()

    cdef bint falls_short(self) noexcept:
        return self.num_found < self.num_expected

    cdef int hash_pages(self) except -1:
        """Hash all full pages whose lookahead is known. Pages with extra keys are hashed one by one."""
        cdef HashChain chain = self.chain
        cdef dict own = {page: data for page, data in self.extra_keys if page is not None}
        cdef bytes others = b""
        cdef Py_ssize_t page = 0, stop, num_pages
        cdef PageIds part
        num_pages = max(<Py_ssize_t>0, self.token_ids.num - chain.hashing.hash_lookahead) // chain.page_size
        if self.extra_keys and self.extra_keys[len(self.extra_keys) - 1][0] is None:
            others = self.extra_keys[len(self.extra_keys) - 1][1]
        while page < num_pages:
            stop = page + 1 if self.extra_keys else num_pages
            part = PageIds.__new__(PageIds)
            part.add(self.token_ids.ids + page * chain.page_size, chain.count_tokens(stop - page))
            chain.extend(part, own.get(page, others), page)
            page = stop
        return 0

    cdef bint fits(self, const Hashing *hashing, Py_ssize_t page_size, list extra_keys) except -1:
        """Whether a row that hashes in this way, with these extra keys, has the same digests."""
        if self.chain is None or self.chain.page_size != page_size or extra_keys != self.extra_keys:
            return False
        return memcmp(&self.chain.hashing, hashing, sizeof(Hashing)) == 0

    def __reduce__(self):
        raise ArgumentTypeError("HashedTokens have digests under a secret key and cannot be pickled")
