"""A plan as a self-contained HTML page."""

import re
from collections.abc import Iterable
from html import escape
from io import BytesIO
from string import Template

from pagepool.replay.plans.host_report import list_host_columns
from pagepool.replay.plans.plan import Plan
from pagepool.replay.plans.plot import save_plot
from pagepool.replay.plans.report import (
    HIT_RATE,
    describe,
    headline,
    list_columns,
    list_knee_columns,
    list_notes,
    list_policy_columns,
    summarize,
)
from pagepool.replay.plans.state_report import list_interval_columns
from pagepool.replay.shared.drawing import COLORS

PAGE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; $colors }
@media screen and (prefers-color-scheme: dark) { :root { $dark_colors } }
body { margin: 0 auto; max-width: 52rem; padding: 1rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; line-height: 1.25; }
h2 { font-size: 1rem; margin-bottom: 0; }
.wide { overflow-x: auto; margin: 1.5rem 0; }
svg { display: block; width: 100%; max-width: 36rem; height: auto; margin: 1.5rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
caption { max-width: calc(100vw - 2rem); text-align: left; font-weight: 600; padding-bottom: 0.5rem; }
th, td { border-bottom: 1px solid var(--grid); padding: 0.25rem 0 0.25rem 1.2rem; text-align: right; vertical-align: bottom; }
th:first-child { position: sticky; left: 0; padding: 0.25rem 0.3rem 0.25rem 0; background: var(--paper); }
thead th { border-bottom: 2px solid var(--ink); font-weight: 600; }
tbody th { font-weight: 400; }
td, tbody th { white-space: nowrap; }
@media (max-width: 30rem) {
  body { padding: 0.75rem; }
  h1 { font-size: 1.2rem; }
  table { font-size: 0.85rem; }
  th, td { padding-left: 0.75rem; }
}
@media print {
  body { max-width: none; padding: 0; font-size: 10pt; }
  .wide { overflow: visible; }
  tr, svg { break-inside: avoid; }
}
</style>
</head>
<body>
<main>
<h1>$title</h1>
<p>$summary</p>
$sentences
$plot
$tables
<h2>What the columns mean</h2>
$notes
</main>
</body>
</html>
""")


def make_page(plan: Plan, name: str) -> str:
    """Make the page, including the plot; `name` is the name of the trace."""
    tables = [_make_table(f"By size of the pool; {HIT_RATE}", list_columns(plan))]
    if plan.policies:
        tables.append(_make_table("LRU pools that hit as much as adaptive eviction", list_policy_columns(plan)))
    if plan.checkpoints:
        tables.append(_make_table(*list_interval_columns(plan)))
    if plan.host_runs:
        tables.append(_make_table(*list_host_columns(plan)))
    if plan.knees and not (plan.checkpoints or plan.windows):
        tables.append(_make_table("Pages for a share of all possible hits", list_knee_columns(plan)))
    return PAGE.substitute(
        title=escape(headline(plan, name)),
        colors=_set_variables(is_dark=False),
        dark_colors=_set_variables(is_dark=True),
        summary=escape(summarize(plan)),
        sentences=_make_paragraphs(describe(plan)),
        plot=_make_svg(plan, name),
        tables="\n".join(tables),
        notes=_make_paragraphs(list_notes(plan)),
    )


def _make_paragraphs(texts: Iterable[str]) -> str:
    return "\n".join(f"<p>{escape(text)}</p>" for text in texts)


def _make_table(caption: str, columns: list[tuple[str, list[str]]]) -> str:
    """Make a table whose first column has the row headings."""
    headings = "".join(f'<th scope="col">{escape(heading)}</th>' for heading, _ in columns)
    rows = zip(*(cells for _, cells in columns), strict=True)
    body = "\n".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for first, *cells in rows
    )
    head = f"<caption>{escape(caption)}</caption>\n<thead><tr>{headings}</tr></thead>"
    region = f'role="region" aria-label="{escape(caption)}" tabindex="0"'  # scrollable by keyboard
    return f'<div class="wide" {region}>\n<table>\n{head}\n<tbody>\n{body}\n</tbody>\n</table>\n</div>'


def _make_svg(plan: Plan, name: str) -> str:
    """Make the SVG element without the XML header, in the colors of the page."""
    file = BytesIO()
    save_plot(plan, name, file, "svg", is_within_page=True)
    text = file.getvalue().decode()
    names = {light: f"var(--{name})" for name, (light, _) in COLORS.items()}
    return re.sub(r"(?<=: )#[0-9a-f]{6}\b", lambda match: names.get(match[0], match[0]), text[text.index("<svg") :])


def _set_variables(is_dark: bool) -> str:
    """Return the palette as CSS variables."""
    return " ".join(f"--{name}: {colors[is_dark]};" for name, colors in COLORS.items())
