"""The interface of requests, their status, and a simple request for use without an engine."""

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import IntEnum
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from pagepool._core import are_plain_token_ids
from pagepool.arguments import MAX_SIZE, as_list, require_flag, require_int, require_name, require_token_counts
from pagepool.errors import ArgumentTypeError

__all__ = [
    "EngineRequest",
    "EngineRequestStatus",
    "LoraId",
    "Request",
    "RequestTraits",
    "Salt",
    "TokenIds",
]

TokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]
"""Token ids by position: a list, or an array of ints. An int32 array is read without a copy."""


Salt: TypeAlias = int | str | bytes
"""A salt: a name, or a number of at most 256 bits."""

LoraId: TypeAlias = Salt | tuple[Salt, Salt]
"""The id of an adapter: a number of at most 256 bits, a name, or a pair of name and path, as vLLM hashes it."""


class EngineRequestStatus(IntEnum):
    """The status of a request in an engine. Requests with values above `PREEMPTED` are finished."""

    WAITING = 1
    WAITING_FOR_FSM = 2
    WAITING_FOR_REMOTE_KVS = 3
    RUNNING = 4
    PREEMPTED = 5
    FINISHED_STOPPED = 6
    FINISHED_LENGTH_CAPPED = 7
    FINISHED_ABORTED = 8
    FINISHED_IGNORED = 9

    def __str__(self) -> str:
        """Return the name alone, as in logs of engines."""
        return self.name

    @staticmethod
    def is_finished(status: "EngineRequestStatus") -> bool:
        """Whether a request with this status will never run again.

        >>> EngineRequestStatus.is_finished(EngineRequestStatus.PREEMPTED)
        False
        """
        return status > EngineRequestStatus.PREEMPTED


class Request(Protocol):
    """The attributes of a request read by a manager. A manager never writes to a request.

    Tokens may be appended between calls. After a call that returned None or raised, tokens without slots may be removed or
    replaced; after the request was freed, all tokens may be: see docs/engines.md.

    Counts and status may be NumPy scalars. A missing attribute, or one of another type, raises ArgumentTypeError naming it.

    Optional attributes: `cache_salt` (requests with different salts share no pages), `lora_id` (requests with different
    adapters share no pages: an int, a string, or a pair of name and path), `mm_features` (images and the like: objects with
    `mm_hash` or `identifier`, and `placeholder_range` or `mm_position` with `offset` and `length` in tokens), and `has_vision`
    (if true without features, the request shares pages with no other, even one of the same id). Media in an attribute such as
    `pixel_values` or `multi_modal_data` have the same effect. Embeddings in place of tokens, in `prompt_embeds`,
    `inputs_embeds`, `input_embeds` or `input_embeddings`, are read at the first look-up: arrays in host memory, and lists of
    numbers, share the pages in which their rows are equal; other objects share none.

    With a `CrossAttentionSpec`, `num_encoder_tokens` is the number of tokens of an encoder's output, read when the request gets
    its first pages, and `cross_key` (int, string or bytes) names the medium behind it: requests with one key share its pages,
    and requests with other media share no pages. Without a key nothing of the request is shared.

    More optional attributes, read when the request gets its first pages: `num_prompt_tokens` (an int: the tokens behind are of
    its answer, which matters with a `ReferenceWindowSpec`, and is read at each look-up too; without it or with None, all tokens
    known by then are of the prompt), `resume_at` (up to four numbers of tokens where other
    requests are likely to diverge, such as the end of a system prompt: with sliding windows they can resume there; none for a
    model with states that are not kept), `session_id` (a string: the session that will own the pages cached by the request, see
    `CacheManager.expect_session`), and `tenant` (a string: the tenant charged for the pages the request takes, see
    `CacheManager.set_shares`).
    """

    @property
    def request_id(self) -> str:
        """Unique among the requests that hold pages. A call for another object with the id of a request that holds pages raises
        ArgumentError.
        """

    @property
    def all_token_ids(self) -> TokenIds:
        """Prompt and generated tokens so far, `[num_tokens]`; sliceable."""

    @property
    def num_tokens(self) -> int:
        """Length of `all_token_ids`."""

    @property
    def num_computed_tokens(self) -> int:
        """Number of leading tokens with keys and values in their pages."""

    @property
    def sampling_params(self) -> Any:
        """None, or an object. If its `prompt_logprobs` is not None, the request takes no prefix hits."""

    @property
    def status(self) -> int:
        """An `EngineRequestStatus`, or an engine's own int of the same value."""


