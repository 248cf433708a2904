"""Linear layers whose bias, GELU or gated residual is applied under the matrix unit's work."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from . import vmem
from .layouts import LANES, ROW_ALIGNMENT, Ref, check_block_size, matmul_precision, round_up
from .modulation import select_modulation
from .validation import Activation, check_linear, check_linear_gated_residual

LARGEST_DEPTH = 4096
GELU_SLOPE = math.sqrt(2 / math.pi)


@dataclasses.dataclass(frozen=True)
class LinearConfig:
    """What a grid step multiplies: rows of x, rows of the weight (output channels), and input channels.

    rows are a multiple of 16, columns and depth of 128; depth divides the input channels.
    """

    block_rows: int
    block_columns: int
    block_depth: int

    def __post_init__(self) -> None:
        check_block_size("block_rows", self.block_rows, ROW_ALIGNMENT)
        check_block_size("block_columns", self.block_columns, LANES)
        check_block_size("block_depth", self.block_depth, LANES)

    @classmethod
    def heuristic(
        cls, tokens: int, in_channels: int, out_channels: int, vmem_bytes: Callable[["LinearConfig"], int]
    ) -> "LinearConfig":
        """Blocks of nearly even size, as deep as fits by the kernel's VMEM estimate."""
        rows, columns = _even(tokens, 1024, ROW_ALIGNMENT), _even(out_channels, 1536, LANES)
        configs = [
            cls(rows, columns, depth)
            for depth in range(LANES, min(in_channels, LARGEST_DEPTH) + 1, LANES)
            if in_channels % depth == 0
        ]
        # At least the shallowest: what does not fit is then refused by its size.
        return max(
            (config for config in configs if vmem_bytes(config) <= vmem.VMEM_LIMIT_BYTES),
            key=lambda config: config.block_depth,
            default=configs[0],
        )


def _even(size: int, most: int, unit: int) -> int:
    """A multiple of `unit`, at most `most`, with as little as possible beyond the last block."""
    return round_up(pl.cdiv(size, pl.cdiv(size, most)), unit)


def linear_vmem_bytes(config: LinearConfig, itemsize: int, arrays: int) -> int:
    """Estimate: blocks of both operands and of `arrays` as large as the output, and the f32 sum twice.

    The second stands for spilled registers. f32 operands are split into bf16 parts.
    """
    rows, columns, depth = config.block_rows, config.block_columns, config.block_depth
    operands = [(rows, depth), (columns, depth)]
    parts = vmem.f32_bytes(operands) * 2 if itemsize == 4 else 0
    blocks = vmem.block_bytes([*operands, (arrays * rows, columns)], itemsize)
    return blocks + vmem.f32_bytes([(2 * rows, columns)]) + parts


def gelu_tanh(x: jax.Array) -> jax.Array:
    """``0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`` (arXiv 1606.08415), in few operations."""
    half = 0.5 * x
    return half * jnp.tanh(x * (x * x * (0.044715 * GELU_SLOPE) + GELU_SLOPE)) + half


def _kernel(*refs: Ref, depth_steps: int, finish: Callable[[jax.Array, Sequence[Ref]], jax.Array]) -> None:
    """refs: the layer, x, weight, what `finish` takes, the output, and, for several steps, the f32 sum."""
    _, x_ref, weight_ref, *others = refs

    def product() -> jax.Array:
        return jax.lax.dot_general(
            x_ref[...],
            weight_ref[...],
            (((1,), (1,)), ((), ())),
            precision=matmul_precision(x_ref.dtype),
            preferred_element_type=jnp.float32,
        )

    if depth_steps == 1:
        *inputs, out_ref = others
        out_ref[...] = finish(product(), inputs).astype(out_ref.dtype)
        return
    *inputs, out_ref, sum_ref = others
    step = pl.program_id(3)

    # The product is in each branch, so that the addition is done while it is made.
    @pl.when(step == 0)
    def _():
        sum_ref[...] = product()

    @pl.when(jnp.logical_and(step > 0, step < depth_steps - 1))
    def _():
        sum_ref[...] += product()

    @pl.when(step == depth_steps - 1)
    def _():
        out_ref[...] = finish(sum_ref[...] + product(), inputs).astype(out_ref.dtype)


def _call(
    name: str,
    operands: tuple[jax.Array, jax.Array, jax.Array],
    extra: Sequence[tuple[jax.Array, pl.BlockSpec]],
    finish: Callable[[jax.Array, Sequence[Ref]], jax.Array],
    config: LinearConfig,
    interpret: bool,
    layer: jax.Array | None,
) -> jax.Array:
    """operands: x, weight and bias. extra: what `finish` takes after the bias, with its blocks."""
    x, weight, bias = operands
    if layer is None:
        layer, weight, bias = jnp.zeros((), jnp.int32), weight[None], bias[None]
    batch, tokens, in_channels = x.shape
    out_channels = weight.shape[1]
    rows, columns, depth = config.block_rows, config.block_columns, config.block_depth
    depth_steps = in_channels // depth
    return pl.pallas_call(
        functools.partial(_kernel, depth_steps=depth_steps, finish=finish),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            # A weight's block stays while all rows pass by, where it is of the whole depth.
            grid=(pl.cdiv(out_channels, columns), batch, pl.cdiv(tokens, rows), depth_steps),
            in_specs=[
                pl.BlockSpec((None, rows, depth), lambda _n, b, m, k, _: (b, m, k)),
                pl.BlockSpec((None, columns, depth), lambda n, _b, _m, k, layer: (layer[0], n, k)),
                pl.BlockSpec((None, 1, columns), lambda n, _b, _m, _k, layer: (layer[0], 0, n)),
                *(spec for _, spec in extra),
            ],
            out_specs=pl.BlockSpec((None, rows, columns), lambda n, b, m, *_: (b, m, n)),
            scratch_shapes=[pltpu.VMEM((rows, columns), jnp.float32)] if depth_steps > 1 else [],
        ),
        out_shape=jax.ShapeDtypeStruct((batch, tokens, out_channels), x.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=vmem.VMEM_LIMIT_BYTES,
        ),
        interpret=interpret,
        name=name,
    )(layer.reshape(1), x, weight, bias[:, None], *(values for values, _ in extra))


