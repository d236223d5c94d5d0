"""Calls in child processes of `multiprocessing`, before they import anything of the program."""

from collections.abc import Callable
from multiprocessing import spawn
from typing import Any

_get_preparation_data = spawn.get_preparation_data
_actions: list[Callable[[], None]] = []


class _Call:
    """An object whose unpickling calls the action."""

    def __init__(self, action: Callable[[], None]) -> None:
        self.action = action

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return self.action, ()


def call_in_children(action: Callable[[], None]) -> None:
    """Call `action`, a module-level function, first in each child that is started by spawn or by a fork server.

    Forked children share their parent's state already. An exception in `action` ends the child. Repeated calls have no effect.
    """
    if action not in _actions:
        _actions.append(action)
    spawn.get_preparation_data = _add_actions


def stop_calling_in_children(action: Callable[[], None]) -> None:
    """Cancel `call_in_children` for children started from now on. No effect if it was not called."""
    if action in _actions:
        _actions.remove(action)


def _add_actions(name: str) -> dict[str, Any]:
    calls = {f"{action.__module__}.{action.__qualname__}": _Call(action) for action in _actions}
    return _get_preparation_data(name) | calls
