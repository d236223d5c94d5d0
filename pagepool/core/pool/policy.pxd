# The adaptive policy. It learns at which age pages of each part are used again, and evicts the page that promises the fewest
# hits per unit of time. That unit is the epoch: the time in which a sixteenth of the pool's pages enter the queue.
#
# For each part and bucket of ages it counts the pages that are used again: all queued pages, and a sample of the evicted ones.
# The value of an age is the highest rate of hits to be had by keeping a page until some later age, an index like that of
# Gittins (Bandit Processes and Dynamic Allocation Indices, 1979). Three parts follow the blank one: pages used once; pages used
# again that least-recently-used (LRU) eviction would have kept; pages used again that LRU would have lost.
#
# Each page has a mark. Its lowest 2 bits name the page's part or, for a held page, the part that it will be put into. For a
# free page the other bits are the stamp of the call that released it. The ghost remembers keys of evicted pages.
#
# Always: pages without an entry are in the blank part, and marks of that part are `BLANK`. A key is in the ghost at most once,
# in the set that its tag leads to. `epoch` is `num_released // epoch_pages`. The counts and values pass `is_right`.

from libc.math cimport pow
from libc.stdint cimport INT64_MAX, UINT32_MAX, int32_t, int64_t, uint32_t, uint64_t, uint8_t
from libc.string cimport memmove, memset

from pagepool.core.base cimport CACHE_LINE, Digest, raw_calloc, raw_free

cdef enum:
    BLANK = 0                 # part of pages without an entry: they are evicted first
    NEW = 1                   # part of pages used once
    AGAIN = 2                 # part of pages used again in time
    LATE = 3                  # part of pages used again after LRU would have lost them
    PART = 3                  # mask of a mark's bits
    NUM_PARTS = 4
    NUM_CLASSES = 3           # parts except the blank one
    NUM_AGES = 14             # buckets
    HORIZON = 128             # epochs; older pages are not counted
    NUM_EPOCHS = 256          # ring of counted epochs: a power of 2
    LAST_COUNTED = NUM_EPOCHS - 1
    EPOCHS_A_POOL = 16
    FIRST_HAZARD = 6          # prior: percent of pages used again at the first age
    MARGIN = 70               # a page is evicted in place of LRU's choice if its value is below this percentage of the choice's
    HALF_LIFE = 64            # epochs in which counts lose half of their weight
    HALF_LIFE_REQUESTS = 512  # requests that must also have come before counts lose half of their weight
    REQUESTS_A_WEIGHT = 4     # a prior weighs as much as the pages of this many requests
    REGRET_A_POOL = 12        # LRU takes over for a while once it would have had num_pages / 12 more hits
    MAX_PAUSE = 64            # longest pause: LRU decides until 64 times the pool's pages are released
    KNOWN_SHARE = 75          # a request continues an earlier one if the policy knows this percentage of its pages
    MAX_VALUE = 2             # value of a page that is surely used again within an epoch
    STAMP_SHIFT = 2           # a mark is part, call and epoch, from the lowest bits up
    EPOCH_SHIFT = 18
    LAST_CALL = (1 << 16) - 1
    LAST_EPOCH = (1 << 14) - 1
    SAMPLE_INTERVAL = 8       # the ghost remembers one key in this many: a power of 2
    GHOST_SIZE = 6            # the ghost samples this many pool sizes of evicted pages; a smaller one forgets keys too early
    SET_SIZE = 8              # entries in a set of the ghost
    NUM_POLICY_COUNTS = 8     # int64 counts from `Policy.num_in_part` on
    EVICTED = 0               # bit of a mark in a bank's ghost, of a page that was evicted
    DROPPED = 1               # the same bit, of a checkpoint whose keys and values were evicted

cdef struct GhostEntry:       # an evicted page
    uint32_t tag              # hash of its key and group; 0: empty
    uint32_t mark             # its last mark in the queue

cdef struct Ghost:            # keys of the pages evicted last, in sets, each first in, first out
    GhostEntry *entries       # [num_sets, SET_SIZE], each set in a cache line
    void *memory              # the allocation around `entries`
    uint32_t num_sets

cdef struct Decision:         # the pages to evict until a page is hit, or a page with another mark comes up
    int32_t part              # BLANK: no decision
    int32_t shard
    bint is_newest            # True: pages of the latest release, in its order; False: the oldest pages
    uint32_t mark

