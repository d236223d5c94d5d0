"""Types of the compiled core, and docstrings of what is public."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final, Self, TypedDict, final

import numpy as np
import numpy.typing as npt

from pagepool.hashing import HashNames, PageHashWithGroupId
from pagepool.refusal import Refusal
from pagepool.request import Request

class _BuildFlags(TypedDict):
    debug: bool
    guards: bool
    sanitizer: str
    traced: bool
    free_threaded: bool
    compiler: str

def build_flags() -> _BuildFlags: ...
def siphash128(key: bytes, data: bytes) -> bytes: ...

class PageIds:
    def __new__(cls, values: Iterable[int] | npt.NDArray[Any] | PageIds | None = None) -> Self: ...
    def __len__(self) -> int: ...
    def __getitem__(self, i: int, /) -> int: ...
    def __contains__(self, value: object, /) -> bool: ...
    @staticmethod
    def joined(groups: Iterable[PageIds]) -> PageIds: ...
    @staticmethod
    def of_slice(items: list[int], start: int, stop: int) -> PageIds: ...
    def to_list(self) -> list[int]: ...
    def to_array(self) -> npt.NDArray[np.int32]: ...

def lists_of(groups: tuple[PageIds, ...]) -> tuple[list[int], ...]: ...

_Ids = PageIds | Sequence[int] | npt.NDArray[np.integer[Any]]

_Keys = tuple[npt.NDArray[np.uint64], npt.NDArray[np.int32]]
_Entries = tuple[npt.NDArray[np.uint64], list[tuple[int, int, int, int, int, int]], npt.NDArray[np.int32]]

def are_plain_token_ids(items: list[Any]) -> bool: ...
def require_token_ids(token_ids: _Ids, first: int = 0) -> None: ...

@final
class PageRules:
    def __new__(
        cls,
        page_size: int | None,
        window: int = 0,
        chunk: int = 0,
        hit_tokens: int = 0,
        interval: int = 0,
        period: int = 0,
        capacity: int = 0,
        answer_window: int = 0,
    ) -> Self: ...

_Groups = Iterable[tuple[PageRules, int | None, int]]

@final
class CacheGroups:
    def __new__(
        cls,
        groups: _Groups,
        use_eagle: bool = False,
        boundaries: tuple[int, int, int] | None = None,
        banks: Sequence[int] | None = None,
        hash_lookahead: int = 0,
    ) -> Self: ...
    def __len__(self) -> int: ...
    def count_peak_pages(
        self,
        num_tokens: int,
        max_num_new_tokens: int,
        num_lookahead_tokens: int = 0,
        max_num_tokens: int | None = None,
        bank: int | None = None,
    ) -> int: ...
    def count_step_pages(self, num_computed_tokens: int, num_slots: int, bank: int) -> int: ...

@final
class HashChain:
    page_size: Final[int]
    def __new__(
        cls, page_size: int, key: bytes, keep_token_ids: bool = False, algorithm: str = "siphash128", hash_lookahead: int = 0
    ) -> Self: ...
    def __len__(self) -> int: ...
    def __getitem__(self, i: int, /) -> int: ...
    def extend(self, tokens: Sequence[int] | npt.NDArray[Any] | PageIds, extra_keys: bytes = b"", start: int = -1) -> None: ...
    def append_key(self, key: int, tokens: _Ids = ()) -> None: ...
    def page_token_ids(self, i: int) -> tuple[int, ...]: ...

class HashedTokens:
    token_ids: Final[PageIds]
    def __new__(
        cls,
        token_ids: Sequence[int] | npt.NDArray[Any] | PageIds,
        page_size: int,
        key: bytes = b"",
        extra_keys: Sequence[tuple[int | None, bytes]] = (),
        keep_token_ids: bool = False,
        algorithm: str = "siphash128",
        hash_lookahead: int = 0,
    ) -> Self: ...
    @property
    def hits_fewer(self) -> bool: ...

COUNTERS: Final[tuple[str, ...]]

class PageRecords:
    @property
    def num_pages(self) -> int: ...
    @property
    def num_free_pages(self) -> int: ...
    def ref_counts(self, bank: int = 0) -> npt.NDArray[np.int32]: ...
    def set_ref_count(self, page_id: int, ref_cnt: int) -> None: ...
    def is_free(self, page_id: int) -> bool: ...
    def free_ids(self, bank: int = 0) -> PageIds: ...
    def neighbours(self, page_id: int) -> tuple[CachePage | None, CachePage | None]: ...
    def pop(self, n: int) -> PageIds: ...
    def remove_page(self, page: CachePage) -> None: ...
    def append(self, page_ids: _Ids) -> None: ...
    def page(self, page_id: int) -> CachePage: ...
    def pages(self, ids: PageIds) -> list[CachePage]: ...
    def ids_of_pages(self, pages: Iterable[CachePage]) -> PageIds: ...

class LoosePages(PageRecords):
    def adopt(self, page: CachePage) -> None: ...

class PageStore(PageRecords):
    @property
    def has_tier(self) -> bool: ...
    enable_caching: Final[bool]
    eviction: Final[str]
    bank_names: Final[tuple[str, ...]]
    names: Final[HashNames]
    def __new__(
        cls,
        num_pages: int,
        enable_caching: bool = True,
        eviction: str = "lru",
        further_banks: Sequence[int] = (),
        bank_names: Sequence[str] = ("kv",),
    ) -> Self: ...
    @property
    def num_keys(self) -> int: ...
    @property
    def num_cached_pages(self) -> int: ...
    @property
    def num_sessions(self) -> int: ...
    @property
    def expectations(self) -> tuple[list[int], dict[str, int]]: ...
    def set_time(self, seconds: float) -> None: ...
    @property
    def num_kept_token_ids(self) -> int: ...
    @property
    def counters(self) -> dict[str, int]: ...
    def bounds_of(self, bank: int) -> tuple[int, int]: ...
    def count_pages(self, bank: int) -> int: ...
    def count_free(self, bank: int) -> int: ...
    def ids_in_banks(self, page_ids: PageIds) -> PageIds: ...
    def lists_in_banks(self, groups: tuple[PageIds, ...]) -> tuple[list[int], ...]: ...
    def records_in_bank(self, page_ids: _Ids, bank: int) -> PageIds: ...
    def require_even(self, data_parallel_size: int | None) -> None: ...
    def require_one_bank(self, what: str) -> None: ...
    def name_banks(self, names: Sequence[str]) -> None: ...
    def take(self, n: int, shard: int | None = None, num_shards: int = 0, bank: int = 0) -> PageIds: ...
    def set_aside(self, n: int, bank: int = 0) -> PageIds: ...
    def put_blank_first(self) -> None: ...
    def prefer_held(self) -> None: ...
    def set_shards(self, num_shards: int) -> None: ...
    def give_back(self, page_ids: _Ids, tail_first: bool = False) -> None: ...
    def touch(self, page_ids: _Ids) -> None: ...
    def find(self, key: int, group: int, start: int = 0, stop: int | None = None) -> int | None: ...
    def find_pages(
        self, key: int, groups: Sequence[int], start: int = 0, stop: int | None = None
    ) -> list[CachePage] | None: ...
    def twins(self, page_id: int) -> PageIds: ...
    def enter(self, page_id: int, key: int, group: int) -> None: ...
    def drop(self, page_ids: _Ids) -> int: ...
    def drop_all(self) -> int: ...
    def key_of(self, page_id: int) -> tuple[int, int] | None: ...
    def page_hash_of(self, page_id: int) -> PageHashWithGroupId | None: ...
    def enter_pages(
        self, ids: PageIds, chain: HashChain, start: int, group: int, context: int = 0, first_place: int = 0
    ) -> None: ...
    def cache_hash(self, page_id: int, page_hash: PageHashWithGroupId) -> None: ...

def keep_token_ids(store: PageStore, width: int) -> None: ...
def keep_whole_digests(store: PageStore) -> None: ...
def rank_checkpoints(store: PageStore, banks: Iterable[int]) -> None: ...
def search_all_lost(store: PageStore) -> None: ...
def keep_departures(store: PageStore, notes_leaving: bool = False) -> None: ...
def drop_dependents(store: PageStore, group: int, state_groups: Iterable[int]) -> None: ...
def list_residency(store: PageStore) -> tuple[tuple[list[int], int], ...]: ...
def estimate_hits(store: PageStore) -> tuple[int, int] | None: ...
def count_leased(store: PageStore) -> list[int]: ...
def count_usable(store: PageStore, bank: int) -> int: ...
def list_sizes(store: PageStore) -> list[int]: ...
def count_entries(store: PageStore, bank: int) -> tuple[int, int, int, int, int, int]: ...

_Range = tuple[int, int | None]
_Hits = tuple[PageIds, ...]

def find_prefix(
    store: PageStore,
    groups: CacheGroups,
    chain: HashChain,
    num_tokens: int,
    ids: _Range = (0, None),
    reaches_tier: bool = False,
) -> tuple[_Hits, int]: ...
def find_misses(
    store: PageStore, groups: CacheGroups, chain: HashChain, num_tokens: int, ids: _Range = (0, None)
) -> dict[str, Any]: ...
def has_entry(store: PageStore, chain: HashChain, page: int, group: int) -> bool: ...

class CachePages:
    """Pages for each cache group: the hits of a look-up, or the new pages of an allocation.

    It holds ids; the page objects in ``pages`` are made when they are first read.
    """

    def __init__(self, pages: tuple[list[CachePage], ...] | tuple[PageIds, ...], store: PageStore | None = None) -> None:
        """`pages` is one list of `CachePage` for each group or, with `store`, `PageIds` of that pool."""
    @property
    def pages(self) -> tuple[list[CachePage], ...]:
        """One list of page objects for each group."""
    def get_page_ids(self) -> tuple[list[int], ...]:
        """Return one list of page ids for each group. O(pages)."""
    def get_ids(self, store: PageStore) -> tuple[PageIds, ...]:
        """Return the native ids; PageIdError unless the pages belong to `store`."""
    def get_unhashed_page_ids(self) -> list[int]:
        """Return the ids of the pages that are not cached. ArgumentError unless there is exactly one group."""
    def new_empty(self) -> CachePages:
        """Return empty lists of pages for the same number of groups."""
    def __add__(self, other: CachePages, /) -> CachePages:
        """Return the pages of both, group by group. ArgumentError if the numbers of groups differ."""
    def __radd__(self, other: CachePages, /) -> CachePages: ...
    def __eq__(self, other: object) -> bool:
        """Whether both have the same pages in the same order."""

@final
class FoundPrefix:
    hits: Final[tuple[PageIds, ...]]
    num_queried_tokens: Final[int]
    num_hit_tokens: Final[int]
    is_short: Final[bool]
    is_preempted: bool
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

@final
class RequestHashes:
    request: Final[Any]
    chain: Final[HashChain]
    page_hashes: Final[list[Any]]
    extra_keys: Any
    query: FoundPrefix | None
    is_counted: bool
    are_unsure: bool
    refusal: RefusedRequest | None
    def __new__(cls, request: Any, chain: HashChain, extra_keys: Any = None) -> Self: ...
    def cut(self, num_pages: int) -> None: ...

class RequestMaps:
    held: Final[dict[str, RequestPages]]
    hashes: Final[dict[str, RequestHashes]]
    store: Final[PageStore]
    query_counters: Final[tuple[QueryCounter, QueryCounter]]
    def __init__(self, store: PageStore, trusts_requests: bool = False) -> None: ...
    @property
    def lock(self) -> Any: ...
    def find_held(self, request: Request) -> RequestPages | None: ...
    def refuse_nested(self, request_id: str) -> None: ...

class SlotAllocator:
    _no_ids: Final[tuple[PageIds, ...]]
    def __init__(
        self,
        registry: RequestMaps,
        max_num_tokens: int,
        on_too_large: Callable[[int, Sequence[PageIds], int], None] | None = None,
        caches_computed: bool = False,
    ) -> None:
        """Allocate to the requests of a `RequestRegistry`, each of at most `max_num_tokens` tokens."""
    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_pages: CachePages | None = None,
        num_lookahead_tokens: int = 0,
        delay_cache_pages: bool = False,
        dp_shard_hint: int | None = None,
        data_parallel_size: int | None = None,
        *,
        num_external_computed_tokens: int = 0,
        num_reserved_pages: int = 0,
    ) -> CachePages | None:
        """Allocate slots for the next tokens of a request and return the new pages; None if too few pages are free now.

        The tokens of a request, from its first on::

            | num_computed | num_new_computed | num_external_computed |    num_new    | num_lookahead |
            |    tokens    |      tokens      |         tokens        |    tokens     |    tokens     |
            |--------------|------------------|-----------------------|---------------|---------------|
            | held already;| hits: each page  | pages are taken; a    | pages are     | pages are     |
            | behind a     | gets a reference | transfer fills them   | taken; full   | taken, and    |
            | window given |                  |                       | ones are      | cached by a   |
            | back         |                  |                       | cached        | later call    |

        The request has ``num_computed_tokens`` computed tokens. `new_computed_pages` are the hits of `get_computed_pages`, if
        the request holds no page yet. Slots for drafts, `num_lookahead_tokens`, end at `max_model_len`. Pages that are filled
        by known tokens other than drafts are cached, unless `delay_cache_pages` (then call `commit_external` or `cache_pages`
        later). With ``caches="computed"`` the pages filled by known computed tokens are cached instead, also if None is
        returned, and `delay_cache_pages` changes nothing. If the step does not run, `free` with `num_computed_tokens` drops
        those entries. Pages that have left an attention window are freed first, even if None is returned. After None, and after
        an error, known tokens without slots may be taken back or replaced: docs/engines.md says what else may change.

        With `data_parallel_size` > 1 new pages come from the shard of the request's pages, else from the hinted shard. If that
        shard has too few, the hits count as recently used and None is returned. `num_reserved_pages` free pages are left
        for others (a watermark for admission).

        RequestTooLargeError, and no change, for a request that would hold more pages than the pool, or its shard, has at all:
        no waiting helps, but steps of fewer tokens may (see `CacheManager.require_capacity`).

        New tokens may be unknown ones, such as drafts and tokens in flight: they get slots, but are not cached yet.

        ArgumentError, and no change, for 0 new tokens, for more tokens than `max_model_len`, for more lookahead tokens than a
        ring can take back, for hits that are counted among
        the new tokens too, and for computed tokens that cannot be: beyond the hits of a request that holds nothing (a preempted
        request starts at 0 again), or beyond the slots of one with pages. MovesDueError, and no change, while moves of its
        pages, or states that its step writes, are due. The state of a state group cannot go back: free a request whose
        ``num_computed_tokens`` decreases, or restore its state. One native transaction; if nothing is due, the manager's lock
        is not taken. Amortised O(new pages).
        """
    def cache_pages(self, request: Request, num_computed_tokens: int) -> None:
        """Cache the pages filled by the first `num_computed_tokens` tokens, after a delayed allocation.

        With ``caches="computed"``, after any allocation: other requests then hit the pages before the next call for this one.
        Does nothing without caching. ArgumentError if the request does not hold the pages. If nothing is due, the manager's
        lock is not taken. O(new full pages).
        """

@final
class RequestPages:
    session_id: str | None
    owner: Final[Any]
    num_cached_tokens: Final[int]
    def __new__(cls, store: PageStore, groups: CacheGroups, max_num_tokens: int, owner: object = None) -> Self: ...
    def __len__(self) -> int: ...
    @property
    def num_room_tokens(self) -> int: ...
    @property
    def num_full_tokens(self) -> int: ...
    def count_entered_hashes(self, num_computed_tokens: int) -> int: ...
    def begin(self, num_tokens: int, found: FoundPrefix) -> None: ...
    def find_last_write(self, num_tokens: int) -> int: ...
    def get_page_ids(self) -> tuple[PageIds, ...]: ...
    def allocate(
        self,
        num_tokens: int,
        num_computed_tokens: int = 0,
        hits: Iterable[PageIds] = (),
        chain: HashChain | None = None,
        num_tokens_to_cache: int = 0,
        shard: int | None = None,
        num_shards: int = 0,
    ) -> tuple[PageIds, ...] | None: ...
    def enter(self, chain: HashChain, num_tokens: int, num_computed_tokens: int, context: int = 0) -> None: ...
    def fork(self, target: RequestPages, num_computed_tokens: int, session: int = 0, hash_lookahead: int = 0) -> bool: ...
    def end_external(
        self, chain: HashChain | None, num_tokens: int, is_failed: bool, context: int = 0, is_last: bool = True
    ) -> None: ...
    def require_moves_taken(self, may_be_read: bool = False) -> None: ...
    def give_back(
        self,
        num_computed_tokens: int | None = None,
        chain: HashChain | None = None,
        num_last_tokens: int = 0,
        context: int = 0,
        term: int = 0,
        num_tokens_to_cache: int = 0,
    ) -> None: ...
    def count_shared(self, group: int, num_holders: int) -> int: ...

@final
class Lease:
    """References to pages that keep them from being handed out, until `release` or the end of the lease: see
    `CacheManager.lease`.

    A ``with`` block releases the lease at its end. ``page_ids`` are the leased pages; ``len()`` counts them. With several
    pools an id counts within the pool of its group; ``page_ids_by_pool`` has the ids of each pool by its name. ``is_held``
    is False once the lease was released or has ended.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    @property
    def is_held(self) -> bool: ...
    @property
    def page_ids(self) -> list[int]: ...
    @property
    def page_ids_by_pool(self) -> dict[str, list[int]]: ...
    def __len__(self) -> int: ...
    def extend(self, seconds: float) -> None:
        """Let the lease end `seconds` from now. ArgumentError if it has ended or never ends, and unless `seconds` is finite and
        above 0.
        """
    def release(self) -> None:
        """Give the references back, the last page's first; a second call does nothing. DoubleFreeError, and nothing changed, if
        somebody else gave one of them back. O(pages), and O(leases) for a lease with an end.
        """
    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...

