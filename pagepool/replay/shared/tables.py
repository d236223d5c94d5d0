"""Tables and lines of text on standard output."""

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

MAX_WIDTH = 10_000


def print_columns(columns: dict[str, list[tuple[str, str]]], title: str, note: str = "") -> None:
    """Print a title, a table and a note. `columns` maps each heading to its rows ``(name, value)``, with equal names in all."""
    table = Table.grid(padding=(0, 4))
    table.add_column("figure")
    for heading, rows in columns.items():
        table.add_column(heading, justify="right", no_wrap=True, min_width=max(len(value) for _, value in rows))
    table.add_row("", *columns)
    for row in zip(*columns.values(), strict=True):
        table.add_row(row[0][0], *(value for _, value in row))
    print_text(title, style="bold")
    print_table(table)
    if note:
        print_text(note, style="dim")


def print_text(text: str, style: str = "") -> None:
    """Print a line, wrapped only on a terminal."""
    console = Console(highlight=False, emoji=False)
    console.print(text, style=style, markup=False, soft_wrap=not console.is_terminal)


def print_table(table: Table) -> None:
    """Print a table, wider than the terminal if its cells do not fit."""
    console = Console(highlight=False, emoji=False)
    needed = Measurement.get(console, console.options.update(max_width=MAX_WIDTH), table).minimum
    Console(highlight=False, emoji=False, width=max(console.width, needed)).print(table)