cdef struct Learned:
    int64_t num_released      # pages put into the queue
    int64_t epoch
    int64_t call              # number of the call within the epoch
    int64_t num_requests_then  # `num_requests` when the epoch began
    int64_t alive[NUM_CLASSES][NUM_EPOCHS]  # pages released in an epoch and not used since
    double exposed[NUM_CLASSES][NUM_AGES]  # pages that reached an age
    double reused[NUM_CLASSES][NUM_AGES]  # pages used again at an age
    double values[NUM_CLASSES][NUM_AGES]
    int64_t lru_age           # age in epochs at which LRU would have lost a page
    int64_t regret            # hits that LRU would have had, less the actual ones; at least 0
    int64_t pause             # length of the last pause: LRU decided while this many times `num_pages` pages were released
    int64_t paused_until      # LRU decides while `num_released` is below this
    Decision decision

cdef struct Policy:
    uint32_t *marks           # [num_pages]
    Ghost ghost
    int64_t num_in_part[NUM_PARTS]  # free pages without a term, by part; this and the next four fields are copied together
    int64_t num_requests      # requests that took pages
    int64_t num_shared_hits   # hits on held pages
    int64_t num_free_hits
    int64_t num_lru_hits      # estimated hits of LRU on free pages
    Learned learned
    int64_t num_pages
    int64_t epoch_pages       # length of an epoch, in released pages
    int32_t edges[NUM_AGES + 1]  # epochs at which the buckets of ages begin: 0 1 2 3 4 6 8 12 16 24 ... 96, and the horizon
    uint8_t buckets[HORIZON]  # bucket of each age in epochs
    int32_t first_part        # first part of the tenant that the decision is about
    int32_t newest[NUM_PARTS]  # first page that the latest release put into each part, while it is there


# The ghost: a sample of the evicted keys.


cdef inline uint64_t hash_key(Digest key, int32_t group) noexcept nogil:
    """Return the hash of a key and group. It is the same in each process, and so are a policy's choices."""
    cdef uint64_t word = key.lo ^ key.hi * <uint64_t>0x9E3779B97F4A7C15 ^ <uint64_t>(group + 1) * <uint64_t>0xC2B2AE3D27D4EB4F
    word = (word ^ word >> 32) * <uint64_t>0xD6E8FEB86659FD93
    word = (word ^ word >> 32) * <uint64_t>0xD6E8FEB86659FD93
    return word ^ word >> 32


cdef inline bint is_sampled(uint64_t word) noexcept nogil:
    """Whether the ghost remembers keys with this hash."""
    return word & (SAMPLE_INTERVAL - 1) == 0


cdef inline uint32_t _tag_in_ghost(uint64_t word) noexcept nogil:
    return <uint32_t>(word >> 32) or 1


cdef inline GhostEntry *set_of(const Ghost *ghost, uint32_t tag) noexcept nogil:
    return ghost.entries + SET_SIZE * (<uint64_t>tag * ghost.num_sets >> 32)


cdef inline GhostEntry *find_ghost(const Ghost *ghost, uint64_t word) noexcept nogil:
    """Return the entry of a key, or NULL."""
    cdef uint32_t tag = _tag_in_ghost(word)
    cdef GhostEntry *entries = set_of(ghost, tag)
    cdef Py_ssize_t i
    for i in range(SET_SIZE):
        if entries[i].tag == tag:
            return &entries[i]
    return NULL


cdef inline void remember(Ghost *ghost, uint64_t word, uint32_t mark) noexcept nogil:
    """Add a key as the newest of its set. It replaces its own entry, if an earlier eviction left one; else it takes the first
    gap; else it replaces the oldest entry.
    """
    cdef uint32_t tag = _tag_in_ghost(word)
    cdef GhostEntry *own = find_ghost(ghost, word)
    cdef GhostEntry *entries = set_of(ghost, tag)
    cdef Py_ssize_t i = 0 if own == NULL else own - entries
    while own == NULL and i < SET_SIZE - 1 and entries[i].tag:
        i += 1
    memmove(entries + 1, entries, i * sizeof(GhostEntry))
    entries[0] = GhostEntry(tag=tag, mark=mark)
    assert find_ghost(ghost, word) == entries


