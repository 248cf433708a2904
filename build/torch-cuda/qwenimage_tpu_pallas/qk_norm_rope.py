"""QK RMSNorm and RoPE in one pass over HBM, for both streams."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from . import vmem
from .layouts import HEAD_DIM, JointRows, Ref, matmul_precision
from .row_blocks import RowConfig, choose_block_rows
from .validation import check_qk_norm_rope


def norm_rope_vmem_bytes(block_rows: int, channels: int, itemsize: int) -> int:
    """Estimate: q and k in and out, cos and sin, of both streams, and one head's f32 values."""
    activations = vmem.block_bytes([(8 * block_rows, channels)], itemsize)
    tables = vmem.block_bytes([(4 * block_rows, HEAD_DIM)], 4)
    return activations + tables + 8 * 4 * block_rows * HEAD_DIM


def _exchange_pairs(dtype: jnp.dtype) -> jax.Array:
    """``[HEAD_DIM, HEAD_DIM]``: x times it has the lanes of each pair (2i, 2i + 1) exchanged, exactly."""
    row = jax.lax.broadcasted_iota(jnp.int32, (HEAD_DIM, HEAD_DIM), 0)
    column = jax.lax.broadcasted_iota(jnp.int32, (HEAD_DIM, HEAD_DIM), 1)
    return (row == column ^ 1).astype(dtype)


def _norm_rope(
    x_ref: Ref,  # [block_rows, heads * HEAD_DIM]
    weight_ref: Ref,  # [1, HEAD_DIM]
    cos: jax.Array,  # [block_rows, HEAD_DIM]
    signed_sin: jax.Array,
    is_even: jax.Array,
    out_ref: Ref,
    eps: float,
) -> None:
    """The matrix unit, idle here, exchanges lanes and sums them: moving lanes takes 2.75 times as long (v6e).

    Weights are in the tables, once for all heads: ``(a r w) cos - (b r v) sin = r (a (w cos) - b (v sin))``.
    """
    dtype = x_ref.dtype
    dot = functools.partial(jnp.dot, precision=matmul_precision(dtype), preferred_element_type=jnp.float32)
    exchange = _exchange_pairs(dtype)
    mean = jnp.full((HEAD_DIM, HEAD_DIM), 1 / HEAD_DIM, dtype)
    weight = weight_ref[...].astype(jnp.float32)
    # The lanes that roll around are never selected.
    partner_weight = jnp.where(is_even[:1], pltpu.roll(weight, HEAD_DIM - 1, 1), pltpu.roll(weight, 1, 1))
    cos, signed_sin = cos * weight, signed_sin * partner_weight
    for start in range(0, x_ref.shape[-1], HEAD_DIM):
        head = slice(start, start + HEAD_DIM)
        x = x_ref[:, head]
        wide = x.astype(jnp.float32)
        # Rounded to bf16, 128 squares have a mean with a tenth of the output's rounding error.
        mean_square = dot((wide * wide).astype(dtype), mean)
        rotated = wide * cos + dot(x, exchange) * signed_sin
        out_ref[:, head] = (rotated * jax.lax.rsqrt(mean_square + eps)).astype(dtype)


