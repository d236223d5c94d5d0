"""Writes the site's pages of the API, from signatures and docstrings: build/api.md with all names, and build/api/ with a page
for each class, and one for the functions, constants and errors of a module. build/api.json has their order.
"""

from __future__ import annotations

import inspect
import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from typing import NamedTuple

import griffe
from public_api import ROOT, SECTIONS, Public, Section, exports_of, find_constructor, list_members, list_names, load

TARGET = ROOT / "build"
WIDTH = 100  # longest signature on one line, in columns
MAX_VALUE = 60  # longest value of a constant, in characters

Links = Mapping[str, str]
"""Where names in docstrings lead, relative to build/api/: in full, or without the module if the short name is unique."""

HEAD = """# API reference

All public names, each with its types and docstring. [Stability](stability.md) says what may change when. Names without a module
are imported from `pagepool`; for others the module stands before the name, after `pagepool.`.
"""


class Page(NamedTuple):
    """A page below build/api/."""

    path: str
    title: str
    text: str


def main() -> None:
    """Write the pages to their files."""
    shutil.rmtree(TARGET / "api", ignore_errors=True)
    (TARGET / "api").mkdir(parents=True)
    index, sections = render(load(ROOT))
    for page in [page for pages in sections.values() for page in pages]:
        (TARGET / "api" / page.path).write_text(page.text)
    navigation = {title: [[page.title, f"api/{page.path}"] for page in pages] for title, pages in sections.items()}
    (TARGET / "api.json").write_text(json.dumps(navigation, indent=1))
    (TARGET / "api.md").write_text(index)


def render(package: griffe.Module) -> tuple[str, dict[str, list[Page]]]:
    """Return the page of all names, and the pages of each section. Raise LookupError for a public name without a section."""
    contents: dict[Section, dict[str, Public]] = {}
    for section in SECTIONS:
        before = {name for names in contents.values() for name in names}
        contents[section] = {name: value for name, value in list_names(package, section).items() if name not in before}
    listed = {name for names in contents.values() for name in names}
    missing = set(exports_of(package)) - listed - {"__version__", "errors"}
    if missing:
        raise LookupError(f"in no section of tools/public_api.py: {', '.join(sorted(missing))}")
    links = find_links(contents)
    parts = [HEAD]
    for section, names in contents.items():
        parts += ["", f"## {section.title}", "", *introduce(package, section, links), "| name | |", "|---|---|"]
        parts += [f"| [`{name}`](api/{links[name]}) | {summarize(value, links, name)} |" for name, value in names.items()]
    return "\n".join(parts) + "\n", {
        section.title: list(write_pages(section, names, links)) for section, names in contents.items()
    }


def has_page(section: Section, value: Public) -> bool:
    """Whether a public name has a page of its own: a class has, unless it is an error, which says all in a line or two."""
    return value.is_class and section.module != "errors"


def find_links(contents: dict[Section, dict[str, Public]]) -> Links:
    """Return where each name leads."""
    full: dict[str, str] = {}
    for section, names in contents.items():
        for name, value in names.items():
            path = f"{name}.md" if has_page(section, value) else f"{section.module}.md"
            full[name] = path if has_page(section, value) else f"{path}#{anchor(name)}"
            if has_page(section, value):
                full |= {f"{name}.{method}": f"{path}#{anchor(method)}" for method in methods_of(value)}
    shorts = Counter(name.rpartition(".")[2] for names in contents.values() for name in names)
    unique = {name: name.rpartition(".")[2] for names in contents.values() for name in names}
    return {short: full[name] for name, short in unique.items() if shorts[short] == 1} | full


def write_pages(section: Section, names: dict[str, Public], links: Links) -> Iterator[Page]:
    """Yield the pages of a section: its names without a page of their own, then each class."""
    short = {name: value for name, value in names.items() if not has_page(section, value)}
    if short:
        lines = [f"# {section.title}", ""]
        for name, value in short.items():
            lines += [f"## `{name}`", "", *describe(name, value, links)]
        yield Page(f"{section.module}.md", section.title, "\n".join(lines).rstrip() + "\n")
    for name, value in names.items():
        if has_page(section, value):
            lines = [f"# class `{name}`", "", *describe(name, value, links)]
            yield Page(f"{name}.md", name.rpartition(".")[2], "\n".join(lines).rstrip() + "\n")


def anchor(heading: str) -> str:
    """Return the anchor of a heading, as GitHub and Python-Markdown make it.

    >>> anchor("Copies on the device"), anchor("`read_trace`")
    ('copies-on-the-device', 'read_trace')
    """
    return re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-")


def introduce(package: griffe.Module, section: Section, links: Links) -> Iterator[str]:
    """Yield the docstring of a module imported by users."""
    if not section.is_top:
        text = markdown(docstring_of(package[section.module]), links)
        yield f"`pagepool.{section.module}`. {move_up(text)}"
        yield ""


