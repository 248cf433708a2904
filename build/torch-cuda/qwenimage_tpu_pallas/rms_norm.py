"""RMSNorm of whole rows: the text embeddings', 3584 wide in QwenImage."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from . import vmem
from .layouts import Ref
from .row_blocks import RowConfig, choose_block_rows, norm_vmem_bytes
from .validation import check_rms_norm


def rms_norm(
    x: jax.Array,
    weight: jax.Array,
    *,
    eps: float = 1e-6,
    config: RowConfig | None = None,
    interpret: bool = False,
) -> jax.Array:
    """``x / sqrt(mean(x**2) + eps) * weight`` over the channels, in f32 with one rounding (arXiv 1910.07467).

    Args:
        x: ``[batch, tokens, channels]``, bf16 or f32, channels a multiple of 128.
        weight: ``[channels]``, bf16 or f32.
        eps: added to the mean square.
        config: block size; None takes the heuristic's.
        interpret: run in Pallas' interpret mode, on any platform.

    Returns:
        The shape and dtype of `x`.

    Raises:
        ValueError: the weight's shape does not belong to `x`.
        NotImplementedError: another dtype, or channels that are no multiple of 128 or do not fit VMEM.
    """
    check_rms_norm(x, weight)
    batch, tokens, channels = x.shape
    estimate = functools.partial(norm_vmem_bytes, channels=channels, itemsize=x.dtype.itemsize, activations=2)
    block_rows = choose_block_rows("rms_norm", config, tokens, estimate)

    def kernel(x_ref: Ref, weight_ref: Ref, out_ref: Ref) -> None:
        wide = x_ref[...].astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
        out_ref[...] = (normed * weight_ref[...].astype(jnp.float32)).astype(out_ref.dtype)

    rows = pl.BlockSpec((None, block_rows, channels), lambda b, i: (b, i, 0))
    return pl.pallas_call(
        kernel,
        grid=(batch, pl.cdiv(tokens, block_rows)),
        in_specs=[rows, pl.BlockSpec((1, channels), lambda *_: (0, 0))],
        out_specs=rows,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=vmem.VMEM_LIMIT_BYTES
        ),
        interpret=interpret,
        name="rms_norm",
    )(x, weight[None])
