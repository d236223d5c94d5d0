"""The pages that look-ups and allocations return."""

from pagepool._core import CachePage, PageIds, PageStore, lists_of
from pagepool.errors import ArgumentError

__all__ = ["CachePages"]


class CachePages:
    """Pages for each cache group: the hits of a look-up, or the new pages of an allocation.

    It holds ids; the page objects in ``pages`` are made when they are first read.
    """

    __slots__ = ("_groups", "_store")

    _groups: tuple[PageIds, ...] | tuple[list[CachePage], ...]

    def __init__(self, pages: tuple[list[CachePage], ...] | tuple[PageIds, ...], store: PageStore | None = None) -> None:
        """`pages` is one list of pages for each group or, with `store`, of page ids of that pool."""
        self._groups = pages
        self._store = store

    @property
    def pages(self) -> tuple[list[CachePage], ...]:
        """One list of page objects for each group."""
        if self._store is not None:
            self._groups = tuple([self._store.pages(ids) for ids in self._groups])  # type: ignore[arg-type]
            self._store = None
        return self._groups  # type: ignore[return-value]

    def get_page_ids(self) -> tuple[list[int], ...]:
        """One list of page ids for each group. O(pages)."""
        if self._store is not None:
            return lists_of(self._groups)  # type: ignore[arg-type]
        return tuple([page.page_id for page in group] for group in self.pages)

    def get_ids(self, store: PageStore) -> tuple[PageIds, ...]:
        """Return the native ids; PageIdError unless the pages belong to `store`."""
        if self._store is store:
            return self._groups  # type: ignore[return-value]
        return tuple(store.ids_of_pages(group) for group in self.pages)

    def get_unhashed_page_ids(self) -> list[int]:
        """Return the ids of the pages that are not cached. ArgumentError unless there is exactly one group."""
        if len(self._groups) != 1:
            raise ArgumentError(f"get_unhashed_page_ids: got {len(self._groups)} groups, allowed: 1")
        return [page.page_id for page in self.pages[0] if page.page_hash is None]

    def new_empty(self) -> "CachePages":
        """Return no pages, for the same number of groups."""
        return CachePages(tuple([] for _ in self._groups))

    def __add__(self, other: "CachePages") -> "CachePages":
        """Return the pages of both, group by group. ArgumentError if the numbers of groups differ."""
        if not isinstance(other, CachePages):
            return NotImplemented
        if len(self.pages) != len(other.pages):
            raise ArgumentError(f"+: got {len(other.pages)} groups, allowed: {len(self.pages)}, as many as on the left")
        return CachePages(tuple([*mine, *others] for mine, others in zip(self.pages, other.pages, strict=True)))

    def __eq__(self, other: object) -> bool:
        """Whether both have the same pages in the same order."""
        return isinstance(other, CachePages) and self.pages == other.pages

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """The ids."""
        return f"CachePages(page_ids={self.get_page_ids()})"
