"""The torch functions of this kernel: checked arguments, then one custom op each.

All take ``implementation="kernel"`` (on `tpu` tensors the compiled Pallas kernel, on `cpu` tensors the
same kernel in interpret mode), ``"interpret"`` (interpret mode on either device, for TPU devices
that are emulated) or ``"reference"`` (plain f32 JAX on either device). They are for inference: with grad
mode on, an input that requires grad raises NotImplementedError.
"""

import math
from collections.abc import Sequence

import torch

from . import _jax_functions
from ._bridge import define_op, torch_tpu_loaded
from .qwenimage_tpu_pallas import choose_softmax, validation
from .qwenimage_tpu_pallas.layouts import HEAD_DIM

IMPLEMENTATIONS = ("kernel", "interpret", "reference")


def check_implementation(implementation: str) -> None:
    """Raise ValueError for an implementation that the functions here do not have."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {IMPLEMENTATIONS}, got {implementation!r}")


def _resolve(implementation: str, **tensors: torch.Tensor) -> str:
    """The op's implementation for these tensors, once they share a device and need no gradient."""
    check_implementation(implementation)
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}; convert it first")
    (first_name, first), *others = tensors.items()
    for name, tensor in others:
        if tensor.device != first.device:
            raise ValueError(
                f"{name} must be on the device of {first_name}, {first.device}, got {tensor.device};"
                f" move it with .to({str(first.device)!r})"
            )
    _check_device(first.device)
    if torch.is_grad_enabled():
        for name, tensor in tensors.items():
            if tensor.requires_grad:
                raise NotImplementedError(
                    f"these kernels have no backward pass, but {name} requires grad and grad mode is on;"
                    " call them under torch.no_grad()"
                )
    return "interpret" if implementation == "kernel" and first.device.type == "cpu" else implementation


def _optional(**tensors: torch.Tensor | None) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _check_number(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be a finite number above 0, got {value}")


def _check_device(device: torch.device) -> None:
    if device.type == "tpu" and not torch_tpu_loaded():
        raise NotImplementedError(
            "torch_tpu was not loaded when this kernel was; import torch_tpu before get_kernel"
        )
    if device.type not in ("cpu", "tpu"):
        raise NotImplementedError(
            f"tensors must be on a tpu or cpu device, got {device}; move them with .to('tpu')"
        )


_joint_attention = define_op(
    _jax_functions.joint_attention,
    "(Tensor image_query, Tensor image_key, Tensor image_value, Tensor text_query, Tensor text_key,"
    " Tensor text_value, Tensor text_lengths, str softmax, float scale,"
    " str implementation) -> (Tensor, Tensor)",
    lambda *arguments: tuple(
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (arguments[0], arguments[3])
    ),
)
_qk_norm_rope = define_op(
    _jax_functions.qk_norm_rope,
    "(Tensor image_query, Tensor image_key, Tensor text_query, Tensor text_key,"
    " Tensor image_query_weight, Tensor image_key_weight, Tensor text_query_weight,"
    " Tensor text_key_weight, Tensor image_cos, Tensor image_sin, Tensor text_cos, Tensor text_sin,"
    " float eps, str implementation) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda *arguments: tuple(
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in arguments[:4]
    ),
)
_layer_norm_modulate = define_op(
    _jax_functions.layer_norm_modulate,
    "(Tensor x, Tensor shift, Tensor scale, Tensor? index, float eps, str implementation) -> Tensor",
    lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format),
)
_gated_residual_layer_norm_modulate = define_op(
    _jax_functions.gated_residual_layer_norm_modulate,
    "(Tensor x, Tensor branch, Tensor gate, Tensor shift, Tensor scale, Tensor? index, float eps,"
    " str implementation) -> (Tensor, Tensor)",
    lambda x, *_: (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        torch.empty_like(x, memory_format=torch.contiguous_format),
    ),
)
_rms_norm = define_op(
    _jax_functions.rms_norm,
    "(Tensor x, Tensor weight, float eps, str implementation) -> Tensor",
    lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format),
)
_linear = define_op(
    _jax_functions.linear,
    "(Tensor x, Tensor weight, Tensor bias, str activation, str implementation) -> Tensor",
    lambda x, weight, *_: x.new_empty(*x.shape[:2], weight.shape[0]),
)
_linear_gated_residual = define_op(
    _jax_functions.linear_gated_residual,
    "(Tensor x, Tensor weight, Tensor bias, Tensor residual, Tensor gate, Tensor? index,"
    " str implementation) -> Tensor",
    lambda *arguments: torch.empty_like(arguments[3], memory_format=torch.contiguous_format),
)


