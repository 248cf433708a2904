"""Forwards of diffusers' QwenImage modules over these kernels.

Each class is a stateless layer as the Hub wants it: a forward that reads the attributes of the diffusers
module it stands in for, and nothing else. An attribute `kernel_implementation`, where there is one,
chooses the implementation of the functions in `ops`. `kernelize` asks them for what they support.
"""

import math
from typing import Any

import torch
from torch import nn

from .linear_layers import mlp_residual
from .ops import (
    gated_residual_layer_norm_modulate,
    joint_attention,
    layer_norm_modulate,
    qk_norm_rope,
    rms_norm,
)
from .qwenimage_tpu_pallas.layouts import HEAD_DIM
from .qwenimage_tpu_pallas.softmax import LOG2_E

Rope = tuple[torch.Tensor, torch.Tensor]


def _implementation(module: nn.Module) -> str:
    return getattr(module, "kernel_implementation", "kernel")


class RMSNorm(nn.Module):
    """For `diffusers.models.normalization.RMSNorm` with a weight and without a bias."""

    has_backward = False
    can_torch_compile = True

    weight: nn.Parameter
    eps: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        # Of heads, [batch, tokens, heads, head_dim], each is a row.
        rows = hidden_states if hidden_states.ndim == 3 else hidden_states.flatten(0, -2)[None]
        normed = rms_norm(rows, self.weight, eps=self.eps, implementation=_implementation(self))
        return normed.view_as(hidden_states)


class AdaLayerNormContinuous(nn.Module):
    """For `diffusers.models.normalization.AdaLayerNormContinuous` over a LayerNorm without affine weights."""

    has_backward = False
    can_torch_compile = True

    silu: nn.Module
    linear: nn.Module
    norm: nn.LayerNorm

    def forward(self, x: torch.Tensor, conditioning_embedding: torch.Tensor) -> torch.Tensor:
        emb = self.linear(self.silu(conditioning_embedding).to(x.dtype))
        scale, shift = emb.chunk(2, dim=1)
        return layer_norm_modulate(x, shift, scale, eps=self.norm.eps, implementation=_implementation(self))


class QwenImageTransformerBlock(nn.Module):
    """For `QwenImageTransformerBlock` of diffusers, whose attention has a `QwenImageAttnProcessor`."""

    has_backward = False
    can_torch_compile = True

    zero_cond_t: bool
    img_mod: nn.Module
    txt_mod: nn.Module
    img_norm1: nn.LayerNorm
    img_norm2: nn.LayerNorm
    txt_norm1: nn.LayerNorm
    txt_norm2: nn.LayerNorm
    attn: nn.Module
    img_mlp: nn.Module
    txt_mlp: nn.Module

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_hidden_states_mask: torch.Tensor | None,
        temb: torch.Tensor,
        image_rotary_emb: tuple[Rope, Rope] | None = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
        modulate_index: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        image, text, index = hidden_states, encoder_hidden_states, modulate_index
        implementation = _implementation(self)
        image_mod = self.img_mod(temb).chunk(6, dim=-1)
        text_mod = self.txt_mod(temb.chunk(2)[0] if self.zero_cond_t else temb).chunk(6, dim=-1)
        # Each six: shift, scale and gate of the attention, then of the MLP.
        image_shift, image_scale, image_gate, image_mlp_shift, image_mlp_scale, image_mlp_gate = image_mod
        text_shift, text_scale, text_gate, text_mlp_shift, text_mlp_scale, text_mlp_gate = text_mod

        image_attn, text_attn = self.attn(
            hidden_states=layer_norm_modulate(
                *(image, image_shift, image_scale, index),
                eps=self.img_norm1.eps,
                implementation=implementation,
            ),
            encoder_hidden_states=layer_norm_modulate(
                text, text_shift, text_scale, eps=self.txt_norm1.eps, implementation=implementation
            ),
            encoder_hidden_states_mask=encoder_hidden_states_mask,
            image_rotary_emb=image_rotary_emb,
            **(joint_attention_kwargs or {}),
        )
        image, image_normed = gated_residual_layer_norm_modulate(
            *(image, image_attn, image_gate, image_mlp_shift, image_mlp_scale, index),
            eps=self.img_norm2.eps,
            implementation=implementation,
        )
        text, text_normed = gated_residual_layer_norm_modulate(
            *(text, text_attn, text_gate, text_mlp_shift, text_mlp_scale),
            eps=self.txt_norm2.eps,
            implementation=implementation,
        )
        image = mlp_residual(self.img_mlp, image_normed, image, image_mlp_gate, index)
        text = mlp_residual(self.txt_mlp, text_normed, text, text_mlp_gate, None)
        return text, image


class QwenImageAttnProcessor:
    """For `QwenDoubleStreamAttnProcessor2_0`: QKV, norm and RoPE, joint attention, output projections.

    The attention module's norms return their weights when called without input: called, because hooks that
    offload parameters act on calls.

    Args:
        logit_bound: as of `joint_attention`. One for all layers, so that they share one executable.
        implementation: as of the functions in `ops`.
        softmax: as of `joint_attention`.
    """

    # Set by diffusers' set_attention_backend and by its context parallelism.
    _attention_backend = None
    _parallel_config = None

    def __init__(
        self, logit_bound: float, implementation: str = "kernel", softmax: str | None = None
    ) -> None:
        self.logit_bound = logit_bound
        self.implementation = implementation
        self.softmax = softmax

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,  # [batch, image_tokens, channels]
        encoder_hidden_states: torch.Tensor,  # [batch, text_tokens, channels]
        encoder_hidden_states_mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: tuple[Rope, Rope] | None = None,
        text_lengths: torch.Tensor | None = None,
        text_rotary_emb: Rope | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        image_rope, text_rope = self._check(encoder_hidden_states_mask, attention_mask, image_rotary_emb)
        base2_scale = HEAD_DIM**-0.5 * LOG2_E
        image_query, image_key, text_query, text_key = qk_norm_rope(
            *(attn.to_q(hidden_states), attn.to_k(hidden_states)),
            *(attn.add_q_proj(encoder_hidden_states), attn.add_k_proj(encoder_hidden_states)),
            *(attn.norm_q().float() * base2_scale, attn.norm_k()),
            *(attn.norm_added_q().float() * base2_scale, attn.norm_added_k()),
            image_rope,
            text_rotary_emb or text_rope,
            eps=attn.norm_q.eps,
            implementation=self.implementation,
        )
        image, text = joint_attention(
            *(image_query, image_key, attn.to_v(hidden_states)),
            *(text_query, text_key, attn.add_v_proj(encoder_hidden_states)),
            text_lengths,
            logit_bound=self.logit_bound,
            softmax=self.softmax,
            scale=math.log(2),
            implementation=self.implementation,
        )
        for module in attn.to_out:
            image = module(image)
        return image, attn.to_add_out(text)

    def _check(self, text_mask: Any, attention_mask: Any, rope: Any) -> tuple[Rope, Rope]:
        if text_mask is not None:
            raise ValueError(
                "a patched block takes text_lengths and no encoder_hidden_states_mask; call the transformer,"
                " which turns a mask of any pattern into lengths"
            )
        if attention_mask is not None:
            raise ValueError("attention_mask is not taken, as in diffusers; pass encoder_hidden_states_mask")
        if rope is None:
            raise ValueError("image_rotary_emb must hold the image's and the text's (cos, sin), got None")
        if self._parallel_config is not None:
            raise NotImplementedError(
                "context parallelism is not supported by these kernels; use tensor parallelism, or undo the"
                " patch"
            )
        return rope
