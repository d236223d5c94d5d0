"""The scripts that a release runs: notes from the changelog, whether all files are there, and what they promise."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType, SimpleNamespace

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


@pytest.fixture
def check(distributions: ModuleType) -> ModuleType:
    pytest.importorskip("packaging")
    return importlib.import_module("release_check")


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
        "pagepool-1.2.0.tar.gz: missing",
        "pagepool-1.2.0-cp311-cp311-manylinux*_x86_64.whl: missing",
        "pagepool-1.2.0-cp314-cp314-macosx*_arm64.whl: 2 files, expected 1",
        "pagepool-1.1.0-cp311-cp311-manylinux_2_28_x86_64.whl: unexpected",
    ]


FIRST = "# Changelog\n\n## 0.1.0 (unreleased)\n\n- All.\n"


@pytest.mark.parametrize(
    ("version", "changelog", "other_tags", "faults"),
    [
        ("0.1.0", FIRST, [], []),
        ("1.3.0", CHANGELOG, ["v1.2.0", "v1.2.0rc1", "nightly"], []),
        ("0.1.0", FIRST.replace("unreleased", "2026-01-31"), [], []),
        ("0.2.0", FIRST, [], ["pagepool/_version.py has 0.2.0, but the first section of CHANGELOG.md is 0.1.0"]),
        ("0.1.0", "", [], ["pagepool/_version.py has 0.1.0, but the first section of CHANGELOG.md is None"]),
        (
            "0.1.0",
            FIRST,
            ["v0.1.0", "v0.2.0"],
            ["pagepool/_version.py has 0.1.0, but other commits have the tags v0.1.0, v0.2.0"],
        ),
        ("0.1", "## 0.1 (soon)", [], ["CHANGELOG.md: the section of 0.1 has no date, but 'soon'"]),
        ("1.0-rc1", "## 1.0-rc1 (unreleased)", [], ["pagepool/_version.py has 1.0-rc1, which an index would show as 1.0rc1"]),
    ],
)
def test_a_version_fits_its_section_and_the_tags(
    check: ModuleType, version: str, changelog: str, other_tags: list[str], faults: list[str]
) -> None:
    assert [*check.check_version(version, changelog, other_tags)] == faults


CLONE = "```sh\n# Later: pip install 'pagepool[jax]'\ngit clone URL && cd pagepool\npip install --editable .\n```\n"
ONE_LINE = "```sh\npip install 'pagepool[jax]'   # Python 3.11\n```\n\n```sh\ngit clone URL\n```\n"


@pytest.mark.parametrize(
    ("readme", "state", "fault"),
    [
        (CLONE, "unreleased", None),
        (ONE_LINE, "2026-01-31", None),
        (ONE_LINE, "unreleased", "must install a clone"),
        (CLONE.replace("# Later: pip install 'pagepool[jax]'\n", ""), "unreleased", "below a comment"),
        (CLONE, "2026-01-31", "must be one line"),
        ("pip install 'pagepool[jax]'", "2026-01-31", "must be one line"),
    ],
)
def test_the_readme_installs_what_there_is(check: ModuleType, readme: str, state: str, fault: str | None) -> None:
    later = "## 0.2.0 (unreleased)\n\n" if state != "unreleased" else ""
    faults = [*check.check_installation(readme, f"{later}{FIRST.replace('unreleased', state)}")]
    assert len(faults) == (fault is not None)
    assert fault is None or fault in faults[0]


def test_the_readme_fits_the_changelog(check: ModuleType) -> None:
    assert [*check.check_installation((ROOT / "README.md").read_text(), (ROOT / "CHANGELOG.md").read_text())] == []


CORRECT = {
    "name": "pagepool",
    "version": "1.2.0",
    "requires_python": ">=3.13",
    "requires_dist": ["numpy>=1.26", 'click; extra == "replay"', 'pagepool[replay]; extra == "plan"'],
    "provides_extra": ["replay", "plan"],
    "classifiers": [
        "Programming Language :: Python :: 3.13",
        "Programming Language :: Python :: 3.14",
        "Programming Language :: Python :: Free Threading :: 2 - Beta",
    ],
}


@pytest.mark.parametrize(
    ("changes", "faults"),
    [
        ({}, []),
        ({"requires_python": ">=3.11"}, ["requires-python: got >=3.11, expected >=3.13, the least Python with wheels"]),
        ({"requires_python": None}, ["requires-python: got None, expected >=3.13, the least Python with wheels"]),
        (
            {"classifiers": [CORRECT["classifiers"][0], "Programming Language :: Python :: 3.9"]},
            [
                "classifiers: Python 3.9 has no wheels",
                "classifiers: Python 3.14, which has wheels, is missing",
                "classifiers: free threading must be there if, and only if, it has wheels",
                "classifiers: the index has no 'Programming Language :: Python :: 3.9'",
            ],
        ),
        ({"name": "Page_Pool", "requires_dist": ["numpy"]}, ["name: got Page_Pool, which an index would show as page-pool"]),
        ({"requires_dist": ["numpy", "jax"]}, ["dependencies: without extras only numpy is allowed"]),
        ({"provides_extra": ["plan"]}, ["extras: replay is mentioned, but does not exist"]),
    ],
)
def test_metadata_promise_what_is_built(check: ModuleType, changes: dict[str, object], faults: list[str]) -> None:
    metadata = check.Metadata.from_raw({"metadata_version": "2.4", **{k: v for k, v in (CORRECT | changes).items() if v}})
    texts = ["pip install 'pagepool[plan]'", "pip install '.[replay,plan]'", "pagepool[0]"]
    found = [
        *check.check_pythons(metadata, ["cp313", "cp314", "cp314t"]),
        *check.check_names(metadata, CORRECT["classifiers"], texts),
    ]
    assert found == faults
    if not changes:
        assert [*check.check_names(metadata, CORRECT["classifiers"], ["pip install 'pagepool[events]'"])] == [
            "extras: events is mentioned, but does not exist"
        ]


def test_a_module_has_no_path_of_the_building_machine(check: ModuleType) -> None:
    folders = [Path("/home/me"), Path("/")]
    modules = {"core.so": b"\0pagepool/core/pool.pyx\0/home/mean/x\0/lib/x\0"}
    assert [*check.check_traces("a.whl", modules, folders)] == []
    modules["pool.so"] = b"\0/home/me/python/lib\0"
    assert [*check.check_traces("a.whl", modules, folders)] == [
        "a.whl: 1 modules have paths in /home/me of the building machine, the first is pool.so"
    ]


def test_what_the_workflow_builds_is_listed_by_python(check: ModuleType, distributions: ModuleType) -> None:
    names = [name for name in complete("1.2.0") if "manylinux" not in name or "cp314-cp314t" in name]
    missing = distributions.find_missing(names, "1.2.0")
    assert check.summarize(missing) == [
        f"{tags}: manylinux*_x86_64, manylinux*_aarch64"
        for tags in ("cp311-cp311", "cp312-cp312", "cp313-cp313", "cp314-cp314")
    ]


def test_a_source_distribution_has_only_files_in_git(check: ModuleType) -> None:
    names = ["PKG-INFO", "setup.cfg", "pagepool.egg-info/SOURCES.txt", "setup.py", "tests/notes.txt", "sub/PKG-INFO"]
    assert [*check.check_sources(names, ["setup.py", "Makefile"])] == [
        "source distribution: sub/PKG-INFO is not in git",
        "source distribution: tests/notes.txt is not in git",
    ]


def test_one_python_of_each_kind_is_found(distributions: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    find_pythons = importlib.import_module("find_pythons")

    def python(minor: int, name: str, *, freethreaded: bool = False, implementation: str = "cpython") -> SimpleNamespace:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\nexit {'without' in name:d}\n")
        path.chmod(0o755)
        return SimpleNamespace(major=3, minor=minor, executable=path, freethreaded=freethreaded, implementation=implementation)

    candidates = [
        python(14, "python3.14t", freethreaded=True),
        python(14, "without_headers"),
        python(14, "python3.14"),
        python(14, "again"),
        python(12, "pypy", implementation="pypy"),
        python(10, "python3.10"),
        python(11, "python3.11"),
    ]
    assert [path.name for path in find_pythons.select(candidates)] == ["python3.11", "python3.14", "python3.14t"]
