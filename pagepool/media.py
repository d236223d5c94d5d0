"""Media: the pages of encoders' outputs, which layers of cross-attention read.

A medium, such as an audio or a picture, gets its pages with the first pages of its request or row, and they do not grow. Media
with one key share pages. A medium is to a core of groups of its own what a request is to the model's other groups: its hashes,
hits and pages are those of a prompt of `num_encoder_tokens` tokens that hits as a whole, or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pagepool._core import CacheGroups, HashChain, PageIds, PageRules, PageStore, RequestPages, StepResult, find_prefix
from pagepool.arguments import read_count, require_int
from pagepool.errors import ArgumentError, RequestTooLargeError
from pagepool.group_rules import kind_of
from pagepool.host_table import HostTable
from pagepool.page_hashing import PageHashing
from pagepool.page_pool import PagePool
from pagepool.request import RequestTraits
from pagepool.specs import CacheGroupSpec, cdiv, find_shard, find_shard_bounds

Array = npt.NDArray[np.int32]

NO_PAGES: tuple[int, ...] = ()


class Medium:
    """The pages of one encoder's output: `CacheManager.get_medium` and `RunningBatch.get_medium` return it.

    `page_ids` has a tuple of ids in their pool for each group of cross-attention, `num_tokens` is the number of encoder tokens,
    and `num_cached_tokens` is the same number if the pages were hit, so that the encoder need not run, otherwise 0.
    """

    def __init__(self, page_ids: tuple[tuple[int, ...], ...], num_tokens: int, num_cached_tokens: int) -> None:
        """Describe pages that `Media` holds."""
        self.page_ids, self.num_tokens, self.num_cached_tokens = page_ids, num_tokens, num_cached_tokens
        self.pages: RequestPages | None = None
        self.chain: HashChain | None = None  # until the pages are cached
        self.num_holders = 1
        self.step: StepResult | None = None  # the step of a row that runs the encoder
        self.has_run: Callable[[], bool] = _always

    @property
    def is_in_flight(self) -> bool:
        """Whether its encoder runs in a step that was not settled."""
        return self.num_cached_tokens == 0 and self.step is not None and not self.step.is_settled

    def __repr__(self) -> str:
        """Show the pages."""
        return f"Medium(page_ids={self.page_ids}, num_tokens={self.num_tokens}, num_cached_tokens={self.num_cached_tokens})"


def _always() -> bool:
    """Return True: pages are cached as they are scheduled."""
    return True


class _Key(NamedTuple):
    mm_hash: str | bytes | int


class _Prompt(NamedTuple):
    """A medium as a request: each token stands for one of the encoder's."""

    request_id: str
    all_token_ids: list[int]
    cache_salt: Any
    lora_id: Any
    mm_features: tuple[_Key, ...]


