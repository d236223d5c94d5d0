# The adaptive policy: it learns at which age pages of each part are used again, and evicts the page from which it expects the
# fewest hits a page and time. Its unit of time is the epoch, a sixteenth of the pool's pages put into the queue.
#
# It counts, in buckets of ages and for each part, the pages in the queue that are used again, and a sample of those that were
# evicted. The value of an age is the highest rate of hits that keeping a page to any later age gives, an index like that of
# Gittins (Bandit Processes and Dynamic Allocation Indices, 1979). Beside the blank part there are three: pages that were used
# once, and pages used again, when least-recently-used (LRU) eviction would have kept them, or would have lost them.

from libc.math cimport pow
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint32_t, uint64_t, uint8_t
from libc.string cimport memmove

from pagepool.core.queue cimport is_page, newest_in, oldest_in, record_before, record_behind
from pagepool.core.records cimport (
    BLANK, FLAGS, NEW, NULL_PAGE, PART, SET_SIZE, TWIN, Ghost, GhostEntry, Policy, Pool, digest_of, has_level, is_free,
)
from pagepool.core.siphash cimport Digest


# The ghost of a pool: what its policy remembers of a sample of the pages that were evicted.


cdef enum:
    SAMPLE_INTERVAL = 8       # keys, of which one is remembered: a power of 2


cdef inline uint64_t hash_key(Digest key, int32_t group) noexcept nogil:
    """The hash of a key and group: the same in each process, so that a policy's choices are."""
    cdef uint64_t word = key.lo ^ key.hi * <uint64_t>0x9E3779B97F4A7C15 ^ <uint64_t>(group + 1) * <uint64_t>0xC2B2AE3D27D4EB4F
    word = (word ^ word >> 32) * <uint64_t>0xD6E8FEB86659FD93
    word = (word ^ word >> 32) * <uint64_t>0xD6E8FEB86659FD93
    return word ^ word >> 32


cdef inline bint is_sampled(uint64_t word) noexcept nogil:
    """Whether a key with this hash is remembered."""
    return word & (SAMPLE_INTERVAL - 1) == 0


cdef inline uint32_t tag_in_ghost(uint64_t word) noexcept nogil:
    return <uint32_t>(word >> 32) or 1


cdef inline GhostEntry *set_of(const Ghost *ghost, uint32_t tag) noexcept nogil:
    return ghost.entries + SET_SIZE * (<uint64_t>tag * ghost.num_sets >> 32)


cdef inline GhostEntry *find_ghost(const Ghost *ghost, uint64_t word) noexcept nogil:
    """The entry of a key, or NULL."""
    cdef uint32_t tag = tag_in_ghost(word)
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
    cdef uint32_t tag = tag_in_ghost(word)
    cdef GhostEntry *own = find_ghost(ghost, word)
    cdef GhostEntry *entries = set_of(ghost, tag)
    cdef Py_ssize_t i = 0 if own == NULL else own - entries
    while own == NULL and i < SET_SIZE - 1 and entries[i].tag:
        i += 1
    memmove(entries + 1, entries, i * sizeof(GhostEntry))
    entries[0] = GhostEntry(tag, mark)


cdef enum:
    AGAIN = 2                 # part for pages that were used again in time
    LATE = 3                  # part for pages that were used again, and LRU would have lost them
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
    MAX_VALUE = 2             # of a page that is surely used again within an epoch
    STAMP_SHIFT = 2           # of a mark: part, then the call, then the epoch
    EPOCH_SHIFT = 18
    LAST_CALL = (1 << 16) - 1
    LAST_EPOCH = (1 << 14) - 1

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

cdef struct Adaptive:
    Policy base
    Learned learned
    int64_t num_pages
    int64_t epoch_pages       # in an epoch
    int32_t edges[NUM_AGES + 1]  # epochs at which the buckets of ages begin: 0 1 2 3 4 6 8 12 16 24 ... 96, and the horizon
    uint8_t buckets[HORIZON]  # of ages in epochs
    int32_t newest[PART + 1]  # in each part the first page of the newest call that released any, as far as it still is


cdef inline Adaptive *adaptive_of(Pool *pool) noexcept nogil:
    return <Adaptive *>pool.policy


cdef inline uint32_t stamp_of(const Adaptive *state) noexcept nogil:
    """The stamp of pages that are released now."""
    return <uint32_t>(state.learned.epoch & LAST_EPOCH) << EPOCH_SHIFT | <uint32_t>state.learned.call << STAMP_SHIFT


