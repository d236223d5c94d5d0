"""The index of a router on the conversation trace, or on generated chats: batches of events applied, and prompts looked up."""

from __future__ import annotations

from functools import cache
from itertools import islice
from pathlib import Path
from threading import Thread
from time import process_time
from typing import Any

import numpy as np
import pytest

from bench.races.race import READERS, ROUTERS, WALL_TIME, Race, Work
from pagepool._core import HashChain
from pagepool.hashing import get_siphash_key
from pagepool.replay import make_requests
from pagepool.replay.traces.generator import generate_chats
from pagepool.replay.traces.reader import read_trace
from pagepool.router import PrefixIndex

pytest.importorskip("msgspec")
from bench.races.router_rivals import INDEXES, encode_stored

TRACE = Path(__file__).resolve().parents[3] / "shared/traces/mooncake_conversation.jsonl"
PAGE_SIZE = 16
NUM_REQUESTS = 1000
NUM_FRESH = 50  # prompts at the end, which are stored and removed again and again
NUM_TURNS = 5
NUM_READ = 16  # prompts that threads read
NUM_READS = 100  # of each prompt in a round


@cache
def prompts() -> list[tuple[Any, Any]]:
    """Hashes and token ids of prompts."""
    if TRACE.exists():
        requests = make_requests(list(islice(read_trace(str(TRACE)), NUM_REQUESTS)))
    else:
        requests = generate_chats(NUM_REQUESTS, seed=1)
    made = []
    for request in requests:
        token_ids = np.asarray(request.all_token_ids, np.int32)
        chain = HashChain(PAGE_SIZE, get_siphash_key("bench"))
        num_pages = len(token_ids) // PAGE_SIZE
        chain.extend(token_ids[: num_pages * PAGE_SIZE])
        hashes = [chain[i] & (1 << 64) - 1 for i in range(num_pages)]
        made.append((np.array(hashes, np.uint64), token_ids))
    return made


class Filled:
    """An index that has the prompts but the last ones, each at one worker, the pages that it lacks."""

    def __init__(self, name: str, num_workers: int) -> None:
        self.index: Any = INDEXES[name](num_workers)
        self.num_workers = num_workers
        self.stored: list[tuple[int, bytes]] = []
        self.removed: list[tuple[int, bytes]] = []
        self.num_stored = 0
        known: list[set[int]] = [set() for _ in range(num_workers)]
        for i, (hashes, token_ids) in enumerate(prompts()):
            worker = i % num_workers
            listed = hashes.tolist()
            start = next((i for i, block_hash in enumerate(listed) if block_hash not in known[worker]), len(listed))
            known[worker].update(listed)
            if start == len(listed):
                continue
            payload = self.index.encode_stored(hashes, start, token_ids, PAGE_SIZE)
            if i < NUM_REQUESTS - NUM_FRESH:
                self.index.apply(worker, payload)
            else:
                self.stored.append((worker, payload))
                self.removed.insert(0, (worker, self.index.encode_removed(hashes[start:])))
                self.num_stored += len(listed) - start
        self.page_ids: Any = None

    def prepare(self) -> None:
        pass

    def wait(self) -> None:
        """Wait until all batches are applied, by a look-up."""
        self.page_ids = self.index.as_pages(self.index.find(self.index.as_query(prompts()[-1][0])))


class Store(Filled):
    """Stores the last prompts; they are removed again untimed."""

    is_full = False

    def prepare(self) -> None:
        if self.is_full:
            for worker, payload in self.removed:
                self.index.apply(worker, payload)

    def run(self) -> None:
        for worker, payload in self.stored:
            self.index.apply(worker, payload)
        self.is_full = True
        self.wait()


class Remove(Store):
    """Removes the last prompts; they are stored again untimed."""

    def prepare(self) -> None:
        for worker, payload in self.stored:
            self.index.apply(worker, payload)

    def run(self) -> None:
        for worker, payload in self.removed:
            self.index.apply(worker, payload)
        self.wait()


class LookUp(Filled):
    """Looks up all prompts but the last."""

    def __init__(self, name: str, num_workers: int) -> None:
        super().__init__(name, num_workers)
        self.queries = [self.index.as_query(hashes) for hashes, _ in prompts()[:-NUM_FRESH]]

    def run(self) -> None:
        find = self.index.find
        for query in self.queries:
            found = find(query)
        self.page_ids = self.index.as_pages(found)


class Readers:
    """Looks random prompts up in threads, each of which has its part of them: by hashes, or by token ids, which are hashed."""

    def __init__(self, num_threads: int, num_pages: int, has_hashes: bool) -> None:
        index = PrefixIndex(PAGE_SIZE, hash_seed="bench")
        rng = np.random.default_rng(num_pages)
        queries: list[Any] = []
        for worker in range(NUM_READ):
            token_ids = rng.integers(0, 50_000, num_pages * PAGE_SIZE + 1, dtype=np.int32)
            chain = index.hash_tokens(token_ids)
            hashes = np.array([chain[i] & (1 << 64) - 1 for i in range(num_pages)], np.uint64)
            index.apply(worker, encode_stored(hashes, 0, token_ids, PAGE_SIZE))
            queries.append(hashes if has_hashes else token_ids)
        self.find: Any = index.find if has_hashes else index.find_tokens
        self.parts = [queries[i::num_threads] for i in range(num_threads)]
        self.page_ids: Any = None

    def prepare(self) -> None:
        pass

    def run(self) -> None:
        threads = [Thread(target=self.read, args=(part,)) for part in self.parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.page_ids = self.find(self.parts[0][0]).tolist()

    def read(self, queries: list[Any]) -> None:
        for _ in range(NUM_READS):
            for query in queries:
                self.find(query)


@pytest.mark.benchmark(timer=process_time)
@pytest.mark.parametrize("num_workers", [16, 64])
@pytest.mark.parametrize("kind", [Store, Remove, LookUp])
def test_index(race: Race, kind: type[Store] | type[Remove] | type[LookUp], num_workers: int) -> None:
    """The time is that of all threads, since Dynamo's index works in one of its own."""
    contenders = {name: kind(name, num_workers) for name in INDEXES}
    if kind is LookUp:
        num_units, unit, target = NUM_REQUESTS - NUM_FRESH, "prompt", 9000
    else:
        num_units, unit, target = contenders["pagepool"].num_stored, "block", 75
    num_pages = sum(len(hashes) for hashes, _ in prompts()) // NUM_REQUESTS
    name = {Store: "store", Remove: "remove", LookUp: f"look up {num_pages} pages"}[kind]
    race(contenders, Work(f"{name}, {num_workers} workers", unit, num_units, NUM_TURNS, target, suite=ROUTERS))


@WALL_TIME
@pytest.mark.parametrize(("num_pages", "has_hashes"), [(857, True), (2048, False), (16_384, True)])
def test_threads(race: Race, num_pages: int, has_hashes: bool) -> None:
    """Needs two idle cores."""
    contenders = {"one thread": Readers(1, num_pages, has_hashes), "two threads": Readers(2, num_pages, has_hashes)}
    name = f"look up {num_pages} pages by {'hashes' if has_hashes else 'token ids'}, {NUM_READ} workers"
    race(contenders, Work(name, "prompt", NUM_READS * NUM_READ, NUM_TURNS, suite=READERS))
