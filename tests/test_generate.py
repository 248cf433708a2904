import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline
from PIL import Image

from qwenimage_tpu import environment, loading
from qwenimage_tpu import generate as generate_module
from qwenimage_tpu.comparison import compare
from qwenimage_tpu.compilation import static_shapes
from qwenimage_tpu.generate import GenerateResult, Stopwatch, encode_text, generate
from qwenimage_tpu.kernel_loader import KernelLoadError
from qwenimage_tpu.options import GenerateOptions, check_size
from qwenimage_tpu.pictures import save_images
from qwenimage_tpu.request import check_output, picture_paths

# The template adds these to a prompt: end of the user's turn, and the assistant's opening.
SUFFIX_TOKENS = 5


def options(**changes: Any) -> GenerateOptions:
    small: dict[str, Any] = {
        "prompts": ("a red fox",),
        "height": 64,
        "width": 64,
        "steps": 2,
        "kernels": False,
    }
    return GenerateOptions(**(small | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": ()}, "at least one prompt is needed"),
        ({"steps": 0}, "steps must be at least 1, but is 0"),
        ({"images_per_prompt": 0}, "images per prompt must be at least 1, but is 0"),
        ({"height": 1000}, "height must be a positive multiple of 16, but is 1000; .* 992 or 1008"),
        ({"width": 7}, "width must be a positive multiple of 16, but is 7; the nearest valid is 16"),
        ({"height": -16}, "height must be a positive multiple of 16, but is -16; the nearest valid is 16"),
        ({"seed": -1}, r"must lie in \[0, 2\*\*63\), but the first of 1 is -1"),
        ({"seed": 2**63 - 1, "images_per_prompt": 2}, r"must lie in \[0, 2\*\*63\), but the first of 2 is"),
        (
            {"true_cfg_scale": float("nan")},
            "true_cfg_scale must be a finite number of at least 1, but is nan",
        ),
        ({"true_cfg_scale": 0.5}, r"at least 1, but is 0\.5; 1 turns guidance off"),
        ({"prompts": ("\ud800",)}, r"a prompt must be valid Unicode text, but '\\ud800' is not"),
        (
            {"true_cfg_scale": 1.0, "negative_prompt": "blur"},
            "only acts with true_cfg_scale > 1, but true_cfg_scale is 1.0; raise true_cfg_scale or leave",
        ),
        (
            {"kernels": False, "softmax": "int8"},
            "the int8 softmax belongs to the kernels, which are turned off; leave one out",
        ),
        ({"text_bucket": 100}, r"must be one of \(128, 256, 512, 1024\), but is 100"),
    ],
)
def test_bad_options(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        options(**changes)


def test_one_step_of_a_stretched_schedule(pipe: QwenImagePipeline):
    with pytest.raises(ValueError, match="scheduler needs at least 2 steps"):
        generate(pipe, options(steps=1))


def test_the_text_that_is_too_long_is_named(pipe: QwenImagePipeline):
    with pytest.raises(ValueError, match=r"'very very .*'\.\.\.: a text must fit the largest bucket of 1024"):
        generate(pipe, options(negative_prompt="very " * 2000))


def test_latents_that_are_not_finite_are_no_picture(pipe: QwenImagePipeline, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pipe.transformer.proj_out.bias, "data", torch.full((64,), torch.nan))
    with pytest.raises(FloatingPointError, match="latents are not finite"):
        generate(pipe, options(kernels=False))


def test_last_valid_seed():
    assert options(seed=2**63 - 2, images_per_prompt=2).image_count == 2


@pytest.mark.parametrize(
    ("scale", "given", "used"),
    [(4.0, None, " "), (4.0, "", ""), (1.5, "blur", "blur"), (1.0, None, None)],
)
def test_true_cfg_is_never_dropped_in_silence(scale: float, given: str | None, used: str | None):
    assert options(true_cfg_scale=scale, negative_prompt=given).used_negative_prompt == used


def test_size_follows_the_pipelines_own_multiple(pipe: QwenImagePipeline, monkeypatch: pytest.MonkeyPatch):
    check_size(96, 64, 32)
    monkeypatch.setattr(pipe, "vae_scale_factor", 16)
    with pytest.raises(ValueError, match=r"height must be a positive multiple of 32, but is 80; .* 64 or 96"):
        generate(pipe, options(height=80))


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_equals_the_stock_pipeline_without_padding(pipe: QwenImagePipeline, scale: float):
    result = generate(pipe, options(true_cfg_scale=scale, seed=5))
    arguments: dict[str, Any] = {"negative_prompt": " "} if scale > 1 else {}
    expected: Any = pipe(
        "a red fox",
        true_cfg_scale=scale,
        height=64,
        width=64,
        num_inference_steps=2,
        generator=torch.Generator("cpu").manual_seed(5),
        **arguments,
    )
    pixels = [np.asarray(image, np.int16) for image in (result.images[0], expected.images[0])]
    assert np.abs(pixels[0] - pixels[1]).max() <= 1


def test_each_picture_of_a_batch_equals_its_own_run(pipe: QwenImagePipeline):
    prompts = ("a red fox", "a much longer prompt about a blue whale")
    batch = generate(pipe, options(prompts=prompts, images_per_prompt=2, seed=7))
    assert len(batch.images) == 4
    for index in range(4):
        alone = generate(pipe, options(prompts=(prompts[index // 2],), seed=7 + index))
        torch.testing.assert_close(batch.latents[index], alone.latents[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("length", "changes", "bucket", "negative_bucket"),
    [
        (1, {}, 128, 128),
        (128 - SUFFIX_TOKENS, {}, 128, 128),
        (129 - SUFFIX_TOKENS, {}, 256, 128),
        (1, {"text_bucket": 512}, 512, 512),
        (1, {"negative_prompt": "x" * 300}, 128, 512),
    ],
)
def test_texts_get_the_bucket_that_fits(
    pipe: QwenImagePipeline, length: int, changes: dict[str, Any], bucket: int, negative_bucket: int
):
    chosen = options(prompts=("x" * length,), **changes)
    with static_shapes(pipe, chosen.buckets):
        text = encode_text(pipe, chosen)
    assert text["prompt_embeds"].shape == (1, bucket, 128)
    assert int(text["prompt_embeds_mask"].sum()) == length + SUFFIX_TOKENS
    assert text["negative_prompt_embeds"].shape == (1, negative_bucket, 128)


def test_a_prompt_that_fills_its_bucket(pipe: QwenImagePipeline):
    full = generate(pipe, options(prompts=("x" * (128 - SUFFIX_TOKENS),)))
    padded = generate(pipe, options(prompts=("x" * (128 - SUFFIX_TOKENS),), text_bucket=256))
    torch.testing.assert_close(full.latents, padded.latents, rtol=0, atol=1e-4)


@pytest.mark.parametrize("bucket", [None, 256])
@pytest.mark.parametrize("role", ["prompt", "negative prompt"])
def test_a_text_too_long_is_an_error_and_not_cut_off(pipe: QwenImagePipeline, role: str, bucket: int | None):
    text = "x" * 1100
    changes = {"prompts": (text,)} if role == "prompt" else {"negative_prompt": text}
    message = f"largest bucket of {bucket or 1024} tokens, but has {1100 + SUFFIX_TOKENS}; shorten"
    with pytest.raises(ValueError, match=message):
        generate(pipe, options(text_bucket=bucket, **changes))


def test_progress_and_stage_times(pipe: QwenImagePipeline):
    steps: list[int] = []
    watch = Stopwatch({"load": 1.0})
    result = generate(pipe, options(steps=3), steps.append, watch)
    assert steps == [1, 2, 3]
    assert list(result.seconds) == ["load", "text encoding", "denoising", "decoding"]
    assert all(seconds > 0 for seconds in result.seconds.values())
    assert result.kernels is None


@pytest.fixture(scope="module")
def with_kernels(pipe: QwenImagePipeline, kernel_build: Path) -> GenerateResult:
    return generate(pipe, options(kernels=True, kernel_repo=str(kernel_build)))


def test_kernels_paint_the_stock_picture(pipe: QwenImagePipeline, with_kernels: GenerateResult):
    difference = compare(with_kernels, generate(pipe, options()))
    assert difference.latents <= 1e-4
    assert difference.max_pixel <= 1
    assert with_kernels.kernels is not None
    assert with_kernels.kernels.softmax == "bounded"
    assert with_kernels.seconds["kernels"] > 0


def test_the_transformer_is_restored_also_after_an_error(pipe: QwenImagePipeline, kernel_build: Path):
    def patched() -> bool:
        return any("forward" in vars(module) for module in pipe.transformer.modules())

    def fail(step: int) -> None:
        assert patched()
        raise ArithmeticError(f"stopped at step {step}")

    with pytest.raises(ArithmeticError, match="stopped at step 1"):
        generate(pipe, options(kernels=True, kernel_repo=str(kernel_build)), fail)
    assert not patched()


def test_missing_kernels_are_an_error(pipe: QwenImagePipeline, tmp_path: Path):
    with pytest.raises(KernelLoadError, match="No usable kernel build"):
        generate(pipe, options(kernels=True, kernel_repo=str(tmp_path)))


def test_compare_measures_pixels_and_latents(pipe: QwenImagePipeline):
    result = generate(pipe, options())
    assert str(compare(result, result)).startswith("pixels differ by at most 0 and on average 0.0000 of 255")
    inverted = [Image.fromarray(255 - np.asarray(image)) for image in result.images]
    other = GenerateResult(inverted, 2 * result.latents, {}, None, result.options)
    assert compare(other, result).latents == pytest.approx(1)
    assert compare(other, result).max_pixel > 100


@pytest.mark.parametrize(
    ("output", "count", "names"),
    [
        ("fox.png", 1, ["fox.png"]),
        ("deep/er/fox.PNG", 2, ["deep/er/fox-0.PNG", "deep/er/fox-1.PNG"]),
        ("folder", 1, ["folder/image-0.png"]),
        ("v1.5", 2, ["v1.5/image-0.png", "v1.5/image-1.png"]),
    ],
)
def test_picture_paths(tmp_path: Path, output: str, count: int, names: list[str]):
    (tmp_path / "v1.5").mkdir()
    assert picture_paths(tmp_path / output, count) == [tmp_path / name for name in names]


def test_only_png_is_written():
    with pytest.raises(
        ValueError, match=r"written as PNG, but the output path fox.jpg ends in .jpg; end it in"
    ):
        check_output(Path("fox.jpg"))


def png_info(path: Path) -> dict[Any, Any]:
    with Image.open(path) as image:
        return image.info


def test_pictures_say_how_they_were_made(
    pipe: QwenImagePipeline, with_kernels: GenerateResult, tmp_path: Path
):
    stock = generate(pipe, options(prompts=("a 猫",), images_per_prompt=2, negative_prompt="blur", seed=3))
    second = save_images(stock, tmp_path / "new" / "cat.png", model="demo")[1]
    parameters = png_info(second)
    versions = {name: parameters.pop(f"{name}_version") for name in ("torch", "diffusers", "qwenimage-tpu")}
    assert versions["torch"] == torch.__version__.partition("+")[0]
    assert parameters == {
        "prompt": "a 猫",
        "negative_prompt": "blur",
        "true_cfg_scale": "4.0",
        "width": "64",
        "height": "64",
        "steps": "2",
        "seed": "4",
        "model": "demo",
        "kernel_repo": "none",
        "kernel_build": "none",
        "softmax": "none",
    }
    used = png_info(save_images(with_kernels, tmp_path / "kernels.png", model="demo")[0])
    assert with_kernels.kernels is not None
    assert used["kernel_build"] == with_kernels.kernels.build_id
    assert used["softmax"] == "bounded"


def test_a_picture_is_written_whole_or_not_at_all(
    pipe: QwenImagePipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    result = generate(pipe, options())
    (tmp_path / "fox.png").write_text("old")

    def interrupted(_image: Image.Image, path: Path, **_: Any) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(Image.Image, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_images(result, tmp_path / "fox.png", model="demo")
    assert [path.name for path in tmp_path.iterdir()] == ["fox.png"]
    assert (tmp_path / "fox.png").read_text() == "old"


@pytest.mark.parametrize(
    ("model", "demo", "message"),
    [(None, False, "neither was given; pass --model"), ("x/y", True, "both were")],
)
def test_exactly_one_of_model_and_demo(model: str | None, demo: bool, message: str):
    with pytest.raises(ValueError, match=message):
        loading.load_pipeline(model, demo, torch.float32)


def test_a_folder_without_an_index(tmp_path: Path):
    with pytest.raises(
        FileNotFoundError, match=r"must hold model_index.json, but .* does not; pass the folder"
    ):
        loading.load_pipeline(str(tmp_path), False, torch.float32)


def test_another_pipelines_folder(tmp_path: Path):
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "QwenImageEditPipeline"}))
    with pytest.raises(ValueError, match=r"QwenImagePipeline can be run, but .* is a QwenImageEditPipeline"):
        loading.load_pipeline(str(tmp_path), False, torch.float32)


def test_neither_folder_nor_hub_id():
    with pytest.raises(
        FileNotFoundError, match=r"'\./no/such/folder' is neither an existing folder nor a Hub id"
    ):
        loading.load_pipeline("./no/such/folder", False, torch.float32)


def test_an_unreachable_hub(monkeypatch: pytest.MonkeyPatch):
    def unreachable(*_: Any) -> str:
        raise ConnectionError("no route to host\nand much more")

    monkeypatch.setattr(loading, "hf_hub_download", unreachable)
    with pytest.raises(
        OSError, match=r"owner/name is not a local folder, .* no route to host\nCheck the name"
    ):
        loading.load_pipeline("owner/name", False, torch.float32)


def test_device_auto_is_the_cpu_without_a_tpu(pipe: QwenImagePipeline, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(environment, "has_tpu", lambda: False)
    monkeypatch.setattr(loading, "has_tpu", lambda: False)
    assert environment.choose_device("auto") == "cpu"
    with pytest.raises(ValueError, match=r"the device tpu needs TPU hardware, .* generate --device cpu"):
        loading.move_pipeline(pipe, "tpu", "cpu")


def test_generators_are_seeded_one_by_one():
    first, second = generate_module.seeded_generators(41, 2)
    assert (first.initial_seed(), second.initial_seed()) == (41, 42)
