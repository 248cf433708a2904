"""From options to pictures: encode the text, denoise, decode, with or without our kernels."""

import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from diffusers import QwenImagePipeline
from PIL import Image

from . import emulator
from .compilation import disable_tpu_compile, enable_tpu_compile, static_shapes
from .kernel_loader import LoadedKernels, load_kernels
from .modulation import tabulated_modulation
from .options import GenerateOptions, check_size

OnStep = Callable[[int], None]


class Patch(Protocol):
    """What the kernel package's `patch_transformer` returns."""

    softmax: str
    logit_bound: float

    def undo(self) -> None: ...


@dataclass(frozen=True)
class UsedKernels:
    """Which kernels made a picture."""

    repo: str
    build_id: str
    variant: str
    softmax: str


@dataclass(frozen=True)
class GenerateResult:
    """images: one per seed, by prompt. latents: those of the last step, float32 on the CPU, of shape
    [images, image tokens, channels].

    seconds: wall time by stage ("kernels", "text encoding", "denoising", "decoding"). kernels: None for
    stock diffusers.
    """

    images: list[Image.Image]
    latents: torch.Tensor
    seconds: dict[str, float]
    kernels: UsedKernels | None
    options: GenerateOptions


@dataclass
class Stopwatch:
    """Wall time by stage; a stage that is entered twice adds up."""

    seconds: dict[str, float] = field(default_factory=dict[str, float])

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def attach_kernels(pipe: QwenImagePipeline, kernels: LoadedKernels, softmax: str | None = None) -> Patch:
    """Replace the transformer's hot parts by the kernels, until the returned patch's `undo()`."""
    # An emulated TPU cannot run TPU code.
    implementation = "interpret" if emulator.started() else "kernel"
    return kernels.module.patch_transformer(pipe.transformer, implementation=implementation, softmax=softmax)


@contextmanager
def prepared(
    pipe: QwenImagePipeline, options: GenerateOptions, watch: Stopwatch | None = None
) -> Generator[UsedKernels | None]:
    """Inside, the pipeline has the kernels, static shapes and compiled models that the options ask for.

    With the kernels comes a table of the modulation. Afterwards, also after an error, the pipeline is as it
    was. Yields which kernels they are. Raises KernelLoadError if they cannot be loaded.
    """
    with ExitStack() as cleanup:
        used = None
        if options.kernels:
            with (watch or Stopwatch()).stage("kernels"):
                loaded = load_kernels(options.kernel_repo, trust_remote_code=options.trust_remote_code)
                patch = attach_kernels(pipe, loaded, options.softmax)
            cleanup.callback(patch.undo)
            used = UsedKernels(loaded.repo, loaded.build_id, loaded.variant, patch.softmax)
        if options.compile is not None:
            models = [name for name in ("transformer", "vae") if getattr(pipe, name) is not None]
            enable_tpu_compile(pipe, models, mode=options.compile)
            cleanup.callback(disable_tpu_compile, pipe, models)
        cleanup.enter_context(static_shapes(pipe, options.buckets))
        if options.kernels:
            cleanup.enter_context(tabulated_modulation(pipe))
        yield used


def generate(
    pipe: QwenImagePipeline,
    options: GenerateOptions,
    on_step: OnStep | None = None,
    watch: Stopwatch | None = None,
) -> GenerateResult:
    """Prepare the pipeline, run it once, and leave it as it was found, also after an error.

    on_step: called after each denoising step with the number of steps done. watch: may hold the time of
    earlier stages, like loading.
    Raises ValueError for a size or a prompt length that the model does not take, KernelLoadError if the
    kernels cannot be loaded.
    """
    check_model(pipe, options)
    watch = watch or Stopwatch()
    with prepared(pipe, options, watch) as used:
        return run(pipe, options, used, on_step, watch)


