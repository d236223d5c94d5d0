"""The request dataclass, and the states of a request."""

import importlib.util
from typing import Any

import numpy as np
import pytest
from cpu_time import median_seconds

from pagepool._core import build_flags
from pagepool.errors import ArgumentError, ArgumentTypeError
from pagepool.request import EngineRequest, EngineRequestStatus


def test_tokens_are_appended_to_a_copy_of_the_prompt() -> None:
    prompt = [1, 2, 3]
    request = EngineRequest("a", prompt)
    assert (request.num_tokens, request.num_computed_tokens, request.status) == (3, 0, EngineRequestStatus.WAITING)
    request.append_output_token_ids(4)
    request.append_output_token_ids([5, 6])
    assert request.all_token_ids == [1, 2, 3, 4, 5, 6]
    assert request.num_tokens == 6
    assert request.prompt_token_ids is prompt
    assert prompt == [1, 2, 3]


@pytest.mark.skipif(build_flags()["traced"], reason="lines of the core are counted")
def test_a_list_is_checked_by_less_than_a_loop_of_python() -> None:
    prompt = list(range(1000, 9192))
    native, loop = median_seconds(lambda: EngineRequest("a", prompt)), median_seconds(lambda: [token < 0 for token in prompt])
    print(f"{native / len(prompt) * 1e9:.1f} ns a token, {loop / len(prompt) * 1e9:.1f} by a loop")
    assert native < loop


INT64_MAX = 2**63 - 1


@pytest.mark.parametrize("tokens", [[], [0], [INT64_MAX], [INT64_MAX + 1, 1], [2**64, 2**5000]], ids=["none", *"0123"])
def test_ints_of_any_size_are_tokens(tokens: list[int]) -> None:
    assert EngineRequest("a", [7, *tokens]).all_token_ids == [7, *tokens]


@pytest.mark.parametrize(
    ("token", "error"),
    [(-1, ArgumentError), (-(2**63), ArgumentError), (-(2**63) - 1, ArgumentError), (-(2**5000), ArgumentError)]
    + [(token, ArgumentTypeError) for token in (True, 1.0, "1", None, np.True_, np.float64(1), [1], np.array([1, 2]))],
    ids=lambda value: type(value).__name__,
)
def test_other_tokens_are_refused(token: Any, error: type[Exception]) -> None:
    """And named by their place."""
    allowed = "an int" if error is ArgumentTypeError else "at least 0"
    with pytest.raises(error, match=rf"^prompt_token_ids\[1\]: got .*, allowed: {allowed}$"):
        EngineRequest("a", [7, token])
    request = EngineRequest("a", [7])
    with pytest.raises(error, match=rf"^token_ids\[2\]: got .*, allowed: {allowed}$"):
        request.append_output_token_ids([1, 2, token])
    assert request.all_token_ids == [7]


def test_ints_of_other_types_become_plain_ones() -> None:
    class Token(int):
        pass

    request = EngineRequest("a", [np.int64(3), Token(4), np.uint8(5)])
    request.append_output_token_ids(np.uint8(7))
    assert (request.all_token_ids, {*map(type, request.all_token_ids)}) == ([3, 4, 5, 7], {int})


def test_options_are_named_and_unknown_attributes_refused() -> None:
    request = EngineRequest("a", [1], cache_salt="tenant", lora_id=7)
    assert (request.cache_salt, request.lora_id, request.mm_features) == ("tenant", 7, ())
    with pytest.raises(TypeError):
        EngineRequest("a", [1], 5)
    with pytest.raises(AttributeError):
        request.computed = 1


def test_ends_are_ends() -> None:
    ends = [status for status in EngineRequestStatus if EngineRequestStatus.is_finished(status)]
    assert ends == [status for status in EngineRequestStatus if status.name.startswith("FINISHED_")]
    assert str(EngineRequestStatus.RUNNING) == "RUNNING"


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(importlib.util.find_spec("easydel") is None, reason="the engine is not installed")
def test_states_equal_the_engines() -> None:
    from easydel.inference.esurge import request as engine

    assert {s.name: int(s) for s in EngineRequestStatus} == {s.name: int(s) for s in engine.EngineRequestStatus}
