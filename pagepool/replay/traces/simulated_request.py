"""Requests whose output is known before they run."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import ClassVar, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from pagepool.request import EngineRequestStatus

Int32Array: TypeAlias = npt.NDArray[np.int32]


def count_slots(num_prompt_tokens: int, num_output_tokens: int) -> int:
    """Count the tokens with a slot in a page: all but the last generated one, which is never computed.

    >>> count_slots(3, 2), count_slots(3, 0)
    (4, 3)
    """
    return max(num_prompt_tokens, num_prompt_tokens + num_output_tokens - 1)


class Turn(NamedTuple):
    """A request in a session: its arrival and end in seconds, and the pause until the session's next request, infinite for the
    last one.
    """

    session_id: str
    arrival: float
    end: float
    pause: float

    @property
    def is_last(self) -> bool:
        """Whether the session has no later request."""
        return self.pause == inf


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request as managers read it, backed by one int32 array of prompt and output.

    `make_token_ids` creates this array, `[num_prompt_tokens + num_output_tokens]`, just before the request runs, since the
    tokens of a long trace would not fit in memory. Decoding a token is `num_tokens += 1`. `turn` is the request's place in its
    session, if any.

    >>> request = SimulatedRequest("a", 3, 2, lambda: np.arange(5, dtype=np.int32))
    >>> request.all_token_ids.tolist(), request.num_final_tokens, request.num_slots
    ([0, 1, 2], 5, 4)
    """

    sampling_params: ClassVar[None] = None

    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int
    make_token_ids: Callable[[], Int32Array]
    turn: Turn | None = None
    num_tokens: int = field(init=False)
    num_computed_tokens: int = field(init=False, default=0)
    status: EngineRequestStatus = field(init=False, default=EngineRequestStatus.WAITING)
    _token_ids: Int32Array | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        """Start with the prompt."""
        self.num_tokens = self.num_prompt_tokens

    @property
    def session_id(self) -> str | None:
        """The id of the session, None without one."""
        return None if self.turn is None else self.turn.session_id

    @property
    def num_final_tokens(self) -> int:
        """Prompt and output together."""
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def num_slots(self) -> int:
        """Number of tokens with a slot in a page."""
        return count_slots(self.num_prompt_tokens, self.num_output_tokens)

    @property
    def all_token_ids(self) -> Int32Array:
        """Prompt and generated tokens so far: a view, `[num_tokens]`. O(1) once loaded."""
        return self.load_token_ids()[: self.num_tokens]

    def load_token_ids(self) -> Int32Array:
        """Return all token ids, including those still to be generated. O(tokens) the first time, then O(1)."""
        if self._token_ids is None:
            self._token_ids = self.make_token_ids()
        return self._token_ids

    def drop_token_ids(self) -> None:
        """Free the token ids; the next access creates them again."""
        self._token_ids = None
