"""Types of the compiled core. Its docstrings say what each call does and costs."""

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

def build_flags() -> _BuildFlags:
    """Return how the core was built: `debug` (asserts and bounds checks), `guards` (the checks of the hot loops), `sanitizer`
    ("address" with undefined behaviour, "thread", or ""), `traced` (line counts for coverage), `free_threaded` (for a Python
    without the GIL), and `compiler`.
    """

def siphash128(key: bytes, data: bytes) -> bytes:
    """Return the 128-bit SipHash-2-4 of `data` under the 16-byte `key`: 16 bytes. O(len(data)).

    >>> siphash128(bytes(range(16)), b"").hex()
    'a3817f04ba25a8e66df67214c7550293'
    """

class PageIds:
    """An immutable run of int32 page ids in native memory, used by the manager instead of page objects.

    It copies a list, a tuple, another iterable of ints, an array of ints, or another PageIds. ``len()`` is the number of ids;
    `to_list` and `to_array` copy them out. Always: the first `num` of `capacity` ids are valid, and borrowed ids do not grow.
    """

    def __new__(cls, values: Iterable[int] | npt.NDArray[Any] | PageIds | None = None) -> Self: ...
    def __len__(self) -> int: ...
    def __getitem__(self, i: int, /) -> int: ...
    def __contains__(self, value: object, /) -> bool: ...
    @staticmethod
    def joined(groups: Iterable[PageIds]) -> PageIds:
        """Return the ids of several PageIds, one after another."""
    @staticmethod
    def of_slice(items: list[int], start: int, stop: int) -> PageIds:
        """Return the token ids ``items[start:stop]``, fewer if the list ends sooner."""
    def to_list(self) -> list[int]:
        """Return the ids as a new list."""
    def to_array(self) -> npt.NDArray[np.int32]:
        """Return the ids as a new int32 array."""

def lists_of(groups: tuple[PageIds, ...]) -> tuple[list[int], ...]:
    """Return the ids of each PageIds as a list. One group, as in most models, costs no loop."""

_Ids = PageIds | Sequence[int] | npt.NDArray[np.integer[Any]]

_Keys = tuple[npt.NDArray[np.uint64], npt.NDArray[np.int32]]
_Entries = tuple[npt.NDArray[np.uint64], list[tuple[int, int, int, int, int, int]], npt.NDArray[np.int32]]

def are_plain_token_ids(items: list[Any]) -> bool:
    """Return whether all items are plain ints from 0 to the largest int64; False for other kinds of ints. O(n)."""

def require_token_ids(token_ids: _Ids, first: int = 0) -> None:
    """Raise ArgumentError for a negative token id, naming its index; the first id is at `first`. O(n)."""

@final
class PageRules:
    """The rules by which a request needs pages in one cache group.

    `page_size` tokens share a page; None is a state, one page for any number of tokens. With a `window` a token attends to that
    many tokens, including itself; with a `chunk` to those of its chunk. Pages that no later token attends to are skipped. Hits
    have a multiple of `hit_tokens` tokens, or with 0 any number: see `is_needed_by_hits`. A state is kept at multiples of
    `interval` tokens; 0: never.
    """

    def __new__(
        cls, page_size: int | None, window: int = 0, chunk: int = 0, hit_tokens: int = 0, interval: int = 0
    ) -> Self: ...

_Groups = Iterable[tuple[PageRules, int | None, int]]

@final
class CacheGroups:
    """The cache groups of a model.

    `groups` are ``(PageRules, id, hashes of a page)``, with the id in the prefix index, or None where pages are not cached.
    `banks` are the banks of their pages; None: the first one for all.
    With `use_eagle` the last page of each hit is dropped, because the drafter needs its hidden states. `boundaries` are numbers
    of tokens, ``(multiple, slack, interval)``: pages of windows and chunks stay cached only if a request that resumes at a
    boundary needs them, see `Boundaries`; None: all stay, and no states are kept. States of a group with an id are kept at
    boundaries. The hash of a page covers a `lookahead` of tokens behind it.
    """

    def __new__(
        cls,
        groups: _Groups,
        use_eagle: bool = False,
        boundaries: tuple[int, int, int] | None = None,
        banks: Sequence[int] | None = None,
        lookahead: int = 0,
    ) -> Self: ...
    def __len__(self) -> int: ...
    def count_peak_pages(
        self,
        num_tokens: int,
        max_num_new_tokens: int,
        num_lookahead_tokens: int = 0,
        max_num_tokens: int | None = None,
        bank: int | None = None,
    ) -> int:
        """Return the most pages of a bank (None: of all) that a request of `num_tokens` tokens holds at once, in steps of up to
        `max_num_new_tokens`, each with slots for `num_lookahead_tokens` more, at most for `max_num_tokens` (None: no limit).

        Exact, unless page sizes and chunks have no common multiple below a million tokens: then up to three pages more for each
        group. O(groups), with different page sizes or chunks O(groups x pages in that multiple).
        """

@final
class HashChain:
    """The digests of a request's full pages, each made from the one before: SipHash-2-4-128 under a secret key, or SHA-256.

    `page_size` is in tokens. `algorithm` is ``"siphash128"``, with a `key` of 16 bytes, or ``"sha256"`` or ``"sha256_cbor"``,
    whose `key` of 32 bytes is the parent of first pages. A digest also covers the `lookahead` tokens behind its page. With
    `keep_token_ids` the tokens stay beside the digests. 16 bytes a page, 32 with SHA-256.
    """

    page_size: Final[int]
    def __new__(
        cls, page_size: int, key: bytes, keep_token_ids: bool = False, algorithm: str = "siphash128", lookahead: int = 0
    ) -> Self: ...
    def __len__(self) -> int:
        """Return the number of hashed pages."""
    def __getitem__(self, i: int, /) -> int:
        """Return the digest of page `i` as an int of 128 bits, or 256 with SHA-256."""
    def extend(self, tokens: Sequence[int] | npt.NDArray[Any] | PageIds, extra_keys: bytes = b"") -> None:
        """Hash the next pages, a list or an int array with the token ids of whole pages and of the lookahead of the last one.
        The first of these pages also depends on `extra_keys`, unless they are empty. O(tokens).
        """
    def append_key(self, key: int, tokens: _Ids = ()) -> None:
        """Append a page by a key made elsewhere, 128 bits, or 256 with SHA-256. `tokens` are none, or all of the page and of
        its lookahead, and may be kept.
        """
    def page_token_ids(self, i: int) -> tuple[int, ...]:
        """Return the tokens of page `i`; an empty tuple if they are not kept."""

COUNTERS: Final[tuple[str, ...]]

class PageRecords:
    """The records of pages, and their free queue: those of a pool (`PageStore`) or of pages without one (`LoosePages`)."""

    @property
    def num_pages(self) -> int: ...
    @property
    def num_free_pages(self) -> int: ...
    def ref_counts(self, bank: int = 0) -> npt.NDArray[np.int32]:
        """Return the ref counts of the null page and all pages of a bank, an int32 array. O(pages of the bank)."""
    def set_ref_count(self, page_id: int, ref_cnt: int) -> None:
        """Overwrite a ref count, except the null page's. `check` and the next `take` report a free page with references."""
    def is_free(self, page_id: int) -> bool:
        """Whether the page is in the free queue."""
    def free_ids(self, bank: int = 0) -> PageIds:
        """Return the free queue of a bank, front first; with a policy, part by part. O(pages of the bank)."""
    def neighbours(self, page_id: int) -> tuple[CachePage | None, CachePage | None]:
        """Return the pages before and after a page in the free queue; None at the ends and outside the queue."""
    def pop(self, n: int) -> PageIds:
        """Take the first `n` pages out of the queue without changes to ref counts and prefix entries."""
    def remove_page(self, page: CachePage) -> None:
        """Take a page out of the queue, wherever it stands. PageIdError for a page of another pool. O(1)."""
    def append(self, page_ids: _Ids) -> None:
        """Append pages to the queue in order. PageIdError for pages that are in it, or held."""
    def page(self, page_id: int) -> CachePage:
        """Return the view of a page. It is made once."""
    def pages(self, ids: PageIds) -> list[CachePage]:
        """Return the views of pages."""
    def ids_of_pages(self, pages: Iterable[CachePage]) -> PageIds:
        """Return the ids of views; PageIdError for a page of another pool."""

