"""What the commands have in common: how they are called, options, traces in, and refusals."""

import shutil
from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any

import click

from pagepool.errors import ArgumentError
from pagepool.replay.shared.memory import explain
from pagepool.replay.shared.results import OutputFile, require_files_apart
from pagepool.replay.shared.sizes import COUNT_UNITS, Sizes, parse_number

__all__ = [
    "SECONDS",
    "Command",
    "Context",
    "Refusal",
    "Size",
    "json_option",
    "max_batched_tokens_option",
    "max_num_seqs_option",
    "page_size_option",
    "plot_option",
    "require_plots",
]

UNITS = "Numbers may have a unit: 10k, 1.5M, 2G; bytes kB, MB, GB, TB or KiB, MiB, GiB, TiB."
MAX_SECONDS = 10**9  # thirty years: a clock that counts in steps and rounds stays far from the largest float
RESERVED_BYTES = 4 << 20  # never touched: address space to say in that there is no more


class HelpFormatter(click.HelpFormatter):
    """As wide as the terminal, where click takes 50 columns at least, and with room for words beside the options."""

    def __init__(self, indent_increment: int = 2, width: int | None = None, max_width: int | None = None) -> None:
        """`width` and `max_width` in columns; None: the terminal's, and 80."""
        columns = min(shutil.get_terminal_size().columns, max_width or 80)
        super().__init__(indent_increment, max(columns - 2, 20) if width is None else width)

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        """Write a list of names and what they mean."""
        super().write_dl([*rows], min(col_max, self.width // 3), col_spacing)


class Context(click.Context):
    """A context that formats help with `HelpFormatter`."""

    formatter_class = HelpFormatter


class Command(click.Command):
    """A command that keeps its files apart, reports short memory in a sentence, and explains sizes in its help."""

    context_class = Context

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Say how sizes are written."""
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(UNITS)

    def get_short_help_str(self, limit: int = 45) -> str:
        """The first sentence, whatever its length."""
        return super().get_short_help_str(limit=10**6)

    def invoke(self, ctx: click.Context) -> Any:
        """Run it."""
        require_files_apart(ctx)
        reserve = bytearray(RESERVED_BYTES)
        try:
            return super().invoke(ctx)
        except MemoryError as error:
            del reserve
            raise click.ClickException(f"out of memory: {explain(error)}") from error


class Size(click.ParamType):  # type: ignore[type-arg]  # only later versions of click have a parameter there
    """A whole number with a unit, at least `minimum`: `1k`, `40GiB`; with `many` some numbers, or a range, as `Sizes`."""

    def __init__(self, noun: str, units: Mapping[str, int] = COUNT_UNITS, minimum: int = 1, *, many: bool = False) -> None:
        """`noun` is what help shows for the number."""
        self.name = noun
        self._units = units
        self._minimum = minimum
        self._parse = Sizes.parse if many else parse_number

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Defaults are numbers already."""
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value, self._units, self._minimum)
        except ArgumentError as error:
            self.fail(f"{error}.", param, ctx)


class Seconds(click.FloatRange):
    """More than 0, and at most `MAX_SECONDS`."""

    def __init__(self) -> None:
        """Without other bounds."""
        super().__init__(min=0, min_open=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Refuse what floats have beside numbers."""
        seconds = super().convert(value, param, ctx)
        if not isfinite(seconds):
            self.fail(f"{value!r} is not a number of seconds.", param, ctx)
        if seconds > MAX_SECONDS:
            self.fail(f"{value!r} is more than {MAX_SECONDS:,} seconds.", param, ctx)
        return seconds


SECONDS = Seconds()

page_size_option = click.option("--page-size", type=Size("tokens"), default=16, help="Tokens in a page.")
max_batched_tokens_option = click.option(
    "--max-batched-tokens", type=Size("tokens"), default=8192, help="Tokens that a step computes at most."
)
max_num_seqs_option = click.option(
    "--max-num-seqs", type=Size("requests"), default=256, help="Requests that run at once at most."
)
json_option = click.option(
    "--json",
    "json_path",
    type=OutputFile(),
    help="Write the figures to a file as JSON (- is standard output, then without a table).",
)


def check_plot_format(_: click.Context, __: click.Parameter, path: str | None) -> str | None:
    """Refuse a plot whose format its name does not tell."""
    if path is not None and not path.lower().endswith((".png", ".svg")):
        raise click.BadParameter(f"{path!r} must end in .png or .svg")
    return path


plot_option = click.option(
    "--plot", "plot_path", type=OutputFile(), callback=check_plot_format, help="Draw to a file: .png or .svg."
)


class Refusal(click.ClickException):
    """Something the user got wrong: the message alone on standard error, exit code 2."""

    exit_code = 2


def require_plots() -> None:
    """Exit with code 1 and the name of the extra where plots cannot be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise click.ClickException("plots need matplotlib: pip install 'pagepool[plan]'") from error
