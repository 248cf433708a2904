"""The kernels and blocks that `qwenimage-tpu verify` runs, each as a function and its inputs."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch

from qwenimage_tpu_pallas.layouts import HEAD_DIM
from qwenimage_tpu_pallas.shapes import HEADS, QWENIMAGE_SHAPES, TEXT_EMBEDDING_CHANNELS, JointShape

from .kernel_loader import load_kernels
from .lab.bench_block import BlockCase, build_block

Outputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Size:
    """How large the inputs are."""

    shape: JointShape
    heads: int


REAL_SIZE = Size(QWENIMAGE_SHAPES[0], HEADS)
# What interpret mode does in a moment; two tiles' worth of nothing special.
SMALL_SIZE = Size(JointShape(128, 40), 2)

KERNELS = (
    "joint_attention",
    "qk_norm_rope",
    "layer_norm_modulate",
    "gated_residual_layer_norm_modulate",
    "rms_norm",
    "linear",
    "linear_gated_residual",
)
BLOCKS = {"block, stock diffusers": False, "block, on our kernels": True}


def kernel_inputs(name: str, size: Size, dtype: torch.dtype) -> list[Any]:
    """Random inputs on the CPU, batch 1, from a fixed seed; the text is half padding."""
    generator = torch.Generator().manual_seed(KERNELS.index(name))
    channels, (image, text) = size.heads * HEAD_DIM, (size.shape.image_tokens, size.shape.text_tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    def table(tokens: int) -> Outputs:
        angles = torch.rand((1, tokens, HEAD_DIM // 2), generator=generator).repeat_interleave(2, dim=-1)
        return angles.cos(), angles.sin()

    if name == "joint_attention":
        streams = [normal(1, tokens, channels) for tokens in (image, image, image, text, text, text)]
        return [*streams, torch.tensor([text // 2], dtype=torch.int32)]
    if name == "qk_norm_rope":
        streams = [normal(1, tokens, channels) for tokens in (image, image, text, text)]
        return [*streams, *(normal(HEAD_DIM) for _ in range(4)), table(image), table(text)]
    if name == "rms_norm":
        return [normal(1, text, TEXT_EMBEDDING_CHANNELS), normal(TEXT_EMBEDDING_CHANNELS)]
    if name.startswith("linear"):
        x, weight, bias = normal(1, image, channels), normal(channels, channels), normal(channels)
        product = [x, weight * channels**-0.5, bias]
        return product if name == "linear" else [*product, normal(1, image, channels), normal(1, channels)]
    activations = 1 if name == "layer_norm_modulate" else 2
    vectors = [normal(1, channels) for _ in range(activations + 1)]
    return [*(normal(1, image, channels) for _ in range(activations)), *vectors]


def kernel_function(kernels: ModuleType, name: str, implementation: str) -> Callable[..., Outputs]:
    """The kernel, with all its results as a tuple."""
    function = partial(getattr(kernels, name), implementation=implementation)

    def run(*inputs: Any) -> Outputs:
        results = function(*inputs)
        return results if isinstance(results, tuple) else (results,)

    return run


def on_device(inputs: list[Any], device: str) -> list[Any]:
    return [
        tuple(part.to(device) for part in value) if isinstance(value, tuple) else value.to(device)
        for value in inputs
    ]


def timed_case(
    name: str, size: Size, implementation: str, kernel_repo: str | None
) -> tuple[Callable[..., Any], list[Any], dict[str, Any]]:
    """A kernel or block in bf16 on the `tpu` device: what to call, and its inputs."""
    if name in BLOCKS:
        case = BlockCase(size.shape, size.heads, patched=BLOCKS[name])
        block, inputs = build_block(case, implementation, kernel_repo)
        return block, [], inputs
    function = kernel_function(load_kernels(kernel_repo).module, name, implementation)
    return function, on_device(kernel_inputs(name, size, torch.bfloat16), "tpu"), {}