@final
class PageSessions:
    def __new__(cls, store: PageStore) -> Self: ...
    def hold(self, session_id: str | None, tenant: str | None = None) -> int: ...
    def release(self, number: int) -> None: ...
    def expect(self, session_id: str, seconds: float | None) -> int: ...
    def set_shares(self, shares: Mapping[str, float]) -> None: ...
    def count_charged(self, bank: int) -> dict[str, int]: ...

def lease_pages(store: PageStore, page_ids: _Ids, bank: int = 0, seconds: float | None = None) -> Lease: ...
def limit_leases(store: PageStore, max_share: float) -> None: ...
def count_leasable_pages(store: PageStore) -> int: ...
def list_leases(store: PageStore) -> list[Lease]: ...
def term_of(seconds: float | None) -> int: ...

@final
class PageTier:
    def __new__(
        cls,
        store: PageStore,
        num_pages: int,
        writes_through: bool = False,
        further_banks: Sequence[int] = (),
    ) -> Self: ...
    def counters(self, store: PageStore) -> dict[str, int]: ...
    def count_banks(self, store: PageStore) -> list[tuple[int, ...]]: ...

def add_tier(store: PageStore, tier: PageTier) -> None: ...
def resize_banks(store: PageStore, sizes: Sequence[int], are_final: bool = False, only_unheld: bool = False) -> int: ...

