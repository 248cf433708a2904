"""The doors of the `kernels` library to a published version, and the environments that it is loaded in.

Each runs in a process of its own against a Hub on loopback, as kernels and huggingface_hub read their
variables when imported. Where a door does not open, the test says so: docs/hub.md has the same table.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

import hub_programs
from hub_programs import REPO
from hub_state import Blob
from kernel_trees import ROOT
from local_hub import LocalHub
from release_trees import build_and_commit, edit, make_clone

NO_HUB = "http://127.0.0.1:9"
VARIANT = re.compile(r"_qwenimage_tpu_kernels_(cpu|cuda)_[0-9a-f]{10}")


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Generator[LocalHub]:
    """Version 1 as this checkout has it, and a version 2 with one function more."""
    second = make_clone(tmp_path_factory.mktemp("second"))
    edit(second / "build.toml", "version = 1", "version = 2")
    package = second / "torch_ext/qwenimage_tpu_kernels/__init__.py"
    edit(package, "__all__ = [", "version_two = True\n\n__all__ = [")
    edit(package, '"softmax_from_norm_weights",\n]', '"softmax_from_norm_weights",\n    "version_two",\n]')
    build_and_commit(second)
    with LocalHub() as hub:
        hub.add(REPO, second / "build", version=2)
        hub.add(REPO, ROOT / "build", version=1)
        repository = hub.repositories[REPO]
        script = Blob((ROOT / "benchmarks/benchmark.py").read_bytes())
        extra = {"README.md": Blob(b"the card"), "benchmarks/benchmark.py": script}
        for branch in ("v1", "v2"):
            repository.commit(branch, {**hub.files(REPO, branch), **extra})
        yield hub


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(hub: LocalHub, tmp_path: Path) -> Run:
    """Run a command with the test's own cache, in its own folder; `offline` or not, `check` or not."""

    def run(
        *command: str, offline: bool = False, check: bool = True, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        environ = os.environ | {
            "HF_ENDPOINT": NO_HUB if offline else hub.endpoint,
            "HF_HUB_OFFLINE": str(int(offline)),
            "HF_HOME": str(tmp_path / "home"),
            "KERNELS_CACHE": str(tmp_path / "cache"),
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }
        environ.pop("LOCAL_KERNELS", None)
        done = subprocess.run(
            command, env=environ | variables, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert not check or done.returncode == 0, done.stderr
        return done

    return run


@pytest.fixture
def trusted(hub: LocalHub) -> Generator[None]:
    hub.trusted_publishers.add("org")
    yield
    hub.trusted_publishers.discard("org")


def program(function: Callable[..., None], *arguments: str) -> tuple[str, ...]:
    return sys.executable, hub_programs.__file__, function.__name__, *arguments


def tool(*arguments: str) -> tuple[str, ...]:
    """The command `kernels` or `hf` of this environment."""
    return str(Path(sys.executable).parent / arguments[0]), *arguments[1:]


def download_all(run: Run, cache: Path) -> None:
    repository = (REPO, "--repo-type", "kernel", "--revision", "v1")
    run(*tool("hf", "download", *repository, "--cache-dir", str(cache)))


def test_versions_and_info(run: Run) -> None:
    versions = run(*tool("kernels", "versions", REPO)).stdout
    assert re.search(r"Version 1:.*torch-cpu.*Version 2:.*torch-cpu", versions, re.S)
    info = json.loads(run(*tool("kernels", "info", REPO, "--version", "1", "--json")).stdout)
    assert (info["name"], info["version"]) == ("qwenimage-tpu-kernels", 1)
    assert info["backends"] == ["cpu", "cuda", "tpu"]


def _project(folder: Path) -> None:
    (folder / "pyproject.toml").write_text(f'[tool.kernels.dependencies]\n"{REPO}" = 1\n')


def test_lock_refuses_publishers_who_are_not_trusted(run: Run, tmp_path: Path) -> None:
    _project(tmp_path)
    refused = run(*tool("kernels", "lock", "."), check=False)
    assert "is not from a trusted publisher" in refused.stderr
    assert not (tmp_path / "kernels.lock").exists()


@pytest.mark.full
@pytest.mark.usefixtures("trusted")
def test_locked_version(run: Run, hub: LocalHub, tmp_path: Path) -> None:
    _project(tmp_path)
    run(*tool("kernels", "lock", "."))
    (entry,) = json.loads((tmp_path / "kernels.lock").read_text())
    commit = entry["lock"]["commit"]
    assert commit == hub.repositories[REPO].branches["v1"]

    # What `kernels download` leaves is not what load_kernel looks for.
    run(*tool("kernels", "download", "--all-variants", "."))
    missing = run(*program(hub_programs.load_kernel), check=False)
    assert "Cannot find a local snapshot" in missing.stderr

    download_all(run, tmp_path / "cache")
    assert VARIANT.search(run(*program(hub_programs.load_kernel), offline=True).stdout)
    assert VARIANT.search(run(*program(hub_programs.verified, f"{REPO}@{commit}"), offline=True).stdout)


def test_locked_version_of_a_publisher_who_is_allowed(run: Run, hub: LocalHub, tmp_path: Path) -> None:
    dependency = {"repo-id": REPO, "version": 1}
    lock = {"commit": hub.repositories[REPO].branches["v1"]}
    (tmp_path / "kernels.lock").write_text(json.dumps([{"dependency": dependency, "lock": lock}]))
    refused = run(*program(hub_programs.get_locked_kernel), check=False)
    assert "is not from a trusted publisher" in refused.stderr
    assert VARIANT.search(run(*program(hub_programs.get_locked_kernel, REPO)).stdout)


def test_offline_get_kernel_needs_all_files(run: Run, tmp_path: Path) -> None:
    run(*program(hub_programs.literal))
    missing = run(*program(hub_programs.literal), offline=True, check=False)
    assert "is not available in the local cache" in missing.stderr
    download_all(run, tmp_path / "cache")
    assert VARIANT.search(run(*program(hub_programs.literal), offline=True).stdout)


@pytest.mark.full
def test_benchmark_runs_from_a_folder_only(run: Run, tmp_path: Path) -> None:
    quick = ("--iterations", "1", "--warmup", "0", "--output", "result.json")
    by_name = run(*tool("kernels", "benchmark", REPO, "--version", "1", *quick), check=False)
    assert "/api/models/" in by_name.stderr
    for part in ("build", "benchmarks"):
        shutil.copytree(ROOT / part, tmp_path / "clone" / part)
    run(*tool("kernels", "benchmark", "./clone", *quick))
    results = json.loads((tmp_path / "result.json").read_text())["results"]
    assert len(results) == 2
    assert all(result["verified"] for result in results)


@pytest.mark.full
@pytest.mark.usefixtures("trusted")
def test_signature_is_said_to_be_missing(run: Run) -> None:
    refused = run(*tool("kernels", "verify-signature", REPO, "1"), check=False)
    assert refused.returncode == 1
    assert "signature not found" in refused.stdout


def test_kernelize(run: Run) -> None:
    assert re.fullmatch(r"[1-9]\d* layers", run(*program(hub_programs.kernelize_layers)).stdout.strip())
    function = run(*program(hub_programs.kernelize_function))
    assert function.stdout.strip() == "1 function"
    assert "FuncRepository is deprecated" in function.stderr


def test_two_versions_in_one_process(run: Run) -> None:
    assert run(*program(hub_programs.two_versions)).stdout.strip() == "side by side"


@pytest.mark.full
def test_where_torch_tpu_loads_by_itself(run: Run) -> None:
    """As where nobody sets anything: importing torch imports torch_tpu, and there is no TPU."""
    done = run(*program(hub_programs.run_functions), TORCH_DEVICE_BACKEND_AUTOLOAD="1")
    assert re.fullmatch(rf"{VARIANT.pattern} torch_tpu", done.stdout.strip())


def test_where_torch_tpu_is_not_installed(run: Run, tmp_path: Path) -> None:
    """All packages of this environment but torch-tpu; the interpreter sees no others."""
    site = tmp_path / "site-packages"
    site.mkdir()
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if not package.name.startswith("torch_tpu"):
            (site / package.name).symlink_to(package)
    executable, *arguments = program(hub_programs.run_functions)
    variables = {"PYTHONPATH": str(site), "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}
    done = run(executable, "-S", *arguments, **variables)
    assert re.fullmatch(rf"{VARIANT.pattern} without torch_tpu", done.stdout.strip())


def test_the_variant_of_a_cpu_build_of_torch(run: Run) -> None:
    done = run(*program(hub_programs.run_functions, "cpu"))
    assert done.stdout.startswith("_qwenimage_tpu_kernels_cpu_")


def test_on_the_emulated_tpu(run: Run) -> None:
    assert VARIANT.fullmatch(run(*program(hub_programs.emulated)).stdout.strip())
