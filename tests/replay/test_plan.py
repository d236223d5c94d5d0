"""Figures of a plan: against the real manager, against brute force, and by hand."""

import itertools
from collections import Counter

import pytest
from replays import generators, make_manager, make_random_records, record_of, run_alone
from settings import scale

from pagepool.errors import ArgumentError, ArgumentTypeError
from pagepool.replay import Planner, TraceRecord, make_requests
from pagepool.replay.models.pages import ModelPages
from pagepool.replay.plans.lru import LruCurve
from pagepool.replay.plans.optimum import BestCurve
from pagepool.replay.plans.reuse import find_reuse
from pagepool.specs import cdiv

NUM_SEEDS = scale(30)


def count_hits(records: list[TraceRecord], num_pages: int, page_size: int) -> int:
    """Return the tokens that the real manager hits for the requests that fit, one after another."""
    manager = make_manager(num_pages, page_size)
    requests = [request for request in make_requests(records) if cdiv(request.num_slots, page_size) < num_pages]
    return page_size * sum(len(run_alone(manager, request)) for request in requests)


def without_hits_on_twins(records: list[TraceRecord], page_size: int) -> list[TraceRecord]:
    """Return the records without those that would hit a page that is in the pool twice."""
    manager = make_manager(20_000, page_size)
    others = []
    for record, request in zip(records, make_requests(records), strict=True):
        hits, _ = manager.get_computed_pages(request)
        if all(len(manager.page_pool.store.twins(page_id)) == 1 for page_id in hits.get_page_ids()[0]):
            run_alone(manager, request)
            others.append(record)
    return others


def count_twins(records: list[TraceRecord], page_size: int) -> int:
    """Count the pages that are computed although they are cached, in a pool that never evicts."""
    manager = make_manager(20_000, page_size)
    for request in make_requests(records):
        run_alone(manager, request)
    pool = manager.page_pool
    return pool.store.num_cached_pages - len(pool.cached_page_hash_to_page)


def count_best_hits(records: list[TraceRecord], num_usable_pages: int, page_size: int) -> int:
    """Count the pages that hit at best, over all choices of pages to keep."""
    best_of: dict[frozenset[bytes], int] = {frozenset(): 0}
    for request in make_requests(records):
        tokens = request.load_token_ids()
        keys = [tokens[:end].tobytes() for end in range(page_size, request.num_slots + 1, page_size)]
        max_hits = (request.num_prompt_tokens - 1) // page_size
        num_kept = num_usable_pages - cdiv(request.num_slots, page_size)
        after: dict[frozenset[bytes], int] = {}
        for cached, num_hits in best_of.items():
            num_hits += len(list(itertools.takewhile(cached.__contains__, keys[:max_hits])))
            others = cached.difference(keys)
            for kept in itertools.combinations(others, min(num_kept, len(others))):
                state = frozenset((*kept, *keys))
                after[state] = max(after.get(state, 0), num_hits)
        best_of = after
    return max(best_of.values())


class TestLru:
    def test_equal_to_the_manager(self) -> None:
        """For all sizes, pages of other sizes than blocks, and skipped requests."""
        seen: Counter[str] = Counter()
        for rng in generators(NUM_SEEDS):
            page_size = int(rng.integers(1, 9))
            records = without_hits_on_twins(make_random_records(rng), page_size)
            planner = Planner(records, page_size)
            for pool in planner.make_plan(rng.integers(2, planner.max_num_pages + 3, size=8).tolist()).pools:
                assert pool.lru_hit_tokens == count_hits(records, pool.num_pages, page_size)
                seen.update(twins=count_twins(records, page_size), skipped=pool.skipped, hits=pool.lru_hit_tokens)
        assert min(seen.values()) > 0

    def test_hits_on_pages_that_are_there_twice_differ_by_so_many_pages(self) -> None:
        num_differences = 0
        for rng in generators(NUM_SEEDS):
            records, page_size = make_random_records(rng), int(rng.integers(1, 9))
            num_twins = count_twins(records, page_size)
            curve = LruCurve(find_reuse(records, page_size))
            for num_pages in rng.integers(60, 300, size=4).tolist():
                hits = count_hits(records, num_pages, page_size) // page_size
                assert curve.count_hits(num_pages - 1 - num_twins) <= hits <= curve.count_hits(num_pages - 1 + num_twins)
                num_differences += hits != curve.count_hits(num_pages - 1)
        assert num_differences > 0


