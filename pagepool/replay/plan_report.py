"""A plan as a table on a terminal."""

from rich.console import Console
from rich.table import Table

from pagepool.replay.plan import Plan
from pagepool.replay.wording import HIT_RATE, describe, list_columns, list_notes, summarize

__all__ = ["print_plan"]


def print_plan(plan: Plan, source: str) -> None:
    """Print what was planned, the sentences that matter, a row for each pool, and what the columns mean, to standard output."""
    console = Console(highlight=False)
    table = Table(
        title=HIT_RATE.capitalize(), title_justify="left", title_style="", box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
    columns = list_columns(plan)
    for heading, _ in columns:
        table.add_column(heading.replace(" ", "\n"), justify="right")
    for row in zip(*(cells for _, cells in columns), strict=True):
        table.add_row(*row)
    console.print(f"{source}: {summarize(plan)}", style="bold", markup=False, soft_wrap=True)
    for sentence in describe(plan):
        console.print(sentence, markup=False, soft_wrap=True)
    console.print()
    console.print(table)
    console.print()
    for note in list_notes(plan):
        console.print(note, style="dim", markup=False, soft_wrap=True)
