"""The request dataclass, and the states of a request."""

import importlib.util

import pytest

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
