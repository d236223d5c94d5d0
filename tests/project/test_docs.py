"""The documents: links lead to a file and a heading, in the repository and on the site, and the site shows every page."""

from __future__ import annotations

import functools
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

import pytest
from sources import ROOT

MarkdownIt = pytest.importorskip("markdown_it").MarkdownIt
CONFIGURATION = ROOT / "mkdocs.yml"
if not CONFIGURATION.exists():
    pytest.skip("the documents are not here", allow_module_level=True)

PAGES = sorted((ROOT / "docs").rglob("*.md"))
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *PAGES]


def parse(path: Path) -> list:
    return MarkdownIt("commonmark").enable("table").parse(path.read_text())


def find_links(path: Path) -> Iterator[str]:
    """Yield the relative links and pictures of a document, in Markdown or HTML."""
    for block in parse(path):
        for token in (block, *(block.children or ())):
            html = token.content if token.type.startswith("html") else ""
            links = [token.attrGet("href"), token.attrGet("src"), *re.findall(r'(?:href|src|srcset)="([^"]*)"', html)]
            yield from (unquote(link) for link in links if link and not re.match("[a-z]+:", link))


@functools.cache
def find_anchors(path: Path) -> set[str]:
    """Return the anchors of headings by GitHub's rules, without those that several headings share."""
    headings = [text for start, text in pairwise(parse(path)) if start.type == "heading_open"]
    texts = ["".join(token.content for token in heading.children) for heading in headings]
    counts = Counter(re.sub(r"[^\w\- ]", "", text).lower().replace(" ", "-") for text in texts)
    return {anchor for anchor, count in counts.items() if count == 1}


def leads_somewhere(path: Path, link: str) -> bool:
    name, _, anchor = link.partition("#")
    target = (path.parent / name).resolve() if name else path
    return target.is_relative_to(ROOT) and target.exists() and (not anchor or anchor in find_anchors(target))


def test_links_lead_somewhere() -> None:
    links = [(path, link) for path in DOCUMENTS for link in find_links(path)]
    assert (ROOT / "docs" / "engines.md", "running_batch.md#how-fast") in links
    assert [(path.name, link) for path, link in links if not leads_somewhere(path, link)] == []
    assert not leads_somewhere(ROOT / "docs" / "engines.md", "#no-such-heading")


def test_links_to_the_site_lead_to_its_pages() -> None:
    """`mkdocs build --strict` follows them to their headings."""
    site = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Documentation"]
    pages = re.findall(r": ([\w/-]+)\.md$", CONFIGURATION.read_text(), re.MULTILINE)
    links = re.findall(r"https://[^)\s]*\.html\b", "".join(path.read_text() for path in DOCUMENTS))
    assert f"{site}/api.html" in links
    assert [link for link in links if link not in {f"{site}/{page}.html" for page in pages}] == []


def test_the_site_shows_every_page_once() -> None:
    shown = Counter(re.findall(r": ([\w/-]+\.md)$", CONFIGURATION.read_text(), re.MULTILINE))
    assert {path.relative_to(ROOT / "docs").as_posix() for path in PAGES} <= set(shown)
    assert max(shown.values()) == 1
