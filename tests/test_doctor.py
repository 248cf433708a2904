import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import QwenImagePipeline
from safetensors.torch import save_file

from qwenimage_tpu import doctor
from qwenimage_tpu.doctor_checks import (
    Check,
    check_clashes,
    check_environment,
    check_hardware,
    check_requirements,
)
from qwenimage_tpu.doctor_kernels import check_checkpoint, check_kernels, check_smoke_run, read_norm_weights
from qwenimage_tpu.environment import WITHOUT_TPU, configure, tpu_device_files
from qwenimage_tpu.kernel_loader import LoadedKernels, load_kernels

GOOD = {
    "torch": "2.15.0+cpu",
    "torch-tpu": "0.2.0",
    "libtpu": "0.0.50",
    "jax": "0.12.0.1",
    "jaxlib": "0.12.0.1",
    "kernels": "0.17.2",
}


def only(checks: list[Check], name: str) -> Check:
    (check,) = [check for check in checks if check.name == name]
    return check


def test_versions_that_work_together():
    checks = check_clashes(GOOD, python="3.12.1")
    assert len(checks) == 5
    assert {check.status for check in checks} == {"ok"}


@pytest.mark.parametrize(
    ("changes", "python", "name", "status", "remedy"),
    [
        ({"libtpu": "0.0.50.1"}, "3.12.1", "libtpu and torch-tpu", "problem", "libtpu==0.0.50"),
        ({"torch": "2.16.0"}, "3.12.1", "torch and torch-tpu", "problem", "torch>=2.15,<2.16"),
        ({"torch": "2.10.1"}, "3.12.1", "torch and torch-tpu", "problem", "torch>=2.15,<2.16"),
        ({"torch": "2.11.0"}, "3.12.1", "torch and torch-tpu", "ok", ""),
        ({"torch": "2.15.1"}, "3.13.0", "torch and torch-tpu", "ok", ""),
        ({}, "3.11.7", "Python and jax", "problem", "use Python 3.12"),
        ({"jaxlib": "0.11.2"}, "3.12.1", "jax and jaxlib", "problem", "jaxlib==0.12.0.1"),
        ({"torchax": "0.0.13"}, "3.12.1", "torchax and torch", "warning", "pip uninstall torchax"),
        ({"torchax": "0.0.13", "torch": "2.11.0"}, "3.12.1", "torchax and torch", "ok", ""),
    ],
)
def test_clashes(changes: dict[str, str], python: str, name: str, status: str, remedy: str):
    check = only(check_clashes(GOOD | changes, python), name)
    assert check.status == status
    assert remedy in check.remedy
    assert bool(check.remedy) == (status != "ok")


def test_what_is_not_installed_clashes_with_nothing():
    assert check_clashes({}, python="3.12.1") == []
    assert check_clashes({"torch": "not a version"}, python="3.12.1") == []


@pytest.mark.parametrize(
    ("requirement", "installed", "status", "found"),
    [
        ("torch<2.16,>=2.15", {"torch": "2.15.0+cpu"}, "ok", "2.15.0+cpu"),
        ("torch<2.16,>=2.15", {"torch": "2.14.0"}, "problem", "2.14.0, but <2.16,>=2.15 is required"),
        ("jax[tpu]==0.12.0.1", {"jax": "0.12.0.1"}, "ok", "0.12.0.1"),
        ("kernels==0.17.2", {}, "problem", "not installed, ==0.17.2 is required"),
        ("numpy", {}, "problem", "not installed, any version is required"),
    ],
)
def test_requirements(requirement: str, installed: dict[str, str], status: str, found: str):
    (check,) = check_requirements([requirement], installed)
    assert (check.status, check.found) == (status, found)
    assert check.remedy == ("" if status == "ok" else f'pip install "{requirement}"')


def test_extras_are_not_missed():
    requirements = ["numpy", 'tokamax==0.0.17; extra == "bench"']
    assert [check.name for check in check_requirements(requirements, {"numpy": "2.0"})] == ["numpy"]


def test_without_our_own_metadata_there_is_a_warning():
    (check,) = check_requirements([], GOOD)
    assert (check.status, check.found) == ("warning", "not installed")


@pytest.mark.parametrize(
    ("environ", "has_tpu", "expected"),
    [
        ({}, True, {"environment": "ok"}),
        ({"JAX_PLATFORMS": "cpu", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, False, {"environment": "ok"}),
        ({"JAX_PLATFORMS": "cpu"}, True, {"JAX_PLATFORMS": "problem"}),
        ({"JAX_PLATFORMS": "tpu,cpu"}, True, {"environment": "ok"}),
        ({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, True, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "problem"}),
        ({"LOCAL_KERNELS": "org/name=folder"}, False, {"LOCAL_KERNELS": "warning"}),
    ],
)
def test_environment_variables(environ: dict[str, str], has_tpu: bool, expected: dict[str, str]):
    assert {check.name: check.status for check in check_environment(environ, has_tpu)} == expected


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ([], []),
        (["vfio/vfio", "null", "accel/accel0"], []),
        (["accel0", "accel1"], ["accel0", "accel1"]),
        (["vfio/vfio", "vfio/0", "vfio/12"], ["vfio/0", "vfio/12"]),
    ],
)
def test_device_files(tmp_path: Path, files: list[str], found: list[str]):
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    devices = tpu_device_files(tmp_path)
    assert devices == [tmp_path / name for name in found]
    assert check_hardware(devices).status == ("ok" if found else "warning")


