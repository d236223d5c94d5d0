"""Whether moving the pages of a prompt from another engine takes less time than computing them."""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

from pagepool.replay.models.pages import ModelPages
from pagepool.replay.models.pools import ModelPools
from pagepool.specs import cdiv

PROMPTS = 8_000, 32_000, 100_000  # tokens
LONGEST = 1 << 24  # tokens


@dataclass(frozen=True, slots=True)
class PlannedLink:
    """A link from another engine with the same `model`. It moves `bandwidth` bytes a second; prefill computes `prefill_rate`
    tokens a second.

    >>> link = PlannedLink(ModelPools(token_bytes=24_576, state_bytes=39_518_208), 500_000_000, 10_000)
    >>> link.find_least_tokens(), link.find_seconds(8_000), link.find_least_bandwidth(8_000)
    (1568, (0.472252416, 0.8), 295157760.0)
    """

    model: ModelPages | ModelPools
    bandwidth: int
    prefill_rate: int

    @property
    def token_bytes(self) -> float:
        """Bytes that each token of a prompt adds."""
        return self.model.token_bytes or 0

    @property
    def end_bytes(self) -> int:
        """The most bytes of windows, states and rings, which cross at the end of a long prompt."""
        num_tokens = cdiv(LONGEST, self.model.hit_size) * self.model.hit_size
        return self.model.count_prompt_bytes(num_tokens) - round(num_tokens * self.token_bytes)

    def pays(self, num_tokens: int) -> bool:
        """Whether moving a prompt of `num_tokens` takes no longer than computing it."""
        return self.model.count_prompt_bytes(num_tokens) * self.prefill_rate <= num_tokens * self.bandwidth

    def find_least_tokens(self) -> int | None:
        """Return the length, in whole pages of all groups, from which on moving pays; None if it pays at no length."""
        size = self.model.hit_size
        lengths = range(size, LONGEST + size, size)
        place = bisect_left(lengths, True, key=self.pays)  # bytes a token fall with the length
        return lengths[place] if place < len(lengths) else None

    def find_least_bandwidth(self, num_tokens: int) -> float:
        """Return the bytes a second from which on moving a prompt of `num_tokens` pays."""
        return self.model.count_prompt_bytes(num_tokens) * self.prefill_rate / num_tokens

    def find_seconds(self, num_tokens: int) -> tuple[float, float]:
        """Return the seconds to move a prompt of `num_tokens`, and to compute it."""
        return self.model.count_prompt_bytes(num_tokens) / self.bandwidth, num_tokens / self.prefill_rate

    def as_dict(self) -> dict[str, Any]:
        """Return all figures by name, for JSON."""
        prompts = []
        for num_tokens in PROMPTS:
            move, compute = self.find_seconds(num_tokens)
            prompts.append(
                {
                    "tokens": num_tokens,
                    "bytes": self.model.count_prompt_bytes(num_tokens),
                    "least_bandwidth": self.find_least_bandwidth(num_tokens),
                    "move_seconds": move,
                    "compute_seconds": compute,
                }
            )
        names = ("bandwidth", "prefill_rate", "token_bytes", "end_bytes")
        fields = {name: getattr(self, name) for name in names}
        return {**fields, "least_tokens": self.find_least_tokens(), "prompts": prompts}