class LoosePages(PageRecords):
    """The pages of a `FreeCachePageQueue` without a pool, or a single one. They have no entries, and their number grows."""

    def adopt(self, page: CachePage) -> None:
        """Move the record of a page without a pool into this store: `page` becomes its view. Amortised O(1)."""

class PageStore(PageRecords):
    """The records of one pool, its free queue and its prefix index. Users call `pagepool.PagePool`.

    Methods take and return page ids. Making a store is O(num_pages). Memory for each page: 32 bytes of record, and with caching
    8 of twin links and 16 to 32 of index slots; 24 more after the first data-parallel hint (8 without caching); 6 more after
    the first expectation, or once shares are set; 16 more for digests of 32 bytes, 48 with events.
    """

    @property
    def has_tier(self) -> bool:
        """Whether there is a host tier behind the pool."""
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
    def num_keys(self) -> int:
        """Count the distinct (hash, group) pairs in the prefix index."""
    @property
    def num_cached_pages(self) -> int:
        """Count the pages with a prefix entry."""
    @property
    def num_sessions(self) -> int:
        """Count the sessions that have pages, rows or requests."""
    @property
    def expectations(self) -> tuple[list[int], dict[str, int]]:
        """Return the numbers of free pages by term, from no term to `NEVER`, and the `Outcomes` by name."""
    def set_time(self, seconds: float) -> None:
        """Stop the clock of expectations and leases at a time, for tests and replays. ArgumentError for a time before the last
        one, after the first expectation.
        """
    @property
    def num_kept_token_ids(self) -> int:
        """Return how many tokens are kept for a page at most; 0 means none."""
    @property
    def counters(self) -> dict[str, int]:
        """Return the `Counters` by name."""
    def bounds_of(self, bank: int) -> tuple[int, int]:
        """Return the first page of a bank and the one behind its last, which is None in a store of one bank, for look-ups."""
    def count_pages(self, bank: int) -> int:
        """Count the pages of a bank without the null page."""
    def count_free(self, bank: int) -> int:
        """Count the free pages of a bank."""
    def ids_in_banks(self, page_ids: PageIds) -> PageIds:
        """Return the ids of pages in their banks. O(n) with several banks, else O(1)."""
    def lists_in_banks(self, groups: tuple[PageIds, ...]) -> tuple[list[int], ...]:
        """Return the ids of pages in their banks, a list for each group."""
    def records_in_bank(self, page_ids: _Ids, bank: int) -> PageIds:
        """Return the pages with these ids in a bank. PageIdError for an id outside the bank. O(n) with several banks."""
    def require_even(self, data_parallel_size: int | None) -> None:
        """Raise ArgumentError for less than one shard, and in a store of several banks unless the number divides all sizes."""
    def require_one_bank(self, what: str) -> None:
        """Raise ArgumentError in a store of several banks, which `what` does not support."""
    def name_banks(self, names: Sequence[str]) -> None:
        """Name the pools of the store in errors and refusals."""
    def take(self, n: int, shard: int | None = None, num_shards: int = 0, bank: int = 0) -> PageIds:
        """Take `n` pages from the front of a bank's queue, or of a shard. They get ref count 1 and lose their prefix entries.
        O(n).
        """
    def put_blank_first(self) -> None:
        """Hand out pages without an entry first from now on, as with a policy. O(num_pages)."""
    def prefer_held(self) -> None:
        """Let look-ups find a held page from now on, if any page with the content is held. O(num_pages), once."""
    def set_shards(self, num_shards: int) -> None:
        """Divide the pool into `num_shards` equal ranges of ids, each with a free queue and its first pages of equal content.
        O(num_pages + pages of equal content x shards) when the number changes.
        """
    def give_back(self, page_ids: _Ids, tail_first: bool = False) -> None:
        """Take a reference from each page; pages without any go to the back of the queue in order. Null pages are ignored."""
    def touch(self, page_ids: _Ids) -> None:
        """Add a reference to each page; free pages leave the queue. Null pages are ignored. O(n)."""
    def find(self, key: int, group: int, start: int = 0, stop: int | None = None) -> int | None:
        """Return the page cached first under an int key and a group, among ids in ``[start, stop)``, or None. A key has 128
        bits; in a store that keeps whole digests it is one of these, or its lower half.
        """
    def find_pages(self, key: int, groups: Sequence[int], start: int = 0, stop: int | None = None) -> list[CachePage] | None:
        """Return the views of the pages found under a key in each group; None if a group has none."""
    def twins(self, page_id: int) -> PageIds:
        """Return the pages with the content of a cached page, in the order they were cached, starting with this page."""
    def enter(self, page_id: int, key: int, group: int) -> None:
        """Cache a page under a key and a group. PageHashError if it is cached already."""
    def drop(self, page_ids: _Ids) -> int:
        """Drop the prefix entries of pages, which stay where they are. Return how many had one."""
    def drop_all(self) -> int:
        """Drop every prefix entry, in the tier too, unless pages are held. Return how many are. O(num_pages)."""
    def key_of(self, page_id: int) -> tuple[int, int] | None:
        """Return ``(int key, group)`` of a cached page, or None. The key is the whole digest in a store that keeps these."""
    def page_hash_of(self, page_id: int) -> PageHashWithGroupId | None:
        """Return the PageHashWithGroupId of a cached page, or None."""
    def keep_whole_digests(self) -> None:
        """Keep the upper halves of digests of 32 bytes beside the keys, of pages cached from now on. No effect if they are kept
        already.
        """
    def enter_pages(
        self, ids: PageIds, chain: HashChain, start: int, group: int, context: int = 0, first_place: int = 0
    ) -> None:
        """Cache ``ids[start:]`` under their digests in the chain, all or nothing. Null pages are ignored.

        `context` is one of `EntryJournal.add_context`; `first_place` is the place of ``ids[0]`` in its request. PageHashError
        if a page is cached already. O(pages).
        """
    def cache_hash(self, page_id: int, page_hash: PageHashWithGroupId) -> None:
        """Cache a page under a PageHashWithGroupId. PageHashError if it is cached already."""

def keep_token_ids(store: PageStore, width: int) -> None:
    """Keep up to `width` tokens of each page cached from now on, at 4 bytes a token. Tokens kept so far stay; a width that
    is not greater changes nothing.
    """

def remember_evicted(store: PageStore, bank: int) -> None:
    """Remember the keys of pages evicted from a bank from now on, of the last ones twice as many as it has pages. So
    look-ups count the hits lost with these pages. 16 bytes a page. O(pages of the bank), once.
    """

def search_all_lost(store: PageStore) -> None:
    """Let each look-up search for checkpoints behind its hits, so that the hits lost for want of pages are exact."""

def drop_dependents(store: PageStore, group: int, state_groups: Iterable[int]) -> None:
    """Uncache the free checkpoints of these groups of states, if there is a policy, as the page with the keys and values of
    `group` before them is evicted.
    """