@pytest.mark.parametrize("has_tpu", [False, True])
def test_configure_keeps_what_the_user_set(monkeypatch: pytest.MonkeyPatch, has_tpu: bool):
    environ = {"JAX_PLATFORMS": "chosen"}
    monkeypatch.setattr("qwenimage_tpu.environment.os", SimpleNamespace(environ=environ))
    monkeypatch.setattr("qwenimage_tpu.environment.has_tpu", lambda: has_tpu)
    configure()
    assert environ == ({} if has_tpu else WITHOUT_TPU) | {"JAX_PLATFORMS": "chosen"}


@pytest.fixture(scope="module")
def kernels(kernel_build: Path) -> LoadedKernels:
    return load_kernels(str(kernel_build))


def test_the_kernel_rows(kernels: LoadedKernels, kernel_build: Path):
    loaded, smoke_run = check_kernels(str(kernel_build), trust_remote_code=False, model=None)
    assert loaded.status == smoke_run.status == "ok"
    assert f"build {kernels.build_id}, digests verified" in loaded.found
    assert kernels.variant in loaded.found


def test_kernels_that_do_not_load(tmp_path: Path):
    (check,) = check_kernels(str(tmp_path), trust_remote_code=False, model=None)
    assert check.status == "problem"
    assert "No usable kernel build" in check.found


@pytest.mark.parametrize(
    ("rms_norm", "found"),
    [
        (lambda x, _, **__: x, "RMSNorm is off by"),
        (lambda x, _, **__: x * torch.nan, "RMSNorm is off by nan"),
        (lambda *_, **__: 1 / 0, "RMSNorm raised ZeroDivisionError: division by zero"),
    ],
    ids=["wrong", "nan", "raises"],
)
def test_a_kernel_that_does_not_run(rms_norm: Any, found: str):
    broken: Any = SimpleNamespace(module=SimpleNamespace(rms_norm=rms_norm))
    check = check_smoke_run(broken)
    assert check.status == "problem"
    assert found in check.found


def test_softmax_of_a_checkpoint(pipe: QwenImagePipeline, kernels: LoadedKernels, tmp_path: Path):
    pipe.transformer.save_pretrained(tmp_path / "whole" / "transformer")
    pipe.transformer.save_pretrained(tmp_path / "sharded" / "transformer", max_shard_size="4MB")
    assert len(list((tmp_path / "sharded" / "transformer").glob("*.safetensors"))) > 1
    for folder in ("whole", "sharded"):
        assert len(read_norm_weights(tmp_path / folder)) == 8
        check = check_checkpoint(kernels, tmp_path / folder)
        assert check.status == "ok"
        assert check.found.startswith("bounded (no logit is beyond")


def test_softmax_of_a_checkpoint_with_large_norm_weights(kernels: LoadedKernels, tmp_path: Path):
    (tmp_path / "transformer").mkdir()
    names = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")
    weights = {f"transformer_blocks.0.attn.{name}.weight": torch.full((128,), 50.0) for name in names}
    save_file(weights, tmp_path / "transformer" / "diffusion_pytorch_model.safetensors")
    assert check_checkpoint(kernels, tmp_path).found.startswith("online")


def test_a_folder_without_a_checkpoint(kernels: LoadedKernels, tmp_path: Path):
    check = check_checkpoint(kernels, tmp_path)
    assert check.status == "problem"
    assert "must hold diffusion_pytorch_model.safetensors" in check.found


def test_a_checkpoint_of_something_else(kernels: LoadedKernels, tmp_path: Path):
    (tmp_path / "transformer").mkdir()
    index = {"weight_map": {"conv.weight": "part.safetensors"}}
    (tmp_path / "transformer" / "diffusion_pytorch_model.safetensors.index.json").write_text(
        json.dumps(index)
    )
    check = check_checkpoint(kernels, tmp_path)
    assert check.status == "problem"
    assert "pass the weights of a QwenImage transformer" in check.found


def test_the_table_appears_where_torch_does_not_import(monkeypatch: pytest.MonkeyPatch):
    # None in sys.modules makes the import fail.
    monkeypatch.setitem(sys.modules, "qwenimage_tpu.doctor_kernels", None)
    check = doctor.diagnose({})[-1]
    assert (check.name, check.status) == ("imports", "problem")
    assert "qwenimage_tpu.doctor_kernels" in check.found
