"""A `tpu` device of torch-tpu on a machine without a TPU: one chip, which a CPU plays.

torch-tpu drives a TPU through a PJRT plugin, a shared library with a C interface. Here it gets a CPU's
plugin behind a small shim (`pjrt_shim.c`), so that its own eager mode, compiler and caches run unchanged.
The shim counts compilations and transfers, and can write out every program that torch-tpu compiles
(`capture.py`). Importing this package imports no torch: `start()` must come before.
"""

from .device import start, started
from .monitor import Counts, captured_programs, read_counts
from .shim import EmulatorError, check_installation

__all__ = [
    "Counts",
    "EmulatorError",
    "captured_programs",
    "check_installation",
    "read_counts",
    "start",
    "started",
]
