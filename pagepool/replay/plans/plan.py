"""Hit rates of a trace for many pool sizes."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from pagepool.arguments import require_int
from pagepool.replay.models.pages import ModelPages
from pagepool.replay.plans.link import PlannedLink
from pagepool.replay.plans.lru import LruCurve
from pagepool.replay.plans.optimum import BestCurve
from pagepool.replay.plans.reuse import find_reuse
from pagepool.replay.shared.sizes import format_bytes
from pagepool.replay.simulation.figures import Figures, HostFigures, find_hit_rate
from pagepool.replay.simulation.host import HostMemory
from pagepool.replay.traces.records import TraceRecord

POLICY_NAMES = {"lru": "LRU", "adaptive": "adaptive"}
Key = TypeVar("Key")
Run = TypeVar("Run")

SHARES = (0.5, 0.8, 0.95, 0.99)
MAIN_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """Hits in a pool of `num_pages`, including the null page, with LRU and with the optimal eviction policy, if requests run
    one after another. Requests larger than the pool count as `skipped` and `skipped_prompt_tokens` only.
    """

    num_pages: int
    requests: int
    skipped: int
    prompt_tokens: int
    lru_hit_tokens: int
    best_hit_tokens: int
    skipped_prompt_tokens: int = 0

    @property
    def lru_hit_rate(self) -> float:
        """Share of all prompt tokens that hit with LRU: see `find_hit_rate`."""
        return find_hit_rate(self.lru_hit_tokens, self.prompt_tokens, self.skipped_prompt_tokens)

    @property
    def best_hit_rate(self) -> float:
        """Share of all prompt tokens that hit with the optimal policy."""
        return find_hit_rate(self.best_hit_tokens, self.prompt_tokens, self.skipped_prompt_tokens)


@dataclass(frozen=True, slots=True)
class PolicyFigures:
    """Hits of an eviction policy in a pool, simulated with requests one after another. `lru_num_pages` is the size of the
    smallest pool that holds the largest request and hits as many tokens with LRU; None if this pool skips requests.
    """

    eviction: str
    pool: PoolFigures
    hit_tokens: int
    lru_num_pages: int | None

    @property
    def hit_rate(self) -> float:
        """Hit tokens' share of all prompt tokens."""
        return find_hit_rate(self.hit_tokens, self.pool.prompt_tokens, self.pool.skipped_prompt_tokens)

    @property
    def gain(self) -> float:
        """Hit rate less LRU's in the same pool; negative if LRU hits more."""
        return self.hit_rate - self.pool.lru_hit_rate

    def as_dict(self) -> dict[str, Any]:
        """Return the figures by name, for JSON."""
        return {"hit_tokens": self.hit_tokens, "hit_rate": self.hit_rate, "lru_num_pages": self.lru_num_pages}


class HostSpeed(NamedTuple):
    """`bandwidth` between host and device in bytes a second, and `prefill_rate` in tokens a second."""

    bandwidth: int
    prefill_rate: int


class PlannedStore(NamedTuple):
    """A store of `num_pages` behind the host tier. It loads `bandwidth` bytes a second; prefill computes `prefill_rate` tokens
    a second. None means unknown.
    """

    num_pages: int | None = None
    bandwidth: int | None = None
    prefill_rate: int | None = None

    def find_least_bandwidth(self, token_bytes: float) -> float | None:
        """Return the bytes a second of a store that loads tokens as fast as prefill computes them."""
        return None if self.prefill_rate is None else self.prefill_rate * token_bytes

    def pays(self, token_bytes: float) -> bool | None:
        """Whether loading a token takes no longer than computing it."""
        least = self.find_least_bandwidth(token_bytes)
        return None if least is None or self.bandwidth is None else self.bandwidth >= least

    def as_dict(self, token_bytes: float | None) -> dict[str, Any]:
        """Return the store's fields by name, for JSON, with the least bandwidth that pays, and whether the store pays."""
        least, pays = (None, None) if token_bytes is None else (self.find_least_bandwidth(token_bytes), self.pays(token_bytes))
        return {**self._asdict(), "least_bandwidth": least, "pays": pays}


