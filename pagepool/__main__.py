"""`python -m pagepool` is the command `pagepool`."""

from pagepool.replay.cli import main

if __name__ == "__main__":
    main()