def summarize(value: Public, links: Links, name: str) -> str:
    """Return the first sentence of a docstring, for a cell of a table."""
    text = markdown(docstring_of(value), links, name).partition("\n\n")[0].replace("\n", " ")
    sentence = re.match(r".*?\.(?=\s|$)", text)
    return move_up(sentence[0] if sentence else text).replace("|", "\\|")


def move_up(text: str) -> str:
    """Return Markdown of a page in build/api/ for build/api.md.

    >>> move_up("[`a`](b.md#a), [`c`](../d.md)")
    '[`a`](api/b.md#a), [`c`](d.md)'
    """
    return re.sub(r"\]\((?!\w+:)", "](api/", text).replace("](api/../", "](")


# Docstrings.


def docstring_of(value: Public) -> str:
    """Return the docstring, without indentation."""
    return "" if value.docstring is None else inspect.cleandoc(value.docstring.value)


def markdown(text: str, links: Links, owner: str = "") -> str:
    """Return a docstring as Markdown: examples in fences, a blank line before lists, and links to names."""
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
        lines += [line if is_example else link_names(line, links, owner)]
    return "\n".join([*lines, "```"] if is_example else lines)


def link_names(line: str, links: Links, owner: str) -> str:
    """Return a line with links to documents, and from names in code to their pages. A name may be a member of `owner`."""

    def link(match: re.Match[str]) -> str:
        name = match[1].removeprefix("pagepool.")
        target = links.get(f"{owner}.{name}", links.get(name))
        return match[0] if target in (None, links.get(owner)) else f"[{match[0]}]({target})"

    return re.sub(r"\bdocs/(\w+\.md)", r"[\g<0>](../\1)", re.sub(r"(?<!`)`([\w.]+)`(?!`)", link, line))


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


def describe(name: str, value: Public, links: Links) -> Iterator[str]:
    """Yield the lines of a public name, below its heading."""
    if value.is_class:
        yield from describe_class(name, value, links)
    else:
        yield from describe_item(name, value, links, name.rpartition(".")[0])


def describe_class(name: str, cls: Public, links: Links) -> Iterator[str]:
    """Yield the constructor, docstrings, attributes and methods of a class."""
    constructor, short = find_constructor(cls), name.rpartition(".")[2]
    known = documented_bases(cls)
    bases = shown_bases(cls, known)
    head = f"class {short}({', '.join(bases)})" if bases else f"class {short}"
    of_class = "" if constructor is None else "\n" + signature_of(short, constructor, of_class=True)
    yield from ("```python", head + of_class, "```", "")
    yield from (markdown(docstring_of(cls), links, name), "")
    if constructor is not None and constructor.docstring is not None:
        yield from (markdown(docstring_of(constructor), links, name), "")
    inherited = {base.canonical_path for base in known}
    attributes = {
        attribute: item
        for attribute, item in list_members(cls).items()
        if item.is_attribute and (attribute in cls.members or parent_of(item) not in inherited)
    }
    if attributes:
        yield from (*(describe_attribute(key, item, links, name) for key, item in attributes.items()), "")
    for method, item in methods_of(cls).items():
        yield from (f"## `{method}`", "", *describe_item(f"{name}.{method}", item, links, name))


def describe_attribute(name: str, item: Public, links: Links, owner: str) -> str:
    """Return a line of a list: the name, its type or value, and the docstring."""
    annotation, value = item.annotation, str(item.value)  # type: ignore[union-attr]
    text = re.sub(r"^Final\[(.*)\]$", r"\1", type_of(annotation)) if annotation is not None else ""
    shown = f"{name}: {text}" if text else f"{name} = {value}" if value.isdecimal() else name
    described = " ".join(markdown(docstring_of(item), links, owner).split())
    return f"- `{shown}`" + (f": {described}" if described else "")


def describe_item(name: str, item: Public, links: Links, owner: str) -> Iterator[str]:
    """Yield the signature of a function, or the value of a constant, and the docstring."""
    target = item.final_target if isinstance(item, griffe.Alias) else item
    if isinstance(target, griffe.Function):
        labels = [f"@{label}" for label in ("staticmethod", "classmethod") if label in target.labels]
        yield from ("```python", *labels, signature_of(name, target), "```", "")
    elif isinstance(target, griffe.Attribute):
        annotation = f": {type_of(target.annotation)}" if target.annotation is not None else ""
        value = f" = {double_quoted(target.value)}" if len(str(target.value)) <= MAX_VALUE else ""
        yield from ("```python", f"{name}{annotation}{value}", "```", "")
    yield from (markdown(docstring_of(item), links, owner), "")


if __name__ == "__main__":
    main()