@dataclass(frozen=True, slots=True)
class HostRun:
    """Hits of a pool with LRU and a host tier, simulated with requests one after another, and the traffic between pool and
    tier. `store_hit_tokens` is the most tokens that hit with a store behind the tier; None without a store, or if the pool
    skips requests.
    """

    hits: PolicyFigures
    moved: HostFigures
    store_hit_tokens: int | None = None

    @property
    def num_more_tokens(self) -> int:
        """Additional hit tokens compared with the pool alone."""
        return self.hits.hit_tokens - self.hits.pool.lru_hit_tokens

    @property
    def num_store_tokens(self) -> int | None:
        """The most hit tokens that a store adds; None if they are unknown."""
        return None if self.store_hit_tokens is None else self.store_hit_tokens - self.hits.hit_tokens

    @property
    def store_hit_rate(self) -> float:
        """The largest share of all prompt tokens that can hit with a store; 0 if it is unknown."""
        pool = self.hits.pool
        return find_hit_rate(self.store_hit_tokens or 0, pool.prompt_tokens, pool.skipped_prompt_tokens)

    def find_transfer_seconds(self, speed: HostSpeed) -> float:
        """Return the seconds per request of all loads and saves, one after another; 0 if their bytes are unknown."""
        num_bytes = (self.moved.loaded_bytes or 0) + (self.moved.saved_bytes or 0)
        return num_bytes / speed.bandwidth / max(1, self.hits.pool.requests)

    def find_seconds(self, speed: HostSpeed) -> float:
        """Return the seconds per request saved by the tier: prefill of the additional hit tokens, less the transfers."""
        prefill_seconds = self.num_more_tokens / speed.prefill_rate / max(1, self.hits.pool.requests)
        return prefill_seconds - self.find_transfer_seconds(speed)

    def as_dict(self, speed: HostSpeed | None) -> dict[str, Any]:
        """Return the figures by name, for JSON."""
        seconds = None if speed is None else self.find_seconds(speed)
        more = {"seconds_saved_a_request": seconds, "store_hit_tokens": self.store_hit_tokens}
        return {**self.hits.as_dict(), **self.moved.as_dict(), **more}


@dataclass(frozen=True, slots=True)
class CheckpointFigures:
    """Hits of a model with states in a pool of `num_pages`, including the null page, under a policy, with checkpoints after
    each `interval` tokens, simulated with requests one after another.

    `copied_pages` counts copies of states, into checkpoints and back. At the end `kept_pages` of the pool were checkpoints.
    """

    interval: int
    num_pages: int
    hit_tokens: int
    copied_pages: int
    kept_pages: int
    eviction: str = "lru"


@dataclass(frozen=True, slots=True)
class WindowFigures:
    """Hits of a model with windows in a pool of `num_pages`, including the null page, under a policy and a rule for pages of
    windows: see `CacheManager`. Requests ran one after another in the simulation.
    """

    num_pages: int
    eviction: str
    windows: str
    hit_tokens: int


