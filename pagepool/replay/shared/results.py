"""Input and output files of a command: all different, and results written atomically."""

import json
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import BytesIO, TextIOWrapper
from typing import Any, BinaryIO

import click

from pagepool.replay.shared.output import open_output

STDIN, STDOUT = 0, 1


class InputFile(click.Path):
    """Parameter type: an existing, readable file; - is standard input if allowed."""

    def __init__(self, allow_dash: bool = False) -> None:
        """Exclude folders."""
        super().__init__(exists=True, dir_okay=False, allow_dash=allow_dash)


class OutputFile(click.Path):
    """Parameter type: a file to write; - is standard output."""

    def __init__(self) -> None:
        """Exclude folders."""
        super().__init__(dir_okay=False, allow_dash=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Reject paths without a file name."""
        if not os.path.basename(value):
            self.fail(f"{value!r} is not the name of a file.", param, ctx)
        return super().convert(value, param, ctx)


def require_files_apart(ctx: click.Context) -> None:
    """Raise UsageError if an output is also an input or another output, under any name, link or descriptor."""
    names: dict[object, str] = {}
    for param in ctx.command.params:
        if isinstance(param.type, InputFile) and (path := ctx.params[str(param.name)]) is not None:
            names[_identify(path, STDIN)] = _describe(param, path)
    outputs = {
        _describe(param, path): path
        for param in ctx.command.params
        if isinstance(param.type, OutputFile) and (path := ctx.params[str(param.name)]) is not None
    }
    if "-" not in outputs.values():
        outputs["standard output"] = "-"
    for name, path in outputs.items():
        other = names.setdefault(_identify(path, STDOUT), name)
        if other != name:
            raise click.UsageError(f"{name} is the same file as {other}", ctx)


def _describe(param: click.Parameter, path: str) -> str:
    """Return the parameter as the user wrote it."""
    option = param.opts[0] if isinstance(param, click.Option) else param.human_readable_name
    return f"{option} {click.format_filename(path)}"


def _identify(path: str, descriptor: int) -> object:
    """Return a key that is equal for two names of one file; `descriptor` stands for -. Devices may be used repeatedly."""
    try:
        status = os.fstat(descriptor) if path == "-" else os.stat(path)
    except OSError:
        return os.path.realpath(path)  # the file does not exist yet
    if stat.S_ISREG(status.st_mode) or stat.S_ISFIFO(status.st_mode):
        return status.st_dev, status.st_ino
    return descriptor if path == "-" else object()


@contextmanager
def open_result(path: str | None) -> Iterator[BinaryIO | None]:
    """Yield a buffer for a result, or None without a path. Open the file before the work, and write it atomically at the end of
    the block; - is standard output. Exit with code 1 and a message if it cannot be written.
    """
    if path is None:
        yield None
        return
    content = BytesIO()
    with ExitStack() as stack:
        if path != "-":
            with _explaining(path):
                file = stack.enter_context(open_output(path))
        yield content
        if path == "-":
            with printing() as stdout:
                stdout.buffer.write(content.getvalue())
            return
        with _explaining(path):
            file.write(content.getvalue())
            stack.close()


@contextmanager
def _explaining(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise click.ClickException(f"{click.format_filename(path)} cannot be written: {error.strerror or error}") from error


@contextmanager
def printing() -> Iterator[TextIOWrapper]:
    """Yield standard output, and flush it at the end of the block. Exit with code 1 and a message if writing fails; leave a
    closed pipe to click. Escape characters missing in the encoding.
    """
    if not isinstance(sys.stdout, TextIOWrapper):
        raise click.ClickException("standard output cannot be written: it is closed")
    try:
        sys.stdout.reconfigure(errors="backslashreplace")
        yield sys.stdout
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        with suppress(OSError, ValueError):  # otherwise a second flush at exit reports the error
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise click.ClickException(f"standard output cannot be written: {error.strerror or error}") from error


def to_json(figures: dict[str, Any]) -> bytes:
    """Encode with indentation and a final newline."""
    return json.dumps(figures, indent=2).encode() + b"\n"
