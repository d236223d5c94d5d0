"""``python -m pagepool.compat.easydel PROGRAM``: run a program with pagepool as the allocator of EasyDeL's engine."""

import os
from optparse import OptionParser

from pagepool.compat.easydel import VARIABLE, install_if_asked
from pagepool.compat.program import run_module, run_path

USAGE = "%prog PROGRAM [ARGUMENT ...]\n       %prog -m MODULE [ARGUMENT ...]"


def main() -> None:
    """Parse the command line up to the program, and run the program with the remaining arguments."""
    parser = OptionParser(
        USAGE,
        prog="python -m pagepool.compat.easydel",
        description="Run PROGRAM (a script, or a folder or zip file with a __main__.py) as python does, with pagepool as the "
        f"allocator of EasyDeL's eSurge engine. Sets {VARIABLE}=1 for the program and its children.",
    )
    parser.disable_interspersed_args()
    parser.add_option("-m", action="store_true", dest="is_module", help="run a module, as python -m does")
    options, arguments = parser.parse_args()
    if not arguments:
        parser.error("got no PROGRAM and no -m MODULE, allowed: one of them")
    os.environ[VARIABLE] = "1"
    install_if_asked()
    run = run_module if options.is_module else run_path
    run(arguments[0], arguments[1:])


if __name__ == "__main__":
    main()
