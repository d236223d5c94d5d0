# The requests of a manager, by id.

from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF
from libc.stdint cimport int64_t

from pagepool.core.base cimport GIL_DISABLED
from pagepool.core.holding.request_pages cimport *

cdef extern from *:
    """
    /* Finds an item and references it at once: without a GIL another thread may remove it in between. 0: there is none. */
    #if PY_VERSION_HEX >= 0x030D0000
    #define pagepool_get_item PyDict_GetItemRef
    #else
    #define pagepool_get_item(dict, key, item) 0  /* with a GIL it is not called */
    #endif
    """
    int get_item "pagepool_get_item" (dict values, object key, PyObject **item) except -1


cdef class RequestMaps:
    cdef readonly PageStore store
    cdef readonly dict held         # request id -> RequestPages
    cdef readonly dict hashes       # request id -> RequestHashes
    cdef list writing               # requests with writes of states to be taken; some writes may have been dropped since
    cdef object reentrant_lock      # a request's attributes and finalizers may call back
    cdef readonly tuple query_counters  # two `QueryCounter`
    cdef int process                # number of the process that made it
    cdef bint trusts_requests       # requests with one id share its pages, and hits may be counted twice

    cdef int count_admission(self, object request, object request_id, int64_t num_taken_tokens) except -1


cdef inline RequestPages find_held(dict requests, object request_id):
    """Return the pages that a request holds, or None. The manager's lock is not needed."""
    cdef PyObject *item = NULL
    cdef RequestPages held = None
    if not GIL_DISABLED:
        return requests.get(request_id)
    if get_item(requests, request_id, &item):
        held = <RequestPages>item
        Py_DECREF(held)
    return held