@final
class PageCopies:
    """Pages to copy, in order: page ``src[i]`` to page ``dst[i]``, in the arrays of cache group ``group[i]``.

    The three are read-only int32 arrays of one length, which ``len()`` returns. With several pools, ids are relative to the
    group's pool. Destinations are distinct.
    """

    src: Final[npt.NDArray[np.int32]]
    dst: Final[npt.NDArray[np.int32]]
    group: Final[npt.NDArray[np.int32]]
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def __len__(self) -> int: ...

@final
class StateWrites:
    """States that the next step writes: the state of row ``rows[i]`` after its first ``num_tokens[i]`` tokens, to page
    ``page_ids[i]`` in the arrays of cache group ``group[i]``. In writes of a batch, ``request_ids`` is None. In writes of a
    manager's requests, ``request_ids[i]`` names the request, and ``rows`` is None.

    The request ids are a tuple, the other fields read-only int32 arrays, all of one length, which ``len()`` returns.
    """

    rows: Final[npt.NDArray[np.int32] | None]
    request_ids: Final[tuple[str, ...] | None]
    num_tokens: Final[npt.NDArray[np.int32]]
    page_ids: Final[npt.NDArray[np.int32]]
    group: Final[npt.NDArray[np.int32]]
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def __len__(self) -> int: ...

@final
class Moves:
    """Moves to make before the next step, and states that it writes. ``len()`` counts all moves.

    The device first reads all pages of ``saves``, which go from the device to the tier; then it writes all pages of ``loads``,
    which come from the tier; then it makes the ``copies`` within the device, reading all sources before it writes any
    destination, so one gather and one scatter suffice. These are `PageCopies`. The step itself makes the ``writes``, which are
    `StateWrites`. Answer ``number`` by `CacheManager.complete` or `fail` once the bytes of loads and saves have arrived; 0:
    there are no loads or saves, and nothing to answer.
    """

    number: Final[int]
    copies: Final[PageCopies]
    loads: Final[PageCopies]
    saves: Final[PageCopies]
    writes: Final[StateWrites]
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def __len__(self) -> int: ...

def take_moves(store: PageStore, maps: RequestMaps | None = None) -> Moves: ...
def list_in_flight(store: PageStore) -> list[Moves]: ...
def link_storage(store: PageStore, writes_through: bool = False) -> None: ...
def unlink_storage(store: PageStore) -> None: ...
def take_unstored(
    store: PageStore, num_steps: int = 0
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int64], int, int]: ...
def begin_fills(
    store: PageStore, banks: Sequence[int], keys: npt.NDArray[np.uint64], group_ids: _Ids, chain: HashChain | None = None
) -> tuple[int, npt.NDArray[np.int32]]: ...
def end_fills(store: PageStore, number: int, failed: Sequence[int] = ()) -> None: ...
def list_absent(
    store: PageStore,
    groups: CacheGroups,
    chain: HashChain,
    num_tokens: int,
    keys: npt.NDArray[np.uint64] | None = None,
    group_ids: _Ids = (),
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int32], int, int]: ...

@final
class TierHold:
    page_ids: Final[npt.NDArray[np.int32]]
    num_clears: Final[int]
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def release(self) -> npt.NDArray[np.bool_]: ...

def hold_stored(store: PageStore, keys: npt.NDArray[np.uint64], group_ids: _Ids, num_steps: int = 0) -> TierHold: ...

