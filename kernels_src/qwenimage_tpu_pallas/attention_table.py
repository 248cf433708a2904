"""Block sizes of joint attention with the fewest executed cycles. Written by `qwenimage-tpu tune`."""

from typing import NamedTuple


class Row(NamedTuple):
    """The best of a search.

    Attributes:
        generation: of the TPU.
        softmax: which one.
        tokens: image and text tokens together; the row serves shapes up to there.
        blocks: block_q, block_q_compute, block_kv and block_kv_compute.
        cycles: executed on one core, for six heads.
        compiler: that counted them.
    """

    generation: str
    softmax: str
    tokens: int
    blocks: tuple[int, int, int, int]
    cycles: int
    compiler: str


# For bf16.
ROWS: tuple[Row, ...] = ()
