"""The metrics of engines, fetched and read."""

import math
import time
from collections.abc import Iterable
from http.client import HTTPException
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from prometheus_client.parser import text_string_to_metric_families

from pagepool.errors import ArgumentError
from pagepool.replay.top.view import QUEUE, PoolView, View

MAX_BYTES = 1 << 26
MAX_MANAGERS = 64
TIMEOUT_SECONDS = 10.0
PREFIX = "pagepool_"
INNER_LABELS = {"pool", "tenant", "holder", "le"}
POOL_METRICS = ("pool_pages", "pool_free_pages", "pool_held_pages", "pool_cached_pages")

Labels = tuple[tuple[str, str], ...]


class FetchError(Exception):
    """Metrics that did not come, or cannot be read."""


def fetch_views(url: str) -> list[View]:
    """Return a view of each manager whose metrics are at an address. Raise FetchError if there is none."""
    try:
        with urlopen(Request(url, headers={"Accept": "text/plain"}), timeout=TIMEOUT_SECONDS) as response:
            content: bytes = response.read(MAX_BYTES + 1)
    except HTTPError as error:
        error.close()
        raise FetchError(f"{url}: {error.code} {error.reason}") from error
    except (URLError, HTTPException, OSError, ValueError) as error:
        raise FetchError(f"{url}: {getattr(error, 'reason', None) or error}") from error
    if len(content) > MAX_BYTES:
        raise FetchError(f"{url}: got more than {MAX_BYTES >> 20} MiB, allowed: metrics")
    try:
        return read_views(content.decode(), time.time())
    except ArgumentError as error:
        raise FetchError(f"{url}: {error}") from error
    except UnicodeDecodeError as error:
        raise FetchError(f"{url}: got text that is not UTF-8, allowed: metrics") from error


def read_views(text: str, seconds: float) -> list[View]:
    """Return a view of each manager in a text of metrics: managers differ in their labels. Raise ArgumentError for a text that
    is none, or has no metric of pagepool.
    """
    counts: dict[Labels, dict[str, float]] = {}
    pools: dict[Labels, dict[str, dict[str, float]]] = {}
    kinds: dict[Labels, dict[str, dict[str, int]]] = {}
    for name, labels, value in _read_samples(text):
        manager = tuple(sorted((key, each) for key, each in labels.items() if key not in INNER_LABELS))
        pool = labels.get("pool")
        if pool is None and "tenant" not in labels and "le" not in labels:
            counts.setdefault(manager, {})[name] = value
        elif pool is not None and name in POOL_METRICS:
            pools.setdefault(manager, {}).setdefault(pool, {})[name] = value
        elif pool is not None and name == "pool_holder_pages" and "holder" in labels:
            kinds.setdefault(manager, {}).setdefault(pool, {})[labels["holder"]] = int(value)
    managers = [manager for manager in counts if manager in pools]
    if not managers:
        raise ArgumentError("metrics: got none of a manager of pagepool, allowed: what pagepool.stats.prometheus exports")
    return [
        View(
            ", ".join(f"{name} {value}" for name, value in manager) or "pagepool",
            seconds,
            tuple(_make_pool(name, values, kinds.get(manager, {}).get(name, {})) for name, values in pools[manager].items()),
            counts[manager] | _find_queue(manager, counts),
            None,
        )
        for manager in managers[:MAX_MANAGERS]
    ]


def _find_queue(manager: Labels, counts: dict[Labels, dict[str, float]]) -> dict[str, float]:
    """Return the numbers of a queue with fewer labels than the manager's."""
    found: dict[str, float] = {}
    for labels, values in counts.items():
        if labels != manager and {*labels} < {*manager}:
            found |= {name: value for name, value in values.items() if name.startswith(QUEUE)}
    return found


def _read_samples(text: str) -> Iterable[tuple[str, dict[str, str], float]]:
    """Yield names without the prefix, labels and finite values."""
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.startswith(PREFIX) and math.isfinite(sample.value):
                    yield sample.name.removeprefix(PREFIX), sample.labels, sample.value
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:  # the parser's errors for other text
        raise ArgumentError(f"metrics: got what is not in Prometheus' text format ({error}), allowed: metrics") from error


def _make_pool(name: str, values: dict[str, float], kinds: dict[str, int]) -> PoolView:
    num_pages, num_free, num_held, num_cached = (max(0, int(values.get(metric, 0))) for metric in POOL_METRICS)
    return PoolView(name, num_pages, num_free, num_held, num_cached, kinds)
