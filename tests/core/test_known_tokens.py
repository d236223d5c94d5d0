"""Known tokens that an engine takes back, replaces or extends: what hits has been computed, or the change is refused."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
from hybrids import make_manager, manager_state
from refusing import refused

from pagepool import CacheManager, EngineRequest, FullAttentionSpec, MambaSpec, SlidingWindowSpec
from pagepool.errors import PageHashError


class OwnRequest:
    """An engine's own request, whose tokens are an array that is made anew for each read."""

    def __init__(self, request_id: str, token_ids: list[int]) -> None:
        self.request_id, self.tokens, self.num_computed_tokens = request_id, list(token_ids), 0
        self.sampling_params, self.status = None, 1

    @property
    def all_token_ids(self) -> Any:
        return np.array(self.tokens, dtype=np.int32)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


def set_tokens(request: Any, token_ids: list[int]) -> None:
    """Change the known tokens in place."""
    if isinstance(request, OwnRequest):
        request.tokens = list(token_ids)
    else:
        request.all_token_ids[:] = token_ids


def full(page_size: int) -> Any:
    return FullAttentionSpec(page_size, 1, 8, "float16", False)


def window(page_size: int) -> Any:
    return SlidingWindowSpec(page_size, 1, 8, "float16", False, 2 * page_size + 1)


def state(page_size: int) -> Any:
    return MambaSpec(page_size, ((1, 1),), "float16", checkpoint_interval=2 * page_size)


LAYOUTS: dict[str, Callable[[int], tuple[Any, ...]]] = {
    "full": lambda size: (full(size),),
    "full and window": lambda size: (full(size), window(size)),
    "full and state": lambda size: (full(size), state(size)),
}


def hits_of(manager: CacheManager, token_ids: list[int]) -> int:
    return manager.probe(EngineRequest("probe", [*token_ids, 999])).num_hit_tokens


def find_next(manager: CacheManager, request: Any) -> int:
    """Return how many tokens the next chunk has: up to a multiple of the interval of checkpoints, if any are kept."""
    interval = manager.checkpoint_interval or manager.max_model_len
    return min(interval - request.num_computed_tokens % interval, request.num_tokens - request.num_computed_tokens)


def finish(manager: CacheManager, request: Any) -> None:
    """Compute what is known in chunks, and look the request up before the first."""
    while request.num_computed_tokens < request.num_tokens:
        hits, num_hit_tokens = None, 0
        if not any(manager.get_page_ids(request.request_id)):
            hits, num_hit_tokens = manager.get_computed_pages(request)
        request.num_computed_tokens += num_hit_tokens
        num_new = find_next(manager, request)
        request.num_computed_tokens -= num_hit_tokens
        assert manager.allocate_slots(request, num_new, num_hit_tokens, hits) is not None
        request.num_computed_tokens += num_hit_tokens + num_new
        manager.take_moves()


@pytest.mark.parametrize("caches", ["scheduled", "computed"])
@pytest.mark.parametrize("seed", range(30))
@pytest.mark.usefixtures("drafter")
def test_what_hits_was_computed_whatever_changes(seed: int, caches: str) -> None:
    """Chunks, refusals, preemptions, look-ups and changes at random: of tokens without slots, of all once a request was freed,
    and of computed ones that are computed again, which may be refused.
    """
    rng = Random(seed)
    page_size = rng.choice((1, 2, 3, 4))
    layout = rng.choice((*LAYOUTS, "full"))
    options: dict[str, Any] = {"keep_token_ids": rng.random() < 0.3, "caches": caches}
    manager = make_manager(*LAYOUTS[layout](page_size), num_pages=150, **options)
    computed: set[tuple[int, ...]] = set()  # all prefixes of which each token was computed
    for number in range(12):
        tokens = [rng.randrange(3) for _ in range(rng.randint(1, 12))]
        request = rng.choice((EngineRequest, OwnRequest))(f"{number % 3}", tokens)
        for _ in range(12):
            num_computed = request.num_computed_tokens
            if rng.random() < 0.6:
                tokens = tokens[: rng.randint(num_computed, len(tokens))] + [rng.randrange(3) for _ in range(rng.randint(0, 3))]
                set_tokens(request, tokens)
            num_free = manager.page_pool.get_num_free_pages()
            others = manager.page_pool.get_new_page_ids(num_free if rng.random() < 0.4 else 0)
            if num_computed < len(tokens):
                hits, num_hits = None, 0
                if num_computed == 0 and rng.random() < 0.7:
                    hits, num_hits = manager.get_computed_pages(request)
                    assert num_hits == 0 or tuple(tokens[:num_hits]) in computed
                request.num_computed_tokens += num_hits
                num_new = find_next(manager, request)
                request.num_computed_tokens -= num_hits
                is_delayed = rng.random() < 0.2
                added = manager.allocate_slots(request, num_new, num_hits, hits, delay_cache_pages=is_delayed)
                if added is not None and rng.random() < 0.2:
                    manager.free(request, num_computed_tokens=num_hits + num_computed)  # it did not run
                    request.num_computed_tokens = 0
                elif added is not None:
                    request.num_computed_tokens += num_hits + num_new
                    computed |= {tuple(tokens[:n]) for n in range(request.num_computed_tokens + 1)}
                    if is_delayed:
                        manager.cache_pages(request, request.num_computed_tokens)
                manager.take_moves()
            manager.page_pool.free_page_ids(others)
            if rng.random() < 0.2:
                manager.free(request)
                request.num_computed_tokens = 0
            prompt = [rng.randrange(3) for _ in range(rng.randint(1, 14))]
            for probed in (prompt, tokens):
                num_hits = hits_of(manager, probed)
                assert num_hits == 0 or tuple(probed[:num_hits]) in computed
        manager.free(request)
        manager.check()


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_cached_token_that_changes_is_noticed(page_size: int, is_late: bool) -> None:
    """Where it is to be computed again. Once the request is freed with its computed tokens, it may go on with other ones."""
    manager = make_manager(full(page_size))
    request = EngineRequest("a", list(range(100, 108)))
    manager.allocate_slots(request, 4)
    request.num_computed_tokens = 4
    manager.allocate_slots(request, 4, delay_cache_pages=is_late)
    if is_late:
        manager.cache_pages(request, 8)
    request.all_token_ids[7] = 1
    with refused(lambda: manager_state(manager), PageHashError, "has a hash already: got other tokens .* allowed: the same"):
        manager.allocate_slots(request, 4)
    with refused(lambda: manager_state(manager), PageHashError, "has a hash already"):
        manager.cache_pages(request, 8)
    manager.free(request, num_computed_tokens=4)
    request.num_computed_tokens = 0
    finish(manager, request)
    assert hits_of(manager, list(range(100, 108))) == 8 - page_size
    assert hits_of(manager, request.all_token_ids) == 8


