"""The loader: where builds are found, that every file is verified before import, and what errors say."""

import hashlib
import os
import py_compile
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Literal

import pytest
import torch
from huggingface_hub import constants
from kernels import get_kernel

from hub_state import Fault
from kernel_trees import ROOT, edit_metadata, make_build, make_sources
from local_hub import LocalHub
from qwenimage_tpu import kernel_sources
from qwenimage_tpu.assemble import assemble
from qwenimage_tpu.kernel_loader import REPO_ID, KernelLoadError, load_kernels


@pytest.fixture(autouse=True)
def no_local_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test starts with an empty LOCAL_KERNELS; what load_kernels makes of it is undone."""
    monkeypatch.setenv("LOCAL_KERNELS", "")


@pytest.fixture
def build(tmp_path: Path) -> Path:
    """A build with an id of its own (modules stay loaded from test to test)."""
    return make_build(tmp_path / "clone", factor=_unique_factor(tmp_path))


def _unique_factor(tmp_path: Path) -> float:
    return float(int(hashlib.sha256(str(tmp_path).encode()).hexdigest()[:5], 16))


def _loadable_variant(build: Path) -> Path:
    """The variant that `kernels` picks on this machine."""
    return build / ("torch-cuda" if torch.version.cuda else "torch-cpu")


def _pretend_to_run_from(monkeypatch: pytest.MonkeyPatch, package: Path) -> None:
    monkeypatch.setattr(kernel_sources, "__file__", str(package / "kernel_sources.py"))


def test_local_folder_loads(build: Path, tmp_path: Path) -> None:
    loaded = load_kernels(str(build))
    assert loaded.repo == str(build)
    assert loaded.version == 1
    assert loaded.path == _loadable_variant(build)
    assert loaded.variant == loaded.path.name
    assert loaded.build_id == loaded.module.__name__
    expected = torch.full((2,), _unique_factor(tmp_path))
    assert torch.equal(loaded.module.scale(torch.ones(2)), expected)
    assert torch.equal(getattr(torch.ops, loaded.build_id).scale(torch.ones(2)), expected)


def test_the_clone_or_one_variant_may_be_named(build: Path) -> None:
    modules = {load_kernels(str(path)).module for path in (build, build.parent, _loadable_variant(build))}
    assert len(modules) == 1


def test_same_build_elsewhere_is_the_same_module(build: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(build, copy)
    assert load_kernels(str(build)).module is load_kernels(str(copy)).module


def test_two_builds_in_one_process_do_not_clash(build: Path, tmp_path: Path) -> None:
    other = make_build(tmp_path / "other", factor=-1.0)
    first, second = load_kernels(str(build)), load_kernels(str(other))
    assert first.build_id != second.build_id
    ones = torch.ones(3)
    assert torch.equal(first.module.scale(ones), _unique_factor(tmp_path) * ones)
    assert torch.equal(second.module.scale(ones), -ones)
    assert first.module.late_factor() == _unique_factor(tmp_path)
    assert second.module.late_factor() == -1.0


def test_rebuild_under_a_running_process_is_refused(build: Path) -> None:
    load_kernels(str(build))
    make_sources(build.parent, factor=-2.0)
    assemble(build.parent, build)
    with pytest.raises(KernelLoadError, match="start a new process to use the new build"):
        load_kernels(str(build))


def test_other_files_under_a_loaded_id_are_refused(build: Path, tmp_path: Path) -> None:
    forged = make_build(tmp_path / "forged", factor=-3.0)
    edit_metadata(forged, id=load_kernels(str(build)).build_id)
    with pytest.raises(KernelLoadError, match=r"Another build with the id _qwenimage.* is loaded already"):
        load_kernels(str(forged))


def test_clone_uses_its_own_build(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_KERNELS", "someone/else=/elsewhere")
    _pretend_to_run_from(monkeypatch, build.parent / "pipelines" / "qwenimage_tpu")
    loaded = load_kernels()
    assert (loaded.repo, loaded.path) == (REPO_ID, _loadable_variant(build))
    assert os.environ["LOCAL_KERNELS"] == f"someone/else=/elsewhere:{REPO_ID}={build}"
    assert get_kernel("org/qwenimage-tpu-kernels", version=1) is loaded.module


def test_installed_wheel_uses_the_build_inside_it(
    build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site-packages" / "qwenimage_tpu"
    shutil.copytree(build, package / "kernels_build")
    _pretend_to_run_from(monkeypatch, package)
    assert load_kernels().path == _loadable_variant(package / "kernels_build")


def test_users_local_kernels_come_first(build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = make_build(tmp_path / "other", factor=-4.0)
    monkeypatch.setenv("LOCAL_KERNELS", f"{REPO_ID}={other}:")
    _pretend_to_run_from(monkeypatch, build.parent / "pipelines" / "qwenimage_tpu")
    assert load_kernels().path == _loadable_variant(other)


def test_local_kernels_also_serves_a_named_repository(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_KERNELS", f"someone/kernels={build}")
    loaded = load_kernels("someone/kernels")
    assert (loaded.repo, loaded.path) == ("someone/kernels", _loadable_variant(build))


def test_no_build_never_asks_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend_to_run_from(monkeypatch, tmp_path / "pipelines" / "qwenimage_tpu")
    with pytest.raises(KernelLoadError, match=r"has no kernel build \(looked in .*: run `make build`"):
        load_kernels()
    assert not os.environ["LOCAL_KERNELS"]


def test_clone_path_with_a_colon_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = make_build(tmp_path / "a:b", factor=-5.0)
    _pretend_to_run_from(monkeypatch, build.parent / "pipelines" / "qwenimage_tpu")
    with pytest.raises(KernelLoadError, match=r"cannot hold .*a:b.*: move the project to a path without ':'"):
        load_kernels()
    assert load_kernels(str(build)).path == _loadable_variant(build)


def test_clone_path_with_an_equals_sign_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = make_build(tmp_path / "a=b", factor=-6.0)
    _pretend_to_run_from(monkeypatch, build.parent / "pipelines" / "qwenimage_tpu")
    assert load_kernels().path == _loadable_variant(build)


def test_malformed_local_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_KERNELS", "nonsense")
    with pytest.raises(KernelLoadError, match=r"'nonsense' has no '=': correct or unset it"):
        load_kernels()


def _alter(variant: Path) -> None:
    (variant / "late.py").write_text("LATE_FACTOR = 666\n")


def _delete(variant: Path) -> None:
    (variant / "qwenimage_tpu_pallas" / "tuned.json").unlink()


def _add(variant: Path) -> None:
    (variant / "qwenimage_tpu_pallas" / "extra.so").write_bytes(b"\x7fELF")


def _plant_sourceless_module(variant: Path) -> None:
    (variant / "qwenimage_tpu_pallas" / "numpy.pyc").write_bytes(b"bytecode")


def _link_folder(variant: Path) -> None:
    outside = variant.parent.parent / "outside"
    outside.mkdir()
    (outside / "__init__.py").touch()
    (variant / "linked").symlink_to(outside)


def _dangling_link(variant: Path) -> None:
    (variant / "late.py").unlink()
    (variant / "late.py").symlink_to("nowhere")


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (_alter, r"late\.py"),
        (_delete, r"qwenimage_tpu_pallas/tuned\.json"),
        (_add, r"qwenimage_tpu_pallas/extra\.so"),
        (_plant_sourceless_module, r"unknown file: qwenimage_tpu_pallas/numpy\.pyc"),
        (_link_folder, r"unknown file: linked"),
        (_dangling_link, r"No such file"),
    ],
)
def test_build_that_differs_from_its_digest_is_not_imported(
    build: Path, fault: Callable[[Path], None], named: str
) -> None:
    fault(_loadable_variant(build))
    before = set(sys.modules)
    with pytest.raises(KernelLoadError, match=rf"(?s)was not imported:\n.*{named}.*run `make build`"):
        load_kernels(str(build))
    assert not [name for name in set(sys.modules) - before if name.startswith("_qwenimage_tpu_kernels")]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"digest": None}, r"metadata\.json has no digest, so the build cannot be verified"),
        ({"name": "relu"}, r"must be version 1 of qwenimage-tpu-kernels, but .* version 1 of relu"),
        ({"version": 2}, r"must be version 1 of qwenimage-tpu-kernels, but .* version 2 of"),
        ({"kernels-minver": "99.0.0"}, r"is intact but cannot be imported: .*requires kernels>=99\.0\.0"),
        ({"id": 3}, r"No usable kernel build in .*metadata"),
        ({"kernel-depends": [{"repo-id": "a/b", "version": 1}]}, r"wants other Hub kernels \(a/b\)"),
    ],
)
def test_wrong_metadata_is_refused(build: Path, changes: dict[str, object], message: str) -> None:
    edit_metadata(build, **changes)
    with pytest.raises(KernelLoadError, match=message):
        load_kernels(str(build))


def test_missing_metadata_is_refused(build: Path) -> None:
    (_loadable_variant(build) / "metadata.json").unlink()
    with pytest.raises(KernelLoadError, match=r"(?s)No usable kernel build in .*run `make build`"):
        load_kernels(str(build))


def test_folder_without_a_variant_for_this_machine_is_refused(build: Path) -> None:
    for variant in build.iterdir():
        if variant.name != "torch-tpu":
            shutil.rmtree(variant)
    with pytest.raises(KernelLoadError, match=r"Cannot find a build variant for this system"):
        load_kernels(str(build))


def test_kernel_that_fails_to_import_keeps_the_cause(tmp_path: Path) -> None:
    make_sources(tmp_path, factor=-7.0)
    (tmp_path / "torch_ext/qwenimage_tpu_kernels/__init__.py").write_text("import no_such_package\n")
    assemble(tmp_path, tmp_path / "build")
    with pytest.raises(
        KernelLoadError, match=r"is intact but cannot be imported: .*no_such_package"
    ) as caught:
        load_kernels(str(tmp_path))
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_bytecode_beside_the_sources_is_neither_read_nor_written(build: Path, tmp_path: Path) -> None:
    variant = _loadable_variant(build)
    planted = tmp_path / "planted.py"
    planted.write_text('raise RuntimeError("planted bytecode ran")\n')
    sources = ["__init__.py", "_ops.py", "late.py", "qwenimage_tpu_pallas/factor.py"]
    for source in sources:
        cached = (
            variant
            / Path(source).parent
            / "__pycache__"
            / f"{Path(source).stem}.{sys.implementation.cache_tag}.pyc"
        )
        # Python runs bytecode of this kind without a look at the source.
        py_compile.compile(
            str(planted),
            cfile=str(cached),
            doraise=True,
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        )
    prefix, dont_write = sys.pycache_prefix, sys.dont_write_bytecode

    module = load_kernels(str(build)).module
    assert module.late_factor() == _unique_factor(tmp_path)
    assert (sys.pycache_prefix, sys.dont_write_bytecode) == (prefix, dont_write)
    assert len(list(variant.rglob("*.pyc"))) == len(sources)


@pytest.mark.parametrize("repo", ["./nowhere", "/nowhere/at/all", "nowhere", "a/b/c", "a/b@"])
def test_neither_folder_nor_hub_id(repo: str) -> None:
    with pytest.raises(KernelLoadError, match=r"is an existing folder or a Hub id, .* is neither"):
        load_kernels(repo)


def test_repository_that_is_not_cached_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(KernelLoadError, match=r"(?s)'no-such/kernels' on http.*HF_HUB_OFFLINE=1") as caught:
        load_kernels("no-such/kernels")
    assert isinstance(caught.value.__cause__, ValueError)


LOAD_FROM_HUB = """
import sys
from qwenimage_tpu.kernel_loader import load_kernels
trust = {"": False, "trust": True}.get(sys.argv[2], [sys.argv[2]])
loaded = load_kernels(sys.argv[1], trust_remote_code=trust)
print(loaded.path, loaded.module.late_factor())
"""


def _load_from_hub(
    endpoint: str,
    cache: Path,
    *,
    repo: str = "someone/kernels",
    trust: str = "trust",
    offline: bool = False,
    before: str = "",
) -> subprocess.CompletedProcess[str]:
    """In a process of its own: kernels and huggingface_hub read these variables when imported."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", before + LOAD_FROM_HUB, repo, trust],
        env=os.environ
        | {
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(cache / "home"),
            "HF_HUB_OFFLINE": str(int(offline)),
            "KERNELS_CACHE": str(cache),
        },
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def hub(build: Path) -> Generator[LocalHub]:
    """A Hub with the build as version 1 of someone/kernels."""
    with LocalHub() as hub:
        hub.add("someone/kernels", build)
        yield hub


