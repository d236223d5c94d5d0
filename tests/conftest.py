"""Excludes helpers that import EasyDeL or Ray from doctest collection, since these are not always installed."""

collect_ignore = ["ray_fleet.py", "easydel_scheduler.py", "tiny_engine.py"]