cdef inline bint make_ghost(Ghost *ghost, double num_entries) noexcept nogil:
    """Allocate an empty ghost for about `num_entries` keys; False if memory is short."""
    cdef double size_in_sets = num_entries / SET_SIZE
    ghost.num_sets = 1 + <uint32_t>min(<double>(UINT32_MAX - 1), size_in_sets)
    ghost.memory = raw_calloc(<size_t>ghost.num_sets * SET_SIZE * sizeof(GhostEntry) + CACHE_LINE, 1)
    ghost.entries = <GhostEntry *>(<char *>ghost.memory + CACHE_LINE - <size_t>ghost.memory % CACHE_LINE)
    return ghost.memory != NULL


cdef inline void clear_ghost(Ghost *ghost) noexcept nogil:
    if ghost.entries != NULL:
        memset(ghost.entries, 0, <size_t>ghost.num_sets * SET_SIZE * sizeof(GhostEntry))


cdef inline bint has_left(const Ghost *ghost, Digest key, int32_t group, uint32_t mark) noexcept nogil:
    """Whether a bank's ghost, if it has entries, remembers a key as EVICTED or DROPPED."""
    cdef const GhostEntry *entry = find_ghost(ghost, hash_key(key, group)) if ghost.entries != NULL else NULL
    return entry != NULL and entry.mark & DROPPED == mark


cdef inline uint32_t _stamp_of(const Policy *policy) noexcept nogil:
    """Return the stamp of pages that are released now."""
    return <uint32_t>(policy.learned.epoch & LAST_EPOCH) << EPOCH_SHIFT | <uint32_t>policy.learned.call << STAMP_SHIFT


cdef inline int64_t _epochs_since(const Policy *policy, uint32_t mark) noexcept nogil:
    return (policy.learned.epoch - (mark >> EPOCH_SHIFT)) & LAST_EPOCH


cdef inline int32_t _bucket_of(const Policy *policy, int64_t age) noexcept nogil:
    return policy.buckets[age] if age < HORIZON else NUM_AGES - 1


cdef inline uint32_t age_of(const Policy *policy, uint32_t mark) noexcept nogil:
    """Return the time since a page was released, as a number fit only for comparisons."""
    return _stamp_of(policy) - (mark & ~<uint32_t>PART)


cdef inline double value_of(const Policy *policy, uint32_t mark) noexcept nogil:
    assert mark & PART != BLANK
    return policy.learned.values[(mark & PART) - 1][_bucket_of(policy, _epochs_since(policy, mark))]


# Learning.

cdef inline void _rate_ages(Policy *policy) noexcept nogil:
    """Compute the value of each age from counts. An age's prior is the rate of all parts, smoothed with the prior before it."""
    cdef double[NUM_AGES] prior
    cdef double num_reused, num_exposed, weight = 1
    cdef Py_ssize_t c, j
    if policy.learned.num_released:
        weight = REQUESTS_A_WEIGHT * <double>policy.learned.num_released / <double>max(<int64_t>1, policy.num_requests)
    for j in range(NUM_AGES):
        num_reused = num_exposed = 0
        for c in range(NUM_CLASSES):
            num_reused += policy.learned.reused[c][j]
            num_exposed += policy.learned.exposed[c][j]
        prior[j] = (num_reused + weight * (prior[j - 1] if j else <double>FIRST_HAZARD / 100)) / (num_exposed + weight)
        prior[j] = min(1.0, prior[j])
    for c in range(NUM_CLASSES):
        _rate_class(policy, c, prior, weight)


cdef inline void _rate_class(Policy *policy, Py_ssize_t c, const double *prior, double weight) noexcept nogil:
    cdef double[NUM_AGES] hazard
    cdef double hits, time, surviving, best
    cdef Py_ssize_t j, start
    for j in range(NUM_AGES):
        hazard[j] = min(1.0, (policy.learned.reused[c][j] + weight * prior[j]) / (policy.learned.exposed[c][j] + weight))
    for start in range(NUM_AGES):
        hits = time = best = 0
        surviving = 1
        for j in range(start, NUM_AGES):
            hits += surviving * hazard[j]
            time += surviving * (policy.edges[j + 1] - policy.edges[j]) * (1 - hazard[j] / 2)
            surviving *= 1 - hazard[j]
            best = max(best, hits / time)
        policy.learned.values[c][start] = best


cdef inline void free_policy(Policy *policy) noexcept nogil:
    if policy != NULL:
        raw_free(policy.marks)
        raw_free(policy.ghost.memory)
        raw_free(policy)


