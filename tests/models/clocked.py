"""A manager on a clock that stands until a test lets it go on."""

from __future__ import annotations

from typing import Any

from argument_cases import SPEC
from managing import grouped

from pagepool import CacheGroupSpec, CacheManager

PAGE_SIZE = SPEC.page_size


class Clocked:
    """A manager of one group, and the seconds on its clock."""

    def __init__(self, num_pages: int, **options: Any) -> None:
        self.manager = CacheManager(num_pages, [CacheGroupSpec(SPEC)], 64, **grouped(**options))
        self.now = 1000.0
        self.wait(0)

    def wait(self, seconds: float = 1) -> None:
        self.now += seconds
        self.manager.page_pool.store.set_time(self.now)
