"""Page ids and token ids in native memory."""

cimport cython
from cpython.long cimport PyLong_CheckExact
from cpython.mem cimport PyMem_RawFree as free
from libc.stdint cimport int64_t

from pagepool.core.base cimport GIL_DISABLED, MAX_PAGES, copy_bytes, find_negative, reserve_items
from pagepool.core.values.arguments cimport *

import numpy as np

from pagepool.arguments import require_unmasked
from pagepool.errors import ArgumentError, ArgumentTypeError

cdef object ndarray = np.ndarray


@cython.freelist(8)
@cython.no_gc  # an int32 array refers to nothing
cdef class PageIds:
    """An immutable run of int32 page ids in native memory, used by the manager instead of page objects.

    It copies a list, a tuple, another iterable of ints, an array of ints, or another PageIds. ``len()`` is the number of ids;
    `to_list` and `to_array` copy them out. Always: the first `num` of `capacity` ids are valid, and borrowed ids do not grow.
    """

    def __cinit__(self, values=None):
        if values is not None:
            self.fill(values)

    def __dealloc__(self):
        if self.array is None:
            free(self.ids)

    def __reduce__(self):
        return PageIds, (self.to_list(),)

    def __len__(self):
        return self.num

    def __getitem__(self, Py_ssize_t i) -> int:
        if not 0 <= i < self.num:
            raise IndexError(f"index: got {i}, allowed: 0 to {self.num - 1}")
        return self.ids[i]

    def __contains__(self, value) -> bool:
        cdef Py_ssize_t i
        cdef int32_t wanted = page_id_of(value), num_found = 0
        for i in range(self.num):  # no early exit, so that it vectorises
            num_found |= self.ids[i] == wanted
        return num_found != 0

    def __repr__(self):
        return f"{type(self).__name__}({self.to_list()})"

    cdef int reserve(self, Py_ssize_t num_more) except -1:
        """Make room for `num_more` ids, so that adding them cannot fail. Amortised O(1) per id."""
        if not self.try_reserve(num_more):
            raise MemoryError(f"{self.num + num_more} int32 values")
        return 0

    cdef bint try_reserve(self, Py_ssize_t num_more) noexcept:
        """Make room, as `reserve` does; return False if memory is short."""
        assert num_more >= 0 and self.array is None
        return reserve_items(<void **>&self.ids, &self.capacity, self.num + num_more, sizeof(int32_t))

    cdef void put(self, const int32_t *ids, Py_ssize_t n) noexcept:
        """Append ids. There must be room."""
        assert n >= 0 and self.num + n <= self.capacity
        copy_bytes(self.ids + self.num, ids, n * sizeof(int32_t))
        self.num += n

    cdef int add(self, const int32_t *ids, Py_ssize_t n) except -1:
        self.reserve(n)
        self.put(ids, n)
        return 0

    cdef int add_items(self, list items, Py_ssize_t start, Py_ssize_t stop, str name="page_ids") except -1:
        """Append ``items[start:stop]``, fewer if the list ends sooner. A slice would touch each reference count twice."""
        cdef Py_ssize_t i, num = 0
        cdef int32_t number
        assert start >= 0
        stop = min(stop, len(items))
        self.reserve(max(0, stop - start))
        while not GIL_DISABLED and start + num < stop and is_small_item(items, start + num, &self.ids[self.num + num]):
            num += 1  # reads nearly all lists whole: no Python code runs here, so the list stays as it is
        try:
            for i in range(start + num, stop):
                if i >= len(items):
                    raise changed_values(name)
                number = int32_of(items[i])  # may run Python code that changes the list, or even self
                if self.num + num >= self.capacity:
                    raise changed_values(name)
                self.ids[self.num + num] = number
                num += 1
        except (OverflowError, TypeError) as error:
            raise explained(name, error) from None
        assert self.num + num <= self.capacity
        self.num += num
        return 0

    @staticmethod
    def of_slice(list items not None, start, stop) -> PageIds:
        """Return the token ids ``items[start:stop]``, fewer if the list ends sooner."""
        cdef PageIds ids = PageIds.__new__(PageIds)
        ids.add_items(items, size_of(start, "start"), size_of(stop, "stop"), "token_ids")
        return ids

    @staticmethod
    def joined(groups) -> PageIds:
        """Return the ids of several PageIds, one after another."""
        cdef PageIds ids = PageIds.__new__(PageIds)
        for group in groups:
            ids.fill(<PageIds?>group)
        return ids

    cdef int fill(self, object values) except -1:
        """Append ids; append nothing if one of them is not an int that fits int32."""
        cdef PageIds ids
        if isinstance(values, (PageIds, ndarray)):
            ids = as_page_ids(values)
            self.add(ids.ids, ids.num)
        else:
            self.add_items(as_list(values, "page_ids"), 0, MAX_PAGES)
        return 0

    def to_list(self) -> list:
        """Return the ids as a new list."""
        return list_of(self)

    def to_array(self):
        """Return the ids as a new int32 array."""
        return array_of(self.ids, self.num)