@final
class FailedLoads:
    """Pages with wrong contents, since loads of list `number` failed. ``len()`` counts them. `groups` has the cache group of
    each page; ids are relative to the group's pool.
    """

    number: Final[int]
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def __len__(self) -> int: ...
    @property
    def page_ids(self) -> list[int]: ...
    @property
    def groups(self) -> list[int]: ...

def end_transfers(
    store: PageStore, number: int, failed_saves: Sequence[int] = (), failed_loads: Sequence[int] = ()
) -> FailedLoads: ...
def rewind_request(held: RequestPages | None, failed: FailedLoads) -> int | None: ...
def count_steps(store: PageStore) -> int: ...
def are_loading(store: PageStore, hits: tuple[PageIds, ...]) -> bool: ...
def load_prefix(
    store: PageStore,
    groups: CacheGroups,
    chain: HashChain,
    num_tokens: int,
    ids: _Range = (0, None),
    context: int = 0,
    num_reserved: int = 0,
    session: int = 0,
) -> FoundPrefix: ...
def check_holders(
    store: PageStore, requests: Iterable[RequestPages], rows: RunningRows | None = None, groups: CacheGroups | None = None
) -> None: ...

@final
class PageClaim:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    @property
    def holder(self) -> Any: ...
    @property
    def row(self) -> int: ...
    @property
    def num_references(self) -> int: ...
    @property
    def num_pages(self) -> dict[str, int]: ...
    @property
    def num_own_pages(self) -> dict[str, int]: ...
    @property
    def num_first_pages(self) -> dict[str, int]: ...
    @property
    def page_ids_by_pool(self) -> dict[str, list[int]]: ...
    @property
    def seconds(self) -> float | None: ...
    @property
    def seconds_left(self) -> float | None: ...

def list_claims(store: PageStore, holders: Iterable[Lease | PageIds | RequestPages | RunningRows]) -> list[PageClaim]: ...

CONSTANTS: Final[SimpleNamespace]

def copy_records(store: PageStore, names: str | None = None, of_tier: bool = False) -> dict[str, Any]: ...
def locate_numbers(holder: RequestPages | RunningRows | TableRows) -> dict[str, tuple[int, tuple[int, ...], np.dtype[Any]]]: ...
def locate_records(store: PageStore, of_tier: bool = False) -> dict[str, tuple[int, tuple[int, ...], np.dtype[Any]]]: ...
def find_policy_fault(store: PageStore, of_tier: bool = False) -> str | None: ...
def follow(prev_ids: _Ids, next_ids: _Ids, first_ids: _Ids) -> tuple[PageIds, bool]: ...

@final
class TokenSpan:
    start: Final[int]
    stop: Final[int]
    def __new__(cls, start: int = 0, stop: int | None = None) -> Self: ...
    def of_request(
        self, store: PageStore, groups: CacheGroups, chain: HashChain, num_tokens: int, held: RequestPages | None = None
    ) -> TokenSpan: ...
    def of_row(self, rows: RunningRows, row: int) -> TokenSpan: ...
    def expect(self, seconds: float | None) -> int: ...
    def lease(self, seconds: float) -> Lease: ...

class EntryJournal:
    def __new__(cls, store: PageStore) -> Self: ...
    def start(self) -> None: ...
    def add_context(self) -> int: ...
    def hold_context(self, context: int) -> None: ...
    def release_context(self, context: int) -> None: ...
    def kept_contexts(self) -> set[int] | None: ...
    @property
    def max_num_kept_keys(self) -> int: ...
    def list_kept_keys(self) -> npt.NDArray[np.uint64] | None: ...
    def take_changes(
        self, with_entries: bool = False
    ) -> tuple[bool, tuple[_Keys, _Entries, _Entries | None], tuple[_Keys, _Keys, _Keys | None]]: ...
    def list_entries(self) -> tuple[_Entries, _Keys]: ...
    def end_report(self) -> None: ...

class QueryCounter:
    is_preempted: Final[bool]
    def __new__(cls, store: PageStore, is_preempted: bool = False) -> Self: ...
    @property
    def counts(self) -> dict[str, int]: ...

@final
class RefusedRequest:
    hits: Final[tuple[PageIds, ...]]
    num_tokens: Final[int]
    num_hit_tokens: Final[int]
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def find_again(self) -> FoundPrefix | None: ...

