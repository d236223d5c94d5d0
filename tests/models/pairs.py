"""Managers and batches of the package beside the oracle, with the features that a workload has."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

from batch_model import BatchRows, OracleRows
from batch_workload import NUM_ROWS, BatchWorkload
from eviction_oracle import make_policy
from features import Features, Workload, run_workload
from oracle import OracleManager
from oracle_kinds import cdiv
from oracle_pool import NULL_PAGE
from oracle_tier import OracleTier
from pool_workload import describe_policy, describe_twin
from router import Telling
from settings import HASHING, NATIVE_HASHING, NumPages, Setting
from twins import OracleTwin, PackageTwin, Twins, charged_of_twin, figures_of, pools_of_twin, share_hashes, stats_of_twin
from workload import RandomWorkload

import pagepool
from pagepool._core import CacheGroups, HashChain, PageRules, copy_records, find_prefix

POLICIES = "lru", "adaptive"
LEASED_SHARES = 0.2, 0.6, 1.0
CACHES = "scheduled", "computed"
LOOKAHEADS = 0, 0, 0, 1, 2, 3
PERIODS = 1, 2, 7, 30  # calls between events that are told
NULL_KEY = bytes(16)
KEPT = 1 << 28  # flag in the group of a page


class FeaturedTwins(Twins):
    """Twins over managers whose tiers are compared too, and whose second half is checked by events, every few calls."""

    def __init__(self, oracle: Any, system: Any, features: Features, seed: int) -> None:
        super().__init__(oracle, system)
        self.tier = oracle.manager.page_pool.tier
        self.telling = Telling(system.manager, oracle.manager, seed % 8 >= 4) if features.events else None
        self.period = PERIODS[seed % len(PERIODS)]

    def compare_states(self) -> None:
        super().compare_states()
        if self.tier is not None:
            expected, manager = self.tier.stats(), self.system.manager
            self.require_equal("tier", expected, {name: getattr(manager.stats().host_tier, name) for name in expected})
            of_pools = {name: figures_of(stats) for name, stats in manager.stats().host_pools.items()}
            self.require_equal("pools of the tier", pools_of_twin(self.tier.pool, self.tier.pools), of_pools)
            self.require_equal("entries", sorted(self.tier.pool.index), find_entries(manager, self.oracle.manager))
        if self.oracle.manager.page_pool.tenants.are_used:
            stats = self.system.manager.stats()
            charged = {name: dict(pool.num_pages_by_tenant) for name, pool in stats.pools.items()}
            expected = charged_of_twin(self.oracle.manager.page_pool, self.oracle.manager.pools)
            self.require_equal("charged", expected, charged)
        if self.oracle.manager.windows is not None:
            kept = sorted(self.oracle.manager.page_pool.kept)
            self.require_equal("kept", kept, find_kept(self.system.manager._store))
        if self.telling is not None and self.num_calls % self.period == 0:
            self.telling.check()

    def require_same_figures(self) -> None:
        """Mismatch unless the counters and what the policies keep are the same in the end, too."""
        oracle, manager = self.oracle.manager, self.system.manager
        manager.check()
        self.require_equal("stats", stats_of_twin(oracle.page_pool), pagepool.PagePoolStats(**manager._store.counters))
        self.require_equal("policy", describe_twin(oracle.page_pool.policy), describe_policy(manager._store))


def find_kept(store: Any) -> list[int]:
    """Return the cached pages of a pool that stay when they leave a window."""
    groups = copy_records(store, "pages")["pages"]["group"][: copy_records(store, "")["num_pages"]]
    return ((groups >= 0) & (groups & KEPT != 0)).nonzero()[0].tolist()


def find_entries(manager: Any, oracle: OracleManager) -> list[tuple[int, int]]:
    """Return those entries of an oracle's tier that the package's tier has. All are looked up at once, mostly."""
    found, store = [], manager._store
    for group in range(len(oracle.kinds)):
        groups = CacheGroups([(PageRules(1), group, 1)])
        entries = [entry for entry in sorted(oracle.page_pool.tier.pool.index) if entry[1] == group]
        while entries:
            chain = HashChain(1, NULL_KEY)
            for content, _ in entries:
                chain.append_key(oracle.keys.digests[content])
            _, num_hits = find_prefix(store, groups, chain, len(entries) + 1, (NULL_PAGE, NULL_PAGE + 1), True)
            found += entries[:num_hits]
            del entries[: num_hits + 1]
    return sorted(found)


def make_managers(
    setting: Setting,
    num_pages: NumPages,
    features: Features,
    seed: int,
    hashings: list[dict[str, Any]],
    caches: str = "scheduled",
) -> tuple[OracleManager, pagepool.CacheManager]:
    """Make the oracle, and a manager whose hashes it knows. The seed chooses what the features leave open."""
    eviction = POLICIES[seed % len(POLICIES)] if features.policies else POLICIES[0]
    share = LEASED_SHARES[seed % len(LEASED_SHARES)] if features.expectations else LEASED_SHARES[0]
    knows_hashes = features.policies or features.tier or setting.has_pools
    hashings = [options for options in hashings if options != HASHING["weak"] or not knows_hashes]
    options: dict[str, Any] = {"hash_seed": seed} | hashings[seed // len(POLICIES) % len(hashings)]
    if features.tier:
        rng = Random(f"{setting.name} {seed}")
        tier_sizes = draw_tier_sizes(rng, num_pages)
        tier_policy = rng.choice(("write_back", "write_through"))
        options["host_tier"] = pagepool.HostTier(tier_sizes, policy=tier_policy)
    groups, policy = setting.cache_groups(pagepool), make_policy(eviction, setting.pools(num_pages).ranges[0].stop)
    common = {"caches": caches}
    oracle = setting.manager(OracleManager, groups, num_pages, share, policy=policy, **common)
    options |= {"eviction": eviction, **common}
    manager = setting.manager(pagepool.CacheManager, groups, num_pages, share, **options)
    oracle.keys.ignores_lengths = options.get("hash_algo") == "sha256_cbor"
    if knows_hashes:
        share_hashes(oracle, manager)
    if features.tier:
        tier_pools = setting.pools(tier_sizes)
        saved = {group.pool for group in setting.groups if not group.is_ring}
        ranges = zip(oracle.pools.names, tier_pools.ranges, oracle.pools.ranges, strict=True)
        has_room = all(len(pages) >= 2 * len(device) for name, pages, device in ranges if name in saved)
        writes_through = tier_policy == "write_through" and has_room
        OracleTier(oracle.page_pool, oracle.pools, tier_pools, writes_through)
    return oracle, manager


def draw_tier_sizes(rng: Random, num_pages: NumPages) -> NumPages:
    """Return a number of pages for a tier, or one for each pool."""
    if isinstance(num_pages, Mapping):
        return {name: rng.choice((4, 20, 60, 2 * size, 2 * size)) for name, size in num_pages.items()}
    return rng.choice((4, 20, 60, 200, 2 * num_pages))


def with_room(setting: Setting) -> Setting:
    """Return a setting with pools for some requests, so that these run for a while, and much is evicted meanwhile."""
    if setting.has_pools:
        least = Counter[str]()
        for group in setting.groups:
            least[group.pool] += 2 * cdiv(setting.max_model_len, group.page_size)
        step = setting.data_parallel_size or 1
        roomy = [
            {name: cdiv(max(size, least[name]), step) * step for name, size in sizes.items()} for sizes in setting.num_pages
        ]
        return replace(setting, num_pages=tuple(roomy))
    num_pages = sum(cdiv(setting.max_model_len, group.page_size) for group in setting.groups)
    return replace(setting, num_pages=tuple(cdiv(n * num_pages, 4) * 4 + setting.num_pages[0] % 2 for n in (2, 3)))


def make_requests(setting: Setting, num_pages: NumPages, features: Features, seed: int) -> FeaturedTwins:
    """Make twins that work request by request."""
    caches = "computed" if features.late else "scheduled"
    oracle, manager = make_managers(setting, num_pages, features, seed, list(HASHING.values()), caches)
    return FeaturedTwins(OracleTwin(oracle), PackageTwin(manager), features, seed)


def make_rows(
    setting: Setting,
    num_pages: NumPages,
    features: Features,
    seed: int,
    num_rows: int = NUM_ROWS,
    caches: str = "scheduled",
) -> FeaturedTwins:
    """Make twins that work row by row."""
    oracle, manager = make_managers(setting, num_pages, features, seed, NATIVE_HASHING, caches)
    rows, batch = OracleRows(oracle, setting, num_rows, caches), BatchRows(manager, setting, num_rows)
    return FeaturedTwins(rows, batch, features, seed)


def make_steps_ahead(setting: Setting, num_pages: NumPages, features: Features, seed: int) -> FeaturedTwins:
    """Make twins that work row by row, none, one or two steps ahead."""
    setting = replace(setting, max_steps_ahead=seed % 3)
    return make_rows(setting, num_pages, features, seed, caches=CACHES[seed // 3 % len(CACHES)])


KINDS: dict[str, tuple[type[Workload], Callable[..., FeaturedTwins]]] = {
    "requests": (RandomWorkload, make_requests),
    "rows": (BatchWorkload, make_rows),
    "steps ahead": (BatchWorkload, make_steps_ahead),
}


def run_twins(
    work: str, setting: Setting, features: Features, seed: int, num_calls: int, kind: type[Workload] | None = None
) -> Twins:
    """Run a seed's workload to its end: requests, rows, or rows with steps ahead."""
    usual, make = KINDS[work]
    setting = with_room(setting) if features.tier else setting
    setting = setting.with_lookahead(LOOKAHEADS[seed // 5 % len(LOOKAHEADS)])
    return run_workload(kind or usual, setting, partial(make, features=features, seed=seed), seed, num_calls, features)


def seeds_of(name: str, num_calls: int) -> Iterator[tuple[int, int]]:
    """Share the calls of a case among seeds: a few long runs, so that each reaches much, or a short one. Returns seeds, each
    with a number of calls.
    """
    num_seeds = max(1, num_calls // max(100, min(num_calls // 4, 1000)))
    first_seed = zlib.crc32(name.encode())
    return ((seed, -(-num_calls // num_seeds)) for seed in range(first_seed, first_seed + num_seeds))
