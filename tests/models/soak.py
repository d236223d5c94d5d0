"""The soak test: rounds of work under random faults, with a manager request by request and a running batch, side by side.

``make soak SOAK_SECONDS=3600 SOAK_SEED=1``. A round has a kind, by which groups, pool and load are chosen, and a seed; one that
fails prints the line that repeats it. After each step both engines must have handed out the same pages to the same requests; at
the end of a round nobody holds a page and nothing is kept for a request. Resident memory must stay flat. A part of the time
goes to the simulation of contents, on the same settings and more.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import logging
import os
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import contents
import numpy as np
from settings import SETTINGS, Group, Setting
from soak_engine import BatchSide, Engine, ManagerSide, SoakError, require_equal, require_same_pools
from soak_faults import Faults
from twin_engine import NUM_FAMILIES, VOCABULARY

import pagepool
from pagepool.replay import SimulatedRequest, TraceRecord, generate_chats, make_requests, read_trace

TRACE = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_conversation.jsonl"
LIBC = ctypes.CDLL(None)
STATM = Path("/proc/self/statm")
MIB = 1 << 20
MAX_GROWTH_MIB = 16
CONTENTS_SHARE = 0.25  # share of the time
EVICTION = ("lru", "adaptive")  # by seed
MIN_SAMPLES = 4  # rounds of a kind, whose medians show growth


@dataclass(frozen=True)
class Kind:
    """The parameters of a round. Settings of the differential tests have short prompts, others those of the trace."""

    setting: Setting
    max_num_seqs: int = 6
    max_num_batched_tokens: int = 24
    num_requests: int = 400
    num_steps: int = 400
    checked_every: int = 16  # steps
    fault_rate: float = 0.6  # faults per step
    is_short: bool = True

    @property
    def name(self) -> str:
        return self.setting.name


def make_long(name: str, groups: tuple[Group, ...], num_pages: int, max_num_seqs: int, **options: bool) -> Kind:
    """Make a kind whose prompts have thousands of tokens."""
    setting = Setting(name, groups, (num_pages,), **options)
    return Kind(setting, max_num_seqs, 16_384, 12 * max_num_seqs, 2000, 250, 0.2, is_short=False)


SHORT = [Kind(setting) for setting in SETTINGS if setting.data_parallel_size is None]
LONG = [
    make_long("200,000 pages", (Group("full", 16),), 200_000, 256),
    make_long("8,000 pages of 64", (Group("full", 64),), 8000, 64),
    make_long("300 pages of 512", (Group("full", 512),), 300, 64),
    make_long("50,000 pages uncached", (Group("full", 16),), 50_000, 64, enable_caching=False),
    make_long("window of 4,096", (Group("sliding", 64, 4096),), 4000, 64),
    make_long("full and window of 1,024", (Group("full", 32), Group("sliding", 32, 1024)), 20_000, 64),
    make_long(
        "full 64, window, chunk 16", (Group("full", 64), Group("sliding", 16, 512), Group("chunked", 16, 2048)), 30_000, 64
    ),
]


def take_turns() -> list[Kind]:
    """Return the kinds in the order of their rounds: a long one after a few short ones."""
    size = -(-len(SHORT) // len(LONG))
    return [kind for i, long in enumerate(LONG) for kind in (*SHORT[i * size : (i + 1) * size], long)]


# --- the load -----------------------------------------------------------------------------------------------


def load_trace() -> list[TraceRecord]:
    """Return the real trace, empty if it is not available."""
    return read_trace(str(TRACE)) if TRACE.exists() else []


def make_load(kind: Kind, seed: int, records: list[TraceRecord]) -> list[SimulatedRequest]:
    """Return the requests of a round; without records long ones are generated."""
    if kind.is_short:
        return make_short_requests(kind, Random(seed))
    if not records:
        return generate_chats(kind.num_requests, seed)
    start = Random(seed).randrange(len(records) - kind.num_requests)
    return make_requests(records[start : start + kind.num_requests], f"line {start} and", seed)


def make_short_requests(kind: Kind, rng: Random) -> list[SimulatedRequest]:
    """Return requests of a few families over a tiny vocabulary, with many hits and duplicates."""
    max_num_tokens = kind.setting.max_model_len
    families = [rng.choices(VOCABULARY, k=max_num_tokens) for _ in range(NUM_FAMILIES)]
    requests = []
    for number in range(kind.num_requests):
        num_prompt_tokens = rng.randint(1, max_num_tokens)
        num_shared = rng.randint(0, num_prompt_tokens)
        num_output_tokens = rng.randint(0, max_num_tokens - num_prompt_tokens)
        own = rng.choices(VOCABULARY, k=num_prompt_tokens + num_output_tokens - num_shared)
        tokens = np.array(rng.choice(families)[:num_shared] + own, dtype=np.int32)
        requests.append(SimulatedRequest(f"short {number}", num_prompt_tokens, num_output_tokens, tokens.copy))
    return requests


# --- a round ------------------------------------------------------------------------------------------------


class Round:
    """One kind under one seed, on a manager and a batch, or on one of them alone: a policy minds that a batch does for several
    requests at once what a manager does one by one.
    """

    def __init__(self, kind: Kind, seed: int, records: list[TraceRecord]) -> None:
        self.kind = kind
        self.rng = Random(seed)
        requests = make_load(kind, seed, records)
        setting, eviction = kind.setting, EVICTION[seed % len(EVICTION)]
        max_model_len = max(request.num_final_tokens for request in requests)
        make_manager = partial(
            pagepool.CacheManager,
            self.rng.choice(setting.num_pages),
            setting.cache_groups(pagepool),
            max_model_len,
            setting.enable_caching,
            hashing=pagepool.PageHashing(use_eagle=setting.use_eagle, hash_seed=seed),
            eviction=eviction,
        )
        limits = {"max_num_batched_tokens": kind.max_num_batched_tokens, "max_num_seqs": kind.max_num_seqs}
        sides = [ManagerSide, BatchSide]
        if eviction != "lru":
            sides = [sides[seed // len(EVICTION) % len(sides)]]
        self.engines = [Engine(make_manager, side, requests, **limits) for side in sides]
        self.faults = Faults(self.engines, self.rng)
        self.counts: Counter[str] = Counter()

    def run(self) -> None:
        """Step and inject faults until the steps are done or no request is left; then end the rest."""
        for step in range(self.kind.num_steps):
            if not self.is_left():
                break
            self.faults.step()
            if self.rng.random() < self.kind.fault_rate and self.is_left():
                self.faults.inject()
            self.compare()
            if step % self.kind.checked_every == 0:
                self.check()
        self.end()

    def is_left(self) -> bool:
        engine = self.engines[0]
        return bool(engine.waiting or engine.running.size)

    def compare(self) -> None:
        """Compare the counts, which is cheap, after each step."""
        require_equal("figures", [engine.figures for engine in self.engines])
        require_equal("free pages", [engine.pool.get_num_free_pages() for engine in self.engines])
        require_equal("counters", [engine.pool.stats for engine in self.engines])

    def check(self) -> None:
        """Compare everything, and check the invariants of each engine. O(pool)."""
        for engine in self.engines:
            engine.side.check()
        require_same_pools("the engines' pools", [engine.pool for engine in self.engines])
        for row in self.engines[0].running.tolist():
            require_equal(f"the pages of row {row}", [engine.side.get_page_ids(row) for engine in self.engines])
        self.counts["checks"] += len(self.engines)

    def end(self) -> None:
        """Drain the engines and check that nothing is left."""
        for engine in self.engines:
            engine.drain()
            self._count(engine)
        self.compare()
        self.check()
        for engine in self.engines:
            require_empty(engine)

    def _count(self, engine: Engine) -> None:
        figures = engine.figures
        self.counts += engine.counts
        self.counts["requests"] += figures.requests
        self.counts["steps"] += figures.steps
        self.counts["tokens"] += figures.prompt_tokens + figures.rehit_tokens
        self.counts["hit tokens"] += figures.hit_tokens + figures.rehit_tokens
        self.counts["preemptions"] += figures.preemptions


def require_empty(engine: Engine) -> None:
    """Raise unless no page is held, nothing is kept for any request, and the prefix cache can be reset."""
    pool, manager = engine.pool, engine.manager
    left = {
        "pages held": int(np.count_nonzero(pool.ref_counts()[1:])),
        "pages not free": pool.num_pages - 1 - pool.get_num_free_pages(),
        "requests with pages": len(manager.registry.held),
        "requests with hashes": len(manager.registry.hashes),
        "resets refused": int(not manager.reset_prefix_cache()),
        "prefix entries": len(pool.cached_page_hash_to_page),
    }
    if any(left.values()):
        raise SoakError(f"left at the end: {left}")
    pool.check()


# --- the program --------------------------------------------------------------------------------------------


def read_resident_mib() -> float:
    """Return the resident memory of this process, without malloc's reserves; 0 if /proc does not report it."""
    gc.collect()
    if hasattr(LIBC, "malloc_trim"):
        LIBC.malloc_trim(0)
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB if STATM.exists() else 0.0


