"""Entry point of the command `pagepool`."""

import sys

from pagepool._version import __version__

NEEDED = ("click", "rich")


def main() -> None:
    """Run the command on `sys.argv`. Without the extra only ``--version`` and ``doctor`` work; others exit with code 1."""
    if sys.argv[1:] == ["--version"]:
        print(f"pagepool, version {__version__}")
        return
    if sys.argv[1:2] == ["doctor"]:
        from pagepool.doctor.command import main as run_doctor

        sys.exit(run_doctor(sys.argv[2:]))
    try:
        from pagepool.replay.command import pagepool
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        if missing not in NEEDED:
            raise
        sys.exit(f"pagepool: the command needs {missing}: pip install 'pagepool[replay]'; `pagepool doctor` works without")
    pagepool(prog_name="pagepool")
