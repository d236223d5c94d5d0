"""Turns prefix caching off for models with recurrent layers, which EasyDeL treats as full attention.

EasyDeL keeps the states of these layers by batch row, and zeroes a row when its request ends. A prefix hit skips tokens in
these layers too: they continue from a zero state, and results are wrong. Without hits they are right: only hits are refused.
"""

import functools
import inspect
import logging
from collections.abc import Iterable, Iterator
from typing import Any

from pagepool.compat.patching import signature_of
from pagepool.compat.switch import ON, read_switch
from pagepool.errors import CompatError, count_of

logger = logging.getLogger(__name__)

RECURRENT_VARIABLE = "PAGEPOOL_EASYDEL_RECURRENT_HITS"
"""Environment variable that keeps prefix caching on for models with recurrent layers: a value in `ON`."""

FROM_RUNNER = (
    "(runner, max_num_batched_tokens=None, enable_prefix_caching=True, "
    "async_scheduling=True, long_prefill_token_threshold=None)"
)
"""Signature of the engine's ``Scheduler.from_runner``, where prefix caching is decided."""

LAYER_WORDS = ("linear", "hybrid", "mamba", "recurrent", "conv", "ssm")
"""Substrings of ``layer_types`` in a config that mark a recurrent layer, with or without attention: `linear_attention`,
`kda_linear_attention`, `hybrid`, `parallel_hybrid`, `mamba` and the like.
"""

VIEWS = frozenset({"RecurrentCacheView", "KDACacheView", "LightningCacheView"})
"""The engine's classes of layer states."""

STATES = ("recurrent", "recurrent_state", "conv_state")
"""Attributes of a layer's view that hold a state, with or without pages."""

_guarded: dict[type, Any] = {}
"""Original ``from_runner`` of each guarded scheduler class."""


def keeps_hits() -> bool:
    """Whether `RECURRENT_VARIABLE` leaves prefix caching on. Raise CompatError for a value that is neither in `ON` nor in
    `OFF`.
    """
    return read_switch(RECURRENT_VARIABLE) in ON


def guard(scheduler: type) -> None:
    """Let ``from_runner`` of a scheduler class turn prefix caching off for models with recurrent layers. Raise CompatError
    unless it is a class method with the recorded signature.
    """
    if scheduler in _guarded:
        return
    own = inspect.getattr_static(scheduler, "from_runner", None)
    got = signature_of(scheduler.from_runner) if isinstance(own, classmethod) else repr(own)  # type: ignore[attr-defined]
    if got != FROM_RUNNER:
        raise CompatError(f"{scheduler.__module__}.Scheduler.from_runner: got {got}, allowed: {FROM_RUNNER}")
    _guarded[scheduler] = own
    scheduler.from_runner = _make_guarded(own)  # type: ignore[attr-defined]


def is_guarded(scheduler: object) -> bool:
    """Whether `guard` was called for a class."""
    return scheduler in _guarded


def remove_guards() -> None:
    """Restore each class's own ``from_runner``."""
    for scheduler, own in _guarded.items():
        scheduler.from_runner = own  # type: ignore[attr-defined]
    _guarded.clear()


def _make_guarded(own: Any) -> Any:
    make = own.__func__

    @functools.wraps(make)
    def from_runner(
        cls: type, runner: Any, max_num_batched_tokens: Any = None, enable_prefix_caching: Any = True, *args: Any, **kwargs: Any
    ) -> Any:
        if not keeps_hits() and enable_prefix_caching:
            num_layers = count_recurrent_layers(runner)
            if num_layers:
                layers = f"{count_of(num_layers, 'recurrent layer')} {'keeps' if num_layers == 1 else 'keep'}"
                logger.warning("prefix caching is off: %s no state that a hit could start from", layers)
                enable_prefix_caching = False
        return make(cls, runner, max_num_batched_tokens, enable_prefix_caching, *args, **kwargs)

    return classmethod(from_runner)


def count_recurrent_layers(runner: Any) -> int:
    """Return the number of recurrent layers of a runner's model: the largest count in its caches, which may have been
    released, and in its configs.
    """
    cache = getattr(getattr(runner, "executor_manager", None), "kv_pages", None)
    views = getattr(cache, "views", None) or ()
    config = getattr(getattr(runner, "model", None), "config", None)
    return max(sum(map(_holds_state, views)), *map(_count_recurrent_types, _walk_configs(config)), 0)


def _holds_state(view: Any) -> bool:
    is_state = any(cls.__name__ in VIEWS for cls in type(view).__mro__)
    return is_state or any(getattr(view, name, None) is not None for name in STATES)


def _count_recurrent_types(config: Any) -> int:
    kinds = getattr(config, "layer_types", None)
    if not isinstance(kinds, Iterable):
        return 0
    words = [str(getattr(kind, "value", kind)).lower() for kind in kinds]
    return sum(any(part in word for part in LAYER_WORDS) for word in words)


def _walk_configs(config: Any) -> Iterator[Any]:
    """Yield a config and the configs inside it, such as the text config of a model with images."""
    found, seen = [config], set()
    while found:
        one = found.pop()
        if id(one) in seen or not hasattr(one, "__dict__"):
            continue
        seen.add(id(one))
        yield one
        found += [value for name, value in vars(one).items() if name.endswith("config") or hasattr(value, "layer_types")]
