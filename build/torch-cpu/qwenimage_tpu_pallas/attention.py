"""Joint attention of image and text tokens: flash attention with all keys of a head in VMEM.

Keys lie on sublanes and queries on lanes (``S^T = K Q^T``, ``O^T = V^T P^T``), so that the softmax
reduces over sublanes, which costs plain vector adds, and the statistics of a row are one lane each.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from . import vmem
from .layouts import HEAD_DIM, LANES, JointRows, Ref, matmul_precision, round_up
from .softmax import LARGEST_EXPONENT, LOG2_E, Softmax
from .validation import check_joint_attention


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Block sizes, in tokens; all multiples of 128.

    Attributes:
        block_q: image queries a grid step works on.
        block_q_text: text queries a grid step works on.
        block_kv: image keys of one matmul.
        block_kv_text: text keys of one matmul.
    """

    block_q: int
    block_q_text: int
    block_kv: int
    block_kv_text: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value <= 0 or value % LANES:
                raise ValueError(f"{field.name} must be a positive multiple of {LANES}, got {value}")

    @classmethod
    def heuristic(cls, image_tokens: int, text_tokens: int) -> "AttentionConfig":
        """Large blocks, no larger than the streams."""
        return cls(
            block_q=min(1024, round_up(image_tokens, LANES)),
            block_q_text=min(512, round_up(text_tokens, LANES)),
            block_kv=min(512, round_up(image_tokens, LANES)),
            block_kv_text=min(512, round_up(text_tokens, LANES)),
        )

    def vmem_bytes(self, image_tokens: int, text_tokens: int, itemsize: int) -> int:
        """Estimate of the VMEM that a call with these token counts takes."""
        keys = round_up(image_tokens, self.block_kv) + round_up(text_tokens, self.block_kv_text)
        queries = self.block_q + self.block_q_text
        blocks = vmem.block_bytes([(2 * keys, HEAD_DIM), (2 * queries, HEAD_DIM)], itemsize)
        widest = max(self.block_q, self.block_q_text)
        # Accumulator and statistics, then logits and probabilities of one key block.
        return (
            blocks + 4 * widest * (HEAD_DIM + 2 * 8) + 3 * 4 * widest * max(self.block_kv, self.block_kv_text)
        )


@dataclasses.dataclass(frozen=True)
class _Keys:
    """One stream's keys and values of a head, padded to the block with whatever VMEM held."""

    key_ref: Ref  # [tokens rounded up to block, HEAD_DIM]
    value_ref: Ref
    tokens: int
    valid: int | jax.Array
    block: int


def _dot(lhs: jax.Array, rhs: jax.Array, contract: tuple[int, int]) -> jax.Array:
    return jax.lax.dot_general(
        lhs,
        rhs,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=matmul_precision(lhs.dtype),
        preferred_element_type=jnp.float32,
    )


def _load_keys(keys: _Keys, start: jax.Array, masked: bool) -> tuple[jax.Array, ...]:
    """A block of keys and of values, ``[block, HEAD_DIM]``, and which of them count, ``[block, 1]``."""
    rows = pl.ds(start, keys.block)
    key, value = keys.key_ref[rows, :], keys.value_ref[rows, :]
    valid = start + jax.lax.broadcasted_iota(jnp.int32, (keys.block, 1), 0) < keys.valid
    if masked:
        # 0 * NaN is NaN, so a probability of 0 alone does not keep padding out of the sum. In f32,
        # because v5e selects no 16-bit vectors.
        value = jnp.where(valid, value.astype(jnp.float32), 0).astype(value.dtype)
    return key, value, valid


