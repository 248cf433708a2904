"""Linear layers with their epilogues: interpret mode against float64, and which blocks they choose."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import qwenimage_tpu_pallas as kernels
from accuracy import assert_as_accurate, in_float64, random_array, rounded_everywhere
from qwenimage_tpu_pallas import LinearConfig, reference
from qwenimage_tpu_pallas.linear import linear_vmem_bytes
from qwenimage_tpu_pallas.validation import Activation
from qwenimage_tpu_pallas.vmem import VMEM_LIMIT_BYTES

ACTIVATIONS: list[Activation] = ["identity", "gelu_tanh"]
DTYPES = ["float32", "bfloat16"]
# Of one block, or ragged in rows, in columns, and with a depth of one, two and three steps.
CONFIGS = [None, LinearConfig(32, 128, 128), LinearConfig(16, 256, 384), LinearConfig(48, 384, 128)]


@rounded_everywhere
def plain_product(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    product = jnp.einsum("btk,nk->btn", x, weight, precision="highest", preferred_element_type=jnp.float32)
    return (product + bias.astype(jnp.float32)).astype(x.dtype)


@given(
    tokens=st.sampled_from([1, 7, 16, 17, 50, 129]),
    batch=st.integers(1, 2),
    depth=st.sampled_from([128, 384]),
    columns=st.sampled_from([128, 384, 640]),
    activation=st.sampled_from(ACTIVATIONS),
    config=st.sampled_from(CONFIGS),
    dtype=st.sampled_from(DTYPES),
    scale=st.floats(-3, 3).map(lambda exponent: 10.0**exponent),
)
@settings(max_examples=10)
def test_linear(
    tokens: int,
    batch: int,
    depth: int,
    columns: int,
    activation: Activation,
    config: LinearConfig | None,
    dtype: str,
    scale: float,
):
    rng = np.random.default_rng(0)
    if config is not None and depth % config.block_depth:
        config = None
    x = random_array(rng, batch, tokens, depth, dtype=dtype, scale=scale)
    weight = random_array(rng, columns, depth, dtype=dtype, scale=depth**-0.5)
    bias = random_array(rng, columns, dtype=dtype)
    run: Any = functools.partial(kernels.linear, activation=activation, config=config, interpret=True)
    (exact,) = in_float64(reference.linear, [x, weight, bias], activation=activation)
    plain = plain_product(x, weight, bias)
    if activation == "gelu_tanh":
        plain = jax.nn.gelu(plain, approximate=True)
    assert_as_accurate(jax.jit(run)(x, weight, bias), plain, exact, reduction=depth)


@given(
    tokens=st.sampled_from([1, 16, 17, 50, 129]),
    batch=st.integers(1, 2),
    columns=st.sampled_from([128, 384]),
    indexed=st.booleans(),
    config=st.sampled_from(CONFIGS),
    dtype=st.sampled_from(DTYPES),
    gate_dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=8)
def test_linear_gated_residual(
    tokens: int,
    batch: int,
    columns: int,
    indexed: bool,
    config: LinearConfig | None,
    dtype: str,
    gate_dtype: str,
):
    rng = np.random.default_rng(0)
    depth = 384
    x, residual = (random_array(rng, batch, tokens, n, dtype=dtype) for n in (depth, columns))
    weight = random_array(rng, columns, depth, dtype=dtype, scale=depth**-0.5)
    bias = random_array(rng, columns, dtype=dtype)
    gate = random_array(rng, 2 * batch if indexed else batch, columns, dtype=gate_dtype)
    index = jnp.asarray(rng.integers(0, 2, (batch, tokens)), jnp.int32) if indexed else None
    arguments = [x, weight, bias, residual, gate, index]
    run = functools.partial(kernels.linear_gated_residual, config=config, interpret=True)
    (exact,) = in_float64(reference.linear_gated_residual, arguments)
    chosen = reference.select_modulation(gate, index).astype(x.dtype)
    plain = residual + chosen * plain_product(x, weight, bias)
    assert_as_accurate(jax.jit(run)(*arguments), plain, exact, reduction=depth)


@pytest.mark.parametrize("out_channels", [128, 768, 3072, 12288])
@pytest.mark.parametrize("in_channels", [128, 3072, 12288, 128 * 97])
@pytest.mark.parametrize("tokens", [1, 512, 4096, 6889])
@pytest.mark.parametrize(("itemsize", "arrays"), [(2, 1), (2, 2), (4, 2)])
def test_blocks_fit_and_waste_little(
    tokens: int, in_channels: int, out_channels: int, itemsize: int, arrays: int
):
    estimate = functools.partial(linear_vmem_bytes, itemsize=itemsize, arrays=arrays)
    config = LinearConfig.heuristic(tokens, in_channels, out_channels, estimate)
    assert estimate(config) <= VMEM_LIMIT_BYTES
    assert in_channels % config.block_depth == 0
    for size, block, unit in (
        (tokens, config.block_rows, 16),
        (out_channels, config.block_columns, 128),
    ):
        blocks = -(-size // block)
        assert blocks * block - size < blocks * unit


@pytest.mark.parametrize("sizes", [(0, 128, 128), (8, 128, 128), (16, 64, 128), (16, 128, 100)])
def test_a_config_names_the_rule(sizes: tuple[int, int, int]):
    with pytest.raises(ValueError, match=r"block_\w+ must be a positive multiple of \d+, got \d+"):
        LinearConfig(*sizes)


def test_depth_must_divide_the_input_channels():
    x, weight, bias = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1, 16, 384), (128, 384), (128,)))
    run = functools.partial(kernels.linear, config=LinearConfig(16, 128, 256))
    with pytest.raises(ValueError, match="block_depth must divide the 384 input channels, got 256"):
        jax.eval_shape(run, x, weight, bias)


def test_a_config_that_does_not_fit_vmem():
    x, weight, bias = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1, 4096, 4096), (4096, 4096), (4096,)))
    run = functools.partial(kernels.linear, config=LinearConfig(4096, 4096, 4096))
    with pytest.raises(NotImplementedError, match=r"linear needs .* MiB of VMEM.*use smaller blocks"):
        jax.eval_shape(run, x, weight, bias)


def test_one_layer_of_several():
    rng = np.random.default_rng(0)
    x = random_array(rng, 2, 17, 384, dtype="float32")
    weight = random_array(rng, 3, 256, 384, dtype="float32", scale=0.05)
    bias, gate = random_array(rng, 3, 256, dtype="float32"), random_array(rng, 2, 256, dtype="float32")
    residual = random_array(rng, 2, 17, 256, dtype="float32")
    config = LinearConfig(16, 128, 128)

    @jax.jit
    def run(layer: jax.Array) -> tuple[jax.Array, jax.Array]:
        chosen: Any = {"layer": layer, "config": config, "interpret": True}
        out = kernels.linear(x, weight, bias, **chosen)
        return out, kernels.linear_gated_residual(x, weight, bias, residual, gate, **chosen)

    for layer in range(3):
        out, gated = run(jnp.int32(layer))
        only: Any = {"config": config, "interpret": True}
        np.testing.assert_array_equal(out, kernels.linear(x, weight[layer], bias[layer], **only))
        alone = kernels.linear_gated_residual(x, weight[layer], bias[layer], residual, gate, **only)
        np.testing.assert_array_equal(gated, alone)


def test_stacked_weights_need_a_layer():
    x, weight, bias = jnp.zeros((1, 16, 128)), jnp.zeros((2, 128, 128)), jnp.zeros((2, 128))
    with pytest.raises(ValueError, match=r"weight must have shape \[out_channels, in_channels\]"):
        kernels.linear(x, weight, bias, interpret=True)
    with pytest.raises(ValueError, match=r"weight must have shape \[layers, out_channels, in_channels\]"):
        kernels.linear(x, weight[0], bias[0], layer=jnp.int32(0), interpret=True)
