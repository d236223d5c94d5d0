"""Print an executable for each Python of a release that this machine has with its headers: on PATH, or of pyenv, rye or uv."""

import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from check_distributions import PYTHONS

HAS_HEADERS = "import sys, sysconfig, pathlib; sys.exit(not pathlib.Path(sysconfig.get_path('include'), 'Python.h').exists())"


def select(candidates: Iterable[Any]) -> Iterator[Path]:
    """Yield the executable of the first complete candidate for each Python of a release, in the order of those."""
    found: dict[str, Path] = {}
    for python in candidates:
        name = f"cp{python.major}{python.minor}{'t' * bool(python.freethreaded)}"
        if name not in PYTHONS or name in found or python.implementation != "cpython":
            continue
        if subprocess.run([python.executable, "-Ic", HAS_HEADERS], check=False, stderr=subprocess.DEVNULL).returncode == 0:
            found[name] = python.executable
    yield from (found[name] for name in PYTHONS if name in found)


if __name__ == "__main__":
    import findpython

    print(*select(findpython.find_all(3)))
