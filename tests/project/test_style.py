"""The package has no asserts, and its hot loops are free of Python."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sources import DOORS, EXAMPLES, HEADERS, PYTHON_FILES, ROOT, Function, cython_functions, name_of

CYTHON_FILES = [*DOORS, *HEADERS]
ANNOTATED_LINE = re.compile(r'<pre class="cython line score-(\d+)"[^\n]*?<span class="">(\d+)</span>')


def test_no_asserts() -> None:
    """`python -O` removes them, and users' mistakes deserve a typed error."""
    trees = {name_of(path): ast.parse(path.read_text()) for path in (*PYTHON_FILES, *EXAMPLES)}
    assert [path for path, tree in trees.items() if any(isinstance(node, ast.Assert) for node in ast.walk(tree))] == []


def test_structs_are_made_with_the_names_of_their_fields() -> None:
    structs = "|".join(
        name for path in CYTHON_FILES for name in re.findall(r"^cdef struct (\w+)", path.read_text(), re.MULTILINE)
    )
    literal = re.compile(rf"(?<![<\w])(?:{structs})\((?!\)|\s*\w+=)")
    found = [(path.name, match.group()) for path in CYTHON_FILES for match in literal.finditer(path.read_text())]
    assert not found


def release_directives() -> dict[str, object]:
    """Return the directives that the build gives to Cython."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "DIRECTIVES":
            directives: dict[str, object] = ast.literal_eval(node.value)
            return directives
    raise LookupError("setup.py has no DIRECTIVES")


def nogil_functions(path: Path) -> list[Function]:
    return [f for f in cython_functions(path) if "noexcept nogil" in f.header]


@pytest.mark.slow
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
    assert [path.stem for path in HEADERS if path.stem not in modules and not nogil_functions(path)] == [
        "limits",
        "platform",
        "run",
    ]
