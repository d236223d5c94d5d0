"""The random work driven by hypothesis, which shrinks its findings: requests; rows with requests and direct calls beside
them, at once on one pool.

Whatever is done, the oracle does it too; mistakes are made on the package alone, which must refuse them and be as before.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import hypothesis.strategies as st
import pytest
from batch_model import BatchRows, OracleRows
from batch_workload import NUM_ROWS, BatchWorkload
from features import Features, Workload
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from oracle import NULL_PAGE
from pairs import make_requests, make_rows, with_room
from pool_workload import OracleCalls, PackageCalls
from settings import NUM_OPERATIONS, SETTINGS, STATE_SETTINGS, Setting
from twin_engine import Request
from workload import RandomWorkload

import pagepool
from pagepool.errors import PagePoolError

HAS_EVENTS = importlib.util.find_spec("msgspec") is not None

randoms = st.randoms(use_true_random=False)


# --- actions beside rows and requests ---------------------------------------------------------------------------


class Direct:
    """What both sides do beside their rows."""

    manager: Any
    neighbours: dict[str, Request]

    @property
    def pool(self) -> Any:
        return self.manager.page_pool

    def extend_neighbour(self, request_id: str, token_ids: list[int]) -> bool:
        """Append tokens to a request and compute them; False, and nothing changed, if they do not fit."""
        request = self.neighbours[request_id]
        request.num_computed_tokens = request.num_tokens
        request.all_token_ids.extend(token_ids)
        is_extended = False
        try:
            is_extended = self.manager.allocate_slots(request, len(token_ids)) is not None
        finally:
            if not is_extended:
                del request.all_token_ids[-len(token_ids) :]
        return is_extended


class OracleTogether(Direct, OracleCalls, OracleRows):
    """The oracle's rows, and its pool called directly."""

    def find_like(self, page_id: int) -> list[int] | None:
        """Return the page that a look-up of a cached page's content finds."""
        entry = self.pool.entry_of_page.get(page_id)
        return None if entry is None else self.pool.get_cached_page(entry[0], [entry[1]])

    def probe_request(self, token_ids: list[int]) -> int:
        """Make a look-up that is not counted."""
        counts, request = self.manager.page_pool.counts.copy(), Request("probe", token_ids)
        num_hit_tokens = self.manager.get_computed_pages(request)[1]
        self.manager.free_page_hashes(request)
        self.manager.page_pool.counts = counts
        return num_hit_tokens


class PackageTogether(Direct, PackageCalls, BatchRows):
    """The running batch, and its pool called directly."""

    def find_like(self, page_id: int) -> list[int] | None:
        page_hash = self.pool.pages[page_id].page_hash
        pages = page_hash and self.pool.get_cached_page(page_hash.page_hash, [page_hash.group_id])
        return pages and [page.page_id for page in pages]

    def probe_request(self, token_ids: list[int]) -> int:
        return self.manager.probe(Request("probe", token_ids)).num_hit_tokens


# --- wrong calls ------------------------------------------------------------------------------------------------


FOREIGN = pagepool.PagePool(4, enable_caching=True)
MISTAKES: dict[str, Callable[[PackageTogether], Any]] = {
    "free a page of another pool": lambda rows: rows.pool.free_pages([FOREIGN.pages[1]]),
    "touch a page of another pool": lambda rows: rows.pool.touch([[FOREIGN.pages[1]]]),
    "free a page outside": lambda rows: rows.pool.free_page_ids([rows.pool.num_pages]),
    "touch a page outside": lambda rows: rows.pool.touch_page_ids([-1]),
    "take all pages and one": lambda rows: rows.pool.get_new_pages(rows.pool.get_num_free_pages() + 1),
    "take less than none": lambda rows: rows.pool.get_new_page_ids(-1),
    "evict a page outside": lambda rows: rows.pool.evict_pages([rows.pool.num_pages]),
    "step a row outside": lambda rows: rows.batch.step([NUM_ROWS], [1]),
    "step a row without a token": lambda rows: rows.batch.step([0], []),
    "plan less than nothing": lambda rows: rows.batch.plan([0], -1),
    "release a row twice": lambda rows: rows.batch.release([0, 0]),
    "append to a row outside": lambda rows: rows.batch.append([-1], [1]),
    "trim to less than nothing": lambda rows: rows.batch.trim([0], -1),
    "admit without tokens": lambda rows: rows.batch.admit(0, []),
    "admit too many tokens": lambda rows: rows.batch.admit(0, [1] * (rows.batch.max_num_tokens + 1)),
    "admit a row outside": lambda rows: rows.batch.admit(NUM_ROWS, [1]),
    "move a row to itself": lambda rows: rows.batch.move_row(0, 0),
    "swap with a row outside": lambda rows: rows.batch.swap_row(0, -1),
    "overflow a row": lambda rows: rows.tables[0].append_row([1] * (rows.tables[0].max_num_pages_per_req + 1), 0),
    "give a row a negative page": lambda rows: rows.tables[0].add_row([-1], 0),
    "clear a row outside": lambda rows: rows.tables[0].clear_row(NUM_ROWS),
    "commit too many rows": lambda rows: rows.tables[0].count_dirty_segments(0, NUM_ROWS + 1),
}


# --- the machine ------------------------------------------------------------------------------------------------


