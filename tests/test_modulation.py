"""The modulation's table, in one process: a transformer that looks it up says what it said before."""

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImagePipeline, QwenImageTransformer2DModel

from emulated_process import EmulatedProcess
from qwenimage_tpu.emulator import read_counts
from qwenimage_tpu.generate import attach_kernels, denoise, encode_text, generate, prepared
from qwenimage_tpu.kernel_loader import load_kernels
from qwenimage_tpu.loading import load_pipeline, move_pipeline
from qwenimage_tpu.modulation import ModulationTable, tabulated_modulation
from qwenimage_tpu.options import SCHEDULE_ROWS, GenerateOptions

GRID, TEXT_TOKENS = (4, 6), 12


def call(transformer: Any, *timesteps: float) -> torch.Tensor:
    """On inputs from a seed, with the pipeline's own arithmetic on the scheduler's timesteps."""
    generator = torch.Generator().manual_seed(0)
    rows = len(timesteps)
    with torch.no_grad():
        return transformer(
            hidden_states=torch.randn(rows, GRID[0] * GRID[1], 64, generator=generator),
            encoder_hidden_states=torch.randn(rows, TEXT_TOKENS, 128, generator=generator),
            encoder_hidden_states_mask=torch.ones(rows, TEXT_TOKENS, dtype=torch.bool),
            timestep=torch.tensor(timesteps).to(transformer.dtype) / 1000,
            img_shapes=[[(1, *GRID)]] * rows,
            return_dict=False,
        )[0]


def small(**config: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return QwenImageTransformer2DModel(
            num_layers=2, num_attention_heads=2, joint_attention_dim=128, **config
        )


def scalars(*timesteps: float) -> list[torch.Tensor]:
    return list(torch.tensor(timesteps))


@pytest.mark.parametrize("zero_cond_t", [False, True])
def test_looked_up_is_computed(zero_cond_t: bool):
    transformer = small(zero_cond_t=zero_cond_t)
    expected = call(transformer, 1000.0, 321.5)
    table = ModulationTable(transformer)
    table.fill(scalars(1000.0, 700.0, 321.5))
    torch.testing.assert_close(call(transformer, 1000.0, 321.5), expected, atol=1e-6, rtol=1e-5)


def test_patched_with_kernels_before_and_after(pipe: QwenImagePipeline):
    duplicate = copy.deepcopy(pipe.transformer)
    expected = call(duplicate, 500.0)
    parts: Any = pipe.components | {"transformer": duplicate}
    copied, kernels = QwenImagePipeline(**parts), load_kernels()
    patch = attach_kernels(copied, kernels)
    table = ModulationTable(duplicate)
    table.fill(scalars(500.0))
    torch.testing.assert_close(call(duplicate, 500.0), expected, atol=1e-4, rtol=1e-4)
    patch.undo()
    patch = attach_kernels(copied, kernels)
    torch.testing.assert_close(call(duplicate, 500.0), expected, atol=1e-4, rtol=1e-4)
    table.undo()
    patch.undo()
    assert torch.equal(call(duplicate, 500.0), expected)


@pytest.mark.parametrize("steps", [1, SCHEDULE_ROWS - 2, SCHEDULE_ROWS - 1, SCHEDULE_ROWS])
def test_an_unknown_timestep_is_not_a_number(steps: int):
    transformer = small()
    table = ModulationTable(transformer)
    known = [float(step + 1) for step in range(steps)]
    table.fill(scalars(*known))
    assert len(transformer.norm_out.silu.table) % SCHEDULE_ROWS == 0
    found = call(transformer, known[-1], 999.5)
    assert found[0].isfinite().all()
    assert found[1].isnan().all()


def test_undone_it_is_the_same_model():
    transformer = small()
    names, expected = set(transformer.state_dict()), call(transformer, 250.0)
    table = ModulationTable(transformer)
    table.fill(scalars(100.0))
    assert set(transformer.state_dict()) == names
    table.undo()
    assert torch.equal(call(transformer, 250.0), expected)
    assert not [name for name, _ in transformer.named_buffers() if name.endswith("table")]
    ModulationTable(transformer).undo()  # never filled


def test_a_scheduler_fills_the_table_again():
    transformer = small().to(torch.bfloat16)
    scheduler: Any = FlowMatchEulerDiscreteScheduler()
    pipe = SimpleNamespace(transformer=transformer, scheduler=scheduler)
    with tabulated_modulation(pipe):
        for steps in (3, 5):
            scheduler.set_timesteps(steps)
            keys = transformer.time_text_embed.table
            assert torch.equal(keys[1 : steps + 1], scheduler.timesteps.to(torch.bfloat16) / 1000)
            assert keys[steps + 1 :].isnan().all()
    scheduler.set_timesteps(7)
    assert not hasattr(transformer.time_text_embed, "table")


def test_layered_models_are_refused():
    with pytest.raises(NotImplementedError, match="use_additional_t_cond"):
        ModulationTable(small(use_additional_t_cond=True))


def paint_with_a_table() -> tuple[torch.Tensor, torch.Tensor, int]:
    """Latents from the `tpu` device and from stock diffusers on the CPU; programs for other steps."""
    options = GenerateOptions(
        prompts=("a red star",), true_cfg_scale=3.0, height=96, width=96, steps=3, compile="blocks"
    )
    stock = generate(
        load_pipeline(None, demo=True, dtype=torch.float32), replace(options, kernels=False, compile=None)
    )
    pipe = move_pipeline(load_pipeline(None, demo=True, dtype=torch.float32), "tpu", "cpu")
    with prepared(pipe, options):
        text = encode_text(pipe, options)
        latents = denoise(pipe, options, text).cpu()
        before = read_counts()
        denoise(pipe, replace(options, steps=5), text)
        counts = read_counts() - before
    return latents, stock.latents, counts.compilations + counts.cache_loads


@pytest.mark.xdist_group("emulated TPU")
def test_compiled_by_torch_tpu_with_kernels(emulated_tpu: EmulatedProcess):
    found, expected, compiled = emulated_tpu.run(paint_with_a_table)
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    assert compiled == 0
