"""Decode steps whose rows share prefixes: what it costs to find the groups and to keep them, and what reading once saves.

``python -m bench.studies.shared_prefix`` prints for each load the pages that the rows read one by one, the pages read with
groups, and CPU times relative to a decode step of the batch: of inputs whose groups are kept, of a search, and of plain inputs.
With ``--attend`` it also attends in jax, with the functions of examples/, and prints the CPU time of reading row by row over
that of reading once: as the example engine decides, groups that save less than a tenth are left alone.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from time import process_time_ns, thread_time_ns
from typing import Any, NamedTuple

import numpy as np

from pagepool import CacheGroupSpec, CacheManager, FullAttentionSpec, PageTable, RunningBatch, SharedPrefixes, StepInputs

PAGE_SIZE, NUM_ROWS, NUM_STEPS = 16, 256, 60
NUM_HEADS, HEAD_SIZE = 4, 64  # with one head of keys
SPEC = FullAttentionSpec(PAGE_SIZE, 1, HEAD_SIZE, "float32", use_mla=False)


class Load(NamedTuple):
    """Rows with prefixes of so many tokens, each shared by a number of rows, and tokens of their own behind."""

    name: str
    prefixes: tuple[tuple[int, int], ...]
    num_own: int
    num_levels: int = 1


LOADS = [
    Load("16 prompts of 8,192 tokens x 16 samples", ((8192, 16),), 2048),
    Load("one prompt of 12,288 tokens for all", ((12288, 256),), 4096),
    Load("2,048 tokens for all, 6,144 for each 16", ((2048, 256), (6144, 16)), 1024, 2),
    Load("nothing shared", (), 4096),
]


def make_batch(load: Load, rng: np.random.Generator) -> RunningBatch:
    """Return a batch of rows that are decoding, in a random order."""
    most = sum(num for num, _ in load.prefixes) + load.num_own + 256
    num_pages = (
        sum(num * NUM_ROWS // rows for num, rows in load.prefixes) // PAGE_SIZE + NUM_ROWS * (load.num_own + 256) // PAGE_SIZE
    )
    manager = CacheManager(num_pages + 8192, [CacheGroupSpec(SPEC)], most)
    batch = RunningBatch(manager, PageTable(NUM_ROWS, -(-most // PAGE_SIZE), NUM_ROWS * 64))
    shared = [[rng.integers(0, 50_000, num) for _ in range(NUM_ROWS // rows)] for num, rows in load.prefixes]
    for row in rng.permutation(NUM_ROWS).tolist():
        parts = [tokens[row % len(tokens)] for tokens in shared]
        own = rng.integers(0, 50_000, int(rng.integers(load.num_own // 2, load.num_own + 1)))
        batch.admit(row, np.concatenate([*parts, own]).astype(np.int32))
    return batch


def measure(load: Load, rng: np.random.Generator) -> str:
    """Return a line of pages and times."""
    batch, rows = make_batch(load, rng), np.arange(NUM_ROWS)
    sizes = SharedPrefixes(num_levels=load.num_levels)
    plain = StepInputs(batch, num_tokens=NUM_ROWS, num_reqs=NUM_ROWS, fields=["starts"])
    groups = StepInputs(batch, num_tokens=NUM_ROWS, num_reqs=NUM_ROWS, fields=["own_starts"], order="prefixes", prefixes=sizes)
    times: dict[str, list[int]] = {"step": [], "plain": [], "kept": [], "searched": []}

    def add(name: str, call: Callable[[], Any]) -> Any:
        start = thread_time_ns()
        result = call()
        times[name].append(thread_time_ns() - start)
        return result

    for _ in range(NUM_STEPS):
        step = add("step", lambda: batch.step(rows, np.ones(NUM_ROWS, np.int32)))
        batch.inputs(step, out=groups)
        add("plain", lambda step=step: batch.inputs(step, out=plain))
        add("kept", lambda step=step: batch.inputs(step, out=groups))
        order, starts = rng.permutation(NUM_ROWS), batch.num_computed_tokens - 1
        named = {"rows": order, "starts": starts[order], "stops": starts[order] + 1}
        add("searched", lambda named=named: batch.inputs(**named, out=groups))
    median = {name: float(np.median(values)) for name, values in times.items()}
    num_pages, num_saved = int((-(-batch.num_computed_tokens // PAGE_SIZE)).sum()), groups.num_saved_pages
    ratios = ", ".join(f"{name} {value / median['step']:.2f}" for name, value in median.items() if name != "step")
    num_read = num_pages - num_saved
    return f"{load.name:42} {num_pages:>8,} pages, {num_read:>8,} with groups ({num_pages / num_read:.2f}x); {ratios}"


def attend(load: Load, rng: np.random.Generator, num_runs: int = 5) -> str:
    """Return a line with the CPU time of attention row by row over that of attention to groups."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    import jax
    from attention import attend_by_gather
    from shared_prefix import attend_once, list_shared
    from sharing import count_pages, is_worth_it

    batch = make_batch(load, rng)
    fields = ["order", "seq_lens", "own_starts", "prefix_page_ids", "prefix_rows"]
    num_rows = min((rows for _, rows in load.prefixes), default=NUM_ROWS)
    sizes = SharedPrefixes(num_groups=max(1, NUM_ROWS // num_rows), num_rows=num_rows)
    groups = StepInputs(batch, num_tokens=NUM_ROWS, num_reqs=NUM_ROWS, fields=fields, order="prefixes", prefixes=sizes)
    batch.inputs(batch.step(np.arange(NUM_ROWS), np.ones(NUM_ROWS, np.int32)), out=groups)
    num_pages, *most = count_pages(groups, PAGE_SIZE)
    is_shared = is_worth_it(num_pages, groups.num_saved_pages)
    shape = 1, batch.group_tables[0].page_table_cpu.max() + 1, PAGE_SIZE, HEAD_SIZE
    keys, values = (jax.random.normal(jax.random.key(i), shape) for i in range(2))
    query = jax.random.normal(jax.random.key(2), (NUM_ROWS, NUM_HEADS, HEAD_SIZE))
    columns = -(-int(batch.num_computed_tokens.max()) // PAGE_SIZE)
    table = jax.numpy.asarray(batch.group_tables[0].page_table_cpu[:, :columns])
    lengths = jax.numpy.asarray(batch.num_computed_tokens)
    by_row = jax.jit(attend_by_gather), (query, keys, values, table, lengths)
    once = (jax.jit(attend_once), (*by_row[1], list_shared(groups, NUM_ROWS, *most))) if is_shared else by_row
    results = [function(*arguments) for function, arguments in (by_row, once)]
    difference = float(jax.numpy.abs(results[0] - results[1]).max())
    times: list[list[int]] = [[], []]
    for _ in range(num_runs):
        for taken, (function, arguments) in zip(times, (by_row, once), strict=True):
            start = process_time_ns()
            function(*arguments).block_until_ready()
            taken.append(process_time_ns() - start)
    ratio = float(np.median([mine / other for mine, other in zip(*times, strict=True)]))
    return f"{load.name:42} attention {ratio:.2f}x less CPU time, largest difference {difference:.0e}"


def main() -> None:
    """Run the command line."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--attend", action="store_true", help="attend in jax too, which takes some GB of memory")
    args, rng = parser.parse_args(), np.random.default_rng(0)
    for load in LOADS:
        print(measure(load, rng), flush=True)
    for load in LOADS if args.attend else ():
        print(attend(load, rng), flush=True)


if __name__ == "__main__":
    main()