def joint_attention(
    image_query: torch.Tensor,
    image_key: torch.Tensor,
    image_value: torch.Tensor,
    text_query: torch.Tensor,
    text_key: torch.Tensor,
    text_value: torch.Tensor,
    text_lengths: torch.Tensor | None = None,
    *,
    logit_bound: float = math.inf,
    softmax: str | None = None,
    scale: float = HEAD_DIM**-0.5,
    implementation: str = "kernel",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Non-causal attention of image and text queries to image and text keys, per head.

    ``softmax(scale * q k^T) v``, where the keys of batch row b are all image keys and the first
    ``text_lengths[b]`` text keys. Key order does not matter, so a text mask of any pattern is served
    by moving its valid tokens to the front. Whatever stands in the other text keys and values (NaN
    included) has no effect. Text queries beyond the length are computed like any other row. Every
    row has a valid key, as there is at least one image token.

    Args:
        image_query, image_key, image_value: ``[batch, image_tokens, heads * 128]``, bf16 or f32. A
            4D ``[batch, tokens, heads, 128]`` tensor is this one with ``.flatten(2)``.
        text_query, text_key, text_value: ``[batch, text_tokens, heads * 128]``, the same dtype.
        text_lengths: ``[batch]`` int32; None takes all text tokens. CPU values are checked, values on
            a TPU (and any inside torch.compile) are clamped to ``[0, text_tokens]``.
        logit_bound: upper bound of every ``|scale * <q, k>|``, infinite if none is known.
        softmax: "bounded" (no maximum, no rescaling; only while the bound is at most `BOUNDED_LIMIT`),
            "exact" (no rescaling; any finite logits, slow where a row rises by more than `BOUNDED_LIMIT`
            above its first keys), "online" (any finite logits), "int8" (bounded, on logits of int8 queries
            and keys: faster on v5e, v5p and v6e, less accurate; only while the bound is at most
            `INT8_LIMIT`), or None for `choose_softmax(logit_bound)`.
        scale: factor of the logits. ``math.log(2)`` costs nothing: the kernel works in base 2.
        implementation: "kernel", "interpret" or "reference", see the module.

    Returns:
        The image's and the text's rows, with the shapes and dtype of `image_query` and `text_query`.

    Raises:
        ValueError: shapes, dtypes or devices do not belong together, a CPU length is out of range, or
            a softmax is asked for with a bound that does not allow it.
        NotImplementedError: another dtype, head size or device, keys that do not fit VMEM, or gradients.
    """
    _check_number("scale", scale)
    streams = {
        "image_query": image_query,
        "image_key": image_key,
        "image_value": image_value,
        "text_query": text_query,
        "text_key": text_key,
        "text_value": text_value,
    }
    resolved = _resolve(implementation, **streams)
    validation.check_streams(streams)
    if text_lengths is None:
        text_lengths = torch.full(
            image_query.shape[:1], text_query.shape[1], dtype=torch.int32, device=image_query.device
        )
    allowed = choose_softmax(logit_bound)
    used = softmax or allowed
    tensors = {**streams, "text_lengths": text_lengths}
    _resolve(implementation, **tensors)
    validation.check_joint_attention(**tensors, softmax=used, logit_bound=logit_bound)
    _check_lengths(text_lengths, text_query.shape[1])
    return _joint_attention(*tensors.values(), used, scale, resolved)


def _check_lengths(text_lengths: torch.Tensor, text_tokens: int) -> None:
    # Inside torch.compile, and on a TPU, a look at the values would break the graph or wait.
    if text_lengths.device.type != "cpu" or torch.compiler.is_compiling():
        return
    smallest, largest = int(text_lengths.min()), int(text_lengths.max())
    if smallest < 0 or largest > text_tokens:
        raise ValueError(
            f"text_lengths must be in [0, text_tokens] = [0, {text_tokens}], got {smallest} to {largest}"
        )


def qk_norm_rope(
    image_query: torch.Tensor,
    image_key: torch.Tensor,
    text_query: torch.Tensor,
    text_key: torch.Tensor,
    image_query_weight: torch.Tensor,
    image_key_weight: torch.Tensor,
    text_query_weight: torch.Tensor,
    text_key_weight: torch.Tensor,
    image_rope: Sequence[torch.Tensor],
    text_rope: Sequence[torch.Tensor],
    *,
    eps: float = 1e-6,
    implementation: str = "kernel",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """RMSNorm of each head of q and k, then their rotary embedding, in f32 with one rounding.

    ``n = x / sqrt(mean(x**2) + eps) * weight`` over the 128 channels of a head, then for each pair
    ``(a, b) = (n[2i], n[2i + 1])``: ``(a cos_2i - b sin_2i, b cos_2i+1 + a sin_2i+1)``
    (RoFormer, arXiv 2104.09864, with adjacent pairs as QwenImage has them).

    Args:
        image_query, image_key: ``[batch, image_tokens, heads * 128]``, bf16 or f32.
        text_query, text_key: ``[batch, text_tokens, heads * 128]``, the same dtype.
        image_query_weight, image_key_weight, text_query_weight, text_key_weight: ``[128]``, bf16 or
            f32. A softmax scale belongs in the query weights: there it costs nothing.
        image_rope, text_rope: cos and sin, each ``[1 or batch, tokens, 128]`` f32, a pair's value twice.
        eps: added to the mean square.
        implementation: "kernel", "interpret" or "reference", see the module.

    Returns:
        Image query, image key, text query and text key, with the shapes and dtype they came with.

    Raises:
        ValueError: shapes, dtypes or devices do not belong together.
        NotImplementedError: another dtype, head size or device, more channels than fit VMEM, or gradients.
    """
    streams = {
        "image_query": image_query,
        "image_key": image_key,
        "text_query": text_query,
        "text_key": text_key,
    }
    weights = {
        "image_query_weight": image_query_weight,
        "image_key_weight": image_key_weight,
        "text_query_weight": text_query_weight,
        "text_key_weight": text_key_weight,
    }
    image_cos, image_sin = _cos_and_sin("image_rope", image_rope)
    text_cos, text_sin = _cos_and_sin("text_rope", text_rope)
    tables = {"image_cos": image_cos, "image_sin": image_sin, "text_cos": text_cos, "text_sin": text_sin}
    _check_number("eps", eps)
    resolved = _resolve(implementation, **streams, **weights, **tables)
    validation.check_qk_norm_rope(**streams, weights=weights, tables=tables)
    return _qk_norm_rope(*streams.values(), *weights.values(), *tables.values(), eps, resolved)


def _cos_and_sin(name: str, rope: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    if isinstance(rope, torch.Tensor) or len(rope) != 2:
        raise ValueError(
            f"{name} must be the two tensors cos and sin; of a complex table these are its real and imaginary"
            " part, each pair's value twice"
        )
    return rope


def layer_norm_modulate(
    x: torch.Tensor,
    shift: torch.Tensor,
    scale: torch.Tensor,
    index: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    implementation: str = "kernel",
) -> torch.Tensor:
    """``LayerNorm(x) * (1 + scale) + shift`` without affine weights, in f32 with one rounding.

    The modulation of DiT (arXiv 2212.09748).

    Args:
        x: ``[batch, tokens, channels]``, bf16 or f32, channels a multiple of 128.
        shift, scale: ``[batch, channels]``, bf16 or f32. With an index ``[2 * batch, channels]``: row b
            for tokens of index 0, row ``batch + b`` for the others (`zero_cond_t` of the Edit models).
        index: ``[batch, tokens]`` int32, or None.
        eps: added to the variance.
        implementation: "kernel", "interpret" or "reference", see the module.

    Returns:
        The shape and dtype of `x`.

    Raises:
        ValueError: shapes, dtypes or devices do not belong together.
        NotImplementedError: another dtype or device, channels that are no multiple of 128 or do not
            fit VMEM, or gradients.
    """
    _check_number("eps", eps)
    resolved = _resolve(implementation, x=x, shift=shift, scale=scale, **_optional(index=index))
    validation.check_modulation(x, {"shift": shift, "scale": scale}, index)
    return _layer_norm_modulate(x, shift, scale, index, eps, resolved)


def gated_residual_layer_norm_modulate(
    x: torch.Tensor,
    branch: torch.Tensor,
    gate: torch.Tensor,
    shift: torch.Tensor,
    scale: torch.Tensor,
    index: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    implementation: str = "kernel",
) -> tuple[torch.Tensor, torch.Tensor]:
    """``r = x + gate * branch`` and ``LayerNorm(r) * (1 + scale) + shift``, without rounding r in between.

    Args:
        x, branch: ``[batch, tokens, channels]``, bf16 or f32, channels a multiple of 128.
        gate, shift, scale, index: as `shift`, `scale` and `index` of `layer_norm_modulate`.
        eps, implementation: as there.

    Returns:
        ``r`` and the normed and modulated ``r``, both with the shape and dtype of `x`.

    Raises:
        ValueError: shapes, dtypes or devices do not belong together.
        NotImplementedError: another dtype or device, channels that are no multiple of 128 or do not
            fit VMEM, or gradients.
    """
    modulation = {"gate": gate, "shift": shift, "scale": scale}
    _check_number("eps", eps)
    resolved = _resolve(implementation, x=x, branch=branch, **modulation, **_optional(index=index))
    validation.check_gated_residual(x, branch, modulation, index)
    return _gated_residual_layer_norm_modulate(x, branch, gate, shift, scale, index, eps, resolved)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6, implementation: str = "kernel"
) -> torch.Tensor:
    """``x / sqrt(mean(x**2) + eps) * weight`` over the channels, in f32 with one rounding (arXiv 1910.07467).

    Args:
        x: ``[batch, tokens, channels]``, bf16 or f32, channels a multiple of 128.
        weight: ``[channels]``, bf16 or f32.
        eps: added to the mean square.
        implementation: "kernel", "interpret" or "reference", see the module.

    Returns:
        The shape and dtype of `x`.

    Raises:
        ValueError: shapes or devices do not belong together.
        NotImplementedError: another dtype or device, channels that are no multiple of 128 or do not
            fit VMEM, or gradients.
    """
    _check_number("eps", eps)
    resolved = _resolve(implementation, x=x, weight=weight)
    validation.check_rms_norm(x, weight)
    return _rms_norm(x, weight, eps, resolved)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    activation: str = "identity",
    implementation: str = "kernel",
) -> torch.Tensor:
    """``activation(x weight^T + bias)``, summed and activated in f32 with one rounding.

    Args:
        x: ``[batch, tokens, in_channels]``, bf16 or f32, channels a multiple of 128.
        weight: ``[out_channels, in_channels]``, the dtype of `x`, as `torch.nn.Linear` has it.
        bias: ``[out_channels]``, bf16 or f32.
        activation: "identity", or "gelu_tanh", GELU by its tanh approximation (arXiv 1606.08415).
        implementation: "kernel", "interpret" or "reference", see the module.

    Returns:
        ``[batch, tokens, out_channels]`` in the dtype of `x`.

    Raises:
        ValueError: shapes, dtypes or devices do not belong together, or an unknown activation.
        NotImplementedError: another dtype or device, channels that are no multiple of 128, or gradients.
    """
    resolved = _resolve(implementation, x=x, weight=weight, bias=bias)
    validation.check_linear(x, weight, bias, activation)
    return _linear(x, weight, bias, activation, resolved)


def linear_gated_residual(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    residual: torch.Tensor,
    gate: torch.Tensor,
    index: torch.Tensor | None = None,
    *,
    implementation: str = "kernel",
) -> torch.Tensor:
    """``residual + gate * (x weight^T + bias)``, in f32 with one rounding.

    Args:
        x, weight, bias: as of `linear`.
        residual: ``[batch, tokens, out_channels]``, the dtype of `x`.
        gate: ``[batch, out_channels]``, bf16 or f32. With an index ``[2 * batch, out_channels]``: row b
            for tokens of index 0, row ``batch + b`` for the others (`zero_cond_t` of the Edit models).
        index: ``[batch, tokens]`` int32, or None.
        implementation: "kernel", "interpret" or "reference", see the module.

    Returns:
        The shape and dtype of `residual`.

    Raises:
        ValueError: shapes, dtypes or devices do not belong together.
        NotImplementedError: another dtype or device, channels that are no multiple of 128, or gradients.
    """
    tensors = {"x": x, "weight": weight, "bias": bias, "residual": residual, "gate": gate}
    resolved = _resolve(implementation, **tensors, **_optional(index=index))
    validation.check_linear_gated_residual(x, weight, bias, residual, gate, index)
    return _linear_gated_residual(*tensors.values(), index, resolved)
