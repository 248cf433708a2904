"""Split the rows of a batch, true CFG's two branches among them, over the groups of a mesh's data axis."""

import math
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

Text = tuple[torch.Tensor, torch.Tensor]


class DataParallelTransformer(nn.Module):
    """Stands in for a pipeline's transformer, of which every group of the data axis has one.

    A call's rows, the pictures' and with guidance the negative prompt's behind them, are cut into as many
    equal parts as the number of groups allows; each group runs one, and all get all results. So a step with
    guidance is one call; the pipeline's second call, for the negative prompt, gets what the first one left.
    What does not divide is run by several groups alike.
    """

    def __init__(self, transformer: Any, mesh: DeviceMesh, negative: Text | None) -> None:
        """mesh: one-dimensional, of this device's fellows in the other groups. negative: embeddings and mask
        of the negative prompts, as the pipeline gets them; None without guidance.
        """
        super().__init__()
        self.transformer = transformer
        self._mesh = mesh
        self._negative = negative
        self._branch: str | None = None
        self._negative_output: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        """The transformer's own attributes: config, dtype, device."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("transformer"), name)

    @contextmanager
    def cache_context(self, name: str) -> Generator[None]:
        """As diffusers': the pipeline says here which branch it is about to run."""
        self._branch = name
        with self.transformer.cache_context(name):
            yield

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_hidden_states_mask: torch.Tensor,
        timestep: torch.Tensor,
        img_shapes: list[Any],
        **kwargs: Any,
    ) -> tuple[torch.Tensor]:
        """As the transformer's with ``return_dict=False``, its results of all rows of this branch."""
        if self._branch == "uncond":
            assert self._negative_output is not None
            return (self._negative_output,)
        images = len(hidden_states)
        text = encoder_hidden_states, encoder_hidden_states_mask
        if self._negative is not None:
            hidden_states, timestep = torch.cat([hidden_states] * 2), torch.cat([timestep] * 2)
            img_shapes = img_shapes * 2
            text = _concatenate(text, self._negative)
        part = self._part(len(hidden_states))
        output = self.transformer(
            hidden_states=hidden_states[part],
            encoder_hidden_states=text[0][part],
            encoder_hidden_states_mask=text[1][part],
            timestep=timestep[part],
            img_shapes=img_shapes[part],
            **kwargs,
        )[0]
        rows = self._gather(output)
        self._negative_output = rows[images : 2 * images]
        return (rows[:images],)

    def _part(self, rows: int) -> slice:
        parts = math.gcd(rows, self._mesh.size())
        size, mine = rows // parts, self._mesh.get_local_rank() % parts
        return slice(mine * size, (mine + 1) * size)

    def _gather(self, output: torch.Tensor) -> torch.Tensor:
        """The first groups' parts make up the batch; those of the others repeat them."""
        gathered = output.new_empty(self._mesh.size() * len(output), *output.shape[1:])
        dist.all_gather_into_tensor(gathered, output.contiguous(), group=self._mesh.get_group())
        return gathered


def _concatenate(first: Text, second: Text) -> Text:
    """Both texts' rows, padded to the longer bucket."""
    tokens = max(first[0].shape[1], second[0].shape[1])
    padded = [
        (F.pad(embeds, (0, 0, 0, tokens - embeds.shape[1])), F.pad(mask, (0, tokens - mask.shape[1])))
        for embeds, mask in (first, second)
    ]
    embeds, masks = zip(*padded, strict=True)
    return torch.cat(embeds), torch.cat(masks)
