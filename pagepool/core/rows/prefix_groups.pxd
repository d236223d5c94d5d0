# Rows of a step that share a prefix, so that a kernel can read its pages once: groups of neighbours, in levels.
#
# A page at a place stands for all tokens before it. So rows with one page at a place share all places before it, and pages are
# compared only where the search looks. Only full pages that the step does not write are shared. The search makes a tree: rows
# with one page at a place are a node, which ends where the first of them leaves the others. Then it chooses the nodes that save
# most pages within the number of levels: a chosen node takes a level from those below it.
#
# Always: `order` is a permutation, the rows of a node are neighbours in it, and the rows of a child are among its parent's. The
# pages of a chosen node begin where those of the next chosen one above it end.

from libc.stdint cimport uint32_t
from libc.string cimport memset

from pagepool.core.rows.page_lists cimport *


cdef enum:
    MAX_LEVELS = 4            # most levels in which a row shares pages
    MAX_NODE_DEPTH = 8
    NO_NODE = -1

cdef struct PrefixNode:
    int32_t parent            # NO_NODE: the root, which has all rows
    int32_t depth
    int32_t first_row         # index in `order`
    int32_t num_rows
    int32_t start             # place of the first page of its group
    int32_t end               # place behind the pages that its rows share
    int32_t level             # its level; NO_NODE: it was not chosen
    int32_t above             # depth of the last chosen node down to this one
    int32_t num_left          # levels that the nodes below it may take

cdef struct PrefixLimits:
    Py_ssize_t num_levels     # most levels in which a row shares pages
    Py_ssize_t num_groups     # most groups; one has at most `num_rows` rows, and the nodes of more rows count as several
    Py_ssize_t num_pages      # most pages of a group, in each cache group
    Py_ssize_t num_places     # places with at most as many pages in each cache group
    Py_ssize_t num_rows
    int64_t min_saved_pages   # a group saves at least as many

cdef struct PrefixGroups:
    PrefixLimits limits
    Py_ssize_t group          # the cache group whose pages are compared
    int32_t unit              # places after which pages of all groups with full attention end together
    Py_ssize_t max_num_reqs
    PrefixNode *nodes         # [max_num_reqs + 1]
    Py_ssize_t num_nodes
    int64_t *saved            # [max_num_reqs + 1, MAX_NODE_DEPTH + 1, MAX_LEVELS + 1]: see `_saved_below`
    int64_t num_saved_pages
    int32_t *order            # [max_num_reqs] index of each row in the call
    int32_t *places           # [max_num_reqs] by row of the call: full pages that the step does not write
    int32_t *own              # [max_num_reqs] by row in order: place of its first page outside all groups
    int32_t *at               # [MAX_LEVELS, max_num_reqs] by row in order: the node whose group begins there, or NO_NODE
    int32_t *others           # [max_num_reqs] memory of `_split`, as are the next four
    int32_t *buckets
    int32_t *ends
    int32_t *pages
    int32_t *table            # [num_slots] buckets by page
    Py_ssize_t num_slots      # a power of 2, at least twice `max_num_reqs`
    int64_t *stays            # [max_num_reqs] stays of the rows of the call that were searched
    Py_ssize_t num_rows       # rows of that call; -1: the groups may have grown since
    int64_t num_rewrites      # those of the table then


cdef inline int32_t _count_common(
    const PrefixGroups *groups, const Table *table, const Spans *spans, int32_t leader, int32_t i, int32_t low, int32_t most
) noexcept nogil:
    """Count the places that two rows share, up to `most`, given one of them: by doubling, then by halving."""
    cdef const int32_t *mine = ids_at(table, spans.rows[leader])
    cdef const int32_t *others = ids_at(table, spans.rows[i])
    cdef int32_t bad = min(most, groups.places[i]) - 1, step = 1, middle
    assert most <= groups.places[leader] and low <= bad and mine[low] == others[low]
    if mine[bad] == others[bad]:
        return bad + 1
    while low + step < bad and mine[low + step] == others[low + step]:
        low, step = low + step, 2 * step
    bad = min(bad, low + step)
    while bad - low > 1:
        middle = low + (bad - low) // 2
        if mine[middle] == others[middle]:
            low = middle
        else:
            bad = middle
    return low + 1


