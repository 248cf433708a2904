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
ROWS: tuple[Row, ...] = (
    Row("tpu7x", "bounded", 4608, (4608, 768, 512, 256), 194098, "libtpu 0.0.50"),
    Row("tpu7x", "bounded", 7145, (1792, 896, 512, 256), 477759, "libtpu 0.0.50"),
    Row("tpu7x", "bounded", 9216, (2304, 768, 512, 256), 777031, "libtpu 0.0.50"),
    Row("v5e", "bounded", 4608, (2304, 1152, 512, 512), 449663, "libtpu 0.0.50"),
    Row("v5e", "bounded", 7145, (1792, 896, 512, 512), 1160844, "libtpu 0.0.50"),
    Row("v5e", "bounded", 9216, (2304, 1152, 512, 512), 1781975, "libtpu 0.0.50"),
    Row("v5e", "int8", 4608, (4608, 256, 512, 512), 416850, "libtpu 0.0.50"),
    Row("v5e", "online", 4608, (4608, 1152, 512, 256), 545278, "libtpu 0.0.50"),
    Row("v5e", "online", 7145, (1792, 896, 1024, 512), 1347504, "libtpu 0.0.50"),
    Row("v5e", "online", 9216, (2304, 1152, 512, 512), 2186762, "libtpu 0.0.50"),
    Row("v5p", "bounded", 4608, (2304, 1152, 512, 512), 232844, "libtpu 0.0.50"),
    Row("v5p", "bounded", 7145, (1792, 896, 512, 512), 561148, "libtpu 0.0.50"),
    Row("v5p", "bounded", 9216, (2304, 1152, 512, 512), 907828, "libtpu 0.0.50"),
    Row("v5p", "int8", 4608, (4608, 256, 512, 512), 209384, "libtpu 0.0.50"),
    Row("v6e", "bounded", 4608, (4608, 768, 512, 256), 191681, "libtpu 0.0.50"),
    Row("v6e", "bounded", 7145, (1792, 896, 512, 256), 503296, "libtpu 0.0.50"),
    Row("v6e", "bounded", 9216, (2304, 768, 512, 256), 763121, "libtpu 0.0.50"),
    Row("v6e", "exact", 4608, (4608, 768, 512, 256), 201752, "libtpu 0.0.50"),
    Row("v6e", "exact", 7145, (896, 896, 512, 256), 520999, "libtpu 0.0.50"),
    Row("v6e", "exact", 9216, (2304, 768, 512, 256), 805740, "libtpu 0.0.50"),
    Row("v6e", "int8", 4608, (4608, 256, 512, 768), 178890, "libtpu 0.0.50"),
    Row("v6e", "int8", 7145, (1792, 256, 512, 1024), 476956, "libtpu 0.0.50"),
    Row("v6e", "int8", 9216, (2304, 256, 512, 768), 737376, "libtpu 0.0.50"),
    Row("v6e", "online", 4608, (4608, 768, 512, 256), 248336, "libtpu 0.0.50"),
    Row("v6e", "online", 7145, (1792, 896, 1024, 256), 625670, "libtpu 0.0.50"),
    Row("v6e", "online", 9216, (2304, 768, 1024, 512), 988734, "libtpu 0.0.50"),
)
