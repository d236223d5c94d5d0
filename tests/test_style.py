"""House style beyond the linters: size limits, no asserts in the package, only C in hot loops."""

import ast
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from sources import DOORS, EXAMPLES, HEADERS, PYTHON_FILES, ROOT, STUBS, Function, classes_in, cython_functions, functions_in

import pagepool

CYTHON_FILES = [*DOORS, *HEADERS]
PRODUCT = [*PYTHON_FILES, *CYTHON_FILES, *STUBS]
FUNCTIONS = [function for path in [*PYTHON_FILES, *EXAMPLES, *CYTHON_FILES] for function in functions_in(path)]
MAX_BODY_LINES = 50
MAX_MEDIAN = 9
MAX_FILE_LINES = 800
MAX_CLASS_LINES = 400
MAX_PARAMETERS = 6
CONSTRUCTORS = {"__init__", "__cinit__", "__new__"}
LONG_PUBLIC_CALLS = {
    "CacheManager.allocate_slots",
    "PagePool.cache_full_pages",
    "PagePool.cache_full_page_ids",
    "RunningBatch.admit",
}
ANNOTATED_LINE = re.compile(r'<pre class="cython line score-(\d+)"[^\n]*?<span class="">(\d+)</span>')


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", PRODUCT, ids=name_of)
def test_no_file_is_long(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES


@pytest.mark.parametrize("path", PRODUCT, ids=name_of)
def test_no_class_is_long(path: Path) -> None:
    sizes = {cls.name: cls.stop - cls.start for cls in classes_in(path)}
    assert {name: size for name, size in sizes.items() if size > MAX_CLASS_LINES} == {}


def is_public_constructor(qualname: str) -> bool:
    *owners, name = qualname.split(".")
    return name in CONSTRUCTORS and not any(owner.startswith("_") for owner in owners)


def commands(path: Path) -> set[str]:
    """Return the functions of a Python file that click calls, with an argument for each option."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    return {node.name for node in nodes if any("click.command(" in ast.unparse(item) for item in node.decorator_list)}


@pytest.mark.parametrize("path", [*PYTHON_FILES, *CYTHON_FILES], ids=name_of)
def test_no_function_has_many_parameters(path: Path) -> None:
    """Except what users call by keywords: public constructors, commands, and `LONG_PUBLIC_CALLS`."""
    exceptions = LONG_PUBLIC_CALLS | (commands(path) if path.suffix == ".py" else set())
    assert [
        f"{f.qualname}: {f.num_parameters}"
        for f in functions_in(path)
        if f.num_parameters > MAX_PARAMETERS and f.qualname not in exceptions and not is_public_constructor(f.qualname)
    ] == []


def test_long_calls_are_public() -> None:
    """And long: the list of exceptions has nothing else."""
    assert {f.qualname for f in FUNCTIONS if f.num_parameters > MAX_PARAMETERS} >= LONG_PUBLIC_CALLS
    assert {name.partition(".")[0] for name in LONG_PUBLIC_CALLS} <= set(pagepool.__all__)


def test_no_function_is_long() -> None:
    long = [f"{f.file}:{f.start} {f.name}: {f.num_body_lines}" for f in FUNCTIONS if f.num_body_lines > MAX_BODY_LINES]
    assert not long


@pytest.mark.parametrize("suffix", [".py", ".pyx", ".pxd"])
def test_the_median_function_is_short(suffix: str) -> None:
    sizes = [f.num_body_lines for f in FUNCTIONS if Path(f.file).suffix == suffix and f.num_body_lines]
    assert statistics.median(sizes) <= MAX_MEDIAN


@pytest.mark.parametrize("path", [*PYTHON_FILES, *EXAMPLES], ids=lambda path: str(path.relative_to(ROOT)))
def test_no_asserts(path: Path) -> None:
    """`python -O` removes them, and users' mistakes deserve a typed error."""
    assert [node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assert)] == []


def release_directives() -> dict[str, object]:
    """Return the directives that the build gives to Cython."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "DIRECTIVES":
            directives: dict[str, object] = ast.literal_eval(node.value)
            return directives
    raise LookupError("setup.py has no DIRECTIVES")


def nogil_functions(path: Path) -> list[Function]:
    return [f for f in cython_functions(path) if "noexcept nogil" in f.header]


@pytest.mark.parametrize("path", [path for path in CYTHON_FILES if nogil_functions(path)], ids=name_of)
def test_nogil_functions_are_pure_c(path: Path, tmp_path: Path) -> None:
    """Cython's annotated source scores each line by its calls into Python: yellow above 0. Asserts are for debug builds. A
    module is annotated under its own name, so that its declarations belong to it; a header as a module of its own.
    """
    pytest.importorskip("Cython")
    source = tmp_path / f"{path.stem}.pyx"
    source.write_text(re.sub(r"^( *)assert .*$", r"\1pass", path.read_text(), flags=re.MULTILINE))
    directives = ",".join(f"{name}={value}" for name, value in release_directives().items())
    command = [sys.executable, "-m", "cython", "--annotate", "-I", str(ROOT), "-X", directives, source.name]
    command += ["--module-name", ".".join(path.relative_to(ROOT).with_suffix("").parts)] if path in DOORS else []
    subprocess.run(command, cwd=tmp_path, check=True, timeout=120)
    annotated = source.with_suffix(".html").read_text()
    scores = {int(line): int(score) for score, line in ANNOTATED_LINE.findall(annotated)}
    assert len(scores) == len(path.read_text().splitlines())
    yellow = [f"{f.name}: line {line}" for f in nogil_functions(path) for line in range(f.start, f.stop) if scores[line]]
    assert not yellow


def test_headers_have_nogil_functions() -> None:
    """Those of no module: so that none is left out unnoticed."""
    modules = {path.stem for path in DOORS}
    assert [path.stem for path in HEADERS if path.stem not in modules and not nogil_functions(path)] == ["platform"]
