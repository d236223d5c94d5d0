from libc.stdint cimport int32_t, int64_t

from pagepool.compat.vllm.policy_queue cimport PolicyQueue


cdef enum Outcome:             # how a request's turn ends
    FINISHED
    ABORTED
    PREEMPTED


cdef class Turn:
    cdef object name           # name of the session that the turn ends, or None
    cdef int32_t number        # number of the session, held until the turn ends
    cdef tuple pins            # numbers of leading tokens, each with the seconds for which their blocks are held
    cdef int32_t term          # expected return of the blocks that the request gives back
    cdef bint has_all_input    # whether the request is a streaming one that has answered all its input


cdef class SessionQueue(PolicyQueue):
    cdef readonly object sessions       # PageSessions of the store
    cdef readonly object listener       # Listener
    cdef readonly dict shares           # shares of salts that were set in the store, by key
    cdef list pins                      # a heap: end in ticks of stamps, number of the pin, blocks
    cdef readonly Py_ssize_t num_pinned_blocks
    cdef Py_ssize_t num_pins
    cdef dict turns                     # by request id: requests with hints that have blocks, or wait for some
    cdef set heard                      # ids of preempted requests, whose hints were counted

    cdef Turn hear(self, object request)
    cdef int end_input(self, object request_id) except -1
    cdef int end_turn(self, object request_id, list groups, Outcome outcome) except -1
    cdef int pin(self, list groups, int64_t num_tokens, double seconds) except -1
    cdef int end_pins(self) except -1
    cdef int mark(self, list groups, int32_t term) except -1
