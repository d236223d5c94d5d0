"""Which pages of windows and chunks stay cached, as the oracle knows it: those with which a later request can resume."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from oracle_checkpoints import ANSWER_END, JUNCTION, LONE_PLACE, PROMPT_END, PrefixEnd
from oracle_kinds import Chunked, Kind, Mamba, Sliding, is_leading
from oracle_pool import NULL_PAGE
from pool_ranges import Shard

if TYPE_CHECKING:
    from oracle import OracleManager

NUM_BOUNDARIES = 7  # boundaries of a request
STATE_SLACK = 64  # tokens before the end of a prompt at which its state is written


@dataclass(frozen=True)
class Boundaries:
    """Numbers of tokens at which others may resume a request that had `num_prompt` tokens when it was admitted."""

    tokens: Mapping[int, int]  # with the kind of each
    num_prompt: int  # those in which multiples of the interval are boundaries
    first_answer: int = 0  # from here on, each multiple may be the end of the answer


class OracleWindows:
    """The boundaries of a manager's requests."""

    def __init__(self, manager: OracleManager, slack: int, interval: int) -> None:
        self.manager = manager
        self.slack, self.interval = -(-slack // manager.hit_step) * manager.hit_step, interval
        self.kinds = [kind for kind in manager.classes if not isinstance(kind, Mamba)]  # as a look-up goes through them
        self.page_step = math.lcm(*(kind.page_size for kind in self.kinds))
        self.boundaries: dict[str, Boundaries] = {}
        self.last_end = PrefixEnd()  # of the last look-up that reached the tier
        self.prefix_ends: dict[str, tuple[Any, PrefixEnd]] = {}  # by request id, with the request that was looked up
        self.writes_answers = False  # for the request that is admitted
        self.external_ends: dict[str, int] = {}  # by request id: the end of tokens from elsewhere

    @staticmethod
    def has_window(kind: Kind) -> bool:
        return isinstance(kind, Sliding | Chunked)

    @property
    def num_uncertain(self) -> int:
        """Tokens by which a hit may be shorter with eagle, if a request has hardly more than it shares with another."""
        return self.manager.hit_step * (self.manager.use_eagle and self.kinds[0].page_size < self.manager.hit_step)

    @property
    def num_dropped(self) -> int:
        """Tokens that eagle drops at least of those that are shared, or that a lookahead cannot be without."""
        num_later = len(self.kinds) - 1
        num_dropped = self.kinds[0].page_size + num_later * self.manager.hit_step
        return num_dropped if self.manager.use_eagle else self.num_behind

    @property
    def num_behind(self) -> int:
        """Tokens behind a page without which it does not hit; those of states are within the slack."""
        return 0 if self.manager.writes_states else self.manager.keys.hash_lookahead

    def find_resumption(self, num_tokens: int) -> int:
        """Return at how many tokens a request resumes that shares `num_tokens` with another, if all pages are cached."""
        for kind in self.kinds if self.manager.use_eagle else ():
            num_tokens = self.manager._floor(max(0, num_tokens // kind.page_size - 1) * kind.page_size)
        return self.manager._floor(max(0, num_tokens - self.num_behind))

    def find_end(self, request: Any, hits: dict[Kind, list[bool]], length: int, most: int, shard: range | Shard | None) -> None:
        """Note the tokens that would hit if windows and states hit as far as full attention, if those are more than the hit of
        `length`, how other requests went on from there, and what was lost.
        """
        full = [kind for kind in hits if is_leading(kind)]
        for kind in full:
            most = self.manager._floor(kind.longest(hits[kind], most, self.manager.use_eagle))
        num_full = most
        most -= (len(self.kinds) - len(full)) * self.manager.hit_step * self.manager.use_eagle
        self.last_end = PrefixEnd(most if full and most > length else 0)
        pool = self.manager.page_pool
        if self.last_end.junction and pool.checkpoints.are_kept:
            self._find_parting(request, full[0], shard)
        if full and len(pool.ranges) > 1:
            self._find_lost(request, hits, length, num_full, shard)

    def _find_parting(self, request: Any, kind: Kind, shard: range | Shard | None) -> None:
        """Note whether runs have parted from the last page of full attention that hits, or ended with it."""
        pool, group_id = self.manager.page_pool, self.manager.classes[kind][0]
        keys = self.manager.keys_of(request, kind)
        num, most = self.last_end.junction // kind.page_size, (request.num_tokens - 1) // kind.page_size
        while num < min(most, len(keys)) and all(
            self.manager.is_hit((keys[num], i), shard, True) for i in self.manager.classes[kind]
        ):
            num += 1
        page = pool.first_entered(keys[num - 1], group_id, shard)
        if page is None:  # only the tier has it
            return
        child = pool.checkpoints.children.get(page)
        has_parted = child is not None and num < len(keys) and child != keys[num]
        self.last_end = self.last_end._replace(has_parted=has_parted, is_run_end=page in pool.checkpoints.ends)

    def _find_lost(
        self, request: Any, hits: dict[Kind, list[bool]], length: int, num_full: int, shard: range | Shard | None
    ) -> None:
        """Note the last checkpoint behind the hit that was evicted, within the hits of full attention."""
        for end in range(num_full, length, -self.manager.hit_step):
            is_lost = False
            for kind in [kind for kind in hits if isinstance(kind, Mamba)]:
                content = self.manager.keys_of(request, kind)[end // kind.hit_size - 1]
                for group_id in self.manager.classes[kind]:
                    is_hit = self.manager.is_hit((content, group_id), shard, True)
                    was_evicted = self._has_evicted(content, group_id)
                    if not was_evicted and not is_hit:
                        break
                    is_lost = is_lost or (was_evicted and not is_hit)
                else:
                    continue
                break
            else:
                if is_lost:
                    self.last_end = self.last_end._replace(num_lost=end - length, lost_content=content)
                    return

    def _has_evicted(self, content: int, group_id: int) -> bool:
        pages = self.manager.pools.range_of(group_id)
        ranks = self.manager.page_pool.checkpoints.ranks_of(pages.start)
        return ranks is not None and ranks.has_evicted(content, group_id)

    def begin(self, request: Any) -> None:
        """Fix the boundaries of a request that is admitted."""
        looked_up, end = self.prefix_ends.get(request.request_id, (None, PrefixEnd()))
        end = end if looked_up is request else PrefixEnd()
        num_slack = STATE_SLACK if self.manager.writes_states else 0
        last = self.find_resumption(max(0, request.num_tokens - num_slack))
        places = [(self.find_resumption(place), JUNCTION) for place in getattr(request, "resume_at", ())]
        first_answer = 0
        if self.manager.writes_states:
            external_end = self.external_ends.get(request.request_id, 0)
            places.append((external_end if external_end % self.manager.hit_step == 0 else 0, 0))
            if end.has_parted:
                places.append((end.junction, JUNCTION))
            elif end.junction > last:
                last = end.junction
            else:
                places.append((end.junction, LONE_PLACE))
            first_answer = (last + self.manager.hit_step) * self.writes_answers
        else:
            places.append((end.junction, 0))
        kinds = {}
        for place, kind in (*places, (last, PROMPT_END)):
            kinds[place] = kinds.get(place, 0) | kind
        kinds.pop(0, None)
        self.boundaries[request.request_id] = Boundaries(kinds, request.num_tokens, first_answer)

    def _list_fixed(self, request: Any) -> list[int]:
        """Return the boundaries of a request except those of its answer."""
        boundaries = self.boundaries[request.request_id]
        parts = range(self.interval, boundaries.num_prompt + 1, self.interval) if self.interval else ()
        return sorted({*boundaries.tokens, *map(self.find_resumption, parts)} - {0})

    def list_ends(self, request: Any) -> list[int]:
        """Return all boundaries of a request, where it writes states."""
        first = self.boundaries[request.request_id].first_answer
        answers = range(first, self.manager.max_model_len + 1, self.manager.hit_step) if first else ()
        ends = sorted({*self._list_fixed(request), *answers})
        if self.manager.has_answers:
            return [end for end in ends if end <= self.manager.held[request.request_id][0].num_prompt_tokens]
        return ends

    def list_written(self, request: Any, num_planned: int) -> list[int]:
        """Return the boundaries whose states a step up to so many tokens writes: of those of the answer the last."""
        ends, fixed = [end for end in self.list_ends(request) if end <= num_planned], self._list_fixed(request)
        return [end for end in ends if end in fixed or end == ends[-1]]

    def kind_at(self, request: Any, end: int) -> int:
        kinds = self.boundaries[request.request_id].tokens
        return kinds[end] if end in kinds else 0 if end in self._list_fixed(request) else ANSWER_END

    def first_held_page(self, kind: Kind, num_computed_tokens: int, num_cached_pages: int) -> int:
        """Return the first page that a request keeps: its next tokens attend to it, or a request that goes on where it may end
        now. Behind checkpoints, that is where all groups have whole pages.
        """
        first = kind.first_useful_page(num_computed_tokens, num_cached_pages)
        if self.manager.writes_states:
            return first
        end = num_computed_tokens // self.page_step * self.page_step
        if self.manager.use_eagle:
            end = max(0, self.manager._floor(num_computed_tokens) - len(self.kinds) * self.manager.hit_step)
        return min(first, kind.first_hit_page(end, self.manager.use_eagle))

    def keep_hits(self, hits: tuple[list[int], ...]) -> None:
        """Let the pages of windows that were hit stay when they leave the window again."""
        for kind, pages in zip(self.manager.kinds, hits, strict=True):
            for page in pages if self.has_window(kind) else ():
                self.manager.page_pool.keep(page)

    def fork(self, request: Any, target: Any) -> None:
        self.boundaries[target.request_id] = replace(self.boundaries[request.request_id])

    def is_at_boundary(self, kind: Kind, boundaries: Boundaries, place: int) -> bool:
        """Whether a request that resumes at a boundary, or up to the slack before, needs a page."""
        slack = self.num_uncertain + self.slack * (not self.manager.writes_states)
        windows = [(max(0, end - slack), end) for end in boundaries.tokens]
        if self.interval:
            parts = range(self.interval, boundaries.num_prompt + 1, self.interval)
            windows += [(max(0, end - self.num_uncertain), end) for end in map(self.find_resumption, parts) if end]
        return any(place in self.pages_at(kind, first, end) for first, end in windows)

    def pages_at(self, kind: Kind, first: int, end: int) -> range:
        """Return the pages of a group that a request needs which resumes from `first` to `end`. With eagle each kind looks up
        one more, which it drops, behind what the kinds behind it drop; a state has one page, its checkpoint.
        """
        if isinstance(kind, Mamba):
            return range(kind.first_hit_page(end, False), kind.num_places(end))
        eagle, num_behind = self.manager.use_eagle, len(self.kinds) - 1 - self.kinds.index(kind)
        stop = (end + eagle * num_behind * self.manager.hit_step) // kind.page_size + eagle
        return range(kind.first_hit_page(first, eagle), stop)

    def leave(self, request: Any, kind: Kind, place: int, page: int) -> None:
        """Free a page that a window has left."""
        pool = self.manager.page_pool
        if self.has_window(kind) and self.is_at_boundary(kind, self.boundaries[request.request_id], place):
            pool.keep(page)
        if pool.is_worthless(page):
            pool.give_back([], [page])
        else:
            pool.free_pages([page], is_counted=False)

    def keep_last(self, request: Any, num_computed_tokens: int | None) -> None:
        """Mark the pages that stay of a request which is about to give all back."""
        groups = list(zip(self.manager.kinds, self.manager.held.get(request.request_id, ()), strict=False))
        if not any(self.has_window(kind) for kind, _ in groups):
            return
        boundaries = self.boundaries[request.request_id]
        num_entered = self._count_entered(groups, num_computed_tokens)
        end = self.find_resumption(num_entered + self.num_behind)
        is_in_prompt = end < self.find_resumption(boundaries.num_prompt)
        ends = set(boundaries.tokens)
        is_worth = is_in_prompt or self._is_cheap(boundaries, end)
        if not self.manager.writes_states and end > 0 and is_worth and self._are_whole(groups, boundaries, end):
            ends = {*sorted({*ends, end})[-NUM_BOUNDARIES:]}
        boundaries = replace(boundaries, tokens=dict.fromkeys(ends, 0))
        for kind, held in groups:
            for place, page in enumerate(held.pages):
                if self.has_window(kind) and self.is_at_boundary(kind, boundaries, place):
                    self.manager.page_pool.keep(page)

    def _count_entered(self, groups: list[Any], num_computed_tokens: int | None) -> int:
        """Count the computed tokens whose full pages were entered in all groups."""
        ends = [(held.num_cached_pages * kind.page_size, kind) for kind, held in groups if not isinstance(kind, Mamba)]
        most = max(end for end, _ in ends)
        num_tokens = most if num_computed_tokens is None else min(most, num_computed_tokens)
        return min([num_tokens, *(end for end, kind in ends if end // kind.page_size < num_tokens // kind.page_size)])

    def _are_whole(self, groups: list[Any], boundaries: Boundaries, end: int) -> bool:
        """Whether the windows before an end are held, but for pages that stayed as they left."""
        return all(
            held.pages[place] != NULL_PAGE or self.is_at_boundary(kind, boundaries, place)
            for kind, held in groups
            if self.has_window(kind)
            for place in range(kind.first_hit_page(end, self.manager.use_eagle), end // kind.page_size)
        )

    def _is_cheap(self, boundaries: Boundaries, end: int) -> bool:
        """Whether windows have no more pages behind the prompt than the answer has in one group, if possible a full one, or the
        prompt has no more there than the windows have.
        """
        kinds = [kind for kind in self.manager.kinds if not isinstance(kind, Mamba)]
        one = [kind for kind in kinds if is_leading(kind)][-1:] or kinds[:1]
        prompt = max(0, boundaries.num_prompt - self.num_dropped)  # as at `end`
        [num_saved] = [end // kind.page_size - prompt // kind.page_size for kind in one]
        windowed = [kind for kind in kinds if self.has_window(kind)]
        windows = [range(kind.first_hit_page(end, self.manager.use_eagle), end // kind.page_size) for kind in windowed]
        starts = [prompt // kind.page_size for kind in windowed]
        num_new = sum(max(0, pages.stop - max(pages.start, start)) for pages, start in zip(windows, starts, strict=True))
        [num_prompt] = [prompt // kind.page_size for kind in one]
        return num_saved > 0 and (num_new <= num_saved or num_prompt <= sum(map(len, windows)))
