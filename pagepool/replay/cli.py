"""The door of the command: runs it, or says which extra is missing."""

import sys

from pagepool._version import __version__

__all__ = ["main"]

NEEDED = ("click", "rich")


def main() -> None:
    """Run the command on `sys.argv` and exit: 0 when done, 2 for users' mistakes, 1 without the extra, which only
    ``--version`` does not need.
    """
    if sys.argv[1:] == ["--version"]:
        print(f"pagepool, version {__version__}")
        return
    try:
        from pagepool.replay.command import pagepool
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        if missing not in NEEDED:
            raise
        sys.exit(f"pagepool: the command needs {missing}: pip install 'pagepool[replay]'")
    pagepool(prog_name="pagepool")
