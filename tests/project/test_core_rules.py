"""The core gets simpler, not more complex: what breaks a rule today is listed here, and the lists may only get shorter."""

from __future__ import annotations

import re
from pathlib import Path

from sources import DOORS, HEADERS, ROOT, cython_functions

CORE = ROOT / "pagepool/core"
FILES = [path for path in (*DOORS, *HEADERS) if path.is_relative_to(CORE)]

FEATURES = {
    "pools": r"num_banks|\bbank\b|banks\[|_in_banks|counted_bank",
    "shards": r"shard",
    "tier": r"\btier\b|Tier|load_number|transfer",
    "policy": r"policy|[rR]anking",
    "terms": r"\bterms?\b|expected|NEVER|UNKNOWN",
    "tenants": r"tenant",
    "sessions": r"session",
    "states": r"is_state|checkpoint|has_state|copy_states",
    "writes": r"writes_states|write_list|num_writes|WriteList|writes\.",
    "windows": r"window|boundaries|skip",
    "journal": r"journal|context",
    "hash lookahead": r"lookahead|count_keyed|caches_late",
    "caching": r"caches_computed|num_resolved|caches_first",
    "steps in flight": r"flight|launch",
    "twins": r"twin",
    "leases": r"lease",
    "tokens from elsewhere": r"external",
    "slots ahead": r"ahead",
    "drafts": r"draft",
}
"""Words by which a function knows a feature."""

MAX_FEATURES = 4
MAX_LINES = 700

KNOWN_FUNCTIONS = """
holding/groups.pyx plan_ends 5
tier/tier.pyx load_prefix 5
"""
KNOWN_FILES = """
"""
KNOWN_FLAGS = """
Batch 8
Growth 0
Step 3
Boundaries 2
"""


def read_table(text: str) -> dict[str, int]:
    """Return the numbers of a table by name."""
    return {name: int(number) for name, number in (line.rsplit(maxsplit=1) for line in text.strip().splitlines())}


def features_in(path: Path, start: int, stop: int) -> list[str]:
    """Return the features that lines of a file know, docstrings left out."""
    body = re.sub(r'"""(?:.|\n)*?"""', "", "\n".join(path.read_text().splitlines()[start - 1 : stop - 1]).partition(":\n")[2])
    return [feature for feature, words in FEATURES.items() if re.search(words, body)]


def test_functions_know_few_features() -> None:
    """A feature is a concept in one room. What many functions have to know is a mode."""
    found = {
        f"{path.relative_to(CORE)} {function.name}": len(features_in(path, function.start, function.stop))
        for path in FILES
        for function in cython_functions(path)
    }
    assert {name: number for name, number in found.items() if number > MAX_FEATURES} == read_table(KNOWN_FUNCTIONS)


def test_files_are_short() -> None:
    lengths = {str(path.relative_to(CORE)): len(path.read_text().splitlines()) for path in FILES}
    known = read_table(KNOWN_FILES)
    assert {name for name, length in lengths.items() if length > MAX_LINES} == set(known)
    assert {name: lengths[name] for name, most in known.items() if lengths[name] > most} == {}


def test_structs_that_many_functions_read_get_no_new_flags() -> None:
    """A flag in one of these is asked for all rows, by functions of several rooms."""
    structs = {
        name: len(re.findall(r"^    bint \w+", body, re.MULTILINE))
        for path in HEADERS
        for name, body in re.findall(r"^cdef struct (\w+):(.*(?:\n(?:    .*)?)*)", path.read_text(), re.MULTILINE)
    }
    known = read_table(KNOWN_FLAGS)
    assert {name: structs[name] for name in known} == known
