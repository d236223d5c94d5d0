"""Check that a folder has exactly the files of a release: `python .ci/check_distributions.py FOLDER`.

These are the source distribution and a wheel for each Python and platform below, with the version of pagepool/_version.py.
"""

import sys
from fnmatch import filter as matching
from pathlib import Path

from release_notes import ROOT, read_version

PYTHONS = ("cp311-cp311", "cp312-cp312", "cp313-cp313", "cp314-cp314", "cp314-cp314t")
PLATFORMS = (
    "manylinux*_x86_64",
    "manylinux*_aarch64",
    "musllinux*_x86_64",
    "musllinux*_aarch64",
    "macosx*_x86_64",
    "macosx*_arm64",
)


def find_faults(names: list[str], version: str) -> list[str]:
    """Return a line for each missing, repeated or unexpected file."""
    patterns = [f"pagepool-{version}.tar.gz"]
    patterns += [f"pagepool-{version}-{python}-{platform}.whl" for python in PYTHONS for platform in PLATFORMS]
    found = {pattern: matching(names, pattern) for pattern in patterns}
    expected = {name for matches in found.values() for name in matches}
    faults = [f"{pattern}: {len(matches)} files, expected 1" for pattern, matches in found.items() if len(matches) != 1]
    return faults + [f"{name}: unexpected" for name in sorted(set(names) - expected)]


if __name__ == "__main__":
    files = sorted(path.name for path in Path(sys.argv[1]).iterdir())
    print(*files, sep="\n")
    sys.exit("\n".join(find_faults(files, read_version((ROOT / "pagepool" / "_version.py").read_text()))) or 0)
