"""The linter of English finds what it is for, where it is, and little else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from sources import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import prose

FAULTS = {
    "of which": "# Four bytes, of which some are past the end.",
    "as far as": "# as far as all groups have it",
    "so many": "# takes so many pages",
    "what is ... of": "# what is known of a page",
    "is told": "# The router is told.",
    "that ... that": "# a block that has an entry that nothing hits",
    "who as a subject": "# Who writes here marks it.",
    "a fragment": "x = 1  # of an eviction",
    "third person in place of the imperative": 'def f():\n    """Find it. Returns a page."""',
    "no imperative verb first": 'cdef int f(int x) noexcept:\n    """The page of x."""',
}
GOOD = '''"""A module that needs no verb."""
FIELD = 1  # bytes
"""Whether a field is true."""
# Of two pages the older one is evicted, that is so.
# With a policy, the policy decides. For now the queue is empty.

class A:
    """A class."""

    def __init__(self):
        """The parameters are numbers."""

    @property
    def size(self):
            """The size: `of which`."""

def process(x="# of which"):
    """Process it.

    >>> "Returns"
    """  # noqa
'''


@pytest.mark.parametrize(("name", "source"), FAULTS.items(), ids=FAULTS)
def test_each_pattern_is_found(name: str, source: str) -> None:
    texts = [*prose.read_source(f"\n{source}\n")]
    assert [text.line for text in texts] == [2 + source.count("\n")]
    assert [fault.partition(":")[0] for fault in prose.find_faults(texts[0])] == [name]


@pytest.mark.parametrize(
    "opening", ["The page", "A page", "Returns it", "Where it is", "How it is", "Pages of it", "IntegrityError if"]
)
def test_functions_begin_with_an_imperative_verb(opening: str) -> None:
    assert len([*prose.find_faults(prose.Text(1, "function", opening))]) == 1


@pytest.mark.parametrize("opening", ["Return it", "Whether it is", "Process it", "Bring it", "Pass it"])
def test_imperative_verbs_pass(opening: str) -> None:
    assert [*prose.find_faults(prose.Text(1, "function", opening))] == []


def test_good_sources_pass() -> None:
    faults = {text.line: [*prose.find_faults(text)] for text in prose.read_source(GOOD)}
    assert faults == {line: [] for line in (1, 2, 3, 4, 8, 11, 15, 18)}


def test_pages_are_read_without_code() -> None:
    page = "# Title\n\n```text\nof which\n```\n\n- an item\n- a page `of which`\n\n| a | is told |\n"
    faults = [(text.line, fault) for text in prose.read_page(page) for fault in prose.find_faults(text)]
    assert faults == [(10, "is told")]


@pytest.mark.parametrize(
    "subject", ["Returns a page", "Say where.", "Pages that are cached", "Let a page, of which two exist, go"]
)
def test_subjects(subject: str) -> None:
    assert len([*prose.find_faults(prose.Text(1, "subject", subject))]) == 1


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    monkeypatch.setattr(prose, "CHECKED", ("pagepool",))
    (tmp_path / "pagepool").mkdir()
    assert prose.main([]) == 0
    (tmp_path / "pagepool" / "read.pyx").write_text("x = 1  # so many\n")
    assert prose.main([]) == 1
    assert capsys.readouterr().out == "pagepool/read.pyx:1: so many\n"
