"""The API reference, and the comparison with the last tag, in a repository made for it."""

from __future__ import annotations

import ast
import doctest
import subprocess
import sys
from pathlib import Path

import pytest
from sources import ROOT

pytest.importorskip("griffe")
sys.path.insert(0, str(ROOT / "tools"))
import api_check
import api_reference
import public_api
import stub_docs

import pagepool

OLD = """
class Rows:
    def __init__(self, size: int) -> None: ...
    def grow(self, rows: list[int], num_tokens: int = 1) -> int: ...
    def undo(self) -> None: ...
    def _find(self) -> None: ...
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a released package, whose manager is compiled."""
    root = tmp_path / "repository"
    (root / "pagepool" / "manager").mkdir(parents=True)
    (root / "pagepool" / "__init__.py").write_text('from pagepool.manager import Rows\n__all__ = ["Rows"]\n')
    (root / "pagepool" / "manager" / "__init__.py").write_text('from pagepool._core import Rows\n__all__ = ["Rows"]\n')
    (root / "pagepool" / "_core.pyi").write_text(OLD)
    (root / "CHANGELOG.md").write_text("## Unreleased\n\n## 0.1.0\n\n- `Rows.grow` and `Rows` came.\n")
    for command in ("init --quiet", "add --all", "commit --quiet --message all", "tag v0.1.0", "tag nightly"):
        git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", *command.split()]
        subprocess.run(git, cwd=root, check=True, capture_output=True)
    return root


def change(root: Path, old: str, new: str) -> None:
    """Replace text of the compiled class's stub."""
    stub = root / "pagepool" / "_core.pyi"
    assert old in stub.read_text()
    stub.write_text(stub.read_text().replace(old, new))


def note(root: Path, entry: str) -> None:
    """Add an entry to the unreleased section of the changelog."""
    changelog = root / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace("## Unreleased\n", f"## Unreleased\n\n- {entry}\n"))


BREAKING = [
    ("rows: list[int], num_tokens: int = 1", "rows: list[int]", "Rows.grow", "parameter num_tokens was removed"),
    ("num_tokens: int = 1", "num_tokens: int = 2", "Rows.grow", "parameter num_tokens has another default"),
    ("num_tokens: int = 1", "num_tokens: int", "Rows.grow", "parameter num_tokens became required"),
    ("num_tokens: int = 1", "*, num_tokens: int = 1", "Rows.grow", "parameter num_tokens is passed in another way"),
    ("num_tokens: int = 1) -> int", "num_tokens: int = 1) -> str", "Rows.grow", "returned int, returns str"),
    ("size: int", "size: int, columns: int", "Rows", "parameter columns was added, and is required"),
    ("    def undo(self) -> None: ...\n", "", "Rows.undo", "was removed"),
    ("    def undo(self) -> None: ...\n", "    undo: int\n", "Rows.undo", "was function, is attribute"),
]


@pytest.mark.parametrize(("old", "new", "name", "what"), BREAKING)
def test_what_breaks_needs_an_entry(
    old: str, new: str, name: str, what: str, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(repository, old, new)
    with pytest.raises(SystemExit, match=f"unreleased section of CHANGELOG.md: .*`{name}"):
        api_check.main(repository)
    assert f"{what}; not in the changelog\n" in capsys.readouterr().out
    note(repository, f"`{name}_now` is new.")
    with pytest.raises(SystemExit):
        api_check.main(repository)
    note(repository, f"`{name}` was changed.")
    api_check.main(repository)
    assert f": {what}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("num_tokens: int = 1", "num_tokens: int = 1, num_drafts: int = 0"),
        ("rows: list[int]", "rows: list[int] | None"),
        ("def undo", "def redo(self) -> None: ...\n    def undo"),
        ("    def _find(self) -> None: ...\n", ""),
    ],
)
def test_what_breaks_nobody_passes(old: str, new: str, repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(repository, old, new)
    api_check.main(repository)
    assert capsys.readouterr().out == "api-check: 0 breaking changes since v0.1.0, 0 of them not in the changelog\n"


def test_the_reference_has_every_public_name() -> None:
    """Compiled classes too, with the types of their stub, and docstrings and examples of the compiled object."""
    text = api_reference.render(public_api.load(ROOT))
    headings = {line.split("`")[1] for line in text.splitlines() if line.startswith("### ")}
    assert set(pagepool.__all__) - {"__version__", "errors"} <= headings
    assert "#### `RunningBatch.step`\n\n```python\nRunningBatch.step(\n    rows: " in text
    assert "Append one token to each row and give its next token a slot" in text
    assert "```python\n>>> " in text
    assert not [name for name in headings if name.rpartition(".")[2].startswith("_")]
    anchors = {api_reference.anchor(line.lstrip("# ")) for line in text.splitlines() if line.startswith("#")}
    links = {part.split(")")[0] for part in text.split("](")[1:]}
    assert {link for link in links if link.startswith("#")} <= anchors


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("a list or an int array with the token ids", "a list with the token ids"),
        ('        """Return the ids as a new list."""\n', "        ...\n"),
        ("def __len__(self) -> int: ...", 'def __len__(self) -> int:\n        """Return what nobody documented."""'),
        ('eviction: str = "lru"', "eviction: str = ..."),
        ("num_threads: int = 1", "num_threads: int = 2"),
        ("num_tokens: int | None = None,", "num_tokens: int | None = 0,"),
    ],
)
def test_the_stub_gets_docstrings_and_defaults_of_the_core(old: str, new: str) -> None:
    stub = stub_docs.STUB.read_text()
    assert old in stub
    wanted, mended = (ast.unparse(ast.parse(stub_docs.rewrite(text))) for text in (stub, stub.replace(old, new)))
    assert mended == wanted == ast.unparse(ast.parse(stub))


@pytest.mark.parametrize("module", [api_check, api_reference, public_api, stub_docs])
def test_examples(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]
