"""Benchmarks of pagepool and its rivals, in turn in one run. ``python -m bench`` prints the table."""
