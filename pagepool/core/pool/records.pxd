# The records of a pool, and the links between them. The caller holds the store's lock and passes page ids within the pool.
#
# A pool of `num_pages` pages is one array of `Page` records, indexed by page id. A queue with parts has one more record before
# each part; these follow the records of the pages. Always:
#
# * Record 0 is the null page, which is never handed out. Its links close the free queue into a ring: `next_free` is the front,
#   which without parts is evicted first, and `prev_free` the back.
# * A page is in the free queue exactly when its ref count is 0; outside it both links are `NOT_FREE`. Only an engine that sets
#   `CachePage.ref_cnt` or edits the queue itself can break this; `num_held_free` counts its references to free pages.
# * A page has a prefix entry exactly when `group` is not `NO_GROUP`.
# * A page with a term has a prefix entry.
# * A leased page has a reference for each lease, and is outside the free queue.
#
# If kinds of groups have pools of their own, the pages are divided into banks, one behind another. Each bank has a free queue,
# and a group takes pages of its bank alone. Ids of users count from 0 in each bank; the core uses places of records, and record
# 0 is the null page of all banks. A number names a queue: `-1 - b` the queue of bank `b`, so -1 the queue of a pool with one
# bank; `b * num_shards + s` the queue of shard `s` in bank `b`, so `s` in a pool with one bank. Always:
#
# * The first bank starts at record 1, the last stops at `num_pages`, and each starts where the one before it stops.
# * `num_free` of a pool is the sum of `num_free` of its banks, where it has several; a single bank's is not kept.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t, uint8_t

from pagepool.core.base cimport NEVER, UNKNOWN
from pagepool.core.pool.policy cimport *

cdef enum:
    NULL_PAGE = 0
    NOT_FREE = -1             # links of a page outside the free queue
    NO_GROUP = -1             # group of a page without a prefix entry
    NOT_NEW = -1              # links of a page outside the journal's ring of new keys
    NOT_FIRST = -1            # links of a page with an earlier twin in its shard
    TWIN = 1 << 30            # flag in Page.group: other pages have the same content
    WATCHED = 1 << 29         # flag in Page.group: a refused request hits the page
    KEPT = 1 << 28            # flag in Page.group: it stays cached when it leaves a window
    FLAGS = TWIN | WATCHED | KEPT
    NO_PART = -1
    NO_BANK = -1
    SECOND = 16               # ticks of the clock of stamps
    NO_SESSION = 0
    NOBODY = -1               # in place of a session: neither a row nor a request
    SHARED = -1               # owner of a page that two sessions used; SHARED - n: session n owned it until it was closed
    COMMON = 0                # tenant of pages that belong to no tenant
    MAX_TENANTS = 64          # the common one included
    NO_TENANT = 255           # a free page without an entry is charged to nobody
    MAX_BANKS = 4
    LOST_INTERVAL = 16        # `lost_interval` of a new pool
    NUM_BUCKETS = 24          # histogram buckets: below 1 ms, below 2, 4, ..., 2**22 ms, and longer

cdef struct Page:             # 32 bytes
    uint64_t key_lo           # digest of the content; valid while the page is cached
    uint64_t key_hi
    int32_t ref_cnt           # holders; 0: free
    int32_t prev_free         # page ids; NOT_FREE outside the queue
    int32_t next_free
    int32_t group             # cache group of the prefix entry, with its flags; NO_GROUP: not cached

cdef struct Ranking:          # how a policy ranked the pages that a request computes
    int32_t num_ranked        # leading pages, up to the last whose key the policy knew
    int32_t num_unseen        # sampled keys behind them, all unknown to the policy

cdef struct Slot:             # one slot of the prefix index
    uint32_t tag              # hash of key and group; its high bits are the home slot
    int32_t page_id           # page cached first under the key; NULL_PAGE: empty

cdef struct Links:
    int32_t prev
    int32_t next

