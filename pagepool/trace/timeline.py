"""What happened in a manager and its batches, as events of the Chrome trace format.

Each method of the tracks takes the arguments of one record, in the order of the calls, and adds events to the timeline's list.
Times come in ns of the monotonic clock, and are µs in the events. The manager is process 1, its batches are processes 2, 3 and
so on; each row, each of the manager's running requests, and each step that can be in flight has a track of its own.
"""

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any, NamedTuple

from msgspec import Struct

from pagepool.refusal import Refusal

__all__ = ["BatchTracks", "Event", "ManagerTracks", "Stay", "Timeline"]

MANAGER, FIRST_BATCH = 1, 2  # processes
EVENTS = 1  # the track of what belongs to no row, request or step
STEPS = 2  # the first track of steps
ROWS = 300  # the first track of rows or requests: more than 254 steps ahead are refused
MAX_NAME = 120  # characters of a request id

Args = dict[str, Any]


class Event(Struct, omit_defaults=True, gc=False):
    """An event as the format has it. Times are in µs."""

    name: str
    ph: str
    ts: float
    pid: int
    tid: int
    dur: float | None = None
    cat: str | None = None
    id: int | None = None
    s: str | None = None
    args: Any = None


class StepArgs(Struct, gc=False):
    """The arguments of a step: its number, its rows, how it ended, and the ns in the calls that planned and settled it."""

    step: int
    rows: int
    end: str
    plan_ns: int
    settle_ns: int


class Stay(NamedTuple):
    """A row's stay or a request's, as it begins: its number in the batch, its tokens, and those that were cached, and come from
    elsewhere. `began_before` says that it is older than the trace.
    """

    number: int | None
    num_tokens: int
    num_hit_tokens: int
    num_external_tokens: int = 0
    began_before: bool = False
    forked_from: int | str | None = None
    moved_from: int | None = None

    def describe(self) -> Args:
        """Return the arguments of its slice."""
        args: Args = {} if self.number is None else {"stay": self.number}
        args |= {"tokens": self.num_tokens, "cached_tokens": self.num_hit_tokens}
        optional = {
            "external_tokens": self.num_external_tokens or None,
            "began_before": self.began_before or None,
            "forked_from": self.forked_from,
            "moved_from": self.moved_from,
        }
        return args | {name: value for name, value in optional.items() if value is not None}


class Track:
    """A line of slices and marks. Its times never go back: calls of several threads may be recorded out of order."""

    def __init__(self, timeline: "Timeline", pid: int, tid: int, name: str) -> None:
        """Name the track. Tracks are shown in the order of `tid`."""
        self._timeline, self._pid, self._tid = timeline, pid, tid
        self._last = 0.0
        self.is_open = False
        for key, value in ("name", name), ("sort_index", tid):
            timeline.events.append(Event(f"thread_{key}", "M", 0, pid, tid, args={key: value}))

    def _add(self, time: int, name: str, phase: str, args: Args, scope: str | None = None) -> None:
        self._last = max(self._last, time / 1000)
        self._timeline.events.append(Event(name, phase, self._last, self._pid, self._tid, s=scope, args=args))

    def begin(self, time: int, name: str, args: Args) -> None:
        """Begin a slice. One whose end was dropped ends here."""
        if self.is_open:
            self.end(time, {"end": "dropped"})
        self._add(time, name, "B", args)
        self.is_open = True

    def end(self, time: int, args: Args) -> None:
        """End the slice, unless its begin was dropped."""
        if self.is_open:
            self._add(time, "", "E", args)
        self.is_open = False

    def mark(self, time: int, name: str, args: Args) -> None:
        """Add a mark."""
        self._add(time, name, "i", args, "t")


class Process:
    """A group of tracks, which are made as they are needed."""

    line_name = "line"

    def __init__(self, timeline: "Timeline", pid: int, name: str) -> None:
        """Begin without tracks."""
        self.timeline, self.pid, self.name = timeline, pid, name
        self._tracks: dict[int, Track] = {}

    def line(self, number: int) -> Track:
        """Return the track of a row or request by its number."""
        return self._track(ROWS + number, f"{self.line_name} {number}")

    def _track(self, tid: int, name: str) -> Track:
        track = self._tracks.get(tid)
        if track is None:
            if not self._tracks:
                self.timeline.introduce(self)
            track = self._tracks[tid] = Track(self.timeline, self.pid, tid, name)
        return track

    def mark(self, time: int, name: str, args: Args) -> None:
        """Add a mark that belongs to no row or request."""
        self._track(EVENTS, "events").mark(time, name, args)

    def refuse(self, time: int, row: int | None, refusal: Refusal) -> None:
        """Mark a refusal, on the track of its row if that is known."""
        args: Args = {"needed_pages": refusal.num_needed, "free_pages": refusal.num_free, "pool": refusal.pool}
        args |= {"reserved_pages": refusal.num_reserved, "cached_tokens": refusal.num_hit_tokens}
        args |= {"can_wait": refusal.can_wait, **({} if refusal.shard is None else {"shard": refusal.shard})}
        if row is None:
            self.mark(time, "refused", args)
        else:
            self.line(row).mark(time, "refused", args)

    def count_tracks(self) -> int:
        """Count the tracks, and slices without a track."""
        return len(self._tracks)

    def close(self, time: int) -> None:
        """End all slices."""
        for track in self._tracks.values():
            track.end(time, {"end": "open"})


