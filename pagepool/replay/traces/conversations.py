"""Lines with several requests: the agents of Weka's kv-cache-tester (AgentX), and the turns of a conversation (AIPerf).

A trace of an agent has `requests` with the seconds `t` since its begin, lengths `in` and `out`, and `hash_ids` of full blocks.
A length is that of the whole prompt, which may shrink, unless `context_mode` says otherwise. An item with `requests` of its own
is a subagent. Equal ids are equal blocks in traces whose `hash_id_scope` is `global`, in one trace if it is `local`, and within
one agent if it is missing.

A conversation has `turns`. All of them have `hash_ids`, or none: without them the length of a turn is what it adds to the turns
before it and their answers. If a turn counts cached tokens, its length is that of the whole prompt.
"""

from collections.abc import Iterator
from typing import Any

from pagepool.arguments import require_int
from pagepool.errors import ArgumentError, shown
from pagepool.replay.traces.fields import Fields, checked_milliseconds, use_usual_names
from pagepool.specs import cdiv

SECOND = 1000  # ms
SCOPES = ("local", "global")
MARKS = frozenset({"id", "session_id", "agent_id", "models", "block_size"})

MAX_MISSING_IDS = 1 << 20
"""The largest number of blocks without an id at the end of a request."""


def list_requests(fields: Fields, number: int) -> list[Fields]:
    """Return the fields of each request in a line, by their usual names. `number` distinguishes the lines of a file. Raise
    ArgumentError for requests that are not understood.
    """
    if isinstance(fields.get("requests"), list) and isinstance(fields.get("turns"), list):
        raise ArgumentError("has requests and turns: which of them counts is not understood")
    for name, read in (("requests", _list_agent), ("turns", _list_turns)):
        if isinstance(fields.get(name), list):
            if "input_length" in use_usual_names({key: value for key, value in fields.items() if key != name}):
                raise ArgumentError(f"has {name} and a length of its own: which of them counts is not understood")
            return [*read(fields, number)]
    return [use_usual_names(fields)]


def _read_objects(fields: Fields, name: str) -> Iterator[tuple[int, Fields]]:
    for place, item in enumerate(fields[name], start=1):
        if not isinstance(item, dict):
            raise ArgumentError(f"{name}: item {place} is {shown(item)}, allowed: an object")
        yield place, item


def _list_agent(trace: Fields, number: int) -> Iterator[Fields]:
    """Yield the requests of an agent's trace, and of its subagents."""
    is_list = MARKS.isdisjoint(trace)  # requests without fields that name an agent
    scope = trace.get("hash_id_scope", "global" if is_list else None)
    if scope is not None and scope not in SCOPES:
        raise ArgumentError(f"hash_id_scope: got {shown(scope)}, allowed: {', '.join(SCOPES)}")
    if trace.get("block_size") is not None:
        require_int("block_size", trace["block_size"], 1)
    name = next((trace[name] for name in ("session_id", "id") if trace.get(name) is not None), f"trace {number}")
    shared = {name: trace[name] for name in ("block_size", "context_mode") if trace.get(name) is not None}
    agent = Agent(number, scope, shared)
    yield from agent.list_requests(trace, str(name), 0.0)


class Agent:
    """Reader of one trace of an agent."""

    def __init__(self, number: int, scope: str | None, shared: Fields) -> None:
        """`scope` is the file's `hash_id_scope`: where equal ids are equal blocks. Requests without a field of their own take
        it from `shared`.
        """
        self._number = number
        self._scope = scope
        self._shared = shared
        self._num_tails = self._num_agents = 0

    def list_requests(self, fields: Fields, session_id: str, begin: float) -> Iterator[Fields]:
        """Yield the requests of an agent or subagent whose times count from `begin`, in ms."""
        self._num_agents += 1
        owner = f"{self._number}.{self._num_agents}" if self._scope is None else str(self._number)
        names: dict[Any, Any] = {}
        for place, request in _read_objects(fields, "requests"):
            try:
                time = begin + _read_seconds(request, "t") if "t" in request else None
                if isinstance(request.get("requests"), list):
                    name = place if request.get("agent_id") is None else request["agent_id"]
                    yield from self.list_requests(request, f"{session_id}/{name}", _find_begin(request, begin, time))
                    if "in" not in request:
                        continue
                usual = self._read_request(request, session_id, time)
                self._complete_ids(usual, owner, names)
                yield usual
            except ArgumentError as error:
                raise ArgumentError(f"request {place} of {shown(session_id)}: {error}") from error

    def _read_request(self, request: Fields, session_id: str, time: float | None) -> Fields:
        """Return the fields of a request that comes at `time`, if that is known."""
        named = {NAMES.get(name, name): value for name, value in request.items() if name not in ("t", "requests")}
        usual = use_usual_names(named)
        if time is not None:
            usual.pop("timestamp", None)
            usual |= {"since_start": time, "clock": self._number, "session_id": session_id}
        if time is not None and request.get("think_time") is not None:
            usual["pause_ms"] = _read_seconds(request, "think_time")
        return self._shared | usual

    def _complete_ids(self, usual: Fields, owner: str, names: dict[Any, Any]) -> None:
        """Name ids by the trace or agent that they belong to, and add ids for the tokens behind the last full block."""
        ids, size, length = usual.get("hash_ids"), usual.get("block_size"), usual.get("input_length")
        if ids is None or ids == []:
            usual.pop("hash_ids", None)
            return
        if not isinstance(ids, list):
            raise ArgumentError(f"hash_ids: got {shown(ids)}, allowed: a list of ints or texts")
        if self._scope != "global":
            known = (int, str)
            ids = [names.setdefault(each, f"{owner}: {each!r}") if type(each) in known else each for each in ids]
        if type(length) is int and type(size) is int:
            self._num_tails += 1
            num_missing = max(0, cdiv(length, size) - len(ids))
            if num_missing > MAX_MISSING_IDS:
                raise ArgumentError(f"hash_ids: got {len(ids)} for {length} tokens, allowed: one for each block of {size}")
            ids = ids + [f"{self._number}: end {self._num_tails}.{place}" for place in range(num_missing)]
        usual["hash_ids"] = ids


def _find_begin(subagent: Fields, begin: float, time: float | None) -> float:
    """Return the time from which a subagent's times count: its agent's begin, or in older traces the subagent's own."""
    first = next((each for each in subagent["requests"] if isinstance(each, dict) and "t" in each), None)
    return begin if first is None or time is None or begin + _read_seconds(first, "t") >= time else time


NAMES = {"in": "input_length", "out": "output_length"}


def _read_seconds(fields: Fields, name: str) -> float:
    """Return a number of seconds in ms."""
    value = checked_milliseconds(name, fields[name])
    if value < 0:
        raise ArgumentError(f"{name}: got {shown(value)}, allowed: a number from 0")
    return value * SECOND


def _list_turns(conversation: Fields, number: int) -> Iterator[Fields]:
    """Yield the turns of a conversation. They arrive at its times, in whatever order the file lists conversations."""
    outer = use_usual_names({key: value for key, value in conversation.items() if key != "turns"})
    shared = {key: value for key, value in outer.items() if key not in ("timestamp", "delay", "pause")}
    shared.setdefault("session_id", f"conversation {number}")
    for place, turn in _read_objects(conversation, "turns"):
        try:
            usual = shared | use_usual_names(turn)
            if place == 1 and "timestamp" in outer:
                usual.setdefault("timestamp", outer["timestamp"])
            yield usual | {"is_turn": True}
        except ArgumentError as error:
            raise ArgumentError(f"turn {place}: {error}") from error
