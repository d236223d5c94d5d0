"""The adapter of EasyDeL on a fake package: replaced places, and every reason to refuse."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from multiprocessing import spawn
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fake_easydel import HOME, SHOW, pop_modules, run_python, without_easydel, write_engine

import pagepool
from pagepool.compat import easydel
from pagepool.compat.easydel import ENGINE, PLACES, RECURRENT_VARIABLE, REPLACEMENTS, SCHEDULER, SIGNATURES
from pagepool.compat.import_hook import AfterImport
from pagepool.errors import CompatError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make a folder with the package, first in the path. Modules of the real package are restored afterwards."""
    modules = pop_modules()
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(spawn, "get_preparation_data", spawn.get_preparation_data)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv(easydel.VARIABLE, raising=False)
    monkeypatch.delenv(RECURRENT_VARIABLE, raising=False)
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


def test_ours_takes_what_the_engines_takes(folder: Path) -> None:
    """The same parameters, or optional ones. Methods of compiled classes have no signature."""
    for name, member in ((name, member) for name, members in SIGNATURES.items() for member in members):
        engines = inspect.getattr_static(getattr(engine_module(PLACES[name][0]), name), member)
        ours = inspect.getattr_static(REPLACEMENTS[name], member)
        if inspect.isfunction(ours):
            expected = parameters_of(engines)
            names = {parameter.name for parameter in expected}
            taken = [p for p in parameters_of(ours) if p.name in names or (p.default is p.empty and p.kind != p.VAR_KEYWORD)]
            assert taken == expected, f"{name}.{member}"
        else:
            assert isinstance(ours, property) == isinstance(engines, property), f"{name}.{member}"


def test_names_for_programs_of_the_engine_alone() -> None:
    assert {*easydel.__all__} & {*pagepool.__all__} == set()
    base = easydel.SingleTypeCacheManager
    managers = {cls.__name__ for cls in vars(easydel).values() if isinstance(cls, type) and issubclass(cls, base)}
    assert len(managers) == 5
    assert managers <= {*easydel.__all__}
    assert not [name for name in (*managers, "cdiv", "get_kv_cache_coordinator") if hasattr(pagepool, name)]


