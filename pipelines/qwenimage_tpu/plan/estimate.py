"""From a compiled program to seconds, images per hour and per dollar.

A kernel or fusion takes what its executed cycles take at the core's clock, or what its bytes take at the
memory's bandwidth, whichever is longer; all kernels together not less than the matrix products at the
published peak. A collective takes what its bytes take around a ring of its chips over their links, or its own
cycles if they are more. Without overlap, compute and collectives add up; with perfect overlap the longer of
both remains; a program lies between. Not in the model: the time to start the program, and stalls.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from qwenimage_tpu.lab.ahead_of_time import CLOCK_HZ
from qwenimage_tpu.lab.schedule import Kernel
from qwenimage_tpu.spmd.config import DiTConfig, is_modulation, parameter_shapes
from qwenimage_tpu.spmd.placement import compact_block

from .collectives import KINDS, Collective
from .program import CompiledPlan, PlanCase
from .slices import Slice, ring_ways

OURS = {
    "attention": r"joint_attention",
    "QK norm and RoPE": r"qk_norm_rope",
    "norms and modulation": r"layer_norm_modulate|gated_residual_layer_norm_modulate|rms_norm",
}
REST, COLLECTIVES = "matrix products and what XLA fuses", "collectives"


@dataclass(frozen=True)
class Estimate:
    """Predicted seconds of one call of the denoising program, for all its images.

    parts: by kind, without overlap; they sum to `seconds`. compute, communication: the same by what they wait
    for. flops: of the model, for all images. cycles: executed by a core, by kind.
    """

    parts: dict[str, float]
    cycles: dict[str, int]
    compute: float
    communication: float
    flops: float

    @property
    def seconds(self) -> float:
        """Without any overlap of compute and communication."""
        return self.compute + self.communication

    @property
    def overlapped_seconds(self) -> float:
        """With as much overlap as there can be."""
        return max(self.compute, self.communication)


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
    flops = model_flops(plan.case)
    compute = sum(seconds for kind, seconds in parts.items() if kind != COLLECTIVES)
    # On v5e and v5p the schedule can be shorter than what the matrix units can do.
    missing = flops / where.flops - compute
    if missing > 0:
        parts[REST] += missing
        compute += missing
    return Estimate(parts, cycles, compute, parts[COLLECTIVES], flops)


def kind_of(kernel: str) -> str:
    """Of the parts of an estimate, the one that a kernel or fusion of this name belongs to."""
    if kernel.startswith(KINDS):
        return COLLECTIVES
    return next((kind for kind, pattern in OURS.items() if re.match(pattern, kernel)), REST)


def kernel_seconds(kernel: Kernel, where: Slice) -> float:
    """Of one call: its cycles or its bytes, whichever takes longer."""
    return max(kernel.cycles / CLOCK_HZ[where.generation], kernel.traffic.total / where.hbm_bytes_per_second)


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
