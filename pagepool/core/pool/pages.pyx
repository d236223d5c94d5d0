"""Pages as objects: their records and free queue, and pages that stand alone or in a queue without a pool."""

cimport cython
from cpython.mem cimport PyMem_RawFree as free
from libc.stdint cimport INT32_MAX, INT64_MAX, int64_t, uint32_t

from pagepool.core.base cimport GIL_DISABLED, require_allocated
from pagepool.core.pool.arrays cimport *
from pagepool.core.values cimport index_of, page_id_of

from pagepool.arguments import require_flag
from pagepool.errors import (
    ArgumentError, ArgumentTypeError, DoubleFreeError, OutOfPagesError, PageHashError, PageIdError, made_twice, shown,
)
from pagepool.hashing import PageHashWithGroupId, checked_hash


cdef object short_of_pages(Py_ssize_t num, Py_ssize_t num_free, str where=""):
    """Return the error for more pages than are free."""
    return OutOfPagesError(f"pages: got {num} asked for, {num_free} free{where}, allowed: at most the free ones")


cdef object hashed_page(str page):
    """Return the error for a hash of a page that has one, or is out of use."""
    return PageHashError(f"{page}, which has a hash already or is out of use: got a hash, allowed: none")


cdef object overdrawn_page(str page):
    """Return the error for a page that is freed more often than it is held."""
    return DoubleFreeError(f"{page}: got more frees than references, allowed: one for each")


cdef inline int32_t record_of(PageRecords store, object page) except -1:
    """Return the page id of a view; PageIdError for a view of another pool."""
    if type(page) is not CachePage:
        raise ArgumentTypeError(f"pages: got {type(page).__name__}, allowed: CachePage")
    if (<CachePage>page).store is not store:
        raise PageIdError(f"page {(<CachePage>page).page_id}: got one that belongs to another pool, allowed: this pool's")
    return (<CachePage>page).index


cdef Py_ssize_t find_outside(const Pool *pool, const int32_t *ids, Py_ssize_t n) noexcept nogil:
    """Return the index of an id that is outside the pool, or -1."""
    cdef Py_ssize_t i
    cdef int32_t signs = 0, last = pool.num_pages - 1
    for i in range(n if GUARDS else 0):  # no early exit, so that it vectorises
        signs |= ids[i] | <int32_t>(<uint32_t>last - <uint32_t>ids[i])
    if signs < 0:
        for i in range(n):
            if not 0 <= ids[i] <= last:
                return i
    return -1


cdef void overwrite_count(Pool *pool, int32_t page_id, int32_t count) noexcept:
    cdef Page *page = &pool.pages[page_id]
    assert 0 < page_id < pool.num_pages and count >= 0
    if is_free(pool, page_id):
        pool.num_held_free += (count != 0) - (page.ref_cnt != 0)
    page.ref_cnt = count
    assert pool.num_held_free >= 0


cdef bint change_ref_count(PageRecords store, int32_t page_id, int32_t change) except -1:
    """Add `change` to a ref count; False, with nothing changed, if the count would leave its range."""
    cdef Pool *pool = &store.pool
    cdef bint is_right
    with store.own_lock()[0]:
        is_right = pool.pages[page_id].ref_cnt + <int64_t>change < INT32_MAX
        is_right = is_right and pool.pages[page_id].ref_cnt + change >= 0
        if is_right and page_id != NULL_PAGE:
            overwrite_count(pool, page_id, pool.pages[page_id].ref_cnt + change)
    return is_right


