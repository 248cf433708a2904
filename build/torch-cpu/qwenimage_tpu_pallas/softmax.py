"""Which softmax an attention may use, and the bound on its logits that decides it.

All logits here are ``scale * <q, k>`` in natural units; kernels work in base 2, where a logit is
``log2(e)`` times as large. The first three are exact to the same tolerance:

``bounded``
    ``exp2(s)``: no maximum, no rescaling. Needs every ``|s|`` within `BOUNDED_LIMIT`, so that neither the
    largest row sum overflows nor the smallest row underflows in f32.
``exact``
    ``exp2(s - a)``, where a is the maximum of the row over its first keys, which is never moved. Right for
    any finite logits: a block of queries with a row that rises so far above its anchor that sums could
    overflow is computed again with running maxima. Meant for logits where that does not happen.
``online``
    A running maximum and sum per row, rescaled with each group of keys. Right for any finite logits.
``int8``
    The bounded one on logits of int8 queries and keys, see the module `attention_int8`: faster on v5e, v5p
    and v6e, and never chosen unasked, because its error is a few times that of bf16.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from .layouts import HEAD_DIM

Softmax = Literal["bounded", "exact", "online", "int8"]
SOFTMAXES: tuple[Softmax, ...] = ("bounded", "exact", "online")
ALL_SOFTMAXES: tuple[Softmax, ...] = (*SOFTMAXES, "int8")

LOG2_E = math.log2(math.e)
# Base-2 exponents that weights may reach. Above: 2**100 leaves a factor of 2**27 below the f32 maximum for
# the number of keys times |v|. Below: a row whose largest term is 2**-100 still has 26 bits of smaller
# terms above the smallest normal number.
LARGEST_EXPONENT = 100
BOUNDED_LIMIT = LARGEST_EXPONENT / LOG2_E
# Up to here "exact" is chosen: a row would have to rise by 69 above its first keys to be computed twice.
EXACT_LIMIT = 4 * BOUNDED_LIMIT
# Subtracting the keys' mean can double a logit.
INT8_LIMIT = BOUNDED_LIMIT / 2
# Rounding q and k to bf16 after the normalisation can lengthen each by 2**-9 of itself.
ROUNDING_SLACK = 1.01


def choose_softmax(logit_bound: float) -> Softmax:
    """The cheapest softmax for logits none of which is above `logit_bound` in magnitude.

    Args:
        logit_bound: upper bound of ``|scale * <q, k>|``, natural units; infinite when unknown.

    Raises:
        ValueError: the bound is negative or NaN.
    """
    if not logit_bound >= 0:
        raise ValueError(
            f"logit_bound must be a number >= 0, got {logit_bound}; pass math.inf when none is known"
        )
    if logit_bound <= BOUNDED_LIMIT:
        return "bounded"
    return "exact" if logit_bound <= EXACT_LIMIT else "online"


def check_softmax(softmax: str, logit_bound: float) -> None:
    """Raise ValueError for a softmax that logits up to `logit_bound` could overflow, or an unknown one."""
    if softmax not in ALL_SOFTMAXES:
        raise ValueError(f"softmax must be one of {ALL_SOFTMAXES}, got {softmax!r}")
    limit = {"bounded": BOUNDED_LIMIT, "int8": INT8_LIMIT}.get(softmax, math.inf)
    if not logit_bound <= limit:
        raise ValueError(
            f"the {softmax} softmax needs a logit_bound of at most {limit:.4g}, got {logit_bound:.4g}; leave"
            " softmax None or pass 'online'"
        )


def qk_norm_logit_bound(
    query_weights: Sequence[np.ndarray], key_weights: Sequence[np.ndarray], scale: float = HEAD_DIM**-0.5
) -> float:
    """Bound of ``|scale * <q, k>|`` for RMS-normalised, weighted and rotated q and k.

    RMS normalisation makes ``|x|**2 <= HEAD_DIM``; a rotation of the pair ``(2i, 2i + 1)`` keeps the
    pair's length, so with ``w_i = max(|w_2i|, |w_2i+1|)``, by Cauchy-Schwarz over the pairs,
    ``|<q, k>| <= HEAD_DIM * max_i(wq_i * wk_i)``, for every pairing of the streams' weights.

    Args:
        query_weights: the streams' q norm weights, each ``[HEAD_DIM]``.
        key_weights: the streams' k norm weights, each ``[HEAD_DIM]``.
        scale: the softmax scale.

    Returns:
        The bound in natural units; infinite when a weight is not finite.
    """

    def per_pair(weight: np.ndarray) -> np.ndarray:
        return np.abs(np.asarray(weight, np.float64)).reshape(-1, 2).max(axis=1)

    largest = max(
        float(np.max(per_pair(query) * per_pair(key))) for query in query_weights for key in key_weights
    )
    bound = scale * HEAD_DIM * largest * ROUNDING_SLACK
    return bound if math.isfinite(bound) else math.inf


def checkpoint_logit_bound(norm_weights: Mapping[str, np.ndarray]) -> float:
    """The largest `qk_norm_logit_bound` over the layers of a checkpoint.

    Args:
        norm_weights: ``[HEAD_DIM]`` arrays by parameter name; names that end in ``attn.norm_q.weight``,
            ``attn.norm_added_q.weight``, ``attn.norm_k.weight`` and ``attn.norm_added_k.weight`` are
            read, others are ignored.

    Raises:
        ValueError: a layer lacks one of its four weights, or there is no layer at all.
    """
    layers: dict[str, dict[str, np.ndarray]] = {}
    for name, weight in norm_weights.items():
        layer, _, rest = name.rpartition("attn.")
        parameter = rest.removesuffix(".weight")
        if rest.endswith(".weight") and parameter in ("norm_q", "norm_added_q", "norm_k", "norm_added_k"):
            layers.setdefault(layer, {})[parameter] = weight
    incomplete = sorted(layer for layer, weights in layers.items() if len(weights) != 4)
    if incomplete or not layers:
        raise ValueError(
            "each layer needs attn.norm_q, norm_k, norm_added_q and norm_added_k weights, got"
            f" {len(layers)} layers of which {len(incomplete)} are incomplete {incomplete[:3]};"
            " pass the weights of a QwenImage transformer"
        )
    return max(
        qk_norm_logit_bound([w["norm_q"], w["norm_added_q"]], [w["norm_k"], w["norm_added_k"]])
        for w in layers.values()
    )
