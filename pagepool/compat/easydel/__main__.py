"""``python -m pagepool.compat.easydel PROGRAM``: run a program with pagepool as the allocator of EasyDeL's engine."""

import os
import sys
from optparse import OptionParser

from pagepool.compat.easydel import VARIABLE, install_if_asked
from pagepool.compat.program import run_module, run_path
from pagepool.errors import CompatError

USAGE = "%prog PROGRAM [ARGUMENT ...]\n       %prog -m MODULE [ARGUMENT ...]"


def main() -> None:
    """Parse the command line up to the program, and run the program with the remaining arguments. If EasyDeL is refused, print
    the reason and exit with code 1.
    """
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
    run = run_module if options.is_module else run_path
    try:
        install_if_asked()
        run(arguments[0], arguments[1:])
    except CompatError as error:
        sys.exit(f"pagepool: {error}")


if __name__ == "__main__":
    main()
