"""The random work of `states_workload` with a host tier: transfers are taken in time or not, end late, and in any order, and
fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple

from batch_model import BatchRows, OracleRows
from eviction_oracle import make_policy
from oracle import OracleManager
from oracle_kinds import Mamba, cdiv
from oracle_pool import NULL_PAGE
from oracle_tier import OracleTier, Taken
from pairs import make_managers
from settings import SETTINGS, STATE_SETTINGS, Setting
from states_workload import (
    Actions,
    RetainingStatesBatchWorkload,
    RetainingStatesWorkload,
    StatesBatchWorkload,
    StatesWorkload,
)
from twins import Mismatch, OracleTwin, PackageTwin, Twin
from workload import VOCABULARY, Request

import pagepool
from pagepool._core import HashChain, PageIds, PrefixQuery

EVICTIONS = "lru", "arc", "adaptive"
NULL_KEY = bytes(16)


def sizes_of_pools(setting: Setting) -> tuple[int, ...]:
    """Return how many pages there are for some requests, so that these run for a while, and much is evicted meanwhile."""
    num_pages = sum(cdiv(setting.max_model_len, group.page_size) for group in setting.groups)
    return tuple(cdiv(n * num_pages, 4) * 4 + setting.num_pages[0] % 2 for n in (2, 3))


TIERED_SETTINGS = [
    replace(setting, num_pages=sizes_of_pools(setting))
    for setting in (*SETTINGS, *STATE_SETTINGS)
    if setting.enable_caching and setting.page_size < 16
]


class TieredState(NamedTuple):
    """Everything that can be seen of a tier, and of what is before it."""

    front: Any
    stats: dict[str, int]
    entries: list[tuple[int, int]]  # content and group

    def differences(self, other: TieredState) -> list[str]:
        """Name what differs, with both values."""
        front = self.front.differences(other.front)
        values = zip(("tier", "entries of the tier"), self[1:], other[1:], strict=True)
        return [*front, *(f"{name}: {mine} against {theirs}" for name, mine, theirs in values if mine != theirs)]


def entries_of(tier: OracleTier) -> list[tuple[int, int]]:
    """Return what an oracle's tier has: each entry once."""
    return sorted(tier.pool.index)


def find_entries(manager: Any, oracle: OracleManager) -> list[tuple[int, int]]:
    """Return those entries of an oracle's tier that the package's tier has. All are looked up at once, mostly."""
    found = []
    for group in range(len(oracle.kinds)):
        entries = [entry for entry in entries_of(oracle.page_pool.tier) if entry[1] == group]
        chain = HashChain(1, NULL_KEY)
        for content, _ in entries:
            chain.append_key(oracle.keys.digests[content])
        query, stop = PrefixQuery(manager.page_pool.store, chain, NULL_PAGE, NULL_PAGE + 1, True), 0
        while stop < len(entries):
            start, stop = stop, query.find_leading_hits(PageIds([group]), 1, stop, len(entries))
            found += entries[start:stop]
            stop += stop < len(entries)
    return sorted(found)


def make_tiered_managers(setting: Setting, num_pages: int, seed: int) -> tuple[OracleManager, pagepool.CacheManager]:
    """Make the oracle and a manager, both with a tier, whose options are those of a seed."""
    rng = Random(f"{setting.name} {seed}")
    num_tier_pages, eviction = rng.choice((4, 20, 60, 200)), rng.choice(EVICTIONS)
    policy, min_uses = rng.choice(("write_back", "write_through")), rng.choice((1, 1, 1, 1, 1, 1, 1, 2, 3))
    tier = pagepool.HostTier(num_tier_pages, policy=policy, min_uses=min_uses, eviction=eviction)
    oracle, manager = make_managers(setting, num_pages, seed, {"host_tier": tier})
    tier_policy = make_policy(eviction, num_tier_pages)
    if tier_policy is not None:
        tier_policy.key_of = oracle.keys.digests.__getitem__
    OracleTier(oracle.page_pool, num_tier_pages, tier_policy, policy == "write_through", min_uses)
    return oracle, manager


