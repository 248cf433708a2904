"""What `qwenimage-tpu generate` does: load, generate with a progress bar, save, report."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .comparison import compare
from .compilation import watch_compilations
from .environment import is_leader, process_count
from .generate import GenerateResult, OnStep, Stopwatch, generate
from .kernel_loader import load_kernels
from .loading import load_pipeline, move_pipeline
from .options import GenerateOptions, choose_mesh
from .pictures import save_contact_sheet, save_images
from .request import Request

Paint = Callable[[GenerateOptions, str, Stopwatch], GenerateResult]


def run(request: Request, import_seconds: float) -> None:
    """Make the pictures, print where they are and how long each stage took. Raises what its parts raise."""
    # Of several processes one speaks.
    console = Console(quiet=not is_leader())
    options = request.options
    watch = Stopwatch({"imports": import_seconds})
    paint = _load(request, watch)
    if options.guided and options.negative_prompt is None:
        negative_prompt = options.used_negative_prompt
        _say(
            console,
            f"true CFG {options.true_cfg_scale:g} with the default negative prompt {negative_prompt!r}",
        )
    with watch_compilations() as compilations:
        result = paint(options, "denoising", watch)
    if options.compile:
        _say(console, f"compiled: {compilations}")
    model = "demo" if request.model is None else request.model
    if not is_leader():
        paths = []
    elif request.contact_sheet:
        paths = [save_contact_sheet(result, request.output, model)]
    else:
        paths = save_images(result, request.output, model)
    for path in paths:
        _say(console, f"wrote {path}")
    _say(console, _describe_times(result.seconds))
    _say(console, _describe_kernels(result))
    if request.compare:
        if request.engine == "jax":
            paint = _load_torch(request, Stopwatch())
        stock = paint(replace(options, kernels=False, softmax=None), "denoising without kernels", Stopwatch())
        if is_leader():
            _say(console, f"with and without kernels: {compare(result, stock)}")


def _load(request: Request, watch: Stopwatch) -> Paint:
    if request.engine == "jax":
        return _load_jax(request, watch)
    return _load_torch(request, watch) if process_count() == 1 else _load_parallel(request, watch)


def _load_torch(request: Request, watch: Stopwatch) -> Paint:
    options = request.options
    if options.kernels:
        # A fault of theirs must not wait for a large model; generate() then finds them loaded.
        with watch.stage("kernels"):
            load_kernels(options.kernel_repo, trust_remote_code=options.trust_remote_code)
    with watch.stage("load"):
        pipe = load_pipeline(request.model, request.demo, getattr(torch, request.dtype))
        move_pipeline(pipe, request.device, request.text_encoder_device)

    def paint(options: GenerateOptions, label: str, watch: Stopwatch) -> GenerateResult:
        with _progress_bar(label, options.steps) as on_step:
            return generate(pipe, options, on_step, watch)

    return paint


def _load_parallel(request: Request, watch: Stopwatch) -> Paint:
    from .parallel import engine

    mesh = request.mesh or choose_mesh(request.options, process_count())
    _say(Console(quiet=not is_leader()), f"a mesh of {mesh[0]} x {mesh[1]} processes")
    with watch.stage("load"):
        parallel = engine.load_parallel(
            request.model,
            request.demo,
            getattr(torch, request.dtype),
            request.device,
            mesh,
            split_text=request.text_encoder_device == "tpu",
        )

    def paint(options: GenerateOptions, label: str, watch: Stopwatch) -> GenerateResult:
        with _progress_bar(label, options.steps) as on_step:
            return engine.generate(parallel, options, on_step, watch)

    return paint


def _load_jax(request: Request, watch: Stopwatch) -> Paint:
    from .spmd import engine

    with watch.stage("load"):
        loaded = engine.load_engine(
            request.model, request.demo, getattr(torch, request.dtype), request.mesh, request.options
        )

    def paint(options: GenerateOptions, label: str, watch: Stopwatch) -> GenerateResult:
        # One program from the first step to the last: there is nothing to count between.
        with Console(stderr=True).status(f"{label}, {options.steps} steps, compiled before the first"):
            return engine.generate(loaded, options, watch)

    return paint


@contextmanager
def _progress_bar(label: str, steps: int) -> Generator[OnStep]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True, quiet=not is_leader())) as progress:
        task = progress.add_task(label, total=steps)
        yield lambda done: progress.update(task, completed=done)


def _describe_times(seconds: Mapping[str, float]) -> str:
    return "time: " + ", ".join(f"{stage} {value:.2f} s" for stage, value in seconds.items())


def _describe_kernels(result: GenerateResult) -> str:
    if result.kernels is None:
        return "kernels: none (stock diffusers)"
    used = result.kernels
    return f"kernels: {used.repo}, variant {used.variant}, build {used.build_id}, {used.softmax} softmax"


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
