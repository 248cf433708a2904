"""Pictures from a pipeline whose transformer is spread over the processes of a mesh."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from diffusers import QwenImagePipeline
from torch.distributed.device_mesh import DeviceMesh

from qwenimage_tpu.environment import is_leader
from qwenimage_tpu.generate import (
    GenerateResult,
    OnStep,
    Stopwatch,
    check_finite,
    check_model,
    decode,
    denoise,
    encode_text,
    prepared,
)
from qwenimage_tpu.loading import load_pipeline, no_progress_bars, transformer_folder
from qwenimage_tpu.modulation import tabulated_modulation
from qwenimage_tpu.options import GenerateOptions

from .data_axis import DataParallelTransformer
from .processes import DATA, MODEL, broadcast, start_mesh
from .text_encoder import split_text_encoder
from .transformer import load_transformer


@dataclass(frozen=True)
class ParallelPipeline:
    """pipe: with this process's part of the transformer. Only the first one's has a VAE, and a text encoder
    unless that is split, too.
    """

    pipe: QwenImagePipeline
    mesh: DeviceMesh

    @property
    def encodes(self) -> bool:
        """Whether this process takes part in encoding texts."""
        return self.pipe.text_encoder is not None


def load_parallel(
    model: str | None,
    demo: bool,
    dtype: torch.dtype,
    device: str,
    mesh: tuple[int, int],
    *,
    split_text: bool = False,
) -> ParallelPipeline:
    """As `loading.load_pipeline`, in every process of a mesh of (data, model) devices, "cpu" or "tpu".

    split_text: the text encoder's layers over the model axis; else the first process has all, on its CPU.
    Raises what loading raises, and ValueError for a mesh that the processes or the model do not allow.
    """
    devices = start_mesh(*mesh, device)
    # The others wait until the first has found the model, and downloaded it if it must.
    if is_leader():
        pipe = load_pipeline(model, demo, dtype, without=("transformer",))
        folder = transformer_folder(model)
        broadcast(pipe.vae_scale_factor)
    else:
        scale = broadcast(None)
        leaders = ("vae",) if split_text else ("vae", "text_encoder", "tokenizer")
        pipe = load_pipeline(model, demo, dtype, without=("transformer", *leaders))
        folder = transformer_folder(model)
        pipe.vae_scale_factor = scale
    if split_text:
        split_text_encoder(pipe.text_encoder, devices[MODEL])
    with no_progress_bars() if demo or not is_leader() else nullcontext():
        pipe.transformer = load_transformer(folder, devices[MODEL], dtype)
    if is_leader():
        pipe.vae.to(device)
    return ParallelPipeline(pipe, devices)


def generate(
    parallel: ParallelPipeline,
    options: GenerateOptions,
    on_step: OnStep | None = None,
    watch: Stopwatch | None = None,
) -> GenerateResult:
    """As `qwenimage_tpu.generate.generate`, called by all processes alike; only the first gets pictures."""
    pipe, mesh = parallel.pipe, parallel.mesh
    check_model(pipe, options)
    watch = watch or Stopwatch()
    with prepared(pipe, options, watch) as used:
        with watch.stage("text encoding"):
            text = broadcast(encode_text(pipe, options) if parallel.encodes else None)
        with watch.stage("denoising"):
            with nullcontext() if options.kernels else tabulated_modulation(pipe):
                latents = _denoise(pipe, options, text, on_step, mesh)
            on_cpu = latents.to("cpu", torch.float32, copy=True)
        check_finite(on_cpu)
        with watch.stage("decoding"):
            images = decode(pipe, latents, options) if is_leader() else []
    if used is not None:
        used = replace(
            used, variant=f"{used.variant} on a mesh of {mesh[DATA].size()} x {mesh[MODEL].size()}"
        )
    return GenerateResult(images, on_cpu, watch.seconds, used, options)


def _denoise(
    pipe: QwenImagePipeline,
    options: GenerateOptions,
    text: dict[str, torch.Tensor],
    on_step: OnStep | None,
    mesh: DeviceMesh,
) -> torch.Tensor:
    transformer: Any = pipe.transformer
    text = {name: part.to(mesh.device_type) for name, part in text.items()}
    negative = None
    if options.guided:
        negative = text["negative_prompt_embeds"], text["negative_prompt_embeds_mask"]
    if mesh[DATA].size() > 1:
        pipe.transformer = DataParallelTransformer(transformer, mesh[DATA], negative)
    try:
        return denoise(pipe, options, text, on_step)
    finally:
        pipe.transformer = transformer
