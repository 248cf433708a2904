"""The pipeline on torch-tpu, on the emulated device: right, compiled once, and quiet."""

import logging
from itertools import pairwise
from typing import Any, Literal

import pytest
import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel

from emulated_process import EmulatedProcess
from qwenimage_tpu import compilation
from qwenimage_tpu.compilation import (
    enable_tpu_compile,
    static_shapes,
    tpu_warmup,
    use_static_shapes,
    watch_compilations,
)
from qwenimage_tpu.device_scheduler import DeviceFlowMatchScheduler, to_device_scheduler
from qwenimage_tpu.emulator import Counts, read_counts
from qwenimage_tpu.generate import generate
from qwenimage_tpu.kernel_loader import load_kernels
from qwenimage_tpu.lab.bench_calls import count_steps
from qwenimage_tpu.loading import move_pipeline
from qwenimage_tpu.options import GenerateOptions
from qwenimage_tpu.tiny import tiny_pipeline

pytestmark = pytest.mark.xdist_group("emulated TPU")

Mode = Literal["blocks", "full"] | None
TOLERANCE = 1e-4
SIZE: dict[str, Any] = {"height": 64, "width": 64}
PROMPTS = ("a red fox", "a much longer prompt about a blue whale in the deep sea")


def error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result - expected).abs().max() / expected.abs().max())


def options(**changes: Any) -> GenerateOptions:
    small: dict[str, Any] = {"prompts": PROMPTS, "steps": 2, "kernels": False}
    return GenerateOptions(**(small | SIZE | changes))


def paint_on_tpu(chosen: GenerateOptions, text_encoder_device: str) -> torch.Tensor:
    pipe = move_pipeline(tiny_pipeline(), "tpu", text_encoder_device)
    pipe.set_progress_bar_config(disable=True)
    return generate(pipe, chosen).latents


@pytest.fixture(scope="module")
def on_cpu(pipe: QwenImagePipeline) -> torch.Tensor:
    return generate(pipe, options()).latents


@pytest.mark.parametrize(
    ("mode", "kernels", "text_encoder_device"),
    [
        (None, False, "tpu"),
        (None, True, "cpu"),
        ("blocks", True, "tpu"),
        ("full", True, "cpu"),
        ("blocks", False, "cpu"),
    ],
)
def test_two_prompts_of_different_lengths_are_as_on_the_cpu(
    emulated_tpu: EmulatedProcess, on_cpu: torch.Tensor, mode: Mode, kernels: bool, text_encoder_device: str
):
    latents = emulated_tpu.run(paint_on_tpu, options(compile=mode, kernels=kernels), text_encoder_device)
    assert error(latents, on_cpu) <= TOLERANCE


def edit_transformer() -> Any:
    """The Edit models' kind: a second image beside the first, modulated as if it had no noise."""
    torch.manual_seed(3)
    return QwenImageTransformer2DModel(
        num_layers=2, num_attention_heads=2, attention_head_dim=128, joint_attention_dim=128, zero_cond_t=True
    ).eval()


def edit_inputs() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(4)
    mask = torch.zeros(2, 32, dtype=torch.int64)
    mask[0, :7], mask[1, :20] = 1, 1
    return {
        "hidden_states": torch.randn((2, 16 + 24, 64), generator=generator),
        "timestep": torch.tensor([0.7, 0.2]),
        "encoder_hidden_states": torch.randn((2, 32, 128), generator=generator),
        "encoder_hidden_states_mask": mask,
    }


EDIT_SHAPES = [[(1, 4, 4), (1, 4, 6)]] * 2


@torch.no_grad()
def edit_on_tpu(mode: Mode) -> torch.Tensor:
    transformer = edit_transformer()
    load_kernels().module.patch_transformer(transformer, implementation="interpret")
    transformer.to("tpu")
    arguments: dict[str, Any] = {"backend": "tpu", "fullgraph": True, "dynamic": False}
    if mode == "blocks":
        transformer.compile_repeated_blocks(**arguments)
    elif mode == "full":
        transformer.compile(**arguments)
    inputs = {name: value.to("tpu") for name, value in edit_inputs().items()}
    return transformer(**inputs, img_shapes=EDIT_SHAPES, return_dict=False)[0].cpu()


