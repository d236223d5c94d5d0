"""What managers read of an engine's requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

WAITING = 1
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
    resume_at: Sequence[int] = ()
    session_id: str | None = None
    tenant: str | None = None
    num_prompt_tokens: int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def __repr__(self) -> str:
        return f"{self.request_id}({self.num_computed_tokens} of {self.num_tokens})"
