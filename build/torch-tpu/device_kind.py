"""Which TPU torch-tpu runs on, for the kernels' choice of block sizes."""

import os
import sys

from .qwenimage_tpu_pallas.devices import TARGETS

# A TPU VM names its slice "v6e-8", "v5litepod-4", "v5p-8" or "tpu7x-8".
_PREFIXES = {"v5litepod": "v5e", "v5e": "v5e", "v5p": "v5p", "v6e": "v6e", "tpu7x": "tpu7x"}


def device_kind() -> str:
    """The device's kind as PJRT names it, or of the slice this machine says it is in; empty if unknown.

    JAX is not asked: it would take the TPU away from torch-tpu.
    """
    torch_tpu = sys.modules.get("torch.tpu")
    # Not before it is in use: the question would start the runtime.
    if torch_tpu is not None and torch_tpu.is_initialized():
        kind = str(torch_tpu._get_local_device_attributes().get("device_kind", ""))
        if kind in TARGETS:
            return kind
    generation = _PREFIXES.get(os.environ.get("TPU_ACCELERATOR_TYPE", "").partition("-")[0], "")
    return next((kind for kind, target in TARGETS.items() if target.generation == generation), "")
