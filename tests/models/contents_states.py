"""The simulation's books of states that are kept as checkpoints, of forks, and of loads that fail."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from contents_device import Content, require
from contents_index import NULL_PAGE, STAYS, Books, FindKey
from contents_request import Job, Write
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
            require(not (group.is_ring and page_ids), "a ring is hit", job, page_ids)
            attached.append([] if group.is_state else list(page_ids))
        return attached

    def note_state_hits(self, job: Job, new_ids: PagesByGroup, num_hit_tokens: int, shard: range | Shard | None) -> None:
        """Record whether the checkpoints that a job hits are copied, or become its working pages."""
        states = [(i, new_ids[i][0]) for i in self.state_ids if num_hit_tokens]
        histories = self.list_known(job, num_hit_tokens)
        contents = [self.name(group_id, histories, num_hit_tokens) for group_id, _ in states]
        ref_counts, found = self._count_references(), []
        for (_, page_id), content in zip(states, contents, strict=True):
            pages = self._list_hit(content, shard)
            held = [hit_id for hit_id in pages if hit_id != page_id and ref_counts[hit_id]]  # by a copy, at least
            held = [hit_id for hit_id in held if self.is_cached(hit_id)]  # an equal one may be evicted by now, and written
            found.append([*held, page_id if page_id in pages else pages[0]][0])
        if self.tier is not None:
            job.load_number = max(job.load_number, self.tier.find_load_number(found))
        are_adopted = [page_id == hit_id for (_, page_id), hit_id in zip(states, found, strict=True)]
        require(all(are_adopted) or not any(are_adopted), "some checkpoints are copied, some not", job, states)
        if states and not all(are_adopted):
            self.note_copies(job)
            self.copies.update(zip((page_id for _, page_id in states), found, strict=True))

    def note_copies(self, job: Job) -> None:
        """Record that copies into pages of a job are due."""
        self.are_copies_due, job.awaited_copies = True, self.num_taken

    def awaits_copies(self, job: Job) -> bool:
        return job.awaited_copies == self.num_taken

    def find_writes(self, job: Job | None, num_planned: int | None = None) -> None:
        """Record the pages that a call has taken to write states of a job, or of several: others have holders in the books, or
        are read by copies that are due. No later step writes states among the planned tokens.
        """
        if not self.state_ids:
            return
        others = [
            page_id for page_id, count in enumerate(self._count_references()) if count and not self.count_references(page_id)
        ]
        read = self.copies.values()
        for page_id in [page_id for page_id in others if page_id not in read and not self.is_cached(page_id)]:
            self._claim(page_id, None, job)
            self.due_writes.append(Write(page_id, job))
        if job is not None and num_planned is not None:
            self.pass_over(job, num_planned)

    def _count_references(self) -> list[int]:
        """Return the number of references of each page."""
        banks = range(len(self.pools.ranges))
        return [0, *(count for bank in banks for count in self.store.ref_counts(bank).tolist()[1:])]

    def pass_over(self, job: Job, num_planned: int) -> None:
        for group_id in self.state_ids:
            job.num_cached_pages[group_id] = max(job.num_cached_pages[group_id], num_planned // self.hit_step)

    def take_write(self, job: Job, page_id: int, num_tokens: int, group_id: int, shard: range | Shard | None) -> Write:
        """Record what a page that was taken for a write is for."""
        [write] = [write for write in self.due_writes if write.page == page_id] or [None]
        require(write is not None and write.job in (None, job), "a write to a page that was not taken", job, page_id)
        require(group_id in self.state_ids and num_tokens % self.hit_step == 0, "a wrong write", job, group_id, num_tokens)
        require(num_tokens <= job.prompt_end, "a state of an answer is kept", job, num_tokens)
        require(shard is None or page_id in shard, "a write in another shard", job, page_id, shard)
        same = [other for other in job.writes if (other.group, other.num_tokens) == (group_id, num_tokens)]
        require(not same, "a state is written twice", job, group_id, num_tokens)
        write.job, write.group, write.num_tokens = job, group_id, num_tokens
        self.due_writes.remove(write)
        job.writes.append(write)
        return write

    def content_of_write(self, job: Job, write: Write) -> Content:
        return self.name(write.group, self.list_known(job, write.num_tokens), write.num_tokens)

    def holds(self, work: Any, write: Write) -> bool:
        """Whether the page of a write is still that of its job, or cached for it."""
        return write in work.job.writes or self.index.content_of(write.page) == self.content_of_write(work.job, write)

    def settle_writes(self, job: Job, num_final: int, find_key: FindKey, shard: range | Shard | None, is_row: bool) -> None:
        """Record that the states behind final tokens were cached, unless equal ones are: in the shard of a row, or of the page.
        None is while hits are loaded.
        """
        if self.waits(job):
            return
        for write in [write for write in job.writes if write.num_tokens <= num_final]:
            job.writes.remove(write)
            content = self.content_of_write(job, write)
            equal = self.index.pages.get(content, ())
            there = shard if is_row else self.find_shard_of([write.page], None)
            equal = [page_id for page_id in equal if there is None or page_id in there]
            is_entered = not equal
            if equal and self.is_cached(write.page):  # they were evicted by the same call
                is_entered = not any(map(self.is_cached, equal))
            elif equal and self.tier is not None and not any(map(self.is_cached, equal)):
                self.tier.note_save(write.page, content)  # it may have been cached after these were evicted, and evicted too
            write.is_entered = is_entered
            if is_entered:
                key = (find_key(job, write.num_tokens), write.group) if self.tier is not None else None
                self.note_entry(write.page, content, job, key)
                if write.num_tokens > job.num_admitted_tokens and write.num_tokens not in job.ends:
                    self._drop_outrun(job, write.group)
            self.let_go(write.page)

    def _drop_outrun(self, job: Job, group_id: int) -> None:
        """Drop an earlier state of the answer of a job, if the pool did: the next one takes its place."""
        own = [i for i, entry in self.index.entries.items() if (entry.content[0], entry.stay) == (group_id, job.stay)]
        for page_id in own:
            if not self.is_cached(page_id):
                self.drop(page_id)

    def fork(self, job: Job, target: Job, pages_by_group: PagesByGroup, shard: range | Shard | None) -> None:
        """Record that a job goes on where another one is: it shares full pages with their lookahead, and has pages of its own
        behind them.
        """
        num_tokens, new_ids = job.num_computed_tokens, []
        num_shared = max(0, num_tokens - self.hash_lookahead)
        target.num_drafted_tokens = min(job.num_drafted_tokens, num_shared)
        target.stay, target.num_hit_tokens, target.pages, target.num_cached_pages = next(STAYS), num_tokens, [], []
        target.boundaries, target.ends, target.writes = job.boundaries, job.ends, []
        target.rings = deepcopy(job.rings)
        loading = self.tier.loading if self.tier is not None else {}
        for group_id, (group, pages, page_ids) in enumerate(zip(self.groups, job.pages, pages_by_group, strict=True)):
            num_full = 0 if group.is_state else num_shared // group.page_size
            num_full = max(num_full, self._count_gone(pages[: -(-num_tokens // group.page_size)]))
            num_all = min(1, num_tokens) if group.is_state else -(-num_tokens // group.page_size)
            require(list(page_ids[:num_full]) == pages[:num_full], "a fork with other pages", job, target, page_ids)
            require(len(page_ids) == num_all, "a fork with more pages, or less", job, target, page_ids)
            for page_id in page_ids[:num_full]:
                self.holders[page_id] += page_id != NULL_PAGE
            target.pages.append(list(page_ids[:num_full]))
            size = self.hit_step if group.is_state else group.page_size
            num_kept = num_tokens if group.is_state else num_shared
            target.num_cached_pages.append(min(job.num_cached_pages[group_id], num_kept // size))
            new_ids.append(page_ids[num_full:])
            self.copies.update(zip(page_ids[num_full:], pages[num_full:num_all], strict=True))
            copied = zip(pages[num_full:num_all], page_ids[num_full:], strict=True)
            loading |= {page_id: loading[source] for source, page_id in copied if source in loading}
        self.take(target, new_ids, shard)
        target.forked_lists = {group_id: self.num_taken for group_id, page_ids in enumerate(new_ids) if page_ids}
        if any(new_ids):
            self.note_copies(target)
        self.is_between |= any(page_id != NULL_PAGE for page_ids in new_ids for page_id in page_ids)

    @staticmethod
    def _count_gone(pages: Sequence[int]) -> int:
        """Return how many leading pages end with the last one that a window has left."""
        return max((i + 1 for i, page_id in enumerate(pages) if page_id == NULL_PAGE), default=0)

    # Loads that failed.

    def list_loaded_twins(self) -> list[int]:
        """Return the pages with the content of another one that is being loaded."""
        loading = self.tier.loading if self.tier is not None else {}
        contents = {self.index.entries[page_id].content for page_id in loading if page_id in self.index.entries}
        return [page_id for content in contents for page_id in self.index.pages[content] if page_id not in loading]

    def is_loading(self, job: Job) -> bool:
        """Whether a full page of a request that a fork copies, since its lookahead is not computed, is being loaded."""
        num_shared, copied = max(0, job.num_computed_tokens - self.hash_lookahead), []
        for group, pages in zip(self.groups, job.pages, strict=True):
            if not group.is_state:
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
