"""Times: pagepool and its rivals, in turn in one run."""
