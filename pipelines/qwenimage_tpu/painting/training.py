"""A training loop that can be stopped at any moment and goes on as if it had not been."""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

WARMUP_STEPS = 100
GRADIENT_NORM = 1.0
# The average of the weights needs a start that forgets the random ones.
AVERAGE_WARMUP = 10

type Loss = Callable[[int], torch.Tensor]
"""The loss of a step. All its randomness comes from the step's number, so that a resumed run repeats it."""

type OnStep = Callable[[int, float], None]


@dataclass(frozen=True)
class Recipe:
    """How to optimise: AdamW with warm-up and a cosine to zero, and an average of the weights.

    With several cycles the cosine starts again, each time from the full learning rate.
    """

    steps: int
    batch: int
    learning_rate: float
    weight_decay: float = 0.01
    average_decay: float = 0.999
    cycles: int = 1

    def rate_at(self, step: int) -> float:
        warmup = min(1.0, (step + 1) / WARMUP_STEPS)
        part = self.cycles * step / self.steps % 1
        return self.learning_rate * warmup * 0.5 * (1 + math.cos(math.pi * part))


@dataclass
class Trainer:
    """Trains `module`; its state is in `checkpoint`, written at least every `save_seconds` and at the end.

    `average` holds the running average of the weights: what is used after training.
    """

    module: nn.Module
    recipe: Recipe
    checkpoint: Path
    save_seconds: float = 120.0
    step: int = field(init=False, default=0)
    losses: list[float] = field(init=False, default_factory=list[float])
    average: dict[str, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self._optimizer = torch.optim.AdamW(
            self.module.parameters(), weight_decay=self.recipe.weight_decay, betas=(0.9, 0.98), fused=True
        )
        self.average = {name: value.clone() for name, value in self.module.state_dict().items()}
        if self.checkpoint.is_file():
            self._resume()

    @property
    def done(self) -> bool:
        return self.step >= self.recipe.steps

    def run(self, loss: Loss, on_step: OnStep, until: int | None = None) -> None:
        """Train to the last step, or to the step `until`; `on_step` gets the steps done and the loss."""
        saved = time.monotonic()
        while self.step < min(self.recipe.steps, until or self.recipe.steps):
            self._train_step(loss)
            on_step(self.step, self.losses[-1])
            if time.monotonic() - saved > self.save_seconds:
                self.save()
                saved = time.monotonic()
        self.save()

    def _train_step(self, loss: Loss) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self.recipe.rate_at(self.step)
        value = loss(self.step)
        value.backward()
        nn.utils.clip_grad_norm_(self.module.parameters(), GRADIENT_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.step += 1
        self.losses.append(value.item())
        self._update_average()

    @torch.no_grad()
    def _update_average(self) -> None:
        decay = min(self.recipe.average_decay, self.step / (self.step + AVERAGE_WARMUP))
        for name, value in self.module.state_dict().items():
            self.average[name].lerp_(value, 1 - decay)

    def use_average(self) -> None:
        """Put the averaged weights into the module: the end of training."""
        self.module.load_state_dict(self.average)

    def save(self) -> None:
        """Write the checkpoint; it appears complete or not at all."""
        state = {
            "step": self.step,
            "module": self.module.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "average": self.average,
            "losses": self.losses,
        }
        unfinished = self.checkpoint.with_name(f".{self.checkpoint.name}.{os.getpid()}.tmp")
        torch.save(state, unfinished)
        unfinished.replace(self.checkpoint)

    def _resume(self) -> None:
        state: dict[str, Any] = torch.load(self.checkpoint, weights_only=True)
        self.module.load_state_dict(state["module"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.step, self.average, self.losses = state["step"], state["average"], state["losses"]


def step_generator(seed: int, step: int) -> torch.Generator:
    """The randomness of one training step: the same whether the run was interrupted before it or not."""
    return torch.Generator().manual_seed(seed * 1_000_003 + step)
