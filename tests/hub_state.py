"""What the tests' Hub holds: repositories of commits and branches, large files, and faults to come."""

import hashlib
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

TOKEN = "hf_of_the_local_hub"
USER = "someone"


@dataclass(frozen=True)
class Blob:
    """A file's content; `large` ones are stored by LFS."""

    content: bytes
    large: bool = False

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def oid(self) -> str:
        """What git calls it: of an LFS file, that of its pointer."""
        content = self.pointer if self.large else self.content
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    @property
    def pointer(self) -> bytes:
        lines = ("version https://git-lfs.github.com/spec/v1", f"oid sha256:{self.sha256}")
        return "".join(f"{line}\n" for line in (*lines, f"size {len(self.content)}")).encode()


Files = Mapping[str, Blob]


@dataclass
class Repository:
    """Branches, and every commit's files."""

    branches: dict[str, str] = field(default_factory=dict[str, str])
    commits: dict[str, Files] = field(default_factory=dict[str, Files])

    def commit(self, branch: str, files: Files) -> str:
        """Make `files` the whole content of the branch."""
        described = [f"{path} {blob.oid}" for path, blob in sorted(files.items())]
        text = "\n".join([self.branches.get(branch, ""), *described])
        oid = hashlib.sha1(text.encode()).hexdigest()
        self.commits[oid] = dict(files)
        self.branches[branch] = oid
        return oid

    def resolve(self, revision: str) -> str | None:
        """The commit that a branch's name or full name says, or itself."""
        known = revision if revision in self.commits else None
        return self.branches.get(revision.removeprefix("refs/heads/"), known)


@dataclass
class Fault:
    """What goes wrong with requests of which `pattern` matches the start of "METHOD /path".

    kind: "cut" closes the connection before the request is carried out, "cut after" instead of the answer,
    "cut within" in the middle of the answer's body; "error" answers 500; "tamper" flips the last bit of the
    answer.
    times: of how many requests; None for all. before: runs before the request is carried out.
    """

    pattern: str
    kind: Literal["cut", "cut after", "cut within", "error", "tamper", "none"] = "none"
    times: int | None = 1
    before: Callable[[], object] | None = None

    def strikes(self, request: str) -> bool:
        if self.times == 0 or not re.match(self.pattern, request):
            return False
        if self.times is not None:
            self.times -= 1
        return True


class HubState:
    """Repositories by "owner/name", and what happens to requests."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.large_files: dict[str, bytes] = {}
        self.trusted_publishers: set[str] = set()
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self.lock = threading.Lock()

    def add(self, repo: str, build: Path, version: int = 1) -> str:
        """Put a build folder there as a version, without a request; returns the commit."""
        files = {
            f"build/{path.relative_to(build).as_posix()}": Blob(path.read_bytes())
            for path in build.rglob("*")
            if path.is_file()
        }
        return self.repositories.setdefault(repo, Repository()).commit(f"v{version}", files)

    def files(self, repo: str, branch: str) -> Files:
        repository = self.repositories[repo]
        return repository.commits[repository.branches[branch]]

    def versions(self, repo: str) -> set[str]:
        """The branches that `kernels` takes for versions."""
        repository = self.repositories.get(repo, Repository())
        return {branch for branch in repository.branches if re.fullmatch(r"v\d+", branch)}

    def strike(self, request: str) -> list[Fault]:
        """The faults that this request meets."""
        with self.lock:
            self.requests.append(request)
            return [fault for fault in self.faults if fault.strikes(request)]
