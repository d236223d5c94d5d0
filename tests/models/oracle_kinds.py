"""The kinds of attention and states, as the oracle knows them, and what a request holds in a group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from oracle_checkpoints import Lineage
from oracle_pool import NULL_PAGE, PageIds, Ranking
from oracle_tenants import NOBODY, Holder


def cdiv(dividend: int, divisor: int) -> int:
    """Divide, rounding up."""
    return -(-dividend // divisor)


def leading_run(hits: Sequence[bool]) -> int:
    """Count the hits before the first miss."""
    return next((index for index, hit in enumerate(hits) if not hit), len(hits))


@dataclass(frozen=True)
class Full:
    """Full attention: every page is kept; a hit is a leading run."""

    page_size: int

    def num_required_pages(self, num_tokens: int) -> int:
        return cdiv(num_tokens, self.page_size)

    @property
    def hit_size(self) -> int:
        """The tokens of one place in the prefix index."""
        return self.page_size

    def num_full_pages(self, num_tokens: int) -> int:
        return num_tokens // self.page_size

    def num_places(self, num_tokens: int) -> int:
        """Return how many places in the prefix index end within the tokens."""
        return num_tokens // self.hit_size

    def first_useful_page(self, num_computed_tokens: int, num_cached_pages: int) -> int:
        return 0

    def num_prompt_pages(self, held: HeldPages) -> int:
        """Return how many leading pages are never given back."""
        return 0

    def lacks_page(self, held: HeldPages, num_tokens: int, num_computed_tokens: int) -> bool:
        """Whether tokens from there on attend to, or are written to, one of the pages of so many tokens that was given back."""
        first = max(self.num_prompt_pages(held), self.first_useful_page(num_computed_tokens, 0))
        return NULL_PAGE in held.pages[first : self.num_required_pages(num_tokens)]

    def first_hit_page(self, length: int, eagle: bool) -> int:
        return 0

    def longest(self, hits: Sequence[bool], max_length: int, eagle: bool) -> int:
        """Return the length in tokens of the longest hit of at most `max_length` tokens."""
        return max(0, self.confirmed(hits, max_length, eagle) - eagle * self.page_size)

    def confirmed(self, hits: Sequence[bool], max_length: int, eagle: bool) -> int:
        """Return how much of a hit of `max_length` tokens remains, without eagle's page."""
        return leading_run(hits[: max_length // self.page_size]) * self.page_size


@dataclass(frozen=True)
class Sliding(Full):
    """Sliding window: pages wholly before the window are dropped; a hit is a run that covers the window."""

    window: int

    def first_useful_page(self, num_computed_tokens: int, num_cached_pages: int) -> int:
        return max(0, (num_computed_tokens - self.window + 1) // self.page_size)

    def first_hit_page(self, length: int, eagle: bool) -> int:
        return max(0, length // self.page_size - self._kept_run(eagle))

    def longest(self, hits: Sequence[bool], max_length: int, eagle: bool) -> int:
        length = self._end_of_last_run(hits, max_length, self._kept_run(eagle) + eagle)
        return max(0, length - eagle * self.page_size)

    def confirmed(self, hits: Sequence[bool], max_length: int, eagle: bool) -> int:
        return self._end_of_last_run(hits, max_length, self._kept_run(eagle))

    def _kept_run(self, eagle: bool) -> int:
        """Return the number of pages in a hit; the one that eagle recomputes may cover a small window."""
        return max(1 - eagle, cdiv(self.window - 1, self.page_size))

    def _end_of_last_run(self, hits: Sequence[bool], max_length: int, run: int) -> int:
        num_pages = max_length // self.page_size
        for end in range(num_pages, run - 1, -1):
            if all(hits[end - run : end]):
                return end * self.page_size
        return leading_run(hits[:num_pages]) * self.page_size


@dataclass(frozen=True)
class Reference(Full):
    """Reference window: the prompt is always seen, and of the answer what is in the window. Pages between are dropped, and only
    prompts hit, in any group.
    """

    window: int

    def first_useful_page(self, num_computed_tokens: int, num_cached_pages: int) -> int:
        return max(0, (num_computed_tokens - self.window + 1) // self.page_size)

    def num_prompt_pages(self, held: HeldPages) -> int:
        return cdiv(held.num_prompt_tokens, self.page_size)


@dataclass(frozen=True)
class Chunked(Full):
    """Chunked local attention: pages of earlier chunks are dropped and count as hit."""

    chunk: int

    def first_useful_page(self, num_computed_tokens: int, num_cached_pages: int) -> int:
        first = self.first_hit_page(num_computed_tokens, False)
        return min(first, num_cached_pages - 1) if num_cached_pages else first

    def first_hit_page(self, length: int, eagle: bool) -> int:
        return length // self.chunk * self.chunk // self.page_size

    def confirmed(self, hits: Sequence[bool], max_length: int, eagle: bool) -> int:
        first = self.first_hit_page(max_length, eagle)
        return (first + leading_run(hits[first : max_length // self.page_size])) * self.page_size


@dataclass(frozen=True)
class Mamba(Full):
    """A recurrent state: one working page a request, never shared. With an interval in tokens, what it is after some of its
    multiples, where requests resume, is kept in a page of its own, a checkpoint; a hit is one checkpoint.
    """

    interval: int | None = None

    @property
    def hit_size(self) -> int:
        return self.interval or self.page_size

    def num_required_pages(self, num_tokens: int) -> int:
        return min(1, num_tokens)

    def num_full_pages(self, num_tokens: int) -> int:
        return 0

    def num_places(self, num_tokens: int) -> int:
        return 0 if self.interval is None else num_tokens // self.interval

    def first_hit_page(self, length: int, eagle: bool) -> int:
        return max(0, self.num_places(length) - 1)

    def longest(self, hits: Sequence[bool], max_length: int, eagle: bool) -> int:
        return self.confirmed(hits, max_length, eagle)

    def confirmed(self, hits: Sequence[bool], max_length: int, eagle: bool) -> int:
        """Return the length of the last checkpoint; eagle drops none."""
        ends = range(self.num_places(max_length), 0, -1)
        return next((end for end in ends if hits[end - 1]), 0) * self.hit_size


@dataclass(frozen=True)
class Ring(Mamba):
    """A ring of the last `page_size` tokens, which is blank at multiples of a period: hits do not ask for it."""

    period: int = 1


def is_recurrent(kind: Full) -> bool:
    """Whether a kind is a state that cannot go back, and that hits ask for."""
    return isinstance(kind, Mamba) and not isinstance(kind, Ring)


def is_leading(kind: Full) -> bool:
    """Whether any leading run of a kind's pages hits."""
    return type(kind) in (Full, Reference)


Kind = Full | Sliding | Reference | Chunked | Mamba


def kind_of(spec: Any) -> Kind:
    """Return the kind of attention that a spec of the package or the engine describes."""
    match type(spec).__name__:
        case "FullAttentionSpec":
            return Full(spec.page_size)
        case "SlidingWindowSpec":
            return Sliding(spec.page_size, spec.sliding_window)
        case "ReferenceWindowSpec":
            return Reference(spec.page_size, spec.sliding_window)
        case "ChunkedLocalAttentionSpec":
            return Chunked(spec.page_size, spec.attention_chunk_size)
        case "MambaSpec":
            interval = getattr(spec, "checkpoint_interval", None)
            spacing = None if interval is None else 64 if interval == "auto" else math.gcd(interval, 64)
            return Mamba(spec.page_size, spacing)
        case "RingSpec":
            return Ring(spec.page_size, None, spec.period)
    raise TypeError(f"unknown spec {spec!r}")


def group_ids_by_kind(kinds: Sequence[Kind]) -> dict[Kind, list[int]]:
    """Group the groups that hits ask for, equal ones, or those that hit leading pages of one size: the latter first, then in
    order of first appearance.
    """
    classes: dict[Kind, list[int]] = {}
    for group_id, kind in enumerate(kinds):
        if isinstance(kind, Ring):
            continue
        classes.setdefault(Full(kind.page_size) if is_leading(kind) else kind, []).append(group_id)
    return dict(sorted(classes.items(), key=lambda item: not is_leading(item[0])))


@dataclass
class HeldPages:
    """What a request holds in one group."""

    pages: PageIds = field(default_factory=list)
    num_cached_pages: int = 0
    num_hit_pages: int = 0
    ranking: Ranking = field(default_factory=Ranking)
    load_number: int = 0  # of the last list by which hits of the request were loaded
    transfer_number: int = 0  # of the last list that may have a transfer of its pages
    holder: Holder = NOBODY
    lineage: Lineage = field(default_factory=Lineage)
    num_prompt_tokens: int = 0  # of the request
    num_once_cached_tokens: int = 0  # of the request, in any group, before it was set back
    num_written: int = 0  # checkpoints up to the last one that was written and cached, or found cached

    def go_back(self, num_full_pages: int) -> None:
        """Let pages from there on be entered, and ranked, again."""
        self.num_cached_pages = min(self.num_cached_pages, num_full_pages)
        self.num_hit_pages = min(self.num_hit_pages, num_full_pages)
        self.ranking.num_ranked = min(self.ranking.num_ranked, num_full_pages)
