"""Random inputs of joint attention, with garbage in the padding, and how its results are checked."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from accuracy import assert_as_accurate, in_float64, rounded_everywhere
from qwenimage_tpu_pallas import AttentionConfig, joint_attention, reference
from qwenimage_tpu_pallas.layouts import HEAD_DIM
from qwenimage_tpu_pallas.softmax import Softmax

SMALL_BLOCKS = AttentionConfig(block_q=128, block_q_compute=128, block_kv=128, block_kv_compute=128)
NAN, HUGE = math.nan, 1e30


@dataclasses.dataclass(frozen=True)
class Problem:
    """Inputs of one attention: q, k, v of the image, of the text, and the text lengths."""

    streams: tuple[jax.Array, ...]
    lengths: jax.Array
    bound: float

    @classmethod
    def random(
        cls,
        image_tokens: int,
        lengths: list[int],
        text_tokens: int,
        *,
        dtype: str = "float32",
        heads: int = 2,
        logit_scale: float = 3.0,
        padding: float = NAN,
        seed: int = 0,
    ) -> "Problem":
        """Largest logit about `logit_scale`; keys and values beyond a row's length hold `padding`."""
        rng = np.random.default_rng(seed)
        arrays = [
            rng.standard_normal((len(lengths), tokens, heads * HEAD_DIM))
            for tokens in (*[image_tokens] * 3, *[text_tokens] * 3)
        ]
        padded = np.arange(text_tokens)[None, :, None] >= np.array(lengths)[:, None, None]
        logits = [
            np.einsum("bqhd,bkhd->bhqk", *(x.reshape(*x.shape[:2], heads, HEAD_DIM) for x in (q, k)))
            for q in (arrays[0], arrays[3])
            for k in (arrays[1], np.where(padded, 0, arrays[4]))
        ]
        factor = logit_scale / (max(np.abs(x).max() for x in logits) * HEAD_DIM**-0.5)
        arrays[0], arrays[3] = arrays[0] * factor, arrays[3] * factor
        arrays[4], arrays[5] = (np.where(padded, padding, x) for x in arrays[4:])
        return cls(
            tuple(jnp.asarray(x, dtype) for x in arrays),
            jnp.asarray(lengths, jnp.int32),
            logit_scale * 1.02,  # q and k are rounded
        )

    @property
    def arguments(self) -> tuple[jax.Array, ...]:
        return (*self.streams, self.lengths)

    def kernel(self, softmax: Softmax, config: AttentionConfig | None = None) -> tuple[jax.Array, jax.Array]:
        @jax.jit
        def run(*arguments: jax.Array) -> tuple[jax.Array, jax.Array]:
            return joint_attention(*arguments, softmax=softmax, config=config, interpret=True)

        return run(*self.arguments)

    def check(self, softmax: Softmax, config: AttentionConfig | None = None) -> None:
        exact = in_float64(reference.joint_attention, self.arguments)
        keys = self.streams[0].shape[1] + self.streams[3].shape[1]
        own = rounded_everywhere(plain_attention)(*self.arguments)
        for actual, plain, wanted in zip(self.kernel(softmax, config), own, exact, strict=True):
            assert_as_accurate(actual, plain, wanted, reduction=keys, condition=max(1, self.bound))


def plain_attention(*arguments: jax.Array) -> tuple[jax.Array, jax.Array]:
    """XLA's own attention in the inputs' dtype, over concatenated streams with zeros as padding."""
    *streams, lengths = arguments
    image_tokens = streams[0].shape[1]
    valid = jnp.arange(streams[3].shape[1]) < lengths[:, None]
    clean = [*streams[:4], *(jnp.where(valid[..., None], x, 0) for x in streams[4:])]
    query, key, value = (
        jnp.concatenate(pair, axis=1).reshape(len(valid), -1, pair[0].shape[2] // HEAD_DIM, HEAD_DIM)
        for pair in zip(clean[:3], clean[3:], strict=True)
    )
    mask = jnp.concatenate([jnp.ones((len(valid), image_tokens), bool), valid], axis=1)
    out = jax.nn.dot_product_attention(query, key, value, mask=mask[:, None, None, :])
    out = out.reshape(*out.shape[:2], -1)
    return out[:, :image_tokens], out[:, image_tokens:]
