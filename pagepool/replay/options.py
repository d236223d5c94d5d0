"""What the commands have in common: options, traces in, results out, and refusals."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import click

from pagepool.errors import PagePoolError
from pagepool.replay.output import open_output
from pagepool.replay.simulated_request import SimulatedRequest
from pagepool.replay.trace import BLOCK_SIZE, TraceRecord, make_requests, read_trace, source_name

__all__ = [
    "NOT_NEGATIVE",
    "POSITIVE",
    "TRACE",
    "Refusal",
    "block_size_option",
    "json_option",
    "load_trace",
    "max_batched_tokens_option",
    "max_num_seqs_option",
    "open_result",
    "page_size_option",
    "plot_option",
    "require_plots",
    "seed_option",
    "to_json",
]

POSITIVE = click.IntRange(min=1)
NOT_NEGATIVE = click.IntRange(min=0)

TRACE = click.Path(exists=True, dir_okay=False, allow_dash=True)

page_size_option = click.option("--page-size", type=POSITIVE, default=16, help="Tokens in a page.")
block_size_option = click.option(
    "--block-size",
    type=POSITIVE,
    default=BLOCK_SIZE,
    help="Tokens for each hash id of a trace whose lines do not say.",
)
max_batched_tokens_option = click.option(
    "--max-batched-tokens", type=POSITIVE, default=8192, help="Tokens that a step computes at most."
)
max_num_seqs_option = click.option("--max-num-seqs", type=POSITIVE, default=256, help="Requests that run at once at most.")
seed_option = click.option("--seed", type=NOT_NEGATIVE, default=0, help="Of tokens without hash ids, and of made-up chats.")
json_option = click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, allow_dash=True),
    help="Write the figures to a file as JSON (- is standard output, then without a table).",
)


def check_plot_format(_: click.Context, __: click.Parameter, path: str | None) -> str | None:
    """Refuse a plot whose format its name does not tell."""
    if path is not None and not path.lower().endswith((".png", ".svg")):
        raise click.BadParameter(f"{path!r} must end in .png or .svg")
    return path


plot_option = click.option(
    "--plot", "plot_path", type=click.Path(dir_okay=False), callback=check_plot_format, help="Draw to a file: .png or .svg."
)


class Refusal(click.ClickException):
    """Something the user got wrong: the message alone on standard error, exit code 2."""

    exit_code = 2


def load_trace(trace: str, limit: int | None, block_size: int, seed: int) -> tuple[list[TraceRecord], list[SimulatedRequest]]:
    """The records of a trace, and a request for each. Refusal with the line where it is no trace."""
    try:
        records = read_trace(trace, limit, block_size)
        return records, make_requests(records, source_name(trace), seed)
    except (PagePoolError, OSError) as error:
        raise Refusal(str(error)) from error
    except MemoryError as error:
        raise Refusal(f"{source_name(trace)}: too large for the memory: --limit takes the first N requests") from error


@contextmanager
def open_result(path: str | None) -> Iterator[BinaryIO | None]:
    """The file of a result, opened before the work so that a bad path is told at once; - is standard output, None no file. It
    appears whole at the end of the block. Exit code 1 and a sentence if it cannot be written.
    """
    if path is None or path == "-":
        yield None if path is None else sys.stdout.buffer
        return
    try:
        with open_output(path) as file:
            yield file
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written: {error.strerror or error}") from error


def to_json(figures: dict[str, Any]) -> bytes:
    """Indented, with a line's end."""
    return json.dumps(figures, indent=2).encode() + b"\n"


def require_plots() -> None:
    """Exit with code 1 and the name of the extra where plots cannot be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise click.ClickException("plots need matplotlib: pip install 'pagepool[plan]'") from error
