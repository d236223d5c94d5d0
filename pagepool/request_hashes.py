"""The hashes of one request's pages, and the algorithms that make them."""

import hmac
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from pagepool._core import HashChain, PageIds, Refusal, require_token_ids
from pagepool.arguments import refuse_incomplete
from pagepool.errors import ArgumentError, ArgumentTypeError, shown
from pagepool.hashing import (
    MAX_KEY,
    ExtraKeys,
    HashFunction,
    HashNames,
    KeyHolder,
    PageHash,
    RequestExtraKeys,
    VllmExtraKeys,
    encode_extra_keys,
    get_hash_seed,
    get_siphash_key,
    hash_page_tokens,
    sha256_cbor,
    sha256_page,
)
from pagepool.request import Request, TokenIds

__all__ = ["HashAlgorithm", "PageHasher", "RequestHashes", "RequestPageHashes", "make_page_hasher"]

HashAlgorithm = str | HashFunction
"""``"siphash128"``, ``"sha256"``, ``"sha256_cbor"``, or a callable as `pagepool.hash_page_tokens` takes it."""

VLLM_SEED = "vllm-none-hash"
"""What vLLM 0.33 makes the parent of first pages of where no seed is set."""


class RequestHashes(KeyHolder):
    """The digests of a request's full pages, made as far as somebody needed them.

    ``chain`` has the keys of the prefix index. ``page_hashes`` has the hashes that the pages are known by to the user, where
    these are not simply the keys. ``query`` is the look-up that counts once the request is admitted: its tokens, those that
    hit, and whether the request comes back after a preemption, as it does if ``is_counted``. ``refusal`` is what is known of
    the request if it was refused.
    """

    __slots__ = ("chain", "extra_keys", "is_counted", "page_hashes", "query", "refusal", "request")

    def __init__(self, request: Request, chain: HashChain, extra_keys: RequestExtraKeys | None) -> None:
        """No page is hashed yet."""
        self.request = request
        self.chain = chain
        self.page_hashes: list[PageHash] = []
        self.extra_keys = extra_keys
        self.query: tuple[int, int, bool] | None = None
        self.is_counted = False
        self.refusal: Refusal | None = None

    def find_keyed_page(self, start_page: int, page_size: int) -> tuple[int | None, ExtraKeys | None]:
        """The next page from `start_page` on that has extra keys, and the keys; None where there is none."""
        return (None, None) if self.extra_keys is None else self.extra_keys.find_keyed_page(start_page, page_size)


class PageHasher(KeyHolder, ABC):
    """One way to hash pages of `page_size` tokens. Made once for a manager.

    ``num_digest_bytes``, of which the key of the index is the lower or only half, tell pages of different contents apart.
    """

    num_digest_bytes = 16
    algorithm = ""
    extra_keys: type[RequestExtraKeys] = RequestExtraKeys

    def __init__(self, page_size: int, hash_seed: int | str | bytes | None) -> None:
        """See `CacheManager` for the seed. ``keep_token_ids`` may be set later: it is for requests that start then."""
        self.page_size = page_size
        self.keep_token_ids = False
        self._key = get_siphash_key(hash_seed)

    @property
    def native_key(self) -> bytes | None:
        """The SipHash key where the core alone can make the hashes; None where it cannot."""
        return None

    def describe(self) -> dict[str, str]:
        """Its algorithm, and a keyed digest by which the same seed is known again, and nothing else."""
        digest = hmac.digest(self._get_root(), b"pagepool configuration", "sha256")
        return {"hash_algo": self.algorithm, "hash_seed": f"digest {digest[:16].hex()}"}

    def _get_root(self) -> bytes:
        """The secret, if it is one, that the hashes of equal contents depend on."""
        return self._key

    def start(self, request: Request, known: RequestHashes | None = None) -> RequestHashes:
        """The hashes of a request, none of them made yet, with the extra keys of `known` if these are the same request's."""
        chain = HashChain(self.page_size, self._key, self.keep_token_ids)
        if known is not None and known.request is request:
            return RequestHashes(request, chain, known.extra_keys)
        return RequestHashes(request, chain, self.extra_keys.of(request))

    def extend(self, hashes: RequestHashes, request: Request, num_pages: int) -> None:
        """Hash up to `num_pages` pages of the request. ArgumentError for fewer tokens, or negative ones. O(new tokens)."""
        num_hashed = len(hashes.chain)
        while num_hashed < num_pages:
            keyed_page, keys = hashes.find_keyed_page(num_hashed, self.page_size)
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
            raise
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
                f"its pages up to token {shown(stop)} were to be hashed"
            )
        require_token_ids(token_ids, start)
        return token_ids

    @abstractmethod
    def hash_pages(self, hashes: RequestHashes, token_ids: TokenIds | PageIds, extra_keys: ExtraKeys | None) -> None:
        """Append the hashes of the next pages; `extra_keys` are those of the first of them."""

    def name_pages(self, names: HashNames, hashes: RequestHashes, start: int, stop: int) -> None:
        """Tell `names` which hash stands for each key in ``[start, stop)`` of the chain."""
        for i in range(start, min(stop, len(hashes.page_hashes))):
            names.add(hashes.chain[i], hashes.page_hashes[i])

    def list_page_hashes(self, hashes: RequestHashes) -> list[PageHash]:
        """The hashes made so far, as objects. O(pages)."""
        return list(hashes.page_hashes)


