"""`pagepool doctor`: what it finds, what it says where something is wrong, and that it needs no extra."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from sources import run_python

from pagepool._core import build_flags
from pagepool.doctor import command, environment
from pagepool.doctor.environment import (
    Problem,
    inspect_core,
    inspect_engines,
    inspect_extras,
    inspect_jax,
    inspect_versions,
)
from pagepool.doctor.self_test import Twins, run_self_test
from pagepool.errors import IntegrityError, PagePoolError

Versions = Callable[..., None]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Versions:
    """Let distributions have these versions, and no others be installed; and no engine be asked for."""
    for name in ("PAGEPOOL_VLLM", "PAGEPOOL_EASYDEL", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)

    def install(**versions: str | None) -> None:
        monkeypatch.setattr(environment, "find_version", versions.get)

    return install


@pytest.fixture
def problems() -> list[Problem]:
    return []


def test_the_json_is_the_diagnosis() -> None:
    """jax starts in another process, and so takes no device here."""
    code = "import sys; from pagepool.doctor.command import main; main(['--json']); sys.exit(int('jax' in sys.modules))"
    process = run_python("-c", code, timeout=300)
    assert process.returncode == 0, process.stderr
    diagnosis = json.loads(process.stdout)
    assert [*diagnosis] == ["versions", "core", "self_test", "extras", "jax", "engines", "problems"]
    assert diagnosis["core"] == build_flags()
    assert diagnosis["self_test"]["passed"]
    if diagnosis["jax"] is not None:
        assert diagnosis["jax"]["devices"][0]["memory_kinds"]
    assert command.describe(diagnosis).startswith("pagepool   ")


def test_without_click() -> None:
    """The other commands then name the extra, see test_command_manners."""
    find = "from pagepool.doctor import environment; find = environment.find_version"
    no_jax = "environment.find_version = lambda name: None if name == 'jax' else find(name)"
    hidden = f"import sys; sys.modules['click'] = None; {find}; {no_jax}"
    process = run_python("-c", f"{hidden}; from pagepool.replay import cli; sys.argv[1:] = ['doctor']; cli.main()")
    assert process.returncode == 1
    assert "\nself-test  passed in " in process.stdout


def test_the_group_lists_the_command_and_passes_it_on() -> None:
    pytest.importorskip("click")
    pytest.importorskip("rich")
    pytest.importorskip("msgspec")
    from command_line import invoke

    assert "doctor  Check the installation." in invoke("--help").output
    assert invoke("doctor", "--no-such-option").exit_code == 2


def test_the_core_tells_how_it_was_built() -> None:
    flags = build_flags()
    assert flags["free_threaded"] == bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
    assert (flags["sanitizer"] == "address") == ("asan" in os.environ.get("LD_PRELOAD", ""))
    assert flags["debug"] or not flags["sanitizer"]
    assert flags["guards"]
    assert flags["compiler"]


class TestEnvironment:
    def test_versions(self, monkeypatch: pytest.MonkeyPatch, installed: Versions, problems: list[Problem]) -> None:
        versions = inspect_versions(problems)
        assert versions["python"].startswith(f"{sys.version_info[0]}.{sys.version_info[1]}.")
        inspect_core(problems)
        assert problems == []
        installed(pagepool="0.0.1")
        inspect_versions(problems)
        monkeypatch.setattr(environment, "build_flags", lambda: build_flags() | {"guards": False})
        inspect_core(problems)
        other, guards = (problem.what for problem in problems)
        assert other.startswith("pagepool 0.0.1 is installed, but ")
        assert guards == "the core was built without guards"

    def test_extras(self, monkeypatch: pytest.MonkeyPatch, installed: Versions, problems: list[Problem]) -> None:
        """Missing packages are no problem, those that are too old or broken are; extras of developers are left out."""
        requirements = [
            "numpy>=1.26",
            'click>=8.1; extra == "replay"',
            'ray>=2.40; python_version < "3.14" and extra == "fleet"',
            'pagepool[replay]; extra == "plan"',
            "no-such-package>=3; extra == 'plan'",
            'pytest>=8; extra == "test"',
        ]
        monkeypatch.setattr(environment, "requires", lambda _: requirements)
        installed(click="8.0.9", ray="2.40", **{"no-such-package": "3.0.1"})
        monkeypatch.setitem(environment.MODULES, "click", "json")
        monkeypatch.setitem(environment.MODULES, "ray", "json")
        extras = inspect_extras(problems)
        assert extras == {"replay": {"click": "8.0.9"}, "plan": {"no-such-package": "3.0.1"}, "fleet": {"ray": "2.40"}}
        old, broken = problems
        assert old.what == "click 8.0.9 is older than 8.1, which pagepool[replay] needs"
        assert broken.what.startswith("no-such-package 3.0.1 cannot be imported: ModuleNotFoundError(")
        problems.clear()
        installed()
        assert inspect_extras(problems)["replay"] == {"click": None}
        monkeypatch.undo()
        monkeypatch.setattr(environment, "requires", lambda _: environment.version("no-such-distribution"))
        assert inspect_extras(problems) == {}
        assert problems == []


class TestJax:
    def test_it_takes_no_memory_in_advance(self, monkeypatch: pytest.MonkeyPatch, installed: Versions) -> None:
        installed()
        assert inspect_jax([]) is None
        installed(jax="9.9")
        code = "import os; print('{\"backend\": \"' + os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'] + '\", \"devices\": []}')"
        monkeypatch.setattr(environment, "LIST_DEVICES", code)
        assert inspect_jax([]) == {"version": "9.9", "backend": "false", "devices": []}

    def test_one_that_is_too_old(self, monkeypatch: pytest.MonkeyPatch, installed: Versions, problems: list[Problem]) -> None:
        """The extra's own line says the same of other packages."""
        installed(jax="0.5.3")
        monkeypatch.setattr(environment, "requires", lambda _: ['jax>=0.6; extra == "jax"'])
        monkeypatch.setattr(environment, "_run_python", lambda code: ('{"backend": "cpu", "devices": []}', None))
        assert inspect_extras(problems) == {"jax": {"jax": "0.5.3"}}
        assert inspect_jax(problems) == {"version": "0.5.3", "backend": "cpu", "devices": []}
        [old] = problems
        assert old.what.startswith(
            "jax 0.5.3 is older than 0.6.0 and refused, since on CPUs, programs that older versions read "
        )
        assert old.remedy == "pip install --upgrade 'pagepool[jax]'"
        installed(jax="0.6.0")
        inspect_jax(problems)
        assert problems == [old]

    @pytest.mark.parametrize(
        ("code", "fault"),
        [
            ("raise RuntimeError('no device')", "RuntimeError: no device"),
            ("import os; os.abort()", "the process ended with exit code -6"),
            ("import time; time.sleep(60)", "nothing happened for 1 seconds"),
        ],
    )
    def test_one_that_does_not_start(
        self, code: str, fault: str, monkeypatch: pytest.MonkeyPatch, installed: Versions, problems: list[Problem]
    ) -> None:
        installed(jax="9.9")
        monkeypatch.setattr(environment, "LIST_DEVICES", code)
        monkeypatch.setattr(environment, "SECONDS", 1 if "sleep" in code else 120)
        assert inspect_jax(problems) == {"version": "9.9"}
        assert [problem.what for problem in problems] == [f"jax 9.9 does not start: {fault}"]


