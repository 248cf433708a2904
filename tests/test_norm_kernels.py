"""QK norm + RoPE, LayerNorm + modulation, gated residual and RMSNorm: interpret mode against float64."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import qwenimage_tpu_pallas as kernels
from accuracy import assert_as_accurate, in_float64, random_array, rounded_everywhere
from qwenimage_tpu_pallas import RowConfig, reference
from qwenimage_tpu_pallas.layouts import HEAD_DIM
from qwenimage_tpu_pallas.qk_norm_rope import norm_rope_vmem_bytes
from qwenimage_tpu_pallas.row_blocks import norm_vmem_bytes
from qwenimage_tpu_pallas.shapes import HEADS, TEXT_EMBEDDING_CHANNELS
from qwenimage_tpu_pallas.vmem import VMEM_LIMIT_BYTES

RAGGED = [1, 7, 15, 16, 17, 127, 128, 129]
DTYPES = ["float32", "bfloat16"]
tokens = st.sampled_from(RAGGED)
scales = st.floats(-4, 4).map(lambda exponent: 10.0**exponent)


def check(name: str, arguments: list[jax.Array | None], config: Any, plain: Callable[..., Any]) -> None:
    """The kernel `name` against float64, beside the plain computation in the inputs' own dtype."""

    @jax.jit
    def run(*arguments: jax.Array | None) -> Any:
        return getattr(kernels, name)(*arguments, config=config, interpret=True)

    def as_tuple(results: Any) -> tuple[Any, ...]:
        return tuple(results) if isinstance(results, tuple | list) else (results,)

    exact = in_float64(getattr(reference, name), arguments)
    for actual, own, wanted in zip(
        as_tuple(run(*arguments)), as_tuple(rounded_everywhere(plain)(*arguments)), exact, strict=True
    ):
        assert_as_accurate(actual, own, wanted, reduction=wanted.shape[-1])


def plain_rms_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6).astype(x.dtype) * weight


def plain_norm_rope(*a: jax.Array) -> tuple[jax.Array, ...]:
    image_tables, text_tables = a[8:10], a[10:12]

    def one(x: jax.Array, weight: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        normed = plain_rms_norm(x.reshape(*x.shape[:2], -1, HEAD_DIM), weight)
        even, odd = normed[..., 0::2], normed[..., 1::2]
        partner = jnp.stack([-odd, even], axis=-1).reshape(normed.shape)
        return (normed * cos[:, :, None] + partner * sin[:, :, None]).astype(x.dtype).reshape(x.shape)

    return (
        one(a[0], a[4], *image_tables),
        one(a[1], a[5], *image_tables),
        one(a[2], a[6], *text_tables),
        one(a[3], a[7], *text_tables),
    )


def plain_layer_norm_modulate(
    x: jax.Array, shift: jax.Array, scale: jax.Array, index: jax.Array | None = None
) -> jax.Array:
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + 1e-6)
    shift, scale = (reference.select_modulation(m, index).astype(x.dtype) for m in (shift, scale))
    return normed.astype(x.dtype) * (1 + scale) + shift