def list_residency(store: PageStore) -> tuple[tuple[list[int], int], ...]:
    """Return lifetimes, idle times before eviction and gaps between uses of sampled pages: for each, counts of times below
    1 ms, 2, 4, ..., 2**22 ms, and longer, and the sum in ns. O(1).
    """

def estimate_hits(store: PageStore) -> tuple[int, int] | None:
    """Return how many pages were hit since the store was made, and the adaptive policy's estimate for LRU; None for other
    policies.
    """

def count_leased(store: PageStore) -> list[int]:
    """Count the pages of leases with an end, once for each lease, by bank."""

def count_entries(store: PageStore, bank: int) -> tuple[int, int, int, int, int, int]:
    """Count the cached pages of a bank, and what `PoolStats` has of it: the pages that were ever handed out and evicted
    there, tokens of lost hits, refusals, and checkpoints that found no page.
    """

_Range = tuple[int, int | None]
_Hits = tuple[PageIds, ...]

def find_prefix(
    store: PageStore,
    groups: CacheGroups,
    chain: HashChain,
    num_tokens: int,
    ids: _Range = (0, None),
    reaches_tier: bool = False,
) -> tuple[_Hits, int]:
    """Return the longest cached prefix of a request with `num_tokens` tokens: its page ids for each group, with the null page
    where the group's attention does not reach, and its length in tokens. One token is left to compute. Only `ids` of the pool
    hit, ``(first, end)``; an end of None stands for the pool's. If it `reaches_tier`, pages of the tier hit, too, as null
    pages. Changes nothing. O(pages x groups).
    """

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
class RequestHashes:
    """The digests of a request's full pages, computed on demand.

    ``chain`` has the keys of the prefix index. ``page_hashes`` has the hashes that users see, where they differ from the keys.
    ``query`` is the look-up that counts once the request is admitted: its tokens; the tokens that hit; whether the request
    returns after a preemption, which ``is_counted`` implies; and the tokens that all groups of full attention hit, or 0 if no
    group hits fewer. ``refusal`` is the last refusal. ``is_short`` says that too few pages were free to load a prefix of the
    host tier. The hashes ``are_unsure`` after a refused call, and once the request was freed: tokens without slots may change.
    """

    request: Final[Any]
    chain: Final[HashChain]
    page_hashes: Final[list[Any]]
    extra_keys: Any
    query: tuple[int, int, bool, int, tuple[int, int, int] | None] | None
    is_counted: bool
    is_short: bool
    are_unsure: bool
    refusal: RefusedRequest | None
    def __new__(cls, request: Any, chain: HashChain, extra_keys: Any = None) -> Self: ...
    def cut(self, num_pages: int) -> None:
        """Forget the hashes from page `num_pages` on, and the refusal that rests on them. Earlier hashes are sure."""

class RequestMaps:
    """The requests of a manager by id: the pages they hold, and the hashes of their tokens. ``lock`` guards both. Admissions
    are counted in ``query_counters``: the first counts requests that were not preempted, the second others.
    """

    held: Final[dict[str, RequestPages]]
    hashes: Final[dict[str, RequestHashes]]
    store: Final[PageStore]
    query_counters: Final[tuple[QueryCounter, QueryCounter]]
    def __init__(self, store: PageStore, trusts_requests: bool = False) -> None:
        """Start without requests, whose pages are those of `store`. With `trusts_requests` those of one id share pages."""
    @property
    def lock(self) -> Any:
        """The lock. IntegrityError in another process than that of the manager."""
    def find_held(self, request: Request) -> RequestPages | None:
        """Return the pages that a request holds, or None. ArgumentError for another request with the id of one that holds
        pages, unless requests of one id share them.
        """

    def refuse_nested(self, request_id: str) -> None:
        """Raise the error for a request whose attributes allocate, fork or free pages under its id while a call reads them."""

class SlotAllocator:
    """The native half of `CacheManager`. It calls nothing of the façade's half: a `RequestRegistry` hashes tokens that are not
    in a list, with extra keys, or by a callable, and names their pages.
    """

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

        ArgumentError, and no change, for 0 new tokens, for more tokens than `max_model_len`, for hits that are counted among
        the new tokens too, and for computed tokens that cannot be: beyond the hits of a request that holds nothing (a preempted
        request starts at 0 again), or beyond the slots of one that does. MovesDueError, and no change, while moves of its
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
    """The pages of `store` that a request of at most `max_num_tokens` tokens, `owner`, holds in each cache group.

    ``len()`` counts their places, including those of skipped pages. Each call is atomic.
    """

    session_id: str | None
    owner: Final[Any]
    num_cached_tokens: Final[int]
    def __new__(cls, store: PageStore, groups: CacheGroups, max_num_tokens: int, owner: object = None) -> Self: ...
    def __len__(self) -> int: ...
    @property
    def num_room_tokens(self) -> int:
        """Tokens that have a slot in every group, at most those of the model."""
    @property
    def num_full_tokens(self) -> int:
        """Tokens that fill the next page to be cached, or after which a step writes the next checkpoint."""
    def count_entered_hashes(self, num_computed_tokens: int) -> int:
        """Count the leading hashes whose pages need no prefix entry any more, in any group. Pages behind the computed tokens
        are cached again, if they lost theirs.
        """
    def begin(self, num_tokens: int, junction: int) -> None:
        """Fix the boundaries of a request of `num_tokens` tokens, as at admission: see `ResumePlaces`."""
    def find_last_write(self, num_tokens: int) -> int:
        """Return the number of tokens of the last state that steps wrote among the first `num_tokens` tokens and that is not
        cached yet; 0: there is none. O(writes).
        """
    def get_page_ids(self) -> tuple[PageIds, ...]:
        """Return the ids of each group's pages, with the null page for skipped ones. O(pages)."""
    def allocate(
        self,
        num_tokens: int,
        num_computed_tokens: int = 0,
        hits: Iterable[PageIds] = (),
        chain: HashChain | None = None,
        num_tokens_to_cache: int = 0,
    ) -> tuple[PageIds, ...] | None:
        """Give `num_tokens` tokens slots in one transaction. Return the new pages of each group; None if the pool has too few
        free pages. The steps: give back the pages that no token from `num_computed_tokens` on attends to (they stay given back
        even after None); make `hits`, found under `chain`, the first pages; take the missing pages; keep the states that are
        due after `num_computed_tokens` tokens; cache the pages that `num_tokens_to_cache` tokens fill.

        Errors, where nothing has changed: PageHashError for a hit whose content is another one by now, and for a page that was
        cached under another hash; ArgumentError for hits of a request that holds pages; MovesDueError while moves
        of its pages are due; DoubleFreeError if another caller gave back a page that is due. O(pages).
        """
    def enter(self, chain: HashChain, num_tokens: int, num_computed_tokens: int, context: int = 0) -> None:
        """Cache the pages that `num_tokens` tokens fill; those with tokens from `num_computed_tokens` on once more if they lost
        their entry. PageHashError, and nothing changed, if a page was cached under another hash. O(pages due).
        """
    def fork(self, target: RequestPages, num_computed_tokens: int, session: int = 0, lookahead: int = 0) -> bool:
        """Let `target`, which holds nothing, continue from the computed tokens of the request. Full pages are shared, others
        copied; in a pool of shards the copies come from the shard of the first page. A full page is copied too unless the
        `lookahead` tokens behind it are computed. `session` is a number of `PageSessions.hold`, or 0 for the request's own
        session. False, and nothing changed, if too few pages are free. PageIdError for a page that cannot be shared. O(pages).
        """
    def end_external(self, chain: HashChain | None, num_tokens: int, is_failed: bool, context: int = 0) -> None:
        """Cache the pages that `num_tokens` tokens fill, after an engine has filled some of them from elsewhere. Give back
        the pages that no later token attends to. After a failure also give back the pages behind the tokens, the last first.

        PageHashError, and nothing changed, if a page was cached under another hash. O(pages given back and cached).
        """
    def require_moves_taken(self, may_be_read: bool = False) -> None:
        """Raise MovesDueError while moves of the pages are due. Copies from the pages do not count if they `may_be_read`."""
    def give_back(
        self,
        num_computed_tokens: int | None = None,
        chain: HashChain | None = None,
        num_last_tokens: int = 0,
        context: int = 0,
        term: int = 0,
        num_tokens_to_cache: int = 0,
    ) -> None:
        """Give back all pages, group by group, the last page first. Pages without other holders get `term`, a term of
        `term_of`, unless it is 0. O(pages).

        First the pages that `num_tokens_to_cache` tokens fill are cached, unless one was cached under another hash. States
        that steps wrote among the first `num_last_tokens` tokens become checkpoints. Pages with tokens from
        `num_computed_tokens` on were not computed, and lose the entries that they got under `chain`, except hits.
        DoubleFreeError, and nothing changed, if another caller gave one of the pages back.
        """
    def count_shared(self, group: int, num_holders: int) -> int:
        """Count the leading pages of a group with at least `num_holders` references, not counting those of leases, copies and
        loads. 0 without caching, and for groups other than full attention. O(pages of the answer).
        """

