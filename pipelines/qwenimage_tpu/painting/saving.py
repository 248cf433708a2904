"""Write a trained pipeline as it is shipped."""

from pathlib import Path

import torch
from diffusers import QwenImagePipeline
from torch import nn

# The transformer's weights are split over several files with an index, as those of the real model are.
SHARD_SIZE = "4MB"


def save_model(pipe: QwenImagePipeline, folder: Path) -> None:
    """Write a from_pretrained-able folder in bfloat16; the pipeline itself is left in float32.

    The weights must already have bfloat16's values (`models.round_to_bfloat16`), so that nothing is lost.
    """
    parts = (pipe.vae, pipe.text_encoder, pipe.transformer)
    for part in parts:
        # diffusers' own `to` warns about modules to be kept in float32 even where there are none.
        nn.Module.to(part, torch.bfloat16)
    pipe.save_pretrained(folder, max_shard_size=SHARD_SIZE)
    for part in parts:
        nn.Module.to(part, torch.float32)
