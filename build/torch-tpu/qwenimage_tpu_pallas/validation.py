"""Checks of arguments by shape and dtype alone, so that one rule serves jax arrays and torch tensors.

ValueError: the caller is wrong. NotImplementedError: the call makes sense, but no kernel here does it.
"""

from collections.abc import Mapping
from typing import Any, Literal, Protocol, get_args

from .layouts import HEAD_DIM, LANES
from .softmax import check_softmax


class Array(Protocol):
    """What a jax array and a torch tensor have in common."""

    @property
    def shape(self) -> Any: ...
    @property
    def dtype(self) -> Any: ...


FLOAT_DTYPES = ("float32", "bfloat16")
Activation = Literal["identity", "gelu_tanh"]
ACTIVATIONS: tuple[str, ...] = get_args(Activation)


def dtype_name(x: Array) -> str:
    """ "float32" for ``jnp.float32`` and for ``torch.float32`` alike."""
    return str(x.dtype).rsplit(".", maxsplit=1)[-1]


def _require_dtype(name: str, x: Array, allowed: tuple[str, ...]) -> None:
    if dtype_name(x) not in allowed:
        raise NotImplementedError(
            f"{name} must be {' or '.join(allowed)}, got {dtype_name(x)}; convert it first"
        )


def _require_shape(name: str, x: Array, expected: tuple[int, ...], meaning: str) -> None:
    if tuple(x.shape) != expected:
        raise ValueError(f"{name} must have shape {meaning} = {expected}, got {tuple(x.shape)}")


def _require_activation(name: str, x: Array) -> None:
    if len(x.shape) != 3:
        raise ValueError(
            f"{name} must have rank 3, [batch, tokens, channels], got shape {tuple(x.shape)};"
            " flatten [batch, tokens, heads, head_dim] with x.flatten(2)"
        )
    if min(x.shape) < 1:
        raise ValueError(f"{name} must have at least one row, token and channel, got shape {tuple(x.shape)}")
    _require_dtype(name, x, FLOAT_DTYPES)
    if x.shape[2] % LANES:
        raise NotImplementedError(
            f"{name} must have a multiple of {LANES} channels (heads are {HEAD_DIM} wide, a TPU's registers"
            f" {LANES} lanes), got {x.shape[2]}"
        )


def _require_same(name: str, x: Array, like_name: str, like: Array) -> None:
    if tuple(x.shape) != tuple(like.shape):
        raise ValueError(
            f"{name} must have the shape of {like_name}, {tuple(like.shape)}, got {tuple(x.shape)}"
        )
    _require_same_dtype(name, x, like_name, like)


def _require_same_dtype(name: str, x: Array, like_name: str, like: Array) -> None:
    if x.dtype != like.dtype:
        raise ValueError(
            f"{name} must have the dtype of {like_name}, {dtype_name(like)}, got {dtype_name(x)}"
        )


def check_streams(tensors: Mapping[str, Array]) -> None:
    """Image tensors alike, text tensors alike, and both streams of one batch, width and dtype."""
    image_name, text_name = "image_query", "text_query"
    for name in (image_name, text_name):
        _require_activation(name, tensors[name])
    image, text = tensors[image_name], tensors[text_name]
    for axis, meaning in ((0, "batch size"), (2, "heads * head_dim")):
        if image.shape[axis] != text.shape[axis]:
            raise ValueError(
                f"{text_name} must have the {meaning} of {image_name}, {image.shape[axis]},"
                f" got {text.shape[axis]}"
            )
    _require_same_dtype(text_name, text, image_name, image)
    for name, x in tensors.items():
        like_name = image_name if name.startswith("image") else text_name
        _require_same(name, x, like_name, tensors[like_name])


def check_joint_attention(
    image_query: Array,
    image_key: Array,
    image_value: Array,
    text_query: Array,
    text_key: Array,
    text_value: Array,
    text_lengths: Array,
    softmax: str,
    logit_bound: float = 0,
) -> None:
    """Raise for arguments that `joint_attention` does not take."""
    check_streams(
        {
            "image_query": image_query,
            "image_key": image_key,
            "image_value": image_value,
            "text_query": text_query,
            "text_key": text_key,
            "text_value": text_value,
        }
    )
    _require_shape("text_lengths", text_lengths, (image_query.shape[0],), "[batch]")
    if dtype_name(text_lengths) != "int32":
        raise ValueError(f"text_lengths must be int32, got {dtype_name(text_lengths)}; convert it first")
    check_softmax(softmax, logit_bound)


