"""Traces: lines of JSON with the lengths of requests and their shared prefixes, but not their text; or a CSV with lengths only.

A line has `timestamp` (ms, ascending), `input_length` and `output_length` (tokens) and `hash_ids`: one id for each block of 512
input tokens, including a partial last block. Equal ids after equal ids mean equal prefixes. This is the format of the Mooncake
FAST'25 release. The following fields are optional, and other fields are ignored:

`block_size` is the number of tokens per id, by default 512; it is the same in all lines.

`output_hash_ids` are the ids of the following blocks that the answer has filled. If the field is present, even empty, the last
of `hash_ids` also stands for a full block, completed by tokens of the answer, and a prompt continuing an answer has the same
ids. Tokens without an id are equal to no others.

`session_id` is the same for all turns of a chat or steps of an agent. `pause`, only with a session, is the time in ms from the
end of the session's previous request to the arrival of this one. `delay` replaces both `timestamp` and `pause` if ends are
unknown: it counts from the arrival of the session's previous request, which is taken as the end of that request.

Files of other tools are read too, by other modules: `fields` reads other names, `lengths` cached tokens counted apart,
`documents` arrays and objects over several lines, `conversations` lines of several requests, `turns` lengths of what a turn
adds. Notes name missing fields: without `hash_ids` prompts share nothing, without `output_length` there are no answers, without
any `timestamp` there are no times.
"""

import errno
import gzip
import math
import os
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import BinaryIO, NamedTuple, cast

import numpy as np

from pagepool.errors import ArgumentError, PagePoolError, count_of, shown
from pagepool.replay.traces.conversations import list_requests
from pagepool.replay.traces.documents import Lines, read_values
from pagepool.replay.traces.fields import (
    Fields,
    as_milliseconds,
    checked_milliseconds,
    find_reader,
    read_object,
    read_session,
    require_object,
)
from pagepool.replay.traces.lengths import read_length
from pagepool.replay.traces.records import BLOCK_SIZE, TraceRecord
from pagepool.replay.traces.simulated_request import Int32Array, SimulatedRequest, Turn
from pagepool.replay.traces.turns import ANSWERS_APART, Turns
from pagepool.specs import cdiv

MAX_TOKEN_IDS = 2**31  # token ids are int32, and each block has its own
TURN_BLOCK_SIZE = 16  # tokens per id that a conversation without ids is given
TIME_UNITS = {"ms": 1, "s": 1000}  # ms
NUM_IDS_FOR_A_GUESS = 5  # with fewer, a missing id of a partial block, or an extra id, would fit another size
# A trace may be in seconds if it has many requests in a short time or many per second: read as ms, a day would pass in 86 s.
MANY_REQUESTS, BRIEF_SECONDS, MAX_RATE = 10, 100, 10
LATEST = 100_000_000_000_000  # ms, the year 5138: microseconds since 1970 are later


class TraceError(PagePoolError, ValueError):
    """An invalid line of a trace; the message has file name, line number and reason."""

    def __init__(self, source: str, line: int, reason: str) -> None:
        """`line` counts from 1."""
        super().__init__(f"{source}:{line}: {reason}")


def parse_record(text: bytes, block_size: int = BLOCK_SIZE) -> TraceRecord:
    """Parse one line; `block_size` applies unless the line has its own. The output may be empty, but not the prompt. O(length
    of the line).

    Raise `ArgumentError` or `ArgumentTypeError` if the line is not a JSON object, lacks `timestamp` or `input_length`, or has a
    field of a wrong type or length.

    >>> record = parse_record(b'{"timestamp": 0, "input_length": 600, "output_length": 9, "hash_ids": [4, 7]}')
    >>> record.input_length, record.hash_ids
    (600, (4, 7))
    """
    reading = Reading(block_size, None)
    reading.add(read_object(text))
    if not reading.has_times:
        raise ArgumentError("lacks timestamp")
    return reading.records[0]


class Trace(NamedTuple):
    """The requests of a trace, their unknown properties as sentences, whether their times are known to be in ms (None if there
    are no times), and their lines.
    """

    records: list[TraceRecord]
    notes: list[str]
    has_unit: bool | None
    lines: list[int]

    @property
    def seconds(self) -> float:
        """Seconds from the first arrival to the last."""
        return (self.records[-1].timestamp - self.records[0].timestamp) / 1000 if self.records else 0.0

    def require_times(self) -> None:
        """Raise ArgumentError if the trace has no times, or if they may be in seconds or microseconds."""
        if self.has_unit is None:
            raise ArgumentError("the trace has no timestamps, so nothing says when requests arrive")
        if not self.has_unit and self.records and self.records[-1].timestamp > LATEST:
            raise ArgumentError(
                f"timestamp {self.records[-1].timestamp} is more than 3,000 years if the timestamps are in ms: divide those in "
                "microseconds by 1,000, or say --time-unit ms"
            )
        num, seconds = len(self.records), self.seconds
        may_be_brief = num >= MANY_REQUESTS and (0 < seconds < BRIEF_SECONDS or num > MAX_RATE * seconds > 0)
        if may_be_brief and not self.has_unit:
            raise ArgumentError(
                f"{count_of(num, 'request')} would arrive in {seconds:,.1f} s if the timestamps are in ms: say by --time-unit "
                "whether they are in s or ms"
            )


