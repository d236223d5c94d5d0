"""Every refusal says what it is about, what it got and what is allowed: ``name: got X, allowed: Y``."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
REFUSALS = (
    "ArgumentError|ArgumentTypeError|OutOfPagesError|LeaseBudgetError|DoubleFreeError|EndpointError|PageIdError|PageHashError|"
    "MovesDueError|StateAheadError|RowIndexError|RowOverflowError"
)
"""Classes whose texts have the form. Those of the others do not name an argument: data that is damaged (IntegrityError,
SnapshotError, EventBatchError), requests that no pool of this size can run (RequestTooLargeError), and engines
(CompatError).
"""
FORM = re.compile(r"\S: got .*\ballowed\b", re.DOTALL)
OTHER_FOLDERS = {
    "compat": "The texts follow the engine whose code they replace.",
    "replay": "The texts are lines of the command line about a file or an option.",
}
EXCEPTIONS = {
    "cannot be pickled": "No argument is allowed.",
    "{fault}": "The text of another refusal follows the name.",
    "{got}, allowed": "Two refusals share the text of what they got.",
}
CALL = re.compile(rf"(?<![\w.])(?:{REFUSALS})\((?!PagePoolError)")
LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"|\'((?:[^\'\\]|\\.)*)\'')
GOLDEN = ROOT / "tests" / "models" / "argument_errors.txt"


def list_texts() -> Iterator[tuple[str, str]]:
    """Yield each error text of the source, with its file and line."""
    for path in sorted((ROOT / "pagepool").rglob("*.p*")):
        name = path.relative_to(ROOT / "pagepool")
        if path.suffix not in (".py", ".pyx", ".pxd") or name.parts[0] in OTHER_FOLDERS:
            continue
        source = path.read_text("utf-8")
        for call in CALL.finditer(source):
            literals, end = [], call.end()
            while literal := LITERAL.match(source, re.compile(r"[\sf]*").match(source, end).end()):  # type: ignore[union-attr]
                literals.append(literal[1] or literal[2] or "")
                end = literal.end()
            yield f"{name}:{source.count(chr(10), 0, call.start()) + 1}", "".join(literals)


def test_refusals_say_what_they_got_and_what_is_allowed() -> None:
    texts = list(list_texts())
    wrong = [
        f"{place}: {text}" for place, text in texts if not FORM.search(text) and not any(map(text.__contains__, EXCEPTIONS))
    ]
    assert len(texts) > 300
    assert not wrong, "\n".join(wrong)


def test_errors_of_wrong_arguments_have_the_form() -> None:
    errors = re.findall(rf"^ .*?\b(?:{REFUSALS}): (.*)$", GOLDEN.read_text("utf-8"), re.MULTILINE)
    assert len(errors) > 200
    assert not [error for error in errors if not FORM.search(error)]
