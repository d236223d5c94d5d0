"""Self-contained HTML pages: they fetch nothing, and run nothing."""

from collections.abc import Iterable
from html import escape
from string import Template

from pagepool.replay.shared.colors import COLORS

PAGE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
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
$style@media print {
  body { max-width: none; padding: 0; font-size: 10pt; }
  .wide { overflow: visible; }
  tr, svg { break-inside: avoid; }
}
</style>
</head>
<body>
<main>
<h1>$title</h1>
$body
</main>
</body>
</html>
""")


def make_html(title: str, body: str, style: str = "") -> str:
    """Make a page. `title` is escaped here, `body` is HTML, and `style` further rules of CSS, each on a line."""
    colors = [_set_variables(is_dark) for is_dark in (False, True)]
    return PAGE.substitute(title=escape(title), colors=colors[0], dark_colors=colors[1], style=style, body=body)


def make_paragraphs(texts: Iterable[str]) -> str:
    """Make a paragraph of each text, which is escaped here."""
    return "\n".join(f"<p>{escape(text)}</p>" for text in texts)


def make_table(caption: str, columns: list[tuple[str, list[str]]]) -> str:
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


def _set_variables(is_dark: bool) -> str:
    """Return the palette as CSS variables."""
    return " ".join(f"--{name}: {colors[is_dark]};" for name, colors in COLORS.items())
