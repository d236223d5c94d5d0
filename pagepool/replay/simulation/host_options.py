"""Options of the host memory behind simulated pools."""

import click

from pagepool.replay.shared.options import Size
from pagepool.replay.simulation.host import HostMemory, Policy

host_pages_option = click.option(
    "--host-pages",
    type=Size("pages", minimum=2),
    help="Pages of a tier in host memory behind the pool, including a null page.",
    show_default="no tier",
)
host_policy_option = click.option(
    "--host-policy",
    type=click.Choice(("write_back", "write_through")),
    metavar="POLICY",
    help="write_back saves pages in the tier when they are evicted from the pool, write_through once they are computed.",
    show_default="write_back",
)


def choose_host(num_pages: int | None, policy: Policy | None) -> HostMemory | None:
    """Return the requested host memory, if any."""
    if num_pages is not None:
        return HostMemory(num_pages, policy or "write_back")
    if policy is not None:
        raise click.UsageError("--host-policy needs --host-pages")
    return None
