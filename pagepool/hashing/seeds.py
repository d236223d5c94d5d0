"""The secret of the process, and keys derived from it or from a seed."""

import hashlib
import os
from typing import NoReturn

from pagepool.arguments import require_short
from pagepool.errors import ArgumentError, ArgumentTypeError

__all__ = ["KeyHolder", "get_hash_seed", "get_none_hash", "get_siphash_key"]

_PROCESS_SECRET = os.urandom(32)


def get_hash_seed(hash_seed: int | str | bytes | None = None) -> bytes | None:
    """Return the seed as bytes: `hash_seed` if given, else ``PYTHONHASHSEED`` if it names one, else None.

    ArgumentError for an empty `hash_seed`, whose key anyone could derive. An empty ``PYTHONHASHSEED`` names no seed, as in
    Python.

    >>> get_hash_seed(7)
    b'7'
    """
    if hash_seed is None:
        hash_seed = os.environ.get("PYTHONHASHSEED", "random")
        if hash_seed in ("", "random"):
            return None
    if isinstance(hash_seed, str | bytes) and not hash_seed:
        raise ArgumentError(f"hash_seed: got {hash_seed!r}, allowed: int, str or bytes that are not empty, or None")
    if isinstance(hash_seed, bytes):
        return hash_seed
    if isinstance(hash_seed, bool) or not isinstance(hash_seed, int | str):
        raise ArgumentTypeError(f"hash_seed: got {type(hash_seed).__name__}, allowed: int, str, bytes or None")
    try:
        return str(require_short("hash_seed", hash_seed)).encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(f"hash_seed: got text that is not valid Unicode: {error}") from None


def get_siphash_key(hash_seed: int | str | bytes | None = None) -> bytes:
    """Return the 16-byte SipHash key: from the seed if there is one, else from the secret of the process.

    >>> get_siphash_key(1) == get_siphash_key(1) != get_siphash_key(2)
    True
    """
    seed = get_hash_seed(hash_seed)
    source = _PROCESS_SECRET if seed is None else b"seed " + seed
    return hashlib.sha256(b"pagepool siphash key " + source).digest()[:16]


def get_none_hash() -> int:
    """Return the parent hash of first pages: from ``PYTHONHASHSEED`` if it is set, else from the secret of the process."""
    seed = get_hash_seed()
    source = _PROCESS_SECRET if seed is None else hashlib.sha256(b"pagepool none hash " + seed).digest()
    return int.from_bytes(source[:8], "little") >> 1


class KeyHolder:
    """Base of objects that reference the secret key of the hashes. They cannot be pickled or copied."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        """Raise ArgumentTypeError."""
        raise ArgumentTypeError(f"a {type(self).__name__} holds a secret key and cannot be pickled or copied")
