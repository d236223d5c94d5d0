# The adaptive policy: it learns at which age pages of each part are used again, and evicts the page from which it expects the
# fewest hits a page and time. Its unit of time is the epoch, a sixteenth of the pool's pages put into the queue.
#
# It counts, in buckets of ages and for each part, the pages in the queue that are used again, and a sample of those that were
# evicted. The value of an age is the highest rate of hits that keeping a page to any later age gives, an index like that of
# Gittins (Bandit Processes and Dynamic Allocation Indices, 1979). Beside the blank part there are three: pages that were used
# once, and pages used again, when least-recently-used (LRU) eviction would have kept them, or would have lost them.
#
# Each page has a mark: its part in the lowest 2 bits, and, while it is free, the stamp of the call that released it behind
# that. A held page's mark names the part that it will be put into. Pages without an entry are in the blank part, and marks of
# that part are `BLANK`. The ghost remembers keys of evicted pages: each stands once, in the set that its tag leads to. A
# snapshot has the marks, the ghost, the counts and what was learned, so a loaded pool evicts what the saved one would have.

from libc.math cimport pow
from libc.stdint cimport INT64_MAX, UINT32_MAX, int32_t, int64_t, uint32_t, uint64_t, uint8_t
from libc.string cimport memmove

from pagepool.core.base.platform cimport CACHE_LINE, raw_calloc, raw_free
from pagepool.core.base.siphash cimport Digest

cdef enum:
    BLANK = 0                 # part of the queue for pages without an entry: they are evicted first
    NEW = 1                   # part for pages that were used once
    AGAIN = 2                 # part for pages that were used again in time
    LATE = 3                  # part for pages that were used again, and LRU would have lost them
    PART = 3                  # bits of a mark
    NUM_PARTS = 4
    NUM_CLASSES = 3           # parts without the blank one
    NUM_AGES = 14             # buckets
    HORIZON = 128             # epochs; older pages are not counted any more
    NUM_EPOCHS = 256          # for which pages are counted: a power of 2
    LAST_COUNTED = NUM_EPOCHS - 1
    EPOCHS_A_POOL = 16
    FIRST_HAZARD = 6          # percent of the pages of the first age are used again, as long as nothing is known
    MARGIN = 70               # percent of the value of LRU's choice that a page evicted in its place has at most
    HALF_LIFE = 64            # epochs, in which counts lose half of their weight
    HALF_LIFE_REQUESTS = 512  # at least
    REQUESTS_A_WEIGHT = 4     # pages of a prior: those of so many requests
    REGRET_A_POOL = 12        # hits that LRU would have had more, to a pool's pages, from which on it decides for a while
    MAX_PAUSE = 64            # pools
    KNOWN_SHARE = 75          # percent of the pages of a request that goes on with one that was seen
    MAX_VALUE = 2             # of a page that is surely used again within an epoch
    STAMP_SHIFT = 2           # of a mark: part, then the call, then the epoch
    EPOCH_SHIFT = 18
    LAST_CALL = (1 << 16) - 1
    LAST_EPOCH = (1 << 14) - 1
    SAMPLE_INTERVAL = 8       # keys, of which the ghost remembers one: a power of 2
    GHOST_SIZE = 6            # pools of evicted pages, of which the ghost has a sample; a smaller one forgets keys too early
    SET_SIZE = 8              # entries of a ghost
    NUM_POLICY_COUNTS = 8     # from `Policy.num_in_part` on

cdef struct GhostEntry:       # an evicted page
    uint32_t tag              # hash of its key and group; 0: none
    uint32_t mark             # as it was in the queue

cdef struct Ghost:            # the keys of pages that were evicted last, in sets, each first in, first out
    GhostEntry *entries       # [num_sets, SET_SIZE], each set in a cache line
    void *memory              # that they are in
    uint32_t num_sets

cdef struct Decision:         # which pages are evicted, until a page is hit or one with another stamp is met
    int32_t part              # BLANK: none
    int32_t shard
    bint is_newest            # the newest call's pages, the first that it released first; else the oldest page
    uint32_t mark

