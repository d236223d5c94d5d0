"""Configurations of a manager, and of the random work on it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from managing import grouped, keep_token_ids
from pool_ranges import Pools

import pagepool
from pagepool import Retention

NumPages = int | Mapping[str, int]


@dataclass(frozen=True)
class Group:
    """A cache group: kind ("full", "sliding", "reference", "chunked", "mamba", "ring"), page size, window, chunk or period. A
    state may be kept where requests resume, and in prompts after each `interval` tokens. Groups that differ in the pool alone
    are of one kind.
    """

    kind: str
    page_size: int
    span: int = 0
    interval: int | None = None
    pool: str = field(default="kv", compare=False)

    @property
    def is_ring(self) -> bool:
        return self.kind == "ring"

    @property
    def is_state(self) -> bool:
        """Whether it has one page for all tokens, as rings do too."""
        return self.kind in ("mamba", "ring")

    @property
    def has_window(self) -> bool:
        """Whether a window or chunk leaves pages behind."""
        return self.span > 0 and not self.is_ring

    def spec(self, specs: ModuleType, dtype: Any) -> Any:
        """Build the spec with the classes of a module: the package's, or the engine's."""
        if self.is_ring:
            return specs.RingSpec(page_size=self.page_size, period=self.span, shape=(2,), dtype=dtype)
        if self.kind == "mamba":
            options: dict[str, Any] = {} if self.interval is None else {"checkpoint_interval": self.interval}
            return specs.MambaSpec(page_size=self.page_size, shapes=((2, 2),), dtype=dtype, **options)
        common = {
            "page_size": self.page_size,
            "num_kv_heads": 1,
            "head_size": 8,
            "dtype": dtype,
            "use_mla": False,
        }
        if self.kind == "reference":
            return specs.ReferenceWindowSpec(**common, sliding_window=self.span)
        if self.kind == "sliding":
            return specs.SlidingWindowSpec(**common, sliding_window=self.span)
        if self.kind == "chunked":
            return specs.ChunkedLocalAttentionSpec(**common, attention_chunk_size=self.span)
        return specs.FullAttentionSpec(**common)


@dataclass(frozen=True)
class Habits:
    """Abilities of the engine beyond the common ones; each can be switched off for a system without it."""

    extra_keys: bool = True  # salts, LoRA ids, multimodal features
    external_tokens: bool = True  # tokens that a KV transfer computes
    reserved_pages: bool = True
    evict_pages: bool = True
    delay_caching: bool = True
    prompt_logprobs: bool = True
    follow_ups: bool = True  # prompts that begin with a finished request's tokens
    repeated_tokens: bool = True  # generated tokens come from the vocabulary, otherwise each is new
    bursts: bool = True  # several tokens are appended, or drafts accepted, at once
    stray_calls: bool = True  # look-ups of running requests, calls that must be refused
    aborts: bool = True  # requests that were scheduled and did not run


@dataclass(frozen=True)
class Setting:
    """A configuration of the manager and of the workload on it."""

    name: str
    groups: tuple[Group, ...]
    num_pages: tuple[NumPages, ...] = (8, 13, 24, 64)  # by pool where there are several
    enable_caching: bool = True
    use_eagle: bool = False
    hash_lookahead: int = 0  # tokens behind a page that its key covers, with eagle
    data_parallel_size: int | None = None
    windows: tuple[int, int] | None = None  # slack and interval in tokens; None: all pages of windows stay cached
    max_steps_ahead: int = 0
    habits: Habits = field(default_factory=Habits)

    def with_lookahead(self, hash_lookahead: int) -> Setting:
        """Return the setting with eagle whose keys look so many tokens ahead; 0: as it is."""
        return replace(self, use_eagle=True, hash_lookahead=hash_lookahead) if hash_lookahead else self

    @property
    def drops_pages(self) -> bool:
        """Whether eagle drops the last page of a hit."""
        return self.use_eagle and not self.hash_lookahead

    @property
    def page_size(self) -> int:
        """The largest page that fills up, or interval, in tokens."""
        page_sizes = [group.page_size for group in self.groups if not group.is_state]
        return max([1, *page_sizes, *(group.interval or 1 for group in self.groups)])

    @property
    def has_state(self) -> bool:
        return any(group.kind == "mamba" for group in self.groups)

    @property
    def has_reference_window(self) -> bool:
        return any(group.kind == "reference" for group in self.groups)

    @property
    def writes_states(self) -> bool:
        states = [group.interval for group in self.groups if group.kind == "mamba"]
        return bool(states) and None not in states

    @property
    def has_pools(self) -> bool:
        """Whether there are several pools."""
        return len({group.pool for group in self.groups}) > 1

    def pools(self, num_pages: NumPages) -> Pools:
        """Return the pools of so many pages."""
        return Pools.of(num_pages, [(group.pool, group.is_state) for group in self.groups])

    @property
    def max_model_len(self) -> int:
        return max(24, 8 * self.page_size)

    def cache_groups(self, specs: ModuleType, dtype: Any = "float16") -> list[Any]:
        """Build the groups with the spec classes of a module. Those of an engine have one pool."""
        pools: list[dict[str, Any]] = [{"pool": group.pool} if self.has_pools else {} for group in self.groups]
        specs_and_pools = zip((group.spec(specs, dtype) for group in self.groups), pools, strict=True)
        return [specs.CacheGroupSpec(kv_cache_spec=spec, **pool) for spec, pool in specs_and_pools]

    def manager(
        self,
        manager_class: type[Any],
        groups: list[Any],
        num_pages: NumPages,
        max_leased_share: float = 0.2,
        **options: Any,
    ) -> Any:
        """Build a manager of this setting."""
        slack, interval = self.windows or (0, 0)
        retention = Retention(window_slack=slack, window_interval=interval, max_leased_share=max_leased_share)
        keeps_all = self.windows is None and not self.writes_states
        options |= {"windows": "all" if keeps_all else "ends", "retention": retention}
        options |= {"hash_lookahead": self.hash_lookahead} if self.hash_lookahead else {}
        if not issubclass(manager_class, pagepool.CacheManager):
            return manager_class(num_pages, groups, self.max_model_len, self.enable_caching, self.use_eagle, **options)
        keeps = options.pop("keep_token_ids", False)
        options = grouped(use_eagle=self.use_eagle, **options)
        manager = manager_class(num_pages, groups, self.max_model_len, self.enable_caching, **options)
        return keep_token_ids(manager) if keeps and manager.enable_caching else manager


FULL_1, FULL_2, FULL_4, FULL_6, FULL_8, FULL_16 = (Group("full", page_size) for page_size in (1, 2, 4, 6, 8, 16))
WINDOW_1, WINDOW_3, WINDOW_5, WINDOW_9 = (Group("sliding", 4, window) for window in (1, 3, 5, 9))
WIDE_6, WIDE_8 = (Group("sliding", page_size, 13) for page_size in (6, 8))
CHUNK_6, CHUNK_8, CHUNK_16 = (Group("chunked", 4, chunk) for chunk in (6, 8, 16))
STATE = Group("mamba", 8 * FULL_4.page_size)

SMALL, LARGE = (16, 40), (24, 64)

SETTINGS = [
    Setting("full 1", (FULL_1,), (64, 256)),
    Setting("full 2", (FULL_2,)),
    Setting("full 4", (FULL_4,)),
    Setting("full 16", (FULL_16,)),
    Setting("full uncached", (FULL_4,), enable_caching=False),
    Setting("full eagle", (FULL_4,), use_eagle=True),
    Setting("full 2 shards", (FULL_4,), (8, 24), data_parallel_size=2),
    Setting("full 4 shards", (FULL_2,), (16, 48), data_parallel_size=4),
    Setting("full uneven shards", (FULL_4,), (9, 25), data_parallel_size=2),
    Setting("full 4 and 8", (FULL_4, FULL_8), SMALL),
    Setting("window 1", (WINDOW_1,)),
    Setting("window 1 eagle", (WINDOW_1,), use_eagle=True),
    Setting("window 3", (WINDOW_3,)),
    Setting("window 5", (WINDOW_5,)),
    Setting("window 9", (WINDOW_9,)),
    Setting("window 9 eagle", (WINDOW_9,), use_eagle=True),
    Setting("window 9 uncached", (WINDOW_9,), enable_caching=False),
    Setting("window 9 2 shards", (WINDOW_9,), (8, 24), data_parallel_size=2),
    Setting("chunk 6", (CHUNK_6,)),
    Setting("chunk 8", (CHUNK_8,)),
    Setting("chunk 16", (CHUNK_16,)),
    Setting("chunk 16 uncached", (CHUNK_16,), enable_caching=False),
    Setting("mamba", (STATE,)),
    Setting("full and mamba", (FULL_4, STATE), SMALL),
    Setting("full and mamba in pages of 4", (FULL_4, Group("mamba", 4)), SMALL),
    Setting("full and window", (FULL_4, WINDOW_9), SMALL),
    Setting("full and window eagle", (FULL_4, WINDOW_9), SMALL, use_eagle=True),
    Setting("full and window 2 shards", (FULL_4, WINDOW_9), SMALL, data_parallel_size=2),
    Setting("windows and full", (WINDOW_9, WINDOW_9, FULL_4), LARGE),
    Setting("full and chunk", (FULL_4, FULL_4, CHUNK_16), LARGE),
    Setting("chunk and full", (CHUNK_6, FULL_4), SMALL),
    Setting("interleaved", (FULL_4, WINDOW_9, FULL_4, CHUNK_8, WINDOW_9), LARGE),
    Setting("two windows", (WINDOW_5, WINDOW_9), SMALL),
    Setting("two windows eagle", (WINDOW_9, WINDOW_3), SMALL, use_eagle=True),
    Setting("two chunks 4 shards", (CHUNK_8, CHUNK_16), SMALL, data_parallel_size=4),
    Setting("full 4 and window of 8", (FULL_4, WIDE_8), SMALL),
    Setting("window of 8 and full 4 eagle", (WIDE_8, FULL_4), SMALL, use_eagle=True),
    Setting("full 8 and windows of 4", (FULL_8, WINDOW_5, WINDOW_9), LARGE),
    Setting("full 4 and window of 6", (FULL_4, WIDE_6), SMALL),
    Setting("full 6, window of 4, chunk of 4", (FULL_6, WINDOW_9, CHUNK_8), LARGE),
    Setting("one window in pages of 4 and 6", (WINDOW_9, Group("sliding", 6, 9)), LARGE),
    Setting("one chunk in pages of 4 and 6", (CHUNK_8, Group("chunked", 6, 8)), LARGE),
    Setting("windows of 4 and 6 eagle", (WINDOW_9, WIDE_6), LARGE, use_eagle=True),
]


def kept(interval: int) -> Group:
    """Return a state that is kept where requests resume, and after each `interval` tokens of a prompt."""
    return Group("mamba", 64, interval=interval)


STATE_SETTINGS = [
    Setting("full 4, state every 4", (FULL_4, kept(4)), SMALL),
    Setting("full 2, state every 8", (FULL_2, kept(8)), SMALL),
    Setting("full 1, state every 3", (FULL_1, kept(3)), LARGE),
    Setting("state every 8, full 4", (kept(8), FULL_4), SMALL),
    Setting("full 4, window 9, state every 8", (FULL_4, WINDOW_9, kept(8)), LARGE),
    Setting("full 4, states every 4 and 8", (FULL_4, kept(4), kept(8)), SMALL),
    Setting("two states every 8, full 4", (kept(8), kept(8), FULL_4), SMALL),
    Setting("state every 1", (kept(1),)),
    Setting("state every 4", (kept(4),)),
    Setting("states every 4 and 6", (kept(4), kept(6)), SMALL),
    Setting("full 4, state every 4 eagle", (FULL_4, kept(4)), SMALL, use_eagle=True),
    Setting("window 9, state every 4 eagle", (WINDOW_9, kept(4)), SMALL, use_eagle=True),
    Setting("chunk 8, state every 8", (CHUNK_8, kept(8)), SMALL),
    Setting("full 4 and 8, state every 8", (FULL_4, FULL_8, kept(8)), SMALL),
    Setting("full 4 and 6, state every 6", (FULL_4, FULL_6, kept(6)), SMALL),
    Setting("full 4, state every 4, 2 shards", (FULL_4, kept(4)), SMALL, data_parallel_size=2),
    Setting("full 4, window 9, states, 4 shards", (FULL_4, WINDOW_9, kept(4), kept(8)), LARGE, data_parallel_size=4),
    Setting("full 4, state every 4 and none", (FULL_4, kept(4), STATE), SMALL),
    Setting("full 4, state every 4 uncached", (FULL_4, kept(4)), SMALL, enable_caching=False),
]


def in_pool(group: Group, pool: str) -> Group:
    """Return a group of the same kind whose pages come from a pool."""
    return replace(group, pool=pool)


def sizes(*nums: int, names: tuple[str, ...] = ("kv", "states")) -> dict[str, int]:
    """Return a number of pages for each pool."""
    return dict(zip(names, nums, strict=True))


STATE_4, STATE_8 = in_pool(kept(4), "states"), in_pool(kept(8), "states")
IN_THREE = "kv", "windows", "states"
POOL_SETTINGS = [
    Setting("full 4 / state every 4", (FULL_4, STATE_4), (sizes(16, 8), sizes(12, 24), sizes(40, 14))),
    Setting("full 2 / state every 8, tight", (FULL_2, STATE_8), (sizes(17, 7), sizes(24, 7), sizes(60, 8))),
    Setting("state every 8 / full 4", (STATE_8, FULL_4), (sizes(12, 16, names=("states", "kv")), sizes(30, 13))),
    Setting("full 4 / window 9", (FULL_4, in_pool(WINDOW_9, "windows")), tuple(
        sizes(*nums, names=("kv", "windows")) for nums in ((13, 9), (9, 13), (24, 20), (30, 12))
    )),
    Setting("window 5 / full 4 / window 9", (in_pool(WINDOW_5, "windows"), FULL_4, in_pool(WINDOW_9, "windows")), tuple(
        sizes(*nums, names=("windows", "kv")) for nums in ((20, 16), (30, 10), (14, 24))
    )),
    Setting("full 4 / window 9 / state every 8", (FULL_4, in_pool(WINDOW_9, "windows"), STATE_8), tuple(
        sizes(*nums, names=IN_THREE) for nums in ((16, 10, 8), (24, 16, 12), (12, 30, 20))
    )),
    Setting("full 4 / states every 4 and 8", (FULL_4, STATE_4, STATE_8), (sizes(16, 16), sizes(13, 30), sizes(30, 13))),
    Setting("full 4 / full 4", (FULL_4, in_pool(FULL_4, "other")), tuple(
        sizes(*nums, names=("kv", "other")) for nums in ((12, 16), (30, 12), (20, 20))
    )),
    Setting("full 4, state every 4 / window 3 / chunk 8, state every 8",
            (FULL_4, kept(4), in_pool(WINDOW_3, "windows"), in_pool(CHUNK_8, "chunks"), STATE_8),
            (sizes(30, 16, 12, 12, names=("kv", "windows", "chunks", "states")),
             sizes(24, 24, 24, 9, names=("kv", "windows", "chunks", "states")))),
    Setting("full 4 / state", (FULL_4, in_pool(STATE, "states")), (sizes(16, 7), sizes(30, 8))),
    Setting("full 4 / state every 4, uncached", (FULL_4, STATE_4), (sizes(12, 8), sizes(24, 7)), enable_caching=False),
    Setting("full 4 / window 9, uncached", (FULL_4, in_pool(WINDOW_9, "windows")), (
        sizes(12, 10, names=("kv", "windows")), sizes(24, 12, names=("kv", "windows"))
    ), enable_caching=False),
    Setting("full 4 / state every 4, eagle", (FULL_4, STATE_4), (sizes(16, 12), sizes(30, 8)), use_eagle=True),
    Setting("full 4 / window 9, eagle", (FULL_4, in_pool(WINDOW_9, "windows")), (
        sizes(16, 14, names=("kv", "windows")), sizes(12, 24, names=("kv", "windows"))
    ), use_eagle=True),
    Setting("full 4 / window 9, ends", (FULL_4, in_pool(WINDOW_9, "windows")), (
        sizes(16, 10, names=("kv", "windows")), sizes(24, 14, names=("kv", "windows"))
    ), windows=(4, 0)),
    Setting("full 4 / state every 4, 2 shards", (FULL_4, STATE_4), (sizes(24, 16), sizes(40, 24), sizes(16, 32)),
            data_parallel_size=2),
    Setting("full 4 / window 9 / states every 4 and 8, 4 shards", (FULL_4, in_pool(WINDOW_9, "windows"), STATE_4, STATE_8), (
        sizes(48, 40, 32, names=IN_THREE), sizes(64, 32, 48, names=IN_THREE)
    ), data_parallel_size=4),
    Setting("full 4 / window 9 / state every 8, ends", (FULL_4, in_pool(WINDOW_9, "windows"), STATE_8), (
        sizes(16, 12, 9, names=IN_THREE), sizes(24, 12, 16, names=IN_THREE)
    ), windows=(0, 10)),
]  # fmt: skip
"""Pools by kind, divided by slashes."""


def written(interval: int, pool: str = "states") -> Group:
    """Return a state that is kept where requests resume, and after each `interval` tokens of a prompt."""
    return Group("mamba", 64, interval=interval, pool=pool)


WRITE_SETTINGS = [
    Setting("full 4 / state at ends, 16", (FULL_4, written(16)), (sizes(60, 8), sizes(40, 24))),
    Setting("full 2 / state at ends, 8, one ahead", (FULL_2, written(8)), (sizes(60, 12), sizes(90, 40)),
            max_steps_ahead=1),
    Setting("full 4 and state at ends, 12, two ahead", (FULL_4, written(12, "kv")), (40, 64), max_steps_ahead=2),
    Setting("full 4 / window 9 / states at ends, 16", (FULL_4, in_pool(WINDOW_9, "windows"), written(16), written(16)), (
        sizes(40, 30, 18, names=IN_THREE), sizes(60, 20, 30, names=IN_THREE)
    ), windows=(0, 0)),
    Setting("window 5 and state at ends, 8, eagle", (WINDOW_5, written(8, "kv")), (40, 64), use_eagle=True, windows=(4, 0)),
    Setting("full 4, state at ends, 8, eagle", (FULL_4, written(8, "kv")), (40, 64), use_eagle=True),
    Setting("full 4, state at ends, 16, 2 shards", (FULL_4, written(16, "kv")), (64, 96), data_parallel_size=2),
    Setting("full 4 / state at ends, 8, 2 shards, one ahead", (FULL_4, written(8)), (sizes(60, 24), sizes(96, 40)),
            data_parallel_size=2, max_steps_ahead=1),
    Setting("full 4 / state at ends, uncached", (FULL_4, written(8)), (sizes(40, 8), sizes(60, 12)), enable_caching=False),
]  # fmt: skip
"""States that steps write to pages of their own."""

RINGS = "kv", "rings"
RING_4, RING_8 = Group("ring", 12, 4), Group("ring", 16, 8)
RING_SETTINGS = [
    Setting("full 4, ring of 4", (FULL_4, RING_4), (13, 24, 64)),
    Setting("full 4 / ring of 4", (FULL_4, in_pool(RING_4, "rings")), (sizes(16, 7, names=RINGS), sizes(40, 9, names=RINGS))),
    Setting("full 8 / ring of 8, ahead", (FULL_8, in_pool(RING_8, "rings")), (sizes(20, 8, names=RINGS),), max_steps_ahead=1),
    Setting("full 4, window 9, ring of 2", (FULL_4, WINDOW_9, Group("ring", 4, 2)), (30, 64)),
    Setting("full 4, window 9 / ring of 4, ends", (FULL_4, WINDOW_9, in_pool(RING_4, "rings")), (
        sizes(40, 8, names=RINGS), sizes(60, 12, names=RINGS)
    ), windows=(0, 0)),
    Setting("full 4 / state every 8 / ring of 4", (FULL_4, in_pool(kept(8), "states"), in_pool(RING_4, "rings")), (
        sizes(30, 12, 8, names=("kv", "states", "rings")),
    )),
    Setting("full 4, state every 4, ring of 2", (FULL_4, kept(4), Group("ring", 6, 2)), (40, 64)),
    Setting("full 4, ring of 4, eagle", (FULL_4, RING_4), (24, 64), use_eagle=True),
    Setting("full 4, ring of 4, 2 shards", (FULL_4, RING_4), (24, 64), data_parallel_size=2),
    Setting("full 4, ring of 4, uncached", (FULL_4, RING_4), (24,), enable_caching=False),
]  # fmt: skip
"""Rings, which are never cached."""

REFERENCE_3, REFERENCE_9 = Group("reference", 4, 3), Group("reference", 4, 9)
REFERENCE_SETTINGS = [
    Setting("reference 3", (REFERENCE_3,)),
    Setting("reference 9 eagle", (REFERENCE_9,), use_eagle=True),
    Setting("full 4, reference 9", (FULL_4, REFERENCE_9), SMALL),
    Setting("reference 5 in pages of 2 / full 4, ahead", (Group("reference", 2, 5), in_pool(FULL_4, "other")), (
        sizes(40, 12, names=("kv", "other")), sizes(20, 20, names=("kv", "other"))
    ), max_steps_ahead=1),
    Setting("reference 3, window 9, ends", (REFERENCE_3, WINDOW_9), SMALL, windows=(4, 0)),
    Setting("reference 9 / state every 8", (REFERENCE_9, STATE_8), (sizes(16, 12), sizes(40, 16))),
    Setting("reference 9, chunk 8, 2 shards", (REFERENCE_9, CHUNK_8), SMALL, data_parallel_size=2),
    Setting("reference 3, ring of 4", (REFERENCE_3, RING_4), (16, 40)),
    Setting("references 3 and 9, uncached", (REFERENCE_3, REFERENCE_9), SMALL, enable_caching=False),
]  # fmt: skip
"""Reference windows: pages of answers are given back behind the prompt, and never cached."""

WINDOWS = (4, 0), (0, 0), (0, 10), (8, 24), (64, 0)
MORE_ENDS = [
    Setting("full 8, windows of 2 and 4, eagle", (FULL_8, Group("sliding", 2, 6), WINDOW_9), LARGE, use_eagle=True),
    Setting("three windows, eagle", (WINDOW_3, WINDOW_9, Group("sliding", 4, 14)), LARGE, use_eagle=True),
    Setting("full 4, window of 8, window of 2", (FULL_4, WIDE_8, Group("sliding", 2, 5)), LARGE),
    Setting("full 12, window of 4, chunk of 2", (Group("full", 12), WINDOW_9, Group("chunked", 2, 10)), LARGE),
    Setting("full 4, window of 2, state every 8, eagle", (FULL_4, Group("sliding", 2, 7), kept(8)), LARGE, use_eagle=True),
]
ENDS_SETTINGS = [
    replace(setting, name=f"{setting.name}, ends {WINDOWS[i % len(WINDOWS)]}", windows=WINDOWS[i % len(WINDOWS)])
    for i, setting in enumerate(
        setting
        for setting in [*SETTINGS, *STATE_SETTINGS, *MORE_ENDS]
        if setting.enable_caching and any(group.has_window for group in setting.groups)
    )
]


NUM_OPERATIONS = int(os.environ.get("PAGEPOOL_TEST_OPERATIONS", "20000"))


def scale(most: int, part: int = 3) -> int:
    """Return a number of seeds: `most` in `make test-all`, and one of `part` of them in `make test`, or with fewer operations,
    since some tests assert that their seeds reach everything.
    """
    return min(most, most * max(NUM_OPERATIONS, 20_000) // (20_000 * part) + 1)


def weak_hash(content: Any) -> int:
    """Return a hash that collides often, like one known to an attacker."""
    return hash(content) % 5


HASHING: dict[str, dict[str, Any]] = {
    "siphash128": {},
    "siphash128 with token ids": {"keep_token_ids": True},
    "sha256": {"hash_algo": "sha256"},
    "builtin": {"hash_algo": hash},
    "weak": {"hash_algo": weak_hash},
}
NATIVE_HASHING = [options for options in HASHING.values() if not callable(options.get("hash_algo"))]  # which batches need
if find_spec("cbor2"):
    NATIVE_HASHING.append({"hash_algo": "sha256_cbor"})
