# The records of a pool, and the links between them. The caller holds the store's lock and passes page ids within the pool.
#
# A pool of `num_pages` pages is one array of `Page` records, indexed by page id. Always:
#
# * Record 0 is the null page. It is never handed out, and its links close the free queue into a ring: `next_free` is the page
#   that is evicted first, `prev_free` the one that was freed last. With parts more records stand behind those of the pages.
# * A page is in the free queue exactly when its ref count is 0; outside it both links are `NOT_FREE`.
# * A page has a prefix entry exactly when `group` is not `NO_GROUP`.
# * A page with a term, which says when it is expected back, has a prefix entry.
# * A leased page has a reference for each lease, and is outside the free queue.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t, uint8_t

from pagepool.core.base.limits cimport NEVER, UNKNOWN
from pagepool.core.base.siphash cimport Digest
from pagepool.core.pool.policy cimport NEW, NUM_PARTS, Policy

cdef enum:
    NULL_PAGE = 0
    NOT_FREE = -1             # links of a page outside the free queue
    NO_GROUP = -1             # group of a page without a prefix entry
    NOT_NEW = -1              # links of a page whose key was taken from the journal, or is not in it
    NOT_FIRST = -1            # links of a page that has a twin in its shard that was cached before
    TWIN = 1 << 30            # flag in Page.group: other pages have the same content
    WATCHED = 1 << 29         # flag in Page.group: a refused request hits the page
    KEPT = 1 << 28            # flag in Page.group: it stays cached when it leaves a window
    FLAGS = TWIN | WATCHED | KEPT
    NO_PART = -1
    SECOND = 16               # units of the clock of stamps
    NO_SESSION = 0
    SHARED = -1               # owner of a page that two sessions have used; less n: it was session n's until that was closed
    COMMON = 0                # tenant of all pages that belong to none
    MAX_TENANTS = 64          # with the common one
    NO_TENANT = 255           # of free pages without an entry
    NUM_BUCKETS = 24          # of times: below 1 ms, below 2, 4, ..., 2**22 ms, and longer

cdef struct Page:             # 32 bytes
    uint64_t key_lo           # digest of the content; meaningful while group is not NO_GROUP
    uint64_t key_hi
    int32_t ref_cnt           # holders; 0: free
    int32_t prev_free         # page ids; NOT_FREE outside the queue
    int32_t next_free
    int32_t group             # cache group of the prefix entry, with its flags; NO_GROUP: not cached

cdef struct Ranking:          # of pages that a request computes, by what a policy knows of their keys
    int32_t num_ranked        # pages up to the last of which it knew the key
    int32_t num_unseen        # sampled keys since then that it did not know

cdef struct Slot:             # one slot of the prefix index
    uint32_t tag              # hash of key and group; its low bits are the home slot
    int32_t page_id           # page cached first under the key; NULL_PAGE: empty

cdef struct Links:
    int32_t prev
    int32_t next

cdef struct Range:            # half-open range of page ids that may hit
    int32_t start
    int32_t stop

cdef struct Stay:             # of a sampled page, in nanoseconds of the residency clock
    int64_t start             # when it was handed out
    int64_t last_use          # then, or when it was last hit

cdef struct Histogram:        # of times
    int64_t counts[NUM_BUCKETS]
    int64_t sum               # ns

cdef struct Residency:        # how long pages stay; sampled
    Stay *stays               # [num_pages / interval + 1]
    int32_t shift             # every 2**shift-th page is sampled
    Histogram lifetimes       # from when a page was handed out to when it was evicted
    Histogram idle_times      # from its last use to then
    Histogram reuse_gaps      # from use to use

cdef struct Origin:           # how a cached page came to be
    Digest parent             # key of the page before it in its request
    int32_t place             # in its request, in pages; 0: it has no parent
    int32_t context           # extra keys and session of its request, see `EntryJournal.add_context`; 0: neither

