"""Joint attention by our kernel and by others', each behind the same function.

Every function takes what ours takes: query, key and value of the image, `[1, image_tokens, heads * 128]`, and
of the text, then the text's length, `[1]`. It gives the image's and the text's rows.
What a kernel needs around it for that (concatenation, transposes, padding to its blocks, splitting) belongs
to the call. Others attend to all text keys and ignore the length. The query carries the softmax's scale
already, as `qk_norm_rope` can leave it for nothing: so no kernel multiplies its logits.
"""

import functools
import importlib
import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import flash_attention as flash
from jax.experimental.pallas.ops.tpu import splash_attention as splash

import qwenimage_tpu_pallas as kernels
from qwenimage_tpu_pallas.layouts import HEAD_DIM, round_up
from qwenimage_tpu_pallas.shapes import JointShape

from .ahead_of_time import lower_program
from .program import Program
from .torch_attention import capture_torch_attention

# Block sizes that are tried, in tokens: queries / keys fetched at once / keys of one step. They divide 4608
# or 9216 tokens, or 7168, to which 6889 + 256 are padded.
BLOCKS: tuple[tuple[int, int, int], ...] = (
    (1536, 1536, 1536),
    (1536, 1536, 512),
    (2304, 2304, 768),
    (1024, 1024, 1024),
    (1024, 1024, 512),
    (1792, 1792, 896),
)
# Any static value: it replaces the running maximum of tokamax's splash attention.
MAX_LOGIT = 20.0

Heads = jax.Array  # [1, heads, tokens, HEAD_DIM]
Outputs = tuple[jax.Array, jax.Array]
Attention = Callable[..., Outputs]


