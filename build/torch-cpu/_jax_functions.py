"""The JAX functions behind the torch ops: tensors first, then static arguments, then the implementation.

"kernel" is the compiled Pallas kernel, "interpret" the same kernel in interpret mode, "reference" plain
JAX. The annotations are read: ``jax.Array`` becomes a tensor of the op's schema, all others are static.
"""

from typing import cast

import jax

from . import qwenimage_tpu_pallas as pallas
from .device_kind import device_kind
from .qwenimage_tpu_pallas.softmax import Softmax
from .qwenimage_tpu_pallas.validation import Activation


def joint_attention(
    image_query: jax.Array,
    image_key: jax.Array,
    image_value: jax.Array,
    text_query: jax.Array,
    text_key: jax.Array,
    text_value: jax.Array,
    text_lengths: jax.Array,
    softmax: str,
    scale: float,
    implementation: str,
) -> tuple[jax.Array, jax.Array]:
    streams = (image_query, image_key, image_value, text_query, text_key, text_value)
    if implementation == "reference":
        return pallas.reference.joint_attention(*streams, text_lengths, scale=scale)
    return pallas.joint_attention(
        *streams,
        text_lengths,
        softmax=cast(Softmax, softmax),
        scale=scale,
        device_kind=device_kind() if implementation == "kernel" else "",
        interpret=implementation == "interpret",
    )


def qk_norm_rope(
    image_query: jax.Array,
    image_key: jax.Array,
    text_query: jax.Array,
    text_key: jax.Array,
    image_query_weight: jax.Array,
    image_key_weight: jax.Array,
    text_query_weight: jax.Array,
    text_key_weight: jax.Array,
    image_cos: jax.Array,
    image_sin: jax.Array,
    text_cos: jax.Array,
    text_sin: jax.Array,
    eps: float,
    implementation: str,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    arguments = (
        *(image_query, image_key, text_query, text_key),
        *(image_query_weight, image_key_weight, text_query_weight, text_key_weight),
        *(image_cos, image_sin, text_cos, text_sin),
    )
    if implementation == "reference":
        return pallas.reference.qk_norm_rope(*arguments, eps=eps)
    return pallas.qk_norm_rope(*arguments, eps=eps, interpret=implementation == "interpret")


def layer_norm_modulate(
    x: jax.Array,
    shift: jax.Array,
    scale: jax.Array,
    index: jax.Array | None,
    eps: float,
    implementation: str,
) -> jax.Array:
    if implementation == "reference":
        return pallas.reference.layer_norm_modulate(x, shift, scale, index, eps=eps)
    return pallas.layer_norm_modulate(
        x, shift, scale, index, eps=eps, interpret=implementation == "interpret"
    )


def gated_residual_layer_norm_modulate(
    x: jax.Array,
    branch: jax.Array,
    gate: jax.Array,
    shift: jax.Array,
    scale: jax.Array,
    index: jax.Array | None,
    eps: float,
    implementation: str,
) -> tuple[jax.Array, jax.Array]:
    arguments = (x, branch, gate, shift, scale, index)
    if implementation == "reference":
        return pallas.reference.gated_residual_layer_norm_modulate(*arguments, eps=eps)
    return pallas.gated_residual_layer_norm_modulate(
        *arguments, eps=eps, interpret=implementation == "interpret"
    )


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, implementation: str) -> jax.Array:
    if implementation == "reference":
        return pallas.reference.rms_norm(x, weight, eps=eps)
    return pallas.rms_norm(x, weight, eps=eps, interpret=implementation == "interpret")


def linear(
    x: jax.Array, weight: jax.Array, bias: jax.Array, activation: str, implementation: str
) -> jax.Array:
    if implementation == "reference":
        return pallas.reference.linear(x, weight, bias, activation=activation)
    return pallas.linear(
        x, weight, bias, activation=cast(Activation, activation), interpret=implementation == "interpret"
    )


def linear_gated_residual(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
    residual: jax.Array,
    gate: jax.Array,
    index: jax.Array | None,
    implementation: str,
) -> jax.Array:
    arguments = (x, weight, bias, residual, gate, index)
    if implementation == "reference":
        return pallas.reference.linear_gated_residual(*arguments)
    return pallas.linear_gated_residual(*arguments, interpret=implementation == "interpret")
