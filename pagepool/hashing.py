"""Tokens and parent to page hash: the named tuples, the seeds, the extra keys and the hash functions in Python.

A page is known by the chain of everything before it: ``hash(parent hash, tokens of the page, extra keys)``. Equal hashes
mean equal contents from the first token on, which is what lets two requests share a page. Extra keys are what is not in the
tokens but changes the keys and values all the same: a LoRA adapter, an image, a tenant's salt.

The manager's default algorithm, SipHash-2-4-128, runs in the compiled core; this module gives it its secret key.
"""

import hashlib
import os
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple, NoReturn, Self

from pagepool.arguments import MAX_SIZE, refuse_incomplete, require_int, require_short
from pagepool.errors import ArgumentError, ArgumentTypeError, shown
from pagepool.forking import NAMES, make_lock

HashFunction = Callable[[Any], int]
"""Maps ``(parent hash, token ids, extra keys)`` to an int; the builtin `hash` is one."""

ExtraKeys = tuple[tuple[Any, ...], ...]

LORA = "lora"
"""The first item of an adapter's key."""


class PageHash(NamedTuple):
    """What a full page is known by.

    ``hash_value`` is the int that the hash function gave. ``token_ids`` are the page's tokens, or empty where only the digest
    is kept (the manager's own algorithms, unless it was made with ``keep_token_ids=True``). ``extra_keys`` are the page's
    extra keys or None.
    """

    hash_value: int
    token_ids: tuple[int, ...]
    extra_keys: Any | None = None


def checked_hash(page_hash: PageHash) -> PageHash:
    """A page hash whose value is an int of Python's. ArgumentTypeError for what is no page hash, or cannot be a key of a dict,
    ArgumentError for a value that is too large to be written out.
    """
    if not isinstance(page_hash, PageHash):
        raise ArgumentTypeError(f"page_hash: got {type(page_hash).__name__}, allowed: PageHash")
    value = require_short("hash_value", require_int("hash_value", page_hash.hash_value))
    if not isinstance(page_hash.token_ids, tuple):
        raise ArgumentTypeError(f"token_ids: got {type(page_hash.token_ids).__name__}, allowed: a tuple of ints")
    try:
        hash(page_hash)
    except TypeError as error:
        raise ArgumentTypeError(f"page_hash: {error}, allowed: what can be a key of a dict") from None
    return page_hash if value is page_hash.hash_value else page_hash._replace(hash_value=value)


class PageHashWithGroupId(NamedTuple):
    """A page hash in one cache group: groups hold different layers, so equal tokens need a page in each."""

    page_hash: PageHash
    group_id: int

    def get_hash_value(self) -> int:
        """The int in the page hash."""
        return self.page_hash.hash_value


