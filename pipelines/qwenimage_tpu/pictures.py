"""Write pictures as PNG files that say how they were made."""

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from .contact_sheet import contact_sheet
from .generate import GenerateResult
from .request import check_contact_sheet, picture_paths

RECORDED_PACKAGES = ("torch", "diffusers", "qwenimage-tpu")


def picture_parameters(result: GenerateResult, index: int, model: str) -> dict[str, str]:
    """How picture `index` was made, as text: enough to make it again."""
    options, kernels = result.options, result.kernels
    negative_prompt = options.used_negative_prompt
    return {
        "prompt": options.prompts[index // options.images_per_prompt],
        "negative_prompt": "" if negative_prompt is None else negative_prompt,
        "true_cfg_scale": str(options.true_cfg_scale),
        "width": str(options.width),
        "height": str(options.height),
        "steps": str(options.steps),
        "seed": str(options.seed + index),
        "model": model,
        "kernel_repo": "none" if kernels is None else kernels.repo,
        "kernel_build": "none" if kernels is None else kernels.build_id,
        "softmax": "none" if kernels is None else kernels.softmax,
        **{f"{name}_version": _installed_version(name) for name in RECORDED_PACKAGES},
    }


def save_images(result: GenerateResult, output: Path, model: str) -> list[Path]:
    """Write the pictures, creating folders and replacing old files; returns the paths (`picture_paths`).

    A file appears complete or not at all. Raises ValueError for an output path that is not PNG.
    """
    paths = picture_paths(output, len(result.images))
    paths[0].parent.mkdir(parents=True, exist_ok=True)
    for index, (path, image) in enumerate(zip(paths, result.images, strict=True)):
        _write_png(image, path, picture_parameters(result, index, model))
    return paths


def save_contact_sheet(result: GenerateResult, output: Path, model: str) -> Path:
    """Write all pictures as one PNG with their prompts; its text fields are the first picture's, with all
    prompts. Raises ValueError for an output path that is not a PNG file."""
    check_contact_sheet(output)
    prompts = result.options.prompts
    copies = result.options.images_per_prompt
    captions = [prompt for prompt in prompts for _ in range(copies)]
    output.parent.mkdir(parents=True, exist_ok=True)
    parameters = picture_parameters(result, 0, model) | {"prompt": "\n".join(prompts)}
    _write_png(contact_sheet(result.images, captions), output, parameters)
    return output


def _write_png(image: Image.Image, path: Path, parameters: dict[str, str]) -> None:
    info = PngInfo()
    for name, value in parameters.items():
        info.add_itxt(name, value)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        image.save(unfinished, format="PNG", pnginfo=info)
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _installed_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
