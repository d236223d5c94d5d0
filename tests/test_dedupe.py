"""Rows with the same tokens that come to share pages (`dedupe=True`), by hand; for random rows see `test_states`."""

from __future__ import annotations

from hybrids import FULL, PROMPT, count_hits, make_batch, make_manager, take

from pagepool import RunningBatch


def step(batch: RunningBatch, num_tokens: int) -> None:
    """Append the prompt's next tokens to the first two rows, until they know `num_tokens`."""
    while batch.num_tokens[0] < num_tokens:
        batch.step([0, 1], [PROMPT[batch.num_tokens[0]]] * 2)
        batch.check()


def test_a_page_is_shared_from_the_next_growth_on() -> None:
    batch = make_batch(make_manager(FULL), dedupe=True)
    for row in range(2):
        batch.admit(row, PROMPT[:2])
    step(batch, 4)
    assert [batch.get_page_ids(row) for row in range(2)] == [([1],), ([2],)]
    step(batch, 5)
    assert [batch.get_page_ids(row) for row in range(2)] == [([1, 3],), ([1, 4],)]
    ref_counts = batch._manager.page_pool.ref_counts()
    assert ref_counts[:5].tolist() == [0, 2, 0, 1, 1]
    assert batch._manager.page_pool.free_page_ids_in_order()[-1] == 2
    assert count_hits(batch._manager) == 4


def test_forks_share_what_they_fill_alike() -> None:
    batch = make_batch(make_manager(FULL), dedupe=True)
    batch.admit(0, PROMPT[:6])
    batch.fork(0, [1])
    assert take(batch) == [(2, 3, 0)]
    step(batch, 9)
    assert [batch.get_page_ids(row) for row in range(2)] == [([1, 2, 4],), ([1, 2, 5],)]
