"""Requests for `bench.studies.windows`: a recorded trace as chats, and chats in turn.

Token ids come in runs of consecutive numbers, which are Python ranges. Arrays are made of them when a request is about to run,
since the tokens of a long trace would not fit in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from random import Random

import numpy as np

from pagepool.replay import SimulatedRequest, TraceRecord

NUM_CHATS, NUM_ROUNDS = 8, 3
PROMPT_LEN, QUESTION_LEN, ANSWER_LEN = 20_000, 100, 100
NUM_LOOPED_CHATS, NUM_LOOPED_TURNS, FIRST_LEN = 60, 5, 600
MAX_CHAT_LEN = 100_000
LEAST_QUESTION_LEN = 16
"""A prompt that is not so many tokens longer than an earlier one and its answer is taken to be without the answer."""


def make_token_ids(runs: Sequence[range]) -> np.ndarray:
    """Return the tokens of runs."""
    return np.concatenate([np.arange(run.start, run.stop, dtype=np.int32) for run in runs])


def cut(runs: Iterable[range], start: int, stop: int) -> list[range]:
    """Return tokens ``[start, stop)`` of runs.

    >>> cut([range(10, 14), range(50, 54)], 3, 6)
    [range(13, 14), range(50, 52)]
    """
    parts = []
    for run in runs:
        parts.append(run[max(start, 0) : max(stop, 0)])
        start, stop = start - len(run), stop - len(run)
    return [part for part in parts if part]


@dataclass(frozen=True)
class Turn:
    """The computed tokens of a request: its prompt, and its answer without the last token."""

    runs: list[range]
    num_prompt_tokens: int
    num_tokens: int

    def count_continued(self, num_prompt_tokens: int) -> int:
        """Return how many of these tokens a longer prompt that goes on with this turn begins with."""
        most = num_prompt_tokens - LEAST_QUESTION_LEN
        return min(self.num_tokens if self.num_tokens < most else self.num_prompt_tokens, most)


class Chats:
    """Reads the requests of a trace as turns of chats.

    A trace has an id for each block of a prompt, where equal ids mean equal prefixes. It says nothing about answers, and the
    last block of a prompt is part-filled: a prompt that goes on has another id for that place, so that as the trace is, prompts
    part at multiples of a block. Here a prompt whose known blocks end where the last full block of an earlier prompt ends goes
    on with the latest such prompt: it begins with that one and its answer. All other tokens are new.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, list[range]] = {}
        self._turns: dict[int, Turn] = {}  # the latest by the id of the last full block of its prompt
        self._num_token_ids = 0

    def add(self, record: TraceRecord) -> SimulatedRequest:
        """Make the next request."""
        ids, size, num_prompt_tokens = record.hash_ids, record.block_size, record.input_length
        num_known = next((place for place, block in enumerate(ids) if block not in self._blocks), len(ids))
        if 0 < num_known < len(ids) and (turn := self._turns.get(ids[num_known - 1])):
            self._go_on(turn, num_known, record)
        for block in ids:
            if block not in self._blocks:
                self._blocks[block] = [self.new_run(size)]
        prompt = cut(chain.from_iterable(self._blocks[block] for block in ids), 0, num_prompt_tokens)
        runs = [*prompt, self.new_run(record.output_length)]
        if num_full := num_prompt_tokens // size:
            self._turns[ids[num_full - 1]] = Turn(runs, num_prompt_tokens, record.num_slots)
        return SimulatedRequest("", num_prompt_tokens, record.output_length, partial(make_token_ids, runs))

    def _go_on(self, turn: Turn, num_known: int, record: TraceRecord) -> None:
        """Let the blocks of a prompt behind its known ones begin with the tokens of a turn."""
        ids, size = record.hash_ids, record.block_size
        num_tokens = turn.count_continued(record.input_length)
        for place in range(num_known, len(ids)):
            start, stop = place * size, min((place + 1) * size, num_tokens)
            if start >= stop or ids[place] in self._blocks:
                return
            self._blocks[ids[place]] = [*cut(turn.runs, start, stop), self.new_run(size - (stop - start))]

    def new_run(self, length: int) -> range:
        """Return tokens that nothing else has."""
        start = self._num_token_ids
        self._num_token_ids += length
        return range(start, start + length)


def make_chats(records: Iterable[TraceRecord]) -> list[SimulatedRequest]:
    """Make the requests of a trace as turns of chats."""
    chats = Chats()
    return [chats.add(record) for record in records]


def make_chats_in_turn() -> list[SimulatedRequest]:
    """Make chats of which each waits until all others have had a turn; each turn begins with the one before and its answer."""
    return [
        SimulatedRequest("", length, ANSWER_LEN, partial(make_token_ids, [range(first, first + length + ANSWER_LEN)]))
        for length in range(PROMPT_LEN, PROMPT_LEN + NUM_ROUNDS * (QUESTION_LEN + ANSWER_LEN), QUESTION_LEN + ANSWER_LEN)
        for first in range(0, NUM_CHATS * MAX_CHAT_LEN, MAX_CHAT_LEN)
    ]


def make_chats_in_a_loop(seed: int, num_systems: int) -> list[SimulatedRequest]:
    """Make chats that take their turns at random. The first prompt of each begins with 600 tokens of its own or, if there are
    system prompts, with one of these.
    """
    rng, chats = Random(seed), Chats()
    systems = [chats.new_run(FIRST_LEN) for _ in range(num_systems)]
    histories = [[systems[i % num_systems] if systems else chats.new_run(FIRST_LEN)] for i in range(NUM_LOOPED_CHATS)]
    turns = [chat for chat in range(NUM_LOOPED_CHATS) for _ in range(NUM_LOOPED_TURNS)]
    rng.shuffle(turns)
    requests = []
    for chat in turns:
        runs, num_answer_tokens = histories[chat], rng.randrange(50, 700)
        runs.append(chats.new_run(rng.randrange(30, 300)))
        num_prompt_tokens = sum(map(len, runs))
        runs.append(chats.new_run(num_answer_tokens))
        requests.append(SimulatedRequest("", num_prompt_tokens, num_answer_tokens, partial(make_token_ids, list(runs))))
    return requests
