"""A process with the emulated `tpu` device, in which tests run their functions."""

import multiprocessing
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any


class EmulatedProcess:
    """Runs functions one after the other in one process of its own, started at the first.

    A function is found by its module and name, so it must stand at a module's top level; what it takes and
    returns is pickled. log: gets what the process writes to stdout and stderr.
    """

    def __init__(self, log: Path, environ: Mapping[str, str] | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self.log = log
        self._executor = ProcessPoolExecutor(1, context, _start, (log, dict(environ or {})))

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        return self._executor.submit(_call, function, arguments)

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return self.submit(function, *arguments).result()
        except Exception as error:
            error.add_note(self.log.read_text(errors="replace")[-2000:])
            raise

    def kill(self) -> None:
        """As the machine's owner would who has no patience."""
        for process in self._executor._processes.values():
            process.kill()

    def close(self) -> None:
        self._executor.shutdown()


def _start(log: Path, environ: dict[str, str]) -> None:
    os.environ |= environ
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    from qwenimage_tpu import emulator

    emulator.start()


def _call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    import torch

    # What an earlier test compiled must not spare this one its compilation.
    torch.compiler.reset()
    return function(*arguments)