def get_hash_seed(hash_seed: int | str | bytes | None = None) -> bytes | None:
    """The seed as bytes: `hash_seed` where given, else ``PYTHONHASHSEED`` where it names one, else None.

    ArgumentError for an empty `hash_seed`, whose key everybody would know. An empty ``PYTHONHASHSEED`` names none, as for
    Python itself.

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
        raise ArgumentError(f"hash_seed: got text that is no Unicode: {error}") from None


class KeyHolder:
    """Base of objects that lead to the secret key of the hashes: they cannot be pickled or copied."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        """ArgumentTypeError."""
        raise ArgumentTypeError(f"a {type(self).__name__} holds a secret key and cannot be pickled or copied")


_PROCESS_SECRET = os.urandom(32)

NONE_HASH: int = 0
"""Parent hash of a first page for hash functions that are callables. Set by `init_none_hash`."""


def init_none_hash() -> None:
    """Set `NONE_HASH` anew: from ``PYTHONHASHSEED`` where it is set, else from the process's secret.

    Calling it again changes nothing unless the environment changed, so hashes made before stay valid.
    """
    global NONE_HASH
    seed = get_hash_seed()
    source = _PROCESS_SECRET if seed is None else hashlib.sha256(b"pagepool none hash " + seed).digest()
    NONE_HASH = int.from_bytes(source[:8], "little") >> 1


init_none_hash()


def get_siphash_key(hash_seed: int | str | bytes | None = None) -> bytes:
    """The 16-byte SipHash key: from the seed if there is one, else secret and random for each process.

    >>> get_siphash_key(1) == get_siphash_key(1) != get_siphash_key(2)
    True
    """
    seed = get_hash_seed(hash_seed)
    source = _PROCESS_SECRET if seed is None else b"seed " + seed
    return hashlib.sha256(b"pagepool siphash key " + source).digest()[:16]


def hash_page_tokens(
    hash_function: HashFunction,
    parent_page_hash: int | None,
    curr_page_token_ids: Sequence[int],
    extra_keys: Any | None = None,
) -> PageHash:
    """Hash one full page: ``hash_function((parent or NONE_HASH, tuple of tokens, extra_keys))``.

    `parent_page_hash` is the ``hash_value`` of the page before, None for a first page. O(tokens).

    >>> hash_page_tokens(lambda content: len(content[1]), None, [5, 6, 7])
    PageHash(hash_value=3, token_ids=(5, 6, 7), extra_keys=None)
    """
    parent = NONE_HASH if parent_page_hash is None else parent_page_hash
    try:
        token_ids = tuple(curr_page_token_ids)
    except TypeError:
        kind = type(curr_page_token_ids).__name__
        raise ArgumentTypeError(f"curr_page_token_ids: got {kind}, allowed: a sequence of ints") from None
    return PageHash(hash_function((parent, token_ids, extra_keys)), token_ids, extra_keys)


def hash_request_tokens(hash_function: HashFunction, page_size: int, request: Any) -> list[PageHash]:
    """Hash every full page of ``request.all_token_ids``, each with the one before as its parent. O(tokens).

    Each call gives different hashes to a request that says ``has_vision`` and names no feature.
    """
    page_size = require_int("page_size", page_size, 1)
    try:
        token_ids = request.all_token_ids
    except AttributeError as error:
        refuse_incomplete(request, error)
        raise
    extra_keys = RequestExtraKeys.of(request)
    page_hashes: list[PageHash] = []
    parent: int | None = None
    for start in range(0, len(token_ids) - page_size + 1, page_size):
        page_extra_keys = extra_keys.of_page(start, start + page_size) if extra_keys else None
        page_hashes.append(hash_page_tokens(hash_function, parent, token_ids[start : start + page_size], page_extra_keys))
        parent = page_hashes[-1].hash_value
    return page_hashes


def sha256_page(parent: bytes, token_ids: Sequence[int], extra_keys: ExtraKeys | None) -> bytes:
    """SHA-256 of the parent's digest, the tokens as little-endian int32 and the encoded extra keys: 32 bytes.

    The same in every process and on every machine. Token ids outside int32 raise `ArgumentError`.
    """
    try:
        tokens = struct.pack(f"<{len(token_ids)}i", *token_ids)
    except struct.error as error:
        raise ArgumentError(f"token ids: {error}; allowed: ints that fit int32") from None
    return hashlib.sha256(parent + tokens + encode_extra_keys(extra_keys)).digest()


def sha256_cbor(content: Any) -> bytes:
    """SHA-256 of the canonical CBOR encoding of `content`, as vLLM's function of that name: 32 bytes.

    Needs the package cbor2 (the extra ``pagepool[cbor]``).
    """
    try:
        import cbor2
    except ImportError:
        raise ImportError("hash_algo='sha256_cbor' needs cbor2: pip install 'pagepool[cbor]'") from None
    try:
        return hashlib.sha256(cbor2.dumps(content, canonical=True)).digest()
    except UnicodeEncodeError as error:
        raise ArgumentError(f"hash_algo='sha256_cbor': got text that is no Unicode: {error}") from None


def encode_extra_keys(extra_keys: ExtraKeys | None) -> bytes:
    """Extra keys as bytes, different for different keys; empty for None."""
    return b"" if extra_keys is None else repr(extra_keys).encode()


FeatureRange = tuple[int, int, Any, Any]
"""Start, end, modality and content hash of a feature: a half-open range of tokens."""


MAX_SEARCHED_FEATURES = 8
"""Up to this number a search through all features is faster than one in a tree."""


class Features:
    """The features of a request, searched one by one."""

    __slots__ = ("_hash", "_ranges")

    def __init__(self, ranges: tuple[FeatureRange, ...]) -> None:
        """`ranges` in the request's order."""
        self._ranges = ranges
        self._hash = hash(ranges)

    def __eq__(self, other: object) -> bool:
        """The same features in the same order."""
        return isinstance(other, Features) and self._ranges == other._ranges

    def __hash__(self) -> int:
        """Worked out once."""
        return self._hash

    def find_next(self, start: int) -> int | None:
        """The first token from `start` on that is in a feature, or at which one of no tokens is; None behind the last."""
        return min([max(start, begin) for begin, end, _, _ in self._ranges if end > start], default=None)

    def find_overlapping(self, start: int, stop: int) -> list[FeatureRange]:
        """Those that overlap ``[start, stop)``, one of no tokens within it included, in the request's order."""
        return [feature for feature in self._ranges if feature[0] < stop and start < feature[1]]


