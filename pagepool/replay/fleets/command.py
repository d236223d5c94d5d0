"""The command `pagepool fleet`."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from typing import TYPE_CHECKING, BinaryIO

import click

from pagepool.errors import PagePoolError, count_of
from pagepool.replay.models.pages import ModelPages
from pagepool.replay.shared.memory import count_event_pool_bytes, count_request_bytes, require_memory
from pagepool.replay.shared.options import (
    SECONDS,
    Command,
    Refusal,
    Size,
    eviction_option,
    json_option,
    max_batched_tokens_option,
    max_num_seqs_option,
    order_option,
    page_size_option,
    plot_option,
    require_plots,
)
from pagepool.replay.shared.progress import Progress
from pagepool.replay.shared.results import open_result, printing, to_json
from pagepool.replay.simulation.backlog import Order
from pagepool.replay.simulation.runs import describe_pool, require_one_that_fits
from pagepool.replay.traces.options import (
    TRACE,
    block_size_option,
    limit_option,
    load_trace,
    report_notes,
    require_times,
    seed_option,
    time_unit_option,
)
from pagepool.replay.traces.reader import name_trace, source_name

if TYPE_CHECKING:
    from pagepool.replay.fleets.fleet import FleetFigures

ROUTERS = ("round-robin", "least-loaded", "prefix")


def parse_deaths(_: click.Context, __: click.Parameter, texts: tuple[str, ...]) -> list[tuple[float, int]]:
    """Parse each ``REPLICA@SECONDS`` into ``(seconds, replica)``."""
    deaths = []
    for text in texts:
        replica, _at, seconds = text.partition("@")
        try:
            death = float(seconds), int(replica)
        except ValueError as error:
            raise click.BadParameter(f"{text!r} is not REPLICA@SECONDS, such as 3@600") from error
        if not (isfinite(death[0]) and death[0] >= 0):
            raise click.BadParameter(f"{text!r} is not at 0 seconds or later")
        deaths.append(death)
    return deaths


def require_extras(ray: str | None) -> None:
    """Exit with code 1 and the name of the extra if a package is missing."""
    try:
        import msgspec  # noqa: F401

        if ray is not None:
            import ray as _  # noqa: F401
    except ModuleNotFoundError as error:
        raise click.ClickException(f"the fleet needs {error.name}: pip install 'pagepool[fleet]'") from error


@contextmanager
def refusals(ray: str | None) -> Iterator[None]:
    """Exit with code 2 for invalid settings, and with code 1 if Ray cannot be reached."""
    try:
        yield
    except PagePoolError as error:
        raise Refusal(str(error)) from error
    except (OSError, ValueError, RuntimeError) as error:
        if ray is None:
            raise
        raise click.ClickException(f"Ray at {ray}: {error}") from error


def write_plot(figures: "dict[str, FleetFigures]", source: str, summary: str, path: str, file: BinaryIO) -> None:
    """Write the plot in the format of the path's extension."""
    from pagepool.replay.fleets.plot import save_fleet_plot

    save_fleet_plot(figures, name_trace(source), summary, file, path[-3:].lower())


@click.command(cls=Command)
@click.argument("trace", type=TRACE)
@click.option("--replicas", "num_replicas", type=Size("replicas"), default=16, help="Number of engines.")
@click.option(
    "--router",
    "routers",
    type=click.Choice(ROUTERS),
    metavar="ROUTER",
    multiple=True,
    help=f"{', '.join(ROUTERS)}; may be repeated.  [default: all three]",
)
@click.option(
    "--num-pages", type=Size("pages"), default=32768, help="Pages in the pool of each replica, including the null page."
)
@eviction_option
@page_size_option
@block_size_option
@time_unit_option
@max_batched_tokens_option
@max_num_seqs_option
@order_option
@click.option("--decode-seconds", type=SECONDS, default=0.025, help="Minimum duration of a step.")
@click.option("--prefill-rate", type=Size("tokens"), default=10_000, help="Tokens per second in steps with prompts.")
@click.option("--report-seconds", type=SECONDS, default=1.0, help="Interval at which replicas report to the router.")
@click.option(
    "--kill", "deaths", multiple=True, callback=parse_deaths, metavar="REPLICA@SECONDS", help="Kill a replica; may be repeated."
)
@click.option("--ray", metavar="ADDRESS|local", help="Run replicas as actors on a Ray cluster; local starts one.")
@limit_option
@seed_option
@plot_option
@json_option
def fleet(
    trace: str,
    num_replicas: int,
    routers: tuple[str, ...],
    num_pages: int,
    eviction: str,
    page_size: int,
    block_size: int | None,
    time_unit: str | None,
    max_batched_tokens: int,
    max_num_seqs: int,
    order: Order,
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

    Requests arrive at their timestamps and are routed one by one. Each replica has its own pool and runs its
    requests as `pagepool replay` does, on a simulated clock: a step takes --decode-seconds, or longer if its tokens
    need it at --prefill-rate. The report has hit rate, load balance and waiting time.

    Routers: round-robin takes one replica after another; least-loaded the one with the fewest requests; prefix the
    one with the least to compute, according to the cache events of the replicas (in vLLM's format).

    A router's knowledge is as old as the last report. A killed replica (--kill 3@600: the fourth, ten minutes after
    the first request) loses its cache and its requests, which are rerouted, and is replaced by an empty one. On Ray
    the figures are the same.

    TRACE is as for `pagepool replay`.
    """
    require_extras(ray)
    if plot_path:
        require_plots()
    if any(replica not in range(num_replicas) for _, replica in deaths):
        raise click.UsageError(f"--kill: replicas are 0 to {num_replicas - 1}")
    from pagepool.replay.fleets.fleet import make_replicas, run_fleet
    from pagepool.replay.fleets.replica import ReplicaSettings
    from pagepool.replay.fleets.report import print_fleet

    model = ModelPages(page_size)
    summary = f"{count_of(num_replicas, 'replica')} of {describe_pool(num_pages, model, eviction)}"
    with open_result(json_path) as json_file, open_result(plot_path) as plot_file:
        with Progress() as progress:
            loaded, requests = load_trace(trace, limit, block_size, time_unit, seed, progress)
            require_times(trace, loaded)
            records = loaded.records
            require_one_that_fits(requests, num_pages, model)
            if ray in (None, "local"):
                requests_bytes = count_request_bytes(len(records), sum(len(record.block_ids) for record in records))
                pool_bytes = count_event_pool_bytes(num_pages, page_size, eviction)
                require_memory(summary, num_replicas * (pool_bytes + requests_bytes))
            num_rows = min(max_num_seqs, len(records))
            speed = decode_seconds, prefill_rate
            settings = ReplicaSettings(num_pages, page_size, max_batched_tokens, num_rows, *speed, seed, eviction, order)
            figures = {}
            for name in routers or ROUTERS:
                with refusals(ray), progress.follow(name, "request", len(records)) as update:
                    figures[name] = run_fleet(
                        *(name, make_replicas(num_replicas, settings, records, ray), settings),
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
            arrivals = f"Requests arrive within {loaded.seconds:,.0f} s."
            print_fleet(figures, f"{source_name(trace)}: {summary}", [*loaded.notes, arrivals])
    else:
        report_notes(loaded)
