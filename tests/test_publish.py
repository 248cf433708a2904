"""Publishing: what is checked in the clone, what gets to the Hub, and that faults leave no half version."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

import pytest
from huggingface_hub import HfApi, constants
from PIL import Image

from hub_state import TOKEN, Blob, Fault, Repository
from kernel_trees import ROOT
from local_hub import LocalHub
from qwenimage_tpu import environment
from qwenimage_tpu.publishing.command import compare, publish, upload_release
from qwenimage_tpu.publishing.release import PICTURE, Release, make_release
from qwenimage_tpu.publishing.repository import KernelRepository, PublishError
from release_trees import Printed, build_and_commit, edit, git, make_clone

REPO = "org/qwenimage-tpu-kernels"

# huggingface_hub's way of sending a large file.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")


@pytest.fixture(scope="session")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    """This checkout's kernels as version 1."""
    return make_release(make_clone(tmp_path_factory.mktemp("release")), REPO)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Generator[LocalHub]:
    """An empty Hub, which huggingface_hub asks in this process and in those that are started."""
    with LocalHub() as hub:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        # The clients wait longer and longer between their attempts.
        monkeypatch.setattr(time, "sleep", lambda _: None)
        yield hub


def repository(repo: str = REPO, token: str | Literal[False] = TOKEN) -> KernelRepository:
    return KernelRepository(HfApi(token=token), repo)


def changed(release: Release, path: str, content: bytes) -> Release:
    return dataclasses.replace(release, files=release.files | {path: content})


def contents(hub: LocalHub, branch: str) -> dict[str, bytes]:
    files = {path: blob.content for path, blob in hub.files(REPO, branch).items()}
    files.pop(".gitattributes", None)  # the Hub's own
    return files


def test_release_holds_build_card_and_benchmark(release: Release) -> None:
    build = {path for path in release.files if path.startswith("build/")}
    assert {path.split("/")[1] for path in build} == set(release.build_ids)
    assert set(release.files) - build == {
        "LICENSE",
        "README.md",
        "benchmarks/attention.json",
        "benchmarks/benchmark.py",
        PICTURE,
    }
    assert {path: (ROOT / path).read_bytes() for path in build} == {p: release.files[p] for p in build}


def test_card_is_made_of_the_api_and_the_benchmark(release: Release, tmp_path: Path) -> None:
    card = release.files["README.md"].decode()
    assert card.startswith("---\nlibrary_name: kernels\n")
    assert f'get_kernel("{REPO}", version=1, trust_remote_code=["{REPO}"])' in card
    for name in ("joint_attention", "patch_transformer", "RMSNorm", "QwenImageTransformerBlock"):
        assert re.search(rf"^\| `{name}` \| \S", card, re.M)
    reports = json.loads(release.files["benchmarks/attention.json"])["reports"]
    ours = next(each for each in reports[0]["results"] if each["contender"] == "ours, bounded softmax")
    assert f"| **ours, bounded softmax** | {ours['measured']['cycles']:,} |" in card
    assert "{" not in card.split("```")[-1]
    (tmp_path / "picture.png").write_bytes(release.files[PICTURE])
    with Image.open(tmp_path / "picture.png") as picture:
        assert picture.width == 850


def test_a_release_is_the_same_bytes_again(release: Release, tmp_path: Path) -> None:
    again = make_release(make_clone(tmp_path), REPO)
    assert again.files == release.files


def test_usage_of_the_card_runs(release: Release, kernel_build: Path) -> None:
    usage = release.files["README.md"].decode().split("```python\n")[1].split("```")[0]
    environ = os.environ | {"LOCAL_KERNELS": f"{REPO}={kernel_build}"}
    subprocess.run(
        [sys.executable, "-c", usage + "assert image_out.shape == (2, 72, 256)"], env=environ, check=True
    )


def _forget_to_build(root: Path) -> None:
    with (root / "torch_ext/qwenimage_tpu_kernels/layers.py").open("a") as file:
        file.write("# changed\n")
    git(root, "commit", "-qam", "not built")


def _forget_to_commit(root: Path) -> None:
    (root / "notes.txt").touch()


def _change_a_kernel(root: Path) -> None:
    with (root / "kernels_src/qwenimage_tpu_pallas/attention_order.py").open("a") as file:
        file.write("# changed\n")
    build_and_commit(root)


def _lose_the_benchmark(root: Path) -> None:
    (root / "benchmarks/attention.json").unlink()
    build_and_commit(root)


