"""The command `pagepool` and its options."""

import json
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import IO

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pagepool._version import __version__
from pagepool.errors import PagePoolError
from pagepool.manager import CacheManager
from pagepool.replay.figures import Figures
from pagepool.replay.generator import generate_chats
from pagepool.replay.report import print_report
from pagepool.replay.scheduler import Scheduler
from pagepool.replay.simulated_request import SimulatedRequest
from pagepool.replay.trace import make_requests, read_trace, source_name
from pagepool.specs import CacheGroupSpec, FullAttentionSpec

__all__ = ["pagepool"]

DEFAULT_NUM_CHATS = 2000
MAX_SKIPPED_SHOWN = 10
PATHS = ("manager", "batched")
POSITIVE = click.IntRange(min=1)
NOT_NEGATIVE = click.IntRange(min=0)


class Refusal(click.ClickException):
    """Something the user got wrong: the message alone on standard error, exit code 2."""

    exit_code = 2


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__)
def pagepool() -> None:
    """KV-cache page allocator for LLM inference engines."""


def load_requests(trace: str | None, limit: int | None, seed: int) -> list[SimulatedRequest]:
    """The requests of the trace, or of made-up chats."""
    if trace is None:
        return generate_chats(DEFAULT_NUM_CHATS if limit is None else limit, seed)
    try:
        return make_requests(read_trace(trace, limit), source_name(trace), seed)
    except (PagePoolError, OSError) as error:
        raise Refusal(str(error)) from error


def make_manager(num_pages: int, page_size: int, requests: list[SimulatedRequest], enable_caching: bool) -> CacheManager:
    """A manager of one full-attention group that takes the longest of the requests."""
    # The number of bytes a page stands for plays no part here.
    spec = FullAttentionSpec(page_size, num_kv_heads=1, head_size=1, dtype="bfloat16", use_mla=False)
    max_model_len = max((request.num_final_tokens for request in requests), default=1)
    try:
        return CacheManager(num_pages, [CacheGroupSpec(spec)], max_model_len, enable_caching=enable_caching)
    except (PagePoolError, OverflowError, MemoryError) as error:
        raise Refusal(f"no pool of {num_pages} pages of {page_size} tokens: {error or 'out of memory'}") from error


def make_scheduler(
    manager: CacheManager, requests: list[SimulatedRequest], max_batched_tokens: int, max_num_seqs: int, batched: bool
) -> Scheduler:
    """A scheduler of its own copies of the requests, which it changes as they run."""
    copies = [replace(request) for request in requests]
    try:
        return Scheduler(manager, copies, max_num_batched_tokens=max_batched_tokens, max_num_seqs=max_num_seqs, batched=batched)
    except (PagePoolError, MemoryError) as error:
        raise Refusal(f"no batch of {max_num_seqs} requests: {error or 'out of memory'}") from error


def open_output(path: str | None) -> AbstractContextManager[IO[str] | None]:
    """The file for JSON, opened before the work so that a bad path is told at once."""
    if path is None:
        return nullcontext()
    try:
        return click.open_file(path, "w", encoding="utf-8")
    except OSError as error:
        raise Refusal(str(error)) from error


def run_with_progress(scheduler: Scheduler, path: str, shown: bool) -> Figures:
    """Run to the end under a progress bar on standard output, if it is to be shown."""
    if not shown:
        return scheduler.run()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True) as progress:
        task = progress.add_task(f"{path}: requests", total=len(scheduler.waiting))
        return scheduler.run(lambda figures: progress.update(task, completed=figures.requests))


def report_skipped(scheduler: Scheduler) -> None:
    """Name the requests that do not fit the pool on standard error, up to a number."""
    for request, reason in scheduler.skipped[:MAX_SKIPPED_SHOWN]:
        click.echo(f"skipped {request.request_id}: {reason}", err=True)
    num_more = len(scheduler.skipped) - MAX_SKIPPED_SHOWN
    if num_more > 0:
        click.echo(f"skipped {num_more} more", err=True)


def write_json(figures: dict[str, Figures], output: IO[str]) -> None:
    """The figures by name; by path and name if there are several paths."""
    by_path = {path: each.as_dict() for path, each in figures.items()}
    json.dump(by_path if len(by_path) > 1 else next(iter(by_path.values())), output, indent=2)
    output.write("\n")


def require_equal(figures: dict[str, Figures]) -> None:
    """Exit with code 1 and the names of the figures in which the paths differ, if there are any."""
    first, *others = figures.values()
    names = sorted({name for other in others for name in first.list_differences(other)})
    if names:
        raise click.ClickException(f"{' and '.join(figures)} differ in {', '.join(names)}")


@pagepool.command()
@click.argument("trace", required=False, type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@click.option("--num-pages", type=POSITIVE, default=32768, help="Pages in the pool, the null page included.")
@click.option("--page-size", type=POSITIVE, default=16, help="Tokens in a page.")
@click.option("--max-batched-tokens", type=POSITIVE, default=8192, help="Tokens that a step computes at most.")
@click.option("--max-num-seqs", type=POSITIVE, default=256, help="Requests that run at once at most.")
@click.option("--no-caching", is_flag=True, help="Do without prefix caching.")
@click.option("--batched/--no-batched", default=True, help="Allocate for all running requests at once, or request by request.")
@click.option("--compare", is_flag=True, help="Replay both ways; exit code 1 if more than times differs.")
@click.option("--limit", type=NOT_NEGATIVE, metavar="N", help="Only the first N requests; without TRACE how many to make up.")
@click.option("--seed", type=NOT_NEGATIVE, default=0, help="Of the answers' tokens, and of the made-up chats.")
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, writable=True, allow_dash=True),
    help="Write the figures to a file as JSON (- is standard output, then without a table).",
)
def replay(
    trace: str | None,
    num_pages: int,
    page_size: int,
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
    tokens of input; equal ids mean equal prefixes). A name that ends in .gz is unpacked, - is standard input.
    Without TRACE: 2,000 turns of made-up chats that share system prompts.

    All requests wait from the start, in order, and timestamps are not looked at. Each step computes running
    requests first, then admits waiting ones; the newest is preempted when the pool is short. Who allocates, a
    running batch in one call a step or (--no-batched) the manager in one a request, makes no difference but in time.
    """
    requests = load_requests(trace, limit, seed)
    is_shown = json_path != "-"
    with open_output(json_path) as output:
        schedulers = {}
        for path in PATHS if compare else (PATHS[batched],):
            manager = make_manager(num_pages, page_size, requests, not no_caching)
            schedulers[path] = make_scheduler(manager, requests, max_batched_tokens, max_num_seqs, path == "batched")
        report_skipped(next(iter(schedulers.values())))
        figures = {
            path: run_with_progress(scheduler, path, is_shown and sys.stdout.isatty()) for path, scheduler in schedulers.items()
        }
        if is_shown:
            source = source_name(trace) if trace else "made-up chats"
            print_report(figures, f"{source}, {num_pages:,} pages of {page_size} tokens")
        if output is not None:
            write_json(figures, output)
    require_equal(figures)
