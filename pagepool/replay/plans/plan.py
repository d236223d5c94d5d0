"""Hit rates of a trace for many pool sizes."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pagepool.arguments import require_int
from pagepool.replay.models.pages import ModelPages
from pagepool.replay.plans.lru import LruCurve
from pagepool.replay.plans.optimum import BestCurve
from pagepool.replay.plans.reuse import find_reuse
from pagepool.replay.simulation.figures import Figures, find_hit_rate
from pagepool.replay.traces.reader import TraceRecord
from pagepool.specs import cdiv

__all__ = ["CheckpointFigures", "Knee", "Plan", "Planner", "PolicyFigures", "PoolFigures"]

SHARES = (0.5, 0.8, 0.95, 0.99)
MAIN_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """Hits in a pool of `num_pages`, including the null page, if requests run one after another: with LRU and with the optimal
    eviction policy. Requests larger than the pool count as `skipped` and `skipped_prompt_tokens` only.
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
        """The share of all prompt tokens: see `find_hit_rate`."""
        return find_hit_rate(self.lru_hit_tokens, self.prompt_tokens, self.skipped_prompt_tokens)

    @property
    def best_hit_rate(self) -> float:
        """The same with the optimal policy."""
        return find_hit_rate(self.best_hit_tokens, self.prompt_tokens, self.skipped_prompt_tokens)


@dataclass(frozen=True, slots=True)
class PolicyFigures:
    """Hits of an eviction policy in a pool, simulated with requests one after another. `lru_num_pages` is the smallest pool, at
    least as large as the largest request, in which LRU hits as many tokens; None if the pool skips requests.
    """

    eviction: str
    pool: PoolFigures
    hit_tokens: int
    lru_num_pages: int | None

    @property
    def hit_rate(self) -> float:
        """The share of all prompt tokens."""
        return find_hit_rate(self.hit_tokens, self.pool.prompt_tokens, self.pool.skipped_prompt_tokens)

    @property
    def gain(self) -> float:
        """The hit rate beyond LRU's in the same pool; negative if LRU hits more."""
        return self.hit_rate - self.pool.lru_hit_rate

    def as_dict(self) -> dict[str, Any]:
        """Return the figures by name, for JSON."""
        return {"hit_tokens": self.hit_tokens, "hit_rate": self.hit_rate, "lru_num_pages": self.lru_num_pages}


@dataclass(frozen=True, slots=True)
class CheckpointFigures:
    """Hits of a model with states in a pool of `num_pages`, including the null page, with checkpoints after each `interval`
    tokens, simulated with requests one after another.

    `copied_pages` counts copies of states, into checkpoints and back. In the end `kept_pages` of the pool were checkpoints.
    """

    interval: int
    num_pages: int
    hit_tokens: int
    copied_pages: int
    kept_pages: int


