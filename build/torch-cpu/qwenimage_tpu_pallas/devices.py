"""Which TPU a kernel is traced for."""

from typing import NamedTuple

import jax


class Target(NamedTuple):
    """A TPU generation, how many TensorCores work as one device, and whether these have bf16 vector units."""

    generation: str
    cores: int
    bf16_exponentials: bool


# By what PJRT, or torch-tpu, calls the device.
TARGETS = {
    "TPU v5 lite": Target("v5e", 1, False),
    "TPU v5e": Target("v5e", 1, False),
    "TPU v5": Target("v5p", 2, False),
    "TPU v5p": Target("v5p", 2, False),
    "TPU v6 lite": Target("v6e", 1, True),
    "TPU v6e": Target("v6e", 1, True),
    "TPU7x": Target("tpu7x", 1, True),
}


def jax_device_kind() -> str:
    """The kind of the device that JAX traces for: of the abstract mesh, where there is one."""
    if device := jax.sharding.get_abstract_mesh().abstract_device:
        return device.device_kind
    return jax.devices()[0].device_kind
