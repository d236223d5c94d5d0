"""Acts on a module as soon as it has been imported, or reloaded."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["AfterImport", "AfterReload"]


class AfterImport(MetaPathFinder):
    """Calls `action` when the module `name` has run, each time it is imported, before its importer sees it.

    Put it in front of ``sys.meta_path``. What `action` raises comes out of the import, which has failed then, and those of the
    modules below it: an import of one of them afterwards imports them all again, and meets `action` again.
    """

    def __init__(self, name: str, action: Callable[[], None], report_missing: Callable[[str], None] | None = None) -> None:
        """`name` is absolute, dots included. `report_missing` is called with the name of the module, or of a package that it is
        in, where no finder knows that, and may raise.
        """
        self.name = name
        self._action = action
        self._report_missing = report_missing

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """What the finders behind this one find of the module, with a loader that acts when it is done, and of its packages.
        Nothing for a module that is reloaded.
        """
        if target is not None or not f"{self.name}.".startswith(f"{fullname}."):
            return None
        spec = _find_behind(self, fullname, path, target)
        if spec is None and self._report_missing is not None:
            self._report_missing(fullname)
        if fullname == self.name and spec is not None and spec.loader is not None:
            self._act_after(spec.loader)
        return spec

    def _act_after(self, loader: object) -> None:
        """Of this loader alone, which stays what it is for whoever asks it for sources or resources."""
        exec_module: Callable[[ModuleType], None] = loader.exec_module  # type: ignore[attr-defined]

        def exec_and_act(module: ModuleType) -> None:
            exec_module(module)
            try:
                self._action()
            except BaseException:
                self._forget_submodules()
                raise

        loader.exec_module = exec_and_act  # type: ignore[attr-defined]

    def _forget_submodules(self) -> None:
        """Python itself forgets the module alone."""
        for name in [name for name in sys.modules if name.startswith(f"{self.name}.")]:
            del sys.modules[name]


class AfterReload(MetaPathFinder):
    """Calls `action` with a module's name when it was reloaded, for the module or package `name` and all below it; also where
    the module's code raised, since Python keeps what it had defined by then. What `action` raises, ``importlib.reload`` raises.

    Put it in front of ``sys.meta_path``. Reloads that begin while `is_due` says no are left alone.
    """

    def __init__(self, name: str, action: Callable[[str], None], is_due: Callable[[], bool]) -> None:
        """`name` is absolute."""
        self.name = name
        self._action = action
        self._is_due = is_due

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """What the finders behind this one find of a module that is reloaded, with a loader that acts when it is done."""
        if target is None or not f"{fullname}.".startswith(f"{self.name}.") or not self._is_due():
            return None
        spec = _find_behind(self, fullname, path, target)
        if spec is not None and spec.loader is not None:
            self._act_after(spec.loader)
        return spec

    def _act_after(self, loader: object) -> None:
        """Once: some loaders load other modules too."""
        exec_module: Callable[[ModuleType], None] = loader.exec_module  # type: ignore[attr-defined]

        def exec_and_act(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            try:
                exec_module(module)
            finally:
                self._action(module.__name__)

        loader.exec_module = exec_and_act  # type: ignore[attr-defined]


def _find_behind(
    finder: MetaPathFinder, fullname: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    """What the finders behind `finder` find, or all of them if another thread has taken it away."""
    finders = [*sys.meta_path]
    behind = finders[finders.index(finder) + 1 :] if finder in finders else finders
    return next(filter(None, (other.find_spec(fullname, path, target) for other in behind)), None)
