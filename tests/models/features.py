"""What random work can do beside admitting, growing and ending, for workloads of requests and of rows alike.

A workload is given its features, so that each can meet each other.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from random import Random
from types import SimpleNamespace
from typing import Any

from oracle import NULL_PAGE, PagesByGroup
from oracle_expected import START
from oracle_tier import Taken
from settings import NumPages, Setting
from twin_engine import NUM_FAMILIES, VOCABULARY, Feature, Request
from twins import Mismatch, Twins

Actions = dict[Callable[[], None], float]
Span = tuple[()] | tuple[int] | tuple[int, int | None]


@dataclass(frozen=True, repr=False)
class Features:
    """What is done, and what the systems do. A seed chooses what is left open, such as the policy or the size of a tier."""

    states: bool = False  # chunks end where checkpoints can be made, and conversations come back, so that these are hit
    forks: bool = False
    expectations: bool = False  # when pages are wanted, and leases of spans; the clock goes on
    external: bool = False  # requests wait for tokens from elsewhere, and there are leases of pages
    tier: bool = False  # transfers are taken in time or not, end late, in any order, and fail
    policies: bool = False  # other orders of eviction than that of release
    events: bool = False  # a router is told what is cached
    images: bool = False  # most requests have images without a name, and share nothing
    late: bool = False  # pages of requests are cached once they are computed
    sizes: bool = False  # pools shrink, grow, are vacated and come back

    @property
    def copies(self) -> bool:
        """Whether copies are taken: in time or not."""
        return self.states or self.forks or self.tier

    @property
    def names(self) -> list[str]:
        return [field.name for field in fields(self) if getattr(self, field.name)]

    def __repr__(self) -> str:
        return f"Features({', '.join(f'{name}=True' for name in self.names)})"


PLAIN = Features()


def draw_features(rng: Random) -> Features:
    """Return about half of all features; images, which take the prompts of others away, rarely."""
    drawn = {field.name: rng.random() < (0.1 if field.name == "images" else 0.5) for field in fields(Features)}
    return Features(**drawn | {"states": True})


def random_span(rng: Random, num_tokens: int) -> Span:
    """Return all tokens of a request, mostly, or some; sometimes what is refused."""
    start = rng.choice((0, 0, rng.randint(0, num_tokens)))
    stop = rng.choice((None, rng.randint(start, num_tokens + 3), rng.randint(start, num_tokens)))
    return rng.choice(((), (), (start,), (start, stop), (start, stop), rng.choice(((-1,), (3, 2), (start, stop)))))


def random_seconds(rng: Random) -> float | None:
    """Return when something is wanted: soon, mostly, or late, never, nobody knows; sometimes what is refused."""
    seconds = rng.choice((None, math.inf, 0, 1, rng.randint(0, 20), 2.0 ** rng.uniform(0, 8), 2.0 ** rng.uniform(0, 20)))
    return seconds if rng.random() < 0.97 else rng.choice((-1, math.nan, -math.inf))


def draw_placement(rng: Random, num_shards: int | None) -> dict[str, Any]:
    """Return where pages should come from."""
    if num_shards is None:
        return {}
    return {"dp_shard_hint": rng.choice((None, *range(2 * num_shards))), "data_parallel_size": num_shards}


class Driver(ABC):
    """Drives twins at random."""

    actions: Actions  # what may be done next, with weights

    def __init__(self, twins: Twins, rng: Random) -> None:
        self.twins = twins
        self.rng = rng

    @abstractmethod
    def drain(self) -> None:
        """End everything that holds pages, so that a reset succeeds."""

    def run(self, num_calls: int, where: str) -> Twins:
        """Act until so many calls are made, then drain. A mismatch says where it was, so that it can be repeated."""
        actions, weights = zip(*self.actions.items(), strict=True)
        cumulated = list(itertools.accumulate(weights))
        try:
            while self.twins.num_calls < num_calls:
                self.rng.choices(actions, cum_weights=cumulated)[0]()
            self.drain()
            self.twins.require_same_figures()
        except Exception as error:
            raise Mismatch(f"{where}, call {self.twins.num_calls - 1} of {num_calls}\n{error}") from error
        return self.twins


class Workload(Driver):
    """What requests and rows have in common. The state is read from the oracle."""

    max_tokens: int

    def __init__(self, setting: Setting, twins: Twins, num_pages: NumPages, rng: Random, features: Features = PLAIN) -> None:
        super().__init__(twins, rng)
        self.setting = setting
        self.num_pages = setting.pools(num_pages).num_records
        self.features = features
        num_families = NUM_FAMILIES * (1 + features.tier)  # so that more is evicted that is used again
        self.families = [self._tokens(self.max_tokens) for _ in range(num_families)]
        self.in_flight: list[Taken] = []  # transfers
        self.time = START
        if features.expectations:
            self.twins.call("set_time", self.time)

    def _with_features(self, actions: Actions) -> Actions:
        """Add the actions that the features ask for; with a tier, what empties it is rare."""
        for feature, weights in ACTIONS.items():
            if getattr(self.features, feature):
                actions |= {getattr(self, name): weight for name, weight in weights.items() if hasattr(self, name)}
        if self.features.tier:
            rare = {"misuse_fork": 0.05, "evict": 0.1, "fail_load": 0.1, "reset": 0.05, "drain": 0.02}
            actions = {action: rare.get(action.__name__, weight) for action, weight in actions.items()}
            actions[self.end_transfers] = self.rng.choice((2, 10))
        return actions

    def _tokens(self, num_tokens: int) -> list[int]:
        return self.rng.choices(VOCABULARY, k=num_tokens)

    def draw_places(self) -> list[int]:
        """Draw numbers of tokens at which others are to resume, rarely some; none with states, and if all window pages stay."""
        can_name = self.setting.writes_states or (self.setting.windows is not None and not self.setting.has_state)
        if not can_name or self.rng.random() < 0.8:
            return []
        return self.rng.choices(range(self.setting.max_model_len), k=self.rng.randint(1, 4))

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

    def _tenant(self) -> dict[str, Any]:
        return {"cache_salt": self.rng.choice((None, "salt", "pepper")), "lora_id": self.rng.choice((None, 1, "tuned"))}

    def draw_feature(self, place: tuple[int, int] | None) -> Feature:
        """Return an image at a place, its first token and length, or at none that is known."""
        placeholder_range = SimpleNamespace(offset=place[0], length=place[1]) if place else None
        return Feature(self.rng.choice(("cat", "dog")), "image", placeholder_range)

    # the pool

    def evict(self) -> None:
        """Drop the prefix entries of some pages, held ones too."""
        self.twins.call("evict_pages", self.rng.sample(range(1, self.num_pages), self.rng.randint(1, 3)))

    def reset(self) -> None:
        """Reset the prefix cache, or be refused while it is in use."""
        self.twins.call("reset_prefix_cache")

    def _fail_load(self, pages_by_group: PagesByGroup, num_tokens: int) -> None:
        """Let a transfer fail: mostly all pages from the first bad one on lose their entries, else some of them."""
        groups = zip(self.setting.groups, pages_by_group, strict=True)
        bad = [page for group, pages in groups for page in pages[num_tokens // group.page_size :] if page != NULL_PAGE]
        self.twins.call("evict_pages", bad if self.rng.random() < 0.6 else self.rng.sample(bad, len(bad) // 2))

    def let_go(self) -> None:
        """Mostly give up what holds pages beside requests, so that a reset succeeds."""
        if self.has_moves and self.rng.random() < 0.7:
            self.take_moves()
            while self.in_flight:
                self.end_transfers()
        has_leases = self.features.external or self.features.expectations
        while has_leases and self.twins.call("count_leases") and self.rng.random() < 0.95:
            self.end_lease()

    # sizes

    def resize(self) -> None:
        """Let the pools have other sizes, often all pages."""
        if self.setting.data_parallel_size is None:
            sizes = [len(pages) + 1 for pages in self.twins.oracle.manager.pools.ranges]
            small = [self.rng.choice((size, self.rng.randint(1, size + self.rng.choice((0, 0, 1))))) for size in sizes]
            self.twins.call("resize", self.rng.choice((sizes, small, small)))

    def vacate(self) -> None:
        """Empty the pools, mostly after all holders were preempted, and mostly wake them up soon."""
        if self.setting.data_parallel_size is not None:
            return
        if self.rng.random() < 0.7:
            self.let_all_go()
        if self.twins.call("vacate", self.rng.random() < 0.5) is False:
            self.take_in_time()
            if self.rng.random() < 0.7:
                self.resume()

    def resume(self) -> None:
        if self.setting.data_parallel_size is None:
            self.twins.call("resume")

    @abstractmethod
    def let_all_go(self) -> None:
        """Preempt or end everything that holds pages."""

    # expectations

    def draw_seconds(self) -> dict[str, Any]:
        """Return when the pages that go back are wanted, if that is said."""
        seconds = random_seconds(self.rng) if self.features.expectations else None
        return {"seconds": seconds} if seconds is not None and seconds >= 0 else {}

    def draw_session(self) -> dict[str, Any]:
        """Return the session and tenant of a request, if it has any."""
        drawn = {}
        if (self.features.expectations or self.features.events) and self.rng.random() < 0.7:
            drawn["session_id"] = self.rng.choice(("a", "a", "b", "c", f"rare {self.rng.randint(0, 99)}"))
        if self.features.expectations and self.rng.random() < 0.6:
            drawn["tenant"] = self.rng.choice(TENANTS)
        return drawn

    def set_shares(self) -> None:
        """Set shares of some tenants, or of none."""
        names = self.rng.sample(TENANTS, self.rng.randint(0, len(TENANTS)))
        shares = {name: self.rng.choice((0.01, 0.1, 0.2, 0.3)) for name in names}
        self.twins.call("set_shares", shares | {"too much": 0.95} if self.rng.random() < 0.05 else shares)

    def expect_session(self) -> None:
        seconds = self.rng.choice((math.inf, math.inf, None, 1, 100.0, -1))
        self.twins.call("expect_session", self.rng.choice(("a", "b", "c", "unknown")), seconds=seconds)

    def wait(self) -> None:
        """Let the clock go on, a moment or long."""
        self.time += self.rng.choice((1, 8, self.rng.randint(1, 200), int(2.0 ** self.rng.uniform(4, 20))))
        self.twins.call("set_time", self.time)

    def extend_lease(self) -> None:
        num_leases = self.twins.call("count_leases")
        if num_leases:
            self.twins.call("extend_lease", self.rng.randrange(num_leases), self.rng.choice((0, 1, 100)))

    # leases

    @abstractmethod
    def held_by_any(self) -> list[int]:
        """Return the pages of any request, without the null page."""

    def lease(self) -> None:
        """Lease some pages of a request, or any, of one pool, mostly until the lease is released."""
        held, pages = [page_id for page_id in self.held_by_any() if page_id != NULL_PAGE], range(self.num_pages)
        if self.setting.has_pools:
            pages = self.rng.choice(self.twins.oracle.manager.pools.ranges)
            held = [page_id for page_id in held if page_id in pages]
        page_ids = held if self.rng.random() < 0.7 else self.rng.choices(pages, k=2)
        seconds = self.rng.choice((0, 1, 30, 1e9)) if self.features.expectations and self.rng.random() < 0.3 else None
        self.twins.call("lease", self.rng.sample(page_ids, self.rng.randint(0, len(page_ids))), seconds)
        self.twins.call("count_leases")

    def end_lease(self) -> None:
        num_leases = self.twins.call("count_leases")
        if num_leases:
            self.twins.call("end_lease", self.rng.randrange(num_leases))

    # moves

    @property
    def has_moves(self) -> bool:
        return self.features.tier or self.features.copies or self.setting.writes_states

    def take_moves(self) -> None:
        taken = self.twins.call("take_moves")
        if taken.number:
            self.in_flight.append(taken)

    def take_in_time(self) -> None:
        """Mostly take what is in the way of a step."""
        if self.has_moves and self.rng.random() < 0.85:
            self.take_moves()

    def end_transfers(self) -> None:
        """End any transfers in flight: mostly all are done."""
        if not self.in_flight:
            return
        number, saves, loads, *_ = self.in_flight.pop(self.rng.choice((0, self.rng.randrange(len(self.in_flight)))))
        if self.rng.random() < 0.7:
            self.twins.call("complete", number)
        else:
            bad_saves, bad_loads = (self.rng.sample(range(n), self.rng.randint(0, n)) for n in (len(saves), len(loads)))
            self.twins.call("fail", number, bad_saves, bad_loads)
            self.go_back()

    @abstractmethod
    def go_back(self) -> None:
        """Let what has wrong pages now compute them again."""

    def misuse_transfers(self) -> None:
        """End what is not in flight, or more than there is."""
        number = self.rng.choice((-1, 0, 1, 10**6))
        if all(number != taken.number for taken in self.in_flight):
            self.twins.call("complete", number)
            self.twins.call("fail", number, [], [])
        for number, saves, loads, *_ in self.in_flight[:1]:
            self.twins.call("fail", number, [len(saves)], [])
            self.twins.call("fail", number, [], [len(loads)])


TENANTS = "x", "y", "z", "w"
ACTIONS = {
    "copies": {"take_moves": 2},
    "states": {"chunk": 6},
    "forks": {"fork": 2, "misuse_fork": 0.2},
    "expectations": {
        "expect": 5,
        "expect_session": 2,
        "set_shares": 1,
        "wait": 6,
        "lease_span": 1,
        "extend_lease": 0.2,
        "end_lease": 0.5,
    },
    "external": {"commit": 3, "commit_part": 2, "fail": 2, "cancel": 0.5, "misuse_pending": 0.5, "lease": 1, "end_lease": 1},
    "sizes": {"resize": 0.6, "vacate": 0.3, "resume": 0.5},
    "tier": {"take_moves": 1, "end_transfers": 2, "misuse_transfers": 0.2},
}
"""The actions of each feature, with weights. Some are of rows alone."""


def run_workload(
    workload_class: type[Workload],
    setting: Setting,
    make_twins: Callable[[Setting, NumPages], Twins],
    seed: int,
    num_calls: int,
    features: Features = PLAIN,
) -> Twins:
    """Run a seed's workload, empty the pool and reset it, and return the twins."""
    rng = Random(seed)
    num_pages = rng.choice(setting.num_pages)
    workload = workload_class(setting, make_twins(setting, num_pages), num_pages, rng, features)
    where = (
        f"{workload_class.__name__} with {features}, setting {setting.name!r}, lookahead {setting.hash_lookahead}, seed {seed}"
    )
    where += f", {num_pages} pages"
    return workload.run(num_calls, where)