@pytest.fixture
def printed(hub: LocalHub, build: Path, tmp_path: Path) -> str:
    """What LOAD_FROM_HUB prints when all is well."""
    repository = tmp_path / "cache" / "kernels--someone--kernels"
    commit = hub.repositories["someone/kernels"].branches["v1"]
    variant = repository / "snapshots" / commit / "build" / _loadable_variant(build).name
    return f"{variant} {_unique_factor(tmp_path)}\n"


def test_hub_repository_is_downloaded_and_serves_offline(hub: LocalHub, printed: str, tmp_path: Path) -> None:
    online = _load_from_hub(hub.endpoint, tmp_path / "cache")
    assert online.stdout == printed, online.stderr
    offline = _load_from_hub("http://127.0.0.1:9", tmp_path / "cache", offline=True)
    assert offline.stdout == printed, offline.stderr


def test_a_commit_or_branch_may_be_named(hub: LocalHub, printed: str, build: Path, tmp_path: Path) -> None:
    commit = hub.repositories["someone/kernels"].branches["v1"]
    _alter(_loadable_variant(build))
    hub.add("someone/kernels", build)  # what v1 is from now on
    named = _load_from_hub(hub.endpoint, tmp_path / "cache", repo=f"someone/kernels@{commit}")
    assert named.stdout == printed, named.stderr
    unreachable = _load_from_hub("http://127.0.0.1:9", tmp_path / "cache", repo=f"someone/kernels@{commit}")
    assert unreachable.stdout == printed, unreachable.stderr
    latest = _load_from_hub(hub.endpoint, tmp_path / "cache", repo="someone/kernels@v1")
    assert re.search(r"KernelLoadError: .*was not imported:.*late\.py", latest.stderr, re.S)


