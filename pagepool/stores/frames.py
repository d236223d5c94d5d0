"""The bytes of a stored page: a header of 64 bytes, then the row. Needs the extra ``pagepool[store]``.

| bytes | content |
|---|---|
| 0 to 7 | ``pagepool`` |
| 8 to 11 | version 2 |
| 12 to 23 | SHA-256 of the namespace, its first 96 bits |
| 24 to 47 | SHA-256 of the key, its first 192 bits |
| 48 to 55 | bytes of the row |
| 56 to 63 | XXH3-64 of the row, seeded with the last 64 bits of the key's SHA-256 XOR the last 64 bits of the namespace's |

Numbers are little-endian. The seed makes the check fail if an object's row follows another's header, wherever they were joined.
The checksum finds faults of disks, networks and programs. It does not stop an attacker, who can compute it too.
"""

import struct
from functools import lru_cache
from hashlib import sha256
from typing import Any

from pagepool.arguments import require_text
from pagepool.errors import ArgumentError, ArgumentTypeError

__all__ = ["HEADER_BYTES", "is_intact", "write_header"]

HEADER_BYTES = 64
"""Bytes before the row of an object."""

MAGIC = b"pagepool"
VERSION = 2
HEADER = struct.Struct("<8sI12s24sQQ")
DIGEST = struct.Struct("<24sQ")
"""A SHA-256 in two parts: for the header, and for the seed."""


def write_header(buffer: Any, namespace: str, key: bytes, row: Any) -> None:
    """Write the header of `row` into the first 64 bytes of `buffer`.

    Both are contiguous objects with the buffer protocol, `buffer` a writable one. Costs 11 us for each MiB of the row. Raise
    ArgumentTypeError for other objects, ArgumentError if `buffer` is too short, ImportError without the extra
    ``pagepool[store]``.

    >>> page = bytearray(HEADER_BYTES + 1024)
    >>> write_header(page, "llama", b"key", memoryview(page)[HEADER_BYTES:])
    >>> is_intact(page, "llama", b"key"), is_intact(page, "llama", b"another key")
    (True, False)
    """
    target, bytes_of_row = view_bytes("buffer", buffer, True), view_bytes("row", row)
    if len(target) < HEADER_BYTES:
        raise ArgumentError(f"buffer: got {len(target)} bytes, allowed: at least {HEADER_BYTES}")
    target[:HEADER_BYTES] = make_header(namespace, key, bytes_of_row)


def is_intact(stored: Any, namespace: str, key: bytes) -> bool:
    """Whether an object, with its header, is the one saved under this namespace and key, without a changed byte.

    `stored` is contiguous and has the buffer protocol. Costs 11 us for each MiB. Raise ArgumentTypeError for other objects,
    ImportError without the extra ``pagepool[store]``.
    """
    view = view_bytes("stored", stored)
    header = view[:HEADER_BYTES]
    return header[: len(MAGIC)] == MAGIC and header == make_header(namespace, key, view[HEADER_BYTES:])


def make_header(namespace: str, key: bytes, row: memoryview) -> bytes:
    """Return the header of a row."""
    require_text("namespace", namespace)
    if not isinstance(key, bytes):
        raise ArgumentTypeError(f"key: got {type(key).__name__}, allowed: bytes")
    of_namespace, namespace_seed = digest_namespace(namespace)
    of_key, key_seed = DIGEST.unpack(sha256(key).digest())
    checksum = import_xxhash().xxh3_64_intdigest(row, namespace_seed ^ key_seed)
    return HEADER.pack(MAGIC, VERSION, of_namespace, of_key, len(row), checksum)


@lru_cache(maxsize=64)
def digest_namespace(namespace: str) -> tuple[bytes, int]:
    """Return the first 96 bits of a namespace's SHA-256, and its last 64."""
    first, last = DIGEST.unpack(sha256(namespace.encode()).digest())
    return first[:12], last


def view_bytes(name: str, value: Any, is_writable: bool = False) -> memoryview:
    """Return the bytes of a buffer without a copy. Raise ArgumentTypeError for anything else."""
    try:
        view = memoryview(value).cast("B")
    except TypeError:
        raise ArgumentTypeError(f"{name}: got {type(value).__name__}, allowed: contiguous bytes") from None
    if is_writable and view.readonly:
        raise ArgumentTypeError(f"{name}: got read-only memory, allowed: writable memory")
    return view


@lru_cache(maxsize=1)
def import_xxhash() -> Any:
    """Return the package xxhash. Raise ImportError naming the extra."""
    try:
        import xxhash
    except ImportError as error:
        raise ImportError("checksums of stored pages need xxhash: pip install 'pagepool[store]'") from error
    return xxhash