cdef struct Note:             # 32 bytes
    Origin origin             # of a cached page
    Links new                 # ring of the first pages of new keys, closed by the null page; NOT_NEW outside

cdef struct Removal:          # an entry that went
    Digest key
    int32_t group

cdef struct Context:
    int32_t num_users         # cached pages and rows that have it
    int32_t num_holders       # callers that want it kept as well

cdef struct Journal:          # keys that entered and left the prefix index since the changes were taken last
    Note *notes               # [num_pages]; NULL: there is no journal
    Removal *removed          # [num_pages] keys that are gone, and were there when the changes were taken last
    Context *contexts         # [num_contexts], and room up to the next power of 2
    int32_t num_contexts      # the first stands for none
    int32_t num_new
    int32_t num_removed
    uint8_t is_cleared        # all entries went at once; nothing is in `removed` then
    uint8_t is_told           # taken changes are being made into events: names and contexts are still needed

cdef struct PageCopy:
    int32_t src               # page ids
    int32_t dst
    int32_t group

cdef struct Copies:           # that are due before the next step; each has a reference to its source
    PageCopy *items           # [num], and room for `capacity`
    Py_ssize_t num
    Py_ssize_t capacity
    uint32_t list_number      # of this list: moves when the first copy is queued after they were taken

cdef struct Outcomes:         # pages that had a term, other than `NEVER`, by what came of it
    int64_t num_pages_in_time  # used before it was over
    int64_t num_late_pages    # used later
    int64_t num_unused_pages  # lost their entry

cdef struct Expectations:     # when pages are expected back
    uint32_t *stamps          # [num_pages] when a free page was released, or given its term; NULL: none was expected yet
    uint8_t *terms            # [num_pages] behind that; UNKNOWN for most
    int32_t num_free[NEVER + 1]  # pages by term
    uint32_t free_terms       # bit n: free pages have term n
    int64_t fixed_time        # that a test has set; 0: the clock's
    Outcomes outcomes

cdef struct Session:          # or the rows and requests of a tenant in one, or in none
    int32_t first             # of its pages; NULL_PAGE: it has none
    int32_t num_pages
    int32_t num_closed        # pages that were its own until it was closed
    int32_t num_holders       # rows, requests, and callers that are about to make some; of all its tenants
    int32_t main              # number of the session that has the pages, perhaps itself; NO_SESSION: none has
    uint8_t tenant            # to which the pages of rows and requests are charged

cdef struct Sessions:         # see `owners.pxd`
    Links *links              # [num_pages] rings of the pages of a session; NULL: there were none
    int32_t *owners           # [num_pages] behind that: numbers of sessions
    Session *items            # [num], and room for `capacity`; the first stands for none
    int32_t num
    Py_ssize_t capacity
    int32_t num_live

cdef struct Tenants:          # see `owners.pxd`
    uint8_t *of_pages         # [num_pages] behind `Expectations.terms`; NULL: no shares were set
    int32_t num_charged[MAX_TENANTS]  # pages that are held or cached
    int32_t num_free[MAX_TENANTS]  # of them, in the queue
    double shares[MAX_TENANTS]  # of the pool; 0: none, nothing is charged to it

cdef struct LeasedSpan:       # of pages, by page ids or as a span of tokens
    const int32_t *ids        # [num]
    Py_ssize_t num
    int64_t end               # of a lease of a span that is held, on the clock of stamps; 0 for others
    LeasedSpan *next          # the next one of a span that is held
    uint8_t has_begun
    uint8_t is_held

cdef struct Leases:
    int32_t *counts           # [num_pages] references of leases; NULL: there were none
    LeasedSpan *first         # of spans
    int64_t num_pages         # of spans, each page once for each lease
    int64_t next_end          # no lease ends before
    int32_t num_ended         # leases that ended by themselves since they were listed last

