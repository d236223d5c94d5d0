"""Who gets a request: routers in front of a fleet."""

from abc import ABC, abstractmethod
from typing import TypeAlias

import msgspec

from pagepool._core import HashChain
from pagepool.replay.traces.simulated_request import Int32Array

__all__ = ["ROUTERS", "LeastLoadedRouter", "PrefixRouter", "RoundRobinRouter", "Router"]


class Router(ABC):
    """Chooses a replica for each request. It knows what it sent where, what has ended, and what replicas tell it."""

    def __init__(self, num_replicas: int, page_size: int, hash_key: bytes) -> None:
        """Replicas hash pages of `page_size` tokens under `hash_key`."""
        self.num_replicas = num_replicas
        self.page_size = page_size
        self.hash_key = hash_key

    @abstractmethod
    def choose(self, request: int, token_ids: Int32Array) -> int:
        """The replica for a request, which is called by its place in the trace, with so many prompt tokens."""

    def end(self, request: int) -> None:  # noqa: B027  not every router wants to know
        """Hear that a request has ended, or was lost with its replica."""

    def hear(self, replica: int, events: bytes) -> None:  # noqa: B027
        """Hear a replica's batch of events."""

    def forget(self, replica: int) -> None:  # noqa: B027
        """Hear that a replica has lost its cache."""


class RoundRobinRouter(Router):
    """One after another."""

    _next = 0

    def choose(self, request: int, token_ids: Int32Array) -> int:
        """The next one. O(1)."""
        chosen = self._next
        self._next = (chosen + 1) % self.num_replicas
        return chosen


class LoadRouter(Router):
    """One that knows what each replica has to do."""

    def __init__(self, num_replicas: int, page_size: int, hash_key: bytes) -> None:
        """No replica has any request."""
        super().__init__(num_replicas, page_size, hash_key)
        self._loads = [0] * num_replicas
        self._chosen: dict[int, tuple[int, int]] = {}

    def assign(self, request: int, replica: int, load: int) -> int:
        """Count what a request adds to a replica's load until it ends. Returns the replica."""
        self._chosen[request] = replica, load
        self._loads[replica] += load
        return replica

    def end(self, request: int) -> None:
        """Its replica has so much less to do."""
        replica, load = self._chosen.pop(request)
        self._loads[replica] -= load


class LeastLoadedRouter(LoadRouter):
    """The replica with the fewest requests that have not ended; of equal ones the first."""

    def choose(self, request: int, token_ids: Int32Array) -> int:
        """O(replicas)."""
        return self.assign(request, min(range(self.num_replicas), key=self._loads.__getitem__), 1)


Hash: TypeAlias = int


class BlockStored(msgspec.Struct, tag=True):
    """What this router reads of an event."""

    block_hashes: list[Hash]


class BlockRemoved(msgspec.Struct, tag=True):
    """What this router reads of an event."""

    block_hashes: list[Hash]


class AllBlocksCleared(msgspec.Struct, tag=True):
    """Nothing but its name."""


class Batch(msgspec.Struct, array_like=True):
    """A batch of events on the wire."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class PrefixRouter(LoadRouter):
    """The replica that has the least to compute: the request's tokens that it does not have cached, and those of its other
    requests that have not ended. What is cached where it knows from the replicas' events alone.
    """

    def __init__(self, num_replicas: int, page_size: int, hash_key: bytes) -> None:
        """Nothing is cached anywhere."""
        super().__init__(num_replicas, page_size, hash_key)
        self._holders: dict[Hash, int] = {}  # a bit for each replica
        self._decoder = msgspec.msgpack.Decoder(Batch)

    def choose(self, request: int, token_ids: Int32Array) -> int:
        """O(pages of the prompt that are cached anywhere + replicas), hashing included."""
        num_cached_pages = self._count_cached_pages(token_ids)
        costs = [len(token_ids) - self.page_size * num_pages for num_pages in num_cached_pages]
        chosen = min(range(self.num_replicas), key=lambda i: (self._loads[i] + costs[i], self._loads[i]))
        return self.assign(request, chosen, costs[chosen])

    def _count_cached_pages(self, token_ids: Int32Array) -> list[int]:
        """The leading pages of a prompt that each replica has."""
        chain = HashChain(self.page_size, self.hash_key)
        num_pages = (len(token_ids) - 1) // self.page_size
        chain.extend(token_ids[: num_pages * self.page_size])
        counts = [0] * self.num_replicas
        holders = (1 << self.num_replicas) - 1
        for i in range(num_pages):
            still = holders & self._holders.get(chain[i] & LOW_64_BITS, 0)
            for replica in _bits(holders & ~still):
                counts[replica] = i
            holders = still
            if not holders:
                return counts
        for replica in _bits(holders):
            counts[replica] = num_pages
        return counts

    def hear(self, replica: int, events: bytes) -> None:
        """O(pages told of)."""
        bit = 1 << replica
        for event in self._decoder.decode(events).events:
            if isinstance(event, BlockStored):
                for block_hash in event.block_hashes:
                    self._holders[block_hash] = self._holders.get(block_hash, 0) | bit
            elif isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    self._drop(block_hash, bit)
            else:
                self.forget(replica)

    def _drop(self, block_hash: Hash, bit: int) -> None:
        holders = self._holders[block_hash] & ~bit
        if holders:
            self._holders[block_hash] = holders
        else:
            del self._holders[block_hash]

    def forget(self, replica: int) -> None:
        """O(pages cached anywhere)."""
        bit = 1 << replica
        for block_hash in [block_hash for block_hash, holders in self._holders.items() if holders & bit]:
            self._drop(block_hash, bit)


def _bits(mask: int) -> list[int]:
    return [i for i in range(mask.bit_length()) if mask >> i & 1]


LOW_64_BITS = (1 << 64) - 1
ROUTERS: dict[str, type[Router]] = {
    "round-robin": RoundRobinRouter,
    "least-loaded": LeastLoadedRouter,
    "prefix": PrefixRouter,
}
