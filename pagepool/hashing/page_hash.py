"""The hash that identifies a page, and the names of pages whose hash differs from their key in the prefix index."""

import os
from collections.abc import Iterable
from typing import Any, NamedTuple

from pagepool.arguments import require_int, require_short
from pagepool.errors import ArgumentTypeError
from pagepool.forking import NAMES, make_lock

__all__ = ["MAX_KEY", "HashNames", "PageHash", "PageHashWithGroupId", "checked_hash"]

MAX_KEY = (1 << 128) - 1


class PageHash(NamedTuple):
    """The hash of a full page.

    ``hash_value`` is the int from the hash function. ``token_ids`` are the page's tokens, or empty if only the digest is kept
    (the manager's own algorithms without ``keep_token_ids=True``). ``extra_keys`` are the page's extra keys or None.
    """

    hash_value: int
    token_ids: tuple[int, ...]
    extra_keys: Any | None = None


def checked_hash(page_hash: Any) -> PageHash:
    """Return a page hash whose value is a Python int. It may be an engine's own named tuple with `hash_value` and `token_ids`.
    ArgumentTypeError unless it is such a tuple, and hashable; ArgumentError if the value is too large to convert to text.
    """
    if type(page_hash) is PageHash and len(page_hash) == 3:  # nearly always a plain digest, for which this is enough
        value, token_ids, extra_keys = page_hash
        if type(value) is int and 0 <= value < 1 << 128 and type(token_ids) is tuple and not token_ids and extra_keys is None:
            return page_hash
    is_named = hasattr(page_hash, "hash_value") and hasattr(page_hash, "token_ids")
    if not (is_named and tuple in type(page_hash).__mro__):
        raise ArgumentTypeError(f"page_hash: got {type(page_hash).__name__}, allowed: PageHash")
    value = require_short("hash_value", require_int("hash_value", page_hash.hash_value))
    if not isinstance(page_hash.token_ids, tuple):
        raise ArgumentTypeError(f"token_ids: got {type(page_hash.token_ids).__name__}, allowed: a tuple of ints")
    try:
        hash(page_hash)
    except TypeError as error:
        raise ArgumentTypeError(f"page_hash: {error}, allowed: hashable values") from None
    checked: PageHash = page_hash if value is page_hash.hash_value else page_hash._replace(hash_value=value)
    return checked


class PageHashWithGroupId(NamedTuple):
    """A page hash in one cache group. Groups have different layers, so equal tokens need a page in each."""

    page_hash: PageHash
    group_id: int

    def get_hash_value(self) -> int:
        """Return the int in the page hash."""
        return self.page_hash.hash_value


class HashNames:
    """Maps 128-bit keys of the prefix index to the `PageHash` that names them, where the key is not the hash value.

    The keys of natively hashed pages are their hash values and need no entry. One hash may name several keys, if a weak hash
    function gives different prefixes the same value.
    """

    __slots__ = ("__weakref__", "_hash_of_key", "_keys_of_hash", "_lock")

    def __init__(self) -> None:
        """Start without names."""
        self._lock = make_lock(self, "_lock", NAMES)
        self._hash_of_key: dict[int, PageHash] = {}
        self._keys_of_hash: dict[PageHash, list[int]] = {}

    def __len__(self) -> int:
        """Number of keys with a name."""
        return len(self._hash_of_key)

    def add(self, key: int, page_hash: PageHash) -> None:
        """Name `key` by `page_hash`. O(1)."""
        with self._lock:
            if key not in self._hash_of_key:
                self._hash_of_key[key] = page_hash
                named = self._keys_of_hash.get(page_hash)
                if named is None:
                    self._keys_of_hash[page_hash] = [key]  # at once: others read without the lock, and no list is empty
                else:
                    named.append(key)

    def items(self) -> Iterable[tuple[int, PageHash]]:
        """Return keys and their names, in the order in which they were added."""
        with self._lock:
            return list(self._hash_of_key.items())

    def hash_of(self, key: int) -> PageHash | None:
        """Return the name of `key`, or None if the key is the hash value."""
        return self._hash_of_key.get(key)

    def keys_of(self, page_hash: PageHash) -> list[int]:
        """Return the keys that `page_hash` may name, the oldest first. Empty if it cannot be cached."""
        named = self._keys_of_hash.get(page_hash)
        if named is not None:
            return named
        return [page_hash.hash_value] if 0 <= page_hash.hash_value <= MAX_KEY else []

    def key_of(self, page_hash: PageHash) -> int:
        """Return the key for a page with `page_hash`. A hash with tokens gets a new random key, and becomes its name."""
        page_hash = checked_hash(page_hash)
        named = self._keys_of_hash.get(page_hash)
        if named is not None:
            return named[0]
        if not page_hash.token_ids and page_hash.extra_keys is None and 0 <= page_hash.hash_value <= MAX_KEY:
            return page_hash.hash_value
        key = int.from_bytes(os.urandom(16), "little")
        self.add(key, page_hash)
        return key

    def keep_only(self, keys: Iterable[int]) -> None:
        """Drop all names except those of `keys`. O(keys)."""
        with self._lock:
            kept = HashNames()
            for key in keys:
                if key in self._hash_of_key:
                    kept.add(key, self._hash_of_key[key])
            self._hash_of_key, self._keys_of_hash = kept._hash_of_key, kept._keys_of_hash  # other threads may be reading