@dataclass(frozen=True, slots=True)
class Knee:
    """The smallest pools, including the null page, that hold each request and reach `share` of all possible hits (a share of
    hits, not of tokens).
    """

    share: float
    lru_num_pages: int
    best_num_pages: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Figures by pool size, for pages of `page_size` tokens and `page_bytes` bytes (None: unknown).

    A pool that never evicts hits `most_hit_tokens`; a pool of `min_num_pages` holds the largest request. `replays` has the
    figures of simulated schedulers by pool size, `policies` the figures of other eviction policies. `asked_num_pages` is the
    requested size, None for none or several. `host_runs` has the figures of all pools with the tier `host`; `speed` is the
    speed of its transfers and of prefill. `store` is the store behind the tier, `link` the link from another engine. `notes`
    list unknown properties of the trace. `arrays` says whether the arrays of all groups lie over each other, ``"shared"``, or
    are ``"separate"``.

    For a model with states, `checkpoints` has the hits by policy, interval and pool size. All other hits, except in `replays`,
    count its attention alone, in pools of the same memory. Without attention they are 0, and `most_hit_tokens` counts the hits
    of a pool that never evicts and has a state after each token. For a model with windows, `windows` has the hits by policy,
    rule and pool size. All other hits, except in `replays`, count full attention alone. `model` has the model's pages.
    """

    page_size: int
    page_bytes: int | None
    requests: int
    prompt_tokens: int
    most_hit_tokens: int
    min_num_pages: int
    knees: tuple[Knee, ...]
    pools: tuple[PoolFigures, ...]
    replays: dict[int, Figures] = field(default_factory=dict)
    policies: tuple[PolicyFigures, ...] = ()
    asked_num_pages: int | None = None
    model: ModelPages = field(default_factory=ModelPages)
    checkpoints: tuple[CheckpointFigures, ...] = ()
    windows: tuple[WindowFigures, ...] = ()
    host: HostMemory | None = None
    host_runs: tuple[HostRun, ...] = ()
    speed: HostSpeed | None = None
    store: PlannedStore | None = None
    link: PlannedLink | None = None
    notes: tuple[str, ...] = ()
    arrays: str = "shared"

    @property
    def knee(self) -> Knee | None:
        """Knee at 95 %; None without hits."""
        return next((knee for knee in self.knees if knee.share == MAIN_SHARE), None)

    @property
    def token_bytes(self) -> float | None:
        """Bytes of a token; None if they are unknown."""
        return None if self.page_bytes is None else self.page_bytes / self.page_size

    @property
    def most_hit_rate(self) -> float:
        """The hit rate of a pool that never evicts."""
        return find_hit_rate(self.most_hit_tokens, self.prompt_tokens)

    @property
    def runs_by_policy(self) -> dict[str, dict[int, PolicyFigures]]:
        """The figures of `policies` by policy and pool size."""
        return _group_runs((each.eviction, each.pool.num_pages, each) for each in self.policies)

    @property
    def checkpoint_runs(self) -> dict[tuple[str, int], dict[int, CheckpointFigures]]:
        """The figures of `checkpoints` by policy and interval, and by pool size."""
        return _group_runs(((each.eviction, each.interval), each.num_pages, each) for each in self.checkpoints)

    @property
    def window_runs(self) -> dict[tuple[str, str], dict[int, WindowFigures]]:
        """The figures of `windows` by policy and rule, and by pool size."""
        return _group_runs(((each.eviction, each.windows), each.num_pages, each) for each in self.windows)

    @property
    def best_interval(self) -> int | None:
        """The interval with the most LRU hits in total over all pools; None without states."""
        runs = {interval: by_size for (eviction, interval), by_size in self.checkpoint_runs.items() if eviction == "lru"}
        return max(runs, key=lambda interval: sum(each.hit_tokens for each in runs[interval].values()), default=None)

    @property
    def pools_with_hits(self) -> tuple[PoolFigures, ...]:
        """The pools with known hits: all pools, or without full attention only the simulated ones."""
        if self.model.num_attention_groups:
            return self.pools
        sizes = {each.num_pages for each in self.checkpoints} | {each.num_pages for each in self.windows}
        return tuple(pool for pool in self.pools if pool.num_pages in sizes)

    def find_simulated_rate(self, figures: CheckpointFigures | WindowFigures) -> float:
        """Return the share of hit tokens among all prompt tokens."""
        return find_hit_rate(figures.hit_tokens, self.prompt_tokens)

    def list_rate_columns(
        self, names: Mapping[Key, str], runs: Mapping[Key, Mapping[int, CheckpointFigures | WindowFigures]]
    ) -> list[tuple[str, list[str]]]:
        """Return a name and the cells of each run: its hit rate in each pool of `pools_with_hits`."""
        columns = []
        for key, by_size in runs.items():
            found = [by_size.get(pool.num_pages) for pool in self.pools_with_hits]
            cells = [f"{self.find_simulated_rate(run):.1%}" if run else "" for run in found]
            columns.append((f"hit rate, {names[key]}", cells))
        return columns

    def show_bytes(self, num_pages: int) -> str:
        """Return a space and the bytes of pages in parentheses; "" if a page's bytes are unknown."""
        return "" if self.page_bytes is None else f" ({format_bytes(num_pages * self.page_bytes)})"

    def as_dict(self) -> dict[str, Any]:
        """Return all figures by name, for JSON; replays, policies, checkpoints, windows and host runs are part of their pools.
        Without full attention the hits of pools are None.
        """
        plan = asdict(self)
        for name in ("replays", "policies", "asked_num_pages", "checkpoints", "windows", "host_runs"):
            del plan[name]
        plan |= {
            name: None if value is None else value._asdict() for name, value in (("host", self.host), ("speed", self.speed))
        }
        plan |= self.model.fixed.as_dict()
        plan["link"] = self.link and self.link.as_dict()
        plan["store"] = None if self.store is None else self.store.as_dict(self.token_bytes)
        runs, host_runs = self.runs_by_policy, {run.hits.pool.num_pages: run.as_dict(self.speed) for run in self.host_runs}
        for fields, pool in zip(plan["pools"], self.pools, strict=True):
            replay = self.replays.get(pool.num_pages)
            fields |= {"lru_hit_rate": pool.lru_hit_rate, "best_hit_rate": pool.best_hit_rate}
            if not self.model.num_attention_groups:
                fields |= dict.fromkeys(("lru_hit_tokens", "lru_hit_rate", "best_hit_tokens", "best_hit_rate"))
            fields["replay"] = replay.as_dict() if replay else None
            size = pool.num_pages
            fields["policies"] = {name: by_size[size].as_dict() for name, by_size in runs.items() if size in by_size}
            fields["host"] = host_runs.get(size)
            simulated: dict[str, tuple[CheckpointFigures | WindowFigures, ...]]
            simulated = {"checkpoints": self.checkpoints, "windows": self.windows}
            for name, figures in simulated.items():
                fields[name] = [
                    asdict(each) | {"hit_rate": self.find_simulated_rate(each)} for each in figures if each.num_pages == size
                ]
        return plan