@dataclass(frozen=True, slots=True)
class Knee:
    """The smallest pools, including the null page, that hold each request and reach `share` of all possible hits (a share of
    hits, not a hit rate).
    """

    share: float
    lru_num_pages: int
    best_num_pages: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Figures by pool size, for pages of `page_size` tokens and `page_bytes` bytes (None: unknown).

    A pool that never evicts hits `most_hit_tokens`; a pool of `min_num_pages` holds the largest request. `replays` has the
    figures of simulated schedulers by pool size, `policies` those of other eviction policies. `asked_num_pages` is the size
    that the user asked for, None for none or several.

    For a model with states, `checkpoints` has the hits by interval and pool size, and all other figures but those of `replays`
    are of its attention alone. `model` has its pages.
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

    @property
    def knee(self) -> Knee | None:
        """The knee at 95 %; None without hits."""
        return next((knee for knee in self.knees if knee.share == MAIN_SHARE), None)

    @property
    def most_hit_rate(self) -> float:
        """The hit rate of a pool that never evicts."""
        return find_hit_rate(self.most_hit_tokens, self.prompt_tokens)

    @property
    def runs_by_policy(self) -> dict[str, dict[int, PolicyFigures]]:
        """The figures of `policies` by policy and pool size."""
        runs: dict[str, dict[int, PolicyFigures]] = {}
        for each in self.policies:
            runs.setdefault(each.eviction, {})[each.pool.num_pages] = each
        return runs

    @property
    def checkpoints_by_interval(self) -> dict[int, dict[int, CheckpointFigures]]:
        """The figures of `checkpoints` by interval and pool size."""
        runs: dict[int, dict[int, CheckpointFigures]] = {}
        for each in self.checkpoints:
            runs.setdefault(each.interval, {})[each.num_pages] = each
        return runs

    @property
    def best_interval(self) -> int | None:
        """The interval with the most hits, added up over all pools; None without states."""
        runs = self.checkpoints_by_interval
        return max(runs, key=lambda interval: sum(each.hit_tokens for each in runs[interval].values()), default=None)

    def find_checkpoint_rate(self, figures: CheckpointFigures) -> float:
        """Return the share of all prompt tokens that hit."""
        return find_hit_rate(figures.hit_tokens, self.prompt_tokens)

    def as_dict(self) -> dict[str, Any]:
        """Return all figures by name, for JSON; replays, policies and checkpoints are part of their pools."""
        plan = asdict(self)
        for name in ("replays", "policies", "asked_num_pages", "checkpoints"):
            del plan[name]
        runs = self.runs_by_policy
        for fields, pool in zip(plan["pools"], self.pools, strict=True):
            replay = self.replays.get(pool.num_pages)
            fields |= {"lru_hit_rate": pool.lru_hit_rate, "best_hit_rate": pool.best_hit_rate}
            fields["replay"] = replay.as_dict() if replay else None
            size = pool.num_pages
            fields["policies"] = {name: by_size[size].as_dict() for name, by_size in runs.items() if size in by_size}
            fields["checkpoints"] = [
                asdict(each) | {"hit_rate": self.find_checkpoint_rate(each)}
                for each in self.checkpoints
                if each.num_pages == size
            ]
        return plan


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

    def make_figures(self, num_pages: int, num_skipped: int = 0, skipped_prompt_tokens: int = 0) -> PoolFigures:
        """Make the figures of a pool that skips `num_skipped` other requests."""
        return PoolFigures(
            num_pages,
            self.num_requests,
            num_skipped,
            self.prompt_tokens,
            self.lru.count_hits(num_pages - 1) * self.page_size,
            self.best.count_hits(num_pages - 1) * self.page_size,
            skipped_prompt_tokens,
        )

    def find_size(self, curve: LruCurve | BestCurve, num_hit_pages: float) -> int:
        """Find the smallest pool, including the null page, in which so many pages hit, at most all possible ones."""
        return self.sizes[bisect_left(self.sizes, num_hit_pages, key=lambda num_pages: curve.count_hits(num_pages - 1))]

    def find_knees(self) -> tuple[Knee, ...]:
        """Find the knee for each share; none if nothing ever hits."""
        hits = {share: share * self.num_hit_pages for share in SHARES} if self.num_hit_pages else {}
        return tuple(Knee(share, self.find_size(self.lru, num), self.find_size(self.best, num)) for share, num in hits.items())


class Planner:
    """Makes plans for one trace.

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
        """Requests run in the order of the records; `on_request` gets the number of records done. Raises ArgumentError or
        ArgumentTypeError if the page size is not a positive integer.
        """
        self._records = records
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

    def make_plan(self, sizes: Iterable[int], page_bytes: int | None = None) -> Plan:
        """Make the figures of pools of those sizes, in pages including the null page. Cost: milliseconds a size for each 10,000
        requests; a size below `min_num_pages` costs as much as the constructor.
        """
        return Plan(
            page_size=self._curves.page_size,
            page_bytes=page_bytes,
            requests=self._curves.num_requests,
            prompt_tokens=self._curves.prompt_tokens,
            most_hit_tokens=self._curves.num_hit_pages * self._curves.page_size,
            min_num_pages=self.min_num_pages,
            knees=self._curves.find_knees(),
            pools=tuple(self._count(num_pages) for num_pages in sizes),
        )

    def _count(self, num_pages: int) -> PoolFigures:
        if num_pages >= self.min_num_pages:
            return self._curves.make_figures(num_pages)
        page_size = self._curves.page_size
        fitting = [record for record in self._records if cdiv(record.num_slots, page_size) < num_pages]
        curves, num_skipped = Curves(fitting, page_size), len(self._records) - len(fitting)
        return curves.make_figures(num_pages, num_skipped, self._curves.prompt_tokens - curves.prompt_tokens)
