"""Figures of replays as a table for people."""

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from pagepool.replay.figures import Figures

__all__ = ["print_columns", "print_report", "print_table", "print_text"]

MAX_WIDTH = 10_000


def _format_seconds(seconds: float) -> str:
    """With the unit that leaves a number from 1 to 1000.

    >>> _format_seconds(2.5), _format_seconds(0.0123), _format_seconds(4.2e-7)
    ('2.50 s', '12.30 ms', '0.42 us')
    """
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.2f} ms"
    return f"{seconds * 1e6:.2f} us"


def _rows(figures: Figures) -> list[tuple[str, str]]:
    seconds_a_step = figures.allocator_seconds / max(1, figures.steps)
    seconds_a_page = figures.allocator_seconds / max(1, figures.allocated_pages)
    return [
        ("requests", f"{figures.requests:,}"),
        ("  larger than the pool, skipped", f"{figures.skipped:,}"),
        ("    their prompt tokens", f"{figures.skipped_prompt_tokens:,}"),
        ("prompt tokens", f"{figures.prompt_tokens:,}"),
        ("  hit", f"{figures.hit_tokens:,}"),
        ("  hit rate", f"{figures.hit_rate:.1%}"),
        ("generated tokens", f"{figures.generated_tokens:,}"),
        ("steps", f"{figures.steps:,}"),
        ("preemptions", f"{figures.preemptions:,}"),
        ("  tokens looked up again", f"{figures.returned_tokens:,}"),
        ("    hit again", f"{figures.rehit_tokens:,}"),
        ("pages allocated", f"{figures.allocated_pages:,}"),
        ("  evicted for it", f"{figures.evicted_pages:,}"),
        ("peak usage", f"{figures.peak_usage:.1%}"),
        ("mean usage", f"{figures.mean_usage:.1%}"),
        ("time in the allocator", _format_seconds(figures.allocator_seconds)),
        ("  per step", _format_seconds(seconds_a_step)),
        ("  per page allocated", _format_seconds(seconds_a_page)),
        ("wall time", _format_seconds(figures.wall_seconds)),
    ]


def print_report(figures: dict[str, Figures], title: str) -> None:
    """Print the title and a table with one row a figure and one column for each of `figures`, to standard output."""
    print_columns({path: _rows(each) for path, each in figures.items()}, title)


def print_columns(columns: dict[str, list[tuple[str, str]]], title: str, note: str = "") -> None:
    """Print the title, a table, and a note if there is one: `columns` by heading are ``(what it is, value)``, each with the
    same rows.
    """
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
    """Print a line to standard output, broken between words on a terminal and nowhere else."""
    console = Console(highlight=False, emoji=False)
    console.print(text, style=style, markup=False, soft_wrap=not console.is_terminal)


def print_table(table: Table) -> None:
    """Print a table to standard output. Where there is too little room, cells that may not wrap are whole all the same."""
    console = Console(highlight=False, emoji=False)
    needed = Measurement.get(console, console.options.update(max_width=MAX_WIDTH), table).minimum
    Console(highlight=False, emoji=False, width=max(console.width, needed)).print(table)