@final
class StepResult:
    """A step in flight: its rows, with their tokens and new pages.

    `RunningBatch.plan` and `step` return one, and `new_step` an empty one. With ``step=`` these calls and `admit` add rows to a
    step. The first `num_grown` rows of the last call have their room; the next row, if there is one, did not fit. `len` is the
    number of rows of the step. `RunningBatch.settle` ends it, and with `stop_token_ids` or `max_num_tokens` says which rows
    ended: `ended_rows`, int32, and `has_stopped`, bool, whether each of these sampled a stop token. Otherwise these are None.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    num_grown: Final[int]
    is_settled: Final[bool]
    ended_rows: Final[npt.NDArray[np.int32] | None]
    has_stopped: Final[npt.NDArray[np.bool_] | None]
    def __len__(self) -> int: ...
    @property
    def number(self) -> int:
        """The number of the step in its batch, which counts from 1; 0 while the step has no rows."""
    @property
    def rows(self) -> npt.NDArray[np.int32]:
        """The rows of the step, as they were numbered in the calls: int32 ``[len(step)]``, a copy in the order of the calls."""
    @property
    def new_page_ids(self) -> npt.NDArray[np.int32]:
        """Ids of the new pages: int32 ``[num_new_pages]``, a copy, by row and then by group. Pages of admitted rows are
        not listed.
        """
    @property
    def new_page_rows(self) -> npt.NDArray[np.int32]:
        """The row of each new page: int32 ``[num_new_pages]``, a copy, in the order of the calls."""
    @property
    def new_page_groups(self) -> npt.NDArray[np.int32]:
        """The cache group of each new page: int32 ``[num_new_pages]``, a copy."""
    @property
    def refusal(self) -> Refusal | None:
        """Why the row behind the first `num_grown` got no pages; None if all have their room. O(1)."""

INPUT_FIELDS: Final[tuple[str, ...]]

class InputArrays:
    current: Final[int]
    batch: Final[RunningRows | None]
    @property
    def num_saved_pages(self) -> int:
        """Pages of the group with full attention that the step filled last need not read again, with ``order="prefixes"``."""
    def __init__(
        self,
        running: RunningRows | None,
        tables: Iterable[TableRows] | None,
        page_sizes: Iterable[int] | None,
        token_ids: npt.NDArray[np.int32] | None,
        num_tokens: int,
        num_reqs: int,
        depth: int,
        fields: Sequence[tuple[str, int, Sequence[npt.NDArray[Any]]]],
        pad_slot: int,
        pad_last: int,
        puts_single_first: bool,
        slot_strides: Sequence[int] | None = None,
        rank: int = 0,
        num_ranks: int = 1,
        prefixes: Sequence[int] | None = None,
    ) -> None:
        """Take the rows of a batch, or `tables` with their page sizes and an int32 matrix of token ids (or None). `fields` are
        tuples of a name, a group, and an array for each of `depth` sets. `slot_strides` are the slots of a page in the engine's
        arrays, for each group; None: as many as it has tokens. With `prefixes` rows that share a prefix are neighbours: the
        levels of shared pages, the most groups, pages of a group and rows of a group, and the fewest pages that a group saves.
        """
    def fill(
        self,
        step: StepResult | None = None,
        rows: _Ids | None = None,
        starts: _Ids | None = None,
        stops: _Ids | None = None,
        num_tokens: int | None = None,
        num_reqs: int | None = None,
        draft_token_ids: npt.NDArray[np.int32] | None = None,
    ) -> int:
        """Fill the next set with the inputs of a step, and return its number of tokens.

        `step` is a step of the batch: its rows, and the tokens planned for each, with drafts. Without it `rows` do not repeat,
        and row ``rows[i]`` computes its tokens ``starts[i]`` to ``stops[i] - 1``, which have slots. The arrays are padded to
        `num_tokens` and `num_reqs` (None: their length); values behind these stay. Unknown tokens get the ids in
        ``draft_token_ids[i]``, int32, or -1.

        Raise ArgumentError for a step of another batch, a settled one, or one whose rows were planned again, cut, moved or
        released since; for rows that are not admitted, wait for tokens from elsewhere or repeat; for a row without tokens, or
        with a token that has no page; for more tokens or rows than `num_tokens` and `num_reqs` have room for, and for too few
        drafts. RowIndexError for a row outside the table, ArgumentTypeError for other types. Nothing has been written then.
        O(tokens + rows), and with ``page_ids`` O(pages), native; nothing is allocated.
        """

_Amounts = int | Sequence[int] | npt.NDArray[Any]

class RunningRows:
    stays: Final[npt.NDArray[np.int64]]
    num_ahead_tokens: Final[npt.NDArray[np.int32]]
    num_tokens: Final[npt.NDArray[np.int32]]
    num_computed_tokens: Final[npt.NDArray[np.int32]]
    num_cached_tokens: Final[npt.NDArray[np.int32]]
    num_external_tokens: Final[npt.NDArray[np.int32]]
    is_admitted: Final[npt.NDArray[np.bool_]]
    @property
    def num_admitted(self) -> int:
        """Number of admitted rows."""
    @property
    def num_steps(self) -> int:
        """Number of steps that had rows."""
    @property
    def refusal(self) -> Refusal | None:
        """Why the last `admit` returned None; None if it admitted its request, or raised an error. O(1)."""
    def __init__(
        self,
        store: PageStore,
        tables: Iterable[TableRows],
        groups: CacheGroups | _Groups,
        max_num_tokens: int,
        hash_page_size: int,
        key: bytes,
        num_shards: int,
        max_steps_ahead: int = 0,
        caches_computed: bool = False,
        algorithm: str = "siphash128",
        hash_lookahead: int = 0,
        has_local_ids: bool = False,
    ) -> None:
        """`tables` are `TableRows`, one for each of the `groups`; these are `CacheGroups`, or an argument for them. With
        `caches_computed` pages are cached once the steps that computed them are settled. `key`, `algorithm` and
        `hash_lookahead` are as in `HashChain`. With `has_local_ids` the tables count the pages of each shard from 1.
        """
    def _forget_refusal(self) -> None:
        """Reset `refusal` to None, after an error."""
    def _require_drafts(self, num_drafts: int) -> None:
        """Raise ArgumentError for more draft tokens a row than the rings of a model can take back."""
    def _is_refused_still(
        self,
        row: int,
        token_ids: object,
        num_tokens: int | None,
        max_num_new_tokens: int | None,
        num_reserved_pages: int,
        options: object,
        num_lookahead_tokens: int = 0,
        reserves_prompt: bool = False,
    ) -> bool:
        """Whether the row refused this request last, and certainly refuses it again. O(1) for tokens in the same list, or in an
        array over the same memory, where a sample is compared; O(tokens) for others.
        """
    @property
    def max_num_drafts(self) -> int | None:
        """Most draft tokens of a row in a step, so that its rings can take them back; None: any number, without rings."""
    @property
    def max_num_tokens(self) -> int:
        """The most tokens that a row can have: the model's limit, or the table's if that is less."""
    def new_step(self) -> StepResult:
        """Return an empty step, to which `plan`, `step` and `admit` add rows."""
    def plan(
        self, rows: _Ids, num_tokens: _Amounts = 1, num_drafts: _Amounts = 0, step: StepResult | None = None
    ) -> StepResult:
        """Plan a step: give each row slots for its next tokens, row by row in the given order.

        `rows` is a list or an int array without repeats; `num_tokens` and `num_drafts` are a number for all rows or one for
        each. A row with known tokens that no step computes gets slots for the next `num_tokens` of them. Any other row gets one
        for the token that a step in flight samples; at most `max_steps_ahead` such steps may be unsettled. Behind these lie
        `num_drafts` slots: the step computes drafts there or, inside a prompt, leaves them as room for later. Positions are
        planned as if all drafts were accepted, and move back by the rejected drafts when a step is settled.

        For each row, what earlier steps have made final is cached, and pages that fell out of the attention window are given
        back; then the missing pages are taken, then full pages are cached. The first row that does not fit stops the call and
        stays as it was: preempt, and call again from ``num_grown``. With `step` the rows are added to a step, which is
        returned. A plan implies that the step `max_steps_ahead` + 1 before it has run.

        ArgumentError for more tokens than a row has left, for rows not admitted, pending, repeated, or in the step already, for
        a row with nothing to compute, and for a step of another batch, or a settled one; RowOverflowError for a row that may be
        full; MovesDueError while moves of its pages are due; RequestTooLargeError for a row that would hold more pages than
        the pool, or its shard, has; RowIndexError outside the table. Nothing has changed then. O(rows + new pages), native.

        >>> from pagepool import CacheGroupSpec, CacheManager, FullAttentionSpec, PageTable, RunningBatch
        >>> spec = FullAttentionSpec(page_size=4, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False)
        >>> manager = CacheManager(num_pages=16, kv_cache_groups=[CacheGroupSpec(spec)], max_model_len=64)
        >>> table = PageTable(max_num_reqs=2, max_num_pages_per_req=16, max_num_batched_tokens=64)
        >>> batch = RunningBatch(manager, table, max_steps_ahead=1)
        >>> first = batch.new_step()
        >>> batch.admit(0, [1, 2, 3, 4, 5], step=first)
        0
        >>> second = batch.plan([0])                           # the first runs, and its token is not known
        >>> batch.num_tokens.tolist(), batch.num_ahead_tokens.tolist()
        ([5, 0], [1, 0])
        >>> batch.settle(first, [6]).tolist()                  # it is 6, and the second step computes it
        [0]
        >>> batch.num_tokens.tolist(), batch.num_computed_tokens.tolist(), batch.num_ahead_tokens.tolist()
        ([6, 0], [6, 0], [0, 0])
        """

    def step(self, rows: _Ids, token_ids: _Ids, step: StepResult | None = None) -> StepResult:
        """Settle the last step of rows that sampled one token each, and plan the next: the decode step of an engine that waits
        for its steps.

        `rows` and `token_ids` are lists or int arrays of one length; rows do not repeat. Each row gets its token, and a slot
        for it. Drafts of its last step are rejected: only `settle` can accept drafts. The first row that does not fit stops the
        call and gets no token. With `step` the rows are added to a step, which is returned. Nothing has changed after an error:
        RowOverflowError for a row that is full, ArgumentError for one with known tokens to compute, such as one in the middle
        of its prompt, and for one with two steps in flight, and the errors of `plan`. O(rows + new pages), native.
        """
    def settle(
        self,
        step: StepResult,
        token_ids: _Ids | None = None,
        counts: _Amounts | None = None,
        *,
        failed: bool = False,
        stop_token_ids: _Ids | None = None,
        max_num_tokens: _Amounts | None = None,
    ) -> npt.NDArray[np.int32]:
        """End a step that has run: append the tokens sampled by it, and cache the pages filled by now.

        `token_ids` are the tokens of all rows, one row after another in the order of ``step.rows``. ``counts[i]`` is the number
        of tokens of row i, or one number for all: at most one more than the row's drafts, and 0 inside a prompt, or where the
        engine passes the token to `append`. None means one each or, without `token_ids`, 0 each. Computed tokens then include
        the accepted drafts, and the sampled token if a later step computes it. Slots of rejected drafts stay.

        Return the row to which the tokens of each row went, since rows may have moved: int32 ``[len(step)]``. It is -1 if the
        request was released since, or its tokens were cut; then these tokens are dropped. Steps of a row that sample tokens are
        settled in the order of their launch; each also ends the row's part in earlier steps, for chunks of its prompt.

        A row ends at its first token among `stop_token_ids`, or once it has `max_num_tokens` tokens, its prompt's included:
        tokens behind are dropped, also those of later steps, which return -1 for it. ``step.ended_rows`` lists these rows,
        which can only be released then, and ``step.has_stopped`` says why each ended. Stop ids are a list for all rows, or an
        int32 matrix ``[num_rows, ids]`` with a line for each row of the batch, padded with -1; limits are a number, or one for
        each row. With either of them a row that is full ends too.

        With `failed` the step has failed, and with it all later steps of the batch. Pages that these should have filled lose
        their entries, even if other rows have hit them. Each row goes back to the tokens before its first failed step, and a
        row that has hit such a page to the first token of this page; `plan` computes later tokens again. Return the rows that
        cannot go back, and are released: they have a state, wait for tokens from elsewhere, have moves due, or need pages again
        that a window gave back. int32, in ascending order. Known tokens stay, and later steps have nothing to settle.

        ArgumentError, and nothing changed, for a wrong number of tokens, for none where a later step computes them, for
        negative ones, for rows that got their token otherwise, for tokens of a failed step, and for a step of another batch, or
        one settled before; RowOverflowError for a row that would be too long. O(rows + tokens + pages cached), native; with
        `failed` O(pages of all rows).
        """

    def append(self, rows: _Ids, token_ids: _Ids) -> None:
        """Append one known token to each row, without room for it yet. Rows may repeat, for several tokens in order.

        If a step in flight samples the row's next token, this is that token: the drafts of the step are rejected, and `settle`
        takes no token for it. ArgumentError, and nothing changed, for rows that are not admitted, and where a later step in
        flight computes the token; RowOverflowError where a row would be too long. O(rows).
        """
    def trim(self, rows: _Ids, num_tokens: _Amounts) -> None:
        """Cut the known tokens of rows to `num_tokens` (a number for all rows, or one for each), as for rejected drafts.

        A row that keeps its ``num_computed_tokens`` keeps all its pages: they are slots for its next tokens. Where computed
        tokens are cut, the pages behind the cut are given back, the last first, and lose their entries unless they have other
        holders. If the page at the cut has other holders, it is given back as well, and its first tokens have to be computed
        again: ``num_computed_tokens`` says so. Pages of other groups, from these tokens on, are then given back too if they
        have other holders. With a hash lookahead of L tokens the last L tokens before the cut count as changed: the
        drafter writes their slots again, so their pages lose their entries as well, and shared ones are computed again.

        ArgumentError, and nothing changed, for more tokens than a row knows, and while steps in flight compute tokens behind
        the known ones; where computed tokens are cut, also if the attention window needs pages again that were given back, and
        if a state has seen cut tokens, unless all tokens are cut. O(rows + pages behind).
        """
    def release(self, rows: _Ids, seconds: float | Sequence[float | None] | None = None) -> None:
        """Give back all pages of rows, in the given order, the last page of each first, and make the rows free.

        `seconds`, a number for each row or one for all, says when the row's next request is expected: free pages that are
        wanted later are evicted before those wanted sooner (see `CacheManager.expect`). Infinity means never again; None leaves
        what `expect` said.

        A row may be released while its steps are in flight: they have nothing to settle then. If such a step fails, the pages
        that it should have filled lose their entries.

        ArgumentError, and nothing changed, for rows that are not admitted or repeated, for seconds below 0, and for a wrong
        number of seconds; DoubleFreeError if somebody else gave one of the pages back. O(pages).
        """
    def move_row(self, src: int, tgt: int) -> None:
        """Move an admitted row to a free one; the source becomes free. O(tokens and pages of the row)."""
    def swap_row(self, src: int, tgt: int) -> None:
        """Exchange two rows, free or not. O(tokens and pages of both)."""
    def fork(self, row: int, targets: _Ids) -> None:
        """Fork an admitted row into free rows, for parallel samples and beams, after the step that computed its tokens. Targets
        share the full pages, and get copies of the open page of each group, and of states: see `take_moves`.

        Targets get the row's tokens and its ``num_cached_tokens``. ArgumentError for a row that is not admitted, or has
        steps in flight with tokens behind the known ones, for admitted or repeated targets, and for no targets;
        RowIndexError outside the table, MovesDueError while moves into the row's pages are due, OutOfPagesError if too few
        pages are free. Nothing has changed then. O(pages and tokens of a row) for each target, native.

        >>> from pagepool import CacheGroupSpec, CacheManager, FullAttentionSpec, PageTable, RunningBatch
        >>> spec = FullAttentionSpec(page_size=4, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False)
        >>> manager = CacheManager(num_pages=16, kv_cache_groups=[CacheGroupSpec(spec)], max_model_len=64)
        >>> table = PageTable(max_num_reqs=3, max_num_pages_per_req=16, max_num_batched_tokens=64)
        >>> batch = RunningBatch(manager, table)
        >>> _ = batch.admit(0, [1, 2, 3, 4, 5, 6])
        >>> batch.fork(0, [1, 2])
        >>> table.page_table_cpu[:, :2].tolist(), batch.take_moves().copies
        ([[1, 2], [1, 3], [1, 4]], PageCopies(src=[2, 2], dst=[3, 4], group=[0, 0]))
        >>> batch.release([0, 1, 2])
        """
    def commit_external(self, row: int, num_tokens: int, *, is_last: bool = True) -> None:
        """Let a pending row run once the first `num_tokens` of its awaited tokens have arrived: they count as computed, and
        their full pages are cached. `plan` computes the other tokens, whose slots stay.

        Unless the call `is_last`, the row still waits: with full attention alone the full pages of these tokens are cached, so
        that others hit them; with windows, chunks or states nothing hits before the end, and nothing changes.

        Until then the row's new pages are not cached, and `plan`, `step`, `trim` and `fork` raise ArgumentError for it;
        `append`, `release`, `move_row` and `swap_row` work. The transfer writes to the pages that `get_page_ids` lists, once
        the due moves are made. It may leave out pages to which no later token attends: these are given back. With a state all
        tokens have to arrive.

        ArgumentError for a row that is not pending, for more tokens than it waits for, and with a state for fewer in the last
        call; MovesDueError while moves of its pages are due. Nothing has changed then. O(pages cached).

        >>> from pagepool import CacheGroupSpec, CacheManager, FullAttentionSpec, PageTable, RunningBatch
        >>> spec = FullAttentionSpec(page_size=4, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False)
        >>> manager = CacheManager(num_pages=16, kv_cache_groups=[CacheGroupSpec(spec)], max_model_len=64)
        >>> table = PageTable(max_num_reqs=2, max_num_pages_per_req=16, max_num_batched_tokens=64)
        >>> batch = RunningBatch(manager, table)
        >>> batch.admit(0, list(range(11)), num_external_tokens=99), batch.num_external_tokens.tolist()
        (0, [10, 0])
        >>> batch.commit_external(0, 4, is_last=False)
        >>> batch.commit_external(0, 9)
        >>> batch.num_computed_tokens.tolist(), batch.admit(1, list(range(11)))
        ([9, 0], 8)
        """
    def fail_external(self, row: int, num_valid_tokens: int) -> int:
        """Commit the first `num_valid_tokens` of the tokens for which a pending row waits, as `commit_external` does, and give
        back the pages behind them, which no longer hit if they were cached: nothing may write there any more, and readers need
        a lease. Return the row's number of computed tokens; `plan` computes the others.

        With a state all pages are given back, cached ones too, and 0 is returned, since the state would need all tokens. Errors
        as in `commit_external`. O(pages given back and cached).
        """
    def rewind(self, failed: FailedLoads) -> tuple[list[int], list[int]]:
        """Rewind the rows whose pages failed to load (see `CacheManager.fail`) to the first such page:
        ``num_computed_tokens`` is cut, and `plan` computes the tokens again. Call it before rows are planned or settled.

        Return the rewound rows, and the rows that cannot go back, which are released: they need pages again that a window gave
        back, have moves due, or wait for tokens from elsewhere. Admit their requests again. Rows of a model with states go back
        to token 0 if they hit pages loaded by this list or later ones, since their states may have seen wrong tokens.
        ArgumentError for loads of another pool. O(pages of all rows).
        """
    def take_moves(self) -> Moves:
        """Take the moves that are due, with the writes of the batch's states."""

    def show_media(self, tables: Iterable[TableRows], encoder_lens: npt.NDArray[np.int32], media: Any) -> None:
        """Let `media`, a `RowMedia`, follow the rows, and inputs show its pages: `tables` are `TableRows`, one for each group
        of cross-attention, and `encoder_lens` the rows' numbers of encoder tokens, int32 ``[num_rows]``.
        """
    def get_medium(self, row: int) -> Any:
        """Return the `Medium` that an admitted row reads, None for a free row, or one without a medium. Raise ArgumentError for
        a model without cross-attention, RowIndexError outside the table.
        """
    def get_token_ids(self, row: int, start: int = 0) -> npt.NDArray[np.int32]:
        """Return the known tokens of an admitted row from index `start` on: int32, a copy. ArgumentError for a free row, and
        for a start behind them. O(tokens returned).
        """
    def get_page_ids(self, row: int) -> tuple[list[int], ...]:
        """Return the ids of a row's pages: a list for each group, with 0, the null page, for skipped pages. O(pages)."""

