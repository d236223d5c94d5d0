"""Replay request traces, plan pool sizes, simulate a fleet behind a router, and record traces.

`pagepool replay`, `pagepool plan` and `pagepool fleet` on the command line; in Python:

>>> from pagepool.manager import CacheManager
>>> from pagepool.replay import Scheduler, generate_chats
>>> from pagepool.specs import CacheGroupSpec, FullAttentionSpec
>>> spec = FullAttentionSpec(16, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False)
>>> manager = CacheManager(num_pages=4096, kv_cache_groups=[CacheGroupSpec(spec)], max_model_len=65536)
>>> figures = Scheduler(manager, generate_chats(num_requests=20, seed=1)).run()
>>> figures.requests, figures.hit_tokens > 0
(20, True)

The commands need the extra `pagepool[replay]`, their plots `pagepool[plan]`, and the fleet `pagepool[fleet]`.
"""

from pagepool.replay.plans.plan import Knee, Plan, Planner, PolicyFigures, PoolFigures
from pagepool.replay.simulation.figures import Figures, HostFigures
from pagepool.replay.simulation.scheduler import Scheduler
from pagepool.replay.traces.generator import WORKLOADS, generate_chats, generate_workload
from pagepool.replay.traces.reader import TraceError, make_requests, read_trace
from pagepool.replay.traces.recorder import Recorder
from pagepool.replay.traces.records import TraceRecord
from pagepool.replay.traces.simulated_request import SimulatedRequest

__all__ = [
    "WORKLOADS",
    "Figures",
    "HostFigures",
    "Knee",
    "Plan",
    "Planner",
    "PolicyFigures",
    "PoolFigures",
    "Recorder",
    "Scheduler",
    "SimulatedRequest",
    "TraceError",
    "TraceRecord",
    "generate_chats",
    "generate_workload",
    "make_requests",
    "read_trace",
]
