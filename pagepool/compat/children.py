"""Acts in the processes that `multiprocessing` starts, before they import anything of the program."""

from collections.abc import Callable
from multiprocessing import spawn
from typing import Any

__all__ = ["call_in_children"]

_get_preparation_data = spawn.get_preparation_data
_actions: list[Callable[[], None]] = []


class _Call:
    """Unpickling it is calling the action."""

    def __init__(self, action: Callable[[], None]) -> None:
        self.action = action

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return self.action, ()


def call_in_children(action: Callable[[], None]) -> None:
    """Let children that are started by spawn or by a fork server call `action`, a function of a module, first of all.

    Forked ones have what their parent has. What `action` raises ends the child. Asking twice is as asking once.
    """
    if action not in _actions:
        _actions.append(action)
    spawn.get_preparation_data = _add_actions


def _add_actions(name: str) -> dict[str, Any]:
    calls = {f"{action.__module__}.{action.__qualname__}": _Call(action) for action in _actions}
    return _get_preparation_data(name) | calls