@pytest.mark.parametrize("mode", [None, "blocks", "full"])
def test_an_edit_model_with_two_images(emulated_tpu: EmulatedProcess, mode: Mode):
    with torch.no_grad():
        expected = edit_transformer()(**edit_inputs(), img_shapes=EDIT_SHAPES, return_dict=False)[0]
    assert error(emulated_tpu.run(edit_on_tpu, mode), expected) <= TOLERANCE


def ready_pipeline(mode: Literal["blocks", "full"]) -> Any:
    """As the guide for a TPU VM says: move, patch, make shapes static, compile."""
    pipe = move_pipeline(tiny_pipeline(), "tpu", "tpu")
    pipe.set_progress_bar_config(disable=True)
    load_kernels().module.patch_transformer(pipe.transformer, implementation="interpret")
    use_static_shapes(pipe, text_buckets=(128,))
    enable_tpu_compile(pipe, mode=mode)
    return pipe


def count_twenty_prompts(mode: Literal["blocks", "full"]) -> tuple[Counts, int]:
    pipe = ready_pipeline(mode)
    tpu_warmup(pipe, "warm", negative_prompt=" ", **SIZE)
    before = read_counts()
    with watch_compilations() as compilations:
        for index in range(20):
            pipe(
                "x" * (6 * index + 1),
                negative_prompt="y" * index,
                true_cfg_scale=1.5 + index,
                num_inference_steps=2 + index % 2,
                generator=torch.Generator().manual_seed(index),
                **SIZE,
            )
    return read_counts() - before, compilations.programs


@pytest.mark.parametrize("mode", ["blocks", "full"])
def test_nothing_compiles_after_the_warm_up(emulated_tpu: EmulatedProcess, mode: Mode):
    counts, programs = emulated_tpu.run(count_twenty_prompts, mode)
    assert counts.compilations == counts.cache_loads == programs == 0
    assert counts.executions > 0


def count_a_new_size() -> tuple[list[int], list[str]]:
    """Compilations of two calls at the size that was warmed up, and of two at another; and the warnings."""
    pipe = ready_pipeline("blocks")
    call: dict[str, Any] = {"negative_prompt": " ", "num_inference_steps": 2}
    tpu_warmup(pipe, "warm", **call, **SIZE)
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    compilation.logger.addHandler(handler)
    counts = [read_counts()]
    other = {"height": 80, "width": 64}
    for size in (SIZE, SIZE, other, other):
        pipe("a red fox", **call, **size)
        counts.append(read_counts())
    compilation.logger.removeHandler(handler)
    return [(after - before).compilations for before, after in pairwise(counts)], records


def test_a_new_size_compiles_once_and_says_so(emulated_tpu: EmulatedProcess):
    (first, second, new, again), warnings = emulated_tpu.run(count_a_new_size)
    assert (first, second, again) == (0, 0, 0)
    assert new > 0
    assert warnings
    assert all(w.startswith("compiling after the warm-up, which takes") for w in warnings)


def count_the_loop(steps: int) -> list[Counts]:
    pipe = ready_pipeline("blocks")
    call: dict[str, Any] = {"negative_prompt": " ", "num_inference_steps": steps} | SIZE
    tpu_warmup(pipe, "warm", **call)
    return count_steps(pipe, lambda **arguments: pipe("a red fox", **call, **arguments))


def test_the_denoising_loop_is_quiet(emulated_tpu: EmulatedProcess):
    counts = emulated_tpu.run(count_the_loop, 4)
    assert len(counts) == 4
    assert [step.device_to_host for step in counts] == [0] * 4
    assert max(step.host_to_device for step in counts) <= 1
    assert [step.compilations for step in counts] == [0] * 4


