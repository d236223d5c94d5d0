"""The inputs of a step: the arrays that a model reads, filled from the tokens and pages of rows."""

cimport cython
from cpython.buffer cimport (
    PyBUF_C_CONTIGUOUS, PyBUF_FORMAT, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer,
)
from cpython.mem cimport PyMem_RawCalloc as calloc
from cpython.mem cimport PyMem_RawFree as free
from libc.stdint cimport INT32_MAX, int32_t, int64_t
from libc.string cimport memset

from pagepool.core.rows.input_fields cimport *
from pagepool.core.rows.running cimport *
from pagepool.core.tables cimport TableRows, checked_tables, in_lock_order
from pagepool.core.values cimport explained, int32_of, require_matrix

from math import lcm

import numpy as np

from pagepool.errors import ArgumentError, ArgumentTypeError, RowIndexError, made_twice, not_made, shown


cdef enum:
    MAX_DEPTH = 1 << 10       # most sets of inputs, and most steps in flight whose fills are kept

INPUT_FIELDS = (
    "token_ids", "positions", "rows", "slots", "query_start_loc", "kv_start_loc", "seq_lens", "last_tokens", "starts",
    "page_ids", "state_pages", "order", "distribution", "sources", "cross_page_ids", "encoder_lens", "page_starts",
    "page_indices", "last_page_lens", "page_offsets", "rank_slots", "write_pages", "write_starts", "write_indices",
    "write_tokens", "level_query_starts", "level_page_starts", "level_page_indices", "level_last_page_lens",
    "prefix_page_ids", "prefix_rows", "own_starts",
)

cdef FaultKind read_call(const Source *source, StepResult call, Spans *spans, Py_ssize_t *at) noexcept:
    """Read the positions that the rows of a call write. STALE if a row has moved or changed since."""
    cdef const Batch *batch = source.batch
    cdef const Growth *growth = &call.growth
    cdef const int64_t *stays = call.stays.by_row
    cdef int32_t row
    cdef Py_ssize_t i
    copy_bytes(spans.rows, growth.grown_rows, growth.num_grown * sizeof(int32_t))
    for i in range(growth.num_grown):
        row = growth.grown_rows[i]
        if not 0 < batch.stays[row] <= growth.num_stays or (stays != NULL and batch.stays[row] != stays[row]):
            at[0] = i
            return STALE
        if not read_launch(batch, growth, i, spans):
            at[0] = i
            return STALE
    return find_empty_span(spans, growth.num_grown, at)


cdef tuple checked_lists(object rows, object starts, object stops):
    """Return three lists as `PageIds` of one length."""
    cdef PageIds row_ids = as_page_ids(rows, "rows"), first = as_page_ids(starts, "starts"), last = as_page_ids(stops, "stops")
    if first.num != row_ids.num or last.num != row_ids.num:
        raise ArgumentError(f"starts, stops: got {first.num} and {last.num}, allowed: as many as rows, {row_ids.num}")
    return row_ids, first, last


cdef PageIds checked_strides(RunningRows running, PageIds page_sizes, object slot_strides):
    """Return the slots of a page in the engine's arrays, for each group: at least as many as it has tokens."""
    cdef list least = page_sizes.to_list()
    cdef list strides
    cdef Py_ssize_t g
    for g in range(0 if running is None else page_sizes.num):
        least[g] = running.rows.groups.groups[g].rules.capacity or least[g]
    strides = least[:] if slot_strides is None else as_list(slot_strides, "slot_strides")
    if len(strides) != page_sizes.num:
        raise ArgumentError(f"slot_strides: got {len(strides)}, allowed: one for each of {page_sizes.num} groups")
    for g in range(page_sizes.num):
        least[g] = 1 if least[g] == MAX_TOKENS else least[g]  # a state has no slots
    return PageIds([size_of(stride, "slot_strides", least[g], MAX_TOKENS) for g, stride in enumerate(strides)])


cdef PageList *new_lists(Py_ssize_t depth, Py_ssize_t max_num_reqs) except NULL:
    """Return the empty lists of each set."""
    cdef PageList *lists = <PageList *>calloc(depth, sizeof(PageList) + max_num_reqs * sizeof(ListedRow))
    cdef ListedRow *rows = <ListedRow *>(lists + depth)
    cdef Py_ssize_t i
    if lists == NULL:
        raise MemoryError("page_indices")
    for i in range(depth):
        lists[i].rows = rows + i * max_num_reqs
    return lists


cdef bint reserve_fills(Batch *batch) noexcept:
    """Make room for the fills of all steps that may be in flight, and of the step before them; False if memory is short."""
    cdef Py_ssize_t i, capacity = min(batch.max_steps_ahead, MAX_DEPTH) + 2
    cdef FilledRow *rows
    if batch.fills.items != NULL:
        return True
    batch.fills.items = <Fill *>calloc(capacity, sizeof(Fill) + batch.num_rows * sizeof(FilledRow))
    if batch.fills.items == NULL:
        return False
    batch.fills.capacity = capacity
    rows = <FilledRow *>(batch.fills.items + capacity)
    for i in range(capacity):
        batch.fills.items[i].rows = rows + i * batch.num_rows
    return True


