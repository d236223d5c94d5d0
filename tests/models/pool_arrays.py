"""All that a pool keeps, in arrays, for comparisons of two pools or of one before and after a call."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from pagepool import PagePool
from pagepool._core import CONSTANTS
from pagepool.page_pool.integrity import Records

KEPT, PART, GROUP = CONSTANTS.KEPT, CONSTANTS.PART, ~CONSTANTS.FLAGS

FIELDS: dict[str, Callable[[Records], Any]] = {
    "enable_caching": lambda records: [records.store.enable_caching],
    "pool_names": lambda records: records.store.bank_names,
    "pool_sizes": lambda records: [stop - start + 1 for start, stop, *_ in records.banks],
    "pool_counters": lambda records: [bank[-5:] for bank in records.banks],
    "ref_counts": lambda records: records.pages["ref_cnt"],
    "free_page_ids": lambda records: records.free_ids,
    "cached_page_ids": lambda records: records.cached_ids,
    "cached_group_ids": lambda records: records.cached["group"] & GROUP,
    "cached_keys": lambda records: np.column_stack([records.cached[half] for half in ("key_lo", "key_hi")]),
    "cached_uppers": lambda records: take_rows(records.uppers.reshape(-1, 2), records.cached_ids),
    "cached_kept": lambda records: records.cached["group"] & KEPT != 0,
    "cached_token_ids": lambda records: records.page_tokens.take(records.cached_ids, axis=0),
    "names": lambda records: [repr(each) for each in records.store.names._hash_of_key.items()],
    "counters": lambda records: [*records.counters.values()],
    "num_shards": lambda records: [records.num_shards],
    "eviction": lambda records: [records.store.eviction],
    "policy_marks": lambda records: records.marks,
    "policy_ghosts": lambda records: records.ghosts.view(np.uint32).reshape(-1, 2),
    "policy_counts": lambda records: records.policy_counts,
    "policy_learned": lambda records: records.learned.view(np.uint8),
    "terms": lambda records: records.terms,
    "owners": lambda records: records.owners,
    "tenants": lambda records: records.tenants,
}


def take_rows(rows: Any, ids: Any) -> Any:
    """Return the rows of these ids; none if there are no rows."""
    return rows.take(ids, axis=0) if len(rows) else rows


def pool_arrays(pool: PagePool) -> dict[str, Any]:
    """Return the arrays of a pool's store, with all of its pools, after checking it: references, the order of eviction, entries
    with pages of equal content in their order, hash names, counters, what the policy has learned, and to whom pages belong.
    """
    records = Records(pool.store)
    arrays = {name: np.array(read(records)) for name, read in FIELDS.items()}
    return arrays | {"configuration": np.array([json.dumps(pool.configuration)])}


def pool_lists(pool: PagePool) -> dict[str, Any]:
    """Return the same as lists, which can be compared with ``==``."""
    return {name: array.tolist() for name, array in pool_arrays(pool).items()}
