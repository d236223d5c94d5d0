"""Program: an engine with a folder of pages. Arguments: the folder, and the least number of tokens that its requests hit there,
beside those that they hit in the pool.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
from page_sharing import check_sharing, make_sharing

if __name__ == "__main__":
    folder, least = sys.argv[1:]
    with jax.default_matmul_precision("highest"):
        engine = make_sharing(Path(folder), num_devices=len(jax.devices()))
        num_cached = check_sharing(engine)
    num_found = engine.files.num_loaded * engine.files.page_size
    print(f"{num_cached} tokens were cached, {num_found} came from files")
    assert num_found >= int(least)