cdef bint is_read(StepResult step) noexcept:
    """Whether a device may still read the inputs of a step. An engine that never settles steps keeps track itself."""
    return step.batch.batch.settles and not step.is_settled


cdef int32_t padding_of(object value, str name) except? -1:
    try:
        return int32_of(value)
    except (OverflowError, TypeError) as error:
        raise explained(name, error) from None


cdef int take_array(Py_buffer *view, object array, Py_ssize_t length, str name) except -1:
    """Get the buffer of an array of `length` values, or of any number if that is -1."""
    cdef char kind
    try:
        PyObject_GetBuffer(array, view, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)
    except (BufferError, TypeError, ValueError):
        raise ArgumentTypeError(f"{name}: got {type(array).__name__}, allowed: a writable array") from None
    kind = view.format[0]
    if kind not in (c"i", c"l", c"q") or view.format[1] or view.itemsize not in (4, 8) or <size_t>view.buf % view.itemsize:
        raise ArgumentTypeError(f"{name}: got items of {view.itemsize} bytes, allowed: aligned int32 or int64")
    if length >= 0 and view.len != length * view.itemsize:
        raise ArgumentError(f"{name}: got {view.len // view.itemsize} values, allowed: {length}")
    return 0


@cython.auto_pickle(False)
cdef class InputArrays:
    """The arrays of a step's inputs, in sets that are filled in turn. `pagepool.StepInputs` makes the arrays.

    A call takes the locks of the batch and its tables, or of the tables alone, checks everything, then writes and cannot fail.
    """

    cdef readonly Py_ssize_t current          # the set that was filled last
    cdef readonly RunningRows batch           # None: the tables belong to a manager's engine
    cdef RowStore rows
    cdef tuple tables                         # a TableRows for each group
    cdef tuple lock_order                     # the tables in locking order
    cdef const int32_t[:, ::1] token_matrix
    cdef Source source
    cdef Field *fields
    cdef Py_ssize_t num_fields
    cdef Py_buffer *views                     # [num_fields, depth]
    cdef Py_ssize_t depth
    cdef Py_ssize_t max_num_tokens
    cdef Py_ssize_t max_num_reqs
    cdef Py_ssize_t num_calls
    cdef bint puts_single_first
    cdef PrefixGroups *groups                 # of rows that share a prefix; NULL: the order of rows is another
    cdef void *groups_memory
    cdef int64_t num_saved                    # pages that the groups of the current set save
    cdef bint has_narrow_keys                 # whether `kv_start_loc` is int32
    cdef Spans read                           # the rows in the order of the call
    cdef InputStep step
    cdef int32_t *numbers                     # memory of `read` and `step`, and of page sizes
    cdef int64_t *seen                        # [num_rows] the last call that listed each row
    cdef list steps                           # the step whose inputs fill each set; None: named rows
    cdef bint has_sources

    def __init__(
        self, RunningRows running, tables, page_sizes, token_ids, num_tokens, num_reqs, depth, fields, pad_slot, pad_last,
        bint puts_single_first, slot_strides=None, rank=0, num_ranks=1, prefixes=None,
    ):
        """Take the rows of a batch, or `tables` with their page sizes and an int32 matrix of token ids (or None). `fields` are
        tuples of a name, a group, and an array for each of `depth` sets. `slot_strides` are the slots of a page in the engine's
        arrays, for each group; None: as many as it has tokens. With `prefixes` rows that share a prefix are neighbours: the
        levels of shared pages, the most groups, pages of a group and rows of a group, and the fewest pages that a group saves.
        """
        cdef Py_ssize_t i, g, max_num_tokens = size_of(num_tokens, "num_tokens", 1, INT32_MAX - 1)
        cdef Py_ssize_t n, max_num_reqs = size_of(num_reqs, "num_reqs", 1)
        cdef Py_ssize_t num_sets = size_of(depth, "depth", 1, MAX_DEPTH)
        cdef int32_t slot = padding_of(pad_slot, "pad_slot"), last = padding_of(pad_last, "pad_last")
        cdef Py_ssize_t checked_num_ranks = size_of(num_ranks, "ranks", 1, MAX_TOKENS)
        cdef Py_ssize_t checked_rank = size_of(rank, "ranks", 0, checked_num_ranks - 1)
        cdef tuple by_group
        cdef list sizes, described = list(as_list(fields, "fields"))
        cdef PageIds checked_sizes, strides
        if running is not None:
            running.rows.check_made()
            by_group = running.rows.tables
            sizes = [running.rows.groups.groups[g].rules.page_size for g in range(running.rows.groups.num)]
        else:
            by_group, sizes = checked_tables(tables), as_list(page_sizes, "page_sizes")
        checked_sizes = PageIds([size_of(size, "page_sizes", 1, MAX_TOKENS) for size in sizes])
        if not by_group or len(by_group) != checked_sizes.num:
            raise ArgumentError(f"page_sizes: got {checked_sizes.num}, allowed: as many as tables, {len(by_group)}, at least 1")
        strides = checked_strides(running, checked_sizes, slot_strides)
        n = (<TableRows>by_group[0]).table.num_rows
        if running is None and token_ids is not None:
            token_ids = require_matrix(token_ids, np.int32, "token_ids")
            if token_ids.shape[0] != n or not token_ids.flags.c_contiguous:
                raise ArgumentError(f"token_ids: got {token_ids.shape[0]} rows, allowed: {n}, in a contiguous array")
        if self.numbers != NULL:  # checked after everything that may run Python code
            raise made_twice("arrays of inputs")
        self.numbers = <int32_t *>calloc(13 * max_num_reqs + 1 + 4 * checked_sizes.num, sizeof(int32_t))
        self.seen = <int64_t *>calloc(n, sizeof(int64_t))
        self.source.num_cross = 0 if running is None else len(running.rows.cross_tables)
        self.source.tables = <Table **>calloc(checked_sizes.num + self.source.num_cross, sizeof(Table *))
        self.fields = <Field *>calloc(max(1, len(described)), sizeof(Field))
        self.views = <Py_buffer *>calloc(max(1, len(described)) * num_sets, sizeof(Py_buffer))
        if self.numbers == NULL or self.seen == NULL or self.source.tables == NULL or self.fields == NULL or self.views == NULL:
            raise MemoryError(f"inputs of {max_num_reqs} rows")
        self.max_num_tokens, self.max_num_reqs, self.depth = max_num_tokens, max_num_reqs, num_sets
        self.current, self.puts_single_first, self.steps = num_sets - 1, puts_single_first, [None] * num_sets
        self.step.pad_slot, self.step.pad_last = slot, last
        self.place_numbers(checked_sizes, strides, prefixes is not None)
        self.source.rank, self.source.num_ranks = <int32_t>checked_rank, <int32_t>checked_num_ranks
        self.source.num_rows, self.source.num_groups = n, checked_sizes.num
        self.source.max_num_tokens = MAX_TOKENS
        for g in range(checked_sizes.num):
            self.source.tables[g] = &(<TableRows>by_group[g]).table
            self.source.max_num_tokens = <int32_t>min(
                <int64_t>self.source.max_num_tokens, count_table_places(self.source.tables[g]) * <int64_t>checked_sizes.ids[g]
            )
        for g in range(self.source.num_cross):
            by_group += (running.rows.cross_tables[g],)
            self.source.tables[checked_sizes.num + g] = &(<TableRows>running.rows.cross_tables[g]).table
        if self.source.num_cross:
            self.source.cross_tables = self.source.tables + checked_sizes.num
            self.source.encoder_lens = &running.rows.encoder_lens[0]
        for g in range(checked_sizes.num if running is not None else 0):
            self.source.capacities[g] = running.rows.groups.groups[g].rules.capacity
        if running is not None:
            self.source.batch, self.source.token_ids = &running.rows.batch, running.rows.batch.token_ids
            self.source.stride, self.source.max_num_tokens = running.rows.batch.tokens_stride, running.rows.batch.max_num_tokens
        elif token_ids is not None:
            self.token_matrix = token_ids
            self.source.stride = self.token_matrix.shape[1]
            self.source.max_num_tokens = <int32_t>min(<int64_t>self.source.max_num_tokens, <int64_t>self.source.stride)
            self.source.token_ids = &self.token_matrix[0, 0] if self.source.stride else NULL
        if prefixes is not None:
            self.begin_groups(prefixes)
        self.batch, self.rows = running, None if running is None else running.rows
        self.tables, self.lock_order = by_group, in_lock_order(by_group)
        for i in range(len(described)):
            self.add_field(described[i])

    def __dealloc__(self):
        cdef Py_ssize_t i
        for i in range(self.num_fields):
            free(self.fields[i].extents)
            free(self.fields[i].lists)
        for i in range(self.num_fields * self.depth):
            PyBuffer_Release(&self.views[i])
        free(self.groups_memory)
        free(self.fields)
        free(self.views)
        free(self.numbers)
        free(self.seen)
        free(self.source.tables)

    def __reduce__(self):
        raise ArgumentTypeError("inputs of a step cannot be pickled")

    cdef void place_numbers(self, PageIds page_sizes, PageIds strides, bint has_groups) noexcept:
        """Point the vectors of the read rows and of the step into `numbers`."""
        cdef Py_ssize_t i, n = self.max_num_reqs
        cdef int32_t *at = self.numbers
        self.read = Spans(rows=at, starts=at + n, stops=at + 2 * n, known=at + 3 * n, drafts=at + 4 * n)
        at += 5 * n
        self.step.spans = self.read
        if self.puts_single_first or has_groups:
            self.step.spans = Spans(rows=at, starts=at + n, stops=at + 2 * n, known=at + 3 * n, drafts=at + 4 * n)
        self.step.order, self.step.begins, self.step.sources = at + 5 * n, at + 6 * n, at + 7 * n + 1
        self.source.page_sizes = at + 8 * n + 1
        self.source.shifts = self.source.page_sizes + page_sizes.num
        self.source.capacities = self.source.shifts + page_sizes.num
        self.source.strides = self.source.capacities + page_sizes.num
        copy_bytes(self.source.strides, strides.ids, strides.num * sizeof(int32_t))
        for i in range(n):
            self.step.order[i] = <int32_t>i
        for i in range(page_sizes.num):
            self.source.page_sizes[i] = page_sizes.ids[i]
            self.source.shifts[i] = -1 if page_sizes.ids[i] & (page_sizes.ids[i] - 1) else 0
            while self.source.shifts[i] >= 0 and 1 << self.source.shifts[i] < page_sizes.ids[i]:
                self.source.shifts[i] += 1

    cdef int add_field(self, tuple described) except -1:
        """Take the arrays of a field, one for each set: writable, contiguous, int32 or int64, and of the field's length."""
        cdef Field *field = &self.fields[self.num_fields]
        cdef Py_ssize_t i, group, length
        cdef list given
        cdef str name
        cdef bint has_room, is_crossed
        name, number, arrays = described
        if name not in INPUT_FIELDS:
            raise ArgumentError(f"fields: got {shown(name)}, allowed: {', '.join(INPUT_FIELDS)}")
        field.kind = <Kind><int>INPUT_FIELDS.index(name)
        is_crossed = field.kind in (CROSS_PAGE_IDS, ENCODER_LENS)
        if is_crossed and not self.source.num_cross:
            raise ArgumentError(f"fields: got {name!r}, allowed for a batch whose model has cross-attention")
        group = size_of(number, "group", 0, (self.source.num_cross if is_crossed else self.source.num_groups) - 1)
        field.group = group
        field.views = self.views + self.num_fields * self.depth
        given = list(as_list(arrays, name))
        length = self.length_of(field)
        if len(given) != self.depth:
            raise ArgumentError(f"{name}: got {len(given)} arrays, allowed: one for each of {self.depth} sets")
        if field.kind == TOKEN_IDS and self.source.token_ids == NULL:
            raise ArgumentError("fields: got 'token_ids', allowed without a batch: with a matrix `token_ids` only")
        if field.kind == DISTRIBUTION and not self.puts_single_first:
            raise ArgumentError("fields: got 'distribution', allowed with order='decodes' only")
        if field.kind in (SOURCES, WRITE_PAGES, WRITE_STARTS, WRITE_INDICES, WRITE_TOKENS) and self.rows is None:
            raise ArgumentError(f"fields: got {name!r}, allowed with a batch only")
        if field.kind == SOURCES:
            with self.rows.own_lock()[0]:
                has_room = reserve_fills(&self.rows.batch)
            if not has_room:
                raise MemoryError(name)
            self.has_sources = True
        if field.kind == RANK_SLOTS and self.source.page_sizes[group] % self.source.num_ranks:
            size = self.source.page_sizes[group]
            raise ArgumentError(f"ranks: got {self.source.num_ranks}, allowed with pages of {size} tokens: their divisors")
        if field.kind == PAGE_INDICES:
            field.lists = new_lists(self.depth, self.max_num_reqs)
        if field.kind >= LEVEL_QUERY_STARTS:
            if self.groups == NULL:
                raise ArgumentError(f"fields: got {name!r}, allowed with order='prefixes' only")
            if field.kind in (LEVEL_PAGE_STARTS, LEVEL_PAGE_INDICES, LEVEL_LAST_PAGE_LENS, PREFIX_PAGE_IDS):
                self.require_full(group)
            field.groups = self.groups
        field.num_extents = self.count_extents(field)
        if field.num_extents:
            field.extents = <int32_t *>calloc(self.depth * field.num_extents, sizeof(int32_t))
            if field.extents == NULL:
                raise MemoryError(name)
        try:
            for i in range(self.depth):
                take_array(&field.views[i], given[i], length, name)
                if field.views[i].itemsize != field.views[0].itemsize:
                    raise ArgumentTypeError(f"{name}: got arrays of two types, allowed: one type")
                if field.views[i].len != field.views[0].len:
                    raise ArgumentError(f"{name}: got arrays of two lengths, allowed: one length")
        except BaseException:
            for i in range(self.depth):
                PyBuffer_Release(&field.views[i])
            free(field.extents)
            free(field.lists)
            field.extents, field.lists = NULL, NULL
            raise
        for i in range(self.depth):
            memset(field.views[i].buf, 0xFF if field.kind == PREFIX_ROWS else 0, field.views[i].len)
        self.num_fields += 1
        field.is_wide = field.views[0].itemsize == 8
        field.capacity = field.views[0].len // field.views[0].itemsize
        self.has_narrow_keys |= field.kind == KV_START_LOC and not field.is_wide
        return 0

    cdef Py_ssize_t length_of(self, const Field *field) noexcept:
        """Return the number of values in an array of a field; -1: any number."""
        if field.kind in (TOKEN_IDS, POSITIONS, ROWS, SLOTS, RANK_SLOTS, WRITE_PAGES, WRITE_INDICES, WRITE_TOKENS):
            return self.max_num_tokens
        if field.kind in (QUERY_START_LOC, KV_START_LOC, PAGE_STARTS, WRITE_STARTS):
            return self.max_num_reqs + 1
        if field.kind == PAGE_INDICES or field.kind == LEVEL_PAGE_INDICES:
            return -1
        if self.groups != NULL:
            if field.kind in (LEVEL_QUERY_STARTS, LEVEL_PAGE_STARTS):
                return (self.groups.limits.num_levels + 1) * (self.max_num_reqs + 1)
            if field.kind == LEVEL_LAST_PAGE_LENS:
                return (self.groups.limits.num_levels + 1) * self.max_num_reqs
            if field.kind == PREFIX_PAGE_IDS:
                return self.groups.limits.num_groups * self.groups.limits.num_pages
            if field.kind == PREFIX_ROWS:
                return self.groups.limits.num_groups * self.groups.limits.num_rows
        if field.kind == PAGE_IDS:
            return self.max_num_reqs * self.source.tables[field.group].num_columns
        if field.kind == CROSS_PAGE_IDS:
            return self.max_num_reqs * self.source.cross_tables[field.group].num_columns
        return 3 if field.kind == DISTRIBUTION else self.max_num_reqs

    cdef Py_ssize_t count_extents(self, const Field *field) noexcept:
        """Return the number of extents that each set of a field has."""
        if field.kind in (PAGE_IDS, CROSS_PAGE_IDS):
            return self.max_num_reqs
        if field.kind == LEVEL_PAGE_INDICES:
            return self.groups.limits.num_levels + 1
        if field.kind == PREFIX_PAGE_IDS:
            return self.groups.limits.num_groups
        return 1 if field.kind == PREFIX_ROWS else 0

    cdef int begin_groups(self, object prefixes) except -1:
        """Make the memory of groups that share a prefix, in the first group of full attention."""
        cdef Py_ssize_t n = self.max_num_reqs, num_slots = 2, g = 0, i, num_saved
        cdef Py_ssize_t num_levels, num_groups, num_pages, num_places, num_rows, least
        cdef int32_t *at
        cdef list sizes = as_list(prefixes, "prefixes")
        if len(sizes) != 5:
            raise ArgumentError(f"prefixes: got {len(sizes)} numbers, allowed: 5")
        num_levels, num_groups, num_pages, num_rows, least = [size_of(each, "prefixes", 0, MAX_TOKENS) for each in sizes]
        if not (0 < num_levels <= MAX_LEVELS and num_groups and num_pages and num_rows):
            raise ArgumentError(f"prefixes: got {sizes}, allowed: 1 to {MAX_LEVELS} levels, and numbers of at least 1")
        while g < self.source.num_groups and not self.is_full(g):
            g += 1
        if g == self.source.num_groups:
            raise ArgumentError("order: got 'prefixes', allowed for a model with full attention, and without sinks")
        while num_slots < 2 * n:
            num_slots *= 2
        num_saved = (n + 1) * (MAX_NODE_DEPTH + 1) * (MAX_LEVELS + 1)
        self.groups_memory = calloc(
            1, sizeof(PrefixGroups) + (n + 1) * sizeof(PrefixNode) + (num_saved + n) * sizeof(int64_t)
            + ((7 + MAX_LEVELS) * n + num_slots) * sizeof(int32_t),
        )
        if self.groups_memory == NULL:
            raise MemoryError("groups of rows")
        self.groups = <PrefixGroups *>self.groups_memory
        self.groups.limits = PrefixLimits(
            num_levels=num_levels, num_groups=num_groups, num_pages=num_pages, num_places=num_pages, num_rows=num_rows,
            min_saved_pages=least,
        )
        for i in range(self.source.num_groups):
            if self.is_full(i):  # a place of the first group may have several pages of another one
                num_places = num_pages * <int64_t>self.source.page_sizes[i] // self.source.page_sizes[g]
                self.groups.limits.num_places = min(self.groups.limits.num_places, num_places)
        self.groups.unit = lcm(*[self.source.page_sizes[i] for i in range(self.source.num_groups) if self.is_full(i)])
        self.groups.unit //= self.source.page_sizes[g]
        self.groups.group, self.groups.max_num_reqs, self.groups.num_rows, self.groups.num_slots = g, n, -1, num_slots
        self.groups.saved = <int64_t *>(self.groups + 1)
        self.groups.stays = self.groups.saved + num_saved
        self.groups.nodes = <PrefixNode *>(self.groups.stays + n)
        at = <int32_t *>(self.groups.nodes + n + 1)
        self.groups.order, self.groups.places, self.groups.own, self.groups.others = at, at + n, at + 2 * n, at + 3 * n
        self.groups.buckets, self.groups.ends, self.groups.pages = at + 4 * n, at + 5 * n, at + 6 * n
        self.groups.at, self.groups.table = at + 7 * n, at + (7 + MAX_LEVELS) * n
        return 0

    cdef bint is_full(self, Py_ssize_t group) noexcept:
        """Whether a cache group has full attention without sinks, so that its pages can be shared at any place."""
        cdef const Rules *rules
        if self.source.tables[group].num_sinks:
            return False
        if self.source.batch == NULL:
            return True
        rules = &self.source.batch.groups[group].rules
        return not (rules.window or rules.chunk or rules.answer_window or rules.capacity or rules.page_size == MAX_TOKENS)

    cdef int require_full(self, Py_ssize_t group) except -1:
        if not self.is_full(group):
            raise ArgumentError(f"group: got {group}, allowed: one of full attention, and without sinks")
        return 0

    @property
    def num_saved_pages(self) -> int:
        """Pages of the group with full attention that the step filled last need not read again, with ``order="prefixes"``."""
        return self.num_saved

    def fill(
        self, step=None, rows=None, starts=None, stops=None, num_tokens=None, num_reqs=None, draft_token_ids=None,
    ) -> int:
        """Fill the next set with the inputs of a step, and return its number of tokens.

        `step` is a step of the batch: its rows, and the tokens planned for each, with drafts. Without it `rows` do not repeat,
        and row ``rows[i]`` computes its tokens ``starts[i]`` to ``stops[i] - 1``, which have slots. The arrays are padded to
        `num_tokens` and `num_reqs` (None: their length); values behind these stay. Unknown tokens get the ids in
        ``draft_token_ids[i]``, int32, or -1.

        Raise ArgumentError for a step of another batch, a settled one, or one whose rows were planned again, cut, moved or
        released since; for rows that are not admitted, wait for tokens from elsewhere or repeat; for a row without tokens, or
        with a token that has no page; for more tokens or rows than `num_tokens` and `num_reqs` have room for, and for too few
        drafts. RowIndexError for a row outside the table, ArgumentTypeError for other types. Nothing has been written then.
        O(tokens + rows), and with ``page_ids`` O(pages), native; nothing is allocated.
        """
        cdef InputStep *filling = &self.step
        cdef StepResult result = None if step is None else checked_step(self.rows, step)
        cdef tuple listed = None
        cdef const int32_t[:, ::1] drafts = None
        cdef Py_ssize_t n, next_set, num_drafts = 0, num_kept = 0
        cdef Py_ssize_t num_padded_tokens = self.max_num_tokens, num_padded_rows = self.max_num_reqs
        cdef Fault fault
        if num_tokens is not None:
            num_padded_tokens = size_of(num_tokens, "num_tokens", 0, self.max_num_tokens)
        if num_reqs is not None:
            num_padded_rows = size_of(num_reqs, "num_reqs", 0, self.max_num_reqs)
        if draft_token_ids is not None:
            drafts = np.ascontiguousarray(require_matrix(draft_token_ids, np.int32, "draft_token_ids"))
            num_drafts = drafts.shape[1]
        if result is None:
            listed = checked_lists(rows, starts, stops)
        elif rows is not None or starts is not None or stops is not None:
            raise ArgumentError("rows, starts, stops: got both a step and these, allowed: one of them")
        n = len(listed[0]) if result is None else result.num_rows
        if n > num_padded_rows:
            raise ArgumentError(f"rows: got {n}, allowed: {num_padded_rows}, which is num_reqs")
        if drafts is not None and (self.rows is None or drafts.shape[0] != n):
            raise ArgumentError(f"draft_token_ids: got {drafts.shape[0]} rows, allowed: {n}, of a batch")
        next_set = self.find_free_set(result)
        self.lock()
        filling.num_rows, filling.num_padded_tokens, filling.num_padded_rows = n, num_padded_tokens, num_padded_rows
        filling.drafts, filling.num_drafts = NULL, num_drafts
        if drafts is not None:  # not NULL even if there are no ids
            filling.drafts = &drafts[0, 0] if n and num_drafts else <const int32_t *>&filling.num_drafts
        fault = self.read_step(result, listed)
        if fault.kind == FAULTLESS:
            num_kept = filling.num_tokens
            self.write_set(result, next_set)
        self.unlock()
        if fault.kind != FAULTLESS:
            self.refuse(&fault, n, num_padded_tokens, num_drafts)
        self.steps[next_set] = result
        return num_kept

    cdef Py_ssize_t find_free_set(self, StepResult result) except -1:
        """Return the next set. ArgumentError if a step that is not settled reads it."""
        cdef Py_ssize_t next_set = self.current + 1 if self.current + 1 < self.depth else 0
        cdef StepResult reader = self.steps[next_set] if self.steps is not None else None
        if reader is not None and reader is not result and is_read(reader):
            raise ArgumentError(
                f"out: got {self.depth} sets, which steps that are not settled read, allowed: more sets than steps in flight"
            )
        return next_set

    cdef void write_set(self, StepResult result, Py_ssize_t next_set) noexcept:
        """Write the rows that were read to the arrays of a set, and note the step."""
        cdef InputStep *filling = &self.step
        cdef Py_ssize_t i
        cdef void *thread = let_others_run(filling.num_tokens)
        if self.puts_single_first:
            arrange(filling, &self.read)
        for i in range(filling.num_rows if self.groups != NULL else 0):
            put_span(filling, i, &self.read, self.groups.order[i])
        begin_rows(filling)
        self.current = next_set
        self.num_saved = self.groups.num_saved_pages if self.groups != NULL else 0
        write_fields(self.fields, self.num_fields, self.current, self.max_num_reqs, &self.source, filling)
        go_on(thread)
        if self.rows is not None and self.rows.batch.fills.items != NULL:
            self.note_fill(result)

    cdef Fault read_step(self, StepResult result, tuple lists) noexcept:
        """Read the rows of a step, or of lists, and check them, their tokens and pages."""
        cdef Fault fault
        cdef const Field *field
        cdef Listed listed
        cdef Py_ssize_t i, n = self.step.num_rows, at = 0
        cdef int64_t num_pages, capacity
        cdef bint is_wide, is_list
        cdef FaultKind kind
        if result is not None:
            kind = self.read_calls(result, &at)
        else:
            self.num_calls += 1
            listed = Listed(
                rows=(<PageIds>lists[0]).ids, starts=(<PageIds>lists[1]).ids, stops=(<PageIds>lists[2]).ids, num_rows=n,
                call=self.num_calls, seen=self.seen,
            )
            kind = read_lists(&self.source, &listed, &self.read, &at)
        if kind == FAULTLESS:
            kind = count_tokens_of(&self.step, &self.read, &at)
        if kind == FAULTLESS and self.has_sources:
            kind = self.find_sources(result, &at)
        if kind == FAULTLESS and self.has_narrow_keys and self.step.num_keys > INT32_MAX:
            kind = LONG_KEYS
        fault = Fault(kind=kind, at=at, row=0, start=0, stop=0, group=0, page_id=0)
        for i in range(self.num_fields if kind == FAULTLESS else 0):
            field = &self.fields[i]
            if field.kind not in (SLOTS, RANK_SLOTS, PAGE_INDICES, LEVEL_PAGE_INDICES) or fault.kind != FAULTLESS:
                continue
            is_list = field.kind in (PAGE_INDICES, LEVEL_PAGE_INDICES)
            is_wide = field.is_wide or is_list  # a list has page ids, which are small
            if find_wrong_page(&self.source, field.group, is_wide, &self.step, &self.read, &fault):
                fault.kind, fault.group = WITHOUT_PAGE, field.group
            elif is_list:
                num_pages = count_listed(&self.source, field.group, &self.read, n)
                capacity = field.capacity // max(1, field.num_extents)
                if num_pages > capacity:
                    fault.kind, fault.group, fault.start, fault.stop = MANY_PAGES, field.group, capacity, num_pages
        if self.groups != NULL and fault.kind == FAULTLESS:
            if find_wrong_page(&self.source, self.groups.group, True, &self.step, &self.read, &fault):
                fault.kind, fault.group = WITHOUT_PAGE, self.groups.group
            else:
                find_groups(self.groups, &self.source, &self.read, &self.step)
        if fault.kind not in (FAULTLESS, MANY_PAGES) and n:
            fault.row, fault.stop = self.read.rows[fault.at], self.read.stops[fault.at]
            if fault.kind != WITHOUT_PAGE:
                fault.start = self.read.starts[fault.at]
        if fault.kind == MANY_TOKENS:
            fault.stop = self.step.num_tokens
        return fault

    cdef FaultKind read_calls(self, StepResult result, Py_ssize_t *at) noexcept:
        """Read the rows of all calls of a step."""
        cdef StepResult call
        cdef Spans spans = self.read
        cdef FaultKind kind = read_call(&self.source, result, &spans, at)
        cdef Py_ssize_t first = result.growth.num_grown
        for item in result.calls or ():
            call = item
            if kind != FAULTLESS or first + call.growth.num_grown > self.step.num_rows:
                break
            spans = Spans(
                rows=self.read.rows + first, starts=self.read.starts + first, stops=self.read.stops + first,
                known=self.read.known + first, drafts=self.read.drafts + first,
            )
            kind = read_call(&self.source, call, &spans, at)
            at[0] += first
            first += call.growth.num_grown
        return ROWS_ADDED_SINCE if kind == FAULTLESS and first != self.step.num_rows else kind

    cdef FaultKind find_sources(self, StepResult result, Py_ssize_t *at) noexcept:
        """Find the places, in the step filled before, of the rows whose first token that step samples; -1 if it is known."""
        cdef const Batch *batch = &self.rows.batch
        cdef const Fill *fill = find_fill_before(&batch.fills, NAMED_ROWS if result is None else result.growth.step)
        cdef int32_t row, start
        cdef int64_t number
        cdef Py_ssize_t i, place
        for i in range(self.step.num_rows):
            row, start, place = self.read.rows[i], self.read.starts[i], -1
            if start >= self.read.known[i]:
                number = number_of_source(batch, row, start)
                if number and fill != NULL and batch.rows[row].last_cut <= fill.num_cuts:
                    place = place_in(fill, i, batch.stays[row], number)
                if place < 0 and batch.records[row].state != ENDED:
                    at[0] = i
                    return WITHOUT_SOURCE
            self.step.sources[i] = <int32_t>place
        return FAULTLESS

    cdef void note_fill(self, StepResult result) noexcept:
        """Note the rows, in the order of the arrays, and which token of each row the step samples."""
        cdef Batch *batch = &self.rows.batch
        cdef Spans spans = self.step.spans
        cdef int64_t step = NAMED_ROWS
        cdef Fill *fill
        cdef Py_ssize_t i
        if result is not None:
            step = result.growth.step
        fill = begin_fill(&batch.fills, step)
        fill.num_cuts, fill.num_rows = batch.num_cuts, self.step.num_rows
        for i in range(self.step.num_rows):
            fill.rows[i].stay = batch.stays[spans.rows[i]]
            fill.rows[i].sampled = number_sampled(batch, spans.rows[i], spans.starts[i], spans.stops[i])

    cdef int lock(self) except -1:
        if self.numbers == NULL or self.lock_order is None:
            raise not_made("inputs")
        if self.rows is not None:
            self.rows.own_lock()[0].acquire()
        else:
            for table in self.lock_order:
                (<TableRows>table).require_own()
        for table in self.lock_order:
            (<TableRows>table).lock.acquire()
        return 0

    cdef void unlock(self) noexcept:
        for table in self.lock_order:
            (<TableRows>table).lock.release()
        if self.rows is not None:
            self.rows.lock.release()

    cdef int refuse(self, const Fault *fault, Py_ssize_t n, Py_ssize_t num_tokens, Py_ssize_t num_drafts) except -1:
        """Raise the error for a fault."""
        cdef str name = f"row {fault.row} (at {fault.at})"
        if fault.kind == OUTSIDE_TABLE:
            raise RowIndexError(f"row: got {fault.row} (at {fault.at}), allowed: 0 to {self.source.num_rows - 1}")
        if fault.kind == NOT_READY:
            raise ArgumentError(
                f"{name}: got a row that is not admitted, or waits for tokens from elsewhere, allowed: an admitted one that "
                "waits for none"
            )
        if fault.kind == REPEATED:
            raise ArgumentError(f"rows: got {fault.row} twice (the second at {fault.at}), allowed: each once")
        if fault.kind == STALE:
            raise ArgumentError(
                f"{name}: got a row that was cut, moved or released since the step, allowed: the row's last step"
            )
        if fault.kind == WRONG_SPAN:
            raise ArgumentError(
                f"{name}: got tokens {fault.start} to {fault.stop}, allowed: at least one of 0 to {self.source.max_num_tokens}"
            )
        if fault.kind == WITHOUT_SOURCE:
            raise ArgumentError(
                f"{name}: got a first token that is sampled by another step than the one whose inputs were filled before, in "
                "any StepInputs of the batch, allowed: with `sources`, rows of that step"
            )
        if fault.kind == ROWS_ADDED_SINCE:
            refuse_added(n)
        if fault.kind == FEW_DRAFTS:
            raise ArgumentError(f"draft_token_ids: got {num_drafts} a row, allowed: at least the unknown tokens of {name}")
        if fault.kind == MANY_TOKENS:
            raise ArgumentError(f"tokens: got {fault.stop}, allowed: {num_tokens}, which is num_tokens")
        if fault.kind == MANY_PAGES:
            raise ArgumentError(
                f"page_indices: got {fault.stop} pages in group {fault.group}, allowed: {fault.start}, which is num_pages"
            )
        if fault.kind == LONG_KEYS:
            raise ArgumentError("kv_start_loc: got more keys than int32 can count, allowed: with int64 in `dtypes`")
        raise ArgumentError(
            f"{name}: got token {fault.start} in page {fault.page_id} of group {fault.group}, allowed: one whose slots fit the "
            "array's type; tokens need slots, and lie not behind a window"
        )
