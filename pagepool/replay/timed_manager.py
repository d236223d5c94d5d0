"""A stopwatch around a manager."""

from collections.abc import Callable
from time import perf_counter
from typing import Any, Protocol

from pagepool.request import Request

__all__ = ["Manager", "TimedManager"]


class Manager(Protocol):
    """What a replay needs of a manager; `CacheManager` is one. Pages are only passed on."""

    @property
    def usage(self) -> float:
        """The share of the pool that is not free."""

    @property
    def page_pool(self) -> Any:
        """Its `stats` count `num_allocated_pages` and `num_evicted_pages`."""

    def get_computed_pages(self, request: Request) -> tuple[Any, int]:
        """The pages of the longest cached prefix, and its length in tokens."""

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_pages: Any = None,
    ) -> Any | None:
        """Make room for the next tokens; None if the pool is too short."""

    def free(self, request: Request) -> None:
        """Give back the request's pages."""

    def free_page_hashes(self, request: Request) -> None:
        """Forget the hashes of a request that has ended."""

    def require_capacity(self, num_tokens: int) -> None:
        """Raise `RequestTooLargeError` if so many tokens never fit."""


class TimedManager:
    """Pass the calls of a step on and add up how long they take, in `seconds`. Costs 0.1 us a call."""

    def __init__(self, manager: Manager) -> None:
        """Start at 0 seconds."""
        self._manager = manager
        self.seconds = 0.0

    def _time(self, call: Callable[..., Any], *args: Any) -> Any:
        start = perf_counter()
        result = call(*args)
        self.seconds += perf_counter() - start
        return result

    def get_computed_pages(self, request: Request) -> tuple[Any, int]:
        """As the manager's."""
        result: tuple[Any, int] = self._time(self._manager.get_computed_pages, request)
        return result

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_pages: Any = None,
    ) -> Any | None:
        """As the manager's."""
        allocate = self._manager.allocate_slots
        return self._time(allocate, request, num_new_tokens, num_new_computed_tokens, new_computed_pages)

    def free(self, request: Request) -> None:
        """As the manager's."""
        self._time(self._manager.free, request)

    def free_page_hashes(self, request: Request) -> None:
        """As the manager's."""
        self._time(self._manager.free_page_hashes, request)
