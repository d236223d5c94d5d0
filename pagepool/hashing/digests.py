"""The two SHA-256 digests of a page."""

import hashlib
import struct
from collections.abc import Sequence
from typing import Any

from pagepool.errors import ArgumentError
from pagepool.hashing.extra_keys import ExtraKeys, encode_extra_keys

__all__ = ["sha256_cbor", "sha256_page"]


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
