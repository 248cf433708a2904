"""From a compiled program to seconds, images per hour and per dollar.

A kernel or fusion takes what its executed cycles take at the core's clock, or what its bytes take at the
memory's bandwidth, whichever is longer; all kernels together not less than the matrix products at the
published peak. A collective takes what its bytes take around a ring of its chips over their links, or its own
cycles if they are more. Without overlap, compute and collectives add up; with perfect overlap the longer of
both remains; a program lies between. The text encoder and the decoder run before and after, on the first
devices. Not in the model: the time to start the program, and stalls.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from qwenimage_tpu.lab.ahead_of_time import CLOCK_HZ
from qwenimage_tpu.lab.schedule import Kernel, ProgramSchedule
from qwenimage_tpu.spmd.config import DiTConfig, is_modulation, parameter_shapes
from qwenimage_tpu.spmd.placement import compact_block

from .collectives import KINDS, Collective
from .program import CompiledPlan, PlanCase
from .slices import GIB, Slice, ring_ways
from .stages import TEXT_ENCODER, decoding_seconds, text_seconds

OURS = {
    "attention": r"joint_attention",
    "QK norm and RoPE": r"qk_norm_rope",
    "norms and modulation": r"layer_norm_modulate|gated_residual_layer_norm_modulate|rms_norm",
}
REST, COLLECTIVES = "matrix products and what XLA fuses", "collectives"
TEXT, DECODING = "text encoding", "decoding"
# For the VAE's weights, its activations and the text encoder's.
SPARE_BYTES = 2 * GIB


@dataclass(frozen=True)
class Estimate:
    """Predicted seconds of one call of the denoising program, for all its images.

    parts: by kind, without overlap; they sum to `seconds`. compute, communication: the same by what they wait
    for. flops: of the transformer, for all images. cycles: executed by a core, by kind. text_ways: over how
    many devices the text encoder is split; None if it must stay on the host's CPU, whose time is not known.
    """

    parts: dict[str, float]
    cycles: dict[str, int]
    compute: float
    communication: float
    flops: float
    text_ways: int | None

    @property
    def denoising_seconds(self) -> float:
        """Of all steps, without any overlap."""
        return self.seconds - self.parts.get(TEXT, 0.0) - self.parts[DECODING]

    @property
    def seconds(self) -> float:
        """Without any overlap of compute and communication."""
        return self.compute + self.communication

    @property
    def overlapped_seconds(self) -> float:
        """With as much overlap as there can be, which is none with what comes before and after."""
        around = self.seconds - self.denoising_seconds
        return around + max(self.compute - around, self.communication)


def estimate(plan: CompiledPlan) -> Estimate:
    """The prediction for a compiled case."""
    where = plan.case.slice
    clock = CLOCK_HZ[where.generation]
    parts: dict[str, float] = dict.fromkeys([*OURS, REST, COLLECTIVES], 0.0)
    cycles: dict[str, int] = dict.fromkeys(parts, 0)
    parts[REST] = plan.schedule.top_level / clock
    cycles[REST] = plan.schedule.top_level
    for kernel in plan.schedule.kernels:
        kind = kind_of(kernel.name)
        cycles[kind] += kernel.calls * kernel.cycles
        if kind != COLLECTIVES:
            parts[kind] += kernel.calls * kernel_seconds(kernel, where)
    scheduled = {kernel.name: kernel.cycles / clock for kernel in plan.schedule.kernels}
    for collective in plan.collectives:
        seconds = collective.seconds(ring_bytes_per_second(where, plan.case.model, collective))
        parts[COLLECTIVES] += collective.calls * max(seconds, scheduled.get(collective.name, 0.0))
    ways = text_encoder_ways(plan)
    if ways is not None:
        parts[TEXT] = _text_seconds(plan.case, ways)
    parts[DECODING] = plan.case.images * decoding_seconds(where.generation, plan.case.pixels)
    flops = model_flops(plan.case)
    compute = sum(seconds for kind, seconds in parts.items() if kind != COLLECTIVES)
    # On v5e and v5p the schedule can be shorter than what the matrix units can do.
    missing = flops / where.flops - sum(parts[kind] for kind in [*OURS, REST])
    if missing > 0:
        parts[REST] += missing
        compute += missing
    return Estimate(parts, cycles, compute, parts[COLLECTIVES], flops, ways)


def text_encoder_ways(plan: CompiledPlan) -> int | None:
    """The model axis, if the text encoder's heads divide over it and it fits beside the transformer."""
    where, ways = plan.case.slice, plan.case.model
    if TEXT_ENCODER.key_value_heads % ways:
        return None
    needed = plan.memory.total + TEXT_ENCODER.weight_bytes(ways) + SPARE_BYTES
    return ways if needed <= where.hbm_bytes else None


def _text_seconds(case: PlanCase, ways: int) -> float:
    where = case.slice
    seconds = case.rows * text_seconds(where.generation, case.text_tokens, ways)
    if ways > 1:
        sums = TEXT_ENCODER.all_reduces(case.text_tokens, ways, case.rows)
        seconds += sums.calls * sums.seconds(ring_bytes_per_second(where, case.model, sums))
    return seconds


def kind_of(kernel: str) -> str:
    """Of the parts of an estimate, the one that a kernel or fusion of this name belongs to."""
    if kernel.startswith(KINDS):
        return COLLECTIVES
    return next((kind for kind, pattern in OURS.items() if re.match(pattern, kernel)), REST)


def kernel_seconds(kernel: Kernel, where: Slice) -> float:
    """Of one call: its cycles or its bytes, whichever takes longer."""
    return max(kernel.cycles / CLOCK_HZ[where.generation], kernel.traffic.total / where.hbm_bytes_per_second)


def schedule_seconds(schedule: ProgramSchedule, where: Slice) -> float:
    """Of a program on one device that sends nothing."""
    kernels = sum(kernel.calls * kernel_seconds(kernel, where) for kernel in schedule.kernels)
    return schedule.top_level / CLOCK_HZ[where.generation] + kernels


def ring_bytes_per_second(where: Slice, model: int, collective: Collective) -> float:
    """What a chip can send around the ring of a collective's chips.

    Those of a model axis are a compact block; others are taken for a line. A ring that passes through both
    devices of a tpu7x chip crosses to the next chip once in each direction, as one over single devices does.
    """
    chips = -(-collective.chips // where.chip.devices)
    block = compact_block(where.grid, chips) if collective.chips == model else None
    ways = 1 if block is None else ring_ways(where, block)
    return ways * where.chip.link_bytes_per_second


def model_flops(case: PlanCase) -> float:
    """Operations that the model needs: two per weight and token, and attention's two products."""
    config, steps, rows = case.config, case.steps, case.rows
    image, text = case.image_tokens, case.text_tokens
    attention = 4 * (image + text) ** 2 * config.channels * config.layers
    per_row = attention + _linear_flops(config, lambda name: _tokens(name, image, text))
    # The modulation depends on the step alone.
    modulation = _linear_flops(config, lambda name: int(is_modulation(name)))
    return float(steps * (rows * per_row + modulation))


def _linear_flops(config: DiTConfig, tokens: Callable[[str], int]) -> int:
    return sum(
        2 * math.prod(shape) * tokens(name)
        for name, shape in parameter_shapes(config).items()
        if name.endswith(".weight")
    )


def _tokens(name: str, image: int, text: int) -> int:
    """How many tokens a weight is multiplied with."""
    if is_modulation(name) or "norm_" in name:
        return 0
    return text if re.search(r"txt_|add_", name) else image
