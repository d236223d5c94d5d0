"""`pagepool fleet`: replicas behind a router."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from typing import TYPE_CHECKING, BinaryIO

import click

from pagepool.errors import PagePoolError
from pagepool.replay.shared.memory import count_event_pool_bytes, count_request_bytes, require_memory
from pagepool.replay.shared.options import (
    SECONDS,
    Command,
    Refusal,
    Size,
    json_option,
    max_batched_tokens_option,
    max_num_seqs_option,
    page_size_option,
    plot_option,
    require_plots,
)
from pagepool.replay.shared.progress import Progress
from pagepool.replay.shared.results import open_result, printing, to_json
from pagepool.replay.simulation.runs import describe_pool, require_one_that_fits
from pagepool.replay.traces.options import TRACE, block_size_option, limit_option, load_trace, seed_option
from pagepool.replay.traces.reader import name_trace, source_name
from pagepool.specs import count_of

if TYPE_CHECKING:
    from pagepool.replay.fleets.fleet import FleetFigures

__all__ = ["fleet"]

ROUTERS = ("round-robin", "least-loaded", "prefix")


def parse_deaths(_: click.Context, __: click.Parameter, texts: tuple[str, ...]) -> list[tuple[float, int]]:
    """``REPLICA@SECONDS`` as ``(seconds, replica)``."""
    deaths = []
    for text in texts:
        replica, _at, seconds = text.partition("@")
        try:
            death = float(seconds), int(replica)
        except ValueError as error:
            raise click.BadParameter(f"{text!r} is not REPLICA@SECONDS, as 3@600") from error
        if not (isfinite(death[0]) and death[0] >= 0):
            raise click.BadParameter(f"{text!r} is not at 0 seconds or later")
        deaths.append(death)
    return deaths


def require_extras(ray: str | None) -> None:
    """Exit with code 1 and the name of the extra where something is not installed."""
    try:
        import msgspec  # noqa: F401

        if ray is not None:
            import ray as _  # noqa: F401
    except ModuleNotFoundError as error:
        raise click.ClickException(f"the fleet needs {error.name}: pip install 'pagepool[fleet]'") from error


@contextmanager
def refusals(ray: str | None) -> Iterator[None]:
    """Say in a sentence what cannot be run, with exit code 2, and that Ray cannot be reached, with 1."""
    try:
        yield
    except PagePoolError as error:
        raise Refusal(str(error)) from error
    except (OSError, ValueError, RuntimeError) as error:
        if ray is None:
            raise
        raise click.ClickException(f"Ray at {ray}: {error}") from error


def write_plot(figures: "dict[str, FleetFigures]", source: str, summary: str, path: str, file: BinaryIO) -> None:
    """In the format that the path's end tells."""
    from pagepool.replay.fleets.plot import save_fleet_plot

    save_fleet_plot(figures, name_trace(source), summary, file, path[-3:].lower())


@click.command(cls=Command)
@click.argument("trace", type=TRACE)
@click.option("--replicas", "num_replicas", type=Size("replicas"), default=16, help="Engines behind the router.")
@click.option(
    "--router",
    "routers",
    type=click.Choice(ROUTERS),
    metavar="ROUTER",
    multiple=True,
    help=f"{', '.join(ROUTERS)}; give it again for more.  [default: all three]",
)
@click.option(
    "--num-pages", type=Size("pages"), default=32768, help="Pages in the pool of each replica, the null page included."
)
@page_size_option
@block_size_option
@max_batched_tokens_option
@max_num_seqs_option
@click.option("--decode-seconds", type=SECONDS, default=0.025, help="How long a step takes at least: a token of each request.")
@click.option("--prefill-rate", type=Size("tokens"), default=10_000, help="Tokens a second in steps with prompts.")
@click.option("--report-seconds", type=SECONDS, default=1.0, help="How often replicas report to the router.")
@click.option("--kill", "deaths", multiple=True, callback=parse_deaths, metavar="REPLICA@SECONDS", help="Let replicas die.")
@click.option("--ray", metavar="ADDRESS|local", help="Run replicas as actors on a Ray cluster, or on one started here.")
@limit_option
@seed_option
@plot_option
@json_option
def fleet(
    trace: str,
    num_replicas: int,
    routers: tuple[str, ...],
    num_pages: int,
    page_size: int,
    block_size: int,
    max_batched_tokens: int,
    max_num_seqs: int,
    decode_seconds: float,
    prefill_rate: int,
    report_seconds: float,
    deaths: list[tuple[float, int]],
    ray: str | None,
    limit: int | None,
    seed: int,
    plot_path: str | None,
    json_path: str | None,
) -> None:
    """Simulate TRACE on a fleet of engines under each routing policy.

    Requests arrive at their timestamps and are routed one by one. Each replica has a pool of its own and runs its
    requests as `pagepool replay` does, on a clock: a step takes as long as one token of each request, or its
    prompts' tokens at the rate of prefill. The report has hit rate, balance of load, and waiting.

    Routers: round-robin takes one replica after another; least-loaded the one with the fewest requests; prefix the
    one with the least to compute, by the events with which replicas report what they have cached (as vLLM's do).

    What a router knows is as old as the last report. A replica that dies (--kill 3@600: the fourth, ten minutes
    after the first request) loses its cache and its requests, which are routed anew, and an empty one takes its place.
    On Ray the figures are the same.

    TRACE is as for `pagepool replay`.
    """
    require_extras(ray)
    if plot_path:
        require_plots()
    if any(replica not in range(num_replicas) for _, replica in deaths):
        raise click.UsageError(f"--kill: replicas are 0 to {num_replicas - 1}")
    from pagepool.replay.fleets.fleet import run_fleet
    from pagepool.replay.fleets.replica import ReplicaSettings
    from pagepool.replay.fleets.report import print_fleet

    summary = f"{count_of(num_replicas, 'replica')} of {describe_pool(num_pages, page_size)}"
    with open_result(json_path) as json_file, open_result(plot_path) as plot_file:
        with Progress() as progress:
            records, requests = load_trace(trace, limit, block_size, seed, progress)
            require_one_that_fits(requests, num_pages, page_size)
            if ray in (None, "local"):
                requests_bytes = count_request_bytes(len(records), sum(len(record.block_ids) for record in records))
                require_memory(summary, num_replicas * (count_event_pool_bytes(num_pages, page_size) + requests_bytes))
            num_rows = min(max_num_seqs, len(records))
            settings = ReplicaSettings(num_pages, page_size, max_batched_tokens, num_rows, decode_seconds, prefill_rate, seed)
            figures = {}
            for name in routers or ROUTERS:
                with refusals(ray), progress.follow(name, "request", len(records)) as update:
                    figures[name] = run_fleet(
                        *(name, num_replicas, settings, records, ray),
                        report_seconds=report_seconds,
                        deaths=deaths,
                        on_progress=update,
                    )
        if plot_path and plot_file:
            write_plot(figures, source_name(trace), summary, plot_path, plot_file)
        if json_file:
            json_file.write(to_json({name: each.as_dict() for name, each in figures.items()}))
    if json_path != "-":
        with printing():
            print_fleet(figures, f"{source_name(trace)}: {summary}")
