"""The untrained pipeline: diffusers' and transformers' own classes at toy size, with weights from a seed."""

import random
import re
from typing import Any

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from torch import nn

from qwenimage_tpu.tiny import TEXT_DIM, build_text_encoder, build_tokenizer

from .captions import random_caption
from .drawings import random_scene

LAYERS = 2
# Of the word embeddings. With the usual 0.02 the words of a caption hardly differ beside what attention,
# which random weights spread over the whole template, adds to all of them.
EMBEDDING_DEVIATION = 1.0
FIRST_LOG_VARIANCE = -5.0
SILENT_LAYER = re.compile(r"(proj_out|norm_out\.linear|.*\.(img_mod|txt_mod)\.1)\.(weight|bias)")
# Enough to hold every word of the captions, with a space before it and without.
VOCABULARY_CAPTIONS = 4000


def untrained_pipeline(seed: int) -> QwenImagePipeline:
    """Build it on the CPU in float32; torch's global generator is untouched."""
    chance = random.Random(f"vocabulary {seed}")
    captions = [random_caption(random_scene(chance), chance) for _ in range(VOCABULARY_CAPTIONS)]
    tokenizer = build_tokenizer(captions)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        text_encoder = build_text_encoder(tokenizer)
        embeddings: Any = text_encoder.get_input_embeddings()
        nn.init.normal_(embeddings.weight, std=EMBEDDING_DEVIATION)
        vae, transformer = _vae(), _transformer()
    # It is never trained, so that it is already what will be saved.
    round_to_bfloat16(text_encoder)
    return QwenImagePipeline(
        scheduler=_scheduler(),
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=transformer,
    )


@torch.no_grad()
def round_to_bfloat16(module: nn.Module) -> None:
    """Give float32 weights the values that they will have after they were saved in bfloat16."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            tensor.copy_(tensor.bfloat16())


@torch.no_grad()
def _vae() -> AutoencoderKLQwenImage:
    vae: Any = AutoencoderKLQwenImage(
        base_dim=16,
        z_dim=16,
        dim_mult=[1, 2, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    ).eval()
    # At first the latents must not drown in noise: colours, which move them little, would never be learnt.
    channels = vae.config["z_dim"]
    vae.quant_conv.weight[channels:] = 0
    vae.quant_conv.bias[channels:] = FIRST_LOG_VARIANCE
    return vae


@torch.no_grad()
def _transformer() -> QwenImageTransformer2DModel:
    transformer = QwenImageTransformer2DModel(
        num_layers=LAYERS, num_attention_heads=2, attention_head_dim=128, joint_attention_dim=TEXT_DIM
    ).eval()
    # Blocks that start as the identity, and a zero prediction, train faster (adaLN-Zero of the DiT paper).
    for name, parameter in transformer.named_parameters():
        if SILENT_LAYER.fullmatch(name):
            nn.init.zeros_(parameter)
    return transformer


def _scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Dynamic shifting as QwenImage's, around the 36 image tokens of a 96 px drawing."""
    return FlowMatchEulerDiscreteScheduler(
        shift=1.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=36,
        max_image_seq_len=8192,
        time_shift_type="exponential",
    )