class TestEngines:
    def test_engines_that_nobody_asked_for_are_no_problem(self, installed: Versions, problems: list[Problem]) -> None:
        installed()
        found = inspect_engines(problems, True)
        assert [(item["version"], item["is_on"], item["is_replaced"]) for item in found.values()] == [(None, False, None)] * 2
        installed(vllm="0.33.7", easydel="0.3.0")
        found = inspect_engines(problems)
        assert [(item["is_supported"], item["is_replaced"]) for item in found.values()] == [(True, None)] * 2
        assert problems == []

    @pytest.mark.parametrize("version", [None, "0.34.0", "0.3"])
    def test_one_that_is_asked_for_and_not_supported(
        self, version: str | None, monkeypatch: pytest.MonkeyPatch, installed: Versions, problems: list[Problem]
    ) -> None:
        installed(vllm=version)
        monkeypatch.setenv("PAGEPOOL_VLLM", "known")
        monkeypatch.setattr(environment, "entry_points", lambda group: [SimpleNamespace(name="pagepool")])
        assert not inspect_engines(problems)["vllm"]["is_supported"]
        assert [problem.remedy for problem in problems] == ["pip install 'vllm==0.33.*', or unset PAGEPOOL_VLLM"]

    @pytest.mark.parametrize(
        ("value", "what", "text"),
        [
            ("0", [], "; prefix caching is off for models with recurrent layers"),
            (
                "1",
                ["PAGEPOOL_EASYDEL_RECURRENT_HITS is on: prefix hits of models with recurrent layers start from a zero state"],
                "",
            ),
            (
                "x",
                ["PAGEPOOL_EASYDEL_RECURRENT_HITS: got 'x', allowed: 1, true, yes, on; 0, false, no, off or nothing"],
                "; prefix caching is off for models with recurrent layers",
            ),
        ],
    )
    def test_hits_of_recurrent_layers(
        self,
        value: str,
        what: list[str],
        text: str,
        monkeypatch: pytest.MonkeyPatch,
        installed: Versions,
        problems: list[Problem],
    ) -> None:
        installed(easydel="0.3.0")
        monkeypatch.setenv("PAGEPOOL_EASYDEL", "1")
        monkeypatch.setenv("PAGEPOOL_EASYDEL_RECURRENT_HITS", value)
        monkeypatch.setattr(environment, "_run_python", lambda code: ("", None))
        line = command._describe_engine(inspect_engines(problems)["easydel"])
        assert line.endswith(f"PAGEPOOL_EASYDEL is on; pagepool takes its allocator's place{text}")
        assert [problem.what for problem in problems] == what

    def test_one_that_keeps_a_part(self, monkeypatch: pytest.MonkeyPatch, installed: Versions, problems: list[Problem]) -> None:
        """In a version that was not tested, or one that somebody patched."""
        installed(vllm="0.34.0")
        monkeypatch.setenv("PAGEPOOL_VLLM", "1")
        monkeypatch.setattr(environment, "entry_points", lambda group: [SimpleNamespace(name="pagepool")])
        monkeypatch.setattr(environment, "_run_python", lambda code: ("a log\nslots: KVCacheManager: another source\n", None))
        text = command._describe_engine(inspect_engines(problems)["vllm"])
        assert text.startswith("vLLM       0.34.0, not tested; supported: 0.31.*, ")
        assert [problem.what for problem in problems] == [
            "vLLM 0.34.0 keeps parts of its own: slots: KVCacheManager: another source"
        ]

    @pytest.mark.parametrize(("value", "text"), [("off", ""), ("all", "; hints of requests are heard: all"), ("yes", "")])
    def test_hints(
        self, monkeypatch: pytest.MonkeyPatch, installed: Versions, problems: list[Problem], value: str, text: str
    ) -> None:
        installed(vllm="0.33.0")
        monkeypatch.setenv("PAGEPOOL_VLLM", "1")
        monkeypatch.setenv("PAGEPOOL_VLLM_HINTS", value)
        monkeypatch.setattr(environment, "entry_points", lambda group: [SimpleNamespace(name="pagepool")])
        monkeypatch.setattr(environment, "_run_python", lambda code: ("", None))
        line = command._describe_engine(inspect_engines(problems)["vllm"])
        assert line.endswith(f"PAGEPOOL_VLLM is on; pagepool takes its allocator's place{text}")
        assert len(problems) == (value == "yes")

    def test_a_plug_in_that_vllm_does_not_load(
        self, monkeypatch: pytest.MonkeyPatch, installed: Versions, problems: list[Problem]
    ) -> None:
        installed(vllm="0.33.0")
        monkeypatch.setenv("PAGEPOOL_VLLM", "1")
        monkeypatch.setenv("VLLM_PLUGINS", "one,other")
        monkeypatch.setattr(environment, "entry_points", lambda group: [])
        monkeypatch.setattr(environment, "_run_python", lambda code: ("", None))
        assert inspect_engines(problems)["vllm"]["is_replaced"]
        assert [problem.what for problem in problems] == [
            "vLLM does not see pagepool's plug-in",
            "VLLM_PLUGINS=one,other leaves pagepool out",
        ]

    def test_a_value_that_is_none(self, monkeypatch: pytest.MonkeyPatch, installed: Versions, problems: list[Problem]) -> None:
        installed()
        monkeypatch.setenv("PAGEPOOL_EASYDEL", "perhaps")
        assert not inspect_engines(problems)["easydel"]["is_on"]
        assert problems[0].what.startswith("PAGEPOOL_EASYDEL: got 'perhaps', allowed: 1, ")

    def test_an_engine_that_refuses(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problems: list[Problem]) -> None:
        """Another version is imported than the installed one."""
        (tmp_path / "vllm.py").write_text("__version__ = '0.1'")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(environment, "find_version", {"vllm": "0.33.0"}.get)
        monkeypatch.delenv("PAGEPOOL_VLLM", raising=False)
        found = inspect_engines(problems, True)["vllm"]
        assert found["is_replaced"] is False
        assert command._describe_engine(found) == "vLLM       0.33.0, supported; PAGEPOOL_VLLM is off; refuses pagepool"
        refusal = "vLLM refuses pagepool: pagepool.errors.CompatError: vLLM 0.1 differs from the tested versions"
        assert [problem.what.startswith(refusal) for problem in problems] == [True]