cdef struct Learned:          # what a snapshot keeps
    int64_t num_released      # pages put into the queue
    int64_t epoch
    int64_t call              # of this epoch
    int64_t num_requests_then  # at the last tick
    int64_t alive[NUM_CLASSES][NUM_EPOCHS]  # pages that an epoch released and that were not used since
    double exposed[NUM_CLASSES][NUM_AGES]  # pages that came to an age
    double reused[NUM_CLASSES][NUM_AGES]  # pages that were used again at it
    double values[NUM_CLASSES][NUM_AGES]
    int64_t lru_age           # epochs from which on LRU would have lost a page
    int64_t regret            # hits that LRU would have had, less those that there were
    int64_t pause             # pools
    int64_t paused_until      # releases; up to then LRU decides
    Decision decision

cdef struct Policy:
    uint32_t *marks           # [num_pages]
    Ghost ghost
    int64_t num_in_part[NUM_PARTS]  # free pages without a term; this and the next four are copied together
    int64_t num_requests      # that took pages
    int64_t num_shared_hits   # on held pages
    int64_t num_free_hits
    int64_t num_lru_hits      # pages that LRU would have had, without those that were held; estimated
    Learned learned
    int64_t num_pages
    int64_t epoch_pages       # in an epoch
    int32_t edges[NUM_AGES + 1]  # epochs at which the buckets of ages begin: 0 1 2 3 4 6 8 12 16 24 ... 96, and the horizon
    uint8_t buckets[HORIZON]  # of ages in epochs
    int32_t first_part        # of the tenant for which the decision was made
    int32_t newest[NUM_PARTS]  # in each part the first page of the newest call that released any, as far as it still is


# The ghost: what a policy remembers of a sample of the pages that were evicted.


cdef inline uint64_t hash_key(Digest key, int32_t group) noexcept nogil:
    """The hash of a key and group: the same in each process, so that a policy's choices are."""
    cdef uint64_t word = key.lo ^ key.hi * <uint64_t>0x9E3779B97F4A7C15 ^ <uint64_t>(group + 1) * <uint64_t>0xC2B2AE3D27D4EB4F
    word = (word ^ word >> 32) * <uint64_t>0xD6E8FEB86659FD93
    word = (word ^ word >> 32) * <uint64_t>0xD6E8FEB86659FD93
    return word ^ word >> 32


cdef inline bint is_sampled(uint64_t word) noexcept nogil:
    """Whether a key with this hash is remembered."""
    return word & (SAMPLE_INTERVAL - 1) == 0


cdef inline uint32_t _tag_in_ghost(uint64_t word) noexcept nogil:
    return <uint32_t>(word >> 32) or 1


cdef inline GhostEntry *set_of(const Ghost *ghost, uint32_t tag) noexcept nogil:
    return ghost.entries + SET_SIZE * (<uint64_t>tag * ghost.num_sets >> 32)


cdef inline GhostEntry *_find_ghost(const Ghost *ghost, uint64_t word) noexcept nogil:
    """The entry of a key, or NULL."""
    cdef uint32_t tag = _tag_in_ghost(word)
    cdef GhostEntry *entries = set_of(ghost, tag)
    cdef Py_ssize_t i
    for i in range(SET_SIZE):
        if entries[i].tag == tag:
            return &entries[i]
    return NULL


cdef inline void remember(Ghost *ghost, uint64_t word, uint32_t mark) noexcept nogil:
    """Add a key as the last of its set. It takes the place of its own entry, if nobody asked for the key since it was evicted
    before, else of the first that left a gap, else of the oldest.
    """
    cdef uint32_t tag = _tag_in_ghost(word)
    cdef GhostEntry *own = _find_ghost(ghost, word)
    cdef GhostEntry *entries = set_of(ghost, tag)
    cdef Py_ssize_t i = 0 if own == NULL else own - entries
    while own == NULL and i < SET_SIZE - 1 and entries[i].tag:
        i += 1
    memmove(entries + 1, entries, i * sizeof(GhostEntry))
    entries[0] = GhostEntry(tag, mark)


