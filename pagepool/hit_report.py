"""Why a prompt does not hit: what became of the page at which its hit ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from pagepool._core import RequestHashes, find_misses, has_entry
from pagepool.arguments import read_count
from pagepool.errors import count_of
from pagepool.hashing import RequestExtraKeys

if TYPE_CHECKING:
    from pagepool.request import Request
    from pagepool.request_registry import RequestRegistry

__all__ = ["GroupHit", "HitReport", "MissCause"]


class MissCause(StrEnum):
    """Why a hit ends where it does. docs/explain.md says what to do about each."""

    COMPLETE = "complete"
    """Nothing is missing: only the last token, and what is behind the last full page, is computed."""
    FOLLOWS = "follows"
    """Of a group with windows or states: nothing of it is missing where the hit of full attention ends."""
    NO_FULL_PAGE = "no full page"
    """The prompt is too short: a hit needs a full page, and one token or the lookahead behind it."""
    NEVER_COMPUTED = "never computed"
    """The page was not computed here, its step has not ended yet, or it is not known any more."""
    EVICTED = "evicted"
    """The page was evicted from a pool, or from the host tier."""
    DROPPED = "dropped"
    """The page lost its entry: its step or transfer failed, its tokens were cut, or `PagePool.evict_pages` named it."""
    RESET = "reset"
    """`CacheManager.reset_prefix_cache` dropped all entries."""
    WINDOW_GONE = "window gone"
    """The window or chunk before this place was not kept, though its tokens were computed."""
    NO_STATE = "no state"
    """No state was kept at this place, or it was replaced by a later one of its run."""
    OTHER_KEYS = "other keys"
    """A page with equal tokens is cached for another salt, adapter, medium or embedding."""
    OTHER_SHARD = "other shard"
    """Another data-parallel shard has the page."""
    BEING_SAVED = "being saved"
    """The page is on its way to the host tier: it hits again after `CacheManager.complete`."""
    NO_ROOM_TO_LOAD = "no room to load"
    """The host tier has the pages, and the pool too few free pages for their loads."""
    STORE_NOT_ASKED = "store not asked"
    """The store was not asked for the pages of this prompt: `StoreTier.fetch` was not called, or it did not look them up."""
    STORE_LOADING = "store loading"
    """The pages are on their way from the store."""
    STORE_LATE = "store late"
    """The pages were on their way from the store when the request did not wait any longer."""
    STORE_SLOWER = "store slower"
    """The store has the pages, and loading them would have taken longer than computing them, or half of the tier."""
    STORE_FAILED = "store failed"
    """The store raised, did not answer, or lost or damaged the pages."""
    UNCACHED = "uncached"
    """The prompt hits nothing on purpose: ``detail`` says why."""


ENDS = frozenset({MissCause.COMPLETE, MissCause.FOLLOWS, MissCause.NO_FULL_PAGE})
LEFT = frozenset({MissCause.EVICTED, MissCause.DROPPED, MissCause.RESET})

KEY_NAMES = {"lora": "adapter", "salt": "salt", "cache_salt": "salt", "cross": "medium", "prompt_embeds": "embedding"}
"""What each key of a request as a whole stands for; all other keys stand for media in the prompt."""

CAUSES = {
    "cached": MissCause.COMPLETE,
    "follows": MissCause.FOLLOWS,
    "never computed": MissCause.NEVER_COMPUTED,
    "left": MissCause.WINDOW_GONE,
    "evicted": MissCause.EVICTED,
    "dropped": MissCause.DROPPED,
    "reset": MissCause.RESET,
    "other shard": MissCause.OTHER_SHARD,
    "being saved": MissCause.BEING_SAVED,
    "being filled": MissCause.STORE_LOADING,
}
"""The cause for each fate of a page in the core."""

SENTENCES = {
    MissCause.COMPLETE: "the rest is always computed: the last token, and what is behind the last full page",
    MissCause.FOLLOWS: "nothing of this group is missing where the hit of full attention ends",
    MissCause.NO_FULL_PAGE: "the prompt is too short for a hit: it needs a full page, and at least one token behind it",
    MissCause.NEVER_COMPUTED: "{page} was not computed here, or is not known any more{advice}",
    MissCause.EVICTED: "{page} was evicted {ago} from {where}; a larger pool, a HostTier, expect or a lease keeps it longer",
    MissCause.DROPPED: "{page} lost its entry {ago} in {where}, since a step or transfer failed, its tokens were cut, or "
    "evict_pages named it; look for failed steps",
    MissCause.RESET: "{page} left {where} with reset_prefix_cache {ago}; prompts hit again once they were computed again",
    MissCause.WINDOW_GONE: "the window before {page} was not kept; name the place in resume_at, or set "
    "Retention(window_interval=...)",
    MissCause.NO_STATE: "no state was kept at token {token}, the nearest is at token {num_hit_tokens}; name the place in "
    "resume_at, or set a smaller checkpoint_interval",
    MissCause.OTHER_KEYS: "{page} is cached with another {detail}; requests share pages only with equal ones",
    MissCause.OTHER_SHARD: "{page} is cached in another shard; send the request to that rank",
    MissCause.BEING_SAVED: "{page} is on its way to the host tier; it hits once complete was called for its moves",
    MissCause.NO_ROOM_TO_LOAD: "the host tier has the pages from token {token} on, and {where} has too few free pages to load "
    "them; wait, or admit fewer requests",
    MissCause.STORE_NOT_ASKED: "the store was not asked for {page}; call StoreTier.fetch when the request is queued",
    MissCause.STORE_LOADING: "{page} is on its way from the store; admit the request once StoreTier.is_ready is true",
    MissCause.STORE_LATE: "{page} was still on its way from the store; raise deadline_ms, or fetch earlier",
    MissCause.STORE_SLOWER: "the store has {page}, but computing it was expected to take less time than loading it",
    MissCause.STORE_FAILED: "the store failed to give {page}; look at num_errors, num_missing_pages and the log",
    MissCause.UNCACHED: "nothing hits on purpose, since {detail}",
}


@dataclass(frozen=True, slots=True)
class GroupHit:
    """How far one cache group hits, and why no further."""

    group: int
    """Its number in ``kv_cache_groups``; groups of cross-attention are behind the others, and hit as a whole or not at all."""
    num_hit_tokens: int
    """Tokens that the group hits: of windows and states, at most those that full attention hits."""
    cause: MissCause
    token: int
    """Where the missing page begins, or where the missing state would be; if nothing is missing, where the hit ends."""
    pool: str
    """Name of the group's pool."""
    seconds: float | None = None
    """Time since the page left, for `EVICTED`, `DROPPED` and `RESET`, to a sixteenth of a second."""
    detail: str = ""
    """What an `EVICTED`, `DROPPED` or `RESET` page left, by which policy; what differs for `OTHER_KEYS`; why `UNCACHED`.
    """

    def tell(self, advice: str = "") -> str:
        """Return the cause in words, and what to do; `advice` ends the sentence for pages that were not computed."""
        return SENTENCES[self.cause].format(
            page=f"the page at token {self.token:,}",
            token=f"{self.token:,}",
            num_hit_tokens=f"{self.num_hit_tokens:,}",
            ago="at an unknown time" if self.seconds is None else f"{self.seconds:.1f} seconds ago",
            where=self.detail or f"the pool {self.pool!r}",
            detail=self.detail,
            advice=advice,
        )


