"""The transformer's computation: `QwenImageTransformer2DModel` of diffusers in JAX, its blocks scanned.

The kernels are Pallas', each on the local shard of its operands: attention, its projections, QK norm and
the MLP's first product on the chip's heads and hidden channels, norms on whole rows. The products that are
summed over chips are XLA's, and those outside the blocks.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import qwenimage_tpu_pallas as kernels
from qwenimage_tpu_pallas.layouts import HEAD_DIM
from qwenimage_tpu_pallas.softmax import LOG2_E, Softmax
from qwenimage_tpu_pallas.validation import Activation

from .config import TIME_CHANNELS, is_modulation
from .placement import DATA, MODEL

Parameters = Mapping[str, jax.Array]
EPS = 1e-6
# A softmax scale in the query's norm costs nothing; the kernel then needs none of its own.
QUERY_SCALE = HEAD_DIM**-0.5 * LOG2_E


class Layer(Mapping[str, jax.Array]):
    """Parameters of one layer by name, sliced from stacked ones.

    The kernels read their layer of the stacked weights in place: a slice made for them would be a copy.
    """

    def __init__(self, stacks: Parameters, layer: jax.Array) -> None:
        """stacks: of the blocks, by name without "blocks.", each ``[layers, ...]``."""
        self._stacks, self.layer = stacks, layer

    def __getitem__(self, name: str) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(self._stacks[name], self.layer, keepdims=False)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stacks)

    def __len__(self) -> int:
        return len(self._stacks)

    def stacked(self, name: str) -> tuple[jax.Array, jax.Array]:
        """Weight and bias of all layers."""
        return self._stacks[f"{name}.weight"], self._stacks[f"{name}.bias"]


class Rope(NamedTuple):
    """Rotary tables, each ``[1, tokens, 128]`` f32, a pair's value twice."""

    image_cos: jax.Array
    image_sin: jax.Array
    text_cos: jax.Array
    text_sin: jax.Array


class Modulation(NamedTuple):
    """Of all steps. image, text: ``[layers, steps, 6 * channels]``. final: ``[steps, 2 * channels]``."""

    image: jax.Array
    text: jax.Array
    final: jax.Array

    def at(self, step: jax.Array | int) -> "Modulation":
        """Of one step, without the axis of the steps."""
        return Modulation(self.image[:, step], self.text[:, step], self.final[step])


@dataclass(frozen=True)
class Execution:
    """How and where the transformer runs.

    softmax: of the attention kernel. batch_axis: the mesh axis that the batch is split over, or None if it
    cannot be. interpret: run the kernels in Pallas' interpret mode, as on a CPU.
    """

    mesh: Mesh
    softmax: Softmax
    batch_axis: str | None
    interpret: bool

    @classmethod
    def of(cls, mesh: Mesh, softmax: Softmax, batch: int) -> "Execution":
        split = batch % mesh.shape[DATA] == 0
        interpret = mesh.devices.flat[0].platform != "tpu"
        return cls(mesh, softmax, DATA if split else None, interpret)

    @property
    def rows(self) -> P:
        """Of ``[batch, tokens, channels]``, whole on every chip of the model axis."""
        return P(self.batch_axis, None, None)

    @property
    def heads(self) -> P:
        """Of ``[batch, tokens, channels]``, the chip's heads or hidden channels."""
        return P(self.batch_axis, None, MODEL)

    def constrain(self, x: jax.Array, spec: P) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def on_shards(self, function: Callable[..., Any], inputs: Any, outputs: Any) -> Callable[..., Any]:
        """A kernel on the local shards; XLA cannot look into it."""
        return jax.shard_map(
            functools.partial(function, interpret=self.interpret),
            mesh=self.mesh,
            in_specs=inputs,
            out_specs=outputs,
            check_vma=False,
        )


