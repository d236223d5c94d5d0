"""Check what would be published, and print a line for each fault: `python .ci/release_check.py [FOLDER]`.

Without a folder it checks the repository: version, tags, the changelog's sections, and the README's installation. With a folder
of distributions it checks their names, metadata and contents, and lists those that only the release workflow builds.
`make release-check` does both, around its builds.
"""

import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from check_distributions import PYTHONS, find_missing, find_surplus
from packaging.metadata import Metadata
from packaging.utils import canonicalize_name
from packaging.version import Version
from release_notes import ROOT, extract_section, read_headings, read_version

INSTALLATION = "pip install 'pagepool[jax]'"
"""The README's command from the first release on. Until then its first block names the command and installs a clone."""

PYTHON_CLASSIFIER = "Programming Language :: Python :: 3."
EXTRAS = re.compile(r"(?:pagepool|'\.)\[([a-z][\w,-]*)\]")
GENERATED = re.compile(r"PKG-INFO|setup\.cfg|pagepool\.egg-info/.*")


def check_version(version: str, changelog: str, other_tags: Iterable[str]) -> Iterator[str]:
    """Yield the faults of a version that the next tag would publish. `other_tags` are on other commits than this one."""
    if str(Version(version)) != version:
        yield f"pagepool/_version.py has {version}, which an index would show as {Version(version)}"
    headings = read_headings(changelog)
    newest = next(iter(headings), None)
    if newest != version:
        yield f"pagepool/_version.py has {version}, but the first section of CHANGELOG.md is {newest}"
    elif headings[version] != "unreleased":
        try:
            extract_section(changelog, version)
        except ValueError as error:
            yield str(error)
    if taken := [tag for tag in other_tags if re.match(r"v\d", tag) and Version(tag) >= Version(version)]:
        yield f"pagepool/_version.py has {version}, but other commits have the tags {', '.join(taken)}"


def check_installation(readme: str, changelog: str) -> Iterator[str]:
    """Yield a fault unless the README's first block of commands installs a clone before the first release, and the published
    package from then on.
    """
    block = re.search(r"^```sh\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    lines = block[1].splitlines() if block else [""]
    if any(state != "unreleased" for state in read_headings(changelog).values()):
        if len(lines) > 1 or not lines[0].startswith(INSTALLATION):
            yield f"CHANGELOG.md has a release, so the first block of README.md must be one line: {INSTALLATION}"
    elif not (lines[0].startswith("#") and INSTALLATION in lines[0] and any(line.startswith("git clone ") for line in lines)):
        yield (
            "CHANGELOG.md has no release yet, so the first block of README.md must install a clone, "
            f"below a comment with the command of later: {INSTALLATION}"
        )


def check_pythons(metadata: Metadata, built: Iterable[str]) -> Iterator[str]:
    """Yield the faults of what the metadata promise about Pythons. Wheels are built for those in `built`, such as `cp314t`."""
    names = {*built}
    versions = {f"3.{name.removeprefix('cp3').rstrip('t')}" for name in names}
    classifiers = metadata.classifiers or []
    promised = {text.rpartition(" ")[2] for text in classifiers if text.startswith(PYTHON_CLASSIFIER)}
    yield from (f"classifiers: Python {version} has no wheels" for version in sorted(promised - versions))
    yield from (f"classifiers: Python {version}, which has wheels, is missing" for version in sorted(versions - promised))
    if any("Free Threading" in text for text in classifiers) != any(name.endswith("t") for name in names):
        yield "classifiers: free threading must be there if, and only if, it has wheels"
    least = min(versions, key=Version)
    if str(metadata.requires_python) != f">={least}":
        yield f"requires-python: got {metadata.requires_python}, expected >={least}, the least Python with wheels"


def check_names(metadata: Metadata, classifiers: Iterable[str], texts: Iterable[str]) -> Iterator[str]:
    """Yield the names in the metadata that an index would refuse or change, and extras mentioned by `texts` or other extras but
    not defined. `classifiers` are those of the index.
    """
    if metadata.name != canonicalize_name(metadata.name):
        yield f"name: got {metadata.name}, which an index would show as {canonicalize_name(metadata.name)}"
    yield from (f"classifiers: the index has no {text!r}" for text in sorted({*(metadata.classifiers or ())} - {*classifiers}))
    needs = metadata.requires_dist or []
    if [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})] != ["numpy"]:
        yield "dependencies: without extras only numpy is allowed"
    mentioned = {extra for need in needs if need.name == metadata.name for extra in need.extras}
    mentioned |= {extra for text in texts for names in EXTRAS.findall(text) for extra in names.split(",")}
    extras = {*(metadata.provides_extra or ())}
    yield from (f"extras: {extra} is mentioned, but does not exist" for extra in sorted(mentioned - extras))


