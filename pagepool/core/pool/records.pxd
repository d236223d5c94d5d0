# The records of a pool, and the links between them. The caller holds the store's lock and passes page ids within the pool.
#
# A pool of `num_pages` pages is one array of `Page` records, indexed by page id. A queue with parts has one more record before
# each part, a divider; dividers follow the records of the pages. Always:
#
# * Record 0 is the null page, which is never handed out. Its links close the free queue into a ring: `next_free` is the front,
#   which without parts is evicted first, and `prev_free` the back.
# * A page is in the free queue exactly when its ref count is 0; outside it both links are `NOT_FREE`. Only an engine that sets
#   `CachePage.ref_cnt` or edits the queue itself can break this; `num_held_free` counts the free pages that it gave references.
#   Retired pages (see retired.pxd) are outside the queue with or without references.
# * A page has a prefix entry exactly when `group` is not `NO_GROUP`.
# * A page with a term has a prefix entry.
# * A leased page has a reference for each lease, and is outside the free queue.
#
# If kinds of groups have pools of their own, the pages are divided into banks, one after another. Each bank has a free queue,
# and a group takes pages only from its bank. Page ids that users see count from 0 in each bank; in the core they are indices of
# records, and record 0 is the null page of all banks. Queues have numbers: `-1 - b` is the queue of bank `b`, so -1 is that of
# a pool with one bank; `b * num_shards + s` is the queue of shard `s` in bank `b`, so `s` alone in a pool with one bank.
# `Pool.num_free` is the sum of the `num_free` of its banks if it has several; a single bank's `num_free` is not kept.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t, uint8_t

from pagepool.core.pool.awaited cimport *
from pagepool.core.pool.checkpoints cimport *
from pagepool.core.pool.notes cimport *
from pagepool.core.pool.owners cimport *
from pagepool.core.pool.policy cimport *
from pagepool.core.pool.residency cimport *
from pagepool.core.pool.terms cimport *

cdef enum:
    NOT_FREE = -1             # links of a page outside the free queue
    NO_GROUP = -1             # group of a page without a prefix entry
    TWIN = 1 << 30            # flag in Page.group: other pages have the same content
    WATCHED = 1 << 29         # flag in Page.group: a refused request hits the page
    KEPT = 1 << 28            # flag in Page.group: the page stays cached when it leaves a window
    FLAGS = TWIN | WATCHED | KEPT
    LOST_INTERVAL = 16        # `lost_interval` of a new pool

cdef struct Page:             # 32 bytes
    uint64_t key_lo           # digest of the content; valid while the page is cached
    uint64_t key_hi
    int32_t ref_cnt           # holders; 0: free
    int32_t prev_free         # page ids; NOT_FREE outside the queue
    int32_t next_free
    int32_t group             # cache group of the prefix entry, with its flags; NO_GROUP: not cached

cdef struct Slot:             # one slot of the prefix index
    uint32_t tag              # hash of key and group; its high bits are the home slot
    int32_t page_id           # page cached first under the key; NULL_PAGE: empty

cdef struct Bank:             # records ``[start, stop)``; unless noted, later fields are kept only if a pool has several banks
    int32_t start
    int32_t stop
    int32_t pages_per_shard   # ids in each shard, including the null page in the first one; also kept in a single bank
    int32_t num_free
    int32_t num_set_aside     # pages that no request can have, such as sinks; also kept in a single bank
    int32_t num_retired       # pages at the end of the bank that are out of use; also kept in a single bank
    int32_t num_entries
    int64_t num_allocated_pages
    int64_t num_evicted_pages
    int64_t num_lost_hit_tokens  # see `LostHits`; this and the next two fields are also kept in a single bank
    int64_t num_refusals      # calls that got no pages because the bank had too few
    int64_t num_passed_checkpoints  # states that did not become checkpoints, because no page was left
    Ghost ghost               # keys that were evicted last; `entries` NULL: not kept
    Checkpoints *checkpoints  # NULL: the bank has other pages than states, and evicts the page released first

cdef struct PageCopy:
    int32_t src               # page ids
    int32_t dst
    int32_t group

cdef struct Copies:           # copies due before the next step; each has a reference to its source
    PageCopy *items           # [num], and room for `capacity`
    Py_ssize_t num
    Py_ssize_t capacity
    bint is_between           # the next list of moves is for a fork or a refused call, and begins no step

cdef struct LeasedPages:      # leased pages, given by page ids or as a span of tokens
    const int32_t *ids        # [num]
    Py_ssize_t num
    int64_t begun             # when it was leased, on the clock of stamps
    int64_t end               # when a held lease ends, on the clock of stamps; 0: it has no end, or is not held
    LeasedPages *next         # the next held lease with an end
    uint8_t has_begun
    uint8_t is_held

cdef struct Leases:
    int32_t *counts           # [num_pages] references of leases; NULL: no page was ever leased
    LeasedPages *first        # list of the held leases with an end
    int64_t[MAX_BANKS] num_pages_in  # pages of the leases in this list, by bank; a page counts once for each lease
    double max_share          # of the pages in use of each bank that these leases may have, once they are limited
    bint is_limited
    int64_t next_end          # no lease ends before this time
    int32_t num_ended         # leases that ended by themselves since they were last listed

