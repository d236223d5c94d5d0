"""The pages that cross from an engine with a prompt to another one with its answer."""

from collections.abc import Sequence
from math import lcm

from pagepool.errors import ArgumentError
from pagepool.group_rules import STATES, kind_of, window_of
from pagepool.manager import CacheManager


class Crossing:
    """Finds the pages of each cache group that the engine with the answer lacks. Both engines have equal groups."""

    def __init__(self, manager: CacheManager) -> None:
        """Read the groups of a manager. Raise ArgumentError for cross-attention, whose pages belong to a medium."""
        if manager.cross_groups:
            raise ArgumentError("manager: got one with cross-attention, allowed: groups of self-attention and states")
        specs = [group.kv_cache_spec for group in manager.kv_cache_groups]
        self._kinds = [kind_of(spec) for spec in specs]
        self._page_sizes = [spec.page_size for spec in specs]
        self._windows = [window_of(spec) for spec in specs]
        is_full = [not window and kind not in STATES for window, kind in zip(self._windows, self._kinds, strict=True)]
        self.are_all_full = all(is_full)
        """Whether each part of a prompt is of use without its end."""
        self._full_size = lcm(*(spec.page_size for spec, is_one in zip(specs, is_full, strict=True) if is_one))
        self._has_full = any(is_full)
        rules = manager.registry.rules
        self._end_step = 1 if rules.checkpoint_interval is None else rules.hit_tokens

    def find_end(self, num_tokens: int) -> int:
        """Return how many leading tokens of a prompt are worth asking for: all but the last one, from which the asking engine
        samples the next; with states that are kept, up to where a later request can resume.
        """
        return (num_tokens - 1) // self._end_step * self._end_step

    def count_crossing(self, num_computed_tokens: int, end: int) -> int:
        """Return the number of leading tokens of a prompt of `end` tokens whose pages can cross once these are computed: all at
        its end, and before only full pages of full attention.
        """
        if num_computed_tokens == end:
            return end
        return num_computed_tokens // self._full_size * self._full_size if self._has_full else 0

    def list_places(self, num_hit_tokens: int, start: int, stop: int, end: int) -> list[range]:
        """Return the places of the pages that cross with the tokens before `stop`, a result of `count_crossing`, by group.
        Those before `start` have crossed. The prompt has `end` tokens, and the other engine hit `num_hit_tokens`.

        Full attention crosses page by page. At the end also the open page crosses, and of windows, chunks and states what the
        next token reads. O(groups).
        """
        return [self._list_of_group(g, num_hit_tokens, start, stop, end) for g in range(len(self._kinds))]

    def _list_of_group(self, group: int, num_hit_tokens: int, start: int, stop: int, end: int) -> range:
        size, window, kind = self._page_sizes[group], self._windows[group], self._kinds[group]
        is_end = stop == end
        if kind in STATES:
            return range(int(is_end))
        if not window:
            return range(start // size, -(-stop // size) if is_end else stop // size)
        first = end // window * window if kind == "ChunkedLocalAttention" else max(0, end + 1 - window)
        return range(max(first, num_hit_tokens) // size, -(-end // size)) if is_end else range(0)


def choose_pages(page_ids: Sequence[Sequence[int]], places: Sequence[range]) -> list[list[int]]:
    """Return the pages at some places, by group."""
    return [[ids[place] for place in chosen] for ids, chosen in zip(page_ids, places, strict=True)]
