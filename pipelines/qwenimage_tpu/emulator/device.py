"""Start torch-tpu on the emulated device."""

import contextlib
import faulthandler
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Generator
from pathlib import Path

from .shim import PLUGIN_PACKAGE, EmulatorError, check_plugin, compiled_shim, cpu_plugin

# What pjrt_shim.c was written for. Others may do as well; when they do not, the message names both.
WRITTEN_FOR = {"torch-tpu": "0.2.0", PLUGIN_PACKAGE: "0.11.2"}

_started = False


def started() -> bool:
    """Whether the `tpu` device of this process is the emulated one."""
    return _started


def start() -> None:
    """Give this process a `tpu` device that its CPU plays. A second call does nothing.

    Call it before anything imports torch_tpu. Attention must not take torch-tpu's own kernel, which is TPU
    code, so that SDPA is set to plain operations for the whole process.
    Raises EmulatorError, with what to install or where to look.
    """
    global _started
    if _started:
        return
    if "torch_tpu" in sys.modules:
        raise EmulatorError(
            "torch_tpu is loaded already, without the emulated device; start the device first, with"
            " TORCH_DEVICE_BACKEND_AUTOLOAD=0 in the environment"
        )
    os.environ |= {
        "TPU_LIBRARY_PATH": str(compiled_shim()),
        "QWENIMAGE_TPU_CPU_PLUGIN": str(cpu_plugin()),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    try:
        check_plugin()
        with _quiet_stderr():
            importlib.import_module("torch_tpu._loader")._init_device("tpu")
            plain_attention(True)
            _check()
    except Exception as error:
        raise EmulatorError(_explain(error)) from error
    _started = True


def plain_attention(plain: bool) -> None:
    """Choose whether torch's attention is made of plain operations, or takes the device's own kernels."""
    import torch

    torch.backends.cuda.enable_flash_sdp(not plain)
    torch.backends.cuda.enable_mem_efficient_sdp(not plain)
    torch.backends.cuda.enable_cudnn_sdp(not plain)


def _check() -> None:
    """Raise unless a small computation is right and all that it does is counted."""
    import torch

    from .monitor import Counts, read_counts

    host = torch.arange(6, dtype=torch.float32)
    before = read_counts()
    device = host.to("tpu")
    moved = read_counts() - before
    result = (device + device).cpu()
    counts = read_counts() - before
    if not torch.equal(result, host + host):
        raise RuntimeError(f"{host} + itself gave {result}")
    expected = Counts(
        # The program may have come from a cache of torch-tpu's.
        compilations=1 - counts.cache_loads,
        cache_loads=counts.cache_loads,
        executions=1,
        host_to_device=1,
        host_to_device_bytes=24,
        device_to_host=1,
        device_to_host_bytes=24,
    )
    if moved != Counts(host_to_device=1, host_to_device_bytes=24) or counts != expected:
        raise RuntimeError(f"one addition must count as {expected}, but counted as {counts}")


def _explain(error: Exception) -> str:
    installed = {name: importlib.metadata.version(name) for name in WRITTEN_FOR}
    versions = ", ".join(
        f"{name} {installed[name]} (written for {version})" for name, version in WRITTEN_FOR.items()
    )
    return (
        f"the emulated TPU does not start: {error}\nIt runs {versions}. If one of them is newer, look at"
        " emulator/pjrt_shim.c: its positions in the PJRT function table, the order of the functions in the"
        " TPU topology extension, and which functions torch-tpu now transfers and compiles with."
    )


@contextlib.contextmanager
def _quiet_stderr() -> Generator[None]:
    """Hold back what torch-tpu's C++ side prints at start, which says nothing about an emulated device.

    A crash still prints where it was.
    """
    sys.stderr.flush()
    handles_faults = faulthandler.is_enabled()
    with os.fdopen(os.dup(2), "w") as saved, Path(os.devnull).open("w") as nothing:
        faulthandler.enable(saved)
        os.dup2(nothing.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(saved.fileno(), 2)
            faulthandler.disable()
            if handles_faults:
                faulthandler.enable()
