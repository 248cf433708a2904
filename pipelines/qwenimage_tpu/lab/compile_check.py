"""Does every kernel compile for every supported TPU at QwenImage's shapes?

Interpret mode skips the TPU compiler's checks of layouts, alignment and VMEM, so a kernel that is right
on a CPU may still be refused by a TPU. This asks the compiler itself, without a TPU.
"""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Sequence

import jax
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import qwenimage_tpu_pallas as kernels
from qwenimage_tpu_pallas.layouts import HEAD_DIM
from qwenimage_tpu_pallas.shapes import (
    HEADS,
    HEADS_PER_CHIP,
    QWENIMAGE_SHAPES,
    TEXT_EMBEDDING_CHANNELS,
    JointShape,
)

from .ahead_of_time import TOPOLOGIES, lower_for

DTYPES = ("bfloat16", "float32")


def _struct(*shape: int, dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@dataclasses.dataclass(frozen=True)
class KernelCase:
    """One kernel with one choice of its static arguments: a function and the shapes it takes."""

    name: str
    function: Callable[..., object]
    arguments: Callable[[JointShape, str], list[jax.ShapeDtypeStruct]]


def _attention_arguments(shape: JointShape, dtype: str) -> list[jax.ShapeDtypeStruct]:
    image = _struct(1, shape.image_tokens, HEADS_PER_CHIP * HEAD_DIM, dtype=dtype)
    text = _struct(1, shape.text_tokens, HEADS_PER_CHIP * HEAD_DIM, dtype=dtype)
    return [*[image] * 3, *[text] * 3, _struct(1, dtype="int32")]


def _norm_rope_arguments(shape: JointShape, dtype: str) -> list[jax.ShapeDtypeStruct]:
    *streams, _ = _attention_arguments(shape, dtype)
    tables = [
        _struct(1, tokens, HEAD_DIM, dtype="float32") for tokens in (shape.image_tokens, shape.text_tokens)
    ]
    weight = _struct(HEAD_DIM, dtype=dtype)
    return [*streams[:2], *streams[3:5], *[weight] * 4, *(t for t in tables for _ in range(2))]


def _modulation_arguments(
    shape: JointShape, dtype: str, *, activations: int, vectors: int, indexed: bool
) -> list[jax.ShapeDtypeStruct]:
    channels = HEADS * HEAD_DIM
    x = _struct(1, shape.image_tokens, channels, dtype=dtype)
    vector = _struct(2 if indexed else 1, channels, dtype=dtype)
    index = [_struct(1, shape.image_tokens, dtype="int32")] if indexed else []
    return [*[x] * activations, *[vector] * vectors, *index]


def _rms_norm_arguments(shape: JointShape, dtype: str) -> list[jax.ShapeDtypeStruct]:
    return [
        _struct(1, shape.text_tokens, TEXT_EMBEDDING_CHANNELS, dtype=dtype),
        _struct(TEXT_EMBEDDING_CHANNELS, dtype=dtype),
    ]


def _linear_arguments(
    shape: JointShape, dtype: str, *, channels: tuple[int, int], gates: int = 0
) -> list[jax.ShapeDtypeStruct]:
    """gates: rows of the gate; 0 for a layer without a residual, 2 for one chosen per token."""
    (inputs, outputs), tokens = channels, shape.image_tokens
    sizes = [(1, tokens, inputs), (outputs, inputs), (outputs,)]
    if gates:
        sizes += [(1, tokens, outputs), (gates, outputs)]
    index = [_struct(1, tokens, dtype="int32")] if gates == 2 else []
    return [*(_struct(*size, dtype=dtype) for size in sizes), *index]


def kernel_cases() -> list[KernelCase]:
    """Every kernel, and each of its static variants that changes what is compiled."""
    cases = [
        KernelCase(
            f"joint_attention {softmax}",
            functools.partial(kernels.joint_attention, softmax=softmax),
            _attention_arguments,
        )
        for softmax in kernels.ALL_SOFTMAXES
    ]
    cases.append(KernelCase("qk_norm_rope", kernels.qk_norm_rope, _norm_rope_arguments))
    width = HEADS * HEAD_DIM
    for indexed in (False, True):
        suffix = " per token" if indexed else ""
        norm = functools.partial(_modulation_arguments, activations=1, vectors=2, indexed=indexed)
        gated = functools.partial(_modulation_arguments, activations=2, vectors=3, indexed=indexed)
        cases += [
            KernelCase(f"layer_norm_modulate{suffix}", kernels.layer_norm_modulate, norm),
            KernelCase(
                f"gated_residual_layer_norm_modulate{suffix}",
                kernels.gated_residual_layer_norm_modulate,
                gated,
            ),
        ]
        down = functools.partial(_linear_arguments, channels=(4 * width, width), gates=1 + indexed)
        cases.append(KernelCase(f"linear_gated_residual{suffix}", kernels.linear_gated_residual, down))
    square, up = (functools.partial(_linear_arguments, channels=(width, n * width)) for n in (1, 4))
    cases += [
        KernelCase("linear", kernels.linear, square),
        KernelCase("linear gelu_tanh", functools.partial(kernels.linear, activation="gelu_tanh"), up),
    ]
    return [*cases, KernelCase("rms_norm", kernels.rms_norm, _rms_norm_arguments)]


@dataclasses.dataclass(frozen=True)
class CompileResult:
    """Outcome of one compilation; `error` is empty when the compiler took the kernel."""

    kernel: str
    shape: JointShape
    dtype: str
    generation: str
    seconds: float
    error: str


def compile_case(case: KernelCase, shape: JointShape, dtype: str, generation: str) -> CompileResult:
    """Compile one kernel at one shape for one TPU generation."""
    start = time.perf_counter()
    error = ""
    try:
        lower_for(TOPOLOGIES[generation], case.function, case.arguments(shape, dtype)).compile()
    except Exception as exception:  # whatever the compiler raises is the finding
        error = f"{type(exception).__name__}: {exception}"
    return CompileResult(case.name, shape, dtype, generation, time.perf_counter() - start, error)


def report(shapes: Sequence[JointShape] = QWENIMAGE_SHAPES) -> bool:
    """Compile every kernel at every shape, dtype and generation with a progress bar, and print the outcome.

    Returns:
        Whether the compiler took everything.
    """
    cases = list(itertools.product(kernel_cases(), shapes, DTYPES, TOPOLOGIES))
    with Progress(console=Console(stderr=True)) as progress:
        results = [compile_case(*case) for case in progress.track(cases, description="compiling for TPU")]
    console = Console(width=120)
    console.print(_summary(results, shapes))
    failures = [result for result in results if result.error]
    for r in failures:
        console.print(f"{r.kernel} {r.shape} {r.dtype} {r.generation}: {r.error}", markup=False)
    console.print(f"{len(results) - len(failures)} of {len(results)} compiled")
    return not failures


def _summary(results: Sequence[CompileResult], shapes: Sequence[JointShape]) -> Table:
    """A row per kernel and dtype, a column per generation: how many of the shapes compiled."""
    table = Table(title=f"shapes compiled, of image + text tokens {', '.join(map(str, shapes))}")
    table.add_column("kernel", no_wrap=True)
    for column in ("dtype", *TOPOLOGIES, "seconds"):
        table.add_column(column, justify="right", no_wrap=True)
    for (kernel, dtype), group in itertools.groupby(
        sorted(results, key=lambda r: (r.kernel, r.dtype)), key=lambda r: (r.kernel, r.dtype)
    ):
        row = list(group)
        counts = [
            f"{sum(not r.error for r in row if r.generation == name)} of {len(shapes)}" for name in TOPOLOGIES
        ]
        table.add_row(kernel, dtype, *counts, f"{sum(r.seconds for r in row):.0f}")
    return table
