"""A package named easydel with nothing but what the adapter looks at, as it was recorded, in a folder of its own."""

from __future__ import annotations

from pathlib import Path

from pagepool.compat.easydel import ENGINE, PLACES, SIGNATURES, VERSION


def write_engine(folder: Path, version: str = VERSION) -> None:
    """Write the package: each class where it is defined, and imports from there in its other places."""
    engine = folder.joinpath(*ENGINE.split("."))
    for place in sorted({place for places in PLACES.values() for place in places}):
        path = engine.joinpath(*place.split("."))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".py").write_text(module_source(place)) if place not in ("", "core") else None
    for package, source in {"": module_source(""), "core": module_source("core"), "runners": "", "scheduler": ""}.items():
        (engine / package / "__init__.py").write_text(source)
    (folder / "easydel" / "__init__.py").write_text(f"__version__ = {version!r}\n")
    (folder / "easydel" / "inference" / "__init__.py").write_text("")


def module_source(place: str) -> str:
    defined = [class_source(name) for name, places in PLACES.items() if places[0] == place]
    imported = [f"from {ENGINE}.{places[0]} import {name}\n" for name, places in PLACES.items() if place in places[1:]]
    modules = sorted({other for places in PLACES.values() for other in places if other})
    submodules = [f"import {ENGINE}.{module}\n" for module in modules] if place == "" else []
    return "".join([*defined, *imported, *submodules])


def class_source(name: str) -> str:
    methods = "".join(method_source(*method) for method in SIGNATURES[name].items())
    return f"class {name}:\n{methods}\n"


def method_source(name: str, signature: str) -> str:
    if signature == "property":
        return f"    @property\n    def {name}(self): ...\n"
    return f"    def {name}{signature}: ...\n"
