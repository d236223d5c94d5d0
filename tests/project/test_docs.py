"""The documents: links lead to a file and a heading, in the repository and on the site, and the site shows every page."""

from __future__ import annotations

import re
import tomllib
from collections import Counter

import pytest
from documents import find_links, is_relative, leads_somewhere
from sources import ROOT

CONFIGURATION = ROOT / "mkdocs.yml"
if not CONFIGURATION.exists():
    pytest.skip("the documents are not here", allow_module_level=True)

SITES = [CONFIGURATION.read_text(), (ROOT / "mkdocs-maintainers.yml").read_text()]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *PAGES]


def test_links_lead_somewhere() -> None:
    links = [(path, link) for path in DOCUMENTS for link in find_links(path.read_text()) if is_relative(link)]
    assert (ROOT / "docs" / "engines.md", "running_batch.md#how-fast") in links
    assert [(path.name, link) for path, link in links if not leads_somewhere(path, link)] == []
    assert not leads_somewhere(ROOT / "docs" / "engines.md", "#no-such-heading")


def test_links_to_the_site_lead_to_its_pages() -> None:
    """`mkdocs build --strict` follows them to their headings."""
    site = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Documentation"]
    pages = re.findall(r": ([\w/-]+)\.md$", SITES[0], re.MULTILINE)
    links = re.findall(r"https://[^)\s]*\.html\b", "".join(path.read_text() for path in DOCUMENTS))
    assert f"{site}/api.html" in links
    assert [link for link in links if link not in {f"{site}/{page}.html" for page in pages}] == []


def test_the_sites_show_every_page_once() -> None:
    """Users' pages on one, maintainers' pages on the other, which has CONTRIBUTING.md as index.md."""
    users, maintainers = (Counter(re.findall(r": ([\w/-]+\.md)$", site, re.MULTILINE)) for site in SITES)
    assert {path.relative_to(ROOT / "docs").as_posix() for path in PAGES} <= {*users, *maintainers}
    assert {*users} & {*maintainers} == {"index.md"}
    assert max(*users.values(), *maintainers.values()) == 1