def check_traces(wheel: str, modules: dict[str, bytes], folders: Iterable[Path]) -> Iterator[str]:
    """Yield the folders of the building machine whose paths are in a wheel's compiled modules."""
    for folder in folders:
        found = [name for name, contents in modules.items() if f"{folder}/".encode() in contents and folder != folder.parent]
        if found:
            yield f"{wheel}: {len(found)} modules have paths in {folder} of the building machine, the first is {found[0]}"


def check_sources(names: Iterable[str], tracked: Iterable[str]) -> Iterator[str]:
    """Yield the files of a source distribution that are neither generated nor in git."""
    extra = sorted({*names} - {*tracked})
    yield from (f"source distribution: {name} is not in git" for name in extra if not GENERATED.fullmatch(name))


def summarize(wheels: Iterable[str]) -> list[str]:
    """Return a line for each Python, with its tags and the platforms of these wheels."""
    platforms: dict[str, list[str]] = {}
    for wheel in wheels:
        tags, platform = wheel.removesuffix(".whl").split("-", 2)[2].rsplit("-", 1)
        platforms.setdefault(tags, []).append(platform)
    return [f"{tags}: {', '.join(names)}" for tags, names in platforms.items()]


def run_git(*arguments: str) -> list[str]:
    """Return the lines that git prints."""
    return subprocess.run(["git", "-C", ROOT, *arguments], check=True, capture_output=True, text=True).stdout.splitlines()


def check_repository(version: str) -> Iterator[str]:
    """Yield the faults that are seen before anything is built."""
    changelog = (ROOT / "CHANGELOG.md").read_text()
    yield from check_version(version, changelog, sorted({*run_git("tag")} - {*run_git("tag", "--points-at", "HEAD")}))
    yield from check_installation((ROOT / "README.md").read_text(), changelog)


def check_files(folder: Path, version: str) -> Iterator[str]:
    """Yield the faults of the distributions in a folder."""
    from trove_classifiers import classifiers

    yield from find_surplus([path.name for path in folder.iterdir()], version)
    metadata_files = set()
    for path in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(path) as wheel:
            metadata_files.add(wheel.read(f"pagepool-{version}.dist-info/METADATA"))
            modules = {name: wheel.read(name) for name in wheel.namelist() if name.endswith(".so")}
        yield from check_traces(path.name, modules, (ROOT, Path.home(), Path(tempfile.gettempdir())))
    top = f"pagepool-{version}/"
    with tarfile.open(folder / f"pagepool-{version}.tar.gz") as archive:
        information = archive.extractfile(f"{top}PKG-INFO")
        metadata_files.add(information.read() if information else b"")
        names = [member.name.removeprefix(top) for member in archive.getmembers() if member.isfile()]
    yield from check_sources(names, run_git("ls-files"))
    if len(metadata_files) > 1:
        yield "metadata: the distributions have different ones"
    metadata = Metadata.from_email(metadata_files.pop())
    documents = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "pagepool").rglob("*.py")]
    yield from check_pythons(metadata, PYTHONS)
    yield from check_names(metadata, classifiers, [path.read_text() for path in documents])


def main(folder: str | None = None) -> list[str]:
    """Print what is checked, and return the faults."""
    version = read_version((ROOT / "pagepool" / "_version.py").read_text())
    if folder is None:
        print(f"version {version}, {read_headings((ROOT / 'CHANGELOG.md').read_text()).get(version, 'not in CHANGELOG.md')}")
        return [*check_repository(version)]
    names = sorted(path.name for path in Path(folder).iterdir())
    if f"pagepool-{version}.tar.gz" not in names:
        return [f"{folder} has no source distribution: was a Python of {', '.join(PYTHONS)} found, with its headers?"]
    print("built, installed and tested here:", *names, sep="\n  ")
    print("left to the release workflow:", *(summarize(find_missing(names, version)) or ["nothing"]), sep="\n  ")
    return [*check_files(Path(folder), version)]


if __name__ == "__main__":
    faults = main(*sys.argv[1:])
    sys.exit("\n".join(f"release: {fault}" for fault in faults) or 0)
