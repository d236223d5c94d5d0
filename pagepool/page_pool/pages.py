"""The pages of a pool by id, and the free queue."""

from collections.abc import Sequence
from typing import overload

from pagepool._core import CachePage, PageStore
from pagepool.arguments import require_int, require_list
from pagepool.errors import ArgumentTypeError

__all__ = ["FreeCachePageQueue", "Pages"]


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


class FreeCachePageQueue:
    """The free pages in the order of eviction: a doubly linked list inside the page records.

    ``FreeCachePageQueue(pages)`` adopts the records of pages without a pool; ``pool.free_page_queue`` is the queue of a pool.
    All operations are O(1) a page.

    >>> first, second = CachePage(4), CachePage(2)
    >>> queue = FreeCachePageQueue([first, second])
    >>> queue.popleft() is first, queue.num_free_pages
    (True, 1)
    """

    def __init__(self, pages: Sequence[CachePage]) -> None:
        """Queue `pages` in the given order. PageIdError if one belongs to a pool or another queue."""
        self._store = PageStore(1, is_pool=False)
        self.append_n(pages)

    @classmethod
    def of_store(cls, store: PageStore) -> "FreeCachePageQueue":
        """Return the queue of a pool's store."""
        queue = cls.__new__(cls)
        queue._store = store
        return queue

    @property
    def num_free_pages(self) -> int:
        """Number of pages in the queue."""
        return self._store.num_free_pages

    def popleft(self) -> CachePage:
        """Take the page at the front. OutOfPagesError, a ValueError, from an empty queue."""
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[CachePage]:
        """Take the `n` pages at the front; OutOfPagesError, and nothing taken, if there are fewer."""
        return self._store.pages(self._store.pop(n))

    def remove(self, page: CachePage) -> None:
        """Remove a page from any place in the queue; PageIdError if it is not in the queue."""
        self._store.remove_page(page)

    def append(self, page: CachePage) -> None:
        """Append a page. PageIdError if it is in a queue, is held, or belongs to a pool with another queue."""
        if not self._store.is_pool:
            self._store.adopt(page)
        self._store.append_page(page)

    def append_n(self, pages: Sequence[CachePage]) -> None:
        """Append pages in order; all or none of them."""
        if not self._store.is_pool:
            pages = require_list("pages", pages, CachePage)
            for page in pages:
                self._store.adopt(page)
        self._store.append(self._store.ids_of_pages(pages))

    def get_all_free_pages(self) -> list[CachePage]:
        """Return the pages in the queue, front first. O(pages)."""
        return self._store.pages(self._store.free_ids())