def _leave_git(root: Path) -> None:
    (root / ".git").rename(root / "not.git")


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (
            _forget_to_build,
            r"build/ must be what the sources give, but 12 of its files differ, .*run `make build`",
        ),
        (_forget_to_commit, r"must be committed, but git reports\n\?\? notes.txt\n"),
        (
            _change_a_kernel,
            r"the benchmark must be of the kernel in build/.*run `qwenimage-tpu bench attention",
        ),
        (_lose_the_benchmark, r"attention.json must hold the benchmark's results, but is missing"),
        (_leave_git, r"publishing takes a git clone of the project, but .* is none"),
    ],
)
def test_clone_that_is_not_fit_is_refused(
    tmp_path: Path, mistake: Callable[[Path], None], message: str
) -> None:
    root = make_clone(tmp_path)
    mistake(root)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        make_release(root, REPO)


def test_dry_run_uploads_nothing(hub: LocalHub, release: Release) -> None:
    printed = Printed()
    assert compare(release, repository(token=False), printed) is None
    assert re.search(r"branch v1\W+new, as the repository is", printed.text)
    assert re.search(rf"to upload\W+{len(release.files)} of", printed.text)
    assert all(request.startswith("GET ") for request in hub.requests)


def test_published_version_loads_by_version_then_offline_and_paints_the_same(
    hub: LocalHub, tmp_path: Path
) -> None:
    root, printed = make_clone(tmp_path / "clone"), Printed()
    publish(root, REPO, TOKEN, upload=True, console=printed)
    assert re.search(
        r"loaded from the Hub: torch-\w+, _qwenimage_tpu_kernels_\w+, RMSNorm is right", printed.text
    )
    assert f'trust_remote_code=["{REPO}"]' in printed.text
    commit = hub.repositories[REPO].branches["v1"]
    assert f"v1 of {REPO} is commit {commit}" in printed.text
    assert hub.repositories[REPO].branches["main"] == commit

    environ = os.environ | {"KERNELS_CACHE": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "home")}
    environ.pop("LOCAL_KERNELS", None)

    def run(*arguments: str, offline: bool = False) -> str:
        switch = {"HF_HUB_OFFLINE": str(int(offline))}
        command = [sys.executable, *arguments]
        done = subprocess.run(command, env=environ | switch, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    literal = f'''from kernels import get_kernel
print(get_kernel("{REPO}", version=1, trust_remote_code=["{REPO}"]).__name__)'''
    ours = f'''from qwenimage_tpu.kernel_loader import load_kernels
print(load_kernels("{REPO}", trust_remote_code=True).build_id)'''
    builds = [run("-c", literal), run("-c", ours), run("-c", literal, offline=True)]

    pictures = [tmp_path / "local.png", tmp_path / "hub.png"]
    for picture, options in zip(pictures, ([], ["--kernel-repo", REPO, "--trust-remote-code"]), strict=True):
        demo = ["generate", "--demo", "--steps", "2", "-o", str(picture), "a red star on a white background"]
        run("-m", "qwenimage_tpu.cli", *demo, *options, offline=True)
    local, from_hub = (Image.open(picture) for picture in pictures)
    assert local.tobytes() == from_hub.tobytes()
    assert {*builds, from_hub.info["kernel_build"]} == {local.info["kernel_build"]}


def test_publishing_again_changes_nothing(hub: LocalHub, release: Release) -> None:
    first = upload_release(release, repository(), Printed())
    assert contents(hub, "v1") == contents(hub, "main") == release.files
    assert hub.files(REPO, "v1")[PICTURE].large
    hub.requests.clear()
    printed = Printed()
    assert upload_release(release, repository(), printed) == first
    assert re.search(r"to upload\W+none", printed.text)
    assert not [request for request in hub.requests if "/commit/" in request]


def test_a_fix_is_one_commit_that_also_deletes(hub: LocalHub, release: Release) -> None:
    old = changed(release, "build/torch-cpu/old.py", b"gone = True\n")
    first = upload_release(old, repository(), Printed())
    hub.requests.clear()
    second = upload_release(release, repository(), Printed())
    assert contents(hub, "v1") == contents(hub, "main") == release.files
    assert contents(hub, "v1").keys() != dict(hub.repositories[REPO].commits[first])
    assert second == hub.repositories[REPO].branches["v1"]
    assert sum("/commit/v1" in request for request in hub.requests) == 1


def test_fix_of_an_old_version_leaves_main_alone(hub: LocalHub, release: Release) -> None:
    upload_release(release, repository(), Printed())
    newer = dataclasses.replace(release, config=dataclasses.replace(release.config, version=2))
    upload_release(changed(newer, "LICENSE", b"newer"), repository(), Printed())
    upload_release(changed(release, "LICENSE", b"older"), repository(), Printed())
    licenses = {branch: contents(hub, branch)["LICENSE"] for branch in ("main", "v1", "v2")}
    assert licenses == {"main": b"newer", "v1": b"older", "v2": b"newer"}


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("def rms_norm(", "def rms_norm(extra: int, ", r"changed: rms_norm: .* is now rms_norm\(extra: int"),
        ("eps: float = 1e-6", "eps: float = 1e-5", r"changed: rms_norm: "),
    ],
)
def test_changed_signature_needs_another_version(
    release: Release, tmp_path: Path, old: str, new: str, found: str
) -> None:
    upload_release(release, repository(), Printed())
    root = make_clone(tmp_path)
    edit(root / "torch_ext/qwenimage_tpu_kernels/ops.py", old, new)
    build_and_commit(root)
    with pytest.raises(ValueError, match=rf"(?s)keeps its API.*{found}.*KERNEL_VERSION in .* to 2, run"):
        compare(make_release(root, REPO), repository(), Printed())


