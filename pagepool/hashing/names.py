"""Page hashes that differ from their keys in the prefix index."""

import os
from collections.abc import Iterable

from pagepool.forking import NAMES, make_lock
from pagepool.hashing.page_hash import PageHash, checked_hash

__all__ = ["MAX_KEY", "HashNames"]

MAX_KEY = (1 << 128) - 1


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
