"""The cache groups of a model, and the number of pages that a request needs in them."""

cimport cython
from cpython.mem cimport PyMem_RawCalloc as calloc
from cpython.mem cimport PyMem_RawFree as free
from libc.stdint cimport INT32_MAX, INT64_MAX, int32_t, int64_t
from libc.string cimport memcmp

from pagepool.core.base cimport MAX_LOOKAHEAD
from pagepool.core.pool cimport MAX_BANKS
from pagepool.core.values cimport group_of

from math import lcm

from pagepool.errors import ArgumentError, ArgumentTypeError

cdef int64_t MAX_PERIOD = 1 << 20

cdef struct Peak:             # the arguments of `count_peak_pages`
    const Group *groups       # [num_groups]
    Py_ssize_t num_groups
    int64_t num_tokens
    int64_t num_new           # most new tokens of a step
    int64_t num_ahead         # lookahead slots behind the new tokens
    int64_t max_num_slots
    int32_t bank              # -1: any


@cython.final
@cython.auto_pickle(False)
cdef class PageRules:
    """The rules by which a request needs pages in one cache group.

    `page_size` tokens share a page; None is a state, one page for any number of tokens. With a `window` a token attends to that
    many tokens, including itself; with a `chunk` to the tokens of its chunk. Pages that no later token attends to are skipped.
    Hits have a multiple of `hit_tokens` tokens, or with 0 any number: see `is_needed_by_hits`. A state is kept at multiples
    of `interval` tokens; 0: never. With a `period` it is a ring of `capacity` tokens, blank at multiples of the period. With an
    `answer_window` a token attends to the prompt, and of the answer to that many tokens, including itself.
    """

    cdef Rules rules

    def __cinit__(self, page_size, window=0, chunk=0, hit_tokens=0, interval=0, period=0, capacity=0, answer_window=0):
        self.rules.page_size = MAX_TOKENS if page_size is None else <int32_t>size_of(page_size, "page_size", 1, MAX_TOKENS)
        self.rules.window = <int32_t>min(size_of(window, "sliding_window", 0, INT64_MAX), MAX_TOKENS)
        self.rules.answer_window = <int32_t>min(size_of(answer_window, "sliding_window", 0, INT64_MAX), MAX_TOKENS)
        self.rules.chunk = <int32_t>min(size_of(chunk, "attention_chunk_size", 0, INT64_MAX), MAX_TOKENS)
        self.rules.leaves_pages = has_window(&self.rules) or self.rules.answer_window > 0
        self.rules.hit_tokens = <int32_t>size_of(hit_tokens, "hit_tokens", 0, MAX_TOKENS)
        self.rules.entry_size = <int32_t>size_of(interval, "checkpoint_interval", 0, MAX_TOKENS) or self.rules.page_size
        self.rules.period = <int32_t>size_of(period, "period", 0, MAX_TOKENS)
        self.rules.capacity = <int32_t>size_of(capacity, "capacity", 0, MAX_TOKENS)