class BatchTracks(Process):
    """The tracks of a running batch: its steps, and a track for each row."""

    line_name = "row"

    def __init__(self, timeline: "Timeline", number: int, max_steps_ahead: int) -> None:
        """Begin without tracks. A step has ended when the step `max_steps_ahead` + 1 behind it is planned."""
        super().__init__(timeline, FIRST_BATCH + number, f"pagepool batch {number}")
        self._num_lanes = max_steps_ahead + 1
        self._steps: dict[int, tuple[int, int, int]] = {}  # by number: the begin, the rows, and the ns in calls
        self._stays: dict[int, Stay] = {}

    def launch(self, begin: int, end: int, number: int, num_rows: int) -> None:
        """Add rows to a step; the first ones begin it, and imply that earlier steps have run."""
        steps = self._steps
        if number in steps:
            begin_of_step, num_before, ns = steps[number]
            steps[number] = begin_of_step, num_before + num_rows, ns + end - begin
            return
        while steps and (first := next(iter(steps))) <= number - self._num_lanes:
            self._end_step(first, begin, "followed", 0)
        steps[number] = begin, num_rows, end - begin

    def settle(self, begin: int, end: int, number: int, lost_rows: list[int] | None) -> None:
        """End a step; if it has failed (`lost_rows` is not None), also all later ones, and the stays of the lost rows."""
        if lost_rows is None:
            self._end_step(number, end, "settled", end - begin)
            return
        for each in sorted({number, *(each for each in self._steps if each > number)}):
            self._end_step(each, end, "failed", end - begin if each == number else 0)
        self.lose(end, lost_rows)

    def _end_step(self, number: int, time: int, end: str, settle_ns: int) -> None:
        if number not in self._steps:
            self.mark(time, end, {"step": number})
            return
        begin, num_rows, plan_ns = self._steps.pop(number)
        lane = number % self._num_lanes
        if STEPS + lane not in self._tracks:
            self._track(STEPS + lane, f"steps {lane}" if self._num_lanes > 1 else "steps")
        args, dur = StepArgs(number, num_rows, end, plan_ns, settle_ns), (time - begin) / 1000
        self.timeline.events.append(Event("step", "X", begin / 1000, self.pid, STEPS + lane, dur, None, None, None, args))

    def admit(self, time: int, row: int, stay: Stay) -> None:
        """Begin the stay of a row."""
        self._stays[row] = stay
        self.line(row).begin(time, "request", stay.describe())

    def release(self, time: int, rows: list[int], lengths: list[int]) -> None:
        """End the stays of rows, with the number of tokens that each had."""
        for row, num_tokens in zip(rows, lengths, strict=True):
            self._end_stay(time, row, {"end": "released", "tokens": num_tokens})

    def lose(self, time: int, rows: list[int]) -> None:
        """End the stays of rows that could not go back."""
        for row in rows:
            self._end_stay(time, row, {"end": "lost"})

    def _end_stay(self, time: int, row: int, args: Args) -> None:
        self.line(row).end(time, args)
        self._stays.pop(row, None)

    def mark_row(self, time: int, row: int, name: str, args: Args) -> None:
        """Add a mark to the track of a row."""
        self.line(row).mark(time, name, args)

    def exchange(self, time: int, source: int, target: int) -> None:
        """Exchange two rows, free or not: their stays go on in the other's track."""
        stays = [(target, source, self._stays.pop(source, None)), (source, target, self._stays.pop(target, None))]
        for row in source, target:
            self.line(row).end(time, {"end": "moved"})
        for row, moved_from, stay in stays:
            if stay is not None and row != moved_from:
                self.admit(time, row, stay._replace(moved_from=moved_from))

    def close(self, time: int) -> None:
        """End all slices."""
        for number in list(self._steps):
            self._end_step(number, time, "open", 0)
        super().close(time)


