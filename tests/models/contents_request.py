"""A request of the simulation, with the engine's data about it."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from contents_device import NOTHING, Histories
from ring_model import Rings
from twin_engine import WAITING, Feature

_SERIALS = itertools.count()


@dataclass(eq=False)
class Write:
    """A page for the state of a job after some of its tokens, which are known once moves are taken."""

    page: int
    job: Job | None
    group: int = -1
    num_tokens: int = 0
    is_entered: bool = False  # cached, unless an equal state was


@dataclass(eq=False, repr=False)
class Job:
    """The attributes that a manager reads, the engine's own data, and the request's pages as returned to the engine."""

    request_id: str
    all_token_ids: list[int]
    num_final_tokens: int
    histories: Histories
    sampling_params: Any = None
    mm_features: tuple[Feature, ...] = ()
    has_vision: bool = False
    prompt_embeds: Any = None  # [tokens, 1]
    lora_id: Any = None
    cache_salt: str | None = None
    resume_at: Sequence[int] = ()
    session_id: str | None = None
    tenant: str | None = None
    num_prompt_tokens: int | None = None
    num_computed_tokens: int = 0
    status: int = WAITING

    front: Any = None  # the front in which it runs
    row: int = -1
    prompt_end: int = sys.maxsize  # with a reference window: tokens behind it are of the answer
    num_known_tokens: int = 0  # tokens that a batch knows
    num_settled_tokens: int = 0  # computed tokens whose step is settled in a batch, or has run before the last one
    num_drafted_tokens: int = 0  # tokens for which a drafter with lookahead has its values
    dp_shard: int | None = None
    pages: list[list[int]] = field(default_factory=list)  # by group
    num_cached_pages: list[int] = field(default_factory=list)  # by group: entered, hit, or passed over
    stay: int = 0  # number of its current admission
    num_hit_tokens: int = 0  # of the computed tokens
    loading: Any = None  # tokens that a transfer brings
    forked_lists: dict[int, int] = field(default_factory=dict)  # by group: the list of copies into its pages as it was forked
    awaited_copies: int = 0  # the last list of copies with one into its pages
    last_taken: int = 0  # lists of copies that were taken when it got its last page
    boundaries: Sequence[range] = ()  # numbers of tokens at which others may resume, since its admission
    load_number: int = 0  # the last list of transfers that loads what it has hit
    writes: list[Write] = field(default_factory=list)  # taken, and neither cached nor dropped
    rings: Rings = field(default_factory=Rings)
    ends: Collection[int] = ()  # numbers of tokens behind which its states may be written; junctions are in the prompt
    num_admitted_tokens: int = 0  # tokens at its current admission

    def __post_init__(self) -> None:
        self.renew()

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def has_contents(self) -> bool:
        """Whether it has images without names, or embeddings."""
        return self.has_vision or self.prompt_embeds is not None

    def __repr__(self) -> str:
        return f"{self.request_id}({self.num_computed_tokens} of {self.num_tokens}, row {self.row})"

    def renew(self) -> None:
        """If it has images without names, share nothing with its earlier runs."""
        self._serial = next(_SERIALS)
        self._known: list[int] = []

    def share_serial(self, job: Job) -> None:
        """If it has images without names, share them with another job."""
        self._serial = job._serial

    def list_histories(self, stop: int) -> list[int]:
        """Return the histories of the first tokens."""
        for position in range(len(self._known), stop):
            parent = self._known[-1] if position else NOTHING
            self._known.append(self.histories.follow(parent, self._inputs(position, self.all_token_ids[position])))
        return self._known[:stop]

    def list_values(self, histories: Sequence[int], start: int, stop: int) -> list[int]:
        """Return what is computed for tokens with these histories: those of an answer do not see all that is before them."""
        values = list(histories[start:stop])
        for i in range(max(0, self.prompt_end - start), len(values)):
            values[i] = self.histories.follow(values[i], ("of an answer", self.prompt_end))
        return values

    def list_draft_histories(self, token_ids: Sequence[int]) -> list[int]:
        """Return the histories of tokens that may follow."""
        numbers = self.list_histories(self.num_tokens)
        for position, token_id in enumerate(token_ids, self.num_tokens):
            numbers.append(self.histories.follow(numbers[-1], self._inputs(position, token_id)))
        return numbers[self.num_tokens :]

    def _inputs(self, position: int, token_id: int) -> Any:
        """Return the inputs at a position besides the token."""
        seen = [self._part_of(feature, position) for feature in self.mm_features]
        inputs: tuple[Any, ...] = (token_id, *[part for part in seen if part])
        if self.prompt_embeds is not None and position < len(self.prompt_embeds):
            inputs += ("embedding", float(self.prompt_embeds[position, 0]))
        if position == 0:
            inputs += ("salt", self.cache_salt, type(self.lora_id).__name__, self.lora_id)
            inputs += (self._serial,) if self.has_vision and not self.mm_features else ()
        return inputs

    @staticmethod
    def _part_of(feature: Feature, position: int) -> tuple[Any, ...] | None:
        """Return the part of an image at a position. An image without a place is at token 0."""
        place = feature.placeholder_range
        offset, length = (place.offset, place.length) if place else (0, 1)
        if not offset <= position < offset + length:
            return None
        return feature.modality, feature.mm_hash, length, position - offset
