"""One pool: its free queue."""

cimport cython
from libc.stdint cimport INT32_MAX, INT64_MAX

from pagepool.core.arguments cimport as_list, as_shard, group_of, index_of, size_of
from pagepool.core.levels cimport end_retention
from pagepool.core.pages cimport find_untouchable, give_back, note_request, pick, take_from, touch_all
from pagepool.core.platform cimport go_on, let_others_run
from pagepool.core.queue cimport count_free_in, find_held_free, page_before, page_behind, pull, push_all
from pagepool.core.records cimport NULL_PAGE, Page, is_free

from pagepool.arguments import require_flag
from pagepool.errors import (
    ArgumentError, ArgumentTypeError, DoubleFreeError, IntegrityError, OutOfPagesError, PageHashError, PageIdError, shown,
)
from pagepool.hashing import PageHashWithGroupId, checked_hash


cdef inline int32_t record_of(PageStore store, object page) except -1:
    """The record of a view; PageIdError for another pool's."""
    if type(page) is not CachePage:
        raise ArgumentTypeError(f"pages: got {type(page).__name__}, allowed: CachePage")
    if (<CachePage>page).store is not store:
        raise PageIdError(f"page {(<CachePage>page).page_id} belongs to another pool")
    return (<CachePage>page).index


@cython.auto_pickle(False)
cdef class PageStore(CachedPages):
    """The records of one pool, its free queue and its prefix index. `pagepool.PagePool` is the door for users.

    Takes and returns page ids. O(num_pages) to make; memory a page: 32 bytes of record, 8 of twin links and 16 to 32 of index
    slots (none of the last two without caching); 24 more once a data-parallel hint was given, 8 without caching; 4 more once a
    page was pinned, 1 to 5 once one was retained or protected, and 16 once for a time.
    """

    def __cinit__(self, *args, **kwargs):
        self.views = {}

    def neighbours(self, page_id) -> tuple:
        """The pages before and after a page in the free queue; None at the ends and outside the queue."""
        cdef int32_t checked = self.checked_id(page_id)
        cdef int32_t before = NULL_PAGE, behind = NULL_PAGE
        with self.lock:
            if checked != NULL_PAGE and is_free(&self.pool, checked):
                before, behind = page_before(&self.pool, checked), page_behind(&self.pool, checked, -1)
        return tuple([self.view(each) if each != NULL_PAGE else None for each in (before, behind)])

    def page(self, page_id) -> CachePage:
        """The one view of a page, made when first asked for."""
        return self.view(self.checked_id(page_id))

    cdef CachePage view(self, int32_t page_id):
        """The view of a page within the pool."""
        cdef CachePage view = self.views.get(page_id)
        if view is None:
            view = CachePage.__new__(CachePage)
            view.store, view.index, view.page_id = self, page_id, page_id
            view = self.views.setdefault(page_id, view)  # another thread may have made one
        return view

    def pages(self, PageIds ids not None) -> list:
        """The views of the pages."""
        cdef PageIds checked = self.checked(ids)
        cdef Py_ssize_t i
        return [self.view(checked.ids[i]) for i in range(checked.num)]

    def ids_of_pages(self, pages) -> PageIds:
        """The ids of views of this store's pages; PageIdError for another pool's."""
        cdef PageIds ids = PageIds.__new__(PageIds)
        cdef int32_t index
        for item in as_list(pages, "pages"):
            index = record_of(self, item)
            if ids.num == ids.capacity:
                ids.reserve(1)
            ids.ids[ids.num] = index
            ids.num += 1
        return ids

    def take(self, n, shard=None, num_shards=0) -> PageIds:
        """Take `n` pages from the front of the queue, or of a shard: ref count 1, prefix entries dropped. O(n)."""
        cdef PageIds ids = PageIds.__new__(PageIds)
        cdef Py_ssize_t num = size_of(n, "num_pages")
        cdef int32_t divided = <int32_t>size_of(num_shards, "data_parallel_size", 0)
        cdef int32_t checked_shard = as_shard(shard, divided)
        cdef int32_t num_free, bad = NULL_PAGE
        cdef void *thread
        ids.reserve(min(num, self.pool.num_pages))
        self.lock_divided(divided)
        num_free = count_free_in(&self.pool, checked_shard)
        if num <= num_free:
            bad = find_held_free(&self.pool, num)
            if bad == NULL_PAGE:
                thread = let_others_run(num)
                take_from(&self.pool, ids.ids, num, checked_shard)
                note_request(&self.pool)
                go_on(thread)
                ids.num = num
        self.lock.release()
        if num > num_free:
            where = "" if checked_shard < 0 else f" in shard {checked_shard}"
            raise OutOfPagesError(f"pages: {num} asked for, {num_free} free{where}")
        self.check_untaken(bad)
        return ids

    cdef int check_untaken(self, int32_t bad) except -1:
        """IntegrityError unless `bad` is the null page: a page in the free queue that was given a reference."""
        if bad != NULL_PAGE:
            raise IntegrityError(f"page {bad} is in the free queue with ref count {self.pool.pages[bad].ref_cnt}, allowed: 0")
        return 0

    def give_back(self, page_ids, bint tail_first=False) -> None:
        """One reference less for each page; those at 0 go to the back of the queue, in order. Null pages are passed over."""
        cdef PageIds ids = self.checked(page_ids)
        cdef Py_ssize_t bad
        with self.lock:
            bad = self.give_back_ids(ids.ids, ids.num, tail_first)
        if bad >= 0:
            self.refuse_give_back(ids, bad)

    cdef Py_ssize_t give_back_ids(self, const int32_t *ids, Py_ssize_t n, bint tail_first) noexcept:
        """`give_back` of ids that lie within the pool."""
        cdef void *thread = let_others_run(n)
        cdef Py_ssize_t bad = give_back(&self.pool, ids, n, tail_first)
        go_on(thread)
        return bad

    cdef int refuse_give_back(self, PageIds ids, Py_ssize_t bad) except -1:
        raise DoubleFreeError(f"page {ids[bad]} (at {bad} of {len(ids)}) is freed more often than it is held")

    def touch(self, page_ids) -> None:
        """One reference more for each page; a free page leaves the queue. Null pages are passed over. O(n)."""
        cdef PageIds ids = self.checked(page_ids)
        cdef Py_ssize_t bad
        with self.lock:
            bad = find_untouchable(&self.pool, ids.ids, ids.num, ids.num)
            if bad < 0:
                touch_all(&self.pool, ids.ids, ids.num)
        if bad >= 0:
            self.refuse_touch(ids.ids[bad])

    cdef int refuse_touch(self, int32_t page_id) except -1:
        cdef int32_t ref_cnt = self.record(page_id).ref_cnt
        where = f"allowed: fewer than {INT32_MAX}" if ref_cnt else "and it is not in the free queue"
        raise PageIdError(f"page {page_id} cannot be touched: its ref count is {ref_cnt}, {where}")

    def pop(self, n) -> PageIds:
        """Take the first `n` pages out of the queue and leave ref counts and prefix entries as they are."""
        cdef PageIds ids = PageIds.__new__(PageIds)
        cdef Py_ssize_t num = size_of(n, "n")
        cdef int32_t num_free
        ids.reserve(min(num, self.pool.num_pages))
        with self.lock:
            num_free = self.pool.num_free
            if 0 < num <= num_free:
                end_retention(&self.pool)
            while num <= num_free and ids.num < num:
                ids.ids[ids.num] = pick(&self.pool, -1) if self.pool.num_parts else self.pool.pages[NULL_PAGE].next_free
                self.pull_any(ids.ids[ids.num])
                ids.num += 1
        if num > num_free:
            raise OutOfPagesError(f"pages: {num} asked for, {num_free} free")
        return ids

    cdef void pull_any(self, int32_t page_id) noexcept:
        """`pull`, also for a free page that was given a reference."""
        self.pool.num_held_free -= self.pool.pages[page_id].ref_cnt != 0
        pull(&self.pool, page_id)
        self.pool.num_reused += 1

    def remove_page(self, page) -> None:
        """Take a page out of the queue, wherever it stands. PageIdError for another pool's. O(1)."""
        cdef int32_t page_id = record_of(self, page)
        cdef bint was_free
        with self.lock:
            was_free = page_id != NULL_PAGE and is_free(&self.pool, page_id)
            if was_free:
                self.pull_any(page_id)
        if not was_free:
            raise PageIdError(f"page {page.page_id} is not in the free queue")

    def append_page(self, page) -> None:
        """`append` for one page by its view; PageIdError for another pool's."""
        cdef int32_t page_id = record_of(self, page)
        self.push_checked(&page_id, 1)

    def append(self, page_ids) -> None:
        """Put pages that are not in the queue and not held at its back, in order."""
        cdef PageIds ids = self.checked(page_ids)
        self.push_checked(ids.ids, ids.num)

    cdef int push_checked(self, const int32_t *ids, Py_ssize_t n) except -1:
        cdef Py_ssize_t bad
        with self.lock:
            bad = push_all(&self.pool, ids, n)
        if bad >= 0:
            raise PageIdError(
                f"page {self.page(ids[bad]).page_id} cannot be appended: it is in the free queue, held, or the null page"
            )
        return 0

    def adopt(self, CachePage page not None) -> None:
        """Take over the record of a page that stands alone: `page` becomes a view of this store. Amortised O(1)."""
        cdef PageStore home = page.store
        cdef int32_t index = page.index
        cdef Page record
        cdef bint has_room
        if home is self:
            return
        if page.is_null:
            raise PageIdError(f"page {page.page_id} cannot be appended: it is a null page")
        if home.is_pool or self.is_pool or home.is_free(index):
            raise PageIdError(f"page {page.page_id} belongs to another pool or queue")
        record = home.record(index)
        with self.lock:
            has_room = self.add_records(self.pool.num_pages + <Py_ssize_t>1)
            if has_room:
                index = self.pool.num_pages - 1
                self.pool.pages[index].ref_cnt = record.ref_cnt
        if not has_room:
            raise MemoryError(f"{self.pool.num_pages + 1} page records")
        del home.views[page.index]
        with cython.critical_section(page):
            page.store, page.index = self, index
        self.views[index] = page

    def find_pages(self, key, groups, start=0, stop=None):
        """For each group the view of the page that `find` finds; None if it finds none in one of them."""
        pages = []
        for group in as_list(groups, "groups"):
            page_id = self.find(key, group, start, stop)
            if page_id is None:
                return None
            pages.append(self.view(page_id))
        return pages


