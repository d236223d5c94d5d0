"""The report of `pagepool replay`."""

from collections.abc import Iterable

from pagepool.replay.shared.sizes import format_bytes
from pagepool.replay.shared.tables import print_columns, print_text
from pagepool.replay.simulation.figures import Figures, HostFigures

HIT_RATE = "  hit rate"
COPIES = "states copied"
TIME_NOTE = "Time in the allocator: calls into pagepool, hashing included. Wall time adds the simulated scheduler, in Python."


def _format_seconds(seconds: float) -> str:
    """Format seconds with the unit that leaves a number from 1 to 1000.

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
        (HIT_RATE, f"{figures.hit_rate:.1%}"),
        ("generated tokens", f"{figures.generated_tokens:,}"),
        ("steps", f"{figures.steps:,}"),
        ("preemptions", f"{figures.preemptions:,}"),
        ("  tokens looked up again", f"{figures.returned_tokens:,}"),
        ("    hit again", f"{figures.rehit_tokens:,}"),
        ("pages allocated", f"{figures.allocated_pages:,}"),
        ("  evicted for it", f"{figures.evicted_pages:,}"),
        (COPIES, f"{figures.copied_pages:,}"),
        *_host_rows(figures.host),
        ("peak usage", f"{figures.peak_usage:.1%}"),
        ("mean usage", f"{figures.mean_usage:.1%}"),
        ("time in the allocator", _format_seconds(figures.allocator_seconds)),
        ("  per step", _format_seconds(seconds_a_step)),
        ("  per page allocated", _format_seconds(seconds_a_page)),
        ("wall time", _format_seconds(figures.wall_seconds)),
    ]


def _host_rows(host: HostFigures | None) -> list[tuple[str, str]]:
    if host is None:
        return []
    rows = [
        ("pages loaded from the host", f"{host.loaded_pages:,}"),
        ("  bytes", _format_bytes(host.loaded_bytes)),
        ("  tokens in them", "" if host.loaded_tokens is None else f"{host.loaded_tokens:,}"),
        ("pages saved to the host", f"{host.saved_pages:,}"),
        ("  bytes", _format_bytes(host.saved_bytes)),
        ("  evicted there", f"{host.evicted_pages:,}"),
        ("  refused for lack of room", f"{host.refused_pages:,}"),
    ]
    return [(name, value) for name, value in rows if value]


def _format_bytes(num_bytes: int | None) -> str:
    return "" if num_bytes is None else format_bytes(num_bytes)


def print_report(
    figures: dict[str, Figures], title: str, sentences: Iterable[str] = (), *, is_hit_rate_first: bool = False
) -> None:
    """Print a table with a column for each of `figures`, a note on times, and sentences. Omit copies if there are none."""
    columns = {name: _rows(each) for name, each in figures.items()}
    if not any(each.copied_pages for each in figures.values()):
        columns = {name: _without(COPIES, rows) for name, rows in columns.items()}
    if is_hit_rate_first:
        columns = {
            name: [(HIT_RATE.strip(), dict(rows)[HIT_RATE]), *_without(HIT_RATE, rows)] for name, rows in columns.items()
        }
    print_columns(columns, title, TIME_NOTE)
    for sentence in sentences:
        print_text(sentence, style="dim")


def _without(name: str, rows: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [row for row in rows if row[0] != name]
