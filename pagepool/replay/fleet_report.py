"""A fleet's figures by router as a table on a terminal."""

from pagepool.replay.fleet import FleetFigures
from pagepool.replay.report import print_columns

__all__ = ["print_fleet"]


def print_fleet(figures: dict[str, FleetFigures], title: str) -> None:
    """Print the title, a row for each figure and a column for each router, and what the words mean, to standard output."""
    print_columns({name: _rows(each) for name, each in figures.items()}, title, NOTE)


NOTE = (
    "Imbalance: tokens that the busiest replica computed, per token of the average one. Waiting: from a request's arrival to "
    "the step that first computes something of it; so many requests waited so long at most."
)


def _rows(figures: FleetFigures) -> list[tuple[str, str]]:
    return [
        ("requests", f"{figures.num_requests:,}"),
        ("  larger than the pool, skipped", f"{figures.num_skipped:,}"),
        ("  routed anew after a death", f"{figures.num_rerouted:,}"),
        ("prompt tokens", f"{figures.prompt_tokens:,}"),
        ("  hit", f"{figures.hit_tokens:,}"),
        ("  hit rate", f"{figures.hit_rate:.1%}"),
        ("generated tokens", f"{figures.generated_tokens:,}"),
        ("preemptions", f"{figures.preemptions:,}"),
        ("imbalance", f"{figures.imbalance:.2f}"),
        ("waiting, 50 %", f"{figures.wait_percentile(50):,.2f} s"),
        ("  90 %", f"{figures.wait_percentile(90):,.2f} s"),
        ("  99 %", f"{figures.wait_percentile(99):,.2f} s"),
        ("all ended after", f"{figures.end_seconds:,.0f} s"),
    ]
