"""EasyDeL's engine with a tiny random model on CPU, in pools of given sizes: its greedy output, as JSON.

Nothing here replaces the allocator: ``python -m pagepool.compat.easydel`` does.
Run as ``python tiny_engine.py FOLDER NUM_PAGES ...``.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import easydel
import jax
import jax.numpy as jnp
from easydel.caching.ragged_page import cache as ragged_cache
from easydel.inference.esurge import eSurge
from easydel.inference.sampling_params import SamplingParams
from flax import nnx
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

NUM_WORDS = 512
PAGE_SIZE = 16
PAGE_BYTES = 16 << 10  # keys and values of two layers, two heads of 64, float32
NUM_PROMPTS = 24
NUM_NEW_TOKENS = 32


def make_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Return a tokenizer for words w0, w1, ..., one token each."""
    tokenizer = Tokenizer(models.WordLevel({f"w{token}": token for token in range(NUM_WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", pad_token="w1", eos_token="w2")
    fast.save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def make_model() -> Any:
    """Two layers with weights so large that tokens depend on all that is cached."""
    config = easydel.LlamaConfig(
        vocab_size=NUM_WORDS,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        initializer_range=0.3,
        attn_mechanism="ragged_page_attention_v2",
    )
    with config.mesh:
        return easydel.LlamaForCausalLM(config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0))


def make_engine(model: Any, tokenizer: Any, num_pages: int, is_async: bool = False) -> eSurge:
    ragged_cache.per_device_hbm_budget_bytes = lambda *_, **__: num_pages * PAGE_BYTES
    return eSurge(
        model,
        processor=tokenizer,
        max_model_len=256,
        max_num_seqs=8,
        max_num_seq_buckets=[8],
        max_num_batched_tokens=128,
        min_input_pad=128,
        page_size=PAGE_SIZE,
        reserve_tokens=8,
        async_scheduling=is_async,
        overlap_execution=is_async,
        use_aot_forward=False,
        silent_mode=True,
    )


def make_prompts(seed: int) -> list[str]:
    """Of 5 to 110 words; most begin with the same 20 or 50."""
    rng = random.Random(seed)
    words = [f"w{token}" for token in range(3, NUM_WORDS)]
    beginning = rng.choices(words, k=50)
    return [
        " ".join(beginning[: rng.choice([0, 20, 50])] + rng.choices(words, k=rng.randint(5, 60))) for _ in range(NUM_PROMPTS)
    ]


def generate(engine: eSurge, prompts: list[str]) -> dict[str, Any]:
    """The tokens of each prompt, and what the allocator went through."""
    num_preemptions, schedule = 0, engine.scheduler.schedule

    def count_preemptions() -> Any:
        nonlocal num_preemptions
        output = schedule()
        num_preemptions += len(output.preempted_req_ids)
        return output

    engine.scheduler.schedule = count_preemptions
    params = SamplingParams(max_tokens=NUM_NEW_TOKENS, temperature=0.0)
    outputs = engine.generate(prompts, sampling_params=params, use_tqdm=False)
    manager = engine.scheduler.kv_cache_manager
    table = engine.runner.sequence_buffer.page_table
    stats = getattr(manager.page_pool, "stats", None)
    if stats is not None:
        manager.check()
        table.check()
    return {
        "tokens": {output.prompt: list(output.outputs[0].token_ids) for output in outputs},  # in the order in which they ended
        "num_preemptions": num_preemptions,
        "num_evictions": stats and stats.num_evicted_pages,
        "num_hit_tokens": stats and stats.num_hit_tokens,
        "modules": [type(value).__module__ for value in (manager, manager.page_pool, table, table[0])],
    }


def stop(engine: eSurge) -> None:
    """As `terminate` does, which joins its thread under the lock that the thread waits for, and so takes five seconds."""
    engine._scheduler_running = False
    engine._worker_manager.shutdown()


def main(folder: str, *pools: str) -> None:
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    tokenizer, model = make_tokenizer(Path(folder)), make_model()
    for pool in pools:
        engine = make_engine(model, tokenizer, int(pool.removesuffix("async")), pool.endswith("async"))
        print(json.dumps(generate(engine, make_prompts(seed=7))), flush=True)
        stop(engine)


if __name__ == "__main__":
    main(*sys.argv[1:])
