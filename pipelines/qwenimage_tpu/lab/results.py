"""Files of results: whole or not there, with the versions that decided them."""

import hashlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

KERNELS = "qwenimage_tpu_pallas"
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
    """Of the packages that decide the results, those that are there; for our kernels, their digest."""
    spec = importlib.util.find_spec(KERNELS)
    versions = {KERNELS: sources_digest(Path(spec.origin).parent)} if spec and spec.origin else {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def sources_digest(package: Path) -> str:
    """The start of the SHA-256 of a package's modules and their paths."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(package).as_posix()} {content}\n".encode())
    return digest.hexdigest()[:16]
