"""The adapter of EasyDeL on a package of its own making: where classes are replaced, and every reason to refuse."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from fake_easydel import write_engine
from test_package import INSTALLED, on_the_wheel

import pagepool
from pagepool.compat import easydel
from pagepool.compat.easydel import ENGINE, PLACES, REPLACEMENTS, SIGNATURES
from pagepool.compat.import_hook import AfterImport
from pagepool.errors import CompatError


def pop_modules() -> dict[str, ModuleType]:
    """Take what is imported of the package out of sys.modules."""
    return {name: sys.modules.pop(name) for name in list(sys.modules) if f"{name}.".startswith("easydel.")}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the package, first in the path. What other tests imported of the true one comes back afterwards."""
    modules = pop_modules()
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv(easydel.VARIABLE, raising=False)
    write_engine(tmp_path)
    yield tmp_path
    easydel.uninstall()
    pop_modules()
    sys.modules.update(modules)


def engine_module(place: str) -> ModuleType:
    return importlib.import_module(f"{ENGINE}.{place}".rstrip("."))


def edit(folder: Path, place: str, old: str, new: str) -> None:
    path = folder.joinpath(*ENGINE.split("."), *place.split("."))
    path = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def places() -> list[tuple[str, str]]:
    return [(name, place) for name, places in PLACES.items() for place in places]


def modules_of_classes() -> set[str]:
    return {getattr(engine_module(place), name).__module__.split(".")[0] for name, place in places()}


def parameters_of(method: Callable[..., object]) -> list[inspect.Parameter]:
    return [parameter.replace(annotation=parameter.empty) for parameter in inspect.signature(method).parameters.values()]


@pytest.mark.parametrize(("name", "member"), [(name, member) for name, members in SIGNATURES.items() for member in members])
def test_ours_takes_what_the_engines_takes(folder: Path, name: str, member: str) -> None:
    """The same parameters, and such as may be left out. Methods of compiled classes tell no signature."""
    engines = inspect.getattr_static(getattr(engine_module(PLACES[name][0]), name), member)
    ours = inspect.getattr_static(REPLACEMENTS[name], member)
    if inspect.isfunction(ours):
        expected = parameters_of(engines)
        names = {parameter.name for parameter in expected}
        assert [p for p in parameters_of(ours) if p.name in names or p.default is p.empty] == expected
    else:
        assert isinstance(ours, property) == isinstance(engines, property)


def test_all_places_get_ours_and_get_back_the_engines(folder: Path) -> None:
    easydel.install()
    assert all(getattr(engine_module(place), name) is getattr(pagepool, name) for name, place in places())
    assert easydel.is_installed()
    easydel.uninstall()
    assert modules_of_classes() == {"easydel"}
    assert not easydel.is_installed()


def test_other_places_and_names_are_found_too(folder: Path) -> None:
    (folder / "easydel" / "serving.py").write_text(
        f"from {ENGINE}.core import PagePool as Pool\nfrom {ENGINE}.page_table import *\n"
    )
    serving = importlib.import_module("easydel.serving")
    easydel.install()
    assert (serving.Pool, serving.PageTable) == (pagepool.PagePool, pagepool.PageTable)
    easydel.uninstall()
    assert (serving.Pool, serving.PageTable) == (engine_module("core").PagePool, engine_module("page_table").PageTable)


def test_modules_that_are_imported_later_follow(folder: Path) -> None:
    (folder / "easydel" / "late.py").write_text(f"from {ENGINE}.core.manager import CacheManager\n")
    easydel.install()
    late = importlib.import_module("easydel.late")
    assert late.CacheManager is pagepool.CacheManager
    easydel.uninstall()
    assert late.CacheManager is engine_module("core.manager").CacheManager


def test_twice_is_as_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    easydel.uninstall()
    easydel.install()
    assert not caplog.messages
    easydel.install()
    assert caplog.messages == ["EasyDeL allocates with pagepool already: it was installed before"]
    assert modules_of_classes() == {"pagepool"}
    easydel.uninstall()
    easydel.uninstall()
    assert modules_of_classes() == {"easydel"}


