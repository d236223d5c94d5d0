"""Extra keys: a LoRA adapter, an image, embeddings, a tenant's salt. They change keys and values, but are not in tokens."""

import hashlib
import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple, Self

from pagepool.arguments import MAX_SIZE, as_list, require_flag, require_int, require_short
from pagepool.errors import ArgumentError, ArgumentTypeError, shown
from pagepool.hashing.contents import has_unnamed_adapter, has_unnamed_media, may_have_contents, read_embeddings

ExtraKeys = tuple[tuple[Any, ...], ...]

LORA = "lora"
VISION = "vision"
EMBEDS = "prompt_embeds"
CROSS = "cross"
"""First items of extra keys: for an adapter, for a nonce, for embeddings, and for an encoder's output."""

FeatureRange = tuple[int, int, Any, Any]
"""Start, end, modality and content hash of a feature: a half-open range of tokens."""


class ExtraKeyNames(NamedTuple):
    """The caller's names for the attributes of a request, for error messages."""

    salt: str = "cache_salt"
    adapter: str = "lora_id"
    features: str = "mm_features"


REQUEST_NAMES = ExtraKeyNames()


class Features:
    """The features of a request. Finding each feature of a page takes O(log n).

    The search uses binary trees over the features, sorted by start. They hold the first start and the last end below each node;
    the children of node i are at 2 i and 2 i + 1.
    """

    __slots__ = ("_ends", "_first_starts", "_hash", "_last_ends", "_order", "_ranges", "_starts")

    def __init__(self, ranges: tuple[FeatureRange, ...]) -> None:
        """Build the trees for `ranges`, which are in the request's order. O(n log n)."""
        self._ranges, self._hash = ranges, hash(ranges)
        self._order = sorted(range(len(ranges)), key=lambda i: ranges[i][0])
        self._starts = [ranges[i][0] for i in self._order]
        ends = [ranges[i][1] for i in self._order]
        self._last_ends = list(accumulate(ends, max))
        num_leaves = 1 << (len(ends) - 1).bit_length()
        unused = [0] * (num_leaves - len(ends))
        self._first_starts = [0] * num_leaves + self._starts + unused
        self._ends = [0] * num_leaves + ends + unused
        for i in range(num_leaves - 1, 0, -1):
            self._first_starts[i] = self._first_starts[2 * i]
            self._ends[i] = max(self._ends[2 * i], self._ends[2 * i + 1])

    def __eq__(self, other: object) -> bool:
        """Whether both have the same features in the same order."""
        return isinstance(other, Features) and self._ranges == other._ranges

    def __hash__(self) -> int:
        """Return the hash, computed once."""
        return self._hash

    def find_next(self, start: int) -> int | None:
        """Return the first token from `start` on with a feature, even an empty one; None after the last feature. O(log n)."""
        num = bisect_right(self._starts, start)
        if num and self._last_ends[num - 1] > start:
            return start
        return self._starts[num] if num < len(self._starts) else None

    def find_overlapping(self, start: int, stop: int) -> list[FeatureRange]:
        """Return the features overlapping ``[start, stop)``, including empty ones within it, in the request's order.

        O(log n), and O(log n) for each feature found.
        """
        found, nodes, num_leaves = [], [1], len(self._ends) // 2
        while nodes:
            node = nodes.pop()
            if self._ends[node] <= start or self._first_starts[node] >= stop:
                continue
            if node < num_leaves:
                nodes += (2 * node, 2 * node + 1)
            else:
                found.append(self._order[node - num_leaves])
        return [self._ranges[i] for i in sorted(found)]


NO_FEATURES = Features(())


def encode_extra_keys(extra_keys: ExtraKeys | None) -> bytes:
    """Return extra keys as bytes, different for different keys; empty for None."""
    return b"" if extra_keys is None else repr(extra_keys).encode()