cdef struct Range:            # half-open range of page ids or places
    int32_t start
    int32_t stop

cdef struct Ranges:           # pages that may hit, in each bank
    Range[MAX_BANKS] of_banks

cdef struct Bank:             # records from `start` on, before `stop`; the rest is kept where a pool has several
    int32_t start
    int32_t stop
    int32_t pages_per_shard   # ids in each shard, the null page of the first included; also in a single bank
    int32_t num_free
    int32_t num_entries
    int64_t num_allocated_pages
    int64_t num_evicted_pages
    int64_t num_lost_hit_tokens  # see `LostHits`; also kept where a pool has one bank, as the next two
    int64_t num_refusals      # calls that got no pages because the bank had too few
    int64_t num_passed_checkpoints  # states that did not become checkpoints, because no page was left
    Ghost ghost               # keys that were evicted last; no entries: not kept

cdef struct LostHits:         # tokens behind a hit that would have hit, too
    int32_t states_bank       # bank of states that lacks a checkpoint; NO_BANK: none does
    int64_t num_for_states    # up to the last checkpoint there that was evicted, within the hits of full attention
    int64_t num_for_pages     # up to the last checkpoint behind those; for one look-up in `lost_interval`, times this

cdef struct Stay:             # times of a sampled page in nanoseconds of the residency clock
    int64_t start             # when it was handed out
    int64_t last_use          # when it was last handed out or hit

cdef struct Histogram:        # durations by bucket
    int64_t counts[NUM_BUCKETS]
    int64_t sum               # ns

cdef struct Residency:        # how long sampled pages stay
    Stay *stays               # [num_pages / interval + 1]
    int32_t shift             # every 2**shift-th page is sampled
    Histogram lifetimes       # time between handing a page out and evicting it
    Histogram idle_times      # time between its last use and its eviction
    Histogram reuse_gaps      # time between two uses

cdef struct Origin:           # how a cached page came to be
    Digest parent             # key of the page before it in its request
    int32_t place             # index of the page in its request; 0: it has no parent
    int32_t context           # extra keys and session of the request, see `EntryJournal.add_context`; 0: neither

cdef struct Note:             # 32 bytes
    Origin origin             # how the page came to be, if it is cached
    Links new                 # ring of the first pages of new keys, closed by the null page; NOT_NEW outside

cdef struct Removal:          # an entry that left the index
    Digest key
    int32_t group

cdef struct Context:
    int32_t num_users         # cached pages and rows with this context
    int32_t num_holders       # callers that keep it as well

cdef struct Journal:          # keys that came and went since changes were last taken
    Note *notes               # [num_pages]; NULL: there is no journal
    Removal *removed          # [num_pages] keys that left since then
    Context *contexts         # [num_contexts], and room up to the next power of 2
    int32_t num_contexts      # context 0 stands for none
    int32_t num_new
    int32_t num_removed
    uint8_t is_cleared        # all entries were dropped at once, and `removed` is empty
    uint8_t is_told           # events are being made of taken changes, so names and contexts are still needed

cdef struct PageCopy:
    int32_t src               # page ids
    int32_t dst
    int32_t group

cdef struct Copies:           # copies due before the next step; each has a reference to its source
    PageCopy *items           # [num], and room for `capacity`
    Py_ssize_t num
    Py_ssize_t capacity
    bint is_between           # moves are taken next for a fork, or for a call that was refused, and begin no step

cdef struct Outcomes:         # pages whose term ended, except `NEVER`, by outcome
    int64_t num_pages_in_time  # used within the term
    int64_t num_late_pages    # used after it
    int64_t num_unused_pages  # uncached before any use

cdef struct Expectations:     # when pages are expected back
    uint32_t *stamps          # [num_pages] when a free page was released or got its term; NULL: no page was ever expected
    uint8_t *terms            # [num_pages] in the same memory; UNKNOWN for most
    int32_t num_free[NEVER + 1]  # free pages by term
    uint32_t free_terms       # bit n: free pages have term n
    int64_t fixed_time        # time fixed by a test; 0: use the clock
    Outcomes outcomes

