"""The rules of a model's cache groups: the pages they need, and the possible lengths of a hit."""

from collections.abc import Iterable, Sequence
from math import gcd, lcm
from typing import Any, NamedTuple

from pagepool._core import CacheGroups, PageRules
from pagepool.arguments import require_int, require_token_counts
from pagepool.errors import ArgumentError
from pagepool.page_pool.pool import Configuration
from pagepool.retention import Retention
from pagepool.specs import (
    CacheGroupSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    ReferenceWindowSpec,
    RingSpec,
    SlidingWindowSpec,
)

SLACK = 64  # default slack: a request can also resume this many tokens before a boundary
CHECKPOINT_STEP = 64  # tokens: kernels of recurrent layers have states at its multiples
INTERVAL_STEP = 2048
MAX_BOUNDARY = 1 << 30
SPECS = [
    spec.__name__
    for spec in (
        FullAttentionSpec,
        SlidingWindowSpec,
        ChunkedLocalAttentionSpec,
        ReferenceWindowSpec,
        MambaSpec,
        RingSpec,
        CrossAttentionSpec,
    )
]
FULL = "FullAttention", "ReferenceWindow"  # kinds that keep all pages of a prompt
STATES = "Mamba", "Ring"  # kinds with one page for any number of tokens

ALL_STAY = Retention(windows="all")


class GroupRules(NamedTuple):
    """The rules of a model's cache groups. The length of a hit is a multiple of all page sizes and of all state intervals."""

    groups: CacheGroups
    """Rules for the core."""
    hash_page_size: int
    """Tokens per hash: the greatest common divisor of the page sizes of groups with attention."""
    max_cached_page_size: int
    """Largest page size of groups with attention."""
    hit_tokens: int
    """Hits are multiples of this many tokens."""
    checkpoint_interval: int | None
    """Tokens between checkpoints of states; None if no states are kept."""
    has_state: bool
    """Whether a group has states, kept or not."""
    has_ring: bool
    """Whether a group is a ring."""
    has_full_attention: bool
    """Whether a group hits leading pages."""
    has_reference_window: bool
    """Whether a group has a reference window, so that the end of a prompt matters."""
    writes_states: bool
    """Whether states are kept, if pages are cached: steps write checkpoints at boundaries."""
    configuration: Configuration
    """Settings by name, except those of hashes. Managers that share cached pages must agree in all of them."""

    def require_resume_at(self, resume_at: Iterable[int], most: int) -> list[int]:
        """Return the token counts in `resume_at`, each at most `most`. Raise ArgumentError if there are any, but the model has
        states that are not kept; also raise the errors of `require_token_counts`.
        """
        counts = require_token_counts("resume_at", resume_at, most)
        if counts and self.has_state and not self.writes_states:
            raise ArgumentError(f"resume_at: got {counts}, allowed for a model with states without checkpoint_interval: none")
        return counts