def test_publisher_who_is_not_trusted_is_refused(hub: LocalHub, printed: str, tmp_path: Path) -> None:
    refused = _load_from_hub(hub.endpoint, tmp_path / "cache", trust="other/kernels")
    assert re.search(
        r"KernelLoadError: .*not from a trusted publisher.*allow it with --trust-remote-code, in Python with"
        r" load_kernels\(\.\.\., trust_remote_code=True\)",
        refused.stderr,
        re.S,
    )
    assert not [request for request in hub.requests if "/resolve/" in request]
    hub.trusted_publishers.add("someone")
    trusted = _load_from_hub(hub.endpoint, tmp_path / "cache", trust="")
    assert trusted.stdout == printed, trusted.stderr


def test_file_altered_in_the_cache(hub: LocalHub, printed: str, tmp_path: Path) -> None:
    _load_from_hub(hub.endpoint, tmp_path / "cache")
    late = Path(printed.split()[0]) / "late.py"
    # The cache is made of links to blobs, and a blob that is there is not downloaded again.
    assert late.is_symlink()
    late.resolve().write_text("LATE_FACTOR = 666\n")
    for offline in (False, True):
        altered = _load_from_hub(hub.endpoint, tmp_path / "cache", offline=offline)
        assert altered.returncode == 1
        assert re.search(r"KernelLoadError: .*late\.py.*delete (\S+) and run", altered.stderr, re.S)
    shutil.rmtree(tmp_path / "cache" / "kernels--someone--kernels")
    assert _load_from_hub(hub.endpoint, tmp_path / "cache").stdout == printed


