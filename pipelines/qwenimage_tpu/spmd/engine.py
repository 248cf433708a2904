"""Pictures from the JAX program: torch encodes the text and decodes the latents, JAX does all between."""

import importlib.metadata
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from diffusers import QwenImagePipeline
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift, retrieve_timesteps
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import qwenimage_tpu_pallas as kernels
from qwenimage_tpu.generate import (
    GenerateResult,
    Stopwatch,
    UsedKernels,
    check_finite,
    check_model,
    decode,
    encode_text,
    seeded_generators,
)
from qwenimage_tpu.loading import load_pipeline, transformer_folder
from qwenimage_tpu.options import SCHEDULE_ROWS, GenerateOptions, choose_mesh
from qwenimage_tpu.text_buckets import undo_text_buckets, use_text_buckets
from qwenimage_tpu_pallas.softmax import Softmax

from .config import DiTConfig, is_modulation, parameter_shapes
from .denoise import Schedule, Text, denoise
from .dit import Execution, Modulation, linear, time_embedding
from .placement import MODEL, make_mesh, partition_specs, shardings
from .rope import rope_tables
from .weights import Checkpoint, load_layer, load_parameters


class SpmdTransformer:
    """A transformer's weights on a mesh, and its denoising loop, compiled for each new shape.

    The modulation's weights, a third of all, are not among them: what they make of a schedule's timesteps is
    kept instead, until another schedule comes, and then they are read again, layer by layer.

    Attributes:
        config: of the model.
        mesh: where its weights are.
        softmax: that its attention runs.
    """

    def __init__(
        self,
        folder: Path,
        mesh: Mesh,
        dtype: Any,
        *,
        softmax: Softmax | None = None,
    ) -> None:
        """Read the weights, each device its own.

        Raises OSError if a file is missing, ValueError if the weights do not fit the config, the mesh does
        not divide the model or the softmax is not safe for the weights, NotImplementedError for other members
        of the family.
        """
        self.config = DiTConfig.from_folder(folder)
        heads, chips = self.config.heads, mesh.shape[MODEL]
        if heads % chips:
            raise ValueError(
                f"the mesh's model axis must divide the {heads} heads, but is {chips}; choose a divisor"
            )
        self._checkpoint = Checkpoint(folder)
        bound = kernels.checkpoint_logit_bound(self._checkpoint.norm_weights())
        self.softmax: Softmax = softmax or kernels.choose_softmax(bound)
        kernels.check_softmax(self.softmax, bound)
        self.mesh, self._dtype = mesh, dtype
        self._parameters = self._load(lambda name: not is_modulation(name))
        self._table: tuple[bytes, Modulation] | None = None

    def denoise(
        self,
        latents: jax.Array,
        text: Text,
        schedule: Schedule,
        true_cfg_scale: float,
        size: tuple[int, int],
    ) -> np.ndarray:
        """As the function `denoise`, from any device to the CPU. size: rows and columns of image tokens."""
        execution = Execution.of(self.mesh, self.softmax, len(text.lengths))
        rope = rope_tables(self.config.rope_axes, *size, text.embeddings.shape[1])
        split, whole = NamedSharding(self.mesh, P(execution.batch_axis)), NamedSharding(self.mesh, P())
        text = jax.device_put(Text(text.embeddings.astype(self._dtype), text.lengths), split)
        latents, schedule, rope = jax.device_put((latents, schedule, rope), whole)
        scale = jnp.float32(true_cfg_scale)
        table = self._modulation(schedule.timesteps)
        return np.asarray(_denoise(self._parameters, latents, text, schedule, scale, rope, table, execution))

    def _modulation(self, timesteps: jax.Array) -> Modulation:
        """Of all these timesteps; the last ones' is kept."""
        key = np.asarray(timesteps).tobytes()
        if self._table is None or self._table[0] != key:
            self._table = None  # two would not fit where one does
            self._table = key, self._read_modulation(timesteps.astype(self._dtype))
        return self._table[1]

    def _load(self, wanted: Callable[[str], bool]) -> dict[str, jax.Array]:
        shapes = {name: shape for name, shape in parameter_shapes(self.config).items() if wanted(name)}
        placed = shardings(partition_specs(shapes, "sharded", self.mesh.shape[MODEL]), self.mesh)
        return load_parameters(self._checkpoint, self.config, placed, self._dtype)

    def _read_modulation(self, timesteps: jax.Array) -> Modulation:
        split, whole = NamedSharding(self.mesh, P(MODEL)), NamedSharding(self.mesh, P())
        shared = self._load(lambda name: is_modulation(name) and not name.startswith("blocks."))
        embedding = _time_embedding(shared, timesteps)

        def of_blocks(stream: str) -> jax.Array:
            rows: list[jax.Array] = []
            for layer in range(self.config.layers):
                weights = {
                    f"mod.{part}": load_layer(
                        self._checkpoint, f"blocks.{stream}_mod.1.{part}", layer, split, self._dtype
                    )
                    for part in ("weight", "bias")
                }
                rows.append(jax.device_put(_linear(weights, "mod", embedding), whole))
            return jnp.stack(rows)

        final = _linear(shared, "norm_out.linear", embedding)
        return Modulation(of_blocks("img"), of_blocks("txt"), final)


