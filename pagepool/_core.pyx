"""The compiled core: page records, free queue, ref counts, prefix index, hash chains, page tables and running rows.

A pool is an array of page records, a free queue and a prefix index. The headers of `pagepool.core` document their structs and
the invariants between fields; `PagePool.check` checks them.

A call checks everything first, then commits and cannot fail; an error found half-way through a list is rolled back exactly.
Each chain, store, table and batch has a lock, taken in the order batch, chain, store, tables. Calls from several threads are
serialised, and long ones let other threads run. In a forked process, calls on objects that the parent made raise.

This module re-exports the names of `pagepool.core` for Python, and reports how it was built. Headers (``.pxd``) contain code
that runs without Python; modules (``.pyx``) contain the classes. `core/README.md` has a map of them.
"""

from pagepool.core.base cimport GIL_DISABLED, GUARDS

from pagepool.core.values.chain import HashChain, siphash128
from pagepool.core.tier.moves import Moves, PageCopies, StateWrites, list_in_flight, take_moves
from pagepool.core.host.row_copies import copy_rows
from pagepool.core.holding.groups import CacheGroups, PageRules
from pagepool.core.checks.holders import check_holders
from pagepool.core.checks.claims import PageClaim, list_claims
from pagepool.core.checks.layouts import locate_numbers
from pagepool.core.values.hashed import HashedTokens
from pagepool.core.waiting.waiting import WaitingLine, WaitingRequest
from pagepool.core.values.ids import PageIds, are_plain_token_ids, lists_of, require_token_ids
from pagepool.core.pool.journal import EntryJournal
from pagepool.core.holding.lookups import FoundPrefix, RefusedRequest, RequestHashes, find_prefix
from pagepool.core.holding.misses import find_misses, has_entry
from pagepool.core.router.prefixes import PrefixTable, time_of_batch
from pagepool.core.holding.request_maps import RequestMaps
from pagepool.core.holding.request_pages import RequestPages
from pagepool.core.rows.inputs import INPUT_FIELDS, InputArrays
from pagepool.core.rows.row_request import RowRequest
from pagepool.core.rows.running import RunningRows
from pagepool.core.pool.layouts import CONSTANTS, copy_records, locate_records
from pagepool.core.pool.faults import find_policy_fault, follow
from pagepool.core.pool.sessions import PageSessions
from pagepool.core.holding.slots import CachePages, SlotAllocator
from pagepool.core.rows.step_result import StepResult
from pagepool.core.rows.spans import (
    Lease, TokenSpan, count_leasable_pages, lease_pages, limit_leases, list_leases, term_of,
)
from pagepool.core.pool.store import PageStore
from pagepool.core.pool.counts import (
    COUNTERS, QueryCounter, count_entries, count_leased, count_usable, estimate_hits, list_residency, list_sizes,
)
from pagepool.core.pool.keeping import (
    drop_dependents, keep_departures, keep_token_ids, keep_whole_digests, rank_checkpoints, search_all_lost,
)
from pagepool.core.pool.pages import CachePage, LoosePages, PageRecords
from pagepool.core.tables.table import GroupedRows, TableRows, pack_dirty_lines, pack_dirty_segments
from pagepool.core.tier.sizes import resize_banks
from pagepool.core.tier.storage import (
    TierHold, begin_fills, end_fills, hold_stored, link_storage, list_absent, take_unstored, unlink_storage,
)
from pagepool.core.tier.tier import (
    FailedLoads, PageTier, add_tier, are_loading, count_steps, end_transfers, load_prefix, rewind_request,
)


cdef extern from *:
    """
    #if defined(__has_feature)
    #define PAGEPOOL_HAS(name) __has_feature(name)
    #else
    #define PAGEPOOL_HAS(name) 0
    #endif
    #if defined(__SANITIZE_ADDRESS__) || PAGEPOOL_HAS(address_sanitizer)
    #define PAGEPOOL_SANITIZER "address"
    #elif defined(__SANITIZE_THREAD__) || PAGEPOOL_HAS(thread_sanitizer)
    #define PAGEPOOL_SANITIZER "thread"
    #else
    #define PAGEPOOL_SANITIZER ""
    #endif
    #if defined(__clang__)
    #define PAGEPOOL_COMPILER __VERSION__
    #else
    #define PAGEPOOL_COMPILER "GCC " __VERSION__
    #endif
    #ifdef CYTHON_WITHOUT_ASSERTIONS
    #define PAGEPOOL_DEBUG 0
    #else
    #define PAGEPOOL_DEBUG 1
    #endif
    #if CYTHON_TRACE_NOGIL
    #define PAGEPOOL_TRACED 1
    #else
    #define PAGEPOOL_TRACED 0
    #endif
    """
    const char *COMPILER "PAGEPOOL_COMPILER"
    const char *SANITIZER "PAGEPOOL_SANITIZER"
    bint DEBUG "PAGEPOOL_DEBUG"
    bint TRACED "PAGEPOOL_TRACED"


def build_flags():
    """Return how the core was built: `debug` (asserts and bounds checks), `guards` (the checks of the hot loops), `sanitizer`
    ("address" with undefined behaviour, "thread", or ""), `traced` (line counts for coverage), `free_threaded` (for a Python
    without the GIL), and `compiler`.
    """
    return {
        "debug": DEBUG,
        "guards": GUARDS,
        "sanitizer": SANITIZER.decode(),
        "traced": TRACED,
        "free_threaded": GIL_DISABLED,
        "compiler": COMPILER.decode(),
    }
