"""The kernel repository on the Hub: what is there, and how a version gets there whole or not at all."""

import hashlib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile

from .public_api import Declaration, public_api

MAIN = "main"
REPO_TYPE = "kernel"
# Of what a release writes, so what an older one left there is deleted.
FOLDERS = ("build/", "benchmarks/")
CONFLICTS = (409, 412)


class PublishError(RuntimeError):
    """The Hub refused, could not be reached, or holds what does not go with the release."""


@dataclass(frozen=True)
class RepositoryState:
    """Branches and their commits; none if there is no repository."""

    branches: Mapping[str, str]

    @property
    def versions(self) -> dict[int, str]:
        """The commit of each version, which is a branch v<version>."""
        return {
            int(name[1:]): commit
            for name, commit in self.branches.items()
            if name.startswith("v") and name[1:].isdecimal()
        }


@dataclass(frozen=True)
class Difference:
    """Files to add or replace, and files to delete, so that a branch becomes the release."""

    added: Mapping[str, bytes]
    deleted: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.added or self.deleted)


class KernelRepository:
    """A repository of kernels, through huggingface_hub."""

    def __init__(self, api: HfApi, repo: str) -> None:
        self.api = api
        self.repo = repo

    def state(self) -> RepositoryState:
        try:
            refs = self.api.list_repo_refs(self.repo, repo_type=REPO_TYPE)
        except RepositoryNotFoundError:
            return RepositoryState({})
        return RepositoryState({branch.name: branch.target_commit for branch in refs.branches})

    def published_api(self, commit: str) -> dict[str, Declaration]:
        """The API of a published commit; its sources are parsed and not run."""
        with tempfile.TemporaryDirectory(prefix="qwenimage-tpu-") as folder:
            self.api.snapshot_download(
                self.repo,
                repo_type=REPO_TYPE,
                revision=commit,
                allow_patterns=["build/*.py"],
                local_dir=folder,
            )
            variants = sorted(Path(folder).glob("build/*/__init__.py"))
            if not variants:
                return {}
            return public_api(variants[0].parent)

    def difference(self, revision: str, files: Mapping[str, bytes]) -> Difference:
        """What it takes to make a branch or commit hold `files`."""
        there = {
            entry.path: entry
            for entry in self.api.list_repo_tree(
                self.repo, repo_type=REPO_TYPE, revision=revision, recursive=True
            )
            if isinstance(entry, RepoFile)
        }
        added = {
            path: content
            for path, content in files.items()
            if path not in there or not _is_same(there[path], content)
        }
        deleted = tuple(path for path in there if path.startswith(FOLDERS) and path not in files)
        return Difference(added, deleted)

    def publish(self, version: int, files: Mapping[str, bytes], checked: str | None, message: str) -> str:
        """Make branch v<version> hold `files`; returns its commit. Doing it again changes nothing.

        A new version is committed to main, and its branch begins at that commit, so that it is never there
        without its files. One that exists gets one commit, and main another if no version is newer.

        checked: the commit of the version that the API was compared with, None if there was none.

        Raises:
            PublishError: somebody else published meanwhile.
        """
        self.api.create_repo(self.repo, repo_type=REPO_TYPE, exist_ok=True)
        state, branch = self.state(), f"v{version}"
        if branch in state.branches:
            commit = self._commit(branch, state.branches[branch], files, checked, message)
            if version == max(state.versions):
                self._commit(MAIN, state.branches[MAIN], files, state.branches[MAIN], message)
            return commit
        commit = self._commit(MAIN, state.branches[MAIN], files, state.branches[MAIN], message)
        try:
            self.api.create_branch(self.repo, branch=branch, revision=commit, repo_type=REPO_TYPE)
        except HfHubHTTPError as error:
            raise self._explain(error, branch) from error
        return commit

    def _commit(
        self, branch: str, head: str, files: Mapping[str, bytes], checked: str | None, message: str
    ) -> str:
        needed = self.difference(head, files)
        if not needed:
            return head
        if head != checked:
            raise self._moved(branch)
        operations = [
            *(CommitOperationAdd(path, content) for path, content in needed.added.items()),
            *(CommitOperationDelete(path) for path in needed.deleted),
        ]
        try:
            made = self.api.create_commit(
                self.repo,
                operations,
                commit_message=message,
                repo_type=REPO_TYPE,
                revision=branch,
                parent_commit=head,
            )
        except HfHubHTTPError as error:
            raise self._explain(error, branch) from error
        return made.oid

    def _explain(self, error: HfHubHTTPError, branch: str) -> Exception:
        return self._moved(branch) if error.response.status_code in CONFLICTS else error

    def _moved(self, branch: str) -> PublishError:
        return PublishError(
            f"somebody else changed {branch} of {self.repo} meanwhile, and nothing of this release was added"
            " to it: look at what is there, and run the command again"
        )


def _is_same(there: RepoFile, content: bytes) -> bool:
    if there.lfs is not None:
        return there.lfs.sha256 == hashlib.sha256(content).hexdigest()
    return there.blob_id == hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
