"""Joint attention: interpret mode against float64, padding, rare paths, and what it asks of a TPU."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from accuracy import assert_as_accurate, in_float64
from qwenimage_tpu_pallas import AttentionConfig, choose_softmax, joint_attention, reference
from qwenimage_tpu_pallas.attention import scratch_shapes
from qwenimage_tpu_pallas.attention_layout import AttentionLayout, default_config
from qwenimage_tpu_pallas.devices import TARGETS
from qwenimage_tpu_pallas.layouts import HEAD_DIM, round_up
from qwenimage_tpu_pallas.shapes import QWENIMAGE_SHAPES, JointShape
from qwenimage_tpu_pallas.softmax import ALL_SOFTMAXES, SOFTMAXES, Softmax
from qwenimage_tpu_pallas.vmem import VMEM_LIMIT_BYTES

RAGGED = [1, 7, 16, 31, 72, 127, 128, 129, 130, 300]
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

    def plain(self) -> tuple[jax.Array, jax.Array]:
        """XLA's own attention in the inputs' dtype, over concatenated streams with zeros as padding."""
        image_tokens = self.streams[0].shape[1]
        valid = jnp.arange(self.streams[3].shape[1]) < self.lengths[:, None]
        clean = [*self.streams[:4], *(jnp.where(valid[..., None], x, 0) for x in self.streams[4:])]
        query, key, value = (
            jnp.concatenate(pair, axis=1).reshape(len(valid), -1, pair[0].shape[2] // HEAD_DIM, HEAD_DIM)
            for pair in zip(clean[:3], clean[3:], strict=True)
        )
        mask = jnp.concatenate([jnp.ones((len(valid), image_tokens), bool), valid], axis=1)
        out = jax.nn.dot_product_attention(query, key, value, mask=mask[:, None, None, :])
        out = out.reshape(*out.shape[:2], -1)
        return out[:, :image_tokens], out[:, image_tokens:]

    def check(self, softmax: Softmax, config: AttentionConfig | None = None) -> None:
        exact = in_float64(reference.joint_attention, self.arguments)
        keys = self.streams[0].shape[1] + self.streams[3].shape[1]
        for actual, plain, wanted in zip(self.kernel(softmax, config), self.plain(), exact, strict=True):
            assert_as_accurate(actual, plain, wanted, reduction=keys, condition=max(1, self.bound))


@given(
    image_tokens=st.sampled_from(RAGGED),
    text_tokens=st.sampled_from(RAGGED),
    batch=st.integers(1, 3),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    softmax=st.sampled_from(SOFTMAXES),
    padding=st.sampled_from([NAN, HUGE, -HUGE, math.inf, 0.0]),
    logit_scale=st.floats(0.01, 60),
    data=st.data(),
)
@settings(max_examples=20)
def test_any_token_counts_lengths_and_scales(
    image_tokens: int,
    text_tokens: int,
    batch: int,
    dtype: str,
    softmax: Softmax,
    padding: float,
    logit_scale: float,
    data: st.DataObject,
):
    lengths = data.draw(st.lists(st.integers(0, text_tokens), min_size=batch, max_size=batch))
    problem = Problem.random(
        image_tokens, lengths, text_tokens, dtype=dtype, padding=padding, logit_scale=logit_scale
    )
    problem.check(softmax, SMALL_BLOCKS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("softmax", SOFTMAXES)
def test_several_blocks_of_everything(dtype: str, softmax: Softmax):
    Problem.random(400, [0, 150, 300], 300, dtype=dtype).check(softmax, SMALL_BLOCKS)


@pytest.mark.parametrize("softmax", ALL_SOFTMAXES)
@pytest.mark.parametrize("block_q", [256, 768])
def test_no_copy_races_with_the_work(block_q: int, softmax: Softmax):
    """Copies take place as late as they may, and every unordered access to the same memory raises."""
    problem = Problem.random(400, [16], 16, heads=3, logit_scale=1000 if softmax == "exact" else 3)
    out = joint_attention(
        *problem.arguments,
        softmax=softmax,
        config=AttentionConfig(block_q, block_q_compute=128, block_kv=256, block_kv_compute=128),
        interpret=pltpu.InterpretParams(detect_races=True, dma_execution_mode="on_wait"),
    )
    for rows, wanted in zip(out, problem.kernel(softmax, SMALL_BLOCKS), strict=True):
        np.testing.assert_allclose(rows, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("softmax", ALL_SOFTMAXES)
@pytest.mark.parametrize("heads", [2, 3])
def test_two_cores_as_one_device(heads: int, softmax: Softmax):
    """Each works on half of the heads; of an odd number one core works on all."""
    problem = Problem.random(300, [7, 0], 16, heads=heads)
    two, one = (
        jax.jit(functools.partial(joint_attention, softmax=softmax, device_kind=kind, interpret=True))
        for kind in ("TPU v5p", "TPU v5e")
    )
    for out, wanted in zip(two(*problem.arguments), one(*problem.arguments), strict=True):
        np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_default_blocks_at_1024_image_tokens(dtype: str):
    Problem.random(1024, [129], 160, dtype=dtype, heads=1).check("bounded")


@pytest.mark.parametrize("logit_scale", [1e3, 1e4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_huge_logits_take_the_online_softmax(logit_scale: float, dtype: str):
    problem = Problem.random(200, [5, 40], 40, dtype=dtype, logit_scale=logit_scale)
    softmax = choose_softmax(problem.bound)
    assert softmax == "online"
    problem.check(softmax, SMALL_BLOCKS)


@pytest.mark.parametrize("logit_scale", [100, 1e3, 1e4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_exact_softmax_starts_over_where_logits_rise(logit_scale: float, dtype: str):
    """Keys in ascending order of one query's logits: anchored at the first, its sum would overflow."""
    problem = Problem.random(300, [0, 40], 40, dtype=dtype, logit_scale=logit_scale)
    query, key, *rest = problem.streams
    first_head = slice(HEAD_DIM)
    logits = jnp.einsum("bd,bkd->bk", query[:, 5, first_head], key[..., first_head])
    key = jnp.take_along_axis(key, jnp.argsort(logits, axis=1)[..., None], axis=1)
    Problem((query, key, *rest), problem.lengths, problem.bound).check("exact", SMALL_BLOCKS)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bounded_softmax_at_its_limit(sign: int, dtype: str):
    """All logits of a row at the upper or the lower end of what the rule allows."""
    limit = 69.0
    assert choose_softmax(limit) == "bounded"
    problem = Problem.random(130, [7], 9, dtype=dtype, heads=1)
    query = jnp.full((1, 1, HEAD_DIM), sign * math.sqrt(limit / 1.03), dtype)
    key = jnp.full((1, 1, HEAD_DIM), math.sqrt(limit / 1.03) / HEAD_DIM**0.5, dtype)
    image, text = (jnp.broadcast_to(query, x.shape) for x in (problem.streams[0], problem.streams[3]))
    image_key, text_key = (jnp.broadcast_to(key, x.shape) for x in (problem.streams[1], problem.streams[4]))
    streams = (image, image_key, problem.streams[2], text, text_key, problem.streams[5])
    Problem(streams, problem.lengths, limit).check("bounded", SMALL_BLOCKS)


