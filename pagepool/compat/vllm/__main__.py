"""``python -m pagepool.compat.vllm``: whether pagepool accepts the installed vLLM, and what it replaces."""

import pprint
import sys
from optparse import OptionParser

from pagepool.compat.vllm import install, report
from pagepool.compat.vllm.checks import import_homes, record
from pagepool.errors import CompatError


def main() -> None:
    """Install pagepool in this process and print the report; exit code 1 and the reason if vLLM is refused."""
    parser = OptionParser(
        "%prog [--record]",
        prog="python -m pagepool.compat.vllm",
        description="Check whether pagepool accepts the installed vLLM, and print what it replaces. Nothing stays replaced.",
    )
    parser.add_option("--record", action="store_true", help="print the tables of pagepool/compat/vllm/engine.py for this vLLM")
    options, arguments = parser.parse_args()
    if arguments:
        parser.error(f"got {arguments[0]!r}, expected no arguments")
    try:
        if options.record:
            for table in record(import_homes()):
                pprint.pp(table, width=128)
        else:
            install()
            print(report())
    except CompatError as error:
        sys.exit(f"pagepool: {error}")


if __name__ == "__main__":
    main()
