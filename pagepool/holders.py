"""The holders of pages: the result of `CacheManager.held`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from pagepool._core import PageClaim
from pagepool.errors import PagesHeldError, count_of

__all__ = ["KINDS", "HeldPages", "PageHolder", "Preempted"]

KINDS = ("request", "row", "medium", "sink", "lease", "load", "copy", "caller")
"""Kinds of holders. A page with holders of several kinds counts for the first of them."""

MAX_SHOWN = 20  # holders in a table
MAX_NAME = 40  # characters of a name in a line of text


class PageHolder(NamedTuple):
    """A holder of pages, in the report of `CacheManager.held`.

    ``kind`` and ``name``: ``"request"`` has the request's id; ``"row"`` its number and the batch's, as in ``"3 of batch 0"``,
    the first batch of the manager; ``"medium"`` the ids of the requests that read it; ``"lease"`` its place in
    `CacheManager.leases`. ``"sink"`` holds the pages of learned sinks, ``"load"`` pages of the pool to be filled from the host
    tier, ``"copy"`` sources of copies that are due. ``"caller"`` has all references without another holder.

    ``num_pages`` and ``num_own_pages`` map each pool to a number of pages: those it holds, and those that nobody else holds,
    which would become free without it. ``seconds`` is the time since the request was admitted, the row was admitted or forked,
    or the lease began; None if it is not known. ``seconds_left`` is the time until a lease ends; None for leases without an
    end, and all else. Both are counted in sixteenths of a second.
    """

    kind: str
    name: str
    num_pages: Mapping[str, int]
    num_own_pages: Mapping[str, int]
    seconds: float | None
    seconds_left: float | None


class HeldPages(NamedTuple):
    """The holders of a manager's pages, from `CacheManager.held`; `repr` is a table of the largest.

    ``holders`` are those with pages, the largest first. ``num_pages_by_kind`` has the held pages of each pool by kind of
    holder; a page of several kinds counts once, for the first of ``request``, ``row``, ``medium``, ``sink``, ``lease``,
    ``load``, ``copy`` and ``caller``. ``caller_page_ids`` are the ids, by pool, of the caller's pages: taken from `PagePool`,
    held by another manager of the pool, or lost with a batch that was dropped.
    """

    holders: tuple[PageHolder, ...]
    num_pages_by_kind: Mapping[str, Mapping[str, int]]
    caller_page_ids: Mapping[str, list[int]]

    @classmethod
    def of(cls, claims: Iterable[tuple[str, str, PageClaim]], pools: Iterable[str]) -> "HeldPages":
        """Make the report from the core's claims, with their kinds and names, in the order in which they were counted."""
        holders: list[PageHolder] = []
        by_kind: dict[str, dict[str, int]] = {pool: {} for pool in pools}
        caller: dict[str, list[int]] = {pool: [] for pool in by_kind}
        for kind, name, claim in claims:
            holders.append(PageHolder(kind, name, claim.num_pages, claim.num_own_pages, claim.seconds, claim.seconds_left))
            for pool, num_pages in claim.num_first_pages.items():
                if num_pages:
                    by_kind[pool][kind] = by_kind[pool].get(kind, 0) + num_pages
            if kind == "caller":
                caller = claim.page_ids_by_pool
        return cls(tuple(sorted(holders, key=_place_of)), by_kind, caller)

    def __repr__(self) -> str:
        """Return the table."""
        return make_table(self.holders, [*self.num_pages_by_kind])


class Preempted(NamedTuple):
    """The rows and requests that `CacheManager.vacate` wants to be preempted: ``rows`` maps running batches to the numbers of
    their rows, ``request_ids`` are those of the manager's own requests.
    """

    rows: Mapping[Any, list[int]]
    request_ids: list[str]


def refuse_held(held: HeldPages) -> NoReturn:
    """Raise PagesHeldError for pages that have to be given back, naming their holders."""
    holders = [f"{each.kind} {show_name(each.name)}".strip() for each in held.holders if each.kind != "sink"]
    rest = f" and {len(holders) - MAX_SHOWN:,} more" if len(holders) > MAX_SHOWN else ""
    raise PagesHeldError(f"pages: got some held by {', '.join(holders[:MAX_SHOWN])}{rest}, allowed: none")


def count_pages(holder: PageHolder) -> int:
    """Return the pages of a holder in all pools."""
    return sum(holder.num_pages.values())


def _place_of(holder: PageHolder) -> tuple[Any, ...]:
    return -count_pages(holder), -(holder.seconds or 0), holder.kind, holder.name


def list_columns(holders: Sequence[PageHolder], pools: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return the columns of a table of holders, each with its heading: kind and name, then numbers."""
    columns = [("kind", [show_name(each.kind) for each in holders]), ("name", [show_name(each.name) for each in holders])]
    if len(pools) < 2:
        columns.append(("pages", [f"{count_pages(each):,}" for each in holders]))
    else:
        columns += [(f"pages of {show_name(pool)}", [f"{each.num_pages.get(pool, 0):,}" for each in holders]) for pool in pools]
    columns.append(("own", [f"{sum(each.num_own_pages.values()):,}" for each in holders]))
    columns.append(("seconds", [_show_seconds(each.seconds) for each in holders]))
    columns.append(("seconds left", [_show_seconds(each.seconds_left) for each in holders]))
    return columns


def describe_rest(holders: Sequence[PageHolder]) -> str:
    """Return a line on the holders that a table leaves out."""
    return f"and {len(holders):,} more with {count_of(sum(map(count_pages, holders)), 'page')}"


def make_table(holders: Sequence[PageHolder], pools: Sequence[str]) -> str:
    """Return the first holders as a table of text, with a last line on those left out."""
    if not holders:
        return "nobody holds a page"
    cells = [[heading, *column] for heading, column in list_columns(holders[:MAX_SHOWN], pools)]
    widths = [max(map(len, column)) for column in cells]
    columns = [
        [cell.ljust(width) if i < 2 else cell.rjust(width) for cell in column]
        for i, (column, width) in enumerate(zip(cells, widths, strict=True))
    ]
    lines = ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]
    rest = holders[MAX_SHOWN:]
    return "\n".join([*lines, describe_rest(rest)] if rest else lines)


def show_name(name: str, most: int = MAX_NAME) -> str:
    """Return a name for a line of text: printable, and cut in the middle if it is long."""
    text = name if name.isprintable() else name.encode("unicode_escape", "backslashreplace").decode()
    return text if len(text) <= most else f"{text[: most // 2]}...{text[3 - most + most // 2 :]}"


def _show_seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:,.0f}"
