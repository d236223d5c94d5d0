"""The ports of examples/ports/: their answers are those of a model without a cache, with stubs in place of the engines' models.

The stub stores each token at its slot, and samples from all tokens of a row, which it reads through pages.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
PORTS = ROOT / "examples" / "ports"
if not PORTS.exists():
    pytest.skip("the ports are not here", allow_module_level=True)

VOCAB, EOS, PAGE_SIZE, MAX_MODEL_LEN, MAX_LINES = 40, 7, 4, 64, 120


def read_files(name: str) -> list[str]:
    """Return the scheduler and the model of a port."""
    return [(PORTS / f"{name.replace('-', '_')}_{part}.py").read_text() for part in ("scheduler", "model")]


def load(*texts: str) -> SimpleNamespace:
    """Run texts of programs, and return their names."""
    names: dict[str, Any] = {"__name__": "port"}
    for text in texts:
        exec(compile(text, "port", "exec"), names)
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


@pytest.mark.parametrize("name", ["nano-vllm", "mini-sglang"])
def test_ports_are_as_short_as_their_pages_say(name: str) -> None:
    num_lines = sum(bool(line) for text in read_files(name) for line in text.splitlines())
    assert num_lines < MAX_LINES
    assert f"has {num_lines} lines without blank ones" in " ".join((ROOT / "docs" / "ports" / f"{name}.md").read_text().split())


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("num_pages", [24, 200])
@pytest.mark.parametrize("seed", range(4))
def test_nano_vllm(seed: int, num_pages: int, steps_ahead: int) -> None:
    port = load(read_files("nano-vllm")[0])
    model = NanoModel(num_pages)
    scheduler = port.Scheduler(make_config(num_pages), model, steps_ahead)
    requests = draw_requests(seed)
    assert run_nano(scheduler, requests) == [answer(*request) for request in requests]
    stats = scheduler.manager.stats()
    assert stats.queries.num_hit_tokens > 100
    assert (stats.preempted_queries.num_requests > 3) == (num_pages < 100)


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_nano_vllm_computes_equal_prompts_of_a_prefill_once(steps_ahead: int) -> None:
    port = load(read_files("nano-vllm")[0])
    model = NanoModel(40)
    scheduler = port.Scheduler(make_config(40), model, steps_ahead)
    requests = [([*range(9)], max_tokens, True) for max_tokens in (1, 2, 5)]
    assert run_nano(scheduler, requests) == [answer(*request) for request in requests]
    assert (model.num_prefills, model.num_tokens) == (1, 9 + 1 + 1 + (1 + 4))  # no step is for nothing


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
    port = load(*read_files("nano-vllm"))
    requests = draw_requests(5)
    scheduler = port.Scheduler(make_config(num_pages), port.Model(runner), steps_ahead)
    assert run_nano(scheduler, requests) == [answer(*request) for request in requests]


class MiniModel(Cache):
    """What mini-sglang's Engine does with a step, from lists of pages."""

    def __call__(self, inputs: Any, num_tokens: int, params: Any, is_prefill: bool) -> Callable[[], Any]:
        num_reqs = len(params)
        starts, lens, token_ids = inputs.query_start_loc, inputs.seq_lens[:num_reqs], inputs.token_ids[:num_tokens]
        if (token_ids < 0).any():
            token_ids = np.where(token_ids < 0, self.sampled[inputs.sources[:num_reqs]], token_ids)
        rows = read_lists(inputs.page_starts[0][: num_reqs + 1], inputs.page_indices[0], inputs.last_page_lens[0], lens)
        slots, positions = inputs.slots[0][:num_tokens].copy(), inputs.positions[:num_tokens]
        self.num_prefills += is_prefill
        sampled = self.sampled = self.compute(token_ids, positions, slots, starts[: num_reqs + 1], rows)
        return lambda: sampled


def read_lists(starts: Any, indices: Any, last_page_lens: Any, lens: Any) -> list[tuple[Any, int]]:
    """Return the pages and the length of each row, from lists of pages as FlashInfer takes them."""
    rows = [(indices[i:j], int(length)) for i, j, length in zip(starts[:-1], starts[1:], lens, strict=True)]
    assert [(len(pages) - 1) * PAGE_SIZE + int(last) for (pages, _), last in zip(rows, last_page_lens, strict=False)] == [
        length for _, length in rows
    ]
    return rows


def make_mini_config(num_rows: int = 8, num_tokens: int = 24) -> SimpleNamespace:
    return SimpleNamespace(
        page_size=PAGE_SIZE, max_running_req=num_rows, max_extend_tokens=num_tokens, max_seq_len=MAX_MODEL_LEN
    )