cdef struct Session:          # a session, or the rows and requests of one tenant in a session or in none
    int32_t first             # the first of its pages; NULL_PAGE: it has none
    int32_t num_pages         # pages in its ring
    int32_t num_closed        # pages with the owner SHARED - n, where n is its number
    int32_t num_holders       # rows, requests, and callers about to make one, of all its tenants
    int32_t main              # number of the session that owns the pages, perhaps this one; NO_SESSION: none does
    uint8_t tenant            # tenant to which pages of its rows and requests are charged

cdef struct Sessions:         # see `owners.pxd`
    Links *links              # [num_pages] one ring of pages for each session; NULL: no session was ever named
    int32_t *owners           # [num_pages] in the same memory: number of the session, see `SHARED`
    Session *items            # [num], and room for `capacity`; item 0 stands for none
    int32_t num
    Py_ssize_t capacity
    int32_t num_live

cdef struct Tenants:          # see `owners.pxd`
    uint8_t *of_pages         # [num_pages] in the memory of `Expectations.stamps`; NULL: no shares were set
    int32_t num_charged[MAX_BANKS][MAX_TENANTS]  # pages that are held or cached
    int32_t num_free[MAX_BANKS][MAX_TENANTS]  # charged pages in the queue
    double shares[MAX_TENANTS]  # fraction of each bank; 0: nothing is charged to the tenant

cdef struct LeasedSpan:       # leased pages, given by page ids or as a span of tokens
    const int32_t *ids        # [num]
    Py_ssize_t num
    int64_t end               # when a held lease of a span ends, on the clock of stamps; 0 for all others
    LeasedSpan *next          # the next held lease of a span
    uint8_t has_begun
    uint8_t is_held

cdef struct Leases:
    int32_t *counts           # [num_pages] references of leases; NULL: no page was ever leased
    LeasedSpan *first         # list of the held leases of spans
    int64_t[MAX_BANKS] num_pages_in  # pages of these spans, by bank; a page counts once for each lease
    int64_t next_end          # no lease ends before this time
    int32_t num_ended         # leases that ended by themselves since they were last listed

cdef struct Dependents:       # checkpoints that lose their entries with the page of keys and values at their end
    int32_t group             # full attention, with pages in the first bank
    int32_t num               # 0: none
    int32_t *state_groups     # [num]

cdef struct Transfer:         # one page on its way between a pool and its tier
    Digest key                # digest of its content
    int64_t number            # list of moves with which it was taken; 0: it is due
    int32_t page_id           # page of the pool; the null page if it comes from storage
    int32_t tier_id           # page of the tier
    int32_t group             # group of the entry
    bint is_load              # it goes from the tier to the pool
    bint is_void              # its entries were dropped meanwhile

cdef struct FreshPage:        # a newly cached page of a tier that writes through
    int32_t page_id
    uint32_t number           # value of `Tier.num_cached` when it was cached

cdef enum:                    # values of `Tier.fresh_numbers` below all numbers of a `FreshPage`
    UNSAVED = 0
    SAVED = 1                 # saved or about to be; a tier that evicts it does not get it again

cdef struct Pool

cdef struct TierCounters:     # see `Counters`
    int64_t num_saved_pages   # completed saves
    int64_t num_loaded_pages
    int64_t num_failed_pages  # failed transfers
    int64_t num_refused_pages  # saves that found no room in the tier

