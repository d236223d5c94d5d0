"""Files that are no lines of requests: arrays, values over several lines, traces of agents, and turns of conversations."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("click")
pytest.importorskip("rich")
from command_line import figures_of, invoke, refuse

from pagepool.replay import TraceError, TraceRecord, make_requests
from pagepool.replay.traces import documents
from pagepool.replay.traces.reader import Trace, load_records

ROWS = [{"timestamp": time, "input_length": 1200 + time, "output_length": 5, "hash_ids": [0, 1, 2]} for time in (0, 5, 9)]
RECORDS = [TraceRecord(time, 1200 + time, 5, (0, 1, 2)) for time in (0, 5, 9)]


def load(folder: Path, text: str, **options: Any) -> Trace:
    path = folder / "trace.json"
    path.write_text(text)
    return load_records(str(path), **options)


class TestDocuments:
    """The same requests, however their objects are laid out."""

    @pytest.mark.parametrize(
        ("text", "lines"),
        [
            (json.dumps(ROWS), [1, 1, 1]),
            (json.dumps(ROWS, indent=2), [2, 12, 22]),
            ("\n [\n" + ",\n".join(map(json.dumps, ROWS)) + "\n]\n\n", [3, 4, 5]),
            ("".join(json.dumps(row, indent=1) + "\n" for row in ROWS), [1, 11, 21]),
            ("".join(map(json.dumps, ROWS)), [1, 1, 1]),
            ("[" + json.dumps(ROWS[0]) + "]\n" + json.dumps(ROWS[1:], indent=0), [1, 3, 13]),
            ("[] " + json.dumps(ROWS), [1, 1, 1]),
            ("\ufeff" + json.dumps(ROWS) + "\r\n", [1, 1, 1]),
            (json.dumps(ROWS[0]) + "\n" + json.dumps(ROWS[1:], indent=0), [1, 3, 13]),
            (json.dumps(ROWS[0]) + "\n" + "".join(json.dumps(row, indent=1) + "\n" for row in ROWS[1:]), [1, 2, 12]),
            (json.dumps(ROWS[0]) + "\n\ufeff" + "".join(map(json.dumps, ROWS[1:])), [1, 2, 2]),
            (json.dumps(ROWS[:1], indent=1) + json.dumps(ROWS[1:], indent=1), [2, 13, 23]),
        ],
    )
    def test_arrays_and_several_lines(self, text: str, lines: list[int], tmp_path: Path) -> None:
        trace = load(tmp_path, text)
        assert (trace.records, trace.lines) == (RECORDS, lines)
        assert load(tmp_path, text, limit=2).records == RECORDS[:2]
        (tmp_path / "trace.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
        assert load_records(str(tmp_path / "trace.json.gz")).records == RECORDS
        figures = figures_of("replay", "-", "--max-num-seqs", 1, input=text)
        assert (figures["requests"], figures["hit_tokens"]) == (3, 2 * 1200)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ('[{"input_length": 5},\n {"input_length": }]', ":2: not valid JSON: Expecting value: line 2 column 19"),
            ('[{"input_length": 5}\n {"input_length": 7}]',
             ":1: not valid JSON: got '{\"input_length\": 7}]' behind an item, al"),
            ('[{"input_length": 5},\n', ":1: not valid JSON: the array has no end"),
            ('[{"input_length": 5}', ":1: not valid JSON: got '' behind an item, allowed: a comma or ]"),
            ('{"input_length": 5,\n', ":1: not valid JSON: Expecting property name"),
            ('{"input_length": 5} x', ":1: not valid JSON: Expecting value"),
            ('{\n"input_length": 5\n}\n{\n"input_length": NaN\n}', ":4: not valid JSON: NaN is not a JSON number"),
            ('[{"input_length": 5},\n\n[7]]', ":3: got a JSON list, allowed: an object"),
            ('[{"input_length": 5},\n\n{"input_length": 0}]', ":3: input_length"),
            ("[]", ":1: the trace is empty"),
            ('{"input_length": 5}\n{"input_length": 5, "input_length": 6}',
             ":2: not valid JSON: an object has the name 'input_l"),
            ('[\n{"input_length": 5, "x": {"a": 1, "b": 1, "a": 1}}]',
             ":2: not valid JSON: an object has the name 'a' more than o"),
            ('{"input_length": 5}\n{"input_length": 5,\n', ":2: not valid JSON: Expecting property name"),
            ("[7]", ":1: got a JSON int, allowed: an object"),
            ("", ":1: the trace is empty"),
            (" \n\n", ":1: the trace is empty"),
        ],
    )  # fmt: skip
    def test_what_is_refused(self, text: str, message: str, tmp_path: Path) -> None:
        with pytest.raises(TraceError) as error:
            load(tmp_path, text)
        assert f"trace.json{message}" in str(error.value)
        result = refuse(2, message, "plan", tmp_path / "trace.json")
        assert result.output.count("\n") == 1

    def test_a_text_that_is_too_long(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(documents, "MAX_DOCUMENT_BYTES", 100)
        with pytest.raises(
            TraceError, match=r"got a text of more than 100 bytes, allowed: one object a line, as jq -c '\.\[\]'"
        ):
            load(tmp_path, json.dumps(ROWS, indent=2))
        assert load(tmp_path, "".join(json.dumps(row) + "\n" for row in ROWS)).records == RECORDS

    def test_requests_of_one_line_have_names_of_their_own(self, tmp_path: Path) -> None:
        trace = load(tmp_path, json.dumps(ROWS[:2]) + "\n" + json.dumps(ROWS[2]))
        names = [request.request_id for request in make_requests(trace.records, "t", lines=trace.lines)]
        assert names == ["t:1:1", "t:1:2", "t:2"]


def agent(requests: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    return {"id": "a", "models": ["m"], "block_size": 64, "tool_tokens": 9, "system_tokens": 7, "requests": requests} | fields


def step(seconds: float, length: int, ids: list[int], **fields: Any) -> dict[str, Any]:
    return {"t": seconds, "type": "s", "model": "m", "in": length, "out": 3, "hash_ids": ids} | fields


STEPS = [step(0, 200, [1, 2, 3]), step(7.5, 256, [1, 2, 3, 4], think_time=2.5, api_time=1.0), step(9, 320, [1, 2, 5, 6, 7])]
SUBAGENT = {"t": 8.0, "type": "subagent", "agent_id": "x", "status": "completed", "models": ["m"]}


class TestAgents:
    def test_requests(self, tmp_path: Path) -> None:
        trace = load(tmp_path, json.dumps(agent(STEPS)))
        found = [
            (each.timestamp, each.input_length, each.output_length, each.pause, len(each.hash_ids)) for each in trace.records
        ]
        assert found == [(0, 200, 3, None, 4), (7500, 256, 3, 2500, 4), (9000, 320, 3, None, 5)]
        assert {(each.session_id, each.block_size) for each in trace.records} == {("a", 64)}
        assert (trace.notes, trace.has_unit) == ([], True)
        trace.require_times()
        assert figures_of("replay", tmp_path / "trace.json", "--max-num-seqs", 1)["hit_tokens"] == 192 + 128

    def test_the_last_tokens_of_two_prompts_are_not_equal(self, tmp_path: Path) -> None:
        first, second, third = load(tmp_path, json.dumps(agent([step(0, 200, [1, 2, 3])] * 2 + [step(1, 500, [1])]))).records
        assert first.hash_ids[:3] == second.hash_ids[:3] == third.hash_ids[:1] + second.hash_ids[1:3]
        assert first.hash_ids[3] != second.hash_ids[3]
        assert len({*third.hash_ids}) == 8

    @pytest.mark.parametrize(("scope", "num_hits"), [("global", 3), ("local", 2), (None, 1)])
    def test_where_equal_ids_are_equal_blocks(self, scope: str | None, num_hits: int, tmp_path: Path) -> None:
        """The second step hits the first one; a subagent, and the other trace, only where the file says so."""
        for names in (("a", "b"), ("a", "a")):
            inner = SUBAGENT | {"requests": [step(8.5, 640, list(range(1, 11)))]}
            traces = [agent([step(0, 640, list(range(1, 11)))] * 2 + [inner], id=name, hash_id_scope=scope) for name in names]
            text = "\n".join(map(json.dumps, traces))
            load(tmp_path, text)
            hits = figures_of("replay", tmp_path / "trace.json", "--max-num-seqs", 1)["hit_tokens"]
            assert hits == {3: 5, 2: 4, 1: 2}[num_hits] * 624

    @pytest.mark.parametrize("begin", [0, 8.0])
    def test_times_of_subagents(self, begin: float, tmp_path: Path) -> None:
        """They count from the begin of the trace, or from that of the subagent."""
        inner = SUBAGENT | {"requests": [step(begin, 64, [8]), step(begin + 0.5, 64, [9])]}
        deeper = SUBAGENT | {"t": 8.25, "agent_id": None, "requests": []}
        trace = load(tmp_path, json.dumps(agent([STEPS[0], inner, deeper, STEPS[2]])))
        assert [(each.timestamp, each.session_id) for each in trace.records] == [
            (0, "a"),
            (8000, "a/x"),
            (8500, "a/x"),
            (9000, "a"),
        ]

    def test_several_begin_at_once(self, tmp_path: Path) -> None:
        text = json.dumps([agent(STEPS[:2]), agent(STEPS[:2], id=None), agent([])])
        trace = load(tmp_path, text)
        assert [(each.timestamp, each.session_id) for each in trace.records] == [
            (0, "a"),
            (0, "trace 2"),
            (7500, "a"),
            (7500, "trace 2"),
        ]
        assert trace.notes == ["2 traces with times since their own begin: all begin at once."]
        assert trace.notes[0] in " ".join(invoke("replay", tmp_path / "trace.json").stdout.split())

    @pytest.mark.parametrize(
        ("trace", "message"),
        [
            (agent(STEPS, hash_id_scope="host"), "hash_id_scope: got 'host', allowed: local, global"),
            (agent([7]), "requests: item 1 is 7, allowed: an object"),  # type: ignore[list-item]
            (agent([step(0, 64, [1, 2])]), "input_length 64 needs 1 hash_ids, got 2"),
            (agent([step(-1, 64, [1])]), "request 1 of 'a': t: got -1, allowed: a number from 0"),
            (agent([step(0, 64, [1]) | {"in": None}]), "lacks input_length"),
            (agent(STEPS, block_size=0), "block_size"),
            (agent(STEPS, input_length=5), "has requests and a length of its own: which of them counts is not understood"),
            (agent(STEPS, turns=[]), "has requests and turns: which of them counts is not understood"),
            (agent(STEPS, context_mode="half"), "context_mode: got 'half', allowed: deltas_without_responses, deltas"),
            (agent([step(0, 64, [1]), {"in": 64, "out": 1}]), "lacks timestamp"),
            ({"hash_id_scope": "local", "input_length": 5, "hash_ids": [1]}, "hash_id_scope: got 'local', allowed: 'global'"),
        ],
    )
    def test_what_is_refused(self, trace: dict[str, Any], message: str, tmp_path: Path) -> None:
        with pytest.raises(TraceError) as error:
            load(tmp_path, json.dumps(trace))
        assert message in str(error.value)

    def test_two_clocks_do_not_mix(self, tmp_path: Path) -> None:
        with pytest.raises(TraceError, match=":2: has a timestamp, but the lines before have times since their own begin"):
            load(tmp_path, json.dumps(agent(STEPS)) + "\n" + json.dumps({"timestamp": 5, "input_length": 5}))
        with pytest.raises(TraceError, match=":2: has times since its own begin, but the lines before have timestamps"):
            load(tmp_path, json.dumps({"timestamp": 5, "input_length": 5}) + "\n" + json.dumps(agent(STEPS)))

    def test_contexts_may_shrink(self, tmp_path: Path) -> None:
        """Lengths of agents are those of whole prompts, unless the trace or a request says otherwise."""
        steps = [step(0, 300, []), step(1, 100, [])]
        trace = load(tmp_path, json.dumps(agent(steps)))
        assert [each.input_length for each in trace.records] == [300, 100]
        assert len(trace.notes) == 1
        assert "Prefixes are not known" in trace.notes[0]
        trace = load(tmp_path, json.dumps(agent(steps, context_mode="deltas_without_responses")))
        assert [each.input_length for each in trace.records] == [300, 403]

    def test_a_list_of_requests_with_the_usual_names(self, tmp_path: Path) -> None:
        assert load(tmp_path, json.dumps({"requests": ROWS})).records == RECORDS


TURNS = [{"input_length": 300, "output_length": 40}, {"input_length": 150, "output_length": 20, "delay": 2000}]
TURNS += [{"input_length": 50, "output_length": 20, "delay": 1000}]


class TestTurns:
    """Turns say what they add: 300, then 300 + 40 + 150, then 490 + 20 + 50 tokens."""

    @pytest.mark.parametrize(
        "text",
        [
            json.dumps({"session_id": "s", "turns": TURNS}),
            json.dumps([{"session_id": "s", "turns": [TURNS[0] | {"timestamp": 0}, *TURNS[1:]]}], indent=1),
            "\n".join(json.dumps({"session_id": "s"} | turn) for turn in TURNS),
            "\n".join(json.dumps({"session_id": "s", "context_mode": "deltas_without_responses"} | turn) for turn in TURNS),
        ],
    )
    def test_lengths_are_added_up(self, text: str, tmp_path: Path) -> None:
        trace = load(tmp_path, text)
        found = [(each.timestamp, each.input_length, each.output_length, each.session_id) for each in trace.records]
        assert found == [(0, 300, 40, "s"), (2000, 490, 20, "s"), (3000, 560, 20, "s")]
        assert trace.notes == ["2 turns of conversations: the turns before are added to their lengths."]
        figures = figures_of("replay", tmp_path / "trace.json", "--max-num-seqs", 1)
        assert figures["hit_tokens"] == 339 // 16 * 16 + 509 // 16 * 16

    def test_answers_within(self, tmp_path: Path) -> None:
        text = json.dumps({"session_id": "s", "context_mode": "deltas_with_responses", "turns": TURNS})
        assert [each.input_length for each in load(tmp_path, text).records] == [300, 450, 500]
        assert figures_of("replay", tmp_path / "trace.json", "--max-num-seqs", 1)["hit_tokens"] == 288 + 448

    def test_whole_prompts(self, tmp_path: Path) -> None:
        """With ids, with timestamps, or if they say so, lengths are of whole prompts."""
        whole = {"session_id": "s", "context_mode": "message_array_with_responses", "turns": TURNS}
        assert [each.input_length for each in load(tmp_path, json.dumps(whole)).records] == [300, 150, 50]
        rows = [{"session_id": "s", "hash_ids": [7]} | turn for turn in TURNS]
        for text in (json.dumps({"turns": rows}), "\n".join(map(json.dumps, rows))):
            assert [each.input_length for each in load(tmp_path, text).records] == [300, 150, 50]
        rows = [{"session_id": "s", "timestamp": time, "input_length": 100 * time + 1} for time in range(3)]
        assert [each.input_length for each in load(tmp_path, "\n".join(map(json.dumps, rows))).records] == [1, 101, 201]

    def test_lengths_that_may_be_what_a_turn_adds_are_noted(self, tmp_path: Path) -> None:
        rows = [
            {"session_id": "s", "timestamp": time, "input_length": length} for time, length in ((0, 300), (1, 150), (2, 200))
        ]
        note = "1 request shorter than the one before in a session: if lengths are what a turn adds, lines need context_mode"
        assert load(tmp_path, "\n".join(map(json.dumps, rows))).notes[1] == f"{note} deltas_without_responses."
        whole = [row | {"context_mode": "message_array_with_responses"} for row in rows]
        assert len(load(tmp_path, "\n".join(map(json.dumps, whole))).notes) == 2
        added = [row | {"context_mode": "deltas_without_responses"} for row in rows]
        assert [each.input_length for each in load(tmp_path, "\n".join(map(json.dumps, added))).records] == [300, 450, 650]

    def test_ids_of_the_file_keep_their_size(self, tmp_path: Path) -> None:
        trace = load(tmp_path, json.dumps({"turns": TURNS}) + "\n" + json.dumps({"input_length": 600, "hash_ids": [1, 2]}))
        assert {each.block_size for each in trace.records} == {512}
        trace = load(tmp_path, json.dumps({"turns": TURNS}), block_size=64)
        assert [len(each.hash_ids) for each in trace.records] == [5, 8, 9]

    @pytest.mark.parametrize(
        ("row", "message"),
        [
            ({"turns": [{"text": "Hello"}]}, "lacks input_length: only the model's tokenizer counts the tokens of its text"),
            ({"messages": [], "output_length": 5}, "lacks input_length: only the model's tokenizer"),
            ({"turns": [{"output_length": 5}]}, "lacks input_length"),
            ({"turns": ["Hello"]}, "turns: item 1 is 'Hello', allowed: an object"),
            ({"turns": TURNS, "input_length": 5}, "has turns and a length of its own"),
            ({"turns": TURNS, "context_mode": "half"}, "context_mode: got 'half', allowed: deltas_without_responses, deltas"),
            (
                {"context_mode": "deltas_with_responses", "input_length": 5},
                "context_mode: got 'deltas_with_responses', allowed: only in a session, and without hash_ids",
            ),
            (
                {"turns": [TURNS[0] | {"hash_ids": [7]}, TURNS[1]]},
                "lacks hash_ids, unlike the turns before in session 'conversation 1': whether its length is that of the whole",
            ),
            ({"turns": [TURNS[0], TURNS[1] | {"hash_ids": [7]}]}, "has hash_ids, unlike the turns before in session 'conv"),
            ({"turns": [{"prompt_tokens": 9, "cached_tokens": 10}]}, "turn 1: cached_tokens: got 10, allowed: at most 9"),
        ],
    )
    def test_what_is_refused(self, row: dict[str, Any], message: str, tmp_path: Path) -> None:
        with pytest.raises(TraceError) as error:
            load(tmp_path, json.dumps(row))
        assert f":1: {message}" in str(error.value)
