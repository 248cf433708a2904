"""Load the kernels through the `kernels` library, after verifying every file of the build.

`kernels` imports a build without comparing it with the digests in its metadata.json. Here nothing of a
build runs before each of its files has been compared, and Python bytecode, which digests leave out, is
never read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from .kernel_sources import REPO_ID, KernelLoadError, Located, locate
from .source_only import source_only

if TYPE_CHECKING:
    from kernels import Metadata

__all__ = ["KERNEL_VERSION", "REPO_ID", "KernelLoadError", "LoadedKernels", "load_kernels"]

KERNEL_NAME = "qwenimage-tpu-kernels"
KERNEL_VERSION = 1


@dataclass(frozen=True)
class LoadedKernels:
    """The imported kernel package and where it came from."""

    module: ModuleType
    repo: str
    version: int
    build_id: str
    variant: str
    path: Path


def load_kernels(
    repo: str | None = None, *, version: int = KERNEL_VERSION, trust_remote_code: bool | list[str] = False
) -> LoadedKernels:
    """Verify and import the kernels.

    Args:
        repo: None for the build that came with this package (or the one LOCAL_KERNELS names for
            org/qwenimage-tpu-kernels); a folder; or a Hub repository, "owner/name" for its branch of the
            version or "owner/name@revision" for a commit (40 digits, as in kernels.lock), a branch or a tag.
        version: of the kernels' API; what is loaded must be of it.
        trust_remote_code: whether code of a Hub repository may run whose publisher the Hub does not list as a
            trusted publisher of kernels; or, as in `get_kernel`, a list of repositories of which it may.

    Raises:
        KernelLoadError: no build is found for this machine, the publisher is not trusted, a file of the build
            is altered, missing or unknown, the build has no digest or is not that version of
            qwenimage-tpu-kernels, or its import fails.
    """
    located = locate(repo, version, trust_remote_code=trust_remote_code)
    metadata = located.metadata
    _check_identity(located, version)
    _verify_files(located)

    module = _already_loaded(metadata)
    if module is None:
        module = _import(located)
    return LoadedKernels(
        module=module,
        repo=located.repo,
        version=version,
        build_id=metadata.id,
        variant=located.path.name,
        path=located.path.resolve(),
    )


def _check_identity(located: Located, version: int) -> None:
    metadata = located.metadata
    if (str(metadata.name), metadata.version) != (KERNEL_NAME, version):
        raise KernelLoadError(
            f"{located.path} must be version {version} of {KERNEL_NAME}, but its metadata.json says "
            f"version {metadata.version} of {metadata.name}: name another repository with --kernel-repo."
        )
    if metadata.kernel_depends:
        names = ", ".join(str(dependency.repo_id) for dependency in metadata.kernel_depends)
        raise KernelLoadError(
            f"{located.path} wants other Hub kernels ({names}), which would be imported unverified: name "
            "another repository with --kernel-repo."
        )


def _verify_files(located: Located) -> None:
    from kernels._rust import Digest, DigestValidationError

    expected = located.metadata.digest
    if expected is None:
        raise KernelLoadError(
            f"{located.path / 'metadata.json'} has no digest, so the build cannot be verified.\n"
            f"To cure it, {located.remedy}."
        )
    faults: list[str] = []
    try:
        expected.validate(Digest.hash_variant(expected.algorithm, located.path))
    except DigestValidationError as error:
        faults += [str(violation) for violation in error.violations]
    except OSError as error:
        faults.append(str(error))
    faults += [f"unknown file: {path}" for path in _files_that_digests_ignore(located.path)]
    if faults:
        raise KernelLoadError(
            f"The kernel build in {located.path} is not what its metadata.json says, and was not imported:\n"
            + "\n".join(f"  {fault}" for fault in faults)
            + f"\nTo cure it, {located.remedy}."
        )


def _files_that_digests_ignore(variant: Path) -> Iterator[str]:
    """Importable things that `Digest.hash_variant` does not look at: bytecode modules, linked folders."""
    for folder, subfolders, files in os.walk(variant):
        linked = [name for name in subfolders if (Path(folder) / name).is_symlink()]
        bytecode = [name for name in files if name.endswith(".pyc")]
        for name in sorted(linked + bytecode):
            yield str((Path(folder) / name).relative_to(variant))
        # Bytecode in here may be Python's own cache; source_only keeps it from being read.
        subfolders[:] = [name for name in subfolders if name != "__pycache__"]


def _already_loaded(metadata: Metadata) -> ModuleType | None:
    """The module of this very build, if some path to it has been imported before.

    A second import would register the build's ops a second time, which torch refuses.
    """
    from kernels import get_loaded_kernels

    for loaded in get_loaded_kernels():
        if loaded.metadata.id != metadata.id:
            continue
        if _digest_files(loaded.metadata) != _digest_files(metadata):
            raise KernelLoadError(
                f"Another build with the id {metadata.id} and other files is loaded already: assemble "
                "both with `make build`, which derives the id from the sources, or start a new process."
            )
        return loaded.module
    return None


def _digest_files(metadata: Metadata) -> dict[str, str]:
    return {} if metadata.digest is None else metadata.digest.files


def _import(located: Located) -> ModuleType:
    build_id = located.metadata.id
    try:
        with source_only(build_id):
            module = located.load()
    except Exception as error:
        raise KernelLoadError(
            f"The kernel build {build_id} in {located.path} is intact but cannot be imported: {error}\n"
            "Run `qwenimage-tpu doctor` to see which packages do not fit."
        ) from error
    if module.__name__ != build_id:
        # `kernels` remembers modules by path, so it returns what was there before.
        raise KernelLoadError(
            f"{located.path} now holds {build_id}, but this process has loaded {module.__name__} from it: "
            "start a new process to use the new build."
        )
    return module
