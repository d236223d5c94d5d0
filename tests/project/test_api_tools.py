"""The API reference, and the comparison with the last tag, in a repository made for it."""

from __future__ import annotations

import ast
import doctest
import posixpath
import re
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
    """Compiled classes too, with types, docstrings and examples; each class that is no error has a page."""
    index, sections = api_reference.render(public_api.load(ROOT))
    pages = {page.path: page.text for section in sections.values() for page in section}
    assert len(pages) == sum(map(len, sections.values()))
    names = {line.split("`")[1] for line in index.splitlines() if line.startswith("| [`")}
    assert set(pagepool.__all__) - {"__version__", "errors"} <= names
    assert not [name for name in names if name.rpartition(".")[2].startswith("_")]
    batch = pages["RunningBatch.md"]
    assert batch.startswith("# class `RunningBatch`\n")
    assert "## `step`\n\n```python\nRunningBatch.step(\n    rows: " in batch
    assert "Settle the last step of rows that sampled one token each" in batch
    assert "```python\n>>> " in batch
    assert "## `errors.RequestTooLargeError`\n" in pages["errors.md"]
    assert "# Copies on the device\n\n## `page_copies.copy_pages`\n" in pages["page_copies.md"]


def test_links_of_the_reference_lead_somewhere() -> None:
    """From the page of all names, below build/, and from pages in build/api/, to these and to the documents."""
    index, sections = api_reference.render(public_api.load(ROOT))
    texts = {"api.md": index} | {f"api/{page.path}": page.text for pages in sections.values() for page in pages}
    headings = {path: [line.lstrip("# ") for line in text.splitlines() if line.startswith("#")] for path, text in texts.items()}
    targets = {f"{path}#{api_reference.anchor(title)}" for path, titles in headings.items() for title in titles}
    targets |= {*texts, *(path.name for path in (ROOT / "docs").glob("*.md"))}
    for path, text in texts.items():
        links = {link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link}
        found = {posixpath.normpath(posixpath.join(posixpath.dirname(path), link)) for link in links}
        assert found <= targets, path


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Return one list of page ids for each group.", "Return lists of page ids."),
        ('        """Return one list of page ids for each group. O(pages)."""\n', "        ...\n"),
        ("def __len__(self) -> int: ...", 'def __len__(self) -> int:\n        """Return what nobody documented."""'),
        ('eviction: str = "lru"', "eviction: str = ..."),
        ("num_threads: int = 1", "num_threads: int = 2"),
        ("num_tokens: int | None = None,", "num_tokens: int | None = 0,"),
    ],
)
def test_the_stub_gets_public_docstrings_and_defaults_of_the_core(old: str, new: str) -> None:
    stub = stub_docs.STUB.read_text()
    assert old in stub
    wanted, mended = (ast.unparse(ast.parse(stub_docs.rewrite(text))) for text in (stub, stub.replace(old, new)))
    assert mended == wanted == ast.unparse(ast.parse(stub))


@pytest.mark.parametrize("module", [api_check, api_reference, public_api, stub_docs])
def test_examples(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]