def _attend(
    query: jax.Array,  # [block_q, HEAD_DIM]
    streams: tuple[_Keys, ...],
    shift: jax.Array,  # scalar, base 2
    scratch: tuple[Ref, ...],  # maximum and sum [1, widest], accumulator [HEAD_DIM, widest]
    *,
    softmax: Softmax,
    base2_scale: float,
) -> jax.Array:
    """Attention of one block of queries to all keys of the head: ``[HEAD_DIM, block_q]`` f32."""
    max_ref, sum_ref, out_ref = (ref.at[:, : query.shape[0]] for ref in scratch)
    max_ref[...] = jnp.full(max_ref.shape, -math.inf, jnp.float32)
    sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)
    out_ref[...] = jnp.zeros(out_ref.shape, jnp.float32)

    def add_block(keys: _Keys, start: jax.Array, masked: bool) -> None:
        key, value, valid = _load_keys(keys, start, masked)
        logits = _dot(key, query, (1, 1))  # [block, block_q]
        if base2_scale != 1:
            logits *= base2_scale
        if masked:
            logits = jnp.where(valid, logits, -math.inf)
        if softmax == "online":
            # The first block holds a valid image key, so the maximum is finite from then on.
            new_max = jnp.maximum(max_ref[...], jnp.max(logits, axis=0, keepdims=True))
            rescale = jnp.exp2(max_ref[...] - new_max)
            max_ref[...] = new_max
            sum_ref[...] *= rescale
            out_ref[...] *= rescale
            weights = jnp.exp2(logits - new_max)
        else:
            weights = jnp.exp2(logits - shift)
        weights = weights.astype(value.dtype)
        # The sum of the rounded weights: the rounding error then cancels in the quotient.
        sum_ref[...] += jnp.sum(weights.astype(jnp.float32), axis=0, keepdims=True)
        out_ref[...] += _dot(value, weights, (0, 0))  # [HEAD_DIM, block_q]

    for keys in streams:
        all_valid = keys.valid // keys.block if isinstance(keys.valid, int) else 0
        for first, end, masked in (
            (0, all_valid, False),
            (all_valid, pl.cdiv(keys.tokens, keys.block), True),
        ):

            @pl.loop(first, end)
            def _(index: jax.Array, keys: _Keys = keys, masked: bool = masked) -> None:
                add_block(keys, pl.multiple_of(index * keys.block, keys.block), masked)

    return out_ref[...] / sum_ref[...]


def _kernel(
    lengths_ref: Ref,
    bound_ref: Ref,
    image_query_ref: Ref,
    text_query_ref: Ref,
    image_key_ref: Ref,
    image_value_ref: Ref,
    text_key_ref: Ref,
    text_value_ref: Ref,
    image_out_ref: Ref,
    text_out_ref: Ref,
    *scratch: Ref,
    rows: JointRows,
    config: AttentionConfig,
    softmax: Softmax,
    base2_scale: float,
) -> None:
    streams = (
        _Keys(image_key_ref, image_value_ref, rows.image_tokens, rows.image_tokens, config.block_kv),
        _Keys(
            *(text_key_ref, text_value_ref, rows.text_tokens),
            lengths_ref[pl.program_id(0)],
            config.block_kv_text,
        ),
    )
    attend = functools.partial(
        _attend,
        streams=streams,
        shift=jnp.maximum(bound_ref[0] * LOG2_E - LARGEST_EXPONENT, 0),
        scratch=scratch,
        softmax=softmax,
        base2_scale=base2_scale,
    )
    in_image = pl.program_id(2) < rows.image_steps

    @pl.when(in_image)
    def _():
        image_out_ref[...] = attend(image_query_ref[...]).T.astype(image_out_ref.dtype)

    @pl.when(jnp.logical_not(in_image))
    def _():
        text_out_ref[...] = attend(text_query_ref[...]).T.astype(text_out_ref.dtype)


