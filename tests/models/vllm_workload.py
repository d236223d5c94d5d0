"""Random work for vLLM's `KVCacheManager`: a small scheduler that takes its decisions by a seed.

`Requests` does what vLLM's scheduler does with a request (admit, schedule, settle, preempt, finish) and keeps its books;
`Workload` decides. Prompts come from a few families over a tiny vocabulary, and pools are tiny, so that hits, duplicates,
evictions and shortage are all frequent.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import vllm
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils import hashing
from vllm.v1 import kv_cache_interface as specs
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import Request, RequestStatus
from vllm_settings import Group, Setting
from vllm_state import Reader

VERSION = tuple(map(int, vllm.__version__.split(".")[:2]))
SINCE = {"num_hash_lookahead_tokens": (0, 33), "skip_zeroing_group_ids": (0, 32)}
"""The versions of vLLM from which on it has an option."""

MAX_WAITING, MAX_RUNNING, MAX_IN_FLIGHT = 4, 6, 3
NUM_FAMILIES = 3
VOCABULARY = range(3)
PLACEHOLDER = -1
NUM_ENCODER_TOKENS = 6
ADAPTERS = (LoRARequest("tuned", 1, "/adapters/tuned"), LoRARequest("other", 2, "/adapters/other"))
SAMPLING = SamplingParams(max_tokens=1000)
UNREAD = SamplingParams(max_tokens=1000, skip_reading_prefix_cache=True)
REPORTED = SamplingParams(max_tokens=1000, extra_args={"kv_cache_report_mode": "full"})


class Collector:
    """Notes what a pool reports of its blocks."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def on_block_allocated(self, block: Any) -> None:
        self.notes.append(f"allocated {block.block_id}")

    def on_block_accessed(self, block: Any) -> None:
        self.notes.append(f"accessed {block.block_id}")

    def on_block_evicted(self, block: Any) -> None:
        self.notes.append(f"evicted {block.block_id}")

    def reset(self) -> None:
        self.notes.append("reset")


def group_spec(group: Group, setting: Setting, dtype: Any) -> Any:
    """Build vLLM's spec of a group."""
    size = group.block_size
    if group.kind == "mamba":
        mode = "align" if setting.enable_caching else "none"
        return specs.MambaSpec(
            block_size=size, shapes=((1,),), dtypes=(dtype,), mamba_cache_mode=mode, num_speculative_blocks=setting.num_drafts
        )
    common = {"block_size": size, "num_kv_heads": 1, "head_size": 1, "dtype": dtype}
    if group.kind == "sliding":
        extra = max(0, setting.prefill_lookahead - 1)
        return specs.SlidingWindowSpec(**common, sliding_window=group.span, extra_retained_tokens=extra)
    if group.kind == "chunked":
        return specs.ChunkedLocalAttentionSpec(**common, attention_chunk_size=group.span)
    if group.kind == "reference":
        return specs.RSWASpec(**common, rswa_window=group.span)
    classes = {"full": specs.FullAttentionSpec, "ring": specs.CircularBufferSpec, "cross": specs.CrossAttentionSpec}
    return classes[group.kind](**common)


def cache_config(setting: Setting, num_blocks: int) -> Any:
    """Build vLLM's configuration of the cache."""
    groups = []
    for number, group in enumerate(setting.groups):
        dtype = torch.float16 if setting.mixed_precision and not number else torch.float32
        groups.append(specs.KVCacheGroupSpec([f"layer{number}"], group_spec(group, setting, dtype), is_eagle_group=group.eagle))
    interval = None if setting.retention is None else setting.retention * setting.scheduler_block_size
    return specs.KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups, prefix_cache_retention_interval=interval
    )