class Reading:
    """Maker of records from the fields of lines. It keeps the properties common to all lines."""

    def __init__(self, block_size: int | None, time_unit: str | None) -> None:
        """With `block_size` None it is the lines' own, or the one that fits lengths and ids; `time_unit` None means ms."""
        self.records: list[TraceRecord] = []
        self.has_times = False
        self._lines: list[int] = []
        self._block_size = block_size
        self._time_unit = time_unit
        self._has_unit = time_unit is not None
        self._has_own_size = False
        self._last_time: float | None = None
        self._shown_time: object = None
        self._ends: dict[str, float] = {}  # time of the last request of each session
        self._num_without_output = 0
        self._sizes = range(1, MAX_TOKEN_IDS)  # possible block sizes
        self._most_ids = 0
        self._misfit: tuple[int, ArgumentError] | None = None  # first line whose ids do not fit blocks of 512
        self._turns = Turns()
        self._is_unordered = False
        self._clocks: set[int] = set()  # conversations whose times count from their own begin

    def add(self, fields: Fields, line: int = 1) -> None:
        """Add a line's record. Raise ArgumentError or ArgumentTypeError if it is invalid, or cannot follow the last one."""
        if "input_length" not in fields:
            raise ArgumentError(fields.get("missing", "lacks input_length"))
        if fields.get("hash_id_scope") == "local":
            raise ArgumentError("hash_id_scope: got 'local', allowed: 'global', or requests of a trace of their own")
        unit = self._time_unit or ("s" if fields.get("is_in_seconds") else "ms")
        factor = TIME_UNITS[unit]
        session_id = read_session(fields.get("session_id"))
        pause_name = "pause" if "pause" in fields or session_id is None else "delay"
        pause = fields.get(pause_name)
        length = self._turns.find_length(fields, session_id, read_length(fields["input_length"]))
        record = TraceRecord(
            self._find_time(fields, session_id, factor),
            cast(int, length),
            cast(int, read_length(fields.get("output_length", 0))),
            fields.get("hash_ids", ()),
            fields.get("output_hash_ids"),
            fields.get("block_size", self._block_size or BLOCK_SIZE),
            cast(str | None, session_id),
            fields.get("pause_ms") if pause is None else checked_milliseconds(pause_name, pause) * factor,
        )
        self._check_blocks(record, line, has_own_size="block_size" in fields)
        self._num_without_output += "output_length" not in fields
        self._has_unit |= (
            isinstance(fields.get("timestamp"), str)
            or unit == "s"
            or record.output_hash_ids is not None
            or "since_start" in fields
        )
        if record.session_id is not None:
            self._ends[record.session_id] = record.timestamp
        self._turns.add(record, len(self.records))
        self.records.append(record)
        self._lines.append(line)

    def _find_time(self, fields: Fields, session_id: object, factor: int) -> float:
        """Return the arrival: the line's own, or its delay after the session's previous request; 0 in a trace without times."""
        if "since_start" in fields:
            if self._last_time is not None:
                raise ArgumentError("has times since its own begin, but the lines before have timestamps")
            self._clocks.add(fields["clock"])
            self.has_times = self._is_unordered = True
            return cast(float, fields["since_start"])
        if "timestamp" in fields:
            time = as_milliseconds("timestamp", fields["timestamp"], factor)
            if self.records and not self.has_times:
                raise ArgumentError("has a timestamp, but the lines before have none")
            if self._clocks:
                raise ArgumentError("has a timestamp, but the lines before have times since their own begin")
            if self._last_time is not None and isinstance(fields["timestamp"], str) != isinstance(self._shown_time, str):
                raise ArgumentError(
                    f"timestamp {shown(fields['timestamp'])} follows {shown(self._shown_time)}: numbers and dates do not mix"
                )
            if "is_turn" in fields:
                self._is_unordered = True
            elif self._last_time is not None and time < self._last_time:
                raise ArgumentError(
                    f"timestamp {fields['timestamp']} is below {self._shown_time}, that of the line before: sort the trace"
                )
            self._last_time, self._shown_time = time, fields["timestamp"]
            self.has_times = True
            return time
        if "delay" in fields and isinstance(session_id, str) and session_id in self._ends:
            self._is_unordered = True
            return self._ends[session_id] + checked_milliseconds("delay", fields["delay"]) * factor
        if self.has_times:
            raise ArgumentError("lacks timestamp, or a delay behind a line of the same session_id")
        return 0.0

    def _check_blocks(self, record: TraceRecord, line: int, *, has_own_size: bool) -> None:
        """Raise ArgumentError for another block size than before, or if the number of ids does not fit a given size. If no size
        is given, note which sizes fit.
        """
        self._has_own_size |= has_own_size or record.output_hash_ids is not None
        if self.records and record.block_size != self.records[-1].block_size:
            before = self.records[-1].block_size
            raise ArgumentError(f"block_size is {record.block_size}, but {before} in the lines before")
        if not record.hash_ids and record.output_hash_ids is None:
            return
        if self._has_own_size or self._block_size is not None:
            _check_num_ids(record)
            return
        num_ids = len(record.hash_ids)
        self._most_ids = max(self._most_ids, num_ids)
        first = cdiv(record.input_length, num_ids)
        stop = MAX_TOKEN_IDS if num_ids == 1 else cdiv(record.input_length, num_ids - 1)
        self._sizes = range(max(self._sizes.start, first), min(self._sizes.stop, stop))
        try:
            _check_num_ids(record)
        except ArgumentError as error:
            self._misfit = self._misfit or (line, error)

    def finish(self, source: str) -> Trace:
        """Return the trace. Raise TraceError unless ids and lengths fit exactly one block size."""
        notes = []
        if self._misfit is not None:
            fitting = [1 << bits for bits in range(31) if 1 << bits in self._sizes]
            if len(fitting) != 1 or self._most_ids < NUM_IDS_FOR_A_GUESS or self._has_own_size:
                raise TraceError(source, self._misfit[0], str(self._misfit[1]))
            self.records = [replace(record, block_size=fitting[0]) for record in self.records]
            notes.append(
                f"Hash ids stand for {count_of(fitting[0], 'token')} each, since lengths and numbers of ids fit no other."
            )
        self._turns.give_ids(self.records, self._find_block_size())
        num_records = len(self.records)
        num_without_ids = sum(not record.hash_ids for record in self.records)
        if num_records and num_without_ids == num_records:
            notes.append("Prefixes are not known, since the trace has no hash_ids: no prompt hits what another one computed.")
        elif num_without_ids:
            notes.append(f"{count_of(num_without_ids, 'request')} without hash_ids: their prefixes are not known.")
        if self._turns.num_added:
            notes.append(
                f"{count_of(self._turns.num_added, 'turn')} of conversations: the turns before are added to their lengths."
            )
        if self._turns.num_shorter:
            notes.append(
                f"{count_of(self._turns.num_shorter, 'request')} shorter than the one before in a session: if lengths are what "
                f"a turn adds, lines need context_mode {ANSWERS_APART}."
            )
        if len(self._clocks) > 1:
            notes.append(f"{count_of(len(self._clocks), 'trace')} with times since their own begin: all begin at once.")
        if self._num_without_output:
            notes.append(f"{count_of(self._num_without_output, 'request')} without output_length: no answer is computed.")
        if self._is_unordered:
            order = sorted(range(num_records), key=lambda place: self.records[place].timestamp)
            self.records = [self.records[place] for place in order]
            self._lines = [self._lines[place] for place in order]
        return Trace(self.records, notes, (self._has_unit if self.has_times else None), self._lines)

    def _find_block_size(self) -> int:
        """Return the tokens per id: the trace's own number if it has ids or names a size, otherwise `TURN_BLOCK_SIZE`."""
        if self._block_size is not None or self._has_own_size or any(record.hash_ids for record in self.records):
            return self.records[0].block_size if self.records else BLOCK_SIZE
        return TURN_BLOCK_SIZE


