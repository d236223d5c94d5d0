"""Benches: pagepool beside its rivals, each in turn in one run. ``python -m bench`` prints the table."""
