"""What torch-tpu asked of the emulated device: counts, and the programs it compiled."""

import ctypes
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Counts:
    """PJRT calls since the device was started, or, as a difference, between two moments.

    compilations: programs compiled; cache_loads: compiled programs that came from a cache on disk;
    executions: of programs. The transfers are those between host and device, the bytes what they moved.
    """

    compilations: int = 0
    cache_loads: int = 0
    executions: int = 0
    host_to_device: int = 0
    host_to_device_bytes: int = 0
    device_to_host: int = 0
    device_to_host_bytes: int = 0

    def __sub__(self, earlier: "Counts") -> "Counts":
        return Counts(*(now - then for now, then in zip(astuple(self), astuple(earlier), strict=True)))


class _CountsStructure(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in Counts.__dataclass_fields__]


def shim_library() -> ctypes.CDLL:
    """The shim that torch-tpu has loaded: the same file is the same library."""
    return ctypes.CDLL(os.environ["TPU_LIBRARY_PATH"])


def _wait() -> None:
    """Until all work that was asked for is done."""
    import torch

    torch.accelerator.synchronize()


def read_counts() -> Counts:
    """The counts so far, once all work that was asked for is done. Waiting itself is not counted."""
    _wait()
    structure = _CountsStructure()
    shim_library().emulator_counts(ctypes.byref(structure))
    return Counts(*(getattr(structure, name) for name in Counts.__dataclass_fields__))


@contextmanager
def captured_programs(folder: Path) -> Generator[None]:
    """Write every program that is to be compiled inside to `folder`, and fail to compile it.

    <number>.mlir is a StableHLO portable artifact, <number>.options a serialized xla.CompileOptionsProto.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _wait()
    capture = shim_library().emulator_capture
    capture(str(folder.resolve()).encode())
    try:
        yield
        _wait()
    finally:
        capture(b"")