class ManagerTracks(Process):
    """The tracks of a manager: requests without rows, moves, and counters of pages. A request has the first track that is free
    when it is admitted.
    """

    line_name = "request"

    def __init__(self, timeline: "Timeline") -> None:
        """Begin without tracks."""
        super().__init__(timeline, MANAGER, "pagepool manager")
        self._lines: dict[str, int] = {}
        self._free: list[int] = []
        self._moves: set[int] = set()
        self._counts: dict[str, Args] = {}

    def admit(self, time: int, request_id: str, stay: Stay) -> None:
        """Begin the stay of a request."""
        if request_id in self._lines:
            self.free(time, request_id, {"end": "dropped"})
        line = heappop(self._free) if self._free else len(self._lines)
        self._lines[request_id] = line
        self.line(line).begin(time, show(request_id), stay.describe())

    def free(self, time: int, request_id: str, args: Args) -> None:
        """End the stay of a request, if it has one."""
        line = self._lines.pop(request_id, None)
        if line is not None:
            self.line(line).end(time, args)
            heappush(self._free, line)

    def refuse_request(self, time: int, request_id: str, free: dict[str, int], num_new_tokens: int) -> None:
        """Mark a request that got no pages: the free pages of each pool were too few."""
        line = self._lines.get(request_id)
        args: Args = {"free_pages": free, "new_tokens": num_new_tokens}
        if line is None:
            self.mark(time, "refused", {"request": show(request_id), **args})
        else:
            self.line(line).mark(time, "refused", args)

    def take_moves(self, time: int, number: int, num_loads: int, num_saves: int) -> None:
        """Begin the loads and saves of a number."""
        self._moves.add(number)
        self._add(time, "moves", "b", {"number": number, "loads": num_loads, "saves": num_saves}, number)

    def end_moves(self, time: int, number: int, args: Args) -> None:
        """End the loads and saves of a number, if they began within the trace."""
        if number in self._moves:
            self._moves.remove(number)
            self._add(time, "moves", "e", args, number)

    def count(self, time: int, counts: dict[str, Args]) -> None:
        """Add counters whose values have changed."""
        for name, values in counts.items():
            if self._counts.get(name) != values:
                self._counts[name] = values
                self._add(time, name, "C", values)

    def _add(self, time: int, name: str, phase: str, args: Args, number: int | None = None) -> None:
        """Add an event that lies on no track, but belongs to the process."""
        self._track(EVENTS, "events")
        category = None if number is None else "moves"
        self.timeline.events.append(Event(name, phase, time / 1000, self.pid, EVENTS, cat=category, id=number, args=args))

    def count_tracks(self) -> int:
        """Count the tracks, and the moves in flight."""
        return super().count_tracks() + len(self._moves)

    def close(self, time: int) -> None:
        """End all slices."""
        for number in sorted(self._moves):
            self.end_moves(time, number, {"end": "open"})
        super().close(time)


def show(request_id: str) -> str:
    """Return a request id as text for JSON, cut to `MAX_NAME` characters."""
    text = request_id[:MAX_NAME].encode("utf-8", "backslashreplace").decode()
    return text if len(request_id) <= MAX_NAME else f"{text}..."


class Timeline:
    """Unwritten events, and the processes with any."""

    def __init__(self) -> None:
        """Begin without events."""
        self.events: list[Event] = []
        self.manager = ManagerTracks(self)
        self._processes: list[Process] = []

    def introduce(self, process: Process) -> None:
        """Name a process."""
        self._processes.append(process)
        for key, value in ("name", process.name), ("sort_index", process.pid):
            self.events.append(Event(f"process_{key}", "M", 0, process.pid, EVENTS, args={key: value}))

    def take(self) -> list[Event]:
        """Return the events since the last call."""
        events, self.events = self.events, []
        return events

    def count_tracks(self) -> int:
        """Count the tracks: no more slices than these have to be ended."""
        return sum(process.count_tracks() for process in self._processes)

    def close(self, time: int) -> None:
        """End all slices, since the trace ends before they do."""
        for process in self._processes:
            process.close(time)

    def list_ends(self, time: int, unwritten: Sequence[Event]) -> list[Event]:
        """Return the last events of a file that is full: a mark, and the ends of all slices whose begins are written. The
        events since the last call of `take` are `unwritten`.
        """
        self.close(time)
        first: dict[tuple[int, int, int | None], Event] = {}
        for event in (*unwritten, *self.take()):
            if event.ph in "BEbe":
                first.setdefault((event.pid, event.tid, event.id), event)
        full = Event("the file is full", "i", time / 1000, MANAGER, EVENTS, s="g", args={})
        return [full, *(event for event in first.values() if event.ph in "Ee")]