cdef inline bint _make_ghost(Ghost *ghost, int32_t num_pages) noexcept nogil:
    """Make room for a sample of the pages that were evicted last; False where memory is short."""
    cdef double size_in_sets = <double>GHOST_SIZE * num_pages / SAMPLE_INTERVAL / SET_SIZE
    ghost.num_sets = 1 + <uint32_t>min(<double>(UINT32_MAX - 1), size_in_sets)
    ghost.memory = raw_calloc(<size_t>ghost.num_sets * SET_SIZE * sizeof(GhostEntry) + CACHE_LINE, 1)
    ghost.entries = <GhostEntry *>(<char *>ghost.memory + CACHE_LINE - <size_t>ghost.memory % CACHE_LINE)
    return ghost.memory != NULL


cdef inline uint32_t _stamp_of(const Policy *policy) noexcept nogil:
    """The stamp of pages that are released now."""
    return <uint32_t>(policy.learned.epoch & LAST_EPOCH) << EPOCH_SHIFT | <uint32_t>policy.learned.call << STAMP_SHIFT


cdef inline int64_t _epochs_since(const Policy *policy, uint32_t mark) noexcept nogil:
    return (policy.learned.epoch - (mark >> EPOCH_SHIFT)) & LAST_EPOCH


cdef inline int32_t _bucket_of(const Policy *policy, int64_t age) noexcept nogil:
    return policy.buckets[age] if age < HORIZON else NUM_AGES - 1


cdef inline uint32_t age_of(const Policy *policy, uint32_t mark) noexcept nogil:
    """How long ago a page was released, in calls and epochs: only the order matters."""
    return _stamp_of(policy) - (mark & ~<uint32_t>PART)


cdef inline double value_of(const Policy *policy, uint32_t mark) noexcept nogil:
    return policy.learned.values[(mark & PART) - 1][_bucket_of(policy, _epochs_since(policy, mark))]


# Learning.

cdef inline void _rate_ages(Policy *policy) noexcept nogil:
    """Compute the value of each age from what was counted, with the mean of all parts, and the age before, as prior."""
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
    """Make the policy of a pool without pages in its queue; NULL where memory is short."""
    cdef Policy *policy = <Policy *>raw_calloc(1, sizeof(Policy))
    cdef int32_t age, j, bucket = 0
    if policy == NULL:
        return NULL
    policy.marks = <uint32_t *>raw_calloc(num_pages, sizeof(uint32_t))
    if policy.marks == NULL or not _make_ghost(&policy.ghost, num_pages):
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
    """Count the pages that come to the next ages."""
    cdef Py_ssize_t c, j
    cdef int64_t num_alive
    policy.learned.epoch += 1
    for c in range(NUM_CLASSES):
        policy.learned.alive[c][policy.learned.epoch & LAST_COUNTED] = 0
        for j in range(1, NUM_AGES):
            num_alive = policy.learned.alive[c][(policy.learned.epoch - policy.edges[j]) & LAST_COUNTED]
            policy.learned.exposed[c][j] += <double>max(<int64_t>0, num_alive)


cdef inline void _decay(Policy *policy, double epochs) noexcept nogil:
    """Let what was counted before weigh less."""
    cdef double requests = <double>(policy.num_requests - policy.learned.num_requests_then)
    cdef double share = pow(2.0, -min(epochs / HALF_LIFE, requests / HALF_LIFE_REQUESTS))
    cdef Py_ssize_t c, j
    for c in range(NUM_CLASSES):
        for j in range(NUM_AGES):
            policy.learned.exposed[c][j] *= share
            policy.learned.reused[c][j] *= share
    policy.learned.num_requests_then = policy.num_requests


cdef inline int64_t _find_lru_age(const Policy *policy, int64_t num_free) noexcept nogil:
    """The age at which LRU would lose pages: as many were released since, and not used, as it has room for."""
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
    """Count a call that is about to put pages into the queue, which has `num_free`."""
    cdef int64_t epoch = policy.learned.epoch
    policy.learned.num_released += num_pages
    policy.learned.call = min(policy.learned.call + 1, <int64_t>LAST_CALL)
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


cdef inline void stamp_page(Policy *policy, int32_t page_id, uint32_t part) noexcept nogil:
    """Mark a page with an entry that is put into a part now."""
    policy.marks[page_id] = _stamp_of(policy) | part
    policy.learned.exposed[part - 1][0] += 1
    policy.learned.alive[part - 1][policy.learned.epoch & LAST_COUNTED] += 1


