"""`Retention`: the settings of a cache that depend on its traffic."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from pagepool.arguments import MAX_SIZE, require_choice, require_int, require_share

WindowRule: TypeAlias = Literal["ends", "all"]


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which pages a cache retains beyond the order of eviction: ``CacheManager(..., retention=Retention(...))``.

    `pagepool plan` prints the settings that it has simulated. None chooses a default for the model, 0 turns a setting off: see
    docs/windows.md. Raise ArgumentError for values out of range, ArgumentTypeError for others.

    >>> Retention(window_interval=2048)
    Retention(windows='ends', window_slack=None, window_interval=2048, max_leased_share=0.2)
    """

    windows: WindowRule = "ends"
    """Pages of sliding windows and chunks that stay cached: those where a request can resume, or all."""
    window_slack: int | None = None
    """Pages of windows and chunks also stay for this many tokens before each place where a request can resume."""
    window_interval: int | None = None
    """Tokens between places in a prompt where a request can resume, for models with sliding windows or chunks."""
    max_leased_share: float = 0.2
    """Share of the pages that leases with an end may hold, 0 to 1: see `CacheManager.lease`."""

    def __post_init__(self) -> None:
        """Check the values, and store them as int and float."""
        require_choice("windows", self.windows, "ends", "all")
        for name in ("window_slack", "window_interval"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, require_int(name, getattr(self, name), 0, MAX_SIZE))
        object.__setattr__(self, "max_leased_share", require_share("max_leased_share", self.max_leased_share))
