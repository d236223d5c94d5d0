"""jax, which is imported on first use, and differences between its versions and settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from pagepool.errors import CompatError

if TYPE_CHECKING:
    import jax

LEAST_JAX = "0.6.0"
"""Oldest supported version of jax, as in pyproject.toml."""

# A donated array may share its memory with NumPy. Compiled programs copy the array first. In older versions a program from the
# compilation cache does not: it writes into that memory, which NumPy frees when the array is gone. GPUs share no memory with
# NumPy, but the minimum version is the same for all devices.
WHY_LEAST_JAX = (
    "on CPUs, programs that older versions read from jax's compilation cache write into memory of NumPy: "
    "page tables and pages become wrong without an error"
)


@cache
def import_jax() -> Any:
    """Return the module jax. Raise ImportError naming the extra to install, or CompatError for a jax older than `LEAST_JAX`."""
    try:
        import jax
    except ImportError as error:
        raise ImportError(
            "page tables, page copies and host pages on a device need jax: pip install 'pagepool[jax]' (all else works without)"
        ) from error
    if jax.__version_info__ < tuple(map(int, LEAST_JAX.split("."))):
        got = f"jax: got version {jax.__version__}, allowed: {LEAST_JAX} and newer"
        raise CompatError(f"{got}, since {WHY_LEAST_JAX}; pip install --upgrade 'pagepool[jax]'")
    return jax


def call_with_payload(program: Callable[..., Any], arrays: Sequence[jax.Array], *payload: Any) -> Any:
    """Call a program with device arrays and host arrays, even under a transfer guard."""
    jax = import_jax()
    if jax.config.jax_transfer_guard_host_to_device is None:  # skip the context, which takes time, if no guard is set
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
