"""Links and headings of Markdown documents."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

import pytest
from sources import ROOT

MarkdownIt = pytest.importorskip("markdown_it").MarkdownIt


def parse(text: str) -> list:
    return MarkdownIt("commonmark").enable("table").parse(text)


def find_links(text: str) -> Iterator[str]:
    """Yield the links and pictures of a document, in Markdown or HTML."""
    for block in parse(text):
        for token in (block, *(block.children or ())):
            html = token.content if token.type.startswith("html") else ""
            links = [token.attrGet("href"), token.attrGet("src"), *re.findall(r'(?:href|src|srcset)="([^"]*)"', html)]
            yield from (unquote(link) for link in links if link)


def is_relative(link: str) -> bool:
    return not re.match("[a-z]+:", link)


@functools.cache
def find_anchors(path: Path) -> set[str]:
    """Return the anchors of headings by GitHub's rules, without those that several headings share."""
    headings = [text for start, text in pairwise(parse(path.read_text())) if start.type == "heading_open"]
    texts = ["".join(token.content for token in heading.children) for heading in headings]
    counts = Counter(re.sub(r"[^\w\- ]", "", text).lower().replace(" ", "-") for text in texts)
    return {anchor for anchor, count in counts.items() if count == 1}


def leads_somewhere(path: Path, link: str) -> bool:
    """Return whether a relative link of this document leads to a file of the repository, and to a heading if it names one."""
    name, _, anchor = link.partition("#")
    target = (path.parent / name).resolve() if name else path
    return target.is_relative_to(ROOT) and target.exists() and (not anchor or anchor in find_anchors(target))
