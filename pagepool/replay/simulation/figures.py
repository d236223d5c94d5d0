"""What a replay counts."""

from dataclasses import asdict, dataclass

__all__ = ["Figures", "find_hit_rate"]


def find_hit_rate(hit_tokens: int, prompt_tokens: int, skipped_prompt_tokens: int = 0) -> float:
    """The share of prompt tokens that need not be computed; 0 without prompts. A run's, as `replay` and `fleet` report it, is a
    share of the prompts that ran, the number that `CacheManager.stats` gives. `plan` compares pools that skip different
    requests, so its is a share of all prompt tokens, those of skipped requests included.
    """
    return hit_tokens / max(1, prompt_tokens + skipped_prompt_tokens)


@dataclass(slots=True)
class Figures:
    """Counts of one replay. Tokens are tokens, usages are shares of the pool in [0, 1], times are seconds.

    `prompt_tokens` and `hit_tokens` count a request's first admission only. When it comes back after a preemption, its tokens
    count as `returned_tokens` and those that are hit as `rehit_tokens`. Usage is seen once a step, after its pages were taken.
    Requests larger than the pool are `skipped`, with `skipped_prompt_tokens`, and in no other count. An answer is counted when
    it has ended.
    """

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    returned_tokens: int = 0
    rehit_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    allocated_pages: int = 0
    evicted_pages: int = 0
    preemptions: int = 0
    peak_usage: float = 0.0
    mean_usage: float = 0.0
    allocator_seconds: float = 0.0
    wall_seconds: float = 0.0
    skipped: int = 0
    skipped_prompt_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        """The share of the prompt tokens that ran, the number in `CacheManager.stats().queries`."""
        return find_hit_rate(self.hit_tokens, self.prompt_tokens)

    @property
    def trace_hit_rate(self) -> float:
        """The share of all prompt tokens, as `plan` reports it: see `find_hit_rate`."""
        return find_hit_rate(self.hit_tokens, self.prompt_tokens, self.skipped_prompt_tokens)

    def see_usage(self, usage: float) -> None:
        """Count one step and its usage. O(1)."""
        self.steps += 1
        self.peak_usage = max(self.peak_usage, usage)
        self.mean_usage += (usage - self.mean_usage) / self.steps

    def list_differences(self, other: "Figures") -> list[str]:
        """The names of the figures that are not the same, times aside."""
        others = other.as_dict()
        return [name for name, value in self.as_dict().items() if value != others[name] and not name.endswith("_seconds")]

    def as_dict(self) -> dict[str, int | float]:
        """All figures by name, for JSON."""
        return {**asdict(self), "hit_rate": self.hit_rate, "trace_hit_rate": self.trace_hit_rate}
