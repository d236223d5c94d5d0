"""Pages whose keys look ahead: which of them prompts share, and what follows where tokens behind a page are not known yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hybrids import CHUNK, FULL, PAGE_SIZE, PROMPT, count_hits, fill, make_batch, make_manager, run
from hypothesis import given, settings
from settings import HASHING, scale

from pagepool import CacheManager, EngineRequest, FullAttentionSpec, SlidingWindowSpec
from pagepool.errors import ArgumentError

NARROW = SlidingWindowSpec(PAGE_SIZE, 1, 8, "float16", False, 1)
NEW = 999  # a token of no prompt
LOOKAHEADS = [0, 1, 2, 3]


def looks(hash_lookahead: int) -> dict[str, Any]:
    """Return the options of a manager."""
    return {"use_eagle": hash_lookahead > 0, "hash_lookahead": hash_lookahead}


def hits_of_request(first: list[int], second: list[int], size: int, **options: Any) -> int:
    """Return what a request hits after another one has ended."""
    manager = make_manager(FullAttentionSpec(size, 1, 8, "float16", False), num_pages=128, **options)
    request = EngineRequest("first", first)
    run(manager, request, len(first))
    manager.free(request)
    manager.check()
    return manager.get_computed_pages(EngineRequest("second", second))[1]


def hits_of_row(first: list[int], second: list[int], size: int, **options: Any) -> int:
    """Return what a row hits beside another one."""
    batch = make_batch(make_manager(FullAttentionSpec(size, 1, 8, "float16", False), num_pages=128, **options))
    batch.admit(0, first)
    num_hits = batch.admit(1, second)
    assert num_hits is not None
    batch.check()
    return num_hits


FINDERS: dict[str, Callable[..., int]] = {"a request": hits_of_request, "a row": hits_of_row}


@pytest.mark.parametrize("find_hits", FINDERS.values(), ids=FINDERS)
@settings(max_examples=scale(400), deadline=None)
@given(
    prompt=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    num_shared=st.integers(0, 40),
    rest=st.lists(st.integers(0, 2), min_size=0, max_size=8),
    size=st.integers(1, 16),
    hash_lookahead=st.sampled_from(LOOKAHEADS),
    hash_algo=st.sampled_from(["siphash128", "sha256"]),
)
def test_prompts_share_pages_whose_lookahead_they_share(
    find_hits: Callable[..., int],
    prompt: list[int],
    num_shared: int,
    rest: list[int],
    size: int,
    hash_lookahead: int,
    hash_algo: str,
) -> None:
    """Of two prompts that part after n tokens, floor((n - L) / P) pages, without the token that a request must compute."""
    num_shared = min(num_shared, len(prompt))
    second = [*prompt[:num_shared], NEW, *rest]
    num_hits = find_hits(prompt, second, size, hash_algo=hash_algo, **looks(hash_lookahead))
    assert num_hits == max(0, num_shared - hash_lookahead) // size * size


@pytest.mark.parametrize("hashing", [name for name in HASHING if name != "weak"])
def test_managers_with_other_lookaheads_share_nothing(hashing: str) -> None:
    """Not through a pool that both use, and their keys differ where the pages are the same."""
    keys: list[set[Any]] = []
    for hash_lookahead in LOOKAHEADS:
        manager = make_manager(FULL, **looks(hash_lookahead), **HASHING[hashing])
        fill(manager, 20)
        for other in LOOKAHEADS:
            pool = manager.page_pool
            if other == hash_lookahead:
                assert count_hits(make_manager(FULL, page_pool=pool, **looks(other), **HASHING[hashing])) == 20
            else:
                with pytest.raises(ArgumentError, match=r"page_pool: ((hash_lookahead|hash_seed): got|got one that keeps)"):
                    make_manager(FULL, page_pool=pool, **looks(other), **HASHING[hashing])
        keys.append({key.page_hash.hash_value for key in manager.page_pool.cached_page_hash_to_page})
    assert len(set.union(*keys)) == sum(map(len, keys))


@pytest.mark.parametrize("hash_algo", ["siphash128", "sha256", "sha256_cbor"])
def test_the_number_of_tokens_is_part_of_the_key(hash_algo: str) -> None:
    """Where as many tokens are hashed, of pages of other sizes."""
    keys = set()
    for hash_lookahead in LOOKAHEADS:
        manager = make_manager(
            FullAttentionSpec(8 - hash_lookahead, 1, 8, "float16", False), hash_algo=hash_algo, **looks(hash_lookahead)
        )
        run(manager, EngineRequest("a", PROMPT[:8]), 8)
        [key] = manager.page_pool.cached_page_hash_to_page
        keys.add(key.page_hash.hash_value)
    assert len(keys) == len(LOOKAHEADS)


def test_a_lookahead_is_for_drafters() -> None:
    with pytest.raises(ArgumentError, match="lookahead: got 1, allowed without use_eagle: 0"):
        make_manager(FULL, hash_lookahead=1)
    assert make_manager(CHUNK, use_eagle=True, hash_lookahead=64).enable_caching  # of chunks eagle alone cannot cache any


# What is not known yet.


def decode_row(manager: CacheManager, start: int, stop: int) -> list[int]:
    """Decode tokens of the prompt, and list what another would hit after each step."""
    batch, hits = make_batch(manager), []
    batch.admit(0, PROMPT[:start])
    for token in PROMPT[start:stop]:
        assert batch.step([0], [token]).num_grown == 1
        hits.append(count_hits(manager))
    batch.check()
    return hits


def decode_request(manager: CacheManager, start: int, stop: int) -> list[int]:
    request, hits = EngineRequest("a", PROMPT[:start]), []
    run(manager, request, start)
    for token in PROMPT[start:stop]:
        request.append_output_token_ids(token)
        assert run(manager, request, 1) is not None
        hits.append(count_hits(manager))
    manager.check()
    return hits


@pytest.mark.parametrize("specs", [(FULL,), (NARROW,), (FULL, CHUNK)], ids=["full", "window", "chunk"])
@pytest.mark.parametrize("decode", [decode_row, decode_request])
@pytest.mark.parametrize("hash_lookahead", LOOKAHEADS)
def test_a_page_is_cached_by_the_step_that_knows_its_lookahead(
    specs: tuple[Any, ...], decode: Callable[..., list[int]], hash_lookahead: int
) -> None:
    """Also where a window leaves it in the same step."""
    manager = make_manager(*specs, **looks(hash_lookahead))
    assert decode(manager, 2, 22) == [max(0, num - hash_lookahead) // PAGE_SIZE * PAGE_SIZE for num in range(3, 23)]


@pytest.mark.parametrize("hash_lookahead", LOOKAHEADS)
def test_a_row_that_ends_caches_what_its_last_tokens_allow(hash_lookahead: int) -> None:
    batch = make_batch(make_manager(FULL, **looks(hash_lookahead)))
    batch.admit(0, PROMPT[:8])
    batch.append([0] * 2, PROMPT[8:10])
    batch.release([0])
    assert batch.probe(0, PROMPT) == (8 if hash_lookahead <= 2 else 4)
