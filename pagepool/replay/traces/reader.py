"""Traces: lines of JSON with the lengths of requests and their shared prefixes, but not their text.

A line has `timestamp` (ms, ascending), `input_length` and `output_length` (tokens) and `hash_ids`: one id for each block of 512
input tokens, including a partial last block. Equal ids mean equal prefixes. This is the format of the Mooncake FAST'25 release.
More fields are optional, and all others are ignored:

`block_size` is the number of tokens per id if not 512; it is the same in all lines.

`output_hash_ids` are the ids of the following blocks, as far as the answer has filled them. If the field is present, even
empty, the last of `hash_ids` stands for a full block too, completed by tokens of the answer, and a prompt that continues an
answer has the same ids. Tokens without an id equal no others.

`session_id` is a string, the same for all turns of a chat or steps of an agent. `pause`, only beside it, is the time in ms
from the end of the session's request before this one to the arrival of this one.
"""

import errno
import gzip
import json
import math
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, BinaryIO, NoReturn, cast

import numpy as np

from pagepool.arguments import require_int, require_name
from pagepool.errors import ArgumentError, PagePoolError, count_of, shown
from pagepool.replay.traces.simulated_request import Int32Array, SimulatedRequest, Turn, count_slots
from pagepool.specs import cdiv

__all__ = [
    "BLOCK_SIZE",
    "TraceError",
    "TraceRecord",
    "make_requests",
    "name_trace",
    "parse_record",
    "read_trace",
    "source_name",
]

BLOCK_SIZE = 512
MAX_TOKEN_IDS = 2**31  # token ids are int32, and each block has its own
MAX_MILLISECONDS = 2**53  # beyond it floats skip integers
MAX_LINE_BYTES = 1 << 26  # three million hash ids; without a limit a file without newlines would be read into memory whole
FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


