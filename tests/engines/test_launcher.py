"""``python -m pagepool.compat.easydel``: a program runs as under python, and its engine has pagepool."""

from __future__ import annotations

import py_compile
import re
import subprocess
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from fake_easydel import HOME, SHOW, run_python, write_engine

LAUNCHER = ("-m", "pagepool.compat.easydel")

DESCRIBE = """
import pickle, sys, threading
class Point: pass
def describe():
    main = sys.modules["__main__"]
    print(sys.argv, sys.path, vars(main) is globals(), type(pickle.loads(pickle.dumps(Point()))) is Point)
names = ("__name__", "__file__", "__package__", "__doc__", "__cached__", "__annotations__", "__builtins__")
print([globals().get(name, "no such name") for name in names])
print(type(__loader__).__name__, __spec__ and (__spec__.name, __spec__.origin))
describe()
threading.Thread(target=lambda: (threading.main_thread().join(), describe())).start()  # when the program is over
"""

FAIL = """
import sys
def fail(): {}["no such key"]
def show(kind, error, traceback):
    print(kind, error, traceback.tb_lineno, error.__traceback__ is traceback, sys.excepthook is show, file=sys.stderr)
what = sys.argv[1]
if what == "exit": sys.exit(int(sys.argv[2]))
if what == "message": sys.exit("a message")
if what == "none": sys.exit()
if what == "interrupt": raise KeyboardInterrupt
if what == "group": raise ExceptionGroup("two", [ValueError("one"), TypeError("other")])
if what == "hook": sys.excepthook = show
try:
    fail()
except KeyError as error:
    if what == "cause": raise ValueError("because") from error
    raise
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an engine, and programs of every form that python runs."""
    write_engine(tmp_path)
    for name, source in {"describe.py": DESCRIBE, "fail.py": FAIL, "show.py": SHOW, "broken.py": "x = (\n"}.items():
        (tmp_path / name).write_text(source)
    (tmp_path / "latin.py").write_bytes(b'# coding: latin-1\nprint(ascii("\xe9"))\n')
    for name in ("package", "empty"):
        (tmp_path / name).mkdir()
    for name in ("__main__.py", "module.py"):
        (tmp_path / "package" / name).write_text(DESCRIBE)
    with zipfile.ZipFile(tmp_path / "packed.zip", "w") as archive:
        archive.writestr("__main__.py", DESCRIBE)
    (tmp_path / "link.py").symlink_to(Path("package") / "module.py")
    py_compile.compile(str(tmp_path / "describe.py"), str(tmp_path / "compiled.pyc"))
    return tmp_path


def outcome(process: subprocess.CompletedProcess[str]) -> tuple[str, str, int]:
    """Return the output of a process, without addresses of objects, and its exit code."""
    return process.stdout, re.sub(r"0x\w+", "0x", process.stderr), process.returncode