cdef inline int64_t epochs_since(const Adaptive *state, uint32_t mark) noexcept nogil:
    return (state.learned.epoch - (mark >> EPOCH_SHIFT)) & LAST_EPOCH


cdef inline int32_t bucket_of(const Adaptive *state, int64_t age) noexcept nogil:
    return state.buckets[age] if age < HORIZON else NUM_AGES - 1


cdef inline double value_of(const Adaptive *state, uint32_t mark) noexcept nogil:
    return state.learned.values[(mark & PART) - 1][bucket_of(state, epochs_since(state, mark))]


cdef inline void start_adaptive(Adaptive *state, int32_t num_pages) noexcept nogil:
    cdef int32_t age, j, bucket = 0
    state.num_pages = num_pages
    state.epoch_pages = max(EPOCHS_A_POOL, num_pages // EPOCHS_A_POOL)
    state.learned.lru_age = HORIZON
    for j in range(NUM_AGES + 1):
        state.edges[j] = j if j <= 4 else (2 if j % 2 == 0 else 3) << (j // 2 - 1)
    for age in range(HORIZON):
        bucket += age == state.edges[bucket + 1]
        state.buckets[age] = <uint8_t>bucket
    rate_ages(state)


# Learning.

cdef inline void rate_ages(Adaptive *state) noexcept nogil:
    """Compute the value of each age from what was counted, with the mean of all parts, and the age before, as prior."""
    cdef double[NUM_AGES] prior
    cdef double num_reused, num_exposed, weight = 1
    cdef Py_ssize_t c, j
    if state.learned.num_released:
        weight = REQUESTS_A_WEIGHT * <double>state.learned.num_released / <double>max(<int64_t>1, state.base.num_requests)
    for j in range(NUM_AGES):
        num_reused = num_exposed = 0
        for c in range(NUM_CLASSES):
            num_reused += state.learned.reused[c][j]
            num_exposed += state.learned.exposed[c][j]
        prior[j] = (num_reused + weight * (prior[j - 1] if j else <double>FIRST_HAZARD / 100)) / (num_exposed + weight)
        prior[j] = min(1.0, prior[j])
    for c in range(NUM_CLASSES):
        rate_class(state, c, prior, weight)


cdef inline void rate_class(Adaptive *state, Py_ssize_t c, const double *prior, double weight) noexcept nogil:
    cdef double[NUM_AGES] hazard
    cdef double hits, time, surviving, best
    cdef Py_ssize_t j, start
    for j in range(NUM_AGES):
        hazard[j] = min(1.0, (state.learned.reused[c][j] + weight * prior[j]) / (state.learned.exposed[c][j] + weight))
    for start in range(NUM_AGES):
        hits = time = best = 0
        surviving = 1
        for j in range(start, NUM_AGES):
            hits += surviving * hazard[j]
            time += surviving * (state.edges[j + 1] - state.edges[j]) * (1 - hazard[j] / 2)
            surviving *= 1 - hazard[j]
            best = max(best, hits / time)
        state.learned.values[c][start] = best


cdef inline void begin_epoch(Adaptive *state) noexcept nogil:
    """Count the pages that come to the next ages."""
    cdef Py_ssize_t c, j
    cdef int64_t num_alive
    state.learned.epoch += 1
    for c in range(NUM_CLASSES):
        state.learned.alive[c][state.learned.epoch & LAST_COUNTED] = 0
        for j in range(1, NUM_AGES):
            num_alive = state.learned.alive[c][(state.learned.epoch - state.edges[j]) & LAST_COUNTED]
            state.learned.exposed[c][j] += <double>max(<int64_t>0, num_alive)


cdef inline void decay(Adaptive *state, double epochs) noexcept nogil:
    """Let what was counted before weigh less."""
    cdef double requests = <double>(state.base.num_requests - state.learned.num_requests_then)
    cdef double share = pow(2.0, -min(epochs / HALF_LIFE, requests / HALF_LIFE_REQUESTS))
    cdef Py_ssize_t c, j
    for c in range(NUM_CLASSES):
        for j in range(NUM_AGES):
            state.learned.exposed[c][j] *= share
            state.learned.reused[c][j] *= share
    state.learned.num_requests_then = state.base.num_requests


cdef inline int64_t find_lru_age(const Adaptive *state, int64_t num_free) noexcept nogil:
    """The age at which LRU would lose pages: as many were released since, and not used, as it has room for."""
    cdef int64_t age = 0, count = 0
    cdef Py_ssize_t c
    while age < HORIZON and age <= state.learned.epoch:
        for c in range(NUM_CLASSES):
            count += state.learned.alive[c][(state.learned.epoch - age) & LAST_COUNTED]
        if count > num_free:
            break
        age += 1
    return age


cdef inline void note_release(Pool *pool, int64_t num_pages) noexcept nogil:
    cdef Adaptive *state = adaptive_of(pool)
    cdef int64_t epoch = state.learned.epoch
    state.learned.num_released += num_pages
    state.learned.call = min(state.learned.call + 1, <int64_t>LAST_CALL)
    if state.learned.num_released // state.epoch_pages == epoch:
        return
    state.learned.call = 0
    state.learned.decision.part = BLANK
    while state.learned.num_released // state.epoch_pages > state.learned.epoch:
        begin_epoch(state)
    decay(state, <double>(state.learned.epoch - epoch))
    rate_ages(state)
    state.learned.lru_age = find_lru_age(state, pool.num_free + num_pages)
    if REGRET_A_POOL * state.learned.regret > state.num_pages:
        state.learned.pause = min(max(<int64_t>2, 2 * state.learned.pause), <int64_t>MAX_PAUSE)
        state.learned.paused_until = state.learned.num_released + state.learned.pause * state.num_pages
        state.learned.regret = 0


cdef inline void note_queued(Pool *pool, int32_t page_id, uint32_t part) noexcept nogil:
    cdef Adaptive *state = adaptive_of(pool)
    state.base.marks[page_id] = stamp_of(state) | part
    state.learned.exposed[part - 1][0] += 1
    state.learned.alive[part - 1][state.learned.epoch & LAST_COUNTED] += 1


cdef inline uint32_t note_use(Adaptive *state, uint32_t mark, int64_t weight, bint is_hit) noexcept nogil:
    """Count that a page with this mark was used again, and return the part that it belongs to now."""
    cdef int64_t age = epochs_since(state, mark)
    cdef Py_ssize_t c = (mark & PART) - 1
    cdef bint is_in_time = age < state.learned.lru_age
    state.base.num_lru_hits += weight * is_in_time
    state.learned.regret = max(<int64_t>0, state.learned.regret + weight * (is_in_time - is_hit))
    if age < HORIZON:
        state.learned.reused[c][bucket_of(state, age)] += <double>weight
        state.learned.alive[c][(state.learned.epoch - age) & LAST_COUNTED] -= weight
    return AGAIN if is_in_time else LATE


cdef inline void note_hit(Pool *pool, int32_t page_id, bint was_free) noexcept nogil:
    cdef Adaptive *state = adaptive_of(pool)
    cdef uint32_t *mark = &state.base.marks[page_id]
    if was_free:
        state.learned.decision.part = BLANK
        mark[0] = note_use(state, mark[0], 1, True) if mark[0] != BLANK else <uint32_t>AGAIN
    else:
        mark[0] = AGAIN


cdef inline uint32_t note_miss(Pool *pool, uint64_t word) noexcept nogil:
    cdef Adaptive *state = adaptive_of(pool)
    cdef GhostEntry *entry = find_ghost(&state.base.ghost, word)
    if entry == NULL:
        return BLANK
    entry.tag = 0
    return note_use(state, entry.mark, SAMPLE_INTERVAL, False)


cdef inline void note_eviction(Pool *pool, int32_t page_id) noexcept nogil:
    cdef Policy *policy = pool.policy
    cdef uint64_t word = hash_key(digest_of(&pool.pages[page_id]), pool.pages[page_id].group & ~FLAGS)
    if is_sampled(word) and policy.marks[page_id] != BLANK and not pool.pages[page_id].group & TWIN:
        remember(&policy.ghost, word, policy.marks[page_id])


cdef inline void note_drop(Pool *pool, int32_t page_id) noexcept nogil:
    cdef Adaptive *state = adaptive_of(pool)
    cdef uint32_t mark = state.base.marks[page_id]
    cdef int64_t age = epochs_since(state, mark)
    if age < HORIZON:
        state.learned.alive[(mark & PART) - 1][(state.learned.epoch - age) & LAST_COUNTED] -= 1


cdef inline bint is_right(Pool *pool) noexcept nogil:
    cdef const Adaptive *state = adaptive_of(pool)
    cdef const Learned *learned = &state.learned
    cdef bint is_fine = learned.num_released >= 0 and learned.epoch == learned.num_released // state.epoch_pages
    cdef int64_t most = INT64_MAX // 8  # so that sums of counts are counts too
    cdef Py_ssize_t c, j
    is_fine &= 0 <= learned.call <= LAST_CALL and 0 <= learned.lru_age <= HORIZON and learned.regret >= 0
    is_fine &= 0 <= learned.num_requests_then <= state.base.num_requests and learned.paused_until >= 0
    is_fine &= 0 <= learned.pause <= MAX_PAUSE and BLANK <= learned.decision.part <= PART
    is_fine &= -1 <= learned.decision.shard < max(1, pool.num_shards)
    for c in range(NUM_CLASSES):
        for j in range(NUM_AGES):  # neither is NaN
            is_fine &= 0 <= learned.values[c][j] <= MAX_VALUE
            is_fine &= 0 <= learned.exposed[c][j] <= most and 0 <= learned.reused[c][j] <= most
        for j in range(NUM_EPOCHS):
            is_fine &= -most <= learned.alive[c][j] <= most
    return is_fine


# Choosing.

cdef inline uint32_t age_of(const Adaptive *state, uint32_t mark) noexcept nogil:
    """How long ago a page was released, in calls and epochs: only the order matters."""
    return stamp_of(state) - (mark & ~<uint32_t>PART)


cdef inline int32_t *known_newest(Pool *pool, int32_t part, int32_t shard) noexcept nogil:
    return &adaptive_of(pool).newest[part] if shard < 0 else &pool.shard_newest[shard * (PART + 1) + part]


cdef inline int32_t first_of_newest(Pool *pool, int32_t part, int32_t shard) noexcept nogil:
    """Of the pages of a part that the newest call released, the one that it released first; or NULL_PAGE. Amortised O(1)."""
    cdef Adaptive *state = adaptive_of(pool)
    cdef const uint32_t *marks = state.base.marks
    cdef int32_t *known = known_newest(pool, part, shard)
    cdef int32_t before, page_id = newest_in(pool, part, shard)
    if page_id == NULL_PAGE:
        return NULL_PAGE
    if known[0] != NULL_PAGE and is_free(pool, known[0]) and not has_level(pool, known[0]):
        if marks[known[0]] == marks[page_id]:
            page_id = known[0]
    before = record_before(pool, page_id, shard)
    while is_page(pool, before) and marks[before] == marks[page_id]:
        page_id = before
        before = record_before(pool, page_id, shard)
    known[0] = page_id
    return page_id


cdef inline int32_t candidate_of(Pool *pool, const Decision *decision) noexcept nogil:
    if decision.is_newest:
        return first_of_newest(pool, decision.part, decision.shard)
    return oldest_in(pool, decision.part, decision.shard)


cdef inline Decision decide_as_lru(Pool *pool, int32_t shard) noexcept nogil:
    """The oldest page of all parts."""
    cdef Adaptive *state = adaptive_of(pool)
    cdef Decision oldest = Decision(BLANK, shard, False, 0)
    cdef uint32_t mark
    cdef int32_t part, page_id
    for part in range(NEW, PART + 1):
        page_id = oldest_in(pool, part, shard)
        if page_id != NULL_PAGE:
            mark = state.base.marks[page_id]
            if oldest.part == BLANK or age_of(state, mark) > age_of(state, oldest.mark):
                oldest = Decision(part, shard, False, mark)
    return oldest


cdef inline Decision decide(Pool *pool, int32_t shard) noexcept nogil:
    """The page of least value among the oldest and the newest of each part, if it is worth less than LRU's choice."""
    cdef Adaptive *state = adaptive_of(pool)
    cdef Decision best = decide_as_lru(pool, shard)
    cdef double value, least = value_of(state, best.mark) * MARGIN / 100
    cdef int32_t part, page_id, is_newest
    if state.learned.num_released < state.learned.paused_until:
        return best
    for part in range(NEW, PART + 1):
        for is_newest in range(2):
            page_id = newest_in(pool, part, shard) if is_newest else oldest_in(pool, part, shard)
            if page_id != NULL_PAGE:
                value = value_of(state, state.base.marks[page_id])
                if value < least:
                    least = value
                    best = Decision(part, shard, is_newest, state.base.marks[page_id])
    return best


cdef inline int32_t pick(Pool *pool, int32_t shard) noexcept nogil:
    cdef Adaptive *state = adaptive_of(pool)
    cdef Decision *decision = &state.learned.decision
    cdef int32_t behind, page_id = NULL_PAGE
    if decision.part != BLANK and decision.shard == shard:
        page_id = candidate_of(pool, decision)
    if page_id == NULL_PAGE or state.base.marks[page_id] != decision.mark:
        decision[0] = decide(pool, shard)
        page_id = candidate_of(pool, decision)
    if decision.is_newest:
        behind = record_behind(pool, page_id, shard)
        known_newest(pool, decision.part, shard)[0] = behind if is_page(pool, behind) else <int32_t>NULL_PAGE
    return page_id
