"""Rotary tables of one picture, as `QwenEmbedRope` of diffusers has them, without complex numbers."""

import jax.numpy as jnp
import numpy as np

from .dit import Rope

THETA = 10_000.0
POSITIONS = 4096  # of diffusers' tables


def rope_tables(axes: tuple[int, int, int], height: int, width: int, text_tokens: int) -> Rope:
    """Of a picture of ``height x width`` image tokens, counted from its middle, and the text behind its edge.

    Raises ValueError for more text tokens than there are positions left.
    """
    first = max(height // 2, width // 2)
    if first + text_tokens > POSITIONS:
        raise ValueError(
            f"text must have at most {POSITIONS - first} tokens beside this image, as RoPE has {POSITIONS}"
            f" positions, but has {text_tokens}"
        )
    rows, columns = (np.arange(size) - (size - size // 2) for size in (height, width))
    image = _angles(axes, (np.zeros(height * width), np.repeat(rows, width), np.tile(columns, height)))
    text = _angles(axes, (np.arange(first, first + text_tokens),) * 3)
    return Rope(*(jnp.asarray(table) for x in (image, text) for table in (np.cos(x), np.sin(x))))


def _angles(axes: tuple[int, int, int], positions: tuple[np.ndarray, ...]) -> np.ndarray:
    """``[1, tokens, 128]`` f32: the axes side by side, each pair of channels with one angle."""
    parts: list[np.ndarray] = []
    for channels, position in zip(axes, positions, strict=True):
        exponents = np.arange(0, channels, 2, dtype=np.float32) / np.float32(channels)
        frequencies = np.float32(1) / np.power(np.float32(THETA), exponents)
        parts.append(np.outer(position.astype(np.float32), frequencies))
    return np.repeat(np.concatenate(parts, axis=1), 2, axis=1)[None].astype(np.float32)
