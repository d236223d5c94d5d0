"""A router that consumes events, written to be obviously correct, and its comparison with the oracle.

It insists on what is promised: nothing is stored twice, nothing removed that is not there, and a page whose parent is not known
when it comes has none in the cache.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from oracle import ContentKeys, OracleManager
from oracle_kinds import Mamba

import pagepool
from pagepool.page_hashing import VllmHasher

MASK = (1 << 64) - 1
ORDER = ["AllBlocksCleared", "BlockRemoved", "BlockStored"]

Key = tuple[int, Any]
"""A group and a hash."""


NONCE = re.compile("[0-9a-f]{32}")


class Nonce(NamedTuple):
    """The oracle's stand-in for a random nonce."""

    number: int


class Stored(NamedTuple):
    """The router's knowledge of a page."""

    parent: Any
    token_ids: tuple[int, ...]
    behind: tuple[int, ...] | None  # the lookahead
    extra_keys: tuple[Any, ...] | None
    lora: int | str | None


class Router:
    """The pages that one engine reports: on its device, and in its host tier."""

    def __init__(self) -> None:
        self.pages: dict[Key, Stored] = {}
        self.saved: set[Key] = set()
        self.sessions: dict[Key, str | None] = {}  # that stored each page

    def apply(self, events: Iterable[Any]) -> None:
        """Apply a batch of events, ours or decoded ones, and assert what is promised."""
        events = list(events)
        names = [type(event).__name__ for event in events]
        assert names == sorted(names, key=ORDER.index), names
        orphans = []
        for name, event in zip(names, events, strict=True):
            if name == "AllBlocksCleared":
                self.pages.clear()
                self.saved.clear()
            elif name == "BlockRemoved":
                self.remove(event)
            elif event.medium == "CPU":
                self.save(event)
            elif not self.store(event):
                orphans.append((event.group_idx, event.parent_block_hash))
        assert not self.pages.keys() & orphans, "a parent came after its child"

    def remove(self, event: Any) -> None:
        assert len(event.block_hashes)
        assert event.medium in ("GPU", "CPU")
        for block_hash in hashes_of(event):
            if event.medium == "CPU":
                self.saved.remove((event.group_idx, block_hash))
            else:
                del self.pages[event.group_idx, block_hash]

    def save(self, event: Any) -> None:
        """Enter pages of the host tier, of which the hashes alone are told."""
        keys = {(event.group_idx, block_hash) for block_hash in hashes_of(event)}
        assert len(keys) == len(event.block_hashes) > 0
        assert not keys & self.saved, "a page is saved twice"
        assert (event.parent_block_hash, len(event.token_ids), event.extra_keys, event.session_id) == (None, 0, None, None)
        assert event.lookahead_token_ids is None
        self.saved |= keys

    def store(self, event: Any) -> bool:
        """Enter pages. Returns whether the first one's parent is known, if it has one."""
        size, hashes = event.block_size, hashes_of(event)
        token_ids = [int(token_id) for token_id in event.token_ids]
        extra_keys = event.extra_keys or [None] * len(hashes)
        behind = event.lookahead_token_ids or [None] * len(hashes)
        assert len(hashes) == len(extra_keys) == len(behind) > 0
        assert event.medium == "GPU"
        assert len(token_ids) in (0, size * len(hashes))
        assert event.lora_id is None or event.lora_name is None
        lora = event.lora_name if event.lora_id is None else event.lora_id
        parent = event.parent_block_hash
        is_known = parent is None or (event.group_idx, parent) in self.pages
        for i, block_hash in enumerate(hashes):
            key = event.group_idx, block_hash
            assert key not in self.pages, f"{key} is stored twice"
            tokens, tokens_behind = tuple(token_ids[i * size : (i + 1) * size]), behind[i] and tuple(map(int, behind[i]))
            self.pages[key] = Stored(parent, tokens, tokens_behind, extra_keys[i], lora)
            self.sessions[key] = event.session_id
            parent = block_hash
        return is_known


def hashes_of(event: Any) -> list[Any]:
    """Return the hashes as ints or bytes; arrays have NumPy ints."""
    return [block_hash if isinstance(block_hash, bytes) else int(block_hash) for block_hash in event.block_hashes]


def as_int(block_hash: int | bytes) -> int:
    """Return the int of a hash that is told as bytes."""
    return int.from_bytes(block_hash[-8:], "big") if isinstance(block_hash, bytes) else block_hash


