"""Command class, parameter types and options shared by the commands."""

import shutil
from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any

import click

from pagepool.errors import ArgumentError
from pagepool.replay.shared.memory import POLICY_BYTES, explain
from pagepool.replay.shared.results import OutputFile, require_files_apart
from pagepool.replay.shared.sizes import COUNT_UNITS, Sizes, parse_number

UNITS = "Numbers may have a unit: 10k, 1.5M, 2G; bytes kB, MB, GB, TB or KiB, MiB, GiB, TiB."
MAX_SECONDS = 10**9  # thirty years; keeps the simulated clock far from the largest float
RESERVED_BYTES = 4 << 20  # address space reserved for reporting exhausted memory


class HelpFormatter(click.HelpFormatter):
    """Formatter of help that fits terminals narrower than click's minimum of 50 columns, and leaves room for text beside
    options.
    """

    def __init__(self, indent_increment: int = 2, width: int | None = None, max_width: int | None = None) -> None:
        """Widths in columns; by default the terminal's, up to 80."""
        columns = min(shutil.get_terminal_size().columns, max_width or 80)
        super().__init__(indent_increment, max(columns - 2, 20) if width is None else width)

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        """Write a definition list."""
        super().write_dl([*rows], min(col_max, self.width // 3), col_spacing)


class Context(click.Context):
    """A context that formats help with `HelpFormatter`."""

    formatter_class = HelpFormatter


class Command(click.Command):
    """A command that refuses equal files, reports MemoryError as a message, and explains units in its help."""

    context_class = Context

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Explain the units."""
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(UNITS)

    def get_short_help_str(self, limit: int = 45) -> str:
        """Return the first sentence in full."""
        return super().get_short_help_str(limit=10**6)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        require_files_apart(ctx)
        reserve = bytearray(RESERVED_BYTES)
        try:
            return super().invoke(ctx)
        except MemoryError as error:
            del reserve
            raise click.ClickException(f"out of memory: {explain(error)}") from error


class Size(click.ParamType):  # type: ignore[type-arg]  # only later versions of click have a parameter there
    """A whole number with a unit, such as `1k` or `40GiB`, at least `minimum`; with `many`, `Sizes`."""

    def __init__(self, noun: str, units: Mapping[str, int] = COUNT_UNITS, minimum: int = 1, *, many: bool = False) -> None:
        """`noun` is the metavar in the help."""
        self.name = noun
        self._units = units
        self._minimum = minimum
        self._parse = Sizes.parse if many else parse_number

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse a string; defaults are already converted."""
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value, self._units, self._minimum)
        except ArgumentError as error:
            self.fail(f"{error}.", param, ctx)


class Seconds(click.FloatRange):
    """A number above 0, at most `MAX_SECONDS`."""

    def __init__(self) -> None:
        """Set the lower bound."""
        super().__init__(min=0, min_open=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Reject infinity and NaN too."""
        seconds = super().convert(value, param, ctx)
        if not isfinite(seconds):
            self.fail(f"{value!r} is not a number of seconds.", param, ctx)
        if seconds > MAX_SECONDS:
            self.fail(f"{value!r} is more than {MAX_SECONDS:,} seconds.", param, ctx)
        return seconds


SECONDS = Seconds()

page_size_option = click.option("--page-size", type=Size("tokens"), default=16, help="Tokens in a page.")
max_batched_tokens_option = click.option(
    "--max-batched-tokens", type=Size("tokens"), default=8192, help="Maximum number of tokens computed in a step."
)
max_num_seqs_option = click.option(
    "--max-num-seqs", type=Size("requests"), default=256, help="Maximum number of requests running at once."
)
EVICTION_POLICIES = LRU, ADAPTIVE = tuple(POLICY_BYTES)
EVICTION = click.Choice(EVICTION_POLICIES)
eviction_option = click.option(
    "--eviction",
    type=EVICTION,
    metavar="POLICY",
    default=LRU,
    help=f"Policy by which cached pages are evicted: {', '.join(EVICTION_POLICIES)}.",
)
ORDERS = ARRIVAL, WORK = ("arrival", "work")
order_option = click.option(
    "--order",
    type=click.Choice(ORDERS),
    metavar="ORDER",
    default=ARRIVAL,
    help="Order in which waiting requests are admitted: arrival, or work, the least to compute first (WaitingQueue).",
)
json_option = click.option(
    "--json",
    "json_path",
    type=OutputFile(),
    help="Write the figures to a file as JSON; - is standard output, and suppresses the table.",
)


def check_plot_format(_: click.Context, __: click.Parameter, path: str | None) -> str | None:
    """Reject file names without a known extension."""
    if path is not None and not path.lower().endswith((".png", ".svg")):
        raise click.BadParameter(f"{path!r} must end in .png or .svg")
    return path


plot_option = click.option(
    "--plot", "plot_path", type=OutputFile(), callback=check_plot_format, help="Draw a plot to a .png or .svg file."
)


class Refusal(click.ClickException):
    """A user's mistake: the command prints only the message and exits with code 2."""

    exit_code = 2


def require_plots() -> None:
    """Exit with code 1 and the name of the extra if matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise click.ClickException("plots need matplotlib: pip install 'pagepool[plan]'") from error
