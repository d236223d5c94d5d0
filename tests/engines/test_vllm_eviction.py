"""vLLM's pools with adaptive eviction: the hits of `pagepool replay`, and blocks and pages that agree."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.v1.request import RequestStatus
from vllm_engine import BLOCK_SIZE, make_manager

from pagepool._core import HashChain
from pagepool.compat import vllm as compat
from pagepool.compat.vllm.blocks import Block, Queue
from pagepool.compat.vllm.policy_queue import AdaptiveQueue
from pagepool.errors import DoubleFreeError, IntegrityError, OutOfPagesError, PageIdError
from pagepool.hashing import get_siphash_key
from pagepool.replay import SimulatedRequest, generate_workload
from pagepool.replay.models.pages import ModelPages
from pagepool.replay.plans.policies import PolicySimulator
from pagepool.replay.simulation.allocator import HASH_SEED

MAX_MODEL_LEN = 1 << 20


@pytest.fixture(autouse=True)
def adaptive(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let vLLM's managers take blocks by adaptive eviction."""
    monkeypatch.setenv(compat.EVICTION_VARIABLE, "adaptive")
    with compat.installed():
        assert compat.report().eviction == "adaptive"
        yield


class Traced:
    """A request as vLLM's manager reads it, whose hashes are known."""

    num_in_flight_tokens = num_preemptions = shared_prefix_boundary = 0
    skip_reading_prefix_cache = False
    mm_features = ()

    def __init__(self, request_id: str, digests: list[bytes], num_prompt_tokens: int) -> None:
        self.request_id = request_id
        self.digests = digests
        self.num_prompt_tokens = num_prompt_tokens
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.grow(num_prompt_tokens)

    def grow(self, num_tokens: int) -> None:
        """Know so many tokens."""
        self.num_tokens = num_tokens
        self.block_hashes = self.digests[: num_tokens // BLOCK_SIZE]


# Hits.


def hash_pages(request: SimulatedRequest) -> list[bytes]:
    """Return the digests that `pagepool replay` knows a request's pages by."""
    chain = HashChain(BLOCK_SIZE, get_siphash_key(HASH_SEED))
    chain.extend(request.make_token_ids()[: request.num_slots // BLOCK_SIZE * BLOCK_SIZE])
    return [chain[i].to_bytes(16, "little") for i in range(len(chain))]


def run_alone(manager: Any, simulated: SimulatedRequest, max_batched_tokens: int) -> int:
    """Run a request from its look-up to its end, and return how many tokens it hit."""
    request = Traced(simulated.request_id, hash_pages(simulated), simulated.num_prompt_tokens)
    found, num_hits, request.shared_prefix_boundary = manager.get_computed_blocks(request)
    placement: tuple[Any, ...] = (num_hits, found)
    lengths = [*range(num_hits + max_batched_tokens, request.num_tokens, max_batched_tokens), request.num_tokens]
    size = BLOCK_SIZE
    lengths += range(request.num_tokens - request.num_tokens % size + size, simulated.num_slots, size)
    num_done = num_hits
    for length in [*lengths, simulated.num_slots]:
        request.grow(max(length, request.num_tokens))
        if length > num_done:
            assert manager.allocate_slots(request, length - num_done, *placement) is not None
            request.num_computed_tokens, placement, num_done = length, (), length
    manager.free(request)
    return num_hits


def count_hits(requests: list[SimulatedRequest], num_blocks: int, max_batched_tokens: int = 8192) -> int:
    """Run requests one after another through vLLM's manager, and return the number of prompt tokens that hit."""
    manager = make_manager(num_blocks, MAX_MODEL_LEN)
    num_hits = run_all(manager, requests, max_batched_tokens)
    check_pool(manager.block_pool)
    return num_hits


def run_all(manager: Any, requests: list[SimulatedRequest], max_batched_tokens: int = 8192) -> int:
    num_blocks = len(manager.block_pool.blocks)
    num_groups = len(manager.coordinator.single_type_managers)
    fitting = [request for request in requests if num_groups * -(-request.num_slots // BLOCK_SIZE) < num_blocks]
    return sum(run_alone(manager, request, max_batched_tokens) for request in fitting)


@pytest.mark.parametrize(("name", "num_blocks"), [("mix", 2000), ("agents", 900), ("loop", 5000), ("drift", 2000)])
def test_hits_of_a_replay(name: str, num_blocks: int) -> None:
    requests = generate_workload(name, 120, seed=3)
    num_hits = count_hits(requests, num_blocks)
    assert num_hits == PolicySimulator(requests, ModelPages(BLOCK_SIZE)).count_hits("adaptive", num_blocks)
    assert num_hits > 0


@pytest.mark.parametrize("max_batched_tokens", [48, 500])
def test_hits_of_a_replay_in_steps(max_batched_tokens: int) -> None:
    requests = generate_workload("mix", 80, seed=5)
    expected = PolicySimulator(requests, ModelPages(BLOCK_SIZE), max_batched_tokens).count_hits("adaptive", 1500)
    assert count_hits(requests, 1500, max_batched_tokens) == expected


# Windows: which of their blocks are cached is vLLM's choice.

WINDOWS = (None, 512)
RETENTIONS = (None, 0, 1024)


@pytest.mark.parametrize("retention", RETENTIONS)
def test_windows_keep_what_vllm_keeps(retention: int | None) -> None:
    """Where there is room for all, the same blocks are cached under the same hashes: intervals, last windows, junctions."""
    requests = generate_workload("agents", 20, seed=3)
    kept = []
    for _ in range(2):
        manager = make_manager(40_000, MAX_MODEL_LEN, WINDOWS, retention)
        num_hits = run_all(manager, requests)
        kept.append(
            (type(manager.block_pool.free_block_queue), num_hits, {*manager.block_pool.cached_block_hash_to_block._cache})
        )
        del manager
        compat.uninstall()
    (ours, *found), (theirs, *expected) = kept
    assert (ours is AdaptiveQueue, theirs is AdaptiveQueue) == (True, False)
    assert found == expected
    assert found[0] > 0
    gc.collect()


def count_with_and_without(requests: list[SimulatedRequest], num_blocks: int, retention: int | None) -> list[int]:
    """Return the hits with adaptive eviction, and those of vLLM without pagepool."""
    counts = []
    for install in (compat.install, compat.uninstall):
        if compat.is_installed() != (install is compat.install):
            install()
        counts.append(run_all(make_manager(num_blocks, MAX_MODEL_LEN, WINDOWS, retention), requests))
        gc.collect()
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("retention", RETENTIONS)
def test_windows_hit_no_less_than_vllms_on_generated_work(retention: int | None) -> None:
    """In sum: short work of one kind may hit less, as without windows."""
    works = [(name, size, seed) for name, size in (("mix", 4000), ("agents", 1800), ("drift", 4000)) for seed in range(3, 6)]
    counts = [count_with_and_without(generate_workload(name, 120, seed=seed), size, retention) for name, size, seed in works]
    ours, theirs = map(sum, zip(*counts, strict=True))
    assert ours >= theirs


# Blocks and pages.


def check_pool(pool: Any) -> None:
    """Check that exactly the blocks without references are queued, and that the queue's pages agree with them."""
    queue = pool.free_block_queue
    assert type(queue) is AdaptiveQueue
    queue.check()
    free = [block.block_id for block in queue.get_all_free_blocks()]
    assert sorted(free) == [block.block_id for block in pool.blocks if block.ref_cnt == 0 and not block.is_null]
    assert len(free) == queue.num_free_blocks == pool.get_num_free_blocks()


class Load:
    """Random work: requests that share prefixes come, grow, are preempted and end; blocks are pinned, evicted and reset.

    Windows are cached at intervals, at prompts' ends and at junctions with other prompts, or all.
    """

    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(seed)
        groups = rng.choice(((None,), (None, 40), (20, None)))
        retention = rng.choice((None, 0, 3 * BLOCK_SIZE)) if len(groups) > 1 else None
        self.manager = make_manager(rng.choice((12, 30)), 1024, groups, retention)
        self.pool = self.manager.block_pool
        self.families = [[rng.randbytes(32) for _ in range(12)] for _ in range(3)]
        self.running: list[Traced] = []
        self.pinned: list[list[Any]] = []
        self.num_requests = 0

    def start(self) -> None:
        """Start a request with a part of a family's hashes and some of its own."""
        rng = self.rng
        shared = rng.choice(self.families)[: rng.randint(0, 6)]
        digests = [*shared, *(rng.randbytes(32) for _ in range(14 - len(shared)))]
        request = Traced(f"r{self.num_requests}", digests, rng.randint(1, 8 * BLOCK_SIZE))
        self.num_requests += 1
        found, num_hits, request.shared_prefix_boundary = self.manager.get_computed_blocks(request)
        num_new = rng.randint(1, request.num_tokens - num_hits)
        if self.manager.allocate_slots(request, num_new, num_hits, found) is not None:
            request.num_computed_tokens = num_hits + num_new
            self.running.append(request)

    def grow(self) -> None:
        if self.running:
            request = self.rng.choice(self.running)
            num_new = self.rng.randint(1, 20)
            num_tokens = min(14 * BLOCK_SIZE, request.num_computed_tokens + num_new)
            request.grow(max(request.num_tokens, num_tokens))
            num_new = num_tokens - request.num_computed_tokens
            if num_new and self.manager.allocate_slots(request, num_new) is not None:
                request.num_computed_tokens = num_tokens

    def end(self) -> None:
        if self.running:
            self.manager.free(self.running.pop(self.rng.randrange(len(self.running))))

    def evict(self) -> None:
        self.manager.evict_blocks(set(self.rng.sample(range(1, len(self.pool.blocks)), 2)))

    def pin(self) -> None:
        """Hold blocks as a connector does."""
        pinned = self.rng.sample(self.pool.blocks[1:], 2)
        self.pool.touch(pinned)
        self.pinned.append(pinned)

    def unpin(self) -> None:
        if self.pinned:
            pinned = self.pinned.pop()
            if self.rng.random() < 0.5:
                self.pool.free_blocks(pinned)
            else:
                self.pool.unpin_blocks(pinned, lambda block: None)

    def move(self) -> None:
        """Move the hashes of a block to one that is queued."""
        cached = [block for block in self.pool.blocks if block.block_hash is not None]
        others = [block for block in self.pool.blocks[1:] if block.block_hash is None and block.ref_cnt == 0]
        if cached and others:
            self.pool.move_block_hashes(self.rng.choice(cached), self.rng.choice(others))

    def held(self) -> dict[int, Any]:
        """Return the hashes of the blocks that requests or a connector hold, by id."""
        managers = self.manager.coordinator.single_type_managers
        running = [manager.req_to_blocks[request.request_id] for request in self.running for manager in managers]
        blocks = [block for blocks in [*running, *self.pinned] for block in blocks if not block.is_null]
        return {block.block_id: block.block_hash for block in blocks}

    def reset(self) -> None:
        """End everything and forget all hashes."""
        while self.running:
            self.end()
        while self.pinned:
            self.unpin()
        assert self.manager.reset_prefix_cache()
        assert self.pool.free_block_queue.store.num_cached_pages == 0


@pytest.mark.parametrize("seed", range(30))
def test_blocks_and_pages_agree(seed: int) -> None:
    """What is held, by requests or pins, is never taken, nor does it lose its hash."""
    load = Load(seed)
    actions = [load.start, load.grow, load.end, load.evict, load.pin, load.unpin, load.move, load.reset]
    for action in load.rng.choices(actions, (8, 20, 5, 1, 1, 1, 1, 0.2), k=400):
        before = load.held()
        action()
        check_pool(load.pool)
        if action in (load.start, load.pin):  # which let nothing go
            after = load.held()
            assert before.keys() <= after.keys()
            assert all(after[block_id] == block_hash for block_id, block_hash in before.items() if block_hash is not None)
    load.reset()


def test_uncached_pool() -> None:
    pool = make_manager(8, 1024, enable_caching=False).block_pool
    assert type(pool.free_block_queue) is Queue
    taken = pool.get_new_blocks(3)
    pool.free_blocks(reversed(taken))
    assert [block.block_id for block in pool.get_new_blocks(2)] == [3, 2]


def test_request_counts_once() -> None:
    manager = make_manager(8, 1024)
    noted: list[int] = []
    request = Traced("r", [bytes([i] * 32) for i in range(3)], 3 * BLOCK_SIZE)
    for num_tokens, placement in ((BLOCK_SIZE, (0,)), (BLOCK_SIZE, ()), (1, (0,))):
        assert manager.allocate_slots(request, num_tokens, *placement) is not None
        request.num_computed_tokens += num_tokens
        noted.append(manager.block_pool.free_block_queue.num_requests)
    assert manager.allocate_slots(Traced("too long", [], 9 * BLOCK_SIZE), 9 * BLOCK_SIZE, 0) is None
    assert [*noted, manager.block_pool.free_block_queue.num_requests] == [1, 1, 1, 1]


@pytest.fixture
def pool() -> Iterator[Any]:
    """Return a pool of six blocks, of which three are held, and check that it is in order at the end."""
    pool = make_manager(6, 1024).block_pool
    pool.get_new_blocks(3)
    yield pool
    check_pool(pool)
    assert [block.ref_cnt for block in pool.blocks[1:]] == [1, 1, 1, 0, 0]


def test_refusals_change_nothing(pool: Any) -> None:
    free, held = pool.blocks[4], pool.blocks[1:4]
    foreign = Block(2, 1, pool=make_manager(6, 1024).block_pool)
    for error, call, args in [
        (DoubleFreeError, pool.free_blocks, [[held[0], free]]),
        (DoubleFreeError, pool.free_blocks, [[held[0], held[0]]]),
        (PageIdError, pool.free_blocks, [[held[0], Block(9, 1)]]),
        (PageIdError, pool.touch, [[held[0], foreign]]),
        (IntegrityError, pool.touch, [[free, Block(4)]]),
        (OutOfPagesError, pool.get_new_blocks, [3]),
    ]:
        with pytest.raises(error):
            call(*args)
        check_pool(pool)


def test_free_block_with_references(pool: Any) -> None:
    pool.blocks[5].ref_cnt = 1
    with pytest.raises(IntegrityError, match="block 5 is in the free queue with 1 references"):
        pool.get_new_blocks(2)
    pool.blocks[5].ref_cnt = 0
