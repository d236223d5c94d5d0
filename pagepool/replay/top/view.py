"""What `pagepool top` shows of a manager, from a dump or from its metrics."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pagepool.dump import Dump
from pagepool.holders import KINDS, PageHolder, show_name


class PoolView(NamedTuple):
    """Pages of a pool: free and held ones, and those of both that can be hit; ``num_pages_by_kind`` divides the held ones by
    the kind of their holder.
    """

    name: str
    num_pages: int
    num_free_pages: int
    num_held_pages: int
    num_cached_pages: int
    num_pages_by_kind: Mapping[str, int]

    def share(self, num_pages: int) -> float:
        """Return a number of pages as a share of the pool, 0 to 1, even of wrong numbers."""
        return min(1.0, num_pages / max(1, self.num_pages))

    def list_kinds(self) -> list[tuple[str, int]]:
        """Return kinds of holders with pages, in the usual order, unknown ones last."""
        order = {kind: i for i, kind in enumerate(KINDS)}
        counts = sorted(self.num_pages_by_kind.items(), key=lambda item: (order.get(item[0], len(order)), item[0]))
        return [(show_name(kind), num) for kind, num in counts if num]


class View(NamedTuple):
    """A manager at a time, ``seconds`` of a clock. ``counts`` has numbers by the names of metrics, without ``pagepool_``.
    ``holders`` are the largest first; None: metrics do not name them.
    """

    title: str
    seconds: float
    pools: tuple[PoolView, ...]
    counts: Mapping[str, float]
    holders: tuple[PageHolder, ...] | None


class Figure(NamedTuple):
    """A line of the table of figures. ``field`` is a field of `CacheStats`, for dumps."""

    label: str
    metric: str
    field: str


FIGURES = {
    "look-ups": (
        Figure("requests", "prefix_cache_requests_total", "queries.num_requests"),
        Figure("prompt tokens", "prefix_cache_queries_total", "queries.num_queried_tokens"),
        Figure("hit tokens", "prefix_cache_hits_total", "queries.num_hit_tokens"),
        Figure("requests back after a preemption", "preempted_prefix_cache_requests_total", "preempted_queries.num_requests"),
    ),
    "pages": (
        Figure("handed out", "allocated_pages_total", "num_allocated_pages"),
        Figure("evicted", "evicted_pages_total", "num_evicted_pages"),
        Figure("leased for a time", "leased_pages", "num_leased_pages"),
    ),
    "host tier": (
        Figure("pages", "host_pages", "host_tier.num_pages"),
        Figure("free pages", "host_free_pages", "host_tier.num_free_pages"),
        Figure("cached pages", "host_cached_pages", "host_tier.num_cached_pages"),
        Figure("in flight", "host_pages_in_flight", "host_tier.num_in_flight"),
        Figure("saved", "host_saved_pages_total", "host_tier.num_saved_pages"),
        Figure("loaded", "host_loaded_pages_total", "host_tier.num_loaded_pages"),
        Figure("evicted", "host_evicted_pages_total", "host_tier.num_evicted_pages"),
        Figure("refused", "host_refused_pages_total", "host_tier.num_refused_pages"),
        Figure("failed", "host_failed_pages_total", "host_tier.num_failed_pages"),
    ),
    "store": (
        Figure("being saved", "store_queued_pages", "store.num_queued_pages"),
        Figure("being loaded", "store_loading_pages", "store.num_loading_pages"),
        Figure("saved", "store_saved_pages_total", "store.num_saved_pages"),
        Figure("loaded", "store_loaded_pages_total", "store.num_loaded_pages"),
        Figure("errors", "store_errors_total", "store.num_errors"),
    ),
}
"""Lines by section. A section without numbers is left out."""

QUEUE = "waiting_"
"""Metrics of a waiting queue have names with this prefix."""


class Line(NamedTuple):
    """A number as it is shown, with its change in a second; None if that is not known."""

    section: str
    label: str
    value: float
    rate: float | None

    def show_rate(self) -> str:
        """Return the change in a second, empty if it is not known."""
        return "" if self.rate is None else f"{self.rate:,.1f}/s"


def view_dump(dump: Dump, title: str) -> View:
    """Return the view of a dump."""
    counts: dict[str, float] = {}
    for figures in FIGURES.values():
        for figure in figures:
            outer, _, name = figure.field.rpartition(".")
            owner = getattr(dump.stats, outer) if outer else dump.stats
            if owner is not None:
                counts[figure.metric] = getattr(owner, name)
    pools = tuple(
        PoolView(
            name,
            pool.num_pages,
            pool.num_free_pages,
            pool.num_held_pages,
            pool.num_cached_pages,
            dump.held.num_pages_by_kind.get(name, {}),
        )
        for name, pool in dump.stats.pools.items()
    )
    return View(title, dump.unix_seconds, pools, counts, dump.held.holders)


def list_lines(view: View, before: View | None = None) -> Iterator[Line]:
    """Yield the figures, with their changes since a view before."""
    for section, figures in FIGURES.items():
        for figure in figures:
            if figure.metric in view.counts:
                yield _make_line(view, before, section, figure.label, figure.metric)
    for name in sorted(view.counts):
        if name.startswith(QUEUE):
            label = name.removeprefix(QUEUE).removesuffix("_total").replace("_", " ")
            yield _make_line(view, before, "waiting queue", label, name)


def find_hit_rate(view: View) -> float | None:
    """Return the share of prompt tokens that hit, 0 to 1; None before the first."""
    num_queried = view.counts.get("prefix_cache_queries_total", 0)
    return min(1.0, view.counts.get("prefix_cache_hits_total", 0) / num_queried) if num_queried else None


def _make_line(view: View, before: View | None, section: str, label: str, metric: str) -> Line:
    value, rate = view.counts[metric], None
    if before is not None and metric.endswith("_total") and metric in before.counts and view.seconds > before.seconds:
        change = value - before.counts[metric]
        rate = change / (view.seconds - before.seconds) if change >= 0 else None  # the engine has restarted
    return Line(section, label, value, rate)
