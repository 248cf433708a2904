"""The denoising program of a planned case, lowered for the devices of its slice."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from qwenimage_tpu.spmd.denoise import Schedule, Text, denoise
from qwenimage_tpu.spmd.dit import Execution, Modulation, Rope
from qwenimage_tpu.spmd.placement import make_mesh, partition_specs, shardings
from qwenimage_tpu_pallas.layouts import HEAD_DIM

from .program import PlanCase


def lower_denoise(case: PlanCase, devices: Sequence[Any]) -> jax.stages.Lowered:
    """With the number of steps known to the compiler, so that its schedule says how often everything runs."""
    mesh = make_mesh(devices, case.data, case.model)
    execution = Execution.of(mesh, case.softmax, case.rows)
    placed = shardings(partition_specs(case.resident, case.table, case.model), mesh)
    parameters = {
        name: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=placed[name])
        for name, shape in case.resident.items()
    }

    def array(shape: tuple[int, ...], dtype: Any = jnp.float32, axis: str | None = None) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(axis) if axis else P()))

    image, text, rows, axis = case.image_tokens, case.text_tokens, case.rows, execution.batch_axis

    def table(*shape: int) -> Any:
        return array(shape, jnp.bfloat16)

    layers, channels = case.config.layers, case.config.channels
    blocks = table(layers, case.steps, 6 * channels)
    modulation = Modulation(blocks, blocks, table(case.steps, 2 * channels)) if case.tabled else None

    def run(
        parameters: Any, latents: Any, text: Text, schedule: Any, scale: Any, rope: Rope, table: Any
    ) -> jax.Array:
        timesteps, sigmas = schedule
        known = Schedule(timesteps, sigmas, case.steps)
        return denoise(parameters, latents, text, known, scale, rope, table, execution)

    arguments = (
        parameters,
        array((case.images, image, case.config.in_channels)),
        Text(
            array((rows, text, case.config.text_channels), jnp.bfloat16, axis),
            array((rows,), jnp.int32, axis),
        ),
        (array((case.steps,)), array((case.steps + 1,))),
        array(()),
        Rope(*(array((1, tokens, HEAD_DIM)) for tokens in (image, image, text, text))),
        modulation,
    )
    return jax.jit(run).trace(*arguments).lower(lowering_platforms=("tpu",))
