"""The ports of docs/ports/: their answers are those of a model without a cache, with stubs in place of the engines' models.

The stub stores each token at its slot, and samples from all tokens of a row, which it reads through pages.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

PORTS = Path(__file__).parents[2] / "docs" / "ports"
if not PORTS.exists():
    pytest.skip("the ports are not here", allow_module_level=True)

VOCAB, EOS, PAGE_SIZE, MAX_MODEL_LEN, MAX_LINES = 40, 7, 4, 64, 110


def read_blocks(name: str) -> list[str]:
    """Return the blocks of Python of a page."""
    return re.findall(r"^```python\n(.*?)^```", (PORTS / f"{name}.md").read_text(), re.MULTILINE | re.DOTALL)


def load(*blocks: str) -> SimpleNamespace:
    """Run blocks, and return their names."""
    names: dict[str, Any] = {"__name__": "port"}
    for block in blocks:
        exec(compile(block, "port", "exec"), names)
    return SimpleNamespace(**names)


def next_token(token_ids: Sequence[int]) -> int:
    """Return the token behind others, to which each of them contributes by its place."""
    places = np.arange(1, len(token_ids) + 1)
    return int((np.asarray(token_ids, np.int64) + 3) @ (places * places) % 10007 % VOCAB)


def answer(prompt: Sequence[int], max_tokens: int, ignore_eos: bool) -> list[int]:
    """Return the answer of the model without a cache."""
    token_ids = [*prompt]
    while len(token_ids) < min(len(prompt) + max_tokens, MAX_MODEL_LEN):
        token_ids.append(next_token(token_ids))
        if token_ids[-1] == EOS and not ignore_eos:
            break
    return token_ids[len(prompt) :]


class NanoSequence:
    """The fields of a sequence of nano-vllm that its port reads."""

    def __init__(self, prompt: list[int], max_tokens: int, ignore_eos: bool) -> None:
        self.token_ids, self.num_prompt_tokens = [*prompt], len(prompt)
        self.max_tokens, self.ignore_eos, self.temperature = max_tokens, ignore_eos, max_tokens / 64


class Cache:
    """Tokens by slot. Slots that were never written have other tokens."""

    def __init__(self, num_pages: int) -> None:
        self.token_ids = np.arange(num_pages * PAGE_SIZE) % VOCAB
        self.sampled = np.zeros(0, np.int64)
        self.num_tokens = self.num_prefills = 0

    def compute(self, token_ids: Any, positions: Any, slots: Any, starts: Any, rows: Sequence[tuple[Any, int]]) -> Any:
        """Write the tokens of a step, and sample. `rows` are the pages of each row, or None if the step has all its tokens, and
        its length.
        """
        assert len(set(slots.tolist())) == len(slots) > 0
        assert slots.min() >= PAGE_SIZE
        self.token_ids[slots] = token_ids
        self.num_tokens += len(slots)
        sampled = []
        for (pages, length), start, stop in zip(rows, starts[:-1], starts[1:], strict=True):
            assert positions[start:stop].tolist() == [*range(length - (stop - start), length)]
            if pages is None:
                assert stop - start == length
                sampled.append(next_token(token_ids[start:stop]))
            else:
                read = (np.asarray(pages)[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).ravel()[:length]
                sampled.append(next_token(self.token_ids[read]))
        return np.array(sampled)


class NanoModel(Cache):
    """What nano-vllm's ModelRunner does with a step."""

    def __call__(self, inputs: Any, num_tokens: int, temperatures: Any, is_prefill: bool) -> Callable[[], Any]:
        num_reqs = len(temperatures)
        starts, kv_starts = inputs.query_start_loc[: num_reqs + 1], inputs.kv_start_loc[: num_reqs + 1]
        lens, token_ids = inputs.seq_lens[:num_reqs], inputs.token_ids[:num_tokens]
        assert np.diff(kv_starts).tolist() == lens.tolist()
        assert is_prefill or np.diff(starts).tolist() == [1] * num_reqs
        if (token_ids < 0).any():
            token_ids = np.where(token_ids < 0, self.sampled[inputs.sources[:num_reqs]], token_ids)
        rows = [*zip(inputs.page_ids[0], lens.tolist(), strict=False)]
        slots, positions = inputs.slots[0][:num_tokens].copy(), inputs.positions[:num_tokens]
        self.num_prefills += is_prefill
        sampled = self.sampled = self.compute(token_ids, positions, slots, starts, rows)
        return lambda: sampled


def make_config(num_pages: int, num_rows: int = 8, num_tokens: int = 24) -> SimpleNamespace:
    return SimpleNamespace(
        kvcache_block_size=PAGE_SIZE,
        num_kvcache_blocks=num_pages,
        max_num_seqs=num_rows,
        max_num_batched_tokens=num_tokens,
        max_model_len=MAX_MODEL_LEN,
        eos=EOS,
    )


