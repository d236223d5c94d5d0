"""Files that are written whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from secrets import token_hex
from typing import BinaryIO

__all__ = ["open_output"]


@contextmanager
def open_output(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write bytes to, which takes the place of `path` when the `with` block ends, and is removed if that raises.

    Until then it stands beside `path`, with `.part` at the end of its name. What is there and no plain file, such as a device
    or a pipe, is written to directly. `OSError` as for `open`, a file that is there and write-protected included.
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
