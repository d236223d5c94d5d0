"""Checks the English of comments, docstrings, pages and commit subjects, and prints each fault with its place.

Without arguments it checks the files below and the subjects of new commits; with arguments, those files and folders.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
CHECKED = ("pagepool", "tools", "examples", "setup.py", "docs", "README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
BASE = "91b7270bb659"
"""Subjects of later commits are checked."""

TOKEN = re.compile(
    r"""(?P<string>(?<!\w)[rbRBuf]{0,2}(?P<quotes>\"{3}|'{3}|"|')(?:\\.|(?!(?P=quotes)).)*?(?P=quotes))|(?P<comment>\#[^\n]*)""",
    re.DOTALL,
)
HEADER = re.compile(r"\s*(?:(?P<type>(?:cdef )?class|cdef extern)|(?:async )?def|cdef|cpdef)\b")
PRAGMA = re.compile(r"#!|# (?:noqa|type: ignore|cython:|distutils:|fmt:|pragma)")
CODE = re.compile(r"```.*?```|``[^`]+``|`[^`]+`|^ *(?:>>>|\.\.\. ).*$", re.DOTALL | re.MULTILINE)
CELL = re.compile(r"^ *- |\||\n\s*\n", re.MULTILINE)

OPENING = r"(?:^|(?<=[.;:!?]\s)|(?<=\())"
PATTERNS = {
    "of which": re.compile(r"\bof (?:which|whom)\b"),
    "as far as": re.compile(r"\bas far as\b"),
    "so many": re.compile(r"\bso many\b"),
    "what is ... of": re.compile(r"\bwhat (?:is|was|are|were) \w+ of\b", re.IGNORECASE),
    "is told": re.compile(r"\b(?:is|are|was|were|be|been|being) told\b"),
    "that ... that": re.compile(r"\bthat\b(?:,?\s+[\w'-]+){0,9}\s+(?!(?:and|or|but)\b)[\w'-]+\s+that\b"),
    "who as a subject": re.compile(OPENING + r"Who(?:ever)?\b"),
}
FRAGMENT = re.compile(r"(?:of|that|what|by|for|with|from|as|than|where)\b", re.IGNORECASE)
VERB = re.compile(r"\b(?:is|are|was|were|has|have|had|do|does|can|could|may|might|must|will|would|should|needs?)\b|, ")
THIRD_PERSON = re.compile(r"(?:^|[.!?]\s+)(?:Returns|Yields|Raises)\b")
NO_VERB = re.compile(
    r"(?:The|An?|All|Any|Both|Each|Every|Its|No|None|One|This|These|Those|What|Where|How|When|Which|Who|If|"
    r"As|At|By|For|From|In|Into|Of|On|Once|Only|Other|Over|Than|That|Then|To|Under|Upon|With|Without|"
    r"\w+Error|\w+[^s\W]s|\w{2,}(?<!r)ing|\w{2,}[^e\W]ed)\b"
    r"|\w+ (?:of|is|are|was|were|has|have)\b"
)


class Text(NamedTuple):
    """Prose and its line. The kind is comment, function or name (a docstring), page, or subject."""

    line: int
    kind: str
    text: str


def read_source(source: str) -> Iterator[Text]:
    """Yield the comments and docstrings of Python or Cython. Adjacent comment lines are one comment."""
    lines = source.splitlines()
    comment: list[str] = []
    first = last = 0
    for token in TOKEN.finditer(source):
        line = source.count("\n", 0, token.start()) + 1
        is_alone = not source[source.rfind("\n", 0, token.start()) + 1 : token.start()].strip()
        if token["comment"] is None:
            if is_alone and token["quotes"] == '"""':
                yield Text(line, find_kind(lines[: line - 1]), token["string"].strip('r"'))
        elif not PRAGMA.match(token["comment"]):
            if comment and not (is_alone and line == last + 1):
                yield Text(first, "comment", "\n".join(comment))
                comment = []
            first = first if comment else line
            comment.append(token["comment"].lstrip("# "))
            last = line if is_alone else 0
    if comment:
        yield Text(first, "comment", "\n".join(comment))


def find_kind(lines: list[str]) -> str:
    """Return the kind of a docstring after these lines. A property is documented like an attribute, not like a function."""
    header = next((i for i in range(len(lines) - 1, -1, -1) if HEADER.match(lines[i])), 0)
    match = HEADER.match(lines[header]) if lines and lines[-1].rstrip().endswith(":") else None
    is_name = match is None or match["type"] or "property" in lines[header - 1] or re.search(r"def __c?init__", lines[header])
    return "name" if is_name else "function"


def read_page(page: str) -> Iterator[Text]:
    """Yield the paragraphs, items and cells of a page, without code."""
    prose = CODE.sub(lambda code: "x" + "\n" * code[0].count("\n"), page)
    start = 0
    for end in [*(match.start() for match in CELL.finditer(prose)), len(prose)]:
        yield Text(prose.count("\n", 0, start) + 1, "page", prose[start:end].strip(" -|\n"))
        start = end


def find_faults(text: Text) -> Iterator[str]:
    """Yield the faults of a text."""
    prose = CODE.sub("x", text.text).strip()
    yield from (name for name, pattern in PATTERNS.items() if pattern.search(prose))
    if text.kind == "comment":
        sentences = re.split(r"(?<=[.!?])\s+", prose)
        yield from (f"a fragment: {each}" for each in sentences if FRAGMENT.match(each) and not VERB.search(each))
    if text.kind == "function" and THIRD_PERSON.search(prose):
        yield "third person in place of the imperative"
    elif text.kind in ("function", "subject") and NO_VERB.match(prose):
        yield "no imperative verb first"
    if text.kind == "subject" and prose.endswith("."):
        yield "a period at the end"


def list_files(names: Iterable[str]) -> Iterator[Path]:
    """Yield the files with prose among files and folders."""
    for name in names:
        path = ROOT / name
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        yield from (file for file in files if file.suffix in (".py", ".pyi", ".pyx", ".pxd", ".md"))


def list_subjects() -> list[str]:
    """Return the subjects of commits after `BASE`, without merges; none without git or in a shallow clone."""
    command = ["git", "-C", str(ROOT), "log", "--no-merges", "--format=%s", f"{BASE}..HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []


def list_faults(names: Iterable[str]) -> Iterator[str]:
    """Yield the faults of files and folders, with their places."""
    for path in list_files(names):
        read = read_page if path.suffix == ".md" else read_source
        for text in read(path.read_text()):
            yield from (f"{path.relative_to(ROOT)}:{text.line}: {fault}" for fault in find_faults(text))


def main(names: list[str]) -> int:
    """Print the faults and return the exit code."""
    checked = names or [str(path) for path in list_files(CHECKED)]
    faults = [*list_faults(checked)]
    for subject in () if names else list_subjects():
        faults += [f"commit {subject!r}: {fault}" for fault in find_faults(Text(1, "subject", subject))]
    print(*faults, sep="\n", end="\n" if faults else "")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
