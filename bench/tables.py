"""Tables of results in GitHub's form. Nothing here imports pagepool."""

from __future__ import annotations

from collections.abc import Sequence


def as_table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a GitHub table with the first column aligned left and numbers aligned right."""
    rules = ["---", *["---:"] * (len(columns) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (columns, rules, *lines))


def show_time(time: float | None, unit: str) -> str:
    return "-" if time is None else f"{time:,.{count_decimals(time)}f} {unit}"


def show_ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:,.{min(1, count_decimals(ratio))}f}x"


def count_decimals(value: float) -> int:
    """Return the number of decimals for about three digits."""
    return next((digits for digits, least in enumerate((100, 10, 1, 0.1)) if value >= least), 4)
