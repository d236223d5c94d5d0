"""Trace arguments of the commands."""

from pathlib import Path

import click

from pagepool.errors import PagePoolError
from pagepool.replay.shared.memory import explain
from pagepool.replay.shared.options import Refusal, Size
from pagepool.replay.shared.progress import Progress
from pagepool.replay.shared.results import InputFile
from pagepool.replay.shared.sizes import format_bytes
from pagepool.replay.traces.generator import WORKLOADS
from pagepool.replay.traces.reader import TIME_UNITS, Trace, load_records, make_requests, source_name
from pagepool.replay.traces.records import BLOCK_SIZE
from pagepool.replay.traces.simulated_request import SimulatedRequest

TRACE = InputFile(allow_dash=True)

block_size_option = click.option(
    "--block-size",
    type=Size("tokens"),
    help="Tokens per hash id, unless the trace has its own.",
    show_default=f"{BLOCK_SIZE}, or the only size that lengths and ids fit",
)
time_unit_option = click.option(
    "--time-unit",
    type=click.Choice([*TIME_UNITS]),
    help="Unit of the times of the trace, unless they are dates.  [default: ms]",
)
limit_option = click.option("--limit", type=Size("requests"), help="Use only the first requests of the trace.")
seed_option = click.option(
    "--seed", type=click.IntRange(min=0), default=0, help="Random seed for synthetic tokens and requests."
)
workload_option = click.option(
    "--workload",
    type=click.Choice(WORKLOADS),
    metavar="NAME",
    help=f"Kind of synthetic requests, without TRACE: {', '.join(WORKLOADS)}.  [default: {WORKLOADS[0]}]",
)


def load_trace(
    trace: str, limit: int | None, block_size: int | None, time_unit: str | None, seed: int, progress: Progress
) -> tuple[Trace, list[SimulatedRequest]]:
    """Read a trace, and make a request from each record. Raise Refusal if the trace is invalid or unreadable."""
    source = source_name(trace)
    try:
        with progress.follow("reading the trace", "line") as update:
            loaded = load_records(trace, limit, block_size, update, time_unit)
        return loaded, make_requests(loaded.records, source, seed, loaded.lines)
    except PagePoolError as error:
        raise Refusal(str(error)) from error
    except OSError as error:
        raise Refusal(f"{source}: {error.strerror or error}") from error
    except MemoryError as error:
        reason = explain(error)
        size = f" ({format_bytes(Path(trace).stat().st_size)})" if Path(trace).is_file() else ""
        hint = "too large for the memory: --limit takes the first N requests"
        raise MemoryError(f"{source}{size} is {hint}; {reason}") from error


def require_times(trace: str, loaded: Trace) -> None:
    """Raise Refusal if the trace's times, which the command needs, are missing or may be in another unit."""
    try:
        loaded.require_times()
    except PagePoolError as error:
        raise Refusal(f"{source_name(trace)}: {error}") from error


def report_notes(loaded: Trace) -> None:
    """Print unknown properties of the trace to standard error, for commands that print no report."""
    for note in loaded.notes:
        click.echo(note, err=True)
