"""The pages of a pool by id and by hash, and its free queue.

The index of a `PageStore` has keys of 128 bits: the hashes themselves, or the lower halves of 256-bit hashes, which the store
keeps whole. For other hashes ``PageStore.names`` maps keys to hashes, and hashes to keys.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import overload

from pagepool._core import CachePage, EntryJournal, LoosePages, PageRecords, PageStore, copy_records
from pagepool.arguments import require_int, require_list
from pagepool.errors import ArgumentTypeError, shown
from pagepool.hashing import PageHash, PageHashWithGroupId, checked_hash


class Pages(Sequence[CachePage]):
    """All pages of a pool by id. A page object is made on first access, and kept."""

    def __init__(self, store: PageStore, bank: int = 0) -> None:
        """View the pages of a bank of `store`."""
        self._store = store
        self._bank = bank
        self._is_one_of_several = len(store.bank_names) > 1

    def __len__(self) -> int:
        """Return the number of pages, including the null page."""
        return self._store.count_pages(self._bank) + 1

    @overload
    def __getitem__(self, index: int) -> CachePage: ...
    @overload
    def __getitem__(self, index: slice) -> list[CachePage]: ...
    def __getitem__(self, index: int | slice) -> CachePage | list[CachePage]:
        """Return the page with this id, or a list of pages for a slice. Raise PageIdError, an IndexError, outside the pool."""
        if isinstance(index, slice):
            try:
                page_ids = range(len(self))[index]
            except TypeError:
                raise ArgumentTypeError(f"a slice of pages: got {shown(index)}, allowed: ints") from None
            return [self._page(page_id) for page_id in page_ids]
        index = require_int("page id", index)
        return self._page(index if index >= 0 else index + len(self))

    def _page(self, page_id: int) -> CachePage:
        return self._store.page(self._store.records_in_bank([page_id], self._bank)[0] if self._is_one_of_several else page_id)


class FreeCachePageQueue:
    """The free pages in the order of eviction: a doubly linked list inside the page records. All operations are O(1) per page.

    ``FreeCachePageQueue(pages)`` queues pages without a pool; ``pool.free_page_queue`` is the queue of a pool.

    >>> first, second = CachePage(4), CachePage(2)
    >>> queue = FreeCachePageQueue([first, second])
    >>> queue.popleft() is first, queue.num_free_pages
    (True, 1)
    """

    def __init__(self, pages: Sequence[CachePage]) -> None:
        """Queue `pages` in the given order. Raise PageIdError if one belongs to a pool or another queue."""
        self._store: PageRecords = LoosePages()
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
        """Take the page at the front. Raise OutOfPagesError, a ValueError, if the queue is empty."""
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[CachePage]:
        """Take the `n` pages at the front. Raise OutOfPagesError, with nothing taken, if there are fewer."""
        return self._store.pages(self._store.pop(n))

    def remove(self, page: CachePage) -> None:
        """Remove a page from any place in the queue. Raise PageIdError if it is not in the queue."""
        self._store.remove_page(page)

    def append(self, page: CachePage) -> None:
        """Append a page. Raise PageIdError if it is in a queue, is held, or belongs to a pool with another queue."""
        self.append_n([page])

    def append_n(self, pages: Sequence[CachePage]) -> None:
        """Append pages in order: all of them, or none."""
        if isinstance(self._store, LoosePages):
            pages = require_list("pages", pages, CachePage)
            for page in pages:
                self._store.adopt(page)
        self._store.append(self._store.ids_of_pages(pages))

    def get_all_free_pages(self) -> list[CachePage]:
        """Return the pages in the queue, front first. O(pages)."""
        return self._store.pages(self._store.free_ids())


class PrefixIndex(Mapping[PageHashWithGroupId, dict[int, CachePage]]):
    """A live view of the prefix index: the pages of each hash and group by id, first cached first. ``len``, ``in``: O(1)."""

    def __init__(self, store: PageStore) -> None:
        """View the index of `store`."""
        self._store = store

    def __len__(self) -> int:
        """Return the number of distinct (hash, group) pairs."""
        return self._store.num_keys

    def __iter__(self) -> Iterator[PageHashWithGroupId]:
        """Iterate over the pairs, in no particular order."""
        slots = copy_records(self._store, "slots")["slots"]["page_id"]
        for page_id in slots[slots != 0].tolist():
            page_hash = self._store.page_hash_of(page_id)
            if page_hash is not None:
                yield page_hash

    def __getitem__(self, key: PageHashWithGroupId) -> dict[int, CachePage]:
        """Return pages by id. Raise KeyError if none is cached under `key`."""
        if isinstance(key, PageHashWithGroupId):
            page_id = find_page_id(self._store, checked_hash(key.page_hash), key.group_id)
            if page_id is not None:
                return {page.page_id: page for page in self._store.pages(self._store.twins(page_id))}
        raise KeyError(key)


def is_own_key(store: PageStore, page_hash: PageHash) -> bool:
    """Whether the hash value is the key itself, as for native hashes: names and tokens then do not matter."""
    key = page_hash.hash_value
    return not store.names and 0 <= key <= store.names.max_key and page_hash == (key, (), None)


def find_page_id(store: PageStore, page_hash: PageHash, group_id: int, start: int = 0, stop: int | None = None) -> int | None:
    """Return the page cached first under `page_hash`, a `checked_hash`, in a group, with an id in ``[start, stop)``, or None. A
    hash with token ids hits only a page with equal token ids.
    """
    if is_own_key(store, page_hash):
        return store.find(page_hash.hash_value, group_id, start, stop)
    for key in store.names.keys_of(page_hash):
        page_id = store.find(key, group_id, start, stop)
        if page_id is not None and (page_hash == (key, (), None) or store.page_hash_of(page_id) == (page_hash, group_id)):
            return page_id
    return None


def forget_names(store: PageStore) -> None:
    """Drop unneeded names. Needed are the names of entries, also of removed ones and the tier's, and of parents of entries. No
    name is dropped while events are built. O(pages).
    """
    keys = EntryJournal(store).list_kept_keys()
    if keys is not None:
        store.names.keep_only([high << 64 | low for low, high in keys.reshape(-1, 2).tolist()])