class SipHasher(PageHasher):
    """SipHash-2-4-128 in the compiled core: the key of the index is the hash. 30 ns a page of 16 tokens."""

    algorithm = "siphash128"

    @property
    def native_key(self) -> bytes | None:
        """The key of the chain."""
        return self._key

    def hash_pages(self, hashes: RequestHashes, token_ids: TokenIds | PageIds, extra_keys: ExtraKeys | None) -> None:
        """One native call for all pages."""
        hashes.chain.extend(token_ids, encode_extra_keys(extra_keys))

    def list_page_hashes(self, hashes: RequestHashes) -> list[PageHash]:
        """Made anew from the chain."""
        chain = hashes.chain
        return [PageHash(chain[i], chain.page_token_ids(i)) for i in range(len(chain))]


class PythonHasher(PageHasher):
    """A hash made page by page in Python."""

    def hash_pages(self, hashes: RequestHashes, token_ids: TokenIds | PageIds, extra_keys: ExtraKeys | None) -> None:
        """Page by page, each from the hash of the one before."""
        tokens = token_ids.to_list() if isinstance(token_ids, PageIds) else [int(token_id) for token_id in token_ids]
        for start in range(0, len(tokens), self.page_size):
            self.hash_page(hashes, tokens[start : start + self.page_size], extra_keys if start == 0 else None)

    @abstractmethod
    def hash_page(self, hashes: RequestHashes, token_ids: list[int], extra_keys: ExtraKeys | None) -> None:
        """Append key and hash of one page."""


class Sha256Hasher(PythonHasher):
    """SHA-256 in one of its two forms. The key of the index is the lower half of the hash value, which is the digest."""

    num_digest_bytes = 32
    algorithm = "sha256"

    def __init__(
        self,
        page_size: int,
        hash_seed: int | str | bytes | None,
        root: bytes,
        hash_page_bytes: Callable[[bytes, Sequence[int], ExtraKeys | None], bytes],
    ) -> None:
        """`root` is the parent of first pages; `hash_page_bytes` maps parent, tokens and extra keys to 32 bytes."""
        super().__init__(page_size, hash_seed)
        self._root = root
        self._hash_page_bytes = hash_page_bytes

    def _get_root(self) -> bytes:
        """What first pages begin with. The SipHash key is not used."""
        return self._root

    def hash_page(self, hashes: RequestHashes, token_ids: list[int], extra_keys: ExtraKeys | None) -> None:
        """One digest."""
        parent = hashes.page_hashes[-1].hash_value.to_bytes(32, "big") if hashes.page_hashes else self._root
        digest = self._hash_page_bytes(parent, token_ids, extra_keys)
        kept = tuple(token_ids) if self.keep_token_ids else ()
        hash_value = int.from_bytes(digest, "big")
        hashes.chain.append_key(hash_value & MAX_KEY, kept)
        hashes.page_hashes.append(PageHash(hash_value, kept))


class VllmHasher(Sha256Hasher):
    """vLLM's ``sha256_cbor``: parent, tokens and extra keys in CBOR. docs/engines.md says what is byte for byte the same."""

    extra_keys = VllmExtraKeys
    algorithm = "sha256_cbor"

    def __init__(self, page_size: int, hash_seed: int | str | bytes | None) -> None:
        """The root is the hash of the seed as a string."""
        super().__init__(page_size, hash_seed, sha256_cbor(_vllm_seed(hash_seed)), _sha256_cbor_page)


