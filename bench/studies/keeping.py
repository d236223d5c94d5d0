"""What agents hit if they say when they come back: ``python -m bench.studies.keeping``, or ``make bench-keeping``.

Two hundred sessions run for two hours, some sixty of them at once (`agents`), in pools of a part of what the live
contexts take. The figures are the prompt tokens that were hit, in percent of all, in the mean of the seeds. A column is what
the engine tells the pool:

``LRU``, ``adaptive``
    Nothing, with that policy. In the other columns the policy is LRU.
``close``
    When a session has ended.
``expected``
    Also when each session comes back, typically wrong by a factor of e. ``wrong by 4.5`` is typically wrong by that factor.
``half vanish``
    As ``expected``, but half of the sessions end unannounced, after a last promise to be back in three seconds.
``no truth``
    The times have nothing to do with when the sessions come back.
``half tell``
    Half of the sessions are closed, and say nothing else. Further lines have what each half hits, also of ``close``.
``one-shots never``
    As ``expected``, and that one-shots never come back. In all other columns nothing is said about them.

Arguments are words. Those that name a column choose columns; of the others a line has to contain one to be measured:
``python -m bench.studies.keeping 1/2 close expected``. ``--seeds N`` takes the first N seeds. Each figure is on stderr as
soon as it is known, with the seconds that it took. ``--results FILE`` puts the figures into a file, and prints all that it has.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from math import inf, log
from statistics import fmean
from time import perf_counter
from typing import Any

import numpy as np

from bench.studies.agents import (
    NUM_PROMPTS,
    PROMPT_LEN,
    TOOL_PAUSE,
    Session,
    Turn,
    count_live_pages,
    make_one_shots,
    make_sessions,
)
from bench.studies.command import Chosen, make_parser
from bench.studies.hits import Table, merge, show
from bench.studies.timed import TimedBatch
from bench.workload import PAGE_SIZE

NUM_SEEDS = 5
NUM_ROWS = 128
MAX_NUM_TOKENS = 200_000
BROKEN_PROMISE = 3.0
"""The seconds after which a session that vanishes was expected."""
HALVES = (": sessions that tell", ": the others")

Figures = Mapping[str, float]
"""What was measured, by what it adds to the name of a line."""


@dataclass(frozen=True)
class Engine:
    """What an engine tells the pool about sessions. `error` is the standard deviation of the logarithm by which its times are
    wrong, None if it tells none. Of every two sessions one vanishes with `half_vanish`, and one says nothing until it is closed
    with `half_tell`.
    """

    eviction: str = "lru"
    closes: bool = True
    error: float | None = None
    is_true: bool = True
    half_vanish: bool = False
    half_tell: bool = False
    ends_one_shots: bool = False
    has_halves: bool = False

    def draw_times(self, session: Session, seed: int) -> list[float | None]:
        """Draw the times that are told at the end of each turn of a session."""
        if session.is_one_shot:
            return [inf if self.ends_one_shots else None]
        num_turns = len(session.turns)
        if self.error is None or (self.half_tell and is_second(session)):
            return [None] * num_turns
        rng = np.random.default_rng((seed, session.number))
        median, spread = TOOL_PAUSE
        pauses = [turn.pause for turn in session.turns] if self.is_true else rng.lognormal(log(median), spread, num_turns)
        told = (np.asarray(pauses) * rng.lognormal(sigma=self.error, size=num_turns)).tolist()
        return [*told[:-1], BROKEN_PROMISE if self.vanishes(session) else None]

    def vanishes(self, session: Session) -> bool:
        return self.half_vanish and is_second(session)


ENGINES: Mapping[str, Engine] = {
    "LRU": Engine(closes=False),
    "adaptive": Engine("adaptive", closes=False),
    "close": Engine(has_halves=True),
    "expected": Engine(error=1.0),
    "wrong by 4.5": Engine(error=1.5),
    "half vanish": Engine(error=1.0, half_vanish=True),
    "no truth": Engine(error=1.0, is_true=False),
    "half tell": Engine(error=1.0, half_tell=True, has_halves=True),
    "one-shots never": Engine(error=1.0, ends_one_shots=True),
}
"""The engine of each column."""


def is_second(session: Session) -> bool:
    """Return whether a session is the second of two."""
    return session.number % 2 == 1


class Agents:
    """Sessions and one-shots in a running batch, and the tokens of sessions that were asked for and hit, by halves."""

    def __init__(self, num_pages: int, engine: Engine, sessions: Sequence[Session], seed: int) -> None:
        self.timed = TimedBatch(num_pages, NUM_ROWS, MAX_NUM_TOKENS, engine.eviction)
        self.num_tokens, self.num_hits = [0, 0], [0, 0]
        self._engine = engine
        for session in sessions:
            turns = list(zip(session.turns, engine.draw_times(session, seed), strict=True))
            self.timed.timeline.call_at(session.turns[0].time, partial(self.begin, session, turns))

    def begin(self, session: Session, turns: Sequence[tuple[Turn, float | None]]) -> None:
        """Begin the first of the turns that are left."""
        (turn, seconds), *later = turns

        def start(row: int, num_hits: int) -> None:
            if not session.is_one_shot:
                self.num_tokens[is_second(session)] += turn.num_prompt_tokens
                self.num_hits[is_second(session)] += num_hits
            self.timed.timeline.call_in(turn.seconds, partial(end, row))

        def end(row: int) -> None:
            self.timed.end(row, **({} if seconds is None else {"seconds": [seconds]}))
            if later:
                self.timed.timeline.call_in(turn.pause, partial(self.begin, session, later))
            else:
                self.close(session)

        options: dict[str, Any] = {"session_id": session.name} if self._engine.closes and not session.is_one_shot else {}
        self.timed.start(session.load_token_ids(turn.num_tokens), start, **options)

    def close(self, session: Session) -> None:
        """Close a session, if that is told."""
        session.drop_token_ids()
        if self._engine.closes and not session.is_one_shot and not self._engine.vanishes(session):
            self.timed.manager.close_session(session.name)

    def run(self) -> list[float]:
        """Run to the end. Returns the prompt tokens that hit in percent, of all sessions and of each half."""
        self.timed.timeline.run()
        pairs = [(sum(self.num_hits), sum(self.num_tokens)), *zip(self.num_hits, self.num_tokens, strict=True)]
        return [100 * num_hits / num_tokens for num_hits, num_tokens in pairs]


@dataclass(frozen=True)
class Line:
    """A line of the table: the pool in parts of the live contexts, and the one-shots a second."""

    share: Fraction
    rate: float = 0.0

    @property
    def name(self) -> str:
        return f"agents, {self.share} of their contexts" + (f", one-shots: {self.rate:g} a second" if self.rate else "")

    def measure(self, engine: Engine, seed: int) -> list[float]:
        sessions = make_sessions(seed)
        num_pages = int(count_live_pages(sessions) * self.share) + NUM_PROMPTS * PROMPT_LEN // PAGE_SIZE
        return Agents(num_pages, engine, [*sessions, *make_one_shots(seed, sessions, self.rate)], seed).run()


HALF = Fraction(1, 2)
LINES = (Line(Fraction(1, 3)), Line(HALF), Line(Fraction(3, 4)), Line(HALF, 0.2), Line(HALF, 1.0))


def list_cells(chosen: Chosen) -> Iterator[tuple[Line, str, Engine]]:
    """Yield the cells that are chosen, and have one-shots if their column is about them."""
    for line in filter(lambda line: chosen.has_line(line.name), LINES):
        for column, engine in ENGINES.items():
            if chosen.has_column(column) and (line.rate or not engine.ends_one_shots):
                yield line, column, engine


def measure_cell(line: Line, column: str, engine: Engine, num_seeds: int) -> Figures:
    """Return the means of the seeds, of halves too if that is what the column is about and there are no one-shots."""
    start = perf_counter()
    percents = [line.measure(engine, seed) for seed in range(num_seeds)]
    whole, *halves = map(fmean, zip(*percents, strict=True))
    by_seed = " ".join(f"{percent:.1f}" for percent, *_ in percents)
    print(f"{line.name}, {column}: {whole:.1f} ({by_seed}; {perf_counter() - start:.0f} s)", file=sys.stderr, flush=True)
    return {"": whole, **(dict(zip(HALVES, halves, strict=True)) if engine.has_halves and not line.rate else {})}


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("keeping")
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS, help="the number of seeds")
    options = parser.parse_intermixed_args(arguments)
    table: dict[str, dict[str, float]] = {}
    for line, column, engine in list_cells(Chosen(options.words)):
        for name, figure in measure_cell(line, column, engine, options.seeds).items():
            table.setdefault(line.name + name, {})[column] = round(figure, 2)
    whole: Table = merge(options.results, "keeping", table) if options.results else table
    print(show("prompt tokens hit, %", whole))


if __name__ == "__main__":
    main(sys.argv[1:])