def test_grown_and_shrunk_api_needs_another_version(hub: LocalHub, release: Release, tmp_path: Path) -> None:
    upload_release(release, repository(), Printed())
    root = make_clone(tmp_path)
    package = root / "torch_ext/qwenimage_tpu_kernels"
    edit(package / "__init__.py", '    "rms_norm",\n', "")
    edit(
        package / "layers.py",
        "class QwenImageAttnProcessor:",
        "class Extra(nn.Module):\n    pass\n\n\nclass QwenImageAttnProcessor:",
    )
    build_and_commit(root)
    with pytest.raises(
        ValueError, match=r"(?s)added: layers\.Extra: class Extra.*removed: rms_norm: rms_norm\("
    ):
        compare(make_release(root, REPO), repository(), Printed())

    edit(root / "build.toml", "version = 1", "version = 2")
    build_and_commit(root)
    moved = make_release(root, REPO)
    upload_release(moved, repository(), Printed())
    assert hub.versions(REPO) == {"v1", "v2"}
    assert contents(hub, "v1") == release.files
    assert contents(hub, "v2") == contents(hub, "main") == moved.files


def test_version_below_the_published_is_refused(hub: LocalHub, release: Release) -> None:
    hub.repositories[REPO] = Repository()
    for branch in ("main", "v3"):
        hub.repositories[REPO].commit(branch, {path: Blob(data) for path, data in release.files.items()})
    with pytest.raises(ValueError, match=r"must be above .* \[3\], but build.toml says 1: set it to 4"):
        compare(release, repository(), Printed())