def test_complete_hub_cache_serves_offline(hub: LocalHub, printed: str, tmp_path: Path) -> None:
    """The cache as `hf download --repo-type kernel --revision v1` leaves it."""
    command = "from huggingface_hub import snapshot_download as s; import sys;"
    command += "s('someone/kernels', repo_type='kernel', revision='v1', cache_dir=sys.argv[1])"
    environ = os.environ | {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0"}
    subprocess.run([sys.executable, "-c", command, str(tmp_path / "cache")], env=environ, check=True)
    ran = _load_from_hub("http://127.0.0.1:9", tmp_path / "cache", offline=True)
    assert ran.stdout == printed, ran.stderr


def test_hub_that_serves_an_altered_file(hub: LocalHub, tmp_path: Path) -> None:
    hub.faults.append(Fault("GET /kernels/someone/kernels/resolve/.*/late.py", "tamper", times=None))
    ran = _load_from_hub(hub.endpoint, tmp_path / "cache")
    assert re.search(r"KernelLoadError: .*was not imported:.*late\.py.*tell its owner", ran.stderr, re.S)


@pytest.mark.parametrize("kind", ["cut within", pytest.param("error", marks=pytest.mark.full)])
def test_download_that_breaks_is_not_loaded_and_goes_on_later(
    hub: LocalHub, printed: str, tmp_path: Path, kind: Literal["cut within", "error"]
) -> None:
    fault = Fault("GET /kernels/someone/kernels/resolve/.*/(late|__init__).py", kind, times=None)
    hub.faults.append(fault)
    broken = _load_from_hub(hub.endpoint, tmp_path / "cache")
    assert re.search(
        r"KernelLoadError: Cannot get version 1 .*Check the name, the network", broken.stderr, re.S
    )
    offline = _load_from_hub(hub.endpoint, tmp_path / "cache", offline=True)
    assert re.search(r"KernelLoadError: ", offline.stderr)
    hub.faults.clear()
    healed = _load_from_hub(hub.endpoint, tmp_path / "cache")
    assert healed.stdout == printed, healed.stderr


def test_server_error_that_passes_is_not_noticed(hub: LocalHub, printed: str, tmp_path: Path) -> None:
    hub.faults.append(Fault("GET /kernels/someone/kernels/resolve/.*/late.py", "error"))
    ran = _load_from_hub(hub.endpoint, tmp_path / "cache")
    assert ran.stdout == printed, ran.stderr


def test_cache_that_is_full(hub: LocalHub, printed: str, tmp_path: Path) -> None:
    # No file may grow beyond this, as on a disk without room; the first of the build is larger.
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))"
    full = _load_from_hub(hub.endpoint, tmp_path / "cache", before=limit)
    assert re.search(r"KernelLoadError: .*have room for some MB: .* KERNELS_CACHE", full.stderr, re.S)
    assert _load_from_hub(hub.endpoint, tmp_path / "cache").stdout == printed


def test_cache_that_cannot_be_written(hub: LocalHub, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    ran = _load_from_hub(hub.endpoint, tmp_path / "cache")
    assert re.search(r"KernelLoadError: .*must be writable .* KERNELS_CACHE", ran.stderr, re.S)


@pytest.mark.parametrize("trust", ["", "trust"])
def test_hub_that_cannot_be_reached(tmp_path: Path, trust: str) -> None:
    ran = _load_from_hub("http://127.0.0.1:9", tmp_path / "cache", trust=trust)
    assert re.search(r"KernelLoadError: Cannot get version 1 .*'someone/kernels'.*Check", ran.stderr, re.S)


def test_wheel_holds_the_build(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        prefix = "qwenimage_tpu/kernels_build/"
        shipped = {
            n.removeprefix(prefix): archive.read(n) for n in archive.namelist() if n.startswith(prefix)
        }
    committed = {
        p.relative_to(ROOT / "build").as_posix(): p.read_bytes()
        for p in (ROOT / "build").rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    }
    assert shipped == committed