def find_growth(samples: list[float]) -> float:
    """Return the median of the later half of the samples minus that of the earlier half, without the first sample."""
    samples = samples[1:]
    half = len(samples) // 2
    return statistics.median(samples[half:]) - statistics.median(samples[:half]) if half else 0.0


class Soak:
    """Rounds in sequence, and their results."""

    def __init__(self, seed: int, records: list[TraceRecord]) -> None:
        self.seed = seed
        self.records = records
        self.counts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.num_rounds = 0
        self.contents: Counter[str] = Counter()
        self.contents_seconds = 0.0
        self.resident_mib: dict[str, list[float]] = defaultdict(list)
        self.start = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start

    def run_round(self, kind: Kind) -> None:
        """Run one round with the next seed."""
        seed = self.seed + self.num_rounds
        work = Round(kind, seed, self.records)
        try:
            work.run()
        except Exception:
            print(f"failed; to repeat: python tests/models/soak.py --kind {kind.name!r} --seed {seed} --rounds 1", flush=True)
            raise
        self.num_rounds += 1
        self.counts += work.counts
        self.faults += work.faults.counts
        del work
        self.resident_mib[kind.name].append(read_resident_mib())

    def run_contents(self) -> None:
        """Simulate contents for its share of the time."""
        while self.contents_seconds < CONTENTS_SHARE * self.seconds:
            start, num_rounds = self.seconds, self.contents["rounds"]
            setting = contents.CONTENTS_SETTINGS[num_rounds % len(contents.CONTENTS_SETTINGS)]
            self.contents += contents.run_round(setting, self.seed + num_rounds)
            self.contents_seconds += self.seconds - start

    def grown(self) -> dict[str, float]:
        """Return the growth of the resident memory in MiB by kind, if known."""
        return {name: find_growth(samples) for name, samples in self.resident_mib.items() if len(samples) > MIN_SAMPLES}

    def require_flat(self) -> None:
        """Raise if the resident memory has grown."""
        grown = {name: growth for name, growth in self.grown().items() if growth > MAX_GROWTH_MIB}
        if grown:
            raise SoakError(f"resident memory has grown, in MiB, between the rounds of: {grown}")

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield the summary."""
        yield "rounds", f"{self.num_rounds:,}"
        yield "seeds", f"{self.seed} to {self.seed + self.num_rounds - 1}"
        yield "seconds", f"{self.seconds:,.1f}"
        yield "operations a second", f"{self.counts['operations'] / (self.seconds - self.contents_seconds):,.0f}"
        yield from ((name, f"{count:,}") for name, count in sorted(self.counts.items()))
        yield "faults and interventions", f"{self.faults.total():,}"
        yield from ((f"  {name}", f"{count:,}") for name, count in sorted(self.faults.items()))
        yield from ((f"contents: {name}", f"{count:,}") for name, count in sorted(self.contents.items()))
        samples = [sample for each in self.resident_mib.values() for sample in each]
        yield "resident memory, MiB", f"{min(samples):.0f} to {max(samples):.0f}"
        yield "  most it grew between rounds of a kind", f"{max(self.grown().values(), default=0.0):.1f}"
        yield "errors", "0"


def parse_arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description="Soak the allocator in work and faults.")
    parser.add_argument("--seconds", type=float, default=60.0, help="no round begins after so many seconds")
    parser.add_argument("--seed", type=int, default=0, help="of the first round; each has the next")
    parser.add_argument("--kind", help="rounds of this kind alone")
    parser.add_argument("--rounds", type=int, help="so many rounds at most")
    return parser.parse_args()


def main() -> None:
    """Soak for the given time and print the results."""
    options = parse_arguments()
    turns = [kind for kind in take_turns() if options.kind in (None, kind.name)]
    if not turns:
        sys.exit(f"--kind: got {options.kind!r}, allowed: {', '.join(kind.name for kind in take_turns())}")
    records = load_trace()
    print(f"load: {TRACE.name if records else 'made-up chats'}; kinds: {len(turns)}", flush=True)
    soak = Soak(options.seed, records)
    while soak.seconds < options.seconds and soak.num_rounds != options.rounds:
        kind = turns[soak.num_rounds % len(turns)]
        soak.run_round(kind)
        if options.kind is None:
            soak.run_contents()
        print(f"{soak.seconds:8.1f} s  seed {soak.seed + soak.num_rounds - 1}  {kind.name}", flush=True)
    for name, value in soak.lines():
        print(f"{name:44} {value:>20}")
    soak.require_flat()


if __name__ == "__main__":
    logging.getLogger("pagepool").setLevel(logging.ERROR)  # refused resets and hopeless requests are expected
    main()
