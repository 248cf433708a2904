"""The command's steps: check, compare with the Hub, show, upload, confirm."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalTokenNotFoundError,
)
from huggingface_hub.utils import validate_repo_id
from rich.console import Console
from rich.table import Table

from qwenimage_tpu.environment import was_interrupted
from qwenimage_tpu.hub_retries import causes, no_hub_progress, with_retries
from qwenimage_tpu.kernel_loader import KERNEL_VERSION

from .confirm import try_version
from .public_api import changes
from .release import Release, make_release
from .repository import MAIN, Difference, KernelRepository, PublishError, RepositoryState

PLAIN: dict[str, Any] = {"highlight": False, "soft_wrap": True}
GET_A_TOKEN = (
    "get one with write access at https://huggingface.co/settings/tokens, and pass it with --token or log in"
    " with `hf auth login`"
)


def publish(root: Path, repo: str, token: str | None, *, upload: bool, console: Console) -> None:
    """Publish the kernels of the clone at `root` as build.toml's version; without `upload` only say how.

    Raises:
        ValueError: `repo` is no name, the clone is not fit to be published, or its API needs another version.
        PublishError: the build does not work, or the Hub refused or could not be reached.
    """
    check_name(repo)
    if token is not None and not token.strip():
        raise ValueError(f"the token is empty; {GET_A_TOKEN}")
    with console.status("putting the release together"):
        release = make_release(root, repo)
    version = release.config.version
    if version != KERNEL_VERSION:
        raise ValueError(
            f"the pipeline of a clone must use its kernels, but build.toml says version {version} and"
            f" KERNEL_VERSION in pipelines/qwenimage_tpu/kernel_loader.py {KERNEL_VERSION}: set both"
        )
    console.print(f"{root}, commit {release.commit[:12]}: committed, built, benchmarked", **PLAIN)
    with console.status("trying the build in a fresh process"):
        try:
            try_version(str(root / "build"), version, None, release.build_ids)
        except PublishError as error:
            raise PublishError(f"the build does not work, and was not uploaded:\n{error}") from error
    repository = KernelRepository(HfApi(token=token), repo)
    with no_hub_progress():
        if not upload:
            compare(release, repository, console)
            console.print("nothing was uploaded; say --upload to do it", **PLAIN)
            return
        commit = upload_release(release, repository, console)
    console.print(f"v{version} of {repo} is commit {commit}", **PLAIN)
    with console.status("loading it from the Hub in a fresh process and cache"):
        try:
            found = try_version(repo, version, token, release.build_ids)
        except PublishError as error:
            raise PublishError(
                f"v{version} of {repo} is public now, but what the Hub gives does not work:\n{error}\nRun the"
                f" command again; if that does not help, publish a fix, or delete the branch v{version} there"
            ) from error
    console.print(f"loaded from the Hub: {found}", **PLAIN)
    console.print(_how_to_load(repository, version), **PLAIN)


def check_name(repo: str) -> None:
    """Raise ValueError unless it is an owner's repository on the Hub."""
    try:
        validate_repo_id(repo)
        valid = repo.count("/") == 1
    except HFValidationError:
        valid = False
    if not valid:
        raise ValueError(
            f"--repo must be owner/name, as in org/qwenimage-tpu-kernels, but is {repo!r}; correct it"
        )


def upload_release(release: Release, repository: KernelRepository, console: Console) -> str:
    """Bring the release to its branch, in whole or not at all; returns the commit there.

    Raises:
        ValueError, PublishError: as `publish`.
    """
    user = _ask("asking whose token it is", lambda: _user(repository.api), console)
    console.print(f"publishing as {user}", **PLAIN)
    checked = compare(release, repository, console)
    version = release.config.version
    message = f"Version {version}, from commit {release.commit[:12]}"
    return _ask("uploading", lambda: repository.publish(version, release.files, checked, message), console)