@final
class WaitingRequest(HashedTokens):
    name: Any
    traits: Any
    keys: Any
    num_prefetched: int

@final
class WaitingLine:
    def __new__(
        cls,
        store: PageStore,
        groups: CacheGroups,
        is_by_work: bool = True,
        max_overtaken: int = 0,
        max_stretch: float = 0.0,
        promote_after: int = 1,
        num_shards: int = 0,
        awaits_equal: bool = False,
    ) -> Self: ...
    def enter(
        self,
        request: WaitingRequest,
        num_prompt: int | None = None,
        priority: int = 0,
        shard: int | None = None,
        is_back: bool = False,
    ) -> None: ...
    def choose(self, step: int | None = None) -> WaitingRequest | None: ...
    def correct(self, request: WaitingRequest) -> bool: ...
    def set_misfit(self, request: WaitingRequest) -> None: ...
    def set_away(self, request: WaitingRequest) -> None: ...
    def begin_round(self) -> None: ...
    def admit(self, request: WaitingRequest, num_hits: int, step: int | None = None) -> None: ...
    def leave(self, request: WaitingRequest) -> None: ...
    def prefetch(self, request: WaitingRequest, num_reserved: int, context: int = 0, session: int = 0) -> bool: ...
    def count_hits(self, request: WaitingRequest) -> int: ...
    def count_loads(self, request: WaitingRequest) -> int: ...
    def list_next(self, n: int, step: int | None = None) -> list[WaitingRequest]: ...
    def counters(self) -> dict[str, Any]: ...
    def check(self) -> None: ...

