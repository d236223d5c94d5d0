"""What runs share: groups, rules, pages, and the index of pages by key. The pool is unlimited."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

STATE_SLACK = 64


class Refused(Exception):
    """A call that is wrong now. Nothing has changed."""


@dataclass(frozen=True)
class Group:
    kind: str = "full"  # full, window, state
    page_size: int = 4
    window: int = 0

    def pages(self, n):
        return min(n, 1) if self.kind == "state" else -(-n // self.page_size)

    def full(self, n):
        return 0 if self.kind == "state" else n // self.page_size

    def first_read(self, n):  # first page that tokens from n on read
        return max(0, n - self.window + 1) // self.page_size if self.kind == "window" else 0

    def run(self):  # pages of a window before a hit
        return max(1, (self.window + self.page_size - 2) // self.page_size)


@dataclass(frozen=True)
class Rules:
    groups: tuple = (Group(),)
    hash_lookahead: int = 0  # L: tokens behind a page in its key
    caches: str = "scheduled"
    max_steps_ahead: int = 0
    interval: int = 8  # of checkpoints; hits of states end at multiples of `multiple`
    max_len: int = 128

    @property
    def multiple(self):
        sizes = [g.page_size for g in self.groups if g.kind != "state"]
        step = gcd(self.interval, 64) if any(g.kind == "state" for g in self.groups) else 1
        for size in sizes:
            step = step * size // gcd(step, size)
        return step

    @property
    def has_state(self):
        return any(g.kind == "state" for g in self.groups)


@dataclass(eq=False)
class Page:
    refs: int = 1
    key: object = None


class Index:
    """Pages by key; several pages may have one. Shared by runs."""

    def __init__(self, rules):
        self.rules, self.pages, self.all = rules, {}, set()
        self.made = {}  # by step in flight: entries of pages and states that it fills; kept until the step ends
        self.last_ended = 0  # number of the latest step that has run for a row, by a settled, later or told step

    def take(self):
        page = Page()
        self.all.add(page)
        return page

    def give_back(self, page):
        if page is not None:
            assert page.refs > 0
            page.refs -= 1

    def enter(self, page, g, key, step, stay):
        assert page.key is None
        page.key = g, key
        if step is not None:
            self.made.setdefault(step, []).append((page, page.key, stay))
        self.pages.setdefault(page.key, []).append(page)

    def drop(self, page):
        if page is not None and page.key is not None:
            self.pages[page.key].remove(page)
            page.key = None

    def find(self, g, tokens, end):
        """The page of group g that ends at token `end`, or the state there, if its lookahead is known."""
        if end + self.rules.hash_lookahead > len(tokens):
            return None
        found = self.pages.get((g, tuple(tokens[: end + self.rules.hash_lookahead])))
        held = [page for page in found or () if page.refs and self.rules.caches == "computed"]  # a held page first
        return (held or found)[0] if found else None

    def hit(self, tokens):
        """Return (tokens that hit, junction)."""
        groups, most = self.rules.groups, len(tokens) - 1
        for g, group in enumerate(groups):
            if group.kind == "full":
                n = 0
                while (n + 1) * group.page_size <= most and self.find(g, tokens, (n + 1) * group.page_size):
                    n += 1
                most = min(most, n * group.page_size)
        step = self.rules.multiple
        full = n = most // step * step
        while n and not all(self._serves(g, group, tokens, n) for g, group in enumerate(groups)):
            n -= step
        return n, full if full > n else 0

    def _serves(self, g, group, tokens, n):
        if group.kind == "state":
            return self.find(g, tokens, n) is not None
        if group.kind == "window":
            stop = n // group.page_size
            return all(self.find(g, tokens, (i + 1) * group.page_size) for i in range(max(0, stop - group.run()), stop))
        return True