def quantized(problem: Problem) -> tuple[jax.Array, ...]:
    """Queries rounded one by one, keys less their mean in pieces of 128, as SMALL_BLOCKS cut them."""
    streams = [np.asarray(x, np.float64) for x in problem.streams]
    batch, image_tokens, _ = streams[0].shape
    heads = [x.reshape(*x.shape[:2], -1, HEAD_DIM) for x in streams]

    def rounded(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
        step = np.abs(x).max(axis=axes, keepdims=True) / 127
        return np.round(x / np.maximum(step, 1e-30)) * step

    image_query, text_query = (rounded(x, (-1,)) for x in (heads[0], heads[3]))
    image_key, text_key = heads[1].copy(), heads[4].copy()
    for row, length in enumerate(np.asarray(problem.lengths)):
        text_key[row, length:] = 0
        mean = np.concatenate([image_key[row], text_key[row, :length]]).mean(axis=0)
        whole = image_tokens // 128 * 128
        # The tail: image keys that fill no tile, padded to 16 rows, then the text, padded to 32 in all.
        rest, text_start = image_tokens - whole, round_up(image_tokens - whole, 16)
        tail = np.zeros((round_up(text_start + text_key.shape[1], 32), *mean.shape))
        tail[:rest], tail[text_start : text_start + text_key.shape[1]] = image_key[row, whole:], text_key[row]
        for part in (image_key[row, :whole], tail):
            for first in range(0, len(part), 128):
                part[first : first + 128] = rounded(part[first : first + 128] - mean, (0, 2))
        image_key[row, whole:] = tail[:rest]
        text_key[row] = tail[text_start : text_start + text_key.shape[1]]
    result = [image_query, image_key, heads[2], text_query, text_key, heads[5]]
    return tuple(jnp.asarray(x.reshape(batch, x.shape[1], -1), jnp.float32) for x in result)


@pytest.mark.parametrize(
    ("image_tokens", "lengths", "text_tokens"),
    [(400, [0, 150, 300], 300), (5, [3], 9), (72, [31], 31), (300, [20, 7], 40)],
)
def test_int8_logits_are_those_of_rounded_queries_and_keys(
    image_tokens: int, lengths: list[int], text_tokens: int
):
    """On v5e, whose exponentials are f32: what is left is the rounding of ties."""
    problem = Problem.random(image_tokens, lengths, text_tokens, logit_scale=10)
    run = functools.partial(
        joint_attention, softmax="int8", config=SMALL_BLOCKS, device_kind="TPU v5e", interpret=True
    )
    exact = in_float64(reference.joint_attention, (*quantized(problem), problem.lengths))
    for out, wanted in zip(jax.jit(run)(*problem.arguments), exact, strict=True):
        assert relative_rms(out, wanted) < 1e-3


@pytest.mark.parametrize("padding", [NAN, HUGE, math.inf])
@pytest.mark.parametrize(("logit_scale", "error"), [(3, 0.01), (10, 0.025), (20, 0.035)])
def test_int8_error_beside_the_exact_softmax(logit_scale: float, error: float, padding: float):
    """It grows with the logits, and nothing in the padding adds to it."""
    problem = Problem.random(300, [0, 20], 40, dtype="bfloat16", logit_scale=logit_scale, padding=padding)
    exact = in_float64(reference.joint_attention, problem.arguments)
    for out, wanted in zip(problem.kernel("int8", SMALL_BLOCKS), exact, strict=True):
        assert relative_rms(out, wanted) < error


@pytest.mark.parametrize(("spread", "error"), [(0.0, 0.015), (0.5, 0.04)])
def test_int8_error_on_normalised_and_rotated_queries_and_keys(spread: float, error: float):
    """spread: of the logarithms of the norms' weights. Bf16 with the bounded softmax: 0.0025."""
    rng = np.random.default_rng(0)
    tokens, heads = (300, 40), 2
    streams = [
        jnp.asarray(rng.standard_normal((1, size, heads * HEAD_DIM)), jnp.bfloat16)
        for size in tokens
        for _ in range(3)
    ]
    weights = [jnp.asarray(np.exp(spread * rng.standard_normal(HEAD_DIM)), jnp.float32) for _ in range(4)]
    angles = [np.repeat(rng.uniform(0, 6.3, (1, size, HEAD_DIM // 2)), 2, axis=-1) for size in tokens]
    tables = [jnp.asarray(part(angle), jnp.float32) for angle in angles for part in (np.cos, np.sin)]
    image_query, image_key, image_value, text_query, text_key, text_value = streams
    image_query, image_key, text_query, text_key = reference.qk_norm_rope(
        image_query, image_key, text_query, text_key, *weights, *tables
    )
    problem = Problem(
        (image_query, image_key, image_value, text_query, text_key, text_value), jnp.array([30]), math.inf
    )
    exact = in_float64(reference.joint_attention, problem.arguments)
    limits: dict[Softmax, float] = {"int8": error, "bounded": 0.0025}
    for softmax, allowed in limits.items():
        for out, wanted in zip(problem.kernel(softmax, SMALL_BLOCKS), exact, strict=True):
            assert relative_rms(out, wanted) < allowed


def test_int8_keys_may_share_an_offset():
    """It moves all logits of a row alike, and would take the bits of the rest without smoothing."""
    problem = Problem.random(300, [40], 40, logit_scale=3)
    offset = 5 * jnp.sign(jnp.sin(jnp.arange(problem.streams[1].shape[2])))
    image_query, image_key, image_value, text_query, text_key, text_value = problem.streams
    shifted = (image_query, image_key + offset, image_value, text_query, text_key + offset, text_value)
    exact = in_float64(reference.joint_attention, problem.arguments)
    for out, wanted in zip(
        dataclasses.replace(problem, streams=shifted).kernel("int8", SMALL_BLOCKS), exact, strict=True
    ):
        assert relative_rms(out, wanted) < 0.01


def relative_rms(actual: jax.Array, wanted: np.ndarray) -> float:
    difference = np.asarray(actual, np.float64) - np.asarray(wanted, np.float64)
    return float(np.sqrt(np.mean(difference**2) / np.mean(np.asarray(wanted, np.float64) ** 2)))


def test_a_row_without_text_attends_to_the_image_alone():
    problem = Problem.random(40, [0], 16)
    image, text = problem.kernel("online")
    alone = Problem((*problem.streams[:3], *problem.streams[:3]), jnp.array([0], jnp.int32), problem.bound)
    np.testing.assert_allclose(image, alone.kernel("online")[0], rtol=1e-5, atol=1e-6)
    assert np.isfinite(np.asarray(text)).all()


@pytest.mark.parametrize(("given_length", "meant"), [(-5, 0), (99, 16)])
def test_lengths_out_of_range_are_clamped(given_length: int, meant: int):
    problem = Problem.random(40, [16], 16)
    for out, wanted in zip(
        dataclasses.replace(problem, lengths=jnp.array([given_length], jnp.int32)).kernel("online"),
        dataclasses.replace(problem, lengths=jnp.array([meant], jnp.int32)).kernel("online"),
        strict=True,
    ):
        np.testing.assert_array_equal(out, wanted)


def test_key_order_does_not_matter():
    problem = Problem.random(72, [31], 31)
    order = np.random.default_rng(1).permutation(31)
    shuffled = (*problem.streams[:4], *(x[:, order] for x in problem.streams[4:]))
    for out, wanted in zip(
        dataclasses.replace(problem, streams=shuffled).kernel("online"), problem.kernel("online"), strict=True
    ):
        np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-6)


def test_scale_of_log_two_multiplies_nothing():
    """With it the caller's own factor log2(e) / sqrt(128) in q gives the same attention."""
    problem = Problem.random(40, [9], 16)
    factor = HEAD_DIM**-0.5 / math.log(2)
    query, text_query = (problem.streams[i] * factor for i in (0, 3))
    folded = (query, *problem.streams[1:3], text_query, *problem.streams[4:])
    for softmax in SOFTMAXES:
        run = jax.jit(
            lambda *a, softmax=softmax: joint_attention(
                *a, softmax=softmax, scale=math.log(2), interpret=True
            )
        )
        for out, wanted in zip(run(*folded, problem.lengths), problem.kernel(softmax), strict=True):
            np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", QWENIMAGE_SHAPES, ids=str)
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("softmax", ALL_SOFTMAXES)
def test_the_default_fits_vmem(shape: JointShape, itemsize: int, softmax: Softmax):
    dtype = "bfloat16" if itemsize == 2 else "float32"
    for generation in (None, *(target.generation for target in TARGETS.values())):
        config = default_config(shape.image_tokens, shape.text_tokens, softmax, dtype, generation)
        layout = AttentionLayout(shape.image_tokens, shape.text_tokens, softmax, config)
        assert layout.vmem_bytes(itemsize) <= VMEM_LIMIT_BYTES


@pytest.mark.parametrize("softmax", ALL_SOFTMAXES)
@pytest.mark.parametrize(("image_tokens", "text_tokens"), [(300, 7), (1, 1), (2000, 300)])
def test_vmem_estimate_is_what_the_buffers_take(softmax: Softmax, image_tokens: int, text_tokens: int):
    config = AttentionConfig(block_q=512, block_q_compute=256, block_kv=256, block_kv_compute=128)
    layout = AttentionLayout(image_tokens, text_tokens, softmax, config)
    buffers, _, *scratch = scratch_shapes(layout, jnp.dtype(jnp.bfloat16))
    arrays = [
        x.get_ref_aval() for x in jax.tree.leaves([buffers, scratch], is_leaf=lambda x: hasattr(x, "shape"))
    ]
    assert layout.vmem_bytes(2) == sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)


@given(
    image_tokens=st.integers(1, 20_000),
    text_tokens=st.integers(1, 3000),
    block_q=st.integers(1, 32),
    compute=st.integers(1, 8),
)
@settings(max_examples=200, deadline=None)
def test_every_query_is_in_one_block_and_every_key_in_one_tile(
    image_tokens: int, text_tokens: int, block_q: int, compute: int
):
    config = AttentionConfig(block_q * 128, compute * 128, 512, compute * 128)
    layout = AttentionLayout(image_tokens, text_tokens, "online", config)
    for rows in (layout.image_rows, layout.text_rows):
        assert rows.size % 16 == 0
        assert rows.size * layout.blocks >= rows.tokens
    assert layout.image_rows.size + layout.text_rows.size == config.block_q
    tiles = [tile for group in layout.key_groups for tile in group]
    assert [tile.start for tile in tiles] == [0, *np.cumsum([tile.size for tile in tiles])[:-1]]
    assert sum(tile.size for tile in tiles) == layout.keys
    assert all(tile.masked == (tile.start >= layout.whole_keys) for tile in tiles)
    assert layout.whole_keys + layout.tail_image == image_tokens
    assert layout.keys - layout.whole_keys - layout.tail_text_start >= text_tokens


def test_keys_that_do_not_fit_vmem_are_refused():
    huge = jax.ShapeDtypeStruct((1, 60_000, HEAD_DIM), jnp.float32)
    arguments = [huge] * 6 + [jax.ShapeDtypeStruct((1,), jnp.int32)]
    with pytest.raises(NotImplementedError, match=r"joint_attention needs .* MiB of VMEM.*use fewer tokens"):
        jax.eval_shape(joint_attention, *arguments)


@pytest.mark.parametrize("value", [0, -128, 100])
@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(AttentionConfig)])
def test_a_block_is_a_multiple_of_128(field: str, value: int):
    with pytest.raises(ValueError, match=rf"{field} must be a positive multiple of 128, got {value}"):
        dataclasses.replace(SMALL_BLOCKS, **{field: value})
