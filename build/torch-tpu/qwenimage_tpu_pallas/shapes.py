"""Shapes that QwenImage really runs, one list for the tests, the compile checks and the benchmarks."""

import dataclasses

HEADS = 24
TEXT_EMBEDDING_CHANNELS = 3584
# 24 heads over four chips.
HEADS_PER_CHIP = 6


@dataclasses.dataclass(frozen=True)
class JointShape:
    """Token counts of the two streams; an image token is a square of 16 x 16 pixels."""

    image_tokens: int
    text_tokens: int

    def __str__(self) -> str:
        return f"{self.image_tokens}+{self.text_tokens}"


QWENIMAGE_SHAPES = (
    JointShape(4096, 512),  # 1024 x 1024
    JointShape(6889, 256),  # 1328 x 1328, the model's own square size: an odd token count
    JointShape(8192, 1024),  # an Edit model's image beside its input
)
