"""The torch ops: diffusers against the reference, the reference against the kernel, and bad input."""

import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from diffusers.models.normalization import AdaLayerNormContinuous, RMSNorm
from diffusers.models.transformers.transformer_qwenimage import (
    QwenImageTransformerBlock,
    apply_rotary_emb_qwen,
)

OPS = (
    "joint_attention",
    "qk_norm_rope",
    "layer_norm_modulate",
    "gated_residual_layer_norm_modulate",
    "rms_norm",
    "linear",
    "linear_gated_residual",
)
IMAGE, TEXT = (2, 72, 256), (2, 7, 256)


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def rope(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of random angles, each pair's value twice."""
    angle = (100 * rand(*shape[:-1], shape[-1] // 2)).repeat_interleave(2, dim=-1)
    return angle.cos(), angle.sin()


def arguments_of(name: str) -> dict[str, Any]:
    """Valid keyword arguments of a public function."""
    if name == "joint_attention":
        shapes = {"image": IMAGE, "text": TEXT}
        streams = {f"{s}_{p}": rand(*shapes[s]) for s in shapes for p in ("query", "key", "value")}
        return streams | {"text_lengths": torch.tensor([3, 7], dtype=torch.int32)}
    if name == "qk_norm_rope":
        streams = {
            f"{s}_{p}": rand(*shape)
            for s, shape in (("image", IMAGE), ("text", TEXT))
            for p in ("query", "key")
        }
        weights = {
            f"{s}_{p}_weight": 1 + 0.1 * rand(128) for s in ("image", "text") for p in ("query", "key")
        }
        return streams | weights | {"image_rope": rope(1, 72, 128), "text_rope": rope(2, 7, 128)}
    if name == "rms_norm":
        return {"x": rand(*IMAGE), "weight": rand(256)}
    if name.startswith("linear"):
        product = {"x": rand(*IMAGE), "weight": rand(384, 256) / 16, "bias": rand(384)}
        if name == "linear":
            return product
        index = torch.arange(2 * 72).reshape(2, 72).remainder(2).int()
        return product | {"residual": rand(2, 72, 384), "gate": rand(4, 384), "index": index}
    modulation = {"shift": rand(4, 256), "scale": rand(4, 256)}
    index = torch.arange(2 * 72).reshape(2, 72).remainder(2).int()
    if name == "layer_norm_modulate":
        return {"x": rand(*IMAGE), **modulation, "index": index}
    return {"x": rand(*IMAGE), "branch": rand(*IMAGE), "gate": rand(4, 256), **modulation, "index": index}


def as_tuple(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPS)
def test_kernel_matches_the_reference(kernels: ModuleType, name: str, dtype: torch.dtype):
    streams = {f"{s}_{p}" for s in ("image", "text") for p in ("query", "key", "value")}
    activations = {*streams, "x", "branch", "residual", *({"weight"} if name.startswith("linear") else ())}
    arguments = {k: v.to(dtype) if k in activations else v for k, v in arguments_of(name).items()}
    function = getattr(kernels, name)
    actual, expected = (as_tuple(function(**arguments, implementation=i)) for i in ("kernel", "reference"))
    rtol, atol = (1e-4, 1e-5) if dtype == torch.float32 else (2**-6, 2**-6)
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


def test_rms_norm_reference_is_diffusers(kernels: ModuleType):
    arguments = arguments_of("rms_norm")
    module = RMSNorm(256, eps=1e-6)
    module.load_state_dict({"weight": arguments["weight"]})
    torch.testing.assert_close(
        kernels.rms_norm(**arguments, implementation="reference"), module(arguments["x"]).detach()
    )


@pytest.mark.parametrize("indexed", [False, True])
def test_modulation_reference_is_diffusers(kernels: ModuleType, indexed: bool):
    block: Any = QwenImageTransformerBlock(256, 2, 128)
    arguments = arguments_of("gated_residual_layer_norm_modulate")
    if not indexed:
        arguments = {k: v[:2] for k, v in arguments.items() if k != "index"}
    residual, out = kernels.gated_residual_layer_norm_modulate(**arguments, implementation="reference")
    x, branch = arguments["x"], arguments["branch"]
    params = torch.cat([arguments["shift"], arguments["scale"], arguments["gate"]], dim=-1)
    _, gate = block._modulate(x, params, arguments.get("index"))
    torch.testing.assert_close(residual, x + gate * branch)
    modulated, _ = block._modulate(block.img_norm1(residual), params, arguments.get("index"))
    torch.testing.assert_close(out, modulated, rtol=1e-4, atol=1e-5)
    plain = {k: v for k, v in arguments.items() if k not in ("x", "branch", "gate")}
    torch.testing.assert_close(
        kernels.layer_norm_modulate(residual, **plain, implementation="reference"), out
    )


@torch.no_grad()
@pytest.mark.parametrize("indexed", [False, True])
def test_linear_references_are_torch(kernels: ModuleType, indexed: bool):
    arguments = arguments_of("linear_gated_residual")
    if not indexed:
        arguments |= {"gate": arguments["gate"][:2], "index": None}
    product = {name: arguments[name] for name in ("x", "weight", "bias")}
    expected = torch.nn.functional.linear(*product.values())
    for activation, wanted in (
        ("identity", expected),
        ("gelu_tanh", torch.nn.functional.gelu(expected, approximate="tanh")),
    ):
        actual = kernels.linear(**product, activation=activation, implementation="reference")
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)
    block: Any = QwenImageTransformerBlock(384, 3, 128)
    params = torch.cat([torch.zeros_like(arguments["gate"])] * 2 + [arguments["gate"]], dim=-1)
    _, gate = block._modulate(expected, params, arguments["index"])
    actual = kernels.linear_gated_residual(**arguments, implementation="reference")
    torch.testing.assert_close(actual, arguments["residual"] + gate * expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_ada_layer_norm_is_diffusers(kernels: ModuleType):
    module = AdaLayerNormContinuous(256, 256, elementwise_affine=False, eps=1e-6)
    x, emb = rand(*IMAGE), rand(2, 256)
    torch.testing.assert_close(
        kernels.layers.AdaLayerNormContinuous.forward(module, x, emb), module(x, emb), rtol=1e-4, atol=1e-5
    )


@torch.no_grad()
def test_norm_rope_and_attention_references_are_diffusers(kernels: ModuleType):
    """The processor's own steps: norm, complex rotation, masked SDPA over [text, image]."""
    attention, norm = arguments_of("joint_attention"), arguments_of("qk_norm_rope")
    heads: dict[str, torch.Tensor] = {}
    for stream in ("image", "text"):
        cos, sin = norm[f"{stream}_rope"]
        for part in ("query", "key"):
            rms = RMSNorm(128, eps=1e-6)
            rms.load_state_dict({"weight": norm[f"{stream}_{part}_weight"]})
            x = rms(norm[f"{stream}_{part}"].unflatten(-1, (2, 128)))
            # diffusers has one table for the batch.
            rows: list[Any] = [  # the annotation of diffusers' function is wrong
                apply_rotary_emb_qwen(
                    x[b : b + 1], torch.complex(*(t[b % len(t), :, ::2] for t in (cos, sin))), use_real=False
                )
                for b in range(2)
            ]
            heads[f"{stream}_{part}"] = torch.cat(rows)
        heads[f"{stream}_value"] = attention[f"{stream}_value"].unflatten(-1, (2, 128))
    normed = kernels.qk_norm_rope(**norm, implementation="reference")
    for name, x in zip(("image_query", "image_key", "text_query", "text_key"), normed, strict=True):
        torch.testing.assert_close(x, heads[name].flatten(2), rtol=1e-4, atol=1e-5)

    query, key, value = (
        torch.cat([heads[f"text_{p}"], heads[f"image_{p}"]], dim=1).transpose(1, 2)
        for p in ("query", "key", "value")
    )
    text_mask = torch.arange(7) < attention["text_lengths"][:, None]
    mask = torch.cat([text_mask, torch.ones(2, 72, dtype=torch.bool)], dim=1)[:, None, None]
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    text, image = expected.transpose(1, 2).flatten(2).split([7, 72], dim=1)
    actual = kernels.joint_attention(
        *(normed[0], normed[1], attention["image_value"]),
        *(normed[2], normed[3], attention["text_value"]),
        attention["text_lengths"],
        implementation="reference",
    )
    torch.testing.assert_close(actual, (image, text), rtol=1e-4, atol=1e-5)


def raw_calls(kernels: ModuleType) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Each op of this build with valid positional arguments."""
    namespace = getattr(torch.ops, kernels.__name__)
    calls: dict[str, tuple[Any, tuple[Any, ...]]] = {}
    for name in OPS:
        arguments = arguments_of(name)
        tensors: list[torch.Tensor] = []
        for value in arguments.values():
            tensors += value if isinstance(value, tuple) else [value]
        static: tuple[Any, ...] = {
            "joint_attention": ("online", 128**-0.5),
            "linear": ("gelu_tanh",),
            "linear_gated_residual": (),
        }.get(name, (1e-6,))
        calls[name] = (getattr(namespace, name).default, (*tensors, *static, "interpret"))
    return calls


@pytest.mark.parametrize("name", OPS)
def test_opcheck(kernels: ModuleType, name: str):
    op, arguments = raw_calls(kernels)[name]
    assert set(torch.library.opcheck(op, arguments).values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", OPS)
def test_fullgraph(kernels: ModuleType, name: str):
    arguments = arguments_of(name)
    compiled = torch.compile(getattr(kernels, name), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**arguments), getattr(kernels, name)(**arguments))


@pytest.mark.parametrize("name", OPS)
def test_strided_inputs(kernels: ModuleType, name: str):
    """Views into larger tensors, as chunk() and split() give, and misaligned memory."""

    def strided(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(strided(item) for item in x)
        padded = torch.nn.functional.pad(x, (1, 2))
        return padded[..., 1:-2]

    arguments = arguments_of(name)
    views = {k: strided(v) for k, v in arguments.items()}
    before = {k: v.clone() for k, v in views.items() if isinstance(v, torch.Tensor)}
    function = getattr(kernels, name)
    torch.testing.assert_close(function(**views), function(**arguments))
    torch.testing.assert_close({k: views[k] for k in before}, before)


def test_torch_tpu_gives_the_same_ops(kernels: ModuleType):
    """With torch-tpu loaded the ops are its jax_ops: same schemas, opcheck passes, same results.

    And each lowers for a TPU through torch-tpu: its default fake, which ours replaces, does what the
    first call on a TPU does.
    """
    schemas = {name: str(op._schema) for name, (op, _) in raw_calls(kernels).items()}
    script = f"""
import sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch, torch_tpu
from torch.library import opcheck
from qwenimage_tpu.kernel_loader import load_kernels
from test_ops import OPS, arguments_of, as_tuple, raw_calls
kernels = load_kernels().module
for name, (op, arguments) in raw_calls(kernels).items():
    assert str(op._schema) == {schemas!r}[name], op._schema
    assert set(opcheck(op, arguments).values()) == {{"SUCCESS"}}, name
    keywords = arguments_of(name)
    actual, expected = (
        getattr(kernels, name)(**keywords, implementation=i) for i in ("kernel", "reference")
    )
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    torch.tpu.pallas.jax_op("probe::" + name, getattr(kernels._jax_functions, name))
    meta = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in arguments[:-1]]
    lowered = getattr(torch.ops.probe, name)(*meta, "kernel")
    for result, tensor in zip(as_tuple(lowered), as_tuple(actual), strict=True):
        assert (result.shape, result.dtype) == (tensor.shape, tensor.dtype), name
print("checked", len(OPS))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1:] == [f"checked {len(OPS)}"], done.stderr


# Each row: function, what is changed, the error and the start of its message.
Change = Callable[[dict[str, Any]], dict[str, Any]]


def replaced(name: str, value: Any) -> Change:
    return lambda arguments: arguments | {name: value(arguments[name]) if callable(value) else value}


def same(x: torch.Tensor) -> torch.Tensor:
    return x


BAD_INPUT: list[tuple[str, str, Change, type[Exception], str]] = [
    ("joint_attention", "half precision", replaced("image_query", torch.Tensor.half), NotImplementedError,
     "image_query must be float32 or bfloat16, got float16; convert it first"),
    ("joint_attention", "mixed dtypes", replaced("image_key", torch.Tensor.bfloat16), ValueError,
     "image_key must have the dtype of image_query, float32, got bfloat16"),
    ("joint_attention", "streams of different dtype",
     lambda a: a | {k: v.bfloat16() for k, v in a.items() if k in ("text_query", "text_key", "text_value")},
     ValueError, "text_query must have the dtype of image_query, float32, got bfloat16"),
    ("joint_attention", "rank 4", replaced("image_query", lambda x: x.unflatten(-1, (2, 128))), ValueError,
     r"image_query must have rank 3, \[batch, tokens, channels\], got shape \(2, 72, 2, 128\); flatten"),
    ("joint_attention", "head size",
     lambda a: {k: v[..., :192] if v.ndim == 3 else v for k, v in a.items()}, NotImplementedError,
     r"image_query must have a multiple of 128 channels .*, got 192"),
    ("joint_attention", "key tokens", replaced("image_key", lambda x: x[:, :-1]), ValueError,
     r"image_key must have the shape of image_query, \(2, 72, 256\), got \(2, 71, 256\)"),
    ("joint_attention", "heads differ",
     lambda a: a | {k: v[..., :128] for k, v in a.items() if k in ("text_query", "text_key", "text_value")},
     ValueError, r"text_query must have the heads \* head_dim of image_query, 256, got 128"),
    ("joint_attention", "batch differs",
     lambda a: a | {k: v[:1] for k, v in a.items() if k in ("text_query", "text_key", "text_value")},
     ValueError, "text_query must have the batch size of image_query, 2, got 1"),
    ("joint_attention", "no image token",
     lambda a: a | {k: v[:, :0] for k, v in a.items() if k.startswith("image")}, ValueError,
     r"image_query must have at least one row, token and channel, got shape \(2, 0, 256\)"),
    ("joint_attention", "lengths' shape", replaced("text_lengths", lambda x: x[:1]), ValueError,
     r"text_lengths must have shape \[batch\] = \(2,\), got \(1,\)"),
    ("joint_attention", "lengths' dtype", replaced("text_lengths", torch.Tensor.long), ValueError,
     "text_lengths must be int32, got int64; convert it first"),
    ("joint_attention", "length too large", replaced("text_lengths", lambda x: x + 1), ValueError,
     r"text_lengths must be in \[0, text_tokens\] = \[0, 7\], got 4 to 8"),
    ("joint_attention", "length below zero", replaced("text_lengths", lambda x: x - 4), ValueError,
     r"text_lengths must be in \[0, text_tokens\] = \[0, 7\], got -1 to 3"),
    ("joint_attention", "softmax", lambda a: a | {"softmax": "fast"}, ValueError,
     r"softmax must be one of \('bounded', 'exact', 'online', 'int8'\), got 'fast'"),
    ("joint_attention", "bounded without a bound", lambda a: a | {"softmax": "bounded"}, ValueError,
     "the bounded softmax needs a logit_bound of at most 69.31, got inf; leave softmax None or pass"),
    ("joint_attention", "int8 without a bound", lambda a: a | {"softmax": "int8"}, ValueError,
     "the int8 softmax needs a logit_bound of at most 34.66, got inf; leave softmax None or pass 'online'"),
    ("joint_attention", "bound below zero", lambda a: a | {"logit_bound": -1.0}, ValueError,
     r"logit_bound must be a number >= 0, got -1\.0"),
    ("joint_attention", "other device", replaced("text_key", lambda x: x.to("meta")), ValueError,
     r"text_key must be on the device of image_query, cpu, got meta; move it with \.to\('cpu'\)"),
    ("qk_norm_rope", "weight's shape", replaced("image_key_weight", lambda x: x[:64]), ValueError,
     r"image_key_weight must have shape \[head_dim\] = \(128,\), got \(64,\)"),
    ("qk_norm_rope", "weight's dtype", replaced("text_key_weight", torch.Tensor.double), NotImplementedError,
     "text_key_weight must be float32 or bfloat16, got float64"),
    ("qk_norm_rope", "table's tokens",
     replaced("image_rope", lambda r: tuple(x[:, :-1] for x in r)), ValueError,
     r"image_cos must have shape \[1 or batch, tokens, head_dim\] = \(1, 72, 128\) or \(2, 72, 128\), got"),
    ("qk_norm_rope", "table's dtype", replaced("text_rope", lambda r: tuple(x.bfloat16() for x in r)),
     ValueError, "text_cos must be float32 .*, got bfloat16"),
    ("qk_norm_rope", "head size", lambda a: a | {k: a[k][..., :64] for k in list(a)[:4]},
     NotImplementedError, r"image_query must have a multiple of 128 channels .*, got 64"),
    ("layer_norm_modulate", "rank 2", replaced("x", lambda x: x[0]), ValueError,
     r"x must have rank 3, \[batch, tokens, channels\], got shape \(72, 256\)"),
    ("layer_norm_modulate", "lanes", lambda a: a | {k: a[k][..., :100] for k in ("x", "shift", "scale")},
     NotImplementedError, r"x must have a multiple of 128 channels .*, got 100"),
    ("layer_norm_modulate", "rows without an index", lambda a: a | {"index": None}, ValueError,
     r"shift must have shape \[batch, channels\] = \(2, 256\), got \(4, 256\)"),
    ("layer_norm_modulate", "rows with an index", replaced("scale", lambda x: x[:2]), ValueError,
     r"scale must have shape \[2 \* batch, channels\] = \(4, 256\), got \(2, 256\)"),
    ("layer_norm_modulate", "index's shape", replaced("index", lambda x: x[:, :-1]), ValueError,
     r"index must have shape \[batch, tokens\] = \(2, 72\), got \(2, 71\)"),
    ("layer_norm_modulate", "index's dtype", replaced("index", torch.Tensor.bool), ValueError,
     "index must be int32, got bool; convert it first"),
    ("gated_residual_layer_norm_modulate", "branch's shape", replaced("branch", lambda x: x[:, :-1]),
     ValueError, r"branch must have the shape of x, \(2, 72, 256\), got \(2, 71, 256\)"),
    ("gated_residual_layer_norm_modulate", "branch's dtype", replaced("branch", torch.Tensor.bfloat16),
     ValueError, "branch must have the dtype of x, float32, got bfloat16"),
    ("gated_residual_layer_norm_modulate", "gate's shape", replaced("gate", lambda x: x[:1]), ValueError,
     r"gate must have shape \[2 \* batch, channels\] = \(4, 256\), got \(1, 256\)"),
    ("rms_norm", "weight's shape", replaced("weight", lambda x: x[:128]), ValueError,
     r"weight must have shape \[channels\] = \(256,\), got \(128,\)"),
    ("rms_norm", "integers", replaced("x", torch.Tensor.int), NotImplementedError,
     "x must be float32 or bfloat16, got int32"),
    ("linear", "weight's channels", replaced("weight", lambda x: x[:, :128]), ValueError,
     r"weight must have shape \[out_channels, in_channels\] with the 256 channels of x, got \(384, 128\)"),
    ("linear", "output channels", lambda a: a | {"weight": a["weight"][:100], "bias": a["bias"][:100]},
     NotImplementedError, "weight must have a multiple of 128 output channels, got 100"),
    ("linear", "weight's dtype", replaced("weight", torch.Tensor.bfloat16), ValueError,
     "weight must have the dtype of x, float32, got bfloat16"),
    ("linear", "bias's shape", replaced("bias", lambda x: x[:128]), ValueError,
     r"bias must have shape \[out_channels\] = \(384,\), got \(128,\)"),
    ("linear", "no bias", lambda a: a | {"bias": None}, TypeError,
     "bias must be a torch.Tensor, got NoneType"),
    ("linear", "activation", lambda a: a | {"activation": "relu"}, ValueError,
     r"activation must be one of \('identity', 'gelu_tanh'\), got 'relu'"),
    ("linear_gated_residual", "residual's shape", replaced("residual", lambda x: x[:, :, :256]), ValueError,
     r"residual must have shape \[batch, tokens, out_channels\] = \(2, 72, 384\), got \(2, 72, 256\)"),
    ("linear_gated_residual", "residual's dtype", replaced("residual", torch.Tensor.bfloat16), ValueError,
     "residual must have the dtype of x, float32, got bfloat16"),
    ("linear_gated_residual", "gate's shape", replaced("gate", lambda x: x[:2]), ValueError,
     r"gate must have shape \[2 \* batch, channels\] = \(4, 384\), got \(2, 384\)"),
    ("joint_attention", "rank 1", replaced("image_query", lambda x: x[0, 0]), ValueError,
     r"image_query must have rank 3, .*, got shape \(256,\)"),
    ("joint_attention", "a list as lengths", replaced("text_lengths", [3, 7]), TypeError,
     "text_lengths must be a torch.Tensor, got list; convert it first"),
    ("joint_attention", "scale", lambda a: a | {"scale": math.nan}, ValueError,
     "scale must be a finite number above 0, got nan"),
    ("qk_norm_rope", "complex table", replaced("image_rope", lambda r: torch.complex(*r)), ValueError,
     "image_rope must be the two tensors cos and sin; of a complex table"),
    ("layer_norm_modulate", "eps", lambda a: a | {"eps": -1.0}, ValueError,
     r"eps must be a finite number above 0, got -1\.0"),
    ("rms_norm", "no weight", lambda a: a | {"weight": None}, TypeError,
     "weight must be a torch.Tensor, got NoneType"),
    ("rms_norm", "numpy", replaced("x", lambda x: x.numpy()), TypeError,
     "x must be a torch.Tensor, got ndarray; convert it first"),
    *(
        (name, "meta device",
         lambda a: {k: tuple(x.to("meta") for x in v) if isinstance(v, tuple) else v.to("meta")
                    for k, v in a.items()},
         NotImplementedError, r"tensors must be on a tpu or cpu device, got meta; move them with")
        for name in OPS
    ),
    *(
        (name, "implementation", lambda a: a | {"implementation": "fast"}, ValueError,
         r"implementation must be one of \('kernel', 'interpret', 'reference'\), got 'fast'")
        for name in OPS
    ),
    *(
        (name, "gradients", replaced(first, lambda x: x.clone().requires_grad_()), NotImplementedError,
         f"these kernels have no backward pass, but {first} requires grad and grad mode is on; call")
        for name, first in (
            ("joint_attention", "text_value"),
            ("qk_norm_rope", "image_query_weight"),
            ("layer_norm_modulate", "shift"),
            ("gated_residual_layer_norm_modulate", "gate"),
            ("rms_norm", "weight"),
            ("linear", "weight"),
            ("linear_gated_residual", "residual"),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [pytest.param(n, c, e, m, id=f"{n}-{what}".replace(" ", "-")) for n, what, c, e, m in BAD_INPUT],
)
def test_bad_input_raises_before_a_kernel_runs(
    kernels: ModuleType, name: str, change: Change, error: type[Exception], message: str
):
    def forbidden(*_: Any, **__: Any) -> Any:
        raise AssertionError("a kernel ran")

    arguments = change(arguments_of(name))
    function = getattr(kernels, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(function.__globals__, f"_{name}", forbidden)
        with pytest.raises(error, match=message):
            function(**arguments)


def test_weights_that_require_grad_pass_without_grad_mode(kernels: ModuleType):
    arguments = arguments_of("rms_norm")
    arguments["weight"].requires_grad_()
    with torch.no_grad():
        kernels.rms_norm(**arguments)


def test_a_number_as_bound_chooses_the_softmax(kernels: ModuleType):
    arguments = arguments_of("joint_attention")
    exact = kernels.joint_attention(**arguments, implementation="reference")
    for bound in (60.0, 200.0, 1000.0, math.inf):
        torch.testing.assert_close(
            kernels.joint_attention(**arguments, logit_bound=bound), exact, rtol=1e-4, atol=1e-5
        )


def test_lengths_default_to_all_text(kernels: ModuleType):
    arguments = arguments_of("joint_attention")
    full = arguments | {"text_lengths": torch.tensor([7, 7], dtype=torch.int32)}
    del arguments["text_lengths"]
    torch.testing.assert_close(kernels.joint_attention(**arguments), kernels.joint_attention(**full))


def test_the_api_is_documented(kernels: ModuleType):
    """Every public function says what it takes, gives and raises."""
    for name in OPS:
        doc = getattr(kernels, name).__doc__
        assert all(section in doc for section in ("Args:", "Returns:", "Raises:")), name
        assert re.search(r"``.*``", doc), name
