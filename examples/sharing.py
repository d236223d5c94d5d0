"""When rows read the pages of a shared prefix once, and how many pages that saves: what engines on jax and on torch decide and
report in the same way.
"""

import numpy as np

from pagepool import StepInputs

__all__ = ["Sharing", "count_pages", "is_worth_it", "list_widths"]


class Sharing:
    """The decision of an engine in each decode step, and the pages that its decode steps have read."""

    def __init__(self, inputs: StepInputs, page_size: int, widths: list[int], is_wanted: bool) -> None:
        """Decide about the steps of `inputs`, which have ``order="prefixes"`` and the fields ``seq_lens``, ``own_starts`` and
        ``prefix_page_ids``. Numbers of pages are rounded up to `widths`. Nothing is shared unless it is wanted.
        """
        self.inputs, self.page_size, self.widths, self.is_wanted = inputs, page_size, widths, is_wanted
        self.num_row_pages = self.num_saved_pages = 0

    def find_widths(self) -> tuple[int, int] | None:
        """Count the pages of the decode step whose inputs were filled last. Return room for the pages of a group and for those
        that a row reads alone; None if the step is not worth it, or sharing is not wanted.
        """
        num_pages, num_shared, num_own = count_pages(self.inputs, self.page_size)
        num_saved = self.inputs.num_saved_pages
        self.num_row_pages += num_pages
        if not self.is_wanted or not is_worth_it(num_pages, num_saved):
            return None
        self.num_saved_pages += num_saved
        return round_up(num_shared, self.widths), round_up(num_own, self.widths)

    def describe(self) -> str:
        """Return a line with the pages read in decode steps."""
        num_read = self.num_row_pages - self.num_saved_pages
        if not self.num_saved_pages:
            return f"Pages read in decode steps: {num_read:,}."
        ratio = self.num_row_pages / num_read
        return f"Pages read in decode steps: {num_read:,}, row by row {self.num_row_pages:,} ({ratio:.2f} times as many)."


def count_pages(inputs: StepInputs, page_size: int) -> tuple[int, int, int]:
    """Return the pages that the rows of a step read one by one, the most pages of a group, and the most of a row alone."""
    num_pages, num_shared = -(-inputs.seq_lens // page_size), np.count_nonzero(inputs.prefix_page_ids[0], axis=1)
    return int(num_pages.sum()), int(num_shared.max()), int((num_pages - inputs.own_starts // page_size).max())


def is_worth_it(num_pages: int, num_saved: int) -> bool:
    """Whether reading shared pages once saves a tenth of the pages that the rows read one by one."""
    return num_saved > 0 and 10 * num_saved >= num_pages


def list_widths(least: int, num_columns: int) -> list[int]:
    """Return the numbers of pages to which those of groups and rows are rounded up, `least` and its doubles: few programs are
    compiled, or graphs captured.
    """
    widths = [least]
    while widths[-1] < num_columns:
        widths.append(2 * widths[-1])
    return widths


def round_up(num_pages: int, widths: list[int]) -> int:
    """Return the first width that has room for the pages."""
    return next(width for width in widths if width >= num_pages)
