"""Pad text embeddings to a few fixed lengths, so that a new prompt does not mean a new compilation."""

from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F

from .options import TEXT_BUCKETS

Encoded = tuple[torch.Tensor, torch.Tensor]


def smallest_bucket(tokens: int, buckets: Sequence[int] = TEXT_BUCKETS) -> int:
    """The smallest bucket that holds this many tokens; ValueError if none does."""
    fitting = [bucket for bucket in buckets if bucket >= tokens]
    if not fitting:
        raise ValueError(
            f"a text must fit the largest bucket of {max(buckets)} tokens, but has {tokens}; shorten it"
        )
    return min(fitting)


def pad_to_bucket(
    embeds: torch.Tensor, mask: torch.Tensor | None, buckets: Sequence[int] = TEXT_BUCKETS
) -> Encoded:
    """Pad at the end with zeros to the smallest bucket that fits.

    embeds: [batch, tokens, dim], any float dtype. mask: [batch, tokens], 1 where a token is valid, or None
    if all are (what `encode_prompt` returns when it padded nothing).
    Returns embeds [batch, bucket, dim] and the mask [batch, bucket], int64 when it was None.
    Raises ValueError for mismatched shapes and for more tokens than the largest bucket.
    """
    if embeds.ndim != 3:
        raise ValueError(f"embeds must be [batch, tokens, dim], got shape {tuple(embeds.shape)}")
    if mask is None:
        mask = torch.ones(embeds.shape[:2], dtype=torch.int64, device=embeds.device)
    if mask.shape != embeds.shape[:2]:
        raise ValueError(
            f"mask must be [batch, tokens] = {tuple(embeds.shape[:2])} like embeds, got shape"
            f" {tuple(mask.shape)}"
        )
    padding = smallest_bucket(embeds.shape[1], buckets) - embeds.shape[1]
    return F.pad(embeds, (0, 0, 0, padding)), F.pad(mask, (0, padding))


def use_text_buckets(pipe: Any, buckets: Sequence[int] = TEXT_BUCKETS) -> None:
    """Let `pipe.encode_prompt` pad every text to the smallest bucket that fits, until `undo_text_buckets`.

    pipe: a QwenImagePipeline. Its own calls then get embeddings [images, bucket, dim] and always a mask
    [images, bucket], 1 for a valid token: of prompts, and of embeddings passed by hand with a mask or
    without. A prompt's own tokens keep their values. With the text encoder on the CPU only the result is
    padded; elsewhere its input is too, so that it is compiled once per bucket.
    Several images of a prompt stand together, as do their masks: diffusers 0.42.1 orders the embeddings
    [a, a, b, b] but the masks [a, b, a, b].
    Afterwards a prompt that is longer than the largest bucket raises ValueError, as do bad buckets now.
    """
    _check_buckets(buckets)

    @torch.no_grad()
    def encode_prompt(
        self: Any,
        prompt: str | list[str] | None = None,
        device: torch.device | None = None,
        num_images_per_prompt: int = 1,
        prompt_embeds: torch.Tensor | None = None,
        prompt_embeds_mask: torch.Tensor | None = None,
        max_sequence_length: int = 1024,
    ) -> Encoded:
        if prompt_embeds is None:
            texts = [prompt] if isinstance(prompt, str) else list(prompt or ())
            prompt_embeds, prompt_embeds_mask = _encode(self, texts, buckets)
        if prompt_embeds_mask is not None:
            prompt_embeds_mask = prompt_embeds_mask[:, :max_sequence_length]
        padded = pad_to_bucket(prompt_embeds[:, :max_sequence_length], prompt_embeds_mask, buckets)
        embeds, mask = (part.to(device or self._execution_device) for part in padded)
        images = num_images_per_prompt
        return embeds.repeat_interleave(images, dim=0), mask.repeat_interleave(images, dim=0)

    pipe.encode_prompt = MethodType(encode_prompt, pipe)


def _check_buckets(buckets: object) -> None:
    lengths = list(buckets) if isinstance(buckets, Sequence) else []
    if not lengths or not all(type(length) is int and length > 0 for length in lengths):
        raise ValueError(f"text buckets must be one or more positive lengths, but are {buckets!r}")


def undo_text_buckets(pipe: Any) -> None:
    """Give the pipeline its own `encode_prompt` back."""
    del pipe.encode_prompt


def _encode(pipe: Any, texts: list[str], buckets: Sequence[int]) -> Encoded:
    """Embeddings [texts, tokens, dim], 0 where the mask [texts, tokens] is, on the text encoder's device."""
    device, dropped = pipe.text_encoder.device, pipe.prompt_template_encode_start_idx
    filled = [pipe.prompt_template_encode.format(text) for text in texts]
    lengths = [len(ids) - dropped for ids in pipe.tokenizer(filled).input_ids]
    longest = max(lengths)
    try:
        bucket = smallest_bucket(longest, buckets)
    except ValueError as error:
        raise ValueError(f"{texts[lengths.index(longest)][:40]!r}...: {error}") from error
    tokens = pipe.tokenizer(
        filled,
        padding="max_length",
        max_length=dropped + (longest if device.type == "cpu" else bucket),
        padding_side="right",
        return_tensors="pt",
    ).to(device)
    # Without its head, whose logits nobody reads.
    output = pipe.text_encoder.model(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask)
    mask = tokens.attention_mask[:, dropped:]
    return output.last_hidden_state[:, dropped:] * mask[..., None].to(pipe.text_encoder.dtype), mask
