"""A patched transformer equals the stock one, in every configuration of diffusers, and can be undone."""

import copy
import dataclasses
import itertools
import pickle
from pathlib import Path
from types import ModuleType
from typing import Any

import accelerate
import pytest
import torch
from accelerate.hooks import remove_hook_from_module
from diffusers import (
    FirstBlockCacheConfig,
    MagCacheConfig,
    QwenImageTransformer2DModel,
    TaylorSeerCacheConfig,
)
from peft import LoraConfig
from torch._dynamo.testing import CompileCounterWithBackend

CONFIGS: dict[str, dict[str, Any]] = {
    "base": {},
    "zero_cond_t": {"zero_cond_t": True},
    "layer3d": {"use_layer3d_rope": True},
    "additional_t_cond": {"use_additional_t_cond": True},
}
TEXT_TOKENS = (1, 7, 31, 129)
# The grid of an image; where the configuration has several images, each gets half of its rows.
IMAGES = {16: (4, 4), 72: (6, 12), 1024: (32, 32)}
MASKS = ("none", "padded", "holes")
FACTORS = (tuple(CONFIGS), (False, True), TEXT_TOKENS, tuple(IMAGES), (1, 3), MASKS)


@dataclasses.dataclass(frozen=True)
class Problem:
    """One configuration of the model and one shape of its inputs."""

    config: str
    controlnet: bool
    text_tokens: int
    image_tokens: int
    batch: int
    mask: str

    def __str__(self) -> str:
        control = "-controlnet" if self.controlnet else ""
        return f"{self.config}{control}-{self.batch}x({self.image_tokens}+{self.text_tokens})-{self.mask}"

    def inputs(self, seed: int = 0) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)

        def rand(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        height, width = IMAGES[self.image_tokens]
        two_images = self.config in ("zero_cond_t", "layer3d")
        grids = [(1, height // 2, width)] * 2 if two_images else [(1, height, width)]
        inputs: dict[str, Any] = {
            "hidden_states": rand(self.batch, self.image_tokens, 64),
            "encoder_hidden_states": rand(self.batch, self.text_tokens, 128),
            "encoder_hidden_states_mask": self.text_mask(),
            "timestep": torch.rand(self.batch, generator=generator),
            "img_shapes": [grids] * self.batch,
            "return_dict": False,
        }
        if self.controlnet:
            inputs["controlnet_block_samples"] = [rand(self.batch, self.image_tokens, 256)]
        if self.config == "additional_t_cond":
            inputs["additional_t_cond"] = torch.arange(self.batch) % 2
        return inputs

    def text_mask(self) -> torch.Tensor | None:
        """A different number of tokens in each row: the first ones, or with holes and none in row 0."""
        if self.mask == "none":
            return None
        position = torch.arange(self.text_tokens)
        rows = torch.arange(self.batch)[:, None]
        if self.mask == "padded":
            return (position < self.text_tokens * (rows + 1) / (self.batch + 1)).long()
        return (position * 5 + rows) % 3 < rows


def covering_array() -> list[Problem]:
    """Few problems in which every pair of values of any two factors occurs."""

    def pairs(row: tuple[Any, ...]) -> set[Any]:
        return set(itertools.combinations(enumerate(row), 2))

    missing = set[Any]().union(*(pairs(row) for row in itertools.product(*FACTORS)))
    rows: list[tuple[Any, ...]] = []
    while missing:
        rows.append(max(itertools.product(*FACTORS), key=lambda row: len(pairs(row) & missing)))
        missing -= pairs(rows[-1])
    return [Problem(*row) for row in rows]


def make_model(config: str, dtype: torch.dtype = torch.float32) -> QwenImageTransformer2DModel:
    """Two layers whose norms have weights that differ per channel."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = QwenImageTransformer2DModel(
            num_layers=2, num_attention_heads=2, joint_attention_dim=128, **CONFIGS[config]
        )
        for name, parameter in model.named_parameters():
            if "norm" in name and parameter.ndim == 1:
                parameter.data = 1 + 0.3 * torch.randn_like(parameter)
    return model.eval().to(dtype)


@pytest.fixture(scope="module")
def models() -> dict[str, QwenImageTransformer2DModel]:
    return {config: make_model(config) for config in CONFIGS}


@pytest.fixture
def model() -> QwenImageTransformer2DModel:
    return make_model("base")


SMALL = Problem("base", False, 31, 72, 2, "padded")


@torch.no_grad()
def run(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    return model(**inputs)[0]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


def check(kernels: ModuleType, model: Any, problem: Problem) -> None:
    inputs = problem.inputs()
    stock = run(model, inputs)
    patch = kernels.patch_transformer(model)
    try:
        patched = run(model, inputs)
    finally:
        patch.undo()
    assert relative_error(patched, stock) <= 1e-4
    assert torch.equal(run(model, inputs), stock)


@pytest.mark.parametrize("problem", covering_array(), ids=str)
def test_equals_stock(kernels: ModuleType, models: dict[str, Any], problem: Problem):
    check(kernels, models[problem.config], problem)


@pytest.mark.full
@pytest.mark.parametrize("problem", [Problem(*row) for row in itertools.product(*FACTORS)], ids=str)
def test_equals_stock_everywhere(kernels: ModuleType, models: dict[str, Any], problem: Problem):
    check(kernels, models[problem.config], problem)


@pytest.mark.parametrize("config", CONFIGS)
def test_bf16_is_as_accurate_as_stock(kernels: ModuleType, config: str):
    """The error against a float64 run is at most twice that of stock bf16 on the same input."""
    model = make_model(config, dtype=torch.bfloat16)
    inputs = Problem(config, True, 31, 72, 3, "holes").inputs()

    def cast(dtype: torch.dtype) -> dict[str, Any]:
        def one(x: Any) -> Any:
            if isinstance(x, list):
                return [one(item) for item in x]
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                return x.bfloat16().to(dtype)
            return x

        return {name: one(value) for name, value in inputs.items()}

    exact = run(copy.deepcopy(model).double(), cast(torch.float64))
    stock = run(model, cast(torch.bfloat16)).double()
    kernels.patch_transformer(model)
    patched = run(model, cast(torch.bfloat16)).double()
    assert (patched - exact).norm() <= 2 * (stock - exact).norm()
    assert (patched - exact).abs().max() <= 2 * (stock - exact).abs().max()


def test_garbage_in_padding_does_not_reach_the_image(kernels: ModuleType, model: Any):
    """Embeddings of masked tokens, as large as bf16 holds; NaN would be NaN in stock diffusers as well."""
    kernels.patch_transformer(model)
    inputs = SMALL.inputs()
    clean = run(model, inputs)
    padding = inputs["encoder_hidden_states_mask"] == 0
    inputs["encoder_hidden_states"][padding] = 3e38
    assert torch.equal(run(model, inputs), clean)


def test_huge_norm_weights_take_the_online_softmax(kernels: ModuleType, model: Any):
    assert kernels.softmax_for(model)[0] == "bounded"
    for block in model.transformer_blocks:
        block.attn.norm_q.weight.data *= 30
        block.attn.norm_added_k.weight.data *= 30
    softmax, bound = kernels.softmax_for(model)
    patch = kernels.patch_transformer(model)
    assert (patch.softmax, patch.logit_bound) == (softmax, bound)
    assert softmax == "online"
    assert kernels.softmax_from_norm_weights(model.state_dict()) == (softmax, bound)
    patched = run(model, SMALL.inputs())
    patch.undo()
    assert relative_error(patched, run(model, SMALL.inputs())) <= 1e-4


def test_int8_on_request(kernels: ModuleType, model: Any):
    with pytest.raises(ValueError, match=r"the int8 softmax needs a logit_bound of at most 34\.66, got 37"):
        kernels.patch_transformer(model, softmax="int8")
    assert not hasattr(model, "kernel_patch")
    for block in model.transformer_blocks:
        block.attn.norm_q.weight.data /= 2
        block.attn.norm_added_q.weight.data /= 2
    expected = run(model, SMALL.inputs())
    assert kernels.patch_transformer(model, softmax="int8").softmax == "int8"
    # More than rounding in f32, so that it is seen to act.
    assert 1e-5 < relative_error(run(model, SMALL.inputs()), expected) < 1e-3


@pytest.mark.parametrize("implementation", ["reference", "interpret"])
def test_implementation_reaches_every_op(
    kernels: ModuleType, model: Any, implementation: str, monkeypatch: pytest.MonkeyPatch
):
    seen: set[str] = set()
    for name in ("_joint_attention", "_qk_norm_rope", "_layer_norm_modulate", "_rms_norm",
                 "_gated_residual_layer_norm_modulate"):  # fmt: skip
        op = getattr(kernels.ops, name)

        def spy(*arguments: Any, op: Any = op) -> Any:
            seen.add(arguments[-1])
            return op(*arguments)

        monkeypatch.setattr(kernels.ops, name, spy)
    kernels.patch_transformer(model, implementation=implementation)
    run(model, SMALL.inputs())
    assert seen == {implementation}


def test_positional_arguments_and_none(kernels: ModuleType, model: Any):
    inputs = SMALL.inputs()
    stock = run(model, inputs)
    kernels.patch_transformer(model)
    names = ("hidden_states", "encoder_hidden_states", "encoder_hidden_states_mask", "timestep", "img_shapes")
    with torch.no_grad():
        positional = model(*(inputs[name] for name in names), None, {}, return_dict=False)[0]
    assert relative_error(positional, stock) <= 1e-4


def test_models_own_errors_stay(kernels: ModuleType, model: Any):
    kernels.patch_transformer(model)
    inputs = SMALL.inputs()
    inputs["encoder_hidden_states_mask"] = torch.ones(2, 30)
    with pytest.raises(ValueError, match=r"`encoder_hidden_states_mask` shape .* must match"):
        run(model, inputs)
    with pytest.raises(TypeError, match="multiple values"):
        model(*[None] * 11)


# ---- undo, twice, on top of other things


def test_undo_leaves_no_trace(kernels: ModuleType, model: Any):
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    keys = list(model.state_dict())
    patch = kernels.patch_transformer(model)
    assert list(model.state_dict()) == keys
    patch.undo()
    for name, module in model.named_modules():
        assert vars(module).keys() == before[name].keys(), name
        assert not module._buffers, name
    with pytest.raises(ValueError, match="patched forwards were replaced or restored since"):
        patch.undo()


def test_patching_twice_is_refused(kernels: ModuleType, model: Any):
    kernels.patch_transformer(model)
    with pytest.raises(ValueError, match=r"forward of \d+ modules was replaced already.*patch once, and"):
        kernels.patch_transformer(model)


def test_patching_under_a_cache_is_refused(kernels: ModuleType, model: Any):
    model.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    with pytest.raises(ValueError, match=r"replaced already.*transformer\.disable_cache\(\)"):
        kernels.patch_transformer(model)


def test_undo_under_a_cache_is_refused_and_changes_nothing(kernels: ModuleType, model: Any):
    inputs = SMALL.inputs()
    patch = kernels.patch_transformer(model)
    patched = run(model, inputs)
    model.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    with pytest.raises(ValueError, match=r"first remove what was put on top of it"):
        patch.undo()
    model.disable_cache()
    assert torch.equal(run(model, inputs), patched)
    patch.undo()


def _other_model(_: Any) -> Any:
    return torch.nn.Linear(2, 2)


def _meta(model: Any) -> Any:
    return model.to("meta")


def _no_norm(model: Any) -> Any:
    model.transformer_blocks[1].attn.norm_added_k = None
    return model


def _half(model: Any) -> Any:
    return model.half()


def _double(model: Any) -> Any:
    return model.double()


def _offloaded(model: Any) -> Any:
    return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))


def _head_dim_64(_: Any) -> Any:
    return QwenImageTransformer2DModel(
        num_layers=1, num_attention_heads=2, attention_head_dim=64, joint_attention_dim=128,
        axes_dims_rope=(16, 24, 24),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (_other_model, ValueError, r"expected a QwenImageTransformer2DModel, got Linear without"),
        (_meta, ValueError, "the weights are on the meta device; load them before patching"),
        (_no_norm, ValueError, r"expected q and k RMSNorms .* got none for \['norm_added_k'\]"),
        (_half, NotImplementedError, "weights must be bfloat16 or float32, got torch.float16; load the"),
        (_double, NotImplementedError, "weights must be bfloat16 or float32, got torch.float64; load the"),
        (_offloaded, ValueError, r"replaced already.*pipe\.remove_all_hooks\(\)"),
        (_head_dim_64, NotImplementedError, "heads must be 128 wide, as QwenImage's are, got 64"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_what_cannot_be_patched(kernels: ModuleType, model: Any, spoil: Any, error: type, message: str):
    with pytest.raises(error, match=message):
        kernels.patch_transformer(spoil(model))


def test_a_block_called_by_hand_refuses_a_mask(kernels: ModuleType, model: Any):
    kernels.patch_transformer(model)
    x = torch.zeros(1, 16, 256)
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match="takes text_lengths and no encoder_hidden"),
    ):
        model.transformer_blocks[0](x, x, torch.ones(1, 16), torch.zeros(1, 256))


def test_an_unknown_implementation_is_refused(kernels: ModuleType, model: Any):
    with pytest.raises(ValueError, match=r"implementation must be one of .* got 'fast'"):
        kernels.patch_transformer(model, implementation="fast")


def test_text_beyond_the_rotary_table_is_refused(kernels: ModuleType, model: Any):
    kernels.patch_transformer(model)
    with pytest.raises(ValueError, match="text must have at most 4090 tokens beside this image"):
        model.pos_embed([[(1, 12, 12)]], max_txt_seq_len=4091, device=torch.device("cpu"))


def test_pickling_a_patched_model_is_refused(kernels: ModuleType, model: Any):
    patch = kernels.patch_transformer(model)
    with pytest.raises(TypeError, match=r"cannot be pickled.*save_pretrained\(\).*kernel_patch\.undo\(\)"):
        pickle.dumps(model)
    patch.undo()
    pickle.dumps(model)


def test_a_copy_is_patched_too(kernels: ModuleType, model: Any):
    kernels.patch_transformer(model)
    inputs = SMALL.inputs()
    patched = run(model, inputs)
    duplicate = copy.deepcopy(model)
    model.kernel_patch.undo()
    for parameter in model.parameters():
        parameter.data.zero_()
    assert torch.equal(run(duplicate, inputs), patched)
    duplicate.kernel_patch.undo()
    assert relative_error(run(duplicate, inputs), patched) <= 1e-4


# ---- caches, hooks, adapters


def steps(model: Any, problem: Problem, count: int = 6) -> torch.Tensor:
    """The outputs of a few steps that change slowly, for two branches of CFG."""
    outputs: list[torch.Tensor] = []
    for step in range(count):
        for branch, seed in (("cond", 0), ("uncond", 1)):
            inputs = problem.inputs(seed)
            inputs["hidden_states"] += 0.01 * step
            with model.cache_context(branch):
                outputs.append(run(model, inputs))
    return torch.stack(outputs)


@pytest.mark.parametrize(
    "config",
    [
        FirstBlockCacheConfig(threshold=0.1),
        MagCacheConfig(num_inference_steps=6, mag_ratios=torch.ones(6), retention_ratio=0.2),
        TaylorSeerCacheConfig(cache_interval=2, disable_cache_before_step=2),
    ],
    ids=lambda config: type(config).__name__,
)
def test_caches(kernels: ModuleType, config: Any):
    stock, patched = make_model("base"), make_model("base")
    kernels.patch_transformer(patched)
    uncached = steps(stock, SMALL)
    for model in (stock, patched):
        model.enable_cache(copy.deepcopy(config))
    expected = steps(stock, SMALL)
    assert not torch.equal(expected, uncached)  # the cache was in use
    assert relative_error(steps(patched, SMALL), expected) <= 1e-4


def test_sequential_offload(kernels: ModuleType, model: Any):
    inputs = SMALL.inputs()
    patch = kernels.patch_transformer(model)
    patched = run(model, inputs)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.transformer_blocks[0].attn.norm_q.weight.device.type == "meta"
    assert torch.equal(run(model, inputs), patched)
    remove_hook_from_module(model, recurse=True)
    patch.undo()


@pytest.mark.parametrize("level", ["block_level", "leaf_level"])
def test_group_offload(kernels: ModuleType, model: Any, level: str):
    inputs = SMALL.inputs()
    kernels.patch_transformer(model)
    patched = run(model, inputs)
    cpu = torch.device("cpu")
    blocks = {"num_blocks_per_group": 1} if level == "block_level" else {}
    model.enable_group_offload(onload_device=cpu, offload_device=cpu, offload_type=level, **blocks)
    assert torch.equal(run(model, inputs), patched)


def test_layerwise_casting(kernels: ModuleType):
    stock, patched = make_model("base"), make_model("base")
    kernels.patch_transformer(patched)
    for model in (stock, patched):
        model.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32)
    inputs = SMALL.inputs()
    assert relative_error(run(patched, inputs), run(stock, inputs)) <= 1e-4


LORA_TARGETS = ["to_q", "to_k", "add_v_proj", "to_out.0", "img_mod.1", "net.0.proj", "net.2"]


@pytest.mark.parametrize("patch_first", [True, False])
def test_lora_and_its_scale_in_attention_kwargs(kernels: ModuleType, patch_first: bool):
    targets = LORA_TARGETS
    outputs: list[torch.Tensor] = []
    for patched in (False, True):
        model = make_model("base")
        if patched and patch_first:
            kernels.patch_transformer(model)
        with torch.random.fork_rng():
            torch.manual_seed(1)
            model.add_adapter(LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
        if patched and not patch_first:
            kernels.patch_transformer(model)
        inputs = SMALL.inputs()
        outputs += [run(model, inputs | {"attention_kwargs": {"scale": s}}) for s in (0.5, 1.0)]
        model.disable_adapters()
        outputs.append(run(model, inputs))
    for expected, actual in zip(outputs[:3], outputs[3:], strict=True):
        assert relative_error(actual, expected) <= 1e-5
    assert relative_error(outputs[0], outputs[1]) > 1e-3


@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute")
@pytest.mark.parametrize("patch_first", [True, False])
def test_loras_loaded_weighted_fused_and_unloaded(kernels: ModuleType, tmp_path: Path, patch_first: bool):
    """By diffusers' own calls, two adapters in files: on the kernels as on the stock model."""
    for seed, name in enumerate(("first", "second")):
        maker = make_model("base")
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            maker.add_adapter(LoraConfig(r=4, target_modules=LORA_TARGETS, init_lora_weights=False))
        maker.save_lora_adapter(tmp_path / name)
    inputs = SMALL.inputs()

    def outputs(patched: bool) -> list[torch.Tensor]:
        model: Any = make_model("base")
        plain = run(model, inputs)
        patch = kernels.patch_transformer(model) if patched and patch_first else None
        for name in ("first", "second"):
            model.load_lora_adapter(
                tmp_path / name,
                prefix=None,
                adapter_name=name,
                weight_name="pytorch_lora_weights.safetensors",
            )
        if patched and not patch_first:
            patch = kernels.patch_transformer(model)
        results: list[torch.Tensor] = []
        for weights in ([1.0, 0.0], [0.3, 0.7]):
            model.set_adapters(["first", "second"], weights)
            results.append(run(model, inputs))
        model.fuse_lora()
        results.append(run(model, inputs))
        model.unfuse_lora()
        model.unload_lora()
        results.append(run(model, inputs))
        if patch is not None:
            patch.undo()
        assert relative_error(run(model, inputs), plain) <= 1e-5
        return results

    stock, ours = outputs(False), outputs(True)
    for expected, actual in zip(stock, ours, strict=True):
        assert relative_error(actual, expected) <= 1e-5
    assert min(relative_error(a, b) for a, b in zip(stock[:2], stock[1:2] + stock[3:], strict=True)) > 1e-3


def test_training_is_refused(kernels: ModuleType, model: Any):
    kernels.patch_transformer(model)
    with pytest.raises(NotImplementedError, match=r"no backward pass.*torch\.no_grad"):
        model(**SMALL.inputs())


# ---- compilation


@torch.no_grad()
def test_one_graph_without_complex_numbers_for_all_prompts(kernels: ModuleType):
    model = make_model("zero_cond_t")
    kernels.patch_transformer(model)
    problem = Problem("zero_cond_t", True, 64, 72, 2, "padded")
    counter = CompileCounterWithBackend("aot_eager")
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return counter(graph, example_inputs)

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for seed in range(10):
        inputs = problem.inputs(seed)
        lengths = torch.randint(1, 65, (2, 1), generator=torch.Generator().manual_seed(seed))
        inputs["encoder_hidden_states_mask"] = torch.arange(64) < lengths
        torch.testing.assert_close(compiled(**inputs)[0], run(model, inputs))
    assert counter.frame_count == 1
    (graph,) = graphs
    values = [node.meta.get("example_value") for node in graph.graph.nodes]
    assert not any(isinstance(v, torch.Tensor) and v.is_complex() for v in values)


@torch.no_grad()
def test_one_block_program_for_all_blocks(kernels: ModuleType):
    torch.compiler.reset()
    model = make_model("base")
    kernels.patch_transformer(model)
    expected = run(model, SMALL.inputs())
    counter = CompileCounterWithBackend("aot_eager")
    model.compile_repeated_blocks(fullgraph=True, dynamic=False, backend=counter)
    for _ in range(2):
        torch.testing.assert_close(run(model, SMALL.inputs()), expected)
    assert counter.frame_count == 1


@torch.no_grad()
@pytest.mark.parametrize("dynamic", [None, False])
def test_compiles_again_for_other_shapes(kernels: ModuleType, dynamic: bool | None):
    """A second text length or image size must not end fullgraph: torch then makes sizes symbols."""
    torch.compiler.reset()
    model = make_model("base")
    kernels.patch_transformer(model)
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for text_tokens, image_tokens in ((12, 16), (20, 16), (20, 72)):
        inputs = Problem("base", False, text_tokens, image_tokens, 2, "padded").inputs()
        torch.testing.assert_close(compiled(**inputs)[0], run(model, inputs))