cdef struct Transfer:         # of a page between a pool and its tier
    Digest key                # of the page
    int64_t number            # of the list that it was taken with; 0: it is due
    int32_t page_id           # in the pool
    int32_t tier_id           # in the tier
    int32_t group             # of the prefix entry
    bint is_load              # from the tier
    bint is_void              # it has no key, or its entries were dropped meanwhile

cdef struct FreshPage:        # a page that was cached
    int32_t page_id
    uint32_t number           # of times that pages were

ctypedef uint8_t Fill         # how a save into a page of the tier went

cdef enum:
    FILLED = 0                # it completed
    FILLING = 1               # it did not end yet
    UNFILLED = 2              # it failed

cdef enum:                    # in place of a number of a `FreshPage`
    UNSAVED = 0
    SAVED = 1                 # it was, or is to be, and a tier that evicts it does not get it again

cdef struct Pool

cdef struct TierCounters:     # see `Counters`
    int64_t num_saved_pages   # by transfers that completed, as the next one
    int64_t num_loaded_pages
    int64_t num_failed_pages  # whose transfer failed
    int64_t num_refused_pages  # that found no room in the tier

cdef struct Tier:             # a second pool behind a pool, with pages under the same keys
    Pool *pool
    Transfer *items           # [num] due ones and those in flight, and room for `capacity`
    Py_ssize_t num
    Py_ssize_t capacity
    Py_ssize_t num_due
    int64_t last_number       # of a list that was taken
    int64_t oldest_load       # number of the first list with loads in flight, or due; INT64_MAX: none
    int64_t *loading          # [num_pages] number of the list by which a page of the pool is loaded; 0 for most
    int64_t last_forked       # of a list by which a page was loaded when a fork copied it
    uint8_t *uses             # [num_pages] times that a cached page was used, up to `min_uses`; NULL: that is 1
    uint8_t min_uses          # of a page that is worth saving
    Fill *fills               # [pages of the tier]
    Py_ssize_t num_swapped    # rows with pages in the tier
    uint32_t *fresh_numbers   # [num_pages] of each page that was cached; NULL unless the tier writes through
    uint32_t num_cached       # pages, ever
    FreshPage *fresh          # [num_fresh] that are to be saved, and room for `fresh_capacity`
    Py_ssize_t num_fresh
    Py_ssize_t num_ready      # of them, first ones that a step has computed
    Py_ssize_t fresh_capacity
    TierCounters counters
    # Has a page of the pool saved that is about to be evicted. Called by these pointers, both stay out of the loops that take
    # and enter pages.
    void (*save_evicted)(Pool *pool, int32_t page_id) noexcept nogil
    # Records that a page of the pool was given an entry.
    void (*record_cached)(Pool *pool, int32_t page_id) noexcept nogil

cdef struct Counters:         # since construction. `PageStore.counters`, snapshots and stats have the fields under these names
    int64_t num_allocated_pages
    int64_t num_freed_pages
    int64_t num_evicted_pages
    int64_t num_cached_pages
    int64_t num_queried_tokens
    int64_t num_hit_tokens

