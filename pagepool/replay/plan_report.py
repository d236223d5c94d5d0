"""A plan as a table on a terminal."""

from rich.table import Table

from pagepool.replay.plan import Plan
from pagepool.replay.report import print_table, print_text
from pagepool.replay.wording import HIT_RATE, describe, list_columns, list_notes, summarize

__all__ = ["print_plan"]


def print_plan(plan: Plan, source: str) -> None:
    """Print what was planned, the sentences that matter, a row for each pool, and what the columns mean, to standard output."""
    table = Table(
        title=HIT_RATE.capitalize(), title_justify="left", title_style="", box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
    columns = list_columns(plan)
    for heading, _ in columns:
        table.add_column(heading.replace(" ", "\n"), justify="right", no_wrap=True)
    for row in zip(*(cells for _, cells in columns), strict=True):
        table.add_row(*row)
    print_text(f"{source}: {summarize(plan)}", style="bold")
    for sentence in describe(plan):
        print_text(sentence)
    print_text("")
    print_table(table)
    print_text("")
    for note in list_notes(plan):
        print_text(note, style="dim")
