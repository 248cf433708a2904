"""torch-tpu's own attention kernel as a program, captured on the emulated device in a process of its own."""

import functools
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

from qwenimage_tpu import emulator, environment
from qwenimage_tpu_pallas.layouts import HEAD_DIM
from qwenimage_tpu_pallas.shapes import JointShape

from .program import Program


@functools.cache
def capture_torch_attention(shape: JointShape, heads: int) -> Program:
    """F.scaled_dot_product_attention between the six arrays that our kernel takes and the two that it gives.

    Raises EmulatorError if the emulated device cannot be started, and what the capture raises.
    """
    # What is missing is to be said here, and not in a process that then is gone.
    emulator.check_installation()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, _start) as process:
        return process.submit(_capture, shape, heads).result()


def _start() -> None:
    environment.configure_without_tpu()
    emulator.start()


def _capture(shape: JointShape, heads: int) -> Program:
    import torch
    import torch.nn.functional as F

    from qwenimage_tpu.emulator.capture import capture

    def attend(*streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, value = (
            torch.cat([image, text], dim=1).unflatten(2, (heads, HEAD_DIM)).transpose(1, 2)
            for image, text in zip(streams[:3], streams[3:], strict=True)
        )
        out = F.scaled_dot_product_attention(query, key, value, scale=1.0).transpose(1, 2).flatten(2)
        return out[:, : shape.image_tokens], out[:, shape.image_tokens :]

    def zeros(tokens: int) -> torch.Tensor:
        return torch.zeros(1, tokens, heads * HEAD_DIM, dtype=torch.bfloat16, device="tpu")

    return capture(attend, *(zeros(n) for n in (shape.image_tokens, shape.text_tokens) for _ in range(3)))
