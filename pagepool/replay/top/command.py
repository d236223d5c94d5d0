"""The command `pagepool top`."""

import time
from collections.abc import Callable
from contextlib import suppress
from os.path import basename
from urllib.parse import urlsplit

import click
from rich.live import Live

from pagepool.doctor.pool import load_dump
from pagepool.errors import ArgumentError
from pagepool.replay.shared.options import Command, Refusal, Seconds
from pagepool.replay.shared.results import InputFile, OutputFile, open_result, printing
from pagepool.replay.top.page import make_page
from pagepool.replay.top.screen import draw, make_console, print_views
from pagepool.replay.top.view import View, view_dump

Fetch = Callable[[], list[View]]


def is_web_address(url: str) -> bool:
    """Whether a text is an address of a web server."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a wrong port, or a bracket without its other half
        return False


def make_fetch(url: str) -> Fetch:
    """Return a function that returns the views at an address, or raises ClickException."""
    if not is_web_address(url):
        raise click.UsageError(f"--url: got {url!r}, allowed: http://... or https://...")
    try:
        from pagepool.replay.top.metrics import FetchError, fetch_views
    except ModuleNotFoundError as error:
        raise click.ClickException("metrics need prometheus-client: pip install 'pagepool[metrics]'") from error

    def fetch() -> list[View]:
        try:
            return fetch_views(url)
        except FetchError as error:
            raise click.ClickException(str(error)) from error

    return fetch


def read_file(path: str) -> View:
    """Return the view of a dump. Exit with code 2 and a message for other files."""
    try:
        return view_dump(load_dump(path), basename(path))
    except ArgumentError as error:
        raise Refusal(str(error)) from error


def show(views: list[View], before: list[View]) -> None:
    """Print views as text."""
    with printing():
        print_views(views, before)


def follow(fetch: Fetch, interval: float) -> None:
    """Show the views again after each interval, until the command is interrupted. The first ones must come."""
    views, before, console = fetch(), list[View](), make_console()
    is_live = console.is_terminal and not console.is_dumb_terminal
    with suppress(KeyboardInterrupt):
        if not is_live:
            while True:
                show(views, before)
                time.sleep(interval)
                before, views = views, fetch()
        with Live(draw(views), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                try:
                    before, views = views, fetch()
                    live.update(draw(views, before), refresh=True)
                except click.ClickException as error:
                    live.update(error.format_message(), refresh=True)


@click.command(cls=Command, short_help="Show who holds the pages of a running engine, or of a dump.")
@click.option("--url", help="Address of an engine's metrics, such as http://localhost:8000/metrics.")
@click.option("--pool", "pool_path", type=InputFile(), help="A file that json.dump wrote of CacheManager.dump.")
@click.option("--interval", type=Seconds(), default=2.0, help="Seconds between two readings of the metrics.")
@click.option("--once", is_flag=True, help="Read the metrics once.")
@click.option("--html", "html_path", type=OutputFile(), help="Write the dump as one HTML page.")
def top(url: str | None, pool_path: str | None, interval: float, once: bool, html_path: str | None) -> None:
    """Show free, cached and held pages by pool and by kind of holder, hits, evictions, tier, store and queue.

    With --url the view is live, until it is interrupted with Ctrl-C; on no terminal it is printed again as text. A dump also
    has the largest holders by name.

    \b
    Examples:
      pagepool top --url http://localhost:8000/metrics
      pagepool top --pool dump.json --html pool.html
    """
    if (url is None) == (pool_path is None):
        raise click.UsageError("give either --url or --pool")
    if html_path is not None and pool_path is None:
        raise click.UsageError("--html needs --pool")
    if url is not None:
        fetch = make_fetch(url)
        if once:
            show(fetch(), [])
        else:
            follow(fetch, interval)
        return
    view = read_file(str(pool_path))
    with open_result(html_path) as html_file:
        if html_file:
            html_file.write(make_page(view).encode())
    if html_path != "-":
        show([view], [])