def make_rules(
    kv_cache_groups: Sequence[CacheGroupSpec],
    use_eagle: bool,
    enable_caching: bool,
    retention: Retention = ALL_STAY,
    banks: Sequence[int] | None = None,
    hash_lookahead: int = 0,
) -> GroupRules:
    """Return the rules of groups. Group i takes pages from bank ``banks[i]``; see `CacheManager` for the rest. Raise
    ArgumentError for values out of range, and for eagle with chunked local attention, which cannot drop a page across chunks.
    """
    specs: list[Any] = [group.kv_cache_spec for group in kv_cache_groups]
    kinds = [kind_of(spec) for spec in specs]
    if use_eagle and enable_caching and "ChunkedLocalAttention" in kinds:
        raise ArgumentError("use_eagle: got True, allowed with chunked local attention and caching: False")
    sizes = [require_int("page_size", spec.page_size, 1) for spec in specs]
    page_sizes = [size for size, kind in zip(sizes, kinds, strict=True) if kind not in STATES]
    intervals = _list_spacings([spec for spec, kind in zip(specs, kinds, strict=True) if kind == "Mamba"])
    hash_page_size = gcd(*(page_sizes or intervals)) or 1
    num_hit_tokens = lcm(*page_sizes, *intervals)
    if enable_caching:
        _check_rings([spec for spec, kind in zip(specs, kinds, strict=True) if kind == "Ring"], specs, num_hit_tokens)
    described = [_describe_group(i, spec, num_hit_tokens, hash_page_size, bool(intervals)) for i, spec in enumerate(specs)]
    rules = [_rules_of(each, spec, num_hit_tokens, use_eagle) for each, spec in zip(described, specs, strict=True)]
    index_ids = [each["index_group_id"] if enable_caching else None for each in described]
    num_hashes = [each["num_hashes_per_page"] for each in described]
    state_interval = find_state_interval(kv_cache_groups) if intervals and enable_caching else None
    is_cached = all(index is not None for index, kind in zip(index_ids, kinds, strict=True) if kind != "Ring")
    boundaries = _find_boundaries(specs, retention, num_hit_tokens, is_cached, state_interval)
    configuration: Configuration = {"num_kv_cache_groups": len(described)}
    for i, each in enumerate(described):
        configuration |= {f"kv_cache_groups[{i}].{name}": each[name] for name in each}
    return GroupRules(
        CacheGroups(
            list(zip(rules, index_ids, num_hashes, strict=True)),
            use_eagle,
            boundaries,
            banks,
            hash_lookahead,
        ),
        hash_page_size,
        max_cached_page_size=max(page_sizes, default=hash_page_size),
        hit_tokens=num_hit_tokens,
        checkpoint_interval=state_interval,
        has_state="Mamba" in kinds,
        has_ring="Ring" in kinds,
        has_full_attention=any(kind in FULL for kind in kinds),
        has_reference_window="ReferenceWindow" in kinds,
        writes_states=bool(intervals),
        configuration=configuration | {"hash_page_size": hash_page_size},
    )


def _check_rings(rings: Sequence[Any], specs: Sequence[Any], num_hit_tokens: int) -> None:
    """Raise ArgumentError for a ring with tokens where hits end, since a request that hits gets a blank one, and for a model
    with nothing but rings.
    """
    if len(rings) == len(specs):
        raise ArgumentError("kv_cache_groups: got only rings, allowed with enable_caching: another group beside them")
    for ring in rings:
        if num_hit_tokens % ring.period:
            raise ArgumentError(
                f"period: got {ring.period}, allowed with enable_caching: a divisor of {num_hit_tokens}, at whose multiples "
                "hits end"
            )


