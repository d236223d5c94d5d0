"""Check that a folder has exactly the files of a release: `python .ci/check_distributions.py FOLDER`.

These are the source distribution and a wheel for each Python of pyproject.toml's `tool.cibuildwheel` and each platform below,
with the version of pagepool/_version.py.
"""

import sys
import tomllib
from fnmatch import filter as matching
from pathlib import Path

from release_notes import ROOT, read_version

BUILDS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]["build"]
PYTHONS = {build.removesuffix("-*"): f"{build.removesuffix('-*').rstrip('t')}-{build.removesuffix('-*')}" for build in BUILDS}
"""The tags of each Python in the names of its wheels: `cp314t` has `cp314-cp314t`."""

PLATFORMS = (
    "manylinux*_x86_64",
    "manylinux*_aarch64",
    "musllinux*_x86_64",
    "musllinux*_aarch64",
    "macosx*_x86_64",
    "macosx*_arm64",
)


def list_patterns(version: str) -> list[str]:
    """Return a pattern for the name of each file of a release."""
    wheels = [f"pagepool-{version}-{tags}-{platform}.whl" for tags in PYTHONS.values() for platform in PLATFORMS]
    return [f"pagepool-{version}.tar.gz", *wheels]


def find_missing(names: list[str], version: str) -> list[str]:
    """Return the pattern of each missing file."""
    return [pattern for pattern in list_patterns(version) if not matching(names, pattern)]


def find_surplus(names: list[str], version: str) -> list[str]:
    """Return a line for each repeated or unexpected file."""
    found = {pattern: matching(names, pattern) for pattern in list_patterns(version)}
    expected = {name for matches in found.values() for name in matches}
    faults = [f"{pattern}: {len(matches)} files, expected 1" for pattern, matches in found.items() if len(matches) > 1]
    return faults + [f"{name}: unexpected" for name in sorted(set(names) - expected)]


def find_faults(names: list[str], version: str) -> list[str]:
    """Return a line for each missing, repeated or unexpected file."""
    return [f"{pattern}: missing" for pattern in find_missing(names, version)] + find_surplus(names, version)


if __name__ == "__main__":
    files = sorted(path.name for path in Path(sys.argv[1]).iterdir())
    print(*files, sep="\n")
    sys.exit("\n".join(find_faults(files, read_version((ROOT / "pagepool" / "_version.py").read_text()))) or 0)
