"""The counts of a replay."""

from dataclasses import asdict, dataclass
from typing import Any


def find_hit_rate(hit_tokens: int, prompt_tokens: int, skipped_prompt_tokens: int = 0) -> float:
    """Return the share of prompt tokens that need not be computed; 0 without prompts. `replay` and `fleet` report the share of
    the prompts that ran, as `CacheManager.stats` does. `plan` compares pools that skip different requests, so it reports the
    share of all prompt tokens, including those of skipped requests.
    """
    return hit_tokens / max(1, prompt_tokens + skipped_prompt_tokens)


@dataclass(frozen=True, slots=True)
class HostFigures:
    """Traffic between a pool and the host tier behind it, in pages, and in bytes if a page's bytes are known.

    `loaded_tokens` counts the tokens of `loaded_pages`, once even if several groups loaded their pages; None if all groups keep
    states. Pages without room in the tier count as `refused_pages`.
    """

    saved_pages: int
    loaded_pages: int
    loaded_tokens: int | None
    evicted_pages: int
    refused_pages: int
    page_bytes: int | None = None

    @property
    def saved_bytes(self) -> int | None:
        """Bytes moved to the host."""
        return None if self.page_bytes is None else self.saved_pages * self.page_bytes

    @property
    def loaded_bytes(self) -> int | None:
        """Bytes moved to the device."""
        return None if self.page_bytes is None else self.loaded_pages * self.page_bytes

    def as_dict(self) -> dict[str, int | None]:
        """Return all figures by name, for JSON."""
        return {**asdict(self), "saved_bytes": self.saved_bytes, "loaded_bytes": self.loaded_bytes}


@dataclass(slots=True)
class Figures:
    """Counts of one replay. Usages are shares of the pool in [0, 1].

    `prompt_tokens` and `hit_tokens` count a request's first admission only; after a preemption its tokens count as
    `returned_tokens`, and hits as `rehit_tokens`. Usage is sampled once a step, after allocation. Requests larger than the pool
    count as `skipped` and `skipped_prompt_tokens` only. `generated_tokens` counts finished requests. `copied_pages` counts
    copies of states, into checkpoints and back. `host` has the figures of the host tier, None without one.
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
    copied_pages: int = 0
    preemptions: int = 0
    peak_usage: float = 0.0
    mean_usage: float = 0.0
    allocator_seconds: float = 0.0
    wall_seconds: float = 0.0
    skipped: int = 0
    skipped_prompt_tokens: int = 0
    host: HostFigures | None = None

    @property
    def hit_rate(self) -> float:
        """Hit tokens' share of the prompt tokens that ran, as in `CacheManager.stats()`."""
        return find_hit_rate(self.hit_tokens, self.prompt_tokens)

    @property
    def trace_hit_rate(self) -> float:
        """Hit tokens' share of all prompt tokens, as in `plan`."""
        return find_hit_rate(self.hit_tokens, self.prompt_tokens, self.skipped_prompt_tokens)

    def see_usage(self, usage: float) -> None:
        """Count one step and its usage."""
        self.steps += 1
        self.peak_usage = max(self.peak_usage, usage)
        self.mean_usage += (usage - self.mean_usage) / self.steps

    def list_differences(self, other: "Figures") -> list[str]:
        """List the names of differing figures, except times."""
        others = other.as_dict()
        return [name for name, value in self.as_dict().items() if value != others.get(name) and not name.endswith("_seconds")]

    def as_dict(self) -> dict[str, Any]:
        """Return all figures by name, for JSON; `host` only with a host tier."""
        figures = {**asdict(self), "hit_rate": self.hit_rate, "trace_hit_rate": self.trace_hit_rate}
        del figures["host"]
        return figures if self.host is None else {**figures, "host": self.host.as_dict()}
