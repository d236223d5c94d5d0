"""Import hooks that call a function after a module was imported or reloaded."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class AfterImport(MetaPathFinder):
    """Import hook that calls `action` each time the module `name` was imported, before the importer gets the module.

    Insert it at the front of ``sys.meta_path``. If `action` raises, the import fails, and so does an import of a module below
    `name`; the next import starts over and calls `action` again.
    """

    def __init__(self, name: str, action: Callable[[], None], report_missing: Callable[[str], None] | None = None) -> None:
        """Watch for a module by its absolute name, dots included. If no finder knows the module or one of its parent packages,
        `report_missing` is called with the missing name; it may raise.
        """
        self.name = name
        self._action = action
        self._report_missing = report_missing

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec, from the later finders, of the module or one of its parent packages. The module's loader calls the
        action at its end. Return None during a reload.
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
        """Wrap ``exec_module`` of this loader object; its type and its access to sources and resources stay."""
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
        """Remove the modules below `name` from `sys.modules`. Python itself removes only the module that failed."""
        for name in [name for name in sys.modules if name.startswith(f"{self.name}.")]:
            del sys.modules[name]


class AfterReload(MetaPathFinder):
    """Import hook that calls `action` with the name of each reloaded module at or below `name`.

    The action is called even if the module's code raised, since Python keeps the definitions made by then. ``importlib.reload``
    raises the errors of `action`. Insert it at the front of ``sys.meta_path``. Reloads that begin while `is_due` is false are
    ignored.
    """

    def __init__(self, name: str, action: Callable[[str], None], is_due: Callable[[], bool]) -> None:
        """Watch for reloads of the module with this absolute name and of modules below it."""
        self.name = name
        self._action = action
        self._is_due = is_due

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the later finders' spec of a reloaded module; its loader calls the action at the end."""
        if target is None or not f"{fullname}.".startswith(f"{self.name}.") or not self._is_due():
            return None
        spec = _find_behind(self, fullname, path, target)
        if spec is not None and spec.loader is not None:
            self._act_after(spec.loader)
        return spec

    def _act_after(self, loader: object) -> None:
        """Wrap ``exec_module`` for one call, since some loaders load other modules too."""
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
    """Search the finders after `finder`, or all if another thread has removed it."""
    finders = [*sys.meta_path]
    behind = finders[finders.index(finder) + 1 :] if finder in finders else finders
    return next(filter(None, (other.find_spec(fullname, path, target) for other in behind)), None)
