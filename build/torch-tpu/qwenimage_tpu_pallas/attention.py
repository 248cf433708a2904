"""Joint attention of image and text tokens: flash attention with all keys of a head in VMEM.

Keys lie on sublanes and queries on lanes (``S^T = K Q^T``, ``O^T = V^T P^T``), so that the softmax reduces
over sublanes, which costs plain vector adds. A step works on one block of queries of one head, image and
text together, in one straight run of instructions: its matrix units never wait but at its two ends. For that

- the logits of the next tile are asked for before the values of this one (and, at the end of a step, those
  of the next step's first tile);
- a block of queries is divided by its sums, transposed and stored while the next one is worked on.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from . import vmem
from .attention_copies import Copies
from .attention_int8 import Int8Attention, Int8Scratch
from .attention_layout import (
    OUT_SLOTS,
    QUERY_SLOTS,
    SUBLANES,
    AttentionConfig,
    AttentionLayout,
    default_config,
)
from .attention_order import run_steps
from .attention_tiles import Attention, Scratch
from .devices import TARGETS, Target, jax_device_kind
from .layouts import HEAD_DIM, LANES, Ref
from .softmax import LOG2_E, Softmax
from .validation import check_joint_attention


def _kernel(
    lengths_ref: Ref,
    image_query_ref: Ref,
    image_key_ref: Ref,
    image_value_ref: Ref,
    text_query_ref: Ref,
    text_key_ref: Ref,
    text_value_ref: Ref,
    image_out_ref: Ref,
    text_out_ref: Ref,
    buffers: Sequence[Ref],
    semaphores: Sequence[Ref],
    scratch: Scratch,
    int8: Int8Scratch | None,
    *,
    layout: AttentionLayout,
    base2_scale: float,
    cores: int,
    exponents: Any,
    interpret: bool,
) -> None:
    batch, _, channels = image_query_ref.shape
    heads = channels // HEAD_DIM
    copies = Copies(
        layout,
        heads,
        interpret,
        (image_query_ref, text_query_ref),
        (image_key_ref, text_key_ref),
        (image_value_ref, text_value_ref),
        (image_out_ref, text_out_ref),
        *buffers,
        *semaphores,
    )
    common = (layout, base2_scale, exponents, heads, lengths_ref, copies, scratch)
    attention = Attention(*common) if int8 is None else Int8Attention(*common, int8)
    pairs = batch * heads // cores
    run_steps(attention, pl.program_id(0) * pairs if cores > 1 else 0, pairs)


def scratch_shapes(layout: AttentionLayout, dtype: jnp.dtype) -> tuple[Any, ...]:
    """Buffers of the copies, their semaphores, `Scratch`, and `Int8Scratch` for the int8 softmax."""
    block_q, width = layout.config.block_q, layout.query_tiles[0][1]
    group = max(sum(tile.size for tile in tiles) for tiles in layout.key_groups)
    slots, maxima = (layout.logit_slots,) * 2 if layout.softmax == "online" else (1, 0)
    activation = functools.partial(pltpu.VMEM, dtype=dtype)
    statistic = functools.partial(pltpu.VMEM, dtype=jnp.float32)
    buffers = [
        activation((QUERY_SLOTS, block_q, HEAD_DIM)),
        *[activation((layout.key_slots, layout.keys, HEAD_DIM))] * 2,
        activation((OUT_SLOTS, block_q, HEAD_DIM)),
    ]
    semaphores = [pltpu.SemaphoreType.DMA((n,)) for n in (QUERY_SLOTS, layout.key_slots, OUT_SLOTS)]
    scratch: Any = cast(Any, Scratch)(
        activation((HEAD_DIM, layout.keys)),
        *[activation((layout.tail, HEAD_DIM))] * 2,
        statistic((layout.tail, LANES)),
        statistic((HEAD_DIM, block_q)),
        *[statistic((SUBLANES, block_q))] * 2,
        [statistic((group, width))] * slots,
        [statistic((SUBLANES, width))] * maxima,
    )
    int8: Any = None
    if layout.softmax == "int8":
        key, pieces = pltpu.VMEM((layout.keys, HEAD_DIM), jnp.int8), len(layout.int8_pieces)
        key_scale = statistic((pieces, SUBLANES, LANES))
        int8 = cast(Any, Int8Scratch)(
            pltpu.VMEM((HEAD_DIM, block_q), jnp.int8),
            statistic((SUBLANES, block_q)),
            *[key, key_scale] * 2,
            statistic((SUBLANES, HEAD_DIM)),
        )
    return buffers, semaphores, scratch, int8


def joint_attention(
    image_query: jax.Array,
    image_key: jax.Array,
    image_value: jax.Array,
    text_query: jax.Array,
    text_key: jax.Array,
    text_value: jax.Array,
    text_lengths: jax.Array,
    *,
    softmax: Softmax = "online",
    scale: float = HEAD_DIM**-0.5,
    config: AttentionConfig | None = None,
    device_kind: str | None = None,
    interpret: bool | pltpu.InterpretParams = False,
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
        softmax: "bounded", "exact", "online" or "int8", see the module `softmax`.
        scale: factor of the logits. ``math.log(2)`` costs nothing: the kernel works in base 2.
        config: block sizes; None takes those tuned for the TPU and the shape.
        device_kind: the TPU that this is traced for, as PJRT names it; None asks JAX.
        interpret: run in Pallas' interpret mode, on any platform; with parameters, in the one that plays a
            TPU's memories and copies.

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
        softmax,
    )
    image_tokens, text_tokens = image_query.shape[1], text_query.shape[1]
    target = TARGETS.get(jax_device_kind() if device_kind is None else device_kind, Target("", 1, True))
    config = config or default_config(
        image_tokens, text_tokens, softmax, image_query.dtype.name, target.generation
    )
    layout = AttentionLayout(image_tokens, text_tokens, softmax, config)
    vmem.check_fits(
        "joint_attention",
        layout.vmem_bytes(image_query.dtype.itemsize),
        "use fewer tokens, bf16, or smaller blocks",
    )
    pairs = image_query.shape[0] * image_query.shape[2] // HEAD_DIM
    cores = target.cores if pairs % target.cores == 0 else 1
    smem, hbm = pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        functools.partial(
            _kernel,
            layout=layout,
            base2_scale=_base2_scale(scale),
            cores=cores,
            exponents=jnp.bfloat16 if softmax == "int8" and target.bf16_exponentials else jnp.float32,
            interpret=bool(interpret),
        ),
        grid=(cores,),
        in_specs=[smem, *[hbm] * 6],
        out_specs=[hbm, hbm],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (image_query, text_query)],
        scratch_shapes=scratch_shapes(layout, image_query.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",),
            vmem_limit_bytes=vmem.VMEM_LIMIT_BYTES,
            # Copies of ragged blocks end in the padding of the last tile, and checks cost 1% of the call.
            disable_bounds_checks=True,
        ),
        interpret=interpret,
        name=f"joint_attention_{softmax}",
    )(
        jnp.clip(text_lengths, 0, text_tokens),
        image_query,
        image_key,
        image_value,
        text_query,
        text_key,
        text_value,
    )


def _base2_scale(scale: float) -> float:
    """`scale` times log2(e); exactly 1 for ``math.log(2)``, whatever the rounding of the two logarithms."""
    product = scale * LOG2_E
    return 1.0 if math.isclose(product, 1, rel_tol=1e-15) else product