ALL = [*SETTINGS, *STATE_SETTINGS]


def features_with(names: str) -> Any:
    """Draw some of these features, beside states and forks; the simplest draw is none of them."""
    drawn = {name: st.booleans() for name in names.split() if name != "events" or HAS_EVENTS}
    return st.builds(Features, states=st.just(True), forks=st.just(True), **drawn)


def fit(features: Features, setting: Setting) -> Features:
    """Leave out what needs caching where there is none."""
    return features if setting.enable_caching else replace(features, tier=False, events=False)


class Acting(RuleBasedStateMachine):
    """Any action of a random workload, in any order, with decisions that hypothesis takes."""

    workload: Workload

    @rule(data=st.data(), rng=randoms)
    def act(self, data: st.DataObject, rng: Random) -> None:
        actions = {action.__name__: action for action in self.workload.actions}
        self.workload.rng = rng
        actions[data.draw(st.sampled_from(sorted(actions)))]()


class Requests(Acting):
    """Requests that arrive, grow, are preempted and end."""

    @initialize(setting=st.sampled_from(ALL), features=features_with("expectations external tier policies events"), rng=randoms)
    def start(self, setting: Setting, features: Features, rng: Random) -> None:
        features = fit(features, setting)
        setting = with_room(setting) if features.tier else setting
        num_pages, seed = rng.choice(setting.num_pages), rng.randint(0, 2**16)
        self.workload = RandomWorkload(setting, make_requests(setting, num_pages, features, seed), num_pages, rng, features)


class Together(Acting):
    """Rows, requests and direct holders on one pool, in any order, with wrong calls in between."""

    @initialize(setting=st.sampled_from(ALL), features=features_with("expectations external policies events"), rng=randoms)
    def start(self, setting: Setting, features: Features, rng: Random) -> None:
        features = fit(features, setting)
        num_pages, seed = rng.choice(setting.num_pages), rng.randint(0, 2**16)
        self.twins = make_rows(setting, num_pages, features, seed, kinds=(OracleTogether, PackageTogether))
        self.package: PackageTogether = self.twins.system
        self.workload = BatchWorkload(setting, self.twins, num_pages, rng, features)
        self.mine: list[int] = []  # pages taken or touched directly, one entry for each reference

    @invariant()
    def is_as_the_oracle(self) -> None:
        """Compare the observable state; this calls `batch.check()`, and with it the pool's."""
        if hasattr(self, "twins"):
            self.twins.compare_states()

    @precondition(lambda self: self.twins.live_request_ids)
    @rule(data=st.data(), token_ids=st.lists(st.integers(0, 2), min_size=1, max_size=6))
    def extend_neighbour(self, data: st.DataObject, token_ids: list[int]) -> None:
        request_id = data.draw(st.sampled_from(list(self.twins.live_request_ids)))
        room = self.workload.max_tokens - self.package.neighbours[request_id].num_tokens
        if room > len(token_ids):
            self.twins.call("extend_neighbour", request_id, token_ids)

    # direct calls

    @rule(num_pages=st.integers(0, 4))
    def take(self, num_pages: int) -> None:
        self.mine += self.twins.call("take", num_pages) or []

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        page_ids = data.draw(st.lists(st.integers(0, self.workload.num_pages - 1), max_size=3))
        self.twins.call("touch", page_ids)
        self.mine += [page_id for page_id in page_ids if page_id != NULL_PAGE]

    @precondition(lambda self: self.mine)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        places = data.draw(st.lists(st.integers(0, len(self.mine) - 1), unique=True, max_size=4))
        self.twins.call("free", [self.mine[place] for place in places])
        self.mine = [page_id for place, page_id in enumerate(self.mine) if place not in places]

    @precondition(lambda self: self.mine)
    @rule(data=st.data(), more=st.integers(1, 3))
    def free_too_often(self, data: st.DataObject, more: int) -> None:
        """Free a page once more than all holders together could: the call is refused as a whole."""
        page_id = data.draw(st.sampled_from(self.mine))
        num_references = int(self.package.pool.ref_counts()[page_id])
        assert self.twins.call("free", [*self.mine, *[page_id] * (num_references + more)]) is None

    @rule(data=st.data())
    def find_like(self, data: st.DataObject) -> None:
        self.twins.call("find_like", data.draw(st.integers(1, self.workload.num_pages - 1)))

    @rule(rng=randoms)
    def probe(self, rng: Random) -> None:
        self.twins.call("probe_request", rng.choice(self.workload.families)[: rng.randint(1, self.workload.max_tokens - 1)])

    @rule(name=st.sampled_from(sorted(MISTAKES)))
    def make_mistake(self, name: str) -> None:
        with pytest.raises(PagePoolError):
            MISTAKES[name](self.package)
        if name.startswith("admit"):  # an error is no refusal
            self.twins.oracle.refusal = None


def settings_of(num_examples: int) -> Any:
    """Return settings for so many examples where PAGEPOOL_TEST_OPERATIONS is 200,000; at least a quarter of these."""
    num_examples = max(num_examples // 4, num_examples * NUM_OPERATIONS // 200_000)
    return settings(
        max_examples=num_examples,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )


TestRequests = Requests.TestCase
TestRequests.settings = settings_of(60)
TestTogether = Together.TestCase
TestTogether.settings = settings_of(30)
