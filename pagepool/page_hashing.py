"""The algorithms that hash the pages of requests: SipHash and two forms of SHA-256, in the core, and any callable."""

import hashlib
import hmac
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pagepool._core import CONSTANTS, HashChain, PageIds, RequestHashes, require_token_ids, siphash128
from pagepool.arguments import read, require_flag, require_int
from pagepool.errors import ArgumentError, ArgumentTypeError, not_unicode, shown
from pagepool.hashing import (
    REQUEST_NAMES,
    ExtraKeyNames,
    ExtraKeys,
    HashFunction,
    HashNames,
    KeyHolder,
    RequestExtraKeys,
    VllmExtraKeys,
    encode_extra_keys,
    get_hash_seed,
    get_siphash_key,
    hash_page_tokens,
)
from pagepool.request import Request, TokenIds

HashAlgorithm = str | HashFunction
"""``"siphash128"``, ``"sha256"``, ``"sha256_cbor"``, or a callable as for `pagepool.hash_page_tokens`."""

KeyedPages = list[tuple[int | None, bytes]]
"""Pages with extra keys, and their encoded keys. The last may be None, for all other pages."""

MAX_LOOKAHEAD = CONSTANTS.MAX_LOOKAHEAD
"""Most tokens behind a page that its hash can cover."""

VLLM_SEED = "vllm-none-hash"
"""vLLM 0.33's default seed for the parent of first pages."""


@dataclass(frozen=True, kw_only=True)
class PageHashing:
    """How pages are hashed and hit: ``CacheManager(..., hashing=PageHashing(hash_algo="sha256"))``.

    Raise ArgumentError for values out of range, ArgumentTypeError for other types.

    >>> PageHashing(use_eagle=True, hash_lookahead=1)
    PageHashing(hash_algo='siphash128', use_eagle=True, hash_lookahead=1)
    """

    hash_algo: HashAlgorithm = "siphash128"
    """``"siphash128"`` (keyed with a secret of the process), ``"sha256"`` (the same in every process), ``"sha256_cbor"``
    (vLLM's: see docs/hashes.md), or a callable such as the builtin `hash`. All but callables are native. SHA-256 keeps 16
    bytes more for each page of the pool.
    """
    hash_seed: int | str | bytes | None = field(default=None, repr=False)
    """Makes a keyed algorithm deterministic, as ``PYTHONHASHSEED`` does; it must not be empty."""
    use_eagle: bool = False
    """For models with a drafter (EAGLE, MTP), whose keys at the end of a page depend on tokens behind it. Without
    `hash_lookahead`, the last page of each hit is dropped, or the last interval of a state.
    """
    hash_lookahead: int = 0
    """With `use_eagle` the number of tokens behind a page on which its keys depend: 1 for EAGLE, the layers of MTP, at most 64.
    Then nothing is dropped: the hash of a page covers these tokens, so a page is cached once they are known, and prompts share
    a page if they share them too. Managers with different lookaheads share no pages.
    """

    def __post_init__(self) -> None:
        """Check the values, and store flag and number as bool and int."""
        _find_hasher(self.hash_algo)
        get_hash_seed(self.hash_seed)
        object.__setattr__(self, "use_eagle", require_flag("use_eagle", self.use_eagle))
        object.__setattr__(self, "hash_lookahead", require_int("hash_lookahead", self.hash_lookahead, 0, MAX_LOOKAHEAD))
        if self.hash_lookahead and not self.use_eagle:
            raise ArgumentError(f"hash_lookahead: got {self.hash_lookahead}, allowed without use_eagle: 0")

    def make_hasher(self, page_size: int) -> "PageHasher":
        """Return the hasher of pages of `page_size` tokens."""
        return make_page_hasher(self.hash_algo, page_size, self.hash_seed, self.hash_lookahead)