def test_as_a_context_manager(folder: Path) -> None:
    with easydel.installed():
        assert modules_of_classes() == {"pagepool"}
    with pytest.raises(KeyError), easydel.installed():
        raise KeyError
    assert modules_of_classes() == {"easydel"}
    easydel.install()
    with easydel.installed():
        pass
    assert easydel.is_installed()


def test_an_object_that_was_made_meanwhile_lives_on(folder: Path) -> None:
    with easydel.installed():
        pool = engine_module("core").PagePool(8, True)
    assert isinstance(pool, pagepool.PagePool)
    assert pool.get_num_free_pages() == 7
    easydel.install()  # ours may live: only those of the engine's own classes would meet others


def check_refused(message: str) -> None:
    with pytest.raises(CompatError, match=message):
        easydel.install()
    assert not easydel.is_installed()


def test_without_the_engine(folder: Path) -> None:
    sys.modules["easydel"] = None  # type: ignore[assignment]
    check_refused(r"EasyDeL is not installed; expected: easydel==0\.3\.0")


def test_an_engine_that_lacks_a_module_says_which(folder: Path) -> None:
    (folder / "easydel" / "__init__.py").write_text("import no_such_module\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        easydel.install()


@pytest.mark.parametrize("version", ["0.2.9", "0.3.0.1", "0.4.0", ""])
def test_an_unknown_version(folder: Path, version: str) -> None:
    write_engine(folder, version)
    check_refused(rf"version: got {version}, expected 0\.3\.0")
    assert ENGINE not in sys.modules


def test_another_signature(folder: Path) -> None:
    edit(folder, "core.manager", "data_parallel_size=None)", "data_parallel_size=None, sink_tokens=0)")
    edit(folder, "page_table", "num_reqs)", "num_requests)")
    edit(folder, "core.page_pool", "    def touch", "    def pin(self, pages): ...\n    def touched")
    check_refused(
        r"CacheManager\.allocate_slots: got .*sink_tokens=0\), expected .*; CacheManager\.get_computed_pages: .*"
        r"PagePool\.pin: got \(self, pages\), expected nothing; PagePool\.touch: got nothing, expected \(self, pages\); .*"
        r"PageTable\.commit: got \(self, num_requests\), expected \(self, num_reqs\)"
    )
    assert modules_of_classes() == {"easydel"}


def test_a_property_that_became_a_method(folder: Path) -> None:
    edit(folder, "core.manager", "    @property\n", "")
    check_refused(r"CacheManager\.usage: got \(self\), expected property")


@pytest.mark.parametrize(("name", "place"), places())
def test_a_class_that_is_gone(folder: Path, name: str, place: str) -> None:
    engine_module("")
    delattr(engine_module(place), name)
    check_refused(rf"{place}\.{name}: got None, expected the class that {ENGINE}\.{PLACES[name][0]} defines")


@pytest.mark.parametrize(("name", "place"), places())
def test_a_class_that_somebody_replaced(folder: Path, name: str, place: str) -> None:
    setattr(engine_module(place), name, type(name, (), {}))
    check_refused(rf"{place}\.{name}: got <class '.*'>, expected the class that {ENGINE}\.{PLACES[name][0]} defines")


def test_an_engine_that_is_built_already(folder: Path) -> None:
    manager = engine_module("core").CacheManager(8, [], 64)
    tables = [engine_module("page_table").PageTable(4, 4, 4) for _ in range(2)]
    check_refused("EasyDeL's own allocator, got 1 CacheManager, 2 PageTable; install before that, or drop it")
    assert modules_of_classes() == {"easydel"}
    manager.itself, manager.tables = manager, tables  # a cycle, which only a collection frees
    del manager, tables
    easydel.install()


def test_a_failure_leaves_nothing_installed(folder: Path) -> None:
    class Frozen(ModuleType):
        def __setattr__(self, name: str, value: object) -> None:
            raise KeyboardInterrupt

    engine_module("")
    frozen = Frozen("easydel.frozen")
    vars(frozen)["PageTable"] = engine_module("page_table").PageTable
    sys.modules["easydel.frozen"] = frozen
    with pytest.raises(KeyboardInterrupt):
        easydel.install()
    assert modules_of_classes() == {"easydel"}
    assert not easydel.is_installed()


# By the environment.


@pytest.fixture
def python(folder: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs code in a new process that sees the package, and pagepool where it is now, with the variable set to `value`."""

    def run(code: str, value: str | None) -> subprocess.CompletedProcess[str]:
        path = str(folder) if INSTALLED else os.pathsep.join([str(folder), str(Path(pagepool.__file__).parents[1])])
        env = {name: text for name, text in os.environ.items() if name not in (easydel.VARIABLE, "PYTHONSAFEPATH")}
        env |= {"PYTHONPATH": path} | ({} if value is None else {easydel.VARIABLE: value})
        return subprocess.run([sys.executable, "-c", code], env=env, cwd=folder, capture_output=True, text=True, timeout=120)

    return run


SHOW = f"import sys; from {ENGINE}.scheduler import scheduler; print(scheduler.CacheManager.__module__)"
HOME = f"{ENGINE}.core.manager"


@pytest.mark.parametrize(("value", "home"), [(None, HOME), ("", HOME), ("0", HOME), ("1", "pagepool.manager")])
def test_the_variable(python: Callable[..., subprocess.CompletedProcess[str]], value: str | None, home: str) -> None:
    process = python(f"import pagepool; {SHOW}", value)
    assert (process.stdout.strip(), process.stderr) == (home, "")


def test_nothing_is_loaded_without_the_variable(python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    assert python("import sys, pagepool; print([name for name in sys.modules if 'compat.' in name])", None).stdout == "[]\n"


@on_the_wheel
def test_the_variable_alone_does_on_the_wheel(python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    assert python(SHOW, "1").stdout.strip() == "pagepool.manager"
    assert python(SHOW, "0").stdout.strip() == HOME
    assert python("import sys; print('pagepool' in sys.modules)", None).stdout.strip() == "False"


@pytest.mark.parametrize("value", ["yes", "2", "true"])
def test_a_wrong_value_stops_the_engine(python: Callable[..., subprocess.CompletedProcess[str]], value: str) -> None:
    process = python(f"import pagepool; {SHOW}", value)
    assert process.returncode == 1
    assert f"CompatError: PAGEPOOL_EASYDEL: got '{value}', allowed: 0 or 1" in process.stderr
    assert python("import pagepool; import json", value).returncode == 0


def test_a_wrong_engine_is_not_started_with_the_variable(
    folder: Path, python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    write_engine(folder, "0.4.0")
    process = python(f"import pagepool; {SHOW}", "1")
    assert process.returncode == 1
    assert "CompatError: EasyDeL's version: got 0.4.0, expected 0.3.0" in process.stderr


def test_the_variable_with_the_engine_imported_before(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(easydel.VARIABLE, "1")
    engine_module("")
    easydel.install_on_import()
    assert easydel.is_installed()


def test_an_import_that_failed_is_tried_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(easydel.VARIABLE, "1")
    easydel.install_on_import()
    write_engine(folder, "0.4.0")
    for _ in range(2):
        with pytest.raises(CompatError):
            engine_module("")
    pop_modules()
    write_engine(folder)
    importlib.invalidate_caches()
    engine_module("")
    assert easydel.is_installed()


def test_two_hooks_of_one_module_both_act(folder: Path) -> None:
    names: list[str] = []
    for name in ("first", "second"):
        sys.meta_path.insert(0, AfterImport("easydel", lambda name=name: names.append(name)))
    importlib.import_module("easydel")
    assert names == ["first", "second"]


def test_the_hook_acts_on_its_module_alone_and_keeps_its_loader(folder: Path) -> None:
    names: list[str] = []
    sys.meta_path.insert(0, AfterImport("easydel.inference", lambda: names.append("easydel.inference")))
    importlib.import_module("easydel")
    assert names == []
    module = importlib.import_module("easydel.inference")
    assert names == ["easydel.inference"]
    assert module.__spec__ is not None
    assert type(module.__spec__.loader).__name__ == "SourceFileLoader"
    sys.meta_path.insert(0, AfterImport("easydel.nowhere", list))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("easydel.nowhere")
