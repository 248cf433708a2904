"""VMEM budget: what one kernel may ask for, and the error when it asks for more."""

import math
from collections.abc import Iterable

# One limit for every supported generation. v5e, v5p and v6e have 128 MiB; tpu7x has 64 MiB, and
# its compiler keeps part of that, so 48 MiB is what fits everywhere.
VMEM_LIMIT_BYTES = 48 * 2**20
# Pallas keeps two copies of each block so that the next one's transfer hides behind this step.
PIPELINE_BUFFERS = 2


def block_bytes(shapes: Iterable[tuple[int, ...]], itemsize: int) -> int:
    """Bytes of VMEM that the pipeline holds for blocks of these shapes."""
    return PIPELINE_BUFFERS * itemsize * sum(math.prod(shape) for shape in shapes)


def f32_bytes(shapes: Iterable[tuple[int, ...]]) -> int:
    """Bytes of f32 arrays that are held once."""
    return 4 * sum(math.prod(shape) for shape in shapes)


def check_fits(kernel: str, estimate: int, remedy: str) -> None:
    """Raise NotImplementedError when `estimate` bytes are more than a kernel may use."""
    if estimate > VMEM_LIMIT_BYTES:
        raise NotImplementedError(
            f"{kernel} needs {estimate / 2**20:.1f} MiB of VMEM, more than the"
            f" {VMEM_LIMIT_BYTES / 2**20:.0f} MiB that every supported TPU has to give; {remedy}"
        )
