"""Hashes of pages: seeds, and the hash functions in Python.

The hash of a page covers everything before it: ``hash(parent hash, tokens of the page, extra keys)``. Equal hashes mean equal
contents from the first token on, so two requests can share the page. Extra keys are what changes keys and values without being
in the tokens: a LoRA adapter, an image, a tenant's salt.

The manager's default algorithm, SipHash-2-4-128, runs in the compiled core, with the secret key of `get_siphash_key`.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from pagepool.arguments import as_list, refuse_incomplete, require_int, require_short, require_slice
from pagepool.errors import ArgumentError, ArgumentTypeError, shown
from pagepool.hashing.extra_keys import LORA, ExtraKeys, RequestExtraKeys, VllmExtraKeys, encode_extra_keys, list_features
from pagepool.hashing.page_hash import MAX_KEY, HashNames, PageHash, PageHashWithGroupId, checked_hash

__all__ = [
    "LORA",
    "MAX_KEY",
    "NONE_HASH",
    "ExtraKeys",
    "HashFunction",
    "HashNames",
    "KeyHolder",
    "PageHash",
    "PageHashWithGroupId",
    "RequestExtraKeys",
    "VllmExtraKeys",
    "checked_hash",
    "encode_extra_keys",
    "get_hash_seed",
    "get_siphash_key",
    "hash_next_pages",
    "hash_page_tokens",
    "hash_request_tokens",
    "init_none_hash",
    "list_features",
]

HashFunction = Callable[[Any], int]
"""Maps ``(parent hash, token ids, extra keys)`` to an int; the builtin `hash` is one."""

NONE_HASH: int = 0
"""Parent hash of a first page for hash functions that are callables. Set by `init_none_hash`."""

_PROCESS_SECRET = os.urandom(32)


def get_hash_seed(hash_seed: int | str | bytes | None = None) -> bytes | None:
    """Return the seed as bytes: `hash_seed` if given, else ``PYTHONHASHSEED`` if it names one, else None.

    ArgumentError for an empty `hash_seed`, whose key anyone could derive. An empty ``PYTHONHASHSEED`` names no seed, as in
    Python.

    >>> get_hash_seed(7)
    b'7'
    """
    if hash_seed is None:
        hash_seed = os.environ.get("PYTHONHASHSEED", "random")
        if hash_seed in ("", "random"):
            return None
    if isinstance(hash_seed, str | bytes) and not hash_seed:
        raise ArgumentError(f"hash_seed: got {hash_seed!r}, allowed: int, str or bytes that are not empty, or None")
    if isinstance(hash_seed, bytes):
        return hash_seed
    if isinstance(hash_seed, bool) or not isinstance(hash_seed, int | str):
        raise ArgumentTypeError(f"hash_seed: got {type(hash_seed).__name__}, allowed: int, str, bytes or None")
    try:
        return str(require_short("hash_seed", hash_seed)).encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(f"hash_seed: got text that is not valid Unicode: {error}") from None


def get_siphash_key(hash_seed: int | str | bytes | None = None) -> bytes:
    """Return the 16-byte SipHash key: from the seed if there is one, else from the secret of the process.

    >>> get_siphash_key(1) == get_siphash_key(1) != get_siphash_key(2)
    True
    """
    seed = get_hash_seed(hash_seed)
    source = _PROCESS_SECRET if seed is None else b"seed " + seed
    return hashlib.sha256(b"pagepool siphash key " + source).digest()[:16]


def init_none_hash() -> None:
    """Set `NONE_HASH` from ``PYTHONHASHSEED`` if it is set, else from the secret of the process.

    Existing hashes stay valid unless the environment has changed.
    """
    global NONE_HASH
    seed = get_hash_seed()
    source = _PROCESS_SECRET if seed is None else hashlib.sha256(b"pagepool none hash " + seed).digest()
    NONE_HASH = int.from_bytes(source[:8], "little") >> 1


init_none_hash()


class KeyHolder:
    """Base of objects that reference the secret key of the hashes. They cannot be pickled or copied."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        """Raise ArgumentTypeError."""
        raise ArgumentTypeError(f"a {type(self).__name__} holds a secret key and cannot be pickled or copied")


def hash_page_tokens(
    hash_function: HashFunction, parent_page_hash: int | None, curr_page_token_ids: Sequence[int], extra_keys: Any | None = None
) -> PageHash:
    """Hash one full page: ``hash_function((parent or NONE_HASH, tuple of tokens, extra_keys))``.

    `parent_page_hash` is the ``hash_value`` of the preceding page, None for a first page. O(tokens).

    >>> hash_page_tokens(lambda content: len(content[1]), None, [5, 6, 7])
    PageHash(hash_value=3, token_ids=(5, 6, 7), extra_keys=None)
    """
    parent = NONE_HASH if parent_page_hash is None else parent_page_hash
    token_ids = tuple(as_list("curr_page_token_ids", curr_page_token_ids, "a sequence of ints"))
    return PageHash(hash_function((parent, token_ids, extra_keys)), token_ids, extra_keys)


def hash_request_tokens(hash_function: HashFunction, page_size: int, request: Any) -> list[PageHash]:
    """Hash every full page of ``request.all_token_ids``, each with the preceding page as its parent. O(tokens).

    A request with ``has_vision`` and without features gets different hashes in each call.
    """
    return hash_next_pages(hash_function, require_int("page_size", page_size, 1), request, [], None)


def hash_next_pages(
    hash_function: HashFunction, page_size: int, request: Any, page_hashes: Sequence[PageHash], num_pages: int | None
) -> list[PageHash]:
    """Return the hashes behind `page_hashes` of a request's first `num_pages` pages; None: of all full ones."""
    try:
        all_token_ids = request.all_token_ids
    except AttributeError as error:
        refuse_incomplete(request, error)
    extra_keys = RequestExtraKeys.of(request)
    parent = checked_hash(page_hashes[-1]).hash_value if page_hashes else None
    num_tokens = (len(all_token_ids) // page_size if num_pages is None else num_pages) * page_size
    new_hashes: list[PageHash] = []
    for start in range(len(page_hashes) * page_size, num_tokens, page_size):
        token_ids = require_slice("all_token_ids", all_token_ids, start, start + page_size)
        if len(token_ids) != page_size:
            name = f"request {shown(getattr(request, 'request_id', None))}"
            raise ArgumentError(f"{name}: no full page of {shown(page_size)} tokens from {shown(start)} on")
        page_extra_keys = extra_keys.of_page(start, start + page_size) if extra_keys else None
        new_hashes.append(hash_page_tokens(hash_function, parent, token_ids, page_extra_keys))
        parent = new_hashes[-1].hash_value
    return new_hashes
