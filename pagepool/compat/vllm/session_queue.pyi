from collections.abc import Iterable

from pagepool._core import PageSessions
from pagepool.compat.vllm.blocks import Block
from pagepool.compat.vllm.listener import Listener
from pagepool.compat.vllm.policy_queue import PolicyQueue

class SessionQueue(PolicyQueue):
    sessions: PageSessions
    listener: Listener
    listens: bool
    shares: dict[str, float]
    num_pinned_blocks: int
    def __new__(cls, blocks: Iterable[Block], eviction: str = "adaptive", listener: Listener | None = None) -> SessionQueue: ...
    @property
    def num_turns(self) -> int: ...

class ListeningQueue(SessionQueue): ...
class AdaptiveListeningQueue(ListeningQueue): ...
