"""The program that torch-tpu would compile for a TPU."""

import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from qwenimage_tpu.lab.program import Program

from .device import plain_attention
from .monitor import captured_programs
from .shim import EmulatorError


def capture(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Program:
    """The program of one call, compiled as a whole with torch.compile's backend "tpu" and static shapes.

    function: a module or function. args, kwargs: its inputs, tensors on the `tpu` device; their values do
    not matter. Pallas kernels and torch-tpu's own attention kernel are in the program as on a TPU. It is
    neither compiled for the CPU nor run.
    Raises EmulatorError if nothing was compiled, and what the call itself raises.
    """
    torch.compiler.reset()
    compiled = torch.compile(
        function, backend="tpu", fullgraph=True, dynamic=False, options={"serializable": False}
    )
    with tempfile.TemporaryDirectory() as folder, _tpu_attention(), torch.no_grad():
        failure = None
        with captured_programs(Path(folder)):
            try:
                compiled(*args, **kwargs)
            except Exception as error:
                failure = error
        programs = list(Path(folder).glob("*.mlir"))
        if not programs:
            raise failure or EmulatorError("the call compiled no program, so there is none to capture")
        (program,) = programs
        return Program(program.read_bytes(), program.with_suffix(".options").read_bytes())


@contextmanager
def _tpu_attention() -> Generator[None]:
    """Inside, attention takes torch-tpu's own kernel, as it does on a TPU."""
    plain_attention(False)
    try:
        yield
    finally:
        plain_attention(True)
