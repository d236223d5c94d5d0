"""A store behind the host tier: pages that leave the tier are saved, and those of queued requests are loaded into it."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from time import sleep
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from pagepool._core import HashChain
from pagepool.arguments import as_list, id_of, require_choice, require_int, require_number, require_text
from pagepool.errors import ArgumentError, ArgumentTypeError
from pagepool.manager import CacheManager
from pagepool.process_forks import ProcessLock
from pagepool.request import Request
from pagepool.request_registry import RequestRegistry
from pagepool.stats import StoreStats
from pagepool.stores.frames import import_xxhash
from pagepool.stores.loads import Fetch, Loads
from pagepool.stores.namespace import warn_of_seed
from pagepool.stores.pages import Tier
from pagepool.stores.pending import Jobs
from pagepool.stores.protocol import Store
from pagepool.stores.saves import Saves

logger = logging.getLogger(__name__)

Rows = npt.NDArray[np.uint8]

MAX_QUEUED_BYTES = 1 << 48
MAX_DEADLINE_MS = 1 << 48
MAX_STEP_TOKENS = (1 << 31) - 1
MAX_STEP_SECONDS = 1e9  # thirty years
MAX_POLLS_AT_END = 1000
MAX_EXPLAINED = 1024
"""Most fetches that are kept for explanations."""
SECONDS_BETWEEN_POLLS = 0.001


@runtime_checkable
class HostRows(Protocol):
    """Host memory that records which of its pages were written, as both classes `HostPages` do."""

    @property
    def rows(self) -> Sequence[Rows]:
        """One array of uint8 for each item of `groups`, or one for all groups: ``[num_host_pages, row_bytes]``."""

    @property
    def groups(self) -> Sequence[int] | None:
        """The cache group of each array; None: one array has the pages of all groups."""

    def mark_saved(self, page_ids: Sequence[int], *, group: int | None) -> None:
        """Let pages be loaded from now on: the caller has written their rows. `group` is None without `groups`."""


class StoreTier:
    """A store behind the host tier of a manager.

    Pages that the tier evicts are saved; with ``write="through"`` pages are saved as they reach the tier, for restarts and for
    other engines. `fetch` looks up the pages of a request when it is queued. Those that the store has, and neither pool nor
    tier, are loaded into the tier, where the request hits them when it is admitted: leading pages for full attention, the last
    ones for windows, one checkpoint for states.

    The store is not trusted: a page hits only if its key and checksum are right in the memory of the tier. A store that is
    slow, fails or returns other bytes costs hits, never tokens.

    A page is saved once the steps that may be planned behind its own have begun. If pool and tier drop it as wrong before, it
    is not saved; if they do so later, a tombstone replaces it in the store.

    `rows` are the engine's `HostPages`, or its own arrays of uint8, ``[num_host_pages, row_bytes]``: one for all groups, or one
    for each. All work is done in `take_moves` and in calls of this object, by the calling threads. `take_moves` copies the
    pages that leave the tier, so nothing may be written into rows of saves before it returns them.

    After `reset_prefix_cache` the store has pages of other weights: nothing is saved or loaded any more. Close it, and make
    another one with the namespace of the new weights.
    """

    _lock = ProcessLock("StoreTier")

    def __init__(
        self,
        manager: CacheManager,
        store: Store,
        rows: HostRows | Sequence[Rows],
        namespace: str,
        *,
        write: Literal["evicted", "through"] = "evicted",
        deadline_ms: float = 20.0,
        max_queued_bytes: int = 256 << 20,
    ) -> None:
        """`namespace` is the result of `make_namespace`. `deadline_ms` is explained in `is_ready`. `max_queued_bytes` of pages
        are saved at a time, and as many loaded, in memory that is reserved for each size of row. The memory for saves is
        allocated now, up to a quarter of the tier's, and the rest when it is used. A page that finds no room is not saved.

        Raise ArgumentError for a manager without a host tier, or with a store, for rows that do not fit the tier, and for other
        values; ArgumentTypeError for other types; ImportError without the extra ``pagepool[store]``.
        """
        if not isinstance(manager, CacheManager):
            raise ArgumentTypeError(f"manager: got {type(manager).__name__}, allowed: CacheManager")
        if not isinstance(store, Store):
            raise ArgumentTypeError(f"store: got {type(store).__name__}, allowed: an object with the methods of Store")
        require_text("namespace", namespace)
        require_choice("write", write, "evicted", "through")
        import_xxhash()
        self._deadline = min(require_number("deadline_ms", deadline_ms), MAX_DEADLINE_MS) / 1000
        max_queued_bytes = require_int("max_queued_bytes", max_queued_bytes, 0, MAX_QUEUED_BYTES)
        tier = read_tier(manager, rows)
        self._manager, self._store = manager, store
        self._jobs = Jobs(store)
        self._saves = Saves(tier, self._jobs, namespace, max_queued_bytes)
        self._loads = Loads(tier, self._jobs, self._saves, namespace, max_queued_bytes)
        self._fetches: dict[str, list[Fetch]] = {}
        self._explained: dict[int, Fetch] = {}  # with explanations: the last fetches, by the last key of their prompts
        self._num_late = 0
        self._is_open, self._is_stale = True, False
        self._lock = threading.RLock()
        warn_of_seed(manager)
        manager.attach_storage(self, writes_through=write == "through")

    def fetch(self, request: Request) -> None:
        """Start to look up the pages of a request that was queued, and those of its medium. Call `is_ready` at its turn, or
        `forget` if it ends before. A second call for the same request changes nothing. A page that is on its way for another
        request is not read again. O(pages).

        The request is as for `CacheManager.probe`, with the same errors.
        """
        with self._lock:
            request_id, query = id_of(request), self._manager.registry.read_query(request)
            if not self._is_open or self._is_stale or query is None or request_id in self._fetches:
                return
            registry, now = self._manager.registry, time.monotonic()
            fetches = [Fetch(registry.rules.groups, registry.hash_apart(request, query[0]), query[0], now)]
            medium = None if registry.media is None else registry.media.name(request)
            if medium is not None:
                groups, chain, num_slots = medium
                fetches.append(Fetch(groups, chain, num_slots + 1, now, num_slots))
            fetches = [fetch for fetch in fetches if self._loads.look_up(fetch)]
            if registry.recent_keys is not None:
                self._keep_explained(fetches)
            if fetches:
                self._fetches[request_id] = fetches

    def is_ready(self, request: Request) -> bool:
        """Whether to admit a request whose turn it is. False while its pages are on their way: give the turn to another one,
        and ask again before the next step. The first True forgets the request. True if `fetch` found nothing to look up.

        Without a rate of loads a request waits for at most `deadline_ms` from its first question. By the rates, its loads end L
        seconds after its look-up was answered, and its pages could be computed C seconds after the first question. If the loads
        end first, it waits for C seconds, but not after both `deadline_ms` and 2 L have passed; otherwise it does not wait.
        Pages that are on their way then serve the next request; other loads do not begin.
        """
        with self._lock:
            request_id = id_of(request)
            fetches = self._fetches.get(request_id)
            if fetches is None:
                return True
            self.poll()
            now = time.monotonic()
            late = [fetch for fetch in fetches if self._is_late(fetch, now)]
            if self._is_open and any(fetch.num_on_the_way and fetch not in late for fetch in fetches):
                return False
            self._num_late += any(fetch.began_at is not None or now != fetch.asked_at for fetch in late)
            for fetch in fetches:
                fetch.is_late = fetch in late
                self._loads.leave(fetch)
            del self._fetches[request_id]
            return True

    def _keep_explained(self, fetches: list[Fetch]) -> None:
        """Keep fetches for `find_fetch`."""
        for fetch in fetches:
            self._explained[fetch.chain[len(fetch.chain) - 1]] = fetch
        while len(self._explained) > MAX_EXPLAINED:
            del self._explained[next(iter(self._explained))]

    def find_fetch(self, chain: HashChain) -> str | None:
        """Return what became of the last `fetch` of the prompt with these hashes, as the value of a `MissCause`; None if the
        store does not have the pages that it was asked for. Before `CacheManager.enable_explanations`, no fetch is known. O(1).
        """
        with self._lock:
            fetch = self._explained.get(chain[len(chain) - 1]) if len(chain) else None
            if fetch is None:
                return "store not asked"
            causes = {
                "store late": fetch.is_late,
                "store loading": fetch.num_on_the_way > 0,
                "store failed": fetch.has_failed,
                "store slower": fetch.is_slower,
            }
            return next((cause for cause, is_true in causes.items() if is_true), None)

    def _is_late(self, fetch: Fetch, now: float) -> bool:
        """Whether pages are still on their way after the time for which a request waits at its turn."""
        self._loads.begin_turn(fetch, now)
        return fetch.num_on_the_way > 0 and now >= self._loads.find_patience(fetch, now, self._deadline)

    def forget(self, request: Request) -> None:
        """Forget a request that will not be admitted. Its loads go on. O(1)."""
        with self._lock:
            for fetch in self._fetches.pop(id_of(request), ()):
                self._loads.forget(fetch)

    def record_step(self, num_tokens: int, seconds: float) -> None:
        """Report that a step took some seconds to compute tokens of prompts. Pages are loaded only if loading should end before
        their tokens could be computed: by the rates of the last ten seconds, and the time for which requests waited for their
        turn. Without rates, and after ten seconds without a load, all are loaded. O(1).

        Raise ArgumentError or ArgumentTypeError for other numbers than a step can have.
        """
        num_tokens = require_int("num_tokens", num_tokens, 0, MAX_STEP_TOKENS)
        seconds = require_number("seconds", seconds, 0.0, MAX_STEP_SECONDS)
        with self._lock:
            self._loads.record_step(num_tokens, seconds)

    def poll(self) -> None:
        """Copy and save the pages that are due, and take the store's answers, without waiting. `take_moves` and
        `is_ready` call this. Nothing is raised: errors are logged and counted. O(pages due).
        """
        with self._lock:
            if not self._is_open:
                return
            try:
                is_stale = self._saves.collect()
                if is_stale and not self._is_stale:
                    logger.warning("the prefix cache was reset: nothing is saved in the store or loaded from it any more")
                    self._is_stale = True
                    self._loads.clear()
                    self._fetches.clear()
                self._jobs.poll()
                self._loads.end_poll()
                self._loads.start()
            except Exception:
                self._jobs.num_errors += 1
                logger.exception("the store behind the host tier")

    def stats(self) -> StoreStats:
        """Return the state and the counters. O(1)."""
        with self._lock:
            saves, loads = self._saves, self._loads
            return StoreStats(
                num_queued_pages=saves.num_queued,
                num_loading_pages=loads.num_loading,
                num_waiting_requests=len(self._fetches),
                num_saved_pages=saves.num_saved,
                num_dropped_pages=saves.num_dropped,
                num_unsaved_pages=saves.num_failed,
                num_looked_up_pages=loads.num_looked_up,
                num_found_pages=loads.num_found,
                num_loaded_pages=loads.num_loaded,
                num_missing_pages=loads.num_missing,
                num_damaged_pages=loads.num_damaged,
                num_recomputed_pages=loads.num_recomputed,
                num_late_requests=self._num_late,
                num_errors=self._jobs.num_errors,
            )

    def close(self, *, drain_seconds: float = 0.0) -> None:
        """Wait for saves up to `drain_seconds`, and close the store. Every request is ready then. A second call does nothing.

        If `drain_seconds` is not 0, pages of the last steps are saved too: first take back steps that have failed. Objects that
        were found to be wrong are replaced before the store is closed, if it answers within a second.
        """
        drain_seconds = require_number("drain_seconds", drain_seconds)
        with self._lock:
            if not self._is_open:
                return
            self.poll()
            if drain_seconds:
                self._saves.collect(is_end=True)
            for _ in range(MAX_POLLS_AT_END):
                if not self._saves.has_wrong:
                    break
                sleep(SECONDS_BETWEEN_POLLS)
                self.poll()
            self._is_open = False
            self._manager.detach_storage()
            self._fetches.clear()
            self._jobs.close(drain_seconds)


def read_tier(manager: CacheManager, rows: HostRows | Sequence[Rows]) -> Tier:
    """Return the tier behind a manager, with the rows of each group. Raise ArgumentError for rows that do not fit it."""
    if manager.host_tier is None:
        raise ArgumentError("manager: got one without a host tier, allowed: CacheManager(..., host_tier=HostTier(...))")
    pools = [group.pool for group in (*manager.kv_cache_groups, *manager.cross_groups)]
    num_groups = len(pools)
    groups: Sequence[int] | None = None
    mark_saved: Callable[..., None] = ignore_saved
    if isinstance(rows, HostRows):
        arrays, mark_saved = [array for array in rows.rows if np.size(array)], rows.mark_saved
        if rows.groups is not None:  # a group without arrays is none of the model's
            groups = [group for group, array in zip(rows.groups, rows.rows, strict=True) if np.size(array)]
    else:
        arrays = as_list("rows", rows, "HostPages, or a list of uint8 arrays")
    has_groups = groups is not None
    arrays = arrays * num_groups if len(arrays) == 1 and not has_groups else arrays
    of_group = dict(zip(range(len(arrays)) if groups is None else groups, arrays, strict=True))
    if sorted(of_group) != list(range(num_groups)):
        raise ArgumentError(f"rows: got {len(arrays)} arrays, allowed: one for all groups, or one for each of {num_groups}")
    for group, array in of_group.items():
        check_rows(f"rows[{group}]", array, manager.host_tier.count_pages(pools[group]))
    names: list[int | None] = [None] if groups is None else [*groups]
    for name in names:
        mark_saved([], group=name)  # raises if others cannot write the rows
    ordered = [of_group[group] for group in range(num_groups)]
    registry = manager.registry
    count_steps_ahead = partial(count_steps_of, registry)
    of_store = [*manager.pools]
    banks = [of_store.index(pool) if len(of_store) > 1 else 0 for pool in pools]
    return Tier(registry.store, banks, ordered, has_groups, mark_saved, count_steps_ahead)


def count_steps_of(registry: RequestRegistry) -> int:
    """Return the number of steps that may be planned before one is known to have failed: at least one, which engines without
    `max_steps_ahead` may plan.
    """
    return max(1, registry.max_steps_ahead)


def check_rows(name: str, array: Rows, num_pages: int) -> None:
    """Raise ArgumentTypeError or ArgumentError unless an array has a writable row of bytes for each page of the tier."""
    if not isinstance(array, np.ndarray) or array.dtype != np.uint8 or array.ndim != 2:
        got = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        raise ArgumentTypeError(f"{name}: got {got}, allowed: a uint8 array with 2 dimensions")
    if not array.shape[1]:
        raise ArgumentError(f"{name}: got shape {array.shape}, allowed: rows of at least 1 byte")
    if len(array) != num_pages or not array.flags.c_contiguous or not array.flags.writeable:
        got = f"shape {array.shape}{'' if array.flags.writeable else ', read-only'}"
        raise ArgumentError(f"{name}: got {got}, allowed: a writable row for each of the tier's {num_pages} pages")


def ignore_saved(_page_ids: Sequence[int], *, group: int | None) -> None:
    """Do nothing: an engine's own arrays need not know which pages the store has written."""
