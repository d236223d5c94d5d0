"""Runs a program in this process as ``python PROGRAM`` and ``python -m MODULE`` would."""

import os
import pkgutil
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from types import ModuleType, TracebackType
from typing import Any


def in_a_line(error: Exception) -> str:
    """Return the type of an error and the first line of its message, for a program that ends with it.

    >>> in_a_line(ValueError("too short: give two\\nsecond line"))
    'ValueError: too short: give two'
    """
    lines = str(error).splitlines()
    return ": ".join((type(error).__name__, *lines[:1]))


def run_path(path: str, arguments: Sequence[str]) -> None:
    """Run a script, a ``.pyc`` file, or a folder or zip file with a ``__main__.py``.

    Only for a process started by ``python -m`` for this purpose: `sys.argv`, `sys.path` and `__main__` permanently become those
    of the program. Exit with code 2 if the script cannot be read, 1 if there is no ``__main__.py``.
    """
    file = os.path.join(os.getcwd(), path)
    is_script = pkgutil.get_importer(file) is None
    _set_first_path(os.path.dirname(os.path.realpath(file)) if is_script else file, is_script)
    sys.argv = [path, *arguments]
    if is_script:
        _call(_run_script, file)
    else:
        _set_main()
        _call(_run_as_main, "__main__", False)


def run_module(name: str, arguments: Sequence[str]) -> None:
    """Run a module, or the ``__main__`` of a package, like `run_path`. Exit with code 1 if it does not exist."""
    sys.argv = ["-m", *arguments]
    _set_main()
    _call(_run_as_main, name, True)


def _set_first_path(folder: str, is_script: bool) -> None:
    """Put `folder` first in `sys.path`, in place of the current folder of ``python -m``. With ``-P`` a script adds none."""
    if not sys.flags.safe_path:
        sys.path[0] = folder
    elif not is_script:
        sys.path.insert(0, folder)


def _set_main() -> ModuleType:
    """Replace `__main__` by a new module, under multiprocessing's name `__mp_main__` too."""
    main, before = ModuleType("__main__"), sys.modules["__main__"]
    vars(main).update((name, vars(before)[name]) for name in ("__annotations__", "__builtins__") if hasattr(before, name))
    sys.modules.update({name: main for name, module in list(sys.modules.items()) if module is before})
    return main


def _run_script(file: str) -> None:
    loader = (SourcelessFileLoader if file.endswith(".pyc") else SourceFileLoader)("__main__", file)
    code = _read_code(file, loader)
    main = _set_main()
    vars(main).update(__file__=file, __cached__=None, __loader__=loader)
    exec(code, vars(main))


def _read_code(file: str, loader: SourceFileLoader | SourcelessFileLoader) -> Any:
    """Return the script's code. The loader's own method would also write a ``.pyc`` file next to a source file."""
    try:
        is_source = isinstance(loader, SourceFileLoader)
        code: Any = (
            compile(loader.get_data(file), file, "exec", dont_inherit=True) if is_source else loader.get_code("__main__")
        )
    except OSError as error:
        print(f"{sys.executable}: can't open file {file!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        raise SystemExit(2) from None
    return code


def _run_as_main(name: str, must_alter_argv: bool) -> None:
    """Call the function behind ``python -m``. `runpy.run_module` would remove `__main__`, which threads still need."""
    runpy._run_module_as_main(name, must_alter_argv)  # type: ignore[attr-defined]


def _call(run: Callable[..., None], *arguments: object) -> None:
    """Call `run`, and let a traceback begin with the program's own frames."""
    try:
        run(*arguments)
    except SystemExit:
        raise
    except BaseException as error:
        _print_from(error, _skip_ours(error.__traceback__))
        raise


def _skip_ours(traceback: TracebackType | None) -> TracebackType | None:
    while traceback is not None and traceback.tb_frame.f_code.co_filename == _skip_ours.__code__.co_filename:
        traceback = traceback.tb_next
    return traceback


def _print_from(error: BaseException, traceback: TracebackType | None) -> None:
    """Pass `error` with this traceback to the program's hook. Python still prints it and sets the exit code."""
    excepthook = sys.excepthook

    def show(kind: type[BaseException], value: BaseException, whole: TracebackType | None) -> None:
        sys.excepthook = excepthook
        part = traceback if value is error else whole
        excepthook(kind, value.with_traceback(part), part)

    sys.excepthook = show
