"""The matmul cycles that attention cannot do without, on each TPU generation.

An MXU keeps a square of one operand, 128 x 128 or 256 x 256, and streams rows of the other through it. One
`vmatmul` takes a vector register of bf16: 16 rows. How many cycles apart the compiler puts them, on each MXU,
was read from its schedules of plain matmul kernels (libtpu 0.0.50; 1024 to 2048 rows, so that loading the
square hides behind the rows):

v6e, tpu7x: 2 MXUs of 256 x 256, 8 cycles. On a tpu7x that holds while results leave the MXU, as all logits
    must. Where it sums over the contraction in place, the compiler issues up to one every 3 cycles, but then
    the next square must be loaded, which takes the 64 cycles that 128 rows (of v^T) take at 8 a register.
v5e, v5p: 4 MXUs of 128 x 128 on each core, 12 cycles. Loading a square takes 20 to 30 more that do not hide:
    little where all queries or keys stream through it, about a quarter where 128 rows do, as in v^T p^T. The
    floor is without them.

At the published bf16 peak and clock a register takes 8 cycles on v6e and tpu7x as well, but 16 on v5e and
v5p, one per row. So on these two a schedule can be shorter than the hardware can run it: `Floor.peak` is the
limit of the hardware, `Floor.scheduled` that of the schedule, which is what can be compared with it.

A register of int8 holds 32 rows and takes as long as one of bf16, so half the time per row; but on a tpu7x
the compiler gives a row of int8 as many cycles as one of bf16.

Attention's q k^T contracts over 128: all of the rows of a small MXU, half of a large one's, which then does
half of what it could. p v fills both when computed as v^T p^T. For 6 heads of 4608 tokens on a v6e, q k^T
takes 6 * 4608/16 * 4608/256 = 31104 registers and p v half of that, as 256 keys are contracted at once:
46656 * 8 cycles / 2 MXUs = 186624.
"""

from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from qwenimage_tpu_pallas.layouts import HEAD_DIM
from qwenimage_tpu_pallas.shapes import JointShape

from .hardware import CORES

ROWS = 16  # of bf16 in a vector register


@dataclass(frozen=True)
class MatrixUnits:
    """The MXUs of a core.

    size: of their square. scheduled, peak: cycles between two vmatmuls on one MXU, as the compiler puts them,
    and at the published peak. int8_rows: how many take as long as a register of bf16.
    """

    count: int
    size: int
    scheduled: int
    peak: int
    int8_rows: int

    def registers(self, rows: int, contraction: int, columns: int) -> Fraction:
        """vmatmuls of ``[rows, contraction] @ [contraction, columns]``.

        Rows and columns may split evenly; a contraction shorter than the square, or what remains of a longer
        one, takes as long as a full one.
        """
        return Fraction(rows, ROWS) * ceil(Fraction(contraction, self.size)) * Fraction(columns, self.size)


MATRIX_UNITS = {
    "v5e": MatrixUnits(count=4, size=128, scheduled=12, peak=16, int8_rows=32),
    "v5p": MatrixUnits(count=4, size=128, scheduled=12, peak=16, int8_rows=32),
    "v6e": MatrixUnits(count=2, size=256, scheduled=8, peak=8, int8_rows=32),
    "tpu7x": MatrixUnits(count=2, size=256, scheduled=8, peak=8, int8_rows=16),
}


@dataclass(frozen=True)
class Floor:
    """Cycles that both matmuls take at least on each core, in the compiler's schedule and at the peak."""

    scheduled: int
    peak: int


def matmul_floor(generation: str, shape: JointShape, heads: int, *, int8_logits: bool = False) -> Floor:
    """Of bf16; int8_logits: q k^T in int8, p v in bf16."""
    units = MATRIX_UNITS[generation]
    tokens = shape.image_tokens + shape.text_tokens
    logits = units.registers(tokens, HEAD_DIM, tokens)
    if int8_logits:
        logits *= Fraction(ROWS, units.int8_rows)
    values = units.registers(HEAD_DIM, tokens, tokens)
    per_unit = heads * (logits + values) / (units.count * CORES[generation])
    return Floor(ceil(per_unit * units.scheduled), ceil(per_unit * units.peak))
