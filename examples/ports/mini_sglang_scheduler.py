"""mini-sglang's scheduler, prefix cache, page table and inputs of a step, on pagepool."""

from collections import deque

import numpy as np

from pagepool import CacheGroupSpec, CacheManager, FullAttentionSpec, PageTable, RunningBatch, StepInputs

FIELDS = ["token_ids", "positions", "slots", "query_start_loc", "seq_lens", "sources"]
LISTS = ["page_starts", "page_indices", "last_page_lens"]


class Scheduler:
    """Prompts run before decodes. Pages for the answers of running requests stay free, so that none is preempted."""

    def __init__(self, config, num_pages, eos, model, steps_ahead=1):
        """`model` starts a step, and returns a function that waits for its tokens. Page 0 is the dummy page."""
        size, num_rows, num_tokens = config.page_size, config.max_running_req, config.max_extend_tokens
        spec = FullAttentionSpec(size, num_kv_heads=1, head_size=1, dtype="bfloat16", use_mla=False)
        self.manager = CacheManager(num_pages + 1, [CacheGroupSpec(spec)], config.max_seq_len)
        self.table = PageTable(num_rows, -(-config.max_seq_len // size), num_tokens)
        self.batch = RunningBatch(self.manager, self.table, max_steps_ahead=steps_ahead)
        sizes = {"num_tokens": num_tokens, "num_reqs": -(-num_rows // 8) * 8, "depth": steps_ahead + 1, "pad_slot": 0}
        self.inputs = StepInputs(self.batch, fields=FIELDS + LISTS, **sizes)
        self.config, self.eos, self.model, self.steps_ahead = config, eos, model, steps_ahead
        self.waiting, self.in_flight, self.cut, self.rows = deque(), deque(), [], np.zeros(0, np.int32)
        self.uids, self.limits, self.num_pages = np.ones((3, num_rows), np.int32)
        self.stops, self.params = np.zeros((num_rows, 1), np.int32), np.zeros((num_rows, 3), np.float32)

    def plan_prompts(self, step):
        """Plan the rest of prompts that were cut, and waiting requests. Return how many tokens each row samples."""
        batch, size, budget = self.batch, self.config.page_size, self.config.max_extend_tokens
        for row in self.cut:
            num_tokens = min(budget, int(batch.num_tokens[row] - batch.num_computed_tokens[row]))
            batch.plan([row], num_tokens, step=step)
            budget -= num_tokens
        for row in np.flatnonzero(~batch.is_admitted)[: len(self.waiting)].tolist():
            uid, token_ids, params = self.waiting[0]
            limit = min(len(token_ids) + params.max_tokens, self.config.max_seq_len)
            num_pages = (limit - 2) // size + 1  # the last token of an answer is not computed
            num_reserved = num_pages - (len(token_ids) - 1) // size - 1
            num_reserved += int((self.num_pages - self.table.num_pages_per_row)[self.rows].sum())
            options = {"max_num_new_tokens": budget, "reserve": "prompt", "num_reserved_pages": num_reserved, "step": step}
            if not budget or (num_cached := batch.admit(row, token_ids, **options)) is None:
                break
            budget -= int(batch.num_computed_tokens[row]) - num_cached
            self.rows, _ = np.append(self.rows, np.int32(row)), self.waiting.popleft()
            self.uids[row], self.limits[row], self.num_pages[row] = uid, limit, num_pages
            self.stops[row] = -1 if params.ignore_eos else self.eos
            self.params[row] = 0 if params.is_greedy else params.temperature, params.top_k, params.top_p
        is_sampled = batch.num_computed_tokens[step.rows] == batch.num_tokens[step.rows]
        self.cut = step.rows[~is_sampled].tolist()
        return is_sampled

    def release(self, rows):
        """End requests, at the end of their answers or at any time."""
        self.batch.release(rows)
        self.rows = self.rows[self.batch.is_admitted[self.rows]]
        self.cut = [row for row in self.cut if self.batch.is_admitted[row]]

    def step(self):
        """Start a step, and end the oldest one if it is due. Return uids, their tokens, and whether each has ended."""
        batch, step = self.batch, self.batch.new_step()
        is_sampled = self.plan_prompts(step) if self.waiting or self.cut else ()
        if not (is_prefill := len(is_sampled) > 0):  # decode all rows but those whose last token is in flight
            has_next = batch.num_computed_tokens + batch.num_ahead_tokens + 1 < self.limits
            batch.plan(self.rows[has_next[self.rows]], step=step)
            is_sampled = np.ones(len(step), bool)
        if len(step):
            num_tokens = batch.inputs(step, out=self.inputs, num_tokens=None if is_prefill else len(self.inputs.seq_lens))
            self.in_flight.append((step, is_sampled, self.model(self.inputs, num_tokens, self.params[step.rows], is_prefill)))
        if len(self.in_flight) <= self.steps_ahead and len(step):
            return self.uids[:0], self.uids[:0], np.zeros(0, bool)
        step, is_sampled, wait = self.in_flight.popleft()
        token_ids, rules = wait()[is_sampled], {"stop_token_ids": self.stops, "max_num_tokens": self.limits}
        rows = batch.settle(step, token_ids, is_sampled.astype(np.int32), **rules)[is_sampled]
        rows, token_ids = rows[rows >= 0], token_ids[rows >= 0]  # the others have ended, or were aborted
        self.release(step.ended_rows)
        return self.uids[rows], token_ids, ~batch.is_admitted[rows]
