"""The index of prefixes cached by workers.

Native methods of `PrefixIndex`:

- ``core/router/prefixes.pyx``: `apply`, `find`, `count_skipped`, `note_loss`, `remove_worker`, `clear`, `list_blocks`, `stats`,
  `check`
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pagepool._core import PrefixTable, require_token_ids
from pagepool.arguments import as_list, require_int
from pagepool.errors import ArgumentError, ArgumentTypeError, shown
from pagepool.hashing import ExtraKeyNames
from pagepool.page_hashing import make_page_hasher
from pagepool.request import LoraId, Salt

NAMED_ALGORITHMS = ("siphash128", "sha256", "sha256_cbor")
MAX_WORKERS = 1 << 16
ARGUMENTS = ExtraKeyNames("salt", "adapter", "images")


class PrefixIndex(PrefixTable):
    """Index of the prefixes cached by each worker, built from the workers' events.

    Workers are ints from 0 on, at most 65,536. `apply` takes a batch of events as it comes from the wire: from pagepool, vLLM
    (maps, or arrays as in older versions), or SGLang. `find` and `find_tokens` return how many tokens of a prompt each worker
    has. The answer is exact: a prefix ends at the first page a worker lacks, even if it has later ones. With several cache
    groups, learned from the events, it is the longest prefix at which all groups can resume, by the rules of `CacheManager`.
    Groups of chunked attention count as full attention, because no event has the size of a chunk; their answer is a lower
    bound. pagepool's events contain the number of groups, and nothing hits while any group is unknown. With events of other
    engines a group without a stored block is ignored. Events of groups from `num_groups` on are left out.

    Events that the index cannot place are left out, with the removals of their blocks, and counted in `num_skipped`: unknown
    events, placeholders without a block size, blocks of another size or kind than the group's, groups and media beyond the
    limits. Blocks shorter than their group's block size hit as in vLLM: after full blocks, if a group has states.

    A worker may report a block several times, as vLLM does for each copy: the block is there until it was removed as often. So
    apply each batch once, in order, as `EventSubscriber` does; after a loss call `note_loss`.

    `page_size` is the number of tokens per hash; it divides the block sizes of all groups. `hash_algo`, `hash_seed`,
    `use_eagle` and `hash_lookahead` (vLLM's ``num_hash_lookahead_tokens``) are those of the workers' managers: with `use_eagle`
    and no `hash_lookahead` the last page of a hit is dropped, as there. `find` needs only the last two, to know whether a
    page is dropped. After a batch a worker has at most `max_worker_blocks` blocks, not counting copies.

    All methods are safe to call from any thread. Up to eight look-ups run in parallel; those of 2,048 pages or more release the
    GIL. A block takes at most 40 bytes for the first 64 workers and one medium; each further 64 workers and each further medium
    add 9 bytes. Raise ArgumentError for values out of range.

    >>> from pagepool.events import BlockStored, EventBatch, encode_batch
    >>> index = PrefixIndex(page_size=16)
    >>> _ = index.apply(1, encode_batch(EventBatch(0.0, [BlockStored([11, 12], None, [], 16, None, "GPU", None)])))
    >>> index.find([11, 12, 13])
    array([ 0, 32], dtype=int32)
    """

    def __init__(
        self,
        page_size: int,
        *,
        hash_algo: str = "siphash128",
        hash_seed: int | str | bytes | None = None,
        max_worker_blocks: int = 1 << 24,
        num_groups: int | None = None,
        use_eagle: bool = False,
        hash_lookahead: int = 0,
    ) -> None:
        """See the class for the parameters."""
        if not isinstance(hash_algo, str) or hash_algo not in NAMED_ALGORITHMS:
            raise ArgumentError(f"hash_algo: got {shown(hash_algo)}, allowed: {', '.join(map(repr, NAMED_ALGORITHMS))}")
        self._hasher = make_page_hasher(hash_algo, page_size, hash_seed, hash_lookahead)

    def hash_tokens(
        self,
        token_ids: Sequence[int] | npt.NDArray[Any],
        *,
        salt: Salt | None = None,
        adapter: LoraId | None = None,
        images: Sequence[Any] = (),
    ) -> Any:
        """Return the hashes of a prompt's pages that may hit, as a `HashChain` for `find`. O(tokens).

        `salt`, `adapter` and `images` are as `cache_salt`, `lora_id` and `mm_features` of a request. One token is left to
        compute. Raise ArgumentTypeError or ArgumentError for an invalid token id, also after the last page.
        """
        if not hasattr(token_ids, "__len__") or getattr(token_ids, "shape", None) == ():
            raise ArgumentTypeError(f"token_ids: got {type(token_ids).__name__}, allowed: a list or an array of ints")
        if not hasattr(token_ids, "dtype"):
            token_ids = as_list("token_ids", token_ids, "a list or an array of ints")
        request: Any = _Prompt(token_ids, salt, adapter, images)
        hashes = self._hasher.start(request, names=ARGUMENTS)
        num_pages = max(0, len(token_ids) - max(1, self._hasher.hash_lookahead)) // self.page_size
        try:
            self._hasher.extend(hashes, request, num_pages)
            require_token_ids(token_ids[num_pages * self.page_size :], num_pages * self.page_size)
        except (ArgumentError, ArgumentTypeError):
            require_token_ids(token_ids)  # its message names the argument, and counts from the first token
            raise
        return hashes.chain

    def find_tokens(
        self,
        token_ids: Sequence[int] | npt.NDArray[Any],
        *,
        salt: Salt | None = None,
        adapter: LoraId | None = None,
        images: Sequence[Any] = (),
        medium: str | None = None,
    ) -> npt.NDArray[np.int32]:
        """Return how many tokens of a prompt each worker has: `find` after `hash_tokens`. O(tokens)."""
        return self.find(self.hash_tokens(token_ids, salt=salt, adapter=adapter, images=images), medium)


class _Prompt(NamedTuple):
    """The attributes of a request that are hashed."""

    all_token_ids: Any
    cache_salt: Salt | None
    lora_id: LoraId | None
    mm_features: Sequence[Any]
    request_id: str = "prompt"


def require_worker(worker: object) -> int:
    """Return the number of a worker as an int."""
    return require_int("worker", worker, 0, MAX_WORKERS - 1)
