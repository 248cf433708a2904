"""The JAX engine on virtual CPU devices: against diffusers' torch model, with the same weights."""

import json
import os
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from qwenimage_tpu import generate as torch_engine
from qwenimage_tpu.cli import app
from qwenimage_tpu.options import GenerateOptions
from qwenimage_tpu.spmd import engine
from qwenimage_tpu.spmd.config import DiTConfig, parameter_shapes
from qwenimage_tpu.spmd.dit import Execution, forward, modulation
from qwenimage_tpu.spmd.placement import TABLES, RuleTable, make_mesh, partition_specs, shardings
from qwenimage_tpu.spmd.rope import rope_tables
from qwenimage_tpu.spmd.weights import Checkpoint, load_parameters

TOLERANCE = 1e-4
GRID, TEXT_TOKENS = (6, 8), 20
LENGTHS = [20, 7]
TIMESTEP = 0.7


def mesh_of(data: int, model: int) -> jax.sharding.Mesh:
    return make_mesh(jax.devices()[: data * model], data, model)


def error(result: Any, expected: Any) -> float:
    result, expected = np.asarray(result), np.asarray(expected)
    return float(np.abs(result - expected).max() / np.abs(expected).max())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformer of four heads, which four chips can share."""
    path = tmp_path_factory.mktemp("transformer")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = QwenImageTransformer2DModel(num_layers=2, num_attention_heads=4, joint_attention_dim=128)
    for name, weight in model.named_parameters():
        if ".norm_" in name or name == "txt_norm.weight":
            weight.data.mul_(1 + 0.2 * torch.randn_like(weight))
    model.save_pretrained(path, max_shard_size="20MB")
    return path


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    image = torch.randn(2, GRID[0] * GRID[1], 64, generator=generator)
    return image, torch.randn(2, TEXT_TOKENS, 128, generator=generator)


@pytest.fixture(scope="module")
def expected(folder: Path) -> np.ndarray:
    model: Any = QwenImageTransformer2DModel.from_pretrained(folder)
    image, text = inputs()
    arguments: dict[str, Any] = {
        "hidden_states": image,
        "encoder_hidden_states": text,
        "encoder_hidden_states_mask": torch.arange(TEXT_TOKENS)[None] < torch.tensor(LENGTHS)[:, None],
        "timestep": torch.full((2,), TIMESTEP),
        "img_shapes": [[(1, *GRID)]] * 2,
    }
    with torch.no_grad():
        return model(**arguments, return_dict=False)[0].numpy()


MESHES = [
    *[((2, 4), table) for table in TABLES],
    ((8, 1), "sharded"),
    *[
        pytest.param(shape, table, marks=pytest.mark.full)
        for shape in ((1, 4), (4, 2), (1, 1))
        for table in TABLES
    ],
]


@pytest.mark.parametrize(("shape", "table"), MESHES)
def test_the_velocity_is_diffusers(
    folder: Path, expected: np.ndarray, table: RuleTable, shape: tuple[int, int]
):
    mesh, config = mesh_of(*shape), DiTConfig.from_folder(folder)
    specs = partition_specs(parameter_shapes(config), table, shape[1])
    parameters = load_parameters(Checkpoint(folder), config, shardings(specs, mesh), np.float32)
    execution = Execution.of(mesh, "bounded", 2)
    image, text = (jnp.asarray(x.numpy()) for x in inputs())
    rope = rope_tables(config.rope_axes, *GRID, TEXT_TOKENS)

    @jax.jit
    def run(parameters: Any, timesteps: Any) -> jax.Array:
        step = modulation(parameters, timesteps, execution).at(1)
        return forward(parameters, image, text, jnp.asarray(LENGTHS), rope, step, execution)

    assert error(run(parameters, jnp.asarray([0.1, TIMESTEP])), expected) < TOLERANCE


def test_each_device_holds_its_shard(folder: Path):
    config = DiTConfig.from_folder(folder)
    shapes = parameter_shapes(config)
    specs = partition_specs(shapes, "sharded", 4)
    parameters = load_parameters(Checkpoint(folder), config, shardings(specs, mesh_of(2, 4)), np.float32)
    held = {name: value.addressable_shards[0].data.shape for name, value in parameters.items()}
    channels = config.channels
    assert held["blocks.attn.to_q.weight"] == (2, channels // 4, channels)
    assert held["blocks.attn.to_out.0.weight"] == (2, channels, channels // 4)
    assert held["blocks.attn.to_out.0.bias"] == (2, channels)
    assert held["blocks.img_mod.1.weight"] == (2, 6 * channels // 4, channels)
    assert held["norm_out.linear.weight"] == shapes["norm_out.linear.weight"]
    # diffusers' model has these parameters and no others.
    saved: Any = QwenImageTransformer2DModel.from_pretrained(folder)
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == saved.num_parameters()


def without_transformer(pipe: QwenImagePipeline) -> QwenImagePipeline:
    parts: Any = pipe.components | {"transformer": None}
    return QwenImagePipeline(**parts)


# One picture's guidance over two chips, two pictures over four, a batch that does not divide.
@pytest.mark.parametrize(
    ("shape", "scale"), [((1, 1), 4.0), ((2, 1), 4.0), ((4, 2), 4.0), ((1, 2), 1.0), ((4, 1), 1.0)]
)
def test_pictures_are_the_torch_pipelines(
    pipe: QwenImagePipeline, tmp_path: Path, shape: tuple[int, int], scale: float
):
    options = GenerateOptions(
        prompts=("a red fox", "a much longer prompt about a blue whale in the deep sea"),
        true_cfg_scale=scale,
        height=64,
        width=96,
        steps=3,
        kernels=False,
    )
    torch_result = torch_engine.generate(pipe, options)
    pipe.transformer.save_pretrained(tmp_path)
    transformer = engine.SpmdTransformer(tmp_path, mesh_of(*shape), np.float32)
    result = engine.generate(engine.JaxEngine(without_transformer(pipe), transformer), options)
    assert error(result.latents, torch_result.latents) < TOLERANCE
    differences = [
        np.abs(np.asarray(image, np.int16) - np.asarray(other, np.int16)).max()
        for image, other in zip(result.images, torch_result.images, strict=True)
    ]
    assert max(differences) <= 1


def test_another_number_of_steps_compiles_nothing(pipe: QwenImagePipeline, tmp_path: Path):
    pipe.transformer.save_pretrained(tmp_path)
    transformer = engine.SpmdTransformer(tmp_path, mesh_of(1, 1), np.float32)
    small = engine.JaxEngine(without_transformer(pipe), transformer)

    def run(prompt: str, steps: int) -> None:
        engine.generate(
            small, GenerateOptions(prompts=(prompt,), height=64, width=64, steps=steps, text_bucket=128)
        )

    run("a fox", 2)
    before = engine.compiled_programs()
    run("two blue whales", 3)
    assert engine.compiled_programs() == before


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"attention_head_dim": 64}, NotImplementedError, "heads must be 128 wide, .* but are 64"),
        ({"zero_cond_t": True}, NotImplementedError, r"has \['zero_cond_t'\]; use --engine torch"),
        ({"use_layer3d_rope": True}, NotImplementedError, "use_layer3d_rope"),
    ],
)
def test_models_that_are_not_run(folder: Path, change: dict[str, Any], kind: type[Exception], message: str):
    config: Any = json.loads((folder / "config.json").read_text()) | change
    with pytest.raises(kind, match=message):
        DiTConfig.from_diffusers(config)


def test_meshes_that_do_not_fit(folder: Path):
    with pytest.raises(ValueError, match="a mesh of 3 x 2 needs 6 devices, but there are 8"):
        make_mesh(jax.devices(), 3, 2)
    with pytest.raises(ValueError, match="model axis must divide the 4 heads, but is 8"):
        engine.SpmdTransformer(folder, mesh_of(1, 8), np.float32)


def test_checkpoints_that_do_not_fit(folder: Path, tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"lacks .*diffusion_pytorch_model\.safetensors"):
        Checkpoint(tmp_path)
    weights: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        weights |= load_file(file)
    config = DiTConfig.from_folder(folder)
    placed = shardings(partition_specs(parameter_shapes(config), "stock", 1), mesh_of(1, 1))
    file = tmp_path / "diffusion_pytorch_model.safetensors"
    removed = weights.pop("img_in.bias")
    save_file(weights, file)
    with pytest.raises(ValueError, match=r"no tensor img_in\.bias"):
        load_parameters(Checkpoint(tmp_path), config, placed, np.float32)
    save_file(weights | {"img_in.bias": removed[:-1].clone()}, file)
    with pytest.raises(ValueError, match=r"img_in\.bias must have the shape \(512,\).*but has \(511,\)"):
        load_parameters(Checkpoint(tmp_path), config, placed, np.float32)


def test_the_command_paints_the_same_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # The command adds to it, in this process too late.
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    arguments = ["--demo", "--engine", "jax", "--mesh", "2,2", "--steps", "3", "--compare"]
    result = CliRunner().invoke(app, ["generate", *arguments, "-o", str(tmp_path / "star.png"), "a red star"])
    assert result.exit_code == 0, result.output
    assert "variant jax on a mesh of 2 x 2" in result.stdout
    latents = re.search(r"latents by max\|a-b\|/max\|b\| = (\S+)", result.stdout)
    assert latents is not None
    assert float(latents[1]) < TOLERANCE
    assert (tmp_path / "star.png").is_file()
