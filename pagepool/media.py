"""Media: the pages of encoders' outputs, which layers of cross-attention read.

A medium, such as an audio or a picture, gets its pages with the first pages of its request or row, and they do not grow. Its
pages are to a core of groups of its own what a prompt of `num_encoder_tokens` tokens is to the model's other groups: hashes,
hits and checks are the same code, except that a medium hits as a whole, or not at all.

The pool has entries only for media whose encoders have run. Until then, requests and rows with one key share the pages by this
module. So a step that fails has no entries to drop: the encoder runs again, with the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pagepool._core import (
    CacheGroups,
    HashChain,
    PageIds,
    PageRules,
    PageStore,
    RequestPages,
    StepResult,
    are_loading,
    count_steps,
    count_usable,
    find_prefix,
    load_prefix,
)
from pagepool.arguments import read_count, require_int
from pagepool.errors import (
    ArgumentError,
    ArgumentTypeError,
    IntegrityError,
    PageHashError,
    RequestTooLargeError,
    count_of,
    shown,
)
from pagepool.group_rules import kind_of
from pagepool.host_table import HostTable
from pagepool.page_hashing import PageHashing
from pagepool.page_pool import PagePool
from pagepool.request import RequestTraits
from pagepool.specs import CacheGroupSpec, cdiv, find_shard, find_shard_bounds

Array = npt.NDArray[np.int32]
Progress = Callable[[], tuple[int, int] | None]

NO_STAY = -1


def _no_progress() -> None:
    """Return None: the owner was not admitted yet."""


class Medium:
    """The pages of one encoder's output, for one request or row: see `CacheManager.get_medium` and `RunningBatch.get_medium`.

    `page_ids` has a tuple of ids in their pool for each group of cross-attention, and `num_tokens` is the number of encoder
    tokens. `num_cached_tokens` is the same number if the pages were hit, so that the encoder need not run, otherwise 0. If the
    pages were hit while another request or row was to run the encoder, and this fails, it becomes 0.
    """

    def __init__(self, encoding: Encoding, is_hit: bool) -> None:
        """Begin apart from the encoding, whose pages it shares once it stands in `Encoding.media`."""
        self.encoding, self.is_hit = encoding, is_hit
        self.is_planned = self.has_run = False  # a step of the owner
        self.num_before = 0
        self._progress: Progress = _no_progress
        self.step: StepResult | None = None  # the owner's first step, if it may fail

    def follow(self, num_before: int, progress: Progress) -> None:
        """Let `progress` tell how many tokens of the owner are planned, and how many have been computed for certain. More than
        `num_before` have been once the encoder has run.
        """
        self.num_before, self._progress = num_before, progress
        self.update()

    @property
    def page_ids(self) -> tuple[tuple[int, ...], ...]:
        """Ids of the pages in their pool, for each group of cross-attention."""
        return self.encoding.page_ids

    @property
    def num_tokens(self) -> int:
        """Number of encoder tokens."""
        return self.encoding.num_tokens

    @property
    def num_cached_tokens(self) -> int:
        """`num_tokens` if the encoder need not run for this owner, otherwise 0."""
        return self.num_tokens if self.is_hit else 0

    def update(self) -> None:
        """Read how far the owner has come; nothing changes once it has ended."""
        counts = self._progress()
        if counts is not None:
            self.is_planned, self.has_run = (count > self.num_before for count in counts)

    def __repr__(self) -> str:
        """Show the pages."""
        return f"Medium(page_ids={self.page_ids}, num_tokens={self.num_tokens}, num_cached_tokens={self.num_cached_tokens})"


class Encoding:
    """The pages of one encoder's output, and the media that share them."""

    def __init__(self, pages: RequestPages, num_tokens: int) -> None:
        """Start without media, and without pages."""
        self.pages, self.num_tokens = pages, num_tokens
        self.page_ids: tuple[tuple[int, ...], ...] = ()
        self.media: list[Medium] = []
        self.chain: HashChain | None = None  # None: nobody else can hit the pages
        self.shard: tuple[int, int] | None = None

    def has_name(self, chain: HashChain, shard: tuple[int, int] | None) -> bool:
        """Whether the pages have these hashes, in this shard."""
        return self.chain is not None and self.chain[len(self.chain) - 1] == chain[len(chain) - 1] and self.shard == shard

    def list_media(self) -> list[Medium]:
        """Return the media as their owners are now."""
        media = [*self.media]  # reading a request's progress may call its own code
        for medium in media:
            medium.update()
        return media

    def is_to_be_run(self) -> bool:
        """Whether the encoder runs in a planned step."""
        return any(medium.is_planned and not medium.is_hit for medium in self.list_media())