cdef inline int32_t _find_bucket(PrefixGroups *groups, int32_t page, uint32_t mask, int32_t num_buckets) noexcept nogil:
    """Return the bucket of a page, which is `num_buckets` for a new page."""
    cdef uint32_t slot = (<uint32_t>page * <uint32_t>2654435769) & mask
    while groups.table[slot] != NO_NODE:
        if groups.pages[groups.table[slot]] == page:
            return groups.table[slot]
        slot = (slot + 1) & mask
    groups.table[slot] = num_buckets
    return num_buckets


cdef inline int32_t _fill_buckets(
    PrefixGroups *groups, const Source *source, const Spans *spans, const PrefixNode *node
) noexcept nogil:
    """Put the rows of a node into buckets by their next page; return the number of buckets."""
    cdef const int32_t *rows = groups.order + node.first_row
    cdef const Table *table = source.tables[groups.group]
    cdef int32_t j, i, page, num_buckets = 0
    cdef uint32_t num_slots = 2
    while num_slots < 2 * <uint32_t>node.num_rows:
        num_slots *= 2
    assert <Py_ssize_t>num_slots <= groups.num_slots
    memset(groups.table, 0xFF, num_slots * sizeof(int32_t))
    for j in range(node.num_rows):
        i = rows[j]
        page = ids_at(table, spans.rows[i])[node.end] if node.end < groups.places[i] else 0
        groups.buckets[j] = num_buckets
        if page and source.batch != NULL and source.batch.num_local_shards:  # ids of other shards are other pages
            page += shown_offset_of(source.batch, spans.rows[i], groups.group)
        if page:
            groups.buckets[j] = _find_bucket(groups, page, num_slots - 1, num_buckets)
        if groups.buckets[j] == num_buckets:
            groups.pages[num_buckets], groups.ends[num_buckets] = page, 0
            num_buckets += 1
        groups.ends[groups.buckets[j]] += 1
    return num_buckets


cdef inline void _split(PrefixGroups *groups, const Source *source, const Spans *spans, Py_ssize_t k) noexcept nogil:
    """Order the rows of a node by their next page, and add a node for each page of several rows."""
    cdef const Table *table = source.tables[groups.group]
    cdef PrefixNode *node = &groups.nodes[k]
    cdef PrefixNode *child
    cdef int32_t *rows = groups.order + node.first_row
    cdef int32_t j, b, end = 0, num, most = <int32_t>groups.limits.num_places
    cdef int32_t num_buckets = _fill_buckets(groups, source, spans, node)
    if num_buckets == node.num_rows:
        return
    for b in range(num_buckets):
        end += groups.ends[b]
        groups.ends[b] = end - groups.ends[b]
    for j in range(node.num_rows):
        groups.others[groups.ends[groups.buckets[j]]] = rows[j]
        groups.ends[groups.buckets[j]] += 1
    copy_bytes(rows, groups.others, node.num_rows * sizeof(int32_t))
    for b in range(num_buckets):
        j = groups.ends[b - 1] if b else 0
        num = groups.ends[b] - j
        if num < 2:
            continue
        child = &groups.nodes[groups.num_nodes]
        child.parent, child.depth, child.first_row, child.num_rows = <int32_t>k, node.depth + 1, node.first_row + j, num
        child.end = groups.places[rows[j]]
        while num > 1:
            num -= 1
            child.end = _count_common(groups, table, spans, rows[j], rows[j + num], node.end, child.end)
        child.end -= child.end % groups.unit
        if child.end - node.end > most:
            child.end, child.depth = node.end + most - most % groups.unit, MAX_NODE_DEPTH
        groups.num_nodes += child.end > node.end
    assert groups.num_nodes <= groups.max_num_reqs + 1