def linear(parameters: Parameters, name: str, x: jax.Array, *, summed: bool = False) -> jax.Array:
    """``x weight^T + bias`` in x's dtype.

    summed: the inputs are split over chips, which add up what they have: in x's dtype, to halve the bytes.
    """
    weight, bias = parameters[f"{name}.weight"], parameters[f"{name}.bias"]
    product = jax.lax.dot_general(
        x,
        weight,
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=x.dtype if summed else jnp.float32,
    )
    return (product.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


def _local_linear(
    parameters: Layer, name: str, x: jax.Array, execution: Execution, activation: Activation = "identity"
) -> jax.Array:
    """The chip's output channels of ``activation(x weight^T + bias)``, from whole rows of x."""

    def run(x: jax.Array, weight: jax.Array, bias: jax.Array, layer: jax.Array, *, interpret: bool) -> Any:
        return kernels.linear(x, weight, bias, activation=activation, layer=layer, interpret=interpret)

    specs = (execution.rows, P(None, MODEL, None), P(None, MODEL), P())
    return execution.on_shards(run, specs, execution.heads)(x, *parameters.stacked(name), parameters.layer)


def _summed_linear(parameters: Layer, name: str, x: jax.Array, execution: Execution) -> jax.Array:
    """Of x whose channels are split over chips, whole rows of ``x weight^T + bias``."""
    if execution.mesh.shape[MODEL] == 1:
        return _local_linear(parameters, name, x, execution)
    return execution.constrain(linear(parameters, name, x, summed=True), execution.rows)


def _gated_linear(
    parameters: Layer,
    name: str,
    x: jax.Array,
    residual: jax.Array,
    gate: jax.Array,
    execution: Execution,
) -> jax.Array:
    """``residual + gate * (x weight^T + bias)``, of x whose channels are split over chips."""
    if execution.mesh.shape[MODEL] == 1:

        def run(*arguments: jax.Array, interpret: bool) -> jax.Array:
            *operands, layer = arguments
            return kernels.linear_gated_residual(*operands, layer=layer, interpret=interpret)

        rows, vector = execution.rows, P(execution.batch_axis, None)
        specs = (rows, P(None, None, None), P(None, None), rows, vector, P())
        return execution.on_shards(run, specs, rows)(
            x, *parameters.stacked(name), residual, gate, parameters.layer
        )
    branch = _summed_linear(parameters, name, x, execution).astype(jnp.float32)
    wide = residual.astype(jnp.float32) + gate[:, None].astype(jnp.float32) * branch
    return wide.astype(residual.dtype)


def time_embedding(parameters: Parameters, timesteps: jax.Array) -> jax.Array:
    """What all modulation is computed from: ``[steps, channels]`` of ``[steps]`` in the model's dtype.

    timesteps: from 1 (noise) to 0.
    """
    half = TIME_CHANNELS // 2
    frequencies = jnp.exp(-math.log(10_000) * jnp.arange(half, dtype=jnp.float32) / half)
    angles = 1000 * timesteps[:, None].astype(jnp.float32) * frequencies
    embedding = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1).astype(timesteps.dtype)
    prefix = "time_text_embed.timestep_embedder"
    hidden = jax.nn.silu(linear(parameters, f"{prefix}.linear_1", embedding))
    return jax.nn.silu(linear(parameters, f"{prefix}.linear_2", hidden))


def modulation(parameters: Parameters, timesteps: jax.Array, execution: Execution) -> Modulation:
    """AdaLN's shifts, scales and gates of every block, from weights that the parameters hold.

    timesteps: as of `time_embedding`. Computed where the weights lie, and gathered.
    """
    embedding = time_embedding(parameters, timesteps)

    def of_blocks(stream: str) -> jax.Array:
        names = ("weight", "bias")
        stacked = {f"mod.{name}": parameters[f"blocks.{stream}_mod.1.{name}"] for name in names}
        _, rows = jax.lax.scan(lambda _, layer: (None, linear(layer, "mod", embedding)), None, stacked)
        return execution.constrain(rows, P())

    final = linear(parameters, "norm_out.linear", embedding)
    return Modulation(of_blocks("img"), of_blocks("txt"), execution.constrain(final, P()))


def forward(
    parameters: Parameters,
    image: jax.Array,
    text: jax.Array,
    text_lengths: jax.Array,
    rope: Rope,
    step: Modulation,
    execution: Execution,
) -> jax.Array:
    """The predicted velocity, as `QwenImageTransformer2DModel.forward` gives it.

    image: ``[batch, image_tokens, in_channels]``; text: ``[batch, text_tokens, text_channels]``, of which the
    first `text_lengths` (``[batch]`` int32) of each row are valid; both in the parameters' dtype.
    Returns ``[batch, image_tokens, out_channels]`` in that dtype.
    """
    norm = execution.on_shards(kernels.rms_norm, (execution.rows, P(None)), execution.rows)
    text = linear(parameters, "txt_in", norm(text, parameters["txt_norm.weight"]))
    image = linear(parameters, "img_in", image)
    stacks = {
        name.removeprefix("blocks."): value
        for name, value in parameters.items()
        if name.startswith("blocks.") and not is_modulation(name)
    }

    def block(streams: tuple[jax.Array, jax.Array], layer: Any) -> tuple[Any, None]:
        number, *modulations = layer
        weights = Layer(stacks, number)
        return _block(weights, *streams, text_lengths, rope, tuple(modulations), execution), None

    streams = tuple(execution.constrain(x, execution.rows) for x in (image, text))
    numbers = jnp.arange(len(step.image), dtype=jnp.int32)
    (image, _), _ = jax.lax.scan(block, streams, (numbers, step.image, step.text))
    scale, shift = jnp.split(_per_row(step.final, image), 2, axis=-1)
    return linear(parameters, "proj_out", _norm(image, shift, scale, execution))


