import pytest
import torch

from qwenimage_tpu.text_buckets import pad_to_bucket, smallest_bucket


@pytest.mark.parametrize(
    ("tokens", "bucket"), [(1, 128), (127, 128), (128, 128), (129, 256), (513, 1024), (1024, 1024)]
)
def test_smallest_bucket_that_fits(tokens: int, bucket: int):
    assert smallest_bucket(tokens) == bucket


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 127, 128, 129])
def test_without_a_mask_all_given_tokens_are_valid(tokens: int, dtype: torch.dtype):
    embeds = torch.randn(2, tokens, 8, dtype=dtype)
    padded, mask = pad_to_bucket(embeds, None)
    bucket = smallest_bucket(tokens)
    assert padded.shape == (2, bucket, 8)
    assert padded.dtype == dtype
    assert torch.equal(padded[:, :tokens], embeds)
    assert not padded[:, tokens:].any()
    assert mask.tolist() == [[1] * tokens + [0] * (bucket - tokens)] * 2


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_a_mask_is_kept_and_extended(dtype: torch.dtype):
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]]).to(dtype)
    _, padded = pad_to_bucket(torch.ones(2, 3, 4), mask, buckets=(5,))
    assert padded.dtype == dtype
    assert padded.tolist() == [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0]]


def test_a_full_bucket_is_returned_as_it_is():
    embeds = torch.randn(1, 4, 2)
    padded, mask = pad_to_bucket(embeds, None, buckets=(4, 8))
    assert torch.equal(padded, embeds)
    assert mask.all()


@pytest.mark.parametrize(
    ("embeds", "mask", "message"),
    [
        (torch.ones(1, 1025, 2), None, "largest bucket of 1024 tokens, but has 1025; shorten"),
        (torch.ones(3, 2), None, r"must be \[batch, tokens, dim\], got shape \(3, 2\)"),
        (torch.ones(1, 3, 2), torch.ones(1, 4), r"= \(1, 3\) like embeds, got shape \(1, 4\)"),
    ],
    ids=["too long", "no batch", "mask of another length"],
)
def test_bad_input(embeds: torch.Tensor, mask: torch.Tensor | None, message: str):
    with pytest.raises(ValueError, match=message):
        pad_to_bucket(embeds, mask)
