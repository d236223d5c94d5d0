"""How much pools of many sizes would hit of a trace."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pagepool.replay.plans.lru import LruCurve
from pagepool.replay.plans.optimum import BestCurve
from pagepool.replay.plans.reuse import find_reuse
from pagepool.replay.simulation.figures import Figures, find_hit_rate
from pagepool.replay.traces.reader import TraceRecord
from pagepool.specs import cdiv, require_int

__all__ = ["Knee", "Plan", "Planner", "PoolFigures"]

SHARES = (0.5, 0.8, 0.95, 0.99)
MAIN_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """What a pool of `num_pages`, the null page included, hits if requests run one after another: with the least recently used
    page evicted, and at best. Requests larger than the pool are `skipped`, with `skipped_prompt_tokens`, and in no other count.
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
        """The same of the best policy."""
        return find_hit_rate(self.best_hit_tokens, self.prompt_tokens, self.skipped_prompt_tokens)


@dataclass(frozen=True, slots=True)
class Knee:
    """The smallest pools, the null page included, that hold each request and give `share` of the hits that any pool could. This
    share is one of hits, no hit rate.
    """

    share: float
    lru_num_pages: int
    best_num_pages: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Figures by pool size, for pages of `page_size` tokens and, if that is known, `page_bytes` bytes.

    A pool that never evicts hits `most_hit_tokens`; one of `min_num_pages` or more holds each request. `replays` has what a
    scheduler that runs requests together counted, by pool size, where somebody let it.
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

    @property
    def knee(self) -> Knee | None:
        """The one for 95 %; None if nothing ever hits."""
        return next((knee for knee in self.knees if knee.share == MAIN_SHARE), None)

    @property
    def most_hit_rate(self) -> float:
        """The hit rate of a pool that never evicts."""
        return find_hit_rate(self.most_hit_tokens, self.prompt_tokens)

    def as_dict(self) -> dict[str, Any]:
        """All figures by name, for JSON: those of a replay with those of its pool."""
        plan = asdict(self)
        del plan["replays"]
        for fields, pool in zip(plan["pools"], self.pools, strict=True):
            replay = self.replays.get(pool.num_pages)
            fields |= {"lru_hit_rate": pool.lru_hit_rate, "best_hit_rate": pool.best_hit_rate}
            fields["replay"] = replay.as_dict() if replay else None
        return plan


class Curves:
    """Hits by pool size of requests that all run."""

    def __init__(
        self, records: Sequence[TraceRecord], page_size: int, on_request: Callable[[int], object] | None = None
    ) -> None:
        """See `find_reuse`."""
        self.num_requests = len(records)
        self.prompt_tokens = sum(record.input_length for record in records)
        self.page_size = page_size
        reuse = find_reuse(records, page_size, on_request)
        self.num_hit_pages = reuse.num_hit_pages
        self.sizes = range(1 + int(reuse.request_pages.max(initial=0)), 2 + int(reuse.request_pages.sum()))
        self.lru = LruCurve(reuse)
        self.best = BestCurve(reuse)

    def make_figures(self, num_pages: int, num_skipped: int = 0, skipped_prompt_tokens: int = 0) -> PoolFigures:
        """The figures of a pool that skips `num_skipped` other requests, which have `skipped_prompt_tokens`."""
        return PoolFigures(
            num_pages,
            self.num_requests,
            num_skipped,
            self.prompt_tokens,
            self.lru.count_hits(num_pages - 1) * self.page_size,
            self.best.count_hits(num_pages - 1) * self.page_size,
            skipped_prompt_tokens,
        )

    def find_size(self, curve: LruCurve | BestCurve, share: float) -> int:
        """The smallest pool, the null page included, that gives that share of the hits that any pool could."""
        num_hit_pages = share * self.num_hit_pages
        return self.sizes[bisect_left(self.sizes, num_hit_pages, key=lambda num_pages: curve.count_hits(num_pages - 1))]

    def find_knees(self) -> tuple[Knee, ...]:
        """One for each share; none if nothing ever hits."""
        shares = SHARES if self.num_hit_pages else ()
        return tuple(Knee(share, self.find_size(self.lru, share), self.find_size(self.best, share)) for share in shares)


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
        """The requests run in the order of the records; `on_request` is told how many were looked at. ArgumentError or
        ArgumentTypeError for a page size that is no positive integer. Cost: about 3 us a block of the trace.
        """
        self._records = records
        self._curves = Curves(records, require_int("page_size", page_size, minimum=1), on_request)

    @property
    def min_num_pages(self) -> int:
        """The smallest pool that holds each request."""
        return self._curves.sizes[0]

    @property
    def max_num_pages(self) -> int:
        """The smallest pool that hits all that any could, with the least recently used page evicted."""
        return self._curves.find_size(self._curves.lru, 1.0)

    def make_plan(self, sizes: Iterable[int], page_bytes: int | None = None) -> Plan:
        """Figures of pools of those sizes, in pages with the null page. Cost: milliseconds a size for each 10,000 requests; for
        a size below `min_num_pages` as much as for all before.
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
