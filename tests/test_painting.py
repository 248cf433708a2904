"""The model that `--demo` loads paints what its prompt says."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import QwenImagePipeline
from safetensors import safe_open

from emulated_process import EmulatedProcess
from qwenimage_tpu.loading import DEMO_MODEL, load_pipeline, move_pipeline
from qwenimage_tpu.painting.captions import plain_caption
from qwenimage_tpu.painting.drawings import unseen_scenes
from qwenimage_tpu.painting.evaluation import (
    BATCH,
    SETTINGS,
    Setting,
    mean_difference,
    negative_effect,
    paint,
    score_setting,
)
from qwenimage_tpu.painting.scoring import Score, score_pictures

SIZE_LIMIT = 30_000_000
COLOUR, SHAPE = 0.95, 0.85
# Between settings: a picture may go either way by rounding.
SETTINGS_DIFFER_BY = 0.02
STOCK = Setting(kernels=False, prompts=BATCH)
# The emulated device takes ten seconds a picture.
ON_TPU = 6


@pytest.fixture(scope="module")
def painter() -> QwenImagePipeline:
    return load_pipeline(None, demo=True, dtype=torch.float32)


def files(pattern: str) -> list[Path]:
    return sorted(DEMO_MODEL.rglob(pattern))


def test_the_folder_is_small_and_complete():
    assert sum(path.stat().st_size for path in files("*") if path.is_file()) <= SIZE_LIMIT
    assert (DEMO_MODEL / "README.md").is_file()


def test_all_weights_are_bfloat16_and_the_transformers_are_sharded():
    for path in files("*.safetensors"):
        with safe_open(path, framework="pt") as weights:
            names = weights.keys()
            assert {weights.get_slice(name).get_dtype() for name in names} == {"BF16"}
    assert len(files("transformer/*.safetensors")) > 1
    assert len(files("transformer/*.safetensors.index.json")) == 1


def test_unseen_prompts_with_kernels(painter: QwenImagePipeline):
    score = score_setting(painter, Setting(prompts=BATCH))
    assert score.colour >= COLOUR
    assert score.shape >= SHAPE


def test_guidance_raises_the_score(painter: QwenImagePipeline):
    scenes = unseen_scenes(BATCH)
    prompts = [plain_caption(scene) for scene in scenes]
    guided, free = (paint(painter, prompts, replace(STOCK, true_cfg_scale=scale)) for scale in (4.0, 1.0))
    assert mean_difference(guided, free) > 1
    better, worse = score_pictures(guided, scenes), score_pictures(free, scenes)
    assert better.colour + better.shape > worse.colour + worse.shape


def test_a_negative_prompt_lowers_a_colours_share(painter: QwenImagePipeline):
    effect = negative_effect(painter, STOCK)
    assert effect.with_it < 0.5 * effect.without


def score_on_tpu(prompts: int) -> Score:
    pipe = move_pipeline(load_pipeline(None, demo=True, dtype=torch.float32), "tpu", "cpu")
    return score_setting(pipe, Setting(prompts=prompts, compile="blocks"))


@pytest.mark.xdist_group("emulated TPU")
def test_unseen_prompts_compiled_on_the_emulated_tpu(
    painter: QwenImagePipeline, emulated_tpu: EmulatedProcess
):
    score = emulated_tpu.run(score_on_tpu, ON_TPU)
    assert score == score_setting(painter, replace(STOCK, prompts=ON_TPU))


@pytest.fixture(scope="module")
def score_with_kernels(painter: QwenImagePipeline) -> Score:
    return score_setting(painter, Setting())


@pytest.mark.full
@pytest.mark.parametrize("name", SETTINGS)
def test_a_hundred_unseen_prompts_in_every_setting(score_with_kernels: Score, name: str):
    dtype, setting = SETTINGS[name]
    check_alike(score_setting(load_pipeline(None, demo=True, dtype=dtype), setting), score_with_kernels)


@pytest.mark.full
@pytest.mark.xdist_group("emulated TPU")
def test_a_hundred_unseen_prompts_compiled_on_the_emulated_tpu(
    score_with_kernels: Score, emulated_tpu: EmulatedProcess
):
    check_alike(emulated_tpu.run(score_on_tpu, 100), score_with_kernels)


def check_alike(score: Score, expected: Score) -> None:
    assert score.colour >= COLOUR
    assert score.shape >= SHAPE
    assert score.colour == pytest.approx(expected.colour, abs=SETTINGS_DIFFER_BY + 1e-9)
    assert score.shape == pytest.approx(expected.shape, abs=SETTINGS_DIFFER_BY + 1e-9)
