"""Which modules setup.py builds again after a change. The package is a small one, the compiler a script that logs its calls."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sources import ROOT

pytest.importorskip("Cython", reason="the build needs Cython")
pytest.importorskip("setuptools", minversion="77", reason="the build needs a setuptools that knows PEP 639")

COMPILER = """#!/bin/sh
echo "$@" >> {log}
while [ "$1" != -o ]; do shift; done
echo "$@" > "$2"
"""
SHARED = "pagepool.core._memoryviews"
SOURCES = {
    "room/lower.pxd": "cdef inline int lower(int a) noexcept:\n    assert a\n    return a + 1\n",
    "room/upper.pxd": "from pagepool.core.room.lower cimport lower\ncdef inline int upper(int a) noexcept: return lower(a)\n",
    "room/user.pyx": "from pagepool.core.room.upper cimport upper\n\ndef use(int a):\n    return upper(a)\n",
    "alone.pyx": "def alone(int a):\n    return a\n",
}


class Tree:
    """A package and a compiler, in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "compiled"
        self.core = folder / "pagepool" / "core"
        for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "pagepool/_version.py"):
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        for name, text in SOURCES.items():
            (self.core / name).parent.mkdir(parents=True, exist_ok=True)
            (self.core / name).write_text(text)
        for package in (self.core.parent, self.core, self.core / "room"):
            (package / "__init__.py").touch()
        compiler = folder / "cc"
        compiler.write_text(COMPILER.format(log=self.log))
        compiler.chmod(0o755)

    def run(self, *arguments: str, **switches: str) -> subprocess.CompletedProcess[str]:
        """Build in place."""
        self.log.write_text("")
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PAGEPOOL_")}
        environment |= {"CC": str(self.folder / "cc"), "LDSHARED": str(self.folder / "cc")} | switches
        command = [sys.executable, *(arguments or ["setup.py"]), "--quiet", "build_ext", "--inplace"]
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False)

    def build(self, **switches: str) -> set[str]:
        """Build in place; return the modules that were compiled."""
        process = self.run(**switches)
        assert process.returncode == 0, process.stderr
        paths = re.findall(r" -c build/\S+?/(pagepool/\S+)[.]c ", self.log.read_text())
        return {path.replace("/", ".") for path in paths}

    def edit(self, name: str, old: str, new: str) -> None:
        path = self.core / name
        path.write_text(path.read_text().replace(old, new))


@pytest.mark.slow
def test_only_what_changed_is_built(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    user, alone = "pagepool.core.room.user", "pagepool.core.alone"
    assert tree.build() == {SHARED, user, alone}
    tree.edit("room/lower.pxd", "cdef", "# A comment moves the lines of an assertion.\n\ncdef")
    assert tree.build() == set()
    tree.edit("room/lower.pxd", "a + 1", "a + 2")
    assert tree.build() == {user}
    next(tree.core.glob("alone.*.so")).unlink()
    next(Path(tmp_path, "build").glob("lib*/pagepool/core/room/user.*.so")).write_text("another")
    assert tree.build() == {user}
    assert next(tree.core.glob("alone.*.so")).exists()
    assert tree.build(PAGEPOOL_DEBUG="1") == {SHARED, user, alone}
    assert tree.build(CFLAGS="-DCHANGED", PAGEPOOL_DEBUG="1") == {SHARED, user, alone}
    assert tree.build() == {SHARED, user, alone}


def test_what_failed_is_built_again(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.edit("alone.pyx", "return a", "return b")
    with pytest.raises(AssertionError, match="undeclared name not builtin: b"):
        tree.build()
    tree.edit("alone.pyx", "return b", "return a")
    assert tree.build() == {SHARED, "pagepool.core.room.user", "pagepool.core.alone"}


WITHOUT_HEADERS = """
import runpy
import setuptools
from distutils import sysconfig
sysconfig.get_python_inc = lambda *_, **__: "/nowhere/include"
runpy.run_path("setup.py", run_name="__main__")
"""
FAILING = """#!/bin/sh
echo "note: no developer tools were found" >&2
exit 1
"""


@pytest.mark.parametrize(
    ("compiler", "arguments", "message"),
    [
        ("/nowhere/cc", (), "pagepool needs a C compiler: '/nowhere/cc' cannot be run (No such file or directory). "),
        ("{folder}", (), "cannot be run (Permission denied). "),
        ("{folder}/failing", (), "failing' fails: note: no developer tools were found. "),
        ("{folder}/failing", ("-c", WITHOUT_HEADERS), "pagepool needs the headers of Python: no Python.h in "),
    ],
)
def test_without_a_compiler_or_headers_one_line_says_so_at_once(
    compiler: str, arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    tree = Tree(tmp_path)
    (tmp_path / "failing").write_text(FAILING)
    (tmp_path / "failing").chmod(0o755)
    process = tree.run(*arguments, CC=compiler.format(folder=tmp_path))
    assert process.returncode == 1
    (line,) = process.stderr.splitlines()
    assert message in line
    assert "apt install gcc python3-dev" in line
    assert not list(tmp_path.glob("build/**/pagepool/**/*.c"))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not bind processes to processors")
def test_the_build_takes_the_processors_that_it_may_use(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    count = (
        "import os, runpy; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); import sys; sys.argv[1:] = ['--version']; "
    )
    count += "print(runpy.run_path('setup.py')['count_processors']())"
    process = tree.run("-c", count)
    assert process.stdout.splitlines()[-1] == "1", process.stderr