def make_manager(setting: Setting, num_blocks: int, has_events: bool, collector: Collector | None) -> Any:
    """Build vLLM's manager of a setting."""
    return KVCacheManager(
        cache_config(setting, num_blocks),
        max_model_len=setting.max_model_len,
        scheduler_block_size=setting.scheduler_block_size,
        hash_block_size=setting.hash_block_size,
        max_in_flight_tokens=setting.max_model_len // 2,
        enable_caching=setting.enable_caching,
        use_eagle=setting.use_eagle,
        num_prefill_lookahead=setting.prefill_lookahead,
        log_stats=True,
        enable_kv_cache_events=has_events,
        dcp_world_size=setting.context_parallel,
        metrics_collector=collector,
        watermark=setting.watermark,
        **accepted({"num_hash_lookahead_tokens": setting.hash_lookahead}),
    )


def accepted(options: dict[str, Any]) -> dict[str, Any]:
    """Return those of the options that this version of vLLM has."""
    return {name: option for name, option in options.items() if SINCE.get(name, ()) <= VERSION}


def kind_of(error: Exception) -> str:
    """Return the built-in kind of an error: pagepool's errors say more, and have kinds of their own."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")


class Calls:
    """Makes calls, and shows each with its result and the state after it to an observer.

    The observer gets a name, a function that describes the arguments as they were, the result or the error, and the state.
    """

    def __init__(self, manager: Any, observe: Callable[..., None]) -> None:
        self.reader = Reader(manager)
        self.requests: dict[str, Request] = {}  # whatever has not finished
        self.extras: dict[str, Any] = {}
        self.num_calls = 0
        self._observe = observe

    def __call__(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Return the function's result, or None where it raises."""
        name = getattr(function, "__name__", "call")
        described = (
            [self.reader.plain(arg) for arg in args],
            {key: self.reader.plain(option) for key, option in options.items()},
        )
        self.num_calls += 1
        result = None
        try:
            result = function(*args, **options)
            outcome = self.reader.plain(result)
        except Exception as error:
            outcome = kind_of(error)
        self._observe(name, described, outcome, self.reader.read(self.requests.values(), self.extras))
        return result


@dataclass
class Step:
    """What was scheduled of a request and is not settled yet."""

    num_tokens: int
    num_drafts: int
    samples: bool
    stale: bool = False  # the request was preempted since


