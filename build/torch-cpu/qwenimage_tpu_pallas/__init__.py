"""Pallas TPU kernels for the QwenImage diffusion transformer, and what each computes in plain JAX."""

from . import reference
from .attention import joint_attention
from .attention_layout import AttentionConfig
from .linear import LinearConfig, linear, linear_gated_residual
from .modulation import gated_residual_layer_norm_modulate, layer_norm_modulate
from .qk_norm_rope import qk_norm_rope
from .rms_norm import rms_norm
from .row_blocks import RowConfig
from .softmax import (
    ALL_SOFTMAXES,
    BOUNDED_LIMIT,
    INT8_LIMIT,
    SOFTMAXES,
    check_softmax,
    checkpoint_logit_bound,
    choose_softmax,
    qk_norm_logit_bound,
)

__all__ = [
    "ALL_SOFTMAXES",
    "BOUNDED_LIMIT",
    "INT8_LIMIT",
    "SOFTMAXES",
    "AttentionConfig",
    "LinearConfig",
    "RowConfig",
    "check_softmax",
    "checkpoint_logit_bound",
    "choose_softmax",
    "gated_residual_layer_norm_modulate",
    "joint_attention",
    "layer_norm_modulate",
    "linear",
    "linear_gated_residual",
    "qk_norm_logit_bound",
    "qk_norm_rope",
    "reference",
    "rms_norm",
]
