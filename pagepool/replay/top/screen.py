"""Views on a terminal, or as plain text."""

from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from pagepool.errors import count_of
from pagepool.holders import PageHolder, describe_rest, list_columns, show_name
from pagepool.replay.shared.tables import MAX_WIDTH
from pagepool.replay.top.view import PoolView, View, find_hit_rate, list_lines

BAR_WIDTH = 40
KIND_STYLES = {"request": "blue", "row": "cyan", "lease": "yellow", "caller": "magenta"}
OTHER_STYLE = "white"
MAX_HOLDERS = 20


def draw(views: Sequence[View], before: Sequence[View] = ()) -> Group:
    """Return the views, with the changes since those before."""
    earlier = {view.title: view for view in before}
    parts: list[RenderableType] = []
    for i, view in enumerate(views):
        parts += [Text("")] if i else []
        parts += _draw_view(view, earlier.get(view.title))
    return Group(*parts)


def make_console() -> Console:
    """Return a console that prints text as it is."""
    return Console(highlight=False, emoji=False, markup=False)


def print_views(views: Sequence[View], before: Sequence[View] = ()) -> None:
    """Print the views as text, wider than the terminal if a table does not fit; lines are wrapped only on a terminal."""
    console, group = make_console(), draw(views, before)
    width = Measurement.get(console, console.options.update(max_width=MAX_WIDTH), group)
    console.width = max(console.width, width.minimum if console.is_terminal else width.maximum)
    console.print(group)


def _draw_view(view: View, before: View | None) -> Iterator[RenderableType]:
    yield Text(show_name(view.title, 200), style="bold")
    rate = find_hit_rate(view)
    yield Text("no prompts were looked up" if rate is None else f"{rate:.1%} of prompt tokens hit")
    for pool in view.pools:
        yield from _draw_pool(pool)
    yield Text("")
    yield _make_figures(view, before)
    if view.holders is not None:
        yield Text("")
        yield _make_holders(view.holders[:MAX_HOLDERS], [pool.name for pool in view.pools])
        if view.holders[MAX_HOLDERS:]:
            yield Text(describe_rest(view.holders[MAX_HOLDERS:]))


def _draw_pool(pool: PoolView) -> Iterator[Text]:
    """Draw a line of numbers, and a bar of held pages by kind, and of free ones."""
    yield Text("")
    yield Text.assemble(
        (f"pool {show_name(pool.name)}", "bold"),
        f": {count_of(pool.num_pages, 'page')}, {pool.num_free_pages:,} free, {pool.num_held_pages:,} held, "
        f"{pool.num_cached_pages:,} cached",
    )
    kinds = pool.list_kinds()
    bar = Text()
    for kind, num in kinds:
        width = min(BAR_WIDTH - len(bar), max(1, round(BAR_WIDTH * pool.share(num))))
        bar.append("#" * width, style=KIND_STYLES.get(kind, OTHER_STYLE))
    bar.append("." * (BAR_WIDTH - len(bar)), style="dim")
    yield Text.assemble("[", bar, "] ", f"{pool.share(pool.num_held_pages):.0%} held")
    if kinds:
        text = Text("held by ")
        for i, (kind, num) in enumerate(kinds):
            text.append(", " if i else "").append(f"{kind} {num:,}", style=KIND_STYLES.get(kind, OTHER_STYLE))
        yield text


def _make_figures(view: View, before: View | None) -> Table:
    table = Table.grid(padding=(0, 2))
    for justify in ("left", "left", "right", "right"):
        table.add_column(justify=justify)
    last = ""
    for line in list_lines(view, before):
        table.add_row(line.section if line.section != last else "", line.label, f"{line.value:,.0f}", line.show_rate())
        last = line.section
    return table


def _make_holders(holders: Sequence[PageHolder], pools: Sequence[str]) -> Table:
    table, columns = Table.grid(padding=(0, 2)), list_columns(holders, pools)
    for i, _ in enumerate(columns):
        table.add_column(justify="left" if i < 2 else "right", no_wrap=True)
    table.add_row(*(Text(heading, style="bold") for heading, _ in columns))
    for row in zip(*(cells for _, cells in columns), strict=True):
        table.add_row(*map(Text, row))
    return table
