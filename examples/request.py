"""Requests and their sampling parameters."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index

__all__ = ["Candidates", "Request", "SamplingParams"]

Candidates = Sequence[tuple[int, float]]
"""Token ids and the logarithms of their probabilities."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters. Temperature 0 is greedy, top-k 0 is the whole vocabulary, `stop_token_id` ends the answer. Raise
    ValueError for values out of range.
    """

    max_tokens: int = 32
    temperature: float = 0.0
    top_k: int = 0
    seed: int = 0
    stop_token_id: int | None = None

    def __post_init__(self) -> None:
        """Check the ranges; NaN is out of range too."""
        for name, least in (("max_tokens", 1), ("temperature", 0), ("top_k", 0), ("seed", 0)):
            if not least <= getattr(self, name) < 2**31:
                raise ValueError(f"{name}: got {getattr(self, name)}, allowed: {least} to 2**31 - 1")


class Request:
    """A prompt and its generated tokens. A preempted request keeps its tokens, and is admitted again with all of them.

    While a request runs, the batch has its tokens. It gets them after each step if it streams, otherwise when it leaves its
    row.
    """

    def __init__(self, prompt: Sequence[int], params: SamplingParams, number: int = 0, streams: bool = False) -> None:
        """Make a request from token ids; raise TypeError unless they are integers. `number` is its order of arrival."""
        self.token_ids = [index(token_id) for token_id in prompt]
        self.num_prompt_tokens = len(self.token_ids)
        self.params = params
        self.number = number
        self.streams = streams
        self.samples: list[Request] = []  # samples of the same prompt, which fork before its last token
        self.candidates: Candidates = ()  # the most probable next tokens of a beam, once its last token is computed
        self.row = -1  # this and the next field describe the last admission, or fork
        self.num_cached_tokens: int | None = None
        self.drafts: list[int] = []  # drafts in the step planned last

    @property
    def request_id(self) -> str:
        """The name by which the store's tier knows the request. Samples and beams of a prompt share it, as its pages."""
        return str(self.number)

    @property
    def own_token_ids(self) -> list[int]:
        """The tokens that its row computes. If it has samples, each of them computes the last one."""
        return self.token_ids[:-1] if self.samples else self.token_ids

    @property
    def output(self) -> list[int]:
        """The tokens generated so far."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_sampled(self) -> bool:
        """Whether the step that computes its due tokens samples the next one. If it has samples, each samples its own."""
        return not self.samples

    @property
    def is_finished(self) -> bool:
        """Whether the answer has its last token."""
        num_generated = len(self.token_ids) - self.num_prompt_tokens
        has_stopped = num_generated > 0 and self.token_ids[-1] == self.params.stop_token_id
        return has_stopped or num_generated == self.params.max_tokens