class SortedFeatures(Features):
    """Features sorted once by where they start.

    A look-up finds each of a page's features among n in O(log n). It searches a tree over the sorted features that holds the
    last end below each node; the children of node i are at 2 i and 2 i + 1.
    """

    __slots__ = ("_ends", "_last_ends", "_order", "_starts")

    def __init__(self, ranges: tuple[FeatureRange, ...]) -> None:
        """O(n log n)."""
        super().__init__(ranges)
        self._order = sorted(range(len(ranges)), key=lambda i: ranges[i][0])
        self._starts = [ranges[i][0] for i in self._order]
        ends = [ranges[i][1] for i in self._order]
        self._last_ends = list(accumulate(ends, max))
        num_leaves = 1 << (len(ends) - 1).bit_length()
        self._ends = [0] * num_leaves + ends + [0] * (num_leaves - len(ends))
        for i in range(num_leaves - 1, 0, -1):
            self._ends[i] = max(self._ends[2 * i], self._ends[2 * i + 1])

    def find_next(self, start: int) -> int | None:
        """O(log n)."""
        num = bisect_right(self._starts, start)
        if num and self._last_ends[num - 1] > start:
            return start
        return self._starts[num] if num < len(self._starts) else None

    def find_overlapping(self, start: int, stop: int) -> list[FeatureRange]:
        """O(log n), and as much for each that is found."""
        found: list[int] = []
        num_leaves = len(self._ends) // 2
        nodes = self._list_nodes(bisect_left(self._starts, stop), num_leaves)
        while nodes:
            node = nodes.pop()
            if self._ends[node] <= start:
                continue
            if node < num_leaves:
                nodes += (2 * node, 2 * node + 1)
            else:
                found.append(self._order[node - num_leaves])
        return [self._ranges[i] for i in sorted(found)]

    @staticmethod
    def _list_nodes(num: int, num_leaves: int) -> list[int]:
        """The largest nodes that have only the first `num` leaves below them, and together all of these."""
        nodes = []
        while num:
            num_below = num & -num
            num -= num_below
            nodes.append((num_leaves + num) // num_below)
        return nodes


NO_FEATURES = Features(())


def _make_features(ranges: tuple[FeatureRange, ...]) -> Features:
    if not ranges:
        return NO_FEATURES
    return SortedFeatures(ranges) if len(ranges) > MAX_SEARCHED_FEATURES else Features(ranges)


@dataclass(frozen=True, slots=True)
class RequestExtraKeys:
    """The extra keys of one request's pages.

    A ``cache_salt`` and a ``lora_id`` enter the first page; each multimodal feature enters the pages that it overlaps. The
    chain carries them to every later page. A feature is any object with ``mm_hash`` (or ``identifier``) and a position
    ``placeholder_range`` (or ``mm_position``) with ``offset`` and ``length`` in tokens; one without a position enters the
    first page. A request that says ``has_vision`` and names no feature has a nonce in its first page, a fresh one each time
    that `of` is called: only hashes made with the same `RequestExtraKeys` share pages. ``request_keys`` are those that are not
    features.
    """

    SALT: ClassVar[str] = "salt"
    FEATURE_NAMES: ClassVar[tuple[str, ...]] = ("mm_hash", "identifier")
    TOLD_OF_FEATURE: ClassVar[slice] = slice(2, 4)

    request_keys: ExtraKeys
    features: Features

    @classmethod
    def of(cls, request: Any) -> Self | None:
        """The extra keys of `request`, or None where it has none. O(features x log features)."""
        lora_id, salt = getattr(request, "lora_id", None), getattr(request, "cache_salt", None)
        keys = [] if lora_id is None else [_lora_key(lora_id)]
        keys += [] if salt is None else [(cls.SALT, _plain("salt", salt))]
        mm_features = list_features(getattr(request, "mm_features", None))
        if not mm_features and getattr(request, "has_vision", False):
            keys.append(("vision", os.urandom(16).hex()))
        ranges = tuple(_feature_range(feature, cls.FEATURE_NAMES) for feature in mm_features)
        return cls(tuple(keys), _make_features(ranges)) if keys or ranges else None

    def of_page(self, start: int, end: int) -> ExtraKeys | None:
        """Keys of the page with tokens ``[start, end)``, or None. Offsets are relative to the page."""
        first: ExtraKeys = self.request_keys if start == 0 else ()
        return (*first, *self._feature_keys(start, end)) or None

    def _feature_keys(self, start: int, end: int) -> ExtraKeys:
        return tuple(
            ("mm", modality, content_hash, feature_start - start, feature_end - feature_start)
            for feature_start, feature_end, modality, content_hash in self.features.find_overlapping(start, end)
        )

    def find_keyed_page(self, start_page: int, page_size: int) -> tuple[int | None, ExtraKeys | None]:
        """The next page from `start_page` on that may have keys, and the keys; None where there is none. O(log features), and
        as much for each feature of the page.
        """
        page = self.find_next_page(start_page * page_size, page_size)
        return page, None if page is None else self.of_page(page * page_size, (page + 1) * page_size)

    def find_next_page(self, start: int, page_size: int) -> int | None:
        """Index of the first page at or after token `start` (a page boundary) that has keys, or None."""
        if start == 0 and self.request_keys:
            return 0
        token = self.features.find_next(start)
        return None if token is None else token // page_size

    def without_tags(self, keys: ExtraKeys) -> list[Any]:
        """What events tell of a page's keys, in vLLM's order: LoRA, features as ``(hash, offset)``, then what is left."""
        in_order = sorted(keys, key=lambda key: (LORA, "mm").index(key[0]) if key[0] in (LORA, "mm") else 2)
        return [key[self.TOLD_OF_FEATURE] if key[0] == "mm" else key[1] for key in in_order]


@dataclass(frozen=True, slots=True)
class VllmExtraKeys(RequestExtraKeys):
    """The same in vLLM's order and form: LoRA in every page, features by name and offset, the salt in the first page.

    Features have to come in the order of their offsets and not to overlap, as vLLM's do.
    """

    SALT: ClassVar[str] = "cache_salt"
    FEATURE_NAMES: ClassVar[tuple[str, ...]] = ("identifier", "mm_hash")
    TOLD_OF_FEATURE: ClassVar[slice] = slice(1, 3)

    def of_page(self, start: int, end: int) -> ExtraKeys | None:
        """Keys of the page with tokens ``[start, end)``, or None."""
        lora = [key for key in self.request_keys if key[0] == LORA]
        first = [key for key in self.request_keys if key[0] != LORA and start == 0]
        return (*lora, *self._feature_keys(start, end), *first) or None

    def _feature_keys(self, start: int, end: int) -> ExtraKeys:
        whole = RequestExtraKeys._feature_keys(self, start, end)
        return tuple(("mm", content_hash, offset) for _, _, content_hash, offset, _ in whole)

    def find_next_page(self, start: int, page_size: int) -> int | None:
        """That page itself where there is an adapter."""
        if any(key[0] == LORA for key in self.request_keys):
            return start // page_size
        return RequestExtraKeys.find_next_page(self, start, page_size)


def list_features(mm_features: Any) -> tuple[Any, ...]:
    """Features as a tuple; ArgumentTypeError for what is no sequence, and no None."""
    try:
        return () if mm_features is None else tuple(mm_features)
    except (TypeError, ValueError):
        raise ArgumentTypeError(f"mm_features: got {type(mm_features).__name__}, allowed: a sequence, or None") from None


def _feature_range(feature: Any, names: Sequence[str]) -> FeatureRange:
    """Where one multimodal feature is, and what. The hash is the first of `names` that it has."""
    content_hash = next((value for name in names if (value := getattr(feature, name, None)) is not None), None)
    if content_hash is None:
        raise ArgumentError(f"mm_features: {shown(feature)} has neither mm_hash nor identifier")
    position = getattr(feature, "placeholder_range", None)
    if position is None:
        position = getattr(feature, "mm_position", None)
    start, end = 0, 1
    if position is not None:
        if not (hasattr(position, "offset") and hasattr(position, "length")):
            kind = type(position).__name__
            raise ArgumentTypeError(f"mm_features: got {kind} as a position, allowed: an object with offset and length")
        start = require_int("mm_features: offset", position.offset, 0, MAX_SIZE)
        end = start + require_int("mm_features: length", position.length, 0, MAX_SIZE)
    return start, end, _text("mm_features: modality", getattr(feature, "modality", "mm")), _plain("mm_hash", content_hash)


def _text(name: str, value: object) -> str:
    try:
        return str(require_short(name, value))
    except ValueError:  # of an int within it
        raise ArgumentError(f"{name}: got {shown(value)}, allowed: a name") from None


def _lora_key(lora_id: Any) -> tuple[Any, ...]:
    """The adapter's key: its number or name, or its name and path."""
    if type(lora_id) is not tuple:
        return LORA, _plain("lora_id", lora_id)
    if len(lora_id) != 2:
        raise ArgumentError(f"lora_id: got a tuple of {len(lora_id)}, allowed: a pair of name and path")
    return LORA, *[_plain("lora_id", part) for part in lora_id]


def _plain(name: str, value: Any) -> int | str | bytes:
    """`value` if its repr tells it from every other value."""
    if type(value) not in (int, str, bytes):
        raise ArgumentTypeError(f"{name}: got {type(value).__name__}, allowed: int, str or bytes")
    checked: int | str | bytes = require_short(name, value)
    return checked


MAX_KEY = (1 << 128) - 1


class HashNames:
    """Which `PageHash` stands for which 128-bit key of the prefix index, where the key is not simply the hash value.

    Pages that the manager hashes natively have keys that are their hash values, and nothing is stored for them. One hash may
    stand for several keys, when a weak hash function gives different prefixes the same value.
    """

    __slots__ = ("__weakref__", "_hash_of_key", "_keys_of_hash", "_lock")

    def __init__(self) -> None:
        """No names yet."""
        self._lock = make_lock(self, "_lock", NAMES)
        self._hash_of_key: dict[int, PageHash] = {}
        self._keys_of_hash: dict[PageHash, list[int]] = {}

    def __len__(self) -> int:
        """Number of keys with a name."""
        return len(self._hash_of_key)

    def add(self, key: int, page_hash: PageHash) -> None:
        """Let `page_hash` stand for `key`. O(1)."""
        with self._lock:
            if key not in self._hash_of_key:
                self._hash_of_key[key] = page_hash
                self._keys_of_hash.setdefault(page_hash, []).append(key)

    def items(self) -> Iterable[tuple[int, PageHash]]:
        """Keys and the hashes that stand for them, in the order in which they were named."""
        with self._lock:
            return list(self._hash_of_key.items())

    def hash_of(self, key: int) -> PageHash | None:
        """The hash that stands for `key`, or None where the key is the hash value."""
        return self._hash_of_key.get(key)

    def keys_of(self, page_hash: PageHash) -> list[int]:
        """The keys that `page_hash` may stand for, the first named first. Empty: it cannot be cached."""
        named = self._keys_of_hash.get(page_hash)
        if named is not None:
            return named
        return [page_hash.hash_value] if 0 <= page_hash.hash_value <= MAX_KEY else []

    def key_of(self, page_hash: PageHash) -> int:
        """The key to enter a page with `page_hash` under. One that carries tokens gets a fresh random key with it as name."""
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
        """Forget every name but those of `keys`. O(keys)."""
        with self._lock:
            kept = HashNames()
            for key in keys:
                if key in self._hash_of_key:
                    kept.add(key, self._hash_of_key[key])
            self._hash_of_key, self._keys_of_hash = kept._hash_of_key, kept._keys_of_hash  # others may read meanwhile
