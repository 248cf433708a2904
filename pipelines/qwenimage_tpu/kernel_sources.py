"""Where a kernel build is: in a folder, beside this package, or on the Hub. Nothing here imports it."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from .hub_retries import causes, is_passing, is_unreachable, no_hub_progress, with_retries

if TYPE_CHECKING:
    from kernels import Metadata

REPO_ID = "org/qwenimage-tpu-kernels"

COMMIT = re.compile(r"[0-9a-f]{40}")
DISK_ERRORS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG),  # full
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST),  # not to be written
)


class KernelLoadError(RuntimeError):
    """The kernels cannot be found, do not match their digests, or fail to import."""


@dataclass(frozen=True)
class Located:
    """A build on disk, not yet imported.

    remedy: what helps if it is damaged. load: imports it through `kernels`.
    """

    repo: str
    path: Path
    metadata: Metadata
    remedy: str
    load: Callable[[], ModuleType]


def locate(repo: str | None, version: int, *, trust_remote_code: bool | list[str]) -> Located:
    """Find, and from the Hub download, the build that `repo` names as in `load_kernels`.

    Raises:
        KernelLoadError: there is none for this machine, or its publisher is not trusted.
    """
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


def _locate_local(repo: str, folder: Path, load: Callable[[], ModuleType]) -> Located:
    from kernels.resolver import resolve_local_kernel

    remedy = f"run `make build` (in a clone), or get the build in {folder} again"
    try:
        kernel = resolve_local_kernel(folder, backend=None)
    except Exception as error:
        raise KernelLoadError(
            f"No usable kernel build in {folder}: {error}\nTo cure it, {remedy}."
        ) from error
    return Located(repo, kernel.variant_path, kernel.metadata, remedy, load)


def _locate_on_hub(repo: str, version: int, trust_remote_code: bool | list[str]) -> Located:
    from huggingface_hub import constants
    from kernels import Metadata, get_local_kernel, install_kernel

    name, at, revision = repo.partition("@")
    if name.count("/") != 1 or name.startswith((".", "/", "~")) or (at and not revision):
        raise KernelLoadError(
            f"A kernel repository is an existing folder or a Hub id, owner/name or owner/name@revision;"
            f" {repo!r} is neither: correct the path or the id."
        )
    trusted = [name] if trust_remote_code is True else trust_remote_code or []

    def install(*, offline: bool) -> Path:
        path = install_kernel(
            name,
            revision=revision or None,
            version=None if revision else version,
            local_files_only=offline,
            trust_remote_code=trusted,
        )
        if not offline:
            _complete_cache(name, revision or f"v{version}")
        return path

    def find() -> Path:
        if constants.HF_HUB_OFFLINE:
            return install(offline=True)
        # What a commit holds never changes, and offline nothing but the caller's word is asked for trust.
        if COMMIT.fullmatch(revision) and name in trusted:
            with suppress(FileNotFoundError):
                return install(offline=True)
        return with_retries(lambda: install(offline=False))

    try:
        with no_hub_progress():
            path = find()
        metadata = Metadata.read_from_file(path / "metadata.json")
    # kernels, huggingface_hub and the HTTP client below them share no base class for their errors.
    except Exception as error:
        wanted = f"revision {revision}" if revision else f"version {version}"
        raise KernelLoadError(
            f"Cannot get {wanted} of the kernels from {name!r} on {constants.ENDPOINT}: {error}\n"
            f"{_hub_remedy(error, offline=constants.HF_HUB_OFFLINE)}"
        ) from error

    # <cache>/<repository>/snapshots/<commit>/build/<variant>. What is imported is what was verified, wherever
    # the branch of the version may have moved in between.
    cached_repository = path.parents[3]
    return Located(
        repo,
        path,
        metadata,
        f"delete {cached_repository} and run again to download it afresh; if that does not help, the"
        " repository itself is damaged: tell its owner",
        lambda: get_local_kernel(path),
    )


def _complete_cache(name: str, revision: str) -> None:
    """Let the cache serve offline: there, `kernels` wants the branch's name and all files of the repository,
    but online it downloads one variant of a commit.
    """
    from huggingface_hub import snapshot_download
    from kernels.hf_hub import CACHE_DIR

    snapshot_download(name, repo_type="kernel", revision=revision, cache_dir=CACHE_DIR)


def _hub_remedy(error: BaseException, *, offline: bool) -> str:
    asked = not (is_passing(error) or is_unreachable(error))
    if asked and re.search("trusted publisher|publisher trust", str(error)):
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
    if offline:
        return (
            "With HF_HUB_OFFLINE=1 all of its files must be in the cache: load it once without, or name no"
            " repository, for the build that comes with this package."
        )
    return (
        "Check the name, the network, and HF_ENDPOINT if it is set. Or name no repository, for the build that"
        " comes with this package; with HF_HUB_OFFLINE=1 what was loaded before comes from the cache."
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
