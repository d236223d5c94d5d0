"""What agents hit under vLLM if they say when they come back: ``make bench-hints``.

The sessions of `bench.studies.keeping`, in a pool of half of what the live contexts take, through the `KVCacheManager` of the
installed vLLM. The figures are the prompt tokens that were hit, in percent of all, in the mean of the seeds. A column is what
requests carry:

``vLLM``
    Nothing: blocks go in vLLM's own order.
``sessions``
    Ids of sessions, with ``PAGEPOOL_VLLM_HINTS=sessions``. In the further columns it is ``all``.
``close``
    Ids, and ``pagepool_close`` in the last request of a session.
``seconds``
    Also ``pagepool_seconds`` in the others, typically wrong by a factor of e. ``wrong by 4.5`` is typically wrong by that.
``envelopes``
    What ``seconds`` says, in actions of ``kv_hints``.

Arguments are names of columns. ``--seeds N`` takes the first N seeds. Each figure is on stderr as soon as it is known, with the
seconds that it took. Importing this module imports vLLM, which has to be installed.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from functools import partial
from statistics import fmean
from time import perf_counter
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")

import torch
import vllm
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import RequestStatus

from bench.studies.agents import NUM_PROMPTS, PROMPT_LEN, Session, Turn, count_live_pages, make_sessions
from bench.studies.keeping import HALF, MAX_NUM_TOKENS, NUM_SEEDS, Engine
from bench.studies.timed import RETRY_SECONDS, TOO_SMALL, Timeline
from bench.tables import as_table
from bench.workload import PAGE_SIZE
from pagepool._core import HashChain
from pagepool.compat import vllm as compat
from pagepool.hashing import get_siphash_key

KEY = get_siphash_key(1)

ENGINES: Mapping[str, tuple[str, Engine]] = {
    "vLLM": ("", Engine(closes=False)),
    "sessions": ("sessions", Engine(closes=False)),
    "close": ("all", Engine()),
    "seconds": ("all", Engine(error=1.0)),
    "wrong by 4.5": ("all", Engine(error=1.5)),
    "envelopes": ("all", Engine(error=1.0)),
}
"""The hints that are heard, and what the engine says, by column."""


@contextmanager
def hearing(hints: str) -> Iterator[None]:
    """Install pagepool with these hints for the block."""
    os.environ[compat.HINTS_VARIABLE] = hints
    try:
        with compat.installed():
            yield
    finally:
        del os.environ[compat.HINTS_VARIABLE]


def make_manager(num_blocks: int) -> KVCacheManager:
    spec = FullAttentionSpec(block_size=PAGE_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
    register_all_kvcache_specs(None)
    config = KVCacheConfig(num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    return KVCacheManager(
        config,
        MAX_NUM_TOKENS,
        scheduler_block_size=PAGE_SIZE,
        hash_block_size=PAGE_SIZE,
        max_in_flight_tokens=MAX_NUM_TOKENS,
    )


class Request:
    """A turn as vLLM's manager reads it. Its answer's tokens are known."""

    num_in_flight_tokens = num_preemptions = num_computed_tokens = shared_prefix_boundary = 0
    skip_reading_prefix_cache = False
    mm_features = ()
    cache_salt = session_id = kv_hints = sampling_params = None

    def __init__(self, request_id: str, turn: Turn, digests: Sequence[bytes]) -> None:
        self.request_id, self.status = request_id, RequestStatus.WAITING
        self.num_prompt_tokens, self.num_tokens = turn.num_prompt_tokens, turn.num_tokens
        self.block_hashes = list(digests[: turn.num_tokens // PAGE_SIZE])


def make_envelope(arguments: Mapping[str, float]) -> Any:
    """Say in an envelope what the arguments say."""
    types = {"pagepool_seconds": "kv.retain", "pagepool_close": "session.end"}
    actions = [
        SimpleNamespace(
            action_id=name,
            action_type=types[name],
            action_version="1.0",
            payload={"seconds": value} if name == "pagepool_seconds" else {},
        )
        for name, value in arguments.items()
    ]
    return SimpleNamespace(protocol_version="1.0", message_id="m", actions=actions)


class Agents:
    """Sessions in vLLM's manager, and the tokens of prompts that were asked for and hit."""

    def __init__(
        self,
        num_blocks: int,
        engine: Engine,
        sessions: Sequence[Session],
        seed: int,
        *,
        has_ids: bool = True,
        uses_envelopes: bool = False,
    ) -> None:
        self.manager = make_manager(num_blocks)
        self.timeline = Timeline(self._set_time)
        self.num_tokens = self.num_hits = self._num_running = 0
        self._engine, self._has_ids, self._uses_envelopes = engine, has_ids, uses_envelopes
        self._digests: dict[int, list[bytes]] = {}
        for session in sessions:
            turns = list(zip(session.turns, engine.draw_times(session, seed), strict=True))
            self.timeline.call_at(session.turns[0].time, partial(self.begin, session, turns))

    def _set_time(self, time: float) -> None:
        """Let the clock of a queue that listens stand at a time, which it wants to be above 0."""
        store = getattr(self.manager.block_pool.free_block_queue, "store", None)
        if store is not None:
            store.set_time(1 + time)

    def begin(self, session: Session, turns: Sequence[tuple[Turn, float | None]]) -> None:
        """Begin the first of the turns that are left, now or as soon as there are blocks."""
        (turn, seconds), *later = turns
        digests = self._digests.get(session.number) or self._hash(session)
        request = Request(f"{session.number}.{len(later)}", turn, digests)
        if self._has_ids:
            request.session_id = session.name
        arguments = {} if seconds is None else {"pagepool_seconds": seconds}
        if not later and self._engine.closes:
            arguments["pagepool_close"] = 1
        if self._uses_envelopes:
            request.kv_hints = make_envelope(arguments)
        else:
            request.sampling_params = SimpleNamespace(extra_args=arguments)
        found, num_hits, *_ = self.manager.get_computed_blocks(request)
        if self.manager.allocate_slots(request, turn.num_tokens - num_hits, num_hits, found) is None:
            assert self._num_running, TOO_SMALL
            self.timeline.call_in(RETRY_SECONDS, partial(self.begin, session, turns))
            return
        self._num_running += 1
        self.num_tokens += turn.num_prompt_tokens
        self.num_hits += min(num_hits, turn.num_prompt_tokens)
        self.timeline.call_in(turn.seconds, partial(self.end, session, request, turn, later))

    def end(self, session: Session, request: Request, turn: Turn, later: Sequence[tuple[Turn, float | None]]) -> None:
        self._num_running -= 1
        request.status = RequestStatus.FINISHED_STOPPED
        self.manager.free(request)
        if later:
            self.timeline.call_in(turn.pause, partial(self.begin, session, later))
        else:
            del self._digests[session.number]

    def _hash(self, session: Session) -> list[bytes]:
        chain = HashChain(PAGE_SIZE, KEY)
        tokens = session.load_token_ids(session.turns[-1].num_tokens)
        chain.extend(tokens[: len(tokens) // PAGE_SIZE * PAGE_SIZE])
        session.drop_token_ids()
        self._digests[session.number] = [chain[i].to_bytes(16, "little") for i in range(len(chain))]
        return self._digests[session.number]

    def run(self) -> float:
        """Run to the end. Returns the prompt tokens that hit in percent."""
        self.timeline.run()
        compat.check(self.manager)
        return 100 * self.num_hits / self.num_tokens


def measure(column: str, seed: int, share: Fraction = HALF, num_sessions: int | None = None) -> float:
    """Return what the sessions of a seed hit in a column, in percent."""
    sessions = make_sessions(seed) if num_sessions is None else make_sessions(seed, num_sessions)
    hints, engine = ENGINES[column]
    num_blocks = int(count_live_pages(sessions) * share) + NUM_PROMPTS * PROMPT_LEN // PAGE_SIZE
    with hearing(hints):
        agents = Agents(num_blocks, engine, sessions, seed, has_ids=column != "vLLM", uses_envelopes=column == "envelopes")
        percent = agents.run()
        del agents
    return percent


def main() -> None:
    parser = ArgumentParser(prog="python -m bench.studies.vllm_keeping")
    parser.add_argument("columns", nargs="*", help=f"some of {', '.join(ENGINES)}; all by default")
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS, help="the number of seeds")
    options = parser.parse_args()
    figures = {}
    for column in options.columns or ENGINES:
        start = perf_counter()
        percents = [measure(column, seed) for seed in range(options.seeds)]
        figures[column] = f"{fmean(percents):.1f}"
        by_seed = " ".join(f"{percent:.1f}" for percent in percents)
        print(f"{column}: {figures[column]} ({by_seed}; {perf_counter() - start:.0f} s)", file=sys.stderr, flush=True)
    header = ["prompt tokens hit, %", *figures]
    print(as_table(header, [[f"vLLM {vllm.__version__}", *figures.values()]]))


if __name__ == "__main__":
    main()
