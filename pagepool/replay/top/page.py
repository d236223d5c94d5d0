"""A dump of a manager as a self-contained HTML page."""

from collections.abc import Iterator
from datetime import UTC, datetime
from html import escape

from pagepool.errors import count_of
from pagepool.holders import describe_rest, list_columns, show_name
from pagepool.replay.shared.web import make_html, make_paragraphs, make_table
from pagepool.replay.top.view import PoolView, View, find_hit_rate, list_lines

MAX_HOLDERS = 200
KIND_COLORS = {"request": "blue", "row": "green", "lease": "orange", "caller": "purple"}
OTHER_COLOR = "grey"
STYLE = """\
.bar { display: flex; height: 1.6rem; margin: 0.4rem 0; border: 1px solid var(--ink); background: var(--grid);
  print-color-adjust: exact; -webkit-print-color-adjust: exact; }
.thin { height: 0.7rem; }
.bar span { display: block; min-width: 1px; }
.legend { display: flex; flex-wrap: wrap; gap: 0.2rem 1.2rem; list-style: none; margin: 0 0 0.8rem; padding: 0; }
.legend span { display: inline-block; width: 0.8em; height: 0.8em; margin-right: 0.4em; border: 1px solid var(--ink);
  background: var(--grid); print-color-adjust: exact; -webkit-print-color-adjust: exact; }
thead th:first-child, tbody th { text-align: left; }
tbody th { min-width: 8rem; white-space: normal; overflow-wrap: anywhere; }
"""


def make_page(view: View) -> str:
    """Make the page of a view."""
    taken = datetime.fromtimestamp(min(view.seconds, 253402300799.0), UTC)
    rate = find_hit_rate(view)
    hits = "no prompt was looked up" if rate is None else f"{rate:.1%} of prompt tokens hit"
    parts = [
        make_paragraphs([f"Taken on {taken:%Y-%m-%d at %H:%M:%S} UTC; {hits}."]),
        *(part for pool in view.pools for part in _draw_pool(pool)),
        *_make_holders(view),
        _make_figures(view),
    ]
    return make_html(f"{show_name(view.title, 100)}: who holds the pages", "\n".join(parts), STYLE)


def _draw_pool(pool: PoolView) -> Iterator[str]:
    """Yield a heading, a bar of held and free pages with its legend, and a bar of those that can be hit."""
    kinds, free = pool.list_kinds(), pool.num_free_pages
    yield f"<h2>Pool {escape(show_name(pool.name))}: {escape(count_of(pool.num_pages, 'page'))}</h2>"
    text = ", ".join([*(f"{kind} {num:,}" for kind, num in kinds), f"free {free:,}"])
    spans = "".join(_make_span(pool.share(num), KIND_COLORS.get(kind, OTHER_COLOR)) for kind, num in kinds)
    yield f'<div class="bar" role="img" aria-label="{escape(text)}">{spans}</div>'
    items = [(f"held by {kind}: {num:,}", KIND_COLORS.get(kind, OTHER_COLOR)) for kind, num in kinds]
    yield _make_legend([*items, (f"free: {free:,}", "grid")])
    cached = f"can be hit, held or free: {pool.num_cached_pages:,}"
    bar = _make_span(pool.share(pool.num_cached_pages), "ink")
    yield f'<div class="bar thin" role="img" aria-label="{cached}">{bar}</div>'
    yield _make_legend([(cached, "ink")])


def _make_span(share: float, color: str) -> str:
    return f'<span style="flex: 0 1 {100 * share:.3f}%; background: var(--{color})"></span>'


def _make_legend(items: list[tuple[str, str]]) -> str:
    boxes = (f'<li><span style="background: var(--{color})"></span>{escape(text)}</li>' for text, color in items)
    return f'<ul class="legend">{"".join(boxes)}</ul>'


def _make_holders(view: View) -> Iterator[str]:
    """Yield a table of the largest holders, and a line on the others."""
    if not view.holders:
        yield make_paragraphs(["Nobody holds a page."])
        return
    (_, kinds), (_, names), *numbers = list_columns(view.holders[:MAX_HOLDERS], [pool.name for pool in view.pools])
    labels = [f"{kind} {name}".strip() for kind, name in zip(kinds, names, strict=True)]
    yield make_table("Who holds the pages, the largest first", [("holder", labels), *numbers])
    if view.holders[MAX_HOLDERS:]:
        yield make_paragraphs([describe_rest(view.holders[MAX_HOLDERS:])])
    yield make_paragraphs(["Own pages are those that nobody else holds: they become free without the holder."])


def _make_figures(view: View) -> str:
    lines = [*list_lines(view)]
    columns = [
        ("", [f"{line.section}: {line.label}" for line in lines]),
        ("number", [f"{line.value:,.0f}" for line in lines]),
    ]
    return make_table("Hits, evictions and tiers", columns)