@final
class RowRequest:
    def __new__(
        cls,
        rows: RunningRows,
        row: int,
        token_ids: Sequence[int] | npt.NDArray[Any] | HashedTokens,
        num_tokens: int | None = None,
        max_num_new_tokens: int | None = None,
        num_reserved_pages: int = 0,
        options: tuple[object, ...] | None = None,
        num_external_tokens: int = 0,
        resume_at: Sequence[int] | None = None,
        num_lookahead_tokens: int = 0,
        reserves_prompt: bool = False,
        num_prompt_tokens: int | None = None,
    ) -> Self: ...
    def count_least_tokens(self) -> int: ...
    def admit(
        self,
        extra_keys: Sequence[tuple[int | None, bytes]] = (),
        takes_hits: bool = False,
        shard: int | None = None,
        context: int = 0,
        counter: QueryCounter | None = None,
        session: int = 0,
        step: StepResult | None = None,
    ) -> int | None: ...
    def probe(self, extra_keys: Sequence[tuple[int | None, bytes]] = (), shard: int | None = None) -> int: ...

def copy_rows(
    source: npt.NDArray[np.uint8],
    source_ids: _Ids,
    target: npt.NDArray[np.uint8],
    target_ids: _Ids,
    num_threads: int = 1,
) -> None: ...
def pack_dirty_lines(
    tables: tuple[TableRows, ...],
    num_reqs: int,
    places: npt.NDArray[np.int64],
    numbers: npt.NDArray[np.int64],
    lines: npt.NDArray[np.int32],
) -> int: ...
def pack_dirty_segments(
    tables: tuple[TableRows, ...], num_reqs: int, num_lines: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]: ...

class TableRows:
    page_table_cpu: Final[npt.NDArray[np.int32]]
    num_pages_per_row: Final[npt.NDArray[np.int32]]
    sink_page_ids: Final[tuple[int, ...]]
    def __init__(self, num_rows: int, num_columns: int, sink_page_ids: _Ids = ()) -> None:
        """Make a table of empty rows, each with room for `num_columns` pages behind the pages `sink_page_ids`; both sizes are
        at least 1.
        """
    @property
    def max_num_reqs(self) -> int:
        """Number of rows."""
    @property
    def max_num_pages_per_req(self) -> int:
        """Number of columns, with those of sinks."""
    @property
    def cpu_version(self) -> int:
        """A number that grows with each change of the host table."""
    def append_row(self, page_ids: _Ids, row_idx: int) -> None:
        """Append page ids to a row: a list or an int32 array, or one for each table of a group. Without ids, do nothing.

        RowIndexError, RowOverflowError, and PageIdError for a negative id. O(ids).
        """
    def add_row(self, page_ids: _Ids, row_idx: int) -> None:
        """Replace a row's pages by page ids. O(ids + pages that the row had)."""
    def clear_row(self, row_idx: int) -> None:
        """Empty a row. O(pages that it had)."""
    def move_row(self, src: int, tgt: int) -> None:
        """Copy row `src` over row `tgt`, with zeros behind the copied pages; `src` stays. O(pages of both)."""
    def swap_row(self, src: int, tgt: int) -> None:
        """Exchange two rows. O(pages of both)."""
    def append_rows_batch(self, page_ids_per_req: Iterable[_Ids], req_indices: Iterable[int]) -> None:
        """Append each request's ids to its row as `append_row` does, in order; rows may repeat. All or nothing. O(ids)."""
    def clear_rows(self) -> None:
        """Empty all rows, and clear all dirty flags but those of sinks, before the device copy is made anew. O(pages in the
        table).
        """
    def mark_dirty(self, rows: Iterable[int] | None = None) -> None:
        """Mark rows (a list or an array; None: all) as changed, after writing to `page_table_cpu` directly."""
    def slot_mapping(self, rows: _Ids, positions: _Ids, page_size: int) -> npt.NDArray[np.int32]:
        """Return the slots of tokens, ``table[row, position // page_size] * page_size + position % page_size``, as int32
        ``[num_tokens]``. Positions count from the first token behind the sinks.

        `rows` and `positions` are int arrays or lists of one length. RowIndexError for a token outside the table, ArgumentError
        for a slot that does not fit int32. O(tokens), native.
        """
    def check(self) -> None:
        """Raise IntegrityError for the first wrong row: its count exceeds the table or its extent, a page id is negative, an id
        behind its extent is not zero, or it has dirty segments and is not dirty itself. O(table).
        """
    def find_unsent(self, device_table: npt.NDArray[np.int32]) -> tuple[int, int] | None:
        """Return the row and column of the first id that differs from `device_table`, an int32 array of the table's shape,
        though its segment counts as sent; None if there is none. O(table).
        """
    def count_dirty_segments(self, start: int, stop: int) -> int:
        """Count the segments in rows ``[start, stop)`` that were not sent yet."""
    def copy_aligned(self, num_rows: int | None = None) -> npt.NDArray[np.int32]:
        """Return a copy of the first rows, by default of all, and clear their dirty flags."""

