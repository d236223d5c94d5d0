"""Locks of Python objects across a fork.

A forked child has only the thread that forked: a lock that another thread held would stay locked, over an object that was being
changed. So a thread that forks takes the locks first, and releases them in parent and child. A holder may itself wait for that
thread; then the child gets the object with a lock that raises. The core does the same for its own locks, and has the hooks.
"""

import itertools
import threading
import time
import weakref
from collections import deque
from functools import partial
from operator import methodcaller
from typing import Any, NamedTuple, NoReturn

from pagepool.errors import IntegrityError

__all__ = ["hold_locks", "make_lock", "release_locks", "replace_lost_locks"]

COMMITS, MANAGERS, EVENTS, NAMES = range(4)
"""Kinds of locks, in the order in which a thread takes them."""

MAX_WAIT_SECONDS = 5.0
"""For all locks of a fork together. A call takes far less, unless it waits for the thread that forks."""


class _Entry(NamedTuple):
    """Where a lock is."""

    kind: int
    number: int
    owner: "weakref.ref[Any]"
    attribute: str


class _Thread(threading.local):
    """What a thread holds while it forks."""

    def __init__(self) -> None:
        self.held: list[Any] = []


_entries: dict[int, _Entry] = {}
_numbers = itertools.count()
_thread = _Thread()


class LostLock:
    """In a forked child, the lock of an object that another thread was in."""

    def __init__(self, owner: object) -> None:
        """Takes the place of the lock of `owner`."""
        self._owner_name = getattr(owner, "__name__", type(owner).__name__)

    def __enter__(self) -> NoReturn:
        """Always IntegrityError."""
        raise IntegrityError(
            f"{self._owner_name}: got a call in a forked process, allowed: none, for another thread was changing the object "
            "when the process was forked"
        )

    def __exit__(self, *_: object) -> None:
        """Never called."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Never succeeds: the lock is lost in the children of this process too."""
        return False


def make_lock(owner: object, attribute: str, kind: int) -> Any:
    """A reentrant lock to be kept as `attribute` of `owner`, which forks take with those of its kind."""
    number = next(_numbers)
    forget = partial(_entries.pop, number)  # no Python code, in which an interrupt would be lost; the reference is the default
    _entries[number] = _Entry(kind, number, weakref.ref(owner, forget), attribute)
    return threading.RLock()


def _list_locks() -> list[tuple[Any, str, Any]]:
    """Owner, attribute and lock, in the order in which they are taken."""
    owners = [(entry.owner(), entry.attribute) for entry in sorted(_entries.copy().values())]
    return [(owner, name, getattr(owner, name)) for owner, name in owners if hasattr(owner, name)]


def hold_locks() -> None:
    """Take all locks for a fork, as far as their holders let go of them in time."""
    deadline = time.monotonic() + MAX_WAIT_SECONDS
    for _, _, lock in _list_locks():
        if lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            _thread.held.append(lock)


def release_locks() -> None:
    """Release what `hold_locks` took, in one call that nothing interrupts."""
    held, _thread.held = _thread.held, []
    deque(map(methodcaller("release"), held), maxlen=0)


def replace_lost_locks() -> None:
    """In a child, after `release_locks`: let locks that can no longer be released raise."""
    for owner, name, lock in _list_locks():
        if lock.acquire(blocking=False):
            lock.release()
        else:
            setattr(owner, name, LostLock(owner))
