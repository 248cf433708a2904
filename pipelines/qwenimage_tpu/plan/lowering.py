"""The denoising program of a planned case, lowered and compiled for the devices of its slice.

Run as a module by `program.compile_plan`, in a process of its own.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from qwenimage_tpu.lab.compiled_program import Memory
from qwenimage_tpu.spmd.config import DiTConfig
from qwenimage_tpu.spmd.denoise import Schedule, Text, denoise
from qwenimage_tpu.spmd.dit import Execution, Modulation, Rope
from qwenimage_tpu.spmd.placement import make_mesh, partition_specs, shardings
from qwenimage_tpu_pallas.layouts import HEAD_DIM

from .program import CASE, HLO, RESULT, PlanCase


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


def compile_case(folder: Path) -> None:
    """Compile the case in the folder, and write there what the compiler says of it."""
    fields = json.loads((folder / CASE).read_text())
    config = fields.pop("config")
    config["rope_axes"] = tuple(config["rope_axes"])
    case = PlanCase(**fields, config=DiTConfig(**config))
    devices = topologies.get_topology_desc(platform="tpu", topology_name=case.topology).devices
    start = time.perf_counter()
    compiled = lower_denoise(case, devices).compile()
    seconds = time.perf_counter() - start
    memory = dataclasses.asdict(Memory.of(compiled.memory_analysis()))
    (folder / HLO).write_text(compiled.as_text() or "")
    (folder / RESULT).write_text(json.dumps({"memory": memory, "compile_seconds": seconds}))


if __name__ == "__main__":
    compile_case(Path(sys.argv[1]))
