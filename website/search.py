"""The search of the site, in Python: what the theme's script finds in a browser, and in which order.

The theme builds its index with lunr from search_index.json; here lunr.py builds the same one. `python website/search.py QUERY`
prints what a reader sees.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lunr.builder import Builder
from lunr.query import Query
from lunr.query_parser import QueryParser
from lunr.stemmer import stemmer
from lunr.stop_word_filter import WORDS, stop_word_filter
from lunr.trimmer import trimmer

INDEX = Path(__file__).parents[1] / "build" / "site" / "search" / "search_index.json"
STOP_WORDS = {*WORDS, "pagepool", "up", "use", "using"}
FUNCTIONS = {"stemmer": stemmer, "stopWordFilter": stop_word_filter, "trimmer": trimmer}


class Hit(NamedTuple):
    """A page or a heading: its URL below the site, and its score."""

    location: str
    score: float


class SiteSearch:
    """The index of a built site."""

    def __init__(self, path: Path = INDEX) -> None:
        """Read and build the index."""
        found = json.loads(path.read_text())
        self._separator = re.compile(found["config"]["separator"])
        builder = Builder()
        builder.b(0)
        builder.ref("location")
        for name in found["config"]["pipeline"]:
            builder.pipeline.add(FUNCTIONS[name])
            if name == "stemmer":
                builder.search_pipeline.add(stemmer)
        for name, options in found["config"]["fields"].items():
            builder.field(name, boost=options["boost"], extractor=lambda page, name=name: self._read_terms(page.get(name)))
        self._titles: dict[str, str] = {}
        for page in found["docs"]:
            self._titles[page["location"]] = page["title"]
            builder.add(page, {"boost": page.get("boost", 1)})
        self._index = builder.build()

    def find(self, query: str) -> Iterator[list[Hit]]:
        """Yield the pages found, best first: each as its hits, the page itself or headings in it, best first."""
        text = " ".join(f"{term}*" for term in self._transform(query))
        parsed = Query(self._index.fields)
        QueryParser(text, parsed).parse()
        terms = {clause.term.rstrip("*") for clause in parsed.clauses}
        pages: dict[str, list[Hit]] = {}
        hits = []
        for found in self._index.search(text):
            words = list(found["match_data"].metadata)
            matched = [any(word.startswith(term) for word in words) for term in terms]
            boost = ("#" not in found["ref"]) + sum(matched) / len(terms)
            hits.append(Hit(found["ref"], found["score"] * (1 + boost**2)))
        for hit in sorted(hits, key=lambda hit: -hit.score):
            pages.setdefault(hit.location.partition("#")[0], []).append(hit)
        yield from pages.values()

    def get_title(self, location: str) -> str:
        """Return the heading at a location."""
        return self._titles[location]

    def _transform(self, query: str) -> Iterator[str]:
        """Yield the terms of a query as the theme does, which repeats a word with hyphens for each of its parts."""
        words = query.split()
        for word in [word for word in words if word.lower() not in STOP_WORDS] or words:  # website/search.js drops these
            for part in re.finditer(r"[^-]+", word):
                yield from (word[: part.start()] + term + word[part.end() :] for term in self._separator.split(part[0]) if term)

    def _read_terms(self, value: Any) -> list[str]:
        """Return the terms of a field: text outside tags, in lower case, divided at separators."""
        values = value if isinstance(value, list) else [value or ""]
        texts = [text for each in values for text in re.split(r"<[^>]*>", each)]
        return [term.lower() for text in texts for term in self._separator.split(text) if term]


def main(query: str) -> None:
    """Print the first pages found for a query."""
    search = SiteSearch()
    for hits in [*search.find(query)][:6]:
        for hit in hits[:4]:
            print(f"{hit.score:10.1f}  {hit.location}  {search.get_title(hit.location)}")
        print()


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]))
