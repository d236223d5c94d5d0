"""The README's program: pasted into a file and into a Python prompt, it prints what its comments say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from sources import ROOT

[PROGRAM] = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
OUTPUT = re.findall(r"^print\(.*\)  # ([^:\n]*)", PROGRAM, re.MULTILINE)


@pytest.mark.parametrize("is_prompt", [False, True], ids=["file", "prompt"])
def test_it_prints_what_it_says(tmp_path: Path, is_prompt: bool) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    arguments, text = (["-i", "-q"], PROGRAM) if is_prompt else (["program.py"], None)
    command = [sys.executable, *arguments]
    process = subprocess.run(command, cwd=tmp_path, input=text, check=True, capture_output=True, text=True, timeout=120)
    assert "Traceback" not in process.stderr
    assert process.stdout.splitlines() == OUTPUT
