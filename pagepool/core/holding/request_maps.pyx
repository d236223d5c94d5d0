"""The requests of a manager, by id: the pages they hold, and the hashes of their tokens."""

cimport cython
from libc.stdint cimport int64_t

from pagepool.core.base cimport process_number, require_process
from pagepool.core.holding.lookups cimport *
from pagepool.core.pool cimport QueryCounter

from threading import RLock

from pagepool.arguments import id_of
from pagepool.errors import ArgumentError, shown


@cython.auto_pickle(False)
cdef class RequestMaps:
    """The requests of a manager by id: the pages they hold, and the hashes of their tokens. ``lock`` guards both. Admissions
    are counted in ``query_counters``: the first counts requests that were not preempted, the second others.
    """

    def __cinit__(self):
        self.process = process_number
        self.held, self.hashes, self.writing, self.reentrant_lock = {}, {}, [], RLock()

    def __init__(self, PageStore store not None, bint trusts_requests=False):
        """Start without requests; their pages come from `store`. With `trusts_requests`, requests with one id share pages."""
        self.store, self.trusts_requests = store, trusts_requests
        self.query_counters = QueryCounter(store), QueryCounter(store, is_preempted=True)

    @property
    def lock(self):
        """The manager's lock. IntegrityError in a process other than the manager's."""
        require_process(self.process, "CacheManager")
        return self.reentrant_lock

    def find_held(self, request):
        """Return the pages that a request holds, or None. ArgumentError if another object holds pages under the
        request's id, unless requests with one id share pages.
        """
        cdef RequestPages held
        try:  # each look-up of a new request passes here: check an id only after a failure
            held = find_held(self.held, request.request_id)
        except (AttributeError, TypeError):
            held = find_held(self.held, id_of(request))
        if held is not None and held.owner is not request and not self.trusts_requests:
            raise ArgumentError(
                f"request {shown(request.request_id)}: got another object than the one that holds pages under this id, "
                "allowed: that object, or another id"
            )
        return held

    def refuse_nested(self, request_id) -> None:
        """Raise the error for a request whose attributes allocate, fork or free pages under its id while a call reads them."""
        raise ArgumentError(
            f"request {shown(request_id)}: got attributes that allocate or free its pages while they are read, allowed: "
            "attributes that leave the pages alone"
        )

    cdef int count_admission(self, object request, object request_id, int64_t num_taken_tokens) except -1:
        """Count the look-up of a request just admitted, which took hits of `num_taken_tokens` tokens. Forget the hashes of a
        waiting request with the same id.
        """
        cdef RequestHashes hashes = self.hashes.get(request_id)
        cdef QueryCounter counter
        cdef FoundPrefix found
        if hashes is None:
            return 0
        if hashes.request is not request:
            del self.hashes[request_id]
            return 0
        if hashes.query is None:
            return 0
        found, counter = hashes.query, self.query_counters[hashes.query.is_preempted]
        hashes.query, hashes.refusal, hashes.is_counted = None, None, True
        counter.count(found.num_queried_tokens, min(found.num_hit_tokens, num_taken_tokens))
        if self.store.pool.num_banks > 1:
            counter.count_lost(&found.end.lost)
        return 0