# A second pool behind a pool, with pages under the same keys, and banks of the same numbers. Behind that stands storage outside
# the process, which has no pool: its `items` are pages of the tier to be stored, with the step of their arrival as `number`.
cdef struct Tier:
    Pool *pool                # NULL: storage
    Transfer *items           # [num] transfers in flight, then those that are due; room for `capacity`
    Py_ssize_t num
    Py_ssize_t capacity
    Py_ssize_t num_due
    int64_t num_fills         # lists that were filled from storage; they have negative numbers
    int64_t num_clears        # how often everything was dropped
    int64_t num_steps         # steps whose moves were taken; of storage, those since it was linked
    int64_t *arrivals         # storage: [pages of the tier] `num_steps` when each was cached
    int64_t oldest_load       # first list with unfinished loads; INT64_MAX: none
    int64_t *loading          # [num_pages] list that loads a page of the pool; 0 for most
    int64_t last_forked       # last list that was loading a page when a fork copied it
    uint8_t *uses             # [num_pages] uses of a cached page, up to `min_uses`; NULL: one use is enough
    uint8_t min_uses          # uses from which a page is worth saving
    uint32_t *fresh_numbers   # [num_pages] number of each cached page; NULL: the tier does not write through
    uint32_t num_cached       # pages ever cached; wraps around
    FreshPage *fresh          # [num_fresh] pages to be saved, and room for `fresh_capacity`
    Py_ssize_t num_fresh
    Py_ssize_t num_ready      # leading entries that were cached before the last list was taken
    Py_ssize_t fresh_capacity
    TierCounters counters
    # Saves a page that is about to be evicted. Calls through these two pointers keep the code of the tier out of the loops that
    # take and cache pages.
    void (*save_evicted)(Pool *pool, int32_t page_id) noexcept nogil
    # Records that a page of the pool was cached.
    void (*record_cached)(Pool *pool, int32_t page_id) noexcept nogil

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
    int32_t num_ranked        # a policy ranks the pages before this one: the first bank's; 0 without a policy
    int32_t num_parts         # parts of each queue; 0: blank pages do not go first, and there are no policy, terms or shares
    int32_t num_parts_each    # parts of each tenant; all parts if there are no shares
    bint is_divided           # there are several banks, shards or parts
    int32_t *shard_newest     # [num_shards, NUM_PARTS] in the same memory: as `Policy.newest`, for each shard of the first bank
    Links *shard_twins        # in the same memory: rings of the twins within each shard; NULL without shards or caching
    Links *shard_firsts       # in the same memory: ring of each shard's first twins; NOT_FIRST for the others
    int32_t *page_tokens      # [num_pages, tokens_width] number and ids of the tokens of cached pages; NULL: not kept
    Digest *uppers            # upper halves of digests; NULL: the keys are whole digests
    uint64_t multiplier       # odd and secret: nobody can choose keys that collide
    uint32_t mask             # number of slots - 1
    uint32_t home_shift       # shifts a tag to the slot where a look-up begins
    int32_t num_pages
    int32_t num_free
    int32_t num_banks
    Bank banks[MAX_BANKS]
    uint32_t num_lookups      # in a pool of several banks; wraps around
    uint32_t lost_interval    # one look-up in this number searches for checkpoints behind its hits
    int32_t num_shards        # 0: there are no shards; each bank is divided into as many
    int32_t num_keys          # distinct pairs of key and group in the index
    int32_t num_entries       # pages with an entry
    int32_t sample_mask       # a page whose id has none of these bits is sampled
    int32_t num_held_free     # pages in the queue to which a caller gave a reference
    Counters counters
    int64_t num_dropped       # entries that were dropped
    int64_t num_reused        # free pages that left the queue without eviction
    int64_t num_unwatched     # pages that lost their WATCHED flag
    Journal journal
    Py_ssize_t tokens_width   # ids of a page in `page_tokens`, and their number
    Residency *residency
    Expectations expected
    Leases leases
    Sessions sessions
    Tenants tenants
    Dependents dependents
    Copies copies
    int64_t list_number       # number of the list of moves that is due: copies, loads and saves. They are taken together
    Tier *tier                # NULL: none
    # Keep held pages before free ones with the same content; NULL: look-ups find the page cached first. Calls through these
    # pointers keep the code of rings out of the loops that cache, hit and give back pages.
    void (*join_held_twin)(Pool *pool, Slot *slot, int32_t page_id) noexcept nogil
    void (*claim_twin)(Pool *pool, int32_t page_id) noexcept nogil
    void (*release_twins)(Pool *pool, const int32_t *ids, Py_ssize_t n, bint tail_first) noexcept nogil


