"""The hash by which a page is known."""

from typing import Any, NamedTuple

from pagepool.arguments import require_int, require_short
from pagepool.errors import ArgumentTypeError

__all__ = ["PageHash", "PageHashWithGroupId", "checked_hash"]


class PageHash(NamedTuple):
    """What a full page is known by.

    ``hash_value`` is the int that the hash function gave. ``token_ids`` are the page's tokens, or empty where only the digest
    is kept (the manager's own algorithms, unless it was made with ``keep_token_ids=True``). ``extra_keys`` are the page's
    extra keys or None.
    """

    hash_value: int
    token_ids: tuple[int, ...]
    extra_keys: Any | None = None


def checked_hash(page_hash: PageHash) -> PageHash:
    """A page hash whose value is an int of Python's. ArgumentTypeError for what is no page hash, or cannot be a key of a dict,
    ArgumentError for a value that is too large to be written out.
    """
    if not isinstance(page_hash, PageHash):
        raise ArgumentTypeError(f"page_hash: got {type(page_hash).__name__}, allowed: PageHash")
    value = require_short("hash_value", require_int("hash_value", page_hash.hash_value))
    if not isinstance(page_hash.token_ids, tuple):
        raise ArgumentTypeError(f"token_ids: got {type(page_hash.token_ids).__name__}, allowed: a tuple of ints")
    try:
        hash(page_hash)
    except TypeError as error:
        raise ArgumentTypeError(f"page_hash: {error}, allowed: what can be a key of a dict") from None
    return page_hash if value is page_hash.hash_value else page_hash._replace(hash_value=value)


class PageHashWithGroupId(NamedTuple):
    """A page hash in one cache group: groups hold different layers, so equal tokens need a page in each."""

    page_hash: PageHash
    group_id: int

    def get_hash_value(self) -> int:
        """The int in the page hash."""
        return self.page_hash.hash_value