@pytest.mark.parametrize("hash_algo", ["siphash128", "sha256"])
@pytest.mark.parametrize(("num_known", "num_slots"), [(24, 2), (24, 5), (10, 2), (9, 1)])
def test_a_page_is_not_overwritten_in_part_while_it_is_cached(num_known: int, num_slots: int, hash_algo: str) -> None:
    """Nor is one of which tokens were taken back. Pages wholly of the same tokens may be computed again."""
    manager = make_manager(full(4), full(2), hash_algo=hash_algo)
    request = EngineRequest("a", list(range(100, 124)))
    manager.allocate_slots(request, 24)
    request.num_computed_tokens = 7
    assert manager.allocate_slots(request, 1) is not None
    request.num_computed_tokens = 8
    assert manager.allocate_slots(request, 1) is not None, "a part of a page, with the same tokens"
    if num_known < 24:
        del request.all_token_ids[num_known:]
    else:
        request.all_token_ids[8 + num_slots - 1] = 1
    with refused(lambda: manager_state(manager), PageHashError, "has a hash already: got other tokens"):
        manager.allocate_slots(request, num_slots)
    manager.free(request, num_computed_tokens=8)
    request.num_computed_tokens = 0
    finish(manager, request)
    assert hits_of(manager, list(range(100, 124))) == (12 if num_slots == 5 else 8)
    assert hits_of(manager, request.all_token_ids) == num_known // 4 * 4


def test_a_request_that_changes_while_it_waits_is_looked_up_again() -> None:
    """Or its hits are refused, if it was refused in one group of full attention, and nothing changed since."""
    manager = make_manager(full(4), num_pages=12)
    first = EngineRequest("first", list(range(100, 108)))
    finish(manager, first)
    manager.free(first)
    others = manager.page_pool.get_new_page_ids(8)
    request = EngineRequest("a", list(range(100, 124)))
    for _ in range(2):
        hits, num_hit_tokens = manager.get_computed_pages(request)
        assert (manager.allocate_slots(request, 24 - num_hit_tokens, num_hit_tokens, hits), num_hit_tokens) == (None, 8)
    request.all_token_ids[6] = 1
    manager.page_pool.free_page_ids(others)
    hits, num_hit_tokens = manager.get_computed_pages(request)
    if num_hit_tokens > 4:
        with refused(lambda: manager_state(manager), PageHashError, "a hit that does not hold this prefix"):
            manager.allocate_slots(request, 24 - num_hit_tokens, num_hit_tokens, hits)
        hits, num_hit_tokens = manager.get_computed_pages(request)
    assert num_hit_tokens == 4
    finish(manager, request)
    assert hits_of(manager, request.all_token_ids) == 24
    assert hits_of(manager, list(range(100, 124))) <= 8


@pytest.mark.parametrize("call", ["allocate", "refused", "cache_pages", "commit_external"])
@pytest.mark.parametrize(
    "specs",
    [(full(4),), (window(4),), (full(4), state(2))],
    ids=["full", "window", "states"],
)
def test_entries_are_forgotten_after_calls_for_a_request_that_was_set_back(specs: tuple[Any, ...], call: str) -> None:
    """The calls lower the number of pages that need no entry, but later pages still have one."""
    manager = make_manager(*specs, num_pages=30, windows="all")
    request = EngineRequest("a", list(range(40)))
    for _ in range(5):
        assert manager.allocate_slots(request, 4) is not None
        manager.take_moves()
        request.num_computed_tokens += 4
    request.num_computed_tokens = 4
    if call == "allocate":
        assert manager.allocate_slots(request, 2) is not None
        manager.take_moves()
    elif call == "refused":
        assert manager.allocate_slots(request, 30, num_reserved_pages=29) is None
    elif call == "cache_pages":
        manager.cache_pages(request, 6)
    else:
        manager.commit_external(request, 2)
    assert manager.stats().num_cached_pages >= 4
    manager.free(request, num_computed_tokens=0)
    assert manager.stats().num_cached_pages == 0
