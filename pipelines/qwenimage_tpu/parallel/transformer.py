"""diffusers' QwenImage transformer with its weights split over the devices of a mesh."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers import QwenImageTransformer2DModel
from diffusers.hooks import tensor_parallel
from diffusers.models._modeling_parallel import ParallelConfig, TensorParallelConfig
from torch.distributed.device_mesh import DeviceMesh


class TensorParallelTransformer(QwenImageTransformer2DModel):
    """A QwenImageTransformer2DModel that also splits its modulation, a third of all parameters.

    Its own forward cannot use the split modulation: a `ModulationTable` stands in for it.
    """

    _tp_plan = QwenImageTransformer2DModel._tp_plan | {
        "transformer_blocks.*.img_mod.1": "colwise",
        "transformer_blocks.*.txt_mod.1": "colwise",
    }

    def _resolve_parallel_config(self, config: Any) -> ParallelConfig:
        """As diffusers', on the mesh's device: diffusers takes the accelerator's, which a CPU lacks."""
        device = torch.device(config.mesh.device_type)
        parallel = ParallelConfig(tensor_parallel_config=config)
        parallel.setup(dist.get_rank(), dist.get_world_size(), device, mesh=config.mesh)
        self._parallel_config = parallel
        return parallel


def load_transformer(folder: Path, mesh: DeviceMesh, dtype: torch.dtype) -> TensorParallelTransformer:
    """Read the weights of this process's part of the mesh, straight onto its device.

    folder: as `save_pretrained` writes it, in safetensors. mesh: one-dimensional, of the devices that share a
    model; each column-parallel weight has `1 / size` of its rows there, each row-parallel one of its columns.
    Raises OSError if a file is missing, ValueError if the mesh does not divide the heads.
    """
    config: Any = TensorParallelTransformer.load_config(folder)
    heads = config["num_attention_heads"]
    if heads % mesh.size():
        raise ValueError(
            f"the mesh's model axis must divide the {heads} heads, but is {mesh.size()}; choose a divisor"
        )
    with _cpu_too():
        model: Any = TensorParallelTransformer.from_pretrained(
            folder, dtype=dtype, parallel_config=TensorParallelConfig(mesh=mesh)
        )
    return model


@contextmanager
def _cpu_too() -> Generator[None]:
    """diffusers 0.42.1 refuses tensor parallelism on CPUs, though nothing in it needs another device."""
    module: Any = tensor_parallel
    supported = module._SUPPORTED_TP_DEVICES
    module._SUPPORTED_TP_DEVICES = (*supported, "cpu")
    try:
        yield
    finally:
        module._SUPPORTED_TP_DEVICES = supported