def joint_attention(
    image_query: jax.Array,
    image_key: jax.Array,
    image_value: jax.Array,
    text_query: jax.Array,
    text_key: jax.Array,
    text_value: jax.Array,
    text_lengths: jax.Array,
    logit_bound: jax.Array,
    *,
    softmax: Softmax = "online",
    scale: float = HEAD_DIM**-0.5,
    config: AttentionConfig | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Non-causal attention of image and text queries to image and text keys, per head.

    ``softmax(scale * q k^T) v``, where the keys of batch row b are all image keys and the first
    ``text_lengths[b]`` text keys. Key order does not matter, so a text mask of any pattern is served
    by moving its valid tokens to the front. Whatever stands in the other text keys and values (NaN
    included) has no effect. Text queries beyond the length are computed like any other row. Every
    row has a valid key, as there is at least one image token.

    Args:
        image_query, image_key, image_value: ``[batch, image_tokens, heads * 128]``, bf16 or f32.
        text_query, text_key, text_value: ``[batch, text_tokens, heads * 128]``, the same dtype.
        text_lengths: ``[batch]`` int32; values outside ``[0, text_tokens]`` are clamped to it.
        logit_bound: ``[1]`` f32, an upper bound of every ``|scale * <q, k>|``. Read by the bounded
            softmax only, which is exact when the bound holds and `choose_softmax` allows it.
        softmax: "bounded" or "online", see the module `softmax`.
        scale: factor of the logits. ``math.log(2)`` costs nothing: the kernel works in base 2.
        config: block sizes; None takes the heuristic's.
        interpret: run in Pallas' interpret mode, on any platform.

    Returns:
        The image's and the text's rows, with the shapes and dtype of `image_query` and `text_query`.

    Raises:
        ValueError: shapes or dtypes do not belong together, or `softmax` is unknown.
        NotImplementedError: another dtype or head size, or the keys of a head do not fit VMEM.
    """
    check_joint_attention(
        image_query,
        image_key,
        image_value,
        text_query,
        text_key,
        text_value,
        text_lengths,
        logit_bound,
        softmax,
    )
    batch, image_tokens, channels = image_query.shape
    text_tokens = text_query.shape[1]
    config = config or AttentionConfig.heuristic(image_tokens, text_tokens)
    vmem.check_fits(
        "joint_attention",
        config.vmem_bytes(image_tokens, text_tokens, image_query.dtype.itemsize),
        "use fewer tokens, bf16, or smaller blocks",
    )
    rows = JointRows(image_tokens, text_tokens, config.block_q, config.block_q_text)

    def block(size: int, index: Callable[[jax.Array], jax.Array | int]) -> pl.BlockSpec:
        return pl.BlockSpec((None, size, HEAD_DIM), lambda b, h, step: (b, index(step), h))

    smem = pl.BlockSpec(memory_space=pltpu.SMEM)
    image_rows = block(config.block_q, rows.image_index)
    text_rows = block(config.block_q_text, rows.text_index)
    image_keys = block(round_up(image_tokens, config.block_kv), lambda _: 0)
    text_keys = block(round_up(text_tokens, config.block_kv_text), lambda _: 0)
    widest = max(config.block_q, config.block_q_text)
    return pl.pallas_call(
        functools.partial(
            _kernel, rows=rows, config=config, softmax=softmax, base2_scale=_base2_scale(scale)
        ),
        grid=(batch, channels // HEAD_DIM, rows.steps),
        in_specs=[smem, smem, image_rows, text_rows, image_keys, image_keys, text_keys, text_keys],
        out_specs=[image_rows, text_rows],
        out_shape=[
            jax.ShapeDtypeStruct(image_query.shape, image_query.dtype),
            jax.ShapeDtypeStruct(text_query.shape, text_query.dtype),
        ],
        scratch_shapes=[
            pltpu.VMEM((1, widest), jnp.float32),
            pltpu.VMEM((1, widest), jnp.float32),
            pltpu.VMEM((HEAD_DIM, widest), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=vmem.VMEM_LIMIT_BYTES,
        ),
        interpret=interpret,
        name=f"joint_attention_{softmax}",
    )(
        jnp.clip(text_lengths, 0, text_tokens),
        logit_bound,
        image_query,
        text_query,
        image_key,
        image_value,
        text_key,
        text_value,
    )


def _base2_scale(scale: float) -> float:
    """`scale` times log2(e); exactly 1 for ``math.log(2)``, whatever the rounding of the two logarithms."""
    product = scale * LOG2_E
    return 1.0 if math.isclose(product, 1, rel_tol=1e-15) else product
