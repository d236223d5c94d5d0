"""EasyDeL's engine with a hybrid of a linear and a full layer on CPU: the answers to one prompt that comes twice, as JSON.

The state of the linear layer forgets slowly, and the full layer adds nothing: what came before counts through the state alone.
With random weights a state forgets within the tokens that a hit computes again, and shows nothing.
Run as ``python hybrid_engine.py FOLDER HITS ...``: for each value of the variable of recurrent hits.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import easydel
import jax
import jax.numpy as jnp
from easydel.inference.sampling_params import SamplingParams
from flax import nnx

sys.path.append(str(Path(__file__).parent))  # PYTHONSAFEPATH leaves it out
from tiny_engine import NUM_WORDS, make_engine, make_prompts, make_tokenizer, stop

NUM_PAGES = 256
NUM_NEW_TOKENS = 16
MAX_WORDS = 70  # fewer tokens than a step computes
SLOW_DECAY = -7.0  # of the logarithm of its rate


def make_hybrid() -> Any:
    config = easydel.Qwen3NextConfig(
        vocab_size=NUM_WORDS,
        pad_token_id=1,
        eos_token_id=2,
        bos_token_id=0,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        initializer_range=0.3,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
        full_attention_interval=2,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        mlp_only_layers=[0, 1],
        attn_mechanism="ragged_page_attention_v2",
    )
    with config.mesh:
        model = easydel.Qwen3NextForCausalLM(config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)
    weights = nnx.to_pure_dict(state)
    let_the_state_count(weights, ())
    nnx.replace_by_pure_dict(state, weights)
    return nnx.merge(graph, state)


def let_the_state_count(weights: dict[Any, Any], path: tuple[str, ...]) -> None:
    for key, value in weights.items():
        here = (*path, str(key))
        if isinstance(value, dict):
            let_the_state_count(value, here)
        elif "A_log" in here:
            weights[key] = jnp.full_like(value, SLOW_DECAY)
        elif {"self_attn", "o_proj"} <= {*here}:
            weights[key] = jnp.zeros_like(value)
        elif "out_proj" in here:
            weights[key] = 4 * value


def answer_twice(model: Any, tokenizer: Any) -> dict[str, Any]:
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pagepool").addHandler(handler)
    engine = make_engine(model, tokenizer, NUM_PAGES)
    logging.getLogger("pagepool").removeHandler(handler)
    engine._tool_parser_class = engine._reasoning_parser_class = None  # those of the model's family, which need its tokens
    manager = engine.scheduler.kv_cache_manager
    prompt = max((prompt for prompt in make_prompts(seed=7) if len(prompt.split()) <= MAX_WORDS), key=len)
    params = SamplingParams(max_tokens=NUM_NEW_TOKENS, temperature=0.0)
    tokens, num_hit_tokens = [], []
    for _ in range(2):
        [output] = engine.generate([prompt], sampling_params=params, use_tqdm=False)
        tokens.append(list(output.outputs[0].token_ids))
        stats = getattr(manager.page_pool, "stats", None)
        num_hit_tokens.append(stats and stats.num_hit_tokens)
    stop(engine)
    return {"tokens": tokens, "num_hit_tokens": num_hit_tokens, "warnings": warnings, "module": type(manager).__module__}


def main(folder: str, *values: str) -> None:
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    tokenizer, model = make_tokenizer(Path(folder)), make_hybrid()
    for value in values:
        os.environ["PAGEPOOL_EASYDEL_RECURRENT_HITS"] = value
        print(json.dumps(answer_twice(model, tokenizer)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