class Telling:
    """A manager with events, beside the oracle that did the same."""

    def __init__(self, manager: pagepool.CacheManager, oracle: OracleManager, hashes_as_bytes: bool) -> None:
        self.manager = manager
        self.oracle = oracle
        self.hashes_as_bytes = hashes_as_bytes
        self.router = Router()
        self._told: dict[tuple[int, int], Any] = {}  # (content, group) to hash, permanently
        self._nonces: dict[int, str] = {}  # the oracle's to the manager's
        manager.enable_events(hashes_as_bytes=hashes_as_bytes)

    def check(self) -> None:
        """Take the events, and check that the router knows what the oracle has cached, as does one that starts now."""
        known = dict(self.router.sessions)
        self.router.apply(self.manager.take_events())
        contents = Contents(self.oracle.keys, isinstance(self.manager.registry.hasher, VllmHasher))
        pool = self.oracle.page_pool
        told = {page: (group, self.hash_of(page)) for page, (_, group) in pool.entry_of_page.items()}
        assert self.router.pages.keys() == set(told.values())
        for page, (content, group) in pool.entry_of_page.items():
            kind = self.oracle.kinds[group]
            num_hashes = 1 if isinstance(kind, Mamba) else kind.page_size // self.oracle.keys.page_size
            expected, parent = contents.page(content, num_hashes)
            stored = self.router.pages[told[page]]
            expected = self._with_nonce(expected, stored)
            assert sorted_keys(stored) == sorted_keys(expected), f"page {page}: {stored} against {expected}"
            assert self._told.setdefault((content, group), told[page][1]) == told[page][1]
            assert parent is not None or stored.parent is None
            assert parent is None or self._told.setdefault((parent, group), stored.parent) == stored.parent
        if pool.tier is not None:
            saved = {(group, self.oracle.keys.digests[content] & MASK) for content, group in pool.tier.pool.index}
            assert {(group, as_int(block_hash)) for group, block_hash in self.router.saved} == saved
            told_saved = [(group, self._told.get((content, group))) for content, group in pool.tier.pool.index]
            assert self.router.saved >= {(group, block_hash) for group, block_hash in told_saved if block_hash is not None}
        late = Router()
        late.apply(self.manager.snapshot_events())
        assert (late.pages, late.saved) == (self.router.pages, self.router.saved)
        for pages in pool.index.values():  # equal pages, each with the session that entered it, one of which is told
            key = told[next(iter(pages))]
            assert late.sessions[key] in pages.values()
            assert self.router.sessions[key] in (*pages.values(), known.get(key, late.sessions[key]))

    def _with_nonce(self, expected: Stored, stored: Stored) -> Stored:
        """Return the expected keys with the manager's nonce in place of the oracle's; a request always has the same."""
        keys = [*(expected.extra_keys or ())]
        for i, key in enumerate(keys):
            if isinstance(key, Nonce):
                [told] = [key for key in stored.extra_keys or () if isinstance(key, str) and NONCE.fullmatch(key)]
                keys[i] = self._nonces.setdefault(key.number, told)
        assert len(set(self._nonces.values())) == len(self._nonces)
        return expected._replace(extra_keys=tuple(keys) or None)

    def hash_of(self, page_id: int) -> Any:
        """Return the hash of a cached page as in events."""
        key, _ = self.manager._store.key_of(page_id)
        if not self.hashes_as_bytes:
            return key & MASK
        return key.to_bytes(self.manager.registry.hasher.num_digest_bytes, "big")


def sorted_keys(stored: Stored) -> tuple[Any, ...]:
    """Return all fields but the parent. Events list features in the request's order; the oracle has each hash once."""
    keys = None if stored.extra_keys is None else sorted(set(map(repr, stored.extra_keys)))
    return stored.token_ids, stored.behind, keys, stored.lora


class Contents:
    """The inputs behind the oracle's numbers."""

    def __init__(self, keys: ContentKeys, has_lora_in_every_page: bool) -> None:
        self.page_size = keys.page_size
        self.has_lora_in_every_page = has_lora_in_every_page
        self.by_number = {number: content for content, number in keys._numbers.items()}

    def page(self, number: int, num_hashes: int) -> tuple[Stored, int | None]:
        """Return a page that ends with a content, with its number of tokens, as expected in events, and its parent's
        content.
        """
        parent: int | None = number
        _, _, behind, _ = self.by_number[number]
        token_ids: list[int] = []
        extra_keys: dict[Any, None] = {}
        for i in range(num_hashes - 1, -1, -1):
            parent, tokens, _, keys = self.by_number[parent]
            token_ids[:0] = tokens
            extra_keys |= dict.fromkeys(told_keys(keys, i * self.page_size))
        lora = self.lora_of(number)
        if self.has_lora_in_every_page and lora is not None:
            extra_keys[lora] = None
        return Stored(None, tuple(token_ids), behind or None, tuple(extra_keys) or None, lora), parent

    def lora_of(self, number: int) -> int | str | None:
        """Return the LoRA adapter, which is in the first content of a chain."""
        parent, _, _, keys = self.by_number[number]
        return dict(key for key in keys if len(key) == 2)["lora"] if parent is None else self.lora_of(parent)


def told_keys(keys: tuple[Any, ...], start: int) -> list[Any]:
    """Return extra keys of a hash, which begins at a token of its page, as in events."""
    features = [(key[1], start + key[2]) for key in keys if len(key) == 4]
    others = [key for key in keys if len(key) == 2 and key[1] is not None]
    return features + [Nonce(value) if name == "private" else value for name, value in others]
