"""The model of mini-sglang under examples/ports/mini_sglang_scheduler.py."""

import numpy as np
import torch
from minisgl.attention.fi import FIMetadata, FlashInferBackend
from minisgl.core import Batch
from minisgl.engine.sample import BatchSamplingArgs


class PagedBackend(FlashInferBackend):
    """FlashInfer over pages of any size."""

    def forward(self, q, k, v, layer_id, batch):
        """Store keys and values, and attend through lists of pages."""
        self._initialize_metadata_once(batch.attn_metadata)
        self.kvcache.store_kv(k, v, batch.out_loc, layer_id)
        cache = self.kvcache.k_cache(layer_id), self.kvcache.v_cache(layer_id)
        return batch.attn_metadata.wrapper.run(q=q, paged_kv_cache=cache)


class Model:
    """Starts steps of mini-sglang's Engine, whose graphs, model and sampler stay."""

    def __init__(self, engine, page_size):
        """Keep the engine; `sampled` has the tokens of the last step, on the device."""
        self.engine, self.page_size, self.sampled = engine, page_size, None

    def __call__(self, inputs, num_tokens, params, is_prefill):
        """Start a step, and return a function that waits for its tokens."""

        def send(array):
            return torch.from_numpy(array).pin_memory().to(engine.device, non_blocking=True)

        engine, backend, host = self.engine, self.engine.attn_backend, torch.from_numpy
        batch = Batch([engine.dummy_req] * len(params), "prefill" if is_prefill else "decode")
        engine.graph_runner.pad_batch(batch)
        size, num = batch.padded_size, num_tokens if is_prefill else batch.padded_size
        batch.input_ids, batch.positions = send(inputs.token_ids[:num]), send(inputs.positions[:num])
        batch.out_loc = send(inputs.slots[0][:num])
        if not is_prefill:
            tokens = self.sampled[send(inputs.sources[:size])]  # they are of the step before
            batch.input_ids = torch.where(batch.input_ids < 0, tokens, batch.input_ids)
        queries, starts, lens = inputs.query_start_loc[: size + 1], inputs.page_starts[0][: size + 1], inputs.seq_lens[:size]
        lists = host(queries), host(starts), send(queries), send(inputs.page_indices[0][: starts[-1]])
        heads = backend.qo_head_local, backend.kv_head_local, backend.config.head_dim, 1, "NONE"
        rest = host(lens), backend.kvcache.dtype, backend.prefill_wrapper if is_prefill else backend.decode_wrappers
        batch.attn_metadata = FIMetadata(*lists, host(inputs.last_page_lens[0][:size]), *heads, *rest)
        batch.attn_metadata.page_size = self.page_size  # no longer 1
        temperatures, top_k, top_p = params.T.copy().clip(1e-6)
        top_k = np.where(top_k < 1, engine.sampler.vocab_size, top_k).astype(np.int32)
        args = BatchSamplingArgs(*map(send, (temperatures, top_k, top_p)) if params[:, 0].any() else [None])
        output = engine.forward_batch(batch, args)
        self.sampled = output.next_tokens_gpu
        return lambda: (output.copy_done_event.synchronize(), output.next_tokens_cpu.numpy())[1]
