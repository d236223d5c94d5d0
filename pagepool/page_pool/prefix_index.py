"""Look-ups and entries of pages by `PageHash`.

The index of a `PageStore` has keys of 128 bits. If a hash differs from its key, ``PageStore.names`` maps one to the other.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pagepool._core import CachePage, EntryJournal, HashChain, PageIds, PageStore, copy_records
from pagepool.arguments import require_group_ids, require_int
from pagepool.errors import ArgumentError, ArgumentTypeError, shown
from pagepool.hashing import PageHash, PageHashWithGroupId, checked_hash, hash_next_pages

__all__ = [
    "CachedPages",
    "check_span",
    "enter_pages",
    "find_page_id",
    "find_page_ids",
    "forget_evicted_names",
    "forget_names",
    "is_own_key",
    "list_kept_keys",
]

Bounds = tuple[int, int | None]
"""A half-open range of page ids."""

PageSpan = tuple[int, int, int]
"""The pages of a request to enter in the index: how many are cached already and how many are full, and their size in tokens."""


def is_own_key(store: PageStore, page_hash: PageHash) -> bool:
    """Whether the hash value is the key, as for native hashes, so that neither names nor tokens matter."""
    key = page_hash.hash_value
    return not store.names and 0 <= key < 1 << 128 and page_hash == (key, (), None)


def find_page_id(store: PageStore, page_hash: PageHash, group_id: int, start: int = 0, stop: int | None = None) -> int | None:
    """Return the page cached first under `page_hash` in a group, with an id in ``[start, stop)``, or None.

    `page_hash` is a `checked_hash`. One that carries token ids hits only a page whose token ids are equal.
    """
    if is_own_key(store, page_hash):
        return store.find(page_hash.hash_value, group_id, start, stop)
    for key in store.names.keys_of(page_hash):
        page_id = store.find(key, group_id, start, stop)
        if page_id is not None and (page_hash == (key, (), None) or _has_hash(store, page_id, page_hash)):
            return page_id
    return None


def _has_hash(store: PageStore, page_id: int, page_hash: PageHash) -> bool:
    found = store.page_hash_of(page_id)
    return found is not None and found.page_hash == page_hash


def find_page_ids(store: PageStore, page_hash: PageHash, group_ids: Sequence[int], bounds: Bounds) -> list[int] | None:
    """Return one page for each group, as `find_page_id` finds it, or None if any group has none."""
    page_ids = []
    for group_id in require_group_ids(group_ids):
        page_id = find_page_id(store, page_hash, group_id, *bounds)
        if page_id is None:
            return None
        page_ids.append(page_id)
    return page_ids


def check_span(num_cached_pages: int, num_full_pages: int, page_size: int) -> PageSpan:
    """Return the numbers as ints."""
    return (
        require_int("num_cached_pages", num_cached_pages, 0),
        require_int("num_full_pages", num_full_pages, 0),
        require_int("page_size", page_size, 1),
    )


def enter_pages(
    store: PageStore, ids: PageIds, request: Any, page_hashes: list[PageHash], span: PageSpan, group_id: int
) -> None:
    """Enter pages of a request under its hashes; hashes that `page_hashes` lacks are computed and appended."""
    num_cached_pages, num_full_pages, page_size = span
    if not isinstance(page_hashes, list):
        raise ArgumentTypeError(f"page_hashes: got {type(page_hashes).__name__}, allowed: a list of PageHash")
    if len(page_hashes) < num_cached_pages:
        raise ArgumentError(
            f"page_hashes: got {len(page_hashes)}, allowed: at least the {shown(num_cached_pages)} of the cached pages"
        )
    if len(ids) != max(0, num_full_pages - num_cached_pages):
        raise ArgumentError(f"num_full_pages: got {shown(num_full_pages)}, allowed: at most the number of pages")
    is_complete = len(page_hashes) >= num_full_pages
    missing = [] if is_complete else hash_next_pages(hash, page_size, request, page_hashes, num_full_pages)
    new_hashes = [*page_hashes, *missing][num_cached_pages:num_full_pages]
    num_parents = min(num_cached_pages, 1)
    parents = page_hashes[num_cached_pages - num_parents : num_cached_pages]
    chain = HashChain(page_size, bytes(16))
    for page_hash in list(map(checked_hash, [*parents, *new_hashes])):
        chain.append_key(store.names.key_of(page_hash))
    ids = PageIds.joined((PageIds([0] * num_parents), ids))
    store.enter_pages(ids, chain, num_parents, group_id, first_place=num_cached_pages - num_parents)
    page_hashes.extend(missing)
    forget_evicted_names(store)


def forget_evicted_names(store: PageStore) -> None:
    """Drop the names of evicted pages once there are more than the pool can need. Amortised O(1)."""
    if len(store.names) > 2 * EntryJournal(store).max_num_kept_keys + 1024:
        forget_names(store)


def forget_names(store: PageStore) -> None:
    """Drop the names that neither the index nor the journal needs."""
    keys = list_kept_keys(store)
    if keys is not None:
        store.names.keep_only(keys)


def list_kept_keys(store: PageStore) -> list[int] | None:
    """Return the keys of entries, of their parents, and of removed entries, and those of the tier. None while events are being
    built. O(num_pages).
    """
    keys = EntryJournal(store).list_kept_keys()
    return None if keys is None else [high << 64 | low for low, high in keys.reshape(-1, 2).tolist()]


class CachedPages(Mapping[PageHashWithGroupId, dict[int, CachePage]]):
    """The prefix index as a mapping from hash and group to the pages with that content, by id, in the order of caching.

    A live view: ``len`` and ``in`` are O(1), iteration is O(size of the index).
    """

    def __init__(self, store: PageStore) -> None:
        """View the index of `store`."""
        self._store = store

    def __len__(self) -> int:
        """Number of distinct (hash, group) pairs."""
        return self._store.num_keys

    def __iter__(self) -> Iterator[PageHashWithGroupId]:
        """The pairs, in no particular order."""
        slots = copy_records(self._store, "slots")["slots"]["page_id"]
        for page_id in slots[slots != 0].tolist():
            page_hash = self._store.page_hash_of(page_id)
            if page_hash is not None:
                yield page_hash

    def __getitem__(self, key: PageHashWithGroupId) -> dict[int, CachePage]:
        """Return pages by id. KeyError if none is cached under `key`."""
        if isinstance(key, PageHashWithGroupId):
            page_id = find_page_id(self._store, checked_hash(key.page_hash), key.group_id)
            if page_id is not None:
                return {page.page_id: page for page in self._store.pages(self._store.twins(page_id))}
        raise KeyError(key)