cdef inline int64_t *_saved_below(const PrefixGroups *groups, Py_ssize_t k, Py_ssize_t depth) noexcept nogil:
    """Return how many pages the nodes below node `k` can save, by levels left, if the last chosen node is at a depth."""
    return groups.saved + (k * (MAX_NODE_DEPTH + 1) + depth) * (MAX_LEVELS + 1)


cdef inline int64_t _count_own(const PrefixGroups *groups, const PrefixNode *node, int32_t start, int64_t least) noexcept nogil:
    """Count the pages that a node saves with a group from place `start` on; 0 if it may not be one."""
    cdef int64_t num_pages = node.end - start, num_saved = (node.num_rows - 1) * num_pages
    return num_saved if num_saved >= least and num_pages <= groups.limits.num_places else 0


cdef inline void _count_saved(PrefixGroups *groups, int64_t least) noexcept nogil:
    """Count the pages that the nodes can save at best, from the last node, which has none below it, to the first."""
    cdef const PrefixNode *node
    cdef Py_ssize_t k, above, depth, level
    cdef int64_t own, num_saved
    memset(groups.saved, 0, groups.num_nodes * (MAX_NODE_DEPTH + 1) * (MAX_LEVELS + 1) * sizeof(int64_t))
    for k in range(groups.num_nodes - 1, 0, -1):
        node = &groups.nodes[k]
        above, depth = node.parent, groups.nodes[node.parent].depth
        while above != NO_NODE:
            own = _count_own(groups, node, groups.nodes[above].end, least)
            for level in range(groups.limits.num_levels + 1):
                num_saved = _saved_below(groups, k, depth)[level]
                if own and level:
                    num_saved = max(num_saved, own + _saved_below(groups, k, node.depth)[level - 1])
                _saved_below(groups, node.parent, depth)[level] += num_saved
            above = groups.nodes[above].parent
            depth = groups.nodes[above].depth if above != NO_NODE else 0


cdef inline int64_t _count_parts(const PrefixGroups *groups, const PrefixNode *node) noexcept nogil:
    """Count the groups of a chosen node."""
    return (node.num_rows + groups.limits.num_rows - 1) // groups.limits.num_rows


cdef inline void _choose(PrefixGroups *groups, int64_t least) noexcept nogil:
    """Choose the nodes that save most. While they are too many groups, the last one goes: no node below it is chosen."""
    cdef const PrefixNode *parent
    cdef PrefixNode *node
    cdef Py_ssize_t k, above
    cdef int64_t own, num_groups = 0
    groups.num_saved_pages = 0
    k = 1
    while k < groups.num_nodes:
        node, parent = &groups.nodes[k], &groups.nodes[groups.nodes[k].parent]
        above = node.parent
        while groups.nodes[above].depth > parent.above:
            above = groups.nodes[above].parent
        node.start, node.level = groups.nodes[above].end, NO_NODE
        node.above, node.num_left = parent.above, parent.num_left
        own = _count_own(groups, node, node.start, least) if parent.num_left else 0
        if own and own + _saved_below(groups, k, node.depth)[parent.num_left - 1] > (
            _saved_below(groups, k, parent.above)[parent.num_left]
        ):
            node.level = <int32_t>groups.limits.num_levels - parent.num_left
            node.above, node.num_left = node.depth, parent.num_left - 1
            num_groups += _count_parts(groups, node)
            groups.num_saved_pages += own
        k += 1
    while num_groups > groups.limits.num_groups:
        k -= 1
        node = &groups.nodes[k]
        if node.level != NO_NODE:
            num_groups -= _count_parts(groups, node)
            groups.num_saved_pages -= _count_own(groups, node, node.start, least)
            node.level = NO_NODE