_denoise: Any = jax.jit(denoise, static_argnames="execution")
_time_embedding: Any = jax.jit(time_embedding)
_linear: Any = jax.jit(linear, static_argnums=1)


def compiled_programs() -> int:
    """How many of the denoising loop this process has compiled."""
    return _denoise._cache_size()


@dataclass(frozen=True)
class JaxEngine:
    """pipe: without a transformer; it encodes the text and decodes the latents."""

    pipe: QwenImagePipeline
    transformer: SpmdTransformer


def load_engine(
    model: str | None,
    demo: bool,
    dtype: torch.dtype,
    mesh: tuple[int, int] | None,
    options: GenerateOptions,
) -> JaxEngine:
    """As `loading.load_pipeline`, with the transformer on all devices, or on as many as the mesh has.

    mesh: None gives the two branches of true CFG, or two pictures, half of the devices each, if that can be.
    Raises what loading raises, and ValueError for a mesh that the devices or the model do not allow.
    """
    pipe = load_pipeline(model, demo, dtype, without=("transformer",))
    devices = jax.devices()
    mesh = mesh or choose_mesh(options, len(devices))
    placed = make_mesh(devices[: math.prod(mesh)], *mesh)
    folder = transformer_folder(model)
    jax_dtype = jnp.bfloat16 if dtype == torch.bfloat16 else np.float32
    return JaxEngine(pipe, SpmdTransformer(folder, placed, jax_dtype, softmax=options.softmax))


def generate(engine: JaxEngine, options: GenerateOptions, watch: Stopwatch | None = None) -> GenerateResult:
    """As `qwenimage_tpu.generate.generate`.

    Raises ValueError for a size or a prompt length that the model does not take.
    """
    pipe, transformer = engine.pipe, engine.transformer
    check_model(pipe, options)
    watch = watch or Stopwatch()
    with watch.stage("text encoding"):
        use_text_buckets(pipe, options.buckets)
        try:
            encoded = encode_text(pipe, options)
        finally:
            undo_text_buckets(pipe)
    with watch.stage("denoising"):
        noise: torch.Tensor = pipe.prepare_latents(
            options.image_count,
            transformer.config.in_channels // 4,
            options.height,
            options.width,
            encoded["prompt_embeds"].dtype,
            torch.device("cpu"),
            seeded_generators(options.seed, options.image_count),
            None,
        )
        latents = transformer.denoise(
            jnp.asarray(noise.float().numpy()),
            _interleave(encoded),
            _schedule(pipe, options.steps, noise.shape[1]),
            options.true_cfg_scale,
            _token_grid(pipe, options),
        )
    result = torch.from_numpy(latents.copy())
    check_finite(result)
    with watch.stage("decoding"):
        images = decode(pipe, result, options)
    return GenerateResult(images, result, watch.seconds, _used_kernels(transformer), options)


def _used_kernels(transformer: SpmdTransformer) -> UsedKernels:
    data, model = transformer.mesh.devices.shape
    return UsedKernels(
        repo="qwenimage_tpu_pallas",
        build_id=importlib.metadata.version("qwenimage-tpu"),
        variant=f"jax on a mesh of {data} x {model}",
        softmax=transformer.softmax,
    )


def _token_grid(pipe: QwenImagePipeline, options: GenerateOptions) -> tuple[int, int]:
    pixels = pipe.vae_scale_factor * 2
    return options.height // pixels, options.width // pixels


def _interleave(encoded: dict[str, torch.Tensor]) -> Text:
    """Each prompt's row, and behind it the negative prompt's if there is one; padded to the longer bucket."""
    branches = [
        (
            encoded[f"{prefix}_embeds"].float().numpy(),
            encoded[f"{prefix}_embeds_mask"].sum(dim=1).int().numpy(),
        )
        for prefix in ("prompt", "negative_prompt")
        if f"{prefix}_embeds" in encoded
    ]
    longest = max(embeddings.shape[1] for embeddings, _ in branches)
    padded = [np.pad(x, ((0, 0), (0, longest - x.shape[1]), (0, 0))) for x, _ in branches]
    embeddings = np.stack(padded, axis=1).reshape(-1, *padded[0].shape[1:])
    lengths = np.stack([lengths for _, lengths in branches], axis=1).reshape(-1)
    return Text(jnp.asarray(embeddings), jnp.asarray(lengths))


def _schedule(pipe: QwenImagePipeline, steps: int, image_tokens: int) -> Schedule:
    """diffusers' own, filled up with rows that do not count."""
    config = pipe.scheduler.config
    shift = calculate_shift(
        image_tokens,
        config.get("base_image_seq_len", 256),
        config.get("max_image_seq_len", 4096),
        config.get("base_shift", 0.5),
        config.get("max_shift", 1.15),
    )
    sigmas = np.linspace(1.0, 1 / steps, steps)
    timesteps: Any
    timesteps, _ = retrieve_timesteps(pipe.scheduler, steps, "cpu", sigmas=sigmas.tolist(), mu=shift)
    rows = -(-steps // SCHEDULE_ROWS) * SCHEDULE_ROWS
    dtype = pipe.vae.dtype
    seen = (timesteps.to(dtype) / 1000).float().numpy()
    return Schedule(
        jnp.asarray(np.pad(seen, (0, rows - steps))),
        jnp.asarray(np.pad(pipe.scheduler.sigmas.numpy(), (0, rows - steps))),
        jnp.int32(steps),
    )
