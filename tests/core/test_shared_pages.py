"""Groups of rows that share a prefix: what they read once is what the rows read alone, and no choice of groups saves more."""

from __future__ import annotations

import os
from functools import cache
from random import Random
from typing import Any

import numpy as np
import pytest

from pagepool import (
    CacheGroupSpec,
    CacheManager,
    FullAttentionSpec,
    MultiGroupPageTable,
    PageTable,
    RequestTraits,
    RunningBatch,
    SharedPrefixes,
    SlidingWindowSpec,
    StepInputs,
)
from pagepool.errors import ArgumentError, ArgumentTypeError

NUM_ROWS, MAX_LEN, PAGE_SIZE = 7, 200, 4
COMMON: dict[str, Any] = {"num_kv_heads": 1, "head_size": 1, "dtype": "float16", "use_mla": False}
FULL = FullAttentionSpec(PAGE_SIZE, **COMMON)
COARSE = FullAttentionSpec(2 * PAGE_SIZE, **(COMMON | {"dtype": "float8_e4m3fn"}))
WINDOW = SlidingWindowSpec(PAGE_SIZE, **COMMON, sliding_window=9)
MODELS = {"full": [FULL], "coarse": [FULL, COARSE], "window": [WINDOW, FULL]}
FIELDS = [
    "level_query_starts",
    "level_page_starts",
    "level_page_indices",
    "level_last_page_lens",
    "prefix_page_ids",
    "prefix_rows",
    "own_starts",
]
NUM_STEPS = int(os.environ.get("PAGEPOOL_TEST_OPERATIONS", "300")) // 2


def make_batch(specs: list[Any], num_rows: int = NUM_ROWS, **options: Any) -> RunningBatch:
    manager = CacheManager(600, [CacheGroupSpec(spec) for spec in specs], MAX_LEN, **options)
    return RunningBatch(manager, MultiGroupPageTable(num_rows, MAX_LEN, 256, [spec.page_size for spec in specs]))


def count_best(lines: list[tuple[Any, ...]], num_levels: int, least: int, unit: int) -> int:
    """Return the most pages that groups in so many levels save. `lines` are the pages of each row that can be shared, in groups
    that end at multiples of `unit` pages.
    """

    @cache
    def best(rows: tuple[int, ...], place: int, start: int, left: int) -> int:
        by_page: dict[Any, list[int]] = {}
        for row in rows:
            if place < len(lines[row]):
                by_page.setdefault(lines[row][place], []).append(row)
        total = 0
        for own in [tuple(own) for own in by_page.values() if len(own) > 1]:
            end = place + 1
            while all(end < len(lines[row]) for row in own) and len({lines[row][end] for row in own}) == 1:
                end += 1
            end -= end % unit
            if end <= place:
                continue
            num_saved, skipped = (len(own) - 1) * (end - start), best(own, end, start, left)
            may = left > 0 and num_saved >= max(1, least)
            total += max(skipped, num_saved + best(own, end, end, left - 1)) if may else skipped
        return total

    return best(tuple(range(len(lines))), 0, 0, num_levels)


