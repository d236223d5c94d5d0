"""Compares the public API with that of the last tag ``v*``. Each broken name needs an entry in CHANGELOG.md."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import griffe
from public_api import ROOT, Public, load, walk

BREAKAGES = {
    griffe.BreakageKind.PARAMETER_MOVED: "parameter {old} moved",
    griffe.BreakageKind.PARAMETER_REMOVED: "parameter {old} was removed",
    griffe.BreakageKind.PARAMETER_CHANGED_KIND: "parameter {old} is passed in another way",
    griffe.BreakageKind.PARAMETER_CHANGED_DEFAULT: "parameter {old} has another default",
    griffe.BreakageKind.PARAMETER_CHANGED_REQUIRED: "parameter {old} became required",
    griffe.BreakageKind.PARAMETER_ADDED_REQUIRED: "parameter {new} was added, and is required",
}


def main(root: Path) -> None:
    """Print broken names, and exit with 1 if the changelog omits one."""
    tag = find_tag(root)
    if tag is None:
        return
    section = unreleased(root)
    breakages = list(compare(load_tag(root, tag), load(root)))
    silent = [breakage for breakage in breakages if not is_named(breakage[0], section)]
    for name, what in breakages:
        print(f"api-check: pagepool.{name}: {what}{'; not in the changelog' if (name, what) in silent else ''}")
    print(f"api-check: {len(breakages)} breaking changes since {tag}, {len(silent)} of them not in the changelog")
    if silent:
        names = ", ".join(sorted({f"`{name}`" for name, _ in silent}))
        sys.exit(f"api-check: keep these, or name them in the unreleased section of CHANGELOG.md: {names}")


def find_tag(root: Path) -> str | None:
    """Return the last release tag among HEAD's ancestors. Without one, print the reason and return None."""
    found = run_git(root, "describe", "--tags", "--abbrev=0", "--match", "v*")
    if found.returncode == 0:
        return found.stdout.decode().strip()
    is_shallow = run_git(root, "rev-parse", "--is-shallow-repository").stdout.strip() == b"true"
    if is_shallow:
        print("api-check: skipped: a shallow clone without tags; git fetch --tags --unshallow gets them")
    else:
        print("api-check: skipped: no tag v* to compare with")
    return None


def run_git(root: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Run git in a folder."""
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True)


def load_tag(root: Path, tag: str) -> griffe.Module:
    """Load the package as of a tag."""
    archive = run_git(root, "archive", "--format=tar", tag, "pagepool")
    archive.check_returncode()
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
        return load(Path(folder))


def unreleased(root: Path) -> str:
    """Return the changelog's section under the heading of unreleased changes; "" if there is none."""
    found = re.search(r"^## [^\n]*unreleased[^\n]*\n(.*?)(?=^## |\Z)", (root / "CHANGELOG.md").read_text(), re.S | re.M | re.I)
    return "" if found is None else found[1]


def is_named(name: str, text: str) -> bool:
    """Whether a text contains the full name of something public.

    >>> is_named("PagePool.touch", "`PagePool.touch` went"), is_named("PagePool.touch", "`PagePool.touch_page_ids` went")
    (True, False)
    """
    return re.search(rf"(?<!\w){re.escape(name.removesuffix('()'))}(?![\w.]*\w)", text) is not None


def compare(old: griffe.Module, new: griffe.Module) -> Iterator[tuple[str, str]]:
    """Yield each broken public name with a description. Members of a removed class are not yielded."""
    remaining = dict(walk(new))
    gone: list[str] = []
    for name, value in walk(old):
        if name not in remaining:
            if not name.endswith("()") and not name.startswith(tuple(f"{parent}." for parent in gone)):
                gone.append(name)
                yield name, "was removed"
        elif value.kind is not remaining[name].kind:
            yield name, f"was {value.kind.value}, is {remaining[name].kind.value}"
        elif value.is_function:
            yield from ((name, text) for text in compare_functions(value, remaining[name]))


def compare_functions(old: Public, new: Public) -> Iterator[str]:
    """Yield descriptions of changes that break callers of a function."""
    for breakage in griffe.find_breaking_changes(alone(old), alone(new)):
        names = {"old": getattr(breakage.old_value, "name", ""), "new": getattr(breakage.new_value, "name", "")}
        if breakage.kind in BREAKAGES:
            yield BREAKAGES[breakage.kind].format(**names)
    results = [str(value.returns) for value in (old, new)]  # type: ignore[union-attr]
    if results[0] != results[1]:
        yield f"returned {results[0]}, returns {results[1]}"


def alone(function: Public) -> griffe.Module:
    """Return a module that contains only a function, since griffe compares modules."""
    module = griffe.Module("alone")
    module.members["function"] = function.final_target if isinstance(function, griffe.Alias) else function
    return module


if __name__ == "__main__":
    main(ROOT if len(sys.argv) == 1 else Path(sys.argv[1]))
