"""How joint attention is cut into steps, matmuls and copies: everything about it that is static."""

import dataclasses
import functools

from . import attention_table, vmem
from .layouts import HEAD_DIM, LANES, ROW_ALIGNMENT, check_block_size, round_up
from .softmax import Softmax

# What VMEM holds for the steps in flight. Queries: of this step and of the next three. Outputs: of this step
# and of the one before, which are being written, and of the one before that, which is being sent; one more,
# because a slot is found by a bit mask.
QUERY_SLOTS, OUT_SLOTS = 4, 4
# Keys that share a scale in int8, and rows of its tiles.
INT8_PIECE, INT8_ROWS = 128, 32
SUBLANES = 8
# Keys times queries of one step, which its code is proportional to: 11 million are 1.1 MB.
MAX_LOGITS_PER_STEP = 2304 * 4608


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Block sizes, in tokens; all multiples of 128.

    Attributes:
        block_q: queries, of the image and of the text together, that one step works on.
        block_q_compute: queries of one matmul.
        block_kv: keys that share one maximum; read by the online softmax only.
        block_kv_compute: keys of one matmul.
    """

    block_q: int
    block_q_compute: int
    block_kv: int
    block_kv_compute: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check_block_size(field.name, getattr(self, field.name), LANES)


def split(size: int, piece: int) -> list[tuple[int, int]]:
    """Start and length of the pieces, of which the last may be shorter."""
    return [(start, min(piece, size - start)) for start in range(0, size, piece)]


@dataclasses.dataclass(frozen=True)
class Rows:
    """One stream's queries in one step: rows ``[block * size, (block + 1) * size)`` of `tokens`."""

    tokens: int
    size: int

    @property
    def full_blocks(self) -> int:
        return self.tokens // self.size

    @property
    def rest(self) -> int:
        return self.tokens % self.size


@dataclasses.dataclass(frozen=True)
class KeyTile:
    """Keys of one matmul. `masked`: some may not count, so it reads the cleaned copy of the tail."""

    start: int
    size: int
    masked: bool


