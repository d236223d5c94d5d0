"""`PrefillClient`: lets other engines compute prompts, and pulls their pages. Needs the extra ``pagepool[peers]``."""

import logging
import os
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from pagepool.arguments import MAX_SIZE, require_callable, require_int, require_number, require_text
from pagepool.errors import ArgumentError, ArgumentTypeError, PeerError, shown
from pagepool.manager import CacheManager
from pagepool.peers.asker import MAX_SECONDS, Answered, Asker
from pagepool.peers.crossing import Crossing
from pagepool.peers.link import Link, Pulled
from pagepool.peers.prompts import MAX_TOKENS, NUM_NAME_BYTES, VERSION, Chunk, Ended, More, Wanted, decode_news, encode
from pagepool.request import RequestTraits, TokenIds
from pagepool.stores.namespace import warn_of_seed

logger = logging.getLogger(__name__)

NO_TRAITS = RequestTraits()


class Arrival(NamedTuple):
    """Arrived pages of a prompt, or the end of one after a failure.

    With `parts`, copy the pages at `places`, by cache group, of the row `name` from them, then call
    ``batch.commit_external(row, num_tokens, is_last=is_last)``. With an `error` call ``batch.fail_external(row, num_tokens)``:
    these tokens have arrived before and are of use, with windows, chunks and states none.
    """

    name: Hashable
    num_tokens: int
    """Tokens behind the hits that have arrived by now."""
    places: Sequence[range]
    """Places among the row's pages, by cache group."""
    parts: Sequence[Any]
    is_last: bool
    error: PeerError | None


@dataclass(eq=False, slots=True)
class Fetching:
    """A prompt whose pages are on their way."""

    name: Hashable
    address: str
    prompt: bytes  # its random name at the other engine
    num_hit_tokens: int
    end: int  # tokens of the prompt
    num_arrived_tokens: int  # hits included
    num_chunks: int = 0  # chunks that have arrived
    chunk: Chunk | None = None  # the chunk that is being pulled


