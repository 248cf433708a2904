"""Load the kernels through the `kernels` library, after verifying every file of the build.

`kernels` imports a build without comparing it with the digests in its metadata.json. Here nothing of a
build runs before each of its files has been compared, and Python bytecode, which digests leave out, is
never read.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from .hub_retries import causes, with_retries
from .source_only import source_only

if TYPE_CHECKING:
    from kernels import Metadata

REPO_ID = "org/qwenimage-tpu-kernels"
KERNEL_NAME = "qwenimage-tpu-kernels"
KERNEL_VERSION = 1

DISK_ERRORS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG),  # full
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST),  # not to be written
)


class KernelLoadError(RuntimeError):
    """The kernels cannot be found, do not match their digests, or fail to import."""


@dataclass(frozen=True)
class LoadedKernels:
    """The imported kernel package and where it came from."""

    module: ModuleType
    repo: str
    version: int
    build_id: str
    variant: str
    path: Path


@dataclass(frozen=True)
class _Located:
    """A build on disk, not yet imported."""

    repo: str
    path: Path
    metadata: Metadata
    remedy: str
    load: Callable[[], ModuleType]


def load_kernels(
    repo: str | None = None, *, version: int = KERNEL_VERSION, trust_remote_code: bool = False
) -> LoadedKernels:
    """Verify and import the kernels.

    Args:
        repo: None for the build that came with this package (or the one LOCAL_KERNELS names for
            org/qwenimage-tpu-kernels); a folder; or a Hub repository, "owner/name" for its branch of the
            version or "owner/name@revision" for a commit (as kernels.lock holds it), a branch or a tag.
        version: of the kernels' API.
        trust_remote_code: run the code of a Hub repository whose publisher the Hub does not list as a trusted
            publisher of kernels.

    Raises:
        KernelLoadError: no build is found for this machine, the publisher is not trusted, a file of the build
            is altered, missing or unknown, the build has no digest or is not that version of
            qwenimage-tpu-kernels, or its import fails.
    """
    located = _locate(repo, version, trust_remote_code)
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


def _locate(repo: str | None, version: int, trust_remote_code: bool) -> _Located:
    from kernels import get_kernel, get_local_kernel

    overrides = _local_overrides()
    if repo is None:
        # Without an override get_kernel would ask the Hub for the placeholder owner "org", whose
        # repository anybody may create.
        if REPO_ID not in overrides:
            overrides[REPO_ID] = _bundled_build()
        _set_local_overrides(overrides)
        return _locate_local(
            REPO_ID,
            overrides[REPO_ID],
            lambda: get_kernel("org/qwenimage-tpu-kernels", version=1),
        )
    _set_local_overrides(overrides)
    folder = Path(repo).expanduser()
    if folder.is_dir():
        folder = folder.resolve()
        return _locate_local(repo, folder, lambda: get_local_kernel(folder))
    if repo in overrides:
        return _locate_local(repo, overrides[repo], lambda: get_kernel(repo, version=version))
    return _locate_on_hub(repo, version, trust_remote_code)


def _locate_local(repo: str, folder: Path, load: Callable[[], ModuleType]) -> _Located:
    from kernels.resolver import resolve_local_kernel

    remedy = f"run `make build` (in a clone), or get the build in {folder} again"
    try:
        kernel = resolve_local_kernel(folder, backend=None)
    except Exception as error:
        raise KernelLoadError(
            f"No usable kernel build in {folder}: {error}\nTo cure it, {remedy}."
        ) from error
    return _Located(repo, kernel.variant_path, kernel.metadata, remedy, load)


def _locate_on_hub(repo: str, version: int, trust_remote_code: bool) -> _Located:
    from huggingface_hub import constants
    from kernels import Metadata, get_kernel, install_kernel

    name, at, revision = repo.partition("@")
    if name.count("/") != 1 or name.startswith((".", "/", "~")) or (at and not revision):
        raise KernelLoadError(
            f"A kernel repository is an existing folder or a Hub id, owner/name or owner/name@revision;"
            f" {repo!r} is neither: correct the path or the id."
        )
    offline = constants.HF_HUB_OFFLINE

    def install() -> Path:
        path = install_kernel(
            name,
            revision=revision or None,
            version=None if revision else version,
            local_files_only=offline,
            trust_remote_code=[name] if trust_remote_code else False,
        )
        if not offline:
            _complete_cache(name, revision or f"v{version}")
        return path

    try:
        path = with_retries(install)
        metadata = Metadata.read_from_file(path / "metadata.json")
    # kernels, huggingface_hub and the HTTP client below them share no base class for their errors.
    except Exception as error:
        wanted = f"revision {revision}" if revision else f"version {version}"
        raise KernelLoadError(
            f"Cannot get {wanted} of the kernels from the Hub repository {name!r}: {error}\n"
            f"{_hub_remedy(error, trust_remote_code)}"
        ) from error

    # <cache>/<repository>/snapshots/<commit>/build/<variant>. The commit pins what is imported to what was
    # verified: the branch of the version may move in between.
    commit, cached_repository = path.parents[1].name, path.parents[3]
    return _Located(
        repo,
        path,
        metadata,
        f"delete {cached_repository} and run again to download it afresh; if that does not help, the"
        " repository itself is damaged: tell its owner",
        # The publisher was checked above, or trusted by the caller.
        lambda: get_kernel(name, revision=commit, trust_remote_code=[name]),
    )


def _complete_cache(name: str, revision: str) -> None:
    """Let the cache serve offline: there, `kernels` wants the branch's name and all files of the repository,
    but online it downloads one variant of a commit.
    """
    from huggingface_hub import snapshot_download
    from kernels.hf_hub import CACHE_DIR

    snapshot_download(name, repo_type="kernel", revision=revision, cache_dir=CACHE_DIR)


def _hub_remedy(error: BaseException, trust_remote_code: bool) -> str:
    if not trust_remote_code and "trust" in str(error):
        return (
            "Its code would run with your rights. If you trust whoever publishes it, allow it with"
            " --trust-remote-code, in Python with load_kernels(..., trust_remote_code=True) or"
            " get_kernel(..., trust_remote_code=[...])."
        )
    if any(isinstance(each, OSError) and each.errno in DISK_ERRORS for each in causes(error)):
        return (
            "The cache's folder must be writable and have room for some MB: free some, or name another folder"
            " with KERNELS_CACHE (or HF_HOME)."
        )
    return (
        "Check the name and the network (HF_HUB_OFFLINE=1 allows only what is cached), or leave --kernel-repo"
        " out to use the build that comes with this package."
    )


def _local_overrides() -> dict[str, Path]:
    """What LOCAL_KERNELS="repo=path:repo=path" says."""
    overrides: dict[str, Path] = {}
    for entry in filter(None, os.environ.get("LOCAL_KERNELS", "").split(":")):
        repo, separator, path = entry.partition("=")
        if not separator:
            raise KernelLoadError(
                f"LOCAL_KERNELS must be owner/name=path entries separated by ':'; {entry!r} has no '=': "
                "correct or unset it."
            )
        overrides[repo] = Path(path)
    return overrides


def _set_local_overrides(overrides: dict[str, Path]) -> None:
    """Write LOCAL_KERNELS as `kernels` wants it, which refuses an empty value or entry."""
    if overrides:
        os.environ["LOCAL_KERNELS"] = ":".join(f"{repo}={path}" for repo, path in overrides.items())
    else:
        os.environ.pop("LOCAL_KERNELS", None)


def _bundled_build() -> Path:
    package = Path(__file__).resolve().parent
    candidates = [package / "kernels_build"]  # where the wheel puts it
    if package.parent.name == "pipelines":
        candidates.insert(0, package.parents[1] / "build")
    for candidate in candidates:
        if not any(candidate.glob("torch-*/metadata.json")):
            continue
        if ":" in str(candidate):
            raise KernelLoadError(
                f"LOCAL_KERNELS separates entries by ':', so it cannot hold {candidate}: move the project "
                "to a path without ':', or name the folder with --kernel-repo."
            )
        return candidate
    raise KernelLoadError(
        f"This installation has no kernel build (looked in {', '.join(map(str, candidates))}): run "
        "`make build` in the clone, or name a build with --kernel-repo."
    )


def _check_identity(located: _Located, version: int) -> None:
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


def _verify_files(located: _Located) -> None:
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


def _import(located: _Located) -> ModuleType:
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
