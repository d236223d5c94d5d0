"""Locks of Python objects across a fork of the process.

The child process has only the forking thread. A lock held by another thread would stay locked, over a half-changed object. A
forking thread therefore takes the locks first, and releases them in parent and child. If the holder of a lock waits for the
forking thread, the child gets the object with a lock that raises. The core does the same for its own locks, and registers the
hooks of the process.
"""

import itertools
import threading
import time
import weakref
from collections import deque
from functools import partial
from operator import itemgetter, methodcaller
from typing import Any, NamedTuple, NoReturn

from pagepool.errors import IntegrityError

__all__ = ["hold_locks", "make_lock", "release_locks", "replace_lost_locks"]

COMMITS, STORES, MANAGERS, EVENTS, NAMES = range(5)
"""Kinds of locks, in the order a thread takes them."""

MAX_WAIT_SECONDS = 5.0
"""Time limit of a fork for all locks together. A call is much shorter, unless it waits for the forking thread."""


class _Entry(NamedTuple):
    """The object and attribute in which a lock is stored."""

    kind: int
    owner: "weakref.ref[Any]"
    attribute: str


_entries: dict[int, _Entry] = {}
_numbers = itertools.count()
_thread = threading.local()
"""``held``: the locks this thread holds while forking the process."""


class LostLock:
    """The lock, in a child process, of an object in the middle of a change by another thread of the parent."""

    def __init__(self, owner: object) -> None:
        """Replace the lock of `owner`."""
        self._owner_name = getattr(owner, "__name__", type(owner).__name__)

    def __enter__(self) -> NoReturn:
        """Raise IntegrityError."""
        raise IntegrityError(
            f"{self._owner_name}: got a call in a forked process, allowed: none, because another thread was changing the "
            "object when the process forked"
        )

    def __exit__(self, *_: object) -> None:
        """Do nothing: the lock can never be entered."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Return False, since the lock is lost in the children of this process too."""
        return False


def make_lock(owner: object, attribute: str, kind: int) -> Any:
    """Return a reentrant lock; the caller stores it as `attribute` of `owner`. A fork takes it with the locks of its kind."""
    number = next(_numbers)
    forget = partial(_entries.pop, number)  # native, since Python code could lose an interrupt
    _entries[number] = _Entry(kind, weakref.ref(owner, forget), attribute)
    return threading.RLock()


def _list_locks() -> list[tuple[Any, str, Any]]:
    """Return owner and attribute of each lock, and the lock, in the order a fork takes them."""
    owners = [(entry.owner(), entry.attribute) for entry in sorted(_entries.copy().values(), key=itemgetter(0))]
    return [(owner, name, getattr(owner, name)) for owner, name in owners if hasattr(owner, name)]


def hold_locks() -> None:
    """Take all locks before the process forks, except those not released in time."""
    deadline, held = time.monotonic() + MAX_WAIT_SECONDS, vars(_thread).setdefault("held", [])
    for _, _, lock in _list_locks():
        if lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            held.append(lock)


def release_locks() -> None:
    """Release the locks taken by `hold_locks`, in one call that cannot be interrupted."""
    deque(map(methodcaller("release"), vars(_thread).pop("held", ())), maxlen=0)


def replace_lost_locks() -> None:
    """Replace the locks that can no longer be released. Called in a child process, after `release_locks`."""
    for owner, name, lock in _list_locks():
        if lock.acquire(blocking=False):
            lock.release()
        else:
            setattr(owner, name, LostLock(owner))