class Awaited(NamedTuple):
    """The medium that is being loaded. Others, which might evict its pages, wait until the step after its loads have come."""

    name: tuple[bytes | int, tuple[int, int] | None]
    hits: tuple[PageIds, ...]
    last_step: int  # in which it was known to be loading


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
        own_groups: CacheGroups,
        hashing: PageHashing,
        enable_caching: bool,
        caches_computed: bool,
    ) -> None:
        """`groups` have the numbers behind `own_groups`, the model's others, in the prefix index. With `caches_computed` media
        hit once their encoder has run, otherwise once its step is planned.
        """
        self._store, self._all_pools, self._own_groups = store, pools, own_groups
        self._first_pool = next(iter(pools.values()))
        banks = [[*pools].index(group.pool) for group in groups]
        specs: list[Any] = [group.kv_cache_spec for group in groups]
        for name in ("page_size", "max_num_encoder_tokens"):
            sizes = {getattr(spec, name) for spec in specs}
            if len(sizes) > 1:
                raise ArgumentError(f"{name}: got {sorted(sizes)} in groups of cross-attention, allowed: one value for all")
        self.page_size: int = specs[0].page_size
        self.max_num_tokens: int = specs[0].max_num_encoder_tokens
        hasher = replace(hashing, use_eagle=False, hash_lookahead=0).make_hasher(self.page_size)
        self._hasher = hasher if enable_caching and hasher.is_native else None
        numbers = [None if self._hasher is None else len(own_groups) + i for i in range(len(groups))]
        rules = [(PageRules(spec.page_size), number, 1) for spec, number in zip(specs, numbers, strict=True)]
        self._groups, self.num_groups = CacheGroups(rules, banks=banks), len(groups)
        self.caches_computed = caches_computed
        self._live: dict[Encoding, None] = {}
        self._unsure: dict[Encoding, None] = {}  # those of the live ones whose encoder has not run for certain
        self._awaited: Awaited | None = None
        self.of_request: dict[str, Medium] = {}

    @property
    def num_columns(self) -> int:
        """Pages of the longest medium."""
        return cdiv(self.max_num_tokens, self.page_size)

    def list_pages(self) -> list[RequestPages]:
        """Return the pages of all media."""
        return [encoding.pages for encoding in self._live]

    def name_pages(self) -> dict[RequestPages, list[str]]:
        """Return the pages of all media, with the ids of the requests that read each; rows have none."""
        owners = {encoding: list[str]() for encoding in self._live}
        for request_id, medium in self.of_request.items():
            owners.setdefault(medium.encoding, []).append(request_id)
        return {encoding.pages: names for encoding, names in owners.items()}

    def read(self, owner: Any) -> int:
        """Return the number of a medium's tokens. Raise ArgumentError for too many."""
        num_tokens = getattr(owner, "num_encoder_tokens", None)
        return 0 if num_tokens is None else require_int("num_encoder_tokens", num_tokens, 0, self.max_num_tokens)

    def take(
        self,
        owner: Any,
        hold: Callable[[Medium], None],
        dp_shard_hint: int | None = None,
        data_parallel_size: int | None = None,
        num_reserved_pages: int = 0,
    ) -> Medium | None:
        """Hold the pages of a new owner's medium: those that its key hits, or new ones. None, without a change, if too few
        pages are free, and while a host tier loads those that are hit; loads leave `num_reserved_pages` of the first pool free.
        The medium is passed to `hold` before it has pages, so that no interrupt loses them; after None let it go.
        O(pages + encoders that have not run).
        """
        num_tokens = self.read(owner)
        num_slots = self._count_slots(num_tokens)
        shard = find_shard(self._first_pool.num_pages, dp_shard_hint, data_parallel_size)
        self.settle()
        chain = self._hash(owner, num_tokens)
        shared = None if chain is None else self._find_unsure(chain, shard)
        if shared is not None:
            return _join(shared, hold, is_hit=True)
        if self._find_misfit(num_tokens, shard) is not None:
            return None
        hits: tuple[PageIds, ...] | None = ()
        if chain is not None:
            inside = find_shard_bounds(self._first_pool.num_pages, dp_shard_hint, data_parallel_size)
            hits = self._find_hits(chain, shard, inside, num_reserved_pages)
        if hits is None:
            return None
        encoding = Encoding(RequestPages(self._store, self._groups, num_slots, owner), num_tokens)
        medium = _join(encoding, hold, is_hit=bool(hits))
        self._live[encoding] = None
        number, num_shards = (None, 0) if shard is None else shard
        try:
            new = encoding.pages.allocate(num_slots, 0, hits, chain, 0, number, num_shards)
        except PageHashError:  # a batch in another thread has evicted a hit since it was found
            new = None
        if new is None:
            self.give_back(medium, has_run=False)
            return None
        encoding.page_ids = tuple(tuple(ids) for ids in self._store.lists_in_banks(encoding.pages.get_page_ids()))
        if not hits:
            encoding.chain, encoding.shard = chain, shard
            self._unsure[encoding] = None
        return medium

    def name(self, owner: Any) -> tuple[CacheGroups, HashChain, int] | None:
        """Return the groups, the keys and the slots of a medium; None if there is none, or nothing names it."""
        num_tokens = self.read(owner)
        chain = self._hash(owner, num_tokens) if num_tokens else None
        return None if chain is None else (self._groups, chain, self._count_slots(num_tokens))

    def _count_slots(self, num_tokens: int) -> int:
        """Return the slots in the pages of a medium."""
        return cdiv(num_tokens, self.page_size) * self.page_size

    def _hash(self, owner: Any, num_tokens: int) -> HashChain | None:
        """Return the keys of a medium's pages; None if nothing names it."""
        key = getattr(owner, "cross_key", None)
        if self._hasher is None or key is None:
            return None
        salt, lora_id = getattr(owner, "cache_salt", None), getattr(owner, "lora_id", None)
        num_slots = self._count_slots(num_tokens)
        prompt: Any = _Prompt("medium", [num_tokens] * num_slots, salt, lora_id, (_Key(key),))
        hashes = self._hasher.start(prompt)
        self._hasher.extend(hashes, prompt, num_slots // self.page_size)
        return hashes.chain

    def _find_hits(
        self, chain: HashChain, shard: tuple[int, int] | None, inside: tuple[int, int | None], num_reserved_pages: int
    ) -> tuple[PageIds, ...] | None:
        """Return the cached pages of a medium, within a range of ids; none unless all are cached. Those that only the host tier
        has are loaded: None until all have come, since a load that fails would let the encoder run again behind the first step.
        """
        num_slots = len(chain) * self.page_size
        query = self._store, self._groups, chain, num_slots + 1, inside
        hits, num_hit_tokens = find_prefix(*query)
        if num_hit_tokens < num_slots:
            if find_prefix(*query, reaches_tier=True)[1] < num_slots:
                return ()
            name, step = (chain[len(chain) - 1], shard), count_steps(self._store)
            if self._awaits_other(name, step):
                return None
            found = load_prefix(*query, num_reserved=num_reserved_pages)
            if found.num_hit_tokens < num_slots:
                return None
            hits, self._awaited = found.hits, Awaited(name, found.hits, step)
        return None if are_loading(self._store, hits) else hits

    def _awaits_other(self, name: tuple[bytes | int, tuple[int, int] | None], step: int) -> bool:
        """Whether another medium is being loaded, or was until the step before."""
        awaited = self._awaited
        if awaited is None or awaited.name == name:
            return False
        if are_loading(self._store, awaited.hits):
            self._awaited = awaited._replace(last_step=step)
            return True
        return step <= awaited.last_step + 1

    def _find_unsure(self, chain: HashChain, shard: tuple[int, int] | None) -> Encoding | None:
        """Return an encoding with this name whose encoder runs in a planned step."""
        for encoding in () if self.caches_computed else [*self._unsure]:
            if encoding.has_name(chain, shard) and encoding.is_to_be_run():
                return encoding
        return None

    # Capacity.

    def count_pages(self, num_tokens: int, bank: int) -> int:
        """Return the pages that a medium needs in a pool, given by its place."""
        return self._groups.count_step_pages(0, num_tokens, bank)

    def _find_misfit(
        self, num_tokens: int, shard: tuple[int, int] | None, num_computed_tokens: int = 0, num_slots: int = 0
    ) -> str | None:
        """Say in which pool a medium does not fit, even alone, beside the pages of its owner's first step."""
        number, num_shards = (0, 1) if shard is None else shard
        for bank, (name, pool) in enumerate(self._all_pools.items()):
            num_pages = self.count_pages(num_tokens, bank)
            num_own = self._own_groups.count_step_pages(num_computed_tokens, num_slots, bank) if num_slots else 0
            num_usable = count_usable(self._store, bank)
            if shard is not None:
                num_usable = pool.num_pages // num_shards - (number == 0)
            if num_pages and num_pages + num_own > num_usable:
                where = ("the pool" if shard is None else "the shard") + (f" {name!r}" if len(self._all_pools) > 1 else "")
                beside = f", and {count_of(num_own, 'page')} of its request at once" if num_own else ""
                needed = f"a medium of {num_tokens:,} tokens needs {count_of(num_pages, 'page')}{beside}"
                return f"{needed}, {where} has {num_usable:,}"
        return None

    def require_fit(
        self, owner: Any, dp_shard_hint: int | None, data_parallel_size: int | None, num_computed_tokens: int, num_slots: int
    ) -> None:
        """Raise RequestTooLargeError if an owner that was refused can never hold its medium beside the pages of its first step,
        from `num_computed_tokens` to `num_slots`. O(groups).
        """
        shard = find_shard(self._first_pool.num_pages, dp_shard_hint, data_parallel_size)
        misfit = self._find_misfit(self.read(owner), shard, num_computed_tokens, num_slots)
        if misfit is not None:
            raise RequestTooLargeError(f"{misfit}: no waiting helps, see CacheManager.require_capacity")

    # Progress.

    def settle(self) -> None:
        """Cache the media whose encoders have run. O(media whose encoders have not)."""
        for encoding in [*self._unsure]:
            if any(medium.has_run for medium in encoding.list_media()):
                self._cache(encoding)

    def _cache(self, encoding: Encoding) -> None:
        """Let the pages of an encoding hit from now on, if it has a name. O(pages)."""
        if encoding not in self._unsure:
            return
        del self._unsure[encoding]
        if encoding.chain is not None:
            num_slots = len(encoding.chain) * self.page_size
            encoding.pages.enter(encoding.chain, num_slots, num_slots)
            encoding.chain = None

    def lose(self) -> None:
        """Let each owner run the encoder of its medium if no planned step does so. O(media whose encoders have not)."""
        for encoding in [*self._unsure]:
            if not encoding.is_to_be_run():
                for medium in encoding.media:
                    medium.is_hit = False

    def give_back(self, medium: Medium, *, has_run: bool) -> None:
        """Let an owner go; its medium is cached if the encoder has run for certain. The last owner's pages go back to the pool.
        O(pages).
        """
        encoding = medium.encoding
        if medium in encoding.media:  # else it was interrupted before it shared the pages
            encoding.media.remove(medium)
        if has_run:
            self._cache(encoding)
        if not encoding.media:
            self._unsure.pop(encoding, None)
            encoding.pages.give_back()
            self._live.pop(encoding, None)

    # Requests.

    def begin(
        self,
        request: Any,
        dp_shard_hint: int | None,
        data_parallel_size: int | None,
        num_before: int,
        is_planned: bool,
        num_new_pages: int,
    ) -> bool:
        """Hold the medium of a new request, which needs `num_new_pages` of the first pool beside it; False if too few pages are
        free, or while the medium is loaded: then call `end`. Its encoder has run once the request has more than `num_before`
        computed tokens.
        """
        if not self.read(request):
            return True
        hold = partial(self.of_request.__setitem__, request.request_id)
        medium = self.take(request, hold, dp_shard_hint, data_parallel_size, num_new_pages)
        if medium is None:
            return False
        medium.follow(num_before, partial(_count_tokens, request, num_before + is_planned))
        return True

    def count_own_pages(self, num_computed_tokens: int, num_slots: int) -> int:
        """Return the pages of the first pool that an owner needs for a step, from `num_computed_tokens` to `num_slots`."""
        return self._own_groups.count_step_pages(num_computed_tokens, num_slots, 0)

    def end(self, request: Any, num_computed_tokens: int | None = None) -> None:
        """Let a request's medium go. Its steps have computed `num_computed_tokens`, hits included; None: all planned ones."""
        medium = self.of_request.pop(request.request_id, None)
        if medium is None:
            return
        medium.update()
        has_run = medium.has_run or (medium.is_planned and not self.caches_computed)
        if num_computed_tokens is not None:
            has_run = num_computed_tokens > medium.num_before
        self.give_back(medium, has_run=has_run)
        if not has_run:
            self.lose()

    def fork(self, request: Any, new_request: Any) -> None:
        """Let a new request share the medium of another one, if that has one."""
        medium = self.of_request.get(request.request_id)
        if medium is not None:
            hold = partial(self.of_request.__setitem__, new_request.request_id)
            self.share(medium, hold, partial(_count_tokens, new_request, 0))

    def share(self, medium: Medium, hold: Callable[[Medium], None], progress: Progress) -> None:
        """Let an owner that continues another one share its medium, which is passed to `hold` first. It is hit unless no step
        of the other one was planned.
        """
        medium.update()
        shared = _join(medium.encoding, hold, is_hit=medium.is_hit or medium.is_planned or medium.has_run)
        shared.follow(medium.num_before, progress)

    def require_same(self, request: Any, new_request: Any) -> None:
        """Raise ArgumentError for a fork that names another medium."""
        for name in ("num_encoder_tokens", "cross_key"):
            mine, new = getattr(request, name, None), getattr(new_request, name, None)
            if mine != new and (mine or new):
                raise ArgumentError(f"request {shown(new_request.request_id)}: got {name} {shown(new)}, allowed: {shown(mine)}")


def _join(encoding: Encoding, hold: Callable[[Medium], None], *, is_hit: bool) -> Medium:
    """Return the medium of a new owner, which shares the pages of an encoding. It is passed to `hold` first, so that no
    interrupt loses it.
    """
    medium = Medium(encoding, is_hit)
    hold(medium)
    encoding.media.append(medium)
    return medium


def _count_tokens(request: Any, num_scheduled_tokens: int) -> tuple[int, int]:
    """Return the planned and the computed tokens of a request; a wrong number counts as 0 here."""
    try:
        num_tokens = read_count(request, "num_computed_tokens")
    except (ArgumentError, ArgumentTypeError):
        num_tokens = 0
    return max(num_tokens, num_scheduled_tokens), num_tokens


class RowMedia:
    """The media of a batch's rows, by row. The batch's stays tell which rows have ended.

    ``lock`` is the manager's. Callers hold it around each change of the rows and the call that follows; ``with`` takes it and
    notes before the change which encoders have run.
    """

    def __init__(self, media: Media, lock: Any, stays: npt.NDArray[np.int64], num_computed_tokens: Array) -> None:
        """Start without media. `stays` and `num_computed_tokens` are the batch's live arrays."""
        self.lock, self._all = lock, media
        self._stays, self._num_computed, self._num_final = stays, num_computed_tokens, num_computed_tokens
        self.tables = tuple(HostTable(stays.size, media.num_columns) for _ in range(media.num_groups))
        self.num_encoder_tokens: Array = np.zeros(stays.size, np.int32)
        self._media: list[Medium | None] = [None] * stays.size
        self._taken: Medium | None = None  # for a row that is being admitted
        self._own_stays = np.full_like(stays, NO_STAY)  # rows without a medium have NO_STAY

    def __enter__(self) -> None:
        """Begin a change of the rows: take the lock, and note which encoders have run. O(media whose encoders have not)."""
        self.lock.acquire()
        self._all.settle()

    def __exit__(self, *_: object) -> None:
        """Give the lock back."""
        self.lock.release()

    def watch(self, num_final_tokens: Array) -> None:
        """Read from this array how many leading tokens of each row no step in flight computes."""
        self._num_final = num_final_tokens

    def __getitem__(self, row: int) -> Medium | None:
        """Return the medium of a row; None if the row is free, or has none."""
        with self.lock:
            return self._media[row]

    def take(
        self, traits: RequestTraits, data_parallel_size: int | None, num_reserved_pages: int, num_tokens: int
    ) -> Medium | None:
        """Hold the pages of the medium of a new row, which needs slots for `num_tokens` tokens and leaves `num_reserved_pages`
        free: see `Media.take`.
        """
        self.collect(may_fail=True)  # after a call that was interrupted
        num_reserved_pages += self._all.count_own_pages(max(0, num_tokens - 1), num_tokens)
        return self._all.take(traits, self._hold, traits.dp_shard, data_parallel_size, num_reserved_pages)

    def _hold(self, medium: Medium) -> None:
        self._taken = medium

    def require_fit(self, traits: RequestTraits, data_parallel_size: int | None, num_tokens: int) -> None:
        """Raise RequestTooLargeError if a row that needs slots for `num_tokens` tokens, whatever it hits, can never hold its
        medium too.
        """
        self._all.require_fit(traits, traits.dp_shard, data_parallel_size, max(0, num_tokens - 1), num_tokens)

    def read(self, traits: RequestTraits) -> int:
        """Return the number of a medium's tokens. Raise ArgumentError for too many."""
        return self._all.read(traits)

    def give_back_taken(self) -> None:
        """Give back the medium of a row that was refused, or whose admission was interrupted."""
        if self._taken is not None:
            self._all.give_back(self._taken, has_run=False)
            self._taken = None

    def place(self, row: int, medium: Medium, num_before: int, step: StepResult | None) -> None:
        """Let an admitted row, with `num_before` hit and awaited tokens, have the medium that was taken for it. Its first step,
        if that can fail, is `step`.
        """
        self._show(row, medium)
        self._taken, medium.step = None, step
        medium.follow(num_before, self._progress_of(row))

    def _progress_of(self, row: int) -> Progress:
        return partial(self._count_tokens, int(self._stays[row]))

    def _count_tokens(self, stay: int) -> tuple[int, int] | None:
        """Return the planned and the computed tokens of the row with this stay; None once it has ended."""
        rows = np.flatnonzero(self._stays == stay)
        return (int(self._num_computed[rows[0]]), int(self._num_final[rows[0]])) if rows.size else None

    def _show(self, row: int, medium: Medium) -> None:
        self._media[row], self._own_stays[row], self.num_encoder_tokens[row] = medium, self._stays[row], medium.num_tokens
        for table, ids in zip(self.tables, medium.page_ids, strict=True):
            table.add_row([*ids], row)

    def collect(self, may_fail: bool) -> None:
        """Give back the media of rows that ended, cached if their encoders have run. Planned steps count as run, unless a step
        in flight `may_fail`. O(rows).
        """
        self.give_back_taken()
        for row in np.flatnonzero((self._own_stays != NO_STAY) & (self._own_stays != self._stays)).tolist():
            medium, self._media[row] = self._media[row], None
            self._own_stays[row], self.num_encoder_tokens[row] = NO_STAY, 0
            for table in self.tables:
                table.clear_row(row)
            if medium is not None:
                is_in_flight = may_fail or (medium.step is not None and not medium.step.is_settled)
                counts_as_run = medium.is_planned and not is_in_flight and not self._all.caches_computed
                self._all.give_back(medium, has_run=medium.has_run or counts_as_run)

    def lose(self) -> None:
        """Give back the media of rows that ended with a failed step, and let its encoders run again."""
        self.collect(may_fail=True)
        self._all.lose()

    def exchange(self, src: int, tgt: int) -> None:
        """Follow two rows of the batch that were exchanged."""
        for table in self.tables:
            table.swap_row(src, tgt)
        for values in (self.num_encoder_tokens, self._own_stays):
            values[[src, tgt]] = values[[tgt, src]]
        self._media[src], self._media[tgt] = self._media[tgt], self._media[src]

    def fork(self, row: int, targets: Sequence[int]) -> None:
        """Let rows that were forked from a row share its medium."""
        medium = self._media[row]
        if medium is not None:
            for target in targets:
                self._all.share(medium, partial(self._show, target), self._progress_of(target))

    def check(self) -> None:
        """Raise IntegrityError unless tables and lengths show the media of the rows."""
        for row, medium in enumerate(self._media):
            expected = [()] * len(self.tables) if medium is None else medium.page_ids
            num_tokens = 0 if medium is None else medium.num_tokens
            for group, (table, ids) in enumerate(zip(self.tables, expected, strict=True)):
                found = table.page_table_cpu[row, : table.num_pages_per_row[row]].tolist()
                if found != [*ids] or self.num_encoder_tokens[row] != num_tokens:
                    got = f"{found} and {self.num_encoder_tokens[row]} encoder tokens"
                    allowed = f"{[*ids]} and {num_tokens}"
                    raise IntegrityError(f"row {row}: got {got} in group {group} of cross-attention, allowed: {allowed}")


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
