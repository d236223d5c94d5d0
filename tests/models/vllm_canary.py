"""Shows what an installed vLLM changed of what the adapter relies on: ``python tests/models/vllm_canary.py FOLDER``.

FOLDER has the package of vLLM that `DIGESTS` were recorded from. Prints the parts, and a diff of each definition that is not as
recorded. Exits with 1 if a part is left to vLLM.
"""

from __future__ import annotations

import ast
import difflib
import sys
from collections.abc import Iterator
from pathlib import Path

from pagepool.compat.vllm.checks import find_obstacles, import_homes, record, version_of
from pagepool.compat.vllm.sources import definitions_in


def code_of(folder: Path, home: str, name: str) -> list[str]:
    """Return the lines of a definition in a package's source, without comments; none if it is not there."""
    path = folder.joinpath(*home.split(".")).with_suffix(".py")
    nodes = definitions_in(path.read_text()) if path.exists() else ()
    return [line for found, node in nodes if found == name for line in ast.unparse(node).splitlines()]


def differences(recorded: Path, installed: Path) -> Iterator[str]:
    """Yield the diffs of all definitions that are not as recorded."""
    for place in record(import_homes()):
        home, name = place.split(":")
        old, new = code_of(recorded, home, name), code_of(installed, home, name)
        yield from ["", *difflib.unified_diff(old, new, f"recorded {home}.{name}", f"installed {home}.{name}", lineterm="")]


def main(folder: str) -> None:
    """Print what there is to say of the installed vLLM."""
    version = version_of()
    obstacles = find_obstacles(import_homes())
    print(f"vLLM {version}")
    for part, obstacle in obstacles.items():
        print(f"{part:8}{obstacle or 'used'}")
    print(*differences(Path(folder), Path(sys.modules["vllm"].__file__ or "").parents[1]), sep="\n", flush=True)
    sys.exit(any(obstacles.values()))


if __name__ == "__main__":
    main(*sys.argv[1:])