class BeforeOracleTier:
    """A twin over an oracle with a tier."""

    manager: OracleManager

    def state(self, request_ids: Any) -> Any:
        tier = self.manager.page_pool.tier
        return TieredState(super().state(request_ids), tier.stats(), entries_of(tier))  # type: ignore[misc]


class BeforeHostTier:
    """A twin over the package, with a tier. It is asked for what the oracle's tier has."""

    manager: Any

    def __init__(self, oracle: OracleManager, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.oracle = oracle

    def state(self, request_ids: Any) -> Any:
        stats = {name: getattr(self.manager.host_tier.stats(), name) for name in self.oracle.page_pool.tier.stats()}
        return TieredState(super().state(request_ids), stats, find_entries(self.manager, self.oracle))  # type: ignore[misc]


class TieredOracleTwin(BeforeOracleTier, OracleTwin):
    """The oracle, with a tier."""


class TieredOracleRows(BeforeOracleTier, OracleRows):
    """Rows over the oracle, with a tier."""


class TieredBatchRows(BeforeHostTier, BatchRows):
    """A running batch, with a tier."""

    def admit(self, row: int, token_ids: list[int], **options: Any) -> int | None:
        """Admit. A refused request is looked up again, since the oracle remembers none: its features are in a new list."""
        return super().admit(row, token_ids, **{"mm_features": [], **options})


class TieredPackageTwin(BeforeHostTier, PackageTwin):
    """The package's manager, with a tier."""

    def look_up(self, request: Any, **options: Any) -> Any:
        """Look up, and probe first, which tells the same where there is room for what is loaded."""
        lookups = self.manager._lookups
        probe = None if options.get("dp_shard_hint") is not None else self.manager.probe(request)
        pages, num_tokens = Twin.look_up(self, request, **options)
        if probe is not None and probe.num_hit_tokens != num_tokens and not lookups.is_short(request):
            raise Mismatch(f"{probe} before a look-up that hit {num_tokens} tokens")
        return pages, num_tokens


class EndingTransfers:
    """Takes and ends the transfers of a workload's twins."""

    twins: Any
    rng: Random
    families: list[list[int]]  # more than there are without a tier, so that more is evicted that is used again
    max_tokens: int

    def __init__(self, *args: Any, **options: Any) -> None:
        self.in_flight: list[Taken] = []
        super().__init__(*args, **options)
        self.families += [self._tokens(self.max_tokens) for _ in self.families]

    def end_step(self) -> None:
        """End a step, as far as the tiers know."""
        self.twins.oracle.manager.end_step()
        self.twins.system.manager.end_step()

    def take_transfers(self) -> None:
        taken = self.twins.call("take_transfers")
        if taken.number:
            self.in_flight.append(taken)

    def take_all(self) -> None:
        super().take_all()  # type: ignore[misc]
        self.take_transfers()

    def take_in_time(self) -> None:
        super().take_in_time()  # type: ignore[misc]
        if self.rng.random() < 0.85:
            self.take_transfers()

    def _most_of(self, prompts: list[list[int]], max_tokens: int) -> list[int]:
        """Return a prompt with most tokens of another, and one more: of some others that of which the tier has most."""
        rng, manager = self.rng, self.twins.oracle.manager
        some = [prompt[: rng.randint(len(prompt) // 2, max_tokens - 1)] for prompt in rng.sample(prompts, 4)]
        asked = [Request("asked", [*prompt, rng.choice(VOCABULARY)]) for prompt in some]
        nums_tokens = []
        for request in asked:
            nums_tokens.append(manager.count_loadable_tokens(request))
            manager.keys.forget(request.request_id)
        self.twins.system.manager.free_page_hashes(asked[-1])
        return asked[nums_tokens.index(max(nums_tokens))].all_token_ids

    def end_transfers(self) -> None:
        """End any transfers in flight: mostly all are done."""
        if not self.in_flight:
            return
        number, saves, loads = self.in_flight.pop(self.rng.choice((0, self.rng.randrange(len(self.in_flight)))))
        if self.rng.random() < 0.7:
            self.twins.call("complete_transfers", number)
        else:
            bad_saves, bad_loads = (self.rng.sample(range(n), self.rng.randint(0, n)) for n in (len(saves), len(loads)))
            self.twins.call("fail_transfers", number, bad_saves, bad_loads)
            self.go_back()

    def go_back(self) -> None:
        """Let what has wrong pages now compute them again."""
        raise NotImplementedError

    def misuse_transfers(self) -> None:
        """End what is not in flight, or more than there is."""
        number = self.rng.choice((-1, 0, 1, 10**6))
        if all(number != taken.number for taken in self.in_flight):
            self.twins.call("complete_transfers", number)
            self.twins.call("fail_transfers", number, [], [])
        for number, saves, loads in self.in_flight[:1]:
            self.twins.call("fail_transfers", number, [len(saves)], [])
            self.twins.call("fail_transfers", number, [], [len(loads)])

    def drain(self) -> None:
        """Mostly with all transfers at an end, so that the reset succeeds."""
        if self.rng.random() < 0.7:
            self.take_transfers()
            while self.in_flight:
                self.end_transfers()
        super().drain()  # type: ignore[misc]


def transfer_actions(workload: Any) -> dict[Callable[[], None], float]:
    """Return the actions of a workload on transfers, with weights, and of what empties the tier, which is rare."""
    return {
        workload.take_copies: 0.5,
        workload.take_transfers: 1,
        workload.end_transfers: workload.rng.choice((2, 10)),
        workload.end_step: 1,
        workload.misuse_transfers: 0.2,
        workload.misuse_fork: 0.05,
        workload.evict: 0.1,
        workload.fail_load: 0.1,
        workload.reset: 0.05,
        workload.drain: 0.02,
    }


class TieredWorkload(EndingTransfers, StatesWorkload):
    """Requests whose pages are saved and loaded."""

    def _weighted_actions(self) -> Actions:
        return super()._weighted_actions() | transfer_actions(self)

    def _prompt(self) -> list[int]:
        """Return, often, what goes on with most of a family, or of what a finished request had."""
        if self.rng.random() < 0.4:
            return super()._prompt()
        return self._most_of([*self.histories, *self.families], self.max_tokens - 1)

    def _attributes(self, token_ids: list[int]) -> dict[str, Any]:
        return super()._attributes(token_ids) if self.rng.random() < 0.3 else {}

    def go_back(self) -> None:
        """Let requests compute wrong tokens again: from the start, where a state or a window needs it."""
        for request in list(self.engine.running):
            num_tokens = self.twins.call("find_wrong_token", request)
            if num_tokens is not None:
                request.num_computed_tokens = min(request.num_computed_tokens, num_tokens)
                if self._lacks_pages(request):
                    self.engine.preempt(request)

    def _lacks_pages(self, request: Request) -> bool:
        """Whether a request cannot go on, since a state, or a page that a window has left, is not that of its tokens."""
        manager = self.twins.oracle.manager
        groups = zip(manager.kinds, manager.get_page_ids(request.request_id), strict=True)
        return any(isinstance(kind, Mamba) or kind.lacks_page(pages, request.num_computed_tokens) for kind, pages in groups)


class TieredBatchWorkload(EndingTransfers, StatesBatchWorkload):
    """Rows, and requests beside them, whose pages are saved and loaded."""

    def _weighted_actions(self, trims: bool) -> Actions:
        return super()._weighted_actions(trims) | transfer_actions(self)

    def _new_request(self) -> tuple[list[int], dict[str, Any]]:
        """Return, often, what goes on with most of a family."""
        if self.rng.random() < 0.5:
            return super()._new_request()
        return self._most_of(self.families, self.max_tokens), {}

    def go_back(self) -> None:
        """Let rows compute wrong tokens again; end those that cannot, and the requests beside them."""
        _, lost = self.twins.call("rewind")
        self._remember(lost)
        self.twins.call("release", lost, 0)
        for name in list(self.twins.live_request_ids):
            if self.twins.call("go_back", name) is not None:
                del self.twins.live_request_ids[name]
                self.twins.call("finish_neighbour", name)


class RetainingTieredWorkload(TieredWorkload, RetainingStatesWorkload):
    """With pinned, retained and protected pages."""


class RetainingTieredBatchWorkload(TieredBatchWorkload, RetainingStatesBatchWorkload):
    """With pinned, retained and protected pages."""
