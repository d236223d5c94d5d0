"""Routing policies."""

from abc import ABC, abstractmethod
from typing import Any

from pagepool.replay.traces.simulated_request import Int32Array
from pagepool.router import PrefixIndex, PrefixRouter


class Router(ABC):
    """Router: chooses a replica for each request, from its own assignments, finished requests and the replicas' events."""

    def __init__(self, num_replicas: int, page_size: int, hash_seed: str) -> None:
        """Route to replicas that hash pages of `page_size` tokens with `hash_seed`."""
        self.num_replicas = num_replicas
        self.page_size = page_size
        self.hash_seed = hash_seed

    @abstractmethod
    def choose(self, request: int, token_ids: Int32Array) -> int:
        """Choose the replica for a request with these prompt tokens. The request is an index into the trace."""

    def end(self, request: int) -> None:  # noqa: B027  optional
        """Notify that a request has ended, or was lost with its replica."""

    def hear(self, replica: int, events: bytes) -> None:  # noqa: B027
        """Process a replica's batch of events."""

    def forget(self, replica: int) -> None:  # noqa: B027
        """Notify that a replica has lost its cache."""


class RoundRobinRouter(Router):
    """Router that takes one replica after another."""

    _next = 0

    def choose(self, request: int, token_ids: Int32Array) -> int:
        """Choose the next replica. O(1)."""
        chosen = self._next
        self._next = (chosen + 1) % self.num_replicas
        return chosen


class LeastLoadedRouter(Router):
    """Router that takes the replica with the fewest unfinished requests; of equals, the first."""

    def __init__(self, num_replicas: int, page_size: int, hash_seed: str) -> None:
        """Start without requests."""
        super().__init__(num_replicas, page_size, hash_seed)
        self._loads = [0] * num_replicas
        self._chosen: dict[int, int] = {}

    def choose(self, request: int, token_ids: Int32Array) -> int:
        """Choose the lowest load. O(replicas)."""
        chosen = min(range(self.num_replicas), key=self._loads.__getitem__)
        self._chosen[request] = chosen
        self._loads[chosen] += 1
        return chosen

    def end(self, request: int) -> None:
        """Subtract the request."""
        self._loads[self._chosen.pop(request)] -= 1


class CachedPrefixRouter(Router):
    """Router that takes the replica with the least to compute, by `pagepool.router.PrefixRouter`. It learns each replica's
    cached prefixes from events.
    """

    def __init__(self, num_replicas: int, page_size: int, hash_seed: str, **limits: Any) -> None:
        """Start with nothing cached. `limits` are as in `PrefixRouter`."""
        super().__init__(num_replicas, page_size, hash_seed)
        self.index = PrefixIndex(page_size, hash_seed=hash_seed)
        self._router = PrefixRouter(self.index, range(num_replicas), **limits)

    def choose(self, request: int, token_ids: Int32Array) -> int:
        """Choose the replica with the least to compute. O(prompt + replicas), including hashing."""
        return self._router.choose(request, token_ids).worker

    def end(self, request: int) -> None:
        """Subtract the tokens that the request had to compute."""
        self._router.end(request)

    def hear(self, replica: int, events: bytes) -> None:
        """Apply the events to the index. O(bytes)."""
        self.index.apply(replica, events)
        self._router.note_report(replica)

    def forget(self, replica: int) -> None:
        """Remove the replica from the index. O(pages cached anywhere)."""
        self.index.remove_worker(replica)


ROUTERS: dict[str, type[Router]] = {
    "round-robin": RoundRobinRouter,
    "least-loaded": LeastLoadedRouter,
    "prefix": CachedPrefixRouter,
}
