"""Tokens that come from elsewhere, and leases of pages that are sent there."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pagepool._core import Lease, check_copies_taken, give_back_behind, lease_pages, skip_unread_pages
from pagepool.arguments import id_of, read_count, require_int
from pagepool.errors import ArgumentError, shown
from pagepool.manager.slots import SlotAllocator
from pagepool.manager.tiers import TieredPages

if TYPE_CHECKING:
    from pagepool._core import RequestPages
    from pagepool.request import Request

__all__ = ["ExternalTokens", "Lease"]


class ExternalTokens(TieredPages):
    """The external tokens and leases of `CacheManager`, which inherits and sets up everything here."""

    _leases: dict[Lease, None]
    _slots: SlotAllocator

    def commit_external(self, request: "Request", num_tokens: int) -> None:
        """Enter the pages that a transfer has filled in the prefix index: those of `num_tokens` tokens of a request behind its
        ``num_computed_tokens``. The caller counts them as computed then.

        Before, `allocate_slots` has given them slots, with `num_external_computed_tokens` and `delay_cache_pages`, and the
        request gets no others. Pages that no later token attends to, because they lie behind a window, are given back:
        the transfer need not fill them. With a state `num_tokens` are all external tokens, since the state is of all of them.

        ArgumentError, and nothing changed, for more tokens than have slots or are known, and for a request that holds no
        pages; CopiesDueError while copies or transfers of its pages are due: they are done before the transfer writes there.
        O(pages entered).
        """
        with self._lock:
            held, num_computed_tokens = self._check_external(request, "num_tokens", num_tokens)
            self._commit(request, held, num_computed_tokens)

    def fail_external(self, request: "Request", num_valid_tokens: int) -> int:
        """`commit_external` for the first `num_valid_tokens` of the external tokens. The pages wholly behind them are given
        back. Returns the number of tokens that are computed: the request goes on from there.

        With a state nothing stands, since it is of tokens that did not come: all pages are given back and 0 is returned; the
        request may be looked up again. Errors as in `commit_external`. O(pages given back and entered).
        """
        with self._lock:
            held, num_computed_tokens = self._check_external(request, "num_valid_tokens", num_valid_tokens)
            if any(manager.is_state for manager in self.coordinator.single_type_managers):
                self.coordinator.free(request.request_id)
                return 0
            hashes = self._lookups.hashes.get(request.request_id)
            self._commit(request, held, num_computed_tokens)
            give_back_behind(held, num_computed_tokens, hashes.chain if hashes else None)
            return num_computed_tokens

    def _check_external(self, request: "Request", name: str, num_tokens: int) -> "tuple[RequestPages, int]":
        """Return what a request holds, and how many tokens are computed with the external ones; raise what is wrong."""
        num_tokens = require_int(name, num_tokens, 0)
        held = self.coordinator.requests.get(id_of(request))
        if held is None:
            raise ArgumentError(f"request {shown(request.request_id)} holds no pages")
        start, num_known_tokens = read_count(request, "num_computed_tokens"), read_count(request, "num_tokens")
        num_most_tokens = min(held.num_room_tokens, num_known_tokens) - start
        if num_tokens > num_most_tokens:
            raise ArgumentError(f"{name}: got {shown(num_tokens)}, allowed: at most {num_most_tokens}, which have slots")
        check_copies_taken(held)
        return held, start + num_tokens

    def _commit(self, request: "Request", held: "RequestPages", num_computed_tokens: int) -> None:
        """Enter the pages of a request that are filled by its first tokens, and that later ones attend to."""
        hashes = self._lookups.extend(request, num_computed_tokens) if self.enable_caching else None
        is_due = hashes is not None and held.check_enterable(hashes.chain, num_computed_tokens)
        skip_unread_pages(held, num_computed_tokens)
        if hashes is not None and is_due:
            self._slots.enter_pages(held, hashes, num_computed_tokens)

    def lease(self, page_ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> Lease:
        """Keep pages that a transfer reads: until the lease is released they are not handed out, though their request is freed.

        `page_ids` are held pages, or free ones that are cached; a page that stands there twice is leased twice. `release` ends
        a lease, as does ``with``. A lease is a reference: its pages are held, and `reset_prefix_cache` returns False. It does
        not keep others from writing there, or from dropping prefix entries. `leases` has all that are held: a lease lives until
        it is released, also if nobody else has it. It cannot be pickled.

        PageIdError, and nothing is leased, for the null page, ids outside the pool, and free pages that are not cached;
        ArgumentTypeError for what is no list or array of ints. O(pages); the first call O(num_pages).

        >>> from pagepool import CacheGroupSpec, CacheManager, EngineRequest, FullAttentionSpec
        >>> spec = FullAttentionSpec(page_size=4, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False)
        >>> manager = CacheManager(num_pages=16, kv_cache_groups=[CacheGroupSpec(spec)], max_model_len=64)
        >>> request = EngineRequest("a", [1, 2, 3, 4, 5])
        >>> _ = manager.allocate_slots(request, 5)
        >>> with manager.lease([1, 2]) as lease:
        ...     manager.free(request)
        ...     manager.stats().num_held_pages, manager.leases
        (2, (Lease(page_ids=[1, 2], is_held=True),))
        >>> manager.stats().num_held_pages, lease.is_held, manager.leases
        (0, False, ())
        """
        return lease_pages(self._store, page_ids, self._leases)

    @property
    def leases(self) -> tuple[Lease, ...]:
        """The leases that are held, the oldest first: also those of calls that were interrupted. O(leases)."""
        return tuple([lease for lease in list(self._leases) if lease.is_held])