def run_mini(scheduler: Any, arrivals: list[tuple[int, tuple[list[int], int, bool]]]) -> list[list[int]]:
    """Answer requests that arrive once so many tokens are sampled, and return the answers."""
    answers: list[list[int]] = [[] for _ in arrivals]
    ended: list[int] = []
    waiting = [*enumerate(arrivals)]
    while waiting or scheduler.waiting or scheduler.rows.size or scheduler.in_flight:
        while waiting and waiting[0][1][0] <= sum(map(len, answers)):
            uid, (_, (prompt, max_tokens, ignore_eos)) = waiting.pop(0)
            params = SimpleNamespace(max_tokens=max_tokens, ignore_eos=ignore_eos, temperature=1, top_k=-1, top_p=1)
            params.is_greedy = uid % 2 == 0
            scheduler.waiting.append((uid, np.array(prompt, np.int32), params))
        for uid, token_id, has_ended in zip(*scheduler.step(), strict=True):
            answers[uid].append(int(token_id))
            ended += [uid] * bool(has_ended)
        scheduler.batch.check()
    assert sorted(ended) == [*range(len(arrivals))]
    return answers


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("num_pages", [24, 200])
@pytest.mark.parametrize("seed", range(4))
def test_mini_sglang(seed: int, num_pages: int, steps_ahead: int) -> None:
    """No request is preempted, though pages are short."""
    port = load(read_files("mini-sglang")[0])
    scheduler = port.Scheduler(make_mini_config(), num_pages, EOS, MiniModel(num_pages + 1), steps_ahead)
    requests = draw_requests(seed)
    assert run_mini(scheduler, [(4 * i, request) for i, request in enumerate(requests)]) == [answer(*each) for each in requests]
    stats = scheduler.manager.stats()
    assert stats.queries.num_hit_tokens > 100
    assert stats.queries.num_requests == len(requests)
    assert not scheduler.batch.is_admitted.any()


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_mini_sglang_keeps_the_pages_of_equal_prompts(steps_ahead: int) -> None:
    """The request that comes later takes all free pages."""
    port = load(read_files("mini-sglang")[0])
    model = MiniModel(10)
    scheduler = port.Scheduler(make_mini_config(), 9, EOS, model, steps_ahead)
    requests = [([*range(9)], 10, True)] * 2 + [([*range(20, 25)], 5, True)]
    assert run_mini(scheduler, [(4 * (i > 1), request) for i, request in enumerate(requests)]) == [
        answer(*each) for each in requests
    ]
    assert model.num_tokens == 9 + 1 + 2 * 9 + 5 + 4  # the second prompt hits two pages, and no step is for nothing


def test_a_request_of_mini_sglang_is_aborted_in_flight() -> None:
    port = load(read_files("mini-sglang")[0])
    scheduler = port.Scheduler(make_mini_config(), 40, EOS, MiniModel(41))
    params = SimpleNamespace(max_tokens=30, ignore_eos=True, temperature=1, top_k=-1, top_p=1, is_greedy=True)
    for uid in range(2):
        scheduler.waiting.append((uid, np.arange(uid, uid + 9, dtype=np.int32), params))
    scheduler.step()
    scheduler.release(scheduler.rows[scheduler.uids[scheduler.rows] == 0])
    while scheduler.rows.size or scheduler.in_flight:
        assert 0 not in scheduler.step()[0].tolist()


class FakeMetadata:
    """mini-sglang's metadata of FlashInfer, for pages of one token."""

    LISTS = ("cu_seqlens_q_cpu", "cu_seqlens_k_cpu", "cu_seqlens_q_gpu", "indices", "last_page_len_cpu")
    HEADS = ("num_qo_heads", "num_kv_heads", "head_dim", "page_size", "pos_encoding_mode")
    NAMES = (*LISTS, *HEADS, "seq_lens_cpu", "dtype", "wrapper")

    def __init__(self, *values: Any) -> None:
        vars(self).update(zip(self.NAMES, values, strict=True))
        assert self.page_size == 1
        assert (self.num_qo_heads, self.num_kv_heads, self.head_dim, self.pos_encoding_mode) == (4, 2, 8, "NONE")


class FakeBackend:
    """mini-sglang's backend of FlashInfer, whose wrappers plan a step once."""

    def _initialize_metadata_once(self, metadata: FakeMetadata) -> None:
        metadata.wrapper.metadata = metadata


class FakeBatch:
    """mini-sglang's batch."""

    def __init__(self, reqs: list[Any], phase: str) -> None:
        self.reqs, self.is_prefill = reqs, phase == "prefill"

    @property
    def padded_size(self) -> int:
        return len(self.padded_reqs)