class PrefillClient:
    """Lets other engines, each with a `PrefillServer`, compute prompts, and pulls the pages that this engine lacks.

    The engine admits a request with ``num_external_tokens``, as many as `find_end` says, and calls `ask`. It calls `poll` in
    each step, and `cancel` if the request ends before its pages have arrived.

    A peer that is dead, slow, of another model or with other bytes costs time, never tokens: the request computes what has not
    arrived.
    """

    def __init__(
        self,
        manager: CacheManager,
        link: Link,
        namespace: str,
        secret: bytes,
        make_parts: Callable[[list[int]], Sequence[Any]],
        *,
        seconds: float = 10.0,
    ) -> None:
        """Start a thread. `namespace` and `secret` are those of the servers. ``make_parts(nums_pages)`` returns the parts into
        which the `link` pulls these numbers of pages, by cache group; parts are not used again before they arrive.

        A request waits for an answer at most `seconds`, and so for each pull as long as the link does. Raise ArgumentTypeError
        or ArgumentError for other values, and for a manager with cross-attention.
        """
        if not isinstance(manager, CacheManager):
            raise ArgumentTypeError(f"manager: got {type(manager).__name__}, allowed: CacheManager")
        if not isinstance(link, Link):
            raise ArgumentTypeError(f"link: got {type(link).__name__}, allowed: an object with the methods of Link")
        self._seconds = require_number("seconds", seconds, 0.001, MAX_SECONDS)
        self._make_parts = require_callable("make_parts", make_parts)
        self._crossing, self._link = Crossing(manager), link
        self._max_num_tokens = min(manager.max_model_len, MAX_TOKENS)
        self._asker = Asker(secret, namespace, name="prefill-asks")
        self._of_name: dict[Hashable, Fetching] = {}
        self._of_question: dict[int, Fetching] = {}
        self._of_job: dict[int, Fetching] = {}
        warn_of_seed(manager)
        self._close = weakref.finalize(self, self._asker.close)

    def find_end(self, num_tokens: int) -> int:
        """Return how many leading tokens of a prompt of `num_tokens` another engine should compute: all but the last one, from
        which this engine samples the next. With states that are kept it is a place where later requests can resume, so their
        state is cached here. Admit the request with ``num_external_tokens=find_end(num_tokens) - probe(...)``, if above 0.
        """
        return self._crossing.find_end(require_int("num_tokens", num_tokens, 1, MAX_SIZE))

    def ask(
        self,
        name: Hashable,
        address: str,
        token_ids: TokenIds,
        num_hit_tokens: int,
        *,
        traits: RequestTraits = NO_TRAITS,
    ) -> None:
        """Let the engine with a `PrefillServer` at an address compute all of `token_ids`: those behind the first
        `num_hit_tokens`, which hit here, are the row's external tokens. `poll` returns what has arrived under `name`, until the
        last chunk or an error. O(tokens).

        Raise ArgumentError for the name of a prompt on its way, for no external tokens or more than a million tokens, and
        for traits of media; ArgumentTypeError for other types.
        """
        require_text("address", address)
        if not isinstance(traits, RequestTraits):
            raise ArgumentTypeError(f"traits: got {type(traits).__name__}, allowed: RequestTraits")
        if traits.mm_features or traits.num_encoder_tokens:
            raise ArgumentError("traits: got media, allowed: requests of tokens alone")
        if name in self._of_name:
            raise ArgumentError(f"name: got {shown(name)}, which is on its way, allowed: another one")
        tokens = np.asarray(token_ids)
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ArgumentTypeError(f"token_ids: got {tokens.dtype} {tokens.shape}, allowed: ints in 1 dimension")
        if not 1 <= len(tokens) <= self._max_num_tokens or tokens.min() < 0 or tokens.max() >= 1 << 31:
            raise ArgumentError(
                f"token_ids: got {len(tokens)}, allowed: 1 to {self._max_num_tokens}, each 0 to {(1 << 31) - 1}"
            )
        num_hits = require_int("num_hit_tokens", num_hit_tokens, 0, len(tokens) - 1)
        prompt = os.urandom(NUM_NAME_BYTES)
        try:
            question = encode(
                Wanted(
                    VERSION,
                    prompt,
                    tokens.astype("<i4").tobytes(),
                    num_hits,
                    traits.cache_salt,
                    traits.lora_id,
                    traits.session_id,
                    traits.tenant,
                )
            )
        except OverflowError:
            raise ArgumentError("traits: got an int of more than 64 bits, allowed: smaller ones") from None
        fetching = Fetching(name, address, prompt, num_hits, len(tokens), num_hits)
        self._ask(fetching, question)
        self._of_name[name] = fetching

    def poll(self) -> list[Arrival]:
        """Return the pages arrived since the last call, and the failed prompts. O(answers)."""
        arrivals: list[Arrival] = []
        for answered in self._asker.poll():
            fetching = self._of_question.pop(answered.number, None)
            if fetching is not None and self._of_name.get(fetching.name) is fetching:
                self._go_on(fetching, answered, arrivals)
        for pulled in self._link.poll():
            fetching = self._of_job.pop(pulled.job, None)
            if fetching is not None and self._of_name.get(fetching.name) is fetching:
                self._take(fetching, pulled, arrivals)
        return arrivals

    def cancel(self, name: Hashable) -> None:
        """Pull no more pages of a prompt; an unknown name does nothing. Parts on their way are dropped."""
        fetching = self._of_name.pop(name, None)
        if fetching is not None:
            self._end(fetching)

    def close(self) -> None:
        """Drop all prompts, and end the thread. The link stays open. A second call has no effect."""
        self._of_name.clear()
        self._close()

    def _ask(self, fetching: Fetching, question: bytes) -> None:
        self._of_question[self._asker.ask(fetching.address, question, seconds=self._seconds)] = fetching

    def _end(self, fetching: Fetching) -> None:
        """Tell the other engine that no more is needed; if that is lost, it notices the silence."""
        self._asker.ask(fetching.address, encode(Ended(fetching.prompt)), seconds=self._seconds, then=ignore_answer)

    def _fail(self, fetching: Fetching, error: Exception, arrivals: list[Arrival]) -> None:
        del self._of_name[fetching.name]
        self._end(fetching)
        failed = error if isinstance(error, PeerError) else PeerError(f"peer {fetching.address}: {error}")
        num_tokens = fetching.num_arrived_tokens - fetching.num_hit_tokens if self._crossing.are_all_full else 0
        arrivals.append(Arrival(fetching.name, num_tokens, (), (), is_last=True, error=failed))

    def _go_on(self, fetching: Fetching, answered: Answered, arrivals: list[Arrival]) -> None:
        """Pull the chunk of an answer, or ask again."""
        try:
            if answered.error is not None:
                raise answered.error
            chunk = decode_news(answered.body).chunk
            if chunk is None:
                self._ask(fetching, encode(More(fetching.prompt, fetching.num_chunks)))
            else:
                self._pull(fetching, chunk)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, PeerError, ArgumentError, ArgumentTypeError) as error:
            self._fail(fetching, error, arrivals)

    def _pull(self, fetching: Fetching, chunk: Chunk) -> None:
        """Pull the pages of a chunk."""
        if not fetching.num_arrived_tokens < chunk.num_tokens <= fetching.end:
            got = f"tokens up to {chunk.num_tokens}, behind {fetching.num_arrived_tokens} of {fetching.end}"
            raise PeerError(f"peer {fetching.address}: got {got}")
        fetching.chunk, places = chunk, self._list_places(fetching, chunk)
        parts = self._make_parts([len(chosen) for chosen in places])
        self._of_job[self._link.pull(chunk.address, chunk.number, parts)] = fetching

    def _take(self, fetching: Fetching, pulled: Pulled, arrivals: list[Arrival]) -> None:
        """Return a chunk that has arrived, and ask for the next one."""
        chunk = fetching.chunk
        if pulled.parts is None or chunk is None:
            self._fail(fetching, pulled.error or PeerError("nothing was pulled"), arrivals)
            return
        places, is_last = self._list_places(fetching, chunk), chunk.num_tokens == fetching.end
        fetching.num_arrived_tokens, fetching.num_chunks = chunk.num_tokens, fetching.num_chunks + 1
        num_tokens = chunk.num_tokens - fetching.num_hit_tokens
        arrivals.append(Arrival(fetching.name, num_tokens, places, pulled.parts, is_last, error=None))
        if is_last:
            del self._of_name[fetching.name]
            self._end(fetching)
        else:
            self._ask(fetching, encode(More(fetching.prompt, fetching.num_chunks)))

    def _list_places(self, fetching: Fetching, chunk: Chunk) -> list[range]:
        return self._crossing.list_places(fetching.num_hit_tokens, fetching.num_arrived_tokens, chunk.num_tokens, fetching.end)


def ignore_answer(_answered: Answered) -> None:
    """Do nothing: the other engine has heard it, or is gone."""
