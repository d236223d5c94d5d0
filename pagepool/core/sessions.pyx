"""Sessions: rows and requests with the same id, and the pages that they have cached."""

cimport cython
from libc.stdint cimport int32_t

from pagepool.core.arguments cimport term_of_seconds
from pagepool.core.ids cimport PageIds
from pagepool.core.owners cimport hold_session, is_live, leave_session
from pagepool.core.queue cimport expect_page
from pagepool.core.records cimport NEVER, NO_SESSION
from pagepool.core.store cimport PageStore

from pagepool.errors import ArgumentTypeError

cdef enum:
    MIN_SESSIONS = 64         # that are remembered before any is forgotten


def require_session_id(session_id) -> str | None:
    """The id of a session as a str, or None."""
    if session_id is not None and not isinstance(session_id, str):
        raise ArgumentTypeError(f"session_id: got {type(session_id).__name__}, allowed: a string, or None")
    return None if session_id is None else str.__str__(session_id)  # a subclass may equal anything


@cython.final
@cython.auto_pickle(False)
cdef class PageSessions:
    """The numbers of the sessions of a pool, by id. Calls of several threads are serialised by the caller."""

    cdef PageStore store
    cdef dict numbers
    cdef list unused                # numbers
    cdef Py_ssize_t num_at_sweep

    def __cinit__(self, PageStore store not None):
        self.store, self.numbers, self.unused, self.num_at_sweep = store, {}, [], MIN_SESSIONS

    def __reduce__(self):
        raise ArgumentTypeError("the sessions of a pool cannot be pickled")

    def hold(self, session_id) -> int:
        """Return the number of a session, valid until `release`; 0 for None. Amortised O(1); the first call O(num_pages)."""
        cdef object number, checked = require_session_id(session_id)
        if checked is None:
            return NO_SESSION
        number = self.numbers.get(checked)
        if number is None:
            if len(self.numbers) >= self.num_at_sweep:
                self.forget()
            number = self.unused.pop() if self.unused else self.store.add_session()
            self.numbers[checked] = number
        with self.store.lock:
            hold_session(&self.store.pool, number, 1)
        return number

    def release(self, number) -> None:
        """Release a number of `hold`. It is used again when no page, row or request has it any more."""
        cdef int32_t checked = self.store.checked_session(number)
        with self.store.lock:
            if checked != NO_SESSION and self.store.pool.sessions.items[checked].num_holders > 0:
                hold_session(&self.store.pool, checked, -1)

    cdef int forget(self) except -1:
        """Forget the sessions that are not live."""
        cdef int32_t number
        cdef bint is_gone
        for name in list(self.numbers):
            number = self.numbers[name]
            with self.store.lock:
                is_gone = not is_live(&self.store.pool.sessions.items[number])
            if is_gone:
                self.unused.append(self.numbers.pop(name))
        self.num_at_sweep = max(<Py_ssize_t>MIN_SESSIONS, 2 * <Py_ssize_t>len(self.numbers))
        return 0

    def expect(self, session_id, seconds) -> int:
        """Say in how many seconds the pages of a session are wanted (None: nobody knows), the last page first; with infinity
        they belong to it no more. Returns how many pages. O(pages).
        """
        cdef object number = self.numbers.get(require_session_id(session_id), NO_SESSION)
        cdef int32_t term = term_of_seconds(seconds)
        cdef PageIds terms = PageIds([term])
        cdef int32_t _, page_id, following, num_pages = 0
        cdef bint has_room = True
        if number == NO_SESSION:
            return 0
        with self.store.lock:
            num_pages = self.store.pool.sessions.items[<int32_t>number].num_pages
            has_room = num_pages == 0 or self.store.make_terms(terms)
            if num_pages and has_room:
                page_id = self.store.pool.sessions.links[self.store.pool.sessions.items[<int32_t>number].first].prev
            for _ in range(num_pages if has_room else 0):
                following = self.store.pool.sessions.links[page_id].prev
                if term == NEVER:
                    leave_session(&self.store.pool, page_id)
                expect_page(&self.store.pool, page_id, term)
                page_id = following
        if not has_room:
            raise MemoryError(f"expectations of {self.store.pool.num_pages} pages")
        return num_pages
