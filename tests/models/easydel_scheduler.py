"""EasyDeL's scheduler under random requests, without a model: tokens are random, and the schedules are recorded."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from easydel.inference.esurge.config import CacheConfig, Config, SchedulerConfig
from easydel.inference.esurge.core.interface import CacheGroupsConfig, CacheGroupSpec
from easydel.inference.esurge.outputs import ModelRunnerOutput
from easydel.inference.esurge.request import EngineRequest
from easydel.inference.esurge.scheduler import AsyncScheduler, Scheduler
from easydel.inference.sampling_params import SamplingParams

EOS = 1


@dataclass
class Plan:
    """The load and its limits. Lengths are in tokens."""

    specs: list[Any]
    num_pages: int
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 96
    max_model_len: int = 256
    num_requests: int = 60
    num_arrivals: int = 2  # a step
    beginnings: tuple[int, ...] = (0, 24, 64)
    max_prompt: int = 60
    max_new_tokens: int = 40
    num_shards: int = 1
    is_async: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def make_scheduler(plan: Plan) -> Scheduler:
    scheduling = SchedulerConfig(
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        async_scheduling=plan.is_async,
        **plan.options,
    )
    page_size = plan.specs[0].page_size
    config = Config(scheduling, CacheConfig(num_pages=plan.num_pages, page_size=page_size, enable_prefix_caching=True))
    groups = [CacheGroupSpec(kv_cache_spec=spec, layer_names=None) for spec in plan.specs]
    scheduler = (AsyncScheduler if plan.is_async else Scheduler)(config, CacheGroupsConfig(plan.num_pages, groups))
    scheduler.data_parallel_size = plan.num_shards
    return scheduler


def make_requests(plan: Plan, seed: int) -> Iterator[EngineRequest]:
    rng = random.Random(seed)
    beginning = rng.choices(range(2, 1000), k=max(plan.beginnings))
    for i in range(plan.num_requests):
        prompt = beginning[: rng.choice(plan.beginnings)] + rng.choices(range(2, 1000), k=rng.randint(1, plan.max_prompt))
        params = SamplingParams(max_tokens=rng.randint(1, plan.max_new_tokens))
        yield EngineRequest(f"{seed}-{i}", prompt_token_ids=prompt, sampling_params=params, eos_token_id=EOS)


def sample(scheduler: Scheduler, request_id: str) -> list[int]:
    """Return a random token once all tokens of the request are computed."""
    request = scheduler.requests[request_id]
    if request.num_computed_tokens < request.num_tokens:
        return []
    return [2 + zlib.crc32(f"{request_id} {request.num_tokens}".encode()) % 998]


def run_model(scheduler: Scheduler, scheduled: Any, rows: dict[str, int]) -> ModelRunnerOutput:
    """Each request keeps its first row, in the shard of its pages if there are several."""
    ids = list(scheduled.num_scheduled_tokens)
    for request_id in [request_id for request_id in rows if request_id not in scheduler.requests]:
        del rows[request_id]
    for request_id in ids:
        rows.setdefault(request_id, find_row(scheduler, request_id, set(rows.values())))
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
        req_id_to_row_index={request_id: rows[request_id] for request_id in ids},
        sampled_token_ids=[sample(scheduler, request_id) for request_id in ids],
        spec_token_ids=None,
        logprobs=None,
        prompt_logprobs_dict={},
    )


def find_row(scheduler: Scheduler, request_id: str, taken: set[int]) -> int:
    num_shards, num_rows = scheduler.data_parallel_size, scheduler.max_num_running_reqs
    page_ids = scheduler.kv_cache_manager.get_page_ids(request_id)[0]
    shard = page_ids[0] * num_shards // scheduler.cache_config.num_pages if num_shards > 1 and page_ids else 0
    start = shard * num_rows // num_shards
    return next(row for row in [*range(start, num_rows), *range(start), *range(num_rows, 2 * num_rows)] if row not in taken)


class Step(NamedTuple):
    """The parts of a step that depend on the allocator, by request: pages and hits of new requests, new pages of others."""

    num_tokens: dict[str, int]
    new: dict[str, tuple[Any, int]]
    cached: dict[str, tuple[Any, int]]
    preempted: list[str]
    num_common_prefix_pages: list[int]
    num_free_pages: int


def describe(scheduled: Any) -> Step:
    cached = scheduled.scheduled_cached_reqs
    return Step(
        scheduled.num_scheduled_tokens,
        {request.req_id: (request.page_ids, request.num_computed_tokens) for request in scheduled.scheduled_new_reqs},
        dict(zip(cached.req_ids, zip(cached.new_page_ids, cached.num_computed_tokens, strict=True), strict=True)),
        sorted(scheduled.preempted_req_ids),
        scheduled.num_common_prefix_pages,
        scheduled.free_pages,
    )


def serve(scheduler: Scheduler, plan: Plan, seed: int) -> Iterator[Step]:
    """Yield the schedule of each step until all requests have ended."""
    requests = make_requests(plan, seed)
    rows: dict[str, int] = {}
    is_over = False
    while not is_over or scheduler.get_num_unfinished_requests():
        arrived = [request for request, _ in zip(requests, range(plan.num_arrivals), strict=False)]
        is_over = len(arrived) < plan.num_arrivals
        for request in arrived:
            scheduler.add_request(request)
        scheduled = scheduler.schedule()
        yield describe(scheduled)
        scheduler.update_from_output(scheduled, run_model(scheduler, scheduled, rows))
