"""The algorithms that hash pages: SipHash in the core, SHA-256 in two forms, and any callable."""

import hashlib
import os
import struct
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from pagepool._core import PageIds, RequestHashes
from pagepool.errors import ArgumentError, shown
from pagepool.hashing import (
    MAX_KEY,
    ExtraKeys,
    HashFunction,
    PageHash,
    VllmExtraKeys,
    encode_extra_keys,
    get_hash_seed,
    hash_page_tokens,
)
from pagepool.hashing.request_hashes import PageHasher
from pagepool.request import TokenIds

__all__ = ["HashAlgorithm", "make_page_hasher", "sha256_cbor", "sha256_page"]

HashAlgorithm = str | HashFunction
"""``"siphash128"``, ``"sha256"``, ``"sha256_cbor"``, or a callable as `pagepool.hash_page_tokens` takes it."""

VLLM_SEED = "vllm-none-hash"
"""The seed of vLLM 0.33 for the parent of first pages if no seed is set."""


class SipHasher(PageHasher):
    """SipHash-2-4-128 in the compiled core: the key of the index is the hash."""

    algorithm = "siphash128"

    @property
    def native_key(self) -> bytes | None:
        """The key of the chain."""
        return self._key

    def hash_pages(self, hashes: RequestHashes, token_ids: TokenIds | PageIds, extra_keys: ExtraKeys | None) -> None:
        """Hash all pages in one native call."""
        hashes.chain.extend(token_ids, encode_extra_keys(extra_keys))

    def list_page_hashes(self, hashes: RequestHashes) -> list[PageHash]:
        """Make the objects from the chain."""
        chain = hashes.chain
        return [PageHash(chain[i], chain.page_token_ids(i)) for i in range(len(chain))]


class PythonHasher(PageHasher):
    """Base of algorithms that hash page by page in Python."""

    def hash_pages(self, hashes: RequestHashes, token_ids: TokenIds | PageIds, extra_keys: ExtraKeys | None) -> None:
        """Hash page by page, each from the preceding hash."""
        tokens = token_ids.to_list() if isinstance(token_ids, PageIds) else [int(token_id) for token_id in token_ids]
        for start in range(0, len(tokens), self.page_size):
            self.hash_page(hashes, tokens[start : start + self.page_size], extra_keys if start == 0 else None)

    @abstractmethod
    def hash_page(self, hashes: RequestHashes, token_ids: list[int], extra_keys: ExtraKeys | None) -> None:
        """Append the key and the hash of one page."""


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
        """Return the parent of first pages. The SipHash key is not used."""
        return self._root

    def hash_page(self, hashes: RequestHashes, token_ids: list[int], extra_keys: ExtraKeys | None) -> None:
        """Append one digest."""
        parent = hashes.page_hashes[-1].hash_value.to_bytes(32, "big") if hashes.page_hashes else self._root
        digest = self._hash_page_bytes(parent, token_ids, extra_keys)
        kept = tuple(token_ids) if self.keep_token_ids else ()
        hash_value = int.from_bytes(digest, "big")
        hashes.chain.append_key(hash_value & MAX_KEY, kept)
        hashes.page_hashes.append(PageHash(hash_value, kept))


class VllmHasher(Sha256Hasher):
    """vLLM's ``sha256_cbor``: parent, tokens and extra keys in CBOR. docs/engines.md lists the identical parts."""

    extra_keys = VllmExtraKeys
    algorithm = "sha256_cbor"

    def __init__(self, page_size: int, hash_seed: int | str | bytes | None) -> None:
        """The root is the hash of the seed as a string."""
        super().__init__(page_size, hash_seed, sha256_cbor(_vllm_seed(hash_seed)), _sha256_cbor_page)


class CallableHasher(PythonHasher):
    """Any callable. Users see its values; the key of the index is a SipHash chain over the same contents, so that prompts which
    collide under a weak callable never share a page.
    """

    def __init__(self, page_size: int, hash_seed: int | str | bytes | None, hash_function: HashFunction) -> None:
        """`hash_function` takes ``(parent hash, token ids, extra keys)``."""
        super().__init__(page_size, hash_seed)
        self._hash_function = hash_function
        name = getattr(hash_function, "__qualname__", type(hash_function).__qualname__)
        self.algorithm = f"callable {getattr(hash_function, '__module__', None)}.{name}"

    def hash_page(self, hashes: RequestHashes, token_ids: list[int], extra_keys: ExtraKeys | None) -> None:
        """Call the callable, and append one native digest."""
        parent = hashes.page_hashes[-1].hash_value if hashes.page_hashes else None
        page_hash = hash_page_tokens(self._hash_function, parent, token_ids, extra_keys)
        hashes.chain.extend(token_ids, encode_extra_keys(extra_keys))
        hashes.page_hashes.append(page_hash)


def sha256_page(parent: bytes, token_ids: Sequence[int], extra_keys: ExtraKeys | None) -> bytes:
    """Return SHA-256 of the parent's digest, the tokens as little-endian int32 and the encoded extra keys: 32 bytes.

    It is the same in every process and on every machine. ArgumentError for token ids outside int32.
    """
    try:
        tokens = struct.pack(f"<{len(token_ids)}i", *token_ids)
    except struct.error as error:
        raise ArgumentError(f"token ids: {error}; allowed: ints that fit int32") from None
    return hashlib.sha256(parent + tokens + encode_extra_keys(extra_keys)).digest()


def sha256_cbor(content: Any) -> bytes:
    """Return SHA-256 of the canonical CBOR encoding of `content`, like vLLM's function of that name: 32 bytes.

    Needs the package cbor2 (the extra ``pagepool[events]``).
    """
    try:
        import cbor2
    except ImportError:
        raise ImportError("hash_algo='sha256_cbor' needs cbor2: pip install 'pagepool[events]'") from None
    try:
        return hashlib.sha256(cbor2.dumps(content, canonical=True)).digest()
    except UnicodeEncodeError as error:
        raise ArgumentError(f"hash_algo='sha256_cbor': got text that is not valid Unicode: {error}") from None


def _sha256_cbor_page(parent: bytes, token_ids: Sequence[int], extra_keys: ExtraKeys | None) -> bytes:
    return sha256_cbor((parent, tuple(token_ids), extra_keys))


def make_page_hasher(hash_algo: HashAlgorithm, page_size: int, hash_seed: int | str | bytes | None) -> PageHasher:
    """Return the hasher for an algorithm's name or a callable. ArgumentError for an unknown name."""
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
    """Return zeros unless a seed is given: the same in every process."""
    return bytes(32) if hash_seed is None else sha256_page(b"root", (), (("seed", get_hash_seed(hash_seed)),))


def _vllm_seed(hash_seed: int | str | bytes | None) -> str:
    """Return `hash_seed` if given, else the seed of vLLM: any ``PYTHONHASHSEED`` that is set, or `VLLM_SEED`."""
    if hash_seed is None:
        return os.environ.get("PYTHONHASHSEED", VLLM_SEED)
    try:
        return (get_hash_seed(hash_seed) or b"").decode()
    except UnicodeDecodeError as error:
        raise ArgumentError(f"hash_seed: {error}; allowed with hash_algo='sha256_cbor': text, as str or UTF-8") from None
