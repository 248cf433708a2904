"""What comes before and after the denoising: the text encoder and the VAE's decoder, on the first chips.

Their predicted times lie in stages.json, because the compiler takes minutes for the decoder alone;
`python -m qwenimage_tpu.plan.measure_stages` made it.
"""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .collectives import Collective
from .program import BF16_BYTES

TABLE = Path(__file__).with_name("stages.json")
TEMPLATE_TOKENS = 34  # of the pipeline's prompt template, which stand before the prompt's


@dataclass(frozen=True)
class TextEncoder:
    """The language model of Qwen/Qwen2.5-VL-7B-Instruct, by its config.json; QwenImage uses no more of it."""

    layers: int = 28
    channels: int = 3584
    hidden: int = 18944
    heads: int = 28
    key_value_heads: int = 4
    vocabulary: int = 152064

    @property
    def head_dim(self) -> int:
        return self.channels // self.heads

    def weight_bytes(self, ways: int) -> int:
        """Of a device, if the layers are split over this many; the embeddings are not."""
        key_value = self.key_value_heads * self.head_dim
        attention = self.channels * (2 * self.channels + 2 * key_value)
        layers = self.layers * (attention + 3 * self.channels * self.hidden)
        return BF16_BYTES * (layers // ways + self.vocabulary * self.channels)

    def all_reduces(self, tokens: int, ways: int, texts: int) -> Collective:
        """Two per layer and text, of the activations."""
        sent = BF16_BYTES * (tokens + TEMPLATE_TOKENS) * self.channels
        return Collective("text encoder", "all-reduce", ways, sent, 2 * self.layers * texts)


TEXT_ENCODER = TextEncoder()


@functools.cache
def _table() -> dict[str, Any]:
    return json.loads(TABLE.read_text(encoding="utf-8"))["generations"]


def text_seconds(generation: str, text_tokens: int, ways: int) -> float:
    """Of one text's forward, without what its devices send."""
    tokens = text_tokens + TEMPLATE_TOKENS
    return tokens * TEXT_ENCODER.layers * _table()[generation]["text_layer_per_token"][str(ways)]


def decoding_seconds(generation: str, pixels: int) -> float:
    """Of one image."""
    return pixels * _table()[generation]["decoding_per_pixel"]