cdef class QueryCounter:
    """Counts requests that were admitted after a look-up, their tokens and the hits among these: in the store's counters too,
    unless they had been preempted.
    """

    def __cinit__(self, PageStore store not None, bint is_preempted=False):
        self.store = store
        self.is_preempted = is_preempted

    def __reduce__(self):
        raise ArgumentTypeError("a query counter cannot be pickled")

    @property
    def counts(self) -> tuple:
        """Requests, tokens, hit tokens."""
        cdef int64_t num_requests, num_tokens, num_hit_tokens
        with self.store.lock:
            num_requests, num_tokens, num_hit_tokens = self.num_requests, self.num_tokens, self.num_hit_tokens
        return num_requests, num_tokens, num_hit_tokens

    def add(self, num_tokens, num_hit_tokens) -> None:
        """Count a request."""
        cdef Py_ssize_t num = size_of(num_tokens, "num_tokens", 0, INT64_MAX >> 20)
        cdef Py_ssize_t num_hits = size_of(num_hit_tokens, "num_hit_tokens", 0, num)
        self.count(num, num_hits)

    cdef void count(self, Py_ssize_t num_tokens, Py_ssize_t num_hit_tokens) noexcept:
        with self.store.lock:
            self.num_requests += 1
            self.num_tokens += num_tokens
            self.num_hit_tokens += num_hit_tokens
            if not self.is_preempted:
                self.store.pool.num_queried += num_tokens
                self.store.pool.num_hit += num_hit_tokens


