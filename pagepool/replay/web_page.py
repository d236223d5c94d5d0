"""A plan as one page for a browser, with nothing to fetch."""

import os
from collections.abc import Iterable
from html import escape
from io import BytesIO
from string import Template

from pagepool.replay.plan import Plan
from pagepool.replay.plot import save_plot
from pagepool.replay.wording import describe, list_columns, list_knee_columns, list_notes, summarize

__all__ = ["make_page"]

PAGE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light; }
body { margin: 0 auto; max-width: 52rem; padding: 1rem; background: #fff; color: #1a1a1a;
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; line-height: 1.25; }
h2 { font-size: 1rem; margin-bottom: 0; }
.wide { overflow-x: auto; margin: 1.5rem 0; }
svg { display: block; width: 100%; min-width: 24rem; height: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
caption { text-align: left; font-weight: 600; padding-bottom: 0.5rem; }
th, td { border-bottom: 1px solid #ccc; padding: 0.25rem 0 0.25rem 1.2rem; text-align: right; vertical-align: bottom; }
th:first-child, td:first-child { padding-left: 0; }
thead th { border-bottom: 2px solid #1a1a1a; font-weight: 600; }
tbody th { font-weight: 400; }
td, tbody th { white-space: nowrap; }
@media print {
  body { max-width: none; padding: 0; font-size: 10pt; }
  .wide { overflow: visible; }
  svg { min-width: 0; }
  tr, svg { break-inside: avoid; }
}
</style>
</head>
<body>
<main>
<h1>$title</h1>
<p>$summary</p>
$sentences
<div class="wide" role="img" aria-label="Prompt tokens saved against the size of the pool; the table below has the figures.">
$plot
</div>
$tables
<h2>What the columns mean</h2>
$notes
</main>
</body>
</html>
""")


def make_page(plan: Plan, source: str) -> str:
    """HTML with the plot within it; `source` is the path of the trace, of which the page shows the name."""
    tables = [_make_table("By size of the pool", list_columns(plan))]
    if plan.knees:
        tables.append(_make_table("Pages for a share of the hits that any pool could", list_knee_columns(plan)))
    return PAGE.substitute(
        title=escape(f"Pools for {os.path.basename(source)}"),
        summary=escape(summarize(plan)),
        sentences=_make_paragraphs(describe(plan)),
        plot=_make_svg(plan),
        tables="\n".join(tables),
        notes=_make_paragraphs(list_notes(plan)),
    )


def _make_paragraphs(texts: Iterable[str]) -> str:
    return "\n".join(f"<p>{escape(text)}</p>" for text in texts)


def _make_table(caption: str, columns: list[tuple[str, list[str]]]) -> str:
    """The first column heads the rows."""
    headings = "".join(f'<th scope="col">{escape(heading)}</th>' for heading, _ in columns)
    rows = zip(*(cells for _, cells in columns), strict=True)
    body = "\n".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for first, *cells in rows
    )
    head = f"<caption>{escape(caption)}</caption>\n<thead><tr>{headings}</tr></thead>"
    return f'<div class="wide">\n<table>\n{head}\n<tbody>\n{body}\n</tbody>\n</table>\n</div>'


def _make_svg(plan: Plan) -> str:
    """The element alone: a page has no place for the document's header."""
    file = BytesIO()
    save_plot(plan, file, "svg")
    text = file.getvalue().decode()
    return text[text.index("<svg") :]