def _find_boundaries(
    specs: Sequence[Any],
    retention: Retention,
    num_hit_tokens: int,
    is_cached: bool,
    state_interval: int | None,
) -> tuple[int, int, int] | None:
    """Return the multiple, the slack and the interval of boundaries for the core. None if boundaries do not matter: all window
    pages stay, and no states are written (`state_interval` is None).
    """
    has_windows = any(map(window_of, specs))
    if has_windows and retention.windows == "all" and state_interval is not None:
        raise ArgumentError("windows: got all, allowed for states that are kept: ends, where requests resume")
    if not is_cached or num_hit_tokens > MAX_BOUNDARY:
        return None
    if state_interval is not None:
        return num_hit_tokens, SLACK, min(state_interval, MAX_BOUNDARY)
    if retention.windows == "all" or not has_windows:
        return None
    slack, interval = find_slack_and_interval(retention, specs, num_hit_tokens)
    slack = min(-(-slack // num_hit_tokens) * num_hit_tokens, MAX_BOUNDARY // num_hit_tokens * num_hit_tokens)
    return num_hit_tokens, slack, min(interval, MAX_BOUNDARY)


def find_slack_and_interval(retention: Retention, specs: Sequence[Any], num_hit_tokens: int) -> tuple[int, int]:
    """Return `window_slack` and `window_interval`, with a model's defaults in place of None."""
    slack, interval = retention.window_slack, retention.window_interval
    slack = max(SLACK, num_hit_tokens) if slack is None else slack
    return slack, find_interval(specs) if interval is None else interval


def _describe_group(group_id: int, spec: Any, num_hit_tokens: int, hash_page_size: int, keeps_states: bool) -> dict[str, Any]:
    """Return a group's settings by name. Managers that share cached pages must agree in them."""
    kind = kind_of(spec)
    is_cached = keeps_states if kind == "Mamba" else kind != "Ring"
    entry_size = num_hit_tokens if kind in STATES else int(spec.page_size)
    described: dict[str, Any] = {"kind": kind}
    own = ["period"] if kind == "Ring" else ["num_sink_tokens"] if getattr(spec, "num_sink_tokens", 0) else []
    for name in ("page_size", "sliding_window", "attention_chunk_size", *own):
        size = getattr(spec, name, None)
        described[name] = None if size is None else int(size)
    return described | {
        "index_group_id": group_id if is_cached else None,
        "num_hashes_per_page": entry_size // hash_page_size if is_cached else 1,
    }


def _rules_of(described: dict[str, Any], spec: Any, num_hit_tokens: int, use_eagle: bool) -> PageRules:
    """Return the rules of a group. With eagle, hits may have any length, since the search goes one page further."""
    hit_tokens = 0 if use_eagle else num_hit_tokens
    match described["kind"]:
        case "Mamba":
            return PageRules(None, interval=0 if described["index_group_id"] is None else num_hit_tokens)
        case "Ring":
            return PageRules(None, period=spec.period, capacity=spec.page_size)
        case "SlidingWindow":
            return PageRules(spec.page_size, window=spec.sliding_window, hit_tokens=hit_tokens)
        case "ReferenceWindow":
            return PageRules(spec.page_size, answer_window=spec.sliding_window)
        case "ChunkedLocalAttention":
            return PageRules(spec.page_size, chunk=spec.attention_chunk_size, hit_tokens=hit_tokens)
    return PageRules(spec.page_size)


def _list_spacings(states: Sequence[Any]) -> list[int]:
    """Return a number of tokens for each state group, at whose multiples its states may be kept; none unless all groups keep
    checkpoints, since otherwise no prefix can hit. Kernels have states at multiples of `CHECKPOINT_STEP`, so the number is the
    greatest common divisor of this step and the group's interval.
    """
    intervals: list[Any] = [getattr(spec, "checkpoint_interval", None) for spec in states]
    if None in intervals:
        return []
    return [CHECKPOINT_STEP if interval == "auto" else gcd(CHECKPOINT_STEP, interval) for interval in intervals]


def find_state_interval(kv_cache_groups: Sequence[CacheGroupSpec]) -> int:
    """Return the tokens between checkpoints inside a prompt: the least interval of the specs; if all are ``"auto"``, the
    smallest multiple of 2,048 tokens for which a checkpoint takes at most a third as many bytes as the keys and values up to
    the next one, or 0 without keys and values.
    """
    state_bytes = token_bytes = 0
    intervals = []
    for group in kv_cache_groups:
        spec: Any = group.kv_cache_spec
        num_bytes = spec.page_size_bytes * max(1, len(group.layer_names or ()))
        if kind_of(spec) == "Ring":
            continue
        if kind_of(spec) != "Mamba":
            token_bytes += num_bytes / spec.page_size
            continue
        state_bytes += num_bytes
        if spec.checkpoint_interval != "auto":
            intervals.append(spec.checkpoint_interval)
    if intervals or not token_bytes:
        return min(intervals, default=0)
    return int(-(-3 * state_bytes // (token_bytes * INTERVAL_STEP)) * INTERVAL_STEP)


def window_of(spec: Any) -> int:
    """Return the size of a sliding window or chunk in tokens; 0 without one, and for a reference window: prompts keep all."""
    if kind_of(spec) == "ReferenceWindow":
        return 0
    return int(getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None) or 0)


def find_interval(specs: Sequence[Any]) -> int:
    """Return the smallest multiple of 2,048 tokens for which all windows together take at most a third of the pages of one
    full-attention group; 0 if some window is at least as long as that multiple.
    """
    specs = [spec for spec in specs if kind_of(spec) not in STATES]
    num_pages = sum(-(-window_of(spec) // spec.page_size) for spec in specs)
    full = [spec.page_size for spec in specs if kind_of(spec) in FULL] or [spec.page_size for spec in specs]
    interval = -(-3 * num_pages * full[0] // INTERVAL_STEP) * INTERVAL_STEP
    return int(interval) if interval > max(map(window_of, specs)) else 0


def kind_of(kv_cache_spec: Any) -> str:
    """Return the kind of attention of a spec: the name of its class, or of a base class, without "Spec".

    So an engine's own spec classes work. Raise ArgumentError for other names.
    """
    for cls in type(kv_cache_spec).__mro__:
        if cls.__name__ in SPECS:
            return cls.__name__.removesuffix("Spec")
    raise ArgumentError(f"kv_cache_spec: got {type(kv_cache_spec).__name__}, allowed: {', '.join(SPECS)}")
