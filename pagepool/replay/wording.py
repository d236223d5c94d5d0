"""A plan in words and numbers for people, whether on a terminal or a page."""

import os
from collections.abc import Iterable

from pagepool.replay.plan import Plan
from pagepool.specs import count_of

__all__ = [
    "HIT_RATE",
    "RUN_HIT_RATE",
    "describe",
    "describe_picture",
    "format_bytes",
    "format_count",
    "headline",
    "list_columns",
    "list_knee_columns",
    "list_notes",
    "name_trace",
    "shorten_name",
    "summarize",
]

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

HIT_RATE = "hit rate: share of all prompt tokens"
RUN_HIT_RATE = "hit rate: share of prompt tokens"
"""Headings of tables and labels of axes: a plan's, in which pools may skip requests, and a run's."""

HIT_RATE_NOTE = (
    "Hit rate: the share of all prompt tokens of the trace that need not be computed. Requests larger than the pool are "
    "skipped: nothing of them hits, and their prompts count."
)
MAX_SHORT_NAME = 40


def name_trace(source: str) -> str:
    """What titles call a trace: its file's name alone, with nothing in it that cannot be printed.

    >>> name_trace("traces/chat.jsonl.gz"), name_trace("<stdin>")
    ('chat', '<stdin>')
    """
    name = os.path.basename(source)
    for ending in (".gz", ".jsonl", ".json"):
        name = name.removesuffix(ending) or name
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in name)


def shorten_name(name: str) -> str:
    """A name for a picture, which has no room for a long one: its beginning and its end.

    >>> shorten_name("chat"), shorten_name("0123456789" * 10)
    ('chat', '0123456789012345678901234…67890123456789')
    """
    return name if len(name) <= MAX_SHORT_NAME else f"{name[:25]}…{name[-14:]}"


def format_count(count: float) -> str:
    """Short, for an axis: three digits that matter.

    >>> format_count(1500), format_count(2e6), format_count(700), format_count(999_999), format_count(1e18)
    ('1.5k', '2M', '700', '1M', '1E')
    """
    rounded = float(f"{count:.3g}")
    for factor, unit in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if rounded >= factor:
            return f"{rounded / factor:g}{unit}"
    return f"{rounded:g}"


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


def headline(plan: Plan, name: str) -> str:
    """What was found, for a title, with the name of the trace."""
    if plan.knee is None:
        return f"{name}: no pool hits anything"
    knee = _with_bytes(plan, plan.knee.lru_num_pages)
    return f"{name}: up to {plan.most_hit_rate:.1%} of prompt tokens hit; beyond {knee} more memory adds little"


def describe(plan: Plan) -> list[str]:
    """The sentences that matter most, the knee first."""
    all_tokens = count_of(plan.prompt_tokens, "prompt token")
    unlimited = f"A pool that never evicts hits {plan.most_hit_tokens:,} of {all_tokens} ({plan.most_hit_rate:.1%})."
    largest = f"The largest request needs a pool of {_with_bytes(plan, plan.min_num_pages)}; smaller ones skip it."
    return [_describe_knee(plan), unlimited, largest]


def describe_picture(plan: Plan) -> str:
    """The plot in words, for screen readers."""
    columns = dict(list_columns(plan))
    rates = zip(columns["pages"], columns["hit rate, LRU"], columns["hit rate, best"], strict=True)
    listed = "; ".join(f"{pages} pages: LRU {lru}, best {best}" for pages, lru, best in rates)
    return " ".join([f"{summarize(plan)}.", *describe(plan), f"{HIT_RATE.capitalize()}, by size of the pool: {listed}."])


def _describe_knee(plan: Plan) -> str:
    knee = plan.knee
    if knee is None:
        return "No prompt begins with full pages of an earlier one: no pool hits anything."
    lru, best = _with_bytes(plan, knee.lru_num_pages), _with_bytes(plan, knee.best_num_pages)
    share = f"{knee.share:.0%} of the hits that any pool could"
    return f"{lru} give {share}, if requests run one after another; with the best eviction policy {best} would."


def list_notes(plan: Plan) -> list[str]:
    """What the columns mean."""
    return [HIT_RATE_NOTE, LRU_NOTE, BEST_NOTE, *([TOGETHER_NOTE] if plan.replays else [])]


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
        columns.append(("hit rate, together", [f"{replay.trace_hit_rate:.1%}" if replay else "" for replay in replays]))
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
