"""What pytest leaves alone when it looks for doctests: helpers that import EasyDeL or Ray, which are not always installed."""

collect_ignore = ["ray_fleet.py", "easydel_scheduler.py", "tiny_engine.py"]