def draw_requests(seed: int, num: int = 40) -> list[tuple[list[int], int, bool]]:
    """Draw prompts with common beginnings, some of them equal, and the ends of their answers."""
    rng = Random(seed)
    documents = [[rng.randrange(VOCAB) for _ in range(40)] for _ in range(3)]
    prompts = [
        [*rng.choice(documents)[: rng.choice((1, 9, 16, 33, 40))], *(rng.randrange(VOCAB) for _ in range(rng.randint(0, 9)))]
        for _ in range(num)
    ]
    prompts = [prompts[i - 1] if i % 3 == 1 else prompt for i, prompt in enumerate(prompts)]
    return [(prompt, rng.randint(1, 30), rng.random() < 0.5) for prompt in prompts]


def run_nano(scheduler: Any, requests: list[tuple[list[int], int, bool]]) -> list[list[int]]:
    """Answer requests, and return the answers."""
    sequences = [NanoSequence(*request) for request in requests]
    scheduler.waiting.extend(sequences)
    ended: list[NanoSequence] = []
    while scheduler.waiting or scheduler.running or scheduler.in_flight:
        ended += scheduler.step()
        scheduler.batch.check()
    assert len(ended) == len({*map(id, ended)}) == len(requests)
    assert scheduler.manager.usage == 0 or not scheduler.batch.is_admitted.any()
    return [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in sequences]


@pytest.mark.parametrize("name", ["nano-vllm"])
def test_ports_are_short(name: str) -> None:
    assert sum(len(block.splitlines()) for block in read_blocks(name)) < MAX_LINES


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("num_pages", [24, 200])
@pytest.mark.parametrize("seed", range(4))
def test_nano_vllm(seed: int, num_pages: int, steps_ahead: int) -> None:
    port = load(read_blocks("nano-vllm")[0])
    model = NanoModel(num_pages)
    scheduler = port.Scheduler(make_config(num_pages), model, steps_ahead)
    requests = draw_requests(seed)
    assert run_nano(scheduler, requests) == [answer(*request) for request in requests]
    stats = scheduler.manager.stats()
    assert stats.queries.num_hit_tokens > 100
    assert (stats.preempted_queries.num_requests > 3) == (num_pages < 100)


def test_nano_vllm_computes_equal_prompts_of_a_prefill_once() -> None:
    port = load(read_blocks("nano-vllm")[0])
    model = NanoModel(40)
    scheduler = port.Scheduler(make_config(40), model)
    requests = [([*range(9)], 1, True)] * 3
    assert run_nano(scheduler, requests) == [answer(*request) for request in requests]
    assert (model.num_prefills, model.num_tokens) == (1, 9 + 1 + 1)


class NanoRunner:
    """The parts of nano-vllm's ModelRunner that its port calls, on torch."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.context: tuple[Any, ...] = ()

    def set_context(
        self,
        is_prefill: bool,
        cu_seqlens_q: Any = None,
        cu_seqlens_k: Any = None,
        max_seqlen_q: int = 0,
        max_seqlen_k: int = 0,
        slot_mapping: Any = None,
        context_lens: Any = None,
        block_tables: Any = None,
    ) -> None:
        """Remember what a step of the model reads: where its rows begin, their lengths, slots and pages."""
        if is_prefill:
            starts, lens = cu_seqlens_q.tolist(), cu_seqlens_k.diff().tolist()
            assert (max_seqlen_q, max_seqlen_k) == (int(cu_seqlens_q.diff().max()), max(lens))
            assert (block_tables is None) == (starts[-1] == sum(lens))
        else:
            starts, lens = [*range(len(context_lens) + 1)], context_lens.tolist()
        self.context = is_prefill, starts, lens, slot_mapping.numpy(), block_tables

    def run_model(self, token_ids: Any, positions: Any, is_prefill: bool) -> list[int]:
        """Compute a step."""
        was_prefill, starts, lens, slots, tables = self.context
        assert was_prefill == is_prefill
        pages = [None] * len(lens) if tables is None else tables.tolist()
        rows = [*zip(pages, lens, strict=True)]
        return self.cache.compute(token_ids.numpy(), positions.numpy(), slots, starts, rows).tolist()

    def sampler(self, logits: list[int], temperatures: Any) -> Any:
        assert len(logits) == len(temperatures)
        return pytest.importorskip("torch").tensor(logits)


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("num_pages", [24, 200])
def test_nano_vllm_on_torch(num_pages: int, steps_ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors of the device are those of the host."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, **_: self)
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    stream = SimpleNamespace(record_event=lambda: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    runner = NanoRunner(Cache(num_pages))
    for name in ("nanovllm", "nanovllm.utils", "nanovllm.utils.context"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["nanovllm.utils.context"].set_context = runner.set_context  # type: ignore[attr-defined]
    port = load(*read_blocks("nano-vllm"))
    requests = draw_requests(5)
    scheduler = port.Scheduler(make_config(num_pages), port.Model(runner), steps_ahead)
    assert run_nano(scheduler, requests) == [answer(*request) for request in requests]
