"""A manager on a clock that stands until a test lets it go on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from argument_cases import SPEC
from managing import grouped

from pagepool import CacheGroupSpec, CacheManager, EngineRequest

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

    def use_page(self, name: str, token_ids: Sequence[int], **attributes: Any) -> list[int]:
        """Use the cached page of a page's tokens, or compute it, by a request with these attributes. Returns its id."""
        hits, _ = self.manager.get_computed_pages(EngineRequest(name, [*token_ids, 0]))
        page_ids: list[int] = hits.get_page_ids()[0]
        if page_ids:
            self.manager.page_pool.touch_page_ids(page_ids)
            self.manager.page_pool.free_page_ids(page_ids)
            return page_ids
        new = EngineRequest(name, token_ids, **attributes)
        pages = self.manager.allocate_slots(new, len(token_ids))
        assert pages is not None
        [page_ids] = pages.get_page_ids()
        self.manager.free(new)
        return page_ids
