"""The command group `pagepool`."""

import sys

import click

from pagepool._version import __version__
from pagepool.replay.fleets.command import fleet
from pagepool.replay.plans.command import plan
from pagepool.replay.shared.options import Context
from pagepool.replay.simulation.command import replay
from pagepool.replay.top.command import top


class Group(click.Group):
    """A group with the help format of its commands."""

    context_class = Context


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__)
def pagepool() -> None:
    """KV-cache page allocator for LLM inference engines.

    Exit codes: 0 success; 1 no request could run, out of memory, a result cannot be written, an extra is not installed, or a
    check failed; 2 invalid arguments, or an unreadable trace.
    """


pagepool.add_command(fleet)
pagepool.add_command(plan)
pagepool.add_command(replay)
pagepool.add_command(top)


@pagepool.command(
    short_help="Check the installation.", add_help_option=False, context_settings={"ignore_unknown_options": True}
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def doctor(arguments: tuple[str, ...]) -> None:
    """Check the installation, and say what to do where something is wrong."""
    from pagepool.doctor.command import main as run_doctor  # imported here, since other commands do not need it

    sys.exit(run_doctor(arguments))
