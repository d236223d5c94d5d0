"""What permissions forbid is allowed to root, in whose name tests may run."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOBODY = 65534


@contextmanager
def without_privileges() -> Iterator[None]:
    """As nobody, if we are root."""
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
    """A folder that nobody may write to, with files that everybody may read."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file_name, content in files.items():
            (folder / file_name).write_bytes(content)
        folder.chmod(0o555)
        try:
            yield folder
        finally:
            folder.chmod(0o755)