class Media:
    """The media of a manager's requests and rows. Callers hold the manager's lock."""

    def __init__(
        self,
        store: PageStore,
        pools: Mapping[str, PagePool],
        groups: Sequence[CacheGroupSpec],
        first_group: int,
        hashing: PageHashing,
        enable_caching: bool,
    ) -> None:
        """`groups` have numbers from `first_group` on in the prefix index."""
        self._store, self._first_pool = store, next(iter(pools.values()))
        self._pools, self._banks = [pools[group.pool] for group in groups], [[*pools].index(group.pool) for group in groups]
        specs: list[Any] = [group.kv_cache_spec for group in groups]
        for name in ("page_size", "max_num_encoder_tokens"):
            sizes = {getattr(spec, name) for spec in specs}
            if len(sizes) > 1:
                raise ArgumentError(f"{name}: got {sorted(sizes)} in groups of cross-attention, allowed: one value for all")
        self.page_size, self.max_num_tokens = specs[0].page_size, specs[0].max_num_encoder_tokens
        hasher = replace(hashing, use_eagle=False, hash_lookahead=0).make_hasher(self.page_size)
        self._hasher = hasher if enable_caching and hasher.is_native else None
        numbers = [None if self._hasher is None else first_group + i for i in range(len(groups))]
        rules = [(PageRules(spec.page_size), number, 1) for spec, number in zip(specs, numbers, strict=True)]
        self._groups, self.num_groups = CacheGroups(rules, banks=self._banks), len(groups)
        self._live: dict[int, Medium] = {}  # the keys are identities
        self.of_request: dict[str, Medium] = {}

    @property
    def num_columns(self) -> int:
        """Pages of the longest medium."""
        return cdiv(self.max_num_tokens, self.page_size)

    def list_pages(self) -> list[RequestPages]:
        """Return the pages of all media."""
        return [medium.pages for medium in self._live.values() if medium.pages is not None]

    def read(self, owner: Any) -> int:
        """Return the number of a medium's tokens. Raise ArgumentError for too many."""
        num_tokens = getattr(owner, "num_encoder_tokens", None)
        return 0 if num_tokens is None else require_int("num_encoder_tokens", num_tokens, 0, self.max_num_tokens)

    def take(self, owner: Any, dp_shard_hint: int | None = None, data_parallel_size: int | None = None) -> Medium | None:
        """Hold the pages of a new holder's medium: those that its key hits, or new ones. None, without a change, if too few
        pages are free. Raise RequestTooLargeError for a medium that the pool, or its shard, can never hold. O(pages).
        """
        num_tokens = self.read(owner)
        num_slots = cdiv(num_tokens, self.page_size) * self.page_size
        shard = find_shard(self._first_pool.num_pages, dp_shard_hint, data_parallel_size)
        self._require_fit(num_slots // self.page_size, shard)
        medium = Medium(tuple(NO_PAGES for _ in self._pools), num_tokens, 0)
        if not num_tokens:
            return medium
        self._cache_ready()
        inside = find_shard_bounds(self._first_pool.num_pages, dp_shard_hint, data_parallel_size)
        medium.pages = RequestPages(self._store, self._groups, num_slots, owner)
        chain = self._hash(owner, num_tokens, num_slots)
        hits: tuple[PageIds, ...] = ()
        if chain is not None:
            found, num_hit_tokens = find_prefix(self._store, self._groups, chain, num_slots + 1, inside)
            hits = found if num_hit_tokens == num_slots else hits
        number, num_shards = (None, 0) if shard is None else shard
        if medium.pages.allocate(num_slots, 0, hits, chain, 0, number, num_shards) is None:
            return None
        self._live[id(medium)] = medium
        medium.page_ids = tuple(tuple(ids) for ids in self._store.lists_in_banks(medium.pages.get_page_ids()))
        medium.num_cached_tokens, medium.chain = num_tokens if hits else 0, None if hits else chain
        return medium

    def _require_fit(self, num_pages: int, shard: tuple[int, int] | None) -> None:
        number, num_shards = (0, 1) if shard is None else shard
        for bank in set(self._banks):
            needed, pool = num_pages * self._banks.count(bank), self._pools[self._banks.index(bank)]
            num_usable = pool.num_pages // num_shards - (number == 0)
            if needed > num_usable:
                where = "the pool" if shard is None else "the shard"
                raise RequestTooLargeError(f"num_encoder_tokens: a medium needs {needed:,} pages, {where} has {num_usable:,}")

    def _hash(self, owner: Any, num_tokens: int, num_slots: int) -> HashChain | None:
        """Return the keys of a medium's pages; None if nothing names it."""
        key = getattr(owner, "cross_key", None)
        if self._hasher is None or key is None:
            return None
        salt, lora_id = getattr(owner, "cache_salt", None), getattr(owner, "lora_id", None)
        prompt: Any = _Prompt("medium", [num_tokens] * num_slots, salt, lora_id, (_Key(key),))
        hashes = self._hasher.start(prompt)
        self._hasher.extend(hashes, prompt, num_slots // self.page_size)
        return hashes.chain

    def _cache_ready(self) -> None:
        """Cache the media whose encoders have run."""
        for medium in self._live.values():
            if medium.chain is not None and medium.has_run():
                self.cache(medium)

    def cache(self, medium: Medium) -> None:
        """Cache the pages of a medium that has a key. O(pages)."""
        if medium.chain is not None and medium.pages is not None:
            num_slots = len(medium.chain) * self.page_size
            medium.pages.enter(medium.chain, num_slots, num_slots)
            medium.chain = None

    def share(self, medium: Medium) -> Medium:
        """Add a holder."""
        medium.num_holders += 1
        return medium

    def give_back(self, medium: Medium, is_void: bool = False) -> None:
        """Let a holder go. The last one gives the pages back, which stay cached if the encoder has run; it has not if the
        medium `is_void`. O(pages).
        """
        medium.num_holders -= 1
        if medium.num_holders == 0 and medium.pages is not None:
            if not is_void and medium.has_run():
                self.cache(medium)
            medium.pages.give_back()
            del self._live[id(medium)]

    # Requests.

    def begin(self, request: Any, dp_shard_hint: int | None, data_parallel_size: int | None, is_late: bool) -> bool:
        """Hold the medium of a new request; False if too few pages are free. If pages are cached late, so is the medium: once a
        token of the request was computed.
        """
        self.end(request)  # of an earlier turn, whose pages were given back without `free`
        medium = self.take(request, dp_shard_hint, data_parallel_size)
        if medium is None:
            return False
        if is_late:
            num_before = read_count(request, "num_computed_tokens")
            medium.has_run = lambda: read_count(request, "num_computed_tokens") > num_before
        self.of_request[request.request_id] = medium
        return True

    def end(self, request: Any, *, has_failed: bool = False, is_void: bool = False) -> None:
        """Let a request's medium go. Where the request's step did not run, neither did its encoder, and the medium loses its
        entries; if the medium `is_void`, it has none.
        """
        medium = self.of_request.pop(request.request_id, None)
        if medium is None:
            return
        if has_failed and medium.num_cached_tokens == 0:
            self.forget(medium)
        self.give_back(medium, is_void)

    def fork(self, request: Any, new_request: Any) -> None:
        """Let a new request share the medium of another one."""
        self.of_request[new_request.request_id] = self.share(self.of_request[request.request_id])

    def forget(self, medium: Medium) -> None:
        """Drop the entries of a medium whose encoder did not run after all; nobody has its content then. O(media + pages)."""
        medium.chain = None
        for pool, ids in zip(self._pools, medium.page_ids, strict=True):
            pool.evict_pages(ids)
        lost = {(group, page_id) for group, ids in enumerate(medium.page_ids) for page_id in ids}
        for other in self._live.values():
            if not lost.isdisjoint((group, page_id) for group, ids in enumerate(other.page_ids) for page_id in ids):
                other.num_cached_tokens, other.chain = 0, None


class RowMedia:
    """The media of a batch's rows, by row. Stays tell which rows have ended. Methods take the manager's lock."""

    def __init__(
        self, media: Media, lock: Any, stays: npt.NDArray[np.int64], num_computed_tokens: Array, caches_computed: bool
    ) -> None:
        """Start without media. `stays` and `num_computed_tokens` are the batch's live arrays. With `caches_computed`, a medium
        hits once the step of its row is settled or, without one, once the row's next step is planned.
        """
        self._all, self._lock, self._waits = media, lock, caches_computed
        self._stays, self._num_computed = stays, num_computed_tokens
        self.tables = tuple(HostTable(stays.size, media.num_columns) for _ in range(media.num_groups))
        self.num_encoder_tokens: Array = np.zeros(stays.size, np.int32)
        self._media: list[Medium | None] = [None] * stays.size
        self._own_stays = np.zeros_like(stays)
        self._ended: list[Medium] = []  # media whose rows ended before the step of the encoder

    def __getitem__(self, row: int) -> Medium | None:
        """Return the medium of a row; None if the row is free."""
        self.collect()
        return self._media[row]

    def take(self, traits: RequestTraits, data_parallel_size: int | None) -> Medium | None:
        """Hold the pages of a new row's medium: see `Media.take`."""
        with self._lock:
            self.collect()
            return self._all.take(traits, traits.dp_shard, data_parallel_size)

    def settle_admission(self, medium: Medium, row: int | None, step: StepResult | None) -> None:
        """Let an admitted row have the medium that was taken for it; give it back if there is no such row."""
        with self._lock:
            if row is None:
                self._all.give_back(medium, is_void=True)
                return
            medium.step = step
            if self._waits:
                of_row = partial(self._is_past, self._stays[row], self._num_computed[row])
                medium.has_run = of_row if step is None else partial(getattr, step, "is_settled")
            self._place(row, medium)

    def _is_past(self, stay: int, num_tokens: int) -> bool:
        """Whether the row of a stay has more computed tokens than these, or has ended."""
        rows = np.flatnonzero(self._stays == stay)
        return rows.size == 0 or bool(self._num_computed[rows[0]] > num_tokens)

    def _place(self, row: int, medium: Medium) -> None:
        self._media[row], self._own_stays[row], self.num_encoder_tokens[row] = medium, self._stays[row], medium.num_tokens
        for table, ids in zip(self.tables, medium.page_ids, strict=True):
            table.add_row([*ids], row)

    def collect(self) -> None:
        """Give back the media of rows that ended. O(rows)."""
        with self._lock:
            for row in np.flatnonzero(self._own_stays != self._stays).tolist():
                medium, self._media[row] = self._media[row], None
                self._own_stays[row] = self.num_encoder_tokens[row] = 0
                for table in self.tables:
                    table.clear_row(row)
                if medium is not None:
                    self._all.give_back(medium)
                    self._ended = [each for each in (*self._ended, medium) if each.is_in_flight]

    def exchange(self, src: int, tgt: int) -> None:
        """Follow two rows of the batch that were exchanged."""
        with self._lock:
            for table in self.tables:
                table.swap_row(src, tgt)
            for values in (self.num_encoder_tokens, self._own_stays):
                values[[src, tgt]] = values[[tgt, src]]
            self._media[src], self._media[tgt] = self._media[tgt], self._media[src]

    def fork(self, row: int, targets: Sequence[int]) -> None:
        """Let rows that were forked from a row share its medium."""
        with self._lock:
            medium = self._media[row]
            if medium is not None:
                for target in targets:
                    self._place(target, self._all.share(medium))

    def list_in_flight(self) -> list[Medium]:
        """Return the media whose encoders run in steps that were not settled."""
        with self._lock:
            self._ended = [medium for medium in self._ended if medium.is_in_flight]
            return self._ended + [medium for medium in self._media if medium is not None and medium.is_in_flight]

    def forget(self, media: Sequence[Medium]) -> None:
        """Forget media whose steps failed."""
        with self._lock:
            for medium in media:
                self._all.forget(medium)
            self.collect()


def count_others(groups: Sequence[CacheGroupSpec]) -> int:
    """Return the number of groups before those of cross-attention. Raise ArgumentError if one of these stands before others,
    and if there are no others.
    """
    are_cross = [kind_of(group.kv_cache_spec) == "CrossAttention" for group in groups]
    num_others = len(groups) - sum(are_cross)
    if True in are_cross[:num_others]:
        names = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        raise ArgumentError(f"kv_cache_groups: got {names}, allowed: groups of cross-attention behind all others")
    if groups and not num_others:
        raise ArgumentError("kv_cache_groups: got only groups of cross-attention, allowed: another group before them")
    return num_others
