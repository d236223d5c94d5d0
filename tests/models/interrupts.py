"""Calls that are interrupted at each place where Python handles signals, one place after the other."""

from __future__ import annotations

import dis
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pagepool

PACKAGE = str(Path(pagepool.__file__).parent)


@cache
def find_places(code: CodeType) -> frozenset[int]:
    """Return the offsets of the opcodes after which signals are handled."""
    names = ("RESUME", "CALL", "JUMP_BACKWARD")
    return frozenset(opcode.offset for opcode in dis.get_instructions(code) if opcode.opname.startswith(names))


@cache
def find_handler(code: CodeType, offset: int) -> int | None:
    """Return the handler of an exception raised by the opcode at an offset."""
    entries = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]
    return next((entry.target for entry in entries if entry.start <= offset < entry.end), None)


class Interrupter:
    """Raises KeyboardInterrupt at the place with that number in frames of the package."""

    def __init__(self, place: int) -> None:
        self.num_left = place
        self.is_done = False
        self.last_offsets: dict[FrameType, int] = {}

    def trace(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.num_left -= self.is_place(frame)
            self.last_offsets[frame] = frame.f_lasti
        if self.num_left < 0 and not self.is_done:
            self.is_done = True
            raise KeyboardInterrupt
        return self.trace

    def is_place(self, frame: FrameType) -> bool:
        """Whether the previous opcode is one, and has the same handler for exceptions."""
        code, last_offset = frame.f_code, self.last_offsets.get(frame, -1)
        return last_offset in find_places(code) and find_handler(code, last_offset) == find_handler(code, frame.f_lasti)

    def interrupts(self, call: Callable[[], object]) -> bool:
        """Whether the call has that many places and was interrupted."""
        previous = sys.gettrace()
        sys.settrace(self.trace)
        try:
            call()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(previous)
        return self.is_done


def interrupted_everywhere(make: Callable[[], Any], call: Callable[[Any], object], min_places: int = 1) -> Iterator[Any]:
    """Yield objects from `make` after a call on each was interrupted at the first place, the second, and so on."""
    for place in itertools.count():
        thing = make()
        if not Interrupter(place).interrupts(lambda thing=thing: call(thing)):
            assert place >= min_places, f"the call has {place} places"
            return
        yield thing


def call_in_thread(call: Callable[[], object]) -> None:
    """Make a call in another thread, which must not block on a lock left behind."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