class GroupedRows:
    def __init__(self, page_tables: Iterable[TableRows]) -> None:
        """Group `page_tables`, distinct `TableRows` with the same number of rows."""
    @property
    def page_tables(self) -> tuple[Any, ...]: ...  # any kind of TableRows
    def __len__(self) -> int: ...
    def __getitem__(self, i: int, /) -> Any: ...
    def append_row(self, page_ids: Sequence[_Ids], row_idx: int) -> None:
        """Append page ids to a row: a list or an int32 array, or one for each table of a group. Without ids, do nothing.

        RowIndexError, RowOverflowError, and PageIdError for a negative id. O(ids).
        """
    def append_rows_batch(self, page_ids_per_req: Iterable[Sequence[_Ids]], req_indices: Iterable[int]) -> None:
        """Append each request's ids to its row as `append_row` does, in order; rows may repeat. All or nothing. O(ids)."""
    def add_row(self, page_ids: Sequence[_Ids], row_idx: int) -> None:
        """Replace a row's pages by page ids. O(ids + pages that the row had)."""
    def clear_row(self, row_idx: int) -> None:
        """Empty a row. O(pages that it had)."""
    def move_row(self, src: int, tgt: int) -> None:
        """Copy row `src` over row `tgt`, with zeros behind the copied pages; `src` stays. O(pages of both)."""
    def swap_row(self, src: int, tgt: int) -> None:
        """Exchange two rows. O(pages of both)."""
    def mark_dirty(self, rows: Iterable[int] | None = None) -> None:
        """Mark rows (a list or an array; None: all) as changed, after writing to `page_table_cpu` directly."""

@final
class CachePage:
    """A view of one page's record: ``pool.pages[i]``. Each page has one view.

    ``CachePage(page_id)`` makes a page without a pool, for a `FreeCachePageQueue`. Pages of different pools, or without one,
    are equal if their visible values are: `page_id`, `ref_cnt`, `page_hash`, `is_null`, and the ids of their neighbours in the
    free queue. The hash is that of `page_id`, which never changes.

    >>> page = CachePage(7)
    >>> page.incr_ref()
    >>> page
    CachePage(page_id=7, ref_cnt=1, page_hash=None, prev_free_page=None, next_free_page=None)
    >>> page == CachePage(7), page == CachePage(page_id=7, ref_cnt=1)
    (False, True)
    """

    page_id: Final[int]
    ref_cnt: int
    page_hash: PageHashWithGroupId | None
    def __init__(
        self,
        page_id: int,
        ref_cnt: int = 0,
        _page_hash: PageHashWithGroupId | None = None,
        prev_free_page: None = None,
        next_free_page: None = None,
        is_null: bool = False,
    ) -> None:
        """Make a page. `ref_cnt` must not be negative; `_page_hash` is the PageHashWithGroupId of a cached page, or None. A
        null page stands for no page, and queues refuse it. ArgumentError for neighbours: a queue links its pages itself.
        """
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def incr_ref(self) -> None:
        """Add a reference."""
    def decr_ref(self) -> None:
        """Take a reference; DoubleFreeError at 0. The page does not enter the free queue; `PagePool.free_pages` puts it there."""
    def reset_hash(self) -> None:
        """Drop the page's prefix entry, if it has one."""
    @property
    def is_null(self) -> bool:
        """Whether this is a pool's null page, or was made as one."""
    @property
    def is_free(self) -> bool:
        """Whether the page is in the free queue."""
    @property
    def prev_free_page(self) -> CachePage | None:
        """Return the page before this one in the free queue, or None."""
    @property
    def next_free_page(self) -> CachePage | None:
        """Return the page behind this one in the free queue, or None."""

class _PrefixStats(TypedDict):
    blocks: int
    held: list[int]
    bytes: int
    num_skipped: int

def time_of_batch(payload: bytes | bytearray | memoryview) -> float: ...

_Hashes = HashChain | Sequence[int] | Sequence[bytes] | npt.NDArray[np.integer[Any]]

class PrefixTable:
    page_size: Final[int]
    max_worker_blocks: Final[int]
    @property
    def num_workers(self) -> int:
        """Highest number of a worker with a batch, plus 1."""
    @property
    def num_skipped(self) -> int:
        """Events that were left out, wholly or in part, since the index was made."""
    @property
    def media(self) -> tuple[str, ...]:
        """Names of the media in events, ``"GPU"`` first."""
    def __new__(
        cls,
        page_size: int,
        *,
        max_worker_blocks: int = 1 << 24,
        num_groups: int | None = None,
        use_eagle: bool = False,
        hash_lookahead: int = 0,
        **_: Any,
    ) -> Self: ...
    def count_skipped(self, worker: int) -> int:
        """Return how many events of a worker were left out, wholly or in part, since the index was made. O(1)."""
    def apply(self, worker: int, payload: bytes | bytearray | memoryview) -> bool:
        """Apply an encoded batch of events of a worker. Return whether it has `AllBlocksCleared`, and so is complete in itself.

        `worker` is an int from 0 on, `payload` is bytes or another buffer. Events that the index cannot place are left out and
        counted. Raise EventBatchError, with nothing changed, if the bytes are not msgpack or not a batch, or if the worker
        would have more than `max_worker_blocks`. O(bytes); `AllBlocksCleared` costs at most a constant for each block stored
        before it.
        """
    def find(self, hashes: _Hashes, medium: str | None = None) -> npt.NDArray[np.int32]:
        """Return how many tokens of a prompt each worker has, int32 ``[workers]``.

        `hashes` are the hashes of the prompt's pages: a uint64 or int64 array ``[pages]``, a list of ints or bytes, which count
        by their last 64 bits, or a `HashChain`. A page counts if the worker has it in any medium, or in `medium` if given.
        O(pages x groups); with windows or states O(pages x groups x workers).
        """
    def note_loss(self, worker: int) -> None:
        """Note that batches of a worker were lost. From now on the first removal of a block removes all its copies, since other
        removals may be lost; this ends when the worker clears everything or is removed. O(1).
        """
    def remove_worker(self, worker: int) -> None:
        """Forget all blocks of a worker. O(blocks that the worker gained since it last had none)."""
    def clear(self) -> None:
        """Forget all blocks and groups, and free their memory. Workers keep their numbers."""
    def list_blocks(self, worker: int, medium: str = "GPU", group: int = 0) -> npt.NDArray[np.uint64]:
        """Return the hashes of a worker's blocks in a medium and a cache group: uint64, in any order. O(all blocks)."""
    def stats(self) -> _PrefixStats:
        """Return ``blocks`` (entries of all groups), ``held`` (a list of the blocks of each worker), ``bytes`` of memory, and
        ``num_skipped``.
        """
    def check(self) -> None:
        """Check that the records agree; raise IntegrityError if they do not. O(blocks x workers)."""
