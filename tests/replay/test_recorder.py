"""A recorded trace replays to the engine's hits, reveals nothing else, and is written whole or not at all."""

import gzip
import json
import signal
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from replays import make_manager, run_alone
from settings import scale
from sources import run_python

from pagepool.errors import ArgumentError, ArgumentTypeError
from pagepool.manager import CacheManager
from pagepool.page_table import MultiGroupPageTable
from pagepool.replay import Recorder, Scheduler, make_requests, read_trace
from pagepool.request import EngineRequest, RequestTraits
from pagepool.running_batch import RunningBatch
from pagepool.specs import CacheGroupSpec, FullAttentionSpec, SlidingWindowSpec

NUM_SEEDS = scale(25, 4)
FIELDS = {"timestamp", "input_length", "output_length", "hash_ids", "output_hash_ids", "block_size"}


class Chats:
    """Prompts that continue others, with answers that are sometimes repeated; some have salts."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.ended: list[EngineRequest] = []
        self.num_requests = 0

    def ask(self) -> EngineRequest:
        """Return a prompt that begins like a finished request's prompt and answer."""
        self.num_requests += 1
        base = self.ended[self.rng.integers(len(self.ended))] if self.ended and self.rng.random() < 0.8 else None
        known = [] if base is None else base.all_token_ids
        kept = known if self.rng.integers(2) else known[: self.rng.integers(len(known) + 1)]
        new = self.rng.integers(3, size=self.rng.integers(not kept, 12)).tolist()
        salt = base.cache_salt if base is not None else (None, None, "a", "b")[self.rng.integers(4)]
        return EngineRequest(str(self.num_requests), kept + new, cache_salt=salt)


def run_batch(manager: CacheManager, recorder: Recorder, chats: Chats, num_requests: int, num_rows: int = 1) -> list[int]:
    """Run as many requests at once as there are rows, which end in any order; return the hit tokens of each."""
    page_sizes = [group.kv_cache_spec.page_size for group in manager.kv_cache_groups]
    batch = RunningBatch(manager, MultiGroupPageTable(num_rows, 2_000, 2_000, page_sizes))
    running: dict[int, tuple[EngineRequest, int]] = {}
    num_hits: list[int] = []
    while len(num_hits) < num_requests or running:
        free = [row for row in range(num_rows) if row not in running]
        if free and len(num_hits) < num_requests:
            request = chats.ask()
            recorder.start(request)
            num_hit_tokens = batch.admit(free[0], request.all_token_ids, traits=RequestTraits(cache_salt=request.cache_salt))
            assert num_hit_tokens is not None
            num_hits.append(num_hit_tokens)
            running[free[0]] = (request, request.num_tokens + int(chats.rng.integers(20)))
        for row, (request, num_final_tokens) in [*running.items()]:
            if request.num_tokens < num_final_tokens:
                request.append_output_token_ids(sum(request.all_token_ids) % 3)
            if request.num_tokens < num_final_tokens:
                assert batch.step([row], request.all_token_ids[-1:]).num_grown == 1
            else:
                recorder.finish(request)
                batch.release([row])
                del running[row]
                chats.ended.append(request)
    return num_hits


def replay(path: Path, manager: CacheManager) -> list[int]:
    """Return the hit tokens of each request of a trace, one after another."""
    page_size = manager.kv_cache_groups[0].kv_cache_spec.page_size
    return [page_size * len(run_alone(manager, request)) for request in make_requests(read_trace(str(path)))]


