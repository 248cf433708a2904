"""The rule that chooses the softmax, and the bound it goes by."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwenimage_tpu_pallas import BOUNDED_LIMIT, checkpoint_logit_bound, choose_softmax, qk_norm_logit_bound
from qwenimage_tpu_pallas.layouts import HEAD_DIM
from qwenimage_tpu_pallas.softmax import EXACT_LIMIT, INT8_LIMIT, LOG2_E, check_softmax


@pytest.mark.parametrize(
    ("bound", "softmax"),
    [
        (0, "bounded"),
        (BOUNDED_LIMIT, "bounded"),
        (math.nextafter(BOUNDED_LIMIT, math.inf), "exact"),
        (EXACT_LIMIT, "exact"),
        (math.nextafter(EXACT_LIMIT, math.inf), "online"),
        (1e4, "online"),
        (math.inf, "online"),
    ],
)
def test_choice(bound: float, softmax: str):
    assert choose_softmax(bound) == softmax


@pytest.mark.parametrize("bound", [-1.0, math.nan])
def test_a_bound_is_a_number_not_below_zero(bound: float):
    with pytest.raises(ValueError, match=r"logit_bound must be a number >= 0, got .*math\.inf"):
        choose_softmax(bound)


@pytest.mark.parametrize(("softmax", "limit"), [("bounded", BOUNDED_LIMIT), ("int8", INT8_LIMIT)])
def test_a_softmax_that_could_overflow_is_refused(softmax: str, limit: float):
    check_softmax(softmax, limit)
    with pytest.raises(ValueError, match=rf"the {softmax} softmax needs a logit_bound of at most .*online"):
        check_softmax(softmax, math.nextafter(limit, math.inf))
    check_softmax("exact", math.inf)
    with pytest.raises(ValueError, match=r"softmax must be one of .*int8.*, got 'fast'"):
        check_softmax("fast", 0)


def test_at_the_limit_the_largest_sum_is_finite_and_the_smallest_keeps_its_small_terms():
    keys, value = 9216, 2**13
    largest, smallest = (np.float32(2.0 ** (sign * BOUNDED_LIMIT * LOG2_E)) for sign in (1, -1))
    assert np.isfinite(largest * np.float32(keys) * np.float32(value))
    assert smallest * np.float32(2**-24) >= np.finfo(np.float32).tiny


@given(seed=st.integers(0, 2**32 - 1), spread=st.floats(0, 3))
@settings(max_examples=50)
def test_no_logit_is_above_the_bound(seed: int, spread: float):
    rng = np.random.default_rng(seed)
    weights = np.exp(spread * rng.standard_normal((4, HEAD_DIM)))
    bound = qk_norm_logit_bound(list(weights[:2]), list(weights[2:]))
    vectors = rng.standard_normal((2, 64, HEAD_DIM)) ** 3  # peaked, as trained ones are
    vectors *= math.sqrt(HEAD_DIM) / np.linalg.norm(vectors, axis=-1, keepdims=True)
    # The worst case as well: all of both vectors on the pair whose weights are largest.
    vectors[:, 0] = 0
    vectors[:, 0, np.argmax(weights[0] * weights[2])] = math.sqrt(HEAD_DIM)
    query, key = vectors[0] * weights[0], vectors[1] * weights[2]
    angle = rng.uniform(0, 2 * math.pi, (64, HEAD_DIM // 2))
    rotated = (key[:, 0::2] + 1j * key[:, 1::2]) * np.exp(1j * angle)
    key = np.stack([rotated.real, rotated.imag], axis=-1).reshape(64, HEAD_DIM)
    assert np.max(np.abs(query @ key.T)) * HEAD_DIM**-0.5 <= bound


def test_the_bound_is_nearly_reached():
    weights = [np.full(HEAD_DIM, 2.0)]
    assert qk_norm_logit_bound(weights, weights) == pytest.approx(4 * math.sqrt(HEAD_DIM), rel=0.011)


def test_weights_that_are_not_finite_have_no_bound():
    weights = np.ones(HEAD_DIM)
    weights[5] = np.nan
    assert qk_norm_logit_bound([weights], [weights]) == math.inf


def _layer(number: int, scale: float) -> dict[str, np.ndarray]:
    names = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")
    return {f"transformer_blocks.{number}.attn.{n}.weight": np.full(HEAD_DIM, scale) for n in names}


def test_a_checkpoint_has_the_bound_of_its_largest_layer():
    weights = _layer(0, 1.0) | _layer(1, 3.0) | {"txt_norm.weight": np.full(8, 1e9)}
    one = [np.full(HEAD_DIM, 3.0)]
    assert checkpoint_logit_bound(weights) == qk_norm_logit_bound(one, one)


@pytest.mark.parametrize("drop", [1, 8])
def test_a_checkpoint_without_its_norms_is_refused(drop: int):
    weights = dict(list((_layer(0, 1.0) | _layer(1, 1.0)).items())[drop:])
    with pytest.raises(ValueError, match=r"each layer needs attn\.norm_q.* incomplete"):
        checkpoint_logit_bound(weights)
