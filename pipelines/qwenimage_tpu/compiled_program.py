"""Compile a captured program with the TPU's own compiler, and read its memory and its schedule."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .emulator.capture import Program
from .environment import WITHOUT_TPU
from .schedule import ProgramSchedule, read_schedule

DUMP_FLAGS = (
    "--xla_jf_dump_to={folder} --xla_jf_dump_hlo_text=true --xla_jf_dump_llo_text=true"
    " --xla_jf_emit_annotations=true"
)
CODE, OPTIONS, MEMORY, DUMPS = "program.mlir", "program.options", "memory.json", "dumps"


@dataclass(frozen=True)
class Memory:
    """Bytes on one chip: of the inputs (weights too), the outputs, what lives in between, and the code."""

    arguments: int
    outputs: int
    temporaries: int
    code: int


@dataclass(frozen=True)
class CompiledProgram:
    """What the compiler says of a program on one chip of a topology."""

    topology: str
    memory: Memory
    schedule: ProgramSchedule


def compile_program(program: Program, topology: str) -> CompiledProgram:
    """Compile for one chip of a topology such as "v6e:2x2", in a process of its own.

    The compiler's dumps, hundreds of megabytes for a large program, go to a temporary folder.
    Raises RuntimeError with the compiler's message, ScheduleError if its dumps cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="qwenimage-tpu-") as name:
        folder = Path(name)
        (folder / CODE).write_bytes(program.code)
        (folder / OPTIONS).write_bytes(program.options)
        flags = DUMP_FLAGS.format(folder=folder / DUMPS)
        # Without the emulated device, whose library would be taken for the compiler's.
        inherited = {name: value for name, value in os.environ.items() if name != "TPU_LIBRARY_PATH"}
        environment = inherited | WITHOUT_TPU
        environment["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {flags}".strip()
        result = subprocess.run(
            [sys.executable, "-m", __name__, name, topology],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode:
            raise RuntimeError(
                f"the program does not compile for {topology}:\n{result.stderr.strip()[-2000:]}"
            )
        memory = Memory(**json.loads((folder / MEMORY).read_text()))
        return CompiledProgram(topology, memory, read_schedule(folder / DUMPS))


def _compile(folder: Path, topology: str) -> None:
    """In the process of its own: compile, and write what the compiler says of the memory."""
    from jax._src.lib import xla_client
    from jax._src.lib.mlir import ir
    from jax._src.lib.mlir.dialects import hlo
    from jax.experimental import topologies

    description = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    device: Any = description.devices[0]
    options = xla_client.CompileOptions.ParseFromString((folder / OPTIONS).read_bytes())
    with ir.Context() as context:
        hlo.register_dialect(context)
        module = hlo.deserialize_portable_artifact(context, (folder / CODE).read_bytes())
        executable = device.client.compile(module, xla_client.DeviceList((device,)), options)
    stats = executable.get_compiled_memory_stats()
    memory = {
        "arguments": stats.argument_size_in_bytes,
        "outputs": stats.output_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
        "code": stats.generated_code_size_in_bytes,
    }
    (folder / MEMORY).write_text(json.dumps(memory))


if __name__ == "__main__":
    _compile(Path(sys.argv[1]), sys.argv[2])
