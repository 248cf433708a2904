"""The AdaLN modulation of all layers and all steps, computed at once: it depends on the timestep alone."""

import functools
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from .options import SCHEDULE_ROWS


class ModulationTable:
    """A transformer that looks its modulation up by timestep, until `undo`.

    With ``e(t)`` the time embedding, row t of a block's tables is ``Linear(SiLU(e(t)))`` of `img_mod` and of
    `txt_mod`, ``[rows, 6 * channels]`` in the weights' dtype. Between the modules travels, instead of the
    embedding, the number of the row ``[batch]``. The linear layers may be split by columns over a mesh: each
    device computes its columns for all rows, and all tables are gathered at once. A timestep that is in no
    table gives NaN; nothing is read on the host.
    """

    def __init__(self, transformer: Any) -> None:
        """transformer: a QwenImageTransformer2DModel, patched with kernels or not.

        Raises NotImplementedError for one whose modulation depends on more than the timestep.
        """
        if transformer.time_text_embed.use_additional_t_cond:
            raise NotImplementedError(
                "the modulation of a model with use_additional_t_cond (Layered) depends on more than the"
                " timestep, so it has no table and cannot be sharded"
            )
        self._transformer = transformer
        self._streams = [
            stream for block in transformer.transformer_blocks for stream in (block.img_mod, block.txt_mod)
        ]
        self._replaced: list[nn.Module] = []
        self._replace(transformer.time_text_embed, _find_rows)
        for module in (*self._streams, transformer.norm_out.silu):
            self._replace(module, _look_up)

    def _replace(self, module: Any, function: Callable[..., torch.Tensor]) -> None:
        module.forward = MethodType(function, module)
        self._replaced.append(module)

    @torch.no_grad()
    def fill(self, timesteps: Sequence[torch.Tensor]) -> None:
        """Compute the tables of these scheduler timesteps, scalars on the device, and of timestep 0."""
        model = self._transformer
        keys = _keys(timesteps, model.dtype, model.device)
        time_embed = model.time_text_embed
        # It takes no more of the second argument than its dtype.
        embedding = F.silu(type(time_embed).forward(time_embed, keys, keys))
        _set_table(time_embed, keys)
        _set_table(model.norm_out.silu, embedding)
        for module, table in zip(self._streams, self._stream_tables(embedding), strict=True):
            _set_table(module, table)

    def _stream_tables(self, embedding: torch.Tensor) -> Sequence[torch.Tensor]:
        # Each an array of its own: at another offset in its storage it would be another program.
        parts = [_columns(stream[1], embedding) for stream in self._streams]
        weight = self._streams[0][1].weight
        if not isinstance(weight, DTensor):
            return parts
        columns, mesh = torch.stack(parts), weight.device_mesh
        gathered = columns.new_empty(mesh.size() * len(columns), *columns.shape[1:])
        dist.all_gather_into_tensor(gathered, columns, group=mesh.get_group())
        shards = gathered.unflatten(0, (mesh.size(), len(columns))).unbind(1)
        return [shard.movedim(0, 1).flatten(1) for shard in shards]

    def undo(self) -> None:
        """Make the transformer what it was."""
        for module in self._replaced:
            del module.forward
            if hasattr(module, "table"):
                del module.table


@contextmanager
def tabulated_modulation(pipe: Any) -> Generator[None]:
    """Inside, the pipeline's transformer has a table, filled whenever its scheduler's timesteps are set."""
    table, scheduler = ModulationTable(pipe.transformer), pipe.scheduler
    set_timesteps = scheduler.set_timesteps

    @functools.wraps(set_timesteps)
    def set_and_fill(*args: Any, **kwargs: Any) -> None:
        set_timesteps(*args, **kwargs)
        table.fill(scheduler.timesteps)

    scheduler.set_timesteps = set_and_fill
    try:
        yield
    finally:
        del scheduler.set_timesteps
        table.undo()


def _keys(timesteps: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What the pipeline makes of its timesteps; filled up with NaN."""
    empty = SCHEDULE_ROWS - (len(timesteps) + 1) % SCHEDULE_ROWS
    # Each a tensor of its own: the same one twice would be another program.
    nothing = [torch.full((), torch.nan, device=device) for _ in range(empty)]
    return torch.stack([torch.zeros((), device=device), *timesteps, *nothing]).to(dtype) / 1000


def _columns(linear: nn.Linear, rows: torch.Tensor) -> torch.Tensor:
    return F.linear(rows, *(_local(part) for part in (linear.weight, linear.bias)))


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _set_table(module: nn.Module, table: torch.Tensor) -> None:
    module.register_buffer("table", table, persistent=False)


def _find_rows(self: Any, timestep: torch.Tensor, *_: Any) -> torch.Tensor:
    """[batch] of timesteps as row numbers; the last row, which is NaN, where there is none.

    To the last bit but one: a device may round a division differently in another shape.
    """
    distance = (self.table - timestep[:, None]).abs().nan_to_num(nan=torch.inf)
    nearest, rows = distance.min(dim=1)
    return torch.where(nearest <= 2 * torch.finfo(timestep.dtype).eps, rows, len(self.table) - 1)


def _look_up(self: Any, rows: torch.Tensor) -> torch.Tensor:
    return self.table[rows]
