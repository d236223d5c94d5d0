"""Pages that requests of a length take in a pool, and how many requests fit at once: a plan without a trace."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pagepool.replay.models.pages import ModelPages
from pagepool.replay.plans.link import PlannedLink


@dataclass(frozen=True, slots=True)
class Capacity:
    """Requests of `mean_tokens` tokens, answers included, in one pool of each of `sizes` pages, null page included. `arrays`
    says how layers with a state share the memory, None without such layers. `link` is the link from another engine.

    >>> llama = ModelPages(page_size=16, page_bytes=2 << 20)
    >>> plan = Capacity(llama, 12_000, (40_960,))
    >>> plan.token_bytes, plan.num_request_pages, plan.count_requests(40_960)
    (131072.0, 750, 54)
    """

    model: ModelPages
    mean_tokens: int
    sizes: Sequence[int] = ()
    arrays: str | None = None
    link: PlannedLink | None = None

    @property
    def token_bytes(self) -> float | None:
        """Bytes of a token in the layers with full attention, None if the bytes of a page are unknown."""
        return self.model.token_bytes

    @property
    def num_peak_pages(self) -> int:
        """The most pages that a request holds at once: in the steps of its prompt."""
        return self.model.count_pages(self.mean_tokens)

    @property
    def num_request_pages(self) -> int:
        """The pages of a request that decodes."""
        return replace(self.model, step_tokens=1).count_pages(self.mean_tokens)

    def count_requests(self, num_pages: int) -> int:
        """Count the requests that fit at once in a pool, with what does not grow with them. They share the tokens of a step, so
        one of them has its peak.
        """
        num_fixed, num_shared = self.model.fixed.count_pages(self.model.page_bytes)
        num_left = num_pages - 1 - num_shared - (self.num_peak_pages - self.num_request_pages)
        return max(0, num_left // (self.num_request_pages + num_fixed))

    def as_dict(self) -> dict[str, Any]:
        """Return the figures by name, for JSON."""
        names = ("mean_tokens", "token_bytes", "num_request_pages", "num_peak_pages")
        return {
            **{name: getattr(self, name) for name in names},
            "arrays": self.arrays,
            "page_size": self.model.page_size,
            "page_bytes": self.model.page_bytes,
            **self.model.fixed.as_dict(),
            "link": self.link and self.link.as_dict(),
            "pools": [{"num_pages": size, "requests": self.count_requests(size)} for size in self.sizes],
        }