@cython.auto_pickle(False)
cdef class PageRecords:
    """The records and the free queue of the pages of a pool (`PageStore`), or of pages without a pool (`LoosePages`)."""

    def __cinit__(self):
        cdef Py_ssize_t capacity = 0
        self.process = process_number
        require_allocated(&self.lock)
        self.views = {}
        self.pool.num_banks, self.pool.sample_mask = 1, -1
        self.pool.banks[0].start = 1
        if not add_records(&self.pool, &capacity, 1):
            raise MemoryError("a page record")

    def __dealloc__(self):
        if self.process == process_number:  # in a forked process another thread may have been changing it
            free(self.pool.pages)

    def __reduce__(self):
        raise ArgumentTypeError("a page store cannot be pickled")

    cdef int32_t read(self, const int32_t *value) except? -1:
        """Read a value of the pool. Reads are never torn: only a build without the GIL needs the lock."""
        cdef int32_t copied
        self.require_own()
        if GIL_DISABLED:
            self.lock.acquire()
        copied = value[0]
        if GIL_DISABLED:
            self.lock.release()
        return copied

    cdef Page record(self, int32_t page_id) except *:
        """Return a copy of a page's record, made under the lock."""
        cdef Page page
        with self.own_lock()[0]:
            assert 0 <= page_id < self.pool.num_pages
            page = self.pool.pages[page_id]
        return page

    @property
    def num_pages(self) -> int:
        return self.pool.num_pages

    @property
    def num_free_pages(self) -> int:
        return self.read(&self.pool.num_free)

    cdef int32_t checked_id(self, object page_id) except -1:
        cdef int32_t checked = page_id_of(page_id)
        self.check_range(checked)
        return checked

    cdef PageIds checked(self, object page_ids):
        """Return `page_ids` as ids within the pool, which do not change."""
        cdef PageIds ids = page_ids if isinstance(page_ids, PageIds) else PageIds(page_ids)
        cdef Py_ssize_t bad = find_outside(&self.pool, ids.ids, ids.num)
        if bad >= 0:
            self.check_range(ids.ids[bad])
        return ids

    cdef int32_t checked_bank(self, object bank) except -1:
        return <int32_t>size_of(bank, "bank", 0, self.pool.num_banks - 1)

    cdef int check_range(self, int32_t page_id) except -1:
        if not 0 <= page_id < self.pool.num_pages:
            raise PageIdError(f"page id: got {page_id}, allowed: 0 to {self.pool.num_pages - 1}")
        return 0

    def ref_counts(self, bank=0):
        """Return the ref counts of the null page and all pages of a bank, an int32 array. O(pages of the bank)."""
        cdef PageIds counts = PageIds.__new__(PageIds)
        cdef Bank pages = self.pool.banks[self.checked_bank(bank)]  # a copy: the store of a queue may grow
        cdef Py_ssize_t i
        counts.reserve(1 + pages.stop - pages.start)
        with self.own_lock()[0]:
            counts.put(&self.pool.pages[NULL_PAGE].ref_cnt, 1)
            for i in range(pages.start, pages.stop):
                counts.put(&self.pool.pages[i].ref_cnt, 1)
        return counts.to_array()

    def set_ref_count(self, page_id, ref_cnt) -> None:
        """Overwrite a ref count, except the null page's. `check` and the next `take` report a free page with references."""
        cdef Py_ssize_t count = size_of(ref_cnt, "ref_cnt", 0, INT32_MAX - 1)
        cdef int32_t checked = self.checked_id(page_id)
        if checked != NULL_PAGE:
            with self.own_lock()[0]:
                overwrite_count(&self.pool, checked, <int32_t>count)

    def is_free(self, page_id) -> bool:
        """Whether the page is in the free queue."""
        cdef int32_t checked = self.checked_id(page_id)
        return checked != NULL_PAGE and self.read(&self.pool.pages[checked].prev_free) != NOT_FREE

    def free_ids(self, bank=0) -> PageIds:
        """Return the free queue of a bank, front first; with a policy, part by part. O(pages of the bank)."""
        cdef PageIds ids = PageIds.__new__(PageIds)
        cdef int32_t queue = queue_of_bank(self.checked_bank(bank)), page_id, num_free
        cdef bint has_room
        with self.own_lock()[0]:
            page_id, num_free = end_of_queue(&self.pool, queue), count_free_in(&self.pool, queue)
            has_room = ids.try_reserve(num_free)
            while has_room and ids.num < num_free:
                page_id = page_behind(&self.pool, page_id, queue)
                assert is_page(&self.pool, page_id) and (self.pool.pages[page_id].ref_cnt == 0 or self.pool.num_held_free)
                ids.put(&page_id, 1)
        if not has_room:
            raise MemoryError("the ids of free pages")
        return ids

    def neighbours(self, page_id) -> tuple:
        """Return the pages before and after a page in the free queue; None at the ends and outside the queue."""
        cdef int32_t checked = self.checked_id(page_id)
        cdef int32_t before = NULL_PAGE, behind = NULL_PAGE, queue
        with self.own_lock()[0]:
            if checked != NULL_PAGE and is_free(&self.pool, checked):
                queue = queue_of(&self.pool, checked)
                before, behind = page_before(&self.pool, checked), page_behind(&self.pool, checked, queue)
        return tuple([self.view(each) if is_page(&self.pool, each) else None for each in (before, behind)])

    def pop(self, n) -> PageIds:
        """Take the first `n` pages out of the queue without changes to ref counts and prefix entries."""
        cdef PageIds ids = PageIds.__new__(PageIds)
        cdef Py_ssize_t num = size_of(n, "n")
        cdef int32_t num_free
        cdef bint has_room
        cdef Supply supply
        with self.own_lock()[0]:
            num_free = count_free_in(&self.pool, -1)
            has_room = num > num_free or ids.try_reserve(num)  # under the lock, because a queue may grow
            supply = begin_supply(&self.pool, COMMON)
            while has_room and num <= num_free and ids.num < num:
                ids.ids[ids.num] = pick(&self.pool, -1, &supply)
                reuse(&self.pool, ids.ids[ids.num])
                assert not is_free(&self.pool, ids.ids[ids.num])
                ids.num += 1
        if num > num_free:
            raise short_of_pages(num, num_free)
        if not has_room:
            raise MemoryError(f"{num} page ids")
        return ids

    def remove_page(self, page) -> None:
        """Take a page out of the queue, wherever it stands. PageIdError for a page of another pool. O(1)."""
        cdef int32_t page_id = record_of(self, page)
        cdef bint was_free
        with self.own_lock()[0]:
            was_free = page_id != NULL_PAGE and is_free(&self.pool, page_id)
            if was_free:
                reuse(&self.pool, page_id)
                assert not is_free(&self.pool, page_id)
        if not was_free:
            raise PageIdError(f"page {page.page_id}: got one that is not in the free queue, allowed: one that is")

    def append(self, page_ids) -> None:
        """Append pages to the queue in order. PageIdError for pages that are in it, or held."""
        cdef PageIds ids = self.checked(page_ids)
        cdef Py_ssize_t bad
        with self.own_lock()[0]:
            bad = push_all(&self.pool, ids.ids, ids.num)
            assert bad >= 0 or ids.num == 0 or is_free(&self.pool, ids.ids[0])
        if bad >= 0:
            raise PageIdError(
                f"page {self.page(ids[bad]).page_id}: got one in the free queue, a held one, or the null page, allowed: others"
            )

    def page(self, page_id) -> CachePage:
        """Return the view of a page. It is made once."""
        return self.view(self.checked_id(page_id))

    cdef CachePage view(self, int32_t page_id):
        """Return the view of a page within the pool."""
        cdef CachePage view = self.views.get(page_id)
        if view is None:
            view = CachePage.__new__(CachePage)
            view.store, view.index, view.page_id = self, page_id, id_in_bank(&self.pool, page_id)
            view = self.views.setdefault(page_id, view)  # another thread may have made one
        return view

    def pages(self, PageIds ids not None) -> list:
        """Return the views of pages."""
        cdef PageIds checked = self.checked(ids)
        cdef Py_ssize_t i
        return [self.view(checked.ids[i]) for i in range(checked.num)]

    def ids_of_pages(self, pages) -> PageIds:
        """Return the ids of views; PageIdError for a page of another pool."""
        cdef PageIds ids = PageIds.__new__(PageIds)
        cdef int32_t index
        for item in as_list(pages, "pages"):
            index = record_of(self, item)
            if ids.num == ids.capacity:
                ids.reserve(1)
            ids.ids[ids.num] = index
            ids.num += 1
        return ids


