"""The text encoder with its layers split over the devices of a mesh."""

from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

STYLES: dict[str, type[ColwiseParallel | RowwiseParallel]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
}


def split_text_encoder(text_encoder: Any, mesh: DeviceMesh) -> None:
    """Split a Qwen2.5-VL's language model in place, by transformers' own tensor-parallel plan.

    mesh: one-dimensional. Each device keeps its part of the layers and all of the embeddings; what encodes
    images and what predicts tokens are left out. The weights, on the CPU, must be the same in all processes.
    Raises ValueError if the mesh does not divide the heads.
    """
    model = text_encoder.model.language_model
    heads = model.config.num_key_value_heads
    if heads % mesh.size():
        raise ValueError(
            f"the mesh's model axis must divide the text encoder's {heads} key and value heads, but is"
            f" {mesh.size()}; choose a divisor, or leave --text-encoder-device out"
        )
    plan: dict[str, ParallelStyle] = {
        name: STYLES[style]() for name, style in model.config.base_model_tp_plan.items()
    }
    parallelize_module(model, mesh, plan, src_data_rank=None)
    del text_encoder.lm_head, text_encoder.model.visual
    text_encoder.to(mesh.device_type)