class PageHasher(KeyHolder):
    """SipHash-2-4-128; also the base class of the other algorithms. Each manager has one.

    It hashes pages of `page_size` tokens, each with the `hash_lookahead` tokens behind it. If it ``is_native``, the core makes
    hashes by itself, with ``chain_algorithm`` and ``chain_key``. A digest has ``num_digest_bytes``; the key of the index is its
    lower half, or all of it. Hashes depend on the content and on ``chain_key``, which may be secret.
    """

    is_native = True
    num_digest_bytes = 16
    reads_environment = True
    """Whether the seed comes from PYTHONHASHSEED if none is given."""
    algorithm = chain_algorithm = "siphash128"
    extra_keys: type[RequestExtraKeys] = RequestExtraKeys

    def __init__(self, page_size: int, hash_seed: int | str | bytes | None, hash_lookahead: int = 0) -> None:
        """See `PageHashing` for the seed. A later change of ``keep_token_ids`` affects only requests started after it."""
        self.page_size, self.hash_lookahead = page_size, hash_lookahead
        self.keep_token_ids = False
        is_keyed = self.chain_algorithm == "siphash128"
        self.is_shared = not is_keyed or get_hash_seed(hash_seed) is not None  # processes with this seed make equal keys
        follows = self.reads_environment and hash_seed is None and "PYTHONHASHSEED" in os.environ
        self.follows_environment = follows and self.is_shared  # processes with this PYTHONHASHSEED make equal keys
        self.chain_key = self._make_root(hash_seed)

    def _make_root(self, hash_seed: int | str | bytes | None) -> bytes:
        """Return the bytes on which first digests depend besides the content."""
        key = get_siphash_key(hash_seed)
        return siphash128(key, f"lookahead {self.hash_lookahead}".encode()) if self.hash_lookahead else key

    def describe(self) -> dict[str, int | str | None]:
        """Return the name of the algorithm, the lookahead if there is any, and a keyed digest of the seed: it identifies the
        seed without revealing it.
        """
        digest = hmac.digest(self.chain_key, b"pagepool configuration", "sha256")
        described = {"hash_lookahead": self.hash_lookahead} if self.hash_lookahead else {}
        return {"hash_algo": self.algorithm, **described, "hash_seed": f"digest {digest[:16].hex()}"}

    def count_pages(self, num_tokens: int) -> int:
        """Return the number of full pages of `num_tokens` known tokens whose lookahead is known."""
        return max(0, num_tokens - self.hash_lookahead) // self.page_size

    def start(
        self, request: Request, known: RequestHashes | None = None, names: ExtraKeyNames = REQUEST_NAMES
    ) -> RequestHashes:
        """Return empty hashes of a request, with the extra keys of `known` if it belongs to the same request. `names` are names
        of its attributes, for messages.
        """
        is_known = known is not None and known.request is request
        extra_keys = known.extra_keys if known is not None and is_known else self.extra_keys.of(request, names)
        chain = HashChain(self.page_size, self.chain_key, self.keep_token_ids, self.chain_algorithm, self.hash_lookahead)
        return RequestHashes(request, chain, extra_keys)

    def extend(self, hashes: RequestHashes, request: Request, num_pages: int) -> None:
        """Hash up to `num_pages` pages of the request. Raise ArgumentError for missing or negative tokens. O(new tokens)."""
        num_hashed = len(hashes.chain)
        while num_hashed < num_pages:
            keyed_page, keys = None, None
            if hashes.extra_keys is not None:
                keyed_page, keys = hashes.extra_keys.find_keyed_page(num_hashed, self.page_size, self.hash_lookahead)
            if keyed_page == num_hashed:
                stop = num_hashed + 1
            else:
                stop, keys = min(num_pages, keyed_page or num_pages), None
            token_ids = self._read_tokens(request, num_hashed, stop)
            self._hash_pages(hashes, num_hashed, token_ids, keys)
            num_hashed = stop

    def _hash_pages(
        self, hashes: RequestHashes, first_page: int, token_ids: TokenIds | PageIds, extra_keys: ExtraKeys | None
    ) -> None:
        """Append the digests of the next pages, unless other calls have appended some; the extra keys belong to the first."""
        hashes.chain.extend(token_ids, self.encode(extra_keys), first_page)

    def list_keyed(self, keys: RequestExtraKeys | None, max_num_tokens: int) -> KeyedPages:
        """Return the pages of up to `max_num_tokens` tokens that have extra keys of their own. O(features x log features)."""
        if keys is None:
            return []
        num_pages = -(-max_num_tokens // self.page_size)
        keyed = keys.list_keyed_pages(self.page_size, num_pages, self.hash_lookahead)
        return [(page, self.encode(own)) for page, own in keyed]

    def encode(self, extra_keys: ExtraKeys | None) -> bytes:
        """Return extra keys as the bytes that are hashed; no bytes for None."""
        return encode_extra_keys(extra_keys)

    def _read_tokens(self, request: Request, start_page: int, stop_page: int) -> TokenIds | PageIds:
        start, stop = start_page * self.page_size, stop_page * self.page_size + self.hash_lookahead
        all_ids = read(request, "all_token_ids")
        try:
            token_ids = PageIds.of_slice(all_ids, start, stop) if type(all_ids) is list else all_ids[start:stop]
        except (TypeError, IndexError, KeyError) as error:
            is_list = isinstance(error, ArgumentTypeError)  # items other than ints raise it
            fault = error if is_list else f"got {type(all_ids).__name__}, allowed: a list or an int32 array"
            raise ArgumentTypeError(f"request {shown(request.request_id)}: all_token_ids: {fault}") from error
        if not isinstance(token_ids, PageIds | np.ndarray):
            require_token_ids(token_ids, start)
            token_ids = PageIds(token_ids)
        if len(token_ids) != stop - start:
            raise ArgumentError(
                f"request {shown(request.request_id)}: got all_token_ids up to {start + len(token_ids)}, "
                f"allowed: up to at least {shown(stop)}, since the pages up to there are to be hashed"
            )
        require_token_ids(token_ids, start)
        return token_ids

    def name_pages(self, names: HashNames, hashes: RequestHashes, start: int, stop: int) -> None:
        """Name the keys in ``[start, stop)`` of the chain."""
        for i in range(start, min(stop, len(hashes.page_hashes))):
            names.add(hashes.chain[i], hashes.page_hashes[i])


class Sha256Hasher(PageHasher):
    """SHA-256, with the digests of `sha256_page`."""

    num_digest_bytes = 32
    reads_environment = False
    algorithm = chain_algorithm = "sha256"

    def _make_root(self, hash_seed: int | str | bytes | None) -> bytes:
        """Return the parent of first pages: zeros, the same in every process, unless a seed or a lookahead is given."""
        keys: ExtraKeys = () if hash_seed is None else (("seed", get_hash_seed(hash_seed)),)
        keys += (("lookahead", self.hash_lookahead),) if self.hash_lookahead else ()
        return sha256_page(b"root", (), keys) if keys else bytes(32)


class VllmHasher(PageHasher):
    """vLLM's ``sha256_cbor``: parent, tokens, and extra keys with the lookahead, in CBOR. docs/hashes.md lists the parts
    identical to vLLM's.
    """

    num_digest_bytes = 32
    extra_keys = VllmExtraKeys
    algorithm = chain_algorithm = "sha256_cbor"

    def _make_root(self, hash_seed: int | str | bytes | None) -> bytes:
        """Return the parent of first pages, the hash of a seed as text: `hash_seed` if given, otherwise ``PYTHONHASHSEED``,
        even empty, otherwise `VLLM_SEED`.
        """
        if hash_seed is None:
            return sha256_cbor(os.environ.get("PYTHONHASHSEED", VLLM_SEED))
        try:
            return sha256_cbor((get_hash_seed(hash_seed) or b"").decode())
        except UnicodeDecodeError as error:
            allowed = "allowed with hash_algo='sha256_cbor': text, as str or UTF-8"
            raise ArgumentError(f"hash_seed: got bytes that are not UTF-8 ({error}), {allowed}") from None

    def encode(self, extra_keys: ExtraKeys | None) -> bytes:
        """Return extra keys in canonical CBOR; no bytes for None, which the core encodes."""
        return b"" if extra_keys is None else _encode_cbor(extra_keys)


class CallableHasher(PageHasher):
    """Any callable; users see its values. Keys are SipHash chains, so colliding values of a weak callable share no pages."""

    is_native = False

    def __init__(
        self, page_size: int, hash_seed: int | str | bytes | None, hash_lookahead: int, hash_function: HashFunction
    ) -> None:
        """Hash with `hash_function`, called with ``(parent hash, token ids, extra keys)``. The token ids are those of a page
        and its lookahead.
        """
        super().__init__(page_size, hash_seed, hash_lookahead)
        self._hash_function = hash_function
        name = getattr(hash_function, "__qualname__", type(hash_function).__qualname__)
        self.algorithm = f"callable {getattr(hash_function, '__module__', None)}.{name}"

    def _hash_pages(
        self, hashes: RequestHashes, first_page: int, token_ids: TokenIds | PageIds, extra_keys: ExtraKeys | None
    ) -> None:
        """Call the callable, and append one native digest, for each page."""
        tokens = token_ids.to_list() if isinstance(token_ids, PageIds) else [int(token_id) for token_id in token_ids]
        starts = range(0, len(tokens) - self.hash_lookahead, self.page_size)
        for page, start in enumerate(starts, start=first_page):
            page_tokens = tokens[start : start + self.page_size + self.hash_lookahead]
            parent = hashes.page_hashes[-1].hash_value if hashes.page_hashes else None
            page_hash = hash_page_tokens(self._hash_function, parent, page_tokens, extra_keys)
            hashes.chain.extend(page_tokens, self.encode(extra_keys), page)
            hashes.page_hashes.append(page_hash)
            extra_keys = None


def sha256_page(parent: bytes, token_ids: Sequence[int], extra_keys: ExtraKeys | None) -> bytes:
    """Return SHA-256 of the parent's digest, the tokens as little-endian int32 and the encoded extra keys: 32 bytes.

    It is the same in every process and on every machine. Raise ArgumentError for token ids outside int32.
    """
    try:
        tokens = struct.pack(f"<{len(token_ids)}i", *token_ids)
    except struct.error as error:
        raise ArgumentError(f"token ids: got one that does not fit ({error}), allowed: ints that fit int32") from None
    return hashlib.sha256(parent + tokens + encode_extra_keys(extra_keys)).digest()


def sha256_cbor(content: Any) -> bytes:
    """Return SHA-256 of canonical CBOR, 32 bytes, as vLLM's function of this name. Needs cbor2 (``pagepool[events]``)."""
    return hashlib.sha256(_encode_cbor(content)).digest()


def _encode_cbor(content: Any) -> bytes:
    try:
        import cbor2
    except ImportError:
        raise ImportError("hash_algo='sha256_cbor' needs cbor2: pip install 'pagepool[events]'") from None
    try:
        return cbor2.dumps(content, canonical=True)
    except UnicodeEncodeError as error:
        raise not_unicode("hash_algo='sha256_cbor'", error) from None


def make_page_hasher(
    hash_algo: HashAlgorithm, page_size: int, hash_seed: int | str | bytes | None, hash_lookahead: int = 0
) -> PageHasher:
    """Return the hasher for an algorithm's name or a callable. Raise ArgumentError for an unknown name, and for a
    `hash_lookahead` out of range.
    """
    hash_lookahead = require_int("hash_lookahead", hash_lookahead, 0, MAX_LOOKAHEAD)
    hasher = _find_hasher(hash_algo)
    if hasher is None:
        return CallableHasher(page_size, hash_seed, hash_lookahead, hash_algo)  # type: ignore[arg-type]  # it is callable
    return hasher(page_size, hash_seed, hash_lookahead)


def _find_hasher(hash_algo: HashAlgorithm) -> type[PageHasher] | None:
    """Return the class for an algorithm's name, None for a callable. Raise ArgumentError for anything else."""
    if callable(hash_algo):
        return None
    for hasher in (PageHasher, Sha256Hasher, VllmHasher):
        if isinstance(hash_algo, str) and hash_algo == hasher.algorithm:
            return hasher
    raise ArgumentError(f"hash_algo: got {shown(hash_algo)}, allowed: 'siphash128', 'sha256', 'sha256_cbor' or a callable")
