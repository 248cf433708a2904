"""The loader: where builds are found, that every file is verified before import, and what errors say."""

import hashlib
import os
import py_compile
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from kernels import get_kernel

from kernel_trees import ROOT, edit_metadata, make_build, make_sources
from local_hub import COMMIT, serve_kernel
from qwenimage_tpu import kernel_loader
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
    monkeypatch.setattr(kernel_loader, "__file__", str(package / "kernel_loader.py"))


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


@pytest.mark.parametrize("repo", ["./nowhere", "/nowhere/at/all", "nowhere", "a/b/c"])
def test_neither_folder_nor_hub_id(repo: str) -> None:
    with pytest.raises(KernelLoadError, match=r"is an existing folder or a Hub id owner/name; .* is neither"):
        load_kernels(repo)


def test_repository_that_is_not_cached_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        KernelLoadError, match=r"(?s)Hub repository 'no-such/kernels'.*HF_HUB_OFFLINE=1"
    ) as caught:
        load_kernels("no-such/kernels")
    assert isinstance(caught.value.__cause__, ValueError)


LOAD_FROM_HUB = """
from qwenimage_tpu.kernel_loader import load_kernels
loaded = load_kernels("someone/kernels")
print(loaded.path, loaded.module.late_factor())
"""


def _load_from_hub(endpoint: str, cache: Path, *, offline: bool) -> subprocess.CompletedProcess[str]:
    """In a process of its own: kernels and huggingface_hub read these variables when imported."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", LOAD_FROM_HUB],
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


def test_hub_repository_is_downloaded_verified_and_pinned(build: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    repository = cache / "kernels--someone--kernels"
    snapshot = repository / "snapshots" / COMMIT / "build" / _loadable_variant(build).name
    expected = f"{snapshot} {_unique_factor(tmp_path)}\n"
    with serve_kernel("someone/kernels", build) as endpoint:
        online = _load_from_hub(endpoint, cache, offline=False)
        assert online.stdout == expected, online.stderr
        # The cache is made of links to blobs, and a blob that is there is not downloaded again.
        assert (snapshot / "late.py").is_symlink()
        (snapshot / "late.py").resolve().write_text("LATE_FACTOR = 666\n")
        altered = _load_from_hub(endpoint, cache, offline=False)
    assert altered.returncode == 1
    assert re.search(rf"KernelLoadError: .*late\.py.*delete {repository} and run", altered.stderr, re.S)


def test_complete_hub_cache_serves_offline(build: Path, tmp_path: Path) -> None:
    """The cache as `hf download --repo-type kernel --revision v1` leaves it."""
    repository = tmp_path / "kernels--someone--kernels"
    snapshot = repository / "snapshots" / COMMIT
    for index, source in enumerate(p for p in build.rglob("*") if p.is_file()):
        blob, link = repository / "blobs" / str(index), snapshot / "build" / source.relative_to(build)
        for path in (blob, link):
            path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, blob)
        link.symlink_to(blob)
    (repository / "refs").mkdir()
    (repository / "refs" / "v1").write_text(COMMIT)
    ran = _load_from_hub("http://127.0.0.1:9", tmp_path, offline=True)
    expected = f"{snapshot / 'build' / _loadable_variant(build).name} {_unique_factor(tmp_path)}\n"
    assert ran.stdout == expected, ran.stderr


def test_hub_that_serves_an_altered_file(build: Path, tmp_path: Path) -> None:
    _alter(_loadable_variant(build))
    with serve_kernel("someone/kernels", build) as endpoint:
        ran = _load_from_hub(endpoint, tmp_path / "cache", offline=False)
    assert re.search(r"KernelLoadError: .*was not imported:.*late\.py", ran.stderr, re.S)


def test_hub_that_cannot_be_reached(tmp_path: Path) -> None:
    ran = _load_from_hub("http://127.0.0.1:9", tmp_path / "cache", offline=False)
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