@dataclass(slots=True)
class EngineRequest:
    """A request for use without an engine: tests, simulations, examples.

    `all_token_ids` starts as a copy of `prompt_token_ids`. The caller updates `num_computed_tokens` and `status`. Token ids are
    ints of at least 0; others raise ArgumentTypeError or ArgumentError.

    >>> request = EngineRequest("chat-1", [11, 12, 13])
    >>> request.append_output_token_ids(14)
    >>> request.append_output_token_ids([15, 16])
    >>> request.num_tokens, request.all_token_ids[-3:]
    (6, [14, 15, 16])
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    _: KW_ONLY
    num_computed_tokens: int = 0
    sampling_params: Any = None
    status: EngineRequestStatus = EngineRequestStatus.WAITING
    mm_features: Sequence[Any] = ()
    cache_salt: Salt | None = None
    lora_id: LoraId | None = None
    resume_at: Sequence[int] = ()
    session_id: str | None = None
    tenant: str | None = None
    num_encoder_tokens: int = 0
    cross_key: int | str | bytes | None = None
    all_token_ids: list[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Copy the prompt's tokens."""
        self.all_token_ids = _list_token_ids("prompt_token_ids", self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens so far."""
        return len(self.all_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    def append_output_token_ids(self, token_ids: int | Sequence[int]) -> None:
        """Append one generated token, or several in order."""
        self.all_token_ids.extend(
            _list_token_ids("token_ids", [token_ids] if isinstance(token_ids, int | np.integer) else token_ids)
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RequestTraits:
    """Salt, session, tenant and the like of a row's request: ``batch.admit(row, token_ids, traits=RequestTraits(tenant="a"))``.

    Make one object for a request, and pass it at each try. Its attributes do not change; do not change `mm_features` in place.
    Raise ArgumentError for values out of range, ArgumentTypeError for other types. Errors of `cache_salt`, `lora_id` and
    `mm_features` come from `RunningBatch.admit`.

    >>> RequestTraits(session_id="chat-1", resume_at=[64]).resume_at
    (64,)
    """

    cache_salt: Salt | None = None
    """Requests with different salts share no pages. A request with images but no features needs a salt of its own, such as
    ``secrets.token_hex(16)``, and the same salt when it returns, since a row does not know the id of its request. For
    embeddings in place of tokens, take a digest of them, such as ``sha256(embeddings.tobytes()).hexdigest()``.
    """
    lora_id: LoraId | None = None
    """Requests with different adapters share no pages."""
    mm_features: Sequence[Any] | None = None
    """Images and the like, as in `Request`."""
    dp_shard: int | None = None
    """Shard of the pool, modulo the batch's `data_parallel_size`: all hits and pages of the row come from it, now and later."""
    look_up: bool = True
    """False: no prefix is taken, as needed for ``prompt_logprobs``."""
    is_preempted: bool = False
    """Whether the request ran before; `CacheManager.stats` counts it separately."""
    num_prompt_tokens: int | None = None
    """Known tokens of the prompt, where those behind are of the answer, as after a preemption; None: all. Only a
    `ReferenceWindowSpec` asks.
    """
    resume_at: Sequence[int] = ()
    """Up to four numbers of tokens where other requests are likely to diverge, as in `Request`; none for a model with states
    that are not kept.
    """
    session_id: str | None = None
    """The session that owns the pages cached by the row: see `CacheManager.expect_session`."""
    tenant: str | None = None
    """The tenant charged for the pages taken by the row: see `CacheManager.set_shares`."""

    num_encoder_tokens: int = 0
    """Tokens of an encoder's output, with a `CrossAttentionSpec`."""
    cross_key: int | str | bytes | None = None
    """Name of the medium behind them, such as a digest of an audio or a picture. Rows with other media share no pages; without
    a name nothing of the row is shared.
    """

    def __post_init__(self) -> None:
        """Check the values, and store them as values of plain Python types."""
        for name in ("look_up", "is_preempted"):
            if type(getattr(self, name)) is not bool:
                object.__setattr__(self, name, require_flag(name, getattr(self, name)))
        for name in ("session_id", "tenant"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, require_name(name, getattr(self, name)))
        if self.dp_shard is not None:
            object.__setattr__(self, "dp_shard", require_int("dp_shard", self.dp_shard, 0))
        num_encoder_tokens = require_int("num_encoder_tokens", self.num_encoder_tokens, 0, MAX_SIZE)
        object.__setattr__(self, "num_encoder_tokens", num_encoder_tokens)
        if self.num_prompt_tokens is not None:
            checked = require_int("num_prompt_tokens", self.num_prompt_tokens, 0, MAX_SIZE)
            object.__setattr__(self, "num_prompt_tokens", checked)
        object.__setattr__(self, "resume_at", tuple(require_token_counts("resume_at", self.resume_at, MAX_SIZE)))


def _list_token_ids(name: str, token_ids: Iterable[int]) -> list[int]:
    if isinstance(token_ids, np.ndarray) and token_ids.ndim != 1:
        raise ArgumentTypeError(f"{name}: got an array of {token_ids.ndim} dimensions, allowed: 1")
    if type(token_ids) is list:
        listed = list(token_ids)
    else:
        listed = token_ids.tolist() if isinstance(token_ids, np.ndarray) else as_list(name, token_ids, "a sequence of ints")
    if are_plain_token_ids(listed):
        return listed
    return [require_int(f"{name}[{i}]", token_id, 0) for i, token_id in enumerate(listed)]