@dataclasses.dataclass(frozen=True)
class AttentionLayout:
    """Rows of the buffers and the order of work for one choice of token counts, softmax and blocks.

    Keys lie in one buffer: whole tiles of image keys, then the tail, whose rows may not all count: the
    image keys that are left, padded to a tile of rows, then the text keys.
    """

    image_tokens: int
    text_tokens: int
    softmax: Softmax
    config: AttentionConfig

    @functools.cached_property
    def blocks(self) -> int:
        """Steps of one head. Both streams are spread over all of them."""
        blocks = -(-(self.image_tokens + self.text_tokens) // self.config.block_q)
        while blocks * (self.config.block_q - self._text_size(blocks)) < self.image_tokens:
            blocks += 1
        return blocks

    def _text_size(self, blocks: int) -> int:
        return round_up(-(-self.text_tokens // blocks), ROW_ALIGNMENT)

    @property
    def text_rows(self) -> Rows:
        return Rows(self.text_tokens, self._text_size(self.blocks))

    @property
    def image_rows(self) -> Rows:
        return Rows(self.image_tokens, self.config.block_q - self.text_rows.size)

    @property
    def key_slots(self) -> int:
        """Heads whose keys are held: this one's, and those of the next two steps."""
        return 2 if self.blocks > 1 else 4

    @property
    def query_tiles(self) -> list[tuple[int, int]]:
        return split(self.config.block_q, self.config.block_q_compute)

    @property
    def whole_keys(self) -> int:
        return self.image_tokens // self.config.block_kv_compute * self.config.block_kv_compute

    @property
    def tail_image(self) -> int:
        """Image keys of the tail; the text keys begin at the next multiple of 16 rows."""
        return self.image_tokens - self.whole_keys

    @property
    def tail_text_start(self) -> int:
        return round_up(self.tail_image, ROW_ALIGNMENT)

    @property
    def tail(self) -> int:
        rows = INT8_ROWS if self.softmax == "int8" else ROW_ALIGNMENT
        return round_up(self.tail_text_start + self.text_tokens, rows)

    @property
    def keys(self) -> int:
        return self.whole_keys + self.tail

    @functools.cached_property
    def key_groups(self) -> list[list[KeyTile]]:
        """Tiles whose logits share a maximum; one by one where none is needed."""
        size = self.config.block_kv_compute
        tiles = [KeyTile(start, length, masked=False) for start, length in split(self.whole_keys, size)]
        tiles += [
            KeyTile(self.whole_keys + start, length, masked=True) for start, length in split(self.tail, size)
        ]
        per_group = max(1, self.config.block_kv // size) if self.softmax == "online" else 1
        return [tiles[start : start + length] for start, length in split(len(tiles), per_group)]

    @property
    def int8_pieces(self) -> list[tuple[int, int]]:
        """Keys that share a scale: first and number. Image keys of whole tiles do not mix with the tail."""
        tail = [(self.whole_keys + first, size) for first, size in split(self.tail, INT8_PIECE)]
        return split(self.whole_keys, INT8_PIECE) + tail

    @property
    def logit_slots(self) -> int:
        """Buffers for a group's logits: the next group's are computed while this one's are used.

        The last group of a step computes the first of the next step, so of an odd number one more is needed.
        """
        groups = len(self.key_groups) * len(self.query_tiles)
        return 2 if groups % 2 == 0 else min(groups, 3)

    def vmem_bytes(self, itemsize: int) -> int:
        """VMEM that a call takes: of activations, of statistics and logits, and of what is quantized."""
        block_q, query_tile = self.config.block_q, self.query_tiles[0][1]
        group = max(sum(tile.size for tile in tiles) for tiles in self.key_groups)
        activations = (
            (QUERY_SLOTS + OUT_SLOTS) * block_q + (2 * self.key_slots + 1) * self.keys + 2 * self.tail
        )
        if self.softmax == "online":
            logits = [(group + SUBLANES, query_tile)] * self.logit_slots
        else:
            logits = [(group, query_tile)]
        statistics: list[tuple[int, ...]] = [
            (HEAD_DIM + 2 * SUBLANES, block_q),
            (self.tail, LANES),
            *logits,
        ]
        int8 = 0
        if self.softmax == "int8":
            pieces = len(self.int8_pieces)
            statistics += [(SUBLANES, block_q), (2 * pieces, SUBLANES, LANES), (SUBLANES, HEAD_DIM)]
            int8 = (block_q + 2 * self.keys) * HEAD_DIM
        return activations * HEAD_DIM * itemsize + vmem.f32_bytes(statistics) + int8


def default_config(
    image_tokens: int, text_tokens: int, softmax: Softmax, dtype: str, generation: str | None
) -> AttentionConfig:
    """What the table of tuned blocks has for this TPU, and where it has nothing, blocks of moderate size."""
    tokens = image_tokens + text_tokens
    rows = [
        row
        for row in attention_table.ROWS
        if (row.generation, row.softmax) == (generation, softmax) and row.tokens >= tokens
    ]
    if rows and dtype == "bfloat16":
        return _fitted(AttentionConfig(*min(rows, key=lambda row: row.tokens).blocks), tokens)
    # A f32 matmul is six of bf16, and each of them is code.
    compute, logits = (768, MAX_LOGITS_PER_STEP) if dtype == "bfloat16" else (256, MAX_LOGITS_PER_STEP // 8)
    block_q = max(compute, logits // tokens // compute * compute)
    if softmax == "int8":
        return _fitted(AttentionConfig(block_q, 256, 512, 768), tokens)
    return _fitted(AttentionConfig(block_q, compute, 512, 256), tokens)


def _fitted(config: AttentionConfig, tokens: int) -> AttentionConfig:
    """With blocks no larger than there are tokens, all queries spread evenly over the steps."""
    largest = round_up(tokens, LANES)
    blocks = -(-tokens // config.block_q)
    block_q = round_up(-(-tokens // blocks), LANES)
    return AttentionConfig(
        block_q,
        min(config.block_q_compute, block_q),
        min(config.block_kv, largest),
        min(config.block_kv_compute, largest),
    )