class Requests:
    """Requests on their way through a manager. One that does not fit stays as it was."""

    def __init__(self, setting: Setting, manager: Any, calls: Calls) -> None:
        self.setting = setting
        self.manager = manager
        self.calls = calls
        self.waiting: list[Request] = []
        self.loading: list[Request] = []
        self.running: list[Request] = []
        self.steps: dict[str, deque[Step]] = {}
        self.deferred: deque[list[Any]] = deque()
        self._numbers = itertools.count()
        hash_function = hashing.get_hash_fn_by_name(setting.hash_algo)
        kv_cache_utils.init_none_hash(hash_function)
        options = accepted({"num_hash_lookahead_tokens": setting.hash_lookahead})
        hasher = kv_cache_utils.get_request_block_hasher(setting.hash_block_size, hash_function, **options)
        self._hasher = hasher if setting.enable_caching else None

    def submit(self, token_ids: list[int], **attributes: Any) -> Request:
        """Queue a new request."""
        request_id = f"r{next(self._numbers)}"

        def new_request() -> Request:
            options = {"sampling_params": SAMPLING, "pooling_params": None, "arrival_time": 0.0} | attributes
            self.calls.requests[request_id] = Request(request_id, token_ids, block_hasher=self._hasher, **options)
            return self.calls.requests[request_id]

        request = self.calls(new_request)
        self.steps[request_id] = deque()
        self.waiting.append(request)
        return request

    def start(self, request: Request, num_new_tokens: int, num_computed_tokens: int, loads: bool) -> None:
        """Note that a waiting request has got its slots."""
        self.waiting.remove(request)
        request.num_computed_tokens = num_computed_tokens
        if loads:
            request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
            self.loading.append(request)
        else:
            request.status = RequestStatus.RUNNING
            self.running.append(request)
            self.schedule(request, num_new_tokens)

    def schedule(self, request: Request, num_new_tokens: int) -> None:
        """Note that tokens are being computed."""
        num_known = request.num_tokens + request.num_output_placeholders
        num_drafts = max(0, request.num_computed_tokens + num_new_tokens - num_known)
        request.num_computed_tokens += num_new_tokens
        request.num_in_flight_tokens += num_new_tokens
        samples = request.num_computed_tokens >= num_known
        if samples and self.setting.asynchronous:
            request.num_output_placeholders += 1 + num_drafts
            request.spec_token_ids = [PLACEHOLDER] * self.setting.num_drafts
        else:
            request.spec_token_ids = []
        self.steps[request.request_id].append(Step(num_new_tokens, num_drafts, samples))

    def settle(self, request: Request, num_accepted: int, token_ids: list[int]) -> None:
        """Take the oldest step's output: the accepted drafts and a token more, as far as there is room."""
        step = self.steps[request.request_id].popleft()
        request.num_in_flight_tokens -= step.num_tokens
        if not step.samples or step.stale:
            return
        num_rejected = step.num_drafts - num_accepted
        request.num_computed_tokens -= num_rejected
        if self.setting.asynchronous:
            request.num_output_placeholders -= num_rejected + num_accepted + 1
        self.calls(request.append_output_token_ids, token_ids)
        if self.setting.asynchronous or self.setting.num_drafts:
            num_settled = request.num_computed_tokens - request.num_in_flight_tokens
            self.calls(self.manager.cache_blocks, request, num_settled)

    def preempt(self, request: Request, defers: bool) -> None:
        """Give the blocks back; the request waits to be computed again."""
        self._release(request, defers)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = request.num_output_placeholders = 0
        request.spec_token_ids = []
        request.num_preemptions += 1
        for step in self.steps[request.request_id]:
            step.stale = True
        self.waiting.append(request)

    def finish(self, request: Request, defers: bool) -> None:
        """End a request, running or not."""
        self._release(request, defers)
        del self.calls.requests[request.request_id], self.steps[request.request_id]

    def _release(self, request: Request, defers: bool) -> None:
        for requests in (self.waiting, self.loading, self.running):
            if request in requests:
                requests.remove(request)
        if not defers:
            self.calls(self.manager.free, request)
        elif blocks := self.calls(self.manager.pop_blocks_for_free, request):
            self.deferred.append(blocks)

    def free_deferred(self) -> None:
        """Give the oldest blocks back that no request has any more."""
        if self.deferred:
            blocks = self.deferred.popleft()
            self.calls.extras["deferred"] = list(self.deferred)

            def free_deferred_blocks() -> None:
                self.manager.block_pool.free_blocks(reversed(blocks))

            self.calls(free_deferred_blocks)


