"""Hints of a request about its session and the blocks that it leaves: the fields, arguments and actions of vLLM's requests.

`read` serves any engine whose requests have vLLM's fields. It needs neither vLLM nor the compiled core.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

__all__ = ["ACTIONS", "CLOSE", "MAX_ACTIONS", "MAX_PIN_SECONDS", "MAX_SECONDS", "SECONDS", "Hints", "read"]

SECONDS = "pagepool_seconds"
"""Name of an extra argument: seconds until the request's session comes back; below 0: never."""

CLOSE = "pagepool_close"
"""Name of an extra argument: 1 if the session ends with the request."""

MAX_SECONDS = 86_400.0
"""Longest expected time in seconds; longer ones count as this one."""

MAX_PIN_SECONDS = 3_600.0
"""Longest time of a pin in seconds; longer ones count as this one."""

MAX_ACTIONS = 16
"""Number of actions read from an envelope; the others are ignored."""

MAJOR_VERSION = "1"
MAX_NAME_LEN = 64


@dataclass(frozen=True, slots=True)
class Hints:
    """The hints of a request. Times are in seconds, `math.inf` for never."""

    session: str | None = None
    """Id of the request's session."""
    seconds: float | None = None
    """Time until the blocks of the request are wanted again, 0 to `MAX_SECONDS` or `math.inf`; None if it is unknown."""
    closes: bool = False
    """Whether the session ends with the request."""
    retains: tuple[tuple[str, float], ...] = ()
    """Other sessions by id, each with the time until it comes back."""
    demotes: tuple[str, ...] = ()
    """Ids of other sessions that do not come back."""
    pins: tuple[tuple[int, float], ...] = ()
    """Pins: each has the number of first tokens whose blocks are to be held, and the time, at most `MAX_PIN_SECONDS`."""
    ignored: tuple[str, ...] = ()
    """Names of parts that were not understood: fields, arguments, action types with their versions, ``payload of`` a type."""


@dataclass(slots=True)
class _Draft:
    """The hints of a request while they are read."""

    session: str | None
    seconds: float | None = None
    closes: bool = False
    retains: list[tuple[str, float]] = field(default_factory=list)
    demotes: list[str] = field(default_factory=list)
    pins: list[tuple[int, float]] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)

    def find_other(self, payload: Mapping[str, Any]) -> str | None:
        """Return the session of an action; None for the request's own session, which an action without an id means."""
        session = _session_in(payload)
        return None if session == self.session else session

    def retain(self, payload: Mapping[str, Any]) -> None:
        seconds, other = _seconds_in(payload["seconds"]), self.find_other(payload)
        if other is None:
            self.seconds = seconds
        else:
            self.retains.append((other, seconds))

    def end(self, payload: Mapping[str, Any]) -> None:
        other = self.find_other(payload)
        if other is None:
            self.closes = True
        else:
            self.demotes.append(other)

    def demote(self, payload: Mapping[str, Any]) -> None:
        other = self.find_other(payload)
        if other is None:
            self.seconds = inf
        else:
            self.demotes.append(other)

    def pin(self, payload: Mapping[str, Any]) -> None:
        num_tokens, seconds = payload["tokens"], _seconds_in(payload["seconds"])
        if type(num_tokens) is not int or num_tokens < 1 or seconds == inf:
            raise ValueError
        self.pins.append((num_tokens, min(seconds, MAX_PIN_SECONDS)))


ACTIONS: dict[str, Callable[[Any, Mapping[str, Any]], None]] = {
    "kv.retain": _Draft.retain,
    "session.end": _Draft.end,
    "kv.demote": _Draft.demote,
    "kv.pin": _Draft.pin,
}
"""The types of actions that are understood, in version 1.x. No project has fixed these names: a gateway's own may be added."""


