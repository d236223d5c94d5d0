"""The search of the site finds the page for each task of a user, in words that users type: `make docs` runs this on it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INDEX = ROOT / "build" / "site" / "search" / "search_index.json"
pytest.importorskip("lunr")
yaml = pytest.importorskip("yaml")
if not INDEX.exists():
    pytest.skip("the site is not built: make docs", allow_module_level=True)
sys.path.insert(0, str(ROOT / "website"))

from search import STOP_WORDS, SiteSearch  # noqa: E402

TASKS = yaml.safe_load((ROOT / "tests" / "project" / "search_queries.yml").read_text())
QUERIES = [(target, query) for target, queries in TASKS.items() for query in queries.split(", ")]


@pytest.fixture(scope="module")
def search() -> SiteSearch:
    return SiteSearch(INDEX)


@pytest.mark.parametrize(("target", "query"), QUERIES)
def test_a_task_is_found_first(target: str, query: str, search: SiteSearch) -> None:
    """Show the page first, and in it the heading before all others."""
    first = next(iter(search.find(query)), [])
    assert first, "nothing is found"
    assert first[0].location.partition("#")[0] == target.partition("#")[0], first[0].location
    if "#" in target:
        assert next(hit.location for hit in first if "#" in hit.location) == target


def test_the_browser_drops_the_same_words() -> None:
    """Compare the stop words of the script with those of lunr.py."""
    listed = re.findall(r'"([a-z ]+)"', (ROOT / "website" / "search.js").read_text())
    assert {word for words in listed for word in words.split()} == STOP_WORDS


def test_maintainers_pages_are_apart() -> None:
    text = INDEX.read_text()
    assert '"location":"start.html"' in text
    assert not re.search(r'"location":"(design|benchmarks|changelog|reliability|releasing)\.html', text)
