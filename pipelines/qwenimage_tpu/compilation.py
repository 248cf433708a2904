"""Compile a stock QwenImage pipeline for the TPU, and keep it from compiling again."""

import inspect
import logging
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch._dynamo.callback import callback_handler
from torch._dynamo.utils import counters

from .device_scheduler import to_device_scheduler
from .options import TEXT_BUCKETS
from .text_buckets import undo_text_buckets, use_text_buckets

Mode = Literal["blocks", "full"]
MODES: tuple[Mode, ...] = ("blocks", "full")

logger = logging.getLogger(__name__)


def enable_tpu_compile(
    pipe: Any,
    model_names: str | Sequence[str] = ("transformer", "vae"),
    *,
    mode: Mode = "blocks",
    **compile_kwargs: Any,
) -> None:
    """Compile models of a pipeline in place: each program when it is first needed.

    model_names: one or more attributes of the pipeline. Of a VAE its `decode` is compiled, of any other model
    its call.
    mode: of the transformer; "blocks" compiles its repeated block, once for all of them, "full" the whole.
    compile_kwargs: as of torch.compile, by default backend="tpu", dynamic=False and fullgraph=True.
    Raises ValueError for a model that the pipeline does not have, one compiled already, and an unknown mode.
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {MODES}, but is {mode!r}")
    models = _models(pipe, model_names)
    compiled = [name for name, model in models.items() if _is_compiled(model)]
    if compiled:
        raise ValueError(f"{compiled} are compiled already; call disable_tpu_compile(pipe) first")
    arguments: dict[str, Any] = {"backend": "tpu", "dynamic": False, "fullgraph": True} | compile_kwargs
    for name, model in models.items():
        if hasattr(model, "decode"):
            model.decode = torch.compile(model.decode, **arguments)
        elif name == "transformer" and mode == "blocks":
            model.compile_repeated_blocks(**arguments)
        else:
            model.compile(**arguments)


def disable_tpu_compile(pipe: Any, model_names: str | Sequence[str] = ("transformer", "vae")) -> None:
    """Undo `enable_tpu_compile`."""
    for model in _models(pipe, model_names).values():
        vars(model).pop("decode", None)
        for module in model.modules():
            module._compiled_call_impl = None


def _models(pipe: Any, names: str | Sequence[str]) -> dict[str, Any]:
    names = [names] if isinstance(names, str) else names
    models = {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
    unknown = [name for name in names if name not in models]
    if unknown:
        raise ValueError(f"{unknown} are no models of this pipeline; choose from {sorted(models)}")
    return {name: models[name] for name in names}


def _is_compiled(model: Any) -> bool:
    return "decode" in vars(model) or any(module._compiled_call_impl for module in model.modules())


def use_static_shapes(pipe: Any, text_buckets: Sequence[int] = TEXT_BUCKETS) -> None:
    """Give every call of the pipeline the same few shapes, whatever the prompt and the number of steps.

    Texts are padded to buckets (`use_text_buckets`), and the scheduler becomes a `DeviceFlowMatchScheduler`.
    Then a new prompt, negative prompt, seed, guidance scale or number of steps compiles nothing; a new size,
    batch or text bucket does, once.
    Raises NotImplementedError for a scheduler of another class than FlowMatchEulerDiscreteScheduler.
    """
    scheduler = to_device_scheduler(pipe.scheduler)
    use_text_buckets(pipe, text_buckets)
    # Last, so that what raises has changed nothing.
    pipe.scheduler = scheduler


@contextmanager
def static_shapes(pipe: Any, text_buckets: Sequence[int] = TEXT_BUCKETS) -> Generator[None]:
    """`use_static_shapes` inside; afterwards the pipeline is as it was."""
    scheduler = pipe.scheduler
    use_static_shapes(pipe, text_buckets)
    try:
        yield
    finally:
        undo_text_buckets(pipe)
        pipe.scheduler = scheduler


def tpu_warmup(pipe: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Run the pipeline once with these arguments, so that later calls of the same shapes compile nothing.

    Two denoising steps are enough, as their number changes no program; another one can be given. When a
    later call of the pipeline compiles all the same, a warning says so.
    """
    _warmed_up.discard(pipe)
    pipe(*args, **({"num_inference_steps": 2} | kwargs))
    _warmed_up.add(pipe)
    if _warn_of_compilation not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_warn_of_compilation)


_warmed_up: WeakSet[Any] = WeakSet()


def _warn_of_compilation(_: Any) -> None:
    """Warn if a pipeline that was warmed up is running: torch's callback does not say who compiles."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "__call__" and frame.f_locals.get("self") in _warmed_up:
            logger.warning(
                "compiling after the warm-up, which takes longer once: a size, batch or text bucket that was"
                " not warmed up, or a model that was patched or compiled since. tpu_warmup() can do it before"
            )
            return
        frame = frame.f_back


@dataclass
class Compilations:
    """programs: that torch.compile asked for; cached: those of them that came from torch's cache on disk;
    seconds: that all of it took, tracing included.
    """

    programs: int = 0
    cached: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.programs} programs in {self.seconds:.1f} s, {self.cached} of them from the cache"


@contextmanager
def watch_compilations() -> Generator[Compilations]:
    """Count what torch.compile compiles inside; the result is complete at the end."""
    result, before = Compilations(), _cache_counts()
    starts: list[float] = []

    def on_start(_: Any) -> None:
        starts.append(time.perf_counter())

    def on_end(_: Any) -> None:
        result.seconds += time.perf_counter() - starts.pop()

    callback_handler.register_start_callback(on_start)
    callback_handler.register_end_callback(on_end)
    try:
        yield result
    finally:
        callback_handler.remove_start_callback(on_start)
        callback_handler.remove_end_callback(on_end)
        programs, cached = _cache_counts()
        result.programs, result.cached = programs - before[0], cached - before[1]


def _cache_counts() -> tuple[int, int]:
    return counters["stats"]["unique_graphs"], counters["aot_autograd"]["autograd_cache_hit"]