class Prompts:
    """Makes requests that have much in common."""

    def __init__(self, setting: Setting, rng: Random) -> None:
        self.setting = setting
        self.rng = rng
        self.max_tokens = setting.max_model_len - 1 - setting.num_drafts
        self.families = [self.tokens(self.max_tokens) for _ in range(NUM_FAMILIES)]
        self.histories: deque[list[int]] = deque(maxlen=6)

    def tokens(self, num_tokens: int) -> list[int]:
        return self.rng.choices(VOCABULARY, k=num_tokens)

    def prompt(self) -> list[int]:
        """Return the beginning of a family, or of what a finished request had, and some tokens more."""
        rng, size = self.rng, self.setting.largest_block
        base = rng.choice(self.histories if self.histories and rng.random() < 0.3 else self.families)
        num_shared = len(base) if rng.random() < 0.2 else rng.randint(0, len(base) // size) * size + rng.randint(0, 2)
        tokens = base[:num_shared] + self.tokens(rng.randint(0, 2 * size))
        return tokens[: rng.randint(self.max_tokens // 2, self.max_tokens - 1)] or self.tokens(1)

    def attributes(self, token_ids: list[int]) -> dict[str, Any]:
        """Return what makes a request special, mostly nothing."""
        rng = self.rng
        attributes: dict[str, Any] = {"sampling_params": rng.choice((*[SAMPLING] * 6, UNREAD, REPORTED))}
        if self.setting.extra_keys and rng.random() < 0.5:
            attributes |= rng.choice((self._tenant, self._images, self._embeddings))(token_ids)
        return attributes

    def _tenant(self, token_ids: list[int]) -> dict[str, Any]:
        rng = self.rng
        session = rng.choice((None, "session"))
        return {
            "cache_salt": rng.choice((None, "salt", "pepper")),
            "lora_request": rng.choice((None, *ADAPTERS)),
            "session_id": session,
        }

    def _images(self, token_ids: list[int]) -> dict[str, Any]:
        """Put images over the prompt's beginning, in one of a few ways so that some requests differ in nothing else."""
        rng, size = self.rng, self.setting.hash_block_size
        places = rng.choice((((0, 2),), ((1, size),), ((0, 1), (2, size)), ((0, 3 * size),)))
        ends = max(offset + length for offset, length in places)
        token_ids[:ends] = [PLACEHOLDER + 9] * min(ends, len(token_ids))
        images = [
            MultiModalFeatureSpec(
                data=None, modality="image", identifier=rng.choice(("cat", "dog")), mm_position=PlaceholderRange(*place)
            )
            for place in places
        ]
        return {"mm_features": images}

    def _embeddings(self, token_ids: list[int]) -> dict[str, Any]:
        """Give the prompt as embeddings besides its tokens."""
        start = self.rng.choice((0, 1))
        return {"prompt_embeds": torch.arange(start, start + 2 * len(token_ids), dtype=torch.float32).reshape(-1, 2)}


class Workload:
    """Drives requests at random."""

    def __init__(self, setting: Setting, seed: int, observe: Callable[..., None]) -> None:
        self.setting = setting
        self.rng = Random(seed)
        self.num_blocks = self.rng.choice(setting.num_blocks)
        collector = Collector() if setting.metrics else None
        self.manager = make_manager(setting, self.num_blocks, setting.events and self.rng.random() < 0.4, collector)
        self.pool = self.manager.block_pool
        self.calls = Calls(self.manager, observe)
        self.requests = Requests(setting, self.manager, self.calls)
        self.prompts = Prompts(setting, self.rng)
        self.max_tokens = self.prompts.max_tokens
        self.pinned: list[list[Any]] = []
        self.reused: list[int] = []
        self.calls.extras |= {"reused": self.reused, "noted": collector.notes if collector else None}
        self._actions = self._weighted_actions()

    def run(self, num_calls: int) -> None:
        """Act until so many calls are made, then empty the pool and reset it."""
        actions, weights = zip(*self._actions.items(), strict=True)
        cumulated = list(itertools.accumulate(weights))
        while self.calls.num_calls < num_calls:
            self.rng.choices(actions, cum_weights=cumulated)[0]()
        self.drain()

    def _weighted_actions(self) -> dict[Callable[[], None], float]:
        actions: dict[Callable[[], None], float] = {
            self.submit: 4,
            self.admit: 6,
            self.step: 16,
            self.settle: 8,
            self.preempt: 0.7,
            self.finish: 1,
            self.requests.free_deferred: 1.5,
            self.new_step: 3,
            self.take_events: 3,
            self.skip_blocks: 0.5,
            self.evict: 0.5,
            self.pin: 0.5,
            self.unpin: 0.6,
            self.take_blocks: 0.3,
            self.ask: 2,
            self.misuse: 0.3,
            self.reset: 0.2,
            self.drain: 0.1,
        }
        if self.setting.external:
            actions |= {self.finish_load: 2, self.fail_load: 0.5}
        return actions

    # requests come

    def submit(self) -> None:
        """Queue a request, unless enough are waiting."""
        if len(self.requests.waiting) < MAX_WAITING:
            token_ids = self.prompts.prompt()
            self.requests.submit(token_ids, **self.prompts.attributes(token_ids))

    def admit(self) -> None:
        """Look a waiting request up and start it, with all of its tokens, some, or those that a transfer brings."""
        if not self.requests.waiting or len(self.requests.running) >= MAX_RUNNING:
            return
        rng, request = self.rng, self.rng.choice(self.requests.waiting)
        blocks, num_hits = self._look_up(request)
        if blocks is None:
            return
        num_external = self._num_external(request, num_hits)
        loads = num_external > 0 and rng.random() < 0.5
        start = request.num_computed_tokens + num_hits + num_external
        num_new = 0 if loads else self._chunk(request, start, request.num_tokens - start)
        if num_new <= 0 and not loads:
            return
        placement = {
            "num_new_computed_tokens": num_hits,
            "new_computed_blocks": blocks,
            "num_external_computed_tokens": num_external,
        }
        slots = self.calls(self.manager.allocate_slots, request, num_new, **placement, **self._options(loads))
        if slots is not None:
            self.calls(self.manager.record_prefix_cache_stats, request, num_hits)
            self.requests.start(request, num_new, start, loads)
        elif rng.random() < 0.3:
            self.preempt()

    def _look_up(self, request: Request) -> tuple[Any, int]:
        """Return the cached blocks of a request and their tokens, sometimes fewer than there are; None if it is refused."""
        rng, manager = self.rng, self.manager
        if request.num_computed_tokens:  # loaded
            return manager.empty_kv_cache_blocks, 0
        limit = {"max_cache_hit_length": rng.randint(0, request.num_tokens - 1)} if rng.random() < 0.05 else {}
        if rng.random() < 0.1:
            found = self.calls(manager.get_computed_blocks_for_connector, request, **limit)
        else:
            found = self.calls(manager.get_computed_blocks, request, **limit)
        if found is None:
            return None, 0
        blocks, num_hits, request.shared_prefix_boundary = found[:3]
        if num_hits and rng.random() < 0.1 and not self.setting.has_mamba:
            size = self.setting.scheduler_block_size
            num_hits = rng.randint(0, num_hits // size) * size
            blocks = self.calls(manager.truncate_computed_blocks, blocks, num_hits)
        return blocks, num_hits

    def _num_external(self, request: Request, num_hits: int) -> int:
        num_left = request.num_tokens - 1 - num_hits
        if not self.setting.external or request.num_computed_tokens or num_left < 1 or self.rng.random() < 0.6:
            return 0
        return self.rng.randint(1, num_left)

    def _options(self, loads: bool) -> dict[str, Any]:
        """Return further keywords for a request's first allocation."""
        rng = self.rng
        options = {
            "num_lookahead_tokens": 0 if loads else self.setting.num_drafts,
            "delay_cache_blocks": loads or rng.random() < 0.05,
            "num_encoder_tokens": NUM_ENCODER_TOKENS if any(group.kind == "cross" for group in self.setting.groups) else 0,
            "full_sequence_must_fit": rng.random() < 0.5,
            "reserved_blocks": rng.choice((0, 0, 0, rng.randint(1, self.num_blocks // 2))),
            "has_scheduled_reqs": bool(self.requests.running),
            "skip_zeroing_group_ids": rng.choice(((), (0,))) if loads else (),
        }
        return accepted(options)

    def _chunk(self, request: Request, start: int, num_left: int) -> int:
        """Return how many of the tokens that are left to compute next; 0 where a state's block would not end well."""
        rng = self.rng
        num_new = num_left if rng.random() < 0.6 else rng.randint(1, max(1, num_left))
        return self._state_chunk(request, start, num_new) if self.setting.has_mamba else num_new

    def _state_chunk(self, request: Request, start: int, num_new: int) -> int:
        """End a chunk of the prompt where a state can be cached."""
        size = next(group.block_size for group in self.setting.groups if group.kind == "mamba")
        prefill_end = max(request.num_prompt_tokens, request.num_tokens - 1)
        if start >= prefill_end:
            return request.num_tokens - start
        end = start + num_new
        end = end if end >= prefill_end else end // size * size
        hash_size = self.setting.hash_block_size
        dropped = hash_size if self.setting.use_eagle else 0
        num_behind = 0 if dropped else max(1, self.setting.hash_lookahead)
        tail = (request.num_prompt_tokens - num_behind) // hash_size * hash_size - dropped
        last = (request.num_tokens - num_behind) // size * size - (size if dropped else 0)
        stops = (tail, last, (start // size + 1) * size if start % size else 0)
        return min((stop for stop in stops if start < stop < end), default=end) - start

    # requests are computed

    def step(self) -> None:
        """Compute more of a running request; preempt where the pool is too short."""
        if not self.requests.running:
            return
        request = self.rng.choice(self.requests.running)
        steps = self.requests.steps[request.request_id]
        num_new = self._num_to_compute(request)
        if num_new <= 0 or len(steps) >= MAX_IN_FLIGHT:
            self._settle(request)
            return
        lookahead = self.setting.num_drafts
        options = {"num_lookahead_tokens": lookahead} if lookahead else {}
        if self.calls(self.manager.allocate_slots, request, num_new, **options) is None:
            self.preempt()
            return
        self.requests.schedule(request, num_new)
        if not self.setting.asynchronous:
            self._settle(request)

    def _num_to_compute(self, request: Request) -> int:
        """Return how many tokens to schedule next: known ones, drafts, and those that steps in flight will give."""
        start = request.num_computed_tokens
        num_known = request.num_tokens_with_spec + request.num_output_placeholders
        num_left = min(num_known, self.setting.max_model_len) - start
        prefills = start < max(request.num_prompt_tokens, request.num_tokens - 1)
        return self._chunk(request, start, num_left) if prefills else num_left

    def settle(self) -> None:
        """Settle the oldest step of any request."""
        requests = [
            request for request in self.requests.running + self.requests.waiting if self.requests.steps[request.request_id]
        ]
        if requests:
            self._settle(self.rng.choice(requests))

    def _settle(self, request: Request) -> None:
        """Settle the oldest step, and end a request that is long enough."""
        steps = self.requests.steps[request.request_id]
        if not steps:
            self._finish(request)
            return
        num_accepted = self.rng.randint(0, steps[0].num_drafts)
        token_ids = self.prompts.tokens(num_accepted + 1)
        self.requests.settle(request, num_accepted, token_ids)
        if request.num_tokens >= self.max_tokens:
            self._finish(request)
        elif self.setting.num_drafts and not self.setting.asynchronous and self.rng.random() < 0.8:
            request.spec_token_ids = self.prompts.tokens(self.setting.num_drafts)

    def finish_load(self) -> None:
        """End a transfer: mostly all of its tokens are there."""
        if not self.requests.loading:
            return
        rng, manager, request = self.rng, self.manager, self.rng.choice(self.requests.loading)
        self.requests.loading.remove(request)
        self.requests.waiting.append(request)
        request.status = RequestStatus.WAITING
        if rng.random() < 0.3:
            size = self.setting.scheduler_block_size
            request.num_computed_tokens = rng.randint(0, request.num_computed_tokens // size) * size
            if not request.num_computed_tokens:
                self.calls(manager.free, request)
                return
            self.calls(manager.cache_blocks, request, request.num_computed_tokens)
            self.calls(manager.record_blocks_for_zeroing, request.request_id, request.num_computed_tokens)
        else:
            self.calls(manager.cache_blocks, request, request.num_computed_tokens)

    def fail_load(self) -> None:
        """Let a transfer of a running request's blocks fail: they lose their hashes and are computed again."""
        if not self.requests.running or self.setting.asynchronous or self.setting.has_mamba:
            return
        rng, request = self.rng, self.rng.choice(self.requests.running)
        size = self.setting.scheduler_block_size
        request.num_computed_tokens = rng.randint(0, request.num_computed_tokens // size) * size
        request.spec_token_ids = []
        held = self.calls(self.manager.get_block_ids, request.request_id)
        bad = [
            block_id
            for group, block_ids in zip(self.setting.groups, held, strict=True)
            for block_id in block_ids[request.num_computed_tokens // (group.block_size * self.setting.context_parallel) :]
        ]
        self.calls(self.manager.evict_blocks, set(bad))
        self.calls(self.manager.record_blocks_for_zeroing, request.request_id, request.num_computed_tokens)

    def new_step(self) -> None:
        """Take what a step takes from the manager."""
        self.calls(self.manager.new_step_starts)
        self.calls(self.manager.take_new_block_ids)
        self.calls(self.manager.take_boundary_state_offloads)
        taken = self.calls(self.manager.take_kv_cache_block_copies)
        if taken and taken[1]:
            self.calls(self.pool.free_blocks, taken[1])

    # requests go

    def preempt(self) -> None:
        """Preempt any running request."""
        if self.requests.running:
            self.requests.preempt(self.rng.choice(self.requests.running), self._defers())

    def finish(self) -> None:
        """End any request."""
        requests = self.requests.running + self.requests.waiting + self.requests.loading
        if requests:
            self._finish(self.rng.choice(requests))

    def _finish(self, request: Request) -> None:
        self.prompts.histories.append(list(request.all_token_ids))
        if self.rng.random() < 0.2:
            self.calls(self.manager.finalize_partial_tail_offloads, request)
        self.requests.finish(request, self._defers())

    def _defers(self) -> bool:
        return self.rng.random() < 0.3

    def drain(self) -> None:
        """End all requests and give all blocks back, so that a reset succeeds."""
        self.new_step()
        for request in list(self.calls.requests.values()):
            self._finish(request)
        while self.requests.deferred:
            self.requests.free_deferred()
        while self.pinned:
            self.unpin()
        self.reset()
        self.take_events()

    # interventions

    def take_events(self) -> None:
        self.calls(self.manager.take_events)
        if self.rng.random() < 0.2:
            self.calls(self.manager.make_prefix_cache_stats)

    def skip_blocks(self) -> None:
        """Free what is behind the window of a running request."""
        if self.requests.running:
            request = self.rng.choice(self.requests.running)
            num_settled = max(0, request.num_computed_tokens - request.num_in_flight_tokens)
            more = (request.num_prompt_tokens,) if self.rng.random() < 0.5 else ()
            self.calls(self.manager.remove_skipped_blocks, request.request_id, num_settled, *more)

    def evict(self) -> None:
        """Drop the hashes of some blocks, held ones too."""
        self.calls(self.manager.evict_blocks, set(self.rng.sample(range(1, self.num_blocks), self.rng.randint(1, 3))))

    def pin(self) -> None:
        """Hold some blocks, held or free, with or without a hash."""
        if len(self.pinned) < 2:
            ids = self.rng.sample(range(self.num_blocks), self.rng.randint(1, 3))
            blocks = [self.pool.blocks[block_id] for block_id in ids]
            self.calls(self.pool.touch, blocks)
            self.pinned.append([block for block in blocks if not block.is_null])

    def unpin(self) -> None:
        """Let pinned blocks go, with or without a watch on their reuse."""
        if not self.pinned:
            return
        blocks = self.pinned.pop(0)
        if self.rng.random() < 0.5:
            self.calls(self.pool.unpin_blocks, blocks, self._note_reuse)
        else:
            self.calls(self.pool.free_blocks, blocks)

    def _note_reuse(self, block: Any) -> None:
        self.reused.append(block.block_id)

    def take_blocks(self) -> None:
        """Take blocks for nobody, sometimes more than there are."""
        if len(self.pinned) < 2:
            blocks = self.calls(self.pool.get_new_blocks, self.rng.choice((0, 1, 2, self.num_blocks)))
            self.pinned.append(blocks or [])

    def reset(self) -> None:
        """Reset the prefix cache, or be told that it is in use."""
        self.calls(self.manager.reset_prefix_cache)

    # questions

    def ask(self) -> None:
        """Ask the manager or its pool something."""
        requests = list(self.calls.requests.values())
        if requests:
            request = self.rng.choice(requests)
            self.rng.choice((self._ask_blocks, self._ask_tokens, self._ask_pool, self._ask_hits))(request)

    def _ask_blocks(self, request: Request) -> None:
        manager, request_id = self.manager, request.request_id
        blocks = self.calls(manager.get_blocks, request_id)
        ask = self.rng.choice(("ids", "ids of some", "unhashed", "sum", "computed"))
        if ask == "ids":
            self.calls(blocks.get_block_ids, allow_none=self.rng.random() < 0.5)
        elif ask == "ids of some":
            group_ids = self.rng.sample(range(len(self.setting.groups)), self.rng.randint(0, len(self.setting.groups)))
            self.calls(blocks.get_block_ids, self.rng.random() < 0.5, group_ids=group_ids)
        elif ask == "unhashed":
            self.calls(blocks.get_unhashed_block_ids_all_groups)
            self.calls(blocks.get_unhashed_block_ids)
        elif ask == "sum":
            self.calls((blocks + blocks.new_empty()).get_block_ids)
        else:
            self.calls(manager.get_block_ids_for_computed_tokens, request_id, request.num_computed_tokens)

    def _ask_tokens(self, request: Request) -> None:
        self.calls(self.manager.estimate_cached_tokens, request)
        self.calls(self.manager.get_num_common_prefix_blocks, request.request_id)
        self.calls(
            self.manager.coordinator.get_num_blocks_to_allocate,
            request_id=request.request_id,
            num_tokens=request.num_tokens,
            new_computed_blocks=self.manager.empty_kv_cache_blocks.blocks,
            num_encoder_tokens=0,
            total_computed_tokens=request.num_computed_tokens,
            num_local_computed_tokens=request.num_computed_tokens,
            num_tokens_main_model=request.num_tokens,
            apply_admission_cap=True,
        )

    def _ask_pool(self, request: Request) -> None:
        if request.block_hashes:
            group_ids = self.rng.sample(range(len(self.setting.groups)), self.rng.randint(1, len(self.setting.groups)))
            self.calls(self.pool.get_cached_block, self.rng.choice(request.block_hashes), group_ids)
        self.calls(self.pool.is_block_writable, self.rng.choice(self.pool.blocks))
        self.calls(self.pool.get_usage)

    def _ask_hits(self, request: Request) -> None:
        """Look any request up, for nothing."""
        self.calls(self.manager.get_computed_blocks, request)

    def misuse(self) -> None:
        """Do what is refused, or does nothing."""
        if self.requests.running:
            request = self.rng.choice(self.requests.running)
            self.calls(self.manager.allocate_slots, request, 0)
            self.calls(self.manager.cache_blocks, request, 0)
            found = self.calls(self.manager.get_computed_blocks, request)
            if found and found[1]:
                self.calls(self.manager.allocate_slots, request, 1, found[1], found[0])
        if self.requests.waiting:
            self.calls(self.manager.free, self.rng.choice(self.requests.waiting))
        self.calls(self.manager.evict_blocks, {self.num_blocks})
        self.calls(self.pool.get_new_blocks, self.num_blocks)
        self.calls(self.manager.remove_skipped_blocks, "nobody", self.max_tokens)
        self.calls(self.manager.get_block_ids, "nobody")
