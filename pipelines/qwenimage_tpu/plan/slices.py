"""Slices of TPUs that can be rented: their chips, memory, links and prices."""

import math
import re
from dataclasses import dataclass

from qwenimage_tpu.lab.hardware import HBM_BYTES_PER_SECOND

GIB = 2**30


@dataclass(frozen=True)
class Generation:
    """What Google Cloud's documentation gives for a chip (docs.cloud.google.com/tpu/docs/<generation>).

    devices: of a chip, as jax counts them. flops: bf16 peak per second. hbm_bytes: per chip.
    link_bytes_per_second: one way over one of the chip's links: the bidirectional bandwidth per chip (400,
    1200, 800 and 1200 GB/s) over two ways and 4, 6, 4 and 6 links. wrap: how many chips a dimension of a
    slice must have at least for its ends to be joined. dollars_per_hour: on demand per chip, as
    cloud.google.com/tpu/pricing listed it for the cheapest region in 2026; it changes, so it can be given.
    """

    devices: int
    flops: float
    hbm_bytes: int
    link_bytes_per_second: float
    wrap: int
    dollars_per_hour: float


GENERATIONS = {
    "v5e": Generation(1, 197e12, 16 * GIB, 50e9, 16, 1.20),
    "v5p": Generation(1, 459e12, 95 * GIB, 100e9, 4, 4.20),
    "v6e": Generation(1, 918e12, 32 * GIB, 100e9, 16, 2.70),
    "tpu7x": Generation(2, 2307e12, 192 * GIB, 100e9, 4, 12.00),
}
TOPOLOGY = re.compile(r"(?P<generation>[a-z0-9]+):(?P<grid>\d+(x\d+){1,2})")


@dataclass(frozen=True)
class Slice:
    """A grid of chips of one generation."""

    generation: str
    grid: tuple[int, ...]

    @classmethod
    def parse(cls, topology: str) -> "Slice":
        """Of a topology such as "v6e:2x4" or "v5p:2x2x1". Raises ValueError for anything else."""
        match = TOPOLOGY.fullmatch(topology)
        if match is None or match["generation"] not in GENERATIONS:
            raise ValueError(
                f"a topology is a generation of {sorted(GENERATIONS)} and a grid, as in v6e:2x4 or"
                f" v5p:2x2x1, but is {topology!r}"
            )
        grid = tuple(map(int, match["grid"].split("x")))
        if min(grid) < 1:
            raise ValueError(f"every dimension of a grid must be at least 1, but is {match['grid']}")
        return cls(match["generation"], grid)

    @property
    def chip(self) -> Generation:
        return GENERATIONS[self.generation]

    @property
    def chips(self) -> int:
        return math.prod(self.grid)

    @property
    def devices(self) -> int:
        return self.chips * self.chip.devices

    @property
    def hbm_bytes(self) -> int:
        """Of a device."""
        return self.chip.hbm_bytes // self.chip.devices

    @property
    def hbm_bytes_per_second(self) -> float:
        """Of a device."""
        return HBM_BYTES_PER_SECOND[self.generation]

    @property
    def flops(self) -> float:
        """Peak of all chips in bf16, per second."""
        return self.chips * self.chip.flops

    def meshes(self, heads: int) -> list[tuple[int, int]]:
        """Every ("data", "model") shape whose model axis divides the heads, the largest model axis first."""
        return [
            (self.devices // model, model)
            for model in range(self.devices, 0, -1)
            if self.devices % model == 0 and heads % model == 0
        ]


def ring_ways(slice_: Slice, block: tuple[int, ...]) -> int:
    """How many directions of a link a ring over the block's chips can use at once.

    A ring uses both where it closes over neighbours: in a block of at least 2 x 2 with an even number of
    chips, or along a dimension whose ends are joined. Over a line it comes back on the links that it went.
    """
    wide = [n for n in block if n > 1]
    closed = len(wide) >= 2 and math.prod(wide) % 2 == 0
    wrapped = any(n == whole >= slice_.chip.wrap for n, whole in zip(block, slice_.grid, strict=True))
    return 2 if closed or wrapped else 1