def _choose_config(
    name: str, config: LinearConfig | None, x: jax.Array, weight: jax.Array, arrays: int
) -> LinearConfig:
    """The config, or the heuristic's. Raises NotImplementedError if it does not fit VMEM."""
    estimate = functools.partial(linear_vmem_bytes, itemsize=x.dtype.itemsize, arrays=arrays)
    out_channels, in_channels = weight.shape[-2:]
    chosen = config or LinearConfig.heuristic(x.shape[1], in_channels, out_channels, estimate)
    if in_channels % chosen.block_depth:
        raise ValueError(
            f"block_depth must divide the {in_channels} input channels, got {chosen.block_depth}"
        )
    vmem.check_fits(name, estimate(chosen), "use smaller blocks")
    return chosen


def linear(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
    *,
    activation: Activation = "identity",
    layer: jax.Array | None = None,
    config: LinearConfig | None = None,
    interpret: bool = False,
) -> jax.Array:
    """``activation(x weight^T + bias)``, summed and activated in f32 with one rounding.

    Args:
        x: ``[batch, tokens, in_channels]``, bf16 or f32, channels a multiple of 128.
        weight: ``[out_channels, in_channels]``, the dtype of `x`, as `torch.nn.Linear` has it.
        bias: ``[out_channels]``, bf16 or f32.
        activation: "identity", or "gelu_tanh", GELU by its tanh approximation (arXiv 1606.08415).
        layer: int32 scalar; weight and bias are then ``[layers, ...]``, of which this one is read in place: a
            slice of them would be a copy.
        config: block sizes; None takes the heuristic's.
        interpret: run in Pallas' interpret mode, on any platform.

    Returns:
        ``[batch, tokens, out_channels]`` in the dtype of `x`.

    Raises:
        ValueError: shapes or dtypes do not belong together, or an unknown activation.
        NotImplementedError: another dtype, or channels that are no multiple of 128 or do not fit VMEM.
    """
    check_linear(x, weight, bias, activation, stacked=layer is not None)

    def finish(product: jax.Array, inputs: Sequence[Ref]) -> jax.Array:
        out = product + inputs[0][...].astype(jnp.float32)
        return gelu_tanh(out) if activation == "gelu_tanh" else out

    name = "linear" if activation == "identity" else f"linear_{activation}"
    chosen = _choose_config(name, config, x, weight, arrays=1)
    return _call(name, (x, weight, bias), [], finish, chosen, interpret, layer)


def linear_gated_residual(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
    residual: jax.Array,
    gate: jax.Array,
    index: jax.Array | None = None,
    *,
    layer: jax.Array | None = None,
    config: LinearConfig | None = None,
    interpret: bool = False,
) -> jax.Array:
    """``residual + gate * (x weight^T + bias)``, in f32 with one rounding.

    Args:
        x, weight, bias: as of `linear`.
        residual: ``[batch, tokens, out_channels]``, the dtype of `x`.
        gate: ``[batch, out_channels]``, bf16 or f32. With an index ``[2 * batch, out_channels]``: row b for
            tokens of index 0, row ``batch + b`` for the others (`zero_cond_t` of the Edit models).
        index: ``[batch, tokens]`` int32, or None.
        layer, config, interpret: as of `linear`.

    Returns:
        The shape and dtype of `residual`.

    Raises:
        As `linear`.
    """
    check_linear_gated_residual(x, weight, bias, residual, gate, index, stacked=layer is not None)
    chosen = _choose_config("linear_gated_residual", config, x, weight, arrays=2)
    rows, columns = chosen.block_rows, chosen.block_columns
    batch, choices = x.shape[0], gate.shape[0] // x.shape[0]
    extra = [
        (residual, pl.BlockSpec((None, rows, columns), lambda n, b, m, *_: (b, m, n))),
        (
            gate.reshape(choices, batch, 1, -1),
            pl.BlockSpec((choices, None, 1, columns), lambda n, b, *_: (0, b, 0, n)),
        ),
    ]
    if index is not None:
        extra.append((index[..., None], pl.BlockSpec((None, rows, 1), lambda _n, b, m, *_: (b, m, 0))))

    def finish(product: jax.Array, inputs: Sequence[Ref]) -> jax.Array:
        bias_ref, residual_ref, gate_ref, *index_ref = inputs
        branch = product + bias_ref[...].astype(jnp.float32)
        chosen_gate = select_modulation(gate_ref, index_ref[0][...] if index_ref else None)
        return residual_ref[...].astype(jnp.float32) + chosen_gate * branch

    return _call("linear_gated_residual", (x, weight, bias), extra, finish, chosen, interpret, layer)
