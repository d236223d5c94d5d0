"""The model of nano-vllm under examples/ports/nano_vllm_scheduler.py."""

import torch
from nanovllm.utils.context import set_context


class Model:
    """Starts steps of nano-vllm's ModelRunner, whose warm-up, graphs, model and sampler stay."""

    def __init__(self, runner):
        """Keep the runner; `sampled` has the tokens of the last step, on the device."""
        self.runner, self.sampled = runner, None

    @torch.inference_mode()
    def __call__(self, inputs, num_tokens, temperatures, is_prefill):
        """Start a step, and return a function that waits for its tokens."""
        num_rows = len(temperatures)

        def send(array, size=num_rows):
            return torch.from_numpy(array[:size]).pin_memory().cuda(non_blocking=True)

        token_ids, positions, slots = (send(x, num_tokens) for x in (inputs.token_ids, inputs.positions, *inputs.slots))
        starts, ends, lens, page_ids = inputs.query_start_loc, inputs.kv_start_loc, inputs.seq_lens, send(*inputs.page_ids)
        if is_prefill:
            sums = [send(x, len(temperatures) + 1) for x in (starts, ends)]
            pages = page_ids if ends[-1] > num_tokens else None  # a prefix is cached
            set_context(True, *sums, int((starts[1:] - starts[:-1]).max()), int(lens.max()), slots, None, pages)
        else:
            set_context(False, slot_mapping=slots, context_lens=send(lens), block_tables=page_ids)
            token_ids = torch.where(token_ids < 0, self.sampled[send(inputs.sources)], token_ids)
        self.sampled = self.runner.sampler(self.runner.run_model(token_ids, positions, is_prefill), send(temperatures))
        sampled, event = self.sampled.to("cpu", non_blocking=True), torch.cuda.current_stream().record_event()
        return lambda: (event.synchronize(), sampled.numpy())[1]
