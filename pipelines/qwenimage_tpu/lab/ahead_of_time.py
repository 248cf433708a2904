"""Compile JAX functions for a TPU that is not there, with the compiler that a TPU would use."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src.lib import xla_client
from jax._src.lib.mlir.dialects import hlo
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding, use_abstract_mesh

from .hardware import CORES, DEVICE_KINDS
from .program import Program

# The smallest slice of each supported generation that the compiler knows.
TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}

# The clock of a core, from the published peak in bf16 and what its matrix units do in a cycle.
CLOCK_HZ = {"v5e": 1.5e9, "v5p": 1.75e9, "v6e": 1.75e9, "tpu7x": 2.2e9}


@functools.cache
def _one_device(topology: str) -> SingleDeviceSharding:
    description = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    return SingleDeviceSharding(description.devices[0])


def lower_for(
    topology: str, function: Callable[..., Any], arguments: Sequence[jax.ShapeDtypeStruct]
) -> jax.stages.Lowered:
    """`function` of the arguments' shapes, lowered for one device of a topology such as "v6e:2x2"."""
    sharding = _one_device(topology)
    placed = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in arguments]
    return jax.jit(function).trace(*placed).lower(lowering_platforms=("tpu",))


def lower_program(
    generation: str, function: Callable[..., Any], arguments: Sequence[jax.ShapeDtypeStruct]
) -> Program:
    """`function` of the arguments' shapes, as a program for `compile_program`; loads no TPU library.

    Kernels that ask for the device that they are traced for get one of `generation`.
    """
    device = AbstractDevice(DEVICE_KINDS[generation], CORES[generation], "tpu")
    # Auto: any other axis puts constraints on every array into the program, and changes what XLA fuses.
    mesh = AbstractMesh((1,), ("device",), axis_types=(AxisType.Auto,), abstract_device=device)
    with use_abstract_mesh(mesh):
        lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("tpu",))
    version = hlo.get_version_from_compatibility_requirement(hlo.StablehloCompatibilityRequirement.NONE)
    module: Any = lowered.compiler_ir("stablehlo")
    code: bytes = hlo.serialize_portable_artifact(module, version)
    return Program(code, xla_client.CompileOptions().SerializeAsString())
