"""The scripts that a release runs: notes from the changelog, and whether all files are there."""

from __future__ import annotations

from types import ModuleType

import pytest
from sources import ROOT, run_python

import pagepool._version

SCRIPTS = ROOT / ".ci"
CHANGELOG = """# Changelog

## 1.3.0 (unreleased)

- Later.

## 1.2.0 (2026-01-31)

### Added

- This.

## 1.2.0rc1 (2026-01-02)

## 1.1.0 (2025-02-30)

- That.
"""

pytestmark = pytest.mark.skipif(not SCRIPTS.exists(), reason="a copy without scripts")


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    return pytest.importorskip("release_notes")


@pytest.fixture
def distributions(notes: ModuleType) -> ModuleType:
    return pytest.importorskip("check_distributions")


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("1.4.0", r"no section '## 1\.4\.0 \(YYYY-MM-DD\)'"),
        ("1.2", "no section"),
        ("1.3.0", "1.3.0 has no date, but 'unreleased'"),
        ("1.1.0", "1.1.0 has no date, but '2025-02-30'"),
        ("1.2.0rc1", "1.2.0rc1 is empty"),
    ],
)
def test_a_section_must_be_ready(notes: ModuleType, version: str, message: str) -> None:
    assert notes.extract_section(CHANGELOG, "1.2.0") == "### Added\n\n- This."
    with pytest.raises(ValueError, match=message):
        notes.extract_section(CHANGELOG, version)


def test_another_tag_is_refused() -> None:
    process = run_python(SCRIPTS / "release_notes.py", "v0.0.0")
    version = pagepool._version.__version__
    assert process.returncode == 1
    assert process.stderr == f"release: the tag is v0.0.0, but pagepool/_version.py has {version}: expected v{version}\n"


def complete(version: str) -> list[str]:
    """Return the names of a release's files."""
    pythons = ["cp311-cp311", "cp312-cp312", "cp313-cp313", "cp314-cp314", "cp314-cp314t"]
    platforms = [f"{libc}_{machine}" for machine in ("x86_64", "aarch64") for libc in ("manylinux_2_28", "musllinux_1_2")]
    platforms += ["macosx_10_13_x86_64", "macosx_11_0_arm64"]
    return [f"pagepool-{version}.tar.gz"] + [
        f"pagepool-{version}-{python}-{platform}.whl" for python in pythons for platform in platforms
    ]


def test_what_is_missing_or_too_much_is_named(distributions: ModuleType) -> None:
    names = complete("1.2.0")
    assert distributions.find_faults(names, "1.2.0") == []
    names.remove("pagepool-1.2.0.tar.gz")
    names[0] = names[0].replace("1.2.0", "1.1.0")
    names.append("pagepool-1.2.0-cp314-cp314-macosx_12_0_arm64.whl")
    assert distributions.find_faults(names, "1.2.0") == [
        "pagepool-1.2.0.tar.gz: 0 files, expected 1",
        "pagepool-1.2.0-cp311-cp311-manylinux*_x86_64.whl: 0 files, expected 1",
        "pagepool-1.2.0-cp314-cp314-macosx*_arm64.whl: 2 files, expected 1",
        "pagepool-1.1.0-cp311-cp311-manylinux_2_28_x86_64.whl: unexpected",
    ]
