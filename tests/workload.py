"""Random work for twins: a small engine that takes its decisions by a seed.

`Engine` knows what a scheduler does with a request (submit, admit, grow, preempt, finish) and keeps its
books. It decides nothing, so that a hypothesis machine can drive it as well; `RandomWorkload` decides. Prompts
come from a few families over a tiny vocabulary, and pools are tiny, so that hits, duplicates, evictions and
shortage are all frequent.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from types import SimpleNamespace
from typing import Any

from oracle import NULL_PAGE, PREEMPTED, RUNNING
from settings import Setting
from twins import Mismatch, Twins

WAITING = 1
MAX_WAITING = 4
NUM_FAMILIES = 3
NUM_FREE_IDS = 3
VOCABULARY = range(3)
PLACEHOLDER_TOKEN = 9
FIRST_UNIQUE_TOKEN = 1000
WITH_LOGPROBS = SimpleNamespace(prompt_logprobs=1)
WITHOUT_LOGPROBS = SimpleNamespace(prompt_logprobs=None)


# --- requests -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Feature:
    """A multimodal feature and the tokens that stand for it."""

    mm_hash: str
    modality: str
    placeholder_range: Any  # has offset and length, in tokens; None: not known


@dataclass(eq=False, repr=False)
class Request:
    """What managers read of an engine's request."""

    request_id: str
    all_token_ids: list[int]
    num_computed_tokens: int = 0
    sampling_params: Any = None
    status: int = WAITING
    mm_features: tuple[Feature, ...] = ()
    has_vision: bool = False
    lora_id: int | None = None
    cache_salt: str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def __repr__(self) -> str:
        return f"{self.request_id}({self.num_computed_tokens} of {self.num_tokens})"


# --- the engine ---------------------------------------------------------------------------------------------


class Engine:
    """Requests on their way through twins. A request that does not fit stays as it was."""

    def __init__(self, twins: Twins) -> None:
        self.twins = twins
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._numbers = itertools.count()
        self._free_ids: deque[str] = deque()

    def submit(self, token_ids: list[int], **attributes: Any) -> Request:
        """Queue a new request. Ids come again, some time after their request was finished."""
        has_enough = len(self._free_ids) > NUM_FREE_IDS
        request_id = self._free_ids.popleft() if has_enough else f"r{next(self._numbers)}"
        request = Request(request_id, token_ids, **attributes)
        self.waiting.append(request)
        return request

    def look_up(self, request: Request, placement: dict[str, Any]) -> int:
        """Return the number of cached tokens."""
        return self.twins.call("look_up", request, **placement)[1]

    def admit(
        self,
        request: Request,
        num_hit_tokens: int,
        num_new_tokens: int,
        num_external_tokens: int = 0,
        **options: Any,
    ) -> bool:
        """Start a waiting request that was looked up just now."""
        if num_external_tokens:
            options["num_external_computed_tokens"] = num_external_tokens
        if self.twins.call("allocate", request, num_new_tokens, num_hit_tokens, **options) is None:
            return False
        self.waiting.remove(request)
        self.running.append(request)
        self.twins.live_request_ids[request.request_id] = None
        request.status = RUNNING
        request.num_computed_tokens = num_hit_tokens + num_external_tokens + num_new_tokens
        return True

    def grow(self, request: Request, num_new_tokens: int, num_drafts: int = 0, **options: Any) -> bool:
        """Compute known tokens of a running request, with drafts behind them that are rejected."""
        if self.twins.call("allocate", request, num_new_tokens + num_drafts, **options) is None:
            return False
        request.num_computed_tokens += num_new_tokens
        return True

    def accept(self, request: Request, token_ids: list[int]) -> None:
        """Accept drafts after all: they are known and computed."""
        request.all_token_ids.extend(token_ids)
        request.num_computed_tokens += len(token_ids)

    def fork(self, request: Request) -> bool:
        """Run a new request from where a running one is; False if it does not fit."""
        forked = self.submit(list(request.all_token_ids))
        self.waiting.remove(forked)
        forked = replace(request, request_id=forked.request_id, all_token_ids=forked.all_token_ids)
        if self.twins.call("fork", request, forked) is None:
            self._free_ids.append(forked.request_id)
            return False
        self.running.append(forked)
        self.twins.live_request_ids[forked.request_id] = None
        return True

    def cache(self, request: Request) -> None:
        """Enter what a delayed allocation left out."""
        self.twins.call("cache_pages", request, request.num_computed_tokens)

    def fail_load(self, request: Request, page_ids: list[int], num_computed_tokens: int) -> None:
        """Drop the entries of pages that a transfer did not fill; the request is computed again from there on."""
        self.twins.call("evict_pages", page_ids)
        request.num_computed_tokens = num_computed_tokens

    def preempt(self, request: Request, **options: Any) -> None:
        """Give the pages back; the request waits to be computed again."""
        self._leave(request, **options)
        request.status = PREEMPTED
        request.num_computed_tokens = 0
        self.waiting.append(request)

    def finish(self, request: Request) -> None:
        """End a request, running or not."""
        if request in self.running:
            self._leave(request)
        else:
            self.waiting.remove(request)
            self.twins.call("free", request)
        self.twins.call("free_page_hashes", request)
        self._free_ids.append(request.request_id)

    def abort(self, request: Request, num_computed_tokens: int) -> None:
        """Preempt a request that was scheduled, and of which fewer tokens were computed."""
        self.preempt(request, num_computed_tokens=num_computed_tokens)

    def _leave(self, request: Request, **options: Any) -> None:
        self.running.remove(request)
        self.twins.call("free", request, **options)
        del self.twins.live_request_ids[request.request_id]


