"""The recorded bytes of models are those of the installed vLLM."""

from __future__ import annotations

import pytest
from model_configs import MODELS, REQUEST_TOKENS, STEP_TOKENS, VLLM_BYTES

pytest.importorskip("vllm.v1.core.kv_cache_planning", reason="vLLM is not installed, or older than 0.33")

from vllm_plans import plan

MANY_TOKENS = 1 << 40  # so many that the last page of a group is nothing


@pytest.mark.parametrize("name", MODELS)
def test_bytes(name: str) -> None:
    few, many = plan(name, MANY_TOKENS, STEP_TOKENS), plan(name, 2 * MANY_TOKENS, STEP_TOKENS)
    assert (round((many - few) / MANY_TOKENS), plan(name, REQUEST_TOKENS, STEP_TOKENS)) == VLLM_BYTES[name]
