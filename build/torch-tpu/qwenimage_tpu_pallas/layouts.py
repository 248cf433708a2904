"""The layout every kernel here shares, in one place.

Activations are token-major and row-major, ``[batch, tokens, heads * HEAD_DIM]``: what a matmul
writes and the next one reads. XLA lays a 4D ``[batch, tokens, heads, head_dim]`` array out
head-major, and each conversion would be a copy of a full activation.

The image and the text stream stay separate operands and results. A kernel that serves both walks
one grid axis over the row blocks of the image and then those of the text (`JointRows`), so that
nothing is concatenated before it or split after it, and both start on a tile boundary whatever
their token counts are.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

# A reference to a block in VMEM or SMEM, inside a kernel. Pallas has no public type for it.
Ref = Any
HEAD_DIM = 128
LANES = 128
# The largest row count that one tile of any supported dtype holds (bf16: 16 x 128).
ROW_ALIGNMENT = 16


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def check_block_size(name: str, value: int, unit: int) -> None:
    """Raise ValueError unless a block's size is a positive multiple of `unit`."""
    if value <= 0 or value % unit:
        raise ValueError(f"{name} must be a positive multiple of {unit}, got {value}")


def matmul_precision(dtype: jnp.dtype) -> jax.lax.Precision:
    """HIGHEST for f32, whose default on a TPU is a single bf16 pass; DEFAULT for bf16, exact in one."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


@dataclasses.dataclass(frozen=True)
class JointRows:
    """A grid axis over the row blocks of the image stream, then those of the text stream.

    While the axis is in one stream, the other stream's block index stands still, so its blocks are
    neither fetched nor written back again.
    """

    image_tokens: int
    text_tokens: int
    image_block: int
    text_block: int

    @property
    def image_steps(self) -> int:
        return pl.cdiv(self.image_tokens, self.image_block)

    @property
    def steps(self) -> int:
        return self.image_steps + pl.cdiv(self.text_tokens, self.text_block)

    def image_index(self, step: jax.Array) -> jax.Array:
        return jnp.minimum(step, self.image_steps - 1)

    def text_index(self, step: jax.Array) -> jax.Array:
        return jnp.maximum(step - self.image_steps, 0)
