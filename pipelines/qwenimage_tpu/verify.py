"""`qwenimage-tpu verify`: is this machine's TPU right, quiet and as fast as predicted?

What we cannot see without a TPU, its owner can with one command, and paste the report into an issue.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement
from rich.console import Console

from . import emulator
from .compilation import watch_compilations
from .doctor import declared_requirements, installed_versions, print_table
from .doctor_checks import Check
from .generate import GenerateResult, generate, prepared, run
from .kernel_loader import load_kernels
from .lab.ahead_of_time import TOPOLOGIES
from .loading import import_tpu_backend, load_pipeline, move_pipeline
from .options import DEMO_SIZE, DEMO_STEPS, DEMO_TRUE_CFG_SCALE, GenerateOptions
from .painting.captions import plain_caption
from .painting.drawings import unseen_scenes
from .painting.scoring import score_pictures
from .verify_cases import (
    BLOCKS,
    KERNELS,
    REAL_SIZE,
    SMALL_SIZE,
    Size,
    kernel_function,
    kernel_inputs,
    on_device,
    timed_case,
)
from .verify_predictions import predict_cycles
from .verify_report import Timing, write_report

# By max|a-b| / max|b|; bf16 rounds to 2^-8, and a result is the end of several roundings.
LARGEST_ERROR = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
PROMPTS = 8
REPETITIONS = 10
# The name that torch-tpu gives the hardware, and ours.
GENERATIONS = {"TPU v5e": "v5e", "TPU v5p": "v5p", "TPU v6e": "v6e", "TPU v7": "tpu7x"}


def verify(output: Path, *, emulated: bool, kernel_repo: str | None, trust_remote_code: bool = False) -> bool:
    """Run all checks, print them, and write the report. Whether no check found a problem.

    Raises ValueError without a TPU unless `emulated`, EmulatorError if the emulated device does not start,
    KernelLoadError if the kernels cannot be loaded.
    """
    console = Console()
    if emulated:
        emulator.start()
    else:
        import_tpu_backend()
    # From here on they are a folder that has been verified.
    kernel_repo = str(load_kernels(kernel_repo, trust_remote_code=trust_remote_code).path)
    size = SMALL_SIZE if emulated else REAL_SIZE
    implementation = "interpret" if emulated else "kernel"
    checks = [Check("hardware", "ok", "emulated on the CPU" if emulated else hardware())]
    for label, found in (
        ("kernels against their references", check_kernels(size, implementation, kernel_repo)),
        ("pictures and compilations", check_pictures(kernel_repo)),
    ):
        with console.status(label):
            checks += found
    with console.status("timing, and asking the compiler for predictions"):
        timings = time_cases(size, implementation, kernel_repo, emulated)
    print_table(checks)
    versions = installed_versions(Requirement(line).name for line in declared_requirements())
    write_report(output, checks, timings, versions, emulated=emulated)
    console.print(f"wrote {output}", markup=False, highlight=False, soft_wrap=True)
    return all(check.status != "problem" for check in checks)


def hardware() -> str:
    from torch_tpu._internal.utils.hardware import get_tpu_device_name

    return str(get_tpu_device_name())


def check_kernels(size: Size, implementation: str, kernel_repo: str | None) -> Iterator[Check]:
    """Each kernel on the device against the plain f32 computation on the CPU."""
    kernels = load_kernels(kernel_repo).module
    for name in KERNELS:
        for dtype, limit in LARGEST_ERROR.items():
            inputs = kernel_inputs(name, size, dtype)
            expected = kernel_function(kernels, name, "reference")(*inputs)
            results = kernel_function(kernels, name, implementation)(*on_device(inputs, "tpu"))
            pairs = zip(results, expected, strict=True)
            error = max(relative_error(result.cpu(), reference) for result, reference in pairs)
            status = "ok" if error <= limit else "problem"
            found = f"max|a-b|/max|b| = {error:.1e}, at most {limit:.0e}, {size.shape} tokens"
            remedy = "" if status == "ok" else "report it with this file"
            yield Check(f"{name}, {str(dtype).removeprefix('torch.')}", status, found, remedy)


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (result.double() - expected.double()).abs().max() / expected.double().abs().max()
    # Not a number must not pass as a small error.
    return float(difference) if difference.isfinite() else float("inf")


def check_pictures(kernel_repo: str | None) -> Iterator[Check]:
    """The demo's pictures on the device and on the CPU, and what compiles after the first of them."""
    scenes = unseen_scenes(PROMPTS)
    options = GenerateOptions(
        prompts=tuple(plain_caption(scene) for scene in scenes),
        height=DEMO_SIZE,
        width=DEMO_SIZE,
        steps=DEMO_STEPS,
        true_cfg_scale=DEMO_TRUE_CFG_SCALE,
        kernel_repo=kernel_repo,
    )
    on_cpu = generate(load_pipeline(None, demo=True, dtype=torch.float32), replace(options, kernels=False))
    pipe = load_pipeline(None, demo=True, dtype=torch.float32)
    move_pipeline(pipe, "tpu", "cpu")
    compiled = replace(options, compile="blocks")
    with prepared(pipe, compiled) as used:
        warm_up = replace(compiled, steps=2)
        run(pipe, warm_up, used)
        with watch_compilations() as again:
            on_tpu = run(pipe, compiled, used)
            run(pipe, replace(warm_up, prompts=compiled.prompts[::-1], seed=9, true_cfg_scale=2.5), used)
    yield _compare_pictures(on_tpu, on_cpu, scenes)
    status = "ok" if again.programs == 0 else "problem"
    remedy = "" if status == "ok" else "report it with this file"
    yield Check("compilations after the warm-up", status, str(again.programs), remedy)


def _compare_pictures(on_tpu: GenerateResult, on_cpu: GenerateResult, scenes: Any) -> Check:
    ours, expected = (score_pictures(result.images, scenes) for result in (on_tpu, on_cpu))
    as_good = ours.colour >= expected.colour and ours.shape >= expected.shape
    error = relative_error(on_tpu.latents, on_cpu.latents)
    found = f"{ours}; stock on the CPU: {expected}; latents apart by {error:.1e}"
    name = f"{len(scenes)} pictures of the demo"
    if as_good:
        return Check(name, "ok", found)
    return Check(name, "problem", found, "report it with this file")


def time_cases(size: Size, implementation: str, kernel_repo: str | None, emulated: bool) -> list[Timing]:
    """Median time of each kernel and block in bf16, beside the compiler's prediction."""
    names = (*KERNELS, *BLOCKS)
    generation = "v6e" if emulated else GENERATIONS.get(hardware(), hardware())
    predictions: dict[str, int] = {}
    # Without them, on unknown hardware or without the emulator's extra, the times still tell something.
    if generation in TOPOLOGIES:
        with suppress(emulator.EmulatorError):
            predictions = predict_cycles(names, size, generation, kernel_repo)
    timings: list[Timing] = []
    for name in names:
        function, inputs, keywords = timed_case(name, size, implementation, kernel_repo)
        seconds = median_seconds(function, inputs, keywords)
        timings.append(Timing(name, generation, predictions.get(name), seconds))
    return timings


@torch.no_grad()
def median_seconds(function: Callable[..., Any], inputs: list[Any], keywords: dict[str, Any]) -> float:
    """The median time of a call, compiled as it would be in a model, without its first two."""
    function = torch.compile(function, backend="tpu", dynamic=False)
    seconds: list[float] = []
    for repetition in range(-2, REPETITIONS):
        torch.accelerator.synchronize()
        start = time.perf_counter()
        function(*inputs, **keywords)
        torch.accelerator.synchronize()
        if repetition >= 0:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
