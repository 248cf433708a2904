"""The processes of this run: what a launcher's environment says of them, and their mesh of devices."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from qwenimage_tpu.environment import process_count
from qwenimage_tpu.loading import import_tpu_backend

DATA, MODEL = "data", "model"


def start_mesh(data: int, model: int, device: str) -> DeviceMesh:
    """Meet the other processes and lay all devices out as a mesh of ("data", "model").

    device: "cpu", with collectives over gloo, or "tpu". Raises ValueError unless `data * model` is the number
    of processes, and for a TPU that is not there.
    """
    if data * model != process_count():
        raise ValueError(
            f"a mesh of {data} x {model} needs {data * model} processes, but there are"
            f" {process_count()}; give launch --nproc {data * model} or another --mesh"
        )
    if device == "tpu":
        import_tpu_backend()
    if not dist.is_initialized():
        # A download may take hours, and the launcher ends who waits for a failed process.
        dist.init_process_group(
            "gloo" if device == "cpu" else "cpu:gloo,tpu:tpu_dist", timeout=timedelta(days=1)
        )
    return init_device_mesh(device, (data, model), mesh_dim_names=(DATA, MODEL))


def broadcast(value: Any) -> Any:
    """The first process's value, in all."""
    values = [value]
    dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
    return values[0]
