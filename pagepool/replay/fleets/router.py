"""Routing policies."""

from abc import ABC, abstractmethod
from typing import TypeAlias

import msgspec

from pagepool._core import HashChain
from pagepool.replay.traces.simulated_request import Int32Array

__all__ = ["ROUTERS", "LeastLoadedRouter", "PrefixRouter", "RoundRobinRouter", "Router"]


class Router(ABC):
    """Chooses a replica for each request, from its own assignments, finished requests and the replicas' events."""

    def __init__(self, num_replicas: int, page_size: int, hash_key: bytes) -> None:
        """Replicas hash pages of `page_size` tokens with `hash_key`."""
        self.num_replicas = num_replicas
        self.page_size = page_size
        self.hash_key = hash_key

    @abstractmethod
    def choose(self, request: int, token_ids: Int32Array) -> int:
        """Choose the replica for a request, an index into the trace, with these prompt tokens."""

    def end(self, request: int) -> None:  # noqa: B027  optional
        """Notify that a request has ended, or was lost with its replica."""

    def hear(self, replica: int, events: bytes) -> None:  # noqa: B027
        """Process a replica's batch of events."""

    def forget(self, replica: int) -> None:  # noqa: B027
        """Notify that a replica has lost its cache."""


class RoundRobinRouter(Router):
    """Takes one replica after another."""

    _next = 0

    def choose(self, request: int, token_ids: Int32Array) -> int:
        """Choose the next replica. O(1)."""
        chosen = self._next
        self._next = (chosen + 1) % self.num_replicas
        return chosen


class LoadRouter(Router):
    """A router that tracks the load of each replica."""

    def __init__(self, num_replicas: int, page_size: int, hash_key: bytes) -> None:
        """Start without load."""
        super().__init__(num_replicas, page_size, hash_key)
        self._loads = [0] * num_replicas
        self._chosen: dict[int, tuple[int, int]] = {}

    def assign(self, request: int, replica: int, load: int) -> int:
        """Add a request's load to a replica until it ends. Returns the replica."""
        self._chosen[request] = replica, load
        self._loads[replica] += load
        return replica

    def end(self, request: int) -> None:
        """Subtract the request's load."""
        replica, load = self._chosen.pop(request)
        self._loads[replica] -= load


class LeastLoadedRouter(LoadRouter):
    """Takes the replica with the fewest unfinished requests; the first of equals."""

    def choose(self, request: int, token_ids: Int32Array) -> int:
        """Choose the lowest load. O(replicas)."""
        return self.assign(request, min(range(self.num_replicas), key=self._loads.__getitem__), 1)


Hash: TypeAlias = int


class BlockStored(msgspec.Struct, tag=True):
    """The part of the event that the router reads."""

    block_hashes: list[Hash]
    medium: str | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    """The part of the event that the router reads."""

    block_hashes: list[Hash]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """The event has no fields."""


class Batch(msgspec.Struct, array_like=True):
    """A batch of events on the wire."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class PrefixRouter(LoadRouter):
    """Takes the replica with the least to compute: the request's tokens that are not cached there, plus those of its unfinished
    requests. It learns what each replica has cached from the replicas' events.
    """

    def __init__(self, num_replicas: int, page_size: int, hash_key: bytes) -> None:
        """Start with nothing cached."""
        super().__init__(num_replicas, page_size, hash_key)
        self._holders: dict[str | None, dict[Hash, int]] = {}  # by medium; a bit for each replica
        self._decoder = msgspec.msgpack.Decoder(Batch)

    def choose(self, request: int, token_ids: Int32Array) -> int:
        """Choose the lowest load. O(prompt pages cached anywhere + replicas), including hashing."""
        num_cached_pages = self._count_cached_pages(token_ids)
        costs = [len(token_ids) - self.page_size * num_pages for num_pages in num_cached_pages]
        chosen = min(range(self.num_replicas), key=lambda i: (self._loads[i] + costs[i], self._loads[i]))
        return self.assign(request, chosen, costs[chosen])

    def _count_cached_pages(self, token_ids: Int32Array) -> list[int]:
        """Count the leading pages of a prompt that each replica has cached."""
        chain = HashChain(self.page_size, self.hash_key)
        num_pages = (len(token_ids) - 1) // self.page_size
        chain.extend(token_ids[: num_pages * self.page_size])
        counts = [0] * self.num_replicas
        holders = (1 << self.num_replicas) - 1
        for i in range(num_pages):
            still = holders & self._find_holders(chain[i] & LOW_64_BITS)
            for replica in _bits(holders & ~still):
                counts[replica] = i
            holders = still
            if not holders:
                return counts
        for replica in _bits(holders):
            counts[replica] = num_pages
        return counts

    def _find_holders(self, block_hash: Hash) -> int:
        """Return the replicas that have a page in any medium, a bit for each."""
        found = 0
        for holders in self._holders.values():
            found |= holders.get(block_hash, 0)
        return found

    def hear(self, replica: int, events: bytes) -> None:
        """Update the holders of the pages in the events. O(pages)."""
        bit = 1 << replica
        for event in self._decoder.decode(events).events:
            if isinstance(event, AllBlocksCleared):
                self.forget(replica)
                continue
            holders = self._holders.setdefault(event.medium, {})
            for block_hash in event.block_hashes:
                if isinstance(event, BlockStored):
                    holders[block_hash] = holders.get(block_hash, 0) | bit
                else:
                    _drop(holders, block_hash, bit)

    def forget(self, replica: int) -> None:
        """Remove the replica from all holders. O(pages cached anywhere)."""
        bit = 1 << replica
        for holders in self._holders.values():
            for block_hash in [block_hash for block_hash, replicas in holders.items() if replicas & bit]:
                _drop(holders, block_hash, bit)


def _drop(holders: dict[Hash, int], block_hash: Hash, bit: int) -> None:
    """Remove a replica from the holders of a page."""
    holders[block_hash] &= ~bit
    if not holders[block_hash]:
        del holders[block_hash]


def _bits(mask: int) -> list[int]:
    return [i for i in range(mask.bit_length()) if mask >> i & 1]


LOW_64_BITS = (1 << 64) - 1
ROUTERS: dict[str, type[Router]] = {
    "round-robin": RoundRobinRouter,
    "least-loaded": LeastLoadedRouter,
    "prefix": PrefixRouter,
}
