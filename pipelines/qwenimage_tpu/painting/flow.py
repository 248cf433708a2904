"""Train the transformer by flow matching on the latents of captioned drawings."""

import random
from dataclasses import dataclass

import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel

from qwenimage_tpu.options import DEFAULT_NEGATIVE_PROMPT

from .autoencoder import encode, normalised, record_latent_scale
from .captions import random_caption
from .drawings import draw, random_scene
from .training import Loss, step_generator

# How often a caption is replaced by the empty one, for classifier-free guidance.
DROPOUT = 0.12
# The noise level is the sigmoid of a normal of this mean and deviation. High levels come more often, because
# what the caption decides is decided there.
LEVEL_MEAN, LEVEL_DEVIATION = 0.5, 1.2
TEXT_BATCH = 256


@dataclass(frozen=True)
class Lesson:
    """Captioned drawings, encoded once.

    latents: [drawings, image tokens, 64], normalised and packed as the transformer takes them.
    texts: one [tokens, dim] per drawing. empty: the text of the empty caption. grid: of the image tokens.
    """

    latents: torch.Tensor
    texts: list[torch.Tensor]
    empty: torch.Tensor
    grid: tuple[int, int]


def prepare(pipe: QwenImagePipeline, seed: int, count: int) -> Lesson:
    """Draw, caption and encode `count` scenes; their latents' scale goes into the VAE's config."""
    chance = random.Random(f"lesson {seed}")
    scenes = [random_scene(chance) for _ in range(count)]
    captions = [random_caption(scene, chance) for scene in scenes]
    latents = encode(pipe.vae, [draw(scene, chance.getrandbits(32)) for scene in scenes])
    record_latent_scale(pipe.vae, latents)
    packed, grid = pack(normalised(pipe.vae, latents))
    texts = encode_captions(pipe, [*captions, DEFAULT_NEGATIVE_PROMPT])
    return Lesson(packed, texts[:-1], texts[-1], grid)


def pack(latents: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int]]:
    """The pipeline's 2x2 patches: [batch, 16, 1, height, width] to [batch, tokens, 64], and their grid."""
    batch, channels, _, height, width = latents.shape
    grid = height // 2, width // 2
    patches = latents.reshape(batch, channels, grid[0], 2, grid[1], 2).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(batch, grid[0] * grid[1], 4 * channels), grid


@torch.no_grad()
def encode_captions(pipe: QwenImagePipeline, captions: list[str]) -> list[torch.Tensor]:
    """One [tokens, dim] per caption, as the pipeline itself encodes it; equal captions share theirs."""
    distinct = sorted(set(captions))
    texts: dict[str, torch.Tensor] = {}
    for start in range(0, len(distinct), TEXT_BATCH):
        part = distinct[start : start + TEXT_BATCH]
        embeds, mask = pipe.encode_prompt(part)
        # The mask is None when all have the same length.
        lengths = [embeds.shape[1]] * len(part) if mask is None else mask.sum(dim=1).tolist()
        for caption, embed, length in zip(part, embeds, lengths, strict=True):
            texts[caption] = embed[:length].clone()
    return [texts[caption] for caption in captions]


def flow_loss(transformer: QwenImageTransformer2DModel, lesson: Lesson, seed: int, batch: int) -> Loss:
    """Mean squared error of the predicted velocity, noise - latents, at random noise levels."""

    def loss(step: int) -> torch.Tensor:
        generator = step_generator(seed, step)
        latents, embeds, mask = _choose(lesson, batch, generator)
        noise = torch.randn(latents.shape, generator=generator)
        level = torch.sigmoid(LEVEL_MEAN + LEVEL_DEVIATION * torch.randn(batch, generator=generator))
        mixed = torch.lerp(latents, noise, level[:, None, None])
        with torch.autocast("cpu", torch.bfloat16):
            velocity = transformer(
                hidden_states=mixed,
                timestep=level,
                encoder_hidden_states=embeds,
                encoder_hidden_states_mask=mask,
                img_shapes=[[(1, *lesson.grid)]] * batch,
                return_dict=False,
            )[0]
        return (velocity.float() - (noise - latents)).square().mean()

    return loss


def _choose(
    lesson: Lesson, batch: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random drawings: latents, texts [batch, tokens, dim] padded with zeros, and their mask."""
    chosen = torch.randint(len(lesson.texts), (batch,), generator=generator)
    dropped = torch.rand(batch, generator=generator) < DROPOUT
    texts = [
        lesson.empty if drop else lesson.texts[index]
        for index, drop in zip(chosen.tolist(), dropped.tolist(), strict=True)
    ]
    embeds = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    lengths = torch.tensor([len(text) for text in texts])
    return lesson.latents[chosen], embeds, (torch.arange(embeds.shape[1]) < lengths[:, None]).long()
