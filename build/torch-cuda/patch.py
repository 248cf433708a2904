"""Patching diffusers' `QwenImageTransformer2DModel` to run on these kernels, by duck typing, and undoing it.

The model keeps its class and its parameters, and its own forward still does the work. Before it runs, a
text mask of any pattern is turned into lengths. What changes below it: the forwards of the blocks, of their
linear layers and MLPs, and of the norms around them, the attention processors, and the rotary embedding,
which gives real tables instead of complex numbers.
"""

import copy
import functools
import inspect
import operator
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import nn

from . import layers, linear_layers
from .ops import check_implementation
from .qwenimage_tpu_pallas import (
    check_softmax,
    checkpoint_logit_bound,
    choose_softmax,
    qk_norm_logit_bound,
)
from .qwenimage_tpu_pallas.layouts import HEAD_DIM

_ROPE_POSITIONS = 4096  # of diffusers' tables
_PROJECTIONS = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
_NORMS = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")


class Patch:
    """A patch in place; the patched transformer holds it as `kernel_patch`.

    Attributes:
        softmax: the softmax that all layers run, "bounded", "exact", "online" or "int8".
        logit_bound: the largest bound on an attention logit over the layers, natural units.
    """

    def __init__(self, transformer: Any, implementation: str, softmax: str | None) -> None:
        self.logit_bound = max(_layer_bound(block.attn) for block in transformer.transformer_blocks)
        self.softmax: str = softmax or choose_softmax(self.logit_bound)
        check_softmax(self.softmax, self.logit_bound)
        self._implementation = implementation
        self._forwards: list[tuple[nn.Module, Callable[..., Any]]] = []
        self._processors: list[tuple[Any, Any]] = []
        self._set_forward(transformer.txt_norm, layers.RMSNorm.forward)
        self._set_forward(transformer.norm_out, layers.AdaLayerNormContinuous.forward)
        self._set_forward(transformer.pos_embed, _real_rope(transformer.pos_embed.forward))
        for block in transformer.transformer_blocks:
            self._set_forward(block, layers.QwenImageTransformerBlock.forward)
            self._patch_attention(block.attn)
            for module, function in _linear_layers(block):
                self._set_forward(module, function)
        self._set_forward(transformer, _sorting_text(type(transformer).forward))
        self._transformer = transformer
        transformer.kernel_patch = self

    def __reduce__(self) -> Any:
        raise TypeError(
            "a patched transformer cannot be pickled, as its forwards belong to this process; save it with"
            " save_pretrained() or its state_dict(), or call kernel_patch.undo() first"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "Patch":
        duplicate = memo[id(self)] = object.__new__(Patch)
        duplicate.__dict__ = copy.deepcopy(self.__dict__, memo)
        return duplicate

    def _set_forward(self, module: Any, function: Callable[..., Any]) -> None:
        forward = MethodType(function, module)
        module.forward = forward
        module.kernel_implementation = self._implementation
        self._forwards.append((module, forward))

    def _patch_attention(self, attn: Any) -> None:
        for name in _NORMS:
            self._set_forward(getattr(attn, name), _weight)
        self._processors.append((attn, attn.processor))
        processor = layers.QwenImageAttnProcessor(self.logit_bound, self._implementation, self.softmax)
        attn.set_processor(processor)

    def undo(self) -> None:
        """Make the transformer what it was.

        Raises:
            ValueError: something has wrapped a patched forward since (a cache, an offloading hook), or
                the patch was undone already. Nothing is changed then.
        """
        wrapped = [m for m, forward in self._forwards if vars(m).get("forward") is not forward]
        if wrapped:
            raise ValueError(
                f"{len(wrapped)} patched forwards were replaced or restored since, the first on"
                f" {type(wrapped[0]).__name__}; undo a patch once, and first remove what was put on top of it"
                " (transformer.disable_cache(), pipe.remove_all_hooks())"
            )
        for module, _ in self._forwards:
            del module.forward, module.kernel_implementation
        for attn, processor in self._processors:
            attn.set_processor(processor)
        del self._transformer.kernel_patch


def patch_transformer(
    transformer: Any, *, implementation: str = "kernel", softmax: str | None = None
) -> Patch:
    """Run a `QwenImageTransformer2DModel` on these kernels.

    Base, Edit, Edit-Plus and Layered models, with ControlNet residuals or without. The patched model
    equals the stock one up to rounding, for any text mask. Its parameters, state dict, hooks and caches
    stay diffusers' own. Patch before adding hooks or caches, and patch again after the q or k norms'
    weights changed: they decide which softmax is exact.

    Args:
        transformer: the model, its weights loaded (on any device but meta), bf16 or f32.
        implementation: "kernel", "interpret" or "reference", as of the functions in `ops`.
        softmax: "bounded", "exact", "online" or "int8", as of `joint_attention`; None for the fastest that is
            exact with these weights.

    Returns:
        The patch, which tells the softmax and can undo itself.

    Raises:
        ValueError: not a QwenImage transformer, patched already, hooked already, weights on meta, or an
            unknown implementation or softmax, or one that these weights' bound does not allow.
        NotImplementedError: a head size other than 128, or weights that are neither bf16 nor f32.
    """
    check_implementation(implementation)
    _check_transformer(transformer)
    return Patch(transformer, implementation, softmax)


def softmax_for(transformer: Any) -> tuple[str, float]:
    """The softmax a patch would choose for this model and the logit bound (natural units) that decides it."""
    bound = max(_layer_bound(block.attn) for block in transformer.transformer_blocks)
    return choose_softmax(bound), bound


def softmax_from_norm_weights(weights: Mapping[str, torch.Tensor]) -> tuple[str, float]:
    """As `softmax_for`, from a checkpoint's q and k norm weights by parameter name; others are ignored.

    Raises:
        ValueError: a layer lacks one of its four norm weights, or there is no layer.
    """
    bound = checkpoint_logit_bound({name: _to_numpy(weight) for name, weight in weights.items()})
    return choose_softmax(bound), bound


def _to_numpy(weight: torch.Tensor) -> np.ndarray:
    return weight.detach().double().cpu().numpy()


def _layer_bound(attn: Any) -> float:
    weights = {name: _to_numpy(getattr(attn, name).weight) for name in _NORMS}
    return qk_norm_logit_bound(
        [weights["norm_q"], weights["norm_added_q"]], [weights["norm_k"], weights["norm_added_k"]]
    )


def _check_transformer(transformer: Any) -> None:
    expected = ("transformer_blocks", "txt_norm", "norm_out", "pos_embed")
    missing = [name for name in expected if not hasattr(transformer, name)]
    if missing or not len(transformer.transformer_blocks):
        raise ValueError(
            f"expected a QwenImageTransformer2DModel, got {type(transformer).__name__} without"
            f" {missing or 'blocks'}; pass pipe.transformer"
        )
    patched = [transformer, *(getattr(transformer, name) for name in expected[1:])]
    for block in transformer.transformer_blocks:
        patched += [block, *(getattr(block.attn, name, None) for name in _NORMS)]
        patched += [module for module, _ in _linear_layers(block)]
    hooked = [module for module in patched if module is not None and "forward" in vars(module)]
    if hooked:
        raise ValueError(
            f"the forward of {len(hooked)} modules was replaced already, the first on"
            f" {type(hooked[0]).__name__}; patch once, and before adding caches or offloading hooks"
            " (patch.undo(), transformer.disable_cache(), pipe.remove_all_hooks())"
        )
    for block in transformer.transformer_blocks:
        _check_attention(block.attn)


def _check_attention(attn: Any) -> None:
    missing = [name for name in _NORMS if getattr(getattr(attn, name, None), "weight", None) is None]
    if missing:
        raise ValueError(f"expected q and k RMSNorms with weights in every block, got none for {missing}")
    weight = attn.norm_q.weight
    if weight.device.type == "meta":
        raise ValueError("the weights are on the meta device; load them before patching")
    if weight.shape != (HEAD_DIM,):
        raise NotImplementedError(f"heads must be {HEAD_DIM} wide, as QwenImage's are, got {weight.numel()}")
    if weight.dtype not in (torch.bfloat16, torch.float32):
        raise NotImplementedError(
            f"weights must be bfloat16 or float32, got {weight.dtype}; load the model in one of these"
        )


def _linear_layers(block: Any) -> list[tuple[nn.Module, Callable[..., Any]]]:
    """The block's linear layers and MLPs, with their forwards: those that the kernels serve.

    A LoRA's linear layer calls the one that it wraps.
    """
    found: list[tuple[nn.Module, Callable[..., Any]]] = []
    attn = block.attn
    linears = [getattr(attn, name, None) for name in _PROJECTIONS] + [attn.to_out[0]]
    for mlp in (block.img_mlp, block.txt_mlp):
        gelu, *_, last = mlp.net
        linears += [gelu.proj, last]
        found.append((mlp, linear_layers.mlp_forward))
        if gelu.approximate == "tanh":
            found.append((gelu, linear_layers.gelu_forward))
    bases = [getattr(module, "base_layer", module) for module in linears]
    served = (m for m in bases if type(m) is nn.Linear and getattr(m, "bias", None) is not None)
    return found + [(module, linear_layers.linear_forward) for module in served]


def _weight(self: Any) -> torch.Tensor:
    return self.weight


def _sorting_text(stock_forward: Callable[..., Any]) -> Callable[..., Any]:
    """The transformer's forward, with a text mask replaced by sorted text and lengths."""
    names = tuple(inspect.signature(stock_forward).parameters)[1:]

    @functools.wraps(stock_forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        kwargs.update(zip(names, args, strict=False))
        _sort_text(self, kwargs)
        return stock_forward(self, *args[len(names) :], **kwargs)

    return forward


def _sort_text(transformer: Any, kwargs: dict[str, Any]) -> None:
    """Move the valid text tokens of each row to the front, with their positions, and pass their number on.

    A stable sort, so that a mask which already has its padding at the end changes nothing; no value is
    read on the host.
    """
    text: Any = kwargs.get("encoder_hidden_states")
    mask: Any = kwargs.get("encoder_hidden_states_mask")
    if mask is None or mask.shape != text.shape[:2]:
        return  # nothing to do, or for the model itself to refuse
    mask = mask.bool()
    order = torch.argsort(mask.logical_not().int(), dim=1, stable=True)
    _, (cos, sin) = transformer.pos_embed(
        kwargs["img_shapes"], max_txt_seq_len=text.shape[1], device=text.device
    )
    kwargs["encoder_hidden_states"] = text.take_along_dim(order[..., None], dim=1)
    kwargs["encoder_hidden_states_mask"] = None
    kwargs["attention_kwargs"] = {
        **(kwargs.get("attention_kwargs") or {}),
        "text_lengths": mask.sum(dim=1, dtype=torch.int32),
        "text_rotary_emb": (cos[0, order], sin[0, order]),
    }


def _real_rope(complex_forward: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Callable[..., Any]:
    """A forward for the rotary embedding that gives ``(cos, sin)`` of the image and of the text.

    Each ``[1, tokens, 128]`` f32, a pair's value twice, from the model's own complex table. Computed on
    the CPU, once for the image sizes in use; a compiled graph holds the tables as constants.
    """

    @functools.lru_cache(maxsize=8)  # at 1024 x 1024 pixels 8 MiB each, a half of it the text's
    def tables(shapes: tuple[Any, ...], device: torch.device) -> tuple[layers.Rope, ...]:
        # Asked for more positions than there are, the model gives all that the image leaves.
        streams = complex_forward(_thaw(shapes), max_txt_seq_len=_ROPE_POSITIONS, device=torch.device("cpu"))

        def table(part: torch.Tensor) -> torch.Tensor:
            return part.float().repeat_interleave(2, dim=-1)[None].to(device)

        return tuple((table(freqs.real), table(freqs.imag)) for freqs in streams)

    @torch.compiler.assume_constant_result
    def constant_tables(shapes: tuple[Any, ...], device: torch.device) -> Any:
        return tables(shapes, device)

    def forward(_: nn.Module, video_fhw: Any, max_txt_seq_len: int, device: torch.device) -> Any:
        image, (cos, sin) = constant_tables(_freeze(video_fhw), device)
        if max_txt_seq_len > cos.shape[1]:
            raise ValueError(
                f"text must have at most {cos.shape[1]} tokens beside this image, as RoPE has"
                f" {_ROPE_POSITIONS} positions, got {max_txt_seq_len}"
            )
        return image, (cos[:, :max_txt_seq_len], sin[:, :max_txt_seq_len])

    return forward


def _freeze(value: Any) -> Any:
    """Lists as tuples marked as lists, so that shapes can be looked up and given back as they came.

    `index` makes torch.compile treat a size that differs from call to call as a constant all the same.
    """
    if isinstance(value, list):
        return ("list", *(_freeze(item) for item in value))
    return tuple(operator.index(size) for size in value)


def _thaw(value: tuple[Any, ...]) -> Any:
    return [_thaw(item) for item in value[1:]] if value and value[0] == "list" else value