cdef inline void _mark_groups(PrefixGroups *groups, Py_ssize_t n) noexcept nogil:
    """Note where groups begin, and each row's own pages."""
    cdef const PrefixNode *node
    cdef Py_ssize_t k, i
    memset(groups.at, 0xFF, MAX_LEVELS * groups.max_num_reqs * sizeof(int32_t))
    memset(groups.own, 0, n * sizeof(int32_t))
    for k in range(1, groups.num_nodes):
        node = &groups.nodes[k]
        if node.level != NO_NODE:
            groups.at[node.level * groups.max_num_reqs + node.first_row] = <int32_t>k
            for i in range(node.first_row, node.first_row + node.num_rows):
                groups.own[i] = max(groups.own[i], node.end)


cdef inline bint _are_kept(const PrefixGroups *groups, const Source *source, const Spans *spans, Py_ssize_t n) noexcept nogil:
    """Whether the groups are still those of the rows: the same ones, in the same order, with the same pages or more."""
    cdef int32_t page_size = source.page_sizes[groups.group], shift = source.shifts[groups.group]
    cdef bint is_any_new = groups.num_rows != n or groups.num_rewrites != source.tables[groups.group].num_rewrites
    cdef int32_t row
    cdef Py_ssize_t i
    for i in range(0 if is_any_new else n):
        row = groups.order[i]
        is_any_new |= groups.stays[row] != source.batch.stays[spans.rows[row]]
        is_any_new |= <int32_t>page_at(spans.starts[row], page_size, shift) < groups.own[i]
    return not is_any_new


cdef inline void find_groups(
    PrefixGroups *groups, const Source *source, const Spans *spans, const InputStep *step
) noexcept nogil:
    """Find the groups of the rows of a call, unless they are known. O(rows x log pages), and for deeper nodes again."""
    cdef const Table *table = source.tables[groups.group]
    cdef int64_t least = max(<int64_t>1, groups.limits.min_saved_pages)
    cdef Py_ssize_t i, n = step.num_rows, k = 0
    if source.batch != NULL and _are_kept(groups, source, spans, n):
        return
    for i in range(n):
        groups.order[i] = <int32_t>i
        groups.places[i] = <int32_t>page_at(spans.starts[i], source.page_sizes[groups.group], source.shifts[groups.group])
        if source.batch != NULL:
            groups.stays[i] = source.batch.stays[spans.rows[i]]
    groups.nodes[0] = PrefixNode(
        parent=NO_NODE, depth=0, first_row=0, num_rows=<int32_t>n, start=0, end=0, level=NO_NODE, above=0,
        num_left=<int32_t>groups.limits.num_levels,
    )
    groups.num_nodes = 1
    while k < groups.num_nodes:
        if groups.nodes[k].depth < MAX_NODE_DEPTH:
            _split(groups, source, spans, k)
        k += 1
    _count_saved(groups, least)
    _choose(groups, least)
    _mark_groups(groups, n)
    groups.num_rows, groups.num_rewrites = n if step.num_single == n else -1, table.num_rewrites


# Writing: a level has a run of rows for each group, and for the rows between groups.

cdef inline Py_ssize_t next_run(
    const PrefixGroups *groups, Py_ssize_t level, Py_ssize_t i, Py_ssize_t n, const PrefixNode **node
) noexcept nogil:
    """Return the rows of the run that begins at row `i` in order, and its node, or NULL."""
    cdef const int32_t *at = groups.at + level * groups.max_num_reqs
    cdef Py_ssize_t first = i
    node[0] = NULL if at[i] == NO_NODE else &groups.nodes[at[i]]
    if node[0] != NULL:
        return node[0].num_rows
    while i < n and at[i] == NO_NODE:
        i += 1
    return i - first


cdef inline int32_t place_for(const PrefixGroups *groups, const Source *source, Py_ssize_t group, int32_t place) noexcept nogil:
    """Return the place in another cache group of a place where pages of the searched one begin."""
    return <int32_t>(place * <int64_t>source.page_sizes[groups.group] // source.page_sizes[group])
