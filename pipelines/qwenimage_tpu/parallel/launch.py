"""Start a command of ours in several processes, and end all of them when one fails."""

import importlib
import json
import logging
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from qwenimage_tpu.environment import ERROR_FILE, has_tpu

# A process that hangs in a collective does not hear SIGTERM.
SECONDS_TO_END = 5


class ProcessFailedError(RuntimeError):
    """One of the launched processes failed; the message is its own."""


def launch(processes: int, arguments: list[str]) -> None:
    """Run ``qwenimage-tpu arguments...`` in this many processes of this machine, one per TPU or on its CPU.

    On a TPU host torch-tpu's variables are set first. Raises ProcessFailedError with the message of the
    process that failed first; all others are ended then. Ctrl-C and SIGTERM end them, too.
    """
    if has_tpu():
        importlib.import_module("torch_tpu")
        tpu: Any = importlib.import_module("torch").tpu
        tpu.distributed.set_tpu_launch_env(nproc_per_node=processes)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    _silence_elastic()
    with tempfile.TemporaryDirectory(prefix="qwenimage-tpu-launch-") as logs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id="qwenimage-tpu",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
            shutdown_timeout=SECONDS_TO_END,
        )
        try:
            elastic_launch(config, sys.executable)("-m", "qwenimage_tpu.cli", *arguments)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            raise ProcessFailedError(f"process {rank} of {processes}: {_message(failure)}") from error
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from error
            sys.exit(128 + error.sigval)


def _silence_elastic() -> None:
    """What it would log of a failure is said better by the failed process."""
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _message(failure: ProcessFailure) -> str:
    if failure.exitcode == -signal.SIGKILL:
        return "killed by the system, which may have been out of memory"
    silent = failure.exitcode > 0 and not Path(failure.error_file).is_file()
    return f"ended with exit code {failure.exitcode}" if silent else str(failure.message)


def report_failure(message: str) -> None:
    """Leave the message for the launcher that started this process."""
    record = {"message": message, "timestamp": int(time.time())}
    Path(os.environ[ERROR_FILE]).write_text(json.dumps(record), encoding="utf-8")
