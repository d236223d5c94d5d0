"""Progress bars with a rate and the time left."""

from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

__all__ = ["ProgressBars"]

NUM_UPDATES = 500  # of a bar at most; more would cost more time than they show


class RateColumn(ProgressColumn):
    """How many a second."""

    def render(self, task: Task) -> Text:
        """Nothing until there is a rate."""
        return Text("" if task.speed is None else f"{task.speed:,.0f}/s")


class ProgressBars:
    """One bar below another on standard output; gone at the end of the `with` block, and none if they are not `shown`."""

    def __init__(self, shown: bool) -> None:
        """No bar yet."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), RateColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, transient=True, disable=not shown)
        self._is_shown = shown

    def __enter__(self) -> Self:
        """The bars."""
        if self._is_shown:  # else the end of it would still be printed
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Take them away."""
        if self._is_shown:
            self._progress.stop()

    def add(self, description: str, total: int) -> Callable[[int], None]:
        """A bar that ends at `total`. Returns what takes how much is done."""
        task = self._progress.add_task(description, total=total)
        step = max(1, total // NUM_UPDATES)
        next_update = 0

        def update(completed: int) -> None:
            nonlocal next_update
            if completed >= next_update:
                next_update = completed + step
                self._progress.update(task, completed=completed)

        return update
