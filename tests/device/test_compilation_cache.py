"""jax's compilation cache: programs read from it write what compiled ones do, and a jax with which they do not is refused."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sources import MODELS, ROOT, run_python

from pagepool import PageTable
from pagepool.device import LEAST_JAX, import_jax
from pagepool.errors import CompatError
from pagepool.host_pages import HostPages
from pagepool.page_copies import copy_pages

jax = pytest.importorskip("jax")


@pytest.mark.slow
def test_a_second_process_computes_the_same(tmp_path: Path) -> None:
    """The first compiles all programs, the second reads them."""
    program = MODELS / "reading_programs.py"
    counts = []
    for _ in range(2):
        process = run_python(program, tmp_path, JAX_PLATFORMS="cpu")
        assert process.returncode == 0, process.stderr
        counts.append(int(process.stdout.splitlines()[-1]))
    assert counts[0] == 0
    if counts[1] == 0:
        pytest.skip("jax reads no program from its cache on this machine")


PAGE = np.array([1], dtype=np.int32)
COPIES = SimpleNamespace(src=PAGE, dst=PAGE + 1, group=PAGE - 1)


@pytest.mark.parametrize(
    "call",
    [
        lambda _: PageTable(4, 64, 64).commit(4),
        lambda _: PageTable(4, 64, 64).page_table,
        lambda arrays: copy_pages(arrays, COPIES),
        lambda arrays: HostPages(arrays, 8),
    ],
    ids=["commit", "page_table", "copy_pages", "HostPages"],
)
def test_an_old_jax_is_refused(call: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = jax.numpy.zeros((4, 2))
    import_jax.cache_clear()
    monkeypatch.setattr(jax, "__version__", "0.5.3")
    monkeypatch.setattr(jax, "__version_info__", (0, 5, 3))
    with pytest.raises(CompatError, match=r"^jax: got version 0\.5\.3, allowed: 0\.6\.0 and newer, since on CPUs, .*--upgrade"):
        call(arrays)
    assert arrays.tolist() == [[0, 0]] * 4
    monkeypatch.undo()
    call(arrays)


def test_the_extra_names_the_same_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["jax"] == [f"jax>={LEAST_JAX}"]
