"""Joint attention with int8 queries and keys: what it computes, and how far that is from the exact one."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from accuracy import in_float64
from attention_problem import HUGE, NAN, SMALL_BLOCKS, Problem
from qwenimage_tpu_pallas import joint_attention, reference
from qwenimage_tpu_pallas.layouts import HEAD_DIM, round_up
from qwenimage_tpu_pallas.softmax import Softmax


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


def relative_rms(actual: jax.Array, wanted: np.ndarray) -> float:
    difference = np.asarray(actual, np.float64) - np.asarray(wanted, np.float64)
    return float(np.sqrt(np.mean(difference**2) / np.mean(np.asarray(wanted, np.float64) ** 2)))


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


@pytest.mark.parametrize(
    ("logit_scale", "error", "padding"), [(3, 0.01, NAN), (10, 0.025, HUGE), (20, 0.035, math.inf)]
)
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
