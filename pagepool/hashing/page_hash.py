"""The hash that identifies a page."""

from typing import Any, NamedTuple

from pagepool.arguments import require_int, require_short
from pagepool.errors import ArgumentTypeError

__all__ = ["PageHash", "PageHashWithGroupId", "checked_hash"]


class PageHash(NamedTuple):
    """The hash of a full page.

    ``hash_value`` is the int from the hash function. ``token_ids`` are the page's tokens, or empty if only the digest is kept
    (the manager's own algorithms without ``keep_token_ids=True``). ``extra_keys`` are the page's extra keys or None.
    """

    hash_value: int
    token_ids: tuple[int, ...]
    extra_keys: Any | None = None


def checked_hash(page_hash: Any) -> PageHash:
    """Return a page hash whose value is a Python int. It may be an engine's own named tuple with `hash_value` and `token_ids`.
    ArgumentTypeError unless it is such a tuple, and hashable; ArgumentError if the value is too large to convert to text.
    """
    if type(page_hash) is PageHash and len(page_hash) == 3:  # nearly always a plain digest, for which this is enough
        value, token_ids, extra_keys = page_hash
        if type(value) is int and 0 <= value < 1 << 128 and type(token_ids) is tuple and not token_ids and extra_keys is None:
            return page_hash
    is_named = hasattr(page_hash, "hash_value") and hasattr(page_hash, "token_ids")
    if not (is_named and tuple in type(page_hash).__mro__):
        raise ArgumentTypeError(f"page_hash: got {type(page_hash).__name__}, allowed: PageHash")
    value = require_short("hash_value", require_int("hash_value", page_hash.hash_value))
    if not isinstance(page_hash.token_ids, tuple):
        raise ArgumentTypeError(f"token_ids: got {type(page_hash.token_ids).__name__}, allowed: a tuple of ints")
    try:
        hash(page_hash)
    except TypeError as error:
        raise ArgumentTypeError(f"page_hash: {error}, allowed: hashable values") from None
    checked: PageHash = page_hash if value is page_hash.hash_value else page_hash._replace(hash_value=value)
    return checked


class PageHashWithGroupId(NamedTuple):
    """A page hash in one cache group. Groups have different layers, so equal tokens need a page in each."""

    page_hash: PageHash
    group_id: int

    def get_hash_value(self) -> int:
        """Return the int in the page hash."""
        return self.page_hash.hash_value
