"""Hashes of pages: seeds, hashes that differ from their keys in the prefix index, and hash functions in Python.

The hash of a page covers everything before it: ``hash(parent hash, tokens of the page, extra keys)``. Equal hashes mean equal
contents from the first token on, so two requests can share the page.

The manager's default algorithm, SipHash-2-4-128, runs in the compiled core, with the secret key of `get_siphash_key`.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

from pagepool.arguments import as_list, read, require_int, require_short, require_slice
from pagepool.errors import ArgumentError, ArgumentTypeError, not_unicode, shown
from pagepool.hashing.extra_keys import (
    LORA,
    REQUEST_NAMES,
    ExtraKeyNames,
    ExtraKeys,
    RecentKeys,
    RequestExtraKeys,
    VllmExtraKeys,
    encode_extra_keys,
    list_features,
)
from pagepool.process_forks import ProcessLock

__all__ = [
    "LORA",
    "MAX_KEY",
    "NONE_HASH",
    "REQUEST_NAMES",
    "ExtraKeyNames",
    "ExtraKeys",
    "HashFunction",
    "HashNames",
    "KeyHolder",
    "PageHash",
    "PageHashWithGroupId",
    "RecentKeys",
    "RequestExtraKeys",
    "VllmExtraKeys",
    "checked_hash",
    "encode_extra_keys",
    "get_hash_seed",
    "get_siphash_key",
    "hash_next_pages",
    "hash_page_tokens",
    "hash_request_tokens",
    "init_none_hash",
    "list_features",
]

MAX_KEY = (1 << 128) - 1
"""Largest key of the prefix index, unless its pool keeps digests of 256 bits."""

HashFunction = Callable[[Any], int]
"""Function from ``(parent hash, token ids, extra keys)`` to an int, such as the builtin `hash`."""

NONE_HASH: int = 0
"""Parent hash of first pages for callable hash functions. Set by `init_none_hash`."""

_PROCESS_SECRET = os.urandom(32)


def get_hash_seed(hash_seed: int | str | bytes | None = None) -> bytes | None:
    """Return the seed as bytes: `hash_seed` if given, otherwise a seed in ``PYTHONHASHSEED``, otherwise None.

    Raise ArgumentError for an empty `hash_seed`: anyone could derive its key. An empty ``PYTHONHASHSEED`` means no seed, as in
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
        raise not_unicode("hash_seed", error) from None


def get_siphash_key(hash_seed: int | str | bytes | None = None) -> bytes:
    """Return the 16-byte SipHash key: from the seed if there is one, otherwise from the secret of the process.

    >>> get_siphash_key(1) == get_siphash_key(1) != get_siphash_key(2)
    True
    """
    seed = get_hash_seed(hash_seed)
    source = _PROCESS_SECRET if seed is None else b"seed " + seed
    return hashlib.sha256(b"pagepool siphash key " + source).digest()[:16]


def init_none_hash() -> None:
    """Set `NONE_HASH` from ``PYTHONHASHSEED`` if it is set, otherwise from the secret of the process.

    Existing hashes stay valid unless the environment has changed.
    """
    global NONE_HASH
    seed = get_hash_seed()
    source = _PROCESS_SECRET if seed is None else hashlib.sha256(b"pagepool none hash " + seed).digest()
    NONE_HASH = int.from_bytes(source[:8], "little") >> 1


init_none_hash()