class FakeEngine:
    """The parts of mini-sglang's Engine that its port calls. A key is a token, and decodes are padded to a power of 2."""

    device, dummy_req = "cpu", SimpleNamespace(complete_one=lambda: None)

    def __init__(self, backend_type: Any, num_pages: int) -> None:
        self.cache, self.num_greedy = Cache(num_pages), 0
        self.graph_runner, self.sampler = SimpleNamespace(pad_batch=self.pad), SimpleNamespace(vocab_size=VOCAB)
        self.kvcache = SimpleNamespace(dtype="bfloat16", store_kv=self.store, k_cache=self.view, v_cache=self.view)
        self.attn_backend = backend_type()
        wrappers = {name: SimpleNamespace(run=self.attend) for name in ("prefill_wrapper", "decode_wrappers")}
        vars(self.attn_backend).update(wrappers, kvcache=self.kvcache, qo_head_local=4, kv_head_local=2)
        self.attn_backend.config = SimpleNamespace(head_dim=8)

    def pad(self, batch: FakeBatch) -> None:
        num = len(batch.reqs)
        batch.padded_reqs = batch.reqs + [self.dummy_req] * (0 if batch.is_prefill else (1 << (num - 1).bit_length()) - num)

    def store(self, keys: Any, values: Any, slots: Any, layer: int) -> None:
        """Remember the tokens and slots of a step."""
        self.written = keys.numpy(), slots.numpy()

    def view(self, layer: int) -> Any:
        return self.cache.token_ids

    def attend(self, q: Any, paged_kv_cache: Any) -> list[int]:
        """Write and sample. Rows of padding have no pages."""
        metadata = self.batch.attn_metadata
        wrapper = getattr(self.attn_backend, "prefill_wrapper" if self.batch.is_prefill else "decode_wrappers")
        assert wrapper.metadata is metadata
        assert metadata.page_size == PAGE_SIZE
        assert (metadata.cu_seqlens_q_cpu == metadata.cu_seqlens_q_gpu).all()
        num, (token_ids, slots) = len(self.batch.reqs), self.written
        starts = metadata.cu_seqlens_q_cpu.tolist()[: num + 1]
        page_starts, indices, last = (
            each.numpy() for each in (metadata.cu_seqlens_k_cpu, metadata.indices, metadata.last_page_len_cpu)
        )
        assert page_starts[num:].tolist() == [len(indices)] * (len(page_starts) - num)
        rows = read_lists(page_starts[: num + 1], indices, last, metadata.seq_lens_cpu[:num].tolist())
        num_tokens = starts[-1]
        assert not slots[num_tokens:].any()
        return self.cache.compute(token_ids[:num_tokens], q.numpy()[:num_tokens], slots[:num_tokens], starts, rows).tolist()

    def forward_batch(self, batch: FakeBatch, args: tuple[Any, ...]) -> SimpleNamespace:
        torch, self.batch = sys.modules["torch"], batch
        assert len(batch.input_ids) == len(batch.positions) == len(batch.out_loc)
        self.num_greedy += args == (None,)
        assert args == (None,) or [each.dtype for each in args] == [torch.float32, torch.int32, torch.float32]
        sampled = torch.tensor(self.attn_backend.forward(batch.positions, batch.input_ids, None, 0, batch), dtype=torch.int32)
        event = SimpleNamespace(synchronize=lambda: None)
        return SimpleNamespace(next_tokens_gpu=sampled, next_tokens_cpu=sampled, copy_done_event=event)


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("num_pages", [24, 200])
def test_mini_sglang_on_torch(num_pages: int, steps_ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    names = {"attention.fi": {"FIMetadata": FakeMetadata, "FlashInferBackend": FakeBackend}, "core": {"Batch": FakeBatch}}
    names |= {"engine.sample": {"BatchSamplingArgs": lambda *args: args}, "attention": {}, "engine": {}}
    monkeypatch.setitem(sys.modules, "minisgl", ModuleType("minisgl"))
    for name, values in names.items():
        monkeypatch.setitem(sys.modules, f"minisgl.{name}", ModuleType(name))
        vars(sys.modules[f"minisgl.{name}"]).update(values)
    port = load(*read_files("mini-sglang"))
    engine = FakeEngine(port.PagedBackend, num_pages + 1)
    scheduler = port.Scheduler(make_mini_config(), num_pages, EOS, port.Model(engine, PAGE_SIZE), steps_ahead)
    requests = draw_requests(5)
    assert run_mini(scheduler, [(4 * i, request) for i, request in enumerate(requests)]) == [answer(*each) for each in requests]
    assert engine.num_greedy > 0
