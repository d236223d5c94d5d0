"""A record of a trace."""

from dataclasses import dataclass
from reprlib import repr as shorten

from pagepool.arguments import require_int, require_name
from pagepool.errors import ArgumentError, ArgumentTypeError, shown
from pagepool.replay.traces.fields import checked_milliseconds
from pagepool.replay.traces.simulated_request import count_slots

BLOCK_SIZE = 512
MAX_LENGTH = 2**31 - 1  # tokens


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """One request of a trace: arrival in ms, lengths in tokens, one id for each `block_size` tokens of input, or none if
    prefixes are unknown. Where known, it also has ids of the answer's full blocks, the session, and the ms since the end of the
    session's previous request. Raises ArgumentError or ArgumentTypeError unless the timestamp is a number below 2**53, the
    pause a number from 0 to below 2**53, the lengths are ints below 2**31, the ids are lists or tuples of ints or strings, and
    the session is a string; a pause needs a session.

    >>> record = TraceRecord(timestamp=0, input_length=6, output_length=7, hash_ids=(4, 9), output_hash_ids=(5,), block_size=4)
    >>> record.block_ids, record.num_known_tokens, record.num_slots
    ((4, 9, 5), 12, 12)
    """

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int | str, ...]
    output_hash_ids: tuple[int | str, ...] | None = None
    block_size: int = BLOCK_SIZE
    session_id: str | None = None
    pause: float | None = None

    def __post_init__(self) -> None:
        """Check the fields, and convert numbers to Python's, since differences of NumPy numbers wrap around."""
        object.__setattr__(self, "timestamp", checked_milliseconds("timestamp", self.timestamp))
        object.__setattr__(self, "hash_ids", _checked_ids("hash_ids", self.hash_ids))
        if self.output_hash_ids is not None:
            object.__setattr__(self, "output_hash_ids", _checked_ids("output_hash_ids", self.output_hash_ids))
        object.__setattr__(self, "session_id", require_name("session_id", self.session_id))
        if self.pause is not None:
            object.__setattr__(self, "pause", self._checked_pause())
        for name, minimum in (("input_length", 1), ("output_length", 0), ("block_size", 1)):
            object.__setattr__(self, name, _checked_length(name, getattr(self, name), minimum))

    def _checked_pause(self) -> float:
        pause = checked_milliseconds("pause", self.pause)
        if pause < 0:
            raise ArgumentError(f"pause: got {shown(pause)}, allowed: a number from 0")
        if self.session_id is None:
            raise ArgumentError(f"pause: got {shown(pause)}, allowed: only with a session_id")
        return pause

    @property
    def block_ids(self) -> tuple[int | str, ...]:
        """Ids of all blocks, in order."""
        return self.hash_ids + (self.output_hash_ids or ())

    @property
    def num_known_tokens(self) -> int:
        """Number of leading tokens with an id."""
        if self.output_hash_ids is None:
            return self.input_length if self.hash_ids else 0
        return min(len(self.block_ids) * self.block_size, self.input_length + self.output_length)

    @property
    def num_slots(self) -> int:
        """Tokens that need a slot in a page."""
        return count_slots(self.input_length, self.output_length)


def _checked_length(name: str, value: object, minimum: int) -> int:
    return require_int(name, value, minimum, MAX_LENGTH)


def _checked_ids(name: str, ids: object) -> tuple[int | str, ...]:
    if not isinstance(ids, list | tuple) or not {*map(type, ids)} <= {int, str}:
        raise ArgumentTypeError(f"{name}: got {shorten(ids)}, allowed: a list of integers or texts")
    return tuple(ids)