# Digests of 32 bytes: their lower halves are the keys, and the pool keeps the upper halves beside them. `Pool.uppers` has three
# arrays of `num_pages`: those of cached pages, of their parents, and of removed entries. Only a journal needs the last two.


cdef inline Digest *uppers_of_parents(const Pool *pool) noexcept nogil:
    return pool.uppers + pool.num_pages


cdef inline Digest *uppers_of_removed(const Pool *pool) noexcept nogil:
    return pool.uppers + 2 * <Py_ssize_t>pool.num_pages


cdef inline Digest upper_of(const Pool *pool, int32_t page_id) noexcept nogil:
    return pool.uppers[page_id] if pool.uppers != NULL else Digest(lo=0, hi=0)


cdef inline void link_after(Links *links, int32_t last, int32_t page_id) noexcept nogil:
    """Insert `page_id` into a ring, after `last`."""
    cdef int32_t following = links[last].next
    assert page_id != last and links[following].prev == last
    links[page_id].prev = last
    links[page_id].next = following
    links[last].next = page_id
    links[following].prev = page_id


cdef inline void unlink(Links *links, int32_t page_id) noexcept nogil:
    assert links[links[page_id].prev].next == page_id and links[links[page_id].next].prev == page_id
    links[links[page_id].prev].next = links[page_id].next
    links[links[page_id].next].prev = links[page_id].prev


cdef inline bint is_served(const Pool *pool, int32_t page_id) noexcept nogil:
    """Whether a policy ranks a page: it serves the first bank alone."""
    return page_id < pool.num_ranked


cdef inline bint is_free(const Pool *pool, int32_t page_id) noexcept nogil:
    return pool.pages[page_id].prev_free != NOT_FREE


cdef inline int32_t term_of(const Pool *pool, int32_t page_id) noexcept nogil:
    return pool.expected.terms[page_id] if pool.expected.terms != NULL else UNKNOWN


cdef inline bint is_leased(const Pool *pool, int32_t page_id) noexcept nogil:
    return pool.leases.counts != NULL and pool.leases.counts[page_id] > 0


cdef inline bint is_kept(const Page *page) noexcept nogil:
    """Whether a page has an entry that stays when it leaves a window."""
    return page.group != NO_GROUP and page.group & KEPT


cdef inline int32_t count_plain_parts(const Pool *pool) noexcept nogil:
    """Count the parts for pages without a term: those of the policy or, without one, a blank part and one of cached pages."""
    return NUM_PARTS if pool.policy != NULL else NEW + 1


cdef inline Py_ssize_t num_slots_of(const Pool *pool) noexcept nogil:
    return <Py_ssize_t>pool.mask + 1 if pool.slots != NULL else 0


cdef inline Digest digest_of(const Page *page) noexcept nogil:
    return Digest(lo=page.key_lo, hi=page.key_hi)


cdef inline int64_t count_changes(const Pool *pool) noexcept nogil:
    """Count the entries that ever came into or left the prefix index and that of the tier."""
    cdef int64_t count = pool.counters.num_cached_pages + pool.num_dropped
    if pool.tier != NULL:
        count += pool.tier.pool.counters.num_cached_pages + pool.tier.pool.num_dropped
    return count


cdef inline int64_t count_given_back(const Pool *pool) noexcept nogil:
    """Count the pages that ever came back into the free queue, but for a constant."""
    return pool.num_free + pool.counters.num_allocated_pages + pool.num_reused
