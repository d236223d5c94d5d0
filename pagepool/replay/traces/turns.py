"""Conversations whose turns have only the lengths that they add: their whole prompts, and ids of the blocks that they share."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice

from pagepool.errors import ArgumentError, shown
from pagepool.replay.traces.fields import Fields
from pagepool.replay.traces.records import TraceRecord
from pagepool.specs import cdiv

ANSWERS_APART, ANSWERS_WITHIN = "deltas_without_responses", "deltas_with_responses"
MAX_LENGTH = 1 << 24
"""The largest number of tokens in a conversation whose blocks are given ids."""

MODES = {ANSWERS_APART: True, ANSWERS_WITHIN: True, "message_array_with_responses": False}
"""AIPerf's names for the contents of a turn, each with whether its length adds to the turns before."""


class Turns:
    """The turns of all sessions of a trace."""

    def __init__(self) -> None:
        """Begin without sessions. `num_added` counts turns with earlier lengths added, `num_shorter` those that shrank."""
        self.num_added = self.num_shorter = 0
        self._lengths: dict[str, int] = {}  # tokens of each session's last turn and its answer
        self._places: dict[str, list[int]] = {}  # records without ids, by session
        self._with_ids: dict[str, bool] = {}  # whether the turns of a session have ids
        self._growing: dict[str, bool] = {}  # whether the answers of a session are added too

    def find_length(self, fields: Fields, session_id: object, input_length: object) -> object:
        """Return the length of the whole prompt of a line. Raise ArgumentError for a mode that is not understood."""
        mode = fields.get("context_mode")
        has_ids = bool(fields.get("hash_ids"))
        if mode is None:
            is_turn = "is_turn" in fields or ("delay" in fields and "timestamp" not in fields)
            is_added = is_turn and not has_ids and "is_whole" not in fields
        elif not isinstance(mode, str) or mode not in MODES:
            raise ArgumentError(f"context_mode: got {shown(mode)}, allowed: {', '.join(MODES)}")
        else:
            is_added = MODES[mode]
        if is_added and mode is not None and (has_ids or session_id is None):
            raise ArgumentError(f"context_mode: got {shown(mode)}, allowed: only in a session, and without hash_ids")
        if not isinstance(session_id, str) or type(input_length) is not int:
            return input_length
        if mode is None:
            self._require_one_kind(session_id, is_turn=is_turn, has_ids=has_ids)
        if not is_added:
            is_agent = "since_start" in fields  # its context may shrink
            self.num_shorter += (
                mode is None and not has_ids and not is_agent and input_length < self._lengths.get(session_id, 0)
            )
            return input_length
        self._growing.setdefault(session_id, mode != ANSWERS_WITHIN)
        before = self._lengths.get(session_id, 0)
        if before + input_length > MAX_LENGTH:
            raise ArgumentError(
                f"input_length: got {before + input_length} with the turns before, allowed: at most {MAX_LENGTH}"
            )
        self.num_added += before > 0
        return before + input_length

    def _require_one_kind(self, session_id: str, *, is_turn: bool, has_ids: bool) -> None:
        """Raise ArgumentError if turns of a session have ids and others have none, so that their lengths differ in meaning."""
        if is_turn and self._with_ids.setdefault(session_id, has_ids) != has_ids:
            difference = f"{'has' if has_ids else 'lacks'} hash_ids, unlike the turns before in session {shown(session_id)}"
            raise ArgumentError(f"{difference}: whether its length is that of the whole prompt is not understood")

    def add(self, record: TraceRecord, place: int) -> None:
        """Remember the record at index `place` of the trace."""
        if record.session_id is None:
            return
        has_answers = self._growing.get(record.session_id, True)
        self._lengths[record.session_id] = record.input_length + has_answers * record.output_length
        if not record.hash_ids and record.output_hash_ids is None:
            self._places.setdefault(record.session_id, []).append(place)

    def give_ids(self, records: list[TraceRecord], block_size: int) -> None:
        """Give the turns of each conversation common ids of blocks, in place."""
        for session_id, has_answers in self._growing.items():
            places = self._places.get(session_id, [])
            longest = max((records[place].input_length + records[place].output_length for place in places), default=0)
            ids = [f"block {block} of {session_id!r}" for block in range(cdiv(longest, block_size))]
            for place in places:
                records[place] = _give_ids(records[place], ids, block_size, has_answers=has_answers)


def _give_ids(record: TraceRecord, ids: list[str], block_size: int, *, has_answers: bool) -> TraceRecord:
    num_ids = cdiv(record.input_length, block_size)
    num_full = (record.input_length + record.output_length) // block_size
    answer: Iterable[str] = islice(ids, num_ids, max(num_ids, num_full))
    output_ids = tuple(answer) if has_answers else None
    return replace(record, hash_ids=tuple(ids[:num_ids]), output_hash_ids=output_ids, block_size=block_size)
