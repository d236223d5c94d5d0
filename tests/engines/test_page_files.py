"""The pages of examples/page_files.py: engines that share a folder answer as the dense model, whatever lies there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

jax = pytest.importorskip("jax", minversion="0.6.1")

import numpy as np  # noqa: E402
from devices import Program, await_programs  # noqa: E402
from engine_workload import HYBRID_WEIGHTS, LIMITS, answer_densely, exact_float32, make_asks  # noqa: E402, F401
from page_files_process import check_sharing, make_sharing, sharing  # noqa: E402

page_files = pytest.importorskip("page_files")

SHAPE = (2, 2, 1, 4, 3)
DIGESTS = [f"{i:064x}" for i in range(4)]


def make_files(folder: Path, model: bytes = b"model", shape: tuple[int, ...] = SHAPE) -> Any:
    return page_files.PageFiles(folder, model, 4, shape)


def make_page(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=SHAPE).astype(np.float32)


# Files.


def test_a_page_comes_back_in_another_process(tmp_path: Path) -> None:
    first, second = make_files(tmp_path / "new" / "folder"), make_files(tmp_path / "new" / "folder")
    digests = first.list_digests(list(range(11)))
    assert (len(digests), first.count_leading(digests)) == (2, 0)
    assert digests == second.list_digests(list(range(8)))
    assert digests != make_files(tmp_path, b"other").list_digests(range(8))
    assert digests != make_files(tmp_path, shape=(1,)).list_digests(range(8))
    first.save(digests[0], make_page(1))
    assert second.count_leading(digests) == 1
    np.testing.assert_array_equal(second.load(digests[0]), make_page(1))
    first.save(digests[0], make_page(2))  # there is one
    assert (first.num_saved, second.num_loaded, len(list(first.folder.iterdir()))) == (1, 1, 1)


def cut(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:num_bytes])


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def put_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def put_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def put(path: Path, page: Any) -> None:
    with path.open("wb") as file:
        np.savez(file, digest=DIGESTS[0], page=page)


BROKEN: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: cut(path, -1),
    "half": lambda path: cut(path, path.stat().st_size // 2),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"1"),
    "a bit of the page": lambda path: flip(path, path.stat().st_size // 2),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "noise": lambda path: path.write_bytes(Random(1).randbytes(path.stat().st_size)),
    "another page": lambda path: path.write_bytes(path.with_name(f"{DIGESTS[1]}.npz").read_bytes()),
    "another dtype": lambda path: put(path, make_page(0).view(np.int32)),
    "another shape": lambda path: put(path, make_page(0).swapaxes(0, 4)),
    "a pickle": lambda path: put(path, np.array([{}] * 3)),
    "a directory": put_directory,
    "a pipe": put_fifo,
}


@pytest.mark.parametrize("break_file", BROKEN.values(), ids=BROKEN)
def test_a_file_that_is_no_page(break_file: Callable[[Path], object], tmp_path: Path) -> None:
    """It is not loaded, and replaced, unless it is a directory."""
    files = make_files(tmp_path)
    files.save(DIGESTS[0], make_page(0))
    files.save(DIGESTS[1], make_page(1))
    path = tmp_path / f"{DIGESTS[0]}.npz"
    break_file(path)
    assert (files.load(DIGESTS[0]), files.num_broken) == (None, 1)
    assert files.count_leading(DIGESTS) == 0
    files.save(DIGESTS[0], make_page(0))
    assert files.count_leading(DIGESTS) == (0 if path.is_dir() else 2)
    loaded = make_files(tmp_path).load(DIGESTS[0])
    assert loaded is None if path.is_dir() else (loaded == make_page(0)).all()
    assert not list(tmp_path.glob("*.tmp"))


def test_any_bit_that_is_flipped(tmp_path: Path) -> None:
    """Either the page is right, or there is none."""
    files = make_files(tmp_path)
    files.save(DIGESTS[0], make_page(0))
    path, num_right = tmp_path / f"{DIGESTS[0]}.npz", 0
    size = path.stat().st_size
    for place in range(0, size, 7):
        flip(path, place)
        page = make_files(tmp_path).load(DIGESTS[0])
        num_right += page is not None
        assert page is None or (page == make_page(0)).all()
        flip(path, place)
    assert 0 < num_right < size // 14  # times and the like in headers


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    files = make_files(tmp_path / "folder")
    (tmp_path / "folder").rmdir()
    files.save(DIGESTS[0], make_page(0))
    assert (files.num_saved, files.load(DIGESTS[0])) == (0, None)


# Engines.


def test_broken_files_cost_a_recomputation(tmp_path: Path) -> None:
    """The second engine finds files, of which some are broken. Each engine replaces those that it reads."""
    first = make_sharing(tmp_path)
    check_sharing(first)
    paths = sorted(tmp_path.iterdir())
    assert first.files.num_saved == len(paths) > 30
    rng = Random(1)
    for path in rng.sample(paths, 15):
        BROKEN[rng.choice(("missing", "truncated", "zeros", "a bit of the page"))](path)
    second = make_sharing(tmp_path)
    check_sharing(second)
    assert min(second.files.num_loaded, second.files.num_saved, second.files.num_broken) > 0
    for _ in range(4):
        last = make_sharing(tmp_path)
        check_sharing(last)
        if not last.files.num_broken:
            break
    assert (last.files.num_broken, last.files.num_saved) == (0, 0)
    assert last.files.num_loaded > second.files.num_loaded
    assert sorted(tmp_path.iterdir()) == paths


def test_samples_fork_where_files_have_the_whole_prompt(tmp_path: Path) -> None:
    engine, (prompt, params) = make_sharing(tmp_path), make_asks(6)[5]
    prompt = prompt[: len(prompt) // 4 * 4 + 1]
    for _ in range(2):
        requests = engine.add_samples(prompt, params, 3)
        list(engine.stream())
        answers = [answer_densely(prompt, request.params) for request in requests]
        assert [request.output for request in requests] == answers
        assert engine.manager.reset_prefix_cache()
    assert engine.files.num_loaded > 0


def test_an_engine_short_of_pages(tmp_path: Path) -> None:
    for _ in range(2):
        engine = make_sharing(tmp_path, num_pages=24)
        check_sharing(engine, 12)
    assert engine.files.num_loaded > 20
    assert engine.manager.stats().num_evicted_pages > 0


def test_hybrids_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^page files: got a hybrid"):
        sharing.SharingEngine(HYBRID_WEIGHTS, tmp_path, **LIMITS)


def test_another_process_hits_what_this_one_has_computed(tmp_path: Path) -> None:
    check_sharing(make_sharing(tmp_path))
    await_programs([Program("page_files_process.py", str(tmp_path), "100", num_devices=2)], timeout=300)


@pytest.mark.slow
def test_two_processes_with_one_folder_at_once(tmp_path: Path) -> None:
    await_programs([Program("page_files_process.py", str(tmp_path), "0", num_devices=i) for i in (1, 2)], timeout=500)