def check_as_python(folder: Path, *arguments: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Output, errors, tracebacks and exit code are python's."""
    process = run_python(folder, *options, *LAUNCHER, *arguments)
    assert outcome(process) == outcome(run_python(folder, *options, *arguments))
    return process


def quick_first(cases: Iterable[Any], num_quick: int) -> list[Any]:
    """Return cases as parameters, of which all but the first ones are slow."""
    return [pytest.param(case, marks=pytest.mark.slow if i >= num_quick else ()) for i, case in enumerate(cases)]


PROGRAMS = ["package", "-m package.module", "describe.py", "link.py", "packed.zip", "compiled.pyc", "package/module.py"]
PROGRAMS += ["./package", "-m package", "-m describe", "-P describe.py", "-P -m describe", "-P package", "-P packed.zip"]


@pytest.mark.parametrize("program", quick_first(PROGRAMS, 2))
def test_a_program_sees_what_it_sees_under_python(folder: Path, program: str) -> None:
    """Modules, arguments, path, `__main__` and its classes, during the run and afterwards."""
    options = ("-P",) if program.startswith("-P ") else ()
    words = program.removeprefix("-P ").split()
    process = check_as_python(folder, *words, "--help", "-m", "x", "--", "-h", options=options)
    assert process.returncode == 0
    assert process.stdout.count("'--help', '-m', 'x', '--', '-h'") == 2


ENDINGS = {"fail.py exit 7": 7, "-m fail cause": 1, "-m fail interrupt": -2, "nowhere.py": 2, "broken.py": 1, "latin.py": 0}
ENDINGS |= dict.fromkeys(
    ["fail.py hook", "fail.py message", "fail.py error", "fail.py group", "empty", "-m empty", "-m broken"], 1
)
ENDINGS |= {"fail.py exit 0": 0, "fail.py none": 0, "nowhere/": 2, "package/nowhere.py": 2, "-m nowhere": 1, "-m broken": 1}
"""Command lines of programs that fail, end, or cannot run, with their exit codes."""


@pytest.mark.parametrize("line", quick_first(ENDINGS, 5))
def test_a_program_ends_as_under_python(folder: Path, line: str) -> None:
    """Exit codes, and tracebacks that begin with the program's own lines."""
    assert check_as_python(folder, *line.split()).returncode == ENDINGS[line]


@pytest.mark.parametrize(
    ("arguments", "got"), [([], "got no PROGRAM"), (["-m"], "got no PROGRAM"), (["--fast", "show.py"], "--fast")]
)
def test_a_wrong_command_line(folder: Path, arguments: list[str], got: str) -> None:
    process = run_python(folder, *LAUNCHER, *arguments)
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr.startswith("Usage: python -m pagepool.compat.easydel PROGRAM [ARGUMENT ...]\n")
    assert got in process.stderr.splitlines()[-1]


def test_help(folder: Path) -> None:
    process = run_python(folder, *LAUNCHER, "--help", "show.py")
    assert (process.returncode, process.stderr) == (0, "")
    assert "python -m pagepool.compat.easydel -m MODULE [ARGUMENT ...]" in process.stdout


@pytest.mark.parametrize(("program", "value"), [("show.py", "0"), ("-m show", None)])
def test_the_engine_has_pagepool(folder: Path, program: str, value: str | None) -> None:
    """The command line takes precedence over the variable."""
    process = run_python(folder, *LAUNCHER, *program.split(), value=value)
    assert (process.stdout, process.stderr, process.returncode) == ("pagepool.compat.easydel\n", "", 0)


def test_the_program_runs_before_the_engine_is_imported(folder: Path) -> None:
    (folder / "early.py").write_text("import sys; print('easydel' in sys.modules, 'jax' in sys.modules)")
    assert run_python(folder, *LAUNCHER, "early.py").stdout == "False False\n"


CHILDREN = f"""
import multiprocessing, sys
from concurrent.futures import ProcessPoolExecutor
class Answer:
    def __init__(self, depth):
        from {HOME[: HOME.index(".core")]}.scheduler import scheduler
        self.homes = [scheduler.CacheManager.__module__, *(ask(depth - 1).homes if depth else [])]
def ask(depth):
    with ProcessPoolExecutor(1, multiprocessing.get_context(sys.argv[1])) as pool:
        return pool.submit(Answer, depth).result()
if __name__ == "__main__":
    print(ask(1).homes)
"""


@pytest.mark.parametrize("words", quick_first(["-m children spawn", "children.py fork", "children.py forkserver"], 1))
def test_children_of_multiprocessing_have_it_too(folder: Path, words: str) -> None:
    """Child processes, and theirs, in a program that never names pagepool and sends objects of its own classes."""
    (folder / "children.py").write_text(CHILDREN)
    process = run_python(folder, *LAUNCHER, *words.split())
    assert (process.stdout, process.stderr, process.returncode) == (f"{['pagepool.compat.easydel'] * 2}\n", "", 0)


@pytest.mark.parametrize("method", quick_first(["spawn", "forkserver"], 1))
def test_children_of_a_program_that_imports_pagepool_have_it_too(folder: Path, method: str) -> None:
    """With the variable alone, also in children that do not import pagepool themselves."""
    source = CHILDREN.replace('__main__":', '__main__":\n    import pagepool')
    (folder / "children.py").write_text(source)
    assert run_python(folder, "children.py", method, value="1").stdout == f"{['pagepool.compat.easydel'] * 2}\n"
    assert run_python(folder, "children.py", method, value="0").stdout == f"{[HOME] * 2}\n"


def test_other_children_have_the_variable(folder: Path) -> None:
    """Programs that import pagepool or are started by the launcher have pagepool; others do not."""
    (folder / "parent.py").write_text(
        "import subprocess, sys\n"
        "for arguments in (['-c', 'import pagepool, show'], ['-m', 'pagepool.compat.easydel', 'show.py'], ['show.py']):\n"
        "    subprocess.run([sys.executable, *arguments], check=True)\n"
    )
    process = run_python(folder, *LAUNCHER, "parent.py")
    assert process.stdout == f"pagepool.compat.easydel\npagepool.compat.easydel\n{HOME}\n"
