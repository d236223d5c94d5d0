"""Requests that wait to be admitted, their order and their hits."""

cimport cython
from cpython.mem cimport PyMem_RawFree as free
from libc.stdint cimport INT32_MAX, INT32_MIN
from libc.string cimport memcpy

from pagepool.core.base cimport Digest, monotonic_ns, process_number, require_allocated, require_process
from pagepool.core.holding cimport Contents, contents_of, find_longest, query_of
from pagepool.core.pool cimport NO_BANK, bucket_of, free_awaited, free_closed, hear_removal, ids_in_shard, note_moved
from pagepool.core.tier cimport find_and_load, find_reachable
from pagepool.core.values cimport HashChain, HashedTokens, as_shard, float_of, index_of, new_ids, size_of

from pagepool.errors import ArgumentError, ArgumentTypeError, IntegrityError, shown

cdef enum:
    NONE = -1                 # no number
    MIN_CAPACITY = 16


cdef void note_key(AwaitedKeys *awaited, Digest key, int32_t group) noexcept nogil:
    """Note in a list of `AwaitedKeys` that a page under a key was cached, or lost its entry. O(waiters with the key)."""
    cdef const AwaitedKey *place
    cdef int32_t at
    while awaited != NULL:
        at = awaited.buckets[bucket_of(awaited, key)] if not awaited.is_closed else <int32_t>NO_PLACE
        while at != NO_PLACE:
            place = &awaited.places[at]
            if place.key.lo == key.lo and place.key.hi == key.hi and place.group == group:
                note_moved(awaited, at // NUM_KEYS_EACH)
            at = place.next
        awaited = awaited.next


cdef AwaitedKeys *new_awaited() except NULL:
    """Return keys without room for a waiter."""
    cdef AwaitedKeys *awaited = <AwaitedKeys *>raw_calloc(1, sizeof(AwaitedKeys))
    if awaited == NULL:
        raise MemoryError("the keys of waiting requests")
    awaited.note = note_key
    return awaited


cdef bint grow_awaited(AwaitedKeys *awaited, Py_ssize_t capacity) noexcept:
    """Make room for more waiters; False, with no place changed, if memory is short."""
    cdef Py_ssize_t i, num_buckets = 2
    cdef int32_t shift = 63
    cdef int32_t *buckets
    cdef AwaitedKey *place
    while num_buckets < NUM_KEYS_EACH * capacity:
        num_buckets, shift = 2 * num_buckets, shift - 1
    if not resize(<void **>&awaited.places, capacity * NUM_KEYS_EACH * sizeof(AwaitedKey)):
        return False
    if not resize(<void **>&awaited.moved, capacity * sizeof(int32_t)) or not resize(<void **>&awaited.has_moved, capacity):
        return False
    buckets = <int32_t *>raw_calloc(num_buckets, sizeof(int32_t))
    if buckets == NULL:
        return False
    free(awaited.buckets)
    awaited.buckets, awaited.num_buckets, awaited.shift = buckets, num_buckets, shift
    for i in range(num_buckets):
        buckets[i] = NO_PLACE
    for i in range(awaited.capacity, capacity):
        awaited.has_moved[i] = False
    for i in range(awaited.capacity * NUM_KEYS_EACH, capacity * NUM_KEYS_EACH):
        awaited.places[i].prev = awaited.places[i].next = NO_KEY
    for i in range(awaited.capacity * NUM_KEYS_EACH):
        place = &awaited.places[i]
        if place.next != NO_KEY:
            place.next = NO_KEY
            await_key(awaited, <int32_t>i, place.key, place.group)
    awaited.capacity = capacity
    return True


cdef int64_t checked_step_of(object step) except -1:
    """Return the number of a step; for None that of a step in which no request is passed over."""
    return INT64_MAX if step is None else size_of(step, "step", 0, INT64_MAX - NUM_PASSES - 1)


cdef int32_t checked_priority_of(object priority) except? -1:
    """Return a priority that fits int32."""
    cdef object number = index_of(priority, "priority")
    if not INT32_MIN <= number <= INT32_MAX:
        raise ArgumentError(f"priority: got {number}, allowed: {INT32_MIN} to {INT32_MAX}")
    return number


cdef bint awaits_same(const AwaitedKeys *awaited, int32_t number, int32_t other) noexcept:
    """Whether the page behind the hits of two waiters has one key."""
    cdef const AwaitedKey *mine = &awaited.places[number * NUM_KEYS_EACH + 1]
    cdef const AwaitedKey *place = &awaited.places[other * NUM_KEYS_EACH + 1]
    return (
        mine.next != NO_KEY and place.next != NO_KEY and mine.key.lo == place.key.lo and mine.key.hi == place.key.hi
        and mine.group == place.group
    )


@cython.final
@cython.auto_pickle(False)
cdef class WaitingRequest(HashedTokens):
    """A request of a `WaitingLine`: its name, `HashedTokens`, traits and extra keys, as objects of Python."""

    def __cinit__(self, *_, **__):
        self.number = NONE


@cython.final
@cython.auto_pickle(False)
cdef class WaitingLine:
    """The requests of a `WaitingQueue` by number, in front of the pool of `store`, in whose `groups` they hit.

    Of the requests of the highest class the one with the least work is next, if it `is_by_work` and no request before it would
    be overtaken by more than `max_overtaken` tokens and `max_stretch` of the work in front of it; else the first one is. After
    `promote_after` computed tokens a request counts in the next class. If it `awaits_equal`, a request waits for up to two
    steps while another one computes the same tokens. `num_shards` are those of the batch; 0: none.
    """

    def __cinit__(
        self, PageStore store not None, CacheGroups groups not None, bint is_by_work=True, max_overtaken=0, max_stretch=0.0,
        promote_after=1, num_shards=0, bint awaits_equal=False,
    ):
        cdef Line *line = &self.line
        self.process, self.first_free = process_number, NONE
        require_allocated(&self.lock)
        self.store, self.groups, self.requests, self.awaits_equal = store, groups, [], awaits_equal
        line.is_by_work = is_by_work
        line.max_overtaken = size_of(max_overtaken, "max_overtaken_tokens", 0, INT64_MAX // 4)
        line.max_stretch = float_of(max_stretch, "max_stretch")
        if not 0 <= line.max_stretch <= 1e6:
            raise ArgumentError(f"max_stretch: got {line.max_stretch}, allowed: 0 to 1,000,000")
        line.promote_after = size_of(promote_after, "promote_after_tokens", 1, INT64_MAX // 4)
        self.num_shards = <int32_t>size_of(num_shards, "num_shards", 0, store.pool.num_pages)
        store.require_own()
        self.awaited = new_awaited()
        self.awaited.multiplier = store.pool.multiplier | 1
        if not self.reserve():
            free_awaited(self.awaited)
            self.awaited = NULL
            raise MemoryError("the keys of waiting requests")
        with store.lock:
            free_closed(&store.pool.awaited, False)
            self.awaited.next = store.pool.awaited
            store.pool.awaited, store.pool.hear_removal = self.awaited, hear_removal
            if store.pool.tier != NULL:
                store.pool.tier.pool.awaited, store.pool.tier.pool.hear_removal = self.awaited, hear_removal

    def __dealloc__(self):
        if self.process == process_number:  # in a forked process another thread may have been changing it
            free(self.line.places)
            free(self.line.classes)
            free(self.waiters)
            if self.awaited != NULL:
                self.awaited.is_closed = True  # the pool's lock may be held by this very thread, so the pool frees it later

    def __reduce__(self):
        raise ArgumentTypeError("a WaitingLine cannot be pickled")

    # Locks: the line's first, then the store's. No Python object is made or freed while they are held.

    cdef int acquire(self) except -1:
        """Take both locks, and divide the pool into the shards that requests name."""
        require_process(self.process, "WaitingQueue")
        self.store.require_own()
        self.lock.acquire()
        self.store.lock_divided(self.num_shards, &self.lock)
        return 0

    cdef void release(self) noexcept:
        self.store.lock.release()
        self.lock.release()

    # Numbers.

    cdef bint reserve(self) noexcept:
        """Make room for a request more; False if memory is short."""
        cdef Py_ssize_t i, capacity = max(<Py_ssize_t>MIN_CAPACITY, 2 * self.awaited.capacity)
        if not reserve_place(&self.line):
            return False
        if self.first_free != NONE:
            return True
        if not resize(<void **>&self.waiters, capacity * sizeof(Waiter)):
            return False
        i = self.awaited.capacity
        if not grow_awaited(self.awaited, capacity):
            return False
        while i < capacity:
            memset(&self.waiters[i], 0, sizeof(Waiter))
            self.waiters[i].next_free, self.first_free = self.first_free, <int32_t>i
            i += 1
        return True

    cdef int32_t number_of(self, WaitingRequest request) except -1:
        """Return the number of a request that waits. Both locks are taken, but not if it raises."""
        cdef int32_t number = request.number
        cdef bint is_waiting
        self.acquire()
        is_waiting = 0 <= number < len(self.requests) and self.requests[number] is request
        if not is_waiting:
            self.release()
            raise ArgumentError(f"request: got {shown(request.name)}, allowed: one that waits in this queue")
        return number

    def enter(self, WaitingRequest request not None, num_prompt=None, priority=0, shard=None, bint is_back=False) -> None:
        """Look a request up and add it: in front of all others if it `is_back`, else at the end.

        The first `num_prompt` tokens are of its prompt (None: all). It hits pages of `shard` (None: of the whole pool).
        O(tokens + waiting).
        """
        cdef Py_ssize_t num = request.token_ids.num
        cdef int32_t number = NONE, checked_priority = checked_priority_of(priority)
        cdef bint has_room = False
        cdef Waiter waiter
        memset(&waiter, 0, sizeof(Waiter))
        waiter.num_tokens = waiter.num_prompt = num
        waiter.shard, waiter.is_waiting = as_shard(shard, self.num_shards), True
        if num_prompt is not None and self.groups.kinds.has_answers:
            waiter.num_prompt = min(num, size_of(num_prompt, "num_prompt_tokens"))
        if request.number != NONE:
            raise ArgumentError(f"request: got {shown(request.name)}, which waits already, allowed: one that does not")
        while True:
            while len(self.requests) < max(<Py_ssize_t>MIN_CAPACITY, 2 * self.awaited.capacity):
                self.requests.append(None)
            self.acquire()
            has_room = self.reserve()
            if not has_room or self.awaited.capacity <= len(self.requests):
                break
            self.release()  # another thread made room for more than that
        if has_room:
            number = self.first_free
            self.first_free = self.waiters[number].next_free
            self.waiters[number], self.requests[number] = waiter, request
            request.number, request.came_at = number, monotonic_ns()
            self.look_up(number)
            add_place(&self.line, number, checked_priority, work_of(&self.waiters[number]), is_back)
        self.release()
        if not has_room:
            raise MemoryError("a waiting request")

    cdef int end(self, int32_t number, Py_ssize_t at) except -1:
        """End the wait of a request whose place is at index `at`. The caller refers to it, so it is not freed here."""
        (<WaitingRequest>self.requests[number]).number = NONE
        self.requests[number] = None
        forget_keys(self.awaited, number)
        remove_place(&self.line, at)
        self.waiters[number].is_waiting = False
        self.waiters[number].next_free, self.first_free = self.first_free, number
        return 0

    # Hits.

    cdef Query look_up_of(self, int32_t number) noexcept:
        """Return the look-up of a request, without digests if nothing is cached."""
        cdef HashChain chain = (<WaitingRequest>self.requests[number]).chain
        cdef const Waiter *waiter = &self.waiters[number]
        if chain is None:
            return query_of(self.groups, NULL, 0, 0, waiter.num_tokens, ids_in_shard(&self.store.pool, waiter.shard))
        return query_of(
            self.groups, chain.digests, chain.num, chain.page_size, min(waiter.num_tokens, waiter.num_prompt + 1),
            ids_in_shard(&self.store.pool, waiter.shard),
        )

    cdef bint look_up(self, int32_t number) noexcept:
        """Look a request up in all groups, and await the keys where its hits end. Return whether its work changed."""
        cdef Pool *pool = &self.store.pool
        cdef Waiter *waiter = &self.waiters[number]
        cdef int64_t before = work_of(waiter)
        cdef Query query = self.look_up_of(number)
        cdef Py_ssize_t num_hashes = 0
        if query.num_digests and pool.slots != NULL:
            num_hashes = find_longest(pool, &query)
            waiter.num_hits = find_reachable(pool, &query, waiter.shard) * query.hash_size
            waiter.num_loads = waiter.num_hits - num_hashes * query.hash_size
            follow(pool, &query, self.awaited, number, waiter)
        return before != work_of(waiter)

    cdef void follow_moved(self) noexcept:
        """Bring the hits of requests up to date whose keys came or went. Amortised O(1) a page and request."""
        cdef Pool *pool = &self.store.pool
        cdef Waiter *waiter
        cdef Query query
        cdef Place *place
        cdef int32_t number
        while self.awaited.num_moved:
            self.awaited.num_moved -= 1
            number = self.awaited.moved[self.awaited.num_moved]
            self.awaited.has_moved[number] = False
            waiter = &self.waiters[number]
            if not waiter.is_waiting:
                continue
            query = self.look_up_of(number)
            if follow(pool, &query, self.awaited, number, waiter):
                waiter.num_hits = count_leading_tokens(&query, waiter.num_reachable)
                waiter.num_loads = waiter.num_hits - count_leading_tokens(&query, waiter.num_pages)
                place = &self.line.places[find_place(&self.line, number)]
                place.work, place.passes_until = work_of(waiter), 0

    # Admission.

    def choose(self, step=None) -> WaitingRequest | None:
        """Return the request that is next in this step; None if none is. Without a step no request is passed over. O(waiting).
        """
        cdef int64_t checked_step = checked_step_of(step)
        cdef WaitingRequest request = None
        cdef Py_ssize_t at
        self.acquire()
        self.follow_moved()
        at = find_next(&self.line, checked_step)
        if at >= 0:
            request = self.requests[self.line.places[at].waiter]
            request.num_expected = self.waiters[request.number].num_hits
        self.release()
        return request

    def correct(self, WaitingRequest request not None) -> bool:
        """Look a request up again, and return whether its work changed. O(tokens)."""
        cdef int32_t number = self.number_of(request)
        cdef bint is_other = self.look_up(number)
        if is_other:
            self.line.places[find_place(&self.line, number)].work = work_of(&self.waiters[number])
        self.release()
        return is_other

    def set_misfit(self, WaitingRequest request not None) -> None:
        """Try others before a request that was refused, until `begin_round`."""
        cdef int32_t number = self.number_of(request)
        self.line.places[find_place(&self.line, number)].is_misfit = True
        self.release()

    def set_away(self, WaitingRequest request not None) -> None:
        """Pass over a request that is not ready, until `begin_round`."""
        cdef int32_t number = self.number_of(request)
        self.line.places[find_place(&self.line, number)].is_away = True
        self.release()

    def begin_round(self) -> None:
        """Let all requests be next again. O(waiting)."""
        cdef Py_ssize_t i
        self.acquire()
        for i in range(self.line.num):
            self.line.places[i].is_misfit = self.line.places[i].is_away = False
        self.release()

    def admit(self, WaitingRequest request not None, num_hits, step=None) -> None:
        """End the wait of a request that was admitted in this step with `num_hits` hit tokens, and charge its work to those
        that it overtook. Without a step none waits for what the request computes. O(waiting).
        """
        cdef int64_t num_hit_tokens = size_of(num_hits, "num_hits", 0, INT64_MAX)
        cdef int64_t checked_step = checked_step_of(step)
        cdef int64_t num_loads, wait = monotonic_ns() - request.came_at
        cdef int32_t number = self.number_of(request)
        cdef const Waiter *waiter = &self.waiters[number]
        cdef Py_ssize_t i, at = find_place(&self.line, number)
        num_hit_tokens = min(num_hit_tokens, waiter.num_tokens)
        num_loads = min(waiter.num_loads, num_hit_tokens)
        charge(&self.line, at, count_work(waiter.num_tokens, num_hit_tokens, num_loads), checked_step)
        for i in range(self.line.num if self.awaits_equal and step is not None else 0):
            if awaits_same(self.awaited, number, self.line.places[i].waiter) and not self.line.places[i].passes_until:
                self.line.places[i].passes_until = checked_step + NUM_PASSES
        self.line.num_admitted += 1
        self.line.longest_wait = max(self.line.longest_wait, wait)
        self.end(number, at)
        self.release()

    def leave(self, WaitingRequest request not None) -> None:
        """End the wait of a request that is not admitted. O(waiting)."""
        cdef int32_t number = self.number_of(request)
        self.end(number, find_place(&self.line, number))
        self.release()

    def prefetch(self, WaitingRequest request not None, num_reserved, context=0, session=0) -> bool:
        """Queue loads of the pages that a request hits in the tier alone, while `num_reserved` pages of the first pool stay
        free. Return False if too few are free for all of them. O(tokens).
        """
        cdef Py_ssize_t num_kept_free = size_of(num_reserved, "num_reserved_pages"), num_hashes = 0
        cdef int32_t checked_context = self.store.checked_context(context)
        cdef int32_t checked_session = self.store.checked_session(session)
        cdef tuple hits = new_ids(self.groups.num)
        cdef int32_t number = self.number_of(request)
        cdef bint is_short = False
        cdef Contents contents
        cdef Query query
        if request.chain is not None and self.waiters[number].num_loads:
            contents = contents_of(request.chain, checked_context, checked_session)
            query = self.look_up_of(number)
            num_hashes = find_and_load(
                &self.store.pool, &query, hits, &contents, self.waiters[number].shard, num_kept_free
            )
            is_short = query.short_bank != NO_BANK
        self.release()
        if num_hashes < 0:
            raise MemoryError("the pages of a prefix")
        return not is_short

    # Inspection.

    def count_hits(self, WaitingRequest request not None) -> int:
        """Return how many tokens of a request would hit, in the tier too."""
        cdef int32_t number = self.number_of(request)
        cdef int64_t num_hits = self.waiters[number].num_hits
        self.release()
        return num_hits

    def count_loads(self, WaitingRequest request not None) -> int:
        """Return how many of these tokens only the tier has."""
        cdef int32_t number = self.number_of(request)
        cdef int64_t num_loads = self.waiters[number].num_loads
        self.release()
        return num_loads

    def list_next(self, n, step=None) -> list:
        """Return the first `n` requests, in the order in which they would be admitted. O(n x waiting)."""
        cdef Py_ssize_t at, num = size_of(n, "n"), num_found = 0
        cdef int64_t checked_step = checked_step_of(step)
        cdef Line line
        cdef bint has_room = True
        cdef list requests = [None] * min(num, len(self.requests))
        memset(&line, 0, sizeof(Line))
        self.acquire()
        self.follow_moved()
        num = min(num, self.line.num, len(requests))
        if num:
            line = self.line
            line.places = <Place *>raw_calloc(line.num, sizeof(Place))
            line.classes = <PriorityClass *>raw_calloc(line.num_classes + 1, sizeof(PriorityClass))
            has_room = line.places != NULL and line.classes != NULL
        if num and has_room:
            memcpy(line.places, self.line.places, line.num * sizeof(Place))
            memcpy(line.classes, self.line.classes, line.num_classes * sizeof(PriorityClass))
            while num_found < num:
                at = find_next(&line, checked_step)
                if at < 0:
                    break
                requests[num_found] = self.requests[line.places[at].waiter]
                num_found += 1
                charge(&line, at, line.places[at].work, checked_step)
                remove_place(&line, at)
        self.release()
        if num:
            free(line.places)
            free(line.classes)
        if not has_room:
            raise MemoryError(f"{num} waiting requests")
        return requests[:num_found]

    def counters(self) -> dict:
        """Return the number of waiting requests, their tokens, hits and work, and what was admitted and overtaken. O(waiting).
        """
        cdef int64_t num_tokens = 0, num_hits = 0, work = 0
        cdef Py_ssize_t i
        cdef Line line
        self.acquire()
        self.follow_moved()
        line = self.line
        for i in range(line.num):
            num_tokens += self.waiters[line.places[i].waiter].num_tokens
            num_hits += self.waiters[line.places[i].waiter].num_hits
            work += line.places[i].work
        self.release()
        return {
            "num_waiting": line.num, "num_waiting_tokens": num_tokens, "num_hit_tokens": num_hits, "num_work_tokens": work,
            "num_computed_tokens": line.num_computed, "num_overtakes": line.num_overtakes,
            "num_overtaken_tokens": line.num_charged, "num_admitted": line.num_admitted,
            "longest_wait_seconds": line.longest_wait / 1e9,
        }

    def check(self) -> None:
        """Raise IntegrityError if numbers, places or awaited keys are damaged. O(waiting + keys)."""
        cdef str fault = None
        cdef Py_ssize_t i, num_waiting = 0, num_keys = 0, num_linked = 0, num_in_classes = 0
        cdef int32_t at
        self.acquire()
        for i in range(self.awaited.capacity):
            num_waiting += self.waiters[i].is_waiting
        for i in range(self.awaited.capacity * NUM_KEYS_EACH):
            num_keys += self.awaited.places[i].next != NO_KEY
        for i in range(self.awaited.num_buckets):
            at = self.awaited.buckets[i]
            while at != NO_PLACE and num_linked <= num_keys:
                num_linked += 1
                at = self.awaited.places[at].next
        for i in range(self.line.num):
            num_in_classes += self.line.places[i].is_back
            if not self.waiters[self.line.places[i].waiter].is_waiting:
                fault = "a place of a request that does not wait"
            if self.line.places[i].left < 0:
                fault = "a request that was overtaken beyond its bound"
        for i in range(self.line.num_classes):
            num_in_classes += self.line.classes[i].num
        if num_in_classes != self.line.num or num_waiting != self.line.num:
            fault = "counts of places that differ"
        if num_keys != num_linked:
            fault = "an awaited key that is in no bucket"
        self.release()
        if fault is not None:
            raise IntegrityError(f"waiting queue: got {fault}, allowed: none")
