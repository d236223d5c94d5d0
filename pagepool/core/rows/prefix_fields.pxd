# The fields of groups that share a prefix: lists of pages by level, as cascade kernels take them, and a table of the groups.

from pagepool.core.rows.prefix_groups cimport *

ctypedef fused Value:
    int32_t
    int64_t


cdef inline void copy_values(Value *out, const int32_t *values, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t i
    if Value is int32_t:
        copy_bytes(out, values, n * sizeof(int32_t))
    else:
        for i in range(n):
            out[i] = values[i]


cdef inline void repeat_value(Value *out, int64_t value, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(n):
        out[i] = <Value>value


cdef inline void count_up(Value *out, int64_t first, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(n):
        out[i] = <Value>(first + i)


cdef inline int32_t _first_own(
    const PrefixGroups *groups, const Source *source, Py_ssize_t group, Py_ssize_t i
) noexcept nogil:
    """Return the place of a row's first page outside all groups."""
    return place_for(groups, source, group, groups.own[i])


cdef inline int64_t count_level_pages(
    const PrefixGroups *groups, const Source *source, Py_ssize_t group, const PrefixNode *node
) noexcept nogil:
    """Count the pages of a run; none are outside groups."""
    if node == NULL:
        return 0
    return place_for(groups, source, group, node.end) - place_for(groups, source, group, node.start)


cdef inline int64_t count_own_pages(
    const PrefixGroups *groups, const Source *source, Py_ssize_t group, const Spans *spans, Py_ssize_t i
) noexcept nogil:
    """Count the pages that a row in order reads alone."""
    return listed_row(source, group, spans, i).num_pages - _first_own(groups, source, group, i)


cdef inline void write_level_query_starts(Value *out, const PrefixGroups *groups, const InputStep *step) noexcept nogil:
    """Write where the tokens of each run begin; in the last level each row is a run."""
    cdef Py_ssize_t level, i, k, n = step.num_rows, stride = groups.max_num_reqs + 1
    cdef const PrefixNode *node
    for level in range(groups.limits.num_levels):
        out[level * stride], i, k = 0, 0, 0
        while i < n:
            i, k = i + next_run(groups, level, i, n, &node), k + 1
            out[level * stride + k] = step.begins[i]
        repeat_value(out + level * stride + k + 1, step.num_tokens, step.num_padded_rows - k)
    out += groups.limits.num_levels * stride
    copy_values(out, step.begins, n + 1)
    repeat_value(out + n + 1, step.num_tokens, step.num_padded_rows - n)


cdef inline void write_level_page_starts(
    Value *out, const PrefixGroups *groups, const Source *source, Py_ssize_t group, const InputStep *step
) noexcept nogil:
    """Write where the pages of each run begin."""
    cdef Py_ssize_t level, i, k, n = step.num_rows, stride = groups.max_num_reqs + 1
    cdef const PrefixNode *node
    cdef int64_t num_pages
    for level in range(groups.limits.num_levels):
        out[level * stride], num_pages, i, k = 0, 0, 0, 0
        while i < n:
            i, k = i + next_run(groups, level, i, n, &node), k + 1
            num_pages += count_level_pages(groups, source, group, node)
            out[level * stride + k] = <Value>num_pages
        repeat_value(out + level * stride + k + 1, num_pages, step.num_padded_rows - k)
    out += groups.limits.num_levels * stride
    out[0], num_pages = 0, 0
    for i in range(n):
        num_pages += count_own_pages(groups, source, group, &step.spans, i)
        out[i + 1] = <Value>num_pages
    repeat_value(out + n + 1, num_pages, step.num_padded_rows - n)


cdef inline void write_level_last_page_lens(
    Value *out, const PrefixGroups *groups, const Source *source, Py_ssize_t group, const InputStep *step
) noexcept nogil:
    """Write the tokens in the last page of each run: shared pages are full."""
    cdef Py_ssize_t level, i, k, n = step.num_rows, stride = groups.max_num_reqs
    cdef const PrefixNode *node
    for level in range(groups.limits.num_levels):
        i = k = 0
        while i < n:
            i += next_run(groups, level, i, n, &node)
            out[level * stride + k] = <Value>(0 if node == NULL else source.page_sizes[group])
            k += 1
        repeat_value(out + level * stride + k, 0, step.num_padded_rows - k)
    out += groups.limits.num_levels * stride
    for i in range(n):
        out[i] = <Value>last_page_len(source, group, &step.spans, i)
    repeat_value(out + n, 0, step.num_padded_rows - n)


cdef inline void write_level_page_indices(
    Value *out, int32_t *extents, Py_ssize_t capacity, const PrefixGroups *groups, const Source *source, Py_ssize_t group,
    const InputStep *step,
) noexcept nogil:
    """Write the pages of each run, and zeros over the ids that an earlier step wrote behind them, `extents` by level."""
    cdef const Table *table = source.tables[group]
    cdef Py_ssize_t level, i, n = step.num_rows
    cdef const PrefixNode *node
    cdef int64_t num, num_pages
    for level in range(groups.limits.num_levels + 1):
        i = num_pages = 0
        while i < n:
            if level == groups.limits.num_levels:
                num = count_own_pages(groups, source, group, &step.spans, i)
                copy_values(out + num_pages, ids_at(table, step.spans.rows[i]) + _first_own(groups, source, group, i), num)
                i += 1
            else:
                num = next_run(groups, level, i, n, &node)
                if node != NULL:
                    copy_values(
                        out + num_pages,
                        ids_at(table, step.spans.rows[i]) + place_for(groups, source, group, node.start),
                        count_level_pages(groups, source, group, node),
                    )
                i, num = i + num, count_level_pages(groups, source, group, node)
            num_pages += num
        repeat_value(out + num_pages, 0, extents[level] - num_pages)
        extents[level] = <int32_t>num_pages
        out += capacity


cdef inline void write_prefix_page_ids(
    Value *out, int32_t *extents, const PrefixGroups *groups, const Source *source, Py_ssize_t group, const InputStep *step
) noexcept nogil:
    """Write a line of page ids for each group, and zeros over the ids of an earlier step, `extents` by line."""
    cdef Py_ssize_t level, i, first, num, g = 0, n = step.num_rows
    cdef const PrefixNode *node
    cdef int64_t num_pages
    for level in range(groups.limits.num_levels):
        i = 0
        while i < n:
            first, num = i, next_run(groups, level, i, n, &node)
            i += num
            num_pages = count_level_pages(groups, source, group, node)
            while node != NULL and first < i:
                copy_values(
                    out, ids_at(table_of(source, group), step.spans.rows[first]) + place_for(groups, source, group, node.start),
                    num_pages,
                )
                repeat_value(out + num_pages, 0, extents[g] - num_pages)
                extents[g], out = <int32_t>num_pages, out + groups.limits.num_pages
                first, g = first + groups.limits.num_rows, g + 1
    while g < groups.limits.num_groups:
        repeat_value(out, 0, extents[g])
        extents[g], out, g = 0, out + groups.limits.num_pages, g + 1


cdef inline const Table *table_of(const Source *source, Py_ssize_t group) noexcept nogil:
    return source.tables[group]


cdef inline void write_prefix_rows(
    Value *out, int32_t *extents, const PrefixGroups *groups, const InputStep *step
) noexcept nogil:
    """Write a line of places of rows for each group, and -1 behind them, also over the groups of an earlier step."""
    cdef Py_ssize_t level, i, first, num, g = 0, n = step.num_rows
    cdef const PrefixNode *node
    for level in range(groups.limits.num_levels):
        i = 0
        while i < n:
            first, num = i, next_run(groups, level, i, n, &node)
            i += num
            while node != NULL and first < i:
                num = min(i - first, groups.limits.num_rows)
                count_up(out, first, num)
                repeat_value(out + num, -1, groups.limits.num_rows - num)
                first, g, out = first + num, g + 1, out + groups.limits.num_rows
    num, extents[0] = extents[0] - g, <int32_t>g
    repeat_value(out, -1, num * groups.limits.num_rows)
