"""Environment variables that must be set before torch or jax are imported."""

import ctypes
import os
import re
import signal
import tempfile
from pathlib import Path

# Where torch's launcher lets each of its processes say why it failed.
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
COMPILE_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "JAX_COMPILATION_CACHE_DIR")
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


def choose_device(device: str) -> str:
    """The device itself, or for "auto" the TPU if the machine has one, else the CPU."""
    if device != "auto":
        return device
    return "tpu" if has_tpu() else "cpu"


def process_count() -> int:
    """How many processes a launcher started for this run; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_leader() -> bool:
    """Whether this process is the first of its run, which speaks for all."""
    return os.environ.get("RANK", "0") == "0"


def is_launched() -> bool:
    """Whether a launcher of ours or of torch's started this process, and waits for its message."""
    return ERROR_FILE in os.environ


_interrupts: list[int] = []


def interrupt(signum: int, _: object) -> None:
    """The handler of SIGINT: as Python's, but it can be asked for later."""
    _interrupts.append(signum)
    raise KeyboardInterrupt


def was_interrupted() -> bool:
    """Whether there was a Ctrl-C, also if Python lost it: in a callback it is only printed."""
    return bool(_interrupts)


def end_with_parent() -> None:
    """Let Linux kill this process when the one that started it ends, however it ends."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def use_compile_cache(folder: Path) -> None:
    """Let torch and jax keep what they compiled in `folder`, for later processes.

    Call it before the first import of either. The caches are their own: they follow the versions, pass over
    what is corrupt, and may be deleted at any time. Raises OSError unless the folder can be written to.
    """
    folder = folder.expanduser().resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise OSError(
            f"compiled programs cannot be kept in {folder} ({error.strerror}); choose another folder"
        ) from error
    for name in COMPILE_CACHES:
        os.environ[name] = str(folder)


def use_virtual_devices(count: int) -> None:
    """Let jax see this many CPU devices. Call it before the first import of jax."""
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={count}".strip()


def configure_without_tpu() -> None:
    """Set the variables for a machine without a TPU, whatever this one has and the user set."""
    os.environ.update(WITHOUT_TPU)


def take_generation(generation: str) -> None:
    """Let the kernels that torch-tpu traces from now on make their choices for this TPU generation.

    For a machine without a TPU. What a process has traced it does not trace again.
    """
    os.environ["TPU_ACCELERATOR_TYPE"] = f"{generation}-4"


def configure() -> None:
    """Set the variables for a machine without a TPU; on a TPU host, or where the user set one, do nothing.

    Call it before the first import of torch or jax.
    """
    if has_tpu():
        return
    for name, value in WITHOUT_TPU.items():
        os.environ.setdefault(name, value)