cdef inline uint32_t _count_reuse(Policy *policy, uint32_t mark, int64_t weight, bint is_hit) noexcept nogil:
    """Count that a page with this mark was used again, and return the part that it belongs to now."""
    cdef int64_t age = _epochs_since(policy, mark)
    cdef Py_ssize_t c = (mark & PART) - 1
    cdef bint is_in_time = age < policy.learned.lru_age
    policy.num_lru_hits += weight * is_in_time
    policy.learned.regret = max(<int64_t>0, policy.learned.regret + weight * (is_in_time - is_hit))
    if age < HORIZON:
        policy.learned.reused[c][_bucket_of(policy, age)] += <double>weight
        policy.learned.alive[c][(policy.learned.epoch - age) & LAST_COUNTED] -= weight
    return AGAIN if is_in_time else LATE


cdef inline void count_demand(Policy *policy, uint32_t mark) noexcept nogil:
    """Count that a page in the queue, with this mark, was asked for, though it stays there."""
    cdef int64_t age = _epochs_since(policy, mark)
    if mark != BLANK and age < HORIZON:
        policy.learned.reused[(mark & PART) - 1][_bucket_of(policy, age)] += 1


cdef inline void pass_part(Policy *policy, int32_t page_id, uint32_t part) noexcept nogil:
    """Let a held page that is a new one go into another part, that of its request."""
    if part > NEW and policy.marks[page_id] & PART == NEW:
        policy.marks[page_id] = part


cdef inline void record_hit(Policy *policy, int32_t page_id, bint was_free) noexcept nogil:
    """Mark a page that was hit and gets a holder, or one more. It has left the queue if it `was_free`."""
    cdef uint32_t *mark = &policy.marks[page_id]
    if was_free:
        policy.learned.decision.part = BLANK
        mark[0] = _count_reuse(policy, mark[0], 1, True) if mark[0] != BLANK else <uint32_t>AGAIN
    else:
        mark[0] = AGAIN


cdef inline uint32_t recall(Policy *policy, uint64_t word) noexcept nogil:
    """The part for the page of a sampled key, known by its hash, that enters the index; BLANK where the key is forgotten."""
    cdef GhostEntry *entry = _find_ghost(&policy.ghost, word)
    if entry == NULL:
        return BLANK
    entry.tag = 0
    return _count_reuse(policy, entry.mark, SAMPLE_INTERVAL, False)


cdef inline void discount(Policy *policy, int32_t page_id) noexcept nogil:
    """Count a page in the queue no more that loses its entry other than by eviction, or is put into the queue again."""
    cdef uint32_t mark = policy.marks[page_id]
    cdef int64_t age = _epochs_since(policy, mark)
    if mark != BLANK and age < HORIZON:
        policy.learned.alive[(mark & PART) - 1][(policy.learned.epoch - age) & LAST_COUNTED] -= 1


cdef inline bint is_right(const Policy *policy) noexcept nogil:
    """Whether what was learned can be: after a snapshot was loaded, and when the pool is checked."""
    cdef const Learned *learned = &policy.learned
    cdef bint is_fine = learned.num_released >= 0 and learned.epoch == learned.num_released // policy.epoch_pages
    cdef int64_t most = INT64_MAX // 8  # so that sums of counts are counts too
    cdef Py_ssize_t c, j
    is_fine &= 0 <= learned.call <= LAST_CALL and 0 <= learned.lru_age <= HORIZON and learned.regret >= 0
    is_fine &= 0 <= learned.num_requests_then <= policy.num_requests and learned.paused_until >= 0
    is_fine &= 0 <= learned.pause <= MAX_PAUSE and BLANK <= learned.decision.part <= PART
    is_fine &= learned.decision.shard >= -1  # it may be of a shard that the pool had before it was divided otherwise
    for c in range(NUM_CLASSES):
        for j in range(NUM_AGES):  # neither is NaN
            is_fine &= 0 <= learned.values[c][j] <= MAX_VALUE
            is_fine &= 0 <= learned.exposed[c][j] <= most and 0 <= learned.reused[c][j] <= most
        for j in range(NUM_EPOCHS):
            is_fine &= -most <= learned.alive[c][j] <= most
    return is_fine
