"""Helpers of the tests on devices: slow computations, compile counts, random commits, separate programs."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from settings import NUM_OPERATIONS
from table_model import Work

import pagepool

if NUM_OPERATIONS < 200_000:  # XLA, which reads this at the first use of a device, takes half the time to compile
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_multi_thread_eigen=false")

TESTS = Path(__file__).parent
COLLECTIVES = ("all-reduce", "all-gather", "collective-permute", "all-to-all", "reduce-scatter", "collective-broadcast")
COMPILATIONS: list[str] = []
# On CPUs: it transposes pages whose axis is not the first, and the oldest does not donate float8.
IS_OLD_COMPILER = jax.__version_info__ < (0, 10)


def note_compilation(event: str, duration: float, **_: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        COMPILATIONS.append(event)


jax.monitoring.register_event_duration_secs_listener(note_compilation)


@contextmanager
def count_compilations() -> Iterator[list[str]]:
    """Yield a list that has an entry for each compilation at the end of the block."""
    start = len(COMPILATIONS)
    compilations: list[str] = []
    yield compilations
    compilations.extend(COMPILATIONS[start:])


@jax.jit
def after_slow_work(table: Any, num_turns: int = 1) -> Any:
    """Return the table after about 50 ms of work in each turn."""
    matrix = jax.lax.fori_loop(0, 60 * num_turns, lambda _, m: jnp.tanh(m @ m), jnp.full((256, 256), 0.01, dtype=jnp.float32))
    return table + (matrix[0, 0] > 2).astype(jnp.int32)


def count_compilations_of_warmup(tables: Any) -> int:
    """Return how many programs a page table, or one of several groups, compiles if there is none yet."""
    jax.clear_caches()
    with count_compilations() as compilations:
        tables.warmup()
    return len(compilations)


def commit_in_all_ways(table: pagepool.PageTable) -> None:
    """Send a window, send the whole table, and clear it."""
    num_reqs = table.max_num_reqs
    table.append_row([1], 0)
    table.commit(num_reqs)
    table.mark_dirty()
    table.commit(num_reqs)
    table.clear()
    table.commit(num_reqs)


def make_pending(table: pagepool.PageTable) -> None:
    """Replace the device array by one that is still being computed, so that a commit started now must wait, and reads late."""
    table._array = after_slow_work(table.page_table)


def read(array: jax.Array) -> Any:
    """Read an array through a copy. The array would cache a NumPy view of itself, which prevents its donation."""
    return np.asarray(jnp.array(array, copy=True))


def read_shards(array: jax.Array) -> list[tuple[Any, Any]]:
    """Return the index and the contents of each shard of this process."""
    return [(shard.index, np.array(shard.data)) for shard in array.addressable_shards]


def assert_separate(arrays: list[Any]) -> None:
    """No two arrays of the host share memory."""
    assert not [1 for i, one in enumerate(arrays) for other in arrays[:i] if np.shares_memory(one, other)]


def commit_at_random(work: Work, is_pending: bool = False) -> list[jax.Array]:
    """Commit some rows, overwrite the host tables before the device can be done, and compare all with the models."""
    num_reqs = work.num_rows if work.coin() else int(work.rng.integers(0, work.num_rows + 1))
    if is_pending:
        for table, _ in work.pairs:
            make_pending(table)
    arrays = work.commit(num_reqs)
    work.overwrite_host()
    for array, (table, model) in zip(arrays, work.pairs, strict=True):
        model.commit(num_reqs)
        np.testing.assert_array_equal(read(array), model.on_device)
        assert array is table.page_table
        assert array.dtype == jnp.int32
        assert array.sharding == table.sharding
    work.restore_host()
    return arrays


def run_work(work: Work, num_commits: int, is_pending: bool = False) -> None:
    """Do random rounds, from no operation at all to more than a full upload takes."""
    for _ in range(num_commits):
        for _ in range(int(work.rng.choice([0, 1, 3, 40], p=[0.1, 0.4, 0.4, 0.1]))):
            work.do()
        commit_at_random(work, is_pending)
    work.check()


class Program:
    """A program of this folder, running on simulated CPU devices."""

    def __init__(self, name: str, *args: str, num_devices: int) -> None:
        folders = [str(TESTS), str(Path(pagepool.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, folders)),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={num_devices}",
        }
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `end`
        command = [sys.executable, str(TESTS / name), *args]
        self.process = subprocess.Popen(command, env=env, stdout=self.log, stderr=subprocess.STDOUT)

    def end(self) -> str:
        """End the program if it still runs, and return its output."""
        self.process.kill()
        self.process.wait()
        with self.log:
            self.log.seek(0)
            return self.log.read()


def await_programs(programs: list[Program], timeout: float) -> None:
    """Wait until all are done. If one fails, for which the others might wait, or the time is over, end all of them."""
    end = time.monotonic() + timeout
    codes: list[int | None] = [None]
    while None in codes and not any(codes) and time.monotonic() < end:
        time.sleep(0.05)
        codes = [program.process.poll() for program in programs]
    said = [program.end() for program in programs]
    assert codes == [0] * len(programs), "\n".join(said)
