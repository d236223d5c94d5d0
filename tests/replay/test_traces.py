"""Traces as other tools write them: names, units, ids, lines and columns; what is not known of them; and what is refused."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("click")
pytest.importorskip("rich")
from command_line import figures_of, invoke, line_of, refuse

from pagepool.replay import TraceError, TraceRecord, read_trace
from pagepool.replay.traces.reader import load_records

FULL = {"timestamp": 0, "input_length": 1200, "output_length": 5, "hash_ids": [0, 1, 2]}
RECORD = TraceRecord(0, 1200, 5, (0, 1, 2))
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n"
AZURE_2024 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2024-05-10 00:00:00.009930+00:00,2162,5\n"
    "2024-05-10 00:00:01.009930+00:00,2399,6\n"
)
BURST = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n45.5,GPT-4,1087,0,1087,API log\n"
)
BURST_SESSIONS = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    '0,,1.2,ChatGPT,10,2,12,API log\n3,17,0.5,"GPT-4, new",20,4,24,Conversation log\n'
)
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n0.5,100,3\n2.5,200.0,4\n"


def without(*names: str, **more: object) -> dict[str, Any]:
    return {name: value for name, value in FULL.items() if name not in names} | more


def write(folder: Path, *rows: dict[str, Any] | str | bytes, name: str = "trace.jsonl") -> Path:
    """Write rows, each a line of JSON or as it is."""
    path = folder / name
    path.write_bytes(b"".join(_encode(row) for row in rows))
    return path


def _encode(row: dict[str, Any] | str | bytes) -> bytes:
    if isinstance(row, dict):
        row = json.dumps(row) + "\n"
    return row.encode() if isinstance(row, str) else row


def read(folder: Path, *rows: dict[str, Any] | str | bytes, **options: Any) -> list[TraceRecord]:
    return read_trace(str(write(folder, *rows)), **options)


class TestLines:
    @pytest.mark.parametrize(
        "text",
        [
            json.dumps(FULL),
            json.dumps(FULL) + "\n\n",
            "\n  \n" + json.dumps(FULL) + "\n\t\n",
            "\ufeff" + json.dumps(FULL) + "\n",
            "\ufeff\n" + json.dumps(FULL) + "\n",
            json.dumps(FULL) + "\r\n",
            "\r\n" + json.dumps(FULL) + "\r\n\r\n",
        ],
    )
    def test_marks_and_blank_lines(self, text: str, tmp_path: Path) -> None:
        assert read(tmp_path, text) == [RECORD]
        (tmp_path / "trace.jsonl.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
        assert read_trace(str(tmp_path / "trace.jsonl.gz")) == [RECORD]

    @pytest.mark.parametrize(
        "row",
        [
            {"created_time": 0, "input_tokens": 1200, "output_tokens": 5, "hash_ids": [0, 1, 2]},
            {"arrival_time": 0, "prompt_tokens": 1200, "completion_tokens": 5, "hash_ids": [0, 1, 2]},
            {"Timestamp": 0, "Input Length": 1200, "Output_Length": 5, "hash_ids": [0, 1, 2]},
            FULL | {"input_length": 1200.0, "output_length": 5.0},
            FULL | {"input_tokens": 1200, "created_time": 1_700_000_000},
            FULL | {"session_id": None, "pause": None, "block_size": None, "output_hash_ids": None, "text": "..."},
        ],
    )
    def test_names(self, row: dict[str, Any], tmp_path: Path) -> None:
        assert read(tmp_path, row) == [RECORD]

    def test_ids(self, tmp_path: Path) -> None:
        texts = ["9f86d081884c7d65", "60303ae22b998861", "fd61a03af4f77d87"]
        for ids in (texts, [2**64 - 1, 2**63, 17], [-5, "a", 0]):
            path = write(tmp_path, FULL | {"hash_ids": ids}, FULL | {"hash_ids": [*ids[:2], "else"]})
            assert read_trace(str(path))[0].hash_ids == tuple(ids)
            for command in (["plan", "--replays", 0, "--eviction", "lru"], ["replay", "--max-num-seqs", 1]):
                figures = figures_of(command[0], path, *command[1:])
                assert figures.get("most_hit_tokens", figures.get("hit_tokens")) == 1024
        assert read(tmp_path, FULL | {"session_id": 17})[0].session_id == "17"


class TestTimes:
    def test_seconds(self, tmp_path: Path) -> None:
        rows = [FULL | {"timestamp": time, "session_id": "a", "pause": 0.5} for time in (0, 61.25)]
        [_, record] = read(tmp_path, *rows, time_unit="s")
        assert (record.timestamp, record.pause) == (61_250, 500)
        assert read(tmp_path, *rows)[1].timestamp == 61.25
        for unit in ("h", ["s"]):
            with pytest.raises(ValueError, match=f"time_unit: got {re.escape(repr(unit))}, allowed: ms, s"):
                read(tmp_path, *rows, time_unit=unit)

    def test_delays(self, tmp_path: Path) -> None:
        """The next turn comes after those of other sessions that were there before."""
        records = read(
            tmp_path,
            FULL | {"session_id": "a"},
            without("timestamp", session_id="a", delay=250),
            without("timestamp", session_id="a", delay=1000),
            FULL | {"session_id": "b", "timestamp": 300},
        )
        assert [(each.session_id, each.timestamp, each.pause) for each in records] == [
            ("a", 0, None),
            ("a", 250, 250),
            ("b", 300, None),
            ("a", 1250, 1000),
        ]
        with pytest.raises(TraceError, match=":2: lacks timestamp, or a delay behind a line of the same session_id"):
            read(tmp_path, FULL | {"session_id": "a"}, without("timestamp", session_id="b", delay=250))
        with pytest.raises(TraceError, match=":2: delay: got '1', allowed: a number"):
            read(tmp_path, FULL | {"session_id": "a"}, without("timestamp", session_id="a", delay="1"))

    def test_no_times(self, tmp_path: Path) -> None:
        path = write(tmp_path, without("timestamp"), without("timestamp"))
        assert [each.timestamp for each in read_trace(str(path))] == [0, 0]
        assert figures_of("plan", path, "--replays", 0)["requests"] == 2
        with pytest.raises(TraceError, match=":2: has a timestamp, but the lines before have none"):
            read(tmp_path, without("timestamp"), FULL)

    @pytest.mark.parametrize(
        ("num_rows", "span", "is_refused"),
        [
            (600, 600, True),
            (100, 86_400, True),  # a day in seconds
            (25, 3600, True),
            (24, 86_400, True),
            (3, 3, False),
            (2_000, 1_200_000, False),
            (20, 86_400_000, False),
        ],
    )
    def test_seconds_are_not_taken_for_milliseconds(self, num_rows: int, span: int, is_refused: bool, tmp_path: Path) -> None:
        rows = [FULL | {"timestamp": span * i / num_rows, "session_id": "a"} for i in range(num_rows)]
        trace = load_records(str(write(tmp_path, *rows)))
        if not is_refused:
            trace.require_times()
            return
        with pytest.raises(ValueError, match=rf"^{num_rows} requests would arrive in .* s if .* in ms: say by --time-unit"):
            trace.require_times()
        for unit in ("s", "ms"):
            load_records(str(tmp_path / "trace.jsonl"), time_unit=unit).require_times()

    def test_microseconds_are_not_taken_for_milliseconds(self, tmp_path: Path) -> None:
        rows = [FULL | {"timestamp": 1_700_000_000_000_000 + 1_000_000 * i} for i in range(3)]
        trace = load_records(str(write(tmp_path, *rows)))
        with pytest.raises(ValueError, match="timestamp 1700000002000000 is more than 3,000 years if the timestamps are in ms"):
            trace.require_times()
        load_records(str(tmp_path / "trace.jsonl"), time_unit="ms").require_times()
        load_records(str(write(tmp_path, FULL | {"timestamp": 1_700_000_000_000}))).require_times()

    def test_commands_that_need_times(self, tmp_path: Path) -> None:
        pytest.importorskip("msgspec")
        rows = [without("timestamp", "hash_ids", timestamp=i, session_id=str(i % 9)) for i in range(60)]
        path = write(tmp_path, *rows)
        fleet = ["fleet", path, "--replicas", 2, "--router", "least-loaded", "--num-pages", 2000]
        sessions = ["replay", path, "--compare-sessions", "--max-num-seqs", 1]
        for command in (fleet, sessions):
            refuse(
                2, "trace.jsonl: 60 requests would arrive in 0.1 s if the timestamps are in ms: say by --time-unit", *command
            )
        seconds = figures_of(*fleet, "--time-unit", "s")["least-loaded"]
        assert (seconds["end_seconds"] >= 59, seconds["wait_seconds"]["max"] < 1) == (True, True)
        assert figures_of(*fleet, "--time-unit", "ms")["least-loaded"]["end_seconds"] < 20
        assert "Requests arrive within 59 s." in invoke(*fleet, "--time-unit", "s").stdout
        assert invoke(*sessions, "--time-unit", "s").exit_code == 0
        path = write(tmp_path, *[without("timestamp")] * 3)
        refuse(2, "trace.jsonl: the trace has no timestamps", *fleet)


class TestBlocks:
    """The size of a block follows from lengths and ids only where it is certain."""

    def rows(self, size: int, lengths: list[int]) -> list[dict[str, Any]]:
        return [
            {"timestamp": i, "input_length": length, "output_length": 1, "hash_ids": [*range(-(-length // size))]}
            for i, length in enumerate(lengths)
        ]

    @pytest.mark.parametrize("size", [16, 64, 128, 1024])
    def test_certain(self, size: int, tmp_path: Path) -> None:
        path = write(tmp_path, *self.rows(size, [7 * size - 3, 3, 9 * size + 5, 5 * size]))
        assert {each.block_size for each in read_trace(str(path))} == {size}
        note = f"Hash ids stand for {size:,} tokens each, since lengths and numbers of ids fit no other."
        for command in ("plan", "replay"):
            assert note in " ".join(invoke(command, path).stdout.split())
        assert note in figures_of("plan", path, "--replays", 0)["notes"]
        assert note in invoke("replay", path, "--json", "-").stderr
        assert figures_of("plan", path, "--replays", 0, "--block-size", size)["notes"] == []

    @pytest.mark.parametrize(
        "rows",
        [
            [FULL | {"hash_ids": [0, 1]}],  # ids of full blocks alone
            [FULL | {"input_length": 655}],  # one id too many
            [FULL | {"input_length": 5000, "hash_ids": [*range(9)]}, FULL | {"input_length": 3000, "hash_ids": [*range(5)]}],
            [
                FULL | {"input_length": 700, "hash_ids": [*range(7)]},
                FULL | {"input_length": 601, "hash_ids": [*range(7)]},
            ],  # 100
            [FULL | {"input_length": 160, "hash_ids": [*range(10)]}, FULL | {"input_length": 640, "hash_ids": [*range(10)]}],
        ],
    )
    def test_uncertain(self, rows: list[dict[str, Any]], tmp_path: Path) -> None:
        with pytest.raises(TraceError, match=r":1: input_length \d+ needs \d+ hash_ids, got .* unless block_size or --block"):
            read(tmp_path, *rows)

    def test_full_blocks_alone_are_never_taken_for_another_size(self, tmp_path: Path) -> None:
        for num_ids in range(2, 40):
            for rest in (1, 8, 15):
                with pytest.raises(TraceError):
                    read(tmp_path, without("hash_ids", input_length=16 * num_ids + rest, hash_ids=[*range(num_ids)]))

    def test_512_if_it_fits(self, tmp_path: Path) -> None:
        assert [each.block_size for each in read(tmp_path, *self.rows(16, [5, 9]))] == [512, 512]


class TestCsv:
    @pytest.mark.parametrize(
        ("text", "records"),
        [
            (AZURE, [(0, 4808, 10, None), (52, 3180, 8, None)]),
            (AZURE_2024, [(0, 2162, 5, None), (1000, 2399, 6, None)]),
            (BURST, [(0, 472, 18, None), (40_500, 1087, 0, None)]),
            (BURST_SESSIONS, [(0, 10, 2, None), (3000, 20, 4, "17")]),
            (VIDUR, [(0, 100, 3, None), (2000, 200, 4, None)]),
            ("timestamp;input_tokens;output_tokens\n0;100;3\n7;200;4\n", [(0, 100, 3, None), (7, 200, 4, None)]),
            ("prompt_tokens\tcompletion_tokens\n100\t3\n", [(0, 100, 3, None)]),
            (",timestamp,input_length,output_length\n0,0,100,\n1,2,200,4\n", [(0, 100, 0, None), (2, 200, 4, None)]),
        ],
    )
    @pytest.mark.parametrize("form", ["as it is", "with a mark", "Windows", "blank lines", "compressed"])
    def test_lengths(self, text: str, records: list[tuple[float, int, int, str | None]], form: str, tmp_path: Path) -> None:
        changed = {
            "with a mark": "\ufeff" + text,
            "Windows": text.replace("\n", "\r\n"),
            "blank lines": "\n" + text.replace("\n", "\n\n"),
        }.get(form, text)
        path = tmp_path / ("trace.csv.gz" if form == "compressed" else "trace.csv")
        path.write_bytes(gzip.compress(changed.encode(), mtime=0) if form == "compressed" else changed.encode())
        trace = load_records(str(path))
        start = trace.records[0].timestamp
        found = [(each.timestamp - start, each.input_length, each.output_length, each.session_id) for each in trace.records]
        assert [(round(time, 3), *rest) for time, *rest in found] == records
        assert {each.hash_ids for each in trace.records} == {()}
        assert trace.notes[0].startswith("Prefixes are not known, since the trace has no hash_ids")
        if "T" in text[:1]:  # dates and BurstGPT say what their times are
            trace.require_times()

    def test_commands(self, tmp_path: Path) -> None:
        pytest.importorskip("msgspec")
        path = write(tmp_path, AZURE, name="azure.csv")
        note = "Prefixes are not known, since the trace has no hash_ids: no prompt hits what another one computed."
        for command in (["plan"], ["replay"], ["fleet", "--replicas", 2]):
            result = invoke(command[0], path, *command[1:], "--num-pages", 2000)
            assert result.exit_code == 0, result.output
            assert note in " ".join(result.stdout.split())
        assert figures_of("replay", path)["hit_tokens"] == 0
        assert figures_of("plan", path)["most_hit_tokens"] == 0
        fleet = figures_of("fleet", path, "--num-pages", 2000, "--router", "least-loaded")["least-loaded"]
        assert (fleet["requests"], fleet["prompt_tokens"]) == (2, 7988)

    def test_ids_in_a_column(self, tmp_path: Path) -> None:
        path = write(tmp_path, 'input_length,hash_ids\n600,"[1, 2]"\n600,"[1, 3]"\n')
        assert [each.hash_ids for each in read_trace(str(path))] == [(1, 2), (1, 3)]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("a,b,c\n1,2,3\n", ":1: lacks input_length: as CSV it has the columns a, b, c"),
            (AZURE + "\n2023-11-16 18:17:05,4808\n", ":5: got 2 columns, allowed: 3, as in the header"),
            (AZURE + "2023-11-16 18:17:05,x,10\n", ":4: input_length: got 'x', allowed: an int"),
            (AZURE + "yesterday,7,10\n", ":4: timestamp: got 'yesterday', allowed: a number or a date"),
            (AZURE + "2023-11-16 18:17:05,0,10\n", ":4: input_length: got 0, allowed: 1 to 2147483647"),
            (AZURE + "2023-11-16 18:17:05,,10\n", ":4: lacks input_length"),
            (AZURE + "2023-11-16 18:17:05,1.5,10\n", ":4: input_length: got 1.5, allowed: an int"),
            (AZURE + '"2023-11-16 18:17:05,1,10\n', ":4: not valid CSV"),
            (AZURE + "2023-11-16 18:17:00,1,10\n", ":4: timestamp 2023-11-16 18:17:00 is below 2023-11-16 18:17:04.0319600"),
            (AZURE + "5,1,10\n", ":4: timestamp 5 follows '2023-11-16 18:17:04.0319600': numbers and dates do not mix"),
            (VIDUR + "2023-11-16 18:17:05,1,10\n", ":4: timestamp '2023-11-16 18:17:05' follows 2.5: numbers"),
            ("input_length,Input length\n600,601\n", ":1: has 'input_length' and 'Input length': which of"),
            ("input_length,input_length\n600,601\n", ":1: has 'input_length' and 'input_length': which"),
            ('{"input_length": 600, "Input_Length": 601}\n', ":1: has 'input_length' and 'Input_Length': which of them is"),
            (AZURE.splitlines()[0], ":1: the trace is empty"),
            ("4808,10\n", ":1: a JSON object is expected"),
        ],
    )  # fmt: skip
    def test_what_is_refused(self, text: str, message: str, tmp_path: Path) -> None:
        path = write(tmp_path, text, name="trace.csv")
        refuse(2, f"trace.csv{message}" if "expected" not in message else "trace.csv:1: not valid JSON", "plan", path)


def test_requests_are_named_by_the_lines_of_the_file(tmp_path: Path) -> None:
    rows = [FULL | {"session_id": "a"}, "\n", without("timestamp", session_id="a", delay=9), FULL | {"timestamp": 5}]
    path = write(tmp_path, *rows)
    assert load_records(str(path)).lines == [1, 4, 3]
    path = write(tmp_path, AZURE.replace("\n", "\n\n"), name="azure.csv")
    output = invoke("replay", path, "--num-pages", 210).output
    assert f"skipped {path}:3: " in output


def test_what_is_not_known_is_said(tmp_path: Path) -> None:
    path = write(tmp_path, FULL, without("hash_ids"), FULL | {"hash_ids": None}, without("output_length"))
    notes = load_records(str(path)).notes
    assert notes == [
        "2 requests without hash_ids: their prefixes are not known.",
        "1 request without output_length: no answer is computed.",
    ]
    for command in ("plan", "replay"):
        text = " ".join(invoke(command, path).stdout.split())
        assert all(note in text for note in notes)
    assert figures_of("replay", path, "--max-num-seqs", 1)["hit_tokens"] == 1184
    assert load_records(str(write(tmp_path, FULL))).notes == []
    assert read_trace(str(path), limit=1) == [RECORD]
    write(tmp_path, line_of(), "garbage\n")
    assert len(read_trace(str(path), limit=1)) == 1
