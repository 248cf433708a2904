"""AdaLN: LayerNorm and modulation, alone or after a gated residual, each in one pass over HBM."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from . import vmem
from .layouts import Ref
from .row_blocks import RowConfig, choose_block_rows, norm_vmem_bytes
from .validation import check_gated_residual, check_modulation


def select_modulation(values_ref: Ref, index: jax.Array | None) -> jax.Array:
    """``[1, channels]``, or ``[block_rows, channels]`` chosen per token, f32."""
    first = values_ref[0].astype(jnp.float32)
    if index is None:
        return first
    return jnp.where(index == 0, first, values_ref[1].astype(jnp.float32))


def _layer_norm_modulate(x: jax.Array, shift: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    return normed * (1 + scale) + shift


def _norm_kernel(*refs: Ref, eps: float) -> None:
    x_ref, shift_ref, scale_ref, *index_ref, out_ref = refs
    index = index_ref[0][...] if index_ref else None
    out = _layer_norm_modulate(
        x_ref[...].astype(jnp.float32),
        select_modulation(shift_ref, index),
        select_modulation(scale_ref, index),
        eps,
    )
    out_ref[...] = out.astype(out_ref.dtype)


def _gated_kernel(*refs: Ref, eps: float) -> None:
    x_ref, branch_ref, gate_ref, shift_ref, scale_ref, *index_ref, residual_ref, out_ref = refs
    index = index_ref[0][...] if index_ref else None
    branch = branch_ref[...].astype(jnp.float32)
    residual = x_ref[...].astype(jnp.float32) + select_modulation(gate_ref, index) * branch
    residual_ref[...] = residual.astype(residual_ref.dtype)
    out = _layer_norm_modulate(
        residual, select_modulation(shift_ref, index), select_modulation(scale_ref, index), eps
    )
    out_ref[...] = out.astype(out_ref.dtype)


def _call(
    kernel: Callable[..., None],
    name: str,
    activations: list[jax.Array],
    modulation: list[jax.Array],
    index: jax.Array | None,
    outputs: int,
    config: RowConfig | None,
    interpret: bool,
) -> list[jax.Array]:
    """`kernel` over row blocks of the activations, with each batch row's modulation and the tokens' index."""
    x = activations[0]
    batch, tokens, channels = x.shape
    arrays = len(activations) + outputs
    estimate = functools.partial(
        norm_vmem_bytes, channels=channels, itemsize=x.dtype.itemsize, activations=arrays
    )
    block_rows = choose_block_rows(name, config, tokens, estimate)
    rows = pl.BlockSpec((None, block_rows, channels), lambda b, i: (b, i, 0))
    choices = modulation[0].shape[0] // batch
    vector = pl.BlockSpec((choices, None, 1, channels), lambda b, _: (0, b, 0, 0))
    operands = [*activations, *(m.reshape(choices, batch, 1, channels) for m in modulation)]
    in_specs = [rows] * len(activations) + [vector] * len(modulation)
    if index is not None:
        operands.append(index[..., None])
        in_specs.append(pl.BlockSpec((None, block_rows, 1), lambda b, i: (b, i, 0)))
    return pl.pallas_call(
        kernel,
        grid=(batch, pl.cdiv(tokens, block_rows)),
        in_specs=in_specs,
        out_specs=[rows] * outputs,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype)] * outputs,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=vmem.VMEM_LIMIT_BYTES
        ),
        interpret=interpret,
        name=name,
    )(*operands)


def layer_norm_modulate(
    x: jax.Array,
    shift: jax.Array,
    scale: jax.Array,
    index: jax.Array | None = None,
    *,
    eps: float = 1e-6,
    config: RowConfig | None = None,
    interpret: bool = False,
) -> jax.Array:
    """``LayerNorm(x) * (1 + scale) + shift`` without affine weights, in f32 with one rounding.

    The modulation of DiT (arXiv 2212.09748).

    Args:
        x: ``[batch, tokens, channels]``, bf16 or f32, channels a multiple of 128.
        shift, scale: ``[batch, channels]``, bf16 or f32. With an index ``[2 * batch, channels]``: row b
            for tokens of index 0, row ``batch + b`` for the others (`zero_cond_t` of the Edit models).
        index: ``[batch, tokens]`` int32, or None.
        eps: added to the variance.
        config: block size; None takes the heuristic's.
        interpret: run in Pallas' interpret mode, on any platform.

    Returns:
        The shape and dtype of `x`.

    Raises:
        ValueError: shapes or dtypes do not belong together.
        NotImplementedError: another dtype, or channels that are no multiple of 128 or do not fit VMEM.
    """
    check_modulation(x, {"shift": shift, "scale": scale}, index)
    kernel = functools.partial(_norm_kernel, eps=eps)
    (out,) = _call(kernel, "layer_norm_modulate", [x], [shift, scale], index, 1, config, interpret)
    return out


def gated_residual_layer_norm_modulate(
    x: jax.Array,
    branch: jax.Array,
    gate: jax.Array,
    shift: jax.Array,
    scale: jax.Array,
    index: jax.Array | None = None,
    *,
    eps: float = 1e-6,
    config: RowConfig | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """``r = x + gate * branch`` and ``LayerNorm(r) * (1 + scale) + shift``, without rounding r in between.

    Args:
        x, branch: ``[batch, tokens, channels]``, bf16 or f32, channels a multiple of 128.
        gate, shift, scale, index: as `shift`, `scale` and `index` of `layer_norm_modulate`.
        eps, config, interpret: as there.

    Returns:
        ``r`` and the normed and modulated ``r``, both with the shape and dtype of `x`.

    Raises:
        ValueError: shapes or dtypes do not belong together.
        NotImplementedError: another dtype, or channels that are no multiple of 128 or do not fit VMEM.
    """
    check_gated_residual(x, branch, {"gate": gate, "shift": shift, "scale": scale}, index)
    kernel = functools.partial(_gated_kernel, eps=eps)
    name = "gated_residual_layer_norm_modulate"
    residual, out = _call(kernel, name, [x, branch], [gate, shift, scale], index, 2, config, interpret)
    return residual, out
