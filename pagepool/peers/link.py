"""The protocol of links: bytes of pages that other processes pull."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable


class Pulled(NamedTuple):
    """An answered job of `Link.pull`."""

    job: int
    """The number returned by `pull`."""

    parts: Sequence[Any] | None
    """The parts with their contents; None if the job failed. What its parts contain is then undefined."""

    error: Exception | None
    """The first error of a failed job."""


@runtime_checkable
class Link(Protocol):
    """Moves parts of pages between processes. One thread calls it, and no call but `close` blocks that thread.

    What a part is depends on the link: host memory for `RowsLink`, a jax array for `JaxLink`, a list for each rank for
    `RankLinks`. A link of your own, on NIXL or Mooncake, gets what your engine passes as parts: registered memory, or the page
    ids of registered arrays. `offer` publishes their descriptors under the number. `pull` exchanges descriptors in a thread,
    starts one read, and writes to nothing but its own parts. `withdraw` deregisters, or waits for reads that are under way, so
    that the memory may be reused when it returns; so does a timer when an offer ends. NIXL reads one-sidedly, without the
    owner's knowledge: check the offer's end after each read by a notification of the owner, and drop what came later. A
    Mooncake transfer is polled by `poll`. Errors of the engine become the `error` of a job; nothing else is raised.
    """

    @property
    def address(self) -> str:
        """The address from which others pull. It names this very link: a restarted process has another one."""

    def offer(self, number: int, parts: Sequence[Any], *, seconds: float) -> None:
        """Let peers pull `parts` under a number, which was never used before, until `seconds` have passed or `withdraw`."""

    def withdraw(self, number: int) -> None:
        """End an offer; an unknown number does nothing. When this returns, no byte of the parts is read any more, and pulls
        under way fail. The same holds once the seconds of the offer have passed.
        """

    def pull(self, address: str, number: int, parts: Sequence[Any]) -> int:
        """Start to pull what a peer offers under a number into parts like its own. Return the number of the job. Until `poll`
        names the job or `close` returns, the link may write to the parts.
        """

    def poll(self) -> list[Pulled]:
        """Return the jobs that have ended since the last call. Each job ends once, even if the peer is dead or silent."""

    def close(self) -> None:
        """End all offers and jobs. No job is answered afterwards, and no part is read or written."""
