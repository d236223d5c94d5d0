"""The pure-Python twin of the allocator, written only to be obviously correct.

Pages are integers, page 0 is the null page. A page's content is everything that determines it: all tokens up
to its end and the extra keys of its request. `ContentKeys` numbers contents, so equal numbers mean equal
contents and there is no hash that could collide. Nothing is shared with the package: specs are told apart by
the name of their class, so that the twin also runs beside the engine that it was checked against.

Errors are the builtin ones that the package's own exceptions derive from.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from oracle_checkpoints import Lineage
from oracle_expected import SECOND, UNKNOWN, term_of_seconds
from oracle_kinds import HeldPages, Kind, Mamba, Reference, group_ids_by_kind, is_leading, is_recurrent, kind_of, leading_run
from oracle_pool import NULL_PAGE, OraclePool, PageIds, Ranking
from oracle_states import OracleStates
from oracle_tenants import Holder
from oracle_tier import Failed, Taken, note_loads, note_taken, waits_for_loads, wrong_token
from oracle_windows import OracleWindows
from oracle_writes import OracleWrites
from pool_ranges import Pools, Shard

if TYPE_CHECKING:
    from eviction_oracle import Adaptive

    from pagepool import Retention

RUNNING = 4
PREEMPTED = 5
MAX_WAITING = 16  # pages of a batch that wait to be entered

PagesByGroup = tuple[PageIds, ...]


# --- what a page contains -----------------------------------------------------------------------------------


class ContentKeys:
    """Numbers the contents of pages: one number for each (content of the parent page, tokens, tokens behind, extra keys).

    The tokens behind a page are its `hash_lookahead`; before they are known it has no content. With `ignores_lengths`, as vLLM
    does, features are the same that have the same content and offset. With `hash_page`, which hashes a page of a request,
    `digests` has the hash of each content.
    """

    def __init__(self, page_size: int, hash_lookahead: int) -> None:
        self.page_size = page_size
        self.hash_lookahead = hash_lookahead
        self.ignores_lengths = False
        self.hash_page: Callable[[Any, int], int] | None = None
        self.digests: dict[int, int] = {}
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._chains: defaultdict[str, list[int]] = defaultdict(list)
        self._nonces: dict[str, int] = {}
        self._next_nonces = itertools.count()

    def count_known(self, num_known_tokens: int) -> int:
        """Return how many of the known tokens can be in pages with a content: behind these the lookahead is known."""
        return max(0, num_known_tokens - self.hash_lookahead)

    def chain(self, request: Any) -> list[int]:
        """Return the contents of all full pages of the request, including newly full ones."""
        chain = self._chains[request.request_id]
        for page in range(len(chain), self.count_known(len(request.all_token_ids)) // self.page_size):
            chain.append(self._number(chain[-1] if chain else None, request, page))
        return chain

    def forget(self, request_id: str) -> None:
        """Drop the contents remembered for a finished request."""
        self._chains.pop(request_id, None)
        self._nonces.pop(request_id, None)

    def share_nonce(self, request: Any, new_id: str) -> None:
        """Let a request with unnamed images be hit by another's pages."""
        if has_unnamed_images(request):
            self._nonces[new_id] = self._nonce(request.request_id)

    def cut(self, request_id: str, num_tokens: int) -> None:
        """Drop the contents remembered for tokens from `num_tokens` on."""
        del self._chains[request_id][self.count_known(num_tokens) // self.page_size :]

    def _nonce(self, request_id: str) -> int:
        return self._nonces.setdefault(request_id, next(self._next_nonces))

    def _number(self, parent: int | None, request: Any, page: int) -> int:
        start, stop = page * self.page_size, (page + 1) * self.page_size
        keys = extra_keys(request, start, stop + self.hash_lookahead)
        if start == 0 and has_unnamed_images(request):
            keys += (("private", self._nonce(request.request_id)),)
        if self.ignores_lengths:
            keys = tuple((None, *key[1:3], None) if len(key) == 4 else key for key in keys)
        behind = request.all_token_ids[stop : stop + self.hash_lookahead]
        content = (parent, tuple(request.all_token_ids[start:stop]), tuple(behind), keys)
        number = self._numbers.setdefault(content, len(self._numbers))
        if self.hash_page is not None and number not in self.digests:
            self.digests[number] = self.hash_page(request, page)
        return number


def has_unnamed_images(request: Any) -> bool:
    """Whether only the request itself may hit its pages."""
    return getattr(request, "has_vision", False) and not getattr(request, "mm_features", None)


def extra_keys(request: Any, start: int, stop: int) -> tuple[Any, ...]:
    """Return the extra keys of the page with tokens [start, stop)."""
    features = getattr(request, "mm_features", None) or ()
    keys: list[Any] = [key for feature in features for key in feature_keys(feature, start, stop)]
    if start == 0:
        keys.append(("salt", getattr(request, "cache_salt", None)))
        keys.append(("lora", getattr(request, "lora_id", None)))
    return tuple(keys)


def feature_keys(feature: Any, start: int, stop: int) -> list[Any]:
    """Return the feature and its place in the page if it overlaps; one without a place is at token 0."""
    place = getattr(feature, "placeholder_range", None) or getattr(feature, "mm_position", None)
    first, length = (place.offset, place.length) if place else (0, 1)
    content = getattr(feature, "mm_hash", None) or feature.identifier
    overlaps = first < stop and start < first + length
    return [(feature.modality, content, first - start, length)] if overlaps else []


class TooLargeError(ValueError):
    """More pages than a pool has, or, without a name, a shard."""

    def __init__(self, pool: str | None) -> None:
        super().__init__(f"larger than {pool}")
        self.pool = pool


# --- the manager --------------------------------------------------------------------------------------------


def joined(first: PagesByGroup, second: PagesByGroup) -> PagesByGroup:
    """Return the pages of both, group by group."""
    return tuple(some + more for some, more in zip(first, second, strict=True))


def is_kept(kind: Kind) -> bool:
    """Whether checkpoints are made of a kind."""
    return isinstance(kind, Mamba) and kind.interval is not None


@dataclass(eq=False)
class OracleLease:
    """References to pages of a manager."""

    manager: OracleManager
    page_ids: PageIds
    end: int | None = None  # None: it has no end

    def extend(self, seconds: float) -> None:
        if self.end is None or not 0 < seconds < float("inf"):
            raise ValueError("no end, or no time")
        self.end = self.manager.page_pool.expected.now + math.ceil(seconds * SECOND)

    def release(self) -> None:
        self.manager.leases.remove(self)
        self.manager.page_pool.free_pages(self.page_ids[::-1])


class OracleManager:
    """The operations of `CacheManager`, with page ids in place of pages. Where it has several pools, these are records."""

    def __init__(
        self,
        num_pages: int | Mapping[str, int],
        kv_cache_groups: Sequence[Any],
        max_model_len: int,
        enable_caching: bool = True,
        use_eagle: bool = False,
        policy: Adaptive | None = None,
        windows: str = "all",
        retention: Retention | None = None,
        caches: str = "scheduled",
        hash_lookahead: int = 0,
    ) -> None:
        self.caches_computed = caches == "computed"
        self.kinds = [kind_of(group.kv_cache_spec) for group in kv_cache_groups]
        self.enable_caching = enable_caching and bool(self.kinds)
        self.max_model_len = max_model_len
        self.use_eagle = use_eagle and not hash_lookahead
        pool_names = [getattr(group, "pool", "kv") for group in kv_cache_groups]
        self.pools = Pools.of(
            num_pages, [(name, isinstance(kind, Mamba)) for name, kind in zip(pool_names, self.kinds, strict=True)]
        )
        num_pages = self.pools.num_records
        self.leased_share = retention.max_leased_share if retention else 0.2
        self.page_pool = OraclePool(num_pages, self.enable_caching, policy, self.pools.ranges)
        self.page_pool.prefers_held = self.caches_computed
        page_sizes = [kind.page_size for kind in self.kinds if not isinstance(kind, Mamba)]
        keeps_states = all(is_kept(kind) for kind in self.kinds if is_recurrent(kind))  # else no prefix can hit
        self.kinds = [kind if keeps_states or not is_kept(kind) else replace(kind, interval=None) for kind in self.kinds]
        intervals = [kind.interval for kind in self.kinds if isinstance(kind, Mamba) and kind.interval]
        self.hit_step = math.lcm(*page_sizes, *intervals)
        self.keys = ContentKeys(math.gcd(*page_sizes) or math.gcd(*intervals) or 1, hash_lookahead)
        self.kinds = [replace(kind, interval=self.hit_step) if is_kept(kind) else kind for kind in self.kinds]
        self.classes = group_ids_by_kind(self.kinds)
        self.states = OracleStates(self)
        self.page_pool.has_blank_first = self.states.interval is not None
        can_hit = self.enable_caching and all(is_kept(kind) or not is_recurrent(kind) for kind in self.kinds)
        is_selective = windows == "ends" and can_hit and any(map(OracleWindows.has_window, self.kinds))
        self.windows = OracleWindows(self, retention.window_slack, retention.window_interval) if is_selective else None
        self.writes_states = self.enable_caching and any(is_kept(kind) for kind in self.kinds)
        if self.writes_states:
            spacings = [getattr(group.kv_cache_spec, "checkpoint_interval", None) for group in kv_cache_groups]
            self.windows = OracleWindows(self, 0, min(filter(None, spacings)))
        self.writes = OracleWrites(self)
        self.sizes_awake: Sequence[int] | None = None
        self.held: dict[str, list[HeldPages]] = {}
        self.owners: dict[str, Any] = {}  # the request that holds pages under each id, or did
        self.queries: dict[str, dict[str, int]] = {}
        self.counted: set[str] = set()
        self.leases: list[OracleLease] = []  # the oldest first
        self.short: dict[str, Any] = {}  # requests for whose loads too few pages were free when they were looked up last
        self.waiting: list[tuple[HeldPages, int, int, int]] = []  # pages to enter: holder, place, content, group
        self.enters_later = False
        if self.writes_states:
            pools = list(zip(self.kinds, self.pools.of_group, strict=True))
            others = {pool for kind, pool in pools if not is_recurrent(kind)}
            of_attention = {pool for kind, pool in pools if not isinstance(kind, Mamba)}
            ranges = [pages for pool, pages in enumerate(self.pools.ranges) if of_attention and pool not in others]
            self.page_pool.checkpoints.begin(ranges, self.keys.digests.__getitem__)
        if policy is not None:
            policy.key_of = self.keys.digests.__getitem__
            kinds = list(enumerate(zip(self.kinds, self.pools.of_group, strict=True)))
            self.page_pool.carrier = next((i for i, (kind, pool) in kinds if is_leading(kind) and pool == 0), -1)
            self.page_pool.state_groups = [i for i, (kind, pool) in kinds if is_recurrent(kind) and pool > 0]

    @property
    def has_state(self) -> bool:
        return any(isinstance(kind, Mamba) for kind in self.kinds)

    @property
    def hits_leading_pages(self) -> bool:
        """Whether all groups hit any number of leading pages."""
        return self.enable_caching and all(is_leading(kind) for kind in self.kinds)

    def require_own(self, request: Any) -> None:
        """Refuse another request with the id of one that holds pages."""
        if request.request_id in self.held and self.owners[request.request_id] is not request:
            raise ValueError("the id of another request")

    # looking up

    def get_computed_pages(
        self,
        request: Any,
        *,
        dp_shard_hint: int | None = None,
        data_parallel_size: int | None = None,
        num_reserved_pages: int = 0,
    ) -> tuple[PagesByGroup, int]:
        """Return the pages of the longest cached prefix, by group, and its length in tokens. Loads leave pages free."""
        if not self._takes_hits(request):
            return self._no_pages(), 0
        shard = self.pools.shard_of_hint(dp_shard_hint, data_parallel_size)
        if self.pools.are_several:
            self.states.divide(shard)
        hits, length = self._load_hits(request, shard, num_reserved_pages)
        if self.windows is not None:
            self.windows.prefix_ends[request.request_id] = request, self.windows.last_end
        is_first = request.status != PREEMPTED and request.request_id not in self.counted
        self.queries[request.request_id] = {"queried": self.count_queried(request), "hit": length} if is_first else {}
        return hits, length

    def count_prompt(self, request: Any) -> int:
        """Return the tokens of a request's prompt: those that it has now, unless it says."""
        num_tokens = getattr(request, "num_prompt_tokens", None)
        return request.num_tokens if num_tokens is None else num_tokens

    def count_queried(self, request: Any) -> int:
        """Return how many tokens are looked up: with a reference window, those of the prompt and one more."""
        return min(request.num_tokens, self.count_prompt(request) + 1) if self.has_answers else request.num_tokens

    @property
    def has_answers(self) -> bool:
        """Whether answers are never cached: some group has a reference window."""
        return any(isinstance(kind, Reference) for kind in self.kinds)

    def _load_hits(self, request: Any, shard: range | Shard | None, num_reserved: int) -> tuple[PagesByGroup, int]:
        """Return the pages of the longest prefix, by group, and its length in tokens. Those that only the tier has are noted to
        be loaded; if too few pages are free for them, that is noted, and the prefix is the longest in the pool.
        """
        tier = self.page_pool.tier
        self.short.pop(request.request_id, None)
        length = self._hit_length(request, shard, reaches_tier=True)
        if tier is None or length == self._hit_length(request, shard):
            return self._hits_of(request, length, shard), length
        self.states.divide(shard)
        group_ids = range(len(self.kinds))
        entries = [entry for group_id in group_ids for entry in self._hit_entries(request, group_id, length)]
        if tier.load(entries, shard, num_reserved, self.page_pool.tenants.holder_of(request)):
            return self._hits_of(request, length, shard), length
        if self._may_hold(entries, shard):  # else no waiting helps
            self.short[request.request_id] = request
        return self._find_hits(request, shard)

    def find_reachable(self, request: Any, shard: range | Shard | None) -> tuple[PagesByGroup, int]:
        """Return the pages of the longest prefix in pool and tier, None for those in the tier alone, and its length."""
        length = self._hit_length(request, shard, reaches_tier=True)
        return self._hits_of(request, length, shard), length

    def _may_hold(self, entries: list[tuple[int, int]], shard: range | Shard | None) -> bool:
        """Whether each pool, or its shard, has enough pages for a hit in the tier, if it holds nothing else."""
        tier = self.page_pool.tier
        places = [tier.pages_for(group_id, shard) or range(self.page_pool.num_pages) for _, group_id in entries]
        return all(places.count(pages) <= len(self.page_pool.sizes.usable_in(pages)) for pages in places)

    def count_hits(self, request: Any, dp_shard_hint: int | None, data_parallel_size: int | None) -> int:
        """Return the tokens that a look-up finds if there is room for its loads."""
        if not self.enable_caching:
            return 0
        shard = self.pools.shard_of_hint(dp_shard_hint, data_parallel_size)
        self.states.divide(shard)
        length = self._hit_length(request, shard, reaches_tier=True)
        group_ids = range(len(self.kinds))
        entries = [entry for group_id in group_ids for entry in self._hit_entries(request, group_id, length)]
        is_in_reach = self.page_pool.tier is None or self._may_hold(entries, shard)
        return length if is_in_reach else self._hit_length(request, shard)

    def _find_hits(self, request: Any, shard: range | Shard | None) -> tuple[PagesByGroup, int]:
        """Return the pages of the longest prefix in the pool, by group, and its length in tokens."""
        length = self._hit_length(request, shard)
        return self._hits_of(request, length, shard), length

    def _hits_of(self, request: Any, length: int, shard: range | Shard | None) -> PagesByGroup:
        return tuple(self._hit_pages(request, group_id, length, shard) for group_id in range(len(self.kinds)))

    def _takes_hits(self, request: Any) -> bool:
        params = request.sampling_params
        return self.enable_caching and not (params and params.prompt_logprobs is not None)

    def _hit_length(self, request: Any, shard: range | Shard | None, reaches_tier: bool = False) -> int:
        """Let the kinds shorten the length in turn, each dropping eagle's page, until all agree."""
        if any(is_recurrent(kind) and kind.interval is None for kind in self.kinds):
            return 0
        length = self._floor(self.count_keyed(request, self.count_queried(request) - 1))
        hits = {kind: self._hits(request, kind, length, shard, reaches_tier) for kind in self.classes}
        most = length
        for kind in self.classes:
            length = self._floor(kind.longest(hits[kind], length, self.use_eagle))
        agreed = None
        while agreed != length:
            agreed = length
            for kind in self.classes:
                length = self._floor(kind.confirmed(hits[kind], length, self.use_eagle))
        if self.windows is not None and reaches_tier:
            self.windows.find_end(request, hits, length, most, shard)
        return length

    def _floor(self, num_tokens: int) -> int:
        return num_tokens // self.hit_step * self.hit_step

    def _hits(self, request: Any, kind: Kind, length: int, shard: range | Shard | None, reaches_tier: bool) -> list[bool]:
        """Return for each page of the kind whether all of its groups have it cached, perhaps in the tier."""
        keys = self.keys_of(request, kind)[: length // kind.hit_size]
        return [all(self.is_hit((key, i), shard, reaches_tier) for i in self.classes[kind]) for key in keys]

    def is_hit(self, entry: tuple[int, int], shard: range | Shard | None, reaches_tier: bool) -> bool:
        """Whether content is cached for a group, perhaps in the tier."""
        tier = self.page_pool.tier if reaches_tier else None
        found = self.page_pool.first_entered(*entry, shard)
        return found is not None or (tier is not None and tier.find(entry) is not None)

    def _hit_pages(self, request: Any, group_id: int, length: int, shard: range | Shard | None) -> PageIds:
        first = self.kinds[group_id].first_hit_page(length, self.use_eagle)
        entries = self._hit_entries(request, group_id, length)
        return [NULL_PAGE] * first + [self.page_pool.first_entered(*entry, shard) for entry in entries]

    def _hit_entries(self, request: Any, group_id: int, length: int) -> list[tuple[int, int]]:
        """Return content and group of the pages that a hit of this length needs in a group."""
        kind = self.kinds[group_id]
        places = slice(kind.first_hit_page(length, self.use_eagle), kind.num_places(length))
        return [(key, group_id) for key in self.keys_of(request, kind)[places]]

    def keys_of(self, request: Any, kind: Kind) -> list[int]:
        """Return the contents of the request's tokens up to each place of this kind."""
        step = kind.hit_size // self.keys.page_size
        return self.keys.chain(request)[step - 1 :: step]

    # allocation

    def allocate_slots(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_pages: PagesByGroup | None = None,
        num_lookahead_tokens: int = 0,
        delay_cache_pages: bool = False,
        dp_shard_hint: int | None = None,
        data_parallel_size: int | None = None,
        *,
        num_external_computed_tokens: int = 0,
        num_reserved_pages: int = 0,
        may_add_nothing: bool = False,
        num_free_rows: int = 0,
        num_reserved_slots: int = 0,
    ) -> PagesByGroup | None:
        """Allocate slots for new tokens; return the new pages by group, or None if a pool has too few. Pages are reserved in
        the first pool; in others checkpoints leave the pages of states for each free row. That many tokens get slots at least.
        """
        hits = new_computed_pages or self._no_pages()
        num_computed = request.num_computed_tokens + num_new_computed_tokens + num_external_computed_tokens
        if num_new_tokens < 0 or (num_new_tokens + num_external_computed_tokens <= 0 and not may_add_nothing):
            raise ValueError("nothing to allocate")
        if any(hits) and (not self.enable_caching or any(self.get_page_ids(request.request_id))):
            raise ValueError("hits go to a request that holds nothing")
        self._check_computed(request, num_new_computed_tokens, hits)
        if num_computed + num_new_tokens > self.max_model_len:
            raise ValueError("longer than the model allows")
        is_row = may_add_nothing
        if self.short.get(request.request_id) is request and request.request_id not in self.held:
            return None
        self.states.copies.require_none(self.held.get(request.request_id, ()))
        self.writes.require_none_due(request)
        num_slots = max(num_reserved_slots, min(num_computed + num_new_tokens + num_lookahead_tokens, self.max_model_len))
        try:
            self.require_fit(request, num_slots, hits, self._bound_shard(request, hits, dp_shard_hint, data_parallel_size))
        except ValueError:
            self.states.divide(self._shard(request, hits, dp_shard_hint, data_parallel_size))
            raise
        if self.writes_states and request.request_id not in self.held:
            ranks = self.page_pool.checkpoints.ranks_of((self.pools.range_of(self.writes.state_ids[0]) or [NULL_PAGE])[0])
            has_windows = any(OracleWindows.has_window(kind) or isinstance(kind, Reference) for kind in self.kinds)
            self.windows.writes_answers = ranks is not None and ranks.writes_answers and not has_windows
        self._rewind(request)
        is_late = self.caches_computed and not is_row
        is_delayed = delay_cache_pages and not is_late
        if not is_row:
            num_final = 0 if is_delayed else min(request.num_computed_tokens, self.keys.count_known(request.num_tokens))
            self.writes.settle_request(request, num_final)
            self.writes.drop(request, request.num_computed_tokens)
        if is_late or (self.keys.hash_lookahead and not is_row and not delay_cache_pages):
            self._enter_full_pages(request, min(request.num_computed_tokens, request.num_tokens))
        if num_new_tokens + num_external_computed_tokens:
            self._skip_pages(request, request.num_computed_tokens if delay_cache_pages and not is_late else None)
        num_missing = self._num_missing_pages(request, num_slots, hits)
        shard = self._shard(request, hits, dp_shard_hint, data_parallel_size)
        if any(num_missing) or any(hits):
            self.states.divide(shard)
        adopts = self._adopts(hits, num_missing, num_reserved_pages, shard, num_free_rows)
        if not adopts and not self._fits(num_missing, hits, num_reserved_pages):
            return None
        new_pages = self._take_pages(request, hits, num_missing, shard, adopts, self._holder_of(request))
        if new_pages is None:
            return None
        if request.request_id not in self.held:
            self.page_pool.note_request()
            if self.windows is not None and not is_row:
                self.windows.external_ends[request.request_id] = num_computed if num_external_computed_tokens else 0
        self._count_admission(request, hits)
        self._attach(request, hits, new_pages)
        if any(new_pages):
            note_taken(self.page_pool, self.held[request.request_id])
        if not is_delayed and not is_late:
            self._enter_full_pages(request, min(num_computed + num_new_tokens, request.num_tokens))
        if self.writes_states and not is_row:
            num_hashed = None if not is_delayed else self.count_queried(request) if any(hits) else 0
            options = {"num_reserved_pages": num_reserved_pages, "num_hashed": num_hashed}
            self.writes.start(request, num_computed - num_external_computed_tokens)
            if num_external_computed_tokens:
                self.writes.plan(request, num_computed, shard, is_transfer=True, **options)
            self.writes.plan(request, min(num_computed + num_new_tokens, request.num_tokens), shard, **options)
        return new_pages

    def require_fit(
        self,
        request: Any,
        num_slots: int,
        hits: PagesByGroup,
        shard: range | Shard | None,
        num_computed: int | None = None,
    ) -> None:
        """Refuse a request that would hold more pages than a pool, or its shard, has: those to which a token behind computed
        ones attends, hits, loaded too, and new ones.
        """
        num_computed = request.num_computed_tokens if num_computed is None else num_computed
        pages = [page for ids in self._attached(hits) for page in ids]
        for kind, held in zip(self.kinds, self.held.get(request.request_id, ()), strict=False):
            num_cached = held.num_cached_pages and max(held.num_cached_pages, num_computed // kind.page_size)
            first, num_prompt = self._first_held_page(kind, num_computed, num_cached), kind.num_prompt_pages(held)
            pages += held.pages[:num_prompt] + held.pages[max(first, num_prompt) :]
        num_missing = self._num_missing_pages(request, num_slots, hits)
        num_missing = [num + ids.count(None) for num, ids in zip(num_missing, self._attached(hits), strict=True)]
        places = [(name, ids, self.pools.groups_of(i)) for i, (name, ids) in enumerate(self.pools.items())]
        if shard is not None:
            parts = [self.pools.part_of(shard, i) for i in range(len(self.pools.ranges))]
            places += [(name, ids, groups) for (name, _, groups), ids in zip(places, parts, strict=True)]
        for name, ids, group_ids in places:
            usable = self.page_pool.sizes.usable_in(ids)
            if sum(page in usable for page in pages) + sum(num_missing[i] for i in group_ids) > len(usable):
                raise TooLargeError(name if self.pools.are_several else None)

    def source_of(self, group_id: int, shard: range | Shard | None) -> range | None:
        """Return where a group takes pages: in a shard, or its pool; None means all pages."""
        return self.pools.range_of(group_id) if shard is None else self.pools.part_of(shard, self.pools.of_group[group_id])

    def _bound_shard(
        self, request: Any, hits: PagesByGroup, dp_shard_hint: int | None, data_parallel_size: int | None
    ) -> range | None:
        """Return the shard from which all pages have to come; None if these are in several."""
        pages = [page for ids in (*self.get_page_ids(request.request_id), *hits) for page in ids if page != NULL_PAGE]
        are_divided = self.pools.are_divided(data_parallel_size)
        if are_divided and len({self.pools.shard_number(page, data_parallel_size) for page in pages}) > 1:
            return None
        return self._shard(request, hits, dp_shard_hint, data_parallel_size)

    def _count_admission(self, request: Any, hits: PagesByGroup) -> None:
        """Count the look-up of a request that holds nothing yet, once, with its hits."""
        if request.request_id not in self.held and request.request_id in self.queries:
            query = self.queries.pop(request.request_id)
            self.counted.add(request.request_id)
            self.page_pool.counts.update(query if any(hits) else query | {"hit": 0})

    def _check_computed(self, request: Any, num_new_computed: int, hits: PagesByGroup) -> None:
        """Refuse tokens that cannot have been computed: each needs a page, among the hits if the request holds nothing yet."""
        held = self.held.get(request.request_id)
        if held is not None and num_new_computed:
            raise ValueError("hits are counted twice")
        pages_by_group = [group.pages for group in held] if held is not None else hits
        num_computed = request.num_computed_tokens + num_new_computed
        if self.states.interval and any(hits) and num_computed != self._count_hit_tokens(hits):
            raise ValueError("a checkpoint is hit at another length")
        if num_computed and self.kinds and not any(pages_by_group):
            raise ValueError("tokens of a request without pages were computed")
        for kind, pages in zip(self.kinds, pages_by_group, strict=True):
            if held is None and isinstance(kind, Mamba):  # an engine may have restored its state
                continue
            if kind.num_required_pages(num_computed) > len(pages):
                raise ValueError("tokens without pages were computed")

    def _count_hit_tokens(self, hits: PagesByGroup) -> int:
        """Return the tokens that all groups hit."""
        groups = zip(self.kinds, hits, strict=True)
        return min(len(pages) * kind.hit_size for kind, pages in groups if is_kept(kind) or not isinstance(kind, Mamba))

    def _rewind(self, request: Any) -> None:
        """Revisit the pages whose tokens are to be computed, perhaps again: they may have lost their entries."""
        groups = list(zip(self.kinds, self.held.get(request.request_id, ()), strict=False))
        revisited = [(kind, held) for kind, held in groups if not (isinstance(kind, Mamba) and self.writes_states)]
        num_once = max((self._entry_size(kind) * held.num_cached_pages for kind, held in revisited), default=0)
        num_once = max(num_once, *(held.num_once_cached_tokens for _, held in groups), 0)
        if request.num_computed_tokens < num_once:
            for kind, held in groups:
                held.go_back(kind.num_places(request.num_computed_tokens))
                held.num_once_cached_tokens = num_once

    def _skip_pages(self, request: Any, num_tokens: int | None = None) -> None:
        """Free the pages to which no token attends behind the cacheable ones, or behind `num_tokens`, and with which nobody
        resumes where the request may end, last one first; none while loads may fail, so that it can go back.
        """
        num_tokens = self.count_cacheable(request) if num_tokens is None else num_tokens
        for kind, held in zip(self.kinds, self.held.get(request.request_id, ()), strict=False):
            if waits_for_loads(self.page_pool, held):
                continue
            num_cached = held.num_cached_pages
            is_past = self.has_answers and (num_cached + 1) * kind.page_size > held.num_prompt_tokens
            if num_cached and (held.load_number or is_past):  # what could not be entered counts
                num_cached = max(num_cached, num_tokens // kind.page_size)
            first = self._first_held_page(kind, num_tokens, num_cached)
            self._skip_to(request, kind, held, min(first, len(held.pages)))

    def _first_held_page(self, kind: Kind, num_computed_tokens: int, num_cached_pages: int) -> int:
        if self.windows is not None and OracleWindows.has_window(kind):
            return self.windows.first_held_page(kind, num_computed_tokens, num_cached_pages)
        return kind.first_useful_page(num_computed_tokens, num_cached_pages)

    def _skip_to(self, request: Any, kind: Kind, held: HeldPages, stop: int) -> None:
        """Free the pages before place `stop`, last one first, of which a policy gets to know in one call."""
        part, left = self._find_known_part(request), []
        for place in range(stop - 1, kind.num_prompt_pages(held) - 1, -1):
            if held.pages[place] == NULL_PAGE:
                break
            self._pass_part([held.pages[place]], part)
            self._leave(request, kind, place, held.pages[place])
            left.append(held.pages[place])
            held.pages[place] = NULL_PAGE
        self.page_pool.count_left(left)

    def _leave(self, request: Any, kind: Kind, place: int, page: int) -> None:
        if self.windows is not None:
            self.windows.leave(request, kind, place, page)
        else:
            self.page_pool.skip_page(page, self._is_needed_by_hits(kind, place))

    def _pass_part(self, pages: PageIds, part: int | None) -> None:
        if self.page_pool.policy is not None:
            self.page_pool.policy.pass_part(pages, part)

    def _find_known_part(self, request: Any) -> int | None:
        """Return the part for all pages of a request of which a policy knew three quarters of the longest group's pages."""
        groups = list(zip(self.kinds, self.held.get(request.request_id, ()), self.pools.of_group, strict=False))
        full = [(held, pool) for kind, held, pool in groups if is_leading(kind)]
        longest = (full[-1:] or [(held, pool) for kind, held, pool in groups if not isinstance(kind, Mamba)])[:1]
        has_parts = self.page_pool.policy is not None and self.windows is not None
        for held in [held for held, pool in longest if has_parts and pool == 0]:
            num_known = held.ranking.num_ranked
            if num_known and 4 * num_known >= 3 * len(held.pages):
                return self.page_pool.policy.marks[held.pages[num_known - 1]].part
        return None

    def _is_needed_by_hits(self, kind: Kind, place: int) -> bool:
        """Whether a hit of any length may need the page at `place`."""
        lengths = range(0, (place + 1) * kind.page_size + 2 * self.hit_step, self.hit_step)
        return self.use_eagle or any(
            kind.first_hit_page(length, False) <= place < length // kind.page_size for length in lengths
        )

    def _num_missing_pages(self, request: Any, num_slots: int, hits: PagesByGroup) -> list[int]:
        there = zip(self.kinds, self.get_page_ids(request.request_id), self._attached(hits), strict=True)
        return [max(0, kind.num_required_pages(num_slots) - len(held) - len(hit)) for kind, held, hit in there]

    def _attached(self, hits: PagesByGroup) -> PagesByGroup:
        """Return the hits that become pages of the request: a checkpoint is copied."""
        return tuple([] if isinstance(kind, Mamba) else pages for kind, pages in zip(self.kinds, hits, strict=True))

    def _adopts(
        self,
        hits: PagesByGroup,
        num_missing: list[int],
        num_reserved_pages: int,
        shard: range | Shard | None,
        num_free_rows: int,
    ) -> bool:
        """Whether checkpoints that are hit become working pages, since there are too few pages to copy them to, beside those of
        other rows without a state.
        """
        checkpoints = self.states.checkpoints_in(hits)
        if not checkpoints or not self.page_pool.free_queue.keys() >= set(checkpoints.values()):
            return False
        num_least = [num_pages - (i in checkpoints) for i, num_pages in enumerate(num_missing)]
        may_copy = self._fits(num_missing, hits, num_reserved_pages, num_free_rows)
        if may_copy and self._fits_shard(num_missing, hits, shard):
            return False
        return self._fits(num_least, hits, num_reserved_pages) and self._fits_shard(num_least, hits, shard)

    def _fits_shard(self, num_missing: list[int], hits: PagesByGroup, shard: range | Shard | None) -> bool:
        hit = {page for pages in hits for page in pages}
        return shard is None or all(
            sum(num_missing[i] for i in self.pools.groups_of(pool)) <= sum(page not in hit for page in free)
            for pool, free in self._free_by_pool(shard)
        )

    def _free_by_pool(self, shard: range | Shard | None) -> list[tuple[int, PageIds]]:
        """List the free pages of a shard, or all, by pool."""
        ranges = self.pools.ranges if shard is None else [self.pools.part_of(shard, i) for i in range(len(self.pools.ranges))]
        return [(pool, self.page_pool.free_in(pages)) for pool, pages in enumerate(ranges)]

    def _fits(self, num_missing: list[int], hits: PagesByGroup, num_reserved_pages: int, num_free_rows: int = 0) -> bool:
        pools = range(len(self.pools.ranges))
        kept = [num_free_rows * self._count_states_in(pool) if pool else num_reserved_pages for pool in pools]
        return all(self._fits_pool(pool, num_missing, hits, kept[pool]) for pool in pools)

    def _count_states_in(self, pool: int) -> int:
        """Count the groups of states in a pool."""
        return sum(isinstance(self.kinds[i], Mamba) for i in self.pools.groups_of(pool))

    def _fits_pool(self, pool: int, num_missing: list[int], hits: PagesByGroup, num_reserved_pages: int) -> bool:
        """Whether a pool has as many free pages as the groups of it take."""
        group_ids, free = self.pools.groups_of(pool), self.page_pool.free_in(self.pools.ranges[pool])
        num_free_hits = len({page for i in group_ids for page in hits[i] if page in self.page_pool.free_queue})
        return sum(num_missing[i] for i in group_ids) + num_free_hits <= max(0, len(free) - num_reserved_pages)

    def _shard(
        self, request: Any, hits: PagesByGroup, dp_shard_hint: int | None, data_parallel_size: int | None
    ) -> range | None:
        """Return the shard on which all held pages and hits agree, else the hinted one."""
        if not self.pools.are_divided(data_parallel_size):
            return None
        pages_by_group = (*self.get_page_ids(request.request_id), *hits)
        pages = [page for pages in pages_by_group for page in pages if page != NULL_PAGE]
        shards = {self.pools.shard_number(page, data_parallel_size) for page in pages}
        return self.pools.shard_of_hint(shards.pop() if len(shards) == 1 else dp_shard_hint, data_parallel_size)

    def _continue_runs(self, request: Any, hits: PagesByGroup) -> None:
        """Let the runs of a request that is admitted continue from the checkpoints that it hits."""
        self.lineages = {}
        if not self.writes_states or request.request_id in self.held:
            return
        looked_up, end = self.windows.prefix_ends.get(request.request_id, (None, None))
        is_first = True
        for group_id in self.writes.state_ids:
            lineage = self.lineages[group_id] = Lineage()
            page, num_tokens = (hits[group_id] or [NULL_PAGE])[-1], len(hits[group_id]) * self.hit_step
            ranks = self.page_pool.checkpoints.ranks_of((self.pools.range_of(group_id) or [NULL_PAGE])[0])
            if ranks is not None and looked_up is request:
                ranks.learn(end, group_id, page, num_tokens, is_first)
            is_first = False
            if page != NULL_PAGE:
                self.page_pool.checkpoints.continue_from(lineage, page, num_tokens)

    def _take_pages(
        self,
        request: Any,
        hits: PagesByGroup,
        num_missing: list[int],
        shard: range | Shard | None,
        adopts: bool,
        holder: Holder,
    ) -> PagesByGroup | None:
        """Touch the hits and take new pages; free the hits again if the shard has too few."""
        checkpoints = self.states.checkpoints_in(hits)
        if adopts:
            self._continue_runs(request, hits)
            self.page_pool.touch(self._attached(hits))
            self.page_pool.expected.use([page for pages in hits for page in pages], holder)
            for page in checkpoints.values():
                self.page_pool.take_page(page, holder)
            num_missing = [0 if i in checkpoints else num_pages for i, num_pages in enumerate(num_missing)]
            taken = self._take_by_group(num_missing, shard, holder)
            return tuple([checkpoints[i]] if i in checkpoints else pages for i, pages in enumerate(taken))
        self.page_pool.touch(hits)
        nums_free = [(pool, len(free)) for pool, free in self._free_by_pool(shard)]
        if any(num_free < sum(num_missing[i] for i in self.pools.groups_of(pool)) for pool, num_free in nums_free):
            for pages in hits:
                self.page_pool.free_pages(pages)
            return None
        self._continue_runs(request, hits)
        self.page_pool.expected.use([page for pages in hits for page in pages], holder)
        new_pages = self._take_by_group(num_missing, shard, holder)
        for group_id, page in checkpoints.items():
            self.states.copies.note(page, new_pages[group_id][0], group_id)
        return new_pages

    def _take_by_group(self, nums: Sequence[int], shard: range | Shard | None, holder: Holder) -> PagesByGroup:
        return tuple(self.page_pool.take(num, self.source_of(i, shard), holder) for i, num in enumerate(nums))

    def _holder_of(self, request: Any) -> Holder:
        """Return for whom a request takes pages: what it was when it took the first ones."""
        held = self.held.get(request.request_id)
        return held[0].holder if held else self.page_pool.tenants.holder_of(request)

    def set_shares(self, shares: Mapping[str, float]) -> None:
        """Set the shares of tenants."""
        self.page_pool.tenants.set_shares(shares)

    def _attach(self, request: Any, hits: PagesByGroup, new_pages: PagesByGroup) -> None:
        if request.request_id not in self.held:
            attached = zip(hits, self._attached(hits), strict=True)
            holder = self._holder_of(request)
            self.owners[request.request_id] = request
            self.held[request.request_id] = [
                HeldPages(list(pages), len(hit), len(hit), Ranking(len(hit)), holder=holder) for hit, pages in attached
            ]
            for held in self.held[request.request_id]:
                held.num_prompt_tokens = self.count_prompt(request)
            for group_id, lineage in self.lineages.items():
                self.held[request.request_id][group_id].lineage = lineage
            note_loads(self.page_pool, self.held[request.request_id], hits)
            if self.windows is not None:
                self.windows.begin(request)
                self.windows.keep_hits(hits)
        for held, pages in zip(self.held[request.request_id], new_pages, strict=True):
            held.pages += pages

    def cache_pages(self, request: Any, num_computed_tokens: int) -> None:
        """Enter the pages that are full of computed tokens in the prefix index."""
        if request.request_id not in self.held and self.enable_caching:
            raise ValueError("a request without pages")
        self._rewind(request)
        self._enter_full_pages(request, num_computed_tokens)
        self.writes.settle_request(request, self.count_keyed(request, num_computed_tokens))

    def count_keyed(self, request: Any, num_tokens: int) -> int:
        """Return how many of the first tokens of a request have a known lookahead behind them, if that matters."""
        return min(num_tokens, self.keys.count_known(request.num_tokens)) if self.enable_caching else num_tokens

    def count_cacheable(self, request: Any) -> int:
        """Return how many computed tokens may be cached."""
        return self.count_keyed(request, request.num_computed_tokens)

    def _enter_full_pages(self, request: Any, num_computed_tokens: int) -> None:
        if not self.enable_caching:
            return
        for group_id, held in enumerate(self.held.get(request.request_id, ())):
            kind = self.kinds[group_id]
            num_tokens = self.count_keyed(request, num_computed_tokens)
            num_tokens = min(num_tokens, held.num_prompt_tokens) if self.has_answers else num_tokens
            num_full_pages = min(num_tokens // kind.page_size, len(held.pages))
            if isinstance(kind, Mamba) or num_full_pages <= held.num_cached_pages or waits_for_loads(self.page_pool, held):
                continue
            if self.keys.hash_lookahead and self.states.copies.are_due([held], into_only=True):
                continue  # full pages of a fork are copied
            keys = self.keys_of(request, kind)
            for page in range(held.num_cached_pages, num_full_pages):
                if held.pages[page] != NULL_PAGE:
                    self._enter_soon(held, page, keys[page], group_id)
            held.num_cached_pages = num_full_pages
        if not self.enters_later:
            self._enter_waiting()

    def _enter_soon(self, held: HeldPages, page: int, key: int, group_id: int) -> None:
        if len(self.waiting) == MAX_WAITING:
            self._enter_waiting()
        self.waiting.append((held, page, key, group_id))

    def _enter_waiting(self) -> None:
        """Enter the pages that wait for it, unless they have that entry."""
        waiting, self.waiting = self.waiting, []
        for held, page, key, group_id in waiting:
            if self.page_pool.entry_of_page.get(held.pages[page]) != (key, group_id):
                session_id = held.holder.session_id
                self.page_pool.cache_full_pages(held.pages, {page: key}, page, page + 1, group_id, held.ranking, session_id)
                self.page_pool.expected.own(held.pages[page], held.holder)

    @contextmanager
    def entering_later(self) -> Iterator[None]:
        """Let pages wait for others, which are entered with them: a policy is told of misses after the evictions meanwhile."""
        self.enters_later = True
        try:
            yield
        finally:
            self.enters_later = False
        self._enter_waiting()

    # tokens from elsewhere, and leases

    def commit_external(self, request: Any, num_tokens: int, is_last: bool = True) -> None:
        """Enter the pages of tokens that came, which the caller counts as computed, and free those that none attends to. Before
        the last tokens came, only enter pages, if these hit without the end of the tokens.
        """
        self._check_external(request, num_tokens)
        num_computed = request.num_computed_tokens + num_tokens
        if not is_last:
            if self.hits_leading_pages:
                self._enter_full_pages(request, num_computed)
            return
        for kind, held in zip(self.kinds, self.held[request.request_id], strict=True):
            stop = 0 if isinstance(kind, Mamba) else min(kind.first_useful_page(num_computed, 0), len(held.pages))
            self._skip_to(request, kind, held, stop)
            if not isinstance(kind, Reference):
                held.num_cached_pages = max(held.num_cached_pages, stop)
        self._enter_full_pages(request, num_computed)
        self.writes.settle_request(request, self.count_keyed(request, num_computed))

    def fail_external(self, request: Any, num_valid_tokens: int, is_row: bool = False) -> int:
        """Commit the tokens that came, and free the pages behind them; all, if there are states: those of a row one by one,
        those of a request, which holds nothing then, in one call. Returns what is computed.
        """
        self._check_external(request, num_valid_tokens)
        num_computed, has_state = 0, any(isinstance(kind, Mamba) for kind in self.kinds)
        if has_state and not is_row:
            self._give_back_all([request], [None], [UNKNOWN])
            self.note_run_end(request)
            self.writes.drop(request, 0)
            del self.held[request.request_id]
            return 0
        if not has_state:
            self.commit_external(request, num_valid_tokens)
            num_computed = request.num_computed_tokens + num_valid_tokens
        if self.hits_leading_pages:
            self._forget_uncomputed(request, num_computed)
        for kind, held in zip(self.kinds, self.held[request.request_id], strict=True):
            while len(held.pages) > kind.num_required_pages(num_computed):
                self.page_pool.free_pages([held.pages.pop()])
            held.go_back(kind.num_places(num_computed))
        return num_computed

    def _check_external(self, request: Any, num_tokens: int) -> None:
        held = self.held.get(request.request_id)
        if held is None:
            raise ValueError("a request without pages")
        groups = zip(self.kinds, held, strict=True)
        rooms = [len(group.pages) * kind.page_size for kind, group in groups if not isinstance(kind, Mamba)]
        if request.num_computed_tokens + num_tokens > min([request.num_tokens, *rooms]):
            raise ValueError("more tokens than have slots")
        self.states.copies.require_none(held)
        self.writes.require_none_due(request)

    def lease(self, page_ids: PageIds, seconds: float | None = None) -> None:
        """Hold pages that are held, or cached, for some time or until the lease is released."""
        pool = self.page_pool
        if seconds is not None and not 0 < seconds < float("inf"):
            raise ValueError("no time")
        if any(page == NULL_PAGE or (pool.ref_counts[page] == 0 and page not in pool.entry_of_page) for page in page_ids):
            raise IndexError("a page is neither held nor cached")
        if seconds is not None:
            leased = page_ids + [page for lease in self.leases if lease.end is not None for page in lease.page_ids]
            for pages in self.pools.ranges:
                if sum(page in pages for page in leased) > int(self.leased_share * pool.sizes.count_in_use(pages)):
                    raise ValueError("too many pages are leased")
        for page in page_ids:
            if page in pool.free_queue:
                pool.touch([[page]], is_use=False)
            else:
                pool.ref_counts[page] += 1
        end = None if seconds is None else pool.expected.now + math.ceil(seconds * SECOND)
        self.leases.append(OracleLease(self, page_ids, end))

    # going back

    def check_return(self, request: Any, num_tokens: int, restart: int) -> None:
        """Refuse to compute again from `restart` on, of so many tokens, where copies are due, or the next token would miss a
        page: its own, or one it attends to.
        """
        if self.states.copies.are_due(self.held[request.request_id]):
            raise RuntimeError("copies are due")
        for kind, held in zip(self.kinds, self.held[request.request_id], strict=True):
            if kind.lacks_page(held, num_tokens, restart):
                raise ValueError("a page that is needed again was given back")

    def go_back(self, request: Any, num_tokens: int, restart: int, changed: int) -> None:
        """Let the request keep pages for so many tokens, compute them again from `restart` on, and write from `changed` on."""
        for kind, held in zip(self.kinds, self.held[request.request_id], strict=True):
            num_kept_pages = self._num_kept_pages(kind, held, changed, num_tokens)
            while len(held.pages) > num_kept_pages:
                self._let_go(held.pages.pop())
            self.page_pool.drop_entries(held.pages[kind.num_full_pages(changed) :])
            held.go_back(kind.num_places(restart if isinstance(kind, Mamba) else changed))

    def find_restart(self, request: Any, num_tokens: int, changed: int) -> int:
        """Return how many of so many computed tokens stay, if the request writes from `changed` on: none in a page to which it
        writes and which others hold.
        """
        starts = []
        for kind, held in zip(self.kinds, self.held[request.request_id], strict=True):
            num_kept_pages = self._num_kept_pages(kind, held, min(changed, num_tokens), num_tokens)
            if num_kept_pages < kind.num_required_pages(num_tokens):
                starts.append(num_kept_pages * kind.page_size)
        return self.find_restart(request, min(starts), changed) if starts else num_tokens

    def _num_kept_pages(self, kind: Kind, held: HeldPages, changed: int, num_tokens: int) -> int:
        """Count the pages of the tokens, up to the first to which the request would write, and which others hold."""
        num_pages = kind.num_required_pages(num_tokens)
        written = range(kind.num_full_pages(changed), min(num_pages, len(held.pages)))
        return next((i for i in written if self.page_pool.ref_counts[held.pages[i]] > 1), num_pages)

    def _let_go(self, page: int) -> None:
        """Release a page; the last holder drops its entry."""
        if page != NULL_PAGE:
            if self.page_pool.ref_counts[page] == 1:
                self.page_pool.drop_entries([page])
            self.page_pool.free_pages([page])

    # entries of tokens that were not computed

    def _entry_size(self, kind: Kind) -> int:
        """Return the tokens of a group's prefix entry; 0 if it has none."""
        if not self.enable_caching:
            return 0
        return (kind.interval or 0) if isinstance(kind, Mamba) else kind.page_size

    def _forget_uncomputed(self, request: Any, num_computed_tokens: int) -> None:
        """Drop the entries that the request made for pages with tokens from there on. Which page a window has left, or which a
        checkpoint is, is not known any more: all with that content lose the entry.
        """
        for group_id, (kind, held) in enumerate(zip(self.kinds, self.held.get(request.request_id, ()), strict=False)):
            num_once = held.num_once_cached_tokens // self._entry_size(kind) if self._entry_size(kind) else 0
            stop = held.num_written if isinstance(kind, Mamba) else max(held.num_cached_pages, min(num_once, len(held.pages)))
            keys = self.keys_of(request, kind) if stop else []
            for i in range(max(kind.num_places(num_computed_tokens), held.num_hit_pages), stop):
                if isinstance(kind, Mamba) and not self.states.is_checkpoint(request, (i + 1) * self.hit_step):
                    continue
                page = NULL_PAGE if isinstance(kind, Mamba) else held.pages[i]
                if page != NULL_PAGE:
                    self.page_pool.evict_pages([page])
                elif i < len(keys):
                    self.page_pool.evict_pages(list(self.page_pool.index.get((keys[i], group_id), ())))
                    if self.page_pool.tier is not None:
                        self.page_pool.tier.drop((keys[i], group_id))

    # release and inspection

    def free(self, request: Any, *, num_computed_tokens: int | None = None, seconds: float | None = None) -> None:
        """Free all pages of the request, last one first. Uncomputed pages lose their entries."""
        terms = [term_of_seconds(seconds)]
        if request.request_id in self.held:
            if self.caches_computed or self.keys.hash_lookahead:
                nums = request.num_computed_tokens, request.num_tokens, num_computed_tokens
                self._enter_full_pages(request, min(num for num in nums if num is not None))
            self._give_back_all([request], [num_computed_tokens], terms)
            self.note_run_end(request)
            nums = request.num_computed_tokens, self.keys.count_known(request.num_tokens), num_computed_tokens
            self.writes.settle_request(request, min(num for num in nums if num is not None), terms[0])
            self.writes.drop(request, 0)
            self.states.copies.drop(self.pages_of(request))
            if num_computed_tokens is not None:
                self._forget_uncomputed(request, num_computed_tokens)
            del self.held[request.request_id]

    def note_run_end(self, request: Any) -> None:
        """Note that a run ends with its last cached page of full attention."""
        full = [held for kind, held in zip(self.kinds, self.held[request.request_id], strict=True) if is_leading(kind)][:1]
        for held in full if self.writes_states else ():
            if held.num_cached_pages:
                self.page_pool.checkpoints.note_end(held.pages[held.num_cached_pages - 1])

    def _give_back_all(self, requests: Sequence[Any], nums_computed_tokens: Sequence[int | None], terms: Sequence[int]) -> None:
        """Free all pages of requests in one call; those of windows with which nobody can resume are dropped."""
        if self.enable_caching and any(terms):
            self.page_pool.expected.begin()
        for request, num_computed_tokens in zip(requests, nums_computed_tokens, strict=True):
            self._pass_part(self.pages_of(request), self._find_known_part(request))
            if self.windows is not None:
                self.windows.keep_last(request, num_computed_tokens)
        held = [
            (group.pages[place], self._is_worthless(kind, place, group.pages[place], num_computed_tokens), term)
            for request, num_computed_tokens, term in zip(requests, nums_computed_tokens, terms, strict=True)
            for kind, group in zip(self.kinds, self.held.get(request.request_id, ()), strict=False)
            for place in range(len(group.pages) - 1, -1, -1)
        ]
        worthless = [page for page, is_worthless, _ in held if is_worthless]
        staying = [(page, term) for page, is_worthless, term in held if not is_worthless]
        self.page_pool.give_back([page for page, _ in staying], worthless, [term for _, term in staying])

    def _is_worthless(self, kind: Kind, place: int, page: int, num_computed_tokens: int | None) -> bool:
        """Whether a page that is given back loses its entry. That of one that was not computed is forgotten everywhere."""
        if self.windows is None or not OracleWindows.has_window(kind) or not self.page_pool.is_worthless(page):
            return False
        return num_computed_tokens is None or place < num_computed_tokens // kind.page_size

    def free_page_hashes(self, request: Any) -> None:
        """Drop the contents of a finished request's pages, and its counted look-up."""
        self.keys.forget(request.request_id)
        self.counted.discard(request.request_id)
        self.short.pop(request.request_id, None)
        self.queries.pop(request.request_id, None)

    def get_page_ids(self, request_id: str) -> PagesByGroup:
        """Return what the request holds, by group."""
        held = self.held.get(request_id)
        return tuple(group.pages for group in held) if held else self._no_pages()

    def pages_of(self, request: Any) -> set[int]:
        """Return the pages that the request holds."""
        return {page for pages in self.get_page_ids(request.request_id) for page in pages if page != NULL_PAGE}

    def get_num_common_prefix_pages(self, request: Any, num_scheduled_requests: int) -> list[int]:
        """Count, by group, the leading pages that at least this number of requests hold."""
        if request.status != RUNNING:
            raise ValueError("the request is not running")
        return [
            leading_run([self._num_requests(page) >= num_scheduled_requests for page in pages])
            if self.enable_caching and is_leading(kind)
            else 0
            for kind, pages in zip(self.kinds, self.get_page_ids(request.request_id), strict=True)
        ]

    def _num_requests(self, page: int) -> int:
        """Count the references of a page besides those of leases, copies that are due, and loads that did not end."""
        tier = self.page_pool.tier
        moved = [page for lease in self.leases for page in lease.page_ids]
        moved += [copy.src for copy in self.states.copies.due]
        moved += [load.page for load in tier.transfers if load.is_load] if tier is not None else []
        return self.page_pool.ref_counts[page] - (page in self.page_pool.sizes.retired) - moved.count(page)

    def reset_prefix_cache(self) -> bool:
        """Drop all prefix entries, unless a page is held."""
        return self.page_pool.reset_prefix_cache()

    # sizes

    def resize(self, sizes: Sequence[int]) -> PageIds:
        """Let the pools have other sizes; return the pages above that are held."""
        held = self.page_pool.sizes.resize(sizes, self.caches_computed)
        self.sizes_awake = None
        return held

    def vacate(self, preempt: bool) -> bool:
        """Empty the pools. Return whether requests hold pages, and nothing changed, if that may be."""
        pool = self.page_pool
        if any(map(pool.sizes.is_held, range(1, pool.num_pages))):
            held = {page for groups in self.held.values() for group in groups for page in group.pages}
            if preempt and ({*held, *(write.page for write in self.writes.open)} - {NULL_PAGE}):
                return True
            raise RuntimeError("pages are held")
        self.sizes_awake = self.sizes_awake or [1 + pool.sizes.count_in_use(pages) for pages in pool.ranges]
        pool.sizes.resize([1] * len(pool.ranges), self.caches_computed)
        return False

    def resume(self) -> None:
        """Let the pools have the sizes that they had before they were vacated."""
        if self.sizes_awake is not None:
            self.resize(self.sizes_awake)

    # copies and forks

    @property
    def checkpoint_interval(self) -> int | None:
        return self.states.interval

    def take_moves(self) -> Taken:
        """Return the moves that are due, with the writes of requests."""
        return self.take_pool_moves()._replace(writes=self.writes.take_all())

    def take_pool_moves(self) -> Taken:
        """Return the moves that are due, without writes."""
        tier, copies = self.page_pool.tier, self.states.copies
        if tier is not None and not copies.is_between:
            tier.begin_step()
        transfers = (0, [], []) if tier is None else tier.take(bool(copies.due))
        return Taken(*transfers, [tuple(copy) for copy in copies.take()], [])

    def fork(self, request: Any, new_request: Any) -> PagesByGroup | None:
        """Let a new request go on where another one is; return its pages, or None if the pool has too few."""
        if request.request_id not in self.held or new_request.request_id in self.held:
            raise ValueError("a fork is of a request that holds pages to one that holds none")
        num_tokens = request.num_computed_tokens
        rooms = zip(self.kinds, self.held[request.request_id], strict=True)
        is_room = all(kind.num_required_pages(num_tokens) <= len(held.pages) for kind, held in rooms)
        if num_tokens != new_request.num_computed_tokens or not is_room:
            raise ValueError("a fork has computed other tokens")
        self.states.copies.require_none(self.held.get(request.request_id, ()), into_only=True)
        self.writes.require_none_due(request)
        if self.enable_caching and self._inputs(request, num_tokens) != self._inputs(new_request, num_tokens):
            raise ValueError("a fork has other tokens")
        held = [page for pages in self.get_page_ids(request.request_id) for page in pages if page != NULL_PAGE]
        shard = self.states.shard_of(held[0]) if held else None
        if not self.states.fork(request, [new_request], shard):
            return None
        self.keys.share_nonce(request, new_request.request_id)
        if not any(self.get_page_ids(new_request.request_id)):
            del self.held[new_request.request_id]
        return self.get_page_ids(new_request.request_id)

    def _inputs(self, request: Any, num_tokens: int) -> tuple[Any, ...]:
        """Return all that determines what is computed of the first tokens, and the rest of the features."""
        keys = extra_keys(request, 0, self.max_model_len)
        return request.all_token_ids[:num_tokens], keys, has_unnamed_images(request)

    # the tier

    def count_loadable_tokens(self, request: Any) -> int:
        """Return by how many tokens the tier makes the prefix longer that hits."""
        return self._hit_length(request, None, reaches_tier=True) - self._hit_length(request, None)

    def complete(self, number: int) -> None:
        self.fail(number)

    def fail(self, number: int, saves: Sequence[int] = (), loads: Sequence[int] = ()) -> Failed:
        """End the transfers of a list, of which those at these places of the saves and loads failed."""
        if self.page_pool.tier is None:
            raise ValueError("no tier")
        return self.page_pool.tier.end(number, saves, loads)

    def wrong_token(self, request: Any, failed: Failed) -> int | None:
        """Return the first token of a request that is in a page that failed to load; None if there is none."""
        num_tokens = wrong_token(self.kinds, self.held.get(request.request_id, ()), failed)
        if self.page_pool.tier is not None and num_tokens is not None:
            self.page_pool.tier.counts["wrong tokens found"] += 1
        return num_tokens

    def find_wrong_token(self, request: Any, failed: Failed) -> int | None:
        """Let a request go back before its wrong tokens, if it can, and return from which token on it is computed again."""
        num_tokens = self.wrong_token(request, failed)
        if num_tokens is None:
            return None
        num_tokens = self.find_restart(request, num_tokens, num_tokens)
        try:
            self.check_return(request, self.max_model_len, num_tokens)
        except (RuntimeError, ValueError):
            return num_tokens
        self.go_back(request, self.max_model_len, num_tokens, num_tokens)
        if not any(self.get_page_ids(request.request_id)):
            del self.held[request.request_id]
        return num_tokens

    # expectations, and leases of spans

    def set_time(self, time: int) -> None:
        """Let the clock go to a time; leases that are over end, the newest first."""
        self.page_pool.expected.now = time
        for lease in self.leases[::-1]:
            if lease.end is not None and lease.end <= time:
                lease.release()

    def expect(self, request: Any, start: int = 0, stop: int | None = None, *, seconds: float | None) -> int:
        """Say when the cached pages within tokens [start, stop) are wanted again, the last one first."""
        self._check_span(start, stop)
        term, found = term_of_seconds(seconds), self._list_cached(request, start, stop)
        if term != UNKNOWN and found:
            self.page_pool.expected.begin()
        for page in reversed(found):
            self.page_pool.expected.expect(page, term)
        return len(found)

    def expect_session(self, session_id: str, *, seconds: float | None) -> int:
        """Say when the pages of a session are wanted."""
        term = term_of_seconds(seconds)
        if term != UNKNOWN and session_id in self.page_pool.expected.sessions:
            self.page_pool.expected.begin()
        return self.page_pool.expected.expect_session(session_id, term)

    def lease_span(self, request: Any, start: int = 0, stop: int | None = None, *, seconds: float) -> PageIds:
        """Lease the pages that are cached under tokens [start, stop)."""
        self._check_span(start, stop)
        if max(start, stop or 0) > request.num_tokens:
            raise ValueError("behind the known tokens")
        if not 0 < seconds < float("inf"):
            raise ValueError("no time")
        self._check_gone(request, start, stop)
        found = self._list_cached(request, start, stop)
        if not found:
            raise ValueError("no page is cached")
        self.lease(found, seconds)
        return found

    def _list_cached(self, request: Any, start: int, stop: int | None) -> PageIds:
        return [page for page in self._find_cached(request, start, stop).values() if page is not None]

    def _find_cached(self, request: Any, start: int, stop: int | None) -> dict[tuple[int, int], int | None]:
        """Find the page that is cached under the tokens of each place within [start, stop), its own before others."""
        found, own = {}, self.get_page_ids(request.request_id)
        for group_id, place, key in self._places(request, start, stop) if self.enable_caching else ():
            first = None if key is None else self.page_pool.first_entered(key, group_id, None)
            pages = [*own[group_id][place : place + 1], first]
            is_right = [self.page_pool.entry_of_page.get(page) == (key, group_id) for page in pages]
            found[group_id, place] = pages[is_right.index(True)] if any(is_right) else None
        return found

    def _check_gone(self, request: Any, start: int, stop: int | None) -> None:
        """Refuse a span that has lost a page of full attention, or at whose end a request can no longer resume. Without a stop
        a group may end sooner.
        """
        for group_id, kind in enumerate(self.kinds):
            found = self._find_cached(request, start, request.num_tokens if stop is None else min(stop, request.num_tokens))
            there = [page is not None for (each, _), page in found.items() if each == group_id]
            if stop is None and True in there:
                there = there[: len(there) - there[::-1].index(True)]
            if is_leading(kind) and False in there and (stop is not None or True in there):
                raise ValueError("a page is gone")
        if stop is None or not self.hit_step or self.page_pool.enable_caching is False:
            return
        windows = self.windows or OracleWindows(self, 0, 0)
        end = windows.find_resumption(min(stop, request.num_tokens))
        can_hit = all(is_kept(kind) or not is_recurrent(kind) for kind in self.kinds)
        found = self._find_cached(request, 0, min(stop, request.num_tokens)) if end > 0 and can_hit else {}
        for (group_id, place), page in found.items():
            kind = self.kinds[group_id]
            if not is_leading(kind) and page is None and place in windows.pages_at(kind, end, end):
                raise ValueError("requests can no longer resume at the end")

    def _check_span(self, start: int, stop: int | None) -> None:
        if start < 0 or (stop is not None and stop < start):
            raise ValueError("no span of tokens")

    def _places(self, request: Any, start: int, stop: int | None) -> list[tuple[int, int, int | None]]:
        """List group, place and content of the request's full pages, and checkpoints, wholly within tokens [start, stop). Those
        whose lookahead is not known have no content.
        """
        stop = request.num_tokens if stop is None else stop
        return [
            (group_id, place, key)
            for group_id, kind in enumerate(self.kinds)
            if is_kept(kind) or not isinstance(kind, Mamba)
            for place, key in itertools.zip_longest(range(request.num_tokens // kind.hit_size), self.keys_of(request, kind))
            if start <= place * kind.hit_size and (place + 1) * kind.hit_size <= stop
        ]

    def _no_pages(self) -> PagesByGroup:
        return tuple([] for _ in self.kinds)
