"""Print the release notes for a tag: the section of CHANGELOG.md for its version.

`python .ci/release_notes.py v1.2.3` fails unless the tag is `v` and the version in pagepool/_version.py, and the section
exists, is dated (`## 1.2.3 (2026-01-31)`) and is not empty.
"""

import re
import sys
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]


def read_version(source: str) -> str:
    """Return the version assigned by a `_version.py`, without importing it."""
    found = re.search(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    if not found:
        raise ValueError("pagepool/_version.py assigns no version")
    return found[1]


def extract_section(changelog: str, version: str) -> str:
    """Return the text below the version's heading. Raise ValueError unless the heading has a date and the text is not empty."""
    found = re.search(rf"^## {re.escape(version)} \(([^\n)]*)\)$(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if not found:
        raise ValueError(f"CHANGELOG.md has no section '## {version} (YYYY-MM-DD)'")
    try:
        date.fromisoformat(found[1])
    except ValueError:
        raise ValueError(f"CHANGELOG.md: the section of {version} has no date, but '{found[1]}'") from None
    if not found[2].strip():
        raise ValueError(f"CHANGELOG.md: the section of {version} is empty")
    return found[2].strip()


def read_headings(changelog: str) -> dict[str, str]:
    """Return the versions with a section, the newest first, and what is in parentheses behind each: a date or `unreleased`."""
    return dict(re.findall(r"^## (\S+) \(([^\n)]*)\)$", changelog, re.MULTILINE))


def main(tag: str) -> str:
    """Return the notes for the tag."""
    version = read_version((ROOT / "pagepool" / "_version.py").read_text())
    if tag != f"v{version}":
        raise ValueError(f"the tag is {tag}, but pagepool/_version.py has {version}: expected v{version}")
    return extract_section((ROOT / "CHANGELOG.md").read_text(), version)


if __name__ == "__main__":
    try:
        print(main(sys.argv[1]))
    except ValueError as error:
        sys.exit(f"release: {error}")
