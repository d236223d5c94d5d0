"""Excludes helpers that import EasyDeL, Ray or vLLM from doctest collection, since these are not always installed."""

collect_ignore = ["ray_fleet.py", "easydel_scheduler.py", "tiny_engine.py"]
collect_ignore += ["vllm_core.py", "vllm_planted.py", "vllm_side.py", "vllm_state.py", "vllm_workload.py"]