STEPS = {
    "who the token is of": "GET /api/whoami",
    "the branches": "GET /api/kernels/.*/refs",
    "creation of the repository": "POST /api/repos/create",
    "the files that are there": "GET /api/kernels/.*/tree/",
    "validation of the card": "POST /api/validate-yaml",
    "how to upload": "POST /api/kernels/.*/preupload/",
    "where to upload the picture": "POST .*/info/lfs/objects/batch",
    "the picture": "PUT /lfs/",
    "check of the picture": "POST /lfs/.*/verify",
    "the commit": "POST /api/kernels/.*/commit/",
    "the branch of the version": "POST /api/kernels/.*/branch/",
}
KINDS = ("cut", "cut after", "error")
Kind = Literal["cut", "cut after", "error"]
# What a fault that lasts does not keep from being done: the next attempt finds it there.
DONE_ALL_THE_SAME = {
    *((kind, "check of the picture") for kind in KINDS),
    *(("cut after", step) for step in ("the picture", "the commit", "the branch of the version")),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", KINDS)
def test_fault_that_lasts_leaves_no_half_version(
    hub: LocalHub, release: Release, step: str, kind: Kind
) -> None:
    hub.faults.append(Fault(STEPS[step], kind, times=None))
    told = r"(?s)failed on http.*No version is half published.*run it again"
    done = (kind, step) in DONE_ALL_THE_SAME
    with nullcontext() if done else pytest.raises(PublishError, match=told):
        upload_release(release, repository(), Printed())
    assert hub.versions(REPO) == ({"v1"} if done else set())
    hub.faults.clear()
    upload_release(release, repository(), Printed())
    assert contents(hub, "v1") == release.files


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", KINDS)
def test_fault_that_passes_is_survived(hub: LocalHub, release: Release, step: str, kind: Kind) -> None:
    hub.faults.append(Fault(STEPS[step], kind))
    upload_release(release, repository(), Printed())
    assert contents(hub, "v1") == contents(hub, "main") == release.files
    assert hub.faults[0].times == 0  # it did happen


@pytest.mark.parametrize("kind", KINDS)
def test_fault_in_a_fix_leaves_the_version_as_it_was(hub: LocalHub, release: Release, kind: Kind) -> None:
    upload_release(release, repository(), Printed())
    fix = changed(release, "build/torch-cpu/fix.py", b"fixed = True\n")
    hub.faults.append(Fault("POST /api/kernels/.*/commit/v1", kind, times=None))
    if kind == "cut after":  # the commit is there, and is found when it is tried again
        upload_release(fix, repository(), Printed())
    else:
        with pytest.raises(PublishError):
            upload_release(fix, repository(), Printed())
        assert contents(hub, "v1") == release.files
        hub.faults.clear()
        upload_release(fix, repository(), Printed())
    assert contents(hub, "v1") == fix.files


@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize("step", ["the commit", "how to upload", "creation of the repository"])
def test_of_two_publishers_one_is_told(hub: LocalHub, release: Release, published: bool, step: str) -> None:
    if published:
        upload_release(release, repository(), Printed())
    ours, theirs = (changed(release, "LICENSE", content) for content in (b"ours", b"theirs"))
    other = Fault(STEPS[step], before=lambda: upload_release(theirs, repository(), Printed()))
    hub.faults.append(other)
    with pytest.raises(PublishError, match=r"somebody else changed (v1|main) of .* run the command again"):
        upload_release(ours, repository(), Printed())
    assert contents(hub, "v1") == contents(hub, "main") == theirs.files
    upload_release(ours, repository(), Printed())
    assert contents(hub, "v1") == contents(hub, "main") == ours.files


def test_two_publishers_of_the_same_are_both_done(hub: LocalHub, release: Release) -> None:
    hub.faults.append(
        Fault(STEPS["the commit"], before=lambda: upload_release(release, repository(), Printed()))
    )
    with pytest.raises(PublishError, match="somebody else changed main"):
        upload_release(release, repository(), Printed())
    assert contents(hub, "v1") == release.files


@pytest.mark.usefixtures("hub")
def test_wrong_token(release: Release) -> None:
    with pytest.raises(PublishError, match=r"the Hub does not know this token: get one .*hf auth login"):
        upload_release(release, repository(token="hf_wrong"), Printed())


def test_missing_token(hub: LocalHub, release: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(PublishError, match=r"publishing needs a token of the Hub, but has none"):
        upload_release(release, KernelRepository(HfApi(token=None), REPO), Printed())
    assert not hub.repositories


def test_token_without_rights(hub: LocalHub, release: Release) -> None:
    with pytest.raises(PublishError, match=r"(?s)don't have the rights.*the token's rights"):
        upload_release(release, repository("stranger/kernels"), Printed())
    assert not hub.repositories


def test_broken_kernel_is_not_uploaded(hub: LocalHub, tmp_path: Path) -> None:
    root = make_clone(tmp_path)
    edit(root / "torch_ext/qwenimage_tpu_kernels/ops.py", "def rms_norm(\n    x: ", "def rms_norm(\n    y: ")
    build_and_commit(root)
    with pytest.raises(PublishError, match=r"(?s)the build does not work, and was not uploaded:.*NameError"):
        publish(root, REPO, TOKEN, upload=True, console=Printed())
    assert not hub.requests


def test_version_must_be_the_pipelines_too(tmp_path: Path) -> None:
    root = make_clone(tmp_path)
    edit(root / "build.toml", "version = 1", "version = 2")
    build_and_commit(root)
    with pytest.raises(ValueError, match=r"build.toml says version 2 and KERNEL_VERSION in .* 1: set both"):
        publish(root, REPO, TOKEN, upload=False, console=Printed())


@pytest.mark.parametrize("name", ["", "x", "org/", "/x", "a/b/c", "org/x@v1", "https://hf.co/org/x"])
def test_bad_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"--repo must be owner/name, as in .*; correct it"):
        publish(tmp_path, name, TOKEN, upload=True, console=Printed())


def test_interrupt_that_python_lost_is_found_before_the_next_step(
    hub: LocalHub, release: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "_interrupts", list[int]())
    with pytest.raises(KeyboardInterrupt):
        environment.interrupt(signal.SIGINT, None)
    with pytest.raises(KeyboardInterrupt):
        upload_release(release, repository(), Printed())
    assert not hub.requests


def test_hub_that_gives_an_altered_build_is_found_out(hub: LocalHub, tmp_path: Path) -> None:
    hub.faults.append(Fault("GET /kernels/.*/resolve/.*/ops.py", "tamper", times=None))
    with pytest.raises(
        PublishError,
        match=r"(?s)is public now, but .* does not work:.*not what its metadata.json says.*ops.py",
    ):
        publish(make_clone(tmp_path), REPO, TOKEN, upload=True, console=Printed())