@cython.final
@cython.auto_pickle(False)
cdef class CacheGroups:
    """The cache groups of a model.

    `groups` are ``(PageRules, id, hashes of a page)``. The id is the group's in the prefix index; None: its pages are not
    cached. `banks` are the banks of their pages; None: the first bank for all groups.
    With `use_eagle` the last page of each hit is dropped, because the drafter needs its hidden states. `boundaries` are numbers
    of tokens, ``(multiple, slack, interval)``: pages of windows and chunks stay cached only if a request that resumes at a
    boundary needs them, see `Boundaries`; None: all stay cached, and no states are kept. States of a group with an id are kept
    at boundaries. The hash of a page also covers the `hash_lookahead` tokens behind it.
    """

    def __cinit__(self, groups, bint use_eagle=False, tuple boundaries=None, banks=None, hash_lookahead=0):
        cdef tuple items = tuple(as_list(groups, "groups"))
        cdef list numbers = [0] * len(items) if banks is None else as_list(banks, "banks")
        cdef PageRules rules
        cdef Py_ssize_t g
        self.kinds.use_eagle = use_eagle
        self.groups = <Group *>calloc(max(1, len(items)), sizeof(Group))
        self.kinds.items = <const Group **>calloc(max(1, len(items)), sizeof(Group *))
        if self.groups == NULL or self.kinds.items == NULL:
            raise MemoryError("cache groups")
        if len(numbers) != len(items):
            raise ArgumentError(f"banks: got {len(numbers)}, allowed: {len(items)}, as many as groups")
        for (rules, group_id, stride), bank in zip(items, numbers):
            if rules is None:
                raise ArgumentTypeError("groups: got None, allowed: PageRules")
            self.groups[self.num] = Group(
                rules=rules.rules, id=NO_GROUP if group_id is None else group_of(group_id),
                stride=<int32_t>size_of(stride, "stride", 1, MAX_TOKENS),
                bank=<int32_t>size_of(bank, "bank", 0, MAX_BANKS - 1), next_alike=NULL, num_read_behind=0, end_step=0,
                num_dropped=0, num_step_pages=0, num_run_pages=0,
            )
            self.num_banks = max(self.num_banks, self.groups[self.num].bank + 1)
            self.kinds.has_answers |= rules.rules.answer_window > 0
            self.num += 1
        for g in range(self.num):
            self.groups[g].rules.caches_prompts = self.kinds.has_answers
            self.groups[g].rules.leaves_pages |= self.kinds.has_answers
        multiple = min(lcm(*[self.groups[g].stride for g in range(self.num)]), MAX_TOKENS + 1)  # no prefix is that long
        are_cached = [self.groups[g].id != NO_GROUP or is_ring(&self.groups[g].rules) for g in range(self.num)]
        self.kinds.num_hit_hashes = multiple if all(are_cached) else 0
        multiple = self.kinds.num_hit_hashes * (self.groups.rules.entry_size // max(1, self.groups.stride))
        self.kinds.num_hit_tokens = min(multiple, INT32_MAX)
        read_boundaries(self, boundaries)
        list_kinds(self, True)
        list_kinds(self, False)
        self.boundaries.last = INT32_MAX
        self.boundaries.hash_lookahead = <int32_t>size_of(hash_lookahead, "hash_lookahead", 0, MAX_LOOKAHEAD)
        plan_ends(self)

    def __dealloc__(self):
        free(self.groups)
        free(self.kinds.items)

    def __len__(self):
        return self.num

    def count_peak_pages(
        self, num_tokens, max_num_new_tokens, num_lookahead_tokens=0, max_num_tokens=None, bank=None
    ) -> int:
        """Return the most pages of a bank (None: of all) that a request of `num_tokens` tokens holds at once, in steps of up to
        `max_num_new_tokens`, each with slots for `num_lookahead_tokens` more, at most for `max_num_tokens` (None: no limit).

        Exact, unless page sizes and chunks have no common multiple below a million tokens: then up to three pages more for each
        group. O(groups), with different page sizes or chunks O(groups x pages in that multiple).
        """
        cdef Peak peak
        cdef int64_t num_last, period
        cdef Py_ssize_t g
        peak.groups, peak.num_groups = self.groups, self.num
        peak.num_tokens = size_of(num_tokens, "num_tokens", 0, INT64_MAX // 4)
        peak.num_new = min(size_of(max_num_new_tokens, "max_num_new_tokens", 1, INT64_MAX), max(<int64_t>1, peak.num_tokens))
        peak.max_num_slots = INT64_MAX if max_num_tokens is None else size_of(max_num_tokens, "max_num_tokens", 0, INT64_MAX)
        peak.num_ahead = min(size_of(num_lookahead_tokens, "num_lookahead_tokens", 0, INT64_MAX // 4), peak.max_num_slots)
        peak.bank = -1 if bank is None else <int32_t>size_of(bank, "bank", 0, MAX_BANKS - 1)
        if peak.num_tokens == 0:
            return 0
        num_last = max(<int64_t>0, min(peak.num_tokens, peak.max_num_slots - peak.num_ahead) - peak.num_new)
        period = min(lcm(*[each for g in range(self.num) for each in list_periods(&self.groups[g])]), num_last + 1)
        return find_peak(&peak, num_last, period) if period <= MAX_PERIOD else bound_peak(&peak)

    def count_step_pages(self, num_computed_tokens, num_slots, bank) -> int:
        """Return the pages of a bank that a request holds with `num_slots` slots, when `num_computed_tokens` of these have been
        computed. O(groups).
        """
        cdef int64_t num_computed = size_of(num_computed_tokens, "num_computed_tokens", 0, INT64_MAX // 4)
        cdef int64_t num_tokens = size_of(num_slots, "num_slots", num_computed, INT64_MAX // 4)
        cdef Peak step = Peak(
            groups=self.groups, num_groups=self.num, num_tokens=num_tokens, num_new=num_tokens - num_computed, num_ahead=0,
            max_num_slots=num_tokens, bank=<int32_t>size_of(bank, "bank", 0, MAX_BANKS - 1),
        )
        return count_pages_after(&step, num_computed)


cdef int read_boundaries(CacheGroups groups, tuple boundaries) except -1:
    """Read the template of boundaries. Raise ArgumentError unless checkpoints, if any are kept, can be written at them."""
    cdef Boundaries *read = &groups.boundaries
    cdef Py_ssize_t g
    cdef int32_t size
    for g in range(groups.num):
        read.writes_states |= keeps_checkpoints(&groups.groups[g])
    if boundaries is None:
        if read.writes_states:
            raise ArgumentError("boundaries: got None, allowed for states that are kept: numbers of tokens")
        return 0
    read.use_eagle = groups.kinds.use_eagle
    read.multiple, read.slack, read.interval = [
        <int32_t>size_of(num_tokens, "boundaries", 0, MAX_TOKENS) for num_tokens in boundaries
    ]
    for g in range(groups.num if read.writes_states else 0):
        size = groups.groups[g].rules.entry_size
        if keeps_checkpoints(&groups.groups[g]) and (not read.multiple or read.multiple % size):
            raise ArgumentError(
                f"boundaries: got multiples of {read.multiple}, allowed for checkpoints at multiples of {size} that are "
                f"written there: multiples of {size}"
            )
    return 0


cdef list list_periods(const Group *group):
    """List the periods, in tokens, after which the steps of a group take and skip pages at the same distances again."""
    return [] if is_state(&group.rules) else [group.rules.page_size, group.rules.chunk or 1, group.end_step or 1]


cdef int64_t count_pages_after(const Peak *peak, int64_t num_computed) noexcept nogil:
    """Count the pages that a request holds in the longest step after `num_computed` tokens."""
    cdef int64_t num_pages = 0, num_slots = min(num_computed + peak.num_new, peak.num_tokens)
    cdef Py_ssize_t g
    num_slots = min(num_slots + peak.num_ahead, peak.max_num_slots)
    for g in range(peak.num_groups):
        if peak.bank < 0 or peak.groups[g].bank == peak.bank:
            num_pages += count_step_pages(&peak.groups[g], num_computed, num_slots)
    return num_pages


cdef int64_t find_peak(const Peak *peak, int64_t num_last, int64_t period) noexcept nogil:
    """Find the most pages of any step. Steps that start behind `num_last` tokens end where the step at `num_last` does, and
    hold no more pages. Steps that start a `period` earlier hold no more either. Of all other steps, only one that takes the
    first token of a page can hold more than the step one token earlier.
    """
    cdef int64_t num_computed, size, most = count_pages_after(peak, 0)
    cdef Py_ssize_t g
    for g in range(peak.num_groups):
        size = peak.groups[g].rules.page_size
        num_computed = num_last - (num_last + peak.num_new + peak.num_ahead - 1) % size
        while num_computed > max(<int64_t>0, num_last - period):
            most = max(most, count_pages_after(peak, num_computed))
            num_computed -= size
    return most


cdef int64_t bound_peak(const Peak *peak) noexcept nogil:
    """Return an upper bound of `find_peak`: the sum of each group's most pages, which may fall in different steps."""
    cdef const Rules *rules
    cdef int64_t num_pages, reach, most = 0
    cdef Py_ssize_t g
    for g in range(peak.num_groups):
        if peak.bank >= 0 and peak.groups[g].bank != peak.bank:
            continue
        rules = &peak.groups[g].rules
        num_pages = pages_for(rules, min(peak.num_tokens + peak.num_ahead, peak.max_num_slots))
        reach = rules.window or rules.chunk
        if reach:
            reach += peak.groups[g].end_step + peak.groups[g].num_dropped
            num_pages = min(num_pages, pages_for(rules, reach + peak.num_new + peak.num_ahead) + 3)
        most += num_pages
    return most


cdef bint are_alike(const Group *first, const Group *other, bint are_leading) noexcept:
    """Whether two groups have equal rules, or both hit leading pages of one size, so that a drafter drops one page for both."""
    if first.stride != other.stride:
        return False
    if are_leading:
        return first.rules.page_size == other.rules.page_size
    return memcmp(&first.rules, &other.rules, sizeof(Rules)) == 0


cdef void list_kinds(CacheGroups groups, bint are_leading) noexcept:
    """Add the groups that hit leading pages, or else all other groups, to the list of kinds."""
    cdef Kinds *kinds = &groups.kinds
    cdef Group *group
    cdef const Group *first
    cdef Py_ssize_t g, kind
    for g in range(groups.num):
        group = &groups.groups[g]
        if hits_leading_pages(group) != are_leading or is_ring(&group.rules):
            continue
        for kind in range(kinds.num + 1):
            first = kinds.items[kind]  # NULL for the last: no group is of this kind yet
            if first == NULL or are_alike(first, group, are_leading):
                break
        group.next_alike = first
        kinds.items[kind] = group
        kinds.num = max(kinds.num, kind + 1)


cdef void plan_ends(CacheGroups groups) noexcept:
    """Compute the pages of windows and chunks that a request needs to resume behind tokens of another one. `find_longest`
    shortens a hit kind by kind. With eagle each kind except states drops a page and the rest of a multiple; the first kind
    drops a whole multiple if the request has hardly more tokens. If all pages stay cached, none is held for other requests.
    """
    cdef Kinds *kinds = &groups.kinds
    cdef Boundaries *boundaries = &groups.boundaries
    cdef const Group *item
    cdef Group *group
    cdef Py_ssize_t g, kind
    cdef int64_t num_behind = 0, num_dropped = 0, multiple = boundaries.multiple or kinds.num_hit_tokens
    if boundaries.writes_states:  # their slack is larger
        boundaries.hash_lookahead = 0
    for kind in range(kinds.num - 1, -1, -1):
        item = kinds.items[kind]
        if is_state(&item.rules) or not kinds.use_eagle:
            continue
        kinds.num_later_drops += not hits_leading_pages(item)
        num_dropped = min(num_behind + item.rules.page_size, <int64_t>MAX_TOKENS)
        while item != NULL:
            (<Group *>item).num_read_behind = <int32_t>num_dropped
            item = item.next_alike
        num_behind = min(num_behind + multiple, <int64_t>MAX_TOKENS)
    assert 0 <= num_dropped <= MAX_TOKENS
    boundaries.num_dropped = <int32_t>num_dropped + boundaries.hash_lookahead
    if not boundaries.multiple:
        return
    boundaries.num_uncertain = boundaries.multiple if num_dropped < num_behind else 0
    for g in range(groups.num):
        group = &groups.groups[g]
        if has_window(&group.rules) and not boundaries.writes_states:
            group.end_step = boundaries.multiple
            group.num_dropped = <int32_t>num_behind
            group.num_step_pages = boundaries.multiple // group.rules.page_size
            group.num_run_pages = count_run_pages(&group.rules, kinds.use_eagle)