@final
class Lease:
    """References to pages that keep them from being handed out, until `release` or the end of the lease: see
    `CacheManager.lease`.

    A ``with`` block releases the lease at its end. ``page_ids`` are the leased pages; ``len()`` counts them. With several
    pools each id counts in the pool of its group, and ``page_ids_by_pool`` has the ids of each pool by its name. ``is_held``
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
        """Let the lease end `seconds` from now. ArgumentError if it has ended or has no end, and unless `seconds` is finite and
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
    """The numbers of the sessions of a pool, by id and tenant. Callers serialise their calls."""

    def __new__(cls, store: PageStore) -> Self: ...
    def hold(self, session_id: str | None, tenant: str | None = None) -> int:
        """Return the number of a session for a tenant, valid until `release`; 0 without both, or without caching. Amortised
        O(1); the first call is O(num_pages).
        """
    def release(self, number: int) -> None:
        """Release a number of `hold`. It is reused once no page, row or request has it."""
    def expect(self, session_id: str, seconds: float | None) -> int:
        """Expect the pages of a session back in some seconds (None: unknown), the last page first. Infinity means never, and
        ends the session's claim on them. Return how many pages. O(pages).
        """
    def set_shares(self, shares: Mapping[str, float]) -> None:
        """Set the shares of tenants in each bank, by name; other tenants share the rest. O(num_pages + sessions)."""
    def count_charged(self, bank: int) -> dict[str, int]:
        """Count the pages of a bank charged to each tenant with a share. O(tenants)."""

def lease_pages(store: PageStore, page_ids: _Ids, bank: int = 0) -> Lease:
    """Lease held pages of a bank, or free cached ones: see `PagePool.lease`. O(pages); the first call O(num_pages)."""

def list_leases(store: PageStore) -> list[Lease]:
    """Return the held leases of a pool, the oldest first, and forget those that have ended. O(leases)."""

def term_of(seconds: float | None) -> int:
    """Return the term of pages that are wanted in `seconds`: infinity means never, None gives 0."""

@final
class PageTier:
    """A tier of `num_pages` pages, including a null page, behind `store`. It evicts by LRU. The tier has the banks of the
    store: `num_pages` is the size of the first, `further_banks` has those of the others, without null pages.

    Pages evicted from the store are saved. If the tier `writes_through`, pages are saved as soon as they are computed, and not
    again at eviction. O(num_pages of both) to make.
    """

    def __new__(
        cls,
        store: PageStore,
        num_pages: int,
        writes_through: bool = False,
        further_banks: Sequence[int] = (),
    ) -> Self: ...
    def counters(self, store: PageStore) -> dict[str, int]:
        """Return the `TierCounters` by name, the numbers of free and cached pages and of those in flight, and evicted pages."""
    def count_banks(self, store: PageStore) -> list[tuple[int, ...]]:
        """Return, for each bank, the numbers of its pages without the null page, of free and cached ones, and of the pages that
        were ever handed out and evicted.
        """

def add_tier(store: PageStore, tier: PageTier) -> None:
    """Put a new tier behind its store, which takes ownership and must have none yet."""

@final
class PageCopies:
    """Pages to copy, in order: page ``src[i]`` to page ``dst[i]``, in the arrays of cache group ``group[i]``.

    The three are read-only int32 arrays of one length, which ``len()`` returns. With several pools all ids are those of the
    group's pool. Destinations are distinct.
    """

    src: Final[npt.NDArray[np.int32]]
    dst: Final[npt.NDArray[np.int32]]
    group: Final[npt.NDArray[np.int32]]
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def __len__(self) -> int: ...

@final
class StateWrites:
    """States that the next step writes: that of row ``rows[i]`` behind its first ``num_tokens[i]`` tokens, to page
    ``page_ids[i]`` in the arrays of cache group ``group[i]``. Where a manager's requests write, ``request_ids[i]`` names the
    request, and ``rows`` is None; of a batch's, ``request_ids`` is None.

    The request ids are a tuple, the others read-only int32 arrays, all of one length, which ``len()`` returns.
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
    """What to move before the next step, and by it. ``len()`` counts all moves.

    The device first reads the pages of all ``saves``, from pages of the device to pages of the tier; then it writes those of
    all ``loads``, from the tier to the device; then it makes the ``copies`` within the device, reading all sources before it
    writes any destination, so one gather and one scatter suffice. These are `PageCopies`. The step itself makes the ``writes``,
    which are `StateWrites`. Answer ``number`` by `CacheManager.complete` or `fail` once the bytes of loads and saves have
    arrived; 0: there are none, and nothing to answer.
    """

    number: Final[int]
    copies: Final[PageCopies]
    loads: Final[PageCopies]
    saves: Final[PageCopies]
    writes: Final[StateWrites]
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def __len__(self) -> int: ...

def take_moves(store: PageStore, maps: RequestMaps | None = None) -> Moves:
    """Hand the due copies, loads and saves over to the caller, who makes them, with the states that steps of the requests of a
    manager write. O(moves); nothing is allocated without any.
    """

def list_in_flight(store: PageStore) -> list[Moves]:
    """Return the `Moves` with loads and saves in flight, in the order they were taken. O(loads and saves x lists)."""

def link_storage(store: PageStore, writes_through: bool = False) -> None:
    """Put storage behind the tier of a store. A page that the tier evicts is due there. If the storage `writes_through`, pages
    are also due as they reach the tier. ArgumentError if there is storage already. O(pages of the tier).
    """

def unlink_storage(store: PageStore) -> None:
    """Take the storage away; nothing is due there any more. O(1)."""

def take_unstored(
    store: PageStore, num_steps: int = 0
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int64], int, int]:
    """Return the pages of the tier that are due for storage, in order: an array ``[n, 2]`` of their keys, lower half first,
    their groups, their ids in the tier, and an array of the steps in which they are settled. Contents stay until the transfers
    due before are done. Page 0 stands for a key whose content was found to be wrong. The last two are the number of the present
    step, and how often everything was dropped since the storage was linked.

    A step begins with each call of `take_moves`, except those for forks and refused calls. A page is settled `num_steps` steps
    after it reached the tier: until then its own step may turn out to have failed. Unsettled pages that are still in the tier
    are not due yet. O(pages).
    """

def begin_fills(
    store: PageStore, groups: CacheGroups, keys: npt.NDArray[np.uint64], group_ids: _Ids, chain: HashChain | None = None
) -> tuple[int, npt.NDArray[np.int32]]:
    """Take a free page of the tier for each key that neither pool nor tier has, while the bank of its group has free pages.
    Return the number of this list, or 0 if nothing was taken, and the pages, with page 0 where none was taken. They are held
    until `end_fills`. Pages evicted for them are due for storage: copy those before anything is written. Nothing is taken if
    everything was dropped since the storage was linked. `chain` has the whole digests of the keys, for events: None if they are
    the keys. O(keys + pages + transfers in flight).
    """

def end_fills(store: PageStore, number: int, failed: Sequence[int] = ()) -> None:
    """End a list of `begin_fills`: its pages can hit now, except those at the indices `failed` of the pages that were taken.
    ArgumentError for an unknown number or index. O(transfers in flight).
    """

def list_absent(
    store: PageStore,
    groups: CacheGroups,
    chain: HashChain,
    num_tokens: int,
    keys: npt.NDArray[np.uint64] | None = None,
    group_ids: _Ids = (),
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int32], int, int]:
    """Return the pages of a request of `num_tokens` tokens missing in both pool and tier: an array ``[n, 2]`` of keys, lower
    half first, and their groups. With the `keys` of pages in storage, ascending by the lower half, return only those needed by
    the longest hit with them; its other pages in the tier count as just used, so that they are still there when these come. The
    third and fourth are the tokens of the hit without and with these keys, one token being left to compute.
    O(pages x groups x log keys).
    """

@final
class FailedLoads:
    """Pages with wrong contents after failed loads of list `number`. ``len()`` counts them. `groups` has the cache group of
    each page, and ids are those of the group's pool.
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
) -> FailedLoads:
    """End the loads and saves taken under a number. Failed ones are named by their indices among the saves or loads.
    O(transfers in flight + num_pages).
    """

