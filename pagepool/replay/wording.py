"""A plan in words and numbers for people, whether on a terminal or a page."""

from collections.abc import Iterable

from pagepool.replay.plan import Plan
from pagepool.specs import count_of

__all__ = ["describe", "format_bytes", "format_count", "list_columns", "list_knee_columns", "list_notes", "summarize"]

LRU_NOTE = (
    "LRU: what the pool as it is hits, the least recently used page evicted, if requests run one after another in the order of "
    "the trace (stack distances: Mattson and others, 1970)."
)
BEST_NOTE = (
    "Best: what the best eviction policy hits that there could be, one that knows all requests to come (Belady's MIN, 1966, "
    "for pages that hit only behind pages that hit). It is exact, not a bound: no policy hits more."
)
TOGETHER_NOTE = (
    "Together: what a simulated scheduler hits that runs as many requests at once as there is room for, all of them waiting "
    "from the start. Requests that share a prefix may meet before it is evicted, or push each other out, so it is now more "
    "than one after another, now less."
)

SKIPPED_NOTE = (
    "Skipped: requests larger than the pool. Hit rates are shares of the prompt tokens of those that run, a plot has shares of "
    "all prompt tokens."
)


def format_count(count: float) -> str:
    """Short, for an axis.

    >>> format_count(1500), format_count(2e6), format_count(700)
    ('1.5k', '2M', '700')
    """
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= factor:
            return f"{count / factor:.3g}{unit}"
    return f"{count:.3g}"


def format_bytes(num_bytes: float) -> str:
    """With the binary unit that leaves a number from 1 to 1024.

    >>> format_bytes(2**21), format_bytes(1.5 * 2**40), format_bytes(700)
    ('2.0 MiB', '1.5 TiB', '700 B')
    """
    for exponent, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes >= 1 << exponent:
            return f"{num_bytes / (1 << exponent):,.1f} {unit}"
    return f"{num_bytes:g} B"


def summarize(plan: Plan) -> str:
    """What was planned for, in one line."""
    memory = "" if plan.page_bytes is None else f" and {format_bytes(plan.page_bytes)}"
    trace = f"{count_of(plan.requests, 'request')}, {count_of(plan.prompt_tokens, 'prompt token')}"
    return f"{trace}, pages of {count_of(plan.page_size, 'token')}{memory}"


def describe(plan: Plan) -> list[str]:
    """The sentences that matter most, the knee first."""
    share = plan.most_hit_tokens / max(1, plan.prompt_tokens)
    all_tokens = count_of(plan.prompt_tokens, "prompt token")
    unlimited = f"A pool that never evicts hits {plan.most_hit_tokens:,} of {all_tokens} ({share:.1%})."
    largest = f"The largest request needs a pool of {_with_bytes(plan, plan.min_num_pages)}; smaller ones skip it."
    return [_describe_knee(plan), unlimited, largest]


def _describe_knee(plan: Plan) -> str:
    knee = plan.knee
    if knee is None:
        return "No prompt begins with full pages of an earlier one: no pool hits anything."
    lru, best = _with_bytes(plan, knee.lru_num_pages), _with_bytes(plan, knee.best_num_pages)
    share = f"{knee.share:.0%} of the hits that any pool could"
    return f"{lru} give {share}, if requests run one after another; with the best eviction policy {best} would."


def list_notes(plan: Plan) -> list[str]:
    """What the columns mean."""
    is_skipping = any(pool.skipped for pool in plan.pools)
    return [LRU_NOTE, BEST_NOTE, *([TOGETHER_NOTE] if plan.replays else []), *([SKIPPED_NOTE] if is_skipping else [])]


def list_columns(plan: Plan) -> list[tuple[str, list[str]]]:
    """Headings, each with a cell for each pool. Columns that say nothing are left out."""
    columns = [
        ("pages", [f"{pool.num_pages:,}" for pool in plan.pools]),
        ("hit rate, LRU", [f"{pool.lru_hit_rate:.1%}" for pool in plan.pools]),
        ("hit rate, best", [f"{pool.best_hit_rate:.1%}" for pool in plan.pools]),
        ("tokens saved, LRU", [f"{pool.lru_hit_tokens:,}" for pool in plan.pools]),
    ]
    if plan.page_bytes is not None:
        columns.insert(1, ("GiB", _list_gib((pool.num_pages for pool in plan.pools), plan.page_bytes)))
    if any(pool.skipped for pool in plan.pools):
        columns.append(("requests skipped", [f"{pool.skipped:,}" for pool in plan.pools]))
    if plan.replays:
        replays = [plan.replays.get(pool.num_pages) for pool in plan.pools]
        columns.append(("hit rate, together", [f"{replay.hit_rate:.1%}" if replay else "" for replay in replays]))
        columns.append(("preempted, together", [f"{replay.preemptions:,}" if replay else "" for replay in replays]))
    return columns


def list_knee_columns(plan: Plan) -> list[tuple[str, list[str]]]:
    """Headings, each with a cell for each share."""
    columns = [("share of the hits", [f"{knee.share:.0%}" for knee in plan.knees])]
    for name in ("LRU", "best"):
        sizes = [knee.lru_num_pages if name == "LRU" else knee.best_num_pages for knee in plan.knees]
        columns.append((f"pages, {name}", [f"{size:,}" for size in sizes]))
        if plan.page_bytes is not None:
            columns.append((f"GiB, {name}", _list_gib(sizes, plan.page_bytes)))
    return columns


def _list_gib(sizes: Iterable[int], page_bytes: int) -> list[str]:
    return [f"{size * page_bytes / 2**30:,.1f}" for size in sizes]


def _with_bytes(plan: Plan, num_pages: int) -> str:
    memory = "" if plan.page_bytes is None else f" ({format_bytes(num_pages * plan.page_bytes)})"
    return f"{num_pages:,} pages{memory}"
