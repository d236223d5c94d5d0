"""A stand-in for vLLM's free queue that listens to requests: blocks belong to sessions, and may be expected back.

`pagepool.hints` reads the hints of requests, and a `Listener` bounds and counts them. This module does not need vLLM.
"""

from libc.stdint cimport int32_t, int64_t

from pagepool.compat.vllm.blocks cimport Block, as_block
from pagepool.core.base cimport UNKNOWN
from pagepool.core.pool cimport NO_SESSION, NOBODY, NULL_PAGE, SECOND, Pool, expect_page, now_of
from pagepool.core.values cimport PageIds, term_of_seconds

from heapq import heappop, heappush
from math import inf

from pagepool._core import PageSessions
from pagepool.compat.patching import Unpatched
from pagepool.compat.vllm.blocks import Queue
from pagepool.compat.vllm.listener import get_listener

cdef int64_t MAX_TOKENS = 1 << 40
cdef object PREEMPTED_SECONDS = 1.0  # a preempted request is the first to be resumed


cdef class Turn:
    """The hints of a request that matter for its blocks."""


cdef class SessionQueue(PolicyQueue):
    """Free blocks in the order of `PolicyQueue` until one is expected back; from then on as in a `PagePool` with expectations:
    uncached blocks first, then blocks that are not expected back, then blocks whose return is furthest off.

    A request's call costs one look-up more; a release costs an expectation for each block if the request says when it comes
    back. A block takes 6 bytes more from the first expectation, 12 from the first session. No hint of a request raises an
    error.
    """

    def __init__(self, blocks, eviction="adaptive", listener=None):
        self.sessions = PageSessions(self.store)
        self.listener = get_listener() if listener is None else listener
        self.turns, self.shares, self.pins, self.heard = {}, {}, [], set()
        self.listens = True

    # Calls for a request.

    cdef int begin_turn(self, object request) except -1:
        cdef Turn turn
        self.end_pins()
        self.session = NO_SESSION
        try:
            turn = self.turns.get(request.request_id)
            if turn is None:
                turn = self.hear(request)
            if turn is not None:
                self.session = turn.number
        except Exception as error:
            self.listener.count_error(error)
        return 0

    cdef Turn hear(self, object request):
        """Read the hints of a request; if it has any, remember them until `end_turn`."""
        cdef Turn turn
        heard = self.listener.hear(request, request.request_id in self.heard)
        if heard is None:
            return None
        for session, seconds in heard.others:
            self.sessions.expect(session, seconds)
        turn = Turn()
        turn.name = heard.session if heard.closes else None
        turn.term = term_of_seconds(heard.seconds)
        turn.pins = heard.pins
        if heard.tenant is not None and heard.tenant not in self.shares:
            self.shares = dict(self.listener.shares)
            self.sessions.set_shares(self.shares)
        turn.number = self.sessions.hold(heard.session, heard.tenant)
        self.turns[request.request_id] = turn
        return turn

    cdef int go_on(self, object request_id) except -1:
        cdef Turn turn = self.turns.get(request_id)
        if self.pins:
            self.end_pins()
        self.session = NO_SESSION if turn is None else turn.number
        return 0

    cdef int end_call(self) except -1:
        self.session = NOBODY
        return 0

    # The end of a turn.

    cdef int end_input(self, object request_id) except -1:
        """Note that a streaming request, which has answered all its input, ends without further input."""
        cdef Turn turn = self.turns.get(request_id)
        if turn is not None:
            turn.has_all_input = True
        return 0

    cdef int end_turn(self, object request_id, list groups, Outcome outcome) except -1:
        """Note that a request gives back the blocks in `groups`, or will do so once vLLM permits. Expectations count from
        this call.
        """
        cdef Turn turn = self.turns.pop(request_id, None)
        cdef int32_t term = UNKNOWN
        if outcome == Outcome.PREEMPTED and turn is not None:
            self.heard.add(request_id)
        elif outcome != Outcome.PREEMPTED and self.heard:
            self.heard.discard(request_id)
        if outcome == Outcome.ABORTED and turn is not None and turn.has_all_input:
            outcome = Outcome.FINISHED
        try:
            if turn is not None:
                self.sessions.release(turn.number)
            if outcome == Outcome.PREEMPTED:
                term = term_of_seconds(PREEMPTED_SECONDS)
            elif outcome == Outcome.FINISHED and turn is not None:
                term = turn.term
                for num_tokens, seconds in turn.pins:
                    self.pin(groups, min(num_tokens, MAX_TOKENS), seconds)
                if turn.name is not None:
                    self.sessions.expect(turn.name, inf)
            if term != UNKNOWN:
                self.mark(groups, term)
        except Exception as error:
            self.listener.count_error(error)
        return 0

    cdef int pin(self, list groups, int64_t num_tokens, double seconds) except -1:
        """Hold the cached blocks of a request's first tokens for some time, unless too many blocks are held already."""
        cdef list pinned = []
        cdef Block block
        for blocks in groups:
            for value in blocks:
                block = as_block(value)
                if block._block_hash is not None and block.num_hash_tokens <= num_tokens and self.id_of(block) != NULL_PAGE:
                    pinned.append(block)
        is_held = 0 < len(pinned) <= self.listener.max_pinned * len(self.blocks) - self.num_pinned_blocks
        self.listener.count_pin(is_held)
        if is_held:
            heappush(self.pins, (now_of(&self.store.pool.expected) + <int64_t>(seconds * SECOND), self.num_pins, pinned))
            self.num_pins += 1
            self.num_pinned_blocks += len(pinned)
            for block in pinned:
                block.ref_cnt += 1
        return 0

    cdef int end_pins(self) except -1:
        """Give back the blocks of expired pins, the last block of each first."""
        cdef list pinned
        while self.pins and now_of(&self.store.pool.expected) >= <int64_t>self.pins[0][0]:
            _, _, pinned = heappop(self.pins)
            self.num_pinned_blocks -= len(pinned)
            pinned.reverse()
            (<Block>pinned[0]).pool.free_blocks(pinned)
        return 0

    cdef int mark(self, list groups, int32_t term) except -1:
        """Expect back, within `term`, the blocks whose only reference is about to go."""
        cdef Pool *pool = &self.store.pool
        cdef PageIds terms = PageIds([term])
        cdef Block block
        cdef int32_t page_id
        cdef int64_t now
        cdef bint has_room
        with self.store.lock:
            has_room = self.store.make_terms(terms)
            now = now_of(&pool.expected)
            for blocks in groups if has_room else ():
                for value in blocks:
                    block = as_block(value)
                    page_id = self.id_of(block)
                    if page_id != NULL_PAGE and block.ref_cnt == 1:
                        expect_page(pool, page_id, term, now)
        if not has_room:
            raise MemoryError(f"expectations of {len(self.blocks)} blocks")
        return 0

    # Inspection.

    @property
    def num_turns(self) -> int:
        """Number of requests with hints that have not given back their blocks."""
        return len(self.turns)


class ListeningQueue(SessionQueue, metaclass=Unpatched):
    """The stand-in for vLLM's class that listens, if the pool caches."""
    __slots__ = ()
    eviction = "lru"

    def __new__(cls, blocks):
        listed = list(blocks)
        pool = as_block(listed[0]).pool if listed else None
        if pool is None or not pool.enable_caching:
            return Queue(listed)
        return super().__new__(cls, listed, cls.eviction)


class AdaptiveListeningQueue(ListeningQueue):
    """A `ListeningQueue` with adaptive eviction."""
    __slots__ = ()
    eviction = "adaptive"
