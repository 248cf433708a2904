from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline

from qwenimage_tpu import tiny
from qwenimage_tpu.generate import generate
from qwenimage_tpu.loading import load_pipeline
from qwenimage_tpu.options import GenerateOptions

MODELS = ("transformer", "vae", "text_encoder")


def weights(pipe: QwenImagePipeline, model: str) -> torch.Tensor:
    return torch.cat([parameter.flatten() for parameter in getattr(pipe, model).state_dict().values()])


def picture(pipe: QwenImagePipeline, prompt: str, seed: int = 0, size: int = 64) -> np.ndarray:
    options = GenerateOptions(prompts=(prompt,), seed=seed, height=size, width=size, steps=2, kernels=False)
    return np.asarray(generate(pipe, options).images[0], np.float32)


@pytest.mark.parametrize("model", MODELS)
def test_a_seed_determines_the_weights(pipe: QwenImagePipeline, model: str):
    # The VAE's last layer is scaled by a measured deviation, whose sum may round differently.
    torch.testing.assert_close(weights(tiny.tiny_pipeline(0), model), weights(pipe, model), rtol=0, atol=1e-6)
    assert (weights(tiny.tiny_pipeline(1), model) - weights(pipe, model)).abs().max() > 1e-2


def test_the_global_generator_is_left_alone():
    before = torch.random.get_rng_state()
    tiny.tiny_pipeline(3)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_dtype_of_all_models():
    pipe = tiny.tiny_pipeline(dtype=torch.bfloat16)
    assert {getattr(pipe, model).dtype for model in MODELS} == {torch.bfloat16}


def test_the_templates_prefix_takes_the_tokens_that_the_pipeline_drops(pipe: QwenImagePipeline):
    prefix, _, suffix = pipe.prompt_template_encode.partition("{}")
    assert len(pipe.tokenizer(prefix).input_ids) == pipe.prompt_template_encode_start_idx == 34
    assert pipe.tokenizer.decode(pipe.tokenizer(prefix + "a 猫" + suffix).input_ids[34:]) == "a 猫" + suffix


def test_a_tokenizer_that_splits_the_template_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tiny, "VOCAB_LIMIT", 300)
    with pytest.raises(ValueError, match=r"must take the 34 tokens .* makes \d+ of it; raise VOCAB_LIMIT"):
        tiny.tiny_pipeline()


def test_pictures_have_contrast_and_follow_prompt_and_seed(pipe: QwenImagePipeline):
    fox = picture(pipe, "a red fox")
    assert fox.std() > 30
    assert np.mean((fox == 0) | (fox == 255)) < 0.2
    assert np.abs(picture(pipe, "a blue whale") - fox).mean() > 5
    assert np.abs(picture(pipe, "a red fox", seed=1) - fox).mean() > 5


def test_saved_and_loaded_it_paints_the_same(pipe: QwenImagePipeline, tmp_path: Path):
    pipe.save_pretrained(tmp_path)
    loaded = load_pipeline(str(tmp_path), demo=False, dtype=torch.float32)
    assert np.abs(picture(loaded, "a red fox") - picture(pipe, "a red fox")).max() <= 1
