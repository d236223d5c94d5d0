"""Agents' sessions over two hours, made from seeds: the workload of `bench.studies.keeping`.

A session is a number of turns, each a request that goes on where the turn before ended. The first tokens of its context are one
of four system prompts, which sessions share; the context then grows by answers and by the results of tools, unevenly. After a
turn the session waits for a tool, a few seconds mostly, or now and then for a human. No time depends on hits.

A one-shot is a session of one turn without a system prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from bench.workload import PAGE_SIZE, Int32Array

NUM_SESSIONS, SECONDS_BETWEEN = 200, 20.0
NUM_PROMPTS, PROMPT_LEN = 4, 8192
FEWEST_TURNS, MOST_TURNS = 20, 60
FIRST_LEN = (6_000, 14_000)
"""The tokens that a context begins with behind its system prompt."""
FINAL_LEN = (20_000, 140_000)
"""The tokens that a context ends with, log-uniform."""
LEAST_GROWTH, LEAST_TOTAL_GROWTH = 40, 4_800
"""The least tokens by which a context grows from turn to turn, and from the first to the last."""
GROWTH_TAIL = 1.5
"""The exponent of the Pareto tail of a turn's share in the growth."""
ANSWER_LEN, ANSWER_SPREAD = (20, 4_000), (5.5, 0.9)
"""The bounds of an answer, and the mean and deviation of its logarithm."""
SECONDS_PER_TURN, TOKENS_PER_SECOND = 2.0, 60
TOOL_PAUSE, HUMAN_PAUSE = (3.0, 1.8), (180.0, 1.3)
"""The median of a pause in seconds, and the deviation of its logarithm."""
SHARE_OF_HUMANS, MAX_PAUSE = 0.03, 1_800.0
ONE_SHOT_LEN, ONE_SHOT_ANSWER_LEN, ONE_SHOT_SECONDS = (4_000, 16_000), 300, 5.0
WARM_SECONDS = 1_000.0
"""The sessions that are alive are counted from then on, until the last one begins."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A request of `num_tokens` with its answer, which takes `seconds`. Its session goes on `pause` seconds after its end.
    `time` is the second when it begins, unless one before had to wait for pages.
    """

    time: float
    seconds: float
    num_prompt_tokens: int
    num_tokens: int
    pause: float = 0.0


@dataclass(frozen=True)
class Session:
    """The turns of one context, whose tokens begin with the system prompt `prompt`, if there is one."""

    number: int
    turns: Sequence[Turn]
    prompt: int | None = None
    _token_ids: list[Int32Array] = field(default_factory=list, compare=False, repr=False)

    @property
    def name(self) -> str:
        return f"{'one-shot' if self.is_one_shot else 'session'} {self.number}"

    @property
    def is_one_shot(self) -> bool:
        return self.prompt is None

    def load_token_ids(self, num_tokens: int) -> Int32Array:
        """Return the first tokens of the context. They are made at the first call, and kept."""
        if not self._token_ids:
            own = self.turns[-1].num_tokens - (0 if self.prompt is None else PROMPT_LEN)
            prompt = [] if self.prompt is None else [make_tokens(PROMPT_LEN, (0, self.prompt))]
            self._token_ids.append(np.concatenate([*prompt, make_tokens(own, (1 + self.is_one_shot, self.number))]))
        return self._token_ids[0][:num_tokens]

    def drop_token_ids(self) -> None:
        """Free the tokens of a session that has ended."""
        self._token_ids.clear()


def make_tokens(num_tokens: int, stream: Sequence[int]) -> Int32Array:
    """Return the first tokens of a stream."""
    return np.random.default_rng(stream).integers(2**31 - 1, size=num_tokens, dtype=np.int32)


def make_sessions(seed: int, num_sessions: int = NUM_SESSIONS) -> list[Session]:
    """Make the sessions of a seed, in the order in which they begin."""
    rng = np.random.default_rng(seed)
    sessions = []
    time = 0.0
    for number in range(num_sessions):
        time += rng.exponential(SECONDS_BETWEEN)
        turns = make_turns(rng, time)
        sessions.append(Session(number, turns, prompt=int(rng.integers(NUM_PROMPTS))))
    return sessions


def make_turns(rng: np.random.Generator, time: float) -> list[Turn]:
    """Draw the turns of a session that begins at a time."""
    num_turns = int(rng.integers(FEWEST_TURNS, MOST_TURNS + 1))
    num_prompt_tokens = PROMPT_LEN + int(rng.integers(*FIRST_LEN))
    turns = []
    for growth in draw_growths(rng, num_turns, num_prompt_tokens).tolist():
        answer_len = int(min(rng.lognormal(*ANSWER_SPREAD), ANSWER_LEN[1], max(ANSWER_LEN[0], growth - 10)))
        seconds = SECONDS_PER_TURN + answer_len / TOKENS_PER_SECOND
        median, spread = HUMAN_PAUSE if rng.random() < SHARE_OF_HUMANS else TOOL_PAUSE
        pause = min(MAX_PAUSE, rng.lognormal(np.log(median), spread))
        turns.append(Turn(time, seconds, num_prompt_tokens, num_prompt_tokens + answer_len, pause))
        time += seconds + pause
        num_prompt_tokens += growth
    return turns


def draw_growths(rng: np.random.Generator, num_turns: int, first_len: int) -> npt.NDArray[np.int64]:
    """Draw the tokens by which a context grows in each turn."""
    low, high = np.log(FINAL_LEN)
    final_len = max(int(np.exp(rng.uniform(low, high))), first_len + LEAST_TOTAL_GROWTH)
    weights = rng.pareto(GROWTH_TAIL, num_turns) + 0.2
    growths: npt.NDArray[np.float64] = np.maximum(LEAST_GROWTH, (final_len - first_len) * weights / weights.sum())
    return growths.astype(np.int64)


def make_one_shots(seed: int, sessions: Sequence[Session], rate: float) -> list[Session]:
    """Make so many one-shots a second, until the last turn of the sessions begins."""
    rng = np.random.default_rng((seed, 1))
    end = max(session.turns[-1].time for session in sessions)
    one_shots: list[Session] = []
    time = 0.0
    while rate and time < end:
        time += rng.exponential(1 / rate)
        num_prompt_tokens = int(rng.integers(*ONE_SHOT_LEN))
        turn = Turn(time, ONE_SHOT_SECONDS, num_prompt_tokens, num_prompt_tokens + ONE_SHOT_ANSWER_LEN)
        one_shots.append(Session(len(one_shots), [turn]))
    return one_shots


def count_live_pages(sessions: Sequence[Session]) -> float:
    """Return how many pages the contexts that are alive have at a time, in the mean and without the system prompts. A context
    is alive from its first turn to the end of its last.
    """
    changes = sorted(change for session in sessions for change in list_changes(session))
    start, stop = WARM_SECONDS, max(session.turns[0].time for session in sessions)
    num_pages, area = 0, 0.0
    for (time, change), (next_time, _) in pairwise(changes):
        num_pages += change
        area += num_pages * max(0.0, min(next_time, stop) - max(time, start))
    return area / (stop - start)


def list_changes(session: Session) -> Iterator[tuple[float, int]]:
    """Yield the times at which a context changes, and by how many pages."""
    num_pages = 0
    for turn in session.turns:
        before, num_pages = num_pages, (turn.num_tokens - PROMPT_LEN) // PAGE_SIZE
        yield turn.time, num_pages - before
    yield session.turns[-1].time + session.turns[-1].seconds, -num_pages
