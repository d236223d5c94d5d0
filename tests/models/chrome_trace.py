"""What the Chrome trace format demands of a file, in the form of a JSON array: fields and types by phase, and how events join.

- ``M`` names a process or a track, or says where it is shown.
- ``B`` and ``E`` begin and end a slice of a track, nested as parentheses are. ``X`` is a whole slice, and overlaps no other one
  of its track unless one lies within the other.
- ``b`` and ``e`` begin and end a slice that belongs to no track: category, id and name join them.
- ``i`` is a mark, of a track, a process or all (``s``). ``C`` has the values of counters from its time on.

Times are µs, and numbers of processes and tracks ints. Each phase has its fields, and no others here.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any, Literal

import msgspec

Number = int | float
NAMES = {"process_name": "name", "process_sort_index": "sort_index", "thread_name": "name", "thread_sort_index": "sort_index"}


class Fields(msgspec.Struct, kw_only=True, tag_field="ph", forbid_unknown_fields=True):
    name: str
    ts: Number
    pid: int
    tid: int


class Metadata(Fields, kw_only=True, tag="M"):
    name: Literal["process_name", "process_sort_index", "thread_name", "thread_sort_index"]
    args: dict[Literal["name", "sort_index"], str | int]


class Begin(Fields, kw_only=True, tag="B"):
    args: dict[str, Any]


class End(Fields, kw_only=True, tag="E"):
    args: dict[str, Any]


class Whole(Fields, kw_only=True, tag="X"):
    dur: Number
    args: dict[str, Any]


class AsyncBegin(Fields, kw_only=True, tag="b"):
    cat: str
    id: int | str
    args: dict[str, Any]


class AsyncEnd(Fields, kw_only=True, tag="e"):
    cat: str
    id: int | str
    args: dict[str, Any]


class Mark(Fields, kw_only=True, tag="i"):
    s: Literal["g", "p", "t"]
    args: dict[str, Any]


class Counter(Fields, kw_only=True, tag="C"):
    args: dict[str, Number]


Event = Metadata | Begin | End | Whole | AsyncBegin | AsyncEnd | Mark | Counter


def read_events(path: Path, is_ended: bool = True) -> list[Any]:
    """Read a file and check it. A trace that is not `is_ended` may have slices without an end."""
    events: list[Any] = msgspec.json.decode(path.read_bytes(), type=list[Event])
    check_names(events)
    check_times(events)
    check_slices(events, is_ended)
    return events


def check_names(events: list[Any]) -> None:
    """Each process and track has a name of its own before its first event."""
    names: dict[tuple[int, ...], str | int] = {}
    for event in events:
        if isinstance(event, Metadata):
            assert list(event.args) == [NAMES[event.name]], event
            value = event.args[NAMES[event.name]]  # type: ignore[index]
            assert type(value) is (str if event.name.endswith("_name") else int), event
            where = (event.pid,) if event.name.startswith("process") else (event.pid, event.tid)
            if event.name.endswith("_name"):
                assert where not in names, event
                names[where] = value
        else:
            assert (event.pid,) in names, event
            assert (event.pid, event.tid) in names, event


def check_times(events: list[Any]) -> None:
    """The times of a track, and those of a counter, do not go back."""
    last: dict[Any, float] = defaultdict(float)
    for event in events:
        if isinstance(event, Metadata | AsyncBegin | AsyncEnd):
            continue
        track = event.pid, event.name if isinstance(event, Counter) else event.tid, isinstance(event, Counter)
        assert event.ts >= last[track] > -1, event
        last[track] = event.ts


def check_slices(events: list[Any], is_ended: bool) -> None:
    """Each end has a begin, and each begin an end; whole slices of a track do not overlap."""
    open_slices: dict[Any, list[Any]] = defaultdict(list)
    stops: dict[Any, float] = defaultdict(float)
    for event in events:
        where: Any = event.pid, event.tid
        if isinstance(event, AsyncBegin | AsyncEnd):
            where = event.cat, event.id, event.name
        if isinstance(event, Begin | AsyncBegin):
            open_slices[where].append(event)
        elif isinstance(event, End | AsyncEnd):
            assert event.ts >= open_slices[where].pop().ts, event
        elif isinstance(event, Whole):
            assert event.dur >= 0
            assert event.ts >= stops[where] - 0.01, event  # floats have 15 digits
            stops[where] = event.ts + event.dur
    assert not is_ended or not any(open_slices.values())
