"""The simulation's books of states that are kept as checkpoints, of forks, and of equal pages that rows share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from contents_device import require
from contents_index import NULL_PAGE, STAYS, Books
from contents_request import Job

PagesByGroup = Sequence[Sequence[int]]


class StateBooks(Books):
    """Books of a pool whose requests may have states."""

    def check_state_hits(self, job: Job, hits: PagesByGroup, num_hit_tokens: int, shard: range | None) -> list[list[int]]:
        """Compare checkpoints that are hit; return the hits that are attached."""
        attached = []
        for group_id, (group, page_ids) in enumerate(zip(self.groups, hits, strict=True)):
            if group.kind == "mamba" and page_ids:
                content = group_id, job.list_histories(num_hit_tokens)[-1]
                entry = self.index.entries.get(page_ids[-1])
                require(len(page_ids) * self.hit_step == num_hit_tokens, "a checkpoint at another place", job, page_ids)
                require(entry is not None and entry.content == content, "a wrong checkpoint", job, page_ids, entry)
                require(shard is None or page_ids[-1] in shard, "a checkpoint in another shard", job, page_ids, shard)
            attached.append([] if group.kind == "mamba" else list(page_ids))
        return attached

    def note_state_hits(self, job: Job, new_ids: PagesByGroup, num_hit_tokens: int) -> None:
        """Record whether the checkpoints that a job hits are copied, or become its working pages."""
        states = [(i, new_ids[i][0]) for i, group in enumerate(self.groups) if group.interval and num_hit_tokens]
        entries = [self.index.entries.get(page_id) for _, page_id in states]
        contents = [(group_id, job.list_histories(num_hit_tokens)[-1]) for group_id, _ in states]
        are_adopted = [entry is not None and entry.content == content for entry, content in zip(entries, contents, strict=True)]
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
        self, job: Job, num_computed_tokens: int, new_ids: PagesByGroup, shard: range | None, is_delayed: bool = False
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
                self._enter_state(job, group_id, num_computed_tokens)
                self._let_go(pages.pop())
                self.take(job, [new if i == group_id else [] for i in range(len(self.groups))], shard)
                self.note_copies(job)
            num_passed = num_computed_tokens // self.hit_step
            job.num_cached_pages[group_id] = max(job.num_cached_pages[group_id], num_passed)

    def keep_last(self, job: Job, num_computed_tokens: int) -> None:
        """Record the checkpoints of a job that ends."""
        for group_id, (group, pages) in enumerate(zip(self.groups, job.pages, strict=True)):
            if group.interval and pages and not self.awaits_copies(job) and self._is_due(job, group_id, num_computed_tokens):
                self._enter_state(job, group_id, num_computed_tokens)

    def _is_due(self, job: Job, group_id: int, num_computed_tokens: int) -> bool:
        """Whether a state can be kept now: at a multiple of the interval, once, where no equal one is cached."""
        num_intervals, rest = divmod(num_computed_tokens, self.hit_step)
        if rest or num_intervals <= job.num_cached_pages[group_id] or not self.setting.enable_caching:
            return False
        content = group_id, job.list_histories(num_computed_tokens)[-1]
        return not self.index.has(content, self.find_shard_of(job.pages[group_id], None))

    def _enter_state(self, job: Job, group_id: int, num_computed_tokens: int) -> None:
        content = group_id, job.list_histories(num_computed_tokens)[-1]
        self.index.enter(job.pages[group_id][0], content, job.stay)

    def fork(self, job: Job, target: Job, pages_by_group: PagesByGroup, shard: range | None) -> None:
        """Record that a job goes on where another one is: it shares full pages, and has pages of its own behind them."""
        num_tokens, new_ids = job.num_computed_tokens, []
        target.stay, target.num_hit_tokens, target.pages, target.num_cached_pages = next(STAYS), num_tokens, [], []
        for group_id, (group, pages, page_ids) in enumerate(zip(self.groups, job.pages, pages_by_group, strict=True)):
            num_full = 0 if group.kind == "mamba" else num_tokens // group.page_size
            num_all = min(1, num_tokens) if group.kind == "mamba" else -(-num_tokens // group.page_size)
            require(list(page_ids[:num_full]) == pages[:num_full], "a fork with other pages", job, target, page_ids)
            require(len(page_ids) == num_all, "a fork with more pages, or less", job, target, page_ids)
            for page_id in page_ids[:num_full]:
                self.holders[page_id] += page_id != NULL_PAGE
            target.pages.append(list(page_ids[:num_full]))
            size = self.hit_step if group.kind == "mamba" else group.page_size
            target.num_cached_pages.append(min(job.num_cached_pages[group_id], num_tokens // size))
            new_ids.append(page_ids[num_full:])
        self.take(target, new_ids, shard)
        if any(new_ids):
            self.note_copies(target)

    def dedupe(
        self, job: Job, held: PagesByGroup, num_computed_tokens: int, is_cached: Callable[[int], bool]
    ) -> frozenset[int]:
        """Record the pages that a row has exchanged for equal ones that are cached, and return these. A page that lost its
        entry may have been exchanged for one that left the attention window at once.
        """
        exchanged = set()
        for group_id, (group, pages, held_ids) in enumerate(zip(self.groups, job.pages, held, strict=True)):
            num_full = 0 if group.kind == "mamba" else num_computed_tokens // group.page_size
            for page, (page_id, held_id) in enumerate(zip(pages[:num_full], held_ids[:num_full], strict=True)):
                if held_id == page_id or page_id == NULL_PAGE:
                    continue
                content = group_id, job.list_histories((page + 1) * group.page_size)[-1]
                if held_id == NULL_PAGE and (is_cached(page_id) or self.index.pages.get(content, set()) <= {page_id}):
                    continue
                self.index.drop(page_id)
                if held_id != NULL_PAGE:
                    entry = self.index.entries.get(held_id)
                    is_equal = entry is not None and entry.content == content
                    require(is_equal, "a page that is not equal", job, page_id, held_id)
                    self._let_go(page_id)
                    self.holders[held_id] += 1
                    pages[page] = held_id
                    exchanged.add(held_id)
        return frozenset(exchanged)
