"""Admission of requests to free rows."""

cimport cython
from cpython.mem cimport PyMem_RawCalloc as calloc
from cpython.mem cimport PyMem_RawFree as free
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.string cimport memset

from pagepool.core.holding cimport (
    FITS, Demand, Hits, PrefixEnd, Query, ResumePlaces, attach, begin_boundaries, copy_states, count_attached,
    count_external_tokens, count_state_hits, fetch_hits, find_first_hit_page, fit_or_adopt, list_hits, pays_to_write_answers,
    price, query_of, reserve_copies, set_prompt, shortage_of,
)
from pagepool.core.pool cimport NO_BANK, QueryCounter, count_changes, ids_in_shard
from pagepool.core.rows.running cimport *
from pagepool.core.tier cimport find_and_load, find_reachable
from pagepool.core.values cimport HashChain, HashedTokens, as_shard, checked_extra_keys, ids_in

from pagepool.errors import ArgumentError, PageHashError


cdef struct Loads:            # loads for which too few pages are free
    int32_t short_bank        # NO_BANK: there are none
    int64_t[MAX_BANKS] num_in
    int64_t[MAX_BANKS] num_states_in


cdef Py_ssize_t count_loads(const Query *query, Py_ssize_t num_hashes, tuple hits, Loads *loads) noexcept:
    """Count the hits of a look-up that lack a page, in all and by bank. O(hits)."""
    cdef const Group *group
    cdef Py_ssize_t g, place, num, count = 0
    cdef PageIds found
    memset(loads.num_in, 0, sizeof(loads.num_in))
    memset(loads.num_states_in, 0, sizeof(loads.num_states_in))
    for g in range(query.num_groups):
        group, found, num = &query.groups[g], hits[g], 0
        for place in range(find_first_hit_page(query, group, num_hashes), found.num):
            num += found.ids[place] == NULL_PAGE
        loads.num_in[group.bank] += num
        loads.num_states_in[group.bank] += num if is_state(&group.rules) else 0
        count += num
    return count


cdef void add_loads(Demand *demand, const Loads *loads) noexcept:
    """Add the pages of loads to a priced demand. A loaded checkpoint is not new: it can become the working page."""
    cdef int32_t bank
    demand.short_bank = loads.short_bank
    for bank in range(MAX_BANKS):
        demand.num_new_in[bank] += loads.num_in[bank] - loads.num_states_in[bank]
        demand.num_taken_in[bank] += loads.num_in[bank]
        demand.num_free_hits += loads.num_in[bank]
        demand.num_taken += loads.num_in[bank]