def check_qk_norm_rope(
    image_query: Array,
    image_key: Array,
    text_query: Array,
    text_key: Array,
    weights: Mapping[str, Array],
    tables: Mapping[str, Array],
) -> None:
    """Raise for arguments that `qk_norm_rope` does not take."""
    check_streams(
        {
            "image_query": image_query,
            "image_key": image_key,
            "text_query": text_query,
            "text_key": text_key,
        }
    )
    for name, weight in weights.items():
        _require_shape(name, weight, (HEAD_DIM,), "[head_dim]")
        _require_dtype(name, weight, FLOAT_DTYPES)
    for name, table in tables.items():
        batch, tokens = (image_query if name.startswith("image") else text_query).shape[:2]
        allowed = ((1, tokens, HEAD_DIM), (batch, tokens, HEAD_DIM))
        if tuple(table.shape) not in allowed:
            raise ValueError(
                f"{name} must have shape [1 or batch, tokens, head_dim] = {' or '.join(map(str, allowed))},"
                f" got {tuple(table.shape)}"
            )
        if dtype_name(table) != "float32":
            raise ValueError(
                f"{name} must be float32 (bf16 would turn large positions by whole degrees), got"
                f" {dtype_name(table)}"
            )


def check_modulation(x: Array, modulation: Mapping[str, Array], index: Array | None) -> None:
    """Raise for arguments that the LayerNorm and modulation kernels do not take."""
    _require_activation("x", x)
    batch, tokens, channels = x.shape
    rows, meaning = (batch, "[batch, channels]") if index is None else (2 * batch, "[2 * batch, channels]")
    for name, values in modulation.items():
        _require_shape(name, values, (rows, channels), meaning)
        _require_dtype(name, values, FLOAT_DTYPES)
    if index is not None:
        _require_shape("index", index, (batch, tokens), "[batch, tokens]")
        if dtype_name(index) != "int32":
            raise ValueError(f"index must be int32, got {dtype_name(index)}; convert it first")


def check_gated_residual(
    x: Array, branch: Array, modulation: Mapping[str, Array], index: Array | None
) -> None:
    """Raise for arguments that `gated_residual_layer_norm_modulate` does not take."""
    check_modulation(x, modulation, index)
    _require_same("branch", branch, "x", x)


def check_rms_norm(x: Array, weight: Array) -> None:
    """Raise for arguments that `rms_norm` does not take."""
    _require_activation("x", x)
    _require_shape("weight", weight, (x.shape[2],), "[channels]")
    _require_dtype("weight", weight, FLOAT_DTYPES)


def check_linear(
    x: Array, weight: Array, bias: Array, activation: str = "identity", *, stacked: bool = False
) -> None:
    """Raise for arguments that `linear` does not take. stacked: weight and bias of several layers."""
    _require_activation("x", x)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {ACTIVATIONS}, got {activation!r}")
    channels, layers = x.shape[2], "layers, " if stacked else ""
    if len(weight.shape) != 2 + stacked or weight.shape[-1] != channels:
        raise ValueError(
            f"weight must have shape [{layers}out_channels, in_channels] with the {channels} channels of x,"
            f" got {tuple(weight.shape)}"
        )
    if not weight.shape[-2] or weight.shape[-2] % LANES:
        raise NotImplementedError(
            f"weight must have a multiple of {LANES} output channels, got {weight.shape[-2]}"
        )
    _require_same_dtype("weight", weight, "x", x)
    _require_shape("bias", bias, tuple(weight.shape[:-1]), f"[{layers}out_channels]")
    _require_dtype("bias", bias, FLOAT_DTYPES)


def check_linear_gated_residual(
    x: Array,
    weight: Array,
    bias: Array,
    residual: Array,
    gate: Array,
    index: Array | None,
    *,
    stacked: bool = False,
) -> None:
    """Raise for arguments that `linear_gated_residual` does not take. stacked: as of `check_linear`."""
    check_linear(x, weight, bias, stacked=stacked)
    expected = (*x.shape[:2], weight.shape[-2])
    _require_shape("residual", residual, expected, "[batch, tokens, out_channels]")
    _require_same_dtype("residual", residual, "x", x)
    check_modulation(residual, {"gate": gate}, index)
