"""Texts and the table of a fleet's figures by router."""

from collections.abc import Iterable

from pagepool.replay.fleets.fleet import FleetFigures
from pagepool.replay.shared.tables import print_columns

HIT_RATE = "hit rate: share of prompt tokens"


def print_fleet(figures: dict[str, FleetFigures], title: str, notes: Iterable[str]) -> None:
    """Print a table with a column for each router, and notes on the trace and on its rows."""
    print_columns({name: _rows(each) for name, each in figures.items()}, title, " ".join([*notes, NOTE]))


NOTE = (
    f"{HIT_RATE.capitalize()} that need not be computed, without skipped requests. "
    "Imbalance: tokens computed by the busiest replica, divided by the mean. Waiting: percentiles of the time from a request's "
    "arrival to its first step."
)


def headline_fleet(figures: dict[str, FleetFigures], name: str) -> str:
    """Return the main result, for a title: the router with most hits, and the hit rates of the others.

    >>> round_robin, prefix = FleetFigures(prompt_tokens=8, hit_tokens=1), FleetFigures(prompt_tokens=8, hit_tokens=2)
    >>> headline_fleet({"round-robin": round_robin, "prefix": prefix}, "chat")
    'chat: router prefix hits most, 25.0% of prompt tokens (round-robin 12.5%)'
    """
    if not any(each.hit_tokens for each in figures.values()):
        return f"{name}: no prompt token hits"
    rates = {router: f"{each.hit_rate:.1%}" for router, each in figures.items()}
    most = rates[max(figures, key=lambda router: figures[router].hit_rate)]
    first = [router for router, rate in rates.items() if rate == most]
    others = [f"{router} {rate}" for router, rate in rates.items() if rate != most]
    hitting = f"router {first[0]} hits" if len(first) == 1 else f"routers {' and '.join(first)} hit"
    if not others:
        return f"{name}: {hitting} {most} of prompt tokens"
    return f"{name}: {hitting} most, {most} of prompt tokens ({', '.join(others)})"


def describe_fleet(figures: dict[str, FleetFigures]) -> str:
    """Describe the plot for screen readers."""
    parts = [
        f"{router}: hit rate {each.hit_rate:.1%}, imbalance {each.imbalance:.2f}, half of the requests waited at most "
        f"{each.wait_percentile(50):,.2f} s, 99 % at most {each.wait_percentile(99):,.2f} s"
        for router, each in figures.items()
    ]
    return f"{'; '.join(parts)}. {NOTE}"


def _rows(figures: FleetFigures) -> list[tuple[str, str]]:
    return [
        ("requests", f"{figures.num_requests:,}"),
        ("  larger than the pool, skipped", f"{figures.num_skipped:,}"),
        ("    their prompt tokens", f"{figures.skipped_prompt_tokens:,}"),
        ("  rerouted after a death", f"{figures.num_rerouted:,}"),
        ("prompt tokens", f"{figures.prompt_tokens:,}"),
        ("  hit", f"{figures.hit_tokens:,}"),
        ("  hit rate", f"{figures.hit_rate:.1%}"),
        ("generated tokens", f"{figures.generated_tokens:,}"),
        ("preemptions", f"{figures.preemptions:,}"),
        ("  tokens looked up again", f"{figures.returned_tokens:,}"),
        ("    hit again", f"{figures.rehit_tokens:,}"),
        ("imbalance", f"{figures.imbalance:.2f}"),
        ("waiting, 50 %", f"{figures.wait_percentile(50):,.2f} s"),
        ("  90 %", f"{figures.wait_percentile(90):,.2f} s"),
        ("  99 %", f"{figures.wait_percentile(99):,.2f} s"),
        ("all ended after", f"{figures.end_seconds:,.0f} s"),
    ]