def _group_runs(runs: Iterable[tuple[Key, int, Run]]) -> dict[Key, dict[int, Run]]:
    groups: dict[Key, dict[int, Run]] = {}
    for key, num_pages, run in runs:
        groups.setdefault(key, {})[num_pages] = run
    return groups


class Curves:
    """Hits by pool size, for requests that all fit."""

    def __init__(
        self, records: Sequence[TraceRecord], page_size: int, on_request: Callable[[int], object] | None = None
    ) -> None:
        """Find the reuse, and measure its depths."""
        self.num_requests = len(records)
        self.prompt_tokens = sum(record.input_length for record in records)
        self.page_size = page_size
        reuse = find_reuse(records, page_size, on_request)
        self.num_hit_pages = reuse.num_hit_pages
        self.sizes = range(1 + int(reuse.request_pages.max(initial=0)), 2 + int(reuse.request_pages.sum()))
        self.lru = LruCurve(reuse)
        self.best = BestCurve(reuse)

    def make_figures(self, num_pages: int, num_hit_pages: int, num_skipped: int, skipped_prompt_tokens: int) -> PoolFigures:
        """Make the figures of a pool that skips `num_skipped` other requests. A page of the curves stands for
        `num_hit_pages` full-attention pages of the pool.
        """
        lru = best = 0
        if num_hit_pages:
            num_usable_pages = (num_pages - 1) // num_hit_pages
            lru, best = (curve.count_hits(num_usable_pages) * self.page_size for curve in (self.lru, self.best))
        return PoolFigures(num_pages, self.num_requests, num_skipped, self.prompt_tokens, lru, best, skipped_prompt_tokens)

    def find_size(self, curve: LruCurve | BestCurve, num_hit_pages: float) -> int:
        """Find the smallest pool that hits this many pages, which must be possible. Its size includes the null page."""
        return self.sizes[bisect_left(self.sizes, num_hit_pages, key=lambda num_pages: curve.count_hits(num_pages - 1))]

    def find_knees(self, num_hit_pages: int) -> tuple[Knee, ...]:
        """Find the knee for each share, if a page of the curves stands for `num_hit_pages`; none if nothing ever hits."""
        knees = []
        for share in SHARES if self.num_hit_pages and num_hit_pages else ():
            sizes = [self.find_size(curve, share * self.num_hit_pages) for curve in (self.lru, self.best)]
            knees.append(Knee(share, *(1 + num_hit_pages * (size - 1) for size in sizes)))
        return tuple(knees)


