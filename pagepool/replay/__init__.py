"""Replay a trace of requests through a running batch, or a manager, under a simulated scheduler; plan how large a pool is to
be; put a router before a fleet; record a trace.

`pagepool replay`, `pagepool plan` and `pagepool fleet` on the command line; in Python:

>>> from pagepool.manager import CacheManager
>>> from pagepool.replay import Scheduler, generate_chats
>>> from pagepool.specs import CacheGroupSpec, FullAttentionSpec
>>> spec = FullAttentionSpec(16, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False)
>>> manager = CacheManager(num_pages=4096, kv_cache_groups=[CacheGroupSpec(spec)], max_model_len=65536)
>>> figures = Scheduler(manager, generate_chats(num_requests=20, seed=1)).run()
>>> figures.requests, figures.hit_tokens > 0
(20, True)

Only the commands need the extra `pagepool[replay]`, only their plots `pagepool[plan]`, and the fleet `pagepool[fleet]`.
"""

from pagepool.replay.figures import Figures
from pagepool.replay.generator import generate_chats
from pagepool.replay.plan import Knee, Plan, Planner, PoolFigures
from pagepool.replay.recorder import Recorder
from pagepool.replay.scheduler import Scheduler
from pagepool.replay.simulated_request import SimulatedRequest
from pagepool.replay.trace import TraceError, TraceRecord, make_requests, read_trace

__all__ = [
    "Figures",
    "Knee",
    "Plan",
    "Planner",
    "PoolFigures",
    "Recorder",
    "Scheduler",
    "SimulatedRequest",
    "TraceError",
    "TraceRecord",
    "generate_chats",
    "make_requests",
    "read_trace",
]