cdef struct Dependents:       # checkpoints that are uncached when the page of keys and values at their end is evicted
    int32_t group             # full attention, with pages in the first bank
    int32_t num               # 0: none
    int32_t *state_groups     # [num]

cdef struct Transfer:         # one page on its way between a pool and its tier
    Digest key                # digest of its content
    int64_t number            # number of the list of moves in which it was taken; 0: it is due
    int32_t page_id           # page of the pool; the null page if it comes from storage
    int32_t tier_id           # page of the tier
    int32_t group             # group of the entry
    bint is_load              # it goes from the tier to the pool
    bint is_void              # its entries were dropped meanwhile

cdef struct FreshPage:        # a newly cached page of a tier that writes through
    int32_t page_id
    uint32_t number           # value of `Tier.num_cached` when it was cached

cdef enum:                    # values in `Tier.fresh_numbers` that are less than the `number` of any `FreshPage`
    UNSAVED = 0
    SAVED = 1                 # the page is saved or about to be; if the tier evicts it, it is not saved again

cdef struct Pool

cdef struct TierCounters:     # see `Counters`
    int64_t num_saved_pages   # completed saves
    int64_t num_loaded_pages
    int64_t num_failed_pages  # failed transfers
    int64_t num_refused_pages  # saves that found no room in the tier

# A second pool behind a pool, with pages under the same keys, and banks of the same numbers. Its own tier is storage outside
# the process, which has no pool: `items` of storage are pages of the tier to be stored, with the step of arrival as `number`.
cdef struct Tier:
    Pool *pool                # NULL: storage
    Transfer *items           # [num] transfers in flight, then those that are due; room for `capacity`
    Py_ssize_t num
    Py_ssize_t capacity
    Py_ssize_t num_due
    int64_t num_fills         # lists that were filled from storage; they have negative numbers
    int64_t num_clears        # how often all entries were dropped; in storage, since it was linked
    int64_t num_steps         # steps whose moves were taken; in storage, since it was linked
    int64_t *arrivals         # storage: [pages of the tier] `num_steps` when each was cached
    int64_t oldest_load       # first list with unfinished loads; INT64_MAX: none
    int64_t *loading          # [num_pages] number of the list that loads a page of the pool; 0 for most pages
    int64_t last_forked       # last list that was loading a page when a fork copied it
    uint32_t *fresh_numbers   # [num_pages] number of each cached page; NULL: the tier does not write through
    uint32_t num_cached       # pages ever cached; wraps around
    FreshPage *fresh          # [num_fresh] pages to be saved, and room for `fresh_capacity`
    Py_ssize_t num_fresh
    Py_ssize_t num_ready      # leading items of `fresh`, which were cached before the last list was taken
    Py_ssize_t fresh_capacity
    TierCounters counters
    # Saves a page that is about to be evicted. Calls through these two pointers keep the code of the tier out of the loops that
    # take and cache pages.
    void (*save_evicted)(Pool *pool, int32_t page_id) noexcept nogil
    # Records that a page of the pool was cached. A page that may be replaced is saved at its eviction alone.
    void (*record_cached)(Pool *pool, int32_t page_id, bint may_be_replaced) noexcept nogil

cdef struct Counters:         # since construction; `PageStore.counters` and stats use these names
    int64_t num_allocated_pages
    int64_t num_freed_pages
    int64_t num_evicted_pages
    int64_t num_cached_pages
    int64_t num_queried_tokens
    int64_t num_hit_tokens

