"""The index of a router beside the manager whose events it has: what it finds is what the manager would hit."""

from __future__ import annotations

from random import Random

import pytest

pytest.importorskip("msgspec")

from settings import scale

from pagepool import CacheGroupSpec, CacheManager, EngineRequest, FullAttentionSpec, SlidingWindowSpec
from pagepool.events import EventBatch, encode_batch
from pagepool.router import PrefixIndex

WINDOWS = {"a window": [40], "a window of a page": [16], "two windows": [100, 20], "no window": []}


@pytest.mark.parametrize("kept", ["ends", "all"])
@pytest.mark.parametrize("name", WINDOWS)
def test_found_is_what_the_manager_hits(name: str, kept: str) -> None:
    """In a pool so small that it evicts, with prompts that begin alike and end where others resume."""
    rng = Random(f"{name} {kept}")
    shape = {"num_kv_heads": 1, "head_size": 8, "dtype": "bfloat16", "use_mla": False}
    specs = [FullAttentionSpec(16, **shape), *(SlidingWindowSpec(16, **shape, sliding_window=n) for n in WINDOWS[name])]
    manager = CacheManager(90 * len(specs), [CacheGroupSpec(spec) for spec in specs], 2048, hash_seed="s", windows=kept)
    manager.enable_events()
    index = PrefixIndex(16, hash_seed="s")
    prompts = [[0]]
    num_hits = 0
    for step in range(scale(2000)):
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
    assert num_hits > scale(2000) // 4
    index.check()
