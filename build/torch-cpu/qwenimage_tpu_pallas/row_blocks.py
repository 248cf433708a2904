"""Block of rows for kernels that work on whole rows of channels."""

import dataclasses
from collections.abc import Callable

from . import vmem
from .layouts import ROW_ALIGNMENT, check_block_size, round_up

LARGEST_BLOCK = 512


@dataclasses.dataclass(frozen=True)
class RowConfig:
    """Tokens that a grid step works on, a multiple of 16."""

    block_rows: int

    def __post_init__(self) -> None:
        check_block_size("block_rows", self.block_rows, ROW_ALIGNMENT)

    @classmethod
    def heuristic(cls, tokens: int, vmem_bytes: Callable[[int], int]) -> "RowConfig":
        """As many rows as there are tokens and as fit by the kernel's VMEM estimate, up to 512."""
        rows = min(LARGEST_BLOCK, round_up(tokens, ROW_ALIGNMENT))
        while rows > ROW_ALIGNMENT and vmem_bytes(rows) > vmem.VMEM_LIMIT_BYTES:
            rows = round_up(rows // 2, ROW_ALIGNMENT)
        return cls(rows)


def choose_block_rows(
    kernel: str, config: RowConfig | None, tokens: int, vmem_bytes: Callable[[int], int]
) -> int:
    """The config's rows, or the heuristic's; NotImplementedError when they do not fit VMEM."""
    rows = (config or RowConfig.heuristic(tokens, vmem_bytes)).block_rows
    vmem.check_fits(kernel, vmem_bytes(rows), "use fewer channels per chip, bf16, or smaller blocks")
    return rows


def norm_vmem_bytes(block_rows: int, channels: int, itemsize: int, activations: int) -> int:
    """Estimate for a kernel that normalises rows and reads and writes `activations` arrays in all.

    The pipeline's blocks, three f32 copies of one, the per-channel vectors and the index.
    """
    blocks = vmem.block_bytes([(activations * block_rows, channels)], itemsize)
    vectors = vmem.block_bytes([(3 * 2 * 8, channels), (block_rows, 128)], 4)
    return blocks + vectors + 3 * 4 * block_rows * channels
