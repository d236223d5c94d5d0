"""Hashes of pages: seeds, extra keys, and the hash functions in Python.

The hash of a page covers everything before it: ``hash(parent hash, tokens of the page, extra keys)``. Equal hashes mean equal
contents from the first token on, so two requests can share the page. Extra keys are what changes keys and values without being
in the tokens: a LoRA adapter, an image, a tenant's salt.

The manager's default algorithm, SipHash-2-4-128, runs in the compiled core, with a secret key from `pagepool.hashing.seeds`.
"""

from collections.abc import Callable, Sequence
from typing import Any

from pagepool.arguments import refuse_incomplete, require_int
from pagepool.errors import ArgumentTypeError
from pagepool.hashing.digests import sha256_cbor, sha256_page
from pagepool.hashing.extra_keys import (
    LORA,
    ExtraKeys,
    RequestExtraKeys,
    VllmExtraKeys,
    encode_extra_keys,
    list_features,
)
from pagepool.hashing.features import Features, SortedFeatures
from pagepool.hashing.names import MAX_KEY, HashNames
from pagepool.hashing.page_hash import PageHash, PageHashWithGroupId, checked_hash
from pagepool.hashing.seeds import KeyHolder, get_hash_seed, get_none_hash, get_siphash_key

__all__ = [
    "LORA",
    "MAX_KEY",
    "NONE_HASH",
    "ExtraKeys",
    "Features",
    "HashFunction",
    "HashNames",
    "KeyHolder",
    "PageHash",
    "PageHashWithGroupId",
    "RequestExtraKeys",
    "SortedFeatures",
    "VllmExtraKeys",
    "checked_hash",
    "encode_extra_keys",
    "get_hash_seed",
    "get_siphash_key",
    "hash_page_tokens",
    "hash_request_tokens",
    "init_none_hash",
    "list_features",
    "sha256_cbor",
    "sha256_page",
]

HashFunction = Callable[[Any], int]
"""Maps ``(parent hash, token ids, extra keys)`` to an int; the builtin `hash` is one."""

NONE_HASH: int = 0
"""Parent hash of a first page for hash functions that are callables. Set by `init_none_hash`."""


def init_none_hash() -> None:
    """Set `NONE_HASH` from ``PYTHONHASHSEED`` if it is set, else from the secret of the process.

    Existing hashes stay valid unless the environment has changed.
    """
    global NONE_HASH
    NONE_HASH = get_none_hash()


init_none_hash()


def hash_page_tokens(
    hash_function: HashFunction,
    parent_page_hash: int | None,
    curr_page_token_ids: Sequence[int],
    extra_keys: Any | None = None,
) -> PageHash:
    """Hash one full page: ``hash_function((parent or NONE_HASH, tuple of tokens, extra_keys))``.

    `parent_page_hash` is the ``hash_value`` of the preceding page, None for a first page. O(tokens).

    >>> hash_page_tokens(lambda content: len(content[1]), None, [5, 6, 7])
    PageHash(hash_value=3, token_ids=(5, 6, 7), extra_keys=None)
    """
    parent = NONE_HASH if parent_page_hash is None else parent_page_hash
    try:
        token_ids = tuple(curr_page_token_ids)
    except TypeError:
        kind = type(curr_page_token_ids).__name__
        raise ArgumentTypeError(f"curr_page_token_ids: got {kind}, allowed: a sequence of ints") from None
    return PageHash(hash_function((parent, token_ids, extra_keys)), token_ids, extra_keys)


def hash_request_tokens(hash_function: HashFunction, page_size: int, request: Any) -> list[PageHash]:
    """Hash every full page of ``request.all_token_ids``, each with the preceding page as its parent. O(tokens).

    A request with ``has_vision`` and without features gets different hashes in each call.
    """
    page_size = require_int("page_size", page_size, 1)
    try:
        token_ids = request.all_token_ids
    except AttributeError as error:
        refuse_incomplete(request, error)
    extra_keys = RequestExtraKeys.of(request)
    page_hashes: list[PageHash] = []
    parent: int | None = None
    for start in range(0, len(token_ids) - page_size + 1, page_size):
        page_extra_keys = extra_keys.of_page(start, start + page_size) if extra_keys else None
        page_hashes.append(hash_page_tokens(hash_function, parent, token_ids[start : start + page_size], page_extra_keys))
        parent = page_hashes[-1].hash_value
    return page_hashes
