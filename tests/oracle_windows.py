"""Which pages of windows and chunks stay cached, as the oracle knows it: those with which a later request can resume."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from oracle_kinds import Chunked, Full, Kind, Mamba, Sliding
from oracle_pool import NULL_PAGE

if TYPE_CHECKING:
    from oracle import OracleManager


@dataclass(frozen=True)
class Boundaries:
    """Numbers of tokens at which others may resume a request that had `num_prompt` tokens when it was admitted."""

    tokens: tuple[int, ...]
    num_prompt: int


class OracleWindows:
    """The boundaries of a manager's requests."""

    def __init__(self, manager: OracleManager, slack: int, interval: int) -> None:
        step = manager.hit_step
        self.manager = manager
        self.slack, self.interval = -(-slack // step) * step, -(-interval // step) * step
        self.boundaries: dict[str, Boundaries] = {}
        self.last_junction = 0  # of the last look-up that reached the tier
        self.junctions: dict[str, tuple[Any, int]] = {}  # by request id, with the request that was looked up

    @staticmethod
    def has_window(kind: Kind) -> bool:
        return isinstance(kind, Sliding | Chunked)

    def find_junction(self, hits: dict[Kind, list[bool]], length: int, most: int) -> None:
        """Note the tokens that all groups of full attention hit, if that is more than the hit of `length` tokens."""
        full = [kind for kind in hits if type(kind) is Full]
        for kind in full:
            most = self.manager._floor(kind.longest(hits[kind], most, self.manager.use_eagle))
        self.last_junction = most if full and most > length else 0

    def begin(self, request: Any) -> None:
        """Fix the boundaries of a request that is admitted."""
        looked_up, junction = self.junctions.get(request.request_id, (None, 0))
        ends = [junction if looked_up is request else 0, *getattr(request, "resume_at", ())]
        floored = {self.manager._floor(num_tokens) for num_tokens in (request.num_tokens, *ends)}
        self.boundaries[request.request_id] = Boundaries(tuple(floored - {0}), request.num_tokens)

    def find_end(self, request: Any, stop: int | None) -> int:
        """Return the number of tokens at which a request is to resume behind a span; 0: anywhere."""
        if stop is None:
            return 0
        return max(0, self.manager._floor(min(stop, request.num_tokens)) - self.manager.hit_step * self.manager.use_eagle)

    def keep_hits(self, hits: tuple[list[int], ...]) -> None:
        """Let the pages of windows that were hit stay when they leave the window again."""
        for kind, pages in zip(self.manager.kinds, hits, strict=True):
            for page in pages if self.has_window(kind) else ():
                self.manager.page_pool.keep(page)

    def fork(self, request: Any, target: Any) -> None:
        self.boundaries[target.request_id] = replace(self.boundaries[request.request_id])

    def is_at_boundary(self, kind: Kind, boundaries: Boundaries, place: int) -> bool:
        """Whether a request that resumes at a boundary, or up to the slack before, needs a page. With eagle it needs one more,
        which it drops.
        """
        eagle = self.manager.use_eagle
        most = 4 * self.manager.max_model_len
        windows = [(max(0, end - self.slack), end) for end in boundaries.tokens]
        windows += [(end, end) for end in range(self.interval, most, self.interval)] if self.interval else []
        return any(kind.first_hit_page(first, eagle) <= place < end // kind.page_size + eagle for first, end in windows)

    def leave(self, request: Any, kind: Kind, place: int, page: int) -> None:
        """Free a page that a window has left."""
        pool = self.manager.page_pool
        if self.is_at_boundary(kind, self.boundaries[request.request_id], place):
            pool.keep(page)
        if pool.is_worthless(page):
            pool.give_back([], [page])
        else:
            pool.free_pages([page], is_counted=False)

    def keep_last(self, request: Any, num_computed_tokens: int | None) -> None:
        """Mark the pages that stay of a request which is about to give all back."""
        groups = list(zip(self.manager.kinds, self.manager.held.get(request.request_id, ()), strict=False))
        if not groups:
            return
        boundaries, step = self.boundaries[request.request_id], self.manager.hit_step
        ends = [held.num_cached_pages * kind.page_size for kind, held in groups if not isinstance(kind, Mamba)]
        end = self.manager._floor(min([*ends, *([] if num_computed_tokens is None else [num_computed_tokens])]))
        is_in_prompt = end < self.manager._floor(boundaries.num_prompt)
        end -= step * self.manager.use_eagle
        if end > 0 and self._are_whole(groups, boundaries, end) and (is_in_prompt or self._is_cheap(boundaries, end)):
            boundaries = replace(boundaries, tokens=(*boundaries.tokens, end))
        for kind, held in groups:
            for place, page in enumerate(held.pages):
                if self.has_window(kind) and self.is_at_boundary(kind, boundaries, place):
                    self.manager.page_pool.keep(page)

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
        one = [kind for kind in kinds if type(kind) is Full][-1:] or kinds[:1]
        [num_saved] = [end // kind.page_size - boundaries.num_prompt // kind.page_size for kind in one]
        windowed = [kind for kind in kinds if self.has_window(kind)]
        windows = [range(kind.first_hit_page(end, self.manager.use_eagle), end // kind.page_size) for kind in windowed]
        prompts = [boundaries.num_prompt // kind.page_size for kind in windowed]
        num_new = sum(max(0, pages.stop - max(pages.start, prompt)) for pages, prompt in zip(windows, prompts, strict=True))
        [num_prompt] = [boundaries.num_prompt // kind.page_size for kind in one]
        return num_saved > 0 and (num_new <= num_saved or num_prompt <= sum(map(len, windows)))
