"""Atomic writing of files."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from secrets import token_hex
from typing import BinaryIO


@contextmanager
def open_output(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` when the `with` block ends and is removed if the block raises.

    Until then it is a file next to `path` with a name ending in `.part`. Devices and pipes are written directly. Raise
    `OSError` as `open` does, also for an existing write-protected file.
    """
    target = os.path.realpath(path)
    if os.path.exists(target) and not os.path.isfile(target):
        with open(target, "wb") as file:
            yield file
        return
    with suppress(FileNotFoundError), open(target, "r+b"):
        pass
    part = f"{target}.{token_hex(4)}.part"
    with open(part, "xb") as file:
        try:
            yield file
            file.close()
            os.replace(part, target)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(part)