def rewind_request(held: RequestPages | None, failed: FailedLoads) -> int | None:
    """Return a request to tokens that do not depend on failed loads. See `CacheManager.find_wrong_token`."""

def load_prefix(
    store: PageStore,
    groups: CacheGroups,
    chain: HashChain,
    num_tokens: int,
    ids: _Range = (0, None),
    context: int = 0,
    num_reserved: int = 0,
    session: int = 0,
) -> tuple[_Hits, int, bool, int, tuple[int, int, int] | None]:
    """Find a prefix as `find_prefix` does, and queue loads of its pages that only the tier has. Return ids, number of tokens,
    whether the pool was too full for the loads, the number of junction tokens, and the `LostHits`, None in a pool of
    one bank.

    Each load takes a page among `ids`, those of a shard, and caches it with a `context` of `EntryJournal.add_context` and a
    `session` of `PageSessions.hold`; the load holds it until it ends. If fewer pages are free than the loads need, in a bank,
    beside `num_reserved` of the first, nothing changes, and the prefix is that of the pool. Junction tokens are hit by all
    groups of full attention where others hit fewer; else 0. O(pages x groups).
    """

def check_holders(
    store: PageStore, requests: Iterable[RequestPages], rows: RunningRows | None = None, groups: CacheGroups | None = None
) -> None:
    """Raise IntegrityError unless each page has at least as many references as `requests`, `RequestPages` of the store, and
    `rows` hold, and one for each lease; and unless rows and tables agree. With `groups`, or those of the rows, also unless each
    cached page, in the tier too, is in the bank of its group. O(num_pages + pages held + table).
    """

CONSTANTS: Final[SimpleNamespace]

def copy_records(store: PageStore, names: str | None = None, of_tier: bool = False) -> dict[str, Any]:
    """Copy the records of a pool, or of the tier behind it, by name: its numbers, and the arrays with these `names`, divided by
    blanks (None: all). Other arrays are empty. O(num_pages).
    """

def locate_numbers(holder: RequestPages | RunningRows | TableRows) -> dict[str, tuple[int, tuple[int, ...], np.dtype[Any]]]:
    """Return the address, shape and type of numbers by name: of a request's or the first row's pages in the first group, of the
    records of rows, or of the dirty flags of a table's rows. They move when a list of pages grows.
    """

def locate_records(store: PageStore, of_tier: bool = False) -> dict[str, tuple[int, tuple[int, ...], np.dtype[Any]]]:
    """Return the address, shape and type of each array and number of a pool, or of the tier behind it, by name. An array moves
    when it grows.
    """

def find_policy_fault(store: PageStore, of_tier: bool = False) -> str | None:
    """Describe the first fault in the marks, ghost and counts of the eviction policy of a pool, or of the tier behind it; None
    if there is none. O(num_pages).
    """

def follow(prev_ids: _Ids, next_ids: _Ids, first_ids: _Ids) -> tuple[PageIds, bool]:
    """List the ids of rings, each from its first on. Return them and True, or False at the first link that does not lead back,
    with the ids before it.
    """

@final
class TokenSpan:
    """Tokens ``[start, stop)`` of a request or an admitted row, given by `of_request` or `of_row`; a `stop` of None is the end
    of its tokens. `lease` and `expect` apply to the cached pages that lie wholly within the span: the pages that the request or
    row holds, and others with the same content where it holds none.
    """

    start: Final[int]
    stop: Final[int]
    def __new__(cls, start: int = 0, stop: int | None = None) -> Self: ...
    def of_request(
        self, store: PageStore, groups: CacheGroups, chain: HashChain, num_tokens: int, held: RequestPages | None = None
    ) -> TokenSpan:
        """Return the span for a request of `num_tokens` tokens, hashed by `chain`, which holds the pages `held`, or none."""
    def of_row(self, rows: RunningRows, row: int) -> TokenSpan:
        """Return the span for a row."""
    def expect(self, seconds: float | None) -> int:
        """Set the time, `seconds` from now, at which the cached pages are expected back (None: unknown), the last page first.
        Return the number of pages. O(pages); the first call O(num_pages).
        """
    def lease(self, max_num_leased: _Ids, seconds: float) -> Lease:
        """Lease the cached pages for `seconds`. LeaseBudgetError, and nothing changed, if leases with an end would have more
        pages of a bank than `max_num_leased` lists for it; ArgumentError if the span ends behind the known tokens, if a page of
        it is no longer cached, or a page that requests need to resume at its end, and for a span without pages. O(pages).
        """

class EntryJournal:
    """Changes in the prefix index of a store, and of the tier behind it, for events. The lock of the store guards both."""

    def __new__(cls, store: PageStore) -> Self: ...
    def start(self) -> None:
        """Record from now on which keys come and go, and the places of cached pages in their requests. 56 bytes a page, of the
        tier too. Touch this memory and that of kept tokens now, so that the first prompts do not wait for page faults.

        ArgumentError if there is a journal already, or if pages are held or cached, because their origin is unknown.
        """
    def add_context(self) -> int:
        """Return a new context: a small int for the extra keys and the session of a request; 0 means neither. It is kept while
        cached pages or rows have it, or callers hold it. This caller holds it.
        """
    def hold_context(self, context: int) -> None:
        """Hold a context once more."""
    def release_context(self, context: int) -> None:
        """Release a context once. ArgumentError if it is not held."""
    def kept_contexts(self) -> set[int] | None:
        """Return the contexts in use as a set; None while taken changes are being made into events. O(contexts)."""
    @property
    def max_num_kept_keys(self) -> int:
        """Return the largest possible number of `list_kept_keys`."""
    def list_kept_keys(self) -> npt.NDArray[np.uint64] | None:
        """Return the keys whose names may still be needed: those of entries, their parents, removed entries and pages in
        transfer, uint64 ``[2 n]``. None while taken changes are being made into events. O(num_pages).
        """
    def take_changes(
        self, with_entries: bool = False
    ) -> tuple[bool, tuple[_Keys, _Entries, _Entries | None], tuple[_Keys, _Keys, _Keys | None]]:
        """Return the changes in the index since the last call: ``(is_cleared, changes, changes of the tier)``.

        If `is_cleared`, all entries were removed first, in the tier too. Changes are ``(removed, new, entries)``; removed
        entries went before new ones came. A key that came and went again is in neither. `entries` is the index afterwards, or
        None. Each is in the form of `list_entries`; removed entries, and all of the tier, have keys and groups alone. Names and
        contexts are kept until `end_report`. O(changes), or O(num_pages).
        """
    def list_entries(self) -> tuple[_Entries, _Keys]:
        """Return the entries of the index and of the tier. Names and contexts are kept until `end_report`. O(num_pages).

        Entries of the index are ``(keys, runs, token_ids)``: the lower and upper half of each key, uint64 ``[2 n]``, or four
        quarters of each digest, the lowest first, ``[4 n]``, in a store that keeps whole digests; the runs of consecutive
        pages, ``(key of the parent, place of the first page, context, group, pages, tokens kept for each)``; and these tokens,
        int32. Entries of the tier are keys, and groups, int32 ``[n]``.
        """
    def end_report(self) -> None:
        """Allow names and contexts of the taken changes to be forgotten, now that the events are built."""

