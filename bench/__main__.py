"""Run all benchmarks and print the table: ``python -m bench``. Further arguments go to pytest: ``-k decode``."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NAMES = (
    "drop_in",
    "core",
    "running_batch",
    "refusals",
    "page_table",
    "page_copies",
    "host_tier",
    "host_pages",
    "forks",
    "events",
    "eviction",
)
BENCHES = [str(HERE / f"bench_{name}.py") for name in NAMES]

sys.exit(pytest.main(["-q", *BENCHES, "--benchmark-enable", "--benchmark-quiet", *sys.argv[1:]]))