def read(request: Any, *, reads_times: bool = True) -> Hints:
    """Read the hints of a request: its `session_id`, `SECONDS` and `CLOSE` in ``sampling_params.extra_args``, and the actions
    of its envelope `kv_hints`, which override the arguments. Fields may be missing, and none raises an error: `Hints.ignored`
    lists what is not understood. Without `reads_times` only the session is read. O(actions), at most `MAX_ACTIONS`.

    >>> from types import SimpleNamespace
    >>> request = SimpleNamespace(session_id="s1", sampling_params=SimpleNamespace(extra_args={"pagepool_seconds": 3}))
    >>> hints = read(request)
    >>> hints.session, hints.seconds, hints.closes
    ('s1', 3.0, False)
    """
    session = getattr(request, "session_id", None)
    is_session = type(session) is str and session != ""
    draft = _Draft(session if is_session else None)
    if not is_session and session is not None and session != "":
        draft.ignored.append("session_id")
    if reads_times:
        _read_arguments(draft, getattr(getattr(request, "sampling_params", None), "extra_args", None))
        envelope = getattr(request, "kv_hints", None)
        if envelope is not None:
            _read_envelope(draft, envelope)
    if not (draft.retains or draft.demotes or draft.pins or draft.ignored):
        return Hints(draft.session, draft.seconds, draft.closes)
    return Hints(
        draft.session,
        draft.seconds,
        draft.closes,
        tuple(draft.retains),
        tuple(draft.demotes),
        tuple(draft.pins),
        tuple(draft.ignored),
    )


def _read_arguments(draft: _Draft, arguments: Any) -> None:
    if not isinstance(arguments, dict):
        return
    if SECONDS in arguments:
        try:
            draft.seconds = _seconds_in(arguments[SECONDS])
        except ValueError:
            draft.ignored.append(SECONDS)
    if CLOSE in arguments:
        if type(arguments[CLOSE]) in (bool, int, float) and arguments[CLOSE] in (0, 1):
            draft.closes = bool(arguments[CLOSE])
        else:
            draft.ignored.append(CLOSE)


def _read_envelope(draft: _Draft, envelope: Any) -> None:
    version, actions = _field_of(envelope, "protocol_version"), _field_of(envelope, "actions")
    if not _is_known(version):
        draft.ignored.append(f"kv_hints {_shown(version)}")
    elif not isinstance(actions, list | tuple):
        draft.ignored.append("kv_hints")
    else:
        for action in actions[:MAX_ACTIONS]:
            _read_action(draft, action)
        draft.ignored += ["actions above 16"] * (len(actions) > MAX_ACTIONS)


def _read_action(draft: _Draft, action: Any) -> None:
    name, version, payload = (_field_of(action, field) for field in ("action_type", "action_version", "payload"))
    reader = ACTIONS.get(name) if type(name) is str else None
    if reader is None or not _is_known(version):
        draft.ignored.append(f"{_shown(name)} {_shown(version)}")
        return
    try:
        reader(draft, payload)
    except (KeyError, TypeError, ValueError, AttributeError):
        draft.ignored.append(f"payload of {name}")


def _field_of(value: Any, name: str) -> Any:
    """Return a field of an envelope or an action, which are vLLM's structs, or dicts."""
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)


def _is_known(version: Any) -> bool:
    return type(version) is str and version.partition(".")[0] == MAJOR_VERSION


def _seconds_in(value: Any) -> float:
    """Return a time in seconds, `math.inf` if it is below 0. Raise ValueError unless it is a number."""
    if type(value) not in (int, float) or value != value:
        raise ValueError
    return inf if value < 0 else float(min(value, MAX_SECONDS))


def _session_in(payload: Mapping[str, Any]) -> str | None:
    """Return the session id in a payload; None without one. Raise ValueError unless it is a text that is not empty."""
    session = payload.get("session_id")
    if session is None:
        return None
    if type(session) is not str or not session:
        raise ValueError
    return session


def _shown(value: Any) -> str:
    """Return the printable beginning of a text, or the type of something else."""
    if type(value) is not str:
        return f"({type(value).__name__})"
    return "".join(char if char.isprintable() else "?" for char in value[:MAX_NAME_LEN])
