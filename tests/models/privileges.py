"""Permissions do not bind root, as which tests may run."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOBODY = 65534


@contextmanager
def without_privileges() -> Iterator[None]:
    """Run as nobody if the process is root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@contextmanager
def read_only_folder(**files: bytes) -> Iterator[Path]:
    """Yield a folder that nobody may write to, with files that everybody may read."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file_name, content in files.items():
            (folder / file_name).write_bytes(content)
        folder.chmod(0o555)
        try:
            yield folder
        finally:
            folder.chmod(0o755)
