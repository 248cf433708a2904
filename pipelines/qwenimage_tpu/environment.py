"""Environment variables that must be set before torch or jax are imported."""

import os
import re
from pathlib import Path

# Without a TPU: jax must not wait for one, libtpu must not ask the metadata server of a cloud machine nor
# complain that it does not know its host, several processes may use its compiler at once, and
# `import torch` must not import torch_tpu (seconds, and noise on stderr).
WITHOUT_TPU = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v6e-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
}


def tpu_device_files(dev: Path = Path("/dev")) -> list[Path]:
    """The device files that a TPU host has: /dev/accel<number>, or /dev/vfio/<number> on newer ones."""

    candidates = (*dev.glob("accel*"), *dev.glob("vfio/*"))
    # Without a number they belong to others: /dev/accel/ holds NPUs, /dev/vfio/vfio is always there.
    return sorted(path for path in candidates if re.fullmatch(r"(accel)?\d+", path.name))


def has_tpu() -> bool:
    """Whether this machine has TPU hardware, judged by its device files alone (nothing is imported)."""
    return bool(tpu_device_files())


def configure() -> None:
    """Set the variables for a machine without a TPU; on a TPU host, or where the user set one, do nothing.

    Call it before the first import of torch or jax.
    """
    if has_tpu():
        return
    for name, value in WITHOUT_TPU.items():
        os.environ.setdefault(name, value)
