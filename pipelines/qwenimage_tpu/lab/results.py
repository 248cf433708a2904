"""Files of results: whole or not there, with the versions that decided them."""

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
