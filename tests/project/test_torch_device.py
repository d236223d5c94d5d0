"""What a torch engine sends to its device, measured on the CPU: that the study runs, and its kernel reads the right lists."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")


def test_the_study_runs_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    from bench.studies import torch_device

    torch_device.main(["--device", "cpu", "--quick"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["32", "the", "2", "lists"]
    assert lines[-1].endswith("all as NumPy has them")
