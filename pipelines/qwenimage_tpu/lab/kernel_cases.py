"""Every kernel at QwenImage's shapes, as a function and the shapes that it takes."""

import dataclasses
import functools
from collections.abc import Callable

import jax

import qwenimage_tpu_pallas as kernels
from qwenimage_tpu_pallas.layouts import HEAD_DIM
from qwenimage_tpu_pallas.shapes import HEADS, HEADS_PER_CHIP, TEXT_EMBEDDING_CHANNELS, JointShape


def _struct(*shape: int, dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@dataclasses.dataclass(frozen=True)
class KernelCase:
    """One kernel with one choice of its static arguments: a function and the shapes it takes."""

    name: str
    function: Callable[..., object]
    arguments: Callable[[JointShape, str], list[jax.ShapeDtypeStruct]]


def _streams(shape: JointShape, dtype: str, heads: int) -> list[jax.ShapeDtypeStruct]:
    return [_struct(1, n, heads * HEAD_DIM, dtype=dtype) for n in (shape.image_tokens, shape.text_tokens)]


def _attention_arguments(shape: JointShape, dtype: str) -> list[jax.ShapeDtypeStruct]:
    image, text = _streams(shape, dtype, HEADS_PER_CHIP)
    return [*[image] * 3, *[text] * 3, _struct(1, dtype="int32")]


def _norm_rope_arguments(shape: JointShape, dtype: str) -> list[jax.ShapeDtypeStruct]:
    image, text = _streams(shape, dtype, HEADS)
    tables = [
        _struct(1, tokens, HEAD_DIM, dtype="float32") for tokens in (shape.image_tokens, shape.text_tokens)
    ]
    weight = _struct(HEAD_DIM, dtype=dtype)
    return [image, image, text, text, *[weight] * 4, *(t for t in tables for _ in range(2))]


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
