"""A scheduler whose values lie on the device as scalars, so that the number of steps is no shape."""

from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler


class DeviceFlowMatchScheduler(FlowMatchEulerDiscreteScheduler):
    """diffusers' FlowMatchEulerDiscreteScheduler, for devices on which every shape is compiled anew.

    The schedule is computed on the CPU, and each of its values becomes a scalar of its own on the device,
    before the denoising starts. `timesteps` and `sigmas` are then lists of scalars: a loop over them runs the
    same programs whatever the number of steps, and reads nothing back. The values are those of the parent.
    """

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: str | torch.device | None = None,
        sigmas: list[float] | None = None,
        mu: float | None = None,
        timesteps: list[float] | None = None,
    ) -> None:
        """As the parent's."""
        super().set_timesteps(num_inference_steps, "cpu", sigmas, mu, timesteps)
        self.timesteps: Any = [value.to(device) for value in self.timesteps]
        self.sigmas: Any = [value.to(device) for value in self.sigmas]


def to_device_scheduler(scheduler: Any) -> Any:
    """The same schedule as a DeviceFlowMatchScheduler.

    Raises NotImplementedError for a scheduler of another class.
    """
    if not isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
        raise NotImplementedError(
            "on a TPU the scheduler must be a FlowMatchEulerDiscreteScheduler, but is a"
            f" {type(scheduler).__name__}; set pipe.scheduler ="
            " FlowMatchEulerDiscreteScheduler.from_config(pipe.scheduler.config)"
        )
    return DeviceFlowMatchScheduler.from_config(scheduler.config)
