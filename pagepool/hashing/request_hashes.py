"""The base of the algorithms that hash the pages of requests, and a view of their hashes."""

import hmac
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

import numpy as np

from pagepool._core import HashChain, PageIds, RequestHashes, require_token_ids
from pagepool.arguments import refuse_incomplete
from pagepool.errors import ArgumentError, ArgumentTypeError, shown
from pagepool.hashing import ExtraKeys, HashNames, KeyHolder, PageHash, RequestExtraKeys, get_siphash_key
from pagepool.request import Request, TokenIds

__all__ = ["PageHasher", "RequestPageHashes"]


class PageHasher(KeyHolder, ABC):
    """An algorithm that hashes pages of `page_size` tokens. Each manager has one.

    A digest has ``num_digest_bytes``. The key of the index is its lower half, or all of it.
    """

    num_digest_bytes = 16
    algorithm = ""
    extra_keys: type[RequestExtraKeys] = RequestExtraKeys

    def __init__(self, page_size: int, hash_seed: int | str | bytes | None) -> None:
        """See `CacheManager` for the seed. Setting ``keep_token_ids`` later affects requests that start after that."""
        self.page_size = page_size
        self.keep_token_ids = False
        self._key = get_siphash_key(hash_seed)

    @property
    def native_key(self) -> bytes | None:
        """The SipHash key if the core can make the hashes alone, else None."""
        return None

    def describe(self) -> dict[str, str]:
        """Return the algorithm, and a keyed digest that identifies the seed without revealing it."""
        digest = hmac.digest(self._get_root(), b"pagepool configuration", "sha256")
        return {"hash_algo": self.algorithm, "hash_seed": f"digest {digest[:16].hex()}"}

    def _get_root(self) -> bytes:
        """Return the root that the hashes of equal contents depend on. It may be secret."""
        return self._key

    def start(self, request: Request, known: RequestHashes | None = None) -> RequestHashes:
        """Return empty hashes of a request, with the extra keys of `known` if it belongs to the same request."""
        chain = HashChain(self.page_size, self._key, self.keep_token_ids)
        if known is not None and known.request is request:
            return RequestHashes(request, chain, known.extra_keys)
        return RequestHashes(request, chain, self.extra_keys.of(request))

    def extend(self, hashes: RequestHashes, request: Request, num_pages: int) -> None:
        """Hash up to `num_pages` pages of the request. ArgumentError for missing or negative tokens. O(new tokens)."""
        num_hashed = len(hashes.chain)
        while num_hashed < num_pages:
            keyed_page, keys = None, None
            if hashes.extra_keys is not None:
                keyed_page, keys = hashes.extra_keys.find_keyed_page(num_hashed, self.page_size)
            if keyed_page == num_hashed:
                stop = num_hashed + 1
            else:
                stop, keys = min(num_pages, keyed_page or num_pages), None
            self.hash_pages(hashes, self._read_tokens(request, num_hashed, stop), keys)
            num_hashed = stop

    def _read_tokens(self, request: Request, start_page: int, stop_page: int) -> TokenIds | PageIds:
        start, stop = start_page * self.page_size, stop_page * self.page_size
        try:
            all_ids = request.all_token_ids
        except AttributeError as error:
            refuse_incomplete(request, error)
        try:
            token_ids = PageIds.of_slice(all_ids, start, stop) if type(all_ids) is list else all_ids[start:stop]
        except (TypeError, IndexError, KeyError) as error:
            name = f"request {shown(request.request_id)}: all_token_ids"
            raise ArgumentTypeError(f"{name}: got {type(all_ids).__name__}, allowed: a list or an int32 array") from error
        if not isinstance(token_ids, PageIds | np.ndarray):
            token_ids = PageIds(token_ids)
        if len(token_ids) != stop - start:
            raise ArgumentError(
                f"request {shown(request.request_id)}: all_token_ids ends at {start + len(token_ids)}, "
                f"but its pages up to token {shown(stop)} are to be hashed"
            )
        require_token_ids(token_ids, start)
        return token_ids

    @abstractmethod
    def hash_pages(self, hashes: RequestHashes, token_ids: TokenIds | PageIds, extra_keys: ExtraKeys | None) -> None:
        """Append the hashes of the next pages; `extra_keys` belong to the first of them."""

    def name_pages(self, names: HashNames, hashes: RequestHashes, start: int, stop: int) -> None:
        """Name the keys in ``[start, stop)`` of the chain."""
        for i in range(start, min(stop, len(hashes.page_hashes))):
            names.add(hashes.chain[i], hashes.page_hashes[i])

    def list_page_hashes(self, hashes: RequestHashes) -> list[PageHash]:
        """Return the hashes made so far as objects. O(pages)."""
        return list(hashes.page_hashes)


class RequestPageHashes(KeyHolder, Mapping[str, list[PageHash]]):
    """A live, read-only view of each request's hashes as lists of `PageHash`, by request id. An unknown id has no hashes.

    Each read makes new objects, in O(pages).
    """

    def __init__(self, hasher: PageHasher, hashes: Mapping[str, RequestHashes]) -> None:
        """View `hashes`, which `hasher` made."""
        self._hasher = hasher
        self._hashes = hashes

    def __getitem__(self, request_id: str) -> list[PageHash]:
        """Return the hashes made so far for a request."""
        hashes = self._hashes.get(request_id)
        return [] if hashes is None else self._hasher.list_page_hashes(hashes)

    def __contains__(self, request_id: object) -> bool:
        """Whether hashes are kept for the request."""
        return request_id in self._hashes

    def __iter__(self) -> Iterator[str]:
        """Iterate over a copy of the ids, since other threads may add some."""
        return iter(list(self._hashes))

    def __len__(self) -> int:
        """Number of requests with hashes."""
        return len(self._hashes)