class QueryCounter:
    """Counts of requests admitted after a look-up, of their tokens and of hit tokens. The store counts them too, except
    preempted requests.
    """

    is_preempted: Final[bool]
    def __new__(cls, store: PageStore, is_preempted: bool = False) -> Self: ...
    @property
    def counts(self) -> dict[str, int]:
        """Return the `QueryCounts` by name."""
    def add(self, num_tokens: int, num_hit_tokens: int, lost: tuple[int, int, int] | None = None) -> None:
        """Count a request, and the `LostHits` of its look-up, in which the first is one more than the bank; None: no hits."""

@final
class RefusedRequest:
    """A refused request of `num_tokens` tokens. `hits`, the `PageIds` of each group, have `num_hit_tokens` tokens; both shrink
    as the last hits are evicted.

    The request needs at least as many free pages the next time, unless one of its hits got another holder, or a further page of
    it was cached: see `Watch`. The refusal of a row also keeps its tokens and options, to recognise the request.
    """

    hits: Final[tuple[PageIds, ...]]
    num_tokens: Final[int]
    num_hit_tokens: Final[int]
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def has_same_hits(self) -> bool:
        """Whether a look-up would find the hits of a request. The last ones, if evicted, leave `hits`. O(pages evicted)."""

@final
class StepResult:
    """A step in flight: its rows, with their tokens and new pages.

    `RunningBatch.plan` and `step` return one, and `new_step` an empty one. With ``step=`` these calls and `admit` add rows to a
    step. The first `num_grown` rows of the last call have their room; the next row, if there is one, did not fit. `len` is the
    number of rows of the step. `RunningBatch.settle` ends it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    num_grown: Final[int]
    is_settled: Final[bool]
    def __len__(self) -> int: ...
    @property
    def rows(self) -> npt.NDArray[np.int32]:
        """The rows of the step, as they were numbered in the calls: int32 ``[len(step)]``, a copy in the order of the calls."""
    @property
    def new_page_ids(self) -> npt.NDArray[np.int32]:
        """Ids of the new pages: int32 ``[num_new_pages]``, a copy. Those of a row stand group by group. Pages of admitted rows
        are not listed.
        """
    @property
    def new_page_rows(self) -> npt.NDArray[np.int32]:
        """The row of each new page: int32 ``[num_new_pages]``, a copy. Rows stand in the order of the calls."""
    @property
    def new_page_groups(self) -> npt.NDArray[np.int32]:
        """The cache group of each new page: int32 ``[num_new_pages]``, a copy."""
    @property
    def refusal(self) -> Refusal | None:
        """Why the row behind the first `num_grown` got no pages; None if all have their room. O(1)."""

INPUT_FIELDS: Final[tuple[str, ...]]

class InputArrays:
    """The arrays of a step's inputs, in sets that are filled in turn. `pagepool.StepInputs` makes the arrays.

    A call checks everything under the locks of the batch and its tables, or of the tables alone, then writes, and cannot fail.
    """

    current: Final[int]
    batch: Final[RunningRows | None]
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
    ) -> None:
        """Take the rows of a batch, or `tables` with their page sizes and an int32 matrix of token ids, or None. `fields` are
        tuples of a name, a group, and an array for each of `depth` sets.
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
        `num_tokens` and `num_reqs` (None: whole); what lies behind stays. Unknown tokens have the ids of
        ``draft_token_ids[i]``, int32, or -1.

        Raise ArgumentError for a step of another batch, a settled one, or one whose rows were planned again, cut, moved or
        released since; for rows that are not admitted, wait for tokens from elsewhere or repeat; for a row without tokens, or
        with a token that has no page; for more tokens or rows than `num_tokens` and `num_reqs` have room for, and for too few
        drafts. RowIndexError for a row outside the table, ArgumentTypeError for other types. Nothing has been written then.
        O(tokens + rows), and with ``page_ids`` O(pages), native; nothing is allocated.
        """

_Amounts = int | Sequence[int] | npt.NDArray[Any]

class RunningRows:
    """The rows of a running batch: their tokens and pages. `pagepool.RunningBatch` adds the manager.

    Each row has its known tokens, the digests of its pages and, for each group, its page ids. Memory is used only for tokens
    and pages that rows have had: 4 bytes a token, 16 a hashed page, 4 a page and group. `release` keeps it for the next
    request.
    """

    stays: Final[npt.NDArray[np.int64]]
    num_ahead_tokens: Final[npt.NDArray[np.int32]]
    num_tokens: Final[npt.NDArray[np.int32]]
    num_computed_tokens: Final[npt.NDArray[np.int32]]
    num_cached_tokens: Final[npt.NDArray[np.int32]]
    num_external_tokens: Final[npt.NDArray[np.int32]]
    is_admitted: Final[npt.NDArray[np.bool_]]
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
        lookahead: int = 0,
    ) -> None:
        """`tables` are `TableRows`, one for each of the `groups`; these are `CacheGroups`, or an argument for them. With
        `caches_computed` pages are cached once the steps that computed them are settled. `key`, `algorithm` and `lookahead` are
        those of a `HashChain`.
        """
    def _forget_refusal(self) -> None:
        """Let `refusal` be None, after an error."""
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
    def max_num_tokens(self) -> int:
        """The most tokens that a row can have: the model's limit, or the table's if that is less."""
    def new_step(self) -> StepResult:
        """Return an empty step, to which `plan`, `step` and `admit` add rows."""
    def plan(
        self, rows: _Ids, num_tokens: _Amounts = 1, num_drafts: _Amounts = 0, step: StepResult | None = None
    ) -> StepResult:
        """Plan a step: give each row slots for its next tokens, row by row in the given order.

        `rows` is a list or an int array without repeats; `num_tokens` and `num_drafts` are a number for all rows or one for
        each. A row with known tokens that no step computes gets slots for the next `num_tokens` of them. A row without gets one
        for the token that a step in flight samples; at most `max_steps_ahead` such steps may be unsettled. `num_drafts` slots
        lie behind these: the step computes them too, but not inside a prompt, where they are room for later. Slots are for the
        longest outcome, and fall by the rejected drafts as a step is settled.

        For each row, what earlier steps have made final is cached, and pages that fell out of the attention window are given
        back; then the missing pages are taken, then full pages are cached. The first row that does not fit stops the call and
        stays as it was: preempt, and call again from ``num_grown``. With `step` the rows are added to a step, which is
        returned. A plan says that the step `max_steps_ahead` + 1 before it has run.

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
        for it. Drafts of its last step are rejected: `settle` tells accepted ones. The first row that does not fit stops the
        call and gets no token. With `step` the rows are added to a step, which is returned. Nothing has changed after an error:
        RowOverflowError for a row that is full, ArgumentError for one with known tokens to compute, such as one in the middle
        of its prompt, and for one with two steps in flight, and the errors of `plan`. O(rows + new pages), native.
        """
    def settle(
        self, step: StepResult, token_ids: _Ids | None = None, counts: _Amounts | None = None, *, failed: bool = False
    ) -> npt.NDArray[np.int32]:
        """End a step that has run: append the tokens sampled by it, and cache the pages filled by now.

        `token_ids` are the tokens of all rows, one row after another in the order of ``step.rows``. ``counts[i]`` is the number
        of tokens of row i, or one number for all: at most one more than the row's drafts, and 0 inside a prompt, or where the
        engine tells the token by `append`. None means one each; without `token_ids`, none. Computed tokens then include the
        accepted drafts, and the sampled token that a later step has in flight. Slots of rejected drafts stay.

        Return where the tokens of each row went: its row, which may have moved, or -1 for a request that was released since,
        or whose tokens were cut; its tokens are dropped. int32 ``[len(step)]``. Steps of a row that sample tokens are settled
        in the order of their launch; they end the chunks of its prompt before them, too.

        With `failed` the step has failed, and with it all later ones of the batch. Pages that they should have filled lose
        their entries, whoever has hit them. Each row goes back to the tokens before its first failed step, and a row that has
        hit such a page to the first token of this page; `plan` computes the others again. Return the rows that cannot go back,
        and are released: they have a state, wait for tokens from elsewhere, have moves due, or need pages again that a window
        gave back. int32, in ascending order. Known tokens stay, and later steps have nothing to settle.

        ArgumentError, and nothing changed, for a wrong number of tokens, for none where a later step computes them, for
        negative ones, for rows that got their token otherwise, for tokens of a failed step, and for a step of another batch, or
        one settled before; RowOverflowError for a row that would be too long. O(rows + tokens + pages cached), native; with
        `failed` O(pages of all rows).
        """

    def append(self, rows: _Ids, token_ids: _Ids) -> None:
        """Append one known token to each row, without room for it yet. Rows may repeat, for several tokens in order.

        If a step in flight samples the row's next token, this is its token: its drafts are rejected, and `settle` tells no
        other. ArgumentError, and nothing changed, for rows that are not admitted, and where a later step in flight computes
        the token; RowOverflowError where a row would be too long. O(rows).
        """
    def trim(self, rows: _Ids, num_tokens: _Amounts) -> None:
        """Cut the known tokens of rows, as for rejected drafts, to `num_tokens`, a number for all rows or one for each.

        A row that keeps its ``num_computed_tokens`` keeps all its pages: they are slots for its next tokens. Where computed
        tokens are cut, the pages behind the cut are given back, the last first, and lose their entries unless they have other
        holders. If the page at the cut has other holders, it is given back as well, and its first tokens have to be computed
        again: ``num_computed_tokens`` says so. Pages of other groups with these tokens, and those behind, are then given back
        too if they have other holders. With a hash lookahead of L tokens the last L tokens before the cut count as changed: the
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

        A row may be released while its steps are in flight: they have nothing to tell then. If one fails, its pages lose their
        entries.

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
    def commit_external(self, row: int, num_tokens: int) -> None:
        """Let a pending row run once the first `num_tokens` of its awaited tokens have arrived: they count as computed, and
        their full pages are cached. `plan` computes the other tokens, whose slots stay.

        Until then the row's new pages are not cached, and `plan`, `step`, `trim` and `fork` raise ArgumentError for it;
        `append`, `release`, `move_row` and `swap_row` work. The transfer writes to the pages that `get_page_ids` lists, once
        the due moves are made. It may leave out pages that lie behind the window of all later tokens: those are
        given back. With a state all tokens have to arrive.

        ArgumentError for a row that is not pending, for more tokens than it waits for, and with a state for fewer;
        MovesDueError while moves of its pages are due. Nothing has changed then. O(pages cached).

        >>> from pagepool import CacheGroupSpec, CacheManager, FullAttentionSpec, PageTable, RunningBatch
        >>> spec = FullAttentionSpec(page_size=4, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False)
        >>> manager = CacheManager(num_pages=16, kv_cache_groups=[CacheGroupSpec(spec)], max_model_len=64)
        >>> table = PageTable(max_num_reqs=2, max_num_pages_per_req=16, max_num_batched_tokens=64)
        >>> batch = RunningBatch(manager, table)
        >>> batch.admit(0, list(range(11)), num_external_tokens=99), batch.num_external_tokens.tolist()
        (0, [10, 0])
        >>> batch.commit_external(0, 9)
        >>> batch.num_computed_tokens.tolist(), batch.admit(1, list(range(11)))
        ([9, 0], 8)
        """
    def fail_external(self, row: int, num_valid_tokens: int) -> int:
        """Commit the first `num_valid_tokens` of the tokens for which a pending row waits, as `commit_external` does, and give
        back the pages behind them: nothing may write there any more, and readers need a lease. Return the row's number of
        computed tokens; `plan` computes the others.

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

    def get_page_ids(self, row: int) -> tuple[list[int], ...]:
        """Return the ids of a row's pages, a list for each group, with the null page, 0, for skipped pages. O(pages)."""

