"""Pad text embeddings to a few fixed lengths, so that a new prompt does not mean a new compilation."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from .options import TEXT_BUCKETS


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
) -> tuple[torch.Tensor, torch.Tensor]:
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
