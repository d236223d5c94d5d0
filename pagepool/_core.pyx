"""The compiled core: page records, free queue, ref counts, prefix index, hash chains, page tables and running rows.

A pool is an array of page records, a free queue and a prefix index. The headers of `pagepool.core` document their structs and
the invariants between fields; `PagePool.check` checks them.

A call checks everything first, then commits and cannot fail; an error found half-way through a list is rolled back exactly.
Each chain, store, table and batch has a lock, taken in the order batch, chain, store, tables. Calls from several threads are
serialised, and long ones let other threads run. A thread that forks the process takes all locks first, so the child
finds no half-done work.

This module re-exports the names of `pagepool.core` for Python, and reports how it was built. Headers (``.pxd``) contain code
that runs without Python; modules (``.pyx``) contain the classes. Each file imports only files above it.

===========================  ============================================================================================
`base/platform.pxd`          memory hints, the clock, whether guards are compiled in
`base/memory.pxd`            arrays that grow
`base/vectors.pxd`           arrays of ids, several values at once
`base/limits.pxd`            the largest values that a caller may give, and terms
`base/siphash.pxd`           digests of pages
`base/locks.pyx`             locks across a fork
`values/arguments.pyx`       values from Python, checked
`values/ids.pyx`             `PageIds`: page ids and token ids
`values/chain.pyx`           `HashChain`
`pool/policy.pxd`            the policy that learns when pages are used again, and remembers keys of evicted pages
`pool/records.pxd`           the records of a pool: pages, index slots, journal, residency
`pool/owners.pxd`            which session a page belongs to, and to which tenant it is charged
`pool/queue.pxd`             the free queue and its parts, which page is evicted next, terms; references given back
`pool/index.pxd`             the prefix index: `find`, `enter`, `drop`; pages of equal content; the journal's notes
`pool/pages.pxd`             pages are taken (`claim` evicts), touched, given back; residency; queued transfers
`pool/store.pyx`             `PageStore`: the records, queue and index of a pool; `CachePage`, `QueryCounter`
`pool/sessions.pyx`          `PageSessions`: numbers of sessions by id, and when their pages are wanted; shares of tenants
`pool/journal.pyx`           `EntryJournal`: changes of the prefix index
`pool/saving.pyx`            `copy_records`: a pool copied, to be checked or saved; `load_store`
`holding/rules.pxd`          which pages tokens need, by kind of attention
`holding/boundaries.pxd`     numbers of tokens at which a request can resume, and the pages of windows that it needs there
`holding/holding.pxd`        what requests and rows hold: taken (`price`, `fit`, `attach`), entered, kept, copied, forked
`holding/groups.pyx`         `CacheGroups` of a model, and the `PageRules` of each
`holding/lookups.pyx`        `find_prefix`: the longest hit in all groups; `Refusal`: whether a request is refused again
`holding/request_pages.pyx`  `RequestPages`: what a request holds (`allocate`, `enter`, `give_back`)
`holding/slots.pyx`          `SlotAllocator`: a request is read, its full pages hashed, its slots allocated; `CachePages`
`tier/tier.pyx`              `PageTier` behind a pool; `Transfers` between them, taken and ended; `load_prefix` from it
`tier/copies.pyx`            `PageCopies` that are due
`tables/page_table.pxd`      rows of a page table
`tables/table.pyx`           `TableRows`, `GroupedRows`
`rows/batch.pxd`             records of running rows; rows are hashed, grow (`grow_row`), are cut, and change places
`rows/running.pyx`           `RunningRows`, arrays and locks of a batch: `grow`, `step`, `undo`, `release`, `fork`
`rows/row_request.pyx`       `RowRequest`: a row is admitted, or refused
`rows/spans.pyx`             `TokenSpan` of a request or row: cached pages leased, or expected back; `lease_pages`
`checks/holders.pyx`         `check_holders`
`router/event_batch.pxd`     batches of events, read from msgpack
`router/prefixes.pyx`        `PrefixTable`: a router's index of blocks and their workers, read by many threads at once
===========================  ============================================================================================
"""

from pagepool.core.base.platform cimport GIL_DISABLED, GUARDS

from pagepool.core.values.chain import HashChain, siphash128
from pagepool.core.tier.copies import PageCopies, take_copies
from pagepool.core.holding.groups import CacheGroups, PageRules
from pagepool.core.checks.holders import check_holders
from pagepool.core.values.ids import PageIds, are_plain_token_ids, lists_of, require_token_ids
from pagepool.core.pool.journal import EntryJournal
from pagepool.core.holding.lookups import Refusal, RequestHashes, find_prefix
from pagepool.core.router.prefixes import PrefixTable, time_of_batch
from pagepool.core.holding.request_pages import RequestPages
from pagepool.core.rows.row_request import RowRequest
from pagepool.core.rows.running import RunningRows, StepResult
from pagepool.core.pool.saving import copy_records, find_policy_fault, follow, give_back_restored, load_store
from pagepool.core.pool.sessions import PageSessions
from pagepool.core.holding.slots import CachePages, SlotAllocator
from pagepool.core.rows.spans import Lease, TokenSpan, lease_pages, list_leases, term_of
from pagepool.core.pool.store import CachePage, PageStore, QueryCounter
from pagepool.core.tables.table import GroupedRows, TableRows, pack_dirty_windows
from pagepool.core.tier.tier import (
    FailedLoads, PageTier, Transfers, add_tier, end_step, end_transfers, list_in_flight, load_prefix, rewind_request,
    take_transfers,
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
