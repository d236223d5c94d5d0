"""Locks of Python objects when a process forks.

The child process has only the thread that forked. A lock held by another thread would stay locked, over a half-changed object.
A thread that forks the process therefore takes the locks first, and releases them in parent and child. If a holder waits for
that thread, the child gets the object with a lock that raises. The core does the same for its own locks, and registers the
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

COMMITS, MANAGERS, EVENTS, NAMES = range(4)
"""Kinds of locks, in the order in which a thread takes them."""

MAX_WAIT_SECONDS = 5.0
"""How long a process fork waits for all locks together. A call takes far less, unless it waits for the forking thread."""


class _Entry(NamedTuple):
    """Where a lock is stored."""

    kind: int
    owner: "weakref.ref[Any]"
    attribute: str


_entries: dict[int, _Entry] = {}
_numbers = itertools.count()
_thread = threading.local()
"""``held`` has the locks that this thread holds while it forks the process."""


class LostLock:
    """The lock, in a child process, of an object that another thread was changing when the process forked."""

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
        """Never called."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Return False: the lock is lost in the children of this process too."""
        return False


def make_lock(owner: object, attribute: str, kind: int) -> Any:
    """Return a reentrant lock to be stored as `attribute` of `owner`. A process fork takes it with the locks of its kind."""
    number = next(_numbers)
    forget = partial(_entries.pop, number)  # not Python code, which would lose an interrupt; the reference is pop's default
    _entries[number] = _Entry(kind, weakref.ref(owner, forget), attribute)
    return threading.RLock()


def _list_locks() -> list[tuple[Any, str, Any]]:
    """Return the owner and attribute of each lock, and the lock, in the order in which a process fork takes them."""
    owners = [(entry.owner(), entry.attribute) for entry in sorted(_entries.copy().values(), key=itemgetter(0))]
    return [(owner, name, getattr(owner, name)) for owner, name in owners if hasattr(owner, name)]


def hold_locks() -> None:
    """Take all locks before the process forks, except those that are not released in time."""
    deadline, held = time.monotonic() + MAX_WAIT_SECONDS, vars(_thread).setdefault("held", [])
    for _, _, lock in _list_locks():
        if lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            held.append(lock)


def release_locks() -> None:
    """Release what `hold_locks` took, in one call that cannot be interrupted."""
    deque(map(methodcaller("release"), vars(_thread).pop("held", ())), maxlen=0)


def replace_lost_locks() -> None:
    """Replace the locks that can no longer be released. Called in a child process, after `release_locks`."""
    for owner, name, lock in _list_locks():
        if lock.acquire(blocking=False):
            lock.release()
        else:
            setattr(owner, name, LostLock(owner))
