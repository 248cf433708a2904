"""Block of rows for kernels that normalise whole rows of one stream."""

import dataclasses

from . import vmem
from .layouts import ROW_ALIGNMENT, round_up


@dataclasses.dataclass(frozen=True)
class RowConfig:
    """Tokens that a grid step works on, a multiple of 16."""

    block_rows: int

    def __post_init__(self) -> None:
        if self.block_rows <= 0 or self.block_rows % ROW_ALIGNMENT:
            raise ValueError(
                f"block_rows must be a positive multiple of {ROW_ALIGNMENT}, got {self.block_rows}"
            )

    @classmethod
    def heuristic(cls, tokens: int, channels: int, itemsize: int, activations: int) -> "RowConfig":
        """As many rows as fit, up to 512, for a kernel that reads and writes `activations` arrays in all."""
        config = cls(min(512, round_up(tokens, ROW_ALIGNMENT)))
        while config.block_rows > ROW_ALIGNMENT and (
            config.vmem_bytes(channels, itemsize, activations) > vmem.VMEM_LIMIT_BYTES
        ):
            config = cls(round_up(config.block_rows // 2, ROW_ALIGNMENT))
        return config

    def vmem_bytes(self, channels: int, itemsize: int, activations: int) -> int:
        """Estimate: the pipeline's blocks, three f32 copies of one, the per-channel vectors and the index."""
        blocks = vmem.block_bytes([(activations * self.block_rows, channels)], itemsize)
        vectors = vmem.block_bytes([(3 * 2 * 8, channels), (self.block_rows, 128)], 4)
        return blocks + vectors + 3 * 4 * self.block_rows * channels