def run(
    pipe: QwenImagePipeline,
    options: GenerateOptions,
    used: UsedKernels | None,
    on_step: OnStep | None = None,
    watch: Stopwatch | None = None,
) -> GenerateResult:
    """As `generate`, in a pipeline that `prepared` made ready: several runs share what it compiled."""
    check_model(pipe, options)
    watch = watch or Stopwatch()
    with watch.stage("text encoding"):
        text = encode_text(pipe, options)
    with watch.stage("denoising"):
        latents = denoise(pipe, options, text, on_step)
        on_cpu = latents.to("cpu", torch.float32, copy=True)  # waits for the device
    check_finite(on_cpu)
    with watch.stage("decoding"):
        images = decode(pipe, latents, options)
    return GenerateResult(images, on_cpu, watch.seconds, used, options)


def check_model(pipe: QwenImagePipeline, options: GenerateOptions) -> None:
    """Raise ValueError for a size or a number of steps that this model does not take."""
    check_size(options.height, options.width, pipe.vae_scale_factor * 2)
    # diffusers stretches the schedule between its first and its last step, and divides zero by zero.
    if options.steps == 1 and pipe.scheduler.config.get("shift_terminal"):
        raise ValueError(
            "this model's scheduler needs at least 2 steps (it has a shift_terminal), but steps is 1"
        )


def seeded_generators(seed: int, count: int) -> list[torch.Generator]:
    """One CPU generator per picture, so that a picture depends on its own seed and not on its batch."""
    return [torch.Generator("cpu").manual_seed(seed + index) for index in range(count)]


def encode_text(pipe: QwenImagePipeline, options: GenerateOptions) -> dict[str, torch.Tensor]:
    """The pipeline's text arguments, in static shapes: embeddings [images, bucket, dim] and masks.

    Stock diffusers gets the same padding as the kernels, so that the two can be compared.
    """

    def encode(texts: list[str]) -> Any:
        return pipe.encode_prompt(texts, num_images_per_prompt=options.images_per_prompt)

    embeds, mask = encode([*options.prompts])
    arguments = {"prompt_embeds": embeds, "prompt_embeds_mask": mask}
    if options.used_negative_prompt is not None:
        embeds, mask = encode([options.used_negative_prompt] * len(options.prompts))
        arguments |= {"negative_prompt_embeds": embeds, "negative_prompt_embeds_mask": mask}
    return arguments


def denoise(
    pipe: QwenImagePipeline,
    options: GenerateOptions,
    text: dict[str, torch.Tensor],
    on_step: OnStep | None = None,
) -> torch.Tensor:
    """The last latents [images, image tokens, channels], on the pipeline's device, of `encode_text`'s result.

    Nothing is read from the device.
    """

    def report(_pipe: Any, step: int, _timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if on_step is not None:
            on_step(step + 1)
        return tensors

    # diffusers annotates its optional arguments as if they were required.
    arguments: dict[str, Any] = {
        **text,
        "true_cfg_scale": options.true_cfg_scale,
        "height": options.height,
        "width": options.width,
        "num_inference_steps": options.steps,
        "generator": seeded_generators(options.seed, options.image_count),
        "max_sequence_length": max(options.buckets),
        "callback_on_step_end": report,
        "output_type": "latent",
    }
    output: Any = pipe(**arguments)
    return output.images


def check_finite(latents: torch.Tensor) -> None:
    """Raise FloatingPointError if the latents hold an infinity or a NaN."""
    if not latents.isfinite().all():
        raise FloatingPointError(
            "the model's latents are not finite, so there is no picture; try --dtype float32, or --no-kernels"
            " to see whether the kernels are to blame"
        )


@torch.no_grad()
def decode(pipe: QwenImagePipeline, latents: torch.Tensor, options: GenerateOptions) -> list[Image.Image]:
    """Pictures of latents [images, image tokens, channels], as the pipeline's own last part makes them."""
    vae: Any = pipe.vae
    unpack: Any = pipe._unpack_latents  # pyright: ignore[reportPrivateUsage]
    unpacked = unpack(latents, options.height, options.width, pipe.vae_scale_factor).to(vae.dtype)
    mean, deviation = (
        torch.tensor(values).view(1, -1, 1, 1, 1).to(unpacked)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    pixels = vae.decode(unpacked * deviation + mean, return_dict=False)[0][:, :, 0]
    postprocess: Any = pipe.image_processor.postprocess
    return postprocess(pixels, output_type="pil")
