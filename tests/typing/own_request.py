"""An engine's own request class, which knows nothing of pagepool, and own statuses."""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from pagepool import CacheManager, EngineRequestStatus, Request, RunningBatch


class Status(IntEnum):
    """With the values of `EngineRequestStatus`."""

    WAITING = 1
    RUNNING = 4


@dataclass
class Sequence:
    """With plain, writable attributes."""

    request_id: str
    all_token_ids: list[int]
    num_computed_tokens: int = 0
    sampling_params: Any = None
    status: Status = Status.WAITING
    cache_salt: str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


class SequenceOfArrays:
    """With properties, and tokens in an array."""

    def __init__(self, token_ids: npt.NDArray[np.int32]) -> None:
        self._token_ids = token_ids
        self.sampling_params: object = None
        self.num_computed_tokens = 0
        self.status = EngineRequestStatus.RUNNING

    @property
    def request_id(self) -> str:
        return "a"

    @property
    def all_token_ids(self) -> npt.NDArray[np.int32]:
        return self._token_ids

    @property
    def num_tokens(self) -> int:
        return self._token_ids.size


@dataclass
class Without:
    """What is no request."""

    request_id: str
    prompt: list[int] = field(default_factory=list)


def check(manager: CacheManager, batch: RunningBatch) -> None:
    sequence, arrays = Sequence("a", [1, 2, 3]), SequenceOfArrays(np.arange(3, dtype=np.int32))
    requests: list[Request] = [sequence, arrays]
    for request in requests:
        manager.allocate_slots(request, 3)
    manager.free(sequence)
    manager.free(arrays)
    batch.admit(0, sequence.all_token_ids)
    batch.admit(1, arrays.all_token_ids)
    manager.free(Without("a"))  # type: ignore[arg-type]
