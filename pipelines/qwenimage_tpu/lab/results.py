"""Files of results: whole or not there, with the versions that decided them."""

import ast
import hashlib
import importlib.metadata
import os
from collections.abc import Callable
from pathlib import Path

PACKAGES = ("jax", "libtpu", "torch", "torch-tpu", "tokamax")


def write_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill the file at `path`: complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The ending stays, as it may decide the format.
    unfinished = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        write(unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def installed_versions() -> dict[str, str]:
    """Of the packages that decide the results, those that are there."""
    versions: dict[str, str] = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def sources_digest(module: Path) -> str:
    """The start of the SHA-256 of a module and all that it imports from its own package."""
    waiting, digest = [module.name], hashlib.sha256()
    seen: dict[str, bytes] = {}
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen[name] = (module.parent / name).read_bytes()
        for node in ast.walk(ast.parse(seen[name])):
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                modules = [node.module] if node.module else [alias.name for alias in node.names]
                waiting += [f"{each}.py" for each in modules]
    for name in sorted(seen):
        digest.update(f"{name} {hashlib.sha256(seen[name]).hexdigest()}\n".encode())
    return digest.hexdigest()[:16]
