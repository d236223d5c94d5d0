"""jax, which is imported on first use, and differences between its versions and settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax

__all__ = ["call_with_payload", "get_shard_map", "import_jax"]


def import_jax() -> Any:
    """Return the module jax. ImportError names the extra to install."""
    try:
        import jax
    except ImportError as error:
        raise ImportError(
            "page tables, page copies and host pages on a device need jax: pip install 'pagepool[jax]' (all else works without)"
        ) from error
    return jax


def call_with_payload(program: Callable[..., Any], arrays: Sequence[jax.Array], *payload: Any) -> Any:
    """Call a program with arrays of the device and with host arrays, which a transfer guard does not refuse."""
    jax = import_jax()
    if jax.config.jax_transfer_guard_host_to_device is None:  # no guard is set, and entering the context takes time
        return program(arrays, *payload)
    with jax.transfer_guard_host_to_device("allow"):
        return program(arrays, *payload)


def get_shard_map(is_checked: bool = True) -> Callable[..., Any]:
    """Return jax's `shard_map`. With `is_checked` it checks that replicated values are equal."""
    jax = import_jax()
    if hasattr(jax, "shard_map"):
        return jax.shard_map if is_checked else partial(jax.shard_map, check_vma=False)
    from jax.experimental.shard_map import shard_map

    return shard_map if is_checked else partial(shard_map, check_rep=False)