def compile_blocks(layers: int) -> tuple[int, float]:
    """Programs compiled in one call of a transformer of one head, and its difference to the CPU."""
    torch.manual_seed(5)
    transformer: Any = QwenImageTransformer2DModel(
        num_layers=layers, num_attention_heads=1, attention_head_dim=128, joint_attention_dim=128
    ).eval()
    inputs = {name: value[:1] for name, value in edit_inputs().items()}
    shapes = EDIT_SHAPES[:1]
    with torch.no_grad():
        expected = transformer(**inputs, img_shapes=shapes, return_dict=False)[0]
        load_kernels().module.patch_transformer(transformer, implementation="interpret")
        transformer.to("tpu").compile_repeated_blocks(backend="tpu", fullgraph=True, dynamic=False)
        on_tpu = {name: value.to("tpu") for name, value in inputs.items()}
        with watch_compilations() as compilations:
            result = transformer(**on_tpu, img_shapes=shapes, return_dict=False)[0].cpu()
    return compilations.programs, error(result, expected)


def test_sixty_blocks_are_one_program(emulated_tpu: EmulatedProcess):
    programs, difference = emulated_tpu.run(compile_blocks, 60)
    assert programs == 1
    assert difference <= TOLERANCE


def test_the_device_schedulers_values_are_diffusers_own(pipe: QwenImagePipeline):
    scheduler = to_device_scheduler(pipe.scheduler)
    assert isinstance(scheduler, DeviceFlowMatchScheduler)
    arguments: dict[str, Any] = {"sigmas": [1.0, 0.6, 0.2], "mu": 0.7}
    pipe.scheduler.set_timesteps(device="cpu", **arguments)
    scheduler.set_timesteps(device="cpu", **arguments)
    assert torch.equal(torch.stack(scheduler.timesteps), pipe.scheduler.timesteps)
    assert torch.equal(torch.stack(scheduler.sigmas), pipe.scheduler.sigmas)


def test_other_schedulers_are_refused():
    with pytest.raises(NotImplementedError, match=r"a FlowMatchEulerDiscreteScheduler, but is a object"):
        to_device_scheduler(object())


@pytest.mark.parametrize("mask", [True, False])
def test_embeddings_by_hand_are_guided_too(pipe: QwenImagePipeline, mask: bool):
    """With a mask or without, and with an empty negative prompt: as stock diffusers has it."""
    embeds, _ = pipe.encode_prompt(["a red fox"])
    negative, _ = pipe.encode_prompt([""])
    masks: dict[str, Any] = {}
    if mask:
        masks["prompt_embeds_mask"] = torch.ones(embeds.shape[:2], dtype=torch.int64)
        masks["negative_prompt_embeds_mask"] = torch.ones(negative.shape[:2], dtype=torch.int64)

    def paint(**arguments: Any) -> torch.Tensor:
        call: dict[str, Any] = {"num_inference_steps": 2, "output_type": "latent"} | SIZE | arguments
        output: Any = pipe(generator=torch.Generator().manual_seed(0), **call)
        return output.images

    by_hand: dict[str, Any] = {"prompt_embeds": embeds, "negative_prompt_embeds": negative} | masks
    expected = paint(prompt="a red fox", negative_prompt="")
    with static_shapes(pipe):
        assert error(paint(**by_hand), expected) <= TOLERANCE
        assert error(paint(prompt="a red fox", negative_prompt=""), expected) <= TOLERANCE
        unguided = paint(prompt="a red fox", negative_prompt="", true_cfg_scale=1.0)
    assert error(unguided, expected) > 100 * TOLERANCE


def test_what_cannot_be_compiled_is_named(pipe: QwenImagePipeline):
    with pytest.raises(ValueError, match=r"\['unet'\] are no models of this pipeline; choose from"):
        enable_tpu_compile(pipe, ["unet"])
    with pytest.raises(ValueError, match=r"mode must be one of .*, but is 'all'"):
        enable_tpu_compile(pipe, mode="all")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("buckets", [(), (128, 0), (7.5,), (True,), 128, "abc", None])
def test_bad_buckets(pipe: QwenImagePipeline, buckets: Any):
    with pytest.raises(ValueError, match="text buckets must be one or more positive lengths, but are"):
        use_static_shapes(pipe, buckets)
