"""Compiled programs that outlive their process: found again, and never trusted blindly."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImagePipeline

from emulated_process import EmulatedProcess
from qwenimage_tpu.compilation import Compilations, watch_compilations
from qwenimage_tpu.emulator import Counts, read_counts
from qwenimage_tpu.environment import COMPILE_CACHES
from qwenimage_tpu.generate import generate
from qwenimage_tpu.loading import move_pipeline
from qwenimage_tpu.options import GenerateOptions
from qwenimage_tpu.tiny import tiny_pipeline

pytestmark = pytest.mark.xdist_group("emulated TPU")

OPTIONS = GenerateOptions(prompts=("a red fox",), height=64, width=64, steps=2, compile="blocks")
TOLERANCE = 1e-4
PROGRAMS = 2  # the block and the VAE's decoder; single operations are not torch.compile's

Painted = tuple[torch.Tensor, Compilations, Counts]


def paint() -> Painted:
    pipe = move_pipeline(tiny_pipeline(), "tpu", "cpu")
    pipe.set_progress_bar_config(disable=True)
    before = read_counts()
    with watch_compilations() as compilations:
        latents = generate(pipe, OPTIONS).latents
    return latents, compilations, read_counts() - before


class Processes:
    """New processes that share a cache folder."""

    def __init__(self, folder: Path) -> None:
        self.cache, self._folder, self._count = folder / "cache", folder, 0

    def new(self) -> EmulatedProcess:
        self._count += 1
        return EmulatedProcess(
            self._folder / f"log-{self._count}", dict.fromkeys(COMPILE_CACHES, str(self.cache))
        )

    def run(self, function: Callable[..., Any]) -> Any:
        process = self.new()
        try:
            return process.run(function)
        finally:
            process.close()

    def files(self) -> list[Path]:
        return [path for path in self.cache.rglob("*") if path.is_file()]


@pytest.fixture(scope="module")
def expected(pipe: QwenImagePipeline) -> torch.Tensor:
    return generate(pipe, GenerateOptions(prompts=OPTIONS.prompts, height=64, width=64, steps=2)).latents


def right(painted: Painted, expected: torch.Tensor) -> bool:
    return float((painted[0] - expected).abs().max() / expected.abs().max()) <= TOLERANCE


def test_a_second_process_compiles_nothing_and_a_corrupt_cache_is_not_trusted(
    tmp_path: Path, expected: torch.Tensor
):
    processes = Processes(tmp_path)
    first = processes.run(paint)
    assert right(first, expected)
    assert (first[1].programs, first[1].cached, first[2].cache_loads) == (PROGRAMS, 0, 0)
    second = processes.run(paint)
    assert right(second, expected)
    assert (second[1].programs, second[1].cached, second[2].cache_loads) == (PROGRAMS, PROGRAMS, PROGRAMS)
    assert second[2].compilations == first[2].compilations - PROGRAMS

    for path in processes.files():
        path.write_bytes(b"garbage" + path.read_bytes()[: path.stat().st_size // 2])
    third = processes.run(paint)
    assert right(third, expected)
    assert (third[1].cached, third[2].cache_loads) == (0, 0)
    assert third[2].compilations == first[2].compilations


def test_after_a_process_was_killed_in_a_compilation(tmp_path: Path, expected: torch.Tensor):
    processes = Processes(tmp_path)
    killed = processes.new()
    future = killed.submit(paint)
    deadline = time.monotonic() + 120
    while not processes.files() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert processes.files()
    killed.kill()
    with pytest.raises(Exception, match="terminated abruptly"):
        future.result()
    assert right(processes.run(paint), expected)
