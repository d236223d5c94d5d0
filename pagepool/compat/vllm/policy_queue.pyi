from collections.abc import Iterable
from typing import final

from pagepool._core import PageStore
from pagepool.compat.vllm.blocks import Block, FreeQueue

@final
class PolicyQueue(FreeQueue):
    store: PageStore
    def __new__(cls, blocks: Iterable[Block]) -> PolicyQueue: ...
    @property
    def num_requests(self) -> int: ...
    def check(self) -> None: ...

def make_adaptive_queue(blocks: Iterable[Block]) -> FreeQueue: ...
