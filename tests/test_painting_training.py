"""The training of the tiny painter, a few steps of it."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLQwenImage, QwenImagePipeline
from rich.console import Console
from safetensors.torch import load_file

from qwenimage_tpu.painting import flow
from qwenimage_tpu.painting.autoencoder import encode, normalised, pixels_of
from qwenimage_tpu.painting.course import Course, train
from qwenimage_tpu.painting.curve import save_loss_curves
from qwenimage_tpu.painting.drawings import draw, unseen_scenes
from qwenimage_tpu.painting.models import untrained_pipeline
from qwenimage_tpu.painting.one_frame import one_frame_convolutions
from qwenimage_tpu.painting.training import Loss, Recipe, Trainer, step_generator

SHORT = Course(
    vae=Recipe(steps=3, batch=2, learning_rate=1e-3),
    transformer=Recipe(steps=4, batch=4, learning_rate=1e-3),
    drawings=8,
    scores=2,
    scored_prompts=1,
)


@pytest.fixture(scope="module")
def untrained() -> QwenImagePipeline:
    return untrained_pipeline(0)


def pixels(count: int = 2) -> torch.Tensor:
    return pixels_of([draw(scene, seed) for seed, scene in enumerate(unseen_scenes(count))])


@torch.no_grad()
def round_trip(vae: AutoencoderKLQwenImage) -> tuple[torch.Tensor, torch.Tensor]:
    latents = vae.quant_conv(vae.encoder(pixels()))
    return latents, vae.decoder(vae.post_quant_conv(latents[:, :16]))


def test_one_frame_convolutions_are_exact_and_undone(untrained: QwenImagePipeline):
    with one_frame_convolutions(untrained.vae):
        fast = round_trip(untrained.vae)
    stock = round_trip(untrained.vae)
    torch.testing.assert_close(fast, stock, rtol=1e-4, atol=1e-5)
    assert not any("forward" in vars(module) for module in untrained.vae.modules())


def test_one_frame_convolutions_refuse_a_video(untrained: QwenImagePipeline):
    with (
        one_frame_convolutions(untrained.vae),
        pytest.raises(
            ValueError, match=r"one frame is needed, but the input has the shape \(1, 3, 2, 16, 16\)"
        ),
    ):
        untrained.vae.encoder(torch.zeros(1, 3, 2, 16, 16))


def test_latents_are_packed_as_the_pipeline_unpacks_them():
    latents = torch.randn(2, 16, 1, 12, 8)
    packed, grid = flow.pack(latents)
    assert grid == (6, 4)
    unpack: Callable[..., torch.Tensor] = QwenImagePipeline.__dict__["_unpack_latents"].__func__
    torch.testing.assert_close(unpack(packed, 96, 64, 8), latents, rtol=0, atol=0)


def test_a_lesson_is_normalised_and_captions_are_the_pipelines(untrained: QwenImagePipeline):
    lesson = flow.prepare(untrained, 0, 6)
    assert lesson.latents.shape == (6, 36, 64)
    assert lesson.latents.mean() == pytest.approx(0, abs=1e-3)
    assert lesson.latents.std() == pytest.approx(1, abs=1e-2)
    captions = ["a red star", "a red star on a white background", " "]
    for caption, text in zip(captions, flow.encode_captions(untrained, captions), strict=True):
        alone, mask = untrained.encode_prompt(caption)
        assert mask is None
        torch.testing.assert_close(text, alone[0], rtol=1e-4, atol=1e-4)


def test_each_word_of_a_caption_is_one_token(untrained: QwenImagePipeline):
    caption = "a small orange triangle on a beige background at the top"
    assert len(untrained.tokenizer(caption).input_ids) == len(caption.split())


def interrupted_at(stage: str, step: int) -> Callable[[Trainer, Loss], None]:
    """A training step that is interrupted before it is saved, so that it is lost and must be repeated."""
    take_step = Trainer._train_step  # pyright: ignore[reportPrivateUsage]

    def interrupted(trainer: Trainer, loss: Loss) -> None:
        take_step(trainer, loss)
        if trainer.checkpoint.stem == stage and trainer.step == step:
            raise KeyboardInterrupt

    return interrupted


def test_an_interrupted_training_ends_like_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    console = Console(quiet=True)
    train(tmp_path / "whole", 0, SHORT, console)
    for stage, step in (("vae", 2), ("transformer", 3)):
        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "_train_step", interrupted_at(stage, step))
            with pytest.raises(KeyboardInterrupt):
                train(tmp_path / "parts", 0, SHORT, console, save_seconds=0)
        assert not (tmp_path / "parts" / "model").exists()
    train(tmp_path / "parts", 0, SHORT, console)
    whole, parts = (sorted((tmp_path / name / "model").rglob("*.safetensors")) for name in ("whole", "parts"))
    assert [path.name for path in whole] == [path.name for path in parts]
    for first, second in zip(whole, parts, strict=True):
        torch.testing.assert_close(load_file(first), load_file(second), rtol=0, atol=0)
    assert (tmp_path / "parts" / "loss.png").stat().st_size > 1000


def test_the_average_follows_the_weights(tmp_path: Path):
    layer = torch.nn.Linear(1, 1, bias=False)
    trainer = Trainer(layer, Recipe(200, 1, 0.1, average_decay=0.9), tmp_path / "layer.pt")
    trainer.run(lambda _: (layer.weight - 3).square().sum(), lambda *_: None)
    assert trainer.done
    assert trainer.losses[-1] < trainer.losses[0]
    assert trainer.average["weight"].item() == pytest.approx(3, abs=0.1)
    trainer.use_average()
    assert layer.weight.item() == trainer.average["weight"].item()


def test_a_steps_randomness_depends_on_seed_and_step_alone():
    def draws(seed: int, step: int) -> list[float]:
        return torch.rand(3, generator=step_generator(seed, step)).tolist()

    assert draws(1, 2) == draws(1, 2)
    assert draws(1, 2) != draws(1, 3)
    assert draws(1, 2) != draws(2, 2)


def test_the_learning_rate_warms_up_and_decays():
    recipe = Recipe(steps=1000, batch=1, learning_rate=1.0)
    rates = [recipe.rate_at(step) for step in range(1000)]
    assert rates[0] == pytest.approx(0.01)
    assert np.argmax(rates) in range(90, 110)
    assert rates[-1] < 1e-4


def test_loss_curves(tmp_path: Path):
    save_loss_curves({"short": [3.0, 2.0], "long": list(np.linspace(2, 1, 1001))}, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size > 1000


def test_encoding_uses_the_whole_drawing(untrained: QwenImagePipeline):
    latents = encode(untrained.vae, [draw(scene, 0) for scene in unseen_scenes(3)])
    assert latents.shape == (3, 16, 1, 12, 12)
    assert normalised(untrained.vae, latents).shape == latents.shape
