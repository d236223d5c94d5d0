"""The house style, where no linter looks: short functions, no asserts in the package, C and nothing else in hot loops."""

import ast
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from sources import CORE, EXAMPLES, HEADERS, PYTHON_FILES, ROOT, cython_functions, python_functions

FUNCTIONS = [
    *(function for path in [*PYTHON_FILES, *EXAMPLES] for function in python_functions(path)),
    *(function for path in (CORE, *HEADERS) for function in cython_functions(path)),
]
MAX_BODY_LINES = 50
MAX_MEDIAN = 9
ANNOTATED_LINE = re.compile(r'<pre class="cython line score-(\d+)"[^\n]*?<span class="">(\d+)</span>')


def test_no_function_is_long() -> None:
    long = [f"{f.file}:{f.start} {f.name}: {f.num_body_lines}" for f in FUNCTIONS if f.num_body_lines > MAX_BODY_LINES]
    assert not long


@pytest.mark.parametrize("suffix", [".py", ".pyx", ".pxd"])
def test_the_median_function_is_short(suffix: str) -> None:
    sizes = [f.num_body_lines for f in FUNCTIONS if Path(f.file).suffix == suffix and f.num_body_lines]
    assert statistics.median(sizes) <= MAX_MEDIAN


@pytest.mark.parametrize("path", [*PYTHON_FILES, *EXAMPLES], ids=lambda path: str(path.relative_to(ROOT)))
def test_no_asserts(path: Path) -> None:
    """`python -O` takes them away, and users' mistakes deserve an error of their own."""
    assert [node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assert)] == []


def release_directives() -> dict[str, object]:
    """Return the directives that the build gives to Cython."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "DIRECTIVES":
            directives: dict[str, object] = ast.literal_eval(node.value)
            return directives
    raise LookupError("setup.py has no DIRECTIVES")


@pytest.mark.parametrize("path", [CORE, *HEADERS], ids=lambda path: path.name)
def test_nogil_functions_are_pure_c(path: Path, tmp_path: Path) -> None:
    """Cython's annotated source scores each line by its calls into Python: yellow above 0. Asserts are for debug builds. A
    header is annotated as a module of its own.
    """
    pytest.importorskip("Cython")
    source = tmp_path / f"{path.stem}.pyx"
    source.write_text(re.sub(r"^( *)assert .*$", r"\1pass", path.read_text(), flags=re.MULTILINE))
    directives = ",".join(f"{name}={value}" for name, value in release_directives().items())
    command = [sys.executable, "-m", "cython", "--annotate", "-I", str(ROOT), "-X", directives, source.name]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=120)
    annotated = source.with_suffix(".html").read_text()
    scores = {int(line): int(score) for score, line in ANNOTATED_LINE.findall(annotated)}
    assert len(scores) == len(path.read_text().splitlines())
    nogil = [f for f in FUNCTIONS if f.file == path.name and "noexcept nogil" in f.header]
    assert nogil or path.stem == "platform"
    yellow = [f"{f.name}: line {line}" for f in nogil for line in range(f.start, f.stop) if scores[line]]
    assert not yellow