cdef struct Pool:
    Page *pages
    Slot *slots               # NULL: no prefix caching
    Links *twins              # rings of pages with equal content, valid while TWIN is set
    Links *shard_links        # free queue of each shard, see `end_of_queue`; NULL: there are no shards
    int32_t *shard_num_free   # [num_banks, num_shards] in the memory of `shard_links`
    Policy *policy            # NULL: pages are evicted in the order of their release, unless terms say otherwise
    int32_t num_ranked        # a policy ranks the pages with ids below this: the first bank's; 0 without a policy
    int32_t num_parts         # parts of each queue; 0: blank pages do not go first, and there are no policy, terms or shares
    int32_t num_parts_each    # parts of each tenant; all parts if there are no shares
    bint is_divided           # there are several banks, shards or parts
    int32_t *shard_newest     # [num_shards, NUM_PARTS] in the memory of `shard_links`: as `Policy.newest`, in the first bank
    Links *shard_twins        # in the memory of `shard_links`: rings of the twins in each shard; NULL without shards or caching
    Links *shard_firsts       # in the memory of `shard_links`: rings of the shards' first twins; NOT_FIRST for later twins
    int32_t *page_tokens      # [num_pages, tokens_width] number and ids of the tokens of cached pages; NULL: not kept
    Digest *uppers            # upper halves of digests; NULL: the keys are whole digests
    uint64_t multiplier       # odd and secret: nobody can choose keys that collide
    uint32_t mask             # number of slots - 1
    uint32_t home_shift       # shifts a tag to the slot where a look-up begins
    int32_t num_pages
    int32_t num_free
    int32_t num_banks
    Bank banks[MAX_BANKS]
    uint32_t num_lookups      # counted in a pool of several banks; wraps around
    uint32_t lost_interval    # one look-up in this number searches for checkpoints behind its hits
    int32_t num_shards        # shards of each bank; 0: there are no shards
    int32_t num_keys          # distinct pairs of key and group in the index
    int32_t num_entries       # pages with an entry
    int32_t sample_mask       # a page whose id has none of these bits is sampled
    int32_t num_held_free     # pages in the queue whose ref count a caller has set
    Counters counters
    int64_t num_dropped       # entries that were dropped
    int64_t num_reused        # free pages that left the queue without eviction
    int64_t num_unwatched     # pages that lost their WATCHED flag
    Journal journal
    Py_ssize_t tokens_width   # values for each page in `page_tokens`: the number of ids, and room for the ids
    Residency *residency
    Expectations expected
    Leases leases
    Sessions sessions
    Tenants tenants
    Dependents dependents
    uint32_t *children        # [num_pages] how runs went on from each cached page, see lineage.pxd; NULL: no states are kept
    Copies copies
    int64_t list_number       # number of the list of moves that is due: copies, loads and saves, which are taken together
    Tier *tier                # NULL: none
    AwaitedKeys *awaited      # of the waiting queues in front of the pool; NULL: there are none
    # These keep held pages before free ones with the same content; NULL: look-ups find the page cached first. Calls through
    # pointers keep the code of rings out of the loops that cache, hit and give back pages.
    void (*join_held_twin)(Pool *pool, Slot *slot, int32_t page_id) noexcept nogil
    void (*claim_twin)(Pool *pool, int32_t page_id) noexcept nogil
    void (*release_twins)(Pool *pool, const int32_t *ids, Py_ssize_t n, bint tail_first) noexcept nogil
    # Hears of each page that is about to lose its entry, and why; NULL in a pool where nobody asks.
    void (*hear_removal)(Pool *pool, int32_t page_id, uint32_t why) noexcept nogil
    Ghost departed            # keys that left the index last, see departures.pxd; `entries` NULL: not kept
    bint notes_leaving        # keys of pages that windows leave are among them


# Digests of 32 bytes: their lower halves are the keys, and the pool keeps the upper halves as well. `Pool.uppers` has three
# arrays of `num_pages` halves: for cached pages, for their parents, and for removed entries. Only a journal needs the last two.


cdef inline Digest *uppers_of_parents(const Pool *pool) noexcept nogil:
    return pool.uppers + pool.num_pages


cdef inline Digest *uppers_of_removed(const Pool *pool) noexcept nogil:
    return pool.uppers + 2 * <Py_ssize_t>pool.num_pages


cdef inline Digest upper_of(const Pool *pool, int32_t page_id) noexcept nogil:
    return pool.uppers[page_id] if pool.uppers != NULL else Digest(lo=0, hi=0)


cdef inline bint is_served(const Pool *pool, int32_t page_id) noexcept nogil:
    """Whether a policy ranks a page: it serves the first bank alone."""
    return page_id < pool.num_ranked


cdef inline bint is_free(const Pool *pool, int32_t page_id) noexcept nogil:
    return pool.pages[page_id].prev_free != NOT_FREE


cdef inline bint is_leased(const Pool *pool, int32_t page_id) noexcept nogil:
    return pool.leases.counts != NULL and pool.leases.counts[page_id] > 0


cdef inline bint is_kept(const Page *page) noexcept nogil:
    """Whether a page has an entry that stays when it leaves a window."""
    return page.group != NO_GROUP and page.group & KEPT


cdef inline int32_t count_plain_parts(const Pool *pool) noexcept nogil:
    """Count the parts for pages without a term: a blank part, and a part of cached pages, or those of the policy. A pool of
    several banks has as many parts as there are classes of checkpoints, too.
    """
    if pool.num_banks > 1:
        return max(<int32_t>NUM_PARTS, NEW + NUM_CHECKPOINT_CLASSES)
    return NUM_PARTS if pool.policy != NULL else NEW + 1


cdef inline Py_ssize_t num_slots_of(const Pool *pool) noexcept nogil:
    return <Py_ssize_t>pool.mask + 1 if pool.slots != NULL else 0


cdef inline Digest digest_of(const Page *page) noexcept nogil:
    return Digest(lo=page.key_lo, hi=page.key_hi)


cdef inline int64_t count_changes(const Pool *pool) noexcept nogil:
    """Count how often an entry came into, or left, the prefix index or the tier's index."""
    cdef int64_t count = pool.counters.num_cached_pages + pool.num_dropped
    if pool.tier != NULL:
        count += pool.tier.pool.counters.num_cached_pages + pool.tier.pool.num_dropped
    return count


cdef inline int64_t count_given_back(const Pool *pool) noexcept nogil:
    """Count how often a page ever entered the free queue, up to a constant."""
    return pool.num_free + pool.counters.num_allocated_pages + pool.num_reused