cdef inline Policy *make_policy(int32_t num_pages) noexcept nogil:
    """Make the policy of a pool whose queue is empty; NULL if memory is short."""
    cdef Policy *policy = <Policy *>raw_calloc(1, sizeof(Policy))
    cdef int32_t age, j, bucket = 0
    if policy == NULL:
        return NULL
    policy.marks = <uint32_t *>raw_calloc(num_pages, sizeof(uint32_t))
    if policy.marks == NULL or not make_ghost(&policy.ghost, <double>GHOST_SIZE * num_pages / SAMPLE_INTERVAL):
        free_policy(policy)
        return NULL
    policy.num_pages = num_pages
    policy.epoch_pages = max(EPOCHS_A_POOL, num_pages // EPOCHS_A_POOL)
    policy.learned.lru_age = HORIZON
    for j in range(NUM_AGES + 1):
        policy.edges[j] = j if j <= 4 else (2 if j % 2 == 0 else 3) << (j // 2 - 1)
    for age in range(HORIZON):
        bucket += age == policy.edges[bucket + 1]
        policy.buckets[age] = <uint8_t>bucket
    _rate_ages(policy)
    return policy


cdef inline void _begin_epoch(Policy *policy) noexcept nogil:
    """Begin an epoch: count, in each bucket of ages, the pages that reach it now."""
    cdef Py_ssize_t c, j
    cdef int64_t num_alive
    policy.learned.epoch += 1
    for c in range(NUM_CLASSES):
        policy.learned.alive[c][policy.learned.epoch & LAST_COUNTED] = 0
        for j in range(1, NUM_AGES):
            num_alive = policy.learned.alive[c][(policy.learned.epoch - policy.edges[j]) & LAST_COUNTED]
            policy.learned.exposed[c][j] += <double>max(<int64_t>0, num_alive)


cdef inline void _decay(Policy *policy, double epochs) noexcept nogil:
    """Let earlier counts weigh less."""
    cdef double requests = <double>(policy.num_requests - policy.learned.num_requests_then)
    cdef double share = pow(2.0, -min(epochs / HALF_LIFE, requests / HALF_LIFE_REQUESTS))
    cdef Py_ssize_t c, j
    assert 0 <= share <= 1
    for c in range(NUM_CLASSES):
        for j in range(NUM_AGES):
            policy.learned.exposed[c][j] *= share
            policy.learned.reused[c][j] *= share
    policy.learned.num_requests_then = policy.num_requests


cdef inline int64_t _find_lru_age(const Policy *policy, int64_t num_free) noexcept nogil:
    """Return the age in epochs at which LRU loses pages: the pages released since then and not used would fill the queue."""
    cdef int64_t age = 0, count = 0
    cdef Py_ssize_t c
    while age < HORIZON and age <= policy.learned.epoch:
        for c in range(NUM_CLASSES):
            count += policy.learned.alive[c][(policy.learned.epoch - age) & LAST_COUNTED]
        if count > num_free:
            break
        age += 1
    return age


cdef inline void count_release(Policy *policy, int64_t num_pages, int64_t num_free) noexcept nogil:
    """Count a call that is about to put pages into the queue. `num_free` pages are in it now."""
    cdef int64_t epoch = policy.learned.epoch
    policy.learned.num_released += num_pages
    policy.learned.call = min(policy.learned.call + 1, <int64_t>LAST_CALL)
    assert num_pages >= 0 and num_free >= 0
    if policy.learned.num_released // policy.epoch_pages == epoch:
        return
    policy.learned.call = 0
    policy.learned.decision.part = BLANK
    while policy.learned.num_released // policy.epoch_pages > policy.learned.epoch:
        _begin_epoch(policy)
    _decay(policy, <double>(policy.learned.epoch - epoch))
    _rate_ages(policy)
    policy.learned.lru_age = _find_lru_age(policy, num_free + num_pages)
    if REGRET_A_POOL * policy.learned.regret > policy.num_pages:
        policy.learned.pause = min(max(<int64_t>2, 2 * policy.learned.pause), <int64_t>MAX_PAUSE)
        policy.learned.paused_until = policy.learned.num_released + policy.learned.pause * policy.num_pages
        policy.learned.regret = 0
    assert is_right(policy)


cdef inline void stamp_page(Policy *policy, int32_t page_id, uint32_t part) noexcept nogil:
    """Mark a page with an entry that is being put into `part`, and count it as exposed and alive."""
    assert 0 < page_id < policy.num_pages and BLANK < part < NUM_PARTS
    policy.marks[page_id] = _stamp_of(policy) | part
    policy.learned.exposed[part - 1][0] += 1
    policy.learned.alive[part - 1][policy.learned.epoch & LAST_COUNTED] += 1


cdef inline uint32_t _count_reuse(Policy *policy, uint32_t mark, int64_t weight, bint is_hit) noexcept nogil:
    """Count the reuse of a page with this mark, and return the page's new part."""
    cdef int64_t age = _epochs_since(policy, mark)
    cdef Py_ssize_t c = (mark & PART) - 1
    cdef bint is_in_time = age < policy.learned.lru_age
    assert mark & PART != BLANK
    policy.num_lru_hits += weight * is_in_time
    policy.learned.regret = max(<int64_t>0, policy.learned.regret + weight * (is_in_time - is_hit))
    if age < HORIZON:
        policy.learned.reused[c][_bucket_of(policy, age)] += <double>weight
        policy.learned.alive[c][(policy.learned.epoch - age) & LAST_COUNTED] -= weight
    return AGAIN if is_in_time else LATE


cdef inline void count_demand(Policy *policy, uint32_t mark) noexcept nogil:
    """Count the demand for a queued page with this mark. The page stays in the queue."""
    cdef int64_t age = _epochs_since(policy, mark)
    if mark != BLANK and age < HORIZON:
        policy.learned.reused[(mark & PART) - 1][_bucket_of(policy, age)] += 1


cdef inline void pass_part(Policy *policy, int32_t page_id, uint32_t part) noexcept nogil:
    """Mark a held page for the part of its request, if it is marked NEW and that part is a later one."""
    assert part < NUM_PARTS
    if part > NEW and policy.marks[page_id] & PART == NEW:
        policy.marks[page_id] = part


cdef inline void record_hit(Policy *policy, int32_t page_id, bint was_free) noexcept nogil:
    """Mark a page that was hit. If it `was_free`, it has left the queue."""
    cdef uint32_t *mark = &policy.marks[page_id]
    if was_free:
        policy.learned.decision.part = BLANK
        mark[0] = _count_reuse(policy, mark[0], 1, True) if mark[0] != BLANK else <uint32_t>AGAIN
    else:
        mark[0] = AGAIN


cdef inline uint32_t recall(Policy *policy, uint64_t word) noexcept nogil:
    """Forget a sampled key that is cached again, and return its page's part; BLANK if the ghost does not have the key."""
    cdef GhostEntry *entry = find_ghost(&policy.ghost, word)
    if entry == NULL:
        return BLANK
    entry.tag = 0
    assert find_ghost(&policy.ghost, word) == NULL and entry.mark & PART != BLANK
    return _count_reuse(policy, entry.mark, SAMPLE_INTERVAL, False)


cdef inline void discount(Policy *policy, int32_t page_id) noexcept nogil:
    """Stop counting a queued page that is about to be uncached without eviction, or queued anew."""
    cdef uint32_t mark = policy.marks[page_id]
    cdef int64_t age = _epochs_since(policy, mark)
    if mark != BLANK and age < HORIZON:
        policy.learned.alive[(mark & PART) - 1][(policy.learned.epoch - age) & LAST_COUNTED] -= 1


cdef inline bint is_right(const Policy *policy) noexcept nogil:
    """Whether the learned values can be real."""
    cdef const Learned *learned = &policy.learned
    cdef bint is_fine = learned.num_released >= 0 and learned.epoch == learned.num_released // policy.epoch_pages
    cdef int64_t most = INT64_MAX // 8  # sums of counts must not overflow
    cdef Py_ssize_t c, j
    is_fine &= 0 <= learned.call <= LAST_CALL and 0 <= learned.lru_age <= HORIZON and learned.regret >= 0
    is_fine &= 0 <= learned.num_requests_then <= policy.num_requests and learned.paused_until >= 0
    is_fine &= 0 <= learned.pause <= MAX_PAUSE and BLANK <= learned.decision.part <= PART
    is_fine &= learned.decision.shard >= -1  # the pool may have had more shards then
    for c in range(NUM_CLASSES):
        for j in range(NUM_AGES):  # NaN fails these comparisons
            is_fine &= 0 <= learned.values[c][j] <= MAX_VALUE
            is_fine &= 0 <= learned.exposed[c][j] <= most and 0 <= learned.reused[c][j] <= most
        for j in range(NUM_EPOCHS):
            is_fine &= -most <= learned.alive[c][j] <= most
    return is_fine
