"""Paint the unseen scenes in every setting, and score the pictures."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from diffusers import QwenImagePipeline
from PIL import Image
from rich.console import Console
from rich.table import Table

from qwenimage_tpu.generate import prepared, run
from qwenimage_tpu.loading import load_pipeline
from qwenimage_tpu.options import DEMO_STEPS, DEMO_TRUE_CFG_SCALE, GenerateOptions

from .captions import plain_caption
from .drawings import PICTURE_SIZE, unseen_scenes
from .scoring import Score, colour_share, score_pictures
from .vocabulary import COLOURS

# One shape for every call, so that the kernels are compiled once.
BATCH = 25
COLOURLESS_PROMPT = "a star on a white background"
NEGATIVE_SEEDS = 50


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to make pictures of the first `prompts` unseen scenes. The dtype is the pipeline's own."""

    kernels: bool = True
    true_cfg_scale: float = DEMO_TRUE_CFG_SCALE
    text_bucket: int | None = None
    negative_prompt: str | None = None
    steps: int = DEMO_STEPS
    compile: Literal["blocks", "full"] | None = None
    softmax: Literal["int8"] | None = None
    prompts: int = 100


def paint(pipe: QwenImagePipeline, prompts: list[str], setting: Setting) -> list[Image.Image]:
    """One picture per prompt, in calls of BATCH pictures; picture i has the seed i."""
    options = GenerateOptions(
        prompts=tuple(prompts),
        negative_prompt=setting.negative_prompt,
        true_cfg_scale=setting.true_cfg_scale,
        height=PICTURE_SIZE,
        width=PICTURE_SIZE,
        steps=setting.steps,
        text_bucket=setting.text_bucket,
        kernels=setting.kernels,
        compile=setting.compile,
        softmax=setting.softmax,
    )
    images: list[Image.Image] = []
    with prepared(pipe, options) as kernels:
        for start in range(0, len(prompts), BATCH):
            part = replace(options, prompts=options.prompts[start : start + BATCH], seed=start)
            images += run(pipe, part, kernels).images
    return images


def score_setting(pipe: QwenImagePipeline, setting: Setting) -> Score:
    """Paint the unseen scenes and score the pictures."""
    scenes = unseen_scenes(setting.prompts)
    return score_pictures(paint(pipe, [plain_caption(scene) for scene in scenes], setting), scenes)


@dataclass(frozen=True)
class NegativeEffect:
    """Of pictures whose prompt leaves the colour open: how much of it a negative prompt takes away.

    colour: the one that is most common without it. without, with_it: its mean share of the pixels.
    """

    colour: str
    without: float
    with_it: float


def negative_effect(pipe: QwenImagePipeline, setting: Setting) -> NegativeEffect:
    """Paint COLOURLESS_PROMPT `setting.prompts` times, then again with its most common colour unwanted."""
    prompts = [COLOURLESS_PROMPT] * setting.prompts
    before = _mean_shares(paint(pipe, prompts, setting))
    colour = max(before, key=before.__getitem__)
    unwanted = replace(setting, negative_prompt=f"a {colour} star on a white background")
    after = _mean_shares(paint(pipe, prompts, unwanted))
    return NegativeEffect(colour, before[colour], after[colour])


def _mean_shares(images: Sequence[Image.Image]) -> dict[str, float]:
    return {colour: float(np.mean([colour_share(image, colour) for image in images])) for colour in COLOURS}


def mean_difference(first: Sequence[Image.Image], second: Sequence[Image.Image]) -> float:
    """Of the pixels, on the scale 0 to 255."""
    pixels = [np.stack([np.asarray(image, np.float32) for image in images]) for images in (first, second)]
    return float(np.abs(pixels[0] - pixels[1]).mean())


# All of these must paint equally well.
SETTINGS: dict[str, tuple[torch.dtype, Setting]] = {
    "kernels": (torch.float32, Setting()),
    "stock diffusers": (torch.float32, Setting(kernels=False)),
    "kernels, text padded to 256": (torch.float32, Setting(text_bucket=256)),
    "kernels, bf16": (torch.bfloat16, Setting()),
    "kernels with int8 softmax, bf16": (torch.bfloat16, Setting(softmax="int8")),
    "stock diffusers, bf16": (torch.bfloat16, Setting(kernels=False)),
}
# And of these the second must paint better.
GUIDANCE = {
    f"kernels, true CFG {scale:g}": (torch.float32, Setting(true_cfg_scale=scale)) for scale in (1.0, 4.0)
}


def report(model: Path, console: Console) -> None:
    """Print the scores of every setting, and what guidance and a negative prompt do."""
    scenes = unseen_scenes(Setting().prompts)
    prompts = [plain_caption(scene) for scene in scenes]
    table = Table(title=f"{len(prompts)} unseen prompts, {Setting().steps} steps")
    for column in ("setting", "colour", "shape", "background", "mean pixel difference to the first"):
        table.add_column(column)
    first: list[Image.Image] = []
    for name, (dtype, setting) in (SETTINGS | GUIDANCE).items():
        pipe = load_pipeline(str(model), demo=False, dtype=dtype)
        images = paint(pipe, prompts, setting)
        first = first or images
        score = score_pictures(images, scenes)
        parts = (f"{part:.0%}" for part in (score.colour, score.shape, score.background))
        table.add_row(name, *parts, f"{mean_difference(images, first):.2f} of 255")
        console.print(f"{name}: {score}")
    console.print(table)
    pipe = load_pipeline(str(model), demo=False, dtype=torch.float32)
    effect = negative_effect(pipe, Setting(prompts=NEGATIVE_SEEDS))
    console.print(
        f"negative prompt: {effect.colour} covers {effect.without:.1%} of {NEGATIVE_SEEDS} pictures of"
        f" {COLOURLESS_PROMPT!r}, and {effect.with_it:.1%} when it is unwanted"
    )
