"""Synthetic chats: each turn repeats the conversation so far, and chats share system prompts."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from pagepool.replay.traces.simulated_request import Int32Array, SimulatedRequest

__all__ = ["generate_chats"]

SYSTEM_PROMPT_LENGTHS = (1800, 700, 1200, 300, 90)  # tokens; the first ones are the most popular
MEAN_TURNS = 4
MEAN_THINK_TIME = 100.0  # in units of the mean time between two new chats
MESSAGE_LENGTH = 120  # median, in tokens
ANSWER_LENGTH = 180  # median, in tokens
MAX_LENGTH = 2000  # tokens


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
        system_prompt = _random_tokens(SYSTEM_PROMPT_LENGTHS[self.system_prompt], (seed, 0, self.system_prompt))
        history = _random_tokens(num_tokens - len(system_prompt), (seed, 1, self.number))
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


def _random_tokens(num_tokens: int, seed: tuple[int, ...]) -> Int32Array:
    return np.random.default_rng(seed).integers(2**31, size=num_tokens, dtype=np.int32)


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

    A turn's prompt holds the system prompt, all messages so far and their answers. O(requests); the tokens are created when a
    request is about to run.

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
