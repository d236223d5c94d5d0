"""Writes build/api.md, the site's page of the API, from signatures and docstrings."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache

import griffe
from public_api import ROOT, SECTIONS, Public, Section, exports_of, find_constructor, list_members, list_names, load

TARGET = ROOT / "build" / "api.md"
WIDTH = 100  # longest signature on one line, in columns
MAX_VALUE = 60  # longest value of a constant, in characters

Headings = Mapping[str, str]

HEAD = """# API reference

All public names, with their types and docstrings. [Stability](stability.md) says what may change when. Names without a module
are imported from `pagepool`; for others the module stands before the name, after `pagepool.`.
"""


def main() -> None:
    """Write the reference to its file."""
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(render(load(ROOT)))


def render(package: griffe.Module) -> str:
    """Return the whole reference. Raise LookupError for a public name without a section."""
    contents: dict[Section, dict[str, Public]] = {}
    for section in SECTIONS:
        before = {name for names in contents.values() for name in names}
        contents[section] = {name: value for name, value in list_names(package, section).items() if name not in before}
    listed = {name for names in contents.values() for name in names}
    missing = set(exports_of(package)) - listed - {"__version__", "errors"}
    if missing:
        raise LookupError(f"in no section of tools/public_api.py: {', '.join(sorted(missing))}")
    headings = find_headings(contents)
    parts = [HEAD, *(f"- [{section.title}]({anchor(section.title)}): {links(names)}" for section, names in contents.items())]
    for section, names in contents.items():
        parts += ["", f"## {section.title}", "", *introduce(package, section, headings)]
        for name, value in names.items():
            parts += describe(name, value, headings)
    return "\n".join(parts).rstrip() + "\n"


def find_headings(contents: dict[Section, dict[str, Public]]) -> Headings:
    """Return the headings by their names in docstrings: in full, or without the module if the short name is unique."""
    values = {name: value for names in contents.values() for name, value in names.items()}
    shorts = Counter(name.rpartition(".")[2] for name in values)
    titles = {name: title_of(name, value) for name, value in values.items()}
    headings = {short: title for name, title in titles.items() if shorts[short := name.rpartition(".")[2]] == 1}
    return (
        headings
        | titles
        | {path: path for name, value in values.items() for path in (f"{name}.{item}" for item in methods_of(value))}
    )


def title_of(name: str, value: Public) -> str:
    """Return the heading of a public name, as text. Headings of classes say so, since anchors lack dots and capitals."""
    return f"class {name}" if value.is_class else name


def anchor(heading: str) -> str:
    """Return the link to a heading, as GitHub and Python-Markdown make it.

    >>> anchor("Copies on the device"), anchor("`CacheManager.free`")
    ('#copies-on-the-device', '#cachemanagerfree')
    """
    return "#" + re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-")


def links(names: dict[str, Public]) -> str:
    """Return links to the headings of names."""
    return ", ".join(f"[`{name}`]({anchor(title_of(name, value))})" for name, value in names.items())


def introduce(package: griffe.Module, section: Section, headings: Headings) -> Iterator[str]:
    """Yield the docstring of a module imported by users."""
    if not section.is_top:
        yield f"`pagepool.{section.module}`. {markdown(docstring_of(package[section.module]), headings)}"
        yield ""


# Docstrings.


def docstring_of(value: Public) -> str:
    """Return the docstring, without indentation."""
    return "" if value.docstring is None else inspect.cleandoc(value.docstring.value)


def markdown(text: str, headings: Headings, owner: str = "") -> str:
    """Return a docstring as Markdown: examples in fences, a blank line before lists, and links to headings."""
    lines: list[str] = []
    is_example = False
    for line in text.splitlines():
        if line.startswith(">>> ") and not is_example:
            lines += ["```python"]
            is_example = True
        elif is_example and not line:
            lines += ["```"]
            is_example = False
        if not is_example and re.match(r"[-*] ", line) and lines and lines[-1] and not re.match(r"[-*] |  ", lines[-1]):
            lines += [""]
        lines += [line if is_example else link_names(line, headings, owner)]
    return "\n".join([*lines, "```"] if is_example else lines)


def link_names(line: str, headings: Headings, owner: str) -> str:
    """Return a line with links to documents, and from names in code to their headings. A name may be a member of `owner`."""

    def link(match: re.Match[str]) -> str:
        name = match[1].removeprefix("pagepool.")
        heading = headings.get(f"{owner}.{name}", headings.get(name))
        return match[0] if heading in (None, headings.get(owner)) else f"[{match[0]}]({anchor(heading)})"

    return re.sub(r"\bdocs/(\w+\.md)", r"[\g<0>](\1)", re.sub(r"(?<!`)`([\w.]+)`(?!`)", link, line))


# Signatures.


@cache
def type_aliases() -> dict[str, str]:
    """Return the aliases of types in sources and stubs, since readers of the reference do not see them; omit aliases of
    different types in two files.
    """
    paths = sorted((ROOT / "pagepool").rglob("*.py*"))
    texts = [path.read_text() for path in paths if path.suffix in (".py", ".pyi")]
    found = re.findall(r"^(_?[A-Z][a-z]\w*)(?:: TypeAlias)? = ([^\n(#]+)$", "\n".join(texts), re.MULTILINE)
    aliases = dict(found)
    return {name: aliases[name] for name in aliases if {value for other, value in found if other == name} == {aliases[name]}}


def type_of(annotation: object) -> str:
    """Return an annotation as text, with aliases replaced by types, recursively."""
    text, before = str(annotation), ""
    while text != before:
        before, text = text, re.sub(r"(?<![\w.])_?[A-Z][a-z]\w*", lambda match: type_aliases().get(match[0], match[0]), text)
    return text


def double_quoted(value: object) -> str:
    """Return a value as text, with the quotes of the house style."""
    text = str(value)
    return text if '"' in text else text.replace("'", '"')


def signature_of(name: str, function: griffe.Function, of_class: bool = False) -> str:
    """Return a call with types; a long one has a line for each parameter."""
    parameters = [parameter for parameter in function.parameters if parameter.name not in ("self", "cls")]
    texts = []
    kinds = griffe.ParameterKind
    for i, parameter in enumerate(parameters):
        before = parameters[i - 1].kind if i else None
        if parameter.kind is kinds.keyword_only and before not in (kinds.keyword_only, kinds.var_positional):
            texts.append("*")
        if before is kinds.positional_only is not parameter.kind:
            texts.append("/")
        star = {kinds.var_positional: "*", kinds.var_keyword: "**"}.get(parameter.kind, "")
        annotation = "" if parameter.annotation is None else f": {type_of(parameter.annotation)}"
        equals = " = " if annotation else "="
        default = "" if parameter.default is None or star else f"{equals}{double_quoted(parameter.default)}"
        texts.append(f"{star}{parameter.name}{annotation}{default}")
    result = "" if of_class or function.returns is None else f" -> {type_of(function.returns)}"
    text = f"{name}({', '.join(texts)}){result}"
    return text if len(text) <= WIDTH else f"{name}(\n    " + ",\n    ".join(texts) + f",\n){result}"


# Classes, functions and constants.


def methods_of(value: Public) -> dict[str, Public]:
    """Return the methods of a class that get a heading. Methods of a documented base are listed there."""
    if not value.is_class:
        return {}
    bases = {base.canonical_path for base in documented_bases(value)}
    return {
        name: item
        for name, item in list_members(value).items()
        if item.is_function and (name in value.members or parent_of(item) not in bases)
    }


def parent_of(item: Public) -> str:
    """Return the path of the defining class of a member."""
    return item.canonical_path.rpartition(".")[0]


def documented_bases(cls: Public) -> list[griffe.Class]:
    """Return the bases of a class that are also imported from `pagepool`."""
    target = cls.final_target if isinstance(cls, griffe.Alias) else cls
    names = {value.canonical_path for section in SECTIONS for value in list_names(target.package, section).values()}
    return [base for base in target.mro() if base.canonical_path in names] if isinstance(target, griffe.Class) else []


def shown_bases(cls: Public, known: list[griffe.Class]) -> list[str]:
    """Return the direct bases of a class that have a heading or belong to another package."""
    paths = {base.canonical_path for base in known}
    found = [(str(base), getattr(base, "canonical_path", "")) for base in cls.bases]  # type: ignore[union-attr]
    return [text for text, path in found if path in paths or not path.startswith("pagepool.")]


def describe(name: str, value: Public, headings: Headings) -> Iterator[str]:
    """Yield the lines of a public name."""
    yield from (f"### {title_of(f'`{name}`', value)}", "")
    if value.is_class:
        yield from describe_class(name, value, headings)
    else:
        yield from describe_item(name, value, headings, name.rpartition(".")[0])


def describe_class(name: str, cls: Public, headings: Headings) -> Iterator[str]:
    """Yield the constructor, docstrings, attributes and methods of a class."""
    constructor, short = find_constructor(cls), name.rpartition(".")[2]
    known = documented_bases(cls)
    bases = shown_bases(cls, known)
    head = f"class {short}({', '.join(bases)})" if bases else f"class {short}"
    of_class = "" if constructor is None else "\n" + signature_of(short, constructor, of_class=True)
    yield from ("```python", head + of_class, "```", "")
    yield from (markdown(docstring_of(cls), headings, name), "")
    if constructor is not None and constructor.docstring is not None:
        yield from (markdown(docstring_of(constructor), headings, name), "")
    inherited = {base.canonical_path for base in known}
    attributes = {
        attribute: item
        for attribute, item in list_members(cls).items()
        if item.is_attribute and (attribute in cls.members or parent_of(item) not in inherited)
    }
    if attributes:
        yield from (*(describe_attribute(key, item, headings, name) for key, item in attributes.items()), "")
    for method, item in methods_of(cls).items():
        yield from (f"#### `{name}.{method}`", "", *describe_item(f"{name}.{method}", item, headings, name))


def describe_attribute(name: str, item: Public, headings: Headings, owner: str) -> str:
    """Return a line of a list: the name, its type or value, and the docstring."""
    annotation, value = item.annotation, str(item.value)  # type: ignore[union-attr]
    text = re.sub(r"^Final\[(.*)\]$", r"\1", type_of(annotation)) if annotation is not None else ""
    shown = f"{name}: {text}" if text else f"{name} = {value}" if value.isdecimal() else name
    described = " ".join(markdown(docstring_of(item), headings, owner).split())
    return f"- `{shown}`" + (f": {described}" if described else "")


def describe_item(name: str, item: Public, headings: Headings, owner: str) -> Iterator[str]:
    """Yield the signature of a function, or the value of a constant, and the docstring."""
    target = item.final_target if isinstance(item, griffe.Alias) else item
    if isinstance(target, griffe.Function):
        labels = [f"@{label}" for label in ("staticmethod", "classmethod") if label in target.labels]
        yield from ("```python", *labels, signature_of(name, target), "```", "")
    elif isinstance(target, griffe.Attribute):
        annotation = f": {type_of(target.annotation)}" if target.annotation is not None else ""
        value = f" = {double_quoted(target.value)}" if len(str(target.value)) <= MAX_VALUE else ""
        yield from ("```python", f"{name}{annotation}{value}", "```", "")
    yield from (markdown(docstring_of(item), headings, owner), "")


if __name__ == "__main__":
    main()
