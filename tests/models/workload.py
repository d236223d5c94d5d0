"""Random work for twins, request by request. Prompts come from a few families over a tiny vocabulary, and pools are tiny, so
that hits, duplicates, evictions and shortage are all frequent.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import replace
from random import Random
from typing import Any

from features import PLAIN, Actions, Features, Workload, draw_placement, random_seconds, random_span
from oracle import PREEMPTED, RUNNING
from oracle_kinds import Mamba
from settings import NumPages, Setting
from twin_engine import WITH_LOGPROBS, WITHOUT_LOGPROBS, Request
from twins import Twins

MAX_WAITING = 4
NUM_FREE_IDS = 3
NUM_REMEMBERED = 6
PLACEHOLDER_TOKEN = 9
FIRST_UNIQUE_TOKEN = 1000


class RandomWorkload(Workload):
    """Drives requests at random. One that does not fit stays as it was."""

    def __init__(self, setting: Setting, twins: Twins, num_pages: NumPages, rng: Random, features: Features = PLAIN) -> None:
        self.max_tokens = setting.max_model_len - 1
        super().__init__(setting, twins, num_pages, rng, features)
        self.habits = setting.habits
        self.page_size = setting.page_size
        taken_back = [group.page_size - group.span for group in setting.groups if group.is_ring]
        self.max_num_lookahead = min([self.max_tokens, *taken_back])
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.pending: dict[Request, int] = {}  # tokens from elsewhere for which it waits
        self.histories: deque[list[int]] = deque(maxlen=NUM_REMEMBERED)
        self._numbers = itertools.count()
        self._free_ids: deque[str] = deque()
        self._unique_tokens = itertools.count(FIRST_UNIQUE_TOKEN)
        self.actions = self._weighted_actions()

    def _weighted_actions(self) -> Actions:
        actions: Actions = {
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
        return self._with_features(actions)

    def any_request(self) -> Request | None:
        """Choose one of all requests, if there are any."""
        requests = [*self.running, *self.waiting, *self.pending]
        return self.rng.choice(requests) if requests else None

    def held_by_any(self) -> list[int]:
        request = self.any_request()
        held = self.twins.oracle.manager.get_page_ids(request.request_id) if request is not None else ()
        return [page_id for page_ids in held for page_id in page_ids]

    # requests come

    def submit(self) -> None:
        """Queue a request, unless enough are waiting."""
        if len(self.waiting) < MAX_WAITING:
            token_ids = self._prompt()
            resume_at = self.draw_places()
            attributes = self._attributes(token_ids) | self.draw_session()
            if self.setting.has_reference_window:
                attributes |= {"num_prompt_tokens": self.rng.choice((None, self.rng.randint(0, len(token_ids) + 4)))}
            self.waiting.append(Request(self._new_id(), token_ids, **attributes, resume_at=resume_at))

    def _new_id(self) -> str:
        """Return an id. Ids come again, some time after their request was finished."""
        has_enough = len(self._free_ids) > NUM_FREE_IDS
        return self._free_ids.popleft() if has_enough else f"r{next(self._numbers)}"

    def _prompt(self) -> list[int]:
        """Return the beginning of a family, or of what a finished request had, and some tokens more; with a tier, often most of
        it.
        """
        rng = self.rng
        if self.features.images:
            return list(self.families[0][: rng.choice((2, 3, 4)) * self.page_size + 1][: self.max_tokens - 1])
        if self.features.tier and rng.random() < 0.6:
            return self._most_of([*self.histories, *self.families], self.max_tokens - 1)
        follow_up = self.habits.follow_ups and self.histories and rng.random() < 0.3
        base = rng.choice(self.histories if follow_up else self.families)
        num_pages = rng.randint(0, len(base) // self.page_size)
        num_shared = len(base) if rng.random() < 0.2 else num_pages * self.page_size + rng.randint(0, 2)
        tokens = base[:num_shared] + self._tokens(rng.randint(1, 2 * self.page_size))
        return tokens[: rng.randint(self.max_tokens // 2, self.max_tokens - 1)]

    def _attributes(self, token_ids: list[int]) -> dict[str, Any]:
        """Return what makes a request special, mostly nothing."""
        rng, attributes = self.rng, {}
        if self.features.images:
            return {"has_vision": rng.random() < 0.8}
        if self.features.tier and rng.random() < 0.7:
            return {}
        if self.habits.prompt_logprobs:
            attributes["sampling_params"] = rng.choice((None, None, WITHOUT_LOGPROBS, WITHOUT_LOGPROBS, WITH_LOGPROBS))
        if self.habits.extra_keys and rng.random() < 0.4:
            attributes |= self._tenant() if rng.random() < 0.5 else self._vision(token_ids)
        return attributes

    def _vision(self, token_ids: list[int]) -> dict[str, Any]:
        """Put features over the tokens, in one of a few ways so that some requests differ in nothing else."""
        places = self.rng.choice(((), (None,), ((0, 2),), ((1, self.page_size),), ((0, 1), (2, self.page_size))))
        features = tuple(self.draw_feature(place) for place in places)
        num_placeholders = min(self.page_size, len(token_ids))
        token_ids[:num_placeholders] = [PLACEHOLDER_TOKEN] * num_placeholders
        return {"has_vision": True, "mm_features": features}

    # requests are computed

    def admit(self) -> None:
        """Look a waiting request up and start it, with all of its tokens or some."""
        if not self.waiting:
            return
        rng, request = self.rng, self.rng.choice(self.waiting)
        num_hit_tokens = self._look_up(request)
        num_left = request.num_tokens - num_hit_tokens
        num_external = self._num_external_tokens(num_left)
        num_left -= num_external
        is_pending = bool(num_external and self.features.external and rng.random() < 0.7)
        if is_pending:
            num_new, options = 0, self._placement() | {"delay_cache_pages": True}
        else:
            num_new = self._num_admitted(num_hit_tokens + num_external, num_left, 0 if num_external else 1)
            options = self._options()
        if num_external:
            options["num_external_computed_tokens"] = num_external
        if self.twins.call("allocate", request, num_new, num_hit_tokens, **options) is None:
            if rng.random() < 0.3:
                self.preempt()
            return
        self.waiting.remove(request)
        self.twins.live_request_ids[request.request_id] = None
        request.status, request.num_computed_tokens = RUNNING, num_hit_tokens
        if is_pending:
            self.pending[request] = num_external
            return
        self.running.append(request)
        request.num_computed_tokens += num_external + num_new
        self._cache_delayed(request, options)

    def _num_admitted(self, num_tokens: int, num_left: int, least: int) -> int:
        """Return how many of the tokens behind the first `num_tokens` are computed at admission; with states, often up to the
        last checkpoint.
        """
        if self.features.states:
            interval = self.twins.oracle.manager.states.interval or self.page_size
            num_aligned = (num_tokens + num_left) // interval * interval - num_tokens
            if num_aligned >= max(1, least) and self.rng.random() < 0.5:
                return num_aligned
        return num_left if self.rng.random() < 0.5 else self.rng.randint(least, num_left)

    def _num_external_tokens(self, num_left: int) -> int:
        if self.habits.external_tokens and self.rng.random() < (0.4 if self.features.external else 0.15):
            return self.rng.randint(0, num_left - 1)
        return 0

    def grow(self) -> None:
        """Compute more of a running request; preempt where the pool is too short, end what is long enough."""
        self.take_in_time()
        if not self.running:
            return
        request = self.rng.choice(self.running)
        if request.num_computed_tokens == request.num_tokens and not self._append(request):
            self._finish(request)
            return
        num_left = request.num_tokens - request.num_computed_tokens
        num_new = self._num_grown(request, num_left)
        num_drafts = self.rng.choice((0, 0, 1, 3)) if num_new == num_left else 0
        num_drafts = min(num_drafts, self.setting.max_model_len - request.num_tokens)
        options = self._options()
        if self.twins.call("allocate", request, num_new + num_drafts, **options) is None:
            num_drafts, options["num_lookahead_tokens"] = 0, 0  # they may have passed a checkpoint
            if self.twins.call("allocate", request, num_new, **options) is None:
                self.preempt()
                return
        request.num_computed_tokens += num_new
        self._cache_delayed(request, options)
        if num_drafts and self.habits.bursts:
            self._accept(request, num_drafts)

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
        """Accept some drafts: they are known and computed."""
        num_accepted = min(self.rng.randint(0, num_drafts), self.max_tokens - request.num_tokens)
        request.all_token_ids.extend(self._generated(num_accepted))
        request.num_computed_tokens += num_accepted

    def _generated(self, num_tokens: int) -> list[int]:
        if self.habits.repeated_tokens:
            return self._tokens(num_tokens)
        return list(itertools.islice(self._unique_tokens, num_tokens))

    def _options(self) -> dict[str, Any]:
        """Return keywords for an allocation, mostly few."""
        rng, options = self.rng, self._placement()
        if rng.random() < 0.2:
            options["num_lookahead_tokens"] = min(rng.randint(1, self.page_size + 1), self.max_num_lookahead)
        if self.habits.delay_caching and rng.random() < 0.15:
            options["delay_cache_pages"] = True
        if self.habits.reserved_pages and rng.random() < 0.1:
            options["num_reserved_pages"] = rng.randint(1, self.num_pages // 2)
        return options

    def _placement(self) -> dict[str, Any]:
        """Return where pages should come from."""
        return draw_placement(self.rng, self.setting.data_parallel_size)

    def _look_up(self, request: Request) -> int:
        """Return the number of cached tokens."""
        return self.twins.call("look_up", request, **self._placement())[1]

    def _cache_delayed(self, request: Request, options: dict[str, Any]) -> None:
        if "delay_cache_pages" in options and self.rng.random() < 0.6:
            self._cache(request)

    def _cache(self, request: Request) -> None:
        self.twins.call("cache_pages", request, request.num_computed_tokens)

    # requests go

    def preempt(self) -> None:
        """Preempt any running request."""
        if self.running:
            self._preempt(self.rng.choice(self.running))

    def _preempt(self, request: Request, **options: Any) -> None:
        """Give the pages back; the request waits to be computed again."""
        self._leave(request, **options)
        request.status, request.num_computed_tokens = PREEMPTED, 0
        self.waiting.append(request)

    def _leave(self, request: Request, **options: Any) -> None:
        if request in self.pending:
            del self.pending[request]
        else:
            self.running.remove(request)
        self.twins.call("free", request, **options | self.draw_seconds())
        del self.twins.live_request_ids[request.request_id]

    def abort(self) -> None:
        """Preempt any running request some of whose tokens were scheduled and never computed."""
        if self.running:
            request = self.rng.choice(self.running)
            num_computed_tokens = request.num_computed_tokens - self.rng.randint(0, 2 * self.page_size)
            self._preempt(request, num_computed_tokens=max(0, num_computed_tokens))

    def finish(self) -> None:
        """End any request."""
        request = self.any_request()
        if request is not None:
            self._finish(request)

    def _finish(self, request: Request) -> None:
        self.histories.append(list(request.all_token_ids))
        if request not in self.waiting:
            self._leave(request)
        else:
            self.waiting.remove(request)
            self.twins.call("free", request)
        self.twins.call("free_page_hashes", request)
        self._free_ids.append(request.request_id)

    def let_all_go(self) -> None:
        self.let_go()
        for request in [*self.running, *self.pending]:
            self._preempt(request)

    def drain(self) -> None:
        self.let_go()
        for request in [*self.running, *self.pending]:
            self._finish(request)
        self.reset()

    # forks

    def fork(self) -> None:
        """Let any running request go on twice."""
        for _ in range(self.rng.choice((1, 1, 2, 3)) if self.running else 0):
            request = self.rng.choice(self.running)
            forked = replace(request, request_id=self._new_id(), all_token_ids=list(request.all_token_ids))
            forked.session_id = self.draw_session().get("session_id")
            if self.twins.call("fork", request, forked) is None:
                self._free_ids.append(forked.request_id)
            else:
                self.running.append(forked)
                self.twins.live_request_ids[forked.request_id] = None

    def misuse_fork(self) -> None:
        """Fork to a request that has other tokens or pages, or from one without pages."""
        if len(self.running) < 2:
            return
        first, second = self.rng.sample(self.running, 2)
        self.twins.call("fork", first, second)
        other = replace(first, request_id="other", num_computed_tokens=first.num_computed_tokens + 1)
        self.twins.call("fork", first, other)
        if first.num_computed_tokens >= self.page_size and self.setting.enable_caching:
            tokens = [(token + 1) % 3 for token in first.all_token_ids]
            self.twins.call("fork", first, replace(first, request_id="other", all_token_ids=tokens))
        self.twins.call("free_page_hashes", other)
        if self.waiting:
            waiting = self.rng.choice(self.waiting)
            self.twins.call("fork", waiting, replace(waiting, request_id="other"))
            self.twins.call("free_page_hashes", other)

    # expectations, and leases of spans

    def expect(self) -> None:
        """Say when what is cached under tokens of a request is wanted."""
        request = self.any_request()
        if request is not None:
            span = random_span(self.rng, request.num_tokens)
            self.twins.call("expect", request, *span, seconds=random_seconds(self.rng))

    def lease_span(self) -> None:
        """Lease what is cached under tokens of a request, for a moment or long."""
        request = self.any_request()
        if request is not None:
            span = random_span(self.rng, request.num_tokens)
            self.twins.call("lease_span", request, *span, seconds=self.rng.choice((0, 0.1, 1, 30, 1e9)))

    # tokens from elsewhere, and from the tier

    def commit(self) -> None:
        """End a transfer: all that a state needs came, or more or fewer tokens than a request waits for."""
        self._arrive("commit_external")

    def commit_part(self) -> None:
        """Cache pages of the first tokens that came for a request."""
        self.take_in_time()
        if self.pending:
            request, num_external = self.rng.choice(list(self.pending.items()))
            num_tokens = self.rng.choice((num_external, self.rng.randint(0, num_external), 10**6))
            self.twins.call("commit_external", request, num_tokens, is_last=False)

    def fail(self) -> None:
        self._arrive("fail_external")

    def _arrive(self, name: str) -> None:
        self.take_in_time()
        if not self.pending:
            return
        request, num_external = self.rng.choice(list(self.pending.items()))
        has_state = any(group.is_state for group in self.setting.groups)
        nums = (num_external,) if has_state and name == "commit_external" else (*range(num_external), num_external, 10**6)
        num_computed_tokens = self.twins.call(name, request, self.rng.choice((num_external, self.rng.choice(nums))))
        if num_computed_tokens is None:
            return
        request.num_computed_tokens = num_computed_tokens
        if num_computed_tokens:
            del self.pending[request]
            self.running.append(request)
        else:
            self._preempt(request)

    def cancel(self) -> None:
        if self.pending:
            self._preempt(self.rng.choice(list(self.pending)))

    def go_back(self) -> None:
        """Let requests compute wrong tokens again: from the start, where a state or a window needs it."""
        for request in [*self.running, *self.pending]:
            num_tokens = self.twins.call("find_wrong_token", request)
            if num_tokens is not None:
                request.num_computed_tokens = min(request.num_computed_tokens, num_tokens)
                if request in self.pending or self._lacks_pages(request):
                    self._preempt(request)

    def _lacks_pages(self, request: Request) -> bool:
        """Whether a request cannot go on, since a state, or a page that a window has left, is not that of its tokens."""
        manager = self.twins.oracle.manager
        groups, num_computed = zip(manager.kinds, manager.held[request.request_id], strict=True), request.num_computed_tokens
        return any(isinstance(kind, Mamba) or kind.lacks_page(held, request.num_tokens, num_computed) for kind, held in groups)

    # questions and interventions

    def fail_load(self) -> None:
        """Let a transfer for a running request fail, which is computed again from there on."""
        if not self.running:
            return
        request = self.rng.choice(self.running)
        request.num_computed_tokens = self.rng.randint(0, request.num_computed_tokens)
        self._fail_load(self.twins.oracle.manager.get_page_ids(request.request_id), request.num_computed_tokens)

    def count_common_prefix(self) -> None:
        """Ask what the running requests have in common."""
        running = self.running
        if running:
            num_scheduled = self.rng.randint(1, len(running))
            self.twins.call("get_num_common_prefix_pages", self.rng.choice(running), num_scheduled)

    def look_up(self) -> None:
        """Look any request up, for nothing."""
        requests = self.running + self.waiting
        if requests:
            self._look_up(self.rng.choice(requests))

    def cache(self) -> None:
        """Enter what is computed of a running request, again perhaps."""
        if self.running:
            self._cache(self.rng.choice(self.running))

    def _impersonate(self, request: Request) -> None:
        """Call for another request with the id of one that holds pages."""
        other = replace(request, all_token_ids=self.rng.choice((list(request.all_token_ids), self._prompt())))
        num_tokens = request.num_computed_tokens
        calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
            ("look_up", (), {}),
            ("allocate", (1,), {}),
            ("cache_pages", (num_tokens,), {}),
            ("commit_external", (0,), {}),
            ("fail_external", (0,), {}),
            ("free", (), {}),
            ("free", (), {"num_computed_tokens": 0}),
            ("free_page_hashes", (), {}),
            ("fork", (replace(request, request_id="other"),), {}),
            ("expect", (), {"seconds": 1}),
            ("lease_span", (), {"seconds": 1}),
            ("get_num_common_prefix_pages", (1,), {}),
        ]
        name, args, options = self.rng.choice(calls)
        self.twins.call(name, other, *args, **options)

    def misuse(self) -> None:
        """Do what must be refused, or must do nothing."""
        if self.running:
            request = self.rng.choice(self.running)
            self.twins.call("allocate", request, self.rng.randint(-1, 0))
            num_hit_tokens = self._look_up(request)
            if num_hit_tokens:
                self.twins.call("allocate", request, 1, num_hit_tokens)
            num_too_many = self.setting.max_model_len - request.num_computed_tokens + 1
            self.twins.call("allocate", request, num_too_many)
            if request.request_id in self.twins.oracle.manager.held:
                self._impersonate(request)
        if self.waiting:
            request = self.rng.choice(self.waiting)
            self.twins.call("free", request)
            self.twins.call("get_num_common_prefix_pages", request, 1)
            num_hit_tokens = self._look_up(request)
            self.twins.call("allocate", request, 1, num_hit_tokens + self.page_size)