cdef struct Pool:
    Page *pages
    Slot *slots               # NULL: no prefix caching
    Links *twins              # rings of pages with the same content, valid while TWIN is set
    Links *shard_links        # free queue of each shard, see `end_of_queue`; NULL: no shards yet
    int32_t *shard_num_free   # [num_shards] behind them
    Policy *policy            # NULL: the page that was released first is evicted first, unless terms say otherwise
    int32_t num_parts         # of the queues; 0 without a policy, expectations and shares, unless blank pages go first
    int32_t num_parts_each    # of each tenant's; of all without shares
    bint is_divided           # whether there are shards or parts
    int32_t *shard_newest     # [num_shards, NUM_PARTS] behind that: pages that a policy remembers; with a policy only
    Links *shard_twins        # behind that: rings of the twins in each shard; NULL without shards, and without caching
    Links *shard_firsts       # behind that: rings of the first of each shard; NOT_FIRST for the others
    int32_t *page_tokens      # [num_pages, tokens_width] tokens of cached pages, their number first; NULL: not kept
    Py_ssize_t tokens_width
    uint64_t multiplier       # odd and secret: which slots collide cannot be foreseen
    uint32_t mask             # slots - 1
    uint32_t home_shift       # of a tag, to where a look-up begins
    int32_t num_pages
    int32_t num_free
    int32_t num_shards        # 0: no shards yet
    int32_t pages_per_shard
    int32_t num_keys          # distinct (key, group) in the index
    int32_t num_entries       # pages with an entry
    int32_t sample_mask       # of page ids: 0 for those that are sampled
    int32_t num_held_free     # pages in the queue that were given a reference
    Counters counters
    int64_t num_dropped       # prefix entries
    int64_t num_reused        # free pages that were taken out of the queue as they are
    int64_t num_unwatched     # pages that lost their WATCHED flag
    Journal journal
    Residency *residency
    uint8_t is_restored       # loaded from a snapshot, and no reference taken since
    Expectations expected
    Leases leases
    Sessions sessions
    Tenants tenants
    Copies copies
    Tier *tier                # NULL: none


cdef inline void link_after(Links *links, int32_t last, int32_t page_id) noexcept nogil:
    """Put `page_id` behind `last` into its ring."""
    cdef int32_t following = links[last].next
    links[page_id].prev = last
    links[page_id].next = following
    links[last].next = page_id
    links[following].prev = page_id


cdef inline void unlink(Links *links, int32_t page_id) noexcept nogil:
    links[links[page_id].prev].next = links[page_id].next
    links[links[page_id].next].prev = links[page_id].prev


cdef inline int32_t shard_of(const Pool *pool, int32_t page_id) noexcept nogil:
    return page_id // pool.pages_per_shard


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
    """Count the parts of pages without a term, in a pool that is divided by terms, or will be: those of the policy, or a
    blank one and one of cached pages.
    """
    return NUM_PARTS if pool.policy != NULL else NEW + 1


cdef inline Py_ssize_t num_slots_of(const Pool *pool) noexcept nogil:
    return <Py_ssize_t>pool.mask + 1 if pool.slots != NULL else 0


cdef inline Digest digest_of(const Page *page) noexcept nogil:
    return Digest(page.key_lo, page.key_hi)


cdef inline int64_t count_changes(const Pool *pool) noexcept nogil:
    """Entries that came into the prefix index, or that of the tier, and that went. It never gets less."""
    cdef int64_t count = pool.counters.num_cached_pages + pool.num_dropped
    if pool.tier != NULL:
        count += pool.tier.pool.counters.num_cached_pages + pool.tier.pool.num_dropped
    return count


cdef inline Range ids_in_shard(const Pool *pool, int32_t shard) noexcept nogil:
    """The ids of a shard; -1 means the whole pool."""
    if shard < 0:
        return Range(0, pool.num_pages)
    return Range(shard * pool.pages_per_shard, (shard + 1) * pool.pages_per_shard)


cdef inline int32_t count_pages_in(const Pool *pool, int32_t shard) noexcept nogil:
    """Count the pages of a shard, or with -1 of the pool, held or not, without the null page."""
    cdef Range ids = ids_in_shard(pool, shard)
    return ids.stop - max(1, ids.start)


cdef inline Py_ssize_t count_queue_links(const Pool *pool, Py_ssize_t num_shards) noexcept nogil:
    """Links of the queues of shards: those of the pages, of the end of each queue, and of its parts."""
    return pool.num_pages + num_shards * (1 + pool.num_parts)


cdef inline Py_ssize_t count_remembered(const Pool *pool, Py_ssize_t num_shards) noexcept nogil:
    """Links in the place of which `shard_newest` is, two ids in each."""
    return num_shards * NUM_PARTS // 2 if pool.policy != NULL else 0
