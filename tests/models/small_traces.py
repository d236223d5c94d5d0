"""Small traces whose prompts go on with earlier ones, as a recorded trace has them."""

from __future__ import annotations

from random import Random

from pagepool.replay import TraceRecord

BLOCK_SIZE = 32


def make_records(num_requests: int, seed: int) -> list[TraceRecord]:
    """Make requests of which most go on with one of the last prompts, or part from it inside."""
    rng, records, next_id = Random(seed), [], 0
    for time in range(num_requests):
        ids: tuple[int, ...] = ()
        if records and rng.random() < 0.8:
            record = rng.choice(records[-6:])
            num_full = record.input_length // BLOCK_SIZE
            ids = record.hash_ids[: num_full if rng.random() < 0.8 else rng.randint(0, num_full)]
        num_blocks = rng.randint(1, 6)
        ids += tuple(range(next_id, next_id + num_blocks))
        next_id += num_blocks
        if len(ids) > 20:
            ids = ids[-num_blocks:]
        num_tokens = len(ids) * BLOCK_SIZE - rng.randrange(BLOCK_SIZE)
        records.append(TraceRecord(time, num_tokens, rng.randint(1, 60), ids, block_size=BLOCK_SIZE))
    return records