@final
class RowRequest:
    """A request with `token_ids` for a free `row` of `rows`: see `RunningBatch.admit`.

    `_is_refused_still` knows the request by its tokens and `options`, a tuple of everything else that hits depend on. If up to
    `num_external` tokens come from elsewhere behind the hits, these get room instead, and the row is pending. Other requests
    will resume at the token counts `resume_at`. Lookahead tokens get slots behind those that get room. If the request
    `reserves_prompt`, all known tokens get slots, and lookahead tokens behind these.
    """

    def __new__(
        cls,
        rows: RunningRows,
        row: int,
        token_ids: Sequence[int] | npt.NDArray[Any],
        num_tokens: int | None = None,
        max_num_new_tokens: int | None = None,
        num_reserved_pages: int = 0,
        options: tuple[object, ...] | None = None,
        num_external_tokens: int = 0,
        resume_at: Sequence[int] | None = None,
        num_lookahead_tokens: int = 0,
        reserves_prompt: bool = False,
    ) -> Self: ...
    def admit(
        self,
        extra_keys: Sequence[tuple[int | None, bytes]] = (),
        takes_hits: bool = False,
        shard: int | None = None,
        context: int = 0,
        counter: QueryCounter | None = None,
        session: int = 0,
        step: StepResult | None = None,
    ) -> int | None:
        """Admit the request and return the number of hit tokens; None, and nothing taken, if too few pages are free.

        `extra_keys` are ``(page, bytes)`` of the hash pages that have any, in order; those of the page None, the last, are of
        all pages that have no others. With `takes_hits` the longest cached prefix is hit, and loaded where only the tier has
        it. `context` comes from `EntryJournal.add_context`, `session` from
        `PageSessions.hold`. `counter` counts an admitted request. A row that does not wait for tokens is added to `step`.
        """
    def probe(self, extra_keys: Sequence[tuple[int | None, bytes]] = (), shard: int | None = None) -> int:
        """Return the number of tokens that `admit` hits, in the tier too, once enough pages are free. The row keeps hashes."""

