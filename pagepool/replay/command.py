"""The command `pagepool`: one subcommand a file."""

import click

from pagepool._version import __version__
from pagepool.replay.fleets.command import fleet
from pagepool.replay.plans.command import plan
from pagepool.replay.shared.options import Context
from pagepool.replay.simulation.command import replay

__all__ = ["pagepool"]


class Group(click.Group):
    """A group whose help is formatted like that of its commands."""

    context_class = Context


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__)
def pagepool() -> None:
    """KV-cache page allocator for LLM inference engines.

    Exit codes: 0 done; 1 no request could run, memory is short, a result cannot be written, an extra is not installed, or a
    check failed; 2 what was asked for makes no sense, or a trace cannot be read.
    """


pagepool.add_command(fleet)
pagepool.add_command(plan)
pagepool.add_command(replay)