class CallableHasher(PythonHasher):
    """Any callable. Its values are what the user sees; the key of the index is a SipHash chain over the same contents, so that
    prompts which collide under a weak callable never share a page.
    """

    def __init__(self, page_size: int, hash_seed: int | str | bytes | None, hash_function: HashFunction) -> None:
        """`hash_function` takes ``(parent hash, token ids, extra keys)``."""
        super().__init__(page_size, hash_seed)
        self._hash_function = hash_function
        name = getattr(hash_function, "__qualname__", type(hash_function).__qualname__)
        self.algorithm = f"callable {getattr(hash_function, '__module__', None)}.{name}"

    def hash_page(self, hashes: RequestHashes, token_ids: list[int], extra_keys: ExtraKeys | None) -> None:
        """One call of the callable and one native digest."""
        parent = hashes.page_hashes[-1].hash_value if hashes.page_hashes else None
        page_hash = hash_page_tokens(self._hash_function, parent, token_ids, extra_keys)
        hashes.chain.extend(token_ids, encode_extra_keys(extra_keys))
        hashes.page_hashes.append(page_hash)


def _sha256_cbor_page(parent: bytes, token_ids: Sequence[int], extra_keys: ExtraKeys | None) -> bytes:
    return sha256_cbor((parent, tuple(token_ids), extra_keys))


def make_page_hasher(hash_algo: HashAlgorithm, page_size: int, hash_seed: int | str | bytes | None) -> PageHasher:
    """The hasher for an algorithm's name or a callable. ArgumentError for an unknown name."""
    if callable(hash_algo):
        return CallableHasher(page_size, hash_seed, hash_algo)
    name = hash_algo if isinstance(hash_algo, str) else None
    if name == "siphash128":
        return SipHasher(page_size, hash_seed)
    if name == "sha256":
        return Sha256Hasher(page_size, hash_seed, _sha256_root(hash_seed), sha256_page)
    if name == "sha256_cbor":
        return VllmHasher(page_size, hash_seed)
    raise ArgumentError(f"hash_algo: got {shown(hash_algo)}, allowed: 'siphash128', 'sha256', 'sha256_cbor' or a callable")


def _sha256_root(hash_seed: int | str | bytes | None) -> bytes:
    """Zeros unless a seed is given: the same in every process."""
    return bytes(32) if hash_seed is None else sha256_page(b"root", (), (("seed", get_hash_seed(hash_seed)),))


def _vllm_seed(hash_seed: int | str | bytes | None) -> str:
    """`hash_seed` where given, else what vLLM takes: ``PYTHONHASHSEED`` where it is set, whatever it says, or `VLLM_SEED`."""
    if hash_seed is None:
        return os.environ.get("PYTHONHASHSEED", VLLM_SEED)
    try:
        return (get_hash_seed(hash_seed) or b"").decode()
    except UnicodeDecodeError as error:
        raise ArgumentError(f"hash_seed: {error}; allowed with hash_algo='sha256_cbor': text, as str or UTF-8") from None


class RequestPageHashes(KeyHolder, Mapping[str, list[PageHash]]):
    """The hashes of each request as lists of `PageHash`, by request id: a live, read-only view. An unknown id has none.

    The objects are made when they are read, O(pages) each time.
    """

    def __init__(self, hasher: PageHasher, hashes: Mapping[str, RequestHashes]) -> None:
        """A view of `hashes`, which `hasher` made."""
        self._hasher = hasher
        self._hashes = hashes

    def __getitem__(self, request_id: str) -> list[PageHash]:
        """The hashes made so far for a request."""
        hashes = self._hashes.get(request_id)
        return [] if hashes is None else self._hasher.list_page_hashes(hashes)

    def __contains__(self, request_id: object) -> bool:
        """Whether hashes are kept for the request."""
        return request_id in self._hashes

    def __iter__(self) -> Iterator[str]:
        """Ids of the requests with hashes, as they were at once: other threads may add some."""
        return iter(list(self._hashes))

    def __len__(self) -> int:
        """Number of requests with hashes."""
        return len(self._hashes)
