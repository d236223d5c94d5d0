"""`PrefillServer`: computes prompts for other engines. Needs the extra ``pagepool[peers]``."""

import itertools
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from pagepool._core import Lease
from pagepool.arguments import as_list, require_int, require_number
from pagepool.errors import ArgumentError, ArgumentTypeError
from pagepool.manager import CacheManager
from pagepool.peers.answerer import DEFAULT_ADDRESS, Answerer, Asked
from pagepool.peers.crossing import Crossing, choose_pages
from pagepool.peers.link import Link
from pagepool.peers.prompts import (
    MAX_QUESTION_BYTES,
    MAX_TOKENS,
    NUM_NAME_BYTES,
    TOKEN_BYTES,
    VERSION,
    Chunk,
    More,
    News,
    Wanted,
    decode_question,
    encode,
    read_lora_id,
    read_salt,
)
from pagepool.request import RequestTraits
from pagepool.stores.namespace import warn_of_seed

MAX_PROMPTS = 4096
"""Most prompts that wait or run for other engines; others are refused."""
MAX_SECONDS = 1e6
SIGNS_OF_LIFE = 4
"""Answers without a chunk to questions that wait, in each `lease_seconds`."""


@dataclass(eq=False, slots=True)
class RemotePrompt:
    """A prompt that another engine wants to be computed: all of `token_ids`, int32. That engine has the pages of the first
    `num_hit_tokens` tokens. `traits` are those of its request.
    """

    token_ids: npt.NDArray[np.int32]
    num_hit_tokens: int
    traits: RequestTraits
    num_offered_tokens: int
    """Tokens whose pages were offered, or are not needed."""


@dataclass(eq=False, slots=True)
class Offered:
    """A chunk of a prompt, with the leases of its pages."""

    chunk: Chunk
    leases: Sequence[Lease]


@dataclass(eq=False, slots=True)
class Serving:
    """A prompt and its chunks. Threads hold the lock of the `Prompts`."""

    name: bytes
    prompt: RemotePrompt
    heard_at: float  # time of the last question
    offers: list[Offered] = field(default_factory=list)
    num_arrived: int = 0  # chunks that the other engine has
    num_ended: int = 0  # chunks whose offers have ended
    waiting: Asked | None = None  # the question for a chunk that is not there yet
    is_over: bool = False

    def answer(self) -> None:
        """Answer the question for the next chunk, if it is there."""
        if self.waiting is not None and len(self.offers) > self.num_arrived:
            self.waiting.answer(encode(News(self.offers[self.num_arrived].chunk)))
            self.waiting = None

    def show_life(self) -> None:
        """Answer the question for the next chunk without one."""
        if self.waiting is not None:
            self.waiting.answer(encode(News()))
            self.waiting = None


