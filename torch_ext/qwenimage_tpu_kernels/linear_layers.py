"""Forwards of the linear layers and MLPs in a patched block, which take more than the stock ones.

A patch marks each module that it gave one with `kernel_implementation`. All are called as modules, so that
hooks, tensor parallelism and a LoRA around them do their part.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from .ops import linear, linear_gated_residual


def _is_patched(module: nn.Module) -> bool:
    return hasattr(module, "kernel_implementation")


def linear_forward(
    self: Any,
    input: torch.Tensor,  # noqa: A002, a caller may name it, as nn.Linear's
    *,
    activation: str = "identity",
    residual: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    index: torch.Tensor | None = None,
) -> torch.Tensor:
    """For `torch.nn.Linear` with a bias: as `linear`, or with a residual as `linear_gated_residual`.

    Where tensor parallelism split the weight by columns, each device multiplies its own; a weight that is
    split by rows needs a sum over devices, which torch does.
    """
    weight, bias, implementation = self.weight, self.bias, self.kernel_implementation
    if isinstance(weight, DTensor):
        if weight.placements != (Shard(0),):
            return F.linear(input, weight, bias)
        local = [cast(DTensor, part).to_local() for part in (input, weight, bias)]
        out = linear(*local, activation=activation, implementation=implementation)
        return DTensor.from_local(out, weight.device_mesh, [Shard(-1)], run_check=False)
    if residual is None or gate is None:
        return linear(input, weight, bias, activation=activation, implementation=implementation)
    return linear_gated_residual(input, weight, bias, residual, gate, index, implementation=implementation)


def gelu_forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """For `diffusers.models.activations.GELU` with the tanh approximation."""
    if _is_patched(self.proj):
        return self.proj(hidden_states, activation="gelu_tanh")
    return F.gelu(self.proj(hidden_states), approximate="tanh")


def mlp_forward(
    self: Any,
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    gate: torch.Tensor,
    index: torch.Tensor | None = None,
) -> torch.Tensor:
    """For `diffusers.models.attention.FeedForward`: ``residual + gate * mlp(hidden_states)``."""
    *first, last = self.net
    for module in first:
        hidden_states = module(hidden_states)
    if _is_patched(last) and not isinstance(last.weight, DTensor):
        return last(hidden_states, residual=residual, gate=gate, index=index)
    return _gated_residual(residual, last(hidden_states), gate, index)


def mlp_residual(
    mlp: nn.Module,
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    gate: torch.Tensor,
    index: torch.Tensor | None,
) -> torch.Tensor:
    """``residual + gate * mlp(hidden_states)``, of a patched MLP and of a stock one."""
    if _is_patched(mlp):
        return mlp(hidden_states, residual, gate, index)
    return _gated_residual(residual, mlp(hidden_states), gate, index)


def _gated_residual(
    x: torch.Tensor, branch: torch.Tensor, gate: torch.Tensor, index: torch.Tensor | None
) -> torch.Tensor:
    """``x + gate * branch`` in f32: plain code, which a compiler fuses into what stands around it."""
    gate = gate[:, None]
    if index is not None:
        first, second = gate.chunk(2)
        gate = torch.where(index[..., None] == 0, first, second)
    return (x.float() + gate.float() * branch.float()).to(x.dtype)