@dataclass(frozen=True, slots=True)
class HitReport:
    """Why a prompt hits no more tokens than it does: see `CacheManager.explain`. `str` is one sentence that says what to do."""

    num_hit_tokens: int
    """Tokens that hit, those in the host tier included, if all loads have room."""
    num_queried_tokens: int
    num_tier_tokens: int
    """Tokens of the hit that are loaded from the host tier."""
    end: GroupHit
    """Where the whole hit ends: the group that hits the least, or what concerns the request as a whole."""
    groups: tuple[GroupHit, ...]
    """Each group of the model, then those of cross-attention; none if the prompt is uncached on purpose."""
    is_enabled: bool = True
    """Whether `CacheManager.enable_explanations` was called: without it `EVICTED`, `DROPPED`, `RESET` and most `OTHER_KEYS` are
    `NEVER_COMPUTED`.
    """

    @property
    def cause(self) -> MissCause:
        """Why the whole hit ends."""
        return self.end.cause

    @property
    def reason(self) -> str:
        """The cause in words, and what to do."""
        return self.end.tell("" if self.is_enabled else "; enable_explanations tells evicted pages from those")

    def __str__(self) -> str:
        """Return the hit and the reason in one sentence."""
        return f"{self.num_hit_tokens:,} of {count_of(self.num_queried_tokens, 'token')} hit: {self.reason}"


