"""Progress on standard error: bars on a terminal, otherwise a line every ten seconds."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from time import monotonic
from types import TracebackType
from typing import Self

import click
from rich import progress as rich_progress
from rich.console import Console
from rich.text import Text

from pagepool.errors import count_of
from pagepool.replay.shared.memory import require_memory_left

BAR_SECONDS = 0.1
LINE_SECONDS = 10.0
MIN_WIDTH = 72  # terminal columns for the full display


class RateColumn(rich_progress.ProgressColumn):
    """Items per second."""

    def render(self, task: rich_progress.Task) -> Text:
        """Return the rate as text, empty until it is known."""
        return Text("" if task.speed is None else f"{task.speed:,.0f}/s")


class Part:
    """One part of the work, displayed at intervals. It also checks the memory, ten times a second."""

    def __init__(self, show: Callable[[int, int | None], None], total: int | None, seconds: float) -> None:
        """`show` takes the number of items done and the total."""
        self._show = show
        self._total = total
        self._seconds = seconds
        self._completed = 0
        self._next_check = monotonic() + BAR_SECONDS
        self._next_show = monotonic() + seconds
        self.was_shown = False

    def update(self, completed: int) -> None:
        """Report the number of items done. Raise MemoryError when memory is nearly exhausted."""
        self._completed = completed
        now = monotonic()
        if now >= self._next_check:
            self._next_check = now + BAR_SECONDS
            require_memory_left()
        if now >= self._next_show:
            self._next_show = now + self._seconds
            self.was_shown = True
            self._show(completed, self._total)

    def end(self) -> None:
        """Show the part as complete, including items that needed no work."""
        num_done = self._completed if self._total is None else self._total
        self._show(num_done, num_done)


class Progress:
    """Progress of all parts. Bars are removed at the end of the `with` block. Without a terminal, or on one that cannot move
    its cursor, lines are printed instead, but none for short work.
    """

    def __init__(self) -> None:
        """Detect the terminal."""
        console = Console(stderr=True)
        is_live = console.file.isatty() and not console.is_dumb_terminal
        self._bars = rich_progress.Progress(*_list_columns(console), console=console, transient=True) if is_live else None
        self._exit = ExitStack()

    def __enter__(self) -> Self:
        """Show the bars."""
        if self._bars is not None:
            self._exit.enter_context(self._bars)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Remove the bars."""
        self._exit.close()

    @contextmanager
    def follow(self, description: str, noun: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        """Follow one part of the work, of `total` items named `noun` (None: unknown). Yield a function that takes the number of
        items done; the end of the block completes the part.
        """
        if self._bars is None:
            part = Part(_make_line(description, noun), total, LINE_SECONDS)
        else:
            part = Part(_make_bar(self._bars, description, noun, total), total, BAR_SECONDS)
        yield part.update
        if self._bars is not None or part.was_shown:
            part.end()


def _list_columns(console: Console) -> list[rich_progress.ProgressColumn]:
    text, percentage = rich_progress.TextColumn("{task.description}"), rich_progress.TaskProgressColumn()
    if console.width < MIN_WIDTH:
        return [text, percentage]
    counts, left = rich_progress.MofNCompleteColumn(), rich_progress.TimeRemainingColumn()
    return [text, rich_progress.BarColumn(bar_width=None), percentage, counts, RateColumn(), left]


def _make_bar(
    bars: rich_progress.Progress, description: str, noun: str, total: int | None
) -> Callable[[int, int | None], None]:
    task = bars.add_task(f"{description}: {noun}s", total=total)
    return lambda completed, of: bars.update(task, completed=completed, total=of)


def _make_line(description: str, noun: str) -> Callable[[int, int | None], None]:
    start = monotonic()

    def show(completed: int, total: int | None) -> None:
        done = count_of(completed, noun) if total is None else f"{completed:,} of {count_of(total, noun)}"
        percent = "" if total is None else f" ({100 * completed // max(1, total)}%)"
        click.echo(f"{description}: {done}{percent}, {monotonic() - start:,.0f} s", err=True)

    return show
