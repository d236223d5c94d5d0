from libc.stdint cimport int32_t

from pagepool.compat.vllm.policy_queue cimport PolicyQueue


cdef enum Outcome:             # how a request's turn ends
    FINISHED
    ABORTED
    PREEMPTED


cdef class Turn:
    cdef object name           # of the session that the turn ends, or None
    cdef int32_t number        # of the session, held until the turn ends
    cdef int32_t term          # expected return of the blocks that it gives back


cdef class SessionQueue(PolicyQueue):
    cdef readonly object sessions       # PageSessions of the store
    cdef readonly object listener       # Listener
    cdef readonly dict shares           # of salts that were heard here, by key
    cdef dict turns                     # by request id: requests that have blocks, or wait for some, and said something

    cdef Turn hear(self, object request)
    cdef int end_turn(self, object request_id, list groups, Outcome outcome) except -1
    cdef int mark(self, list groups, int32_t term) except -1
