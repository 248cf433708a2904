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

from attention_problem import HUGE, NAN, SMALL_BLOCKS, Problem
from qwenimage_tpu_pallas import AttentionConfig, choose_softmax, joint_attention
from qwenimage_tpu_pallas.attention import scratch_shapes
from qwenimage_tpu_pallas.attention_layout import AttentionLayout, default_config
from qwenimage_tpu_pallas.devices import TARGETS
from qwenimage_tpu_pallas.layouts import HEAD_DIM
from qwenimage_tpu_pallas.shapes import QWENIMAGE_SHAPES, JointShape
from qwenimage_tpu_pallas.softmax import ALL_SOFTMAXES, SOFTMAXES, Softmax
from qwenimage_tpu_pallas.vmem import VMEM_LIMIT_BYTES

RAGGED = [1, 7, 16, 31, 72, 127, 128, 129, 130, 300]


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
@settings(max_examples=12)
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


# One block of queries, or several.
@pytest.mark.parametrize(
    ("block_q", "softmax"), [(768, "bounded"), *((256, softmax) for softmax in ALL_SOFTMAXES)]
)
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


@pytest.mark.parametrize(("heads", "softmax"), [(3, "bounded"), *((2, softmax) for softmax in ALL_SOFTMAXES)])
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


@pytest.mark.parametrize(("logit_scale", "dtype"), [(1e3, "float32"), (1e4, "bfloat16")])
def test_huge_logits_take_the_online_softmax(logit_scale: float, dtype: str):
    problem = Problem.random(200, [5, 40], 40, dtype=dtype, logit_scale=logit_scale)
    softmax = choose_softmax(problem.bound)
    assert softmax == "online"
    problem.check(softmax, SMALL_BLOCKS)


@pytest.mark.parametrize(
    ("logit_scale", "dtype"), [(100, "bfloat16"), (1e3, "float32"), (1e3, "bfloat16"), (1e4, "float32")]
)
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