# --- decisions ----------------------------------------------------------------------------------------------


class RandomWorkload:
    """Drives an engine at random."""

    def __init__(self, setting: Setting, twins: Twins, num_pages: int, rng: Random) -> None:
        self.setting = setting
        self.habits = setting.habits
        self.num_pages = num_pages
        self.rng = rng
        self.engine = Engine(twins)
        self.twins = twins
        self.max_tokens = setting.max_model_len - 1
        self.page_size = setting.page_size
        self.families = [self._tokens(self.max_tokens) for _ in range(NUM_FAMILIES)]
        self.histories: deque[list[int]] = deque(maxlen=6)
        self._unique_tokens = itertools.count(FIRST_UNIQUE_TOKEN)
        self._actions = self._weighted_actions()

    def run(self, num_calls: int) -> None:
        """Act until so many calls are made."""
        actions, weights = zip(*self._actions.items(), strict=True)
        cumulated = list(itertools.accumulate(weights))
        while self.twins.num_calls < num_calls:
            self.rng.choices(actions, cum_weights=cumulated)[0]()

    def _weighted_actions(self) -> dict[Callable[[], None], float]:
        actions: dict[Callable[[], None], float] = {
            self.submit: 4,
            self.admit: 6,
            self.grow: 14,
            self.preempt: 1,
            self.finish: 2,
            self.count_common_prefix: 1,
            self.reset: 0.3,
            self.drain: 0.1,
        }
        if self.habits.evict_pages:
            actions |= {self.evict: 0.5, self.fail_load: 1}
        if self.habits.aborts:
            actions |= {self.abort: 1}
        if self.habits.stray_calls:
            actions |= {self.look_up: 1, self.cache: 0.5, self.misuse: 0.3}
        return actions

    # requests come

    def submit(self) -> None:
        """Queue a request, unless enough are waiting."""
        if len(self.engine.waiting) < MAX_WAITING:
            token_ids = self._prompt()
            self.engine.submit(token_ids, **self._attributes(token_ids))

    def _prompt(self) -> list[int]:
        """Return the beginning of a family, or of what a finished request had, and some tokens more."""
        rng = self.rng
        follow_up = self.habits.follow_ups and self.histories and rng.random() < 0.3
        base = rng.choice(self.histories if follow_up else self.families)
        num_pages = rng.randint(0, len(base) // self.page_size)
        num_shared = len(base) if rng.random() < 0.2 else num_pages * self.page_size + rng.randint(0, 2)
        tokens = base[:num_shared] + self._tokens(rng.randint(1, 2 * self.page_size))
        return tokens[: rng.randint(self.max_tokens // 2, self.max_tokens - 1)]

    def _tokens(self, num_tokens: int) -> list[int]:
        return self.rng.choices(VOCABULARY, k=num_tokens)

    def _attributes(self, token_ids: list[int]) -> dict[str, Any]:
        """Return what makes a request special, mostly nothing."""
        rng, attributes = self.rng, {}
        if self.habits.prompt_logprobs:
            attributes["sampling_params"] = rng.choice((None, None, WITHOUT_LOGPROBS, WITHOUT_LOGPROBS, WITH_LOGPROBS))
        if self.habits.extra_keys and rng.random() < 0.4:
            attributes |= rng.choice((self._tenant, self._vision))(token_ids)
        return attributes

    def _tenant(self, token_ids: list[int]) -> dict[str, Any]:
        rng = self.rng
        return {"cache_salt": rng.choice((None, "salt", "pepper")), "lora_id": rng.choice((None, 1, "tuned"))}

    def _vision(self, token_ids: list[int]) -> dict[str, Any]:
        """Put features over the tokens, in one of a few ways so that some requests differ in nothing else."""
        places = self.rng.choice(((), (None,), ((0, 2),), ((1, self.page_size),), ((0, 1), (2, self.page_size))))
        features = tuple(self._feature(place) for place in places)
        num_placeholders = min(self.page_size, len(token_ids))
        token_ids[:num_placeholders] = [PLACEHOLDER_TOKEN] * num_placeholders
        return {"has_vision": True, "mm_features": features}

    def _feature(self, place: tuple[int, int] | None) -> Feature:
        placeholder_range = SimpleNamespace(offset=place[0], length=place[1]) if place else None
        return Feature(self.rng.choice(("cat", "dog")), "image", placeholder_range)

    # requests are computed

    def admit(self) -> None:
        """Look a waiting request up and start it, with all of its tokens or some."""
        if not self.engine.waiting:
            return
        rng, request = self.rng, self.rng.choice(self.engine.waiting)
        num_hit_tokens = self.engine.look_up(request, self._placement())
        num_left = request.num_tokens - num_hit_tokens
        num_external = self._num_external_tokens(num_left)
        num_left -= num_external
        num_new = self._num_admitted(num_hit_tokens + num_external, num_left, 0 if num_external else 1)
        options = self._options()
        if self.engine.admit(request, num_hit_tokens, num_new, num_external, **options):
            self._cache_delayed(request, options)
        elif rng.random() < 0.3 and self.engine.running:
            self.engine.preempt(rng.choice(self.engine.running))

    def _num_admitted(self, num_tokens: int, num_left: int, least: int) -> int:
        """Return how many of the tokens behind the first `num_tokens` are computed at admission."""
        return num_left if self.rng.random() < 0.5 else self.rng.randint(least, num_left)

    def _num_external_tokens(self, num_left: int) -> int:
        if self.habits.external_tokens and self.rng.random() < 0.15:
            return self.rng.randint(0, num_left - 1)
        return 0

    def grow(self) -> None:
        """Compute more of a running request; preempt where the pool is too short, end what is long enough."""
        if not self.engine.running:
            return
        request = self.rng.choice(self.engine.running)
        if request.num_computed_tokens == request.num_tokens and not self._append(request):
            self._finish(request)
            return
        num_left = request.num_tokens - request.num_computed_tokens
        num_new = self._num_grown(request, num_left)
        num_drafts = self.rng.choice((0, 0, 1, 3)) if num_new == num_left else 0
        num_drafts = min(num_drafts, self.setting.max_model_len - request.num_tokens)
        options = self._options()
        if self.engine.grow(request, num_new, num_drafts, **options):
            self._cache_delayed(request, options)
            self._accept(request, num_drafts)
        else:
            self.engine.preempt(self.rng.choice(self.engine.running))

    def _num_grown(self, request: Request, num_left: int) -> int:
        """Return how many of the known tokens of a running request are computed."""
        return num_left if self.rng.random() < 0.6 else self.rng.randint(1, num_left)

    def _append(self, request: Request) -> bool:
        """Append generated tokens; False where the request is as long as may be."""
        num_tokens = self.rng.choice((1, 1, 1, self.page_size)) if self.habits.bursts else 1
        num_tokens = min(num_tokens, self.max_tokens - request.num_tokens)
        request.all_token_ids.extend(self._generated(num_tokens))
        return num_tokens > 0

    def _accept(self, request: Request, num_drafts: int) -> None:
        if num_drafts and self.habits.bursts:
            num_accepted = min(self.rng.randint(0, num_drafts), self.max_tokens - request.num_tokens)
            self.engine.accept(request, self._generated(num_accepted))

    def _generated(self, num_tokens: int) -> list[int]:
        if self.habits.repeated_tokens:
            return self._tokens(num_tokens)
        return list(itertools.islice(self._unique_tokens, num_tokens))

    def _options(self) -> dict[str, Any]:
        """Return keywords for an allocation, mostly few."""
        rng, options = self.rng, self._placement()
        if rng.random() < 0.2:
            options["num_lookahead_tokens"] = rng.randint(1, self.page_size + 1)
        if self.habits.delay_caching and rng.random() < 0.15:
            options["delay_cache_pages"] = True
        if self.habits.reserved_pages and rng.random() < 0.1:
            options["num_reserved_pages"] = rng.randint(1, self.num_pages // 2)
        return options

    def _placement(self) -> dict[str, Any]:
        """Return where pages should come from."""
        size = self.setting.data_parallel_size
        if size is None:
            return {}
        return {"dp_shard_hint": self.rng.choice((None, *range(2 * size))), "data_parallel_size": size}

    def _cache_delayed(self, request: Request, options: dict[str, Any]) -> None:
        if "delay_cache_pages" in options and self.rng.random() < 0.6:
            self.engine.cache(request)

    # requests go

    def preempt(self) -> None:
        """Preempt any running request."""
        if self.engine.running:
            self.engine.preempt(self.rng.choice(self.engine.running))

    def abort(self) -> None:
        """Preempt any running request some of whose tokens were scheduled and never computed."""
        if self.engine.running:
            request = self.rng.choice(self.engine.running)
            num_computed_tokens = request.num_computed_tokens - self.rng.randint(0, 2 * self.page_size)
            self.engine.abort(request, max(0, num_computed_tokens))

    def finish(self) -> None:
        """End any request."""
        requests = self.engine.running + self.engine.waiting
        if requests:
            self._finish(self.rng.choice(requests))

    def _finish(self, request: Request) -> None:
        self.histories.append(list(request.all_token_ids))
        self.engine.finish(request)

    def drain(self) -> None:
        """End all running requests, so that a reset succeeds."""
        for request in list(self.engine.running):
            self.engine.finish(request)
        self.reset()

    # questions and interventions

    def reset(self) -> None:
        """Reset the prefix cache, or be told that it is in use."""
        self.twins.call("reset_prefix_cache")

    def evict(self) -> None:
        """Drop the prefix entries of some pages."""
        num_evicted = self.rng.randint(1, 3)
        self.twins.call("evict_pages", self.rng.sample(range(1, self.num_pages), num_evicted))

    def fail_load(self) -> None:
        """Let a transfer fail: mostly all pages from the first bad one on lose their entries, else some of them."""
        if not self.engine.running:
            return
        rng, request = self.rng, self.rng.choice(self.engine.running)
        num_computed_tokens = rng.randint(0, request.num_computed_tokens)
        held = self.twins.oracle.manager.get_page_ids(request.request_id)
        bad = [
            page_id
            for group, page_ids in zip(self.setting.groups, held, strict=True)
            for page_id in page_ids[num_computed_tokens // group.page_size :]
            if page_id != NULL_PAGE
        ]
        self.engine.fail_load(request, bad if rng.random() < 0.6 else rng.sample(bad, len(bad) // 2), num_computed_tokens)

    def count_common_prefix(self) -> None:
        """Ask what the running requests have in common."""
        running = self.engine.running
        if running:
            num_scheduled = self.rng.randint(1, len(running))
            self.twins.call("get_num_common_prefix_pages", self.rng.choice(running), num_scheduled)

    def look_up(self) -> None:
        """Look any request up, for nothing."""
        requests = self.engine.running + self.engine.waiting
        if requests:
            self.engine.look_up(self.rng.choice(requests), self._placement())

    def cache(self) -> None:
        """Enter what is computed of a running request, again perhaps."""
        if self.engine.running:
            self.engine.cache(self.rng.choice(self.engine.running))

    def misuse(self) -> None:
        """Do what must be refused, or must do nothing."""
        if self.engine.running:
            request = self.rng.choice(self.engine.running)
            self.twins.call("allocate", request, self.rng.randint(-1, 0))
            num_hit_tokens = self.engine.look_up(request, self._placement())
            if num_hit_tokens:
                self.twins.call("allocate", request, 1, num_hit_tokens)
            num_too_many = self.setting.max_model_len - request.num_computed_tokens + 1
            self.twins.call("allocate", request, num_too_many)
        if self.engine.waiting:
            request = self.rng.choice(self.engine.waiting)
            self.twins.call("free", request)
            self.twins.call("get_num_common_prefix_pages", request, 1)
            num_hit_tokens = self.engine.look_up(request, self._placement())
            self.twins.call("allocate", request, 1, num_hit_tokens + self.page_size)


def run_workload(
    setting: Setting,
    make_twins: Callable[[Setting, int], Twins],
    seed: int,
    num_calls: int,
    workload_class: type[RandomWorkload] = RandomWorkload,
) -> Twins:
    """Run a seed's workload to its end and return the twins; on a mismatch, say how to run it again."""
    rng = Random(seed)
    num_pages = rng.choice(setting.num_pages)
    workload = workload_class(setting, make_twins(setting, num_pages), num_pages, rng)
    try:
        workload.run(num_calls)
        workload.drain()
    except Mismatch as mismatch:
        where = f"setting {setting.name!r}, seed {seed}, {num_pages} pages, call {workload.twins.num_calls - 1}"
        raise Mismatch(f"{where}\n{mismatch}") from mismatch.__cause__
    return workload.twins
