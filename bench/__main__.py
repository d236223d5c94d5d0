"""Run all benches and print the table: ``python -m bench``. Further arguments go to pytest, ``-k decode`` for instance."""

import sys
from pathlib import Path

import pytest

BENCHES = sorted(str(path) for path in Path(__file__).parent.glob("bench_*.py"))[::-1]  # what engines call first

sys.exit(pytest.main(["-q", *BENCHES, "--benchmark-enable", "--benchmark-quiet", *sys.argv[1:]]))
