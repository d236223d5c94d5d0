"""The pages of a pool by id."""

from collections.abc import Sequence
from typing import overload

from pagepool._core import CachePage, PageStore
from pagepool.arguments import require_int
from pagepool.errors import ArgumentTypeError

__all__ = ["Pages"]


class Pages(Sequence[CachePage]):
    """All pages of a pool by id. A page object is made on the first read, and kept."""

    def __init__(self, store: PageStore) -> None:
        """View the pages of `store`."""
        self._store = store

    def __len__(self) -> int:
        """Number of pages, the null page included."""
        return self._store.num_pages

    @overload
    def __getitem__(self, index: int) -> CachePage: ...
    @overload
    def __getitem__(self, index: slice) -> list[CachePage]: ...
    def __getitem__(self, index: int | slice) -> CachePage | list[CachePage]:
        """Return the page with that id, or a list of pages for a slice. PageIdError, an IndexError, outside the pool."""
        if isinstance(index, slice):
            try:
                page_ids = range(len(self))[index]
            except TypeError as error:
                raise ArgumentTypeError(f"a slice of pages: {error}, allowed: ints") from None
            return [self._store.page(page_id) for page_id in page_ids]
        index = require_int("page id", index)
        return self._store.page(index if index >= 0 else index + len(self))
