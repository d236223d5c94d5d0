"""Admission to a row of a running batch that was used before. A free row keeps its hashes: a wrong one would hit too much, or
too little.
"""

import numpy as np
import pytest
from hybrids import FULL, PROMPT, make_batch, make_manager


@pytest.mark.parametrize("admitted", [[], [0], [1], [0, 1]])
def test_rows_that_changed_places(admitted: list[int]) -> None:
    batch = make_batch(make_manager(FULL))
    prompts = PROMPT[:22], PROMPT[30:44]
    for row in (0, 1):
        batch.admit(row, prompts[row])
    batch.release([row for row in (0, 1) if row not in admitted])
    batch.swap_row(0, 1)
    batch.release(np.flatnonzero(batch.is_admitted))
    for row in (0, 1):
        assert batch.admit(row, prompts[row]) == len(prompts[row]) - 2
        assert batch.admit(2, prompts[1 - row]) == len(prompts[1 - row]) - 2
        batch.release([row, 2])
    batch.check()