def _check_num_ids(record: TraceRecord) -> None:
    """Raise ArgumentError unless there are as many ids as blocks."""
    num_ids = cdiv(record.input_length, record.block_size)
    if len(record.hash_ids) != num_ids:
        raise ArgumentError(
            f"input_length {record.input_length} needs {num_ids} hash_ids, got {len(record.hash_ids)}: "
            f"one for each {count_of(record.block_size, 'token')}, unless block_size or --block-size says otherwise"
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
    for ending in (".gz", ".jsonl", ".json", ".csv"):
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


def _read_fields(lines: Lines) -> Iterator[Fields]:
    first = next(lines, None)
    if first is None:
        return
    read_row = find_reader(first)
    if read_row is not None:
        for row in lines:
            yield read_row(row)
        return
    for number, value in enumerate(read_values(first, lines), start=1):
        yield from list_requests(require_object(value), number)


def read_trace(
    path: str | os.PathLike[str],
    limit: int | None = None,
    block_size: int | None = None,
    on_record: Callable[[int], object] = int,
    time_unit: str | None = None,
) -> list[TraceRecord]:
    """Read a trace, or its first `limit` requests. `block_size` applies unless the lines have their own; by default it is 512,
    or the only power of two that fits the lengths and ids of all lines. `time_unit`, `"ms"` or `"s"`, is the unit of numeric
    times. A path ending in `.gz` is decompressed, `-` is standard input. `on_record` gets the number of requests read so far.

    Raise `TraceError` for an invalid line, a line out of order, or an empty trace, and `OSError` if the file cannot be read.
    Lines after `limit` are not read. O(lines + ids), in time and memory.
    """
    return load_records(os.fspath(path), limit, block_size, on_record, time_unit).records


def load_records(
    path: str,
    limit: int | None = None,
    block_size: int | None = None,
    on_record: Callable[[int], object] = int,
    time_unit: str | None = None,
) -> Trace:
    """Read a trace as `read_trace` does, with its unknown properties."""
    if time_unit is not None and (not isinstance(time_unit, str) or time_unit not in TIME_UNITS):
        raise ArgumentError(f"time_unit: got {shown(time_unit)}, allowed: {', '.join(TIME_UNITS)}")
    reading, number = Reading(block_size, time_unit), 1
    try:
        with _open_file(path) as file:
            lines = Lines(file)
            try:
                for fields in _read_fields(lines) if limit != 0 else ():
                    reading.add(fields, lines.number)
                    on_record(len(reading.records))
                    if len(reading.records) == limit:
                        break
            finally:
                number = max(1, lines.number)
    except (PagePoolError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(source_name(path), number, str(error)) from error
    if not reading.records and limit != 0:
        raise TraceError(source_name(path), 1, "the trace is empty")
    return reading.finish(source_name(path))


def _make_token_ids(record: TraceRecord, block_numbers: Sequence[int], seed: Sequence[int]) -> Int32Array:
    """Make prompt and output, `[input_length + output_length]`: consecutive ids in each block, then random ones."""
    starts = np.array(block_numbers, dtype=np.int32) * np.int32(record.block_size)
    num_known_tokens = record.num_known_tokens
    in_block = np.arange(min(record.block_size, num_known_tokens), dtype=np.int32)
    known = (starts[:, None] + in_block).reshape(-1)[:num_known_tokens]
    num_others = record.input_length + record.output_length - num_known_tokens
    return np.concatenate((known, np.random.default_rng(seed).integers(2**31, size=num_others, dtype=np.int32)))


def _make_turns(records: Sequence[TraceRecord]) -> list[Turn | None]:
    """Return the turn of each request, None without a session. Without a pause, the previous request counts as ended at its
    arrival.
    """
    turns: list[Turn | None] = []
    later: dict[str, TraceRecord] = {}  # next request of each session
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


def make_requests(
    records: Sequence[TraceRecord], source: str = "trace", seed: int = 0, lines: Sequence[int] | None = None
) -> list[SimulatedRequest]:
    """Make a request from each record, in order, named by source and line number: counted from 1, unless `lines` has the
    numbers. Several requests in one line are also numbered within it.

    Equal hash ids give equal tokens, different ones different tokens. Tokens without an id depend only on `seed` (at least 0),
    place in the trace and position. Raise `TraceError` if the blocks have more than 2**31 tokens together. O(hash ids); the
    tokens are created just before a request runs.

    >>> record = TraceRecord(timestamp=0, input_length=513, output_length=1, hash_ids=(90, 17))
    >>> [first, again] = make_requests([record, record])
    >>> first.request_id, first.all_token_ids[-2:].tolist(), again.all_token_ids[-2:].tolist()
    ('trace:1', [511, 512], [511, 512])
    """
    numbers: dict[int | str, int] = {}
    requests = []
    num_in_line, names = Counter(lines), Counter[int]()
    numbered = zip(records, _make_turns(records), lines or range(1, 1 + len(records)), strict=True)
    for place, (record, turn, line) in enumerate(numbered, start=1):
        block_numbers = [numbers.setdefault(hash_id, len(numbers)) for hash_id in record.block_ids]
        if len(numbers) * record.block_size > MAX_TOKEN_IDS:
            raise TraceError(source, line, f"more than {MAX_TOKEN_IDS // record.block_size} distinct hash ids")
        make_token_ids = partial(_make_token_ids, record, block_numbers, (seed, place))
        names[line] += 1
        name = f"{source}:{line}:{names[line]}" if num_in_line[line] > 1 else f"{source}:{line}"
        requests.append(SimulatedRequest(name, record.input_length, record.output_length, make_token_ids, turn))
    return requests