@cython.final
cdef class CachePage:
    """A view of one page's record. ``pool.pages[i]`` gives it; there is one view of each page.

    ``CachePage(page_id)`` makes a page that stands alone, to be handed to a `FreeCachePageQueue`. Pages of other pools, or that
    stand alone, are equal if all that can be seen of them is: `page_id`, `ref_cnt`, `page_hash`, `is_null`, and the ids of the
    pages before and behind in the free queue. The hash is that of `page_id`, which does not change.

    >>> page = CachePage(7)
    >>> page.incr_ref()
    >>> page
    CachePage(page_id=7, ref_cnt=1, page_hash=None, prev_free_page=None, next_free_page=None)
    >>> page == CachePage(7), page == CachePage(page_id=7, ref_cnt=1)
    (False, True)
    """

    def __init__(self, page_id, ref_cnt=0, _page_hash=None, prev_free_page=None, next_free_page=None, is_null=False):
        """`ref_cnt` must not be negative; `_page_hash` is a PageHashWithGroupId that the page is cached under, or None. A null
        page stands for no page, and no queue takes it. ArgumentError for neighbours: a queue links its pages itself.
        """
        cdef PageStore store
        cdef bint is_made_null = require_flag("is_null", is_null)
        if prev_free_page is not None or next_free_page is not None:
            raise ArgumentError("prev_free_page, next_free_page: got a page, allowed: None; a FreeCachePageQueue links its own")
        page_hash = None if _page_hash is None else checked_page_hash(_page_hash)
        store = PageStore(2, is_pool=False)
        checked_id = index_of(page_id, "page_id")
        if not -INT64_MAX <= checked_id <= INT64_MAX:
            raise ArgumentError(f"page_id: got {shown(checked_id)}, allowed: ints of 64 bits")
        store.pop(1)
        store.set_ref_count(1, ref_cnt)
        if self.store is not None:  # after the arguments were read, which may run Python code
            raise ArgumentError("a page is made once")
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

    cdef tuple fields(self):
        """What equal pages have in common besides their id. The neighbours' ids alone: theirs would lead through the queue."""
        before, behind = self.store.neighbours(self.index)
        return self.ref_cnt, self.page_hash, self.is_null, before and before.page_id, behind and behind.page_id

    def __reduce__(self):
        raise ArgumentTypeError("a CachePage is a view of its pool and cannot be pickled")

    @property
    def ref_cnt(self) -> int:
        """References held to the page; 0: free. Settable, never negative."""
        with cython.critical_section(self):
            if self.store.is_pool:
                return self.store.read(&self.store.pool.pages[self.index].ref_cnt)
            return self.store.record(self.index).ref_cnt  # the records of a queue move when it grows

    @ref_cnt.setter
    def ref_cnt(self, value):
        self.store.set_ref_count(self.index, value)

    def incr_ref(self) -> None:
        """One reference more."""
        if not self.store.add_reference(self.index, 1):
            raise ArgumentError(f"page {self.page_id} has {self.ref_cnt} references, allowed: fewer than {INT32_MAX}")

    def decr_ref(self) -> None:
        """One reference less; DoubleFreeError at 0, and at 1 for a pinned page. The page does not enter the free queue:
        `PagePool.free_pages` does that.
        """
        if not self.store.add_reference(self.index, -1):
            raise DoubleFreeError(f"page {self.page_id} has no reference to give back")

    @property
    def page_hash(self):
        """The PageHashWithGroupId that the page is cached under, or None. Setting it enters the page in the prefix index;
        PageHashError if it has one already.
        """
        if self.store.is_pool:
            return self.store.page_hash_of(self.index)
        with cython.critical_section(self):
            return self.own_hash

    @page_hash.setter
    def page_hash(self, page_hash):
        cdef bint is_cached
        checked = checked_page_hash(page_hash)
        if self.store.is_pool:
            self.store.enter(self.index, self.store.names.key_of(checked.page_hash), checked.group_id)
            return
        with cython.critical_section(self):
            is_cached = self.own_hash is not None
            if not is_cached:
                self.own_hash = checked
        if is_cached:
            raise PageHashError(f"page {self.page_id} has a hash already")

    def reset_hash(self) -> None:
        """Drop the page's prefix entry, if it has one."""
        with cython.critical_section(self):
            self.own_hash = None
        self.store.drop([self.index])

    @property
    def is_null(self) -> bool:
        """Whether this is a pool's null page, or one that was made as such."""
        return self.is_made_null or (self.store.is_pool and self.index == NULL_PAGE)

    @property
    def is_free(self) -> bool:
        """Whether the page is in the free queue."""
        return self.store.is_free(self.index)

    @property
    def prev_free_page(self):
        """The page before this one in the free queue, or None."""
        return self.store.neighbours(self.index)[0]

    @property
    def next_free_page(self):
        """The page behind this one in the free queue, or None."""
        return self.store.neighbours(self.index)[1]

    def __repr__(self):
        before, behind = self.store.neighbours(self.index)
        return (
            f"CachePage(page_id={self.page_id}, ref_cnt={self.ref_cnt}, page_hash={self.page_hash}, "
            f"prev_free_page={before and before.page_id}, next_free_page={behind and behind.page_id})"
        )


cdef object checked_page_hash(object page_hash):
    if not isinstance(page_hash, PageHashWithGroupId):
        raise ArgumentTypeError(f"page_hash: got {type(page_hash).__name__}, allowed: PageHashWithGroupId")
    return PageHashWithGroupId(checked_hash(page_hash.page_hash), group_of(page_hash.group_id))