def plain_gated(
    x: jax.Array,
    branch: jax.Array,
    gate: jax.Array,
    shift: jax.Array,
    scale: jax.Array,
    index: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    residual = x + reference.select_modulation(gate, index).astype(x.dtype) * branch
    return residual, plain_layer_norm_modulate(residual, shift, scale, index)


@given(
    image_tokens=tokens,
    text_tokens=tokens,
    batch=st.integers(1, 2),
    heads=st.integers(1, 2),
    per_row_text_tables=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    scale=scales,
)
@settings(max_examples=12)
def test_qk_norm_rope(
    image_tokens: int,
    text_tokens: int,
    batch: int,
    heads: int,
    per_row_text_tables: bool,
    dtype: str,
    scale: float,
):
    rng = np.random.default_rng(0)
    channels = heads * HEAD_DIM
    streams = [
        random_array(rng, batch, n, channels, dtype=dtype, scale=scale)
        for n in (image_tokens, image_tokens, text_tokens, text_tokens)
    ]
    weights = [random_array(rng, HEAD_DIM, dtype=dtype) for _ in range(4)]
    tables: list[jax.Array] = []
    for rows, n in ((1, image_tokens), (batch if per_row_text_tables else 1, text_tokens)):
        angle = np.repeat(rng.uniform(0, 100, (rows, n, HEAD_DIM // 2)), 2, axis=-1)
        tables += [jnp.asarray(np.cos(angle), jnp.float32), jnp.asarray(np.sin(angle), jnp.float32)]
    check("qk_norm_rope", [*streams, *weights, *tables], RowConfig(32), plain_norm_rope)


@given(
    n=tokens,
    batch=st.integers(1, 3),
    indexed=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    modulation_dtype=st.sampled_from(DTYPES),
    scale=scales,
)
@settings(max_examples=12)
def test_modulation(n: int, batch: int, indexed: bool, dtype: str, modulation_dtype: str, scale: float):
    rng = np.random.default_rng(0)
    x, branch = (random_array(rng, batch, n, 256, dtype=dtype, scale=scale) for _ in range(2))
    rows = 2 * batch if indexed else batch
    gate, shift, mod_scale = (random_array(rng, rows, 256, dtype=modulation_dtype) for _ in range(3))
    index = jnp.asarray(rng.integers(0, 2, (batch, n)), jnp.int32) if indexed else None
    check("layer_norm_modulate", [x, shift, mod_scale, index], RowConfig(32), plain_layer_norm_modulate)
    arguments = [x, branch, gate, shift, mod_scale, index]
    check("gated_residual_layer_norm_modulate", arguments, RowConfig(32), plain_gated)


@given(n=tokens, batch=st.integers(1, 2), dtype=st.sampled_from(DTYPES), scale=scales)
@settings(max_examples=8)
def test_rms_norm(n: int, batch: int, dtype: str, scale: float):
    rng = np.random.default_rng(0)
    x = random_array(rng, batch, n, TEXT_EMBEDDING_CHANNELS, dtype=dtype, scale=scale)
    weight = random_array(rng, TEXT_EMBEDDING_CHANNELS, dtype=dtype)
    check("rms_norm", [x, weight], RowConfig(32), plain_rms_norm)


def test_a_large_mean_does_not_cancel():
    """The variance is taken of centred values: mean 1000, deviation 1 in f32."""
    rng = np.random.default_rng(0)
    x = random_array(rng, 1, 40, 256) + 1000
    zeros = jnp.zeros((1, 256), jnp.float32)
    check("layer_norm_modulate", [x, zeros, zeros, None], RowConfig(16), plain_layer_norm_modulate)


def test_rows_of_one_value_are_not_divided_by_zero():
    x = jnp.full((1, 3, 128), 5.0, jnp.float32)
    zeros = jnp.zeros((1, 128), jnp.float32)
    out = kernels.layer_norm_modulate(x, zeros, zeros, interpret=True)
    np.testing.assert_array_equal(out, 0)
    zero_rows = kernels.rms_norm(0 * x, jnp.ones(128), interpret=True)
    np.testing.assert_array_equal(zero_rows, 0)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("activations", [2, 4])
def test_row_heuristic_fits_vmem(itemsize: int, activations: int):
    for channels in (HEADS * HEAD_DIM, TEXT_EMBEDDING_CHANNELS):
        estimate = functools.partial(
            norm_vmem_bytes, channels=channels, itemsize=itemsize, activations=activations
        )
        assert estimate(RowConfig.heuristic(4096, estimate).block_rows) <= VMEM_LIMIT_BYTES


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("heads", [6, 12, 24])
def test_norm_rope_heuristic_fits_vmem(itemsize: int, heads: int):
    estimate = functools.partial(norm_rope_vmem_bytes, channels=heads * HEAD_DIM, itemsize=itemsize)
    assert estimate(RowConfig.heuristic(4096, estimate).block_rows) <= VMEM_LIMIT_BYTES


def test_estimates_count_what_they_say():
    """Two buffers of each block; q, k in and out of both streams, and their tables."""
    assert norm_rope_vmem_bytes(32, 256, 2) == 2 * 8 * 32 * 256 * 2 + 2 * 4 * 32 * 128 * 4 + 8 * 32 * 128 * 4
    vectors, index = 2 * 3 * 2 * 8 * 256 * 4, 2 * 32 * 128 * 4
    assert norm_vmem_bytes(32, 256, 2, 3) == 2 * 3 * 32 * 256 * 2 + vectors + index + 3 * 32 * 256 * 4


def test_the_heuristic_takes_no_more_rows_than_there_are():
    assert RowConfig.heuristic(7, lambda rows: rows).block_rows == 16
    assert RowConfig.heuristic(4096, lambda rows: rows).block_rows == 512
    assert RowConfig.heuristic(4096, lambda rows: rows * VMEM_LIMIT_BYTES // 100).block_rows == 64


@pytest.mark.parametrize("rows", [0, -16, 8])
def test_block_rows_are_a_multiple_of_16(rows: int):
    with pytest.raises(ValueError, match=rf"block_rows must be a positive multiple of 16, got {rows}"):
        RowConfig(rows)


def test_channels_that_do_not_fit_vmem_are_refused():
    x = jax.ShapeDtypeStruct((1, 16, 2**19), jnp.float32)
    vector = jax.ShapeDtypeStruct((1, 2**19), jnp.float32)
    with pytest.raises(NotImplementedError, match=r"layer_norm_modulate needs .* MiB of VMEM"):
        jax.eval_shape(kernels.layer_norm_modulate, x, vector, vector)
