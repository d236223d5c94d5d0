"""The public names of pagepool, read from its sources and stubs without importing it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import griffe

ROOT = Path(__file__).parents[1]


class Section(NamedTuple):
    """Public names of a module."""

    title: str
    module: str
    is_top: bool = True
    """Whether users import the names from `pagepool` itself; names missing there are then left out."""
    names: tuple[str, ...] = ()
    """The names; by default those in ``__all__``."""


ADAPTER = ("VARIABLE", "install", "uninstall", "is_installed", "installed", "install_if_asked", "install_on_import")
VLLM = ("EVICTION_VARIABLE", "HINTS_VARIABLE", "PINS_VARIABLE", "SHARES_VARIABLE", "check", "read_hints", "report", "Report")
SECTIONS = (
    Section("Manager", "manager"),
    Section("Running batch", "running_batch"),
    Section("Inputs of a step", "step_inputs"),
    Section("Waiting requests", "waiting_queue"),
    Section("Refusals", "refusal"),
    Section("Requests", "request"),
    Section("Cache groups", "specs"),
    Section("Page tables", "page_table"),
    Section("Page tables and host memory with torch", "torch", False),
    Section("Page pool", "page_pool"),
    Section("Statistics", "stats"),
    Section("Holders of pages", "holders"),
    Section("Why a prompt did not hit", "hit_report"),
    Section("Traces of the allocator", "trace", False),
    Section("Hashes", "hashing"),
    Section("Errors", "errors", False),
    Section("Events", "events", False),
    Section("Publishing events", "events.publisher", False),
    Section("Routers", "router", False),
    Section("Following workers", "router.subscriber", False),
    Section("Ray Serve", "router.ray_serve", False),
    Section("Prometheus", "stats.prometheus", False),
    Section("Copies on the device", "page_copies", False),
    Section("Pages in host memory", "host_pages", False),
    Section("Stores", "stores", False),
    Section("Bytes of stored pages", "stores.frames", False),
    Section("Peers", "peers", False),
    Section("Traces, plans and fleets", "replay", False),
    Section("Hints of requests", "hints", False),
    Section("EasyDeL", "compat.easydel", False, (*ADAPTER, "VERSION")),
    Section("vLLM", "compat.vllm", False, (*ADAPTER, "VERSIONS", *VLLM)),
)
"""All public names, in the order of the site's page."""

INTERNAL = {
    "HostTier": "bind",
    "PageTable": "batch copy_aligned count_dirty_segments cpu_version distrust find_unsent",
    "PagePool": "bind count forget_evicted_names list_sizes of_bank reset store",
    "RunningBatch": "group_specs group_tables",
    "FreeCachePageQueue": "of_store",
    "TimeHistogram": "of",
}
"""Members without an underscore used only by pagepool itself, by class."""

Public = griffe.Object | griffe.Alias


def load(root: Path) -> griffe.Module:
    """Load the package in a folder. Compiled classes are read from their stubs."""
    package = griffe.load(
        "pagepool",
        search_paths=[root],
        try_relative_path=False,
        allow_inspection=False,
        resolve_aliases=True,
        resolve_external=False,
    )
    if not isinstance(package, griffe.Module):
        raise LookupError(f"{root} has no package pagepool")
    return package


def exports_of(module: Public) -> list[str]:
    """Return the names in ``__all__``, in order; without it, the public classes."""
    if module.exports is None:
        return [name for name, value in module.members.items() if not value.is_alias and value.is_class and value.is_public]
    return [str(name) for name in module.exports]


def list_names(package: griffe.Module, section: Section) -> dict[str, Public]:
    """Return the public names of a section as users write them after ``pagepool.``, in the order of ``__all__``. A missing
    module has none.
    """
    try:
        module = package[section.module]
    except KeyError:
        return {}
    names = [name for name in section.names or exports_of(module) if name in module.members]
    if section.is_top:
        return {name: module[name] for name in names if name in exports_of(package)}
    return {f"{section.module}.{name}": module[name] for name in names}


def list_members(cls: Public) -> dict[str, Public]:
    """Return the public members of a class: its own first, then those inherited within the package."""
    members: Mapping[str, Public] = {**cls.members, **cls.inherited_members}
    internal = INTERNAL.get(cls.name, "").split()
    return {name: member for name, member in members.items() if not name.startswith("_") and name not in internal}


def find_constructor(cls: Public) -> griffe.Function | None:
    """Return the constructor of a class: ``__init__``, or ``__new__`` of a compiled class. Return None if neither is defined,
    or if only pagepool makes the objects; a stub then accepts any arguments.
    """
    members = cls.all_members
    found = next((members[name] for name in ("__init__", "__new__") if name in members), None)
    target = found.final_target if isinstance(found, griffe.Alias) else found
    if not isinstance(target, griffe.Function) or [parameter.name for parameter in target.parameters][1:] == ["args", "kwargs"]:
        return None
    return target


def walk(package: griffe.Module) -> Iterator[tuple[str, Public]]:
    """Yield everything public, including methods and attributes, by the names users write after ``pagepool.``. A class is
    followed by its members; its constructor has the name of the class and parentheses.
    """
    for section in SECTIONS:
        for name, value in list_names(package, section).items():
            yield name, value
            if not value.is_class:
                continue
            constructor = find_constructor(value)
            if constructor is not None:
                yield f"{name}()", constructor
            for member, item in list_members(value).items():
                yield f"{name}.{member}", item