class Planner:
    """Planner of pools for one trace.

    >>> from pagepool.replay import TraceRecord
    >>> chat = [TraceRecord(i, 1024, 1, ids) for i, ids in enumerate([(7, 8), (5, 6), (7, 8)])]
    >>> planner = Planner(chat, page_size=16)
    >>> planner.min_num_pages, planner.max_num_pages
    (65, 128)
    >>> [pool] = planner.make_plan([100]).pools
    >>> pool.lru_hit_tokens, pool.best_hit_tokens, pool.prompt_tokens
    (560, 560, 3072)
    """

    def __init__(
        self, records: Sequence[TraceRecord], page_size: int, on_request: Callable[[int], object] | None = None
    ) -> None:
        """Run the requests in the order of the records; `on_request` gets the number of records done. Raise ArgumentError or
        ArgumentTypeError if the page size is not a positive integer.
        """
        self._records = records
        self._max_num_slots = max((record.num_slots for record in records), default=0)
        self._curves = Curves(records, require_int("page_size", page_size, minimum=1), on_request)

    @property
    def min_num_pages(self) -> int:
        """The smallest pool that holds each request."""
        return self._curves.sizes[0]

    @property
    def max_num_pages(self) -> int:
        """The smallest LRU pool with all possible hits."""
        return self._curves.find_size(self._curves.lru, self._curves.num_hit_pages)

    def compare(self, pool: PoolFigures, eviction: str, hit_tokens: int) -> PolicyFigures:
        """Compare the hits of a policy in one of a plan's pools with LRU's curve. Cost: milliseconds for each 10,000 requests.

        >>> chat = [TraceRecord(i, 1024, 1, ids) for i, ids in enumerate([(7, 8), (5, 6), (7, 8)])]
        >>> planner = Planner(chat, page_size=16)
        >>> [pool] = planner.make_plan([100]).pools
        >>> planner.compare(pool, "adaptive", hit_tokens=800).lru_num_pages
        115
        """
        num_hit_pages = hit_tokens // self._curves.page_size
        lru_num_pages = None if pool.skipped else self._curves.find_size(self._curves.lru, num_hit_pages)
        return PolicyFigures(eviction, pool, hit_tokens, lru_num_pages)

    def find_store_hits(self, run: HostRun, num_pages: int) -> HostRun:
        """Add the most tokens that hit with a tier and a store of `num_pages` together behind the pool: the hits of an LRU pool
        with all pages of the three, as if each page were in one place only.
        """
        pool = run.hits.pool
        if pool.skipped:
            return run
        most = self._curves.lru.count_hits(pool.num_pages - 1 + num_pages) * self._curves.page_size
        return replace(run, store_hit_tokens=max(most, run.hits.hit_tokens))

    def make_plan(self, sizes: Iterable[int], page_bytes: int | None = None, model: ModelPages | None = None) -> Plan:
        """Make the figures of pools of these sizes, in pages including the null page: for one group of attention with pages of
        `page_bytes`, or for the groups of `model`, whose `hit_size` must be the planner's page size. Cost: milliseconds per
        size for each 10,000 requests; a size that skips requests costs as much as the constructor.
        """
        model = model or ModelPages(self._curves.page_size, page_bytes)
        return Plan(
            page_size=model.page_size,
            page_bytes=model.page_bytes,
            requests=self._curves.num_requests,
            prompt_tokens=self._curves.prompt_tokens,
            most_hit_tokens=self._curves.num_hit_pages * self._curves.page_size,
            min_num_pages=self.find_smallest(model),
            knees=self._curves.find_knees(model.num_hit_pages),
            pools=tuple(self._count(num_pages, model) for num_pages in sizes),
            model=model,
        )

    def find_smallest(self, model: ModelPages) -> int:
        """Return the size of the smallest pool that holds each request with its states."""
        return 1 + model.count_pages(self._max_num_slots)

    def _count(self, num_pages: int, model: ModelPages) -> PoolFigures:
        curves = self._curves
        if num_pages < self.find_smallest(model):
            fitting = [record for record in self._records if model.count_pages(record.num_slots) < num_pages]
            curves = Curves(fitting, curves.page_size)
        num_skipped = len(self._records) - curves.num_requests
        num_skipped_tokens = self._curves.prompt_tokens - curves.prompt_tokens
        return curves.make_figures(num_pages, model.num_hit_pages, num_skipped, num_skipped_tokens)
