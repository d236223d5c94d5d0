"""Run all benches and print the table: ``python -m bench``. Further arguments go to pytest: ``-k decode``."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
BENCHES = [str(HERE / name) for name in ("bench_drop_in.py", "bench_core.py", "bench_running_batch.py", "bench_page_table.py")]

sys.exit(pytest.main(["-q", *BENCHES, "--benchmark-enable", "--benchmark-quiet", *sys.argv[1:]]))
