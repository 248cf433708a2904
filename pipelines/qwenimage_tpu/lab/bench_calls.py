"""What a QwenImage pipeline asks of a TPU: compilations and transfers, stock diffusers beside ours.

Counted on the emulated device, in the PJRT calls of torch-tpu itself, on the demo's tiny model: what is
compiled and transferred does not depend on the weights.
"""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from qwenimage_tpu import emulator
from qwenimage_tpu.compilation import enable_tpu_compile, use_static_shapes
from qwenimage_tpu.emulator import Counts, read_counts
from qwenimage_tpu.generate import attach_kernels
from qwenimage_tpu.kernel_loader import load_kernels
from qwenimage_tpu.loading import load_pipeline, move_pipeline
from qwenimage_tpu.options import DEMO_SIZE

STEPS = 4
PROMPT = "a red star on a white background"
OTHER_PROMPT = "a small blue ring on a beige background"
COLUMNS = ("compilations", "executions", "host_to_device", "device_to_host")


def count_calls(pipe: Any) -> dict[str, Counts]:
    """Counts of a first picture, of the denoising loop of the next, and of what changes after it."""
    call: dict[str, Any] = {
        "negative_prompt": " ",
        "height": DEMO_SIZE,
        "width": DEMO_SIZE,
        "num_inference_steps": STEPS,
    }

    def paint(prompt: str = PROMPT, **changes: Any) -> None:
        pipe(prompt, generator=torch.Generator().manual_seed(0), **(call | changes))

    rows: dict[str, Counts] = {}

    def record(label: str, *prompt: str, **changes: Any) -> None:
        before = read_counts()
        paint(*prompt, **changes)
        rows[label] = read_counts() - before

    record("first picture")
    for step, counts in enumerate(count_steps(pipe, paint), start=1):
        rows[f"step {step} of the next"] = counts
    record("same again")
    record("another prompt", OTHER_PROMPT)
    record("another negative prompt", negative_prompt="a purple star")
    record("another guidance scale", true_cfg_scale=2.5)
    record(f"{STEPS + 1} steps", num_inference_steps=STEPS + 1)
    return rows


def count_steps(pipe: Any, paint: Callable[..., Any]) -> list[Counts]:
    """Counts of each denoising step, from the moment the pipeline shows its progress bar.

    paint: calls the pipeline, with the keyword arguments that it is given.
    """
    marks: list[Counts] = []
    progress_bar = pipe.progress_bar

    def begin(*args: Any, **kwargs: Any) -> Any:
        marks.append(read_counts())
        return progress_bar(*args, **kwargs)

    def after_step(_pipe: Any, _step: int, _timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        marks.append(read_counts())
        return tensors

    pipe.progress_bar = begin
    try:
        paint(callback_on_step_end=after_step)
    finally:
        del pipe.progress_bar
    return [after - before for before, after in pairwise(marks)]


def report(console: Console) -> None:
    """Count for stock diffusers, eager and compiled, and for ours, and print the table."""
    pipelines = {"stock, eager": _stock, "stock, blocks compiled": _stock_compiled, "ours": _ours}
    counts: dict[str, dict[str, Counts]] = {}
    context = multiprocessing.get_context("spawn")
    # What is missing is to be said here, and not in a process that then is gone.
    emulator.check_installation()
    for name, build in pipelines.items():
        # Each in a process of its own, since torch-tpu keeps the programs of single operations.
        with (
            console.status(f"painting with {name}"),
            ProcessPoolExecutor(1, context, emulator.start) as process,
        ):
            counts[name] = process.submit(_count, build).result()
    table = Table(title="compilations / executions / host to device / device to host")
    table.add_column("", no_wrap=True)
    for name in counts:
        table.add_column(name, justify="right")
    for label in next(iter(counts.values())):
        cells = [
            " / ".join(str(getattr(rows[label], column)) for column in COLUMNS) for rows in counts.values()
        ]
        table.add_row(label, *cells)
    console.print(table)


def _count(build: Callable[[], Any]) -> dict[str, Counts]:
    return count_calls(build())


def _stock() -> Any:
    return move_pipeline(load_pipeline(None, demo=True, dtype=torch.float32), "tpu", "tpu")


def _stock_compiled() -> Any:
    pipe = _stock()
    enable_tpu_compile(pipe)
    return pipe


def _ours() -> Any:
    pipe = _stock()
    attach_kernels(pipe, load_kernels())
    use_static_shapes(pipe)
    enable_tpu_compile(pipe)
    return pipe
