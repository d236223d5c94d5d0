"""The index of a router beside the manager whose events it has: what it finds is what the manager would hit."""

from __future__ import annotations

from math import gcd
from random import Random
from typing import Any

import pytest
from managing import grouped

pytest.importorskip("msgspec")

import msgspec
from settings import scale

from pagepool import (
    CacheGroupSpec,
    CacheManager,
    EngineRequest,
    FullAttentionSpec,
    MambaSpec,
    MultiGroupPageTable,
    PageHashing,
    ReferenceWindowSpec,
    RequestTraits,
    RingSpec,
    RunningBatch,
    SlidingWindowSpec,
)
from pagepool.errors import ArgumentTypeError
from pagepool.events import EventBatch, encode_batch
from pagepool.router import PrefixIndex, PrefixRouter, Route

WINDOWS = {"a window": [40], "a window of a page": [16], "two windows": [100, 20], "no window": []}


@pytest.mark.parametrize("kept", ["ends", "all"])
@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("hash_lookahead", [0, 2])
def test_found_is_what_the_manager_hits(name: str, kept: str, hash_lookahead: int) -> None:
    """In a pool so small that it evicts, with prompts that begin alike and end where others resume."""
    rng = Random(f"{name} {kept}")
    options: Any = {"use_eagle": hash_lookahead > 0, "hash_lookahead": hash_lookahead, "windows": kept, "hash_seed": "s"}
    shape = {"num_kv_heads": 1, "head_size": 8, "dtype": "bfloat16", "use_mla": False}
    specs = [FullAttentionSpec(16, **shape), *(SlidingWindowSpec(16, **shape, sliding_window=n) for n in WINDOWS[name])]
    manager = CacheManager(90 * len(specs), [CacheGroupSpec(spec) for spec in specs], 2048, **grouped(**options))
    manager.enable_events()
    index = PrefixIndex(16, hash_seed="s", hash_lookahead=hash_lookahead)
    prompts = [[0]]
    num_hits = 0
    for step in range(scale(2000) // (1 + (hash_lookahead > 0))):
        known = rng.choice(prompts)
        prompt = known[: rng.choice((len(known), rng.randint(1, len(known))))] + [rng.randrange(9)] * rng.randint(1, 150)
        prompts = [*prompts[-40:], prompt[:800]]
        request = EngineRequest(str(step), prompts[-1])
        expected = manager.get_computed_pages(request)[1]
        found = index.find_tokens(request.all_token_ids)
        assert (found.tolist() or [0]) == [expected], step
        num_hits += expected > 0
        while request.num_computed_tokens < request.num_tokens:
            num_new = min(rng.choice((16, 70, 800)), request.num_tokens - request.num_computed_tokens)
            if manager.allocate_slots(request, num_new) is None:
                break
            request.num_computed_tokens += num_new
        manager.free(request)
        index.apply(0, encode_batch(EventBatch(1.0, manager.take_events())))
    assert num_hits > scale(2000) // (8 if hash_lookahead else 4)
    index.check()


SHAPE: Any = {"num_kv_heads": 1, "head_size": 8, "dtype": "float16", "use_mla": False}
RING = RingSpec(12, 4, (2,), "float16")
REFERENCE = ReferenceWindowSpec(4, **SHAPE, sliding_window=6)
HYBRIDS: dict[str, list[Any]] = {
    "a ring": [FullAttentionSpec(4, **SHAPE), RING],
    "rings around a state": [
        RING,
        FullAttentionSpec(4, **SHAPE),
        RING,
        MambaSpec(4, ((2, 2),), "float16", checkpoint_interval=16),
    ],
    "a window behind a ring": [FullAttentionSpec(4, **SHAPE), RING, SlidingWindowSpec(4, **SHAPE, sliding_window=20)],
    "a state": [FullAttentionSpec(4, **SHAPE), MambaSpec(4, ((2, 2),), "float16", checkpoint_interval=64)],
    "a state first": [MambaSpec(4, ((2, 2),), "float16", checkpoint_interval=16), FullAttentionSpec(4, **SHAPE)],
    "a state without checkpoints": [FullAttentionSpec(4, **SHAPE), MambaSpec(4, ((2, 2),), "float16")],
    "a reference window": [FullAttentionSpec(4, **SHAPE), REFERENCE],
    "a window of large pages": [FullAttentionSpec(4, **SHAPE), SlidingWindowSpec(32, **SHAPE, sliding_window=40)],
    "large pages first": [FullAttentionSpec(64, **SHAPE), SlidingWindowSpec(4, **SHAPE, sliding_window=9)],
}


def in_pools(specs: list[Any], num_pages: int, rng: Random) -> tuple[Any, list[CacheGroupSpec]]:
    """Return the number of pages and the groups of a manager: rings are in a pool of their own, or in that of all."""
    are_apart = RING in specs and rng.random() < 0.5
    groups = [CacheGroupSpec(spec, pool="rings" if are_apart and spec == RING else "kv") for spec in specs]
    return {"kv": num_pages, "rings": 6} if are_apart else num_pages, groups


def in_groups(specs: list[Any]) -> list[CacheGroupSpec]:
    return [CacheGroupSpec(spec) for spec in specs]


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("hash_lookahead", [0, 1])
def test_a_group_that_told_nothing_yet_hits_nothing(name: str, hash_lookahead: int) -> None:
    """From the first prompt on, which is too short to be cached in all groups."""
    specs = HYBRIDS[name]
    for seed in range(scale(40)):
        rng = Random(f"{name} {seed}")
        options: Any = {"use_eagle": hash_lookahead > 0, "hash_lookahead": hash_lookahead, "hash_seed": "s"}
        manager = CacheManager(*in_pools(specs, 200, rng), 512, **grouped(**options))
        manager.enable_events()
        batch = RunningBatch(manager, MultiGroupPageTable(2, 512, 512, [spec.page_size for spec in specs]))
        index = PrefixIndex(4, hash_seed="s", hash_lookahead=hash_lookahead)
        for _ in range(8):
            prompt = [rng.randrange(2)] + [1] * rng.choice((10, 30, 50, 100, 200))
            if batch.admit(0, prompt) is None:
                continue
            batch.take_moves()
            batch.release([0])
            index.apply(0, encode_batch(EventBatch(1.0, manager.take_events())))
            for num in (10, 50, 100, 200):
                asked = [prompt[0]] + [1] * num
                expected = manager.probe(EngineRequest("p", asked)).num_hit_tokens
                assert index.find_tokens(asked).tolist() == [expected], (seed, len(prompt), num)
        late = PrefixIndex(4, hash_seed="s", hash_lookahead=hash_lookahead)
        late.apply(0, encode_batch(EventBatch(1.0, manager.snapshot_events())))
        assert late.find_tokens(asked).tolist() == [expected]


@pytest.mark.parametrize("specs", [[REFERENCE], HYBRIDS["a reference window"]], ids=len)
@pytest.mark.parametrize("drafting", [{}, {"use_eagle": True}, {"use_eagle": True, "hash_lookahead": 1}], ids=str)
def test_answers_behind_a_reference_window_are_not_found(specs: list[Any], drafting: dict[str, Any]) -> None:
    """Until they are part of a prompt. In pools that evict, with conversations, some of which return after a preemption."""
    num_hits = num_answers = 0
    for seed in range(scale(40)):
        rng = Random(seed)
        options: Any = {**drafting, "hash_seed": "s", "caches": rng.choice(("scheduled", "computed"))}
        manager = CacheManager(rng.choice((60, 100)) * len(specs), in_groups(specs), 512, **grouped(**options))
        manager.enable_events()
        batch = RunningBatch(manager, MultiGroupPageTable(2, 512, 512, [spec.page_size for spec in specs]))
        index = PrefixIndex(4, **drafting, hash_seed="s")
        known = [[0], [1]]
        for _ in range(12):
            prompt = rng.choice(known)[: rng.choice((4, 50, 150))] + [2] * rng.choice((1, 7, 20, 60))
            num_prompt = rng.choice((None, rng.randint(0, len(prompt))))
            traits = RequestTraits(num_prompt_tokens=num_prompt)
            if batch.admit(0, prompt, traits=traits) is None:
                continue
            batch.take_moves()
            answer = [rng.randrange(3) for _ in range(rng.choice((0, 1, 30)))]
            for token in answer:
                batch.settle(batch.step([0], [token]))
            batch.release([0])
            index.apply(0, encode_batch(EventBatch(1.0, manager.take_events())))
            whole = [*prompt, *answer]
            known.append(whole)
            for num in (len(prompt), len(prompt) + 1, len(whole), len(whole) + 9):
                asked = [*whole, *[1] * 9][:num]
                expected = manager.probe(EngineRequest("p", asked)).num_hit_tokens
                assert index.find_tokens(asked).tolist() == [expected], (seed, len(prompt), num)
                num_hits += expected > 0
                num_answers += expected < num - 9
        index.check()
        assert index.num_skipped == 0
    assert num_hits > 0
    assert num_answers > 0


def full(page_size: int) -> FullAttentionSpec:
    return FullAttentionSpec(page_size, **SHAPE)


@pytest.mark.parametrize("intervals", [[8], [8, 8], [8, 12], [24]])
def test_states_alone_are_hashed_by_their_spacing(intervals: list[int]) -> None:
    """Whatever their page size: by the greatest common divisor of several ones."""
    groups = [CacheGroupSpec(state(checkpoint_interval=interval)) for interval in intervals]
    manager = CacheManager(40, groups, 512, hashing=PageHashing(hash_seed="s"))
    manager.enable_events()
    batch = RunningBatch(manager, MultiGroupPageTable(1, 512, 512, [4] * len(groups)))
    prompt = list(range(60))
    assert batch.admit(0, prompt) == 0
    batch.take_moves()
    batch.release([0])
    index = PrefixIndex(gcd(64, *intervals), hash_seed="s")
    index.apply(0, encode_batch(EventBatch(1.0, manager.take_events())))
    assert index.find_tokens(prompt)[0] == manager.probe(EngineRequest("a", prompt)).num_hit_tokens > 0


def window(page_size: int, size: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(page_size, **SHAPE, sliding_window=size)


def state(**options: Any) -> MambaSpec:
    return MambaSpec(4, ((2, 2),), "float16", **options)


DRAFTED: dict[str, list[Any]] = {
    "one group": [full(4)],
    "two groups alike": [full(4), full(4)],
    "three page sizes": [full(8), full(4), full(16)],
    "a window": [full(4), window(4, 20)],
    "a window alone": [window(4, 9)],
    "a window of a token": [full(4), window(8, 1)],
    "windows alike around others": [window(4, 9), full(4), window(4, 30), window(4, 9)],
    "a window of large pages": [full(4), window(32, 40)],
    "large pages and a window": [full(64), window(4, 9)],
    "a state": [full(4), state(checkpoint_interval=16)],
    "a state first": [state(checkpoint_interval=64), full(4)],
    "a window and a state": [window(4, 9), state(checkpoint_interval=16), full(8)],
    "a state where requests resume": [full(4), state(checkpoint_interval="auto")],
    "a state that is never kept": [full(4), state()],
    "a reference window": [full(4), REFERENCE],
    "a reference window and a window": [REFERENCE, window(4, 9)],
    "a ring": [RING, full(4)],
    "a ring and a window": [full(4), RING, window(8, 20)],
    "a ring and a state": [full(4), RING, state(checkpoint_interval=16)],
    "rings around a window and a state": [RING, window(4, 9), state(checkpoint_interval=16), full(8), RING],
}


@pytest.mark.parametrize("name", DRAFTED)
def test_a_drafter_drops_the_same_pages(name: str) -> None:
    """With eagle and no lookahead, in pools that evict, for prompts that share beginnings."""
    specs, num_hits, num_drops = DRAFTED[name], 0, 0
    for seed in range(scale(24)):
        rng = Random(f"{name} {seed}")
        windows = rng.choice(("all", "ends")) if "a window and a state" not in name else "ends"
        hash_lookahead = rng.choice((0, 0, 0, 1))
        options: Any = {"use_eagle": True, "hash_lookahead": hash_lookahead, "windows": windows, "hash_seed": "s"}
        manager = CacheManager(*in_pools(specs, rng.choice((130, 200)) * len(specs), rng), 512, **grouped(**options))
        manager.enable_events()
        batch = RunningBatch(manager, MultiGroupPageTable(2, 512, 512, [spec.page_size for spec in specs]))
        index = PrefixIndex(4, use_eagle=True, hash_lookahead=hash_lookahead, hash_seed="s")
        plain = PrefixIndex(4, hash_lookahead=hash_lookahead, hash_seed="s")
        for _ in range(10):
            prompt = [rng.randrange(2)] + [1] * rng.choice((10, 31, 32, 63, 64, 100, 200))
            prompt = prompt[: len(prompt) // rng.choice((1, 2))] + [5] * rng.choice((0, 16, 50))
            if batch.admit(0, prompt) is None:
                continue
            while batch.num_computed_tokens[0] < len(prompt):
                batch.take_moves()
                batch.plan([0], min(rng.choice((16, 70, 800)), len(prompt) - int(batch.num_computed_tokens[0])))
            batch.take_moves()
            batch.release([0])
            payload = encode_batch(EventBatch(1.0, manager.take_events()))
            index.apply(0, payload)
            plain.apply(0, payload)
            for num in range(rng.randrange(1, 9), 210, 7):
                asked = rng.choice(([prompt[0]] + [1] * num, (prompt + [1] * 200)[:num]))
                expected = manager.probe(EngineRequest("p", asked)).num_hit_tokens
                assert index.find_tokens(asked).tolist() == [expected], (seed, len(prompt), num)
                num_hits += expected > 0
                num_drops += plain.find_tokens(asked).tolist() != [expected]
        index.check()
        assert index.num_skipped == 0
    assert (num_hits > 0 and num_drops > 0) or name == "a state that is never kept"


def test_a_router_drops_pages_too() -> None:
    manager = CacheManager(40, [CacheGroupSpec(full(4))], 64, hashing=PageHashing(use_eagle=True, hash_seed="s"))
    manager.enable_events()
    request = EngineRequest("a", list(range(20)))
    manager.allocate_slots(request, 20)
    index = PrefixIndex(4, use_eagle=True, hash_seed="s")
    index.apply(0, encode_batch(EventBatch(0.0, manager.take_events())))
    assert PrefixRouter(index, range(2)).choose("b", list(range(20))) == Route(0, 12)
    assert manager.probe(EngineRequest("b", list(range(20)))).num_hit_tokens == 12
    assert index.find([]).tolist() == index.find_tokens(range(4)).tolist() == [0]


@pytest.mark.parametrize("flag", ["no", 1, None, [True]])
def test_use_eagle_is_a_flag(flag: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"^use_eagle: got .*, allowed: True or False$"):
        PrefixIndex(4, use_eagle=flag)


def test_ends_of_prompts_that_fill_no_block_hit_as_in_vllm() -> None:
    """Blocks of four hashes in a hybrid: the shorter ones come first, and the longer ones say what a block is."""

    def told(hashes: list[int], size: int, group: int, kind: str) -> dict[str, Any]:
        fields = {"group_idx": group, "kv_cache_spec_kind": kind, "medium": "GPU"}
        return {"type": "BlockStored", "block_hashes": hashes, "block_size": size, **fields}

    def apply(*events: dict[str, Any]) -> None:
        index.apply(0, msgspec.msgpack.encode([0.0, events]))

    index, chain = PrefixIndex(16), list(range(1, 13))
    kinds = ("full_attention", "mamba")
    apply(*(told([2], 16, group, kind) for group, kind in enumerate(kinds)))
    apply(*(told([104, 108], 64, group, kind) for group, kind in enumerate(kinds)))
    assert index.find(chain).tolist() == [32]
    apply(*(told([4], 64, group, kind) for group, kind in enumerate(kinds)))
    assert index.find(chain).tolist() == index.find(chain[:4]).tolist() == [64]
    assert index.find(chain[:3]).tolist() == [32]
    apply(*(told([7], 16, group, kind) for group, kind in enumerate(kinds)))
    assert [index.find(chain[:num]).tolist() for num in (8, 7, 6)] == [[112], [112], [64]]
    apply(told([6], 16, 1, "mamba"))
    assert index.find(chain[:6]).tolist() == [64]  # the keys and values under 7 are not found
    apply({"type": "BlockRemoved", "block_hashes": [4], "group_idx": 0, "medium": "GPU"})
    assert index.find(chain).tolist() == [32]
    assert index.num_skipped == 0
    index.check()
