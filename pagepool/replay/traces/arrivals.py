"""Arrivals of synthetic requests: the time of each, and the streams of random tokens in its prompt."""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import count
from math import exp, log
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagepool.replay.traces.simulated_request import Int32Array, SimulatedRequest

MAX_LENGTH = 2000  # tokens of a message, an answer or a document
STREAMS = 2  # a part of seeds: `generator.py` has 0 or 1 in its place, so tokens differ


class Part(NamedTuple):
    """The first `length` tokens of a stream. Equal streams have equal tokens."""

    stream: tuple[int, int]
    length: int

    def grow(self, num_tokens: int) -> "Part":
        """Return the same stream extended by more tokens."""
        return Part(self.stream, self.length + num_tokens)


class Arrival(NamedTuple):
    """A future request: the parts of its prompt in order. The answer continues the stream of the last part."""

    time: float
    name: str
    parts: tuple[Part, ...]
    num_output_tokens: int


def random_tokens(num_tokens: int, seed: Sequence[int]) -> Int32Array:
    """Return the first tokens of the stream of `seed`, `[num_tokens]`. O(tokens)."""
    return np.random.default_rng(seed).integers(2**31, size=num_tokens, dtype=np.int32)


def _make_token_ids(parts: tuple[Part, ...], seed: int) -> Int32Array:
    return np.concatenate([random_tokens(length, (seed, STREAMS, *stream)) for stream, length in parts])


def make_request(arrival: Arrival, seed: int) -> SimulatedRequest:
    """Make a request whose tokens depend on `seed`. O(parts); the tokens are created just before the request runs."""
    *parts, last = arrival.parts
    make_token_ids = partial(_make_token_ids, (*parts, last.grow(arrival.num_output_tokens)), seed)
    num_prompt_tokens = sum(part.length for part in arrival.parts)
    return SimulatedRequest(arrival.name, num_prompt_tokens, arrival.num_output_tokens, make_token_ids)


class Popularity:
    """Draws items with probabilities that fall with the rank: (rank + 1) ** -exponent."""

    def __init__(self, num_items: int, exponent: float) -> None:
        """Sum up the probabilities. O(items)."""
        self._sums: npt.NDArray[np.float64] = np.cumsum(np.arange(1.0, num_items + 1) ** -exponent)

    def draw(self, rng: np.random.Generator) -> int:
        """Draw a rank, from 0. O(log items)."""
        return int(np.searchsorted(self._sums, rng.random() * self._sums[-1], side="right"))


class Source:
    """Random numbers and new streams for one kind of request, independent of other kinds."""

    def __init__(self, seed: int, number: int = 0) -> None:
        """Seed the numbers; `number` distinguishes the sources of one workload."""
        self.rng = np.random.default_rng((seed, number))
        self._number = number
        self._streams = count()

    def new_part(self, length: int) -> Part:
        """Return the first tokens of a new stream."""
        return Part((self._number, next(self._streams)), length)

    def new_parts(self, num_parts: int, median: float) -> list[Part]:
        """Return first tokens of random length for new streams."""
        return [self.new_part(self.length(median)) for _ in range(num_parts)]

    def happens(self, probability: float) -> bool:
        """Return True with this probability."""
        return self.rng.random() < probability

    def uniform(self, low: float, high: float) -> float:
        """Draw a number between `low` and `high`."""
        return float(self.rng.uniform(low, high))

    def scale(self, low: float, high: float) -> float:
        """Draw a number between `low` and `high` with a uniform logarithm."""
        return exp(self.rng.uniform(log(low), log(high)))

    def length(self, median: float) -> int:
        """Draw a log-normal number of tokens: mostly near the median, some far above it."""
        return min(1 + int(self.pause(median, 0.8)), MAX_LENGTH)

    def pause(self, median: float, sigma: float) -> float:
        """Draw a log-normal time."""
        return float(median * self.rng.lognormal(sigma=sigma))


def in_order(groups: Iterable[Sequence[Arrival]]) -> Iterator[Arrival]:
    """Yield the arrivals of all groups by time, from time 0 on. Each group is ascending, and groups come by the time of their
    first arrival, so that only active groups are held. O(log groups) per arrival.
    """
    waiting: list[tuple[float, int, Arrival]] = []
    numbers = count()
    for group in groups:
        while waiting and waiting[0][0] < group[0].time:
            yield heapq.heappop(waiting)[2]
        for arrival in group:
            if arrival.time >= 0:
                heapq.heappush(waiting, (arrival.time, next(numbers), arrival))
    while waiting:
        yield heapq.heappop(waiting)[2]


def blend(shares: Sequence[tuple[float, Iterator[Arrival]]]) -> Iterator[Arrival]:
    """Yield the arrivals of several kinds by time. Each kind has one arrival per unit of its own time; in the blend its time is
    stretched according to its share.
    """
    return heapq.merge(*(_slow_down(arrivals, share) for share, arrivals in shares), key=lambda arrival: arrival.time)


def _slow_down(arrivals: Iterator[Arrival], share: float) -> Iterator[Arrival]:
    return (arrival._replace(time=arrival.time / share) for arrival in arrivals)