class Prompts:
    """The prompts of other engines. The server's thread calls `handle`; all other callers hold the lock."""

    def __init__(self, max_num_tokens: int) -> None:
        """Refuse prompts of more than `max_num_tokens`."""
        self.lock = threading.RLock()
        self.new: list[RemotePrompt] = []
        self.of_prompt: dict[RemotePrompt, Serving] = {}
        self._of_name: dict[bytes, Serving] = {}
        self._max_num_tokens = min(max_num_tokens, MAX_TOKENS)

    def end(self, serving: Serving, reason: str) -> None:
        """Drop a prompt, and say why if the other engine still waits. `PrefillServer.poll` ends its offers."""
        serving.is_over = True
        self._of_name.pop(serving.name, None)
        if serving.waiting is not None:
            serving.waiting.refuse(reason)
            serving.waiting = None

    def handle(self, asked: Asked) -> None:
        """Answer a question now or later."""
        try:
            question = decode_question(asked.body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            asked.refuse("its question is malformed")
            return
        with self.lock:
            serving = self._of_name.get(question.prompt)
            if isinstance(question, Wanted):
                fault = "the name of the prompt is not new" if serving is not None else self._begin(question)
            elif serving is None:
                fault = "the prompt is unknown, or was dropped"
            elif isinstance(question, More):
                fault = self._go_on(serving, question.num_chunks, asked)
            else:
                fault = None
                self.end(serving, "the prompt has ended")
            if fault is not None:
                asked.refuse(fault)
            elif not isinstance(question, More):
                asked.answer(encode(News()))

    def _begin(self, wanted: Wanted) -> str | None:
        """Take a prompt. Return why not, if it is refused."""
        num_tokens, num_odd = divmod(len(wanted.token_ids), TOKEN_BYTES)
        if wanted.version != VERSION or len(wanted.prompt) != NUM_NAME_BYTES:
            return f"the prompt has version {wanted.version}, here {VERSION}, or a malformed name"
        if len(self.of_prompt) >= MAX_PROMPTS:
            return f"more than {MAX_PROMPTS} prompts wait or run"
        if num_odd or not 0 <= wanted.num_hit_tokens < num_tokens <= self._max_num_tokens:
            return f"got {num_tokens} tokens, {wanted.num_hit_tokens} of them hits, allowed: {self._max_num_tokens}"
        token_ids = np.frombuffer(wanted.token_ids, "<i4").astype(np.int32)
        if token_ids.min() < 0:
            return "a token id is negative"
        try:
            traits = RequestTraits(
                cache_salt=read_salt(wanted.cache_salt),
                lora_id=read_lora_id(wanted.lora_id),
                session_id=wanted.session_id,
                tenant=wanted.tenant,
            )
        except (ValueError, TypeError) as error:
            return str(error)
        prompt = RemotePrompt(token_ids, wanted.num_hit_tokens, traits, wanted.num_hit_tokens)
        self.of_prompt[prompt] = self._of_name[wanted.prompt] = Serving(wanted.prompt, prompt, time.monotonic())
        self.new.append(prompt)
        return None

    def _go_on(self, serving: Serving, num_chunks: int, asked: Asked) -> str | None:
        """Note which chunks have arrived, and answer with the next one, once it is there. Return why not, if it is refused."""
        if not serving.num_arrived <= num_chunks <= len(serving.offers):
            return f"got {num_chunks} chunks, {len(serving.offers)} were offered"
        serving.num_arrived, serving.waiting, serving.heard_at = num_chunks, asked, time.monotonic()
        serving.answer()
        return None


class PrefillServer:
    """Computes prompts for other engines, whose `PrefillClient` asks for them, and lets these pull the pages.

    The engine calls `take` before each step and admits the prompts like others. Once a step with some of their tokens has ended
    well, it gathers the pages that `list_pages` names and calls `offer`: chunk by chunk, and at the prompt's end, before it
    computes anything behind it. Hits count as computed. It calls `poll` in each step. Each server has a link of its own.

    A prompt is dropped when the other engine ends it, or gives no sign of life for `lease_seconds`.
    """

    def __init__(
        self,
        manager: CacheManager,
        link: Link,
        namespace: str,
        secret: bytes,
        *,
        address: str = DEFAULT_ADDRESS,
        lease_seconds: float = 10.0,
    ) -> None:
        """Listen at an address, and start a thread. `namespace` is the result of `make_namespace`, and `secret` has at least 16
        random bytes; both are the same for all engines that share prompts. An offer of the `link` ends after `lease_seconds`.

        Raise ArgumentTypeError or ArgumentError for other values, and for a manager with cross-attention; EndpointError for an
        unusable address.
        """
        if not isinstance(manager, CacheManager):
            raise ArgumentTypeError(f"manager: got {type(manager).__name__}, allowed: CacheManager")
        if not isinstance(link, Link):
            raise ArgumentTypeError(f"link: got {type(link).__name__}, allowed: an object with the methods of Link")
        self._seconds = require_number("lease_seconds", lease_seconds, 0.001, MAX_SECONDS)
        self._crossing, self._link = Crossing(manager), link
        self._numbers = itertools.count(1)
        self._prompts = Prompts(manager.max_model_len)
        self._answerer = Answerer(
            secret,
            namespace,
            address,
            self._prompts.handle,
            name="prefill-answers",
            max_question_bytes=MAX_QUESTION_BYTES,
        )
        warn_of_seed(manager)
        self._close = weakref.finalize(self, self._answerer.close)

    @property
    def address(self) -> str:
        """The address for `PrefillClient.ask`."""
        return self._answerer.address

    def take(self) -> list[RemotePrompt]:
        """Return the prompts that have come since the last call, in their order."""
        with self._prompts.lock:
            taken, self._prompts.new = self._prompts.new, []
        return [prompt for prompt in taken if self.is_wanted(prompt)]

    def is_wanted(self, prompt: RemotePrompt) -> bool:
        """Whether another engine still waits for a prompt."""
        with self._prompts.lock:
            serving = self._prompts.of_prompt.get(prompt)
            return serving is not None and not serving.is_over

    def list_pages(self, prompt: RemotePrompt, page_ids: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """Return the pages that cross once the first `num_tokens` tokens of a prompt are computed, by cache group, out of the
        `page_ids` of its row or request: those that were not offered before and that the other engine lacks. With windows,
        chunks and states these are the pages that the next token reads, at the prompt's end. O(pages).
        """
        num_tokens = self._count_crossing(prompt, num_tokens)
        if num_tokens <= prompt.num_offered_tokens:
            return [[] for _ in page_ids]
        places = self._crossing.list_places(prompt.num_hit_tokens, prompt.num_offered_tokens, num_tokens, len(prompt.token_ids))
        is_short = [bool(chosen) and chosen[-1] >= len(ids) for ids, chosen in zip(page_ids, places, strict=False)]
        if len(page_ids) != len(places) or any(is_short):
            got, allowed = ", ".join(str(len(ids)) for ids in page_ids), f"all pages of {num_tokens} tokens"
            raise ArgumentError(f"page_ids: got {got} by group, allowed: {allowed}, in {len(places)} groups")
        return choose_pages(page_ids, places)

    def offer(self, prompt: RemotePrompt, num_tokens: int, parts: Sequence[Any], *, leases: Sequence[Lease] = ()) -> None:
        """Let the other engine pull the pages that `list_pages` returned for `num_tokens`, as `parts` of the link. If there are
        none yet, call this with the next chunk.

        The link reads the parts until the pages have arrived, the prompt is dropped, or `lease_seconds` have passed. If parts
        are the pages themselves and not copies, give `leases` of these for some seconds more: they are released then.
        """
        num_tokens = self._count_crossing(prompt, num_tokens)
        held = as_list("leases", leases, "a list of Lease")
        if not parts:
            raise ArgumentError("parts: got none, allowed: the pages that list_pages returned")
        if not self.is_wanted(prompt):
            for lease in held:
                lease.release()
            return
        number = next(self._numbers)
        self._link.offer(number, parts, seconds=self._seconds)
        prompt.num_offered_tokens = num_tokens
        with self._prompts.lock:
            serving = self._prompts.of_prompt[prompt]
            serving.offers.append(Offered(Chunk(self._link.address, number, num_tokens), held))
            serving.answer()

    def drop(self, prompt: RemotePrompt) -> None:
        """Compute no more of a prompt: the other engine computes the rest. A second call does nothing."""
        with self._prompts.lock:
            serving = self._prompts.of_prompt.get(prompt)
            if serving is not None:
                self._prompts.end(serving, "it is not computed")
        self.poll()

    def poll(self) -> None:
        """End the offers of arrived chunks, and drop prompts without a waiting engine. O(prompts)."""
        ended: list[Offered] = []
        now = time.monotonic()
        with self._prompts.lock:
            for serving in list(self._prompts.of_prompt.values()):
                if now > serving.heard_at + self._seconds:
                    self._prompts.end(serving, "it gave no sign of life")
                elif now > serving.heard_at + self._seconds / SIGNS_OF_LIFE:
                    serving.show_life()
                stop = len(serving.offers) if serving.is_over else serving.num_arrived
                ended += serving.offers[serving.num_ended : stop]
                serving.num_ended = stop
                if serving.is_over:
                    del self._prompts.of_prompt[serving.prompt]
        for offered in ended:
            self._link.withdraw(offered.chunk.number)
            for lease in offered.leases:
                lease.release()

    def close(self) -> None:
        """Drop all prompts, and end the thread. The link stays open. A second call has no effect."""
        with self._prompts.lock:
            for serving in self._prompts.of_prompt.values():
                self._prompts.end(serving, "the engine ends")
        self.poll()
        self._close()

    def _count_crossing(self, prompt: RemotePrompt, num_tokens: int) -> int:
        """Return the number of leading tokens whose pages can cross. Raise unless a prompt has `num_tokens`."""
        if not isinstance(prompt, RemotePrompt):
            raise ArgumentTypeError(f"prompt: got {type(prompt).__name__}, allowed: RemotePrompt")
        end = len(prompt.token_ids)
        return self._crossing.count_crossing(require_int("num_tokens", num_tokens, 0, end), end)
