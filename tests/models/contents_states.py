"""The simulation's books of states that are kept as checkpoints, of forks, and of loads that fail."""

from __future__ import annotations

from collections.abc import Sequence

from contents_device import require
from contents_index import NULL_PAGE, STAYS, Books
from contents_request import Job
from contents_tier import InFlight
from pool_ranges import Shard

PagesByGroup = Sequence[Sequence[int]]


class StateBooks(Books):
    """Books of a pool whose requests may have states."""

    def check_state_hits(
        self, job: Job, hits: PagesByGroup, num_hit_tokens: int, shard: range | Shard | None
    ) -> list[list[int]]:
        """Compare checkpoints that are hit; return the hits that are attached."""
        attached = []
        for group_id, (group, page_ids) in enumerate(zip(self.groups, hits, strict=True)):
            if group.kind == "mamba" and page_ids:
                content = self.name(group_id, self.list_known(job, num_hit_tokens), num_hit_tokens)
                found = self.index.content_of(page_ids[-1])
                require(len(page_ids) * self.hit_step == num_hit_tokens, "a checkpoint at another place", job, page_ids)
                require(found == content, "a wrong checkpoint", job, page_ids, found)
                require(shard is None or page_ids[-1] in shard, "a checkpoint in another shard", job, page_ids, shard)
            attached.append([] if group.kind == "mamba" else list(page_ids))
        return attached

    def note_state_hits(self, job: Job, new_ids: PagesByGroup, num_hit_tokens: int, shard: range | Shard | None) -> None:
        """Record whether the checkpoints that a job hits are copied, or become its working pages."""
        states = [(i, new_ids[i][0]) for i, group in enumerate(self.groups) if group.interval and num_hit_tokens]
        histories = self.list_known(job, num_hit_tokens)
        contents = [self.name(group_id, histories, num_hit_tokens) for group_id, _ in states]
        found = [self.index.find(content, shard) for content in contents]
        are_adopted = [page_id == hit_id for (_, page_id), hit_id in zip(states, found, strict=True)]
        require(all(are_adopted) or not any(are_adopted), "some checkpoints are copied, some not", job, states)
        if states and not all(are_adopted):
            self.note_copies(job)

    def note_copies(self, job: Job) -> None:
        """Record that copies into pages of a job are due."""
        self.are_copies_due, job.awaited_copies = True, self.num_taken

    def awaits_copies(self, job: Job) -> bool:
        return job.awaited_copies == self.num_taken

    def part(self, job: Job, new_ids: PagesByGroup) -> tuple[list[list[int]], list[list[int]]]:
        """Part new pages into those that a job lacked and the next working pages of its states."""
        are_working = [group.kind == "mamba" and bool(pages) for group, pages in zip(self.groups, job.pages, strict=True)]
        parts = list(zip(are_working, map(list, new_ids), strict=True))
        return [[] if is_working else ids for is_working, ids in parts], [
            ids if is_working else [] for is_working, ids in parts
        ]

    def keep(
        self, job: Job, num_computed_tokens: int, new_ids: PagesByGroup, shard: range | Shard | None, is_delayed: bool = False
    ) -> None:
        """Record the checkpoints of a job that grows: a state that gets a new working page has kept the old one."""
        for group_id, (group, pages, new) in enumerate(zip(self.groups, job.pages, new_ids, strict=True)):
            require(bool(group.interval) or not new, "a state that is not kept moves", job, new)
            if not group.interval or not pages:
                continue
            if new:
                require(not is_delayed and len(new) == 1, "a checkpoint that is not asked for", job, new)
                require(
                    self._is_due(job, group_id, num_computed_tokens), "a checkpoint that is not due", job, num_computed_tokens
                )
                require(not self.waits(job), "a checkpoint of a state that may be wrong", job)
                self._enter_state(job, group_id, num_computed_tokens)
                if self.setting.windows is not None:
                    job.boundaries = [*job.boundaries[-6:], range(num_computed_tokens, num_computed_tokens + 1)]
                self.let_go(pages.pop())
                self.take(job, [new if i == group_id else [] for i in range(len(self.groups))], shard)
                self.note_copies(job)
            num_passed = num_computed_tokens // self.hit_step
            job.num_cached_pages[group_id] = max(job.num_cached_pages[group_id], num_passed)

    def keep_last(self, job: Job, num_computed_tokens: int) -> None:
        """Record the checkpoints of a job that ends."""
        for group_id, (group, pages) in enumerate(zip(self.groups, job.pages, strict=True)):
            may_enter = group.interval and pages and not self.awaits_copies(job) and not self.waits(job)
            num_known = job.num_known_tokens or job.num_tokens  # of a row, or a request
            may_enter = may_enter and num_computed_tokens + self.lookahead <= num_known
            if may_enter and self._is_due(job, group_id, num_computed_tokens):
                may_await_transfers = self.tier is not None and job.last_taken == self.num_taken
                if not may_await_transfers or self.is_cached(pages[0]):
                    self._enter_state(job, group_id, num_computed_tokens)

    def _is_due(self, job: Job, group_id: int, num_computed_tokens: int) -> bool:
        """Whether a state can be kept now: at a multiple of the interval, once, where no equal one is cached."""
        num_intervals, rest = divmod(num_computed_tokens, self.hit_step)
        if rest or num_intervals <= job.num_cached_pages[group_id] or not self.setting.enable_caching:
            return False
        if num_computed_tokens + self.lookahead > job.num_tokens:
            return False
        content = self.name(group_id, self.list_known(job, num_computed_tokens), num_computed_tokens)
        return not self.index.has(content, self.find_shard_of(job.pages[group_id], None))

    def _enter_state(self, job: Job, group_id: int, num_computed_tokens: int) -> None:
        content = self.name(group_id, self.list_known(job, num_computed_tokens), num_computed_tokens)
        self.note_entry(job.pages[group_id][0], content, job)

    def fork(self, job: Job, target: Job, pages_by_group: PagesByGroup, shard: range | Shard | None) -> None:
        """Record that a job goes on where another one is: it shares full pages with their lookahead, and has pages of its own
        behind them.
        """
        num_tokens, new_ids = job.num_computed_tokens, []
        num_shared = max(0, num_tokens - self.lookahead)
        target.num_drafted_tokens = min(job.num_drafted_tokens, num_shared)
        target.stay, target.num_hit_tokens, target.pages, target.num_cached_pages = next(STAYS), num_tokens, [], []
        target.boundaries = job.boundaries
        loading = self.tier.loading if self.tier is not None else {}
        for group_id, (group, pages, page_ids) in enumerate(zip(self.groups, job.pages, pages_by_group, strict=True)):
            num_full = 0 if group.kind == "mamba" else num_shared // group.page_size
            num_full = max(num_full, self._count_gone(pages[: -(-num_tokens // group.page_size)]))
            num_all = min(1, num_tokens) if group.kind == "mamba" else -(-num_tokens // group.page_size)
            require(list(page_ids[:num_full]) == pages[:num_full], "a fork with other pages", job, target, page_ids)
            require(len(page_ids) == num_all, "a fork with more pages, or less", job, target, page_ids)
            for page_id in page_ids[:num_full]:
                self.holders[page_id] += page_id != NULL_PAGE
            target.pages.append(list(page_ids[:num_full]))
            size = self.hit_step if group.kind == "mamba" else group.page_size
            num_kept = num_tokens if group.kind == "mamba" else num_shared
            target.num_cached_pages.append(min(job.num_cached_pages[group_id], num_kept // size))
            new_ids.append(page_ids[num_full:])
            copied = zip(pages[num_full:num_all], page_ids[num_full:], strict=True)
            loading |= {page_id: loading[source] for source, page_id in copied if source in loading}
        self.take(target, new_ids, shard)
        target.forked_lists = {group_id: self.num_taken for group_id, page_ids in enumerate(new_ids) if page_ids}
        if any(new_ids):
            self.note_copies(target)
        self.is_between |= any(page_id != NULL_PAGE for page_ids in new_ids for page_id in page_ids)

    @staticmethod
    def _count_gone(pages: Sequence[int]) -> int:
        """Return how many leading pages a window has left."""
        return next((i for i, page_id in enumerate(pages) if page_id != NULL_PAGE), len(pages))

    # Loads that failed.

    def list_loaded_twins(self) -> list[int]:
        """Return the pages with the content of another one that is being loaded."""
        loading = self.tier.loading if self.tier is not None else {}
        contents = {self.index.entries[page_id].content for page_id in loading if page_id in self.index.entries}
        return [page_id for content in contents for page_id in self.index.pages[content] if page_id not in loading]

    def is_loading(self, job: Job) -> bool:
        """Whether a full page of a request that a fork copies, since its lookahead is not computed, is being loaded."""
        num_shared, copied = max(0, job.num_computed_tokens - self.lookahead), []
        for group, pages in zip(self.groups, job.pages, strict=True):
            if group.kind != "mamba":
                copied += pages[num_shared // group.page_size : -(-job.num_computed_tokens // group.page_size)]
        return self.tier is not None and self.tier.find_load_number(copied) > 0

    def end_transfers(self, one: InFlight) -> set[int]:
        """Record that transfers have ended; return the pages with wrong contents."""
        assert self.tier is not None
        for place in one.bad_loads:
            page_id, loaded = one.loads[place].page, one.loaded[place]
            if self.index.content_of(page_id) == loaded:
                self.drop(page_id)
        for load in one.loads:
            self.let_go(load.page)
        return self.tier.end(one, self.store)

    def find_wrong_token(self, job: Job, number: int, wrong: set[int]) -> int | None:
        """Return the first token of a request in a wrong page. A state is wrong from the start."""
        if job.load_number < number or not wrong:
            return None
        if self.has_state:
            return 0
        groups = zip(self.groups, job.pages, strict=True)
        starts = [i * group.page_size for group, pages in groups for i, page_id in enumerate(pages) if page_id in wrong]
        return min(starts, default=None)