def test_all_places_get_ours_and_get_back_the_engines(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Twice is as once. An error ends the context; else it leaves what was there before, see `test_the_variable`."""
    finders = [*sys.meta_path]
    easydel.uninstall()
    easydel.install()
    assert not caplog.messages
    easydel.install()
    assert caplog.messages == ["EasyDeL already allocates with pagepool"]
    assert all(getattr(engine_module(place), name) is REPLACEMENTS[name] for name, place in places())
    assert all(issubclass(ours, getattr(pagepool, name)) for name, ours in REPLACEMENTS.items())
    assert easydel.is_installed()
    for _ in range(2):
        easydel.uninstall()
        assert modules_of_classes() == {"easydel"}
        assert not easydel.is_installed()
        assert sys.meta_path == finders
    with pytest.raises(KeyError), easydel.installed():
        raise KeyError
    assert modules_of_classes() == {"easydel"}


def test_modules_that_are_imported_later_and_other_names_follow(folder: Path) -> None:
    (folder / "easydel" / "early.py").write_text(f"from {ENGINE}.core import PagePool as Pool\n")
    (folder / "easydel" / "late.py").write_text(f"from {ENGINE}.page_table import *\n")
    early = importlib.import_module("easydel.early")
    easydel.install()
    late = importlib.import_module("easydel.late")
    assert (early.Pool, late.PageTable) == (pagepool.PagePool, pagepool.PageTable)
    easydel.uninstall()
    assert (early.Pool, late.PageTable) == (engine_module("core").PagePool, engine_module("page_table").PageTable)


def check_refused(message: str) -> None:
    with pytest.raises(CompatError, match=message):
        easydel.install()
    assert not easydel.is_installed()


def test_without_the_engine(folder: Path) -> None:
    sys.modules["easydel"] = None  # type: ignore[assignment]
    check_refused(r"EasyDeL: got none installed, allowed: easydel==0\.3\.0")


def test_an_engine_that_lacks_a_module_says_which(folder: Path) -> None:
    (folder / "easydel" / "__init__.py").write_text("import no_such_module\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        easydel.install()


@pytest.mark.parametrize("version", ["0.2.9", "0.3.0.1", "0.4.0", ""])
def test_an_unknown_version(folder: Path, version: str) -> None:
    write_engine(folder, version)
    check_refused(rf"version: got {version}, allowed: 0\.3\.0")
    assert ENGINE not in sys.modules


def test_another_signature(folder: Path) -> None:
    edit(folder, "core.manager", "data_parallel_size=None)", "data_parallel_size=None, sink_tokens=0)")
    edit(folder, "page_table", "num_reqs)", "num_requests)")
    edit(folder, "core.page_pool", "    def touch", "    def pin(self, pages): ...\n    def touched")
    edit(folder, "core.manager", "    @property\n", "")
    check_refused(
        r"CacheManager\.allocate_slots: got .*sink_tokens=0\), allowed: .*; CacheManager\.get_computed_pages: .*"
        r"CacheManager\.usage: got \(self\), allowed: property; .*"
        r"PagePool\.pin: got \(self, pages\), allowed: nothing; PagePool\.touch: got nothing, allowed: \(self, pages\); .*"
        r"PageTable\.commit: got \(self, num_requests\), allowed: \(self, num_reqs\)"
    )
    assert modules_of_classes() == {"easydel"}


@pytest.mark.parametrize(("name", "place"), places())
def test_a_class_that_is_gone_or_another(folder: Path, name: str, place: str) -> None:
    for value in (None, type(name, (), {})):
        setattr(engine_module(place), name, value)
        check_refused(rf"{place}\.{name}: got (None|<class '.*'>), allowed: the class that {ENGINE}\.{PLACES[name][0]} defines")


def test_an_engine_that_is_built_already(folder: Path) -> None:
    manager = engine_module("core").CacheManager(8, [], 64)
    tables = [engine_module("page_table").PageTable(4, 4, 4) for _ in range(2)]
    check_refused("EasyDeL's own allocator, got 1 CacheManager, 2 PageTable; install first, or drop the engine")
    assert modules_of_classes() == {"easydel"}
    manager.itself, manager.tables = manager, tables  # a cycle, which only garbage collection frees
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


# Modules that are reloaded.

HOMES = sorted({places[0] for places in PLACES.values()})
EDITED = "\n    marker = 1\n"


@pytest.mark.parametrize("place", HOMES)
def test_the_classes_of_a_reloaded_module_are_those_that_come_back(folder: Path, place: str) -> None:
    easydel.install()
    edit(folder, place, "    def __init__", f"{EDITED}    def __init__")
    importlib.reload(engine_module(place))
    assert modules_of_classes() == {"pagepool"}
    easydel.uninstall()
    for name, elsewhere in places():
        assert hasattr(getattr(engine_module(elsewhere), name), "marker") == (PLACES[name][0] == place)
        assert getattr(engine_module(elsewhere), name) is getattr(engine_module(PLACES[name][0]), name)
    easydel.install()
    assert easydel.is_installed()


OTHER_VERSION = "import easydel\neasydel.__version__ = '0.4.0'\nclass PagePool"
RELOADS: dict[str, tuple[str, str, str, str]] = {
    "another signature": ("core.page_pool", "touch(self, pages)", "touch(self, pages, at)", "touch: got .*at.*, allowed"),
    "no class": ("core.manager", "class CacheManager", "class Other", r"core\.manager\.CacheManager: got None, allowed: "),
    "no class where it is used": ("scheduler.scheduler", "CacheManager\n", "CacheManager as Other\n", "got None, allowed"),
    "another version": ("core.page_pool", "class PagePool", OTHER_VERSION, r"version: got 0\.4\.0, allowed: 0\.3\.0"),
    "an engine": ("page_table", "class Multi", "table = PageTable(4, 4, 4)\nclass Multi", "allocator, got 1 PageTable"),
}
"""Modules that are edited and reloaded: what is replaced in them, and the error."""


@pytest.mark.parametrize("name", RELOADS)
def test_a_reloaded_module_that_is_wrong_uninstalls(folder: Path, name: str) -> None:
    """No place has pagepool's class then."""
    place, old, new, message = RELOADS[name]
    easydel.install()
    module = engine_module(place)
    edit(folder, place, old, new)
    vars(module).pop("CacheManager", None)  # a reload keeps what is not defined again
    with pytest.raises(CompatError, match=message):
        importlib.reload(module)
    assert not [place for cls, place in places() if getattr(engine_module(place), cls, None) is getattr(pagepool, cls)]


# Recurrent layers.


def make_runner(config: Any, views: list[Any] | None = None) -> Any:
    """Return a runner of a model, with the caches of its layers, or with none while they are released."""
    cache = None if views is None else SimpleNamespace(views=views)
    return SimpleNamespace(model=SimpleNamespace(config=config), executor_manager=SimpleNamespace(kv_pages=cache))


def of_types(*layer_types: Any) -> Any:
    return SimpleNamespace(layer_types=layer_types)


def view(name: str, base: type = object, **fields: Any) -> Any:
    cls = type(name, (base,), {"__init__": lambda self: vars(self).update(fields)})
    return cls()


STATE = view("RecurrentCacheView", conv_state=None, recurrent_state=None)
PAGES = view("RaggedPagesCacheView", kv_pages=1)
RECURRENT = {
    "linear": (of_types("linear_attention", "full_attention"), None, 1),
    "delta rule": (of_types("kda_linear_attention", "full_attention"), None, 1),
    "hybrid": (of_types("hybrid", "hybrid"), None, 2),
    "parallel": (of_types("full_attention", "parallel_hybrid"), None, 1),
    "without attention": (of_types("mamba", "mamba"), None, 2),
    "a member of an enum": (of_types(SimpleNamespace(value="LINEAR_ATTENTION")), None, 1),
    "of the text": (SimpleNamespace(text_config=of_types("linear_attention"), vision_config=SimpleNamespace()), None, 1),
    "of the thinker's text": (SimpleNamespace(thinker_config=SimpleNamespace(text_config=of_types("hybrid"))), None, 1),
    "of the decoder": (SimpleNamespace(decoder=of_types("full_attention", "linear_attention")), None, 1),
    "a state": (None, [STATE, PAGES, STATE], 2),
    "a state of a subclass": (None, [PAGES, view("LinearCacheView", type(STATE))], 1),
    "a state of the delta rule": (None, [PAGES, None, view("KDACacheView")], 1),
    "a state beside pages": (None, [view("ParallelHybridCacheView", transformer=PAGES, recurrent=STATE)], 1),
    "a state in a view for all": (None, [view("HybridCacheView", key=None, recurrent_state=1)], 1),
    "types and states": (of_types("linear_attention", "full_attention"), [STATE, PAGES], 1),
}
"""Configs, the views of the layers, and the number of those that are recurrent."""

_LOOP = SimpleNamespace(num_hidden_layers=2)
_LOOP.text_config = _LOOP
ATTENTION = {
    "types": (of_types("full_attention", "sliding_attention", "chunked_attention"), [PAGES, PAGES, PAGES]),
    "no types": (SimpleNamespace(layer_types=None), [PAGES, None]),
    "no config": (None, None),
    "a config in itself": (_LOOP, [PAGES]),
    "attention in views of hybrids": (
        SimpleNamespace(cache_implementation="hybrid"),
        [
            view("HybridCacheView", key=1, recurrent_state=None),
            view("ParallelHybridCacheView", transformer=PAGES, recurrent=None),
        ],
    ),
}


def make_scheduler(runner: Any, *args: Any, **options: Any) -> Any:
    """Return the arguments with which the engine makes its scheduler."""
    cls, *made = engine_module(SCHEDULER).Scheduler.from_runner(runner, *args, **options)
    assert cls is engine_module(SCHEDULER).Scheduler
    return made


@pytest.mark.parametrize("name", RECURRENT)
def test_prefix_caching_of_recurrent_layers_is_off(folder: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    """A warning says so, unless it was off anyway."""
    config, views, num_layers = RECURRENT[name]
    runner = make_runner(config, views)
    assert make_scheduler(runner) == [runner, None, True, True, None]
    easydel.install()
    assert make_scheduler(runner, 64) == [runner, 64, False, True, None]
    layers = "1 recurrent layer keeps" if num_layers == 1 else f"{num_layers} recurrent layers keep"
    assert caplog.messages == [f"prefix caching is off: {layers} no state that a hit could start from"]
    assert make_scheduler(runner, None, False, async_scheduling=False) == [runner, None, False, False, None]
    assert len(caplog.messages) == 1
    easydel.uninstall()
    assert make_scheduler(runner, enable_prefix_caching=True) == [runner, None, True, True, None]


@pytest.mark.parametrize("name", ATTENTION)
def test_prefix_caching_of_attention_stays(folder: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    runner = make_runner(*ATTENTION[name])
    easydel.install()
    assert make_scheduler(runner, 64, True, False, 8) == [runner, 64, True, False, 8]
    assert make_scheduler(runner, enable_prefix_caching=False)[2] is False
    assert make_scheduler(SimpleNamespace())[2]
    assert not caplog.messages


@pytest.mark.parametrize(("value", "is_on"), [("1", True), (" Yes\n", True), ("0", False), ("off", False), ("", False)])
def test_hits_that_are_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, value: str, is_on: bool
) -> None:
    monkeypatch.setenv(RECURRENT_VARIABLE, value)
    easydel.install()
    assert make_scheduler(make_runner(*RECURRENT["linear"][:2]))[2] == is_on
    assert bool(caplog.messages) != is_on


def test_a_scheduler_that_differs_is_refused(folder: Path) -> None:
    """Its own, after a reload too, is what comes back."""
    easydel.install()
    edit(folder, SCHEDULER, "long_prefill_token_threshold=None)", "long_prefill_token_threshold=None, at=0)")
    with pytest.raises(CompatError, match=r"scheduler\.Scheduler\.from_runner: got .*at=0.*, allowed: \(runner, "):
        importlib.reload(engine_module(SCHEDULER))
    check_refused(r"scheduler\.Scheduler\.from_runner: got .*at=0.*, allowed: \(runner, ")
    assert make_scheduler(make_runner(*RECURRENT["linear"][:2]))[2]
    engine_module(SCHEDULER).Scheduler = int
    check_refused(rf"scheduler\.Scheduler: got <class 'int'>, allowed: the class that {ENGINE}\.scheduler\.scheduler defines")


def test_a_scheduler_that_is_reloaded_is_guarded(folder: Path) -> None:
    runner = make_runner(*RECURRENT["linear"][:2])
    old = engine_module(SCHEDULER).Scheduler
    easydel.install()
    for _ in range(2):
        importlib.reload(engine_module(SCHEDULER))
        assert engine_module(SCHEDULER).Scheduler is not old
        assert make_scheduler(runner)[2] is False
        assert old.from_runner(runner)[3] is False
    easydel.uninstall()
    assert make_scheduler(runner)[2]
    assert old.from_runner(runner)[3]


# By the environment.


VALUES = dict.fromkeys(["", " ", "0", "false", "no", "off", "OFF", " False\n"], "easydel")
VALUES |= dict.fromkeys(["1", "true", "yes", "on", "Yes", " TRUE\t"], "pagepool")


@pytest.mark.parametrize("value", VALUES)
def test_the_variable(folder: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(easydel.VARIABLE, value)
    easydel.install_if_asked()
    assert modules_of_classes() == {VALUES[value]}
    with easydel.installed():
        assert easydel.is_installed()
    assert modules_of_classes() == {VALUES[value]}


@pytest.mark.parametrize("value", ["2", "y", "enabled", "-1", "1,"])
def test_any_other_value_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    allowed = "allowed: 1, true, yes, on; 0, false, no, off or nothing"
    monkeypatch.setenv(RECURRENT_VARIABLE, value)
    easydel.install()
    with pytest.raises(CompatError, match=f"^PAGEPOOL_EASYDEL_RECURRENT_HITS: got '{value}', {allowed}$"):
        make_scheduler(make_runner(None, [PAGES]))
    monkeypatch.setenv(easydel.VARIABLE, value)
    with pytest.raises(CompatError, match=f"^PAGEPOOL_EASYDEL: got '{value}', {allowed}$"):
        easydel.install_if_asked()


LOADED = "print([name for name in ('easydel', 'jax', 'pagepool.compat', 'pagepool.compat.easydel') if name in sys.modules])"


@pytest.mark.parametrize(
    ("code", "value", "output"),
    [
        (f"import sys, pagepool; {LOADED}", None, "[]"),
        (f"import pagepool; {SHOW}", "1", "pagepool.compat.easydel"),
        (f"import {ENGINE}, pagepool; {SHOW}", "1", "pagepool.compat.easydel"),
        (f"{SHOW}; print('pagepool' in sys.modules)", "1", f"{HOME}\nFalse"),
        ("import sys, pagepool; print([name for name in ('easydel', 'jax') if name in sys.modules])", "1", "[]"),
    ],
    ids=["off", "on", "the engine first", "without pagepool", "without the engine"],
)
def test_a_process_with_the_variable(folder: Path, code: str, value: str | None, output: str) -> None:
    """Importing pagepool reads the variable, and imports no engine: the program may still set what jax reads at import."""
    process = run_python(folder, "-c", code, value=value)
    assert (process.stdout, process.stderr) == (f"{output}\n", "")


@without_easydel
def test_the_variable_without_the_engine(tmp_path: Path) -> None:
    """A program with a fallback does not get another engine. A program that needs no engine runs."""
    code = f"import pagepool\ntry:\n    import {ENGINE}\nexcept ImportError:\n    print('another engine')"
    process = run_python(tmp_path, "-c", code, value="1")
    assert (process.returncode, process.stdout) == (1, "")
    assert "CompatError: easydel: got no such module, allowed: that of easydel==0.3.0; is" in process.stderr
    assert run_python(tmp_path, "-c", code, value="0").stdout == "another engine\n"
    assert run_python(tmp_path, "-c", "import pagepool; pagepool.PagePool(8, True)", value="1").returncode == 0


def test_the_variable_with_a_version_that_lacks_the_engine(tmp_path: Path) -> None:
    (tmp_path / "easydel").mkdir()
    (tmp_path / "easydel" / "__init__.py").write_text("__version__ = '0.1'\n")
    process = run_python(tmp_path, "-c", f"import pagepool, easydel, {ENGINE}", value="1")
    assert process.returncode == 1
    assert "CompatError: easydel.inference: got no such module" in process.stderr


def test_no_module_of_an_engine_that_was_refused_can_be_had(folder: Path) -> None:
    """The same for a class that was imported before the refusal."""
    edit(folder, "core.manager", "data_parallel_size=None)", "data_parallel_size=None, sink_tokens=0)")
    easydel.install_on_import()
    for place in ("", "core.manager", "scheduler.scheduler", "page_table", ""):
        with pytest.raises(CompatError, match="sink_tokens"):
            engine_module(place)


def test_an_engine_that_is_imported_anew(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It gets ours with the variable; else its own classes, also once a module is reloaded, until pagepool is installed."""
    easydel.install()
    pop_modules()
    importlib.reload(engine_module("core.manager"))
    assert modules_of_classes() == {"easydel"}
    assert not easydel.is_installed()
    pop_modules()
    easydel.install()
    assert modules_of_classes() == {"pagepool"}
    easydel.uninstall()
    easydel.install_on_import()
    for _ in range(2):
        pop_modules()
        assert not easydel.is_installed()
        assert modules_of_classes() == {"pagepool"}
    assert not caplog.messages
    easydel.uninstall()
    assert modules_of_classes() == {"easydel"}


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
