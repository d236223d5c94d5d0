"""The cache groups of a model: which pages they need, and the requests that hold pages."""

from collections.abc import Iterable, Sequence
from math import gcd, lcm
from typing import Any

from pagepool._core import CacheGroups, PageRules, RequestPages
from pagepool.arguments import MAX_SIZE, require_flag, require_int, require_places
from pagepool.errors import ArgumentError, ArgumentTypeError, shown
from pagepool.page_pool import PagePool
from pagepool.page_pool.snapshot import Configuration
from pagepool.specs import CacheGroupSpec, ChunkedLocalAttentionSpec, FullAttentionSpec, MambaSpec, SlidingWindowSpec

__all__ = ["CacheCoordinator"]

SLACK = 64  # tokens before a boundary at which a request can resume as well, by default
INTERVAL_STEP = 2048
MAX_BOUNDARY = 1 << 30
SPECS = [spec.__name__ for spec in (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec, MambaSpec)]


class CacheCoordinator:
    """The rules of a model's cache groups, and what requests hold in them.

    ``requests`` maps request ids to the pages that they hold; ``groups`` are the rules for the core. A hash covers
    ``hash_page_size`` tokens, the greatest common divisor of the page sizes of groups with attention, of which
    ``max_cached_page_size`` is the largest. The length of a hit is a multiple of all these sizes, and of the intervals at which
    states are kept. ``checkpoint_interval`` is their least common multiple, None without states that are kept. ``has_state``
    says whether a group has states, kept or not.
    """

    def __init__(
        self,
        num_pages: int,
        kv_cache_groups: Sequence[CacheGroupSpec],
        max_model_len: int,
        use_eagle: bool,
        enable_caching: bool,
        page_pool: PagePool | None = None,
        windows: str = "all",
        window_slack: int | None = None,
        window_interval: int | None = None,
    ) -> None:
        """See `CacheManager`. ArgumentError for a pool of another size or with another `enable_caching`, and for eagle with
        chunked local attention, which cannot drop a page across chunks.
        """
        self.kv_cache_groups = kv_cache_groups
        self.max_model_len = max_model_len
        self.use_eagle = require_flag("use_eagle", use_eagle)
        self.enable_caching = require_flag("enable_caching", enable_caching)
        if page_pool is not None and not isinstance(page_pool, PagePool):
            raise ArgumentTypeError(f"page_pool: got {type(page_pool).__name__}, allowed: PagePool, or None")
        self.page_pool = page_pool or PagePool(num_pages, self.enable_caching)
        if page_pool is not None and (page_pool.num_pages, page_pool.enable_caching) != (num_pages, self.enable_caching):
            got = f"{page_pool.num_pages} pages, caching {page_pool.enable_caching}"
            raise ArgumentError(f"page_pool: got {got}; allowed: {shown(num_pages)} pages, caching {self.enable_caching}")
        self.num_pages = self.page_pool.num_pages
        self.requests: dict[str, RequestPages] = {}
        specs: list[Any] = [group.kv_cache_spec for group in kv_cache_groups]
        kinds = [kind_of(spec) for spec in specs]
        self.has_state = "Mamba" in kinds
        if self.use_eagle and self.enable_caching and "ChunkedLocalAttention" in kinds:
            raise ArgumentError("use_eagle: got True, allowed with chunked local attention and caching: False")
        sizes = [require_int("page_size", spec.page_size, 1) for spec in specs]
        page_sizes = [size for size, kind in zip(sizes, kinds, strict=True) if kind != "Mamba"]
        found = [getattr(spec, "checkpoint_interval", None) for spec, kind in zip(specs, kinds, strict=True) if kind == "Mamba"]
        intervals = [interval or 1 for interval in found if interval is not None]
        self.hash_page_size = gcd(*(page_sizes or intervals)) or 1
        self.max_cached_page_size = max(page_sizes, default=self.hash_page_size)
        self._num_hit_tokens = lcm(*page_sizes, *intervals)
        self.checkpoint_interval = self._num_hit_tokens if intervals and self.enable_caching else None
        for interval in intervals:
            if interval % self.hash_page_size:
                allowed = f"multiples of {self.hash_page_size}, the tokens of a hash"
                raise ArgumentError(f"checkpoint_interval: got {interval}, allowed: {allowed}")
        self._described = [self._describe_group(i, kind, spec) for i, (kind, spec) in enumerate(zip(kinds, specs, strict=True))]
        rules = [self._rules_of(described, spec) for described, spec in zip(self._described, specs, strict=True)]
        index_ids = [described["index_group_id"] if self.enable_caching else None for described in self._described]
        num_hashes = [described["num_hashes_per_page"] for described in self._described]
        boundaries = self._find_boundaries(specs, windows, window_slack, window_interval)
        self.groups = CacheGroups(list(zip(rules, index_ids, num_hashes, strict=True)), self.use_eagle, boundaries)

    def _find_boundaries(
        self, specs: Sequence[Any], windows: str, slack: int | None, interval: int | None
    ) -> tuple[int, int, int] | None:
        """Return the multiple, the slack and the interval of boundaries for the core; None where all window pages stay."""
        if not isinstance(windows, str) or windows not in ("all", "ends"):
            raise ArgumentError(f"windows: got {shown(windows)}, allowed: all or ends")
        slack = None if slack is None else require_int("window_slack", slack, 0, MAX_SIZE)
        interval = None if interval is None else require_int("window_interval", interval, 0, MAX_SIZE)
        step = self._num_hit_tokens
        is_cached = self.enable_caching and all(described["index_group_id"] is not None for described in self._described)
        if windows == "all" or not is_cached or not any(map(window_of, specs)) or step > MAX_BOUNDARY:
            return None
        slack = max(SLACK, step) if slack is None else slack
        interval = find_interval(specs) if interval is None else interval
        slack = min(-(-slack // step) * step, MAX_BOUNDARY // step * step)
        return step, slack, min(interval, MAX_BOUNDARY)

    def _describe_group(self, group_id: int, kind: str, spec: Any) -> dict[str, Any]:
        """Return, by name, the settings that decide which pages of a group a prefix hits."""
        is_cached = kind != "Mamba" or getattr(spec, "checkpoint_interval", None) is not None
        entry_size = self._num_hit_tokens if kind == "Mamba" else int(spec.page_size)
        described: dict[str, Any] = {"kind": kind}
        for name in ("page_size", "sliding_window", "attention_chunk_size"):
            size = getattr(spec, name, None)
            described[name] = None if size is None else int(size)
        return described | {
            "index_group_id": group_id if is_cached else None,
            "num_hashes_per_page": entry_size // self.hash_page_size if is_cached else 1,
        }

    def _rules_of(self, described: dict[str, Any], spec: Any) -> PageRules:
        """Return the rules of a group. Hits with eagle may have any length, since the search goes one page further."""
        hit_tokens = 0 if self.use_eagle else self._num_hit_tokens
        match described["kind"]:
            case "Mamba":
                return PageRules(None, interval=0 if described["index_group_id"] is None else self._num_hit_tokens)
            case "SlidingWindow":
                return PageRules(spec.page_size, window=spec.sliding_window, hit_tokens=hit_tokens)
            case "ChunkedLocalAttention":
                return PageRules(spec.page_size, chunk=spec.attention_chunk_size, hit_tokens=hit_tokens)
        return PageRules(spec.page_size)

    def require_resume_at(self, resume_at: Iterable[int], most: int) -> list[int]:
        """Return the numbers of tokens of `resume_at`, each at most `most`. ArgumentError for any if the model has states, and
        errors of `require_places`.
        """
        places = require_places("resume_at", resume_at, most)
        if places and self.has_state:
            reason = "which are kept only after multiples of checkpoint_interval tokens"
            raise ArgumentError(f"resume_at: got {places}, allowed for a model with states, {reason}: none")
        return places

    def describe(self) -> Configuration:
        """Return, by name, the settings that decide which pages a prefix hits, except those of hashes."""
        configuration: Configuration = {"num_kv_cache_groups": len(self._described)}
        for i, described in enumerate(self._described):
            configuration |= {f"kv_cache_groups[{i}].{name}": described[name] for name in described}
        return configuration | {"hash_page_size": self.hash_page_size}


def window_of(spec: Any) -> int:
    """Return the tokens of a sliding window, or chunk; 0 without any."""
    return int(getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None) or 0)


def find_interval(specs: Sequence[Any]) -> int:
    """Return the least multiple of 2,048 tokens at which windows take at most a third of the pages that one group of full
    attention has in as many tokens; 0 if a window is as long as that.
    """
    num_pages = sum(-(-window_of(spec) // spec.page_size) for spec in specs)
    full = [spec.page_size for spec in specs if kind_of(spec) == "FullAttention"] or [spec.page_size for spec in specs]
    interval = -(-3 * num_pages * full[0] // INTERVAL_STEP) * INTERVAL_STEP
    return int(interval) if interval > max(map(window_of, specs)) else 0


def kind_of(kv_cache_spec: Any) -> str:
    """Return the kind of attention of a spec: the name of its class, or of a base class, without "Spec".

    An engine's own spec classes therefore work. ArgumentError for other names.
    """
    for cls in type(kv_cache_spec).__mro__:
        if cls.__name__ in SPECS:
            return cls.__name__.removesuffix("Spec")
    raise ArgumentError(f"kv_cache_spec: got {type(kv_cache_spec).__name__}, allowed: {', '.join(SPECS)}")