@cython.final
@cython.freelist(4)
@cython.no_gc  # in no cycle: nothing refers to it
@cython.auto_pickle(False)
cdef class RowRequest:
    """A request with `token_ids` for a free `row` of `rows`: see `RunningBatch.admit`.

    `_is_refused_still` compares its tokens and `options`, a tuple of everything else that hits depend on. If tokens behind the
    hits, at most `num_external`, come from elsewhere, only these get room, and the row is pending. Other requests will resume
    at the token counts `resume_at`. Lookahead tokens get slots behind the tokens that get room or, if the request
    `reserves_prompt`, behind all known tokens, which then all get slots. The known tokens behind the first `num_prompt_tokens`
    are of its answer, as after a preemption; None: none are.
    """

    cdef RowStore rows
    cdef Py_ssize_t row
    cdef object source              # the caller's list, or `token_ids`
    cdef PageIds token_ids
    cdef HashedTokens hashed        # the tokens with their digests; None: they have none
    cdef Tokens tokens
    cdef object options
    cdef Py_ssize_t num_reserved
    cdef PageIds resume_at          # token counts; None: no further ones
    cdef int32_t shard              # set, with the next two, while the row is claimed
    cdef Identity identity
    cdef PrefixEnd end
    cdef int32_t num_room           # hit tokens, and tokens of the first step or from elsewhere
    cdef int32_t num_slots          # slots of the row, up to its length
    cdef bint keeps_hashes          # whether the row keeps all hashes of its last request
    cdef StepResult step            # the step to which the row is added; None: none
    cdef StepResult call            # its part of the step

    def __cinit__(
        self, RunningRows rows not None, row, token_ids, num_tokens=None, max_num_new_tokens=None, num_reserved_pages=0,
        options=None, num_external_tokens=0, resume_at=None, num_lookahead_tokens=0, bint reserves_prompt=False,
        num_prompt_tokens=None,
    ):
        cdef Py_ssize_t num_external = size_of(num_external_tokens, "num_external_tokens")
        self.rows, self.row, self.options = rows.rows, rows.rows.checked_row(row), options
        self.num_reserved = size_of(num_reserved_pages, "num_reserved_pages")
        self.resume_at = None if resume_at is None else as_page_ids(resume_at, "resume_at")
        self.hashed = token_ids if isinstance(token_ids, HashedTokens) else None
        self.token_ids = as_page_ids(token_ids, "token_ids") if self.hashed is None else self.hashed.token_ids
        self.source = token_ids if type(token_ids) is list else self.token_ids
        if self.token_ids.num == 0:
            raise ArgumentError("token_ids: got none, allowed: at least 1")
        if self.token_ids.num > self.rows.batch.max_num_tokens:
            refuse_row_length(&self.rows.batch, self.row, self.token_ids.num)
        self.tokens = count_tokens(
            num_tokens, max_num_new_tokens, self.token_ids.num, num_external, num_lookahead_tokens, reserves_prompt
        )
        if num_prompt_tokens is not None and rows.rows.groups.kinds.has_answers:
            self.tokens.num_prompt = min(self.tokens.num_known, size_of(num_prompt_tokens, "num_prompt_tokens"))

    def count_least_tokens(self) -> int:
        """Return the number of tokens that get slots whatever the request hits."""
        if self.tokens.reserves_prompt:
            return self.tokens.num_known
        return 1 if self.tokens.num_external else min(self.tokens.num_wanted, self.tokens.max_num_new)

    def admit(
        self, extra_keys=(), bint takes_hits=False, shard=None, context=0, QueryCounter counter=None, session=0, step=None
    ) -> int | None:
        """Admit the request and return the number of hit tokens; None, and nothing taken, if too few pages are free.

        `extra_keys` are ``(page, bytes)`` of the hash pages that have any, in order; a last pair with the page None is for all
        other pages. With `takes_hits` the longest cached prefix is hit, and loaded where only the tier has it. `context` comes
        from `EntryJournal.add_context`, `session` from `PageSessions.hold`. `counter` counts an admitted request. A row that
        does not wait for tokens is added to `step`.
        """
        cdef RowStore rows = self.rows
        cdef list keys = checked_extra_keys(extra_keys)
        cdef bint is_admitted = False
        cdef object result = None
        cdef Identity checked_identity = Identity(
            context=rows.store.checked_context(context), session=rows.store.checked_session(session)
        )
        cdef int32_t checked_shard = as_shard(shard, rows.num_shards)
        if counter is not None and counter.store is not rows.store:
            raise ArgumentError("counter: got one of another pool, allowed: one of the batch's")
        if step is not None:
            self.step, self.call = joined_step(rows, step), new_admission(rows, self.row)
        self.claim_row()
        self.shard, self.identity = checked_shard, checked_identity
        try:
            if self.step is not None:
                add_call(self.step, self.call)
            self.set_contents(keys)
            result = self.try_start(takes_hits and rows.batch.hash_page_size)
            is_admitted = type(result) is not RefusedRequest
            if not is_admitted and not self.hits_fewer():
                self.name_refusal(result)
        finally:
            rows.refusals[self.row] = None if is_admitted else result
            if not is_admitted:
                rows.batch.records[self.row].state = FREE
            if self.step is not None and self.call.num_grown == 0:
                remove_call(self.step, self.call)
        if is_admitted and counter is not None:
            self.count_in(counter)
        return result if is_admitted else None

    cdef int name_refusal(self, RefusedRequest refusal) except -1:
        """Note what identifies a refused request when it is tried again."""
        refusal.num_external = self.tokens.num_external
        refusal.options = self.options if type(self.options) is tuple else None
        refusal.source = self.source
        return 0

    cdef int count_in(self, QueryCounter counter) except -1:
        """Count an admitted request, and with several pools the tokens that each of them lost."""
        counter.count(min(self.tokens.num_known, self.tokens.num_prompt + 1), self.rows.batch.rows[self.row].num_hits)
        if self.rows.batch.pool.num_banks > 1:
            counter.count_lost(&self.end.lost)
        return 0

    def probe(self, extra_keys=(), shard=None) -> int:
        """Return the number of tokens that `admit` would hit, in the tier too, with enough free pages. The row keeps hashes."""
        cdef RowStore rows = self.rows
        cdef list keys = checked_extra_keys(extra_keys)
        cdef Py_ssize_t num_hashes = 0
        cdef Query query
        self.shard = as_shard(shard, rows.num_shards)
        self.claim_row()
        try:
            self.set_contents(keys)
            rows.acquire_locks()
            if rows.batch.hash_page_size:
                query = self.query()
                num_hashes = find_reachable(&rows.store.pool, &query, self.shard)
            rows.release_locks()
        finally:
            if not self.keeps_hashes:
                rows.refusals[self.row] = None
            rows.batch.records[self.row].state = FREE
        return num_hashes * rows.batch.hash_page_size

    cdef Query query(self) noexcept:
        """Return the look-up of the request, whose tokens are hashed."""
        cdef Batch *batch = &self.rows.batch
        return query_of(
            self.rows.groups, digests_of(batch, self.row), batch.rows[self.row].num_hashed, batch.hash_page_size,
            min(self.tokens.num_known, self.tokens.num_prompt + 1), ids_in_shard(batch.pool, self.shard),
        )

    cdef int claim_row(self) except -1:
        """Claim the row, so that no other call admits a request there or moves another row there."""
        cdef bint is_claimed
        with self.rows.own_lock()[0]:
            is_claimed = self.rows.batch.records[self.row].state != FREE
            if not is_claimed:
                self.rows.batch.records[self.row].state = CLAIMED
        if is_claimed:
            raise ArgumentError(f"row {self.row}: got a row that is admitted already, or being admitted, allowed: a free one")
        return 0

    cdef int set_contents(self, list extra_keys) except -1:
        """Copy the tokens and hash their full pages. Leading pages that the row hashed for its last request are kept."""
        cdef RowStore rows = self.rows
        cdef PageIds tokens = self.token_ids
        cdef Batch *batch = &rows.batch
        cdef const int32_t *copied = tokens_of(batch, self.row)
        cdef Py_ssize_t start, num_kept = 0
        cdef int32_t signs = 0
        cdef void *thread
        cdef bint has_same_keys = extra_keys == (rows.extra_key_bytes[self.row] or [])
        if not has_same_keys:
            rows.forget_extra_keys(self.row)
        if batch.hash_page_size:
            num_kept = count_hashed_before(batch, self.row, tokens.ids, tokens.num)
        self.keeps_hashes = has_same_keys and num_kept == batch.rows[self.row].num_hashed
        assert batch.records[self.row].state == CLAIMED
        batch.rows[self.row].num_hashed = <int32_t>num_kept
        start = num_kept * batch.hash_page_size
        copy_bytes(tokens_of(batch, self.row) + start, tokens.ids + start, (tokens.num - start) * sizeof(int32_t))
        if batch.hash_page_size:
            if extra_keys and not has_same_keys:
                self.set_extra_keys(extra_keys)
            if self.hashed is not None and self.hashed.fits(&batch.hashing, batch.hash_page_size, extra_keys):
                self.copy_digests(num_kept)
            thread = let_others_run(count_hashable(batch, tokens.num) - batch.rows[self.row].num_hashed)
            signs = hash_row(batch, self.row, count_keyed(batch, tokens.num))
            go_on(thread)
            start = batch.rows[self.row].num_hashed * batch.hash_page_size
        if (signs | signs_of(copied + start, tokens.num - start)) < 0:
            batch.rows[self.row].num_hashed = <int32_t>num_kept
            refuse_negative(copied, tokens.num, 0)
        return 0

    cdef int copy_digests(self, Py_ssize_t num_kept) except -1:
        """Copy the digests behind the first `num_kept`, of tokens that were copied."""
        cdef Batch *batch = &self.rows.batch
        cdef HashChain chain = self.hashed.chain
        cdef Digest *digests = digests_of(batch, self.row)
        cdef Digest *uppers = batch.rows[self.row].uppers
        cdef Py_ssize_t num = max(num_kept, min(chain.num, <Py_ssize_t>count_hashable(batch, self.token_ids.num)))
        copy_bytes(digests + num_kept, chain.digests + num_kept, (num - num_kept) * sizeof(Digest))
        if uppers != NULL:
            copy_bytes(uppers + num_kept, chain.uppers + num_kept, (num - num_kept) * sizeof(Digest))
        batch.rows[self.row].num_hashed = <int32_t>num
        return 0

    cdef int set_extra_keys(self, list extra_keys) except -1:
        cdef bytes data
        cdef Py_ssize_t num = 1
        cdef ExtraKey *keys = <ExtraKey *>calloc(len(extra_keys) + 2, sizeof(ExtraKey))
        if keys == NULL:
            raise MemoryError(f"{len(extra_keys)} extra keys")
        self.rows.batch.rows[self.row].extra_keys = keys
        self.rows.extra_key_bytes[self.row] = extra_keys
        keys.page = OTHER_PAGES
        for page, data in extra_keys:
            if page is None:
                keys.data, keys.size = <const uint8_t *><const char *>data, len(data)
            else:
                keys[num] = ExtraKey(data=<const uint8_t *><const char *>data, size=len(data), page=page)
                num += 1
        keys[num].page = LAST_PAGE
        return 0

    cdef object try_start(self, bint takes_hits):
        """Hit the request's prefix and take its pages. Return the number of hit tokens; a `RefusedRequest`, with nothing taken,
        if too few pages are free.
        """
        cdef RowStore rows = self.rows
        cdef Batch *batch = &rows.batch
        cdef Holding *holding = holding_of(batch, self.row)
        cdef tuple hits = new_ids(batch.num_groups) if takes_hits else ()
        cdef RefusedRequest refusal = RefusedRequest.__new__(RefusedRequest)
        cdef object num_hit_tokens = None
        cdef int32_t held_free = NULL_PAGE, queue = self.shard
        cdef int64_t num_changes
        cdef int64_t num_excess = 0
        cdef Hits *array = NULL
        cdef Demand demand
        cdef Py_ssize_t[MAX_BANKS] num_for_rows
        cdef bint has_states = False
        cdef Shortage shortage
        cdef Loads loads
        cdef bint has_pages = False, has_room = True, is_right = True
        refusal.hits, refusal.num_tokens, refusal.shard = hits, self.tokens.num_known, self.shard
        loads.short_bank = NO_BANK
        lock_for(rows, self.step, True)
        try:
            batch.rows[self.row].shard = self.shard
            num_changes = count_changes(batch.pool)
            rows.set_shortage(NULL)
            if takes_hits:
                has_room = self.load_hits(refusal, &array, &loads)
            num_hit_tokens = refusal.num_hit_tokens  # a Python object, made before pages are taken
            self.begin_demand(&demand, array, refusal.num_hit_tokens)
            if has_room:
                is_right = price(batch.pool, holding, &demand, NULL, batch.rows[self.row].num_hashed)
            if has_room and is_right and not self.hits_fewer():
                if loads.short_bank != NO_BANK:
                    add_loads(&demand, &loads)
                else:
                    has_states = rare(batch.has_state) and count_state_hits(holding, array) > 0
                    if has_states:  # a checkpoint is not copied at the cost of a row that has no state yet
                        count_reserved_states(batch, 1, num_for_rows)
                    has_pages = fit_or_adopt(batch.pool, holding, &demand, num_for_rows if has_states else NULL) == FITS
                has_room = demand.num_adopted or reserve_copies(batch.pool, count_state_hits(holding, demand.hits))
                if not has_pages:
                    num_excess = find_any_excess(batch.pool, holding, array, demand.num_new_in, 0, &queue)
                    self.begin_refusal(refusal, &demand, num_changes)
                    shortage = shortage_of(batch.pool, holding, &demand, refusal.num_hit_tokens)
                    rows.set_shortage(&shortage if not num_excess else NULL)
                    if not num_excess:
                        count_refusal(batch.pool, shortage.queue)
                else:
                    held_free = find_held_free(batch.pool, demand.num_taken)
                    if held_free == NULL_PAGE and has_room:
                        self.fill_row(&demand, <int32_t>refusal.num_hit_tokens)
        finally:
            rows.release_locks()
            free(array)
        self.check_start(is_right, held_free, has_room)
        if num_excess:
            rows.store.refuse_size(f"row {self.row}", num_excess, queue)
        return num_hit_tokens if has_pages else refusal

    cdef bint hits_fewer(self) noexcept:
        """Whether hits that its queue expected are gone: then the request is not admitted, and another one may be next."""
        return self.hashed is not None and self.hashed.falls_short()

    cdef int check_start(self, bint is_right, int32_t held_free, bint has_room) except -1:
        """Raise the error for a wrong hit, for a free page that a caller gave a reference, and for missing memory."""
        if not is_right:
            raise PageHashError(
                f"row {self.row}: got a hit on a page that cannot be held, allowed: pages that take a further reference"
            )
        self.rows.store.check_untaken(held_free)
        if not has_room:
            raise MemoryError("the pages that were hit")
        return 0

    cdef bint load_hits(self, RefusedRequest refusal, Hits **array, Loads *loads) noexcept:
        """Find the hits, queue their loads from the tier, and store the hits in the refusal. If a bank has too few free pages
        for the loads, count these in `loads`, and store null pages for them. False if memory is short. The locks are held.
        """
        cdef RowStore rows = self.rows
        cdef Batch *batch = &rows.batch
        cdef Contents contents = contents_for(batch, self.row, self.tokens.num_known, self.identity)
        cdef Query query = self.query()
        cdef Py_ssize_t num_hashes = find_and_load(
            batch.pool, &query, refusal.hits, &contents, self.shard, self.num_reserved
        )
        loads.short_bank = query.short_bank
        if num_hashes >= 0 and loads.short_bank != NO_BANK:
            num_hashes = fetch_hits(batch.pool, &query, query.num_reachable, refusal.hits)
            if num_hashes >= 0:
                refusal.num_loads = count_loads(&query, num_hashes, refusal.hits, loads)
        if num_hashes < 0:
            return False
        refusal.num_hit_tokens = num_hashes * batch.hash_page_size
        self.end = query.end
        if self.hashed is not None:
            self.hashed.num_found = refusal.num_hit_tokens
        array[0] = list_hits(refusal.hits)
        return array[0] != NULL

    cdef void fix_boundaries(self, Py_ssize_t num_hits) noexcept:
        """Set the prompt and the boundaries of the free row; a refusal does not reset them. The locks are held."""
        cdef Holding *holding = holding_of(&self.rows.batch, self.row)
        cdef int64_t num_external = count_external_tokens(&self.tokens, num_hits)
        cdef ResumePlaces places = ResumePlaces(
            num_tokens=self.tokens.num_known, junction=self.end.junction, has_parted=self.end.has_parted,
            writes_answer=pays_to_write_answers(self.rows.batch.pool, holding.groups, holding.num_groups),
            external_end=num_hits + num_external if num_external else 0, named=ids_in(self.resume_at),
            num_named=0 if self.resume_at is None else self.resume_at.num,
        )
        if self.rows.batch.has_boundaries:
            begin_boundaries(&self.rows.groups.boundaries, holding.boundaries, &places)
        set_prompt(holding, self.tokens.num_prompt)

    cdef void begin_demand(self, Demand *demand, Hits *hits, Py_ssize_t num_hits) noexcept:
        """Set what the request asks for behind its hits. The locks are held."""
        self.fix_boundaries(num_hits)
        self.num_room = count_room_tokens(&self.tokens, num_hits)
        self.num_slots = count_slots(&self.tokens, self.num_room, self.rows.batch.max_num_tokens)
        demand.num_tokens, demand.hits, demand.end = self.num_slots, hits, &self.end if hits != NULL else NULL
        demand.num_reserved, demand.shard = self.num_reserved, self.shard

    cdef void begin_refusal(self, RefusedRequest refusal, const Demand *demand, int64_t num_changes) noexcept:
        """Prepare a refusal that watches the hits, found after `num_changes` changes of the index. The locks are held."""
        cdef Batch *batch = &self.rows.batch
        cdef Holding *holding = holding_of(batch, self.row)
        cdef Py_ssize_t g, num_held = -demand.num_free_hits
        cdef Query query
        refusal.num_slots = demand.num_tokens
        for g in range(batch.num_groups):
            num_held += count_attached(holding, demand, g)
        num_held += count_state_hits(holding, demand.hits)  # an adopted checkpoint needs no page of its own
        query = self.query()
        refusal.begin(batch.pool, &query, num_held, num_changes)

    cdef void fill_row(self, const Demand *demand, int32_t num_hits) noexcept:
        """Give an empty row the hits and pages of a fitting demand, and cache its full pages, except those that come from
        elsewhere.
        """
        cdef Batch *batch = &self.rows.batch
        cdef bint is_pending
        assert batch.records[self.row].state == CLAIMED and batch.records[self.row].num_tokens == 0
        set_identity(batch, self.row, self.identity)
        self.take_demanded(demand)
        is_pending = self.begin_counts(num_hits)
        if not batch.caches_computed:
            cache_row(batch, self.row, count_final(batch, self.row))
            cache_waiting(&batch.waiting)
        begin_stay(batch, self.row)
        set_state(batch, self.row, PENDING if is_pending else RUNNING)
        count_run_tokens(batch, self.row)
        if not is_pending:
            self.launch(num_hits)
        if rare(batch.writes_states):
            write_states(batch, self.row, num_hits, self.num_room)
        plan_next(batch, self.row)
        if is_pending:
            batch.records[self.row].next_plan = 1

    cdef void take_demanded(self, const Demand *demand) noexcept:
        """Take the hits and pages of a demand, and show them in the tables."""
        cdef Batch *batch = &self.rows.batch
        cdef Holding *holding = holding_of(batch, self.row)
        assert holding.held.num_pages == 0
        attach(batch.pool, holding, demand)
        show_row(batch, self.row)
        take_pages(batch, self.row, <int32_t>demand.num_tokens, NULL)
        if batch.num_local_shards:
            show_local_ids(batch, self.row)
        copy_states(batch.pool, holding, demand)

    cdef bint begin_counts(self, int32_t num_hits) noexcept:
        """Set the row's counts of tokens; True if some of them come from elsewhere."""
        cdef RowRecord *record = &self.rows.batch.records[self.row]
        cdef Row *row = &self.rows.batch.rows[self.row]
        cdef int32_t num_external = count_external_tokens(&self.tokens, num_hits)
        record.num_tokens = <int32_t>self.tokens.num_known
        record.num_computed = record.num_planned = num_hits if num_external else self.num_room
        row.num_hits, row.num_external, row.ring_start = num_hits, num_external, num_hits
        assert record.num_computed + num_external <= self.tokens.num_known
        return num_external > 0

    cdef void launch(self, int32_t num_hits) noexcept:
        """Launch the tokens behind the hits. Drafts belong to the step only if it computes all known tokens."""
        cdef RowRecord *record = &self.rows.batch.records[self.row]
        cdef Launch launch = Launch(before=num_hits, num_sampled=0, step=0)
        if record.num_computed == record.num_tokens:
            record.num_planned = self.num_slots
            if self.step is not None:  # else `append` or `step` tells the token
                launch.num_sampled = self.num_slots - record.num_computed + 1
        note_planned(&self.rows.batch, self.row)
        launch_admission(&self.rows.batch, self.row, self.step, self.call, launch)
