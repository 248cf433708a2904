"""The denoising loop as one program: the transformer, true CFG and Euler's method, all on the device."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from .dit import Execution, Modulation, Parameters, Rope, forward, modulation


class Schedule(NamedTuple):
    """What the scheduler decides.

    timesteps: ``[rows]``, what the model sees, from 1 (noise) down. sigmas: ``[rows + 1]`` f32. steps: how
    many of the rows count. As a device's scalar their number is no shape; as an int the compiler knows it.
    """

    timesteps: jax.Array
    sigmas: jax.Array
    steps: jax.Array | int


class Text(NamedTuple):
    """Embeddings ``[rows, tokens, channels]`` and lengths ``[rows]`` int32 of all rows of the batch.

    With guidance each picture has two rows, one behind the other: the prompt's and the negative prompt's, so
    that a mesh's data axis holds both or splits them.
    """

    embeddings: jax.Array
    lengths: jax.Array


def denoise(
    parameters: Parameters,
    latents: jax.Array,
    text: Text,
    schedule: Schedule,
    true_cfg_scale: jax.Array,
    rope: Rope,
    table: Modulation | None,
    execution: Execution,
) -> jax.Array:
    """Latents ``[images, image_tokens, channels]`` f32, from noise to a picture.

    The state stays f32; the model sees it in its own dtype. With two rows of text per picture the velocity is
    guided as in diffusers' QwenImagePipeline: rescaled to the norm of the prompt's own, token by token.
    table: the modulation of all the schedule's rows; None computes each step's in the step, from weights that
    the parameters hold.
    """
    dtype = text.embeddings.dtype
    branches = text.lengths.shape[0] // latents.shape[0]
    timesteps = schedule.timesteps.astype(dtype)

    def modulation_at(index: jax.Array) -> Modulation:
        if table is not None:
            return table.at(index)
        return modulation(parameters, jax.lax.dynamic_slice_in_dim(timesteps, index, 1), execution).at(0)

    def step(index: jax.Array, latents: jax.Array) -> jax.Array:
        rows = jnp.repeat(latents.astype(dtype), branches, axis=0)
        velocity = forward(
            parameters, rows, text.embeddings, text.lengths, rope, modulation_at(index), execution
        ).astype(jnp.float32)
        if branches == 2:
            velocity = _guide(velocity[0::2], velocity[1::2], true_cfg_scale)
        return latents + (schedule.sigmas[index + 1] - schedule.sigmas[index]) * velocity

    return jax.lax.fori_loop(0, schedule.steps, step, latents)


def _guide(positive: jax.Array, negative: jax.Array, scale: jax.Array) -> jax.Array:
    combined = negative + scale * (positive - negative)
    wanted, found = (jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (positive, combined))
    return combined * (wanted / found)
