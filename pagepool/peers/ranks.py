"""Ranks that each hold a part of a page, as one: `RankLinks` and `RankStores`."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from pagepool.arguments import as_list, require_text
from pagepool.errors import ArgumentError, ArgumentTypeError
from pagepool.peers.link import Link, Pulled
from pagepool.stores.jobs import require_keys, require_rows
from pagepool.stores.protocol import Done, Store

BETWEEN_ADDRESSES = " "


class RankLinks:
    """The links of all ranks as one `Link`. Its parts are a sequence for each rank, its address has those of all ranks, and a
    job ends with the last rank's: failed, if it failed for one.
    """

    def __init__(self, links: Sequence[Link]) -> None:
        """`links` are in the order of the ranks. Raise ArgumentTypeError for other objects, ArgumentError for none."""
        self._links = _require_ranks("links", links, Link)
        self._jobs = itertools.count(1)
        self._places: list[dict[int, int]] = [{} for _ in self._links]  # the jobs by the numbers of each rank's link
        self._waiting: dict[int, tuple[set[int], list[Any], Exception | None]] = {}

    @property
    def address(self) -> str:
        """The address from which others with as many ranks pull."""
        return BETWEEN_ADDRESSES.join(link.address for link in self._links)

    def offer(self, number: int, parts: Sequence[Any], *, seconds: float) -> None:
        """Let peers pull `parts`, a sequence for each rank. Raise as `offer` of the links; ArgumentError for parts of another
        number of ranks.
        """
        begun: list[Link] = []
        try:
            for link, own in zip(self._links, self._divide(parts), strict=True):
                link.offer(number, own, seconds=seconds)
                begun.append(link)
        except BaseException:
            for link in begun:
                link.withdraw(number)
            raise

    def withdraw(self, number: int) -> None:
        """End the offers of all ranks."""
        for link in self._links:
            link.withdraw(number)

    def pull(self, address: str, number: int, parts: Sequence[Any]) -> int:
        """Start to pull each rank's parts from the peer's same rank. Return the number of the job. If it cannot begin for a
        rank but the first, the job fails. Raise as `pull` of the first link, and as `offer`; ArgumentError for an address of
        another number of ranks.
        """
        addresses = require_text("address", address).split(BETWEEN_ADDRESSES)
        if len(addresses) != len(self._links):
            raise ArgumentError(f"address: got one of {len(addresses)} ranks, allowed: of {len(self._links)}")
        divided = self._divide(parts)
        begun: list[int] = []
        error: Exception | None = None
        for link, each, own in zip(self._links, addresses, divided, strict=True):
            try:
                begun.append(link.pull(each, number, own))
            except Exception as raised:
                if not begun:
                    raise
                error = raised
                break
        job = next(self._jobs)
        for rank, theirs in enumerate(begun):
            self._places[rank][theirs] = job
        self._waiting[job] = set(range(len(begun))), [None] * len(self._links), error
        return job

    def poll(self) -> list[Pulled]:
        """Return the jobs that have ended for all ranks since the last call."""
        ended = []
        for rank, link in enumerate(self._links):
            for pulled in link.poll():
                job = self._places[rank].pop(pulled.job)
                ranks, parts, error = self._waiting[job]
                ranks.discard(rank)
                parts[rank] = pulled.parts
                self._waiting[job] = ranks, parts, error or pulled.error
                if not ranks:
                    ranks, parts, error = self._waiting.pop(job)
                    ended.append(Pulled(job, parts if error is None else None, error))
        return ended

    def close(self) -> None:
        """Close the links of all ranks."""
        for link in self._links:
            link.close()

    def _divide(self, parts: Sequence[Any]) -> list[Any]:
        listed = as_list("parts", parts, "a sequence of parts for each rank")
        if len(listed) != len(self._links):
            raise ArgumentError(f"parts: got {len(listed)} sequences, allowed: one for each of {len(self._links)} ranks")
        return listed


class RankStores:
    """The stores of all ranks as one `Store`. Each object is divided into equal parts in the order of the ranks, whose sizes
    differ by at most a byte, and a key is done if it is done for all ranks. A job ends with the last rank's.
    """

    def __init__(self, stores: Sequence[Store]) -> None:
        """`stores` are in the order of the ranks. Raise ArgumentTypeError for other objects, ArgumentError for none."""
        self._stores = _require_ranks("stores", stores, Store)
        self._jobs = itertools.count(1)
        self._places: list[dict[int, int]] = [{} for _ in self._stores]
        self._waiting: dict[int, tuple[set[int], bytes, Exception | None]] = {}

    def lookup(self, keys: Sequence[bytes]) -> int:
        """Start to find out which objects all ranks have. Return the number of the job. Raise as `lookup` of the stores."""
        listed = require_keys(keys)
        return self._start(len(listed), lambda _, store: store.lookup(listed))

    def load(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> int:
        """Start to read each rank's part of objects into that of rows. Raise as `load` of the stores; ArgumentError for a row
        of fewer bytes than ranks.
        """
        listed, parts = require_keys(keys), self._divide(rows, is_writable=True)
        return self._start(len(listed), lambda rank, store: store.load(listed, parts[rank]))

    def save(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> int:
        """Start to write each rank's part of rows. Raise as `load`."""
        listed, parts = require_keys(keys), self._divide(rows, is_writable=False)
        return self._start(len(listed), lambda rank, store: store.save(listed, parts[rank]))

    def poll(self) -> list[Done]:
        """Return the jobs that all ranks have answered since the last call."""
        ended = []
        for rank, store in enumerate(self._stores):
            for done in store.poll():
                job = self._places[rank].pop(done.job)
                ranks, flags, error = self._waiting[job]
                ranks.discard(rank)
                both = bytes(a & b for a, b in zip(flags, done.is_done, strict=True))
                self._waiting[job] = ranks, both, error or done.error
                if not ranks:
                    ended.append(Done(job, *self._waiting.pop(job)[1:]))
        return ended

    def touch(self, keys: Sequence[bytes]) -> None:
        """Report uses to all ranks."""
        for store in self._stores:
            store.touch(keys)

    def close(self, *, drain_seconds: float) -> None:
        """Close the stores of all ranks, each in up to `drain_seconds`."""
        for store in self._stores:
            store.close(drain_seconds=drain_seconds)

    def _start(self, num_keys: int, start: Callable[[int, Store], int]) -> int:
        """Start a job of each rank. Stores refuse the same arguments, so only the first rank's call may raise."""
        job, ranks = next(self._jobs), set(range(len(self._stores)))
        theirs = [start(rank, store) for rank, store in enumerate(self._stores)]
        for rank, number in enumerate(theirs):
            self._places[rank][number] = job
        self._waiting[job] = ranks, b"\1" * num_keys, None
        return job

    def _divide(self, rows: Sequence[memoryview], *, is_writable: bool) -> list[list[memoryview]]:
        """Return each rank's parts of rows."""
        num = len(self._stores)
        listed = require_rows(rows, len(rows) if isinstance(rows, Sequence) else 0, is_writable)
        for row in listed:
            if len(row) < num:
                raise ArgumentError(f"rows: got a row of {len(row)} bytes, allowed: at least {num}, one for each rank")
        return [[row[len(row) * rank // num : len(row) * (rank + 1) // num] for row in listed] for rank in range(num)]


def _require_ranks(name: str, values: Sequence[Any], protocol: Any) -> list[Any]:
    """Return the objects of all ranks."""
    listed = as_list(name, values, f"a sequence of {protocol.__name__}")
    for each in listed:
        if not isinstance(each, protocol):
            raise ArgumentTypeError(
                f"{name}: got {type(each).__name__}, allowed: objects with the methods of {protocol.__name__}"
            )
    if not listed:
        raise ArgumentError(f"{name}: got none, allowed: one for each rank")
    return listed