class TraceError(PagePoolError, ValueError):
    """An invalid line of a trace; the message has file name, line number and reason."""

    def __init__(self, source: str, line: int, reason: str) -> None:
        """`line` counts from 1."""
        super().__init__(f"{source}:{line}: {reason}")


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """One request of a trace: arrival in ms, lengths in tokens, one id for each `block_size` tokens of input, and, if known,
    ids of the full blocks of the answer, the session, and the ms since the end of the session's request before this one. Raises
    ArgumentError or ArgumentTypeError unless the timestamp is a number below 2**53, the pause too and at least 0, the lengths
    are ints below 2**31 and the session is a string, which a pause needs.

    >>> record = TraceRecord(timestamp=0, input_length=6, output_length=7, hash_ids=(4, 9), output_hash_ids=(5,), block_size=4)
    >>> record.block_ids, record.num_known_tokens, record.num_slots
    ((4, 9, 5), 12, 12)
    """

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    output_hash_ids: tuple[int, ...] | None = None
    block_size: int = BLOCK_SIZE
    session_id: str | None = None
    pause: float | None = None

    def __post_init__(self) -> None:
        """Check the fields, and convert numbers to Python's, since differences of NumPy's wrap around."""
        object.__setattr__(self, "timestamp", _checked_milliseconds("timestamp", self.timestamp))
        object.__setattr__(self, "session_id", require_name("session_id", self.session_id))
        if self.pause is not None:
            object.__setattr__(self, "pause", self._checked_pause())
        for name, minimum in (("input_length", 1), ("output_length", 0), ("block_size", 1)):
            object.__setattr__(self, name, _checked_length(name, getattr(self, name), minimum))

    def _checked_pause(self) -> float:
        pause = _checked_milliseconds("pause", self.pause)
        if pause < 0:
            raise ArgumentError(f"pause must be at least 0, got {shown(pause)}")
        if self.session_id is None:
            raise ArgumentError("pause: got one without a session_id")
        return pause

    @property
    def block_ids(self) -> tuple[int, ...]:
        """Ids of all blocks, in order."""
        return self.hash_ids + (self.output_hash_ids or ())

    @property
    def num_known_tokens(self) -> int:
        """Number of leading tokens with an id."""
        if self.output_hash_ids is None:
            return self.input_length
        return min(len(self.block_ids) * self.block_size, self.input_length + self.output_length)

    @property
    def num_slots(self) -> int:
        """Tokens that need a slot in a page."""
        return count_slots(self.input_length, self.output_length)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _load_object(text: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(text.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ArgumentError(f"a JSON object is expected, not {type(fields).__name__}")
    return fields


def _checked_milliseconds(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise ArgumentError(f"{name} must be a number, got {shown(value)}")
    if not -MAX_MILLISECONDS < value < MAX_MILLISECONDS:
        raise ArgumentError(f"{name} must be below 2**53 ms, got {shown(value)}")
    return cast(float, value.item()) if isinstance(value, np.generic) else value


def _checked_length(name: str, value: object, minimum: int) -> int:
    length = require_int(name, value, minimum)
    if length >= 2**31:
        raise ArgumentError(f"{name} must be below 2**31, got {shown(length)}")
    return length


def _read_ids(fields: dict[str, Any], name: str) -> tuple[int, ...]:
    ids = fields[name]
    if not isinstance(ids, list) or any(type(hash_id) is not int for hash_id in ids):
        raise ArgumentError(f"{name} must be a list of integers")
    return tuple(ids)


def parse_record(text: bytes, block_size: int = BLOCK_SIZE) -> TraceRecord:
    """Parse one line; `block_size` applies unless the line has its own. The output may be empty, the prompt may not.
    O(length of the line).

    Raises `ArgumentError` or `ArgumentTypeError` if the line is not a JSON object, lacks a field, or has a field of a wrong
    type or length.

    >>> record = parse_record(b'{"timestamp": 0, "input_length": 600, "output_length": 9, "hash_ids": [4, 7]}')
    >>> record.input_length, record.hash_ids
    (600, (4, 7))
    """
    fields = {"block_size": block_size} | _load_object(text)
    missing = [name for name in FIELDS if name not in fields]
    if missing:
        raise ArgumentError(f"lacks {', '.join(missing)}")
    record = TraceRecord(
        fields["timestamp"],
        fields["input_length"],
        fields["output_length"],
        _read_ids(fields, "hash_ids"),
        _read_ids(fields, "output_hash_ids") if "output_hash_ids" in fields else None,
        fields["block_size"],
        fields.get("session_id"),
        fields.get("pause"),
    )
    _check_num_ids(record)
    return record


def _check_num_ids(record: TraceRecord) -> None:
    """Raise ArgumentError unless there are as many ids as blocks."""
    num_ids = cdiv(record.input_length, record.block_size)
    if len(record.hash_ids) != num_ids:
        raise ArgumentError(
            f"input_length {record.input_length} needs {num_ids} hash_ids, got {len(record.hash_ids)}: "
            f"one for each {count_of(record.block_size, 'token')}, unless block_size says otherwise"
        )
    num_final_tokens = record.input_length + record.output_length
    num_full_blocks = num_final_tokens // record.block_size
    if record.output_hash_ids and len(record.block_ids) > num_full_blocks:
        allowed = f"{count_of(num_full_blocks, 'full block')} of {record.block_size:,} in {count_of(num_final_tokens, 'token')}"
        raise ArgumentError(f"got {count_of(len(record.block_ids), 'id')} for {allowed}")


def source_name(path: str) -> str:
    """Return the name of a trace in messages; undecodable bytes are replaced."""
    return "<stdin>" if path == "-" else os.fsencode(path).decode(errors="replace")


def name_trace(source: str) -> str:
    """Return the name of a trace in titles: its file name, with unprintable characters replaced.

    >>> name_trace("traces/chat.jsonl.gz"), name_trace("<stdin>")
    ('chat', '<stdin>')
    """
    name = os.path.basename(source)
    for ending in (".gz", ".jsonl", ".json"):
        name = name.removesuffix(ending) or name
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in name)


def _open_file(path: str) -> AbstractContextManager[BinaryIO]:
    if path == "-":
        if sys.stdin is None:
            raise OSError(errno.EBADF, "standard input is closed")
        return nullcontext(sys.stdin.buffer)
    if path.endswith(".gz"):
        return cast(BinaryIO, gzip.open(path))
    return open(path, "rb")


def _read_lines(file: BinaryIO) -> Iterator[bytes]:
    while text := file.readline(MAX_LINE_BYTES + 1):
        if len(text) > MAX_LINE_BYTES:
            raise ArgumentError(f"the line is longer than {MAX_LINE_BYTES} bytes")
        yield text


def _append_record(records: list[TraceRecord], record: TraceRecord) -> None:
    """Raise ArgumentError if the record does not follow the previous one."""
    if records and record.timestamp < records[-1].timestamp:
        raise ArgumentError(
            f"timestamp {record.timestamp} is below {records[-1].timestamp}, that of the line before: sort the trace"
        )
    if records and record.block_size != records[-1].block_size:
        raise ArgumentError(f"block_size is {record.block_size}, but {records[-1].block_size} in the lines before")
    records.append(record)


def read_trace(
    path: str, limit: int | None = None, block_size: int = BLOCK_SIZE, on_record: Callable[[int], object] = int
) -> list[TraceRecord]:
    """Read a trace, or its first `limit` lines; `block_size` as in `parse_record`. A path that ends in `.gz` is decompressed,
    `-` is standard input. `on_record` gets the number of lines read after each line.

    Raises `TraceError` for an invalid line, a line out of order, or an empty trace, and `OSError` if the file cannot be read.
    Lines after `limit` are not read. O(lines + ids), in time and memory.
    """
    records: list[TraceRecord] = []
    try:
        with _open_file(path) as file:
            for text in islice(_read_lines(file), limit):
                _append_record(records, parse_record(text, block_size))
                on_record(len(records))
    except (PagePoolError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(source_name(path), len(records) + 1, str(error)) from error
    if not records and limit != 0:
        raise TraceError(source_name(path), 1, "the trace is empty")
    return records


def _make_token_ids(record: TraceRecord, block_numbers: Sequence[int], seed: Sequence[int]) -> Int32Array:
    """Make prompt and output, `[input_length + output_length]`: consecutive ids in each block, then random ones."""
    starts = np.array(block_numbers, dtype=np.int32) * np.int32(record.block_size)
    num_known_tokens = record.num_known_tokens
    in_block = np.arange(min(record.block_size, num_known_tokens), dtype=np.int32)
    known = (starts[:, None] + in_block).reshape(-1)[:num_known_tokens]
    num_others = record.input_length + record.output_length - num_known_tokens
    return np.concatenate((known, np.random.default_rng(seed).integers(2**31, size=num_others, dtype=np.int32)))


def _make_turns(records: Sequence[TraceRecord]) -> list[Turn | None]:
    """Make the turns of sessions, None for requests without one. Where a pause is not known, the request before it is taken to
    have ended at once.
    """
    turns: list[Turn | None] = []
    later: dict[str, TraceRecord] = {}  # by session the request after
    for record in reversed(records):
        if record.session_id is None:
            turns.append(None)
            continue
        pause = math.inf
        end = record.timestamp
        if following := later.get(record.session_id):
            pause = following.timestamp - record.timestamp if following.pause is None else following.pause
            end = max(end, following.timestamp - pause)
        turns.append(Turn(record.session_id, record.timestamp / 1000, end / 1000, pause / 1000))
        later[record.session_id] = record
    return turns[::-1]


def make_requests(records: Sequence[TraceRecord], source: str = "trace", seed: int = 0) -> list[SimulatedRequest]:
    """Make a request from each record, in order, named by source and line number.

    Equal hash ids give equal tokens, different ones different tokens. Tokens without an id depend on `seed` (at least 0), line
    and position alone. Raises `TraceError` if the blocks have more than 2**31 tokens together. O(hash ids); the tokens are
    created when a request is about to run.

    >>> record = TraceRecord(timestamp=0, input_length=513, output_length=1, hash_ids=(90, 17))
    >>> [first, again] = make_requests([record, record])
    >>> first.request_id, first.all_token_ids[-2:].tolist(), again.all_token_ids[-2:].tolist()
    ('trace:1', [511, 512], [511, 512])
    """
    numbers: dict[int, int] = {}
    requests = []
    for line, (record, turn) in enumerate(zip(records, _make_turns(records), strict=True), start=1):
        block_numbers = [numbers.setdefault(hash_id, len(numbers)) for hash_id in record.block_ids]
        if len(numbers) * record.block_size > MAX_TOKEN_IDS:
            raise TraceError(source, line, f"more than {MAX_TOKEN_IDS // record.block_size} distinct hash ids")
        make_token_ids = partial(_make_token_ids, record, block_numbers, (seed, line))
        name = f"{source}:{line}"
        requests.append(SimulatedRequest(name, record.input_length, record.output_length, make_token_ids, turn))
    return requests