cdef class LoosePages(PageRecords):
    """The pages of a `FreeCachePageQueue` without a pool, or one such page. They have no entries, and their number grows."""

    cdef int32_t add_page(self, int32_t ref_cnt) except -1:
        """Add a record of a page outside the queue, and return its id. Amortised O(1)."""
        cdef int32_t page_id
        cdef bint has_room
        with self.own_lock()[0]:
            page_id = self.pool.num_pages
            has_room = add_records(&self.pool, &self.capacity, page_id + <Py_ssize_t>1)
            if has_room:
                self.pool.pages[page_id].ref_cnt = ref_cnt
        if not has_room:
            raise MemoryError(f"{page_id + 1} page records")
        return page_id

    def adopt(self, CachePage page not None) -> None:
        """Move the record of a page without a pool into this store: `page` becomes its view. Amortised O(1)."""
        cdef PageRecords home = page.store
        cdef int32_t index = page.index
        if home is self:
            return
        if page.is_null:
            raise PageIdError(f"page {page.page_id}: got a null page, allowed: others")
        if not page.is_loose() or home.is_free(index):
            raise PageIdError(f"page {page.page_id}: got one that belongs to another pool or queue, allowed: others")
        index = self.add_page(home.record(index).ref_cnt)
        del home.views[page.index]
        with cython.critical_section(page):
            page.store, page.index = self, index
        self.views[index] = page