def copy_rows(
    source: npt.NDArray[np.uint8],
    source_ids: _Ids,
    target: npt.NDArray[np.uint8],
    target_ids: _Ids,
    num_threads: int = 1,
) -> None:
    """Copy row ``source_ids[i]`` of `source` to row ``target_ids[i]`` of `target`, for all `i`.

    Both are uint8 arrays with two axes, of rows equally long, whose bytes are contiguous; there may be gaps between rows. They
    may share memory if no byte is both read and written, except by a copy of a row onto itself. The ids are arrays or lists of
    ints; a row of `target` that occurs twice gets bytes of either source. 64 KiB and more are copied without the GIL, by up to
    `num_threads` threads, the caller's among them, and at most one for each MiB. The call returns when all is copied, without
    waiting for threads that start late.

    Before anything is copied, raise ArgumentTypeError for other types, and ArgumentError for ids outside the arrays, unequal
    lengths, a read-only target, and less than one thread.
    """

def pack_dirty_lines(
    tables: tuple[TableRows, ...],
    num_reqs: int,
    places: npt.NDArray[np.int64],
    numbers: npt.NDArray[np.int64],
    lines: npt.NDArray[np.int32],
) -> int:
    """Pack the dirty segments in rows before `num_reqs` for a device whose tables are seen as lines, into `lines`, int32
    ``[room, width]`` with a divisor of 64 as the width, and the numbers of these lines into `numbers`, int64 ``[room]``. Return
    how many were written. `places`, int64 ``[num_tables, 2]``, has each table's first line and its columns on the device.

    Packed segments count as sent; segments without room do not.
    """

def pack_dirty_segments(
    tables: tuple[TableRows, ...], num_reqs: int, num_lines: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return a payload for the device, with a line for each dirty segment in rows before `num_reqs`: the values, int32
    ``[num_lines, width]``, and the row and column where each line begins in each table, int32 ``[num_tables, num_lines, 2]``.
    Packed segments count as sent; segments without room do not. In other tables a line has a row outside the table, and no row
    repeats.
    """

class TableRows:
    """The host side of a page table: int32 ``[num_rows, num_columns]`` page ids, with zeros behind each row's last page.

    `pagepool.PageTable` adds the device side. Each change is one native call, flags the segments of 64 columns that it touched,
    and increases ``cpu_version``. A wrong call changes nothing.
    """

    page_table_cpu: Final[npt.NDArray[np.int32]]
    num_pages_per_row: Final[npt.NDArray[np.int32]]
    def __init__(self, num_rows: int, num_columns: int) -> None:
        """Make a table of zeros; both sizes are at least 1."""
    @property
    def max_num_reqs(self) -> int:
        """Number of rows."""
    @property
    def max_num_pages_per_req(self) -> int:
        """Number of columns."""
    @property
    def cpu_version(self) -> int:
        """A number that grows with each change of the host table."""
    def append_row(self, page_ids: _Ids, row_idx: int) -> None:
        """Append page ids (a list, or an int32 array; one for each table of a group) to a row. Does nothing without ids.

        RowIndexError, RowOverflowError, and PageIdError for a negative id. O(ids).
        """
    def add_row(self, page_ids: _Ids, row_idx: int) -> None:
        """Replace a row's pages by page ids. O(ids + pages that the row had)."""
    def clear_row(self, row_idx: int) -> None:
        """Empty a row. O(pages that it had)."""
    def move_row(self, src: int, tgt: int) -> None:
        """Copy a row over another one, and fill that with zeros behind; the source stays. O(pages of both)."""
    def swap_row(self, src: int, tgt: int) -> None:
        """Exchange two rows. O(pages of both)."""
    def append_rows_batch(self, page_ids_per_req: Iterable[_Ids], req_indices: Iterable[int]) -> None:
        """`append_row` for each request's ids and row, in order; rows may repeat. All or nothing. O(ids)."""
    def clear_rows(self) -> None:
        """Empty all rows and clear their dirty flags, before the device copy is made anew. O(pages in the table)."""
    def mark_dirty(self, rows: Iterable[int] | None = None) -> None:
        """Mark rows (a list or an array; None: all) as changed, after writing to `page_table_cpu` directly."""
    def slot_mapping(self, rows: _Ids, positions: _Ids, page_size: int) -> npt.NDArray[np.int32]:
        """Return the slots of tokens, ``table[row, position // page_size] * page_size + position % page_size``, as int32
        ``[num_tokens]``.

        `rows` and `positions` are int arrays or lists of one length. RowIndexError outside the table, ArgumentError for a slot
        that does not fit int32. O(tokens), native.
        """
    def check(self) -> None:
        """Raise IntegrityError for the first wrong row: its count exceeds the table or its extent, a page id is negative, an id
        behind its extent is not zero, or it has dirty segments and is not dirty itself. O(table).
        """
    def find_unsent(self, device_table: npt.NDArray[np.int32]) -> tuple[int, int] | None:
        """Return the row and column of the first id that differs from `device_table`, int32 of the table's shape, in a segment
        that counts as sent; None if there is none. O(table).
        """
    def count_dirty_segments(self, start: int, stop: int) -> int:
        """Count the segments in rows ``[start, stop)`` that were not sent yet."""
    def copy_aligned(self, num_rows: int | None = None) -> npt.NDArray[np.int32]:
        """Return a copy of the first rows, by default of all, and clear their dirty flags."""

class GroupedRows:
    """The host tables of several cache groups with the same rows."""

    def __init__(self, page_tables: Iterable[TableRows]) -> None:
        """Group `page_tables`, different `TableRows` with one number of rows."""
    @property
    def page_tables(self) -> tuple[Any, ...]: ...  # any kind of TableRows
    def __len__(self) -> int: ...
    def __getitem__(self, i: int, /) -> Any: ...
    def append_row(self, page_ids: Sequence[_Ids], row_idx: int) -> None:
        """Append page ids (a list, or an int32 array; one for each table of a group) to a row. Does nothing without ids.

        RowIndexError, RowOverflowError, and PageIdError for a negative id. O(ids).
        """
    def append_rows_batch(self, page_ids_per_req: Iterable[Sequence[_Ids]], req_indices: Iterable[int]) -> None:
        """`append_row` for each request's ids and row, in order; rows may repeat. All or nothing. O(ids)."""
    def add_row(self, page_ids: Sequence[_Ids], row_idx: int) -> None:
        """Replace a row's pages by page ids. O(ids + pages that the row had)."""
    def clear_row(self, row_idx: int) -> None:
        """Empty a row. O(pages that it had)."""
    def move_row(self, src: int, tgt: int) -> None:
        """Copy a row over another one, and fill that with zeros behind; the source stays. O(pages of both)."""
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

def time_of_batch(payload: bytes | bytearray | memoryview) -> float:
    """Return the time of an encoded batch in seconds since 1970; 0 if it has none. O(1)."""

_Hashes = HashChain | Sequence[int] | Sequence[bytes] | npt.NDArray[np.integer[Any]]

class PrefixTable:
    """The compiled part of `pagepool.router.PrefixIndex`, which describes it."""

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
        lookahead: int = 0,
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
        """Forget all blocks of a worker. O(blocks that it got since it last had none)."""
    def clear(self) -> None:
        """Forget all blocks and groups, and free their memory. Workers keep their numbers."""
    def list_blocks(self, worker: int, medium: str = "GPU", group: int = 0) -> npt.NDArray[np.uint64]:
        """Return the hashes of a worker's blocks in a medium and a cache group: uint64, in any order. O(blocks of all)."""
    def stats(self) -> _PrefixStats:
        """Return ``blocks`` (entries of all groups), ``held`` (a list of the blocks of each worker), ``bytes`` of memory, and
        ``num_skipped``.
        """
    def check(self) -> None:
        """Check that the records agree; raise IntegrityError if they do not. O(blocks x workers)."""
