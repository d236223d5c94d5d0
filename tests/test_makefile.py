"""Targets of the Makefile: `make help` and the table of CONTRIBUTING.md have all of them."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from sources import ROOT

MAKEFILE = ROOT / "Makefile"


def phony_targets() -> set[str]:
    return {name for line in re.findall(r"^\.PHONY: *(.*)$", MAKEFILE.read_text(), re.MULTILINE) for name in line.split()}


def test_make_help_describes_every_target() -> None:
    """`make` alone prints the same."""
    if shutil.which("make") is None:
        pytest.skip("no make")
    outputs = [
        subprocess.run(["make", "-C", ROOT, *goals], check=True, capture_output=True, text=True, timeout=60).stdout
        for goals in ([], ["help"])
    ]
    assert outputs[0] == outputs[1]
    lines = [line for line in outputs[0].splitlines() if line.startswith("make ")]
    described = re.findall(r"^make ([\w-]+) +\S", "\n".join(lines), re.MULTILINE)
    assert sorted(described) == sorted(phony_targets())
    assert not [line for line in lines if len(line) > 150]


def test_the_table_for_contributors_has_every_target() -> None:
    rows = [line for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`make ([\w-]+)`", row.split(" | ")[0])}
    assert named == phony_targets()
