"""Requests, and a small engine that knows what a scheduler does with them: submit, admit, grow, preempt, finish. It keeps its
books and decides nothing.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from oracle import PREEMPTED, RUNNING
from twins import Twins

WAITING = 1
NUM_FREE_IDS = 3
NUM_FAMILIES = 3  # of prompts
VOCABULARY = range(3)
WITH_LOGPROBS = SimpleNamespace(prompt_logprobs=1)
WITHOUT_LOGPROBS = SimpleNamespace(prompt_logprobs=None)


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


class Engine:
    """Requests on their way through twins. A request that does not fit stays as it was."""

    def __init__(self, twins: Twins) -> None:
        self.twins = twins
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.pending: dict[Request, int] = {}  # tokens from elsewhere for which it waits
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
        is_pending: bool = False,
        **options: Any,
    ) -> bool:
        """Start a waiting request that was looked up just now, or let it wait for the tokens from elsewhere."""
        if num_external_tokens:
            options["num_external_computed_tokens"] = num_external_tokens
        if is_pending:
            options["delay_cache_pages"] = True
        if self.twins.call("allocate", request, num_new_tokens, num_hit_tokens, **options) is None:
            return False
        self.waiting.remove(request)
        self.twins.live_request_ids[request.request_id] = None
        request.status = RUNNING
        request.num_computed_tokens = num_hit_tokens
        if is_pending:
            self.pending[request] = num_external_tokens
        else:
            self.running.append(request)
            request.num_computed_tokens += num_external_tokens + num_new_tokens
        return True

    def arrive(self, request: Request, name: str, num_tokens: int) -> None:
        """End the transfer of a pending request; it runs, or waits again if nothing is left of it."""
        num_computed_tokens = self.twins.call(name, request, num_tokens)
        if num_computed_tokens is None:
            return
        request.num_computed_tokens = num_computed_tokens
        if num_computed_tokens:
            del self.pending[request]
            self.running.append(request)
        else:
            self.preempt(request)

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
        if request not in self.waiting:
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
        if request in self.pending:
            del self.pending[request]
        else:
            self.running.remove(request)
        self.twins.call("free", request, **options)
        del self.twins.live_request_ids[request.request_id]
