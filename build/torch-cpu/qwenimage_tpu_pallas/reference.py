"""What every kernel computes, in plain JAX: f32 throughout (f64 for f64 inputs), one rounding at the end."""

import math

import jax
import jax.numpy as jnp

from .layouts import HEAD_DIM


def _wide(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in arrays)


def _split_heads(x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:-1], -1, HEAD_DIM)


def joint_attention(
    image_query: jax.Array,  # [batch, image_tokens, heads * HEAD_DIM]
    image_key: jax.Array,
    image_value: jax.Array,
    text_query: jax.Array,  # [batch, text_tokens, heads * HEAD_DIM]
    text_key: jax.Array,
    text_value: jax.Array,
    text_lengths: jax.Array,  # [batch]
    *,
    scale: float = HEAD_DIM**-0.5,
) -> tuple[jax.Array, jax.Array]:
    """``softmax(scale * q k^T) v`` over the image keys and the first `text_lengths` text keys of each row."""
    dtype = image_query.dtype
    image_tokens, text_tokens = image_query.shape[1], text_query.shape[1]
    query, key, value = (
        _split_heads(jnp.concatenate(_wide(image, text), axis=1))
        for image, text in ((image_query, text_query), (image_key, text_key), (image_value, text_value))
    )
    text_valid = jnp.arange(text_tokens) < text_lengths[:, None]
    valid = jnp.concatenate([jnp.ones((len(text_valid), image_tokens), bool), text_valid], axis=1)
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key, precision="highest") * scale
    weights = jax.nn.softmax(jnp.where(valid[:, None, None, :], logits, -math.inf), axis=-1)
    value = jnp.where(valid[:, :, None, None], value, 0)
    out = jnp.einsum("bhqk,bkhd->bqhd", weights, value, precision="highest")
    out = out.reshape(*out.shape[:2], -1).astype(dtype)
    return out[:, :image_tokens], out[:, image_tokens:]


def _norm_rope(
    x: jax.Array,  # [batch, tokens, heads * HEAD_DIM]
    weight: jax.Array,  # [HEAD_DIM]
    cos: jax.Array,  # [1 or batch, tokens, HEAD_DIM]
    sin: jax.Array,
    eps: float,
) -> jax.Array:
    heads, weight, cos, sin = _wide(_split_heads(x), weight, cos[:, :, None], sin[:, :, None])
    normed = heads * jax.lax.rsqrt(jnp.mean(heads**2, axis=-1, keepdims=True) + eps) * weight
    even, odd = normed[..., 0::2], normed[..., 1::2]
    rotated = jnp.stack([-odd, even], axis=-1).reshape(normed.shape)
    return (normed * cos + rotated * sin).reshape(x.shape).astype(x.dtype)


def qk_norm_rope(
    image_query: jax.Array,  # [batch, image_tokens, heads * HEAD_DIM]
    image_key: jax.Array,
    text_query: jax.Array,  # [batch, text_tokens, heads * HEAD_DIM]
    text_key: jax.Array,
    image_query_weight: jax.Array,  # [HEAD_DIM]
    image_key_weight: jax.Array,
    text_query_weight: jax.Array,
    text_key_weight: jax.Array,
    image_cos: jax.Array,  # [1 or batch, image_tokens, HEAD_DIM]
    image_sin: jax.Array,
    text_cos: jax.Array,  # [1 or batch, text_tokens, HEAD_DIM]
    text_sin: jax.Array,
    *,
    eps: float = 1e-6,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """RMSNorm over each head, then the rotation of adjacent pairs, for q and k of both streams."""
    return (
        _norm_rope(image_query, image_query_weight, image_cos, image_sin, eps),
        _norm_rope(image_key, image_key_weight, image_cos, image_sin, eps),
        _norm_rope(text_query, text_query_weight, text_cos, text_sin, eps),
        _norm_rope(text_key, text_key_weight, text_cos, text_sin, eps),
    )


def select_modulation(modulation: jax.Array, index: jax.Array | None) -> jax.Array:
    """``[batch, 1, dim]``; with an index ``[batch, tokens, dim]``, of either half of the rows."""
    if index is None:
        return modulation[:, None]
    first, second = jnp.split(modulation[:, None], 2)
    return jnp.where(index[..., None] == 0, first, second)


def layer_norm_modulate(
    x: jax.Array,  # [batch, tokens, dim]
    shift: jax.Array,  # [batch, dim], or [2 * batch, dim] with an index
    scale: jax.Array,
    index: jax.Array | None = None,  # [batch, tokens], 0 or 1
    *,
    eps: float = 1e-6,
) -> jax.Array:
    """``LayerNorm(x) * (1 + scale) + shift``, no affine weights."""
    wide, shift, scale = _wide(x, shift, scale)
    centred = wide - wide.mean(axis=-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + eps)
    return (normed * (1 + select_modulation(scale, index)) + select_modulation(shift, index)).astype(x.dtype)


def gated_residual_layer_norm_modulate(
    x: jax.Array,  # [batch, tokens, dim]
    branch: jax.Array,  # [batch, tokens, dim]
    gate: jax.Array,  # [batch, dim], or [2 * batch, dim] with an index
    shift: jax.Array,
    scale: jax.Array,
    index: jax.Array | None = None,  # [batch, tokens], 0 or 1
    *,
    eps: float = 1e-6,
) -> tuple[jax.Array, jax.Array]:
    """``r = x + gate * branch`` and ``LayerNorm(r) * (1 + scale) + shift``; r is not rounded in between."""
    wide, wide_branch, gate = _wide(x, branch, gate)
    residual = wide + select_modulation(gate, index) * wide_branch
    return residual.astype(x.dtype), layer_norm_modulate(residual, shift, scale, index, eps=eps).astype(
        x.dtype
    )


def rms_norm(
    x: jax.Array,  # [batch, tokens, dim]
    weight: jax.Array,  # [dim]
    *,
    eps: float = 1e-6,
) -> jax.Array:
    """``x / sqrt(mean(x**2) + eps) * weight``."""
    wide, weight = _wide(x, weight)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + eps) * weight).astype(x.dtype)


def linear(
    x: jax.Array,  # [batch, tokens, in_channels]
    weight: jax.Array,  # [out_channels, in_channels]
    bias: jax.Array,  # [out_channels]
    *,
    activation: str = "identity",
) -> jax.Array:
    """``activation(x weight^T + bias)``; "gelu_tanh" is GELU by its tanh approximation."""
    out = _product(x, weight, bias)
    return (jax.nn.gelu(out, approximate=True) if activation == "gelu_tanh" else out).astype(x.dtype)


def linear_gated_residual(
    x: jax.Array,  # [batch, tokens, in_channels]
    weight: jax.Array,  # [out_channels, in_channels]
    bias: jax.Array,  # [out_channels]
    residual: jax.Array,  # [batch, tokens, out_channels]
    gate: jax.Array,  # [batch, out_channels], or [2 * batch, out_channels] with an index
    index: jax.Array | None = None,  # [batch, tokens], 0 or 1
) -> jax.Array:
    """``residual + gate * (x weight^T + bias)``."""
    wide, gate = _wide(residual, gate)
    return (wide + select_modulation(gate, index) * _product(x, weight, bias)).astype(x.dtype)


def _product(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    wide, weight, bias = _wide(x, weight, bias)
    return jnp.einsum("btk,nk->btn", wide, weight, precision="highest") + bias