def explain_hit(
    registry: RequestRegistry,
    request: Request,
    ids: tuple[int, int | None] = (0, None),
    reason: str = "",
) -> HitReport:
    """Return why a request hits no more in a range of page ids. A `reason` says why it hits nothing on purpose. O(tokens), and
    O(pages x groups).
    """
    query, explains = registry.read_query(request), registry.recent_keys is not None
    if query is None and not reason:
        reason = "prompt_logprobs are asked for" if registry.page_pool.enable_caching else "prefix caching is off"
    num_queried = 0 if reason or query is None else query[0]
    hashes = registry.hash_alone(request, num_queried)
    if reason:
        end = GroupHit(0, 0, MissCause.UNCACHED, 0, registry.store.bank_names[0], detail=reason)
        return HitReport(0, read_count(request, "num_tokens"), 0, end, (), explains)
    found = find_misses(registry.store, registry.rules.groups, hashes.chain, num_queried, ids)
    groups = _list_groups(registry, found, 0)
    end = _find_end(registry, found, groups)
    if end.cause is MissCause.NEVER_COMPUTED:
        end = _look_elsewhere(registry, request, hashes, found["groups"][end.group], end)
    if end.cause in (MissCause.NEVER_COMPUTED, MissCause.EVICTED) and registry.find_fetch is not None:
        told = registry.find_fetch(hashes.chain)
        end = end if told is None else replace(end, cause=MissCause(told), seconds=None, detail="")
    groups = [end if each.group == end.group and each.cause not in ENDS else each for each in groups]
    media = None if registry.media is None else registry.media.name(request)
    if media is not None:
        own_groups, chain, num_slots = media
        groups += _list_groups(registry, find_misses(registry.store, own_groups, chain, num_slots + 1, ids), len(groups))
    num_hits = found["num_hit_tokens"]
    return HitReport(num_hits, num_queried, num_hits - found["num_pool_tokens"], end, tuple(groups), explains)


def _list_groups(registry: RequestRegistry, found: dict[str, Any], first: int) -> list[GroupHit]:
    """Return the hits of groups that are numbered from `first` on."""
    hits = [_read_miss(registry, first + i, miss) for i, miss in enumerate(found["groups"])]
    if found["num_most_tokens"]:
        return hits
    return [replace(hit, cause=MissCause.NO_FULL_PAGE) if hit.cause in ENDS else hit for hit in hits]


def _read_miss(registry: RequestRegistry, group: int, miss: dict[str, Any]) -> GroupHit:
    cause, pool = CAUSES[miss["fate"]], registry.store.bank_names[miss["bank"]]
    if cause is MissCause.WINDOW_GONE and miss["is_state"]:
        cause = MissCause.NO_STATE
    hit = GroupHit(group, miss["num_hit_tokens"], cause, miss["token"], pool)
    if miss["is_uncached"]:
        return replace(hit, cause=MissCause.UNCACHED, detail="the model's states are not kept (checkpoint_interval)")
    if cause in LEFT:
        policy = "lru" if miss["bank"] or miss["was_in_tier"] else registry.store.eviction
        where = "the host tier" if miss["was_in_tier"] else f"the pool {pool!r}"
        return replace(hit, seconds=miss["seconds"], detail=f"{where} ({policy})")
    return hit


def _find_end(registry: RequestRegistry, found: dict[str, Any], groups: Sequence[GroupHit]) -> GroupHit:
    """Return where the whole hit ends: the group that hits the least."""
    missing = [group for group in groups if group.cause not in ENDS]
    end = min(missing or groups, key=lambda group: group.num_hit_tokens)
    if found["short_bank"] is not None:
        pool = registry.store.bank_names[found["short_bank"]]
        return replace(end, cause=MissCause.NO_ROOM_TO_LOAD, token=found["num_pool_tokens"], pool=pool, seconds=None, detail="")
    return end


def _look_elsewhere(
    registry: RequestRegistry, request: Request, hashes: RequestHashes, miss: dict[str, Any], end: GroupHit
) -> GroupHit:
    """Return why a page is not known: nobody can share it, or equal tokens are cached under other keys. O(kept keys)."""
    own, stride = hashes.extra_keys, miss["stride"]
    if own is not None and own.has_nonce:
        return replace(end, cause=MissCause.UNCACHED, detail="nothing names its media, embeddings or adapter")
    others = [None, *([] if registry.recent_keys is None else registry.recent_keys.list_keys())]
    start, stop = miss["place"] * stride, (miss["place"] + 1) * stride
    scratch = registry.hash_alone(request, start * registry.rules.hash_page_size)
    for keys in others:
        if keys == own:
            continue
        scratch.cut(start)
        scratch.extra_keys = keys
        registry.hasher.extend(scratch, request, stop)
        if has_entry(registry.store, scratch.chain, stop - 1, end.group):
            return replace(end, cause=MissCause.OTHER_KEYS, detail=_name_difference(own, keys))
    return end


def _name_difference(own: RequestExtraKeys | None, other: RequestExtraKeys | None) -> str:
    """Name what differs in the keys of two requests."""
    own_keys, other_keys = ({*()} if keys is None else {*keys.request_keys} for keys in (own, other))
    names = sorted({KEY_NAMES[key[0]] for key in own_keys ^ other_keys})
    return " and ".join(names) or "medium"