@cython.final
cdef class CachePage:
    """A view of one page's record: ``pool.pages[i]``. Each page has one view.

    ``CachePage(page_id)`` makes a page without a pool, for a `FreeCachePageQueue`. Pages of different pools, or without one,
    are equal if their visible values are: `page_id`, `ref_cnt`, `page_hash`, `is_null`, and the ids of their neighbours in the
    free queue. The hash is that of `page_id`, which never changes.

    >>> page = CachePage(7)
    >>> page.incr_ref()
    >>> page
    CachePage(page_id=7, ref_cnt=1, page_hash=None, prev_free_page=None, next_free_page=None)
    >>> page == CachePage(7), page == CachePage(page_id=7, ref_cnt=1)
    (False, True)
    """

    def __init__(self, page_id, ref_cnt=0, _page_hash=None, prev_free_page=None, next_free_page=None, is_null=False):
        """Make a page. `ref_cnt` must not be negative; `_page_hash` is the PageHashWithGroupId of a cached page, or None. A
        null page stands for no page, and queues refuse it. ArgumentError for neighbours: a queue links its pages itself.
        """
        cdef LoosePages store
        cdef bint is_made_null = require_flag("is_null", is_null)
        if prev_free_page is not None or next_free_page is not None:
            raise ArgumentError("prev_free_page, next_free_page: got a page, allowed: None; a FreeCachePageQueue links its own")
        page_hash = None if _page_hash is None else checked_page_hash(_page_hash)
        store = LoosePages()
        checked_id = index_of(page_id, "page_id")
        if not -INT64_MAX <= checked_id <= INT64_MAX:
            raise ArgumentError(f"page_id: got {shown(checked_id)}, allowed: ints of 64 bits")
        store.add_page(0)
        store.set_ref_count(1, ref_cnt)
        if self.store is not None:  # last, because reading arguments may run Python code
            raise made_twice("page")
        self.page_id, self.store, self.index, self.is_made_null = checked_id, store, 1, is_made_null
        self.own_hash = page_hash
        store.views[1] = self

    def __eq__(self, other):
        if self is other:
            return True
        if type(other) is not CachePage:
            return NotImplemented
        return self.page_id == other.page_id and self.fields() == (<CachePage>other).fields()

    def __hash__(self):
        return hash(self.page_id)

    cdef bint is_loose(self):
        """Whether the page belongs to no pool."""
        return isinstance(self.store, LoosePages) or type(self.store) is PageRecords

    cdef tuple fields(self):
        """Return the values that equal pages share. Neighbours are compared by id, or a comparison would walk the whole queue.
        """
        before, behind = self.store.neighbours(self.index)
        return self.ref_cnt, self.page_hash, self.is_null, before and before.page_id, behind and behind.page_id

    def __reduce__(self):
        raise ArgumentTypeError("a CachePage is a view of its pool and cannot be pickled")

    @property
    def ref_cnt(self) -> int:
        """Return or set how many references the page has, 0 for a free page. Never negative."""
        with cython.critical_section(self):
            if self.is_loose():
                return self.store.record(self.index).ref_cnt  # locked, because a growing queue moves its records
            return self.store.read(&self.store.pool.pages[self.index].ref_cnt)

    @ref_cnt.setter
    def ref_cnt(self, value):
        self.store.set_ref_count(self.index, value)

    def incr_ref(self) -> None:
        """Add a reference."""
        if not change_ref_count(self.store, self.index, 1):
            raise ArgumentError(f"page {self.page_id}: got {self.ref_cnt} references before, allowed: fewer than {INT32_MAX}")

    def decr_ref(self) -> None:
        """Take a reference; DoubleFreeError at 0. The page does not enter the free queue; `PagePool.free_pages` puts it there.
        """
        if not change_ref_count(self.store, self.index, -1):
            raise overdrawn_page(f"page {self.page_id}")

    @property
    def page_hash(self):
        """Return the PageHashWithGroupId of a cached page, or None. Setting it caches the page; PageHashError if it is cached
        already.
        """
        if not self.is_loose():
            return self.store.page_hash_of(self.index)
        with cython.critical_section(self):
            return self.own_hash

    @page_hash.setter
    def page_hash(self, page_hash):
        cdef bint is_cached
        if not self.is_loose():
            self.store.cache_hash(self.index, page_hash)
            return
        checked = checked_page_hash(page_hash)
        with cython.critical_section(self):
            is_cached = self.own_hash is not None
            if not is_cached:
                self.own_hash = checked
        if is_cached:
            raise hashed_page(f"page {self.page_id}")

    def reset_hash(self) -> None:
        """Drop the page's prefix entry, if it has one."""
        with cython.critical_section(self):
            self.own_hash = None
        if not self.is_loose():
            self.store.drop([self.index])

    @property
    def is_null(self) -> bool:
        """Whether this is a pool's null page, or was made as one."""
        return self.is_made_null or self.index == NULL_PAGE

    @property
    def is_free(self) -> bool:
        """Whether the page is in the free queue."""
        return self.store.is_free(self.index)

    @property
    def prev_free_page(self):
        """Return the page before this one in the free queue, or None."""
        return self.store.neighbours(self.index)[0]

    @property
    def next_free_page(self):
        """Return the page behind this one in the free queue, or None."""
        return self.store.neighbours(self.index)[1]

    def __repr__(self):
        before, behind = self.store.neighbours(self.index)
        return (
            f"CachePage(page_id={self.page_id}, ref_cnt={self.ref_cnt}, page_hash={self.page_hash}, "
            f"prev_free_page={before and before.page_id}, next_free_page={behind and behind.page_id})"
        )


cdef object checked_page_hash(object page_hash):
    """Return a PageHashWithGroupId whose parts are checked."""
    if not isinstance(page_hash, PageHashWithGroupId):
        raise ArgumentTypeError(f"page_hash: got {type(page_hash).__name__}, allowed: PageHashWithGroupId")
    return PageHashWithGroupId(checked_hash(page_hash.page_hash), group_of(page_hash.group_id))
