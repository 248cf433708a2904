"""Train the VAE on crops of drawings, and measure its latents."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage
from PIL import Image

from .drawings import PICTURE_SIZE, draw, random_scene
from .one_frame import one_frame_convolutions
from .training import Loss, step_generator

# The network is convolutional: crops teach it all it needs for the whole drawing, in a quarter of the time.
CROP_SIZE = 48
# A little noise in the latents makes the decoder forgive the transformer's small errors.
KL_WEIGHT = 1e-4
# Squares teach the colours, early; absolute values, of pixels and of the differences of neighbouring ones,
# sharpen the edges, late.
SQUARE_WEIGHT = 3.0
ABSOLUTE_WEIGHT = 0.5
EDGE_WEIGHT = 0.5
ENCODING_BATCH = 50


def pixels_of(pictures: Sequence[Image.Image]) -> torch.Tensor:
    """[pictures, 3, 1, height, width] in -1 to 1, as the VAE takes them."""
    stacked = torch.from_numpy(np.stack([np.asarray(picture) for picture in pictures]))
    return (stacked.permute(0, 3, 1, 2).float() / 127.5 - 1)[:, :, None]


def vae_loss(vae: AutoencoderKLQwenImage, seed: int, batch: int) -> Loss:
    """Distances of pixels and of their differences, and a small KL term, on fresh drawings at every step."""

    def loss(step: int) -> torch.Tensor:
        generator = step_generator(seed, step)
        pixels = _crops(f"vae {seed} {step}", batch)
        with one_frame_convolutions(vae), torch.autocast("cpu", torch.bfloat16):
            mean, logvar = vae.quant_conv(vae.encoder(pixels)).float().chunk(2, dim=1)
            logvar = logvar.clamp(-30, 20)
            noise = torch.randn(mean.shape, generator=generator)
            restored = vae.decoder(vae.post_quant_conv(mean + noise * (0.5 * logvar).exp())).float()
        kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
        return _distance(restored - pixels) + KL_WEIGHT * kl

    return loss


def _distance(difference: torch.Tensor) -> torch.Tensor:
    edges = difference.diff(dim=-1).abs().mean() + difference.diff(dim=-2).abs().mean()
    squares, absolutes = difference.square().mean(), difference.abs().mean()
    return SQUARE_WEIGHT * squares + ABSOLUTE_WEIGHT * absolutes + EDGE_WEIGHT * edges


def _crops(seed: str, count: int) -> torch.Tensor:
    chance = random.Random(seed)
    crops: list[Image.Image] = []
    for _ in range(count):
        picture = draw(random_scene(chance), chance.getrandbits(32))
        x, y = (chance.randint(0, PICTURE_SIZE - CROP_SIZE) for _ in range(2))
        crops.append(picture.crop((x, y, x + CROP_SIZE, y + CROP_SIZE)))
    return _channels_last(pixels_of(crops))


def _channels_last(pixels: torch.Tensor) -> torch.Tensor:
    """The memory order in which the CPU's bf16 convolutions are fast."""
    return pixels[:, :, 0].contiguous(memory_format=torch.channels_last)[:, :, None]


@torch.no_grad()
def encode(vae: AutoencoderKLQwenImage, pictures: Sequence[Image.Image]) -> torch.Tensor:
    """The means of the pictures' latents, [pictures, 16, 1, height / 8, width / 8], not yet normalised."""
    means: list[torch.Tensor] = []
    with one_frame_convolutions(vae), torch.autocast("cpu", torch.bfloat16):
        for start in range(0, len(pictures), ENCODING_BATCH):
            pixels = _channels_last(pixels_of(pictures[start : start + ENCODING_BATCH]))
            means.append(vae.quant_conv(vae.encoder(pixels)).float().chunk(2, dim=1)[0])
    return torch.cat(means)


def record_latent_scale(vae: AutoencoderKLQwenImage, latents: torch.Tensor) -> None:
    """Put each channel's mean and standard deviation over `latents` into the config.

    The pipeline reads them there, so that the transformer sees zero mean and unit variance.
    latents: [pictures, 16, 1, height, width] from `encode`.
    """
    deviation, mean = torch.std_mean(latents, dim=(0, 2, 3, 4))
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=deviation.tolist())


def normalised(vae: AutoencoderKLQwenImage, latents: torch.Tensor) -> torch.Tensor:
    """Latents of `encode` to zero mean and unit variance, by the VAE's config."""
    config: Any = vae.config
    mean, deviation = (
        torch.tensor(values).view(1, -1, 1, 1, 1) for values in (config.latents_mean, config.latents_std)
    )
    return (latents - mean) / deviation
