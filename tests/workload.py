"""Random work for twins, request by request. Prompts come from a few families over a tiny vocabulary, and pools are tiny, so
that hits, duplicates, evictions and shortage are all frequent.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

from features import PLAIN, Actions, Features, Span, Workload, random_retention, random_span, run_to_end
from oracle import NULL_PAGE
from oracle_kinds import Mamba
from settings import Setting
from twin_engine import (
    WITH_LOGPROBS,
    WITHOUT_LOGPROBS,
    Engine,
    Request,
)
from twins import Twins

MAX_WAITING = 4
NUM_REMEMBERED = 6
PLACEHOLDER_TOKEN = 9
FIRST_UNIQUE_TOKEN = 1000


class RandomWorkload(Workload):
    """Drives an engine at random."""

    def __init__(self, setting: Setting, twins: Twins, num_pages: int, rng: Random, features: Features = PLAIN) -> None:
        self.max_tokens = setting.max_model_len - 1
        super().__init__(setting, twins, num_pages, rng, features)
        self.habits = setting.habits
        self.page_size = setting.page_size
        self.engine = Engine(twins)
        self.histories: deque[list[int]] = deque(maxlen=NUM_REMEMBERED)
        self.pinned: deque[tuple[Request, Span]] = deque(maxlen=NUM_REMEMBERED)
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
        if self.features.forks:
            actions |= {self.fork: 1.5, self.misuse_fork: 0.2}
        if self.features.pins:
            actions |= {self.pin: 3, self.unpin: 2}
        if self.features.retention:
            actions |= {self.retain: 4, self.protect: 2}
        if self.features.external:
            actions |= {self.commit: 3, self.fail: 2, self.cancel: 0.5}
        return self._common_actions(actions)

    def any_request(self) -> Request | None:
        """Choose one of all requests, if there are any."""
        requests = [*self.engine.running, *self.engine.waiting, *self.engine.pending]
        return self.rng.choice(requests) if requests else None

    def held_by_any(self) -> list[int]:
        request = self.any_request()
        held = self.twins.oracle.manager.get_page_ids(request.request_id) if request is not None else ()
        return [page_id for page_ids in held for page_id in page_ids]

    # requests come

    def submit(self) -> None:
        """Queue a request, unless enough are waiting."""
        if len(self.engine.waiting) < MAX_WAITING:
            token_ids = self._prompt()
            self.engine.submit(token_ids, **self._attributes(token_ids))

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
            attributes |= rng.choice((self._tenant, self._vision))(token_ids)
        return attributes

    def _tenant(self, token_ids: list[int]) -> dict[str, Any]:
        rng = self.rng
        return {"cache_salt": rng.choice((None, "salt", "pepper")), "lora_id": rng.choice((None, 1, "tuned"))}

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
        if not self.engine.waiting:
            return
        rng, request = self.rng, self.rng.choice(self.engine.waiting)
        num_hit_tokens = self.engine.look_up(request, self._placement())
        num_left = request.num_tokens - num_hit_tokens
        num_external = self._num_external_tokens(num_left)
        num_left -= num_external
        if num_external and self.features.external and rng.random() < 0.7:
            self.engine.admit(request, num_hit_tokens, 0, num_external, is_pending=True, **self._placement())
            return
        num_new = self._num_admitted(num_hit_tokens + num_external, num_left, 0 if num_external else 1)
        options = self._options()
        if self.engine.admit(request, num_hit_tokens, num_new, num_external, **options):
            self._cache_delayed(request, options)
        elif rng.random() < 0.3 and self.engine.running:
            self.engine.preempt(rng.choice(self.engine.running))

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
        """Return how many of the known tokens of a running request are computed; with states, often up to a checkpoint."""
        if self.features.states and self.rng.random() < 0.5:
            num_new = self.twins.call("find_next_checkpoint", request) - request.num_computed_tokens
            if num_new <= num_left:
                return num_new
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
        request = self.any_request()
        if request is not None:
            self._finish(request)

    def _finish(self, request: Request) -> None:
        self.histories.append(list(request.all_token_ids))
        self.engine.finish(request)

    def drain(self) -> None:
        self.let_go()
        for request in [*self.engine.running, *self.engine.pending]:
            self.engine.finish(request)
        self.reset()

    # forks

    def fork(self) -> None:
        """Let any running request go on twice."""
        if self.engine.running:
            for _ in range(self.rng.choice((1, 1, 2, 3))):
                self.engine.fork(self.rng.choice(self.engine.running))

    def misuse_fork(self) -> None:
        """Fork to a request that has other tokens or pages, or from one without pages."""
        if len(self.engine.running) < 2:
            return
        first, second = self.rng.sample(self.engine.running, 2)
        self.twins.call("fork", first, second)
        other = replace(first, request_id="other", num_computed_tokens=first.num_computed_tokens + 1)
        self.twins.call("fork", first, other)
        if first.num_computed_tokens >= self.page_size and self.setting.enable_caching:
            tokens = [(token + 1) % 3 for token in first.all_token_ids]
            self.twins.call("fork", first, replace(first, request_id="other", all_token_ids=tokens))
        self.twins.call("free_page_hashes", other)
        if self.engine.waiting:
            waiting = self.rng.choice(self.engine.waiting)
            self.twins.call("fork", waiting, replace(waiting, request_id="other"))
            self.twins.call("free_page_hashes", other)

    # pins and levels

    def pin(self) -> None:
        """Pin what a request holds, or would hit."""
        request = self.any_request()
        if request is not None:
            span = random_span(self.rng, request.num_tokens)
            if self.twins.call("pin", request, *span):
                self.pinned.append((replace(request, all_token_ids=list(request.all_token_ids)), span))

    def unpin(self) -> None:
        """Unpin by the request that pinned, as it was then, or by any."""
        request = self.any_request()
        if self.pinned and self.rng.random() < 0.7:
            request, span = self.rng.choice(self.pinned)
            request = replace(request, request_id="unpins")
            self.twins.call("unpin", request, *span)
            self.twins.call("free_page_hashes", request)
        elif request is not None:
            self.twins.call("unpin", request, *random_span(self.rng, request.num_tokens))

    def retain(self) -> None:
        """Retain what a request holds, or would hit."""
        request = self.any_request()
        if request is not None:
            self.twins.call("retain", request, *random_span(self.rng, request.num_tokens), **random_retention(self.rng))

    def protect(self) -> None:
        """Protect what waits, mostly, or nothing."""
        waiting = self.engine.waiting if self.rng.random() < 0.8 else []
        self.twins.call("protect", [*waiting, *self.engine.running] if self.rng.random() < 0.2 else waiting)

    # tokens from elsewhere, and from the tier

    def commit(self) -> None:
        """End a transfer: all that a state needs came, or more or fewer tokens than a request waits for."""
        self._arrive("commit_external")

    def fail(self) -> None:
        self._arrive("fail_external")

    def _arrive(self, name: str) -> None:
        self.take_in_time()
        if not self.engine.pending:
            return
        request, num_external = self.rng.choice(list(self.engine.pending.items()))
        has_state = any(group.kind == "mamba" for group in self.setting.groups)
        nums = (num_external,) if has_state and name == "commit_external" else (*range(num_external), num_external, 10**6)
        self.engine.arrive(request, name, self.rng.choice((num_external, self.rng.choice(nums))))

    def cancel(self) -> None:
        if self.engine.pending:
            self.engine.preempt(self.rng.choice(list(self.engine.pending)))

    def go_back(self) -> None:
        """Let requests compute wrong tokens again: from the start, where a state or a window needs it."""
        for request in [*self.engine.running, *self.engine.pending]:
            num_tokens = self.twins.call("find_wrong_token", request)
            if num_tokens is not None:
                request.num_computed_tokens = min(request.num_computed_tokens, num_tokens)
                if request in self.engine.pending or self._lacks_pages(request):
                    self.engine.preempt(request)

    def _lacks_pages(self, request: Request) -> bool:
        """Whether a request cannot go on, since a state, or a page that a window has left, is not that of its tokens."""
        manager = self.twins.oracle.manager
        groups = zip(manager.kinds, manager.get_page_ids(request.request_id), strict=True)
        return any(isinstance(kind, Mamba) or kind.lacks_page(pages, request.num_computed_tokens) for kind, pages in groups)

    # questions and interventions

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
    features: Features = PLAIN,
) -> Twins:
    """Run a seed's workload to its end and return the twins."""
    rng = Random(seed)
    num_pages = rng.choice(setting.num_pages)
    return run_to_end(workload_class(setting, make_twins(setting, num_pages), num_pages, rng, features), seed, num_calls)
