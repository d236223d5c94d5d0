"""The installed files, the public names, and their documentation."""

from __future__ import annotations

import doctest
import inspect
import re
import sys
import tarfile
import zipfile
from importlib.metadata import distribution, metadata, version
from pathlib import Path

import pytest
from sources import DOORS, INSTALLED, ROOT, on_the_wheel, run_python

import pagepool
from pagepool import _core

DISTRIBUTIONS = Path(sys.prefix) / "dist"
beside_its_distributions = pytest.mark.skipif(not (INSTALLED and DISTRIBUTIONS.is_dir()), reason="only make leaves them here")
MEMORYVIEWS = "pagepool.core._memoryviews"  # Cython's own code, which the modules of the core share


def members(cls: type) -> list[tuple[str, object]]:
    """Return the public methods and properties that the class itself defines."""
    return [
        (name, member)
        for name, member in vars(cls).items()
        if not name.startswith("_") and (isinstance(member, property | classmethod | staticmethod) or inspect.isroutine(member))
    ]


def test_public_names_are_sorted_and_there() -> None:
    assert pagepool.__all__ == sorted(pagepool.__all__, key=lambda name: (not name.isupper(), name))
    assert len(pagepool.__all__) == len(set(pagepool.__all__))
    assert not [name for name in pagepool.__all__ if not hasattr(pagepool, name)]
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = pagepool.no_such_name


def test_the_core_is_documented() -> None:
    """The linter sees to Python files."""
    public = {name: value for name, value in vars(_core).items() if inspect.isclass(value) or inspect.isroutine(value)}
    undocumented = [name for name, value in public.items() if not value.__doc__]
    for cls in filter(inspect.isclass, public.values()):
        undocumented += [f"{cls.__name__}.{name}" for name, _ in members(cls) if not inspect.getdoc(getattr(cls, name))]
    assert undocumented == []


def test_doctests_of_the_core() -> None:
    """Those of Python files run with pytest's own collection; compiled ones it does not see."""
    modules = {sys.modules[item.__module__] for item in vars(_core).values() if hasattr(item, "__module__")}
    results = [doctest.testmod(module) for module in modules]
    assert sum(result.attempted for result in results) > 0
    assert sum(result.failed for result in results) == 0


@on_the_wheel
def test_the_wheel_is_what_is_tested() -> None:
    assert "site-packages" in Path(pagepool.__file__).parts
    assert Path(_core.__file__).parent == Path(pagepool.__file__).parent
    assert version("pagepool") == pagepool.__version__


@on_the_wheel
def test_the_wheel_carries_the_core_and_its_types_but_no_sources_of_it() -> None:
    files = distribution("pagepool").files
    assert files is not None
    names = {str(file) for file in files if file.parts[0] == "pagepool"}
    suffix = Path(_core.__file__).name.removeprefix("_core")
    modules = {str(path.relative_to(ROOT).with_suffix("")) + suffix for path in DOORS}
    modules.add(MEMORYVIEWS.replace(".", "/") + suffix)
    assert {"pagepool/_core.pyi", "pagepool/py.typed"} | modules <= names
    assert {name for name in names if name.endswith(suffix)} == modules
    assert not {name for name in names if name.endswith((".c", ".pyx", ".pxd", ".html"))}
    assert {file.parts[0] for file in files if file.parts[0] != ".."} == {
        "pagepool",
        f"pagepool-{pagepool.__version__}.dist-info",
    }


@on_the_wheel
def test_an_index_shows_the_readme_with_links_into_the_repository() -> None:
    """Links that are relative in the README lead to the same files and headings, at the tag of this version. So do the URLs of
    the project, on the main branch.
    """
    documents = pytest.importorskip("documents")
    found = metadata("pagepool")
    urls = dict(url.split(", ") for url in found.get_all("Project-URL") or [])
    links = [*documents.find_links(found["Description"])]
    assert not [link for link in links if documents.is_relative(link)]
    into_tag, into_main = (rf"{urls['Repository']}/(?:blob|raw)/{name}/(.*)" for name in (f"v{pagepool.__version__}", "main"))
    paths = [match[1] for match in (re.match(into_tag, link) for link in links) if match]
    assert len(paths) == len([*filter(documents.is_relative, documents.find_links((ROOT / "README.md").read_text()))]) > 0
    paths += [match[1] for match in (re.match(into_main, url) for url in urls.values()) if match]
    assert "CHANGELOG.md" in paths
    assert not [path for path in paths if not documents.leads_somewhere(ROOT / "README.md", path)]


@beside_its_distributions
def test_the_source_distribution_carries_all_sources() -> None:
    """Neither it nor the wheel has a line for Python's start."""
    [wheel], [sources] = (list(DISTRIBUTIONS.glob(f"*.{suffix}")) for suffix in ("whl", "tar.gz"))
    with zipfile.ZipFile(wheel) as packed, tarfile.open(sources) as archive:
        source_names, packed_names = archive.getnames(), packed.namelist()
        readme = archive.extractfile(f"pagepool-{pagepool.__version__}/README.md")
        assert readme is not None
        assert readme.read() == (ROOT / "README.md").read_bytes()
    paths = [path for path in (ROOT / "pagepool").rglob("*.p*") if path.suffix in (".py", ".pyi", ".pyx", ".pxd")]
    assert {f"pagepool-{pagepool.__version__}/{path.relative_to(ROOT)}" for path in paths} <= {*source_names}
    assert not [name for name in source_names if name.endswith((".c", ".so"))]
    assert not [
        name for name in (*source_names, *packed_names) if name.endswith((".pth", "sitecustomize.py", "usercustomize.py"))
    ]


@pytest.mark.parametrize(
    ("arguments", "is_traceback"), [(["-c", "import pagepool.router"], True), (["-m", "pagepool", "doctor"], False)]
)
def test_a_tree_that_was_never_built_says_what_to_do(tmp_path: Path, arguments: list[str], is_traceback: bool) -> None:
    (tmp_path / "pagepool").mkdir()
    for path in (ROOT / "pagepool").glob("*.py"):
        (tmp_path / "pagepool" / path.name).write_text(path.read_text())
    process = run_python(*arguments, cwd=tmp_path, PYTHONPATH="", PYTHONSAFEPATH="")
    assert process.returncode == 1
    assert ("Traceback" in process.stderr) == is_traceback
    said = process.stderr.strip().splitlines()[-1]
    assert f"{tmp_path / 'pagepool'} has no compiled core for {sys.implementation.cache_tag}" in said
    assert "`pip install --editable .`" in said


@pytest.mark.parametrize("value", ["", "1", "wrong"])
def test_python_starts_without_pagepool(value: str) -> None:
    """The variable of EasyDeL changes nothing. The sources have no line for Python's start, and the build names none."""
    assert not list(ROOT.glob("*.pth")) + list((ROOT / "pagepool").rglob("*.pth"))
    builders = [ROOT / name for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "Makefile")]
    assert not [path.name for path in builders if ".pth" in path.read_text()]
    code = "import sys; print([name for name in sys.modules if name.split('.')[0] == 'pagepool'])"
    process = run_python("-c", code, PAGEPOOL_EASYDEL=value)
    assert (process.stdout, process.stderr) == ("[]\n", "")
