"""Timings for `kernels benchmark`, which runs each `benchmark_*` on this machine and checks it by `verify_*`.

As a script it is `qwenimage-tpu bench attention`, which compares with other kernels and needs no TPU.
"""

from typing import Any

import torch
from kernels.benchmark import Benchmark

HEADS, HEAD_DIM = 6, 128  # of one of four chips
TPU_TOKENS, CPU_TOKENS = (4096, 512), (256, 64)  # image and text
LOGIT_BOUND = 40.0  # twice what the longest of these random vectors give


class JointAttention(Benchmark):
    """1024 x 1024 pixels and 512 text tokens on a TPU, a fraction of that in interpret mode on a CPU."""

    seed = 0

    def setup(self) -> None:
        # self.device is what torch was built for ("cuda"), whether or not the machine has it.
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device = "tpu" if accelerator is not None and accelerator.type == "tpu" else "cpu"
        self.streams = [
            torch.randn(1, tokens, HEADS * HEAD_DIM).to(torch.bfloat16).to(device)
            for tokens in (TPU_TOKENS if device == "tpu" else CPU_TOKENS)
            for _ in range(3)
        ]

    def _attend(self, **options: Any) -> torch.Tensor:
        image, _ = self.kernel.joint_attention(*self.streams, **options)
        # The runner waits for other devices only.
        if image.device.type == "tpu":
            torch.accelerator.synchronize()
        return image

    def benchmark_bounded(self) -> None:
        self.out = self._attend(softmax="bounded", logit_bound=LOGIT_BOUND)

    def benchmark_online(self) -> None:
        self.out = self._attend(softmax="online")

    def verify_bounded(self) -> torch.Tensor:
        return self._attend(implementation="reference")

    def verify_online(self) -> torch.Tensor:
        return self._attend(implementation="reference")


if __name__ == "__main__":
    import sys

    from qwenimage_tpu.cli import app

    app(["bench", "attention", *sys.argv[1:]])
