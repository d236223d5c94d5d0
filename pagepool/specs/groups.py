"""Groups of layers that share page ids."""

from collections.abc import Iterable
from dataclasses import dataclass

from pagepool.arguments import as_list
from pagepool.errors import ArgumentTypeError
from pagepool.specs.layers import CacheSpec

__all__ = ["CacheGroupSpec", "CacheGroupsConfig", "check_groups"]


@dataclass(frozen=True)
class CacheGroupSpec:
    """Layers that share page ids. A page id of the group is one page in each of its layers."""

    kv_cache_spec: CacheSpec
    layer_names: list[str] | None = None


def check_groups(kv_cache_groups: Iterable[CacheGroupSpec]) -> list[CacheGroupSpec]:
    """Return the groups as a list. ArgumentTypeError for other objects, such as a spec without its group."""
    groups = as_list("kv_cache_groups", kv_cache_groups, "a list of CacheGroupSpec")
    for i, group in enumerate(groups):
        if not hasattr(group, "kv_cache_spec"):
            raise ArgumentTypeError(f"kv_cache_groups: got {type(group).__name__} (at {i}), allowed: CacheGroupSpec")
    return groups


@dataclass(frozen=True)
class CacheGroupsConfig:
    """The size of a pool in pages, including the null page, and its groups."""

    num_pages: int
    kv_cache_groups: list[CacheGroupSpec]