def _per_row(values: jax.Array, x: jax.Array) -> jax.Array:
    """The same modulation for every row of the batch."""
    return jnp.broadcast_to(values, (x.shape[0], *values.shape))


def _norm(x: jax.Array, shift: jax.Array, scale: jax.Array, execution: Execution) -> jax.Array:
    vector = P(execution.batch_axis, None)
    run = execution.on_shards(kernels.layer_norm_modulate, (execution.rows, vector, vector), execution.rows)
    return run(x, shift, scale)


def _gated_norm(
    x: jax.Array, branch: jax.Array, vectors: tuple[jax.Array, ...], execution: Execution
) -> tuple[jax.Array, jax.Array]:
    """vectors: gate, shift and scale."""
    rows, vector = execution.rows, P(execution.batch_axis, None)
    run = execution.on_shards(
        kernels.gated_residual_layer_norm_modulate, (rows, rows, vector, vector, vector), (rows, rows)
    )
    return run(x, branch, *vectors)


def _block(
    weights: Layer,
    image: jax.Array,
    text: jax.Array,
    text_lengths: jax.Array,
    rope: Rope,
    modulations: tuple[jax.Array, ...],
    execution: Execution,
) -> tuple[jax.Array, jax.Array]:
    # Each six: shift, scale and gate of the attention, then of the MLP.
    image_mod, text_mod = (jnp.split(_per_row(rows, image), 6, axis=-1) for rows in modulations)
    image_branch, text_branch = _attention(
        weights,
        _norm(image, image_mod[0], image_mod[1], execution),
        _norm(text, text_mod[0], text_mod[1], execution),
        text_lengths,
        rope,
        execution,
    )
    outputs: list[jax.Array] = []
    streams = (("img", image, image_branch, image_mod), ("txt", text, text_branch, text_mod))
    for name, x, branch, mod in streams:
        x, normed = _gated_norm(x, branch, (mod[2], mod[3], mod[4]), execution)
        hidden = _local_linear(weights, f"{name}_mlp.net.0.proj", normed, execution, "gelu_tanh")
        outputs.append(_gated_linear(weights, f"{name}_mlp.net.2", hidden, x, mod[5], execution))
    return outputs[0], outputs[1]


def _attention(
    weights: Layer,
    image: jax.Array,
    text: jax.Array,
    text_lengths: jax.Array,
    rope: Rope,
    execution: Execution,
) -> tuple[jax.Array, jax.Array]:
    heads, batch, whole = execution.heads, execution.batch_axis, P(None)

    def project(name: str, x: jax.Array) -> jax.Array:
        return _local_linear(weights, f"attn.{name}", x, execution)

    norm_weights = [weights[f"attn.norm_{name}.weight"] for name in ("q", "k", "added_q", "added_k")]
    for position in (0, 2):
        norm_weights[position] = norm_weights[position].astype(jnp.float32) * QUERY_SCALE
    norm_rope = execution.on_shards(
        functools.partial(kernels.qk_norm_rope, eps=EPS),
        ((heads,) * 4 + (whole,) * 4 + (P(None, None, None),) * 4),
        (heads,) * 4,
    )
    image_query, image_key, text_query, text_key = norm_rope(
        *(project("to_q", image), project("to_k", image)),
        *(project("add_q_proj", text), project("add_k_proj", text)),
        *norm_weights,
        *rope,
    )
    attend = execution.on_shards(
        functools.partial(
            kernels.joint_attention,
            softmax=execution.softmax,
            scale=math.log(2),
            device_kind=execution.mesh.devices.flat[0].device_kind,
        ),
        ((heads,) * 6 + (P(batch),)),
        (heads, heads),
    )
    image_out, text_out = attend(
        *(image_query, image_key, project("to_v", image)),
        *(text_query, text_key, project("add_v_proj", text)),
        text_lengths,
    )
    return (
        _summed_linear(weights, "attn.to_out.0", image_out, execution),
        _summed_linear(weights, "attn.to_add_out", text_out, execution),
    )
