"""``python -m pagepool.compat.vllm``: reports whether pagepool accepts the installed vLLM, and the parts it replaces."""

import json
import sys
from optparse import OptionParser

from pagepool.compat.program import in_a_line
from pagepool.compat.vllm import install, report
from pagepool.compat.vllm.checks import import_homes, record, version_of
from pagepool.errors import CompatError


def main() -> None:
    """Install pagepool in this process and print the report. If vLLM is refused, or cannot be imported, print the reason and
    exit with code 1.
    """
    parser = OptionParser(
        "%prog [--record]",
        prog="python -m pagepool.compat.vllm",
        description="Check whether pagepool accepts the installed vLLM, and print what it replaces. Nothing stays replaced.",
    )
    parser.add_option("--record", action="store_true", help="print what recorded.json has to say of it under changes")
    options, arguments = parser.parse_args()
    if arguments:
        parser.error(f"got {arguments[0]!r}, allowed: no arguments")
    try:
        homes = import_homes()
    except CompatError as error:
        sys.exit(f"pagepool: {error}")
    except Exception as error:  # raised by vLLM, or by a module that it imports
        sys.exit(f"pagepool: vLLM cannot be imported: {in_a_line(error)}")
    try:
        if options.record:
            print(json.dumps({version_of(): record(homes)}))
        else:
            install()
            print(report())
    except CompatError as error:
        sys.exit(f"pagepool: {error}")


if __name__ == "__main__":
    main()
