"""The public API of a kernel package, read from its sources; nothing of it is imported.

Griffe parses, follows the relative imports and prints the signatures.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import griffe

# What a class's user calls without naming it.
CALLED = ("__init__", "__call__")


@dataclass(frozen=True)
class Declaration:
    """kind: "function", "class", "attribute" or "module". text: its signature. summary: of its docstring."""

    kind: str
    text: str
    summary: str


def public_api(package: Path) -> dict[str, Declaration]:
    """Everything that `__all__` of a kernel package reaches, by dotted name.

    Functions, classes with their public members, constants, and the modules among them with all that they
    define.

    Raises:
        ValueError: the package has no `__all__`, or it names what is not there.
    """
    loader = griffe.GriffeLoader(search_paths=[package.parent])
    module: Any = loader.load(package)
    loader.resolve_aliases(implicit=True)
    if not module.exports:
        raise ValueError(f"{package / '__init__.py'} must list its API in __all__, but does not: add it")
    declared: dict[str, Declaration] = {}
    for name in sorted(map(str, module.exports)):
        if name not in module.members:
            raise ValueError(f"__all__ of {package / '__init__.py'} names {name}, which is not there")
        found = module[name]
        declared |= dict(_declarations(name, found.final_target if found.is_alias else found))
    return declared


def _declarations(name: str, found: Any) -> Iterator[tuple[str, Declaration]]:
    yield name, Declaration(found.kind.value, _text(found), _summary(found))
    if not (found.is_module or found.is_class):
        return
    for member_name, member in found.members.items():
        private = member_name.startswith("_") and member_name not in CALLED
        # An alias is what the module imports for itself.
        if not (private or member.is_alias):
            yield from _declarations(f"{name}.{member_name}", member)


def _text(found: Any) -> str:
    if found.is_function:
        return found.signature()
    if found.is_class:
        return f"class {found.name}({', '.join(map(str, found.bases))})"
    if found.is_attribute and found.annotation is not None:
        return f"{found.name}: {found.annotation}"
    return found.name


def _summary(found: Any) -> str:
    return " ".join(found.docstring.value.split("\n\n")[0].split()) if found.docstring else ""


def changes(published: Mapping[str, Declaration], ours: Mapping[str, Declaration]) -> list[str]:
    """What differs, a line each: what was added, removed and changed. Summaries do not count."""
    lines = [f"added: {name}: {ours[name].text}" for name in ours.keys() - published.keys()]
    lines += [f"removed: {name}: {published[name].text}" for name in published.keys() - ours.keys()]
    lines += [
        f"changed: {name}: {published[name].text} is now {ours[name].text}"
        for name in published.keys() & ours.keys()
        if published[name].text != ours[name].text
    ]
    return sorted(lines)
