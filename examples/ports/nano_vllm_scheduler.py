"""nano-vllm's scheduler, block manager and inputs of a step, on pagepool. Its sequences and configuration stay."""

from collections import deque

import numpy as np

from pagepool import CacheGroupSpec, CacheManager, FullAttentionSpec, PageTable, RequestTraits, RunningBatch, StepInputs

FIELDS = ["token_ids", "positions", "slots", "page_ids", "query_start_loc", "kv_start_loc", "seq_lens", "sources"]
TRAITS = RequestTraits(), RequestTraits(is_preempted=True)


class Scheduler:
    """Sequences run in order of arrival, and prompts before decodes. While pages are short the newest one is preempted."""

    def __init__(self, config, model, steps_ahead=0):
        """`model` starts a step, and returns a function that waits for its tokens."""
        size, num_rows, num_tokens = config.kvcache_block_size, config.max_num_seqs, config.max_num_batched_tokens
        spec = FullAttentionSpec(size, num_kv_heads=1, head_size=1, dtype="bfloat16", use_mla=False)
        self.manager = CacheManager(config.num_kvcache_blocks, [CacheGroupSpec(spec)], config.max_model_len)
        table = PageTable(num_rows, -(-config.max_model_len // size), num_tokens)
        self.batch = RunningBatch(self.manager, table, max_steps_ahead=steps_ahead)
        self.inputs = StepInputs(self.batch, num_tokens=num_tokens, num_reqs=num_rows, fields=FIELDS, depth=steps_ahead + 1)
        self.config, self.model, self.steps_ahead = config, model, steps_ahead
        self.waiting, self.in_flight, self.running, self.cut = deque(), deque(), {}, []
        self.limits, self.temperatures = np.ones(num_rows, np.int32), np.zeros(num_rows, np.float32)
        self.stops, self.rows = np.zeros((num_rows, 1), np.int32), np.zeros(0, np.int32)  # running rows, the newest last

    def plan_prompts(self, step):
        """Plan the rest of a prompt that was cut, and waiting sequences. Return how many tokens each row samples."""
        batch, budget = self.batch, self.config.max_num_batched_tokens
        for row in self.cut:
            num_tokens = min(budget, int(batch.num_tokens[row] - batch.num_computed_tokens[row]))
            batch.plan([row], num_tokens, step=step)
            budget -= num_tokens
        for row in np.flatnonzero(~batch.is_admitted)[: len(self.waiting)].tolist():
            seq = self.waiting[0]
            options = {"max_num_new_tokens": budget, "traits": TRAITS[len(seq.token_ids) > seq.num_prompt_tokens], "step": step}
            if not budget or (num_cached := batch.admit(row, seq.token_ids, reserve="prompt", **options)) is None:
                break
            budget -= int(batch.num_computed_tokens[row]) - num_cached
            self.rows, self.running[row] = np.append(self.rows, np.int32(row)), self.waiting.popleft()
            self.limits[row] = min(seq.num_prompt_tokens + seq.max_tokens, self.config.max_model_len)
            self.stops[row], self.temperatures[row] = -1 if seq.ignore_eos else self.config.eos, seq.temperature
        is_sampled = batch.num_computed_tokens[step.rows] == batch.num_tokens[step.rows]
        self.cut = step.rows[~is_sampled].tolist()
        return is_sampled.astype(np.int32)

    def plan_decodes(self, step):
        """Plan all rows but those whose last token is in flight."""
        rows = self.rows[(self.batch.num_computed_tokens + self.batch.num_ahead_tokens + 1 < self.limits)[self.rows]]
        while len(rows := rows[self.batch.plan(rows, step=step).num_grown :]):
            if any(rows[-1] in flight.rows for flight, *_ in self.in_flight):
                break  # its token is on the way: plan again once that step has ended
            self.waiting.extendleft(self.remove(rows[-1:]))
            rows = rows[:-1]

    def remove(self, rows):
        """Release rows, and return their sequences with all tokens."""
        seqs = [self.running.pop(row) for row in rows.tolist()]
        for row, seq in zip(rows, seqs, strict=True):
            seq.token_ids = self.batch.get_token_ids(row).tolist()
        self.batch.release(rows)
        self.rows = self.rows[self.batch.is_admitted[self.rows]]
        return seqs

    def step(self):
        """Start a step, end the oldest one if it is due, and return the sequences that ended."""
        step = self.batch.new_step()
        counts = self.plan_prompts(step) if self.waiting or self.cut else ()
        if not (is_prefill := len(counts) > 0):
            self.plan_decodes(step)
        if len(step):
            num_tokens = self.batch.inputs(step, out=self.inputs, num_tokens=None if is_prefill else len(step))
            wait = self.model(self.inputs, num_tokens, self.temperatures[step.rows], is_prefill)
            self.in_flight.append((step, counts if is_prefill else None, wait))
        if len(self.in_flight) <= self.steps_ahead and len(step):
            return []
        step, counts, wait = self.in_flight.popleft()
        token_ids = wait() if counts is None else wait()[counts > 0]
        self.batch.settle(step, token_ids, counts, stop_token_ids=self.stops, max_num_tokens=self.limits)
        return self.remove(step.ended_rows) if len(step.ended_rows) else []
