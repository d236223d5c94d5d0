"""The soak test: rounds of random work for as long as is asked, whose resident memory must stay flat.

``make soak SOAK_SECONDS=3600 SOAK_SEED=1``. Rounds of the simulation of contents, and of the package beside the oracle, take
turns; then comes a replay in a large pool, request by request and by a running batch, which must leave the same. A round has a
kind and a seed, which chooses the rest; one that fails prints the line that repeats it.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import logging
import os
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import contents
import numpy as np
from features import draw_features
from pairs import KINDS as WORKS
from pairs import run_twins
from pool_arrays import pool_arrays
from settings import ENDS_SETTINGS, SETTINGS, STATE_SETTINGS, Group, Setting

import pagepool
from pagepool.hashing import extra_keys
from pagepool.replay import Scheduler, SimulatedRequest, TraceRecord, generate_chats, make_requests, read_trace

TRACE = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_conversation.jsonl"
LIBC = ctypes.CDLL(None)
STATM = Path("/proc/self/statm")
MIB = 1 << 20
MAX_GROWTH_MIB = 16
NUM_CALLS = 1000  # of the package beside the oracle
NUM_TURNS = 6  # of short rounds before a long one
EVICTION = ("lru", "adaptive")  # by seed
MIN_SAMPLES = 4  # rounds of a kind, whose medians show growth
TWIN_SETTINGS = [
    setting for setting in (*STATE_SETTINGS, *SETTINGS, *ENDS_SETTINGS) if setting.enable_caching and setting.page_size < 16
]
LONG = [
    Setting("200,000 pages", (Group("full", 16),), (200_000,)),
    Setting("8,000 pages of 64", (Group("full", 64),), (8000,)),
    Setting("300 pages of 512", (Group("full", 512),), (300,)),
    Setting("50,000 pages uncached", (Group("full", 16),), (50_000,), enable_caching=False),
    Setting("window of 4,096", (Group("sliding", 64, 4096),), (4000,)),
    Setting("full and window of 1,024", (Group("full", 32), Group("sliding", 32, 1024)), (20_000,)),
    Setting("full 64, window, chunk 16", (Group("full", 64), Group("sliding", 16, 512), Group("chunked", 16, 2048)), (30_000,)),
]


class SoakError(AssertionError):
    """Replays differ, something is left at the end, or memory has grown."""


# --- rounds of the simulation and of the oracle ---------------------------------------------------------------------


def simulate(seed: int) -> Counter[str]:
    settings = contents.CONTENTS_SETTINGS
    return contents.run_round(settings[seed % len(settings)], seed)


def compare(work: str, seed: int) -> Counter[str]:
    """Let the package work beside the oracle, with features that the seed draws."""
    rng = Random(seed)
    with patch.object(extra_keys, "os", SimpleNamespace(urandom=rng.randbytes)):
        twins = run_twins(work, rng.choice(TWIN_SETTINGS), draw_features(rng), seed, NUM_CALLS)
    return Counter({f"calls of {work}": twins.num_calls})


# --- replays --------------------------------------------------------------------------------------------------------


@cache
def load_trace() -> list[TraceRecord]:
    """Return the real trace, empty if it is not available."""
    return read_trace(str(TRACE)) if TRACE.exists() else []


def make_load(num_requests: int, seed: int) -> list[SimulatedRequest]:
    """Return requests of the real trace from anywhere on, or chats."""
    records = load_trace()
    if not records:
        return generate_chats(num_requests, seed)
    start = Random(seed).randrange(len(records) - num_requests)
    return make_requests(records[start : start + num_requests], f"line {start} and", seed)


def replay(setting: Setting, seed: int, num_requests: int = 300) -> Counter[str]:
    """Replay requests with a manager and with a running batch. With a policy it is one of them, since a policy minds that a
    batch does for several requests at once what a manager does one by one.
    """
    eviction = EVICTION[seed % len(EVICTION)]
    fronts = [False, True] if eviction == "lru" else [bool(seed // len(EVICTION) % 2)]
    found: list[tuple[Any, dict[str, Any]]] = []
    for batched in fronts:
        requests = make_load(num_requests, seed)
        manager = pagepool.CacheManager(
            setting.num_pages[0],
            setting.cache_groups(pagepool),
            max(request.num_final_tokens for request in requests),
            setting.enable_caching,
            hashing=pagepool.PageHashing(hash_seed=seed),
            eviction=eviction,
        )
        figures = Scheduler(manager, requests, max_num_batched_tokens=16_384, max_num_seqs=64, batched=batched).run()
        counted = figures.requests, figures.steps, figures.prompt_tokens, figures.hit_tokens, figures.rehit_tokens
        found.append((counted, sort_entries(manager.page_pool)))
        require_empty(manager)
    for counted, arrays in found[1:]:
        different = [name for name in arrays if not np.array_equal(arrays[name], found[0][1][name])]
        if counted != found[0][0] or different:
            raise SoakError(f"replays differ: {found[0][0]} against {counted}, and in {', '.join(different) or 'no array'}")
    return Counter({"replayed requests": found[0][0][0], "replayed steps": found[0][0][1]})


def sort_entries(pool: pagepool.PagePool) -> dict[str, Any]:
    """Return the arrays of a pool, with the prefix entries by key, since their order in the index is different in each pool,
    and without the number of refusals, since a batch is not asked again while it would refuse.
    """
    arrays = pool_arrays(pool)
    arrays["pool_counters"] = np.delete(arrays["pool_counters"], 3, axis=1)
    order = np.lexsort((*arrays["cached_keys"].T, arrays["cached_group_ids"]))
    return arrays | {name: array[order] for name, array in arrays.items() if name.startswith("cached") and array.size}


def require_empty(manager: pagepool.CacheManager) -> None:
    """Raise unless no page is held, nothing is kept for any request, and the prefix cache can be reset."""
    stats = manager.stats()
    left = {
        "pages held": stats.num_held_pages,
        "pages not free": stats.num_pages - stats.num_free_pages,
        "requests with pages": len(manager.registry.held),
        "requests with hashes": len(manager.registry.hashes),
        "resets refused": int(not manager.reset_prefix_cache()),
        "prefix entries": len(manager.page_pool.cached_page_hash_to_page),
    }
    if any(left.values()):
        raise SoakError(f"left at the end: {left}")
    manager.check()


# --- the program ----------------------------------------------------------------------------------------------------


KINDS: dict[str, Callable[[int], Counter[str]]] = {
    "contents": simulate,
    **{work: partial(compare, work) for work in WORKS},
    **{setting.name: partial(replay, setting) for setting in LONG},
}


def take_turns() -> list[str]:
    """Return the kinds in the order of their rounds: a long one after some short ones."""
    return [kind for long in LONG for kind in (*["contents", *WORKS] * NUM_TURNS, long.name)]


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

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.counts: Counter[str] = Counter()
        self.num_rounds = 0
        self.resident_mib: dict[str, list[float]] = defaultdict(list)
        self.start = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start

    def run_round(self, kind: str) -> None:
        """Run one round with the next seed."""
        seed = self.seed + self.num_rounds
        try:
            self.counts += KINDS[kind](seed)
        except Exception:
            print(f"failed; to repeat: python tests/models/soak.py --kind {kind!r} --seed {seed} --rounds 1", flush=True)
            raise
        self.num_rounds += 1
        self.resident_mib[kind].append(read_resident_mib())

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
        yield from ((name, f"{count:,}") for name, count in sorted(self.counts.items()))
        samples = [sample for each in self.resident_mib.values() for sample in each]
        yield "resident memory, MiB", f"{min(samples):.0f} to {max(samples):.0f}"
        yield "  most it grew between rounds of a kind", f"{max(self.grown().values(), default=0.0):.1f}"
        yield "errors", "0"


def parse_arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description="Soak the allocator in random work.")
    parser.add_argument("--seconds", type=float, default=60.0, help="no round begins after so many seconds")
    parser.add_argument("--seed", type=int, default=0, help="of the first round; each has the next")
    parser.add_argument("--kind", choices=KINDS, help="rounds of this kind alone")
    parser.add_argument("--rounds", type=int, help="so many rounds at most")
    return parser.parse_args()


def main() -> None:
    """Soak for the given time and print the results."""
    options = parse_arguments()
    turns = take_turns() if options.kind is None else [options.kind]
    print(f"load of replays: {TRACE.name if TRACE.exists() else 'made-up chats'}; kinds: {len({*turns})}", flush=True)
    soak = Soak(options.seed)
    while soak.seconds < options.seconds and soak.num_rounds != options.rounds:
        kind = turns[soak.num_rounds % len(turns)]
        soak.run_round(kind)
        print(f"{soak.seconds:8.1f} s  seed {soak.seed + soak.num_rounds - 1}  {kind}", flush=True)
    for name, value in soak.lines():
        print(f"{name:44} {value:>20}")
    soak.require_flat()


if __name__ == "__main__":
    logging.getLogger("pagepool").setLevel(logging.ERROR)  # refused resets and hopeless requests are expected
    main()