def request_of(*token_ids: int, name: str = "a") -> EngineRequest:
    return EngineRequest(name, list(token_ids))


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class TestReplay:
    def test_requests_one_after_another_hit_what_they_hit(self, tmp_path: Path) -> None:
        """Pools are so small that most pages are evicted. Requests together hit what they hit if nothing is evicted."""
        seen: Counter[str] = Counter()
        path = tmp_path / "trace.jsonl.gz"
        for seed in range(NUM_SEEDS):
            print(f"seed {seed}")
            rng = np.random.default_rng(seed)
            page_size = int(rng.integers(1, 9))
            manager = make_manager(1_000 // page_size, page_size)
            with Recorder(manager, path) as recorder:
                num_hits = run_batch(manager, recorder, Chats(seed), 60)
            again = make_manager(1_000 // page_size, page_size)
            assert replay(path, again) == num_hits
            scheduler = Scheduler(
                make_manager(1_000 // page_size, page_size), make_requests(read_trace(str(path))), max_num_seqs=1
            )
            assert scheduler.run().hit_tokens == sum(num_hits)
            assert again.page_pool.stats.num_evicted_pages == manager.page_pool.stats.num_evicted_pages
            seen.update(hits=sum(num_hits), evicted=manager.page_pool.stats.num_evicted_pages)
            manager = make_manager(30_000, page_size=4)
            with Recorder(manager, path) as recorder:
                num_hits_together = run_batch(manager, recorder, Chats(seed), 60, num_rows=5)
            assert sum(num_hits_together) > 0
            assert replay(path, make_manager(30_000, page_size=4)) == num_hits_together
        assert min(seen.values()) > 0

    def test_hybrids(self, tmp_path: Path) -> None:
        """The blocks are as long as the smallest page."""
        groups = [
            CacheGroupSpec(FullAttentionSpec(8, 1, 1, "bfloat16", use_mla=False)),
            CacheGroupSpec(SlidingWindowSpec(4, 1, 1, "bfloat16", use_mla=False, sliding_window=10)),
        ]
        path = tmp_path / "trace.jsonl"
        manager = make_manager(500, groups=groups)
        with Recorder(manager, path) as recorder:
            num_hits = run_batch(manager, recorder, Chats(3), 60)
        assert {line["block_size"] for line in lines_of(path)} == {4}
        scheduler = Scheduler(make_manager(500, groups=groups), make_requests(read_trace(str(path))), max_num_seqs=1)
        assert scheduler.run().hit_tokens == sum(num_hits) > 0


class TestLines:
    def record(self, path: Path, *requests: EngineRequest) -> list[dict[str, object]]:
        with Recorder(make_manager(10, page_size=4), path) as recorder:
            for request in requests:
                recorder.start(request)
                recorder.finish(request)
        return lines_of(path)

    def test_nothing_but_hashes_and_lengths(self, tmp_path: Path) -> None:
        [line] = self.record(tmp_path / "trace.jsonl", EngineRequest("secret", [77, 77, 77, 77, 77], cache_salt="salt"))
        assert set(line) == FIELDS
        assert (line["input_length"], line["output_length"], line["block_size"]) == (5, 0, 4)
        assert "secret" not in (tmp_path / "trace.jsonl").read_text()

    def test_sessions_and_their_pauses(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A pause begins when a request of the session has ended, and ends when the next one starts."""
        path = tmp_path / "trace.jsonl"
        seconds = iter([0.0, 1.0, 2.0, 4.0, 4.5, 4.75, 5.0, 8.0, 9.0])
        monkeypatch.setattr("pagepool.replay.traces.recorder.time.monotonic", lambda: next(seconds))
        requests = {
            name: EngineRequest(name, [1, 2, 3], session_id=session_id)
            for name, session_id in [("a", "user \ud800"), ("b", None), ("c", "user \ud800"), ("d", "user \ud800")]
        }
        with Recorder(make_manager(10, page_size=4), path) as recorder:
            for name in ("a", "b"):
                recorder.start(requests[name])
            recorder.finish(requests["a"])
            recorder.finish(requests["b"])
            for name in ("c", "d"):
                recorder.start(requests[name])
            recorder.finish(requests["d"])
            recorder.start(request_of(4, name="e"))
        first, second, third, fourth, last = lines_of(path)
        assert set(second) == set(last) == FIELDS
        assert set(first) == FIELDS | {"session_id"}
        assert first["session_id"] == third["session_id"] == fourth["session_id"]
        assert "user" not in path.read_text()
        assert [third["pause"], fourth["pause"]] == [500, 750]
        assert [record.pause for record in read_trace(str(path))] == [None, None, 500, 750, None]

    def test_session_ids_are_strings(self, tmp_path: Path) -> None:
        with Recorder(make_manager(10, page_size=4), tmp_path / "trace.jsonl") as recorder:
            with pytest.raises(ArgumentTypeError, match="session_id: got int, allowed: a string"):
                recorder.start(EngineRequest("a", [1], session_id=7))  # type: ignore[arg-type]
            recorder.start(request_of(1))
        assert len(lines_of(tmp_path / "trace.jsonl")) == 1

    def test_two_recordings_have_no_id_in_common(self, tmp_path: Path) -> None:
        requests = [request_of(*range(40), name=name) for name in "ab"]
        first, second = (self.record(tmp_path / name, *requests) for name in ("1.jsonl", "2.jsonl"))
        assert first[0]["hash_ids"] == first[1]["hash_ids"]
        assert not set(first[0]["hash_ids"]) & set(second[0]["hash_ids"])  # type: ignore[call-overload]

    def test_salts_and_blocks_that_are_not_full_are_like_no_others(self, tmp_path: Path) -> None:
        prompt = [1, 2, 3, 4, 5]
        requests = [EngineRequest(str(i), prompt, cache_salt=salt) for i, salt in enumerate((None, None, "a", "b"))]
        (one, begun), (same, _), *others = (line["hash_ids"] for line in self.record(tmp_path / "t.jsonl", *requests))  # type: ignore[misc]
        assert one == same
        assert len({one, begun, *(block_id for ids in others for block_id in ids)}) == 6

    def test_what_still_runs_is_written_as_it_stands(self, tmp_path: Path) -> None:
        """A preempted request may be started again; what was not started is not recorded, nor what starts too late."""
        request = request_of(1, 2)
        recorder = Recorder(make_manager(10, page_size=4), tmp_path / "trace.jsonl")
        recorder.start(request)
        request.append_output_token_ids([3, 4, 5])
        recorder.start(request)
        recorder.finish(request_of(1, name="unknown"))
        recorder.close()
        recorder.start(request_of(1, name="late"))
        recorder.finish(request)
        recorder.close()
        [line] = lines_of(tmp_path / "trace.jsonl")
        assert (line["input_length"], line["output_length"]) == (2, 3)

    def test_a_prompt_has_tokens_and_keeps_them(self, tmp_path: Path) -> None:
        with Recorder(make_manager(10, page_size=4), tmp_path / "trace.jsonl") as recorder:
            with pytest.raises(ArgumentError, match="num_tokens: got 0, allowed: at least 1"):
                recorder.start(request_of())
            recorder.start(request_of(1, 2))
            with pytest.raises(ArgumentError, match="num_tokens: got 1, allowed: at least 2"):
                recorder.finish(request_of(1))
        with pytest.raises(ArgumentError, match=r"block_size: got 0, allowed: 1 to 2\*\*62"):
            Recorder(make_manager(10), tmp_path / "trace.jsonl", block_size=0)


class TestFile:
    def test_it_appears_when_the_recorder_is_closed(self, tmp_path: Path) -> None:
        """An error in the engine keeps what was recorded, of managers without caching too."""

        def crash() -> None:
            manager = make_manager(10, page_size=4, enable_caching=False)
            with Recorder(manager, path) as recorder:
                recorder.start(request_of(1, 2, 3, 4, 5))
                assert not path.exists()
                raise KeyboardInterrupt

        path = tmp_path / "trace.jsonl.gz"
        with pytest.raises(KeyboardInterrupt):
            crash()
        assert [*tmp_path.iterdir()] == [path]
        assert b"trace" not in path.read_bytes()
        assert len(json.loads(gzip.decompress(path.read_bytes()))["hash_ids"]) == 2

    def test_a_running_request_that_cannot_be_read_costs_no_other(self, tmp_path: Path) -> None:
        """The file is closed, with what has ended and with the running requests before it."""
        path = tmp_path / "trace.jsonl"
        recorder = Recorder(make_manager(10, page_size=4), path)
        requests = [EngineRequest(name, [1, 2, 3, 4]) for name in "abcd"]
        for request in requests:
            recorder.start(request)
        requests[1].all_token_ids = [{}] * 4  # type: ignore[list-item]
        recorder.finish(requests[3])
        with pytest.raises(ArgumentTypeError, match="request 'b': all_token_ids: token_ids: got dict"):
            recorder.close()
        assert [*tmp_path.iterdir()] == [path]
        assert len(lines_of(path)) == 2
        recorder.close()

    def test_a_process_that_is_killed_leaves_nothing_at_the_path(self, tmp_path: Path) -> None:
        code = f"""
import os, signal
from pagepool import CacheManager, EngineRequest
from pagepool.replay import Recorder
recorder = Recorder(CacheManager(10, [], 64), {str(tmp_path / "trace.jsonl")!r}, block_size=4)
recorder.start(EngineRequest("a", [1, 2, 3]))
recorder.finish(EngineRequest("a", [1, 2, 3]))
os.kill(os.getpid(), signal.SIGKILL)
"""
        assert run_python("-c", code).returncode == -signal.SIGKILL
        assert [path.suffix for path in tmp_path.iterdir()] == [".part"]