class TestBest:
    def test_equal_to_brute_force(self) -> None:
        num_better = 0
        for rng in generators(5 * NUM_SEEDS):
            ids = [rng.integers(2, size=rng.integers(1, 5)).tolist() for _ in range(10)]
            records = [record_of(*path, output_length=int(rng.integers(3)), block_size=2) for path in ids]
            page_size = int(rng.integers(2, 4))
            reuse = find_reuse(records, page_size)
            num_usable_pages = int(reuse.request_pages.max() + rng.integers(3))
            best = BestCurve(reuse).count_hits(num_usable_pages)
            assert best == count_best_hits(records, num_usable_pages, page_size)
            num_better += best > LruCurve(reuse).count_hits(num_usable_pages)
        assert num_better > 0


class TestPlan:
    def test_the_knee_is_the_smallest_pool_with_that_share(self) -> None:
        for rng in generators(NUM_SEEDS):
            planner = Planner(make_random_records(rng), page_size=int(rng.integers(1, 5)))
            plan = planner.make_plan([planner.max_num_pages])
            assert [knee.share for knee in plan.knees] == [0.5, 0.8, 0.95, 0.99]
            assert plan.knee == plan.knees[2]
            assert plan.pools[0].lru_hit_tokens == plan.most_hit_tokens
            for knee in plan.knees:
                for name in ("lru", "best"):
                    num_pages = getattr(knee, f"{name}_num_pages")
                    before, after = planner.make_plan([num_pages - 1, num_pages]).pools
                    assert getattr(after, f"{name}_hit_tokens") >= knee.share * plan.most_hit_tokens
                    if num_pages > plan.min_num_pages:
                        assert getattr(before, f"{name}_hit_tokens") < knee.share * plan.most_hit_tokens

    def test_no_hits_no_knee(self) -> None:
        plan = Planner([record_of(1), record_of(2)], page_size=4).make_plan([3])
        assert (plan.knee, plan.knees, plan.most_hit_tokens, plan.min_num_pages) == (None, (), 0, 2)
        assert plan.pools[0].lru_hit_rate == plan.pools[0].best_hit_rate == 0

    def test_smaller_pools_skip_requests(self) -> None:
        planner = Planner([record_of(1, 2, 3), record_of(1, 2), record_of(1, 4)], page_size=4)
        nothing, pool = planner.make_plan([1, 3]).pools
        assert (nothing.requests, nothing.skipped, nothing.lru_hit_rate) == (0, 3, 0)
        assert (pool.requests, pool.skipped, pool.prompt_tokens, pool.skipped_prompt_tokens) == (2, 1, 16, 12)
        assert pool.lru_hit_tokens == 4
        assert pool.lru_hit_rate == pool.best_hit_rate == 4 / 28

    def test_groups_of_a_model_share_the_pages(self) -> None:
        """The hits are those of as much memory for attention alone."""
        records, model = [record_of(1, 2, 3), record_of(1, 2), record_of(1, 2, 3)], ModelPages(4, 100, 3, 2)
        planner = Planner(records, page_size=4)
        plan, alone = planner.make_plan([1, 9, 12, 99], model=model), planner.make_plan([3, 4, 33])
        assert (plan.min_num_pages, plan.page_bytes, plan.model) == (1 + 3 * 3 + 2, 100, model)
        assert [pool.skipped for pool in plan.pools] == [3, 2, 0, 0]
        assert [pool.lru_hit_tokens for pool in plan.pools[1:]] == [pool.lru_hit_tokens for pool in alone.pools]
        assert [pool.best_hit_tokens for pool in plan.pools[1:]] == [pool.best_hit_tokens for pool in alone.pools]
        assert [knee.lru_num_pages for knee in plan.knees] == [1 + 3 * (knee.lru_num_pages - 1) for knee in alone.knees]

    def test_without_attention_nothing_is_known_of_it(self) -> None:
        plan = Planner([record_of(1, 2)] * 2, page_size=1).make_plan([2, 9], model=ModelPages(1, 100, 0, 1))
        assert (plan.most_hit_tokens, plan.min_num_pages, plan.knees, plan.pools_with_hits) == (7, 2, (), ())
        names = ("lru_hit_tokens", "lru_hit_rate", "best_hit_tokens", "best_hit_rate")
        assert {pool[name] for pool in plan.as_dict()["pools"] for name in names} == {None}

    @pytest.mark.parametrize(("page_size", "error"), [(0, ArgumentError), ("16", ArgumentTypeError)])
    def test_page_sizes_are_positive_integers(self, page_size: object, error: type[Exception]) -> None:
        with pytest.raises(error, match="page_size"):
            Planner([record_of(1)], page_size)  # type: ignore[arg-type]
