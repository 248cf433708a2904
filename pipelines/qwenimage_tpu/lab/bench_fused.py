"""Each fused kernel beside XLA's own fusion of plain code: cycles, and bytes from and to HBM.

Both get and give their arrays in HBM. What a kernel moves at least are its inputs and outputs, once each.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from qwenimage_tpu_pallas import reference
from qwenimage_tpu_pallas.layouts import HEAD_DIM
from qwenimage_tpu_pallas.shapes import JointShape

from .ahead_of_time import CLOCK_HZ, TOPOLOGIES, lower_program
from .compiled_program import compile_program
from .hardware import HBM_BYTES_PER_SECOND
from .kernel_cases import KernelCase, kernel_cases

MIB = 2**20


def _norm_rope(x: jax.Array, weight: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """The partner of each lane by rolls, which XLA fuses; slices of every other lane it copies."""
    heads = x.reshape(*x.shape[:-1], -1, HEAD_DIM).astype(jnp.float32)
    normed = heads * jax.lax.rsqrt(jnp.mean(heads**2, axis=-1, keepdims=True) + 1e-6) * weight
    even = jnp.arange(HEAD_DIM) % 2 == 0
    rotated = jnp.where(even, -jnp.roll(normed, -1, axis=-1), jnp.roll(normed, 1, axis=-1))
    return (normed * cos[:, :, None] + rotated * sin[:, :, None]).astype(x.dtype).reshape(x.shape)


def _qk_norm_rope(*arguments: jax.Array) -> tuple[jax.Array, ...]:
    streams, weights, tables = arguments[:4], arguments[4:8], arguments[8:]
    tables = (*tables[:2], *tables[:2], *tables[2:], *tables[2:])
    return tuple(
        _norm_rope(x, weight, *tables[2 * index : 2 * index + 2])
        for index, (x, weight) in enumerate(zip(streams, weights, strict=True))
    )


def _product(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    return jnp.einsum("btk,nk->btn", x, weight, preferred_element_type=jnp.float32) + bias


def _linear(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    return _product(x, weight, bias).astype(x.dtype)


def _linear_gelu(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    return jax.nn.gelu(_product(x, weight, bias), approximate=True).astype(x.dtype)


def _linear_gated_residual(
    x: jax.Array, weight: jax.Array, bias: jax.Array, residual: jax.Array, gate: jax.Array
) -> jax.Array:
    return (residual + gate[:, None] * _product(x, weight, bias)).astype(x.dtype)


# What XLA is given, by the names of the kernels' cases.
PLAIN: dict[str, Callable[..., object]] = {
    "qk_norm_rope": _qk_norm_rope,
    "layer_norm_modulate": reference.layer_norm_modulate,
    "gated_residual_layer_norm_modulate": reference.gated_residual_layer_norm_modulate,
    "rms_norm": reference.rms_norm,
    "linear": _linear,
    "linear gelu_tanh": _linear_gelu,
    "linear_gated_residual": _linear_gated_residual,
}


def report(shape: JointShape, generations: Sequence[str], console: Console) -> None:
    """Print a table for each TPU generation. Raises ValueError for an unknown one."""
    unknown = [name for name in generations if name not in TOPOLOGIES]
    if unknown:
        raise ValueError(f"TPU generations must be of {sorted(TOPOLOGIES)}, but are {unknown}")
    cases = [case for case in kernel_cases() if case.name in PLAIN]
    for generation in generations:
        table = Table(title=f"{generation}, {shape} tokens, bf16")
        table.add_column("kernel", no_wrap=True)
        for column in ("cycles", "XLA's", "HBM MiB", "XLA's", "at least", "as cycles"):
            table.add_column(column, justify="right")
        for case in cases:
            with console.status(f"compiling {case.name} for {generation}"):
                table.add_row(case.name, *_row(case, shape, generation))
        console.print(table)


def _row(case: KernelCase, shape: JointShape, generation: str) -> list[str]:
    arguments = case.arguments(shape, "bfloat16")
    ours, plain = (
        compile_program(lower_program(generation, function, arguments), TOPOLOGIES[generation]).schedule
        for function in (case.function, PLAIN[case.name])
    )
    arrays = jax.tree.leaves([arguments, jax.eval_shape(case.function, *arguments)])
    least = sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)
    cycles = least * CLOCK_HZ[generation] / HBM_BYTES_PER_SECOND[generation]
    moved = [f"{count / MIB:.1f}" for count in (ours.traffic.total, plain.traffic.total, least)]
    return [f"{ours.cycles:,}", f"{plain.cycles:,}", *moved, f"{cycles:,.0f}"]