@dataclass(frozen=True, slots=True)
class RequestExtraKeys:
    """The extra keys of one request's pages.

    A ``cache_salt`` and a ``lora_id`` enter the first page; each multimodal feature enters the pages it overlaps. Since hashes
    are chained, they affect every later page. A feature is any object with ``mm_hash`` (or ``identifier``) and a position
    ``placeholder_range`` (or ``mm_position``) with ``offset`` and ``length`` in tokens; one without a position enters the first
    page. The ``cross_key`` of an encoder's output of ``num_encoder_tokens`` tokens enters the first page, too. A request with
    such tokens and no key, with ``has_vision``, or with media such as ``pixel_values``, and without features has a nonce in its
    first page, new for each call of `of`: only hashes made with the same `RequestExtraKeys` share pages. ``request_keys`` are
    all keys but those for parts of the prompt.

    Embeddings, such as ``prompt_embeds``, are compared by their bytes, type and shape. If there is a row for each of the first
    tokens, each page has a digest of its rows, and equal prefixes share pages; otherwise the first page has a digest of each
    value. Instead of bytes that cannot be read exactly, or lie on another device, it has a nonce.
    """

    SALT: ClassVar[str] = "salt"
    FEATURE_NAMES: ClassVar[tuple[str, ...]] = ("mm_hash", "identifier")
    FEATURE_IN_EVENTS: ClassVar[slice] = slice(2, 4)
    IN_ALL_PAGES: ClassVar[tuple[str, ...]] = ()

    request_keys: ExtraKeys
    features: Features
    embedded: tuple[bytes, ...] = ()
    """Digests of the embeddings of the first tokens."""

    @classmethod
    def of(cls, request: Any, names: ExtraKeyNames = REQUEST_NAMES) -> Self | None:
        """Return the extra keys of `request`, or None if it has none. O(features x log features + bytes of embeddings)."""
        lora_id, salt = getattr(request, "lora_id", None), getattr(request, "cache_salt", None)
        mm_features = list_features(getattr(request, "mm_features", None), names.features)
        num_encoder_tokens = getattr(request, "num_encoder_tokens", None)
        if num_encoder_tokens is not None:
            num_encoder_tokens = require_int("num_encoder_tokens", num_encoder_tokens, 0, MAX_SIZE)
        cross_key = getattr(request, "cross_key", None) if num_encoder_tokens else None
        has_vision = getattr(request, "has_vision", None)
        is_nameless = not mm_features and has_vision is not None and require_flag("has_vision", has_vision)
        is_nameless = is_nameless or (bool(num_encoder_tokens) and cross_key is None)
        embedded: tuple[bytes, ...] = ()
        whole: tuple[bytes, ...] = ()
        if may_have_contents(type(request)):
            embedded, whole, are_known = read_embeddings(request)
            is_nameless = is_nameless or not are_known or (not mm_features and has_unnamed_media(request))
            is_nameless = is_nameless or (lora_id is None and has_unnamed_adapter(request))
        if lora_id is salt is cross_key is None and not (mm_features or is_nameless or embedded or whole):
            return None
        keys = cls._name(lora_id, salt, names)
        keys += [] if cross_key is None else [(CROSS, _plain("cross_key", cross_key), num_encoder_tokens)]
        keys += [(VISION, os.urandom(16).hex())] if is_nameless else []
        keys += [(EMBEDS, digest) for digest in whole]
        ranges = tuple([_feature_range(names.features, feature, cls.FEATURE_NAMES) for feature in mm_features])
        return cls(tuple(keys), Features(ranges) if ranges else NO_FEATURES, embedded)

    @classmethod
    def _name(cls, lora_id: Any, salt: Any, names: ExtraKeyNames = REQUEST_NAMES) -> list[tuple[Any, ...]]:
        """Return the keys of an adapter and a salt; none for None."""
        keys = [] if lora_id is None else [_lora_key(names.adapter, lora_id)]
        return keys + ([] if salt is None else [(cls.SALT, _plain(names.salt, salt))])

    @classmethod
    def have_same_names(cls, request: Any, keys: Self | None) -> bool:
        """Whether a request still has the adapter and the salt in `keys`, which were read from it before. O(1)."""
        known = [] if keys is None else [key for key in keys.request_keys if key[0] in (LORA, cls.SALT)]
        return cls._name(getattr(request, "lora_id", None), getattr(request, "cache_salt", None)) == known

    @staticmethod
    def have_same_medium(request: Any, keys: "RequestExtraKeys | None") -> bool:
        """Whether a request still has the encoder's output in `keys`, which were read from it before. O(1)."""
        known = [] if keys is None else [key[1:] for key in keys.request_keys if key[0] == CROSS]
        num_tokens, cross_key = getattr(request, "num_encoder_tokens", None), getattr(request, "cross_key", None)
        return known == ([(cross_key, num_tokens)] if num_tokens and cross_key is not None else [])

    @property
    def has_nonce(self) -> bool:
        """Whether the request shares pages only with requests that have this very object."""
        return any(key[0] == VISION for key in self.request_keys)

    def name_contents(self) -> tuple[ExtraKeys, Features, tuple[bytes, ...]]:
        """Return all keys but the nonce, to compare requests that have a nonce."""
        return tuple([key for key in self.request_keys if key[0] != VISION]), self.features, self.embedded

    def of_page(self, start: int, end: int) -> ExtraKeys | None:
        """Return the keys of the page with tokens ``[start, end)``, or None. Offsets are relative to the page."""
        first: ExtraKeys = self.request_keys if start == 0 else ()
        return (*first, *self._feature_keys(start, end), *self._embedded_keys(start, end)) or None

    def _embedded_keys(self, start: int, end: int) -> ExtraKeys:
        rows = self.embedded[start:end]
        return ((EMBEDS, hashlib.sha256(b"".join(rows)).digest()),) if rows else ()

    def _find_part(self, start: int) -> int | None:
        """Return the first token from `start` on with a feature or an embedding; None if there is none. O(log features)."""
        return start if start < len(self.embedded) else self.features.find_next(start)

    def _feature_keys(self, start: int, end: int) -> ExtraKeys:
        return tuple(
            ("mm", modality, content_hash, feature_start - start, feature_end - feature_start)
            for feature_start, feature_end, modality, content_hash in self.features.find_overlapping(start, end)
        )

    def find_keyed_page(self, start_page: int, page_size: int, hash_lookahead: int = 0) -> tuple[int | None, ExtraKeys | None]:
        """Return the next page from `start_page` on that may have keys, and its keys; None if there is none. Features in the
        `hash_lookahead` tokens after a page count as features of the page.

        O(log features), and O(log features) for each feature of the page.
        """
        start = start_page * page_size
        # A list, since closing a generator could raise MemoryError where nobody can catch it.
        is_keyed = bool([key for key in self.request_keys if start == 0 or key[0] in self.IN_ALL_PAGES])
        token = start if is_keyed else self._find_part(start)
        if token is None:
            return None, None
        page = max(start_page, (token - hash_lookahead) // page_size)
        return page, self.of_page(page * page_size, (page + 1) * page_size + hash_lookahead)

    def list_keyed_pages(self, page_size: int, num_pages: int, hash_lookahead: int = 0) -> list[tuple[int | None, ExtraKeys]]:
        """Return the pages below `num_pages` that have keys of their own, with all their keys; at the end None and the keys of
        all other pages, if these have any. `hash_lookahead` is as in `find_keyed_page`. O(features x log features).
        """
        keyed: list[tuple[int | None, ExtraKeys]] = []
        page = 0
        token = 0 if self.request_keys else self._find_part(0)
        while token is not None:
            page = max(page, (token - hash_lookahead) // page_size)
            if page >= num_pages:
                break
            keys = self.of_page(page * page_size, (page + 1) * page_size + hash_lookahead)
            if keys:  # a feature without tokens has no keys
                keyed.append((page, keys))
            page += 1
            token = self._find_part(page * page_size)
        others = tuple([key for key in self.request_keys if key[0] in self.IN_ALL_PAGES])
        return [*keyed, (None, others)] if others else keyed

    def without_tags(self, keys: ExtraKeys) -> list[Any]:
        """Return a page's keys as in events, in vLLM's order: LoRA, features as ``(hash, offset)``, then the others."""
        in_order = sorted(keys, key=lambda key: (LORA, "mm").index(key[0]) if key[0] in (LORA, "mm") else 2)
        return [key[self.FEATURE_IN_EVENTS] if key[0] == "mm" else key[1] for key in in_order]


@dataclass(frozen=True, slots=True)
class VllmExtraKeys(RequestExtraKeys):
    """Extra keys in vLLM's order and form: LoRA in every page, features by name and offset, the salt in the first page.

    Features must be in the order of their offsets and must not overlap, as in vLLM.
    """

    SALT: ClassVar[str] = "cache_salt"
    FEATURE_NAMES: ClassVar[tuple[str, ...]] = ("identifier", "mm_hash")
    FEATURE_IN_EVENTS: ClassVar[slice] = slice(1, 3)
    IN_ALL_PAGES: ClassVar[tuple[str, ...]] = (LORA,)

    def of_page(self, start: int, end: int) -> ExtraKeys | None:
        """Return the keys of the page with tokens ``[start, end)``, or None."""
        lora = [key for key in self.request_keys if key[0] == LORA]
        first = [key for key in self.request_keys if key[0] != LORA and start == 0]
        return (*lora, *self._feature_keys(start, end), *first, *self._embedded_keys(start, end)) or None

    def _feature_keys(self, start: int, end: int) -> ExtraKeys:
        whole = RequestExtraKeys._feature_keys(self, start, end)
        return tuple(("mm", content_hash, offset) for _, _, content_hash, offset, _ in whole)


class RecentKeys:
    """The extra keys of the last requests, to find equal tokens that are cached under other keys."""

    MAX_KEYS = 256

    def __init__(self) -> None:
        """Begin with none."""
        self._kept: dict[RequestExtraKeys, None] = {}

    def keep(self, keys: RequestExtraKeys) -> None:
        """Keep the keys of a request, unless nothing shares its pages, or it has embeddings, whose digests take memory."""
        if keys.has_nonce or keys.embedded:
            return
        self._kept.pop(keys, None)
        self._kept[keys] = None
        if len(self._kept) > self.MAX_KEYS:
            self._kept.pop(next(iter(self._kept)), None)

    def list_keys(self) -> list[RequestExtraKeys]:
        """Return the kept keys, the last ones first."""
        return [*self._kept][::-1]


def list_features(features: Any, name: str = "mm_features") -> tuple[Any, ...]:
    """Return features as a tuple. Raise ArgumentTypeError unless they are a sequence or None."""
    if type(features) is tuple:
        return features
    return () if features is None else tuple(as_list(name, features, "a sequence, or None"))


def _feature_range(argument: str, feature: Any, names: Sequence[str]) -> FeatureRange:
    """Return the range, modality and hash of a feature. The hash is the first attribute in `names` that it has."""
    content_hash = next((value for name in names if (value := getattr(feature, name, None)) is not None), None)
    if content_hash is None:
        raise ArgumentError(f"{argument}: got {shown(feature)}, allowed: features with mm_hash or identifier")
    position = getattr(feature, "placeholder_range", None)
    if position is None:
        position = getattr(feature, "mm_position", None)
    start, end = 0, 1
    if position is not None:
        if not (hasattr(position, "offset") and hasattr(position, "length")):
            kind = type(position).__name__
            raise ArgumentTypeError(f"{argument}: got {kind} as a position, allowed: an object with offset and length")
        start = require_int(f"{argument}: offset", position.offset, 0, MAX_SIZE)
        end = start + require_int(f"{argument}: length", position.length, 0, MAX_SIZE)
    return start, end, _text(f"{argument}: modality", getattr(feature, "modality", "mm")), _plain("mm_hash", content_hash)


def _text(name: str, value: object) -> str:
    try:
        return str(require_short(name, value))
    except ValueError:  # an int in it is too large for text
        raise ArgumentError(f"{name}: got {shown(value)}, allowed: a name") from None


def _lora_key(name: str, lora_id: Any) -> tuple[Any, ...]:
    """Return the key of an adapter: its number or name, or its name and path."""
    if type(lora_id) is not tuple:
        return LORA, _plain(name, lora_id, " or a pair of these")
    if len(lora_id) != 2:
        raise ArgumentError(f"{name}: got a tuple of {len(lora_id)}, allowed: a pair of name and path")
    return LORA, *[_plain(name, part) for part in lora_id]


def _plain(name: str, value: Any, others: str = "") -> int | str | bytes:
    """Return `value` if its repr identifies it. An error message says that `others` are allowed too."""
    if type(value) not in (int, str, bytes):
        raise ArgumentTypeError(f"{name}: got {type(value).__name__}, allowed: int, str or bytes{others and ',' + others}")
    checked: int | str | bytes = require_short(name, value)
    return checked
