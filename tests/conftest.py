"""Shared fixtures. The platform's variables are set here, before any test module imports torch or jax."""

import os
from collections.abc import Generator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import hypothesis
import pytest

from emulated_process import EmulatedProcess
from qwenimage_tpu import environment

environment.configure()
# As many devices as the largest mesh of the tests.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

# An example's first run compiles, so its time says nothing. CI must not fail by the luck of a draw.
hypothesis.settings.register_profile("default", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("default")

if TYPE_CHECKING:
    from diffusers import QwenImagePipeline


@pytest.fixture(scope="session")
def pipe() -> "QwenImagePipeline":
    """The tiny pipeline; tests leave it as they find it."""
    from qwenimage_tpu.tiny import tiny_pipeline

    pipeline = tiny_pipeline()
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="session")
def kernels() -> ModuleType:
    """The kernel package as users get it: the committed build, through get_kernel."""
    from qwenimage_tpu.kernel_loader import load_kernels

    return load_kernels().module


@pytest.fixture(scope="session")
def kernel_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels as the sources of this checkout make them, in the Kernels Hub layout."""
    from qwenimage_tpu.assemble import assemble

    folder = tmp_path_factory.mktemp("kernels") / "build"
    assemble(Path(__file__).resolve().parents[1], folder)
    return folder


@pytest.fixture(scope="session")
def emulated_tpu(tmp_path_factory: pytest.TempPathFactory) -> Generator[EmulatedProcess]:
    """One process with the emulated `tpu` device for all tests of this worker."""
    process = EmulatedProcess(tmp_path_factory.mktemp("emulated") / "log")
    yield process
    process.close()