cdef object changed_values(str name):
    """Return the error for a list that another thread, or an item, changes during a call."""
    return ArgumentError(f"{name}: got values that changed while they were read, allowed: values that stay as they are")


cdef bint borrow(PageIds ids, object array) noexcept:
    """Let `ids`, a new object, borrow the values of a NumPy array without a copy: they change with the array, and none may be
    added. Return False for an array that is no contiguous int32 vector.
    """
    cdef const ArrayHead *head = int32_vector_in(array)
    assert ids.ids == NULL and ids.num == 0 and ids.capacity == 0
    if head == NULL:
        return False
    ids.array, ids.ids, ids.num = array, <int32_t *>head.data, head.shape[0]
    return True


cdef tuple new_ids(Py_ssize_t num_groups):
    """Return an empty `PageIds` for each group."""
    if num_groups == 1:
        return (PageIds.__new__(PageIds),)
    return tuple([PageIds.__new__(PageIds) for _ in range(num_groups)])


cdef PageIds as_page_ids(object values, str name="page_ids"):
    """Return `values` as int32 to read during a call; an int32 array is not copied."""
    cdef PageIds ids
    cdef bint is_array = type(values) is ndarray  # the usual case, and the cheapest test
    if not is_array and isinstance(values, PageIds):
        return values
    ids = PageIds.__new__(PageIds)
    if not is_array and not isinstance(values, ndarray):
        ids.add_items(as_list(values, name), 0, MAX_PAGES, name)
        return ids
    if not is_array:
        require_unmasked(name, values)
    if not borrow(ids, values) and not borrow(ids, as_int32_array(values, name)):
        raise ArgumentTypeError(f"{name}: got an array whose buffer cannot be read, allowed: one of int32")
    return ids


cdef PageIds as_own_ids(object values, str name):
    """Return ids as `as_page_ids` does, but copy arrays, so that the caller cannot change the ids during the call."""
    cdef PageIds ids = as_page_ids(values, name)
    return PageIds(ids) if ids.array is not None else ids


cdef int refuse_negative(const int32_t *token_ids, Py_ssize_t n, Py_ssize_t first) except -1:
    """Raise ArgumentError for a negative token id, naming its index; the first id is at `first`."""
    cdef Py_ssize_t bad = find_negative(token_ids, n)
    assert first >= 0 and -1 <= bad < n
    if bad >= 0:
        raise ArgumentError(f"token_ids: got {token_ids[bad]} (at {first + bad}), allowed: at least 0")
    return 0


def require_token_ids(token_ids, first=0) -> None:
    """Raise ArgumentError for a negative token id, naming its index; the first id is at `first`. O(n)."""
    cdef PageIds ids = as_page_ids(token_ids, "token_ids")
    refuse_negative(ids.ids, ids.num, size_of(first, "first"))


def are_plain_token_ids(list items) -> bool:
    """Return whether all items are plain ints from 0 to the largest int64; False for other kinds of ints. O(n)."""
    try:
        for item in items:
            if not PyLong_CheckExact(item) or <int64_t>item < 0:
                return False
    except OverflowError:
        return False
    return True


cdef list list_of(PageIds ids):
    cdef Py_ssize_t i
    return [ids.ids[i] for i in range(ids.num)]


cpdef tuple lists_of(tuple groups):
    """Return the ids of each PageIds as a list. One group, as in most models, costs no loop."""
    if groups is not None and len(groups) == 1:
        return (list_of(<PageIds?>groups[0]),)
    return tuple([list_of(<PageIds?>ids) for ids in groups])