class KeyHolder:
    """Base of objects with the secret key of the hashes. They cannot be pickled or copied."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        """Raise ArgumentTypeError."""
        raise ArgumentTypeError(f"a {type(self).__name__} holds a secret key and cannot be pickled or copied")


class PageHash(NamedTuple):
    """The hash of a full page.

    ``hash_value`` is the int from the hash function. ``token_ids`` are the page's tokens, or empty if only the digest is kept
    (the manager's own algorithms, unless events are enabled). ``extra_keys`` are the page's extra keys or None.
    """

    hash_value: int
    token_ids: tuple[int, ...]
    extra_keys: Any | None = None


def checked_hash(page_hash: Any) -> PageHash:
    """Return a page hash with a Python int as its value. `page_hash` may be an engine's own named tuple with `hash_value` and
    `token_ids`. Raise ArgumentTypeError unless it is a hashable tuple with these names, ArgumentError if the value is too
    large to convert to text.
    """
    if type(page_hash) is PageHash and len(page_hash) == 3:  # the usual case, a plain digest, needs no more checks
        value, token_ids, extra_keys = page_hash
        if type(value) is int and 0 <= value < 1 << 256 and type(token_ids) is tuple and not token_ids and extra_keys is None:
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
        raise ArgumentTypeError(f"page_hash: got one that cannot be hashed ({error}), allowed: hashable values") from None
    checked: PageHash = page_hash if value is page_hash.hash_value else page_hash._replace(hash_value=value)
    return checked


class PageHashWithGroupId(NamedTuple):
    """A page hash in one cache group. Groups have different layers, so equal tokens need one page per group."""

    page_hash: PageHash
    group_id: int

    def get_hash_value(self) -> int:
        """Return the int in the page hash."""
        return self.page_hash.hash_value


class HashNames:
    """The names of keys in the prefix index: the `PageHash` of each 128-bit key, unless the key is the hash value itself.

    Keys of natively hashed pages are their hash values, up to ``max_key``, and need no name. A hash may name several keys if a
    weak hash function gives different prefixes the same value.
    """

    __slots__ = ("_hash_of_key", "_keys_of_hash", "_lock_and_process", "max_key")

    _lock = ProcessLock("PagePool")

    def __init__(self) -> None:
        """Start without names."""
        self._lock = threading.RLock()
        self.max_key = MAX_KEY
        self._hash_of_key: dict[int, PageHash] = {}
        self._keys_of_hash: dict[PageHash, list[int]] = {}

    def __len__(self) -> int:
        """Return the number of named keys."""
        return len(self._hash_of_key)

    def add(self, key: int, page_hash: PageHash) -> None:
        """Name `key` after `page_hash`. O(1)."""
        with self._lock:
            if key not in self._hash_of_key:
                self._hash_of_key[key] = page_hash
                named = self._keys_of_hash.get(page_hash)
                if named is None:
                    self._keys_of_hash[page_hash] = [key]  # readers without the lock must never see an empty list
                else:
                    named.append(key)

    def hash_of(self, key: int) -> PageHash | None:
        """Return the name of `key`, or None if the key is the hash value."""
        return self._hash_of_key.get(key)

    def keys_of(self, page_hash: PageHash) -> list[int]:
        """Return the possible keys of `page_hash`, oldest first; none if it cannot be cached."""
        named = self._keys_of_hash.get(page_hash)
        if named is not None:
            return named
        return [page_hash.hash_value] if 0 <= page_hash.hash_value <= self.max_key else []

    def key_of(self, page_hash: PageHash) -> int:
        """Return the key for a page with `page_hash`. A hash with tokens gets a new random key, named after it."""
        page_hash = checked_hash(page_hash)
        named = self._keys_of_hash.get(page_hash)
        if named is not None:
            return named[0]
        if not page_hash.token_ids and page_hash.extra_keys is None and 0 <= page_hash.hash_value <= self.max_key:
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


def hash_page_tokens(
    hash_function: HashFunction, parent_page_hash: int | None, curr_page_token_ids: Sequence[int], extra_keys: Any | None = None
) -> PageHash:
    """Hash one full page: ``hash_function((parent or NONE_HASH, tuple of tokens, extra_keys))``.

    `parent_page_hash` is the ``hash_value`` of the preceding page, None for a first page. O(tokens).

    >>> hash_page_tokens(lambda content: len(content[1]), None, [5, 6, 7])
    PageHash(hash_value=3, token_ids=(5, 6, 7), extra_keys=None)
    """
    parent = NONE_HASH if parent_page_hash is None else parent_page_hash
    token_ids = tuple(as_list("curr_page_token_ids", curr_page_token_ids, "a sequence of ints"))
    return PageHash(hash_function((parent, token_ids, extra_keys)), token_ids, extra_keys)


def hash_request_tokens(hash_function: HashFunction, page_size: int, request: Any) -> list[PageHash]:
    """Hash every full page of ``request.all_token_ids``, each with the preceding page as its parent. O(tokens).

    A request with ``has_vision`` and without features gets different hashes in each call, as does one with other contents that
    cannot be compared.
    """
    return hash_next_pages(hash_function, require_int("page_size", page_size, 1), request, [], None)


def hash_next_pages(
    hash_function: HashFunction, page_size: int, request: Any, page_hashes: Sequence[PageHash], num_pages: int | None
) -> list[PageHash]:
    """Return the hashes of a request's pages after those in `page_hashes`, up to `num_pages` pages; None: all full pages."""
    all_token_ids = read(request, "all_token_ids")
    extra_keys = RequestExtraKeys.of(request)
    parent = checked_hash(page_hashes[-1]).hash_value if page_hashes else None
    num_tokens = (len(all_token_ids) // page_size if num_pages is None else num_pages) * page_size
    new_hashes: list[PageHash] = []
    for start in range(len(page_hashes) * page_size, num_tokens, page_size):
        token_ids = require_slice("all_token_ids", all_token_ids, start, start + page_size)
        if len(token_ids) != page_size:
            name = f"request {shown(getattr(request, 'request_id', None))}"
            allowed = f"{shown(page_size)}, a full page"
            raise ArgumentError(f"{name}: got {len(token_ids)} tokens from {shown(start)} on, allowed: {allowed}")
        page_extra_keys = extra_keys.of_page(start, start + page_size) if extra_keys else None
        new_hashes.append(hash_page_tokens(hash_function, parent, token_ids, page_extra_keys))
        parent = new_hashes[-1].hash_value
    return new_hashes
