"""Synthetic workloads: what each kind repeats, in which order, and what its seed decides."""

from itertools import islice
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from pagepool.errors import ArgumentError, ArgumentTypeError
from pagepool.replay import WORKLOADS, SimulatedRequest, generate_chats, generate_workload
from pagepool.replay.traces import arrivals, generator
from pagepool.replay.traces.arrivals import Arrival
from pagepool.replay.traces.workloads import KINDS

all_workloads = pytest.mark.parametrize("name", WORKLOADS)
all_kinds = pytest.mark.parametrize("name", KINDS)


def take(name: str, num_requests: int, seed: int) -> list[Arrival]:
    return list(islice(KINDS[name](seed), num_requests))


def describe(requests: list[SimulatedRequest]) -> list[tuple[str, int, int]]:
    return [(r.request_id, r.num_prompt_tokens, r.num_output_tokens) for r in requests]


class TestAll:
    @all_workloads
    def test_tokens_are_created_later_and_dropped(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patched:
            for module in (arrivals, generator):
                patched.delattr(module, "random_tokens")
            request = generate_workload(name, 50, 0)[-1]
            with pytest.raises((NameError, AttributeError)):
                request.load_token_ids()
        before = request.load_token_ids()
        request.drop_token_ids()
        assert request.load_token_ids() is not before
        np.testing.assert_array_equal(request.load_token_ids(), before)

    @all_kinds
    def test_more_requests_continue(self, name: str) -> None:
        few, many = generate_workload(name, 50, 5), generate_workload(name, 300, 5)
        assert describe(few) == describe(many[:50])
        np.testing.assert_array_equal(few[-1].load_token_ids(), many[49].load_token_ids())

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            (("lru", 1), ArgumentError, f"name: got 'lru', allowed: {', '.join(WORKLOADS)}"),
            (([], 1), ArgumentError, rf"name: got \[\], allowed: {', '.join(WORKLOADS)}"),
            (("loop", -1), ArgumentError, "num_requests: got -1, allowed: at least 0"),
            (("loop", 1.5), ArgumentTypeError, "num_requests: got 1.5, allowed: an int"),
            (("chats", 1, -1), ArgumentError, "seed: got -1, allowed: at least 0"),
        ],
    )
    def test_bad_arguments(self, arguments: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=f"^{message}$"):
            generate_workload(*arguments)


def test_chats_are_those_they_always_were() -> None:
    """Figures of tests and documents depend on them."""
    requests = generate_workload("chats", 50, 7)
    assert describe(requests) == describe(generate_chats(50, 7))
    assert crc32(repr(describe(requests)).encode()) == 593338037
    assert crc32(np.concatenate([request.load_token_ids() for request in requests]).astype("<i4").tobytes()) == 1868210052


DIGESTS = {
    "conversations": 41281104,
    "agents": 2957149831,
    "retrieval": 183194818,
    "shift": 2830258819,
    "drift": 2235017135,
    "loop": 2160254153,
    "recency": 1130509031,
    "mix": 1527568178,
}


@all_kinds
def test_arrivals_are_those_they_always_were(name: str) -> None:
    """Times, names, streams and lengths, through changes of popular documents and rounds of a loop."""
    arrivals = [(round(time, 2), *rest) for time, *rest in take(name, 2000, 7)]
    assert crc32(repr(arrivals).encode()) == DIGESTS[name]
