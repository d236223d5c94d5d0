"""Synthetic workloads by name, and the first of them: chats with a few shared system prompts, where each turn repeats the
conversation so far.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np
import numpy.typing as npt

from pagepool.arguments import require_int
from pagepool.errors import ArgumentError, shown
from pagepool.replay.traces.arrivals import MAX_LENGTH, make_request, random_tokens
from pagepool.replay.traces.simulated_request import Int32Array, SimulatedRequest
from pagepool.replay.traces.workloads import KINDS

WORKLOADS = ("chats", *KINDS)
SYSTEM_PROMPT_LENGTHS = (1800, 700, 1200, 300, 90)  # tokens; the first ones are the most popular
MEAN_TURNS = 4
MEAN_THINK_TIME = 100.0  # unit: the mean time between two new chats
MESSAGE_LENGTH = 120  # median, in tokens
ANSWER_LENGTH = 180  # median, in tokens


@dataclass(frozen=True, slots=True)
class Chat:
    """One conversation: lengths of its parts in tokens, and arrival times of its turns."""

    number: int
    system_prompt: int
    message_lengths: Int32Array
    answer_lengths: Int32Array
    turn_times: npt.NDArray[np.float64]

    def token_ids(self, num_tokens: int, seed: int) -> Int32Array:
        """Return the first tokens of the chat: system prompt, then messages and answers in turn."""
        system_prompt = random_tokens(SYSTEM_PROMPT_LENGTHS[self.system_prompt], (seed, 0, self.system_prompt))
        history = random_tokens(num_tokens - len(system_prompt), (seed, 1, self.number))
        return np.concatenate((system_prompt, history))

    def requests(self, seed: int) -> Iterator[tuple[float, SimulatedRequest]]:
        """Yield time and request of each turn."""
        num_tokens = SYSTEM_PROMPT_LENGTHS[self.system_prompt]
        turns = zip(self.turn_times.tolist(), self.message_lengths.tolist(), self.answer_lengths.tolist(), strict=True)
        for turn, (time, message_length, answer_length) in enumerate(turns, start=1):
            num_prompt_tokens = num_tokens + message_length
            num_tokens = num_prompt_tokens + answer_length
            make_token_ids = partial(self.token_ids, num_tokens, seed)
            name = f"chat {self.number} turn {turn}"
            yield time, SimulatedRequest(name, num_prompt_tokens, answer_length, make_token_ids)


def _random_lengths(rng: np.random.Generator, median: int, count: int) -> Int32Array:
    """Return log-normal lengths: mostly short, some long."""
    lengths = median * rng.lognormal(sigma=0.8, size=count)
    return np.clip(lengths, 1, MAX_LENGTH).astype(np.int32)


def _make_chat(rng: np.random.Generator, number: int, start_time: float) -> Chat:
    num_turns = int(rng.geometric(1 / MEAN_TURNS))
    pauses = rng.exponential(MEAN_THINK_TIME, size=num_turns)
    pauses[0] = start_time
    return Chat(
        number,
        min(int(rng.geometric(0.4)), len(SYSTEM_PROMPT_LENGTHS)) - 1,
        _random_lengths(rng, MESSAGE_LENGTH, num_turns),
        _random_lengths(rng, ANSWER_LENGTH, num_turns),
        np.cumsum(pauses),
    )


def generate_chats(num_requests: int, seed: int = 0) -> list[SimulatedRequest]:
    """Generate `num_requests` turns of many chats, in order of arrival. Deterministic for a given `seed` (at least 0).

    A turn's prompt holds the system prompt, all messages so far and their answers. O(requests); the tokens are created just
    before a request runs.

    >>> [first, *_] = generate_chats(100, seed=7)
    >>> first.request_id, len(first.all_token_ids) == first.num_prompt_tokens
    ('chat 1 turn 1', True)
    """
    rng = np.random.default_rng(seed)
    timed_requests: list[tuple[float, SimulatedRequest]] = []
    start_time, number = 0.0, 0
    while len(timed_requests) < num_requests:
        number += 1
        timed_requests += _make_chat(rng, number, start_time).requests(seed)
        start_time += rng.exponential()
    timed_requests.sort(key=lambda timed: timed[0])
    return [request for _, request in timed_requests[:num_requests]]


def generate_workload(name: str, num_requests: int, seed: int = 0) -> list[SimulatedRequest]:
    """Generate the first `num_requests` requests of the workload `name`, one of `WORKLOADS`, in order of arrival.

    The workload `chats` is that of `generate_chats`, always with the same parameters. All other workloads also draw their
    parameters (lengths, popularity, pauses, shares) from `seed` (at least 0). More requests continue the same workload:

    - `conversations`: chats with think times.
    - `agents`: contexts that grow step by step, with subtasks and summaries.
    - `retrieval`: questions about documents, a few of them popular. In `shift` most of the popular ones are replaced at once,
      again and again; in `drift` one by one.
    - `loop`: some hundred documents, together 400,000 tokens or more, read in order again and again, with conversations
      meanwhile.
    - `recency`: chats whose probability of continuing depends on recency alone, so that LRU is optimal.
    - `mix`: conversations, agents and retrieval at once.

    Raise ArgumentError for another name or a negative number. O(requests); the tokens are created just before a request runs.

    >>> [request.request_id for request in generate_workload("loop", 3, seed=7)]
    ['document 1 round 1', 'document 2 round 1', 'document 3 round 1']
    """
    require_int("num_requests", num_requests, minimum=0)
    require_int("seed", seed, minimum=0)
    if name not in WORKLOADS:
        raise ArgumentError(f"name: got {shown(name)}, allowed: {', '.join(WORKLOADS)}")
    if name not in KINDS:
        return generate_chats(num_requests, seed)
    return [make_request(arrival, seed) for arrival in islice(KINDS[name](seed), num_requests)]
