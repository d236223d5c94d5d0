"""Host memory behind a simulated pool."""

from typing import Literal, NamedTuple, TypeAlias

from pagepool.errors import count_of
from pagepool.manager import HostTier

Policy: TypeAlias = Literal["write_back", "write_through"]


class HostMemory(NamedTuple):
    """A host tier of `num_pages`, including the null page."""

    num_pages: int
    policy: Policy = "write_back"

    def __str__(self) -> str:
        """Describe the tier in words.

        >>> str(HostMemory(2000)), str(HostMemory(50, "write_through"))
        ('2,000 host pages', '50 host pages (write_through)')
        """
        return count_of(self.num_pages, "host page") + ("" if self.policy == "write_back" else f" ({self.policy})")

    def make_tier(self) -> HostTier:
        """Make an empty tier. Raise ArgumentError for an impossible size."""
        return HostTier(self.num_pages, policy=self.policy)