def _kernel(*refs: Ref, rows: JointRows, eps: float) -> None:
    image, text = (refs[:6], refs[12:14]), (refs[6:12], refs[14:16])
    in_image = pl.program_id(1) < rows.image_steps

    def run(inputs: tuple[Ref, ...], outputs: tuple[Ref, ...]) -> None:
        query_ref, key_ref, query_weight_ref, key_weight_ref, cos_ref, sin_ref = inputs
        cos = cos_ref[...]
        is_even = jax.lax.broadcasted_iota(jnp.int32, cos.shape, 1) % 2 == 0
        signed_sin = jnp.where(is_even, -sin_ref[...], sin_ref[...])
        _norm_rope(query_ref, query_weight_ref, cos, signed_sin, is_even, outputs[0], eps)
        _norm_rope(key_ref, key_weight_ref, cos, signed_sin, is_even, outputs[1], eps)

    @pl.when(in_image)
    def _():
        run(*image)

    @pl.when(jnp.logical_not(in_image))
    def _():
        run(*text)


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
    *,
    eps: float = 1e-6,
    config: RowConfig | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """RMSNorm of each head of q and k, then their rotary embedding, in f32 with one rounding.

    ``n = x / sqrt(mean(x**2) + eps) * weight`` over the 128 channels of a head, then for each pair
    ``(a, b) = (n[2i], n[2i + 1])``: ``(a cos_2i - b sin_2i, b cos_2i+1 + a sin_2i+1)``
    (RoFormer, arXiv 2104.09864, with adjacent pairs as QwenImage has them).

    Args:
        image_query, image_key: ``[batch, image_tokens, heads * 128]``, bf16 or f32.
        text_query, text_key: ``[batch, text_tokens, heads * 128]``, the same dtype.
        image_query_weight, image_key_weight, text_query_weight, text_key_weight: ``[128]``, bf16 or
            f32. A softmax scale belongs in the query weights: there it costs nothing.
        image_cos, image_sin, text_cos, text_sin: ``[1 or batch, tokens, 128]`` f32, each pair's
            value twice.
        eps: added to the mean square.
        config: block size; None takes the heuristic's.
        interpret: run in Pallas' interpret mode, on any platform.

    Returns:
        Image query, image key, text query and text key, with the shapes and dtype they came with.

    Raises:
        ValueError: shapes or dtypes do not belong together.
        NotImplementedError: another dtype or head size, or more channels than fit VMEM.
    """
    weights = {
        "image_query_weight": image_query_weight,
        "image_key_weight": image_key_weight,
        "text_query_weight": text_query_weight,
        "text_key_weight": text_key_weight,
    }
    tables = {"image_cos": image_cos, "image_sin": image_sin, "text_cos": text_cos, "text_sin": text_sin}
    check_qk_norm_rope(image_query, image_key, text_query, text_key, weights, tables)
    batch, image_tokens, channels = image_query.shape
    text_tokens = text_query.shape[1]
    itemsize = image_query.dtype.itemsize
    estimate = functools.partial(norm_rope_vmem_bytes, channels=channels, itemsize=itemsize)
    block_rows = choose_block_rows("qk_norm_rope", config, max(image_tokens, text_tokens), estimate)
    rows = JointRows(image_tokens, text_tokens, block_rows, block_rows)

    def activation(index: Callable[[jax.Array], jax.Array]) -> pl.BlockSpec:
        return pl.BlockSpec((None, block_rows, channels), lambda b, step: (b, index(step), 0))

    def table(values: jax.Array, index: Callable[[jax.Array], jax.Array]) -> pl.BlockSpec:
        shared = values.shape[0] == 1
        return pl.BlockSpec(
            (None, block_rows, HEAD_DIM), lambda b, step: (0 if shared else b, index(step), 0)
        )

    weight = pl.BlockSpec((1, HEAD_DIM), lambda *_: (0, 0))
    image, text = activation(rows.image_index), activation(rows.text_index)
    return pl.pallas_call(
        functools.partial(_kernel, rows=rows, eps=eps),
        grid=(batch, rows.steps),
        in_specs=[
            *(image, image, weight, weight),
            *(table(image_cos, rows.image_index), table(image_sin, rows.image_index)),
            *(text, text, weight, weight),
            *(table(text_cos, rows.text_index), table(text_sin, rows.text_index)),
        ],
        out_specs=[image, image, text, text],
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (image_query, image_key, text_query, text_key)
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=vmem.VMEM_LIMIT_BYTES
        ),
        interpret=interpret,
        name="qk_norm_rope",
    )(
        *(image_query, image_key, image_query_weight[None], image_key_weight[None], image_cos, image_sin),
        *(text_query, text_key, text_query_weight[None], text_key_weight[None], text_cos, text_sin),
    )