@dataclass(frozen=True)
class AttentionCase:
    """Batch 1, bf16, heads of 128, on one device of a TPU generation."""

    generation: str
    shape: JointShape
    heads: int

    @property
    def arguments(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the seven arguments."""
        image, text = (
            jax.ShapeDtypeStruct((1, tokens, self.heads * HEAD_DIM), jnp.bfloat16)
            for tokens in (self.shape.image_tokens, self.shape.text_tokens)
        )
        return [*[image] * 3, *[text] * 3, jax.ShapeDtypeStruct((1,), jnp.int32)]


@dataclass(frozen=True)
class Candidate:
    """One way to run a contender. choice: its block sizes, or nothing. function: None if it is torch's."""

    choice: str
    function: Attention | None

    def program(self, case: AttentionCase) -> Program:
        """What the TPU's compiler gets."""
        if self.function is None:
            return capture_torch_attention(case.shape, case.heads)
        return lower_program(case.generation, self.function, case.arguments)


@dataclass(frozen=True)
class Contender:
    """A kernel and the candidates to choose from.

    rare_regions: what it decides by its data is rare, so that its cycles are counted without. missing: why
    there are no candidates. int8_logits: what its floor depends on. remark: what a reader of its results has
    to know.
    """

    name: str
    candidates: Sequence[Candidate]
    ours: bool = False
    rare_regions: bool = False
    missing: str = ""
    int8_logits: bool = False
    remark: str = ""


def all_contenders() -> list[Contender]:
    """Our kernel with each softmax, and its peers."""
    ours = [
        Contender(
            f"ours, {softmax} softmax",
            [Candidate("", functools.partial(kernels.joint_attention, softmax=softmax, scale=math.log(2)))],
            ours=True,
            # It starts a block over, with the online softmax, when a logit is far above its first keys'.
            rare_regions=softmax == "exact",
            int8_logits=softmax == "int8",
            remark="rounds queries and keys; not exact" if softmax == "int8" else "",
        )
        for softmax in kernels.ALL_SOFTMAXES
    ]
    peers = [
        Contender("jax flash", _candidates(attend_flash)),
        Contender("jax splash", _candidates(attend_splash)),
        *_tokamax_contenders(),
        Contender("torch-tpu SDPA", [Candidate("", None)]),
        Contender("XLA, unfused", [Candidate("", attend_unfused)]),
    ]
    return [*ours, *peers]


def _tokamax_contenders() -> list[Contender]:
    names = {"tokamax splash": None, "tokamax splash, constant maximum": MAX_LOGIT}
    if importlib.util.find_spec("tokamax") is None:
        missing = "tokamax is not installed; the extra `bench` has it: pip install -e '.[bench]'"
        return [Contender(name, (), missing=missing) for name in names]
    return [
        Contender(
            name,
            _candidates(functools.partial(attend_tokamax, max_logit=max_logit)),
            remark="does not mask padding here; where blocks do not divide the tokens it needs more cycles",
        )
        for name, max_logit in names.items()
    ]


def _candidates(attend: Callable[..., Heads]) -> list[Candidate]:
    """attend: takes query, key and value as `Heads`, padded, the valid tokens, and `blocks`."""
    return [
        Candidate("/".join(map(str, blocks)), functools.partial(attend_padded, attend=attend, blocks=blocks))
        for blocks in BLOCKS
    ]


def attend_padded(
    *arguments: jax.Array, attend: Callable[..., Heads], blocks: tuple[int, int, int]
) -> Outputs:
    """Run `attend` on tokens padded to the blocks."""
    image_tokens, tokens = arguments[0].shape[1], arguments[0].shape[1] + arguments[3].shape[1]
    block_q, block_kv, _ = blocks
    query, key, value = (
        _join(image, text, round_up(tokens, block))
        for image, text, block in zip(
            arguments[:3], arguments[3:6], (block_q, block_kv, block_kv), strict=True
        )
    )
    out = attend(query, key, value, tokens=tokens, blocks=blocks)
    return _split(out, image_tokens, tokens)


def _join(image: jax.Array, text: jax.Array, padded: int) -> Heads:
    """Both streams' tokens and zeros up to `padded`, head by head.

    A transpose of the heads gives the same, but XLA then copies everything twice.
    """
    channels = image.shape[2]
    zeros = jnp.zeros((1, padded - image.shape[1] - text.shape[1], channels), image.dtype)
    streams = [stream for stream in (image, text, zeros) if stream.shape[1]]
    heads = [
        jnp.concatenate([stream[:, :, start : start + HEAD_DIM] for stream in streams], axis=1)
        for start in range(0, channels, HEAD_DIM)
    ]
    return jnp.stack(heads, axis=1)


def _split(out: Heads, image_tokens: int, tokens: int) -> Outputs:
    image, text = (
        jnp.concatenate([out[:, head, rows] for head in range(out.shape[1])], axis=-1)
        for rows in (slice(image_tokens), slice(image_tokens, tokens))
    )
    return image, text


def _segments(length: int, tokens: int) -> jax.Array:
    """0 for a token, 1 for padding, `[length]`."""
    return (jnp.arange(length) >= tokens).astype(jnp.int32)


def attend_flash(
    query: Heads, key: Heads, value: Heads, *, tokens: int, blocks: tuple[int, int, int]
) -> Heads:
    block_q, block_kv, block_kv_compute = blocks
    lengths = query.shape[2], key.shape[2]
    segments = None
    if lengths != (tokens, tokens):
        segments = flash.SegmentIds(*(_segments(length, tokens)[None] for length in lengths))
    sizes = flash.BlockSizes(block_q, block_kv, block_kv_compute, block_b=1)
    return flash.flash_attention(query, key, value, segment_ids=segments, sm_scale=1.0, block_sizes=sizes)


def attend_splash(
    query: Heads, key: Heads, value: Heads, *, tokens: int, blocks: tuple[int, int, int]
) -> Heads:
    lengths = query.shape[2], key.shape[2]
    mask = splash.MultiHeadMask([splash.FullMask(lengths)] * query.shape[1])
    kernel = splash.make_splash_mha(
        mask, head_shards=1, q_seq_shards=1, block_sizes=splash.BlockSizes(*blocks)
    )
    segments = None
    if lengths != (tokens, tokens):
        segments = splash.SegmentIds(*(_segments(length, tokens) for length in lengths))
    out: Any = kernel(query[0], key[0], value[0], segment_ids=segments)
    return out[None]


def attend_tokamax(
    query: Heads,
    key: Heads,
    value: Heads,
    *,
    tokens: int,
    blocks: tuple[int, int, int],
    max_logit: float | None,
) -> Heads:
    """Padding is not masked: with any mask its grid depends on data, and its schedule cannot be counted."""
    del tokens
    # Its public function takes no block sizes.
    module: Any = importlib.import_module("tokamax._src.ops.experimental.tpu.splash_attention")
    kernel: Any = module.splash_attention_kernel
    lengths = query.shape[2], key.shape[2]
    config = kernel.SplashConfig(*blocks, max_logit_const=max_logit)
    run = kernel.make_splash_mha(
        module.splash_attention_mask.FullMask(lengths), config=config, q_seq_shards=1
    )
    return run(query[0], key[0], value[0])[None]


def attend_unfused(*arguments: jax.Array) -> Outputs:
    query, key, value = (
        jnp.concatenate(pair, axis=1).reshape(1, -1, arguments[0].shape[2] // HEAD_DIM, HEAD_DIM)
        for pair in zip(arguments[:3], arguments[3:6], strict=True)
    )
    out = jax.nn.dot_product_attention(query, key, value, scale=1.0, implementation="xla")
    rows, image_tokens = out.reshape(1, out.shape[1], -1), arguments[0].shape[1]
    return rows[:, :image_tokens], rows[:, image_tokens:]
