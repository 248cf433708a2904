"""Pallas TPU kernels for the QwenImage diffusion transformer, as torch custom ops.

The functions take token-major tensors, ``[batch, tokens, heads * 128]``, on a `tpu` device (through
torch-tpu) or on the CPU (interpret mode). `patch_transformer` runs diffusers' QwenImage model on them.
"""

from . import layers
from .ops import (
    gated_residual_layer_norm_modulate,
    joint_attention,
    layer_norm_modulate,
    linear,
    linear_gated_residual,
    qk_norm_rope,
    rms_norm,
)
from .patch import Patch, patch_transformer, softmax_for, softmax_from_norm_weights
from .qwenimage_tpu_pallas import BOUNDED_LIMIT, INT8_LIMIT, choose_softmax

__all__ = [
    "BOUNDED_LIMIT",
    "INT8_LIMIT",
    "Patch",
    "choose_softmax",
    "gated_residual_layer_norm_modulate",
    "joint_attention",
    "layer_norm_modulate",
    "layers",
    "linear",
    "linear_gated_residual",
    "patch_transformer",
    "qk_norm_rope",
    "rms_norm",
    "softmax_for",
    "softmax_from_norm_weights",
]