def compare(release: Release, repository: KernelRepository, console: Console) -> str | None:
    """Check the version and print what an upload would do; returns the commit of the version, if any."""
    state = _ask("reading the repository", repository.state, console)
    checked = _ask("comparing the API", lambda: check_version(repository, release, state), console)
    needed = Difference(release.files, ())
    if state.branches:
        base = state.branches[f"v{release.config.version}" if checked else MAIN]
        needed = _ask("comparing files", lambda: repository.difference(base, release.files), console)
    _print_plan(console, repository.repo, release, state, needed)
    return checked


def check_version(repository: KernelRepository, release: Release, state: RepositoryState) -> str | None:
    """The commit of the release's version, None if it is new.

    Raises:
        ValueError: the version is older than one that is published and not among them, or its API differs
            from what is published.
    """
    version, published = release.config.version, state.versions
    if version not in published:
        if published and version < max(published):
            raise ValueError(
                f"a new version must be above those that are published, {sorted(published)}, but build.toml"
                f" says {version}: set it to {max(published) + 1}"
            )
        return None
    there = repository.published_api(published[version])
    # A branch without a build has nothing to keep.
    if there and (found := changes(there, release.api)):
        raise ValueError(
            f"a published version keeps its API, but that of v{version} differs from what {repository.repo}"
            f" has:\n  " + "\n  ".join(found) + f"\nset `version` in build.toml and KERNEL_VERSION in"
            f" pipelines/qwenimage_tpu/kernel_loader.py to {max(published) + 1}, run `make build` and commit"
        )
    return published[version]


def _ask[Answer](step: str, call: Callable[[], Answer], console: Console) -> Answer:
    """Do a step on the Hub, again after what passes. Raises PublishError with what the Hub said."""

    def on_retry(error: Exception) -> None:
        console.print(f"{step} failed, trying again: {error}", style="yellow", **PLAIN)

    if was_interrupted():
        raise KeyboardInterrupt
    try:
        with console.status(step):
            return with_retries(call, on_retry)
    except Exception as error:
        if not any(isinstance(each, HTTPError) for each in causes(error)):
            raise
        raise PublishError(
            f"{step} failed on {constants.ENDPOINT}: {error}\nNo version is half published: what is there"
            " already is not uploaded twice. Check the network and the token's rights, and run it again."
        ) from error


def _user(api: HfApi) -> str:
    try:
        return api.whoami()["name"]
    except LocalTokenNotFoundError as error:
        raise PublishError(f"publishing needs a token of the Hub, but has none: {GET_A_TOKEN}") from error
    except HfHubHTTPError as error:
        if error.response.status_code != 401:
            raise
        raise PublishError(f"the Hub does not know this token: {GET_A_TOKEN}") from error


def _print_plan(
    console: Console, repo: str, release: Release, state: RepositoryState, needed: Difference
) -> None:
    version, published = release.config.version, state.versions
    table = Table(title=f"{repo}, version {version}", show_header=False)
    if version in published:
        status = f"exists, at {published[version][:12]}; same API"
    else:
        versions = ", ".join(f"v{each}" for each in sorted(published)) or "none"
        status = f"new; published: {versions}" if state.branches else "new, as the repository is"
    size = sum(map(len, needed.added.values()))
    table.add_row(f"branch v{version}", status)
    table.add_row("files", f"{len(release.files)} in all")
    table.add_row("to upload", f"{len(needed.added)} of {size / 1e6:.2f} MB" if needed.added else "none")
    table.add_row("to delete", str(len(needed.deleted)) if needed.deleted else "none")
    for variant, build_id in release.build_ids.items():
        table.add_row(variant, build_id)
    console.print(table)


def _how_to_load(repository: KernelRepository, version: int) -> str:
    """What users write. Of a publisher that the Hub does not trust they must say that they do."""
    repo = repository.repo
    try:
        owner = repository.api.get_organization_overview(repo.split("/")[0])
        trusted = getattr(owner, "trustedKernelPublisher", False)
    except HTTPError:  # a person, and no organization
        trusted = False
    if trusted:
        return f'users load it with get_kernel("{repo}", version={version})'
    return (
        f'users load it with get_kernel("{repo}", version={version}, trust_remote_code=["{repo}"]), as the'
        " Hub does not list its owner as a trusted publisher of kernels"
    )
