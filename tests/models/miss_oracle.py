"""An oracle that knows why prompts miss: it records what was cached, under which keys, and which call took it away.

It sees which keys pool and tier have, from their records, before and after each call. What a key stands for, how far a prompt
hits, and why it ends there follow from the oracle's own record of prompts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

from twin_engine import Feature

from pagepool import CacheManager, EngineRequest, MissCause
from pagepool._core import copy_records
from pagepool.group_rules import kind_of

KEY_BITS = 128
FLAGS = 7 << 28
"""Flags in the group of a page record."""

FULL, WINDOW, CHUNK, STATE = "FullAttention", "SlidingWindow", "ChunkedLocalAttention", "Mamba"


class Prompt(NamedTuple):
    """Tokens, and the keys under which they are cached."""

    tokens: tuple[int, ...]
    salt: str | None = None
    adapter: int | None = None
    media: tuple[tuple[int, int, str], ...] = ()  # offset, length and name of each
    is_nameless: bool = False  # it has an image that nothing names
    asks_logprobs: bool = False

    def up_to(self, stop: int) -> Prompt:
        """Return what decides the key of a page that ends there."""
        media = tuple(each for each in self.media if each[0] < stop)
        return Prompt(self.tokens[:stop], self.salt, self.adapter, media, self.is_nameless)


class Place(NamedTuple):
    """A page or state of a prompt in a group."""

    group: int
    content: Prompt
    owner: str  # request of a nameless image, whose pages nobody else shares


@dataclass
class Removal:
    """Why and when a key left the index, and how many had left before it."""

    cause: MissCause
    time: float
    number: int


class Answer(NamedTuple):
    """The right cause; whether the system must know it, and the time since the page left."""

    cause: MissCause
    is_strict: bool = True
    seconds: float | None = None


@dataclass
class Records:
    """The pages of a pool or tier, by key and group: their ids, and the most references of one."""

    pages: dict[tuple[int, int], tuple[list[int], int]] = field(default_factory=dict)

    @classmethod
    def of(cls, manager: CacheManager, of_tier: bool) -> Records:
        found: dict[tuple[int, int], tuple[list[int], int]] = {}
        records = copy_records(manager.registry.store, "pages", of_tier)
        pages = records["pages"][: records["num_pages"]]
        cached = pages["group"] >= 0
        ids = cached.nonzero()[0].tolist()
        rows = zip(*(pages[name][cached].tolist() for name in ("key_lo", "key_hi", "group", "ref_cnt")), strict=True)
        for page_id, (low, high, group, num_refs) in zip(ids, rows, strict=True):
            known, most = found.setdefault((low | high << 64, group & ~FLAGS), ([], 0))
            found[low | high << 64, group & ~FLAGS] = ([*known, page_id], max(most, num_refs))
        return cls(found)


class MissOracle:
    """Watches the calls of a manager with one group of each kind at most, and all pages of one size."""

    def __init__(self, manager: CacheManager, page_size: int, lookahead: int = 0) -> None:
        self.manager, self.page_size, self.lookahead = manager, page_size, lookahead
        self.specs = [group.kv_cache_spec for group in manager.kv_cache_groups]
        self.kinds = [kind_of(spec) for spec in self.specs]
        self.multiple = manager.registry.rules.hit_tokens
        self.pool, self.tier = Records(), Records()
        self.places: dict[tuple[int, int], Place] = {}
        self.removals: dict[Place, Removal] = {}
        self.saving: dict[Place, int] = {}  # the list of moves that saves a page; 0: it is due
        self.computed: set[Place] = set()
        self.num_removals, self.now = 0, 1.0
        self.num_pages = manager.num_pages

    # Places and keys.

    def size_of(self, group: int) -> int:
        """Return the tokens of a page, or between states."""
        return self.multiple if self.kinds[group] == STATE else self.page_size

    def place(self, prompt: Prompt, group: int, index: int, owner: str) -> Place:
        stop = (index + 1) * self.size_of(group) + self.lookahead
        return Place(group, prompt.up_to(stop), owner if prompt.is_nameless else "")

    def learn(self, request: EngineRequest, prompt: Prompt) -> None:
        """Learn the keys of a prompt's pages."""
        chain = self.manager.registry.hash_alone(request, len(prompt.tokens)).chain
        for group in range(len(self.kinds)):
            stride = self.size_of(group) // self.page_size
            for index in range(len(chain) // stride):
                key = chain[(index + 1) * stride - 1] & ((1 << KEY_BITS) - 1)
                place = self.place(prompt, group, index, request.request_id)
                known = self.places.setdefault((key, group), place)
                assert known == place, "two contents have one key"

    # Calls.

    def observe(self, call: str, num_computed: int | None = None) -> None:
        """Record what a call did: `num_computed` are the tokens of a failed request that were computed."""
        pool, tier = Records.of(self.manager, False), Records.of(self.manager, True) if self.manager.host_tier else Records()
        for key in self.pool.pages.keys() - pool.pages.keys():
            if key not in tier.pages:
                self.remove(self.places[key], self.name_cause(call, self.places[key], self.pool.pages[key][1], num_computed))
        for key in self.tier.pages.keys() - tier.pages.keys():
            if key not in pool.pages:
                causes = {"reset": MissCause.RESET, "drop": MissCause.DROPPED}
                self.remove(self.places[key], causes.get(call, MissCause.EVICTED))
        if call == "reset":
            self.saving.clear()
            for place in self.removals:
                self.remove(place, MissCause.RESET, is_new=False)
        self.pool, self.tier = pool, tier
        self.computed |= {self.places[key] for key in pool.pages}

    def name_cause(self, call: str, place: Place, num_refs: int, num_computed: int | None) -> MissCause:
        """Return why a page lost its entry in a call: free pages are evicted, others are behind windows or wrong."""
        if call in ("reset", "drop"):
            return MissCause.RESET if call == "reset" else MissCause.DROPPED
        if num_computed is not None and len(place.content.tokens) - self.lookahead > num_computed:
            return MissCause.DROPPED
        return MissCause.EVICTED if num_refs == 0 else MissCause.WINDOW_GONE

    def remove(self, place: Place, cause: MissCause, is_new: bool = True) -> None:
        self.num_removals += is_new
        number = self.num_removals if is_new else self.removals[place].number
        self.removals[place] = Removal(cause, self.now, number)
        self.saving.pop(place, None)
        if cause is MissCause.EVICTED and self.manager.host_tier is not None and not self.is_in_tier(place):
            self.saving[place] = 0

    def is_in_tier(self, place: Place) -> bool:
        """Whether the tier had a page before the call: it was evicted there, and is not saved again."""
        return any(self.places[key] == place for key in self.tier.pages)

    def take_saves(self, number: int) -> None:
        """Note that the saves that are due were taken under a number; 0: there were none."""
        for place, known in [*self.saving.items()]:
            if known == 0 and number:
                self.saving[place] = number
            elif known == 0:
                del self.saving[place]

    def end_saves(self, number: int) -> None:
        self.saving = {place: known for place, known in self.saving.items() if known != number}

    # Answers.

    def is_here(self, prompt: Prompt, group: int, index: int, keys: list[int], ids: range | None) -> bool:
        """Whether a page hits."""
        key = self.key_at(group, index, keys)
        if key in self.tier.pages:
            return True
        return any(ids is None or page_id in ids for page_id in self.pool.pages.get(key, ([], 0))[0])

    def key_at(self, group: int, index: int, keys: list[int]) -> tuple[int, int]:
        stride = self.size_of(group) // self.page_size
        return keys[(index + 1) * stride - 1], group

    def needed(self, group: int, num_tokens: int) -> range:
        """Return the places that a request needs which resumes behind so many tokens."""
        kind, spec, stop = self.kinds[group], self.specs[group], num_tokens // self.size_of(group)
        if kind == WINDOW:
            num_read = spec.sliding_window - 1
            first = max(0, num_tokens - num_read) // self.page_size if num_read else stop
            return range(min(first, max(0, stop - 1)), stop)  # a hit has at least its last page
        if kind == CHUNK:
            size = spec.attention_chunk_size
            return range(num_tokens // size * size // self.page_size, stop)
        return range(stop - 1, stop) if kind == STATE else range(stop)

    def explain(self, request: EngineRequest, prompt: Prompt, ids: range | None) -> Answer:
        """Return the right cause."""
        if prompt.asks_logprobs:
            return Answer(MissCause.UNCACHED)
        chain = self.manager.registry.hash_alone(request, len(prompt.tokens)).chain
        keys = [chain[i] & ((1 << KEY_BITS) - 1) for i in range(len(chain))]
        most = min(len(prompt.tokens) - 1, len(keys) * self.page_size) // self.multiple * self.multiple
        if most <= 0:
            return Answer(MissCause.NO_FULL_PAGE)

        def resumes(group: int, num_tokens: int) -> bool:
            return all(self.is_here(prompt, group, index, keys, ids) for index in self.needed(group, num_tokens))

        ends = [*range(most, 0, -self.multiple), 0]
        groups = range(len(self.kinds))
        num_hits = next(end for end in ends if not end or all(resumes(group, end) for group in groups))
        if num_hits == most:
            return Answer(MissCause.COMPLETE)
        leading = [group for group in groups if self.kinds[group] == FULL]
        limit = next((end for end in ends if not end or all(resumes(group, end) for group in leading)), 0) if leading else most
        if leading and limit == num_hits:
            index = next(i for i in range(len(keys)) if not self.is_here(prompt, leading[0], i, keys, ids))
            return self.explain_page(request, prompt, leading[0], index, keys, ids)
        own = {
            g: next(end for end in ends if end <= limit and (not end or resumes(g, end))) for g in groups if g not in leading
        }
        group = min(own, key=lambda each: own[each])
        if not leading:  # the last place that was computed for certain
            limit = next(
                (end for end in ends if own[group] < end and self.was_computed(request, prompt, group, end)), own[group]
            )
            if limit == own[group]:
                index = own[group] // self.size_of(group)
                while self.is_here(prompt, group, index, keys, ids):
                    index += 1
                return self.explain_page(request, prompt, group, index, keys, ids)
        return self.explain_rest(request, prompt, group, own[group], limit, keys, ids)

    def was_computed(self, request: EngineRequest, prompt: Prompt, group: int, num_tokens: int) -> bool:
        return self.place(prompt, group, num_tokens // self.size_of(group) - 1, request.request_id) in self.computed

    def explain_rest(
        self,
        request: EngineRequest,
        prompt: Prompt,
        group: int,
        own: int,
        limit: int,
        keys: list[int],
        ids: range | None,
    ) -> Answer:
        """Explain a window or state that a request lacks which resumes at the limit."""
        if self.kinds[group] == STATE:
            for index in range(limit // self.multiple - 1, own // self.multiple - 1, -1):
                answer = self.explain_page(request, prompt, group, index, keys, ids)
                if answer.cause not in (
                    MissCause.NEVER_COMPUTED,
                    MissCause.WINDOW_GONE,
                    MissCause.OTHER_KEYS,
                    MissCause.UNCACHED,
                ):
                    return answer
            return Answer(MissCause.NO_STATE)
        missing = [i for i in self.needed(group, limit) if not self.is_here(prompt, group, i, keys, ids)]
        answers = [self.explain_page(request, prompt, group, index, keys, ids) for index in missing]
        gone = (MissCause.NEVER_COMPUTED, MissCause.OTHER_KEYS, MissCause.UNCACHED, MissCause.WINDOW_GONE)
        if any(answer.cause in gone for answer in answers):
            return Answer(MissCause.WINDOW_GONE)
        return answers[-1]._replace(is_strict=all(answer.is_strict for answer in answers))

    def explain_page(
        self, request: EngineRequest, prompt: Prompt, group: int, index: int, keys: list[int], ids: range | None
    ) -> Answer:
        """Explain one missing page."""
        place, key = self.place(prompt, group, index, request.request_id), self.key_at(group, index, keys)
        if key in self.pool.pages:
            return Answer(MissCause.OTHER_SHARD)
        if place in self.saving:
            return Answer(MissCause.BEING_SAVED)
        removal = self.removals.get(place)
        if removal is not None:
            is_strict = self.num_removals - removal.number < self.num_pages // 2
            return Answer(removal.cause, is_strict, self.now - removal.time)
        if prompt.is_nameless:
            return Answer(MissCause.UNCACHED)
        return Answer(MissCause.OTHER_KEYS if self.has_equal_tokens(place) else MissCause.NEVER_COMPUTED)

    def has_equal_tokens(self, place: Place) -> bool:
        """Whether a page is cached with the same tokens, and with other keys from this page on."""
        size, tokens = self.size_of(place.group), place.content.tokens
        start = len(tokens) - self.lookahead - size
        for key in {*self.pool.pages, *self.tier.pages}:
            other = self.places[key]
            if other.group != place.group or other.content.tokens != tokens or other.content.is_nameless:
                continue
            mine, its = (self.keys_before(each.content, start) for each in (place, other))
            if mine == its and other.content != place.content:
                return True
        return False

    def keys_before(self, content: Prompt, start: int) -> Any:
        """Return what decides the keys of the pages before a token; of none, nothing does."""
        return content.up_to(start + self.lookahead)[1:] if start else ()


@dataclass(slots=True)
class NamelessRequest(EngineRequest):
    """A request with an image that nothing names."""

    has_vision: bool = True


def make_request(name: str, prompt: Prompt) -> EngineRequest:
    """Make the request of a prompt."""
    features = [Feature(mm, "image", SimpleNamespace(offset=start, length=n)) for start, n, mm in prompt.media]
    logprobs = SimpleNamespace(prompt_logprobs=1) if prompt.asks_logprobs else None
    make = NamelessRequest if prompt.is_nameless else EngineRequest
    keys: dict[str, Any] = {"cache_salt": prompt.salt, "lora_id": prompt.adapter, "mm_features": features}
    return make(name, list(prompt.tokens), sampling_params=logprobs, **keys)
