"""Where nothing is evicted, the next turn hits with `windows="ends"` what it hits where all pages stay."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from random import Random
from typing import Any, Literal, Protocol

import pytest
from settings import Group, scale

import pagepool
from pagepool import CacheManager, EngineRequest, HostTier, MultiGroupPageTable, Retention, RunningBatch
from pagepool.errors import RequestTooLargeError

MAX_LEN, NUM_PAGES = 400, 6000
SIZES = 1, 2, 3, 4, 6, 8, 16
WINDOWS = 1, 2, 3, 5, 7, 9, 16, 17, 24, 33, 50
NUM_ROWS = 2
NEW = 1 << 20  # a token that no prompt has


@dataclass
class Layout:
    """Groups of a model, and how its manager is made."""

    groups: list[Group]
    use_eagle: bool = False
    slack: int = 0
    interval: int = 0
    has_tier: bool = False

    @property
    def attention(self) -> list[Group]:
        return [group for group in self.groups if group.kind != "mamba"]

    @property
    def has_states(self) -> bool:
        return len(self.attention) < len(self.groups)

    @property
    def step(self) -> int:
        """Tokens of which each hit has a multiple."""
        return lcm(*(group.page_size for group in self.attention), *(group.interval or 1 for group in self.groups))

    def make_manager(self, windows: Literal["all", "ends"]) -> CacheManager:
        specs = [pagepool.CacheGroupSpec(group.spec(pagepool, "float16")) for group in self.groups]
        options: dict[str, Any] = {"host_tier": HostTier(NUM_PAGES)} if self.has_tier else {}
        if windows == "ends":
            options["retention"] = Retention(window_slack=self.slack, window_interval=self.interval)
        return CacheManager(NUM_PAGES, specs, MAX_LEN, use_eagle=self.use_eagle, windows=windows, **options)


def draw_layout(rng: Random, *, has_states: bool) -> Layout:
    """Draw page sizes by group, windows that are no multiple of a page or smaller than one, and chunks beside them."""
    sizes = rng.choice(([4], [4], [2, 4], [4, 16], [3, 6], [3, 6] if has_states else SIZES))
    use_eagle = rng.random() < 0.4 and not has_states
    groups = [Group("full", rng.choice(sizes)) for _ in range(rng.choice((0, 1, 1, 1, 2)))]
    groups += [Group("sliding", rng.choice(sizes), rng.choice(WINDOWS)) for _ in range(rng.randint(1, 3))]
    if not use_eagle and rng.random() < 0.3:
        groups.append(Group("chunked", rng.choice(sizes), rng.choice((4, 10, 16, 30))))
    rng.shuffle(groups)
    if has_states:
        groups.insert(rng.randint(0, len(groups)), Group("mamba", 64, interval=rng.choice((1, 2, 3)) * lcm(*sizes)))
    return Layout(groups, use_eagle, rng.choice((0, 0, 5, 20)), rng.choice((0, 0, 30, 50)), rng.random() < 0.3)


class Runner(Protocol):
    """Runs up to two sequences of tokens on a manager."""

    manager: CacheManager
    num_hits: int  # of the last that was admitted

    def admit(self, place: int, token_ids: list[int], num_new: int, resume_at: list[int]) -> int: ...
    def grow(self, place: int, num_new: int) -> None: ...
    def append(self, place: int, token_id: int) -> None: ...
    def fork(self, source: int, target: int) -> None: ...
    def end(self, place: int, *, says_computed: bool) -> None: ...
    def take(self) -> None: ...


class Rows:
    """Rows of a batch."""

    def __init__(self, manager: CacheManager, layout: Layout) -> None:
        self.manager = manager
        sizes = [group.page_size for group in layout.groups]
        self.batch = RunningBatch(manager, MultiGroupPageTable(NUM_ROWS, MAX_LEN, MAX_LEN, sizes))
        self.can_swap = layout.has_tier

    def admit(self, place: int, token_ids: list[int], num_new: int, resume_at: list[int]) -> int:
        num_hits = self.batch.admit(place, token_ids, max_num_new_tokens=num_new, resume_at=resume_at)
        assert num_hits is not None
        self.num_hits = num_hits
        return int(self.batch.num_computed_tokens[place])

    def grow(self, place: int, num_new: int) -> None:
        assert self.batch.grow([place], num_new).num_grown == 1

    def append(self, place: int, token_id: int) -> None:
        self.batch.append([place], [token_id])

    def fork(self, source: int, target: int) -> None:
        self.batch.fork(source, [target])

    def end(self, place: int, *, says_computed: bool) -> None:
        """Release the row, perhaps after it was swapped out."""
        if self.can_swap and says_computed:
            assert self.batch.swap_out(place)
            self.take()
            self.batch.release([place])
        elif says_computed:
            self.batch.release([place], num_computed_tokens=int(self.batch.num_computed_tokens[place]))
        else:
            self.batch.release([place])

    def take(self) -> None:
        transfers = self.batch.take_transfers()
        self.batch.take_copies()
        if transfers.number:
            self.manager.complete_transfers(transfers.number)


class Requests:
    """Requests of an engine."""

    def __init__(self, manager: CacheManager, _: Layout) -> None:
        self.manager, self.num_requests = manager, 0
        self.requests: dict[int, EngineRequest] = {}

    def _make(self, place: int, token_ids: list[int], resume_at: list[int]) -> EngineRequest:
        self.num_requests += 1
        self.requests[place] = EngineRequest(f"request {self.num_requests}", token_ids, resume_at=resume_at)
        return self.requests[place]

    def admit(self, place: int, token_ids: list[int], num_new: int, resume_at: list[int]) -> int:
        request = self._make(place, token_ids, resume_at)
        hits, self.num_hits = self.manager.get_computed_pages(request)
        num_hits = self.num_hits
        num_new = min(num_new, len(token_ids) - num_hits)
        assert self.manager.allocate_slots(request, num_new, num_hits, hits) is not None
        request.num_computed_tokens = num_hits + num_new
        return request.num_computed_tokens

    def grow(self, place: int, num_new: int) -> None:
        request = self.requests[place]
        assert self.manager.allocate_slots(request, num_new) is not None
        request.num_computed_tokens += num_new

    def append(self, place: int, token_id: int) -> None:
        self.requests[place].append_output_token_ids(token_id)

    def fork(self, source: int, target: int) -> None:
        request = self.requests[source]
        forked = self._make(target, list(request.all_token_ids), [])
        forked.num_computed_tokens = request.num_computed_tokens
        assert self.manager.fork(request, forked) is not None

    def end(self, place: int, *, says_computed: bool) -> None:
        request = self.requests.pop(place)
        self.manager.free(request, num_computed_tokens=request.num_computed_tokens if says_computed else None)

    def take(self) -> None:
        self.manager.take_transfers()
        self.manager.take_copies()


@dataclass
class Sequence:
    """What is known of one of the sequences that run."""

    token_ids: list[int]
    num_prompt: int
    num_computed: int
    num_hits: int  # with pages at ends
    shared: list[int]  # numbers of tokens that others are to share


class Pair:
    """The same sequences on two managers: one keeps all pages of windows, the other those at ends."""

    def __init__(self, layout: Layout, work: type[Any]) -> None:
        self.layout = layout
        self.runners: list[Runner] = [work(layout.make_manager(windows), layout) for windows in ("all", "ends")]
        self.running: dict[int, Sequence] = {}

    def admit(self, place: int, token_ids: list[int], num_new: int, resume_at: list[int]) -> None:
        found = [runner.admit(place, list(token_ids), num_new, list(resume_at)) for runner in self.runners]
        num_hits = self.runners[1].num_hits
        self.running[place] = Sequence(token_ids, len(token_ids), max(found), num_hits, resume_at)
        for runner, num_computed in zip(self.runners, found, strict=True):
            runner.take()
            if num_computed < max(found):  # it hit less
                runner.grow(place, max(found) - num_computed)
                runner.take()

    def grow(self, place: int, num_new: int) -> None:
        self.running[place].num_computed += num_new
        for runner in self.runners:
            runner.grow(place, num_new)
            runner.take()

    def append(self, place: int, token_id: int) -> None:
        self.running[place].token_ids.append(token_id)
        for runner in self.runners:
            runner.append(place, token_id)

    def fork(self) -> None:
        source = self.running[0]
        self.running[1] = Sequence(
            list(source.token_ids), source.num_prompt, source.num_computed, source.num_hits, source.shared
        )
        for runner in self.runners:
            runner.fork(0, 1)
            runner.take()

    def end(self, place: int, *, says_computed: bool) -> Sequence:
        for runner in self.runners:
            runner.end(place, says_computed=says_computed)
            runner.take()
            runner.manager.check()
        return self.running.pop(place)

    def probe(self, token_ids: list[int], num_new: int) -> tuple[int, int]:
        """Return what a request hits that has these tokens and new ones behind them."""
        request = EngineRequest("probe", [*token_ids, *[NEW] * num_new])
        first, second = (runner.manager.probe(request).num_hit_tokens for runner in self.runners)
        return first, second

    def is_worth(self, num_prompt: int, end: int) -> bool:
        """Whether the windows at the end of an answer stay, as docs/hybrids.md says."""
        attention = self.layout.attention
        first = next((group for group in attention if group.kind == "full"), attention[0])
        num_later = len({(group.kind, group.page_size, group.span) for group in attention}) - 1
        num_dropped = self.layout.use_eagle * (first.page_size + num_later * self.layout.step)  # so much earlier all resume
        num_prompt = max(0, num_prompt - num_dropped)
        full = ([group.page_size for group in attention if group.kind == "full"] or [attention[0].page_size])[-1]
        num_windows = num_new = 0
        for group in attention:
            if group.span:
                size, stop = group.page_size, end // group.page_size
                first = max(0, stop - max(1 - self.layout.use_eagle, -(-(group.span - 1) // size)))
                first = end // group.span * group.span // size if group.kind == "chunked" else first
                num_windows += stop - first
                num_new += max(0, stop - max(first, num_prompt // size))
        num_saved = end // full - num_prompt // full
        return num_saved > 0 and (num_new <= num_saved or num_prompt // full <= num_windows)

    def check(self, sequence: Sequence, num_new: int, info: Any) -> bool:
        """Probe what a turn with new tokens hits behind a sequence that ended, and what others share with it. Returns whether
        that is as if all pages had stayed. Behind a short answer it may be less.
        """
        is_in_prompt = sequence.num_computed < sequence.num_prompt
        expected, found = self.probe(sequence.token_ids, num_new)
        if is_in_prompt or self.layout.has_states or self.is_worth(sequence.num_prompt, expected):
            assert found == expected, info
        most, end = self.probe(sequence.token_ids[: sequence.num_prompt], num_new)
        assert end == most <= found <= expected, info
        interval = self.layout.interval
        slack = range(max(0, sequence.num_prompt - self.layout.slack), sequence.num_prompt)
        parts = range(interval, sequence.num_prompt, interval) if interval else ()
        for num_shared in {*slack, *parts, *sequence.shared} if not self.layout.has_states and not is_in_prompt else ():
            most, end = self.probe(sequence.token_ids[:num_shared], num_new)
            assert end == most or most <= sequence.num_hits, (info, num_shared)
        return found == expected


def run_turns(rng: Random, pair: Pair, info: Any) -> None:
    """Run some turns of a chat, each in steps of any size, ended anywhere, some forked."""
    token_ids: list[int] = []
    for _ in range(rng.randint(1, 3)):
        prompt = token_ids + [rng.randrange(NEW) for _ in range(rng.randint(1, 60))]
        if len(prompt) > MAX_LEN - 120:
            return
        chunk = rng.choice((1, 5, 16, 23, 400))
        resume_at = [] if pair.layout.has_states else rng.choices(range(len(prompt)), k=rng.choice((0, 0, 2)))
        pair.admit(0, prompt, chunk, resume_at)
        stop = rng.choice((len(prompt), len(prompt), rng.randint(1, len(prompt))))
        fork_at = rng.choice((None, rng.randint(1, len(prompt) + 20)))
        num_answer = 0 if stop < len(prompt) else rng.choice((0, rng.randint(0, 20), rng.randint(20, 80)))
        for place in (0, 1):
            while place in pair.running:
                sequence = pair.running[place]
                if place == 0 and 1 not in pair.running and fork_at is not None and sequence.num_computed >= fork_at:
                    pair.fork()
                    fork_at = None
                if sequence.num_computed >= stop + num_answer * (place == 0 or rng.random() < 0.99):
                    break
                if sequence.num_computed == len(sequence.token_ids):
                    pair.append(place, rng.randrange(NEW))
                num_left = len(sequence.token_ids) - sequence.num_computed
                pair.grow(place, min(chunk, num_left))
        are_same = True
        for place in rng.sample(list(pair.running), k=len(pair.running)):
            says_computed = rng.random() < 0.5
            ended = pair.end(place, says_computed=says_computed)
            if not pair.running:
                token_ids = ended.token_ids[: rng.choice((ended.num_computed, len(ended.token_ids)))]
            are_same &= all(pair.check(ended, num_new, info) for num_new in (2, 70))
            are_same &= not (pair.layout.has_tier and says_computed)  # what the tier has is loaded, and hits a step later
        if not are_same:
            return


@pytest.mark.parametrize("has_states", [False, True], ids=["attention", "states"])
@pytest.mark.parametrize("work", [Rows, Requests])
@pytest.mark.parametrize("part", range(4))
def test_the_next_turn_hits_as_if_all_stayed(part: int, work: type[Any], has_states: bool) -> None:
    for seed in range(scale(24)):
        rng = Random(f"{part} {work.__name__} {has_states} {seed}")
        layout = draw_layout(rng, has_states=has_states)
        run_turns(rng, Pair(layout, work), (part, seed, layout))


# --- exact values ---------------------------------------------------------------------------------------------------


def list_hits(layout: Layout, num_prompt: int, num_answer: int = 0) -> list[int]:
    """Run one prompt and its answer; return where requests hit that share any number of tokens with it."""
    pair, hits = Pair(layout, Rows), set()
    pair.admit(0, list(range(num_prompt)), num_prompt, [])
    for token_id in range(num_prompt, num_prompt + num_answer):
        pair.append(0, token_id)
        pair.grow(0, 1)
    token_ids = pair.end(0, says_computed=False).token_ids
    for num_shared in range(0, len(token_ids) + 1, 4):
        most, end = pair.probe(token_ids[:num_shared], 70)
        assert end <= most
        hits.add(end)
    return sorted(hits - {0})


FULL, WINDOW = Group("full", 4), Group("sliding", 4, 5)


@pytest.mark.parametrize(
    ("interval", "hits"),
    [
        (48, [48, 96, 144, 192, 200]),
        (50, [48, 100, 148, 200]),
        (51, [48, 100, 152, 200]),
        (6, [num // 4 * 4 for num in range(6, 202, 6)] + [200]),
        (1, list(range(4, 201, 4))),
        (202, [200]),
        (0, [200]),
    ],
)
def test_an_interval_is_one_of_the_prompt(interval: int, hits: list[int]) -> None:
    """Each multiple is rounded down to whole pages; behind the prompt there is none, but the end of the answer."""
    layout = Layout([FULL, WINDOW], interval=interval)
    assert list_hits(layout, 201) == sorted(set(hits))
    assert list_hits(layout, 201, 122) == sorted({*hits, 320})


@pytest.mark.parametrize(
    ("groups", "slack", "hits"),
    [
        ([FULL, Group("sliding", 4, 17)], 0, [192]),
        ([FULL, WINDOW, Group("sliding", 4, 17)], 0, [188]),
        ([WINDOW, Group("sliding", 4, 17)], 0, [192]),
        ([FULL, WINDOW, Group("sliding", 4, 17), Group("sliding", 4, 33)], 0, [184]),
        ([Group("full", 64), Group("sliding", 64, 65)], 0, [64]),
        ([Group("full", 32), Group("sliding", 32, 33), Group("sliding", 32, 65)], 64, [32, 64, 96]),
        ([Group("full", 16), Group("sliding", 32, 33)], 0, [96, 128]),  # the shorter one with hardly more tokens than 200
    ],
)
def test_with_eagle_the_end_of_a_prompt_hits(groups: list[Group], slack: int, hits: list[int]) -> None:
    """Each kind of group drops a page in its turn, and what is left of a multiple."""
    layout = Layout(groups, use_eagle=True, slack=slack)
    assert list_hits(layout, 200) == hits


@pytest.mark.parametrize("use_eagle", [False, True])
def test_pages_that_stay_are_few(use_eagle: bool) -> None:
    """Those of the windows at the two ends, with the slack, and what eagle reads; whatever the steps were."""
    rng = Random(f"few {use_eagle}")
    for _ in range(12):
        layout = draw_layout(rng, has_states=False)
        layout.use_eagle, layout.interval, layout.has_tier = use_eagle, 0, False
        layout.groups = [group for group in layout.groups if group.kind != "chunked"]
        pair, num_prompt, num_all = Pair(layout, Rows), 150, 300
        pair.admit(0, list(range(num_prompt)), rng.choice((1, 17, 400)), [])
        while pair.running[0].num_computed < num_all:
            num_known = len(pair.running[0].token_ids)
            if pair.running[0].num_computed == num_known:
                pair.append(0, num_known)
            num_left = len(pair.running[0].token_ids) - pair.running[0].num_computed
            pair.grow(0, min(num_left, rng.choice((1, 30))))
        pair.end(0, says_computed=True)
        most, num_kinds = 0, len(set(layout.attention))
        for group in layout.groups:
            if group.kind == "full":
                most += num_all // group.page_size
                continue
            reach = group.span + layout.slack + layout.step + use_eagle * (num_kinds + 1) * layout.step
            most += 2 * (-(-reach // group.page_size) + 1)
        assert pair.runners[1].manager.stats().num_cached_pages <= most, layout


def test_a_checkpoint_is_a_boundary() -> None:
    """Where states are kept a request resumes at checkpoints, so windows stay there, and nowhere else."""
    layout = Layout([Group("full", 4), Group("sliding", 4, 9), Group("mamba", 64, interval=16)], slack=64, interval=20)
    pair = Pair(layout, Rows)
    pair.admit(0, list(range(150)), 32, [])
    for num_new in (32, 16, 20, 50):
        pair.grow(0, num_new)
    pair.end(0, says_computed=False)
    hits = [pair.probe(list(range(num_shared)), 2) for num_shared in range(1, 151)]
    assert all(most == end for most, end in hits)
    assert {end for _, end in hits} == {0, 32, 64, 80}
    assert pair.runners[1].manager.stats().num_cached_pages == 37 + 3 + 2 * 3


@pytest.mark.parametrize("use_eagle", [False, True])
def test_what_has_room_runs_alone(use_eagle: bool) -> None:
    """The pages that a request holds for those that resume where it ends are counted, too."""
    rng = Random(f"alone {use_eagle}")
    for _ in range(20):
        layout = draw_layout(rng, has_states=False)
        layout.use_eagle, layout.has_tier = use_eagle, False
        layout.groups = [group for group in layout.groups if not (use_eagle and group.kind == "chunked")]
        num_tokens = rng.randint(1, 150)
        specs = [pagepool.CacheGroupSpec(group.spec(pagepool, "float16")) for group in layout.groups]
        for num_pages in range(2, 1000):
            manager = CacheManager(num_pages, specs, MAX_LEN, use_eagle=use_eagle)
            try:
                manager.require_capacity(num_tokens)
            except RequestTooLargeError:
                continue
            break
        request = EngineRequest("alone", list(range(num_tokens)))
        for num_computed in range(num_tokens):
            request.num_computed_tokens = num_computed
            assert manager.allocate_slots(request, 1) is not None, (layout, num_tokens, num_pages)