class TestSelfTest:
    @pytest.mark.parametrize("name", ["_manager", "_batch"])
    def test_it_notices_a_request_that_is_not_released(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        release = Twins._release

        def release_one(self: Any, row: int) -> None:
            if name == "_batch":
                self._batch.release([row])
                self._requests.pop(row)
            else:
                release(self, row)
                self._batch._manager.page_pool.get_new_pages(1)

        monkeypatch.setattr(Twins, "_release", release_one)
        with pytest.raises(PagePoolError):
            run_self_test()

    def test_it_notices_an_entry_that_the_journal_lost(self) -> None:
        twins = Twins(0)
        twins.admit()
        twins.check()
        twins._told.pop()
        with pytest.raises(IntegrityError, match=r"^the journal: got "):
            twins.check()

    def test_a_failure_is_a_problem(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setattr(command, "run_self_test", Mock(side_effect=IntegrityError("page 3 is nobody's")))
        for name, found in {"jax": {"version": "9.9"}, "engines": {}, "extras": {}}.items():
            monkeypatch.setattr(environment, f"inspect_{name}", Mock(return_value=found))
        assert command.main([]) == 1
        output = capsys.readouterr().out
        assert '\n1 problem:\n- the self-test failed: IntegrityError("page 3 is nobody\'s")\n' in output
        assert "extras unknown" in output
        assert "jax        9.9, does not start" in output