class Groups:
    """Random steps of a batch; after each, the groups are compared with the rows' pages."""

    def __init__(self, model: str, seed: int) -> None:
        self.rng = rng = Random(seed)
        self.specs = MODELS[model]
        self.batch = make_batch(self.specs, caches=rng.choice(("scheduled", "computed")))
        self.sizes = SharedPrefixes(
            num_levels=rng.choice((1, 2, 3)), num_rows=rng.choice((None, 2, 3)), min_saved_pages=rng.choice((0, 2, 8))
        )
        self.inputs = StepInputs(
            self.batch,
            num_tokens=NUM_ROWS * 64,
            num_reqs=NUM_ROWS,
            fields=[*FIELDS, "rows", "starts", "seq_lens", "query_start_loc", "order"],
            depth=rng.choice((1, 2)),
            order="prefixes",
            prefixes=self.sizes,
        )
        self.prompts = [[rng.randrange(9) for _ in range(60)] for _ in range(3)]
        self.num_saved = self.num_kept = self.last_saved = 0

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.change()
            rows = [row for row in range(NUM_ROWS) if self.batch.is_admitted[row]]
            if self.rng.random() < 0.1:
                self.rng.shuffle(rows)
                rows = rows[: self.rng.randint(1, NUM_ROWS)]
            if rows:
                self.step(rows)

    def step(self, rows: list[int]) -> None:
        batch, rng = self.batch, self.rng
        done = [row for row in rows if batch.num_tokens[row] == batch.num_computed_tokens[row]]
        batch.append(done, [rng.randrange(4)] * len(done))
        left = (batch.num_tokens - batch.num_computed_tokens)[rows]
        step = batch.plan(rows, [rng.choice((1, int(num), int(num))) for num in left])
        batch.take_moves()
        if rng.random() < 0.4:  # other steps may replace pages between two fills
            return
        batch.inputs(step, out=self.inputs)
        self.compare(len(step))
        self.num_saved += self.inputs.num_saved_pages

    def content_of(self, group: int, row: int) -> dict[int, tuple[int, ...]]:
        """Return what each of a row's pages stands for: all tokens up to its end."""
        size, tokens = self.specs[group].page_size, self.batch.get_token_ids(row).tolist()
        pages = self.batch.get_page_ids(row)[group]
        return {
            page: (row, i) if (i + 1) * size > len(tokens) else tuple(tokens[: (i + 1) * size]) for i, page in enumerate(pages)
        }

    def compare(self, n: int) -> None:
        inputs, num_levels = self.inputs, self.sizes.num_levels
        rows = [int(inputs.rows[i]) for i in inputs.query_start_loc[:n]]
        starts, stops = inputs.starts[:n].tolist(), inputs.seq_lens[:n].tolist()
        own = inputs.own_starts[:n].tolist()
        searched = next(g for g, spec in enumerate(self.specs) if isinstance(spec, FullAttentionSpec))
        for g, spec in enumerate(self.specs):
            if isinstance(spec, FullAttentionSpec):
                self.compare_levels(g, rows, starts, stops, own)
            else:
                assert inputs.level_page_indices[g] is None
        contents: dict[int, Any] = {}
        for row in rows:
            contents |= self.content_of(searched, row)
        has_twins = len(contents) > len({*contents.values()})
        lines = [
            tuple(contents[page] for page in self.batch.get_page_ids(row)[searched][: start // PAGE_SIZE])
            for row, start in zip(rows, starts, strict=True)
        ]
        read = [int(values[-1]) for values in inputs.level_page_starts[searched]]
        assert sum(read) + inputs.num_saved_pages == sum((stop - 1) // PAGE_SIZE + 1 for stop in stops)
        best = count_best(lines, num_levels, self.sizes.min_saved_pages, 1 + (COARSE in self.specs))
        is_kept = inputs.num_saved_pages == self.last_saved  # the groups may have grown since
        assert inputs.num_saved_pages == best or has_twins or is_kept
        self.last_saved, self.num_kept = inputs.num_saved_pages, self.num_kept + is_kept
        assert sorted(inputs.order[:n].tolist()) == list(range(n))

    def compare_levels(self, g: int, rows: list[int], starts: list[int], stops: list[int], own: list[int]) -> None:
        inputs, size, n = self.inputs, self.specs[g].page_size, len(rows)
        read: list[list[int]] = [[] for _ in rows]
        contents: dict[int, Any] = {}
        for row in rows:
            contents |= self.content_of(g, row)
        groups = []
        for level in range(self.sizes.num_levels + 1):
            queries, begins = inputs.level_query_starts[level].tolist(), inputs.level_page_starts[g][level].tolist()
            lens, ids = inputs.level_last_page_lens[g][level].tolist(), inputs.level_page_indices[g][level].tolist()
            assert (queries[0], begins[0], queries[-1]) == (0, 0, int(inputs.query_start_loc[n]))
            for k in range(NUM_ROWS):
                pages = ids[begins[k] : begins[k + 1]]
                members = [i for i in range(n) if queries[k] <= inputs.query_start_loc[i] < queries[k + 1]]
                for i in members:
                    read[i] += pages
                if level < self.sizes.num_levels:
                    assert lens[k] == (size if pages or (members and any(own[i] for i in members) and lens[k]) else 0)
                    if len(members) > 1 and lens[k]:
                        groups.append((members, pages))
                elif k < n:
                    assert lens[k] == (stops[k] - 1) % size + 1
            assert not any(ids[begins[-1] :])
        for i, row in enumerate(rows):
            pages = self.batch.get_page_ids(row)[g][: (stops[i] - 1) // size + 1]
            assert [contents[page] for page in read[i]] == [contents[page] for page in pages]
            assert own[i] <= starts[i]
        listed = []
        for members, pages in groups:
            most = self.sizes.num_rows or NUM_ROWS
            listed += [(members[first : first + most], pages) for first in range(0, len(members), most)]
        for k, (ids, places) in enumerate(zip(inputs.prefix_page_ids[g].tolist(), inputs.prefix_rows.tolist(), strict=True)):
            members, pages = listed[k] if k < len(listed) else ([], [])
            assert [i for i in places if i >= 0] == members
            assert ids == pages + [0] * (len(ids) - len(pages))

    def change(self) -> None:
        batch, rng = self.batch, self.rng
        free = [row for row in range(NUM_ROWS) if not batch.is_admitted[row]]
        rows = [row for row in range(NUM_ROWS) if batch.is_admitted[row]]
        action = rng.random()
        if free and (not rows or action < 0.3):
            prompt = rng.choice(self.prompts)[: rng.randint(1, 60)] + [rng.randrange(3) for _ in range(rng.randint(0, 20))]
            batch.admit(free[0], prompt, num_tokens=rng.choice((None, 1)))
        elif rows and action < 0.36:
            batch.release([rng.choice(rows)])
        elif rows and action < 0.4:
            batch.swap_row(rng.choice(rows), rng.randrange(NUM_ROWS))
        elif rows and free and action < 0.5:
            batch.fork(rng.choice(rows), free[0:1])
            batch.take_moves()
        elif rows and action < 0.54:
            row = rng.choice(rows)
            try:
                batch.trim([row], [rng.randint(max(1, int(batch.num_tokens[row]) - 20), int(batch.num_tokens[row]))])
            except ArgumentError:  # a window needs pages again
                return
        for row in [row for row in rows if batch.is_admitted[row] and batch.num_tokens[row] > MAX_LEN - 70]:
            batch.release([row])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", range(6))
def test_groups_read_once_what_rows_read(model: str, seed: int) -> None:
    groups = Groups(model, seed)
    groups.run(NUM_STEPS)
    assert groups.num_saved
    groups.batch.check()


def make_inputs(batch: RunningBatch, fields: Any = FIELDS, **options: Any) -> StepInputs:
    sizes = {"num_tokens": 64, "num_reqs": 5, "fields": fields, "order": "prefixes"}
    return StepInputs(batch, **(sizes | options))


def test_samples_share_their_prompt() -> None:
    batch = make_batch([FULL], 5)
    batch.admit(3, range(22))
    batch.admit(1, range(100, 110))
    batch.fork(3, [0, 4])
    batch.take_moves()
    inputs = make_inputs(batch, [*FIELDS, "order", "token_ids"], prefixes=SharedPrefixes(num_groups=2, num_pages=8, num_rows=3))
    batch.inputs(batch.step([0, 1, 3, 4], [7, 8, 9, 10]), out=inputs)
    shared = batch.get_page_ids(3)[0][:5]
    assert (inputs.num_saved_pages, inputs.order[:4].tolist()) == (10, [0, 2, 3, 1])
    assert inputs.token_ids[:4].tolist() == [7, 9, 10, 8]
    assert inputs.prefix_page_ids[0].tolist() == [[*shared, 0, 0, 0], [0] * 8]
    assert inputs.prefix_rows.tolist() == [[0, 1, 2], [-1, -1, -1]]
    assert inputs.own_starts.tolist() == [20, 20, 20, 0, 0]
    assert inputs.level_query_starts.tolist() == [[0, 3, 4, 4, 4, 4], [0, 1, 2, 3, 4, 4]]
    assert inputs.level_page_starts[0].tolist() == [[0, 5, 5, 5, 5, 5], [0, 1, 2, 3, 6, 6]]
    assert inputs.level_last_page_lens[0].tolist() == [[4, 0, 0, 0, 0], [3, 3, 3, 3, 0]]


def test_groups_are_searched_again_behind_a_cut() -> None:
    """Steps whose inputs are not filled compute other tokens behind the cut, in other pages."""
    batch = make_batch([FULL], 5)
    batch.admit(0, range(22))
    batch.admit(1, range(22))
    inputs = make_inputs(batch, ["own_starts"], prefixes=SharedPrefixes(min_saved_pages=1))
    batch.inputs(batch.step([0, 1], [7, 8]), out=inputs)
    assert inputs.own_starts.tolist()[:2] == [20, 20]
    batch.trim([1], [9])
    batch.append([1] * 16, range(100, 116))
    batch.plan([1], int(batch.num_tokens[1] - batch.num_computed_tokens[1]))
    batch.inputs(batch.step([0, 1], [7, 8]), out=inputs)
    assert inputs.own_starts.tolist()[:2] == [8, 8]


def test_rows_of_two_shards_share_nothing() -> None:
    manager = CacheManager(40, [CacheGroupSpec(FULL)], MAX_LEN)
    batch = RunningBatch(manager, PageTable(4, 50, 64), data_parallel_size=2, local_ids=True)
    for row, shard in ((0, 0), (1, 1), (2, 1)):
        batch.admit(row, [*range(100 * shard, 100 * shard + 13), row], traits=RequestTraits(dp_shard=shard))
    inputs = make_inputs(batch, ["own_starts", "prefix_rows"], num_reqs=4, prefixes=SharedPrefixes(min_saved_pages=0))
    assert (inputs.prefix_rows == -1).all()
    batch.inputs(batch.step([0, 1, 2], [7, 8, 9]), out=inputs)
    assert (inputs.num_saved_pages, inputs.own_starts.tolist()) == (3, [0, 12, 12, 0])


def test_pages_of_all_groups_end_where_rows_part() -> None:
    batch = make_batch([FULL, COARSE], 5)
    batch.admit(0, range(22))
    batch.fork(0, [1])
    batch.take_moves()
    inputs = make_inputs(batch, ["own_starts", "prefix_page_ids"], prefixes=SharedPrefixes(min_saved_pages=0))
    batch.inputs(batch.step([0, 1], [7, 8]), out=inputs)
    assert inputs.own_starts.tolist()[:2] == [16, 16]
    assert [np.count_nonzero(ids[0]) for ids in inputs.prefix_page_ids] == [4, 2]


def test_a_line_has_room_for_the_pages_of_each_cache_group() -> None:
    """A prefix has most pages where they have the fewest tokens."""
    batch = make_batch([COARSE, FULL], 5)
    batch.admit(0, range(50))
    batch.fork(0, [1])
    batch.take_moves()
    step = batch.step([0, 1], [7, 8])
    for num_pages, num_shared, width in ((None, 48, MAX_LEN // PAGE_SIZE), (5, 16, 5), (1, 0, 1)):
        prefixes = SharedPrefixes(num_groups=1, num_pages=num_pages, min_saved_pages=0)
        inputs = make_inputs(batch, ["own_starts", "prefix_page_ids"], depth=1, prefixes=prefixes)
        batch.inputs(step, out=inputs)
        assert inputs.own_starts.tolist() == [num_shared, num_shared, 0, 0, 0]
        for ids, pages, spec in zip(inputs.prefix_page_ids, batch.get_page_ids(0), (COARSE, FULL), strict=True):
            shared = pages[: num_shared // spec.page_size]
            assert ids.tolist() == [shared + [0] * (width - len(shared))]


def test_tokens_without_a_page_are_refused() -> None:
    batch = make_batch([FULL], 5)
    batch.admit(0, range(22))
    batch.admit(1, range(22))
    inputs = make_inputs(batch, ["own_starts"], prefixes=SharedPrefixes(min_saved_pages=0))
    batch.inputs(rows=[0, 1], starts=[21, 21], stops=[22, 22], out=inputs)
    with pytest.raises(ArgumentError, match="token 60 in page 0 of group 0"):
        batch.inputs(rows=[0, 1], starts=[60, 60], stops=[61, 61], out=inputs)
    with pytest.raises(ArgumentError, match="tokens: got 22, allowed: 8"):
        batch.inputs(rows=[0], starts=[0], stops=[22], out=inputs, num_tokens=8)
    assert inputs.num_saved_pages == 5


def test_the_levels_are_those_that_save_most() -> None:
    """A page that all rows share takes no level from the longer prefixes of two groups."""
    batch = make_batch([FULL], 5)
    for row in range(4):
        batch.admit(row, [*range(4), *range(10 * (row // 2) + 50, 10 * (row // 2) + 70), row, row])
    rows = list(range(4))
    one = make_inputs(batch, prefixes=SharedPrefixes(min_saved_pages=2))
    two = make_inputs(batch, prefixes=SharedPrefixes(num_levels=2, min_saved_pages=2))
    few = make_inputs(batch, prefixes=SharedPrefixes(num_groups=1, min_saved_pages=2))
    step = batch.step(rows, rows)
    for inputs in (one, two, few):
        batch.inputs(step, out=inputs)
    assert [inputs.num_saved_pages for inputs in (one, two, few)] == [12, 13, 6]
    assert one.level_query_starts[0].tolist()[:3] == [0, 2, 4]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: make_inputs(make_batch([FULL]), ["prefix_rows"], order="given"), ArgumentError, "prefix_rows"),
        (lambda: make_inputs(make_batch([WINDOW]), ["starts"]), ArgumentError, "a model with full attention"),
        (lambda: make_inputs(make_batch([FULL]), ["starts"], order="levels"), ArgumentError, "order: got 'levels'"),
        (lambda: make_inputs(make_batch([FULL]), ["starts"], prefixes=3), ArgumentError, "prefixes: got 3"),
        (
            lambda: make_inputs(make_batch([FULL]), ["starts"], order="given", prefixes=SharedPrefixes()),
            ArgumentError,
            "prefixes: got",
        ),
        (lambda: SharedPrefixes(num_levels=5), ArgumentError, "num_levels: got 5, allowed: 1 to 4"),
        (lambda: SharedPrefixes(num_groups=0), ArgumentError, "num_groups: got 0"),
        (lambda: SharedPrefixes(num_rows=1.5), ArgumentTypeError, "num_rows: got 1.5"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_tables_of_an_engine_are_searched_each_time() -> None:
    tables = MultiGroupPageTable(3, 64, 64, [4])
    for row in range(3):
        tables.add_row([[1, 2, 3, 4, 10 + row]], row)
    inputs = StepInputs(
        tables, num_tokens=8, num_reqs=3, fields=["own_starts", "seq_lens"], order="prefixes",
        prefixes=SharedPrefixes(min_saved_pages=0),
    )  # fmt: skip
    inputs.fill(rows=[0, 1, 2], starts=[17, 18, 9], stops=[18, 19, 10])
    assert (inputs.num_saved_pages, inputs.own_starts.tolist()) == (4, [16, 16, 0])
    tables.add_row([[5, 6, 7, 8, 11]], 1)
    inputs.fill(rows=[0, 1, 2], starts=[17, 18, 9], stops=[18, 19, 10])
    assert (inputs.num_saved_pages, inputs.own_starts.tolist()) == (2, [8, 8, 0])
    assert inputs.seq_lens.tolist() == [18, 10, 19]
    assert PageTable(2, 2, 8).max_num_reqs == 2
