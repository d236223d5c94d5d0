"""The pages that look-ups and allocations return."""

cimport cython

from pagepool.core.store cimport CachePage

from pagepool.core.ids cimport lists_of

from pagepool.errors import ArgumentError, ArgumentTypeError


@cython.freelist(64)
@cython.auto_pickle(False)
cdef class CachePages:
    """Pages for each cache group: the hits of a look-up, or the new pages of an allocation.

    It holds ids; the page objects in ``pages`` are made when they are first read.
    """

    def __init__(self, tuple pages not None, PageStore store=None):
        """`pages` is one list of `CachePage` for each group or, with `store`, `PageIds` of that pool."""
        for group in pages:
            if store is not None:
                store.checked(group)
            elif type(group) is not list or not all([isinstance(page, CachePage) for page in group]):
                allowed = "lists of CachePage, or PageIds and a store"
                raise ArgumentTypeError(f"pages: got {type(group).__name__}, allowed: {allowed}")
        self.groups, self.store = pages, store

    @property
    def pages(self) -> tuple:
        """One list of page objects for each group."""
        cdef PageStore store = self.store
        if store is not None:
            self.groups = tuple([store.pages(ids) for ids in self.groups])
            self.store = None
        return self.groups

    def get_page_ids(self) -> tuple:
        """One list of page ids for each group. O(pages)."""
        if self.store is not None:
            return lists_of(self.groups)
        return tuple([[page.page_id for page in group] for group in self.groups])

    def get_ids(self, PageStore store not None) -> tuple:
        """Return the native ids; PageIdError unless the pages belong to `store`."""
        if self.store is store:
            return self.groups
        return tuple([store.ids_of_pages(group) for group in self.pages])

    def get_unhashed_page_ids(self) -> list:
        """Return the ids of the pages that are not cached. ArgumentError unless there is exactly one group."""
        if len(self.groups) != 1:
            raise ArgumentError(f"get_unhashed_page_ids: got {len(self.groups)} groups, allowed: 1")
        return [page.page_id for page in self.pages[0] if page.page_hash is None]

    def new_empty(self):
        """Return no pages, for the same number of groups."""
        return CachePages(tuple([[] for _ in self.groups]))

    def __add__(self, other):
        """Return the pages of both, group by group. ArgumentError if the numbers of groups differ."""
        if not isinstance(self, CachePages) or not isinstance(other, CachePages):
            return NotImplemented
        if len(self.pages) != len(other.pages):
            raise ArgumentError(f"+: got {len(other.pages)} groups, allowed: {len(self.pages)}, as many as on the left")
        return CachePages(tuple([[*mine, *others] for mine, others in zip(self.pages, other.pages)]))

    def __eq__(self, other):
        """Whether both have the same pages in the same order."""
        return isinstance(other, CachePages) and self.pages == other.pages

    def __reduce__(self):
        return type(self), (self.groups, self.store)

    def __repr__(self):
        """The ids."""
        return f"CachePages(page_ids={self.get_page_ids()})"


cdef CachePages pages_of(tuple groups, PageStore store):
    """`CachePages` of native ids."""
    cdef CachePages pages = CachePages.__new__(CachePages)
    pages.groups, pages.store = groups, store
    return pages
