"""`pagepool replay`: a trace through the allocator."""

import sys

import click

from pagepool.replay.figures import Figures
from pagepool.replay.generator import generate_chats
from pagepool.replay.options import (
    NOT_NEGATIVE,
    POSITIVE,
    TRACE,
    block_size_option,
    json_option,
    load_trace,
    max_batched_tokens_option,
    max_num_seqs_option,
    open_result,
    page_size_option,
    seed_option,
    to_json,
)
from pagepool.replay.progress import ProgressBars
from pagepool.replay.report import print_report
from pagepool.replay.scheduler import Scheduler
from pagepool.replay.simulated_request import SimulatedRequest
from pagepool.replay.simulation import make_scheduler, run
from pagepool.replay.trace import source_name

__all__ = ["replay"]

DEFAULT_NUM_CHATS = 2000
MAX_SKIPPED_SHOWN = 10
PATHS = ("manager", "batched")


def load_requests(trace: str | None, limit: int | None, block_size: int, seed: int) -> list[SimulatedRequest]:
    """The requests of the trace, or of made-up chats."""
    if trace is None:
        return generate_chats(DEFAULT_NUM_CHATS if limit is None else limit, seed)
    return load_trace(trace, limit, block_size, seed)[1]


def report_skipped(scheduler: Scheduler) -> None:
    """Name the requests that do not fit the pool on standard error, up to a number."""
    for request, reason in scheduler.skipped[:MAX_SKIPPED_SHOWN]:
        click.echo(f"skipped {request.request_id}: {reason}", err=True)
    num_more = len(scheduler.skipped) - MAX_SKIPPED_SHOWN
    if num_more > 0:
        click.echo(f"skipped {num_more} more", err=True)


def run_all(schedulers: dict[str, Scheduler], shown: bool) -> dict[str, Figures]:
    """Run each to its end, with a progress bar if they are to be shown."""
    with ProgressBars(shown) as bars:
        return {
            path: run(scheduler, bars.add(f"{path}: requests", len(scheduler.waiting)))
            for path, scheduler in schedulers.items()
        }


def require_equal(figures: dict[str, Figures]) -> None:
    """Exit with code 1 and the names of the figures in which the paths differ, if there are any."""
    first, *others = figures.values()
    names = sorted({name for other in others for name in first.list_differences(other)})
    if names:
        raise click.ClickException(f"{' and '.join(figures)} differ in {', '.join(names)}")


@click.command()
@click.argument("trace", required=False, type=TRACE)
@click.option("--num-pages", type=POSITIVE, default=32768, help="Pages in the pool, the null page included.")
@page_size_option
@block_size_option
@max_batched_tokens_option
@max_num_seqs_option
@click.option("--no-caching", is_flag=True, help="Do without prefix caching.")
@click.option("--batched/--no-batched", default=True, help="Allocate for all running requests at once, or request by request.")
@click.option("--compare", is_flag=True, help="Replay both ways; exit code 1 if more than times differs.")
@click.option("--limit", type=NOT_NEGATIVE, metavar="N", help="Only the first N requests; without TRACE how many to make up.")
@seed_option
@json_option
def replay(
    trace: str | None,
    num_pages: int,
    page_size: int,
    block_size: int,
    max_batched_tokens: int,
    max_num_seqs: int,
    no_caching: bool,
    batched: bool,
    compare: bool,
    limit: int | None,
    seed: int,
    json_path: str | None,
) -> None:
    """Replay TRACE, or made-up chats, through the allocator under a simulated scheduler.

    TRACE has one JSON object a line: timestamp, input_length, output_length, hash_ids (one for each 512
    tokens of input; equal ids mean equal prefixes), as in the Mooncake release, or what pagepool.replay.Recorder
    has written. A name that ends in .gz is unpacked, - is standard input. Without TRACE: 2,000 turns of made-up
    chats that share system prompts.

    All requests wait from the start, in order, and timestamps are not looked at. Each step computes running
    requests first, then admits waiting ones; the newest is preempted when the pool is short. Who allocates, a
    running batch in one call a step or (--no-batched) the manager in one a request, makes no difference but in time.
    """
    requests = load_requests(trace, limit, block_size, seed)
    is_shown = json_path != "-"
    with open_result(json_path) as output:
        schedulers = {
            path: make_scheduler(
                requests,
                num_pages=num_pages,
                page_size=page_size,
                max_batched_tokens=max_batched_tokens,
                max_num_seqs=max_num_seqs,
                enable_caching=not no_caching,
                batched=path == "batched",
            )
            for path in (PATHS if compare else (PATHS[batched],))
        }
        report_skipped(next(iter(schedulers.values())))
        figures = run_all(schedulers, is_shown and sys.stdout.isatty())
        if output is not None:
            by_path = {path: each.as_dict() for path, each in figures.items()}
            output.write(to_json(by_path if compare else next(iter(by_path.values()))))
    if is_shown:
        source = source_name(trace) if trace else "made-up chats"
        print_report(figures, f"{source}, {num_pages:,} pages of {page_size} tokens")
    require_equal(figures)
