"""Locks of Python objects that belong to one process.

A forked child has only the forking thread, and a lock that another thread held is never released there. So an object is for the
process that made it, and raises in another one. The core has the same rule for its own locks.
"""

import os
from typing import Any

from pagepool.errors import of_other_process

_process = object()


def _begin_process() -> None:
    global _process
    _process = object()


os.register_at_fork(after_in_child=_begin_process)


class ProcessLock:
    """An attribute for a lock, which each object of a class sets once. Raise IntegrityError when it is read in another process
    than the one that set it.
    """

    def __init__(self, owner: str) -> None:
        """Name the owner of the lock, for the error."""
        self._owner = owner

    def __set_name__(self, owner: type, name: str) -> None:
        """Store locks in objects under a name derived from that of the attribute."""
        self._attribute = f"{name}_and_process"

    def __set__(self, instance: object, lock: Any) -> None:
        """Store the lock of an object, with this process."""
        setattr(instance, self._attribute, (lock, _process))

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Return the lock of an object."""
        lock, process = getattr(instance, self._attribute)
        if process is not _process:
            raise of_other_process(self._owner)
        return lock
