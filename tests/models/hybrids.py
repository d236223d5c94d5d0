"""Small models with attention, windows, chunks and states, and their requests, for tests with exact page ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from batch_model import package_pool_state
from managing import grouped, keep_token_ids
from twins import copies_of

from pagepool import (
    CacheGroupSpec,
    CacheManager,
    CachePages,
    ChunkedLocalAttentionSpec,
    EngineRequest,
    FullAttentionSpec,
    MambaSpec,
    MultiGroupPageTable,
    RunningBatch,
    SlidingWindowSpec,
)

PAGE_SIZE = 4
MAX_MODEL_LEN = 64
NUM_ROWS = 4
FULL = FullAttentionSpec(PAGE_SIZE, 1, 8, "float16", False)
WINDOW = SlidingWindowSpec(PAGE_SIZE, 1, 8, "float16", False, 5)
CHUNK = ChunkedLocalAttentionSpec(PAGE_SIZE, 1, 8, "float16", False, 8)
PROMPT = list(range(100, 100 + MAX_MODEL_LEN))
THREE_PAGES = PROMPT[: 3 * PAGE_SIZE]


def keep_every(checkpoint_interval: Any) -> MambaSpec:
    """Return the spec of a state that is kept where requests resume, and in prompts at multiples of so many tokens."""
    return MambaSpec(PAGE_SIZE, ((1, 1),), "float16", checkpoint_interval=checkpoint_interval)


STATE = keep_every(8)
DRAFTER: dict[str, Any] = {}  # options of managers for a drafter, which the fixture `drafter` sets


def make_manager(
    *specs: Any,
    default: tuple[Any, ...] = (FULL, STATE),
    num_pages: int = 40,
    max_model_len: int = MAX_MODEL_LEN,
    **options: Any,
) -> CacheManager:
    """Make a manager, by default of one attention group and one state group that is kept every 8 tokens of a prompt."""
    if options.get("hash_algo") == "sha256_cbor":
        pytest.importorskip("cbor2", reason="sha256_cbor is an extra: cbor2 is not installed")
    groups = [CacheGroupSpec(spec) for spec in specs or default]
    options = options if "use_eagle" in options else DRAFTER | options
    keeps = options.pop("keep_token_ids", False)
    manager = CacheManager(num_pages, groups, max_model_len, **grouped(**{"hash_seed": "hybrids"} | options))
    return keep_token_ids(manager) if keeps else manager


def make_told() -> CacheManager:
    """Return a manager with pending events."""
    pytest.importorskip("msgspec", reason="events are an extra")
    manager = make_manager(FULL, WINDOW, CHUNK, num_pages=64)
    manager.enable_events()
    manager.allocate_slots(EngineRequest("told", list(range(30)), cache_salt="salt"), 30)
    manager.page_pool.evict_pages([2])
    return manager


def make_batch(manager: CacheManager, **options: Any) -> RunningBatch:
    """Make a batch of four rows."""
    page_sizes = [group.kv_cache_spec.page_size for group in manager.kv_cache_groups]
    return RunningBatch(manager, MultiGroupPageTable(NUM_ROWS, MAX_MODEL_LEN, MAX_MODEL_LEN, page_sizes), **options)


def make_request(request_id: str, num_tokens: int = 40, **options: Any) -> EngineRequest:
    """Make a request that knows the first tokens of the prompt."""
    return EngineRequest(request_id, PROMPT[:num_tokens], **options)


def like(request: EngineRequest, request_id: str = "new", **options: Any) -> EngineRequest:
    """Return a request with the same tokens, as many of them computed."""
    new = EngineRequest(request_id, list(request.all_token_ids), **options)
    new.num_computed_tokens = request.num_computed_tokens
    return new


def allocate(manager: CacheManager, request: Any, **options: Any) -> CachePages | None:
    """Look a request up, and allocate slots for all tokens behind its hits. Returns the new pages; None if too few are free."""
    hits, num_hit_tokens = manager.get_computed_pages(request)
    return manager.allocate_slots(request, request.num_tokens - num_hit_tokens, num_hit_tokens, hits, **options)


def plan(manager: CacheManager, request: EngineRequest, num_new_tokens: int, **options: Any) -> tuple[list[int], ...] | None:
    """Allocate slots for the next tokens, at most for those known, after the hits if the request holds nothing, and count them
    as computed. Returns the new pages; None if too few are free.
    """
    hits, num_hit_tokens = None, 0
    if not any(manager.get_page_ids(request.request_id)):
        hits, num_hit_tokens = manager.get_computed_pages(request)
    num_new_tokens = min(num_new_tokens, request.num_tokens - request.num_computed_tokens - num_hit_tokens)
    pages = manager.allocate_slots(request, num_new_tokens, num_hit_tokens, hits, **options)
    if pages is None:
        return None
    request.num_computed_tokens += num_hit_tokens + num_new_tokens
    return pages.get_page_ids()


def run(manager: CacheManager, request: EngineRequest, num_new_tokens: int, **options: Any) -> tuple[list[int], ...] | None:
    """Plan the next tokens of a request, and take the moves if states are kept, so that the step writes them."""
    page_ids = plan(manager, request, num_new_tokens, **options)
    if page_ids is not None and manager.checkpoint_interval is not None:
        manager.take_moves()
    return page_ids


def start(manager: CacheManager, request_id: str, token_ids: Sequence[int] = THREE_PAGES) -> EngineRequest:
    """Run a request with all its tokens, and leave it running."""
    request = EngineRequest(request_id, list(token_ids))
    assert run(manager, request, len(token_ids)) is not None
    return request


def take(side: CacheManager | RunningBatch) -> list[tuple[int, int, int]]:
    """Take the copies that are due: source, destination and group of each."""
    return copies_of(side.take_moves().copies)


def count_hits(manager: CacheManager, token_ids: list[int] | None = None, **options: Any) -> int:
    """Return the tokens that another request with the prompt, or with `token_ids`, would hit."""
    return manager.probe(EngineRequest("count_hits", token_ids or PROMPT, **options)).num_hit_tokens


def manager_state(manager: CacheManager) -> tuple[Any, ...]:
    """Return the observable state of requests and their pool after checking it."""
    manager.check()
    requests = {request_id: manager.get_page_ids(request_id) for request_id in manager.registry.held}
    return package_pool_state(manager.page_pool, with_hashes=True), manager.stats().queries, requests


def batch_state(batch: RunningBatch) -> tuple[Any, ...]:
    """Return the observable state of rows, their tables and their pool after checking it."""
    batch.check()
    counts = batch.is_admitted, batch.num_tokens, batch.num_computed_tokens, batch.num_cached_tokens
    page_ids = [batch.get_page_ids(row) for row in range(NUM_ROWS)]
    return [count.tolist() for count in counts], page_ids, manager_state(batch._manager)


def fill(manager: CacheManager, num_tokens: int, step: int = 8, request_id: str = "first") -> EngineRequest:
    """Run a request in chunks of `step` tokens, and leave it running."""
    request = make_request(request_id)
    while request.num_computed_tokens < num_tokens:
        assert run(manager, request, min(step, num_tokens - request.num_computed_tokens)) is not None
    return request
