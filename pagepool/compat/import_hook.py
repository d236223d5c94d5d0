"""Acts on a module as soon as it has been imported."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["AfterImport"]


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
        """What the finders behind this one find of the module, with a loader that acts when it is done, and of its packages."""
        if not f"{self.name}.".startswith(f"{fullname}."):
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in behind)), None)
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
