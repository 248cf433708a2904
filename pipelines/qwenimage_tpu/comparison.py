"""How far apart two runs of the same seeds are."""

from dataclasses import dataclass

import numpy as np

from .generate import GenerateResult


@dataclass(frozen=True)
class Comparison:
    """Pixel differences on the scale 0 to 255, and max|a-b| / max|b| of the final latents."""

    max_pixel: int
    mean_pixel: float
    latents: float

    def __str__(self) -> str:
        return (
            f"pixels differ by at most {self.max_pixel} and on average {self.mean_pixel:.4f} of 255,"
            f" latents by max|a-b|/max|b| = {self.latents:.2e}"
        )


def compare(result: GenerateResult, expected: GenerateResult) -> Comparison:
    """Compare runs of equal size and count; NaN in either gives NaN."""
    pixels = [np.stack([np.asarray(image, np.int16) for image in run.images]) for run in (result, expected)]
    difference = np.abs(pixels[0] - pixels[1])
    scale = expected.latents.abs().max()
    return Comparison(
        max_pixel=int(difference.max()),
        mean_pixel=float(difference.mean()),
        latents=float((result.latents - expected.latents).abs().max() / scale),
    )
